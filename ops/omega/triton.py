"""Triton backend.

| kernels                      | of                                                       |
|------------------------------|----------------------------------------------------------|
| `triton_fwd`                 | forward: gates, the walk from chunk to chunk, reads      |
| `triton_bwd`                 | backward: what reads pull at, the walk back, gradients   |
| `hopper_fwd`                 | the same for Hopper: walk and reads in one               |
| `hopper_groups`              | how groups of chunks change a memory, for few heads      |
| `triton_groups`              | memories between those groups                            |
| `hopper_split`               | the walk and reads of several short chunks at once       |
| `triton_solve`               | what those chunks owe each other                         |
| `hopper_bwd`                 | both walks of its backward                               |
| `hopper_gradients`           | its gradients                                            |
| `triton_tables`              | weights of reads, for the kernels for Hopper             |
| `triton_symmetric`           | forward on symmetric features, which are never in memory |
| `triton_symmetric_back`      | walks of its backward, and what reads ask for            |
| `triton_symmetric_gradients` | its gradients                                            |
| `triton_gates_back`          | gradients of gates, from those that these leave          |

Launchers are in `triton_forward`, `triton_backward`, `hopper_forward`, `hopper_backward`,
`symmetric` and `symmetric_back`, config spaces in `triton_spaces` and `symmetric_spaces`; what
kernels share is in `triton_chunks`. `groups` cuts the sequences of few heads into groups of chunks
that walk side by side.
"""

from __future__ import annotations

import torch

from ...autotune.space import Device, Space, choose
from .. import triton_runtime as runtime
from . import symmetric_spaces
from .hopper_backward import HopperBackward
from .hopper_forward import HopperForward
from .op import OmegaShape, OmegaTensors
from .symmetric import SymmetricForward
from .symmetric_back import SymmetricBackward
from .symmetric_spaces import SPACE_SYMMETRIC, SPACE_SYMMETRIC_BWD
from .triton_backward import Backward
from .triton_forward import Call
from .triton_spaces import SPACE_BWD, SPACE_FWD, bucket, refusal

__all__ = [
    "SPACE_BWD", "SPACE_FWD", "SPACE_SYMMETRIC", "SPACE_SYMMETRIC_BWD", "bwd", "fwd", "spaces",
    "supports", "yields",
]  # fmt: skip


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def supports(shape: OmegaShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if arch != "cpu" and Device.of(shape.device).capability < 80:
        return f"{arch} is older than sm_80"
    reason = symmetric_spaces.refusal(shape) if _symmetric(shape) else refusal(shape)
    space = spaces(shape)["bwd" if shape.backward else "fwd"] if reason is None else None
    if space is not None and not space.fitting(space.bucket(shape), Device.of(shape.device)):
        reason = f"no config fits into the shared memory of {arch}"
    return reason


def yields(shape: OmegaShape, arch: str) -> str | None:
    """None, or why "auto" goes past these kernels though they can run the call."""
    if _symmetric(shape) and shape.backward and arch != "cpu":
        return "its backward on symmetric features has not passed all checks on a GPU yet"
    return None


def spaces(shape: OmegaShape) -> dict[str, Space]:
    """The config spaces of a call's passes."""
    if _symmetric(shape):
        return {"fwd": SPACE_SYMMETRIC, "bwd": SPACE_SYMMETRIC_BWD}
    return {"fwd": SPACE_FWD, "bwd": SPACE_BWD}


def _symmetric(shape: OmegaShape) -> bool:
    return shape.feature_map == "symmetric"


def fwd(shape: OmegaShape, given: OmegaTensors) -> Results:
    """y (B, T, H, Dv) in v's dtype, M and S (N, H, D, Dv) after the last token, S with momentum."""
    if _symmetric(shape):
        return SymmetricForward(shape, given).results()
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    if config.get("HOPPER"):
        return HopperForward(shape, given, config=config).results()
    call = Call(shape, given, config=config)
    call.gates()
    begins, state, velocity = call.chain()
    return call.reads(begins), state, velocity


def bwd(
    shape: OmegaShape,
    d_y: torch.Tensor,
    d_state: torch.Tensor,
    d_momentum: torch.Tensor | None,
    given: OmegaTensors,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the first `DIFFERENTIABLE` tensors of a call."""
    if _symmetric(shape):
        return SymmetricBackward(shape, given, d_y, d_state).gradients()
    config = choose(SPACE_BWD, bucket(shape), Device.of(shape.device))
    launches = HopperBackward if config.get("HOPPER") else Backward
    return launches(shape, given, d_y, d_state, d_momentum).gradients()
