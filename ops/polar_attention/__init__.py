r"""Polar attention: softmax attention that returns a direction and a count of what it found.

Row i of a head sees the keys V_i = {j : max(0, n_i − window) ≤ j < n_i}. With nh_i = max(|V_i|, 1),

    t_i = 1 + length_gain·log nh_i          ν_i = null_base + null_slope·√log(nh_i + 1)
    w   = softmax over {t_i·scale·q_i·k_j, j ∈ V_i} ∪ {t_i·ν_i}   (the null is one more key)
    s_i = Σ_j w_ij v_j + w_iN·null_value    direction_i = s_i / max(‖s_i‖, 1e-6)
    n_eff = w_R² / Σ_j w_ij², w_R = Σ_j w_ij     count_i = tanh(magnitude_gain·log1p(n_eff·w_R))

n_eff is the inverse Simpson index of the real weights: m equal keys give exactly m. It is summed
while the keys stream by, so the count costs one multiply-add a probability.

`softmax_attention` is the same kernel with the null and the count compiled out.

Definition: ATMA, arXiv draft of 2026, section "Polar attention"; `fastweights.reference` holds it
literally.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from .op import (
    PACKAGE,
    POLAR_FWD,
    SOFTMAX_FWD,
    AttentionShape,
    Lengths,
    NullParameters,
    attention_shape,
)

__all__ = ["PolarStats", "polar_attention", "softmax_attention"]


class PolarStats(NamedTuple):
    """Detached fp32 statistics of each row, (B, Tq, Hq).

    Attributes:
        lse: log Σ_j exp(t·scale·q·k_j) over real keys, natural log; −inf for a row with no key.
        n_eff: inverse Simpson index of the real weights; 1 for a row with no key.
        null_mass: weight of the null, in [0, 1].
    """

    lse: torch.Tensor
    n_eff: torch.Tensor
    null_mass: torch.Tensor


def _plan_polar(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    null_value: torch.Tensor | None = None,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    length_gain: torch.Tensor,
    magnitude_gain: torch.Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    n_keys: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    concrete: bool = False,
    **_: Any,
) -> AttentionShape:
    null = NullParameters(null_value, null_base, null_slope, length_gain, magnitude_gain)
    lengths = Lengths(n_keys, cu_seqlens, cu_seqlens_k)
    return attention_shape(
        "polar_attention", q, k, v, null, lengths, scale, causal, window, max_seqlen, max_seqlen_k,
        concrete,
    )  # fmt: skip


def _plan_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    n_keys: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    concrete: bool = False,
    **_: Any,
) -> AttentionShape:
    lengths = Lengths(n_keys, cu_seqlens, cu_seqlens_k)
    return attention_shape(
        "softmax_attention", q, k, v, None, lengths, scale, causal, window, max_seqlen,
        max_seqlen_k, concrete,
    )  # fmt: skip


@explainable(PACKAGE, _plan_polar)
def polar_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    null_value: torch.Tensor | None = None,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    length_gain: torch.Tensor,
    magnitude_gain: torch.Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    n_keys: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    return_stats: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, PolarStats]:
    """Attention that returns what it found (direction) and how much of it (count).

    Args:
        q: (B, Tq, Hq, D), bf16, fp16, fp32 or float64, D from 1 to 256, any strides.
        k, v: (B, Tk, Hk, D) of q's dtype. Query head h reads key/value head h // (Hq / Hk).
        null_value: (Hq, D), what a row returns when the null wins; None is zeros.
        null_base, null_slope, length_gain, magnitude_gain: (Hq,), any floating dtype, read as
            fp32. *Effective* values: a layer that keeps raw parameters passes
            softplus(length_gain_raw), softplus(null_slope_raw), softplus(magnitude_gain_raw) and
            null_base as it is. length_gain ≥ 0.
        scale: of q·k; default D^-½.
        causal: row i sees n_i = clamp(Tk − Tq + i + 1, 0, Tk) keys; False: all Tk.
        window: of the n_i keys only the last `window` are seen; None: all.
        n_keys: int32 (Tq,) or (B, Tq): n_i given outright, clamped to [0, Tk]; replaces `causal`.
        cu_seqlens: int32 (N+1,): N sequences packed along T, B = 1; every rule above then holds
            inside each sequence. Rows after the last sequence are padding: results 0.
        cu_seqlens_k: the same for keys, if it differs.
        max_seqlen, max_seqlen_k: hints (FLOP counts, tuning buckets); results never depend on them.
        return_stats: also return `PolarStats`.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        direction (B, Tq, Hq, D) and count (B, Tq, Hq), contiguous, q's dtype; with
        `return_stats` also the statistics.

    Both results are differentiable in q, k, v and all five parameters; gradients of parameters
    have the parameter's dtype. There is no second derivative; `reference.polar_attention` has.
    A row with no key: direction null_value/max(‖null_value‖, 1e-6), count 0, no gradient to q.

    Raises:
        TypeError: wrong dtype, or not a plain tensor.
        ValueError: wrong shape, head count or width; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import polar_attention
        >>> q = torch.randn(1, 16, 8, 64)
        >>> k, v = torch.randn(2, 1, 16, 2, 64).unbind(0)
        >>> head = torch.ones(8)
        >>> direction, count = polar_attention(
        ...     q, k, v, null_base=2 * head, null_slope=head, length_gain=0.3 * head,
        ...     magnitude_gain=0.2 * head)
        >>> direction.shape, count.shape
        (torch.Size([1, 16, 8, 64]), torch.Size([1, 16, 8]))
    """
    op = "polar_attention"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B Tq Hq D", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    shape = _plan_polar(
        q, k, v, null_value=null_value, null_base=null_base, null_slope=null_slope,
        length_gain=length_gain, magnitude_gain=magnitude_gain, scale=scale, causal=causal,
        window=window, n_keys=n_keys, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k,
        max_seqlen=max_seqlen, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    with without_autocast(q.device):
        direction, count, lse, n_eff, _, null_mass = POLAR_FWD(
            q, k, v, null_value, null_base, null_slope, length_gain, magnitude_gain,
            n_keys, cu_seqlens, cu_seqlens_k, shape.scale, causal, window,
            max_seqlen, max_seqlen_k, backend,
        )  # fmt: skip
    if not return_stats:
        return direction, count
    return direction, count, PolarStats(*(x.transpose(1, 2) for x in (lse, n_eff, null_mass)))


@explainable(PACKAGE, _plan_softmax)
def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    n_keys: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain softmax attention by the kernel of `polar_attention`, null and count compiled out.

    Arguments, visibility and packing are those of `polar_attention`.

    Returns:
        out (B, Tq, Hq, D) in q's dtype and lse (B, Tq, Hq) in fp32 (float64 for float64 inputs),
        both differentiable. A row with no key: out 0, lse −inf.

    Raises:
        TypeError, ValueError: as `polar_attention`.

    Example:
        >>> import torch
        >>> from fastweights.ops import softmax_attention
        >>> q = torch.randn(1, 16, 8, 64)
        >>> out, lse = softmax_attention(q, q, q)
        >>> out.shape, lse.shape
        (torch.Size([1, 16, 8, 64]), torch.Size([1, 16, 8]))
    """
    op = "softmax_attention"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B Tq Hq D", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    shape = _plan_softmax(
        q, k, v, scale=scale, causal=causal, window=window, n_keys=n_keys, cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k, max_seqlen=max_seqlen, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    with without_autocast(q.device):
        out, lse = SOFTMAX_FWD(
            q, k, v, n_keys, cu_seqlens, cu_seqlens_k, shape.scale, causal, window,
            max_seqlen, max_seqlen_k, backend,
        )  # fmt: skip
    return out, lse.transpose(1, 2)
