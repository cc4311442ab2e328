"""Decoding with the gated delta rule: `gated_delta_step_` beside a copy of as many bytes.

| file       | duty                                                          |
|------------|---------------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required shares                       |
| `ours.py`  | memories in a pool, and calls of our op                       |
| `peers.py` | a copy, and torch that gathers, steps and scatters            |
| `gate.py`  | o, and the memories as a call leaves them, against float64    |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, DeltaStepCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class GatedDeltaStep(Family[DeltaStepCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = DeltaStepCase.op
    cases = CASES
    peers = NAMES
    caption = (
        "`gated_delta_step_`: one token for each of N sequences whose memories lie in slots of a "
        "pool. *copy* copies half as many bytes as the step reads and writes, and so moves as "
        "many: the speed beside it is the share of the copy's rate that a step reaches. "
        "*gathered* takes the memories out of the pool, steps in plain torch and puts them back; "
        "*compiled* is the same under `torch.compile`."
    )

    def inputs(self, case: DeltaStepCase, generator: torch.Generator) -> Inputs:
        """Tokens, gates and a pool."""
        return make_inputs(case, generator)

    def ours(self, case: DeltaStepCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: DeltaStepCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """All peers take a pool as it lies."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: DeltaStepCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """o and all memories."""
        return everything(case, inputs, work, got)

    def part(
        self,
        contender: Contender,
        case: DeltaStepCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some rows, and what was written in their slots; that all are finite."""
        return sample(case, inputs, work, got)


GATED_DELTA_STEP = GatedDeltaStep()
