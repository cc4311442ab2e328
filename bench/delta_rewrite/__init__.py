"""The delta rewrite: many slots in place beside a copy, one layer beside compiled torch.

| file       | duty                                                          |
|------------|---------------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required ratios                       |
| `ours.py`  | inputs, and our calls, in place and not                       |
| `peers.py` | a copy, a large product, and plain torch compiled             |
| `gate.py`  | y, and the memories as a call leaves them, against float64    |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, RewriteCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class DeltaRewrite(Family[RewriteCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = RewriteCase.op
    cases = CASES
    peers = NAMES
    outputs = ("y", "state", "normalizer")
    caption = (
        "The delta rewrite of M memory tokens, order 3, in parallel: in place on 16 slots of 384 "
        "features and 2,048 columns, four calls in turn on pools of their own; and a GPT-2 layer. "
        "*copy* copies half as many bytes as a call reads and writes, and so moves as many; beside "
        "*matmul* TFLOP/s are compared. A read is bound by products, and 1.6 times the time that "
        "counted FLOPs and bytes would take is 0.62 of the rate of a large product."
    )

    def inputs(self, case: RewriteCase, generator: torch.Generator) -> Inputs:
        """Tokens, queries and memories."""
        return make_inputs(case, generator)

    def ours(self, case: RewriteCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: RewriteCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """Peers have one layout."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: RewriteCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Every row, by the reference."""
        return everything(case, inputs, work, got)

    def part(
        self,
        contender: Contender,
        case: RewriteCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """First and last row; that all numbers are finite."""
        return sample(case, inputs, work, got)


DELTA_REWRITE = DeltaRewrite()
