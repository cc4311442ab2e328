"""Triton backend: the launcher. The kernel is in `triton_kernels`, configs in `triton_spaces`."""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import last_contiguous
from ..omega.cache import OmegaCache
from ..omega.op import OmegaShape
from .op import StepTensors
from .triton_spaces import FOLD, KERNELS, OP, SPACE_FWD, bucket, refusal

__all__ = ["SPACE_BWD", "SPACE_FWD", "fwd", "supports"]

SPACE_BWD = None
DEFAULT_POWERS = 3  # of features without coefficients


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
    # The kernel takes any strides but of rows: those are copied, and of the cache copied back.
    q, k, v = map(last_contiguous, given[:3])
    rows = {name: last_contiguous(x) for name, x in _rows(cache).items()}
    copied = cache._replace(**rows)
    strided = {
        "q": (q, "nh"),
        "k": (k, "nh"),
        "v": (v, "nh"),
        "state": (copied.state, "nhr"),
        "velocity": (copied.momentum, "nhr"),
        "keys": (copied.keys, "nrh"),
        "values": (copied.values, "nrh"),
        "residuals": (copied.residuals, "nrh"),
        "write": (cache.write, "nhr"),
        "push": (cache.momentum_write, "nhr"),
        "rate": (cache.decay, "nh"),
        "carry": (cache.carry, "nh"),
        "drop": (cache.momentum_decay, "nh"),
        "tail": (cache.tail_length, "n"),
        "filled": (cache.filled, "n"),
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
        **{name: x for name, (x, _) in strided.items()},
        **{name: None if x is None else x.contiguous() for name, x in contiguous.items()},
        "y": y,
        "heads": shape.heads,
        "width": shape.wide,
        "window": shape.window,
        "chunk": shape.chunk_size,
        "stride_powers": powers.shape[1] if powers is not None and powers.ndim == 2 else 0,
    }
    for name, (x, axes) in strided.items():
        for dim, axis in enumerate(axes):
            arguments[f"stride_{name}_{axis}"] = 0 if x is None else x.stride(dim)
    constants = _constants(shape, config, given)
    programs = shape.batch * shape.heads
    runtime.launch(
        OP, (KERNELS, "omega_step"), programs, shape.device, config, arguments, constants
    )
    for name, x in _rows(cache).items():
        if rows[name] is not x:
            x.copy_(rows[name])
    return y


def _rows(cache: OmegaCache) -> dict[str, torch.Tensor]:
    """The fields whose last dimension is a row of a matrix."""
    names = ("state", "momentum", "keys", "values", "residuals")
    return {name: x for name in names if (x := getattr(cache, name)) is not None}


def _constants(shape: OmegaShape, config: Config, given: StepTensors) -> dict[str, Any]:
    powers, values, half = (
        given.coefficients,
        runtime.padded(shape.values),
        shape.dtype != torch.float32,
    )
    mapped = shape.feature_map != "identity"
    columns = config["FOLD_V"]
    if shape.momentum and (mapped or not half):  # which take registers, too
        columns = max(columns // 2, FOLD)
    return {
        "DOT": shape.dot,
        "DECAY": shape.decay,
        "GATES": given.window_gates is not None,
        "MOMENTUM": shape.momentum,
        "BEFORE": shape.read_before,
        "POWERS": powers.shape[-1] if powers is not None else DEFAULT_POWERS * mapped,
        "GIVEN": powers is not None,
        "ALIGNED": shape.aligned,
        "WIDTH": shape.wide,
        "VALUES": shape.values,
        "D": runtime.padded(shape.wide),
        "V": values,
        "ROWS": config["ROWS"],
        "STAGES": config.num_stages,
        "SPAN": 32 * config.num_warps,
        "FOLD": FOLD,
        "FOLD_V": min(columns, values),
        "FOLD_STAGES": config["FOLD_STAGES"] if half else 1,
        "HALF": half,
        "PRECISION": "ieee" if shape.device.type == "cpu" else "tf32" if half else "tf32x3",
    }
