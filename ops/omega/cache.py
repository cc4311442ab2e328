r"""The Omega rule in pieces: what an open chunk keeps, and calls that end in the middle of one.

With b = chunk_size and n = window − 1 + b, a chunk in the making has room for n rows: window − 1
older tokens, then its own. M and S are those of its begin, and after its last token the memory is

    M_t = A M + a S − φ(K)ᵀ (P ∘ R)      S_t = B S − φ(K)ᵀ (U ∘ R)      R = φ(K) M − V

("dot": R = −V), so that a token changes rows and scalars alone. M itself moves once in b tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import checks
from ..dispatch import autocast_operands, requested, without_autocast
from . import OmegaState
from .op import OmegaShape, OmegaTensors, check_features, feature_width, omega_shape


class Rows(NamedTuple):
    """What an open chunk keeps of its tokens and of those before it, as `OmegaCache` describes."""

    keys: torch.Tensor
    values: torch.Tensor
    residuals: torch.Tensor
    tail_length: torch.Tensor
    filled: torch.Tensor


class OmegaCache(NamedTuple):
    """Memories in the middle of a chunk: N of them, each of one sequence.

    `filled` tokens have joined the open chunk. At `filled` = chunk_size it is full, and the next
    token begins with folding it into `state`. Rows of keys, values and residuals that do not exist
    yet may hold anything; write and momentum_write are 0 there. While `filled` is 0, nothing is
    written, decay and momentum_decay are 1, carry is 0, and residuals may hold anything.

    Attributes:
        state: M where the chunk began, (N, H, D, Dv), fp32 (float64 for float64).
        momentum: S there; None without momentum, as momentum_write, carry, momentum_decay are.
        keys: before φ, (N, window − 1 + chunk_size, H, d): row window − 2 is the last token before
            the chunk, row window − 1 + t its token t.
        values: (N, window − 1 + chunk_size, H, Dv).
        residuals: R of the rows, as values, dtype as state.
        write: P after the last token, (N, H, window − 1 + chunk_size), dtype as state.
        momentum_write: U, as write.
        decay: A, the product of all decays in the chunk, (N, H), dtype as state.
        carry: a, the share of S in the memory, as decay.
        momentum_decay: B, as decay.
        tail_length: how many of the window − 1 older rows exist, int32 (N,).
        filled: tokens in the chunk, 0 … chunk_size, int32 (N,).
    """

    state: torch.Tensor
    momentum: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    residuals: torch.Tensor
    write: torch.Tensor
    momentum_write: torch.Tensor | None
    decay: torch.Tensor
    carry: torch.Tensor | None
    momentum_decay: torch.Tensor | None
    tail_length: torch.Tensor
    filled: torch.Tensor

    @property
    def rows(self) -> Rows:
        """The fields that are rows of the chunk, or say which there are."""
        return Rows(self.keys, self.values, self.residuals, self.tail_length, self.filled)

    @classmethod
    def from_state(cls, left: OmegaState, *, chunk_size: int = 64) -> OmegaCache:
        """A cache that goes on where a call of `omega_memory` ended, with a new chunk.

        That is the same sequence going on if the call's tokens filled its last chunk. The tensors
        of `left` are copied; an initial state that was learned may be expanded.

        Raises:
            TypeError: not an `OmegaState`, wrong dtype, chunk_size not an int.
            ValueError: wrong shape.

        Example:
            >>> import torch
            >>> from fastweights.ops import OmegaCache, omega_extend, omega_memory
            >>> x, step = torch.randn(3, 1, 20, 2, 8), torch.full((1, 20, 2), 0.05)
            >>> y, left = omega_memory(*x, step=step, window=3, chunk_size=4, return_state=True)
            >>> cache = OmegaCache.from_state(left, chunk_size=4)
            >>> y, cache = omega_extend(
            ...     *x[:, :, :18], cache, step=step[:, :18], window=3, chunk_size=4
            ... )
            >>> y.shape, cache.filled.tolist()
            (torch.Size([1, 18, 2, 8]), [2])
        """
        check_state("OmegaCache.from_state", left, chunk_size)
        copied = (
            None if x is None else x.clone(memory_format=torch.contiguous_format) for x in left
        )
        return begun(OmegaState._make(copied), chunk_size)

    def to_state(
        self,
        *,
        window: int = 1,
        feature_map: str = "identity",
        coefficients: torch.Tensor | None = None,
    ) -> OmegaState:
        """M and S after the last token, and the tail: what `omega_memory` leaves there.

        Raises:
            TypeError: wrong dtype, window not an int.
            ValueError: wrong shape, or a window that leaves no room for a chunk.
        """
        op = "OmegaCache.to_state"
        shape = shape_of_rows(
            op, self.rows, window, feature_map, coefficients, momentum=self.momentum is not None
        )
        check_cache(op, shape, self)
        from . import extend

        with without_autocast(self.keys.device):
            return extend.left(shape, self, coefficients)


def begun(left: OmegaState, chunk_size: int) -> OmegaCache:
    """A chunk without tokens behind what a call left; its tensors are taken as they are."""
    state, momentum, tail_k, tail_v, tail_length = left
    batch, heads = state.shape[:2]
    rows = tail_k.shape[1] + chunk_size
    keys, values = (
        torch.cat((x, x.new_zeros(batch, chunk_size, *x.shape[2:])), 1) for x in (tail_k, tail_v)
    )
    write = state.new_zeros(batch, heads, rows)
    one = state.new_ones(batch, heads)
    with_momentum = momentum is not None
    return OmegaCache(
        state=state,
        momentum=momentum,
        keys=keys,
        values=values,
        residuals=state.new_zeros(values.shape),
        write=write,
        momentum_write=torch.zeros_like(write) if with_momentum else None,
        decay=one,
        carry=torch.zeros_like(one) if with_momentum else None,
        momentum_decay=torch.ones_like(one) if with_momentum else None,
        tail_length=tail_length,
        filled=torch.zeros_like(tail_length),
    )


def omega_cache(
    batch: int,
    heads: int,
    width: int,
    values: int,
    *,
    window: int = 1,
    chunk_size: int = 64,
    momentum: bool = False,
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> OmegaCache:
    """Memories of zeros to which no token has been written.

    Args:
        batch: how many, one a sequence; for `omega_step_` the number of slots.
        heads, width, values: H, and the sizes d and Dv of a key and a value.
        window, chunk_size: as in the calls that will take the cache.
        momentum: whether those calls pass one.
        feature_map, coefficients: of those calls; of the coefficients the degree counts.
        dtype: of keys and values; fp32, float64, bf16 or fp16.
        device: of all tensors; None: torch's default.

    Raises:
        TypeError: a size that is not an int, another dtype.
        ValueError: a negative size, window or chunk_size below 1, coefficients not of the map.

    Example:
        >>> from fastweights.ops import omega_cache
        >>> cache = omega_cache(16, 8, 64, 64, window=4, chunk_size=32, dtype=torch.bfloat16)
        >>> cache.state.shape, cache.keys.shape
        (torch.Size([16, 8, 64, 64]), torch.Size([16, 35, 8, 64]))
    """
    op = "omega_cache"
    sizes = {"batch": batch, "heads": heads, "width": width, "values": values}
    for name, number in (sizes | {"window": window, "chunk_size": chunk_size}).items():
        check_int(op, name, number, 0 if name in sizes else 1)
    if dtype not in checks.FLOATING:
        accepted = ", ".join(str(d) for d in checks.FLOATING)
        raise TypeError(f"{op}: dtype is {dtype}; accepted: {accepted}")
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    keys = torch.zeros(batch, window - 1, heads, width, dtype=dtype, device=device)
    check_features(op, feature_map, keys, coefficients)
    wide = feature_width(feature_map, width, coefficients)
    state = keys.new_zeros(batch, heads, wide, values, dtype=acc)
    left = OmegaState(
        state,
        torch.zeros_like(state) if momentum else None,
        keys,
        keys.new_zeros(batch, window - 1, heads, values),
        keys.new_zeros(batch, dtype=torch.int32),
    )
    return begun(left, chunk_size)


def omega_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: OmegaCache,
    *,
    step: torch.Tensor,
    decay: torch.Tensor | None = None,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    momentum: torch.Tensor | None = None,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    chunk_size: int = 64,
    read_before: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, OmegaCache]:
    """`omega_memory` cut anywhere: tokens that go on in the middle of a chunk, and may end in one.

    Calls one after another give what one call of `omega_memory` gives for all of their tokens. Each
    sequence may be at another place in its chunk; nothing is read on the host. The chunk that is
    open at first and those at the end are plain torch in fp32 (float64 for float64); whole chunks
    between them are a call of `omega_memory`.

    Args:
        q, k: (N, T, H, d), T ≥ 0, one row a sequence of the cache, of the dtype of its keys.
        v: (N, T, H, Dv).
        cache: from `omega_cache`, `OmegaCache.from_state`, or the call before; not changed. The
            rules (window, chunk_size, losses, features) must be those of its earlier tokens.
        step, decay, window_gates, window, momentum, inner_loss, feature_map, coefficients,
            chunk_size, read_before: as in `omega_memory`; momentum if and only if the cache has it.
        backend: of the whole chunks.

    Returns:
        y (N, T, H, Dv), contiguous, v's dtype; and the cache behind the last token.

    Differentiable in all floating arguments and the floating tensors of the cache.

    Raises:
        TypeError: wrong dtype, not a plain tensor, not an `OmegaCache`.
        ValueError: wrong shape, a cache for another window, chunk_size or for no momentum; and what
            `omega_memory` raises.

    Example:
        >>> import torch
        >>> from fastweights.ops import omega_cache, omega_extend, omega_memory
        >>> x, step = torch.randn(3, 1, 90, 2, 8, dtype=torch.float64), torch.full((1, 90, 2), 0.05)
        >>> rules = {"window": 3, "chunk_size": 16}
        >>> cache = omega_cache(1, 2, 8, 8, **rules, dtype=torch.float64)
        >>> parts = []
        >>> for begin, end in ((0, 5), (5, 77), (77, 90)):
        ...     gates = {"step": step[:, begin:end].double()}
        ...     y, cache = omega_extend(*x[:, :, begin:end], cache, **gates, **rules)
        ...     parts.append(y)
        >>> torch.allclose(torch.cat(parts, 1), omega_memory(*x, step=step.double(), **rules)[0])
        True
    """
    op = "omega_extend"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "N T H d", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    given = OmegaTensors(
        q, k, v, step, decay, window_gates, momentum, coefficients, *[None] * 6
    )  # fmt: skip
    shape = omega_shape(
        op, given, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before,
    )  # fmt: skip
    check_cache(op, shape, cache)
    from . import extend

    with without_autocast(q.device):
        return extend.run(shape, given, cache, backend)


# ---- checks -------------------------------------------------------------------------------------


def shape_of_rows(
    op: str, rows: Rows, window: int, feature_map: str, coefficients: torch.Tensor | None, *,
    momentum: bool,
) -> OmegaShape:  # fmt: skip
    """The shape of a call without tokens on a cache; of its fields only the keys are checked."""
    keys = rows.keys
    checks.tensor(op, "cache.keys", keys, "N window-1+chunk_size H d", checks.FLOATING)
    check_int(op, "window", window)
    check_features(op, feature_map, keys, coefficients)
    chunk_size = keys.shape[1] - window + 1
    if chunk_size < 1:
        raise ValueError(
            f"{op}: window is {window}, cache.keys has {keys.shape[1]} rows for a window and a "
            "chunk"
        )
    heads, width = keys.shape[2:]
    return OmegaShape(
        batch=keys.shape[0], tokens=0, heads=heads, width=width,
        wide=feature_width(feature_map, width, coefficients), values=rows.values.shape[-1],
        window=window, chunk_size=chunk_size, dtype=keys.dtype, device=keys.device, dot=False,
        feature_map=feature_map, momentum=momentum, packed=False, read_before=False,
    )  # fmt: skip


def check_int(op: str, name: str, number: object, least: int = 1) -> None:
    """Require an int of at least `least`."""
    if not isinstance(number, int):
        raise TypeError(f"{op}: {name} must be an int, got {type(number).__name__}")
    if number < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {number}")


def check_cache(op: str, shape: OmegaShape, cache: OmegaCache, *, pool: bool = False) -> None:
    """Require a cache for calls of this shape: one memory a sequence, or a pool of any number."""
    if not isinstance(cache, OmegaCache):
        raise TypeError(f"{op}: cache must be an OmegaCache, got {type(cache).__name__}")
    if (cache.momentum is None) == shape.momentum:
        here, there = ("no ", "") if cache.momentum is not None else ("", "no ")
        raise ValueError(f"{op}: {here}momentum was given, cache was made for {there}momentum")
    absent = () if shape.momentum else ("momentum", "momentum_write", "carry", "momentum_decay")
    check_fields(op, shape, cache._asdict(), absent, pool=pool)


def check_fields(
    op: str, shape: OmegaShape, fields: dict[str, Any], absent: Sequence[str] = (), *, pool: bool
) -> None:
    """Require fields of a cache, by name, to be what a call of this shape takes."""
    checks.tensor(op, "cache.state", fields["state"], "N H D Dv", (shape.acc,))
    count = fields["state"].shape[0] if pool else shape.batch
    heads, rows = shape.heads, shape.window - 1 + shape.chunk_size
    state = ("N H D Dv", (count, heads, shape.wide, shape.values), shape.acc)
    values = ("N window-1+chunk_size H Dv", (count, rows, heads, shape.values))
    write = ("N H window-1+chunk_size", (count, heads, rows), shape.acc)
    scalar = ("N H", (count, heads), shape.acc)
    number = ("N", (count,), torch.int32)
    expected: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {
        "state": state, "momentum": state, "memory": state,
        "keys": ("N window-1+chunk_size H d", (count, rows, heads, shape.width), shape.dtype),
        "values": (*values, shape.dtype), "residuals": (*values, shape.acc),
        "write": write, "momentum_write": write,
        "decay": scalar, "carry": scalar, "momentum_decay": scalar,
        "tail_length": number, "filled": number,
    }  # fmt: skip
    for name, x in fields.items():
        if name in absent:
            continue
        layout, size, dtype = expected[name]
        _check_tensor(op, f"cache.{name}", x, layout, size, dtype)
        checks.same_device(op, f"cache.{name}", x, shape.device)


def _check_tensor(
    op: str, name: str, x: object, layout: str, size: Sequence[int], dtype: torch.dtype
) -> None:
    checks.tensor(op, name, x, layout, (dtype,))
    assert isinstance(x, torch.Tensor)
    for dim, length in enumerate(size):
        checks.size(op, name, x, dim, length, f"dimension {dim} of {layout}")


def check_state(op: str, left: OmegaState, chunk_size: int) -> None:
    """Require what a call left, and a chunk to go on with."""
    if not isinstance(left, OmegaState):
        raise TypeError(f"{op}: left must be an OmegaState, got {type(left).__name__}")
    check_int(op, "chunk_size", chunk_size)
    checks.tensor(op, "tail_k", left.tail_k, "N window-1 H d", checks.FLOATING)
    batch, older, heads, _ = left.tail_k.shape
    acc = torch.float64 if left.tail_k.dtype == torch.float64 else torch.float32
    checks.tensor(op, "state", left.state, "N H D Dv", (acc,))
    state = (batch, heads, *left.state.shape[2:])
    for name, layout, size, dtype in (
        ("state", "N H D Dv", state, acc),
        ("momentum", "N H D Dv", state, acc),
        ("tail_v", "N window-1 H Dv", (batch, older, heads, state[3]), left.tail_k.dtype),
        ("tail_length", "N", (batch,), torch.int32),
    ):
        x = getattr(left, name)
        if name != "momentum" or x is not None:
            _check_tensor(op, name, x, layout, size, dtype)
            checks.same_device(op, name, x, left.tail_k.device)
