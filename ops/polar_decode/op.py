"""What torch sees: shapes and checks, and one operator. Knows no backend.

    polar_decode  -> direction (B, Hq, D), as q; count (B, Hq), fp32 (float64 for float64)

The operator has no gradient: decoding is inference, and `polar_attention` is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, resolve
from ..polar_attention.op import EPS as EPS
from ..polar_attention.op import MAX_HEAD_DIM

PACKAGE = __package__


class DecodeTensors(NamedTuple):
    """The tensors of a call, in the order in which the operator takes them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    null_value: torch.Tensor | None
    null_base: torch.Tensor
    null_slope: torch.Tensor
    length_gain: torch.Tensor
    magnitude_gain: torch.Tensor


@dataclass(frozen=True)
class DecodeShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `blocks` is the width of a block table. `num_splits` None leaves the number to the backend.
    `aligned`: the caches start and stride by multiples of 16 bytes.
    """

    batch: int
    heads_q: int
    heads_k: int
    head_dim: int
    pages: int
    page_size: int
    blocks: int
    dtype: torch.dtype
    device: torch.device
    window: int | None
    max_context_len: int
    num_splits: int | None
    null_value: bool
    aligned: bool = True

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_k

    @property
    def capacity(self) -> int:
        """The longest sequence that a block table has room for."""
        return self.blocks * self.page_size

    @property
    def acc(self) -> torch.dtype:
        """dtype of the count and of all accumulation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def decode_shape(
    op: str,
    given: DecodeTensors,
    *,
    window: int | None,
    max_context_len: int,
    num_splits: int | None,
    concrete: bool = False,
) -> DecodeShape:
    """Check every argument of a call and return its shape. All raising happens here."""
    q, tables, lengths = given.q, given.block_tables, given.context_lens
    checks.tensor(op, "q", q, "B Hq D", checks.FLOATING)
    batch, heads_q, head_dim = q.shape
    check_caches(op, given.k_cache, given.v_cache, q, "q")
    heads_k = given.k_cache.shape[2]
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(
            f"{op}: q has {heads_q} heads, not a multiple of the {heads_k} heads of k_cache"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{op}: head width D of q is {head_dim}; supported: 1 to {MAX_HEAD_DIM}")
    integers = (("block_tables", tables, "B P"), ("context_lens", lengths, "B"))
    for name, x, layout in integers:
        checks.tensor(op, name, x, layout, (torch.int32,))
        checks.same_device(op, name, x, q.device)
        checks.size(op, name, x, 0, batch, "the batch of q")
    if given.null_value is not None:
        checks.tensor(op, "null_value", given.null_value, "Hq D", checks.FLOATING)
        checks.same_device(op, "null_value", given.null_value, q.device)
        checks.size(op, "null_value", given.null_value, 0, heads_q, "the heads of q")
        checks.size(op, "null_value", given.null_value, 1, head_dim, "the head width of q")
    for name in ("null_base", "null_slope", "length_gain", "magnitude_gain"):
        x = getattr(given, name)
        checks.tensor(op, name, x, "Hq", checks.FLOATING)
        checks.same_device(op, name, x, q.device)
        checks.size(op, name, x, 0, heads_q, "the heads of q")
    numbers = (("window", window), ("max_context_len", max_context_len), ("num_splits", num_splits))
    for name, number in numbers:
        checks.positive(op, name, number)
    reason = "decoding has no gradient"
    checks.without_gradient(op, given._asdict(), reason, "use polar_attention")
    shape = unchecked_shape(given, window, max_context_len, num_splits, concrete=concrete)
    _check_values(op, shape, tables, lengths)
    return shape


def check_caches(
    op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, x: torch.Tensor, of: str
) -> None:
    """Require a pair of caches for the heads' rows of x (·, ·, D), argument `of`."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.tensor(op, name, cache, "pages page_size Hk D", checks.FLOATING)
        checks.same_dtype(op, name, cache, x.dtype, of)
        checks.same_device(op, name, cache, x.device)
        checks.size(op, name, cache, 3, x.shape[2], f"the head width of {of}; Dv must equal D")
    for dim, meaning in enumerate(("pages", "page size", "heads")):
        checks.size(op, "v_cache", v_cache, dim, k_cache.shape[dim], f"the {meaning} of k_cache")
    if k_cache.shape[1] < 1:
        raise ValueError(f"{op}: k_cache has pages of {k_cache.shape[1]} tokens, at least 1 needed")


def _check_values(op: str, shape: DecodeShape, tables: torch.Tensor, lengths: torch.Tensor) -> None:
    """Of tensors on the CPU alone; on a GPU a look at them would be a sync."""
    if not (checks.readable(tables) and checks.readable(lengths)):
        return
    most = min(shape.max_context_len, shape.capacity)
    if any(not 0 <= n <= most for n in lengths.tolist()):
        raise ValueError(
            f"{op}: context_lens must be 0 … {most} (max_context_len is {shape.max_context_len}, "
            f"block_tables has room for {shape.capacity}), got {lengths.tolist()}"
        )
    at = torch.arange(shape.blocks) * shape.page_size
    first = 0 if shape.window is None else (lengths - shape.window).clamp(min=0)[:, None]
    used = (at < lengths[:, None]) & (at + shape.page_size > first)
    wrong = used & ((tables < 0) | (tables >= shape.pages))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: block_tables must name pages 0 … {shape.pages - 1} where a sequence has keys, "
            f"got {int(tables[row, column])} at [{row}, {column}]"
        )


def unchecked_shape(
    given: DecodeTensors, window: int | None, max_context_len: int, num_splits: int | None, *,
    concrete: bool,
) -> DecodeShape:  # fmt: skip
    """The shape of a call that was checked."""
    pages, page_size, heads_k, _ = given.k_cache.shape
    return DecodeShape(
        batch=given.q.shape[0],
        heads_q=given.q.shape[1],
        heads_k=heads_k,
        head_dim=given.q.shape[2],
        pages=pages,
        page_size=page_size,
        blocks=given.block_tables.shape[1],
        dtype=given.q.dtype,
        device=given.q.device,
        window=window,
        max_context_len=max_context_len,
        num_splits=num_splits,
        null_value=given.null_value is not None,
        aligned=not concrete or all(map(checks.aligned, given[1:3])),
    )


# ---- operator -----------------------------------------------------------------------------------

_COUNT = len(DecodeTensors._fields)


class _Call(NamedTuple):
    """The arguments of the operator, sorted."""

    given: DecodeTensors
    shape: DecodeShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operator trusts it."""
    given = DecodeTensors(*arguments[:_COUNT])
    *rules, backend = arguments[_COUNT:]
    return _Call(given, unchecked_shape(given, *rules, concrete=True), backend)


def _impl(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    results: tuple[torch.Tensor, torch.Tensor] = resolve(PACKAGE, call.shape, call.backend).fwd(
        call.shape, call.given
    )
    return results


def _fake(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    q, shape = call.given.q, call.shape
    return q.new_empty(q.shape), q.new_empty(shape.batch, shape.heads_q, dtype=shape.acc)


def _flops(call: _Call) -> int:
    """As if each sequence were as long as it may be: lengths are on the device."""
    shape = call.shape
    keys = shape.max_context_len if shape.window is None else shape.window
    pairs = shape.batch * min(shape.max_context_len, keys)
    return flops.attention_forward(pairs, shape.head_dim, shape.heads_q)


def _no_gradient(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise RuntimeError("fastweights::polar_decode has no gradient; polar_attention has")


DECODE = declare(
    Operator(
        "polar_decode",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens, "
        "Tensor? null_value, Tensor null_base, Tensor null_slope, Tensor length_gain, "
        "Tensor magnitude_gain, SymInt? window, SymInt max_context_len, SymInt? num_splits, "
        "str backend) -> (Tensor, Tensor)",
        impl=lambda *args: _impl(_call(args)),
        fake=lambda *args: _fake(_call(args)),
        flops=lambda *args, **kwargs: _flops(_call(args)),
    ),
    backward=_no_gradient,
)
