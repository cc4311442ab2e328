"""CUDA C++ backend: the launchers. Kernels are in csrc/newton_schulz, configs in `cuda_spaces`."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import numpy as np
import torch

from ...autotune.space import Config, Device, choose
from .. import cuda_runtime as runtime
from ..alloc import empty
from ..cuda_runtime import Kernel
from .cuda_spaces import (
    OP,
    SPACE_BWD,
    SPACE_FWD,
    TILE,
    WARP_SIDE,
    WARPS,
    WIDEST,
    block_bytes,
    bucket,
    memory,
    refusal,
)
from .op import NewtonSchulzShape

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "supports", "yields"]

LEAST_OF_256 = 9  # matrices of more than 128 rows: of 8 Triton is faster on an H200, not of 16
MAX_STEPS = 16  # as in csrc/newton_schulz/common.cuh
UPSTREAM = 0.125  # norm that backward brings the upstream gradient to, kScale there
LARGEST = 2.0**15  # that a gradient in fp16 may grow to on its way, half of what fp16 holds
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
    # Along a direction with singular value 0 each step multiplies the gradient by its a.
    if shape.backward and UPSTREAM * prod(abs(a) for a, _, _ in shape.triples) > LARGEST:
        return "a gradient through these steps may leave the range of fp16"
    space = SPACE_BWD if shape.backward else SPACE_FWD
    return refusal(space, bucket(shape), Device.of(shape.device))


def yields(shape: NewtonSchulzShape, arch: str) -> str | None:
    """None, or why "auto" goes past these kernels though they can run the call."""
    if min(shape.rows, shape.cols) > 2 * TILE and shape.batch < LEAST_OF_256:
        # A block for a matrix leaves most of a device idle; a tile of each product does not.
        return f"slower for fewer than {LEAST_OF_256} matrices of more than {2 * TILE} rows"
    return None


def _kernel(config: Config, shape: NewtonSchulzShape, pass_: str) -> Kernel:
    """The instance that a config stands for."""
    rows, cols = config["ROWS"], config["COLS"]
    number, tall = NUMBERS[shape.dtype], str(shape.tall).lower()
    suffix = "" if pass_ == "fwd" else "_backward"
    if rows <= WARP_SIDE:
        name = f"newton_schulz_small{suffix}<{rows // 16}, {number}>"
        return Kernel("newton_schulz/newton_schulz_sm80.cuh", f"fastweights::{name}")
    tiles = f"{rows // TILE}, {cols // TILE}, {tall}, {number}"
    if config.matrix == "mma":
        name = f"newton_schulz_stack{suffix}<{tiles}>"
        return Kernel("newton_schulz/newton_schulz_stack_sm80.cuh", f"fastweights::{name}")
    if cols > WIDEST:
        name = f"newton_schulz_wide<{tiles}>"
        return Kernel("newton_schulz/newton_schulz_wide_sm90.cuh", f"fastweights::{name}")
    if rows == 4 * TILE:
        name = f"newton_schulz_256{suffix}<{tall}, {number}>"
        return Kernel(f"newton_schulz/newton_schulz_256{suffix}_sm90.cuh", f"fastweights::{name}")
    name = f"newton_schulz{suffix}<{tiles}>"
    return Kernel("newton_schulz/newton_schulz_sm90.cuh", f"fastweights::{name}")


def fwd(shape: NewtonSchulzShape, x: torch.Tensor) -> torch.Tensor:
    """The orthogonalised matrices, contiguous."""
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    return _launch(shape, config, "fwd", [x.contiguous()])


def bwd(shape: NewtonSchulzShape, upstream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x for that of `fwd`'s result, contiguous."""
    config = choose(SPACE_BWD, bucket(shape), Device.of(shape.device))
    return _launch(shape, config, "bwd", [x.contiguous(), upstream.contiguous()])


def _launch(
    shape: NewtonSchulzShape, config: Config, pass_: str, stacks: list[torch.Tensor]
) -> torch.Tensor:
    device = Device.of(shape.device)
    out = empty(stacks[0].shape, dtype=shape.dtype, device=shape.device)
    if out.numel() == 0:
        return out
    rows = config["ROWS"]
    of_block = WARPS if rows <= WARP_SIDE else 1
    blocks = -(-shape.batch // of_block)
    if config["EACH"]:
        blocks = min(blocks, config["EACH"] * device.multiprocessors)
    needs = memory(config, pass_, shape.steps, block_bytes(config, device))
    matrices: list[Any] = [*stacks, out]
    piece = rows // 4 if rows <= WARP_SIDE else 8  # neighbours that a thread loads at once
    whole = shape.cols % piece == 0 and not any(x.data_ptr() % 16 for x in matrices)
    if pass_ == "bwd" and rows > WARP_SIDE:
        size = (blocks, needs.workspace // 4)
        matrices.append(empty(size, dtype=torch.int32, device=shape.device))
    numbers: list[Any] = [np.int32(n) for n in (shape.rows, shape.cols, shape.steps)]
    coefficients = shape.coefficients
    if pass_ == "fwd":
        scale, coefficients = scaled(coefficients)
        numbers.append(np.float32(scale))
    if needs.kept:
        numbers.append(np.int32(needs.kept))
    runtime.launch(
        OP,
        _kernel(config, shape, pass_),
        config.name,
        shape.device,
        grid=blocks,
        threads=32 * config.num_warps,
        shared=needs.shared,
        arguments=(
            *matrices,
            np.int64(shape.batch),
            *numbers,
            np.float32(shape.eps),
            np.int32(whole),
            _table(coefficients),
        ),
    )
    return out


@functools.lru_cache(maxsize=256)
def scaled(coefficients: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """The same iteration with every c one, and the multiple of X that it starts from.

    With `scale[i]` · X instead of X at step i, A is `scale[i]`² · A and the next iterate is to be
    `scale[i + 1]` · X, so that c becomes `scale[i + 1]` / `scale[i]`⁵ · c. From a last scale of one
    back to the first, each can be chosen so that this is one: kernels skip the product with it. If
    a c is not about one, all stay as they are.
    """
    steps = [coefficients[i : i + 3] for i in range(0, len(coefficients), 3)]
    if not all(1 / 16 <= c <= 64 for _, _, c in steps):
        return 1.0, coefficients
    following = 1.0
    flat: tuple[float, ...] = ()
    for a, b, c in reversed(steps):
        scale = (c * following) ** 0.2
        ratio = following / scale
        flat = (ratio * a, ratio * b / scale**2, 1.0, *flat)
        following = scale
    return following, flat


@functools.lru_cache(maxsize=256)
def _table(coefficients: tuple[float, ...]) -> Any:
    """The struct that kernels take by value: MAX_STEPS triples, zeros behind the last."""
    table = np.zeros((MAX_STEPS, 3), np.float32)
    table.flat[: len(coefficients)] = coefficients
    return np.frombuffer(table.tobytes(), dtype=f"V{table.nbytes}")[0]
