"""Triton backend, of Newton–Schulz at the end of each chunk.

Kernels are in `triton_fwd` and `triton_bwd`, launchers in `triton_forward` and `triton_backward`,
config spaces in `triton_spaces`; rows of tokens, and where a chunk lies, are as
`omega.triton_chunks` has them.
"""

from __future__ import annotations

import torch

from ...autotune.space import Device, Space
from .. import triton_runtime as runtime
from .op import AtlasShape, AtlasTensors
from .triton_backward import Backward
from .triton_forward import Forward
from .triton_spaces import SPACE_BWD, SPACE_FWD, bucket, refusal

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "spaces", "supports", "yields"]


def supports(shape: AtlasShape, arch: str) -> str | None:
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


def yields(shape: AtlasShape, arch: str) -> str | None:
    """None, or why "auto" goes past these kernels though they can run the call."""
    return None if arch == "cpu" else "its kernels have not been checked on a GPU yet"


def spaces(shape: AtlasShape) -> dict[str, Space]:
    """The config spaces of a call's passes."""
    return {"fwd": SPACE_FWD, "bwd": SPACE_BWD}


def fwd(shape: AtlasShape, given: AtlasTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (B, T, H, Dv) in v's dtype, M and S (N, H, D, Dv) after the last token."""
    return Forward(shape, given).results()


def bwd(
    shape: AtlasShape, d_y: torch.Tensor, d_state: torch.Tensor, d_momentum: torch.Tensor,
    given: AtlasTensors,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients of the first tensors of `omega_memory`, and of output_step."""
    return Backward(shape, given, d_y, d_state, d_momentum).gradients()
