"""Tokens that join an open chunk of an Atlas memory, in plain torch: pieces of any length.

Rows, scans and the cut into parts are those of `omega.extend`. Which tokens meet Newton–Schulz
differs between sequences: of L tokens at most ⌈L/ns_stride⌉ do, which are picked by index, and what
is picked where there is none counts nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import checks
from ..omega import OmegaState
from ..omega import extend as omega
from ..omega.eager import triangle
from ..omega.extend import TOKENS, Taken, after, by_head, chosen, scan, where
from ..omega.op import OmegaShape, OmegaTensors
from . import atlas_memory
from .cache import AtlasCache, begun
from .op import AtlasShape, AtlasTensors
from .stack import orthogonal


def run(
    shape: AtlasShape, given: AtlasTensors, cache: AtlasCache, backend: str
) -> tuple[Tensor, AtlasCache]:
    """y (N, T, H, Dv) in v's dtype, and the cache behind the last token."""
    memory = given.memory
    if shape.tokens == 0:
        return memory.v.new_zeros(memory.v.shape), AtlasCache._make(x.clone() for x in cache)

    def tensors(taken: Taken) -> AtlasTensors:
        *tokens, output_step = taken
        assert output_step is not None
        return AtlasTensors(OmegaTensors._make((*tokens, *memory[TOKENS:])), output_step)

    def join(taken: Taken, cache: AtlasCache, count: Tensor) -> tuple[Tensor, AtlasCache]:
        return advance(shape, tensors(taken), cache, count)

    def whole(taken: Taken, cache: AtlasCache) -> tuple[Tensor, AtlasCache]:
        return _whole_chunks(shape, tensors(taken), cache, backend)

    tokens = (*memory[:TOKENS], given.output_step)
    return omega.in_parts(tokens, shape.chunk_size, cache, join, whole)


def _whole_chunks(
    shape: AtlasShape, given: AtlasTensors, cache: AtlasCache, backend: str
) -> tuple[Tensor, AtlasCache]:
    """Chunks behind one that every sequence has filled."""
    memory = given.memory
    before = left(shape, cache, memory.coefficients)
    assert memory.momentum is not None
    numbers = iter(shape.ns_numbers)
    triples = list(zip(numbers, numbers, numbers, strict=True))
    y, last = atlas_memory(
        memory.q, memory.k, memory.v, step=memory.step, momentum=memory.momentum,
        output_step=given.output_step, decay=memory.decay, window_gates=memory.window_gates,
        window=shape.window, inner_loss="dot" if shape.dot else "squared",
        feature_map=shape.feature_map, coefficients=memory.coefficients,
        chunk_size=shape.chunk_size, ns_stride=shape.ns_stride, ns_steps=len(triples),
        ns_coefficients=triples, ns_eps=shape.ns_eps, read_before=shape.read_before,
        initial_state=before.state, initial_momentum=before.momentum, tail_k=before.tail_k,
        tail_v=before.tail_v, tail_length=before.tail_length, return_state=True, backend=backend,
    )  # fmt: skip
    assert last is not None
    return y, begun(last, shape.chunk_size)


def left(shape: OmegaShape, cache: AtlasCache, coefficients: Tensor | None) -> OmegaState:
    """M and S after the last token, and the tail."""
    keys, residuals = omega.features_of(shape, cache.rows, coefficients)
    momentum = cache.momentum_decay[..., None, None] * cache.momentum
    momentum = momentum - keys.mT @ (cache.momentum_write[..., None] * residuals)
    state = cache.decay[..., None, None] * cache.memory
    return OmegaState(state, momentum, *omega.tail(shape, cache.rows))


# ---- one chunk ----------------------------------------------------------------------------------


def advance(
    shape: AtlasShape, given: AtlasTensors, cache: AtlasCache, count: Tensor
) -> tuple[Tensor, AtlasCache]:
    """Tokens of one chunk: reads (N, L, H, Dv) in fp32 or float64, and the cache behind them.

    Of the L tokens (N, L, …) of a sequence the first `count` (N,) join its chunk, which must have
    room for them; a full one is folded first. At a count of 0 all bits stay, and reads are void.
    """
    memory, length = given.memory, given.output_step.shape[1]
    moving = count > 0
    old = cache = _turned(shape, memory, cache, moving)
    filled = cache.filled.long()
    rows = omega.joined(shape, memory, cache.rows, cache.state, count)
    keys, residuals = omega.features_of(shape, rows, memory.coefficients)
    q = omega.phi(shape, memory.q, memory.coefficients)

    assert memory.momentum is not None
    alpha, theta = omega.decays(shape, memory), by_head(shape, memory.momentum)
    rate = scan(alpha, cache.decay[..., None], None)  # (N, H, L + 1, 1), from `memory` on
    drop = scan(theta, cache.momentum_decay[..., None], None)
    weights = omega.weights(shape, memory, rows, filled)
    pushed = scan(theta, cache.momentum_write, weights)  # (N, H, L + 1, n)

    at, meets = _meetings(shape, filled, count, length)  # (N, J)
    index = at[:, None, :, None].expand(-1, shape.heads, -1, -1)
    push = pushed[:, :, 1:].gather(2, index.expand(-1, -1, -1, pushed.shape[3]))
    momenta = drop[:, :, 1:].gather(2, index)[..., None] * cache.momentum[:, :, None]
    momenta = momenta - keys.mT[:, :, None] @ (push[..., None] * residuals[:, :, None])
    written = orthogonal(shape, momenta.masked_fill(~meets[:, None, :, None, None], 0))
    writes = triangle(alpha).gather(3, index.mT.expand(-1, -1, length, -1))
    writes = writes * by_head(shape, given.output_step).gather(2, index[..., 0])[:, :, None]
    writes = pad(writes.masked_fill(~meets[:, None, None], 0), (0, 0, 1, 0))  # (N, H, L + 1, J)

    seen = slice(0, length) if shape.read_before else slice(1, length + 1)
    read = rate[:, :, seen] * (q @ cache.memory)
    read = read + (writes[:, :, seen].mT[..., None] * (q[:, :, None] @ written)).sum(2)
    kept, share = after(rate, count), after(writes, count)  # (N, H, 1), (N, H, J)
    wrote = meets.any(1)
    total = kept[..., None] * cache.memory + (share[..., None, None] * written).sum(2)
    cache = cache._replace(
        **rows._asdict(),
        memory=where(wrote, total, cache.memory),
        momentum_write=after(pushed, count),
        decay=where(wrote, torch.ones_like(cache.decay), kept[..., 0]),
        momentum_decay=after(drop, count)[..., 0],
    )
    return read.transpose(1, 2), AtlasCache(*_all(chosen(moving, cache, old)))


def _turned(
    shape: AtlasShape, given: OmegaTensors, cache: AtlasCache, moving: Tensor
) -> AtlasCache:
    """Full chunks folded, and older rows met with the memory that a chunk begins with."""
    full = moving & (cache.filled == shape.chunk_size)
    turned = begun(left(shape, cache, given.coefficients), shape.chunk_size)
    cache = AtlasCache(*_all(chosen(full, turned, cache)))
    residuals = omega.met_again(shape, given, cache.rows, cache.state, moving)
    return cache._replace(residuals=residuals)


def _meetings(
    shape: AtlasShape, filled: Tensor, count: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Tokens of each sequence that meet Newton–Schulz (N, J), and which of them there are."""
    stride = shape.ns_stride
    at = (stride - 1 - filled % stride)[:, None]
    at = at + torch.arange(-(-length // stride), device=filled.device) * stride
    meets = at < count[:, None]
    if checks.readable(meets) and not meets.any():
        at, meets = at[:, :0], meets[:, :0]
    return at.clamp(max=length - 1), meets


def _all(fields: list[Tensor | None]) -> list[Tensor]:
    """Fields of a cache in which none may be absent."""
    return [x for x in fields if x is not None]
