r"""Polar attention of one query token for each sequence, over keys and values in pages.

Sequence b has n = context_lens[b] keys, the current token's among them; key j is row j % page_size
of page block_tables[b, j // page_size]. Over the last min(n, window) of them, with nh their number,
at least 1,

    t = 1 + length_gain·log nh              ν = null_base + null_slope·√log(nh + 1)
    w = softmax over {t·D^-½·q·k_j} ∪ {t·ν}    (the null is one more key)
    s = Σ_j w_j v_j + w_N·null_value        direction = s / max(‖s‖, 1e-6)
    count = tanh(magnitude_gain·log1p(n_eff·w_R)), w_R = Σ_j w_j, n_eff = w_R² / Σ_j w_j²

the last row of `polar_attention`. Kernels cut a sequence into splits that run side by side; of each
they keep M = max a_j, L = Σ e^{a_j − M}, Q = Σ e^{2(a_j − M)} and A = Σ e^{a_j − M} v_j, which a
second kernel merges, and folds the null into once.

Definition: ATMA, arXiv draft of 2026; `fastweights.reference` holds it literally.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..dispatch import explainable, requested, without_autocast
from .op import DECODE, PACKAGE, DecodeShape, DecodeTensors, decode_shape

__all__ = ["polar_decode"]


def _plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    null_value: torch.Tensor | None = None,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    length_gain: torch.Tensor,
    magnitude_gain: torch.Tensor,
    window: int | None = None,
    max_context_len: int,
    num_splits: int | None = None,
    concrete: bool = False,
    **_: Any,
) -> DecodeShape:
    given = DecodeTensors(
        q, k_cache, v_cache, block_tables, context_lens, null_value, null_base, null_slope,
        length_gain, magnitude_gain,
    )  # fmt: skip
    return decode_shape(
        "polar_decode", given, window=window, max_context_len=max_context_len,
        num_splits=num_splits, concrete=concrete,
    )  # fmt: skip


@explainable(PACKAGE, _plan)
def polar_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    null_value: torch.Tensor | None = None,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    length_gain: torch.Tensor,
    magnitude_gain: torch.Tensor,
    window: int | None = None,
    max_context_len: int,
    num_splits: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Direction and count of one query token for each of B sequences.

    The token's own key and value are in the cache already (`paged_cache_write_`). Lengths and
    tables are read on the device alone: a step can be captured in a CUDA graph and replayed while
    sequences grow.

    Args:
        q: (B, Hq, D), bf16, fp16, fp32 or float64, D from 1 to 256, any strides.
        k_cache, v_cache: (pages, page_size, Hk, D) of q's dtype, any strides and any page_size.
            Query head h reads key/value head h // (Hq / Hk).
        block_tables: int32 (B, P), the pages of each sequence; what is behind a sequence's last
            page may be anything, −1 for instance.
        context_lens: int32 (B,), keys of each sequence, the current token's included; 0: direction
            null_value/max(‖null_value‖, 1e-6), count 0. Values of both are checked on the CPU
            alone; on a GPU a length beyond P·page_size is read as that.
        null_value, null_base, null_slope, length_gain, magnitude_gain: (Hq, D) or None, and (Hq,)
            each, as in `polar_attention`.
        window: of the keys only the last `window` are seen; None: all.
        max_context_len: no length exceeds it. Only the number of splits depends on it, in steps of
            powers of two.
        num_splits: into how many pieces a sequence is cut; None leaves it to the backend. Results
            are the same bits only for the same number.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        direction (B, Hq, D) in q's dtype, count (B, Hq) in fp32 (float64 for float64), contiguous.

    Not differentiable; `polar_attention` is. Under autocast q is cast to the dtype of the caches.

    Raises:
        TypeError: wrong dtype, or not a plain tensor.
        ValueError: wrong shape, head count or width; a tensor that requires grad while gradients
            are recorded; lengths or pages that are not there; a backend that does not support the
            call.

    Example:
        >>> import torch
        >>> from fastweights.ops import paged_cache_write_, polar_decode
        >>> k_cache, v_cache = torch.zeros(2, 8, 16, 2, 64).unbind(0)  # 8 pages of 16 tokens
        >>> tables = torch.tensor([[5, 2], [7, -1]], dtype=torch.int32)
        >>> k, v = torch.randn(2, 21, 2, 64).unbind(0)  # 20 tokens of the first sequence, 1
        >>> slots = torch.tensor([*range(80, 96), *range(32, 36), 112])
        >>> paged_cache_write_(k, v, k_cache, v_cache, slots)
        >>> head = torch.ones(8)
        >>> direction, count = polar_decode(
        ...     torch.randn(2, 8, 64), k_cache, v_cache, tables,
        ...     torch.tensor([20, 1], dtype=torch.int32), null_base=2 * head, null_slope=head,
        ...     length_gain=0.3 * head, magnitude_gain=0.2 * head, max_context_len=32)
        >>> direction.shape, count.shape
        (torch.Size([2, 8, 64]), torch.Size([2, 8]))
    """
    op = "polar_decode"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B Hq D", checks.FLOATING)
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        checks.tensor(op, "k_cache", k_cache, "pages page_size Hk D", checks.FLOATING)
        q = q.to(k_cache.dtype)
    given = DecodeTensors(
        q, k_cache, v_cache, block_tables, context_lens, null_value, null_base, null_slope,
        length_gain, magnitude_gain,
    )  # fmt: skip
    decode_shape(op, given, window=window, max_context_len=max_context_len, num_splits=num_splits)
    with without_autocast(q.device):
        direction, count = DECODE(*given, window, max_context_len, num_splits, backend)
    return direction, count
