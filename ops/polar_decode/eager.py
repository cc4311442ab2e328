"""Paged decoding in plain torch: any device, dtype and strides, some pages of all sequences a time.

Each sequence keeps the state of an online softmax over its real keys, as `polar_attention.eager`,

    M = max a_j    L = Σ e^{a_j − M}    Q = Σ e^{2(a_j − M)}    A = Σ e^{a_j − M} v_j

and the null is folded in once, at the end. The G query heads of a key head are rows of one matrix.
What lies behind a sequence's last key, in its last page or in its block table, reaches no result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .op import EPS, DecodeShape, DecodeTensors

SPACE_FWD = SPACE_BWD = None

KEYS = 512  # of a sequence at a time


def supports(shape: DecodeShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: DecodeShape, given: DecodeTensors) -> tuple[Tensor, Tensor]:
    """direction (B, Hq, D) in q's dtype, count (B, Hq) in fp32 (float64 for float64)."""
    last = given.context_lens.long().clamp(0, shape.capacity)
    first = torch.zeros_like(last) if shape.window is None else (last - shape.window).clamp(min=0)
    seen = (last - first).clamp(min=1).to(shape.acc)[:, None]  # nh, (B, 1)
    t = 1 + given.length_gain.to(shape.acc) * seen.log()  # (B, Hq)
    null = t * (given.null_base + given.null_slope * (seen + 1).log().sqrt()).to(shape.acc)
    m, l, s2, acc = _stream(shape, given, first, last, t)

    some = l > 0
    lse = torch.where(some, m + l.log(), -torch.inf)
    w_real, w_null = (F.logsigmoid(x).exp() for x in (lse - null, null - lse))
    s = (w_real / torch.where(some, l, 1))[..., None] * acc
    if given.null_value is not None:
        s = s + w_null[..., None] * given.null_value.to(shape.acc)
    direction = s / s.norm(dim=-1, keepdim=True).clamp(min=EPS)
    mass = w_real * l.square() / torch.where(some, s2, 1)  # L = 0 without keys
    count = (given.magnitude_gain.to(shape.acc) * mass.log1p()).tanh()
    return direction.to(shape.dtype), count


def _stream(
    shape: DecodeShape, given: DecodeTensors, first: Tensor, last: Tensor, t: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M, L, Q (B, Hq) and A (B, Hq, D) of the keys first ≤ j < last of each sequence."""
    rows = (shape.batch, shape.heads_k, shape.group)
    q = given.q.to(shape.acc).view(*rows, shape.head_dim)
    rate = (t * shape.head_dim**-0.5).view(*rows, 1)
    m = q.new_full(rows, -torch.inf)
    l, s2, acc = q.new_zeros(rows), q.new_zeros(rows), torch.zeros_like(q)
    begin, end = _columns(shape, first, last)
    step = max(1, KEYS // shape.page_size)
    for column in range(begin, end, step):
        columns = slice(column, min(column + step, end))
        keys = (columns.start * shape.page_size, columns.stop * shape.page_size)
        at = torch.arange(*keys, device=last.device)
        seen = (at >= first[:, None]) & (at < last[:, None])  # (B, keys)
        k, v = _pages(shape, given, columns, seen)  # (B, Hk, keys, D)
        hidden = ~seen[:, None, None]
        a = (rate * (q @ k.mT)).masked_fill(hidden, -torch.inf)  # (B, Hk, G, keys)
        highest = torch.maximum(m, a.amax(-1))
        # A sequence that has seen no key yet keeps −inf; shifting by 0 keeps its p at 0, not NaN.
        shift = torch.where(highest == -torch.inf, 0, highest)
        p, alpha = (a - shift[..., None]).exp(), (m - shift).exp()
        l = l * alpha + p.sum(-1)
        s2 = s2 * alpha.square() + p.square().sum(-1)
        acc = acc * alpha[..., None] + p @ v
        m = highest
    return m.flatten(1), l.flatten(1), s2.flatten(1), acc.flatten(1, 2)


def _columns(shape: DecodeShape, first: Tensor, last: Tensor) -> tuple[int, int]:
    """Columns of the block tables that are looked at: all of them where lengths cannot be read."""
    if shape.pages == 0 or shape.batch == 0:
        return 0, 0
    if not checks.readable(last):
        return 0, shape.blocks
    return int(first.min()) // shape.page_size, -(-int(last.max()) // shape.page_size)


def _pages(
    shape: DecodeShape, given: DecodeTensors, columns: slice, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of some columns of the block tables, (B, Hk, keys, D); 0 where not seen."""
    used = seen.unflatten(1, (-1, shape.page_size)).any(-1)
    pages = given.block_tables[:, columns].long().masked_fill(~used, 0)
    hidden = ~seen[:, :, None, None]
    k, v = (
        x[pages].flatten(1, 2).to(shape.acc).masked_fill(hidden, 0).transpose(1, 2)
        for x in (given.k_cache, given.v_cache)
    )
    return k, v
