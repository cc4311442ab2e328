"""Polynomial features: expanding, reading and updating, beside a copy and products in torch.

| file       | duty                                                            |
|------------|-----------------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required ratios                         |
| `ours.py`  | inputs, and calls of our ops on each backend                    |
| `peers.py` | a copy, and features in memory with `torch.bmm`                 |
| `gate.py`  | what the results are compared with                              |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, PolynomialCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class Polynomial(Family[PolynomialCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = PolynomialCase.op
    cases = CASES
    peers = NAMES
    caption = (
        "Symmetric features of degree 2: `polynomial_features` beside a *copy* that writes as many "
        "bytes; `polynomial_read` and `polynomial_update`, which never write them, beside the same "
        "*expanded*, features to memory and `torch.bmm`."
    )

    def inputs(self, case: PolynomialCase, generator: torch.Generator) -> Inputs:
        """Vectors, a memory or what is written into one, and the upstream gradient."""
        return make_inputs(case, generator)

    def ours(self, case: PolynomialCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: PolynomialCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """A copy, or torch on the features; operands as a model has them."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: PolynomialCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Everything, by the reference."""
        return everything(case, inputs, got)

    def part(
        self,
        contender: Contender,
        case: PolynomialCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some heads; that all numbers are finite."""
        return sample(case, inputs, got)


POLYNOMIAL = Polynomial()
