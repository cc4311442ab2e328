"""Triton backend: the launcher. The kernel is in `triton_kernels`, configs in `triton_spaces`."""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from ..gated_delta.op import DeltaShape
from .op import StepTensors
from .triton_spaces import KERNELS, OP, SPACE_FWD, bucket, refusal

__all__ = ["SPACE_BWD", "SPACE_FWD", "fwd", "supports"]

SPACE_BWD = None


def supports(shape: DeltaShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if arch != "cpu" and Device.of(shape.device).capability < 80:
        return f"{arch} is older than sm_80"
    return refusal(shape)


def fwd(shape: DeltaShape, given: StepTensors) -> torch.Tensor:
    """o (B, H, Dv) in v's dtype; the pool is written."""
    assert given.slots is not None
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    o = empty((shape.batch, shape.heads, shape.values), dtype=shape.dtype, device=shape.device)
    # The kernel takes any strides but of rows: those are copied, and of the pool copied back.
    rows = {name: last_contiguous(getattr(given, name)) for name in ("q", "k", "v")}
    pool = last_contiguous(given.state)
    strided = rows | {"log_decay": given.log_decay, "beta": given.beta, "pool": pool}
    arguments: dict[str, Any] = {
        **strided,
        "slots": given.slots.contiguous(),
        "o": o,
        "heads": shape.heads,
        "heads_q": shape.heads_q,
        "heads_k": shape.heads_k,
        "heads_v": shape.heads_v,
        "scale": float(shape.scale),
        "eps": float(shape.l2norm_eps),
    }
    for name, x in strided.items():
        for dim, axis in enumerate("nhr" if name == "pool" else "nh"):
            arguments[f"stride_{name}_{axis}"] = x.stride(dim)
    constants = {
        "NORM": shape.qk_l2norm,
        "ALIGNED": shape.values % 4 == 0 and pool.numel() > 0 and aligned(pool),
        "WIDTH": shape.width,
        "VALUES": shape.values,
        "D": runtime.padded(shape.width),
        "V": config["V"],
    }
    programs = shape.batch * shape.heads * -(-shape.values // config["V"])
    runtime.launch(
        OP, (KERNELS, "delta_step"), programs, shape.device, config, arguments, constants
    )
    if pool is not given.state:
        given.state.copy_(pool)
    return o
