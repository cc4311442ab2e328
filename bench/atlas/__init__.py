"""The Atlas memory: `atlas_memory` beside the Omega rule that it is without Newton–Schulz.

| file       | duty                                                            |
|------------|-----------------------------------------------------------------|
| `cases.py` | sizes, FLOPs and bytes                                          |
| `ours.py`  | inputs, and calls of our op on each backend                     |
| `peers.py` | the Omega rule, the eager backend, torch under `torch.compile`  |
| `gate.py`  | what the results are compared with                              |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, AtlasCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class Atlas(Family[AtlasCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = AtlasCase.op
    cases = CASES
    peers = NAMES
    caption = (
        "`atlas_memory` with decay and window gates, five steps of Newton–Schulz in the place of "
        "the plain write. *omega-momentum* is `omega_memory` on the same tensors: the same memory "
        "without Newton–Schulz, and fewer FLOPs. *eager* is the same call on its eager backend, "
        "*compiled* its chunks in plain torch under `torch.compile`."
    )

    def inputs(self, case: AtlasCase, generator: torch.Generator) -> Inputs:
        """Queries, keys, values and gates."""
        return make_inputs(case, generator)

    def ours(self, case: AtlasCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: AtlasCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """All take (B, T, H, D), as a model has it."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: AtlasCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """All results and gradients, against the literal loops."""
        return everything(contender.function, case, inputs, got)

    def part(
        self,
        contender: Contender,
        case: AtlasCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some heads of the last row."""
        return sample(contender.function, case, inputs, got)


ATLAS = Atlas()
