"""Polar attention and softmax attention, literally: every logit in memory, packed ones in a loop.

Formulas, arguments and results are those of `fastweights.ops.polar_attention`. Matrix products run
in the dtype of the inputs, all between them in fp32 (float64 for float64 inputs), results are cast
once at the end: the "plain torch" that kernels are measured by. Twice differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


class PolarStats(NamedTuple):
    """Detached statistics of each row, (B, Tq, Hq)."""

    lse: Tensor
    n_eff: Tensor
    null_mass: Tensor


def _visible(
    q: Tensor, k: Tensor, causal: bool, window: int | None, n_keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Which keys each row sees, bool (1 or B, 1, Tq, Tk), and nh, (1 or B, 1, Tq)."""
    tq, tk = q.shape[1], k.shape[1]
    if n_keys is None:
        rows = torch.arange(tq, device=q.device)
        n_keys = tk - tq + rows + 1 if causal else torch.full_like(rows, tk)
    n = torch.atleast_2d(n_keys).clamp(0, tk)
    first = torch.zeros_like(n) if window is None else (n - window).clamp(min=0)
    j = torch.arange(tk, device=q.device)
    visible = (j >= first[..., None]) & (j < n[..., None])
    return visible[:, None], (n - first).clamp(min=1)[:, None]


def _real(q: Tensor, k: Tensor, v: Tensor, t: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    """Softmax over the real keys: mean value (B, Hq, Tq, D), lse and n_eff (B, Hq, Tq)."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for x in (k, v))
    a = t[..., None] * (q.transpose(1, 2) @ k.mT).to(t.dtype)
    seen = visible.any(-1)
    # The mask comes after t: −inf·t has gradient NaN. Rows with no key are finite until the end.
    a = a.masked_fill(~visible & seen[..., None], -torch.inf).masked_fill(~seen[..., None], 0.0)
    u = a.softmax(-1)
    mean = (u.to(v.dtype) @ v).to(t.dtype).masked_fill(~seen[..., None], 0.0)
    lse = a.logsumexp(-1).masked_fill(~seen, -torch.inf)
    return mean, lse, u.square().sum(-1).masked_fill(~seen, 1.0).reciprocal()


def _by_sequence(
    attend: Callable[..., tuple[Tensor, ...]], q: Tensor, k: Tensor, v: Tensor,
    n_keys: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Attend each packed sequence by itself; rows after the last are padding and get zeros."""
    if cu_seqlens is None:
        return [x.transpose(1, 2) for x in attend(q, k, v, n_keys)]
    ends = cu_seqlens.tolist()
    ends_k = ends if cu_seqlens_k is None else cu_seqlens_k.tolist()
    results = [attend(q[:, :0], k[:, :0], v[:, :0], None)]
    for i, j, a, b in zip(ends, ends[1:], ends_k, ends_k[1:], strict=False):
        n = None if n_keys is None else n_keys[..., i:j]
        results.append(attend(q[:, i:j], k[:, a:b], v[:, a:b], n))
    padding = q.shape[1] - ends[-1]
    results.append(tuple(x.new_zeros(*x.shape[:2], padding, *x.shape[3:]) for x in results[0]))
    return [torch.cat(pieces, 2).transpose(1, 2) for pieces in zip(*results, strict=True)]


def polar_attention(
    q: Tensor, k: Tensor, v: Tensor, *, null_value: Tensor | None = None, null_base: Tensor,
    null_slope: Tensor, length_gain: Tensor, magnitude_gain: Tensor, scale: float | None = None,
    causal: bool = True, window: int | None = None, n_keys: Tensor | None = None,
    cu_seqlens: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None, max_seqlen_k: int | None = None, return_stats: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, PolarStats]:  # fmt: skip
    """Direction, count and on request statistics, as `fastweights.ops.polar_attention`."""
    acc = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scalars = null_base, null_slope, length_gain, magnitude_gain
    base, slope, gain, magnitude = (x.to(acc)[:, None] for x in scalars)
    value = torch.zeros(()) if null_value is None else null_value[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, n_keys: Tensor | None) -> tuple[Tensor, ...]:
        visible, nh = _visible(q, k, causal, window, n_keys)
        t = 1 + gain * nh.to(acc).log()
        null = t * (base + slope * (nh + 1).to(acc).log().sqrt())
        mean, lse, n_eff = _real(q, k, v, t * scale, visible)
        # Not sigmoid: its derivative y(1 − y) loses all digits where y rounds to 1.
        w_real, w_null = (F.logsigmoid(x).exp() for x in (lse - null, null - lse))
        s = w_real[..., None] * mean + w_null[..., None] * value.to(acc)
        direction = s / s.square().sum(-1, keepdim=True).clamp(min=EPS**2).sqrt()  # max(‖s‖, ε)
        count = (magnitude * (n_eff * w_real).log1p()).tanh()
        return direction.to(q.dtype), count.to(q.dtype), lse, n_eff, w_null

    direction, count, *stats = _by_sequence(attend, q, k, v, n_keys, cu_seqlens, cu_seqlens_k)
    statistics = PolarStats(*(x.detach() for x in stats))
    return (direction, count, statistics) if return_stats else (direction, count)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = True,
    window: int | None = None, n_keys: Tensor | None = None, cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp, as `fastweights.ops.softmax_attention`."""
    acc = torch.promote_types(q.dtype, torch.float32)
    t = torch.full((), q.shape[-1] ** -0.5 if scale is None else scale, dtype=acc, device=q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, n_keys: Tensor | None) -> tuple[Tensor, ...]:
        return _real(q, k, v, t, _visible(q, k, causal, window, n_keys)[0])[:2]

    out, lse = _by_sequence(attend, q, k, v, n_keys, cu_seqlens, cu_seqlens_k)
    return out.to(q.dtype), lse
