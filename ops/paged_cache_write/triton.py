"""Triton backend: the launcher. The kernel is in `triton_kernels`, configs in `triton_spaces`."""

from __future__ import annotations

from typing import Any

from ...autotune.space import Device, choose
from .. import triton_runtime as runtime
from .op import WriteShape, WriteTensors
from .triton_spaces import KERNELS, OP, SPACE_FWD, WIDEST, bucket

__all__ = ["SPACE_BWD", "SPACE_FWD", "fwd", "supports"]

SPACE_BWD = None
AXES = {"k": "nhd", "v": "nhd", "kc": "pthd", "vc": "pthd"}


def supports(shape: WriteShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch != "cpu" and Device.of(shape.device).capability < 80:
        return f"{arch} is older than sm_80"
    if shape.head_dim > WIDEST:
        return f"takes heads up to {WIDEST} wide, this is {shape.head_dim}"
    if not SPACE_FWD.fitting(bucket(shape), Device.of(shape.device)):
        return f"no config is for heads of {shape.head_dim}"
    return None


def fwd(shape: WriteShape, given: WriteTensors) -> None:
    """The caches are written."""
    if shape.tokens == 0 or shape.pages == 0 or shape.heads == 0 or shape.head_dim == 0:
        return
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    rows = shape.tokens * shape.heads
    arguments: dict[str, Any] = {
        "k": given.k,
        "v": given.v,
        "k_cache": given.k_cache,
        "v_cache": given.v_cache,
        "slots": given.slot_mapping.contiguous(),
        "rows": rows,
        "heads": shape.heads,
    }
    for (name, axes), x in zip(AXES.items(), given[:4], strict=True):
        for axis, stride in zip(axes, x.stride(), strict=True):
            arguments[f"stride_{name}_{axis}"] = stride
    constants = {
        "PAGE": shape.page_size,
        "ALIGNED": shape.aligned,
        "WIDTH": shape.head_dim,
        "BLOCK_D": runtime.padded(shape.head_dim),
        "ROWS": config["ROWS"],
    }
    programs = -(-rows // config["ROWS"])
    kernel = (KERNELS, "cache_write")
    runtime.launch(OP, kernel, programs, shape.device, config, arguments, constants)
