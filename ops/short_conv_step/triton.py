"""Triton backend: the launcher. The kernel is in `triton_kernels`, configs in `triton_spaces`."""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import last_contiguous
from ..short_conv.op import ConvShape
from ..short_conv.triton import unsupported, vector
from .op import StepTensors
from .triton_spaces import KERNELS, OP, SPACE_FWD, bucket, refusal

__all__ = ["SPACE_BWD", "SPACE_FWD", "fwd", "supports"]

SPACE_BWD = None


def supports(shape: ConvShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    return unsupported(shape, arch) or refusal(shape)


def fwd(shape: ConvShape, given: StepTensors) -> torch.Tensor:
    """y (B, D) in x's dtype; the pool is written."""
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    y = empty(given.x.shape, dtype=shape.dtype, device=shape.device)
    # The kernel takes any strides but of channels: those are copied, and of the pool copied back.
    rows = {"x": given.x, "gate_in": given.gate_in, "gate_out": given.gate_out}
    rows = {name: None if x is None else last_contiguous(x) for name, x in rows.items()}
    pool = last_contiguous(given.state_pool)
    lie = [x for x in (*rows.values(), pool) if x is not None and x.numel()]
    numbers = vector(shape, lie)
    arguments: dict[str, Any] = {
        **rows,
        "weight": given.weight,
        "bias": given.bias,
        "pool": pool,
        "slots": given.slots.contiguous(),
        "y": y,
        "rows": shape.batch,
        "groups": shape.channels // numbers,
        "stride_weight_d": given.weight.stride(0),
        "stride_weight_k": given.weight.stride(1),
        "stride_bias": 0 if given.bias is None else given.bias.stride(0),
        "stride_pool_n": pool.stride(0),
        "stride_pool_r": pool.stride(1),
    }
    for name, x in rows.items():
        arguments[f"stride_{name}"] = 0 if x is None else x.stride(0)
    constants = {
        "TAPS": shape.taps,
        "SILU": shape.silu,
        "RESIDUAL": shape.residual,
        "BIAS": shape.bias,
        "GATE_IN": shape.gate_in,
        "GATE_OUT": shape.gate_out,
        "VEC": numbers,
        "C": config["C"],
        "ROWS": config["ROWS"],
    }
    programs = -(-shape.batch // config["ROWS"]) * -(-shape.channels // config["C"])
    runtime.launch(OP, (KERNELS, "conv_step"), programs, shape.device, config, arguments, constants)
    if pool is not given.state_pool:
        given.state_pool.copy_(pool)
    return y
