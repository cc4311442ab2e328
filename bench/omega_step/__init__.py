"""Decoding with the Omega rule: `omega_step_` beside a copy of as many bytes.

| file       | duty                                                          |
|------------|---------------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required shares                       |
| `ours.py`  | memories in the middle of their chunks, and calls of our op   |
| `peers.py` | a copy                                                        |
| `gate.py`  | y, and the memories as a call leaves them, against float64    |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, OmegaStepCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class OmegaStep(Family[OmegaStepCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = OmegaStepCase.op
    cases = CASES
    peers = NAMES
    caption = (
        "`omega_step_`: one token for each of N sequences, whose chunks are filled to all degrees, "
        "as on a server that has run for a while; a fold is in every call of 64 sequences or more. "
        "*copy* copies half as many bytes as the step reads and writes, and so moves as many: the "
        "speed beside it is the share of the copy's rate that a step reaches."
    )

    def inputs(self, case: OmegaStepCase, generator: torch.Generator) -> Inputs:
        """Tokens, gates and a pool."""
        return make_inputs(case, generator)

    def ours(self, case: OmegaStepCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: OmegaStepCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """A copy has one layout."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: OmegaStepCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """y and all that the call wrote."""
        return everything(case, inputs, work, got)

    def part(
        self,
        contender: Contender,
        case: OmegaStepCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some rows, and what was written in their slots; that all are finite."""
        return sample(case, inputs, work, got)


OMEGA_STEP = OmegaStep()
