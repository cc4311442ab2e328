"""Polar attention in streamed torch: any device, dtype and strides, O(T·block) memory both ways.

Both passes are explicit, tile by tile: autograd through a streamed loop would store every tile.
A block of rows keeps the state M, L, Q, A of its online softmax over the *real* keys,

    M = max a_j    L = Σ e^{a_j − M}    Q = Σ e^{2(a_j − M)}    A = Σ e^{a_j − M} v_j

and the null is folded in at the end, in log space. Because M ignores the null, L ≥ 1 and Q ≥ 1
however strongly the null wins, and nothing needs a clamp.

Every visibility rule is one pair of integers a row: it sees the keys lo ≤ j < hi of the global key
axis. Operands outside it are zeroed or masked before they meet a product, so what lies in padding
rows or in keys past the last visible one cannot reach a result, NaN included.

The G query heads of a key head are stacked along the rows of one matrix (B, Hk, G·n, ·): grouped
queries cost no expanded keys. 16-bit operands are widened to fp32 block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import alloc
from .op import EPS, AttentionShape, Lengths, NullParameters

SPACE_FWD = SPACE_BWD = None

KEYS = 256  # keys a tile
# Elements of a tile over all heads, by device: on a CPU a few tiles should stay in the L2 cache.
TILE = {"cpu": 1 << 19}
TILE_ELSEWHERE = 1 << 24


def supports(shape: AttentionShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


# ---- which keys a row sees ----------------------------------------------------------------------


class _Rows(NamedTuple):
    """Visible key range of each row, int64 (1 or B, Tq), and which rows are no padding."""

    lo: Tensor
    hi: Tensor
    live: Tensor

    def at(self, i: slice) -> _Rows:
        return _Rows(self.lo[:, i], self.hi[:, i], self.live[:, i])

    @property
    def seen(self) -> Tensor:
        """Whether a row has any key, (1 or B, n)."""
        return self.hi > self.lo


def _rows(shape: AttentionShape, lengths: Lengths, device: torch.device | str) -> _Rows:
    row = torch.arange(shape.tq, device=device)[None]
    n_keys, cu_q, cu_k = lengths
    first: Tensor | int = 0
    rows: Tensor | int = shape.tq
    keys: Tensor | int = shape.tk
    live = torch.ones_like(row, dtype=torch.bool)
    if cu_q is not None:
        ends = cu_q.long()
        ends_k = ends if cu_k is None else cu_k.long()
        live = row < ends[-1]
        if shape.sequences == 0:
            ends = ends_k = ends.new_zeros(2)
        # side="right" steps over empty sequences; padding rows borrow the last one's numbers.
        n = torch.searchsorted(ends, row, right=True).clamp(max=ends.shape[0] - 1) - 1
        first, rows, keys = ends_k[n], ends[n + 1] - ends[n], ends_k[n + 1] - ends_k[n]
        row = row - ends[n]
    if n_keys is not None:
        count = torch.atleast_2d(n_keys).long()
    elif shape.causal:
        count = keys - rows + row + 1
    else:
        count = torch.zeros_like(row) + keys
    count = torch.minimum(count.clamp(min=0), torch.zeros_like(row) + keys)
    start = torch.zeros_like(count) if shape.window is None else (count - shape.window).clamp(min=0)
    live = live.expand(count.shape)
    lo, hi = (torch.where(live, first + x, 0) for x in (start, count))
    return _Rows(lo, hi, live)


class _Tile(NamedTuple):
    """One block of keys for one block of rows."""

    keys: slice
    hidden: Tensor | None  # (1 or B, 1, 1, n, keys): pairs that do not see each other; None: all do
    unused: Tensor | None  # (1 or B, keys, 1, 1): keys that none of the rows sees


class _Plan:
    """The blocks of rows of a call and, for each, the tiles that are not empty.

    Tiles are skipped, and masks dropped from full ones, where the host knows the ranges: on the
    CPU always, elsewhere for calls without length tensors (reading those would be a sync).
    """

    def __init__(self, shape: AttentionShape, lengths: Lengths) -> None:
        self.shape = shape
        self.rows = _rows(shape, lengths, shape.device)
        self.host: _Rows | None = None
        if shape.device.type == "cpu":
            self.host = self.rows
        elif not shape.has_n_keys and not shape.packed:
            self.host = _rows(shape, lengths, "cpu")

    def row_blocks(self) -> Iterator[slice]:
        budget = TILE.get(self.shape.device.type, TILE_ELSEWHERE)
        heads = self.shape.batch * self.shape.heads_q
        if heads == 0:
            return
        n = min(max(budget // (heads * KEYS), 16), KEYS)
        for i in range(0, self.shape.tq, n):
            yield slice(i, min(i + n, self.shape.tq))

    def tiles(self, i: slice) -> Iterator[_Tile]:
        tk = self.shape.tk
        rows = self.rows.at(i)
        first, last, all_from, all_to = 0, tk, tk, 0
        if self.host is not None:
            lo, hi, _ = host = self.host.at(i)
            first = int(torch.where(host.seen, lo, tk).min())
            last, all_from, all_to = int(hi.max()), int(lo.max()), int(hi.min())
        lowest = torch.where(rows.seen, rows.lo, tk).amin(1, keepdim=True)
        highest = rows.hi.amax(1, keepdim=True)
        for start in range(first, last, KEYS):
            keys = slice(start, min(start + KEYS, last))
            if all_from <= start and keys.stop <= all_to:
                yield _Tile(keys, None, None)
                continue
            j = torch.arange(keys.start, keys.stop, device=self.shape.device)
            hidden = (j < rows.lo[..., None]) | (j >= rows.hi[..., None])
            unused = (j < lowest) | (j >= highest)
            yield _Tile(keys, hidden[:, None, None], unused[:, :, None, None])


# ---- operands -----------------------------------------------------------------------------------


def _per_head(x: Tensor, i: slice, dtype: torch.dtype, keep: Tensor) -> Tensor:
    """Rows i of (B, Tq, Hq[, D]) as (B, Hq, n[, D]) in `dtype`, zero where `keep` (., n) is not."""
    drop = ~keep.reshape(*keep.shape, *[1] * (x.ndim - 2))
    return x[:, i].to(dtype).masked_fill(drop, 0).transpose(1, 2)


def _stack(shape: AttentionShape, x: Tensor) -> Tensor:
    """(1 or B, Hq, n, ·) as (1 or B, Hk, G·n, ·): the query heads of a key head as one matrix."""
    return x.reshape(x.shape[0], shape.heads_k, shape.group * x.shape[2], x.shape[3])


def _unstack(shape: AttentionShape, x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], shape.heads_q, x.shape[2] // shape.group, x.shape[3])


def _keys(x: Tensor, tile: _Tile, dtype: torch.dtype) -> Tensor:
    """A block of keys or values, (B, Hk, keys, D); those that no row sees are zero."""
    block = x[:, tile.keys].to(dtype)
    return (block if tile.unused is None else block.masked_fill(tile.unused, 0)).transpose(1, 2)


def _logits(shape: AttentionShape, q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
    """q kᵀ, (B, Hk, G·n, keys), −inf where hidden; q carries t·scale already."""
    a = q @ k.mT
    if tile.hidden is not None:
        n, keys = tile.hidden.shape[3:]
        a.view(*a.shape[:2], shape.group, n, keys).masked_fill_(tile.hidden, -torch.inf)
    return a


class _Null:
    """What the null and the length ask of a block of rows; all (1 or B, Hq, n)."""

    def __init__(self, shape: AttentionShape, null: NullParameters, rows: _Rows) -> None:
        dtype = shape.statistic_dtype
        base, slope, gain, magnitude = (x.to(dtype)[:, None] for x in null[1:])
        nh = (rows.hi - rows.lo).clamp(min=1)[:, None].to(dtype)
        self.log_length = nh.log()
        self.spread = (nh + 1).log().sqrt()
        self.t = 1 + gain * self.log_length
        self.nu = base + slope * self.spread
        self.logit = self.t * self.nu
        self.magnitude = magnitude  # (Hq, 1)
        self.value = None if null.value is None else null.value.to(dtype)[:, None]  # (Hq, 1, D)


# ---- forward ------------------------------------------------------------------------------------


def fwd(
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    null: NullParameters | None,
    lengths: Lengths,
) -> tuple[Tensor, ...]:
    """Polar: direction, count, lse, n_eff, rho, null_mass. Softmax: out, lse."""
    dtype = shape.statistic_dtype
    out = alloc.empty(q.shape, dtype=q.dtype, device=q.device)
    per_row = (shape.batch, shape.heads_q, shape.tq)
    names = ("lse", "n_eff", "rho", "null_mass") if shape.polar else ("lse",)
    stats = [alloc.empty(per_row, dtype=dtype, device=q.device) for _ in names]
    count = alloc.empty(q.shape[:3] if shape.polar else (0,), dtype=q.dtype, device=q.device)

    plan = _Plan(shape, lengths)
    for i in plan.row_blocks():
        rows = plan.rows.at(i)
        live = rows.live[:, None]
        terms = None if null is None else _Null(shape, null, rows)
        lse, n_eff, mean = _stream(shape, q, k, v, plan, i, terms)
        if terms is None:
            results = [lse]
        else:
            w_real = torch.sigmoid(lse - terms.logit)
            w_null = torch.sigmoid(terms.logit - lse)
            mean = mean * w_real[..., None]
            if terms.value is not None:
                mean = mean + w_null[..., None] * terms.value
            rho = torch.linalg.vector_norm(mean, dim=-1)
            mean = mean / rho.clamp(min=EPS)[..., None]
            mu = torch.tanh(terms.magnitude * torch.log1p(n_eff * w_real))
            results = [lse, n_eff, rho, w_null]
            count[:, i] = mu.masked_fill(~live, 0).transpose(1, 2)
        out[:, i] = mean.masked_fill(~live[..., None], 0).transpose(1, 2)
        for stat, result in zip(stats, results, strict=True):
            stat[:, :, i] = result.masked_fill(~live, 0)
    return (out, count, *stats) if shape.polar else (out, *stats)


def _stream(
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: _Plan,
    i: slice,
    terms: _Null | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """lse and n_eff (B, Hq, n), mean value (B, Hq, n, D) of rows i over their real keys."""
    dtype = shape.statistic_dtype
    q_i = _per_head(q, i, dtype, plan.rows.at(i).seen) * shape.scale
    if terms is not None:
        q_i = q_i * terms.t[..., None]
    q_i = _stack(shape, q_i)
    largest = q_i.new_full((*q_i.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(largest)
    squares = torch.zeros_like(largest)
    values = torch.zeros_like(q_i)
    for tile in plan.tiles(i):
        k_j, v_j = (_keys(x, tile, dtype) for x in (k, v))
        a = _logits(shape, q_i, k_j, tile)
        new = torch.maximum(largest, a.amax(-1, keepdim=True))
        # A row that has met no key yet: −inf − 0 keeps its weights and its old sums at zero.
        frame = new.masked_fill(new == -torch.inf, 0)
        alpha = torch.exp(largest - frame)
        p = a.sub_(frame).exp_()
        total = total * alpha + p.sum(-1, keepdim=True)
        values = values * alpha + p @ v_j
        if terms is not None:
            squares = squares * alpha.square() + p.square_().sum(-1, keepdim=True)
        largest = new
    met = total > 0
    lse = largest + total.log()
    n_eff = (total.square() / squares).masked_fill(~met, 1)
    mean = values / total.masked_fill(~met, 1)
    lse, n_eff, mean = (_unstack(shape, x) for x in (lse, n_eff, mean))
    return lse[..., 0], n_eff[..., 0], mean


# ---- backward -----------------------------------------------------------------------------------


class _Upstream(NamedTuple):
    """What the tiles of a block of rows need: da = u·(Gs·v + e0 − e1·u), dv = uᵀ Gs."""

    lse: Tensor  # (B, Hq, n), −inf for a row with no key
    gs: Tensor  # Gs = w_R·∂loss/∂s, (B, Hq, n, D)
    e0: Tensor  # (B, Hq, n)
    e1: Tensor | None = None  # (B, Hq, n); None is 0
    by_pairs: Tensor | None = None  # (B, Hq, n): rows whose null's gradient is −Σ_j da


def bwd(
    shape: AttentionShape,
    d_direction: Tensor,
    d_count: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    null: NullParameters | None,
    lengths: Lengths,
    direction: Tensor,
    lse: Tensor,
    n_eff: Tensor | None,
    rho: Tensor | None,
) -> tuple[Tensor, ...]:
    """Polar: dq, dk, dv and the five parameter gradients. Softmax: dq, dk, dv.

    In softmax mode `d_direction` and `direction` are those of `out`, and `d_count` is that of lse.
    """
    dtype = shape.statistic_dtype
    dq = alloc.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    sums = None if null is None else _ParameterSums(shape)

    plan = _Plan(shape, lengths)
    for i in plan.row_blocks():
        rows = plan.rows.at(i)
        lse_i = lse[:, :, i].masked_fill(~rows.seen[:, None], -torch.inf)
        dc, c = (_per_head(x, i, dtype, rows.live) for x in (d_direction, direction))
        q_i = _per_head(q, i, dtype, rows.seen)
        factor = torch.full((), shape.scale, dtype=dtype, device=q.device)
        if null is None or sums is None or n_eff is None or rho is None:
            row = _softmax_upstream(dc, c, d_count[:, :, i], lse_i, rows)
        else:
            terms = _Null(shape, null, rows)
            factor = shape.scale * terms.t[..., None]
            dmu = _per_head(d_count, i, dtype, rows.live)
            n, r = (x[:, :, i].masked_fill(~rows.live[:, None], 0) for x in (n_eff, rho))
            one, only = _only_values(shape, v, rows)
            if terms.value is not None:
                c = torch.where(one[..., None], _direction(only, lse_i, r, terms), c)
            row, d_null = _polar_upstream(dc, c, dmu, lse_i, n, r, terms, sums)
            row = row._replace(e0=_balanced(row, d_null, one, only))
        g, da = _gradients(shape, q_i * factor, k, v, plan, i, row, dk, dv)
        dq[:, i] = (g * factor).transpose(1, 2)
        if sums is not None:
            if row.by_pairs is not None:
                d_null = torch.where(row.by_pairs, -da, d_null)
            sums.add_logits((q_i * g).sum(-1) * shape.scale, d_null, terms)
    parameters = () if null is None or sums is None else sums.results(null)
    return (dq, dk.to(k.dtype), dv.to(v.dtype), *parameters)


def _softmax_upstream(
    d_out: Tensor, out: Tensor, d_lse: Tensor, lse: Tensor, rows: _Rows
) -> _Upstream:
    e0 = d_lse.masked_fill(~rows.seen[:, None], 0) - (d_out * out).sum(-1)
    return _Upstream(lse, d_out, e0)


def _polar_upstream(
    dc: Tensor,
    c: Tensor,
    dmu: Tensor,
    lse: Tensor,
    n_eff: Tensor,
    rho: Tensor,
    terms: _Null,
    sums: _ParameterSums,
) -> tuple[_Upstream, Tensor]:
    """The upstream of the tiles, and the gradient of the null's logit (B, Hq, n)."""
    w_real = torch.sigmoid(lse - terms.logit)
    w_null = torch.sigmoid(terms.logit - lse)
    m = n_eff * w_real
    log_m = torch.log1p(m)
    mu = torch.tanh(terms.magnitude * log_m)
    d_tanh = dmu * (1 - mu.square())
    gm_m = d_tanh * terms.magnitude * m / (1 + m)  # ∂loss/∂m · m
    # c is saved rounded, so its own length is divided out. Under the clamp s/ε is linear in s:
    # no projection, and s itself has a gradient, kappa = gs·s.
    clamped = rho <= EPS
    along = (dc * c).sum(-1)
    projection = (along / c.square().sum(-1)).masked_fill(clamped, 0)
    gs = (dc - projection[..., None] * c) / rho.clamp(min=EPS)[..., None]
    kappa = along.masked_fill(~clamped, 0)
    d_null = -gm_m - kappa
    by_pairs = None
    if terms.value is not None:
        d_null = d_null + (gs * terms.value).sum(-1)
        # Σ_j da + d_null = 0. Where the null makes up most of s, gs·value cancels down to the
        # rounding of c, and only the sum over pairs keeps its digits.
        by_pairs = w_null * (c * terms.value).sum(-1) > 0.5 * rho
    d_null = (d_null * w_null).masked_fill(lse == -torch.inf, 0)
    sums.add_upstream(w_null[..., None] * gs, d_tanh * log_m)
    e0 = gm_m * (3 - w_real) - w_real * kappa
    return _Upstream(lse, w_real[..., None] * gs, e0, 2 * gm_m * n_eff, by_pairs), d_null


def _only_values(shape: AttentionShape, v: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Which rows have one key, (1 or B, 1, n), and its value where they do, (B, Hq, n, D)."""
    one = (rows.hi - rows.lo == 1)[:, None]
    if not shape.tk:
        return one, v.new_zeros((), dtype=shape.statistic_dtype)
    at = rows.lo.clamp(max=shape.tk - 1)[..., None, None]
    only = torch.take_along_dim(v, at, 1).to(shape.statistic_dtype)  # (B, n, Hk, D)
    return one, only.repeat_interleave(shape.group, 2).transpose(1, 2)


def _direction(only: Tensor, lse: Tensor, rho: Tensor, terms: _Null) -> Tensor:
    """c of a row of one key, not rounded to the dtype of the results."""
    assert terms.value is not None
    w_real = torch.sigmoid(lse - terms.logit)[..., None]
    w_null = torch.sigmoid(terms.logit - lse)[..., None]
    return (w_real * only + w_null * terms.value) / rho.clamp(min=EPS)[..., None]


def _balanced(row: _Upstream, d_null: Tensor, one: Tensor, only: Tensor) -> Tensor:
    """e0, such that in a row of one key da = −d_null, as Σ_j da + d_null = 0 asks for.

    Gs·v + e0 − e1 would reach it as a difference of large terms, and miss by the rounding of c.
    """
    assert row.e1 is not None
    if row.by_pairs is not None:
        one = one & ~row.by_pairs
    return torch.where(one, row.e1 - d_null - (row.gs * only).sum(-1), row.e0)


def _gradients(
    shape: AttentionShape,
    q_i: Tensor,
    k: Tensor,
    v: Tensor,
    plan: _Plan,
    i: slice,
    row: _Upstream,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Σ_j da_ij k_j (B, Hq, n, D) and Σ_j da_ij (B, Hq, n) of rows i; adds to dk and dv.

    `q_i` carries t·scale. The second sum is made where `row.by_pairs` asks for it, else it is 0.
    """
    dtype = shape.statistic_dtype
    q_i, gs = _stack(shape, q_i), _stack(shape, row.gs)
    lse, e0 = (_stack(shape, x[..., None]) for x in (row.lse, row.e0))
    e1 = None if row.e1 is None else _stack(shape, row.e1[..., None])
    # exp(−inf − 0) = 0 is a hidden pair's weight, also in a row with no key.
    frame = lse.masked_fill(lse == -torch.inf, 0)
    g = torch.zeros_like(q_i)
    total = torch.zeros_like(frame)
    for tile in plan.tiles(i):
        k_j, v_j = (_keys(x, tile, dtype) for x in (k, v))
        u = _logits(shape, q_i, k_j, tile).sub_(frame).exp_()
        da = (gs @ v_j.mT).add_(e0)
        if e1 is not None:
            da.addcmul_(u, e1, value=-1)
        da.mul_(u)
        if row.by_pairs is not None:
            total += da.sum(-1, keepdim=True)
        dv[:, tile.keys] += (u.mT @ gs).transpose(1, 2)
        dk[:, tile.keys] += (da.mT @ q_i).transpose(1, 2)
        g += da @ k_j
    return _unstack(shape, g), _unstack(shape, total)[..., 0]


class _ParameterSums:
    """Gradients of the five parameters, summed over blocks of rows in the statistics' dtype."""

    def __init__(self, shape: AttentionShape) -> None:
        per_head = torch.zeros(shape.heads_q, dtype=shape.statistic_dtype, device=shape.device)
        self.value = per_head.new_zeros((shape.heads_q, shape.head_dim))
        self.base, self.slope, self.gain, self.magnitude = (per_head.clone() for _ in range(4))

    def add_upstream(self, d_value: Tensor, d_magnitude: Tensor) -> None:
        self.value += d_value.sum((0, 2))
        self.magnitude += d_magnitude.sum((0, 2))

    def add_logits(self, d_t: Tensor, d_null: Tensor, terms: _Null) -> None:
        """`d_t` is the real logits' part of ∂loss/∂t, `d_null` is ∂loss/∂(t·ν)."""
        self.base += (d_null * terms.t).sum((0, 2))
        self.slope += (d_null * terms.t * terms.spread).sum((0, 2))
        self.gain += ((d_t + d_null * terms.nu) * terms.log_length).sum((0, 2))

    def results(self, null: NullParameters) -> tuple[Tensor, ...]:
        value = null.base.new_empty(0) if null.value is None else self.value.to(null.value.dtype)
        sums = (self.base, self.slope, self.gain, self.magnitude)
        return (value, *(x.to(p.dtype) for x, p in zip(sums, null[1:], strict=True)))
