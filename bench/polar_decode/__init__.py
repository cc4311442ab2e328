"""Paged decoding: `polar_decode` beside a copy, dense attention of torch and expanded caches.

| file       | duty                                                    |
|------------|---------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required ratios                 |
| `ours.py`  | full caches in pages of any order, and calls of our op  |
| `peers.py` | a copy, and attention over the same keys without pages  |
| `gate.py`  | what the results are compared with                      |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, DecodeCase
from .gate import OUTPUTS, everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class PolarDecode(Family[DecodeCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = DecodeCase.op
    cases = CASES
    peers = NAMES
    outputs = OUTPUTS
    caption = (
        "`polar_decode`: one query for each of B sequences, all as long as the case says, pages in "
        "any order. *copy* copies half as many bytes as the step reads and writes, and so moves as "
        "many: the speed beside it is the share of the copy's rate that a step reaches. *sdpa* is "
        "softmax attention over the same keys without pages; *expanded* our step on caches with a "
        "key head for each query head."
    )

    def inputs(self, case: DecodeCase, generator: torch.Generator) -> Inputs:
        """Queries, caches, tables, and parameters near trained values."""
        return make_inputs(case, generator)

    def ours(self, case: DecodeCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend, then on expanded caches; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: DecodeCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """A copy and SDPA; "natural" operands are (B, H, T, D), contiguous."""
        return peer_contenders(case, names, layout)

    def whole(
        self,
        contender: Contender,
        case: DecodeCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Direction and count of all sequences."""
        return everything(contender.function, inputs, got)

    def part(
        self,
        contender: Contender,
        case: DecodeCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some sequences; that all numbers are finite."""
        return sample(contender.function, inputs, got)


POLAR_DECODE = PolarDecode()
