"""Newton–Schulz: `newton_schulz` beside the batched products that torch offers for it.

| file       | duty                                                            |
|------------|-----------------------------------------------------------------|
| `cases.py` | sizes, FLOPs, bytes and required ratios                         |
| `ours.py`  | inputs, and calls of our op on each backend                     |
| `peers.py` | the iteration by torch's products, and those products alone     |
| `gate.py`  | errors against float64, measured by those of the eager products |
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from ...autotune.verify import FROBENIUS_FACTOR
from ..family import PEERS, Contender, Family, Results, Work
from .cases import CASES, NewtonSchulzCase
from .gate import FACTOR, everything, sample
from .ours import Inputs, contenders, make_inputs
from .peers import NAMES
from .peers import contenders as peer_contenders


class NewtonSchulz(Family[NewtonSchulzCase, Inputs]):
    """The family's answers; each is a function of one of its files."""

    op = NewtonSchulzCase.op
    cases = CASES
    peers = NAMES
    backends = ("auto", "triton", "cuda")
    ratios = MappingProxyType(
        {"out": "error", "orthogonality": "orthogonality", "d_x": "gradient error"}
    )
    caption = (
        "`newton_schulz` of stacks, named ns-B×m×n (one matrix: ns-m×n). *eager* is "
        "the same iteration by `torch.baddbmm` in the dtype of x, *compiled* that under "
        "`torch.compile`, *matmul-floor* its products alone. Errors are against float64, "
        "relative to eager's."
    )

    def inputs(self, case: NewtonSchulzCase, generator: torch.Generator) -> Inputs:
        """Normal matrices, and an upstream gradient."""
        return make_inputs(case, generator)

    def ours(self, case: NewtonSchulzCase, backends: tuple[str, ...]) -> list[Contender]:
        """The op on each backend; one that refuses the call says why."""
        return contenders(case, backends)

    def others(
        self, case: NewtonSchulzCase, names: tuple[str, ...], layout: str
    ) -> list[Contender]:
        """The iteration in torch; contiguous matrices are what a model has, too."""
        return peer_contenders(case, names)

    def whole(
        self,
        contender: Contender,
        case: NewtonSchulzCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """All matrices."""
        return everything(case, inputs, got)

    def part(
        self,
        contender: Contender,
        case: NewtonSchulzCase,
        inputs: Inputs,
        work: Work,
        got: dict[str, Tensor],
    ) -> Results:
        """Some matrices of the stack; that all are finite."""
        return sample(case, inputs, got)

    def factor(self, contender: Contender) -> float:
        """In 16 bits less than the house's: fp16 iterates leave room below bf16 ones."""
        half = contender.case.dtype in ("bf16", "fp16")
        return PEERS if not contender.ours else FACTOR if half else FROBENIUS_FACTOR


NEWTON_SCHULZ = NewtonSchulz()
