"""The gated delta rule beside plain torch and flash-linear-attention.

| file       | duty                                                     |
|------------|----------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required ratios                  |
| `ours.py`  | inputs, and calls of our op on each backend              |
| `peers.py` | chunks in torch, compiled, and flash-linear-attention    |
| `gate.py`  | what the results are compared with                       |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, DeltaCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class GatedDelta(Family[DeltaCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = DeltaCase.op
    cases = CASES
    peers = NAMES
    caption = (
        "`gated_delta_rule` with decays from 0.9 on. *fla* is chunk_gated_delta_rule of "
        "flash-linear-attention on the same tensors, *compiled* all chunks in plain torch as one "
        "graph under `torch.compile`. With l2norm both normalise queries and keys in the call."
    )

    def inputs(self, case: DeltaCase, generator: torch.Generator) -> Inputs:
        """Tokens, gates and the upstream gradient."""
        return make_inputs(case, generator)

    def ours(self, case: DeltaCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: DeltaCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """All peers take tokens in front of heads, as a model has them."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: DeltaCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Everything, by the reference."""
        return everything(case, inputs, got)

    def part(
        self,
        contender: Contender,
        case: DeltaCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some heads; that all numbers are finite."""
        return sample(case, inputs, got)


GATED_DELTA = GatedDelta()
