"""Triton backend: the launchers of stacks, and the way to `triton_large`.

Kernels of stacks are in `triton_kernels`, their configs in `triton_spaces`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...autotune.space import Config, Device, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned
from . import triton_large as large
from .coefficients import on_device
from .op import NewtonSchulzShape
from .triton_spaces import (
    FACTOR_KERNELS,
    KERNELS,
    OP,
    SPACE_BWD,
    SPACE_FACTOR_BWD,
    SPACE_FACTOR_FWD,
    SPACE_FWD,
    Bucket,
    bucket,
    factor_precision,
    precision,
    refusal,
)

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "spaces", "supports"]

FACTOR_ROWS = max(config["ROWS"] for config in SPACE_FACTOR_FWD.configs)


def supports(shape: NewtonSchulzShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and torch.bfloat16 in (shape.dtype, shape.compute_dtype):
        return "Triton's interpreter computes bfloat16 wrongly"
    device = Device.of(shape.device)
    if arch != "cpu" and device.capability < 80:
        return f"{arch} is older than sm_80"
    if shape.factor:
        space = spaces(shape)["bwd" if shape.backward else "fwd"]
        if not space.fitting(space.bucket(shape), device):
            return f"holds Gram matrices whole, up to {FACTOR_ROWS} rows"
        return None
    if large.serves(shape):
        return large.refusal(shape, device)
    space = SPACE_BWD if shape.backward else SPACE_FWD
    return _refusal(space.pass_, bucket(shape), device)


@functools.lru_cache(maxsize=4096)
def _refusal(pass_: str, key: Any, device: Device) -> str | None:
    return refusal(SPACE_BWD if pass_ == "bwd" else SPACE_FWD, key, device)


def spaces(shape: NewtonSchulzShape) -> dict[str, Space]:
    """The config spaces of a call's passes."""
    if shape.factor:
        return {"fwd": SPACE_FACTOR_FWD, "bwd": SPACE_FACTOR_BWD}
    if large.serves(shape):
        return large.spaces(shape)
    return {"fwd": SPACE_FWD, "bwd": SPACE_BWD}


def fwd(shape: NewtonSchulzShape, x: torch.Tensor) -> torch.Tensor:
    """The orthogonalised matrices, or the factors of Gram matrices; contiguous."""
    if shape.factor:
        return _factor(shape, [x])
    if large.serves(shape):
        return large.fwd(shape, x)
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    out = empty(x.shape, dtype=shape.dtype, device=shape.device)
    arguments, constants = _common(shape, config, {"x": x, "out": out})
    constants["EACH"] = int(config["EACH"] > 0)
    kernel = (KERNELS, "newton_schulz_fwd")
    programs = _programs(shape, config)
    runtime.launch(OP, kernel, programs, shape.device, config, arguments, constants)
    return out


def bwd(shape: NewtonSchulzShape, upstream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x (or of the Gram matrices) for that of `fwd`'s result, contiguous."""
    if shape.factor:
        return _factor(shape, [upstream, x])
    config = choose(SPACE_BWD, bucket(shape), Device.of(shape.device))
    out = empty(x.shape, dtype=shape.dtype, device=shape.device)
    views = {"upstream": upstream, "x": x, "out": out}
    arguments, constants = _common(shape, config, views)
    programs = _programs(shape, config)
    size = (programs, shape.steps + 1, constants["R"], constants["C"])
    arguments["scratch"] = empty(size, dtype=shape.compute_dtype, device=shape.device)
    kernel = (KERNELS, "newton_schulz_bwd")
    runtime.launch(OP, kernel, programs, shape.device, config, arguments, constants)
    return out


def _factor(shape: NewtonSchulzShape, stacks: list[torch.Tensor]) -> torch.Tensor:
    """Factors of a stack of Gram matrices; of an upstream gradient and a stack, its gradient."""
    backward = len(stacks) == 2
    space = spaces(shape)["bwd" if backward else "fwd"]
    config = choose(space, space.bucket(shape), Device.of(shape.device))
    out = empty(
        stacks[-1].shape,
        dtype=shape.dtype if backward else shape.statistic_dtype,
        device=shape.device,
    )
    programs = _programs(shape, config)
    rows = config["ROWS"]
    names = ("upstream", "gram") if backward else ("gram",)
    arguments: dict[str, Any] = {
        **{name: stack.contiguous() for name, stack in zip(names, stacks, strict=True)},
        "out": out,
        "table": on_device(shape.coefficients, shape.device),
        "batch": shape.batch,
        "n": shape.rows,
        "steps": shape.steps,
        "eps": shape.eps,
    }
    if backward:
        size = (programs, shape.steps, 2, rows, rows)
        arguments["scratch"] = empty(size, dtype=torch.float32, device=shape.device)
    constants = {"PRECISION": factor_precision(shape), "R": rows}
    kernel = (FACTOR_KERNELS, "gram_factor_bwd" if backward else "gram_factor_fwd")
    runtime.launch(
        "gram_newton_schulz_factor", kernel, programs, shape.device, config, arguments, constants
    )
    return out


def _programs(shape: NewtonSchulzShape, config: Config) -> int:
    if shape.rows * shape.cols == 0:
        return 0
    each = config["EACH"]
    if each == 0:
        return shape.batch
    return min(shape.batch, each * Device.of(shape.device).multiprocessors)


def _common(
    shape: NewtonSchulzShape, config: Config, views: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants that both kernels take; `views` are stacks (B, m, n) by name."""
    _, rows, cols = Bucket(*bucket(shape))
    short, long = sorted((shape.rows, shape.cols))
    arguments: dict[str, Any] = {
        "table": on_device(shape.coefficients, shape.device),
        "batch": shape.batch,
        "rows": short,
        "cols": long,
        "steps": shape.steps,
        "eps": shape.eps,
    }
    constants: dict[str, Any] = {
        "COMPUTE": _element(shape.compute_dtype),
        "PRECISION": precision(shape),
        "MIRROR": config["MIRROR"],
        "EXACT": (short, long) == (rows, cols),
        "R": rows,
        "C": cols,
    }
    for name, view in views.items():
        letter = name[0]
        wide = view.mT if shape.tall else view
        strides = zip("brc", wide.stride(), strict=True)
        arguments |= {name: view} | {f"stride_{letter}{axis}": n for axis, n in strides}
        order, vector = _order(wide)
        constants |= {f"{letter.upper()}_ORDER": order, f"{letter.upper()}_VECTOR": vector}
    return arguments, constants


def _order(wide: torch.Tensor) -> tuple[int, int]:
    """Which axis is contiguous (1: rows' neighbours, 2: none), and how many elements go at once.

    Loads are as wide as 16 bytes only where the other axis also holds a multiple of them.
    """
    for order, x in enumerate((wide, wide.mT)):
        if x.stride(2) == 1:
            vector = 16 // x.element_size()
            return order, vector if aligned(x) and x.shape[2] % vector == 0 else 1
    return 2, 1


def _element(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
