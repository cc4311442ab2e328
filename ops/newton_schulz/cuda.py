"""CUDA C++ backend: the launchers. Kernels are in csrc/newton_schulz, configs in `cuda_spaces`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ...autotune.space import Config, Device, choose
from .. import cuda_runtime as runtime
from ..alloc import empty
from ..cuda_runtime import Kernel
from .cuda_spaces import (
    LARGE,
    LARGEST,
    OP,
    SMALL,
    SPACE_BWD,
    SPACE_FWD,
    WARP_SIDE,
    WARPS,
    bucket,
    refusal,
    shared_bytes,
    tiles,
)
from .op import NewtonSchulzShape

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "kernel", "supports"]

MAX_STEPS = 16  # as in csrc/newton_schulz/common.cuh
NUMBERS = {torch.float16: "fastweights::half", torch.bfloat16: "fastweights::bfloat16"}


def supports(shape: NewtonSchulzShape, arch: str) -> str | None:
    """None, or why CUDA C++ cannot run this call."""
    if arch == "cpu":
        return "the tensors are on the CPU"
    reason = runtime.missing()
    if reason is not None:
        return reason
    if shape.factor:
        return "factors of Gram matrices have no CUDA C++ kernel yet"
    if shape.dtype not in NUMBERS or shape.compute_dtype != torch.float16:
        return "iterates in fp16 on 16-bit matrices"
    if shape.steps > MAX_STEPS:
        return f"takes at most {MAX_STEPS} steps"
    space = SPACE_BWD if shape.backward else SPACE_FWD
    return refusal(space, bucket(shape), Device.of(shape.device))


def kernel(config: Config, shape: NewtonSchulzShape, pass_: str) -> Kernel:
    """The instance that a config stands for."""
    number = NUMBERS[shape.dtype]
    name = "newton_schulz" if pass_ == "fwd" else "newton_schulz_backward"
    if config["ROWS"] <= WARP_SIDE:
        return Kernel(
            SMALL,
            f"fastweights::newton_schulz_small<{config['ROWS'] // 16}, {number}>",
        )
    rows, cols = tiles(config)
    tall = str(shape.tall).lower()
    if rows == 4:
        return Kernel(
            LARGEST,
            f"fastweights::newton_schulz_256<{tall}, {number}>",
        )
    return Kernel(
        LARGE,
        f"fastweights::{name}<{rows}, {cols}, {tall}, {number}>",
    )


def fwd(shape: NewtonSchulzShape, x: torch.Tensor) -> torch.Tensor:
    """The orthogonalised matrices, contiguous."""
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    x = x.contiguous()
    out = empty(x.shape, dtype=shape.dtype, device=shape.device)
    _launch(shape, config, "fwd", [x, out], [np.float32(shape.eps)], shared_bytes(config, "fwd"))
    return out


def bwd(shape: NewtonSchulzShape, upstream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x for that of `fwd`'s result, contiguous."""
    config = choose(SPACE_BWD, bucket(shape), Device.of(shape.device))
    x, upstream = x.contiguous(), upstream.contiguous()
    out = empty(x.shape, dtype=shape.dtype, device=shape.device)
    _launch(shape, config, "bwd", [x, upstream, out], [], shared_bytes(config, "bwd"))
    return out


def _launch(
    shape: NewtonSchulzShape,
    config: Config,
    pass_: str,
    matrices: list[torch.Tensor],
    rules: list[Any],
    shared: int,
) -> None:
    rows, cols = shape.rows, shape.cols
    if rows * cols == 0:
        return
    side = config["ROWS"]
    piece = side // 4 if side <= WARP_SIDE else 8  # neighbours that a thread loads at once
    whole = cols % piece == 0 and not any(x.data_ptr() % 16 for x in matrices)
    of_block = WARPS if side <= WARP_SIDE else 1
    blocks = -(-shape.batch // of_block)
    if config["EACH"]:
        blocks = min(blocks, config["EACH"] * Device.of(shape.device).multiprocessors)
    sizes = [np.int64(shape.batch), np.int32(rows), np.int32(cols), np.int32(shape.steps)]
    runtime.launch(
        OP,
        kernel(config, shape, pass_),
        config.name,
        shape.device,
        grid=blocks,
        threads=32 * config.num_warps,
        shared=shared,
        arguments=(*matrices, *sizes, *rules, np.int32(whole), _table(shape.coefficients)),
    )


@functools.lru_cache(maxsize=256)
def _table(coefficients: tuple[float, ...]) -> Any:
    """The struct that kernels take by value: MAX_STEPS triples, zeros behind the last."""
    table = np.zeros((MAX_STEPS, 3), np.float32)
    table.flat[: len(coefficients)] = coefficients
    return np.frombuffer(table.tobytes(), dtype=f"V{table.nbytes}")[0]
