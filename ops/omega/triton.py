"""Triton backend.

| kernels             | of                                                                  |
|---------------------|---------------------------------------------------------------------|
| `triton_fwd`        | forward: gates, the walk from chunk to chunk, reads                 |
| `triton_bwd`        | backward: what reads pull at, the walk back, gradients              |
| `hopper_fwd`        | the same for Hopper: walk and reads in one                          |
| `hopper_groups`     | how groups of chunks change a memory, for few heads                 |
| `triton_groups`     | memories between those groups                                       |
| `hopper_split`      | the walk and reads of several short chunks at once                  |
| `triton_solve`      | what those chunks owe each other                                    |
| `hopper_bwd`        | both walks of its backward                                          |
| `hopper_gradients`  | its gradients                                                       |
| `triton_tables`     | weights of reads, for the kernels for Hopper                        |
| `triton_gates_back` | gradients of gates, from those that these leave                     |

Launchers are in `triton_forward`, `triton_backward`, `hopper_forward` and `hopper_backward`, config
spaces in `triton_spaces`; what kernels share is in `triton_chunks`. `groups` cuts the sequences of
few heads into groups of chunks that walk side by side.
"""

from __future__ import annotations

import torch

from ...autotune.space import Device, choose
from .. import triton_runtime as runtime
from .hopper_backward import HopperBackward
from .hopper_forward import HopperForward
from .op import OmegaShape, OmegaTensors
from .triton_backward import Backward
from .triton_forward import Call
from .triton_spaces import SPACE_BWD, SPACE_FWD, bucket, refusal

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "supports"]


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def supports(shape: OmegaShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if arch != "cpu" and Device.of(shape.device).capability < 80:
        return f"{arch} is older than sm_80"
    reason = refusal(shape)
    space = SPACE_BWD if shape.backward else SPACE_FWD
    if reason is None and not space.fitting(bucket(shape), Device.of(shape.device)):
        reason = f"no config fits into the shared memory of {arch}"
    return reason


def fwd(shape: OmegaShape, given: OmegaTensors) -> Results:
    """y (B, T, H, Dv) in v's dtype, M and S (N, H, D, Dv) after the last token, S with momentum."""
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
    config = choose(SPACE_BWD, bucket(shape), Device.of(shape.device))
    launches = HopperBackward if config.get("HOPPER") else Backward
    return launches(shape, given, d_y, d_state, d_momentum).gradients()
