"""Triton backend: the launcher of what writes tokens one after another; kernels in
`triton_sequential_kernels`, with configs by a rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autotune.space import Config
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from .op import PACKAGE, RewriteShape, RewriteTensors
from .triton_back import describe_alone
from .triton_spaces import OP

SEQUENTIAL_KERNELS = f"{PACKAGE}.triton_sequential_kernels"
NUMBERS = Config.make(4, 1, "fma")
THREAD_NUMBERS = 64  # of a memory
COLUMNS = 16  # of a program: few, so that there are many programs, and a line of memory


def chain_config(shape: RewriteShape) -> Config:
    """As many warps as hold the columns of a program."""
    numbers = runtime.padded(shape.wide) * COLUMNS
    warps = min(max(numbers // (32 * THREAD_NUMBERS), 1), 8)
    return Config.make(warps, 1, "fma", C=COLUMNS)


class Walked(NamedTuple):
    """Of tokens that were written: the memory behind them, E, and (B·H, M) numbers of each."""

    state: Tensor
    normalizer: Tensor
    change: Tensor | None
    features: Tensor  # (B·H, M, P)
    size: Tensor
    inverse: Tensor
    gamma: Tensor | None
    found: Tensor | None


def write(
    shape: RewriteShape, given: RewriteTensors
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """The memory behind the tokens, and E if an echo needs it."""
    found = walk(shape, given)
    return (found.state, found.normalizer), found.change


def walk(shape: RewriteShape, given: RewriteTensors) -> Walked:
    """The forward; `shape.echo` and `shape.backward` say what is kept of it."""
    heads = shape.batch * shape.heads
    device = shape.device

    def fresh(*size: int) -> Tensor:
        return empty(size, dtype=torch.float32, device=device)

    features, size = describe_alone(shape, given.k)
    v, state, normalizer = map(last_contiguous, (given.v, given.state, given.normalizer))
    beta = last_contiguous(given.beta) if shape.channels else given.beta
    first = None if given.first is None else given.first.contiguous().view(torch.int8)
    slots = None if given.slots is None else given.slots.contiguous()
    state_out, normalizer_out = state, normalizer
    if slots is None:
        state_out, normalizer_out = fresh(*shape.state), fresh(*shape.state[:3])
    inverse = fresh(heads, shape.tokens)
    gamma, found = (fresh(heads, shape.tokens) if shape.backward else None for _ in range(2))
    change = None
    if shape.echo:
        change = fresh(shape.batch, shape.heads, shape.tokens, shape.values)
    common: dict[str, Any] = {
        "features": features, "inverse": inverse, "slots": slots, "first": first,
        "heads": shape.heads, "tokens": shape.tokens,
    }  # fmt: skip
    rules: dict[str, Any] = {
        "POOL": slots is not None,
        "FIRST": first is not None,
        "WIDE": shape.wide,
        "P": runtime.padded(shape.wide),
    }
    arguments = common | {
        "size": size, "normalizer": normalizer, "normalizer_out": normalizer_out,
        "gamma": gamma, "found": found, "eps": shape.eps,
        "stride_zb": normalizer.stride(0), "stride_zh": normalizer.stride(1),
        "stride_yb": normalizer_out.stride(0), "stride_yh": normalizer_out.stride(1),
    }  # fmt: skip
    constants = rules | {
        "KEEP": shape.backward, "DENOMINATOR": shape.denominator, "CORRECTION": shape.correction
    }  # fmt: skip
    kernel = SEQUENTIAL_KERNELS, "numbers"
    runtime.launch(OP, kernel, heads, device, NUMBERS, arguments, constants)
    config = chain_config(shape)
    blocks = -(-shape.values // config["C"])
    strides = {
        f"stride_{letter}{axis}": x.stride(dim)
        for letter, x, axes in (
            ("v", v, "bmh"), ("g", beta, "bmh"), ("a", state, "bhp"), ("o", state_out, "bhp")
        )
        for dim, axis in enumerate(axes)
    }  # fmt: skip
    arguments = common | strides | {
        "v": v, "beta": beta, "state": state, "state_out": state_out, "change": change,
        "blocks": blocks,
    }  # fmt: skip
    constants = rules | {
        "CHANGE": shape.echo,
        "CHANNELS": shape.channels,
        "ALIGNED": aligned(state) and aligned(state_out),
        "VALUES": shape.values,
        "C": config["C"],
    }
    kernel = SEQUENTIAL_KERNELS, "chain"
    runtime.launch(OP, kernel, blocks * heads, device, config, arguments, constants)
    if slots is not None:
        # Pools whose last dimension is strided were copied, and are copied back.
        for pool, new in ((given.state, state), (given.normalizer, normalizer)):
            if new is not pool:
                pool.copy_(new)
    return Walked(state_out, normalizer_out, change, features, size, inverse, gamma, found)
