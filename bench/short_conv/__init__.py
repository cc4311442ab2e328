"""The short convolution beside a copy of as many bytes, and beside plain torch.

| file       | duty                                                          |
|------------|---------------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required shares                       |
| `ours.py`  | inputs, and calls of our op on each backend                   |
| `peers.py` | a copy, and torch eager and compiled                          |
| `gate.py`  | what the results are compared with                            |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, ConvCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class ShortConv(Family[ConvCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = ConvCase.op
    cases = CASES
    peers = NAMES
    caption = (
        "`short_conv` with both gates, as LFM2 has it, or as a Canon layer. *copy* copies half as "
        "many bytes as the forward reads and writes, and so moves as many: the speed beside it is "
        "the share of the copy's rate that a call reaches. *eager* is the op's eager backend, "
        "*compiled* the same function in torch under `torch.compile`."
    )

    def inputs(self, case: ConvCase, generator: torch.Generator) -> Inputs:
        """x, weights, gates, and the upstream gradient."""
        return make_inputs(case, generator)

    def ours(self, case: ConvCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: ConvCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """All peers take tokens as a model has them."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: ConvCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Everything, by the reference."""
        return everything(case, inputs, got)

    def part(
        self,
        contender: Contender,
        case: ConvCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some channels; that all numbers are finite."""
        return sample(case, inputs, got)


SHORT_CONV = ShortConv()
