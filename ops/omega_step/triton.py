"""Triton backend: the launcher. Full chunks are folded (`triton_fold`), then each row has its token
(`triton_kernels`); configs are in `triton_spaces`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import last_contiguous
from ..omega.cache import OmegaCache
from ..omega.op import OmegaShape
from .op import StepTensors
from .triton_spaces import (
    FOLD_KERNELS,
    KERNELS,
    OP,
    SPACE_FWD,
    bucket,
    fold_config,
    fold_programs,
    refusal,
)

__all__ = ["SPACE_BWD", "SPACE_FWD", "fwd", "supports"]

SPACE_BWD = None
DEFAULT_POWERS = 3  # of features without coefficients
SCANNED = 128  # rows that a warp looks at, at a time, for full chunks
# Tensors whose strides the kernels are told: by row or slot, head, and row of a matrix.
AXES = {
    "q": "nh",
    "k": "nh",
    "v": "nh",
    "state": "nhr",
    "velocity": "nhr",
    "keys": "nrh",
    "values": "nrh",
    "residuals": "nrh",
    "write": "nhr",
    "push": "nhr",
    "rate": "nh",
    "carry": "nh",
    "drop": "nh",
    "tail": "n",
    "filled": "n",
}
_OF_FOLD = tuple(name for name in AXES if name not in ("q", "k", "v", "values"))
FOLDED = (
    "slots", "powers", *_OF_FOLD, "heads", "window", "chunk", "stride_powers",
    *(f"stride_{name}_{axis}" for name in _OF_FOLD for axis in AXES[name]),
)  # fmt: skip


def supports(shape: OmegaShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if arch != "cpu" and Device.of(shape.device).capability < 80:
        return f"{arch} is older than sm_80"
    reason = refusal(shape)
    if reason is None and not SPACE_FWD.fitting(bucket(shape), Device.of(shape.device)):
        reason = f"no config fits into the shared memory of {arch}"
    return reason


def fwd(shape: OmegaShape, given: StepTensors, cache: OmegaCache) -> torch.Tensor:
    """y (N, H, Dv) in v's dtype; the cache is written."""
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    y = empty(given.v.shape, dtype=shape.dtype, device=shape.device)
    # The kernels take any strides but of rows: those are copied, and of the cache copied back.
    q, k, v = map(last_contiguous, given[:3])
    rows = {name: last_contiguous(x) for name, x in _rows(cache).items()}
    copied = cache._replace(**rows)
    strided = {
        "q": q,
        "k": k,
        "v": v,
        "state": copied.state,
        "velocity": copied.momentum,
        "keys": copied.keys,
        "values": copied.values,
        "residuals": copied.residuals,
        "write": cache.write,
        "push": cache.momentum_write,
        "rate": cache.decay,
        "carry": cache.carry,
        "drop": cache.momentum_decay,
        "tail": cache.tail_length,
        "filled": cache.filled,
    }
    powers = given.coefficients
    contiguous = {
        "slots": given.slots,
        "step": given.step,
        "decay": given.decay,
        "window_gates": given.window_gates,
        "momentum": given.momentum,
        "powers": powers,
    }
    arguments: dict[str, Any] = {
        **strided,
        **{name: None if x is None else x.contiguous() for name, x in contiguous.items()},
        "y": y,
        "heads": shape.heads,
        "width": shape.wide,
        "window": shape.window,
        "chunk": shape.chunk_size,
        "stride_powers": powers.shape[1] if powers is not None and powers.ndim == 2 else 0,
    }
    for name, axes in AXES.items():
        x = strided[name]
        for dim, axis in enumerate(axes):
            arguments[f"stride_{name}_{axis}"] = 0 if x is None else x.stride(dim)
    common = _constants(shape, given)
    _fold(shape, arguments, common)
    constants = common | {
        "DOT": shape.dot,
        "DECAY": shape.decay,
        "GATES": given.window_gates is not None,
        "BEFORE": shape.read_before,
        "D": runtime.padded(shape.wide),
        "V": runtime.padded(shape.values),
        "ROWS": config["ROWS"],
        "STAGES": config.num_stages,
        "SPAN": 32 * config.num_warps,
    }
    programs = shape.batch * shape.heads
    runtime.launch(
        OP, (KERNELS, "omega_step"), programs, shape.device, config, arguments, constants
    )
    for name, x in _rows(cache).items():
        if rows[name] is not x:
            x.copy_(rows[name])
    return y


def _fold(shape: OmegaShape, arguments: dict[str, Any], common: dict[str, Any]) -> None:
    """Bring M and S of rows whose chunk is full to its end; which those are the kernel finds."""
    config = fold_config(bucket(shape))
    half = shape.dtype != torch.float32
    constants = common | {
        "D": config["FOLD_D"],
        "V": config["FOLD_V"],
        "ROWS": config["FOLD_ROWS"],
        "SCAN": SCANNED * config.num_warps,
        "STAGES": config.num_stages,
        "HALF": half,
        "PRECISION": "ieee" if shape.device.type == "cpu" else "tf32" if half else "tf32x3",
    }
    taken = {name: arguments[name] for name in FOLDED} | {"rows": shape.batch}
    programs = fold_programs(config, shape, Device.of(shape.device))
    runtime.launch(
        OP, (FOLD_KERNELS, "omega_fold"), programs, shape.device, config, taken, constants
    )


def _rows(cache: OmegaCache) -> dict[str, torch.Tensor]:
    """The fields whose last dimension is a row of a matrix."""
    names = ("state", "momentum", "keys", "values", "residuals")
    return {name: x for name in names if (x := getattr(cache, name)) is not None}


def _constants(shape: OmegaShape, given: StepTensors) -> dict[str, Any]:
    """Of both kernels."""
    powers = given.coefficients
    return {
        "MOMENTUM": shape.momentum,
        "POWERS": powers.shape[-1]
        if powers is not None
        else DEFAULT_POWERS * (shape.feature_map != "identity"),
        "GIVEN": powers is not None,
        "ALIGNED": shape.aligned,
        "WIDTH": shape.wide,
        "VALUES": shape.values,
    }
