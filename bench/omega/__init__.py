"""The Omega rule: `omega_memory` beside its own torch forms and the gated delta rule of fla.

| file       | duty                                                                 |
|------------|----------------------------------------------------------------------|
| `cases.py` | sizes, FLOPs and bytes                                               |
| `ours.py`  | inputs, and calls of our op on each backend                          |
| `peers.py` | chunk after chunk in torch, all chunks in one graph, fla             |
| `gate.py`  | what the results are compared with                                   |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Contender, Family, Results, Work
from .cases import CASES, OmegaCase
from .gate import everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class Omega(Family[OmegaCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = OmegaCase.op
    cases = CASES
    peers = NAMES
    caption = (
        "`omega_memory` with decay and window gates. *eager* is the same call on its eager "
        "backend, *compiled* all chunks in plain torch as one graph under `torch.compile`. *fla* "
        "is the gated delta rule, another function: no window, no chunk in its definition. All "
        "TFLOP/s count the work of the Omega rule."
    )

    def inputs(self, case: OmegaCase, generator: torch.Generator) -> Inputs:
        """Queries, keys, values and gates of a bounded memory."""
        return make_inputs(case, generator)

    def ours(self, case: OmegaCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(self, case: OmegaCase, names: tuple[str, ...], layout: str) -> list[Contender]:
        """Torch and fla; all take (B, T, H, D), as a model has it."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: OmegaCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """All results and gradients, against the literal loops."""
        return everything(case, inputs, got)

    def part(
        self,
        contender: Contender,
        case: OmegaCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some heads of the last row; of the gated delta rule the first tokens."""
        return sample(contender.function, case, inputs, got)


OMEGA = Omega()
