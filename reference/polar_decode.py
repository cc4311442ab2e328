"""Polar attention of one query a sequence over a paged cache, literally: sequence after sequence.

Formulas, arguments and results are those of `fastweights.ops.polar_decode`, of which each row is
the last row of `polar_attention`. Matrix products run in the dtype of the inputs, all between them
in fp32 (float64 for float64 inputs): the "plain torch" that kernels are measured by.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def polar_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, *,
    null_value: Tensor | None = None, null_base: Tensor, null_slope: Tensor, length_gain: Tensor,
    magnitude_gain: Tensor, window: int | None = None, max_context_len: int = 0,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `fastweights.ops.polar_decode`; results do not depend on the last two arguments."""
    acc = torch.promote_types(q.dtype, torch.float32)
    batch, heads, width = q.shape
    page_size, group = k_cache.shape[1], heads // k_cache.shape[2]
    scalars = null_base, null_slope, length_gain, magnitude_gain
    base, slope, gain, magnitude = (x.to(acc) for x in scalars)
    direction, count = q.new_empty(q.shape), q.new_empty(batch, heads, dtype=acc)
    for b in range(batch):
        n = int(context_lens[b])
        first = 0 if window is None else max(n - window, 0)
        at = torch.arange(first, n, device=q.device)
        page, offset = block_tables[b].long()[at // page_size], at % page_size
        k, v = (
            x[page, offset].repeat_interleave(group, 1).transpose(0, 1) for x in (k_cache, v_cache)
        )
        nh = torch.tensor(max(n - first, 1), dtype=acc, device=q.device)
        t = 1 + gain * nh.log()
        null = t * (base + slope * (nh + 1).log().sqrt())
        product = (k @ q[b, :, :, None]).squeeze(-1)
        a = t[:, None] * width**-0.5 * product.to(acc)
        u, lse = a.softmax(-1), a.logsumexp(-1)
        mean = (u.to(v.dtype)[:, None] @ v).squeeze(1).to(acc)
        n_eff = u.square().sum(-1).reciprocal() if n > 0 else torch.ones_like(t)
        w_real, w_null = (F.logsigmoid(x).exp() for x in (lse - null, null - lse))
        s = w_real[:, None] * mean
        if null_value is not None:
            s = s + w_null[:, None] * null_value.to(acc)
        direction[b] = s / s.norm(dim=-1, keepdim=True).clamp(min=EPS)
        count[b] = (magnitude * (n_eff * w_real).log1p()).tanh()
    return direction, count


def paged_cache_write_(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """As `fastweights.ops.paged_cache_write_`."""
    page_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // page_size, slot % page_size] = k[token]
            v_cache[slot // page_size, slot % page_size] = v[token]
