"""Tokens that join an open chunk, in plain torch: for pieces of any length, and for single steps.

What a chunk of `eager` starts with, A = B = 1 and a = P = U = 0, is here what the cache holds. How
full a chunk is differs between sequences and is data: rows are placed by index and chosen by
predicate, and nothing is read on the host. All in fp32 (float64 for float64), differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from . import OmegaState, omega_memory
from .cache import OmegaCache, Rows, begun
from .eager import features, triangle
from .op import OmegaShape, OmegaTensors

TOKENS = 7  # of `OmegaTensors`, the first ones have a row a token

Taken = tuple[Tensor | None, ...]  # some tokens of all tensors that have a row a token


class _Open(Protocol):
    """A cache with an open chunk."""

    @property
    def filled(self) -> Tensor: ...


Cache = TypeVar("Cache", bound=_Open)


def run(
    shape: OmegaShape, given: OmegaTensors, cache: OmegaCache, backend: str
) -> tuple[Tensor, OmegaCache]:
    """y (N, T, H, Dv) in v's dtype, and the cache behind the last token."""
    if shape.tokens == 0:
        return given.v.new_zeros(given.v.shape), OmegaCache._make(
            None if x is None else x.clone() for x in cache
        )

    def tensors(taken: Taken) -> OmegaTensors:
        return OmegaTensors._make((*taken, *given[TOKENS:]))

    def join(taken: Taken, cache: OmegaCache, count: Tensor) -> tuple[Tensor, OmegaCache]:
        return advance(shape, tensors(taken), cache, count)

    def whole(taken: Taken, cache: OmegaCache) -> tuple[Tensor, OmegaCache]:
        return _whole_chunks(shape, tensors(taken), cache, backend)

    return in_parts(given[:TOKENS], shape.chunk_size, cache, join, whole)


def in_parts(
    given: Sequence[Tensor | None],
    chunk_size: int,
    cache: Cache,
    join: Callable[[Taken, Cache, Tensor], tuple[Tensor, Cache]],
    whole: Callable[[Taken, Cache], tuple[Tensor, Cache]],
) -> tuple[Tensor, Cache]:
    """Tokens of q, k, v, … taken chunk by chunk: y (N, T, H, Dv), and the cache behind the last.

    `join` takes tokens of one chunk, in each sequence as many of them as its last argument says;
    `whole` takes chunks that are whole in every sequence.
    """
    b, parts = chunk_size, _Parts(given)
    tokens = parts.tokens

    def one(length: int, count: Tensor) -> None:
        nonlocal cache
        read, cache = join(parts.take(length), cache, count)
        parts.put(read, count)

    one(min(b, tokens), (b - cache.filled.long() % b).clamp(max=tokens))
    length = max(0, tokens - b) // b * b
    if length:
        y, cache = whole(parts.take(length), cache)
        parts.put(y, torch.full_like(parts.done, length))
    rest = tokens - length - 1  # at most: less than two chunks
    while rest > 0:
        length = min(b, rest)
        one(length, (tokens - parts.done).clamp(max=length))
        rest -= length
    return parts.reads(), cache


class _Parts:
    """Tokens taken part by part, in each sequence as many as count there, and their reads."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        v = given[2]
        assert v is not None
        self.given, self.v, self.tokens = given, v, v.shape[1]
        self.done = torch.zeros(v.shape[0], dtype=torch.int64, device=v.device)
        self.parts: list[tuple[Tensor, Tensor]] = []

    def take(self, length: int) -> Taken:
        """The next `length` tokens; behind the last one it is repeated."""
        at = self.done[:, None] + torch.arange(length, device=self.done.device)
        at = at.clamp(max=self.tokens - 1)
        return tuple(None if x is None else x.gather(1, like(at, x)) for x in self.given)

    def put(self, read: Tensor, count: Tensor) -> None:
        """Reads of the tokens taken last, of which `count` (N,) count."""
        at = torch.arange(read.shape[1], device=count.device)
        # The others go to a row behind the last token.
        place = torch.where(at < count[:, None], self.done[:, None] + at, self.tokens)
        self.parts.append((place, read.to(self.v.dtype)))
        self.done = self.done + count

    def reads(self) -> Tensor:
        """y."""
        places, reads = (torch.cat(x, 1) for x in zip(*self.parts, strict=True))
        y = self.v.new_zeros(reads.shape[0], self.tokens + 1, *reads.shape[2:])
        return y.scatter(1, like(places, y), reads)[:, : self.tokens].contiguous()


def _whole_chunks(
    shape: OmegaShape, given: OmegaTensors, cache: OmegaCache, backend: str
) -> tuple[Tensor, OmegaCache]:
    """Chunks behind one that every sequence has filled."""
    before = left(shape, cache, given.coefficients)
    y, after = omega_memory(
        given.q, given.k, given.v, step=given.step, decay=given.decay,
        window_gates=given.window_gates, window=shape.window, momentum=given.momentum,
        inner_loss="dot" if shape.dot else "squared", feature_map=shape.feature_map,
        coefficients=given.coefficients, chunk_size=shape.chunk_size,
        read_before=shape.read_before, initial_state=before.state,
        initial_momentum=before.momentum, tail_k=before.tail_k, tail_v=before.tail_v,
        tail_length=before.tail_length, return_state=True, backend=backend,
    )  # fmt: skip
    assert after is not None
    return y, begun(after, shape.chunk_size)


# ---- one chunk ----------------------------------------------------------------------------------


def advance(
    shape: OmegaShape, given: OmegaTensors, cache: OmegaCache, count: Tensor
) -> tuple[Tensor, OmegaCache]:
    """Tokens of one chunk: reads (N, L, H, Dv) in fp32 or float64, and the cache behind them.

    Of the L tokens (N, L, …) of a sequence the first `count` (N,) join its chunk, which must have
    room for them; a full one is folded first. At a count of 0 all bits stay, and reads are void.
    """
    length = given.q.shape[1]
    moving = count > 0
    old = cache = _turned(shape, given, cache, moving)
    filled = cache.filled.long()
    rows = joined(shape, given, cache.rows, cache.state, count)
    cache = cache._replace(**rows._asdict())

    keys, residuals = features_of(shape, rows, given.coefficients)
    q = phi(shape, given.q, given.coefficients)
    seen = slice(0, length) if shape.read_before else slice(1, length + 1)
    alpha = decays(shape, given)
    rate = scan(alpha, cache.decay[..., None], None)
    read = rate[:, :, seen] * (q @ cache.state)
    push = weights(shape, given, rows, filled)
    if given.momentum is not None:
        assert cache.momentum is not None
        assert cache.momentum_write is not None
        assert cache.momentum_decay is not None
        assert cache.carry is not None
        theta = by_head(shape, given.momentum)
        pushed = scan(theta, cache.momentum_write, push)
        push = pushed[:, :, 1:]
        drop = scan(theta, cache.momentum_decay[..., None], None)
        carry = scan(alpha, cache.carry[..., None], drop[:, :, 1:])
        read = read + carry[:, :, seen] * (q @ cache.momentum)
        cache = cache._replace(
            momentum_write=after(pushed, count),
            momentum_decay=after(drop, count)[..., 0],
            carry=after(carry, count)[..., 0],
        )
    write = scan(alpha, cache.write, push)
    read = read - (write[:, :, seen] * (q @ keys.mT)) @ residuals
    cache = cache._replace(write=after(write, count), decay=after(rate, count)[..., 0])
    return read.transpose(1, 2), OmegaCache._make(chosen(moving, cache, old))


def left(shape: OmegaShape, cache: OmegaCache, coefficients: Tensor | None) -> OmegaState:
    """M and S after the last token, and the tail."""
    return OmegaState(*_folded(shape, cache, coefficients), *tail(shape, cache.rows))


def _turned(
    shape: OmegaShape, given: OmegaTensors, cache: OmegaCache, moving: Tensor
) -> OmegaCache:
    """Full chunks folded, and older rows met with the memory that a chunk begins with."""
    b = shape.chunk_size
    full = moving & (cache.filled == b)
    turned = begun(left(shape, cache, given.coefficients), b)
    cache = OmegaCache._make(chosen(full, turned, cache))
    residuals = met_again(shape, given, cache.rows, cache.state, moving)
    return cache._replace(residuals=residuals)


def _folded(
    shape: OmegaShape, cache: OmegaCache, coefficients: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """M and S after the last token."""
    keys, residuals = features_of(shape, cache.rows, coefficients)
    state = cache.decay[..., None, None] * cache.state
    state = state - keys.mT @ (cache.write[..., None] * residuals)
    if cache.momentum is None:
        return state, None
    assert cache.momentum_write is not None
    assert cache.momentum_decay is not None
    assert cache.carry is not None
    state = state + cache.carry[..., None, None] * cache.momentum
    momentum = cache.momentum_decay[..., None, None] * cache.momentum
    return state, momentum - keys.mT @ (cache.momentum_write[..., None] * residuals)


# ---- its rows -----------------------------------------------------------------------------------


def joined(
    shape: OmegaShape, given: OmegaTensors, rows: Rows, state: Tensor, count: Tensor
) -> Rows:
    """The first `count` (N,) tokens of each sequence behind those there are; M as it began."""
    older, length = shape.window - 1, given.k.shape[1]
    row = torch.arange(older + shape.chunk_size, device=shape.device)
    token = row - older - rows.filled.long()[:, None]  # (N, n), the one that a row belongs to
    new = (token >= 0) & (token < count[:, None])

    def join(old: Tensor, tokens: Tensor) -> Tensor:
        fresh = tokens.gather(1, like(token.clamp(0, length - 1), tokens))
        return where(new, fresh, old)

    error = _error(shape, given.k, given.v, state, given.coefficients)
    return Rows(
        keys=join(rows.keys, given.k),
        values=join(rows.values, given.v),
        residuals=join(rows.residuals, error),
        tail_length=rows.tail_length,
        filled=(rows.filled + count).to(torch.int32),
    )


def met_again(
    shape: OmegaShape, given: OmegaTensors, rows: Rows, state: Tensor, moving: Tensor
) -> Tensor:
    """R, its older rows anew where a chunk begins: M is another one then."""
    older = shape.window - 1
    there = _there(shape, rows)[:, :older]
    k, v = (where(there, x[:, :older], x.new_zeros(())) for x in (rows.keys, rows.values))
    error = _error(shape, k, v, state, given.coefficients)
    error = where(moving & (rows.filled == 0), error, rows.residuals[:, :older])
    return torch.cat((error, rows.residuals[:, older:]), 1)


def tail(shape: OmegaShape, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the last window − 1 tokens, and how many of them exist."""
    older = shape.window - 1
    length = (rows.tail_length + rows.filled).clamp(max=older)
    at = torch.arange(older, device=shape.device)
    row = rows.filled.long()[:, None] + at
    row = row.clamp(0, rows.keys.shape[1] - 1)  # a slot never begun may hold any number
    there = at >= older - length[:, None]
    tail_k, tail_v = (
        where(there, x.gather(1, like(row, x)), x.new_zeros(())) for x in (rows.keys, rows.values)
    )
    return tail_k, tail_v, length.to(torch.int32)


def _there(shape: OmegaShape, rows: Rows) -> Tensor:
    """Which rows exist, (N, n): of the others not even products with 0 are formed."""
    row = torch.arange(rows.keys.shape[1], device=shape.device)
    older = shape.window - 1
    return (row >= older - rows.tail_length[:, None]) & (row < older + rows.filled[:, None])


def features_of(
    shape: OmegaShape, rows: Rows, coefficients: Tensor | None
) -> tuple[Tensor, Tensor]:
    """φ(K) (N, H, n, D) and R (N, H, n, Dv), both of zeros where no row exists."""
    there = _there(shape, rows)
    keys = where(there, rows.keys, rows.keys.new_zeros(()))
    residuals = where(there, rows.residuals, rows.residuals.new_zeros(()))
    return phi(shape, keys, coefficients), residuals.transpose(1, 2)


def weights(shape: OmegaShape, given: OmegaTensors, rows: Rows, filled: Tensor) -> Tensor:
    """W (N, H, L, n): step · window_gates of each token at the rows of its window.

    `filled`: tokens of the chunk before them.
    """
    older, window, length = shape.window - 1, shape.window, given.step.shape[1]
    row = torch.arange(rows.keys.shape[1], device=shape.device)
    t = filled[:, None, None] + torch.arange(length, device=shape.device)[:, None]
    lag = older + t - row  # (N, L, n)
    there = (lag >= 0) & (lag < window) & (row >= older - rows.tail_length[:, None, None])
    step = given.step.to(shape.acc)[..., None]
    gates = 1 / window if given.window_gates is None else given.window_gates.to(shape.acc)
    weight = (step * gates).transpose(1, 2)  # (N, H, L, window or 1)
    index = lag.clamp(0, weight.shape[3] - 1)[:, None].expand(-1, shape.heads, -1, -1)
    return weight.gather(3, index).masked_fill(~there[:, None], 0)


def scan(gate: Tensor, first: Tensor, then: Tensor | None) -> Tensor:
    """z_0 = first, z_t = gate_t z_{t−1} + then_t: (N, H, L + 1, ·) of (N, H, L), (N, H, ·).

    Index 0 along L + 1 is what a cache holds; index t what it is after token t.
    """
    left = triangle(torch.cat((torch.ones_like(gate[:, :, :1]), gate), 2))
    if then is None:
        return left[..., :1] * first[:, :, None]
    return left @ torch.cat((first[:, :, None], then), 2)


def after(scanned: Tensor, count: Tensor) -> Tensor:
    """What is scanned (N, H, L + 1, ·), after `count` (N,) tokens of each sequence."""
    at = count.long()[:, None, None, None].expand(-1, scanned.shape[1], 1, scanned.shape[3])
    return scanned.gather(2, at)[:, :, 0]


def decays(shape: OmegaShape, given: OmegaTensors) -> Tensor:
    """(N, H, L), 1 where there are none."""
    if given.decay is None:
        return torch.ones_like(by_head(shape, given.step))
    return by_head(shape, given.decay)


def _error(
    shape: OmegaShape, k: Tensor, v: Tensor, state: Tensor, coefficients: Tensor | None
) -> Tensor:
    """R (N, L, H, Dv) of keys and values (N, L, H, ·)."""
    value = v.to(shape.acc)
    if shape.dot:
        return -value
    return (phi(shape, k, coefficients) @ state).transpose(1, 2) - value


def phi(shape: OmegaShape, x: Tensor, coefficients: Tensor | None) -> Tensor:
    """φ of (N, L, H, d), as (N, H, L, D)."""
    return features(shape, x.transpose(1, 2), coefficients).to(shape.acc)


def by_head(shape: OmegaShape, gate: Tensor) -> Tensor:
    """A gate (N, L, H) as (N, H, L)."""
    return gate.to(shape.acc).transpose(1, 2)


def like(index: Tensor, x: Tensor) -> Tensor:
    """An index (N, L) into dimension 1 of x (N, T, …), for all else of x."""
    return index[(..., *[None] * (x.ndim - 2))].expand(-1, -1, *x.shape[2:])


def where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`torch.where` for a mask of the leading dimensions."""
    return torch.where(mask[(..., *[None] * (max(x.ndim, y.ndim) - mask.ndim))], x, y)


def chosen(
    mask: Tensor, x: Sequence[Tensor | None], y: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Of each field of a cache, x where the mask (N,) holds, else y."""
    return [
        None if a is None or b is None else where(mask, a, b) for a, b in zip(x, y, strict=True)
    ]
