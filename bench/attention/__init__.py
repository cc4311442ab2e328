"""Attention: `polar_attention` and `softmax_attention` beside other libraries' attention.

| file       | duty                                           |
|------------|------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes, peers and required ratios |
| `ours.py`  | inputs, and calls of our ops                   |
| `peers.py` | calls of other libraries on the same data      |
| `gate.py`  | what the results are compared with             |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, AttentionCase
from .gate import OUTPUTS, tail, whole
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class Attention(Family[AttentionCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = AttentionCase.op
    cases = CASES
    peers = NAMES
    outputs = OUTPUTS

    def inputs(self, case: AttentionCase, generator: torch.Generator) -> Inputs:
        """q, k, v and parameters near trained values."""
        return make_inputs(case, generator)

    def ours(self, case: AttentionCase, backends: tuple[str, ...]) -> list[Contender]:
        """Polar and softmax calls on each backend, then the relatives."""
        return contenders(case, backends)

    def others(self, case: AttentionCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """Attention of other libraries; "natural" operands are (B, H, T, D), contiguous."""
        return peer_contenders(case, names, layout)

    def whole(
        self,
        contender: Contender,
        case: AttentionCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """All results and gradients."""
        return whole(contender.function, case, inputs, work.grad_outputs, got)

    def part(
        self,
        contender: Contender,
        case: AttentionCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """The last rows, whose reference needs few scores."""
        return tail(contender.function, case, inputs, got)


ATTENTION = Attention()
