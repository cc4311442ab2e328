r"""The gated delta rule: a linear memory that decays, and of which each token mends one row.

Of each head, with q and k divided by max(‖·‖, l2norm_eps) if `qk_l2norm`,

    S^  = exp(log_decay_t) S_{t−1}
    S_t = S^ + k_tᵀ beta_t (v_t − k_t S^)
    o_t = scale · q_t S_t

The error is taken of the decayed memory, and the read comes after the write. Chunks of tokens run
as products of matrices and one triangular solve (the UT transform). Written literally in
`fastweights.reference`; source: Gated Delta Networks, arXiv 2412.06464.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from .op import DELTA_FWD, PACKAGE, DeltaShape, DeltaTensors, delta_shape

__all__ = ["gated_delta_rule"]


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float = 1.0,
    qk_l2norm: bool = True,
    l2norm_eps: float = 1e-12,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    concrete: bool = False,
    **rest: Any,
) -> DeltaShape:
    given = DeltaTensors(q, k, v, log_decay, beta, initial_state, cu_seqlens)
    return delta_shape(
        "gated_delta_rule", given, scale=scale, qk_l2norm=qk_l2norm, l2norm_eps=l2norm_eps
    )


@explainable(PACKAGE, _plan)
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float = 1.0,
    qk_l2norm: bool = True,
    l2norm_eps: float = 1e-12,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write every token into a decaying memory by the delta rule, and read it.

    With H the largest of Hq, Hk and Hv, head h of H takes head floor(h·Hx/H) of a tensor of Hx:
    neighbours share one. No tensor is expanded to H heads as a whole.

    Args:
        q: (B, T, Hq, Dk), bf16, fp16, fp32 or float64, any strides; T = 0 is allowed.
        k: (B, T, Hk, Dk), v: (B, T, Hv, Dv), dtype as q. Each of Hq, Hk, Hv divides H.
        log_decay: (B, T, H), fp32 (float64 for float64), natural logarithm, 0 or less; −inf forgets
            all, exactly, and has the gradient 0.
        beta: (B, T, H), dtype as log_decay, how much of the error is mended, mostly 0 to 1. With
            keys of norm one the memory stays bounded up to 2.
        scale: multiplies what is read.
        qk_l2norm: bring each q and k to norm one. Without it, keys longer than √(2/beta) let the
            memory diverge.
        l2norm_eps: shorter q and k are divided by this instead of by their norm.
        initial_state: (N, H, Dk, Dv), fp32 (float64 for float64), may be expanded. N is B, or the
            number of packed sequences. None: zeros.
        output_final_state: return the memory after the last token.
        cu_seqlens: int32 (N + 1,), starts of sequences that lie one behind the other along T of a
            batch of 1; tokens after the last one are padding.
        backend: "auto", "eager", "triton" or "cuda". Eager reads `cu_seqlens` on the host.

    Returns:
        o (B, T, H, Dv), contiguous, v's dtype, 0 in padding; and the final state (N, H, Dk, Dv), or
        None if it was not asked for. A call that is given it continues this one.

    Differentiable in all floating arguments, which are all that is saved. There is no second
    derivative; `reference.gated_delta_rule` has. Under autocast q, k and v are cast.

    Raises:
        TypeError: wrong dtype, gates or state in half precision, not a plain tensor.
        ValueError: wrong shape, heads that do not divide H, l2norm_eps not above 0, offsets that
            decrease or end behind T; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import gated_delta_rule
        >>> q, k = torch.randn(1, 100, 4, 16), torch.randn(1, 100, 2, 16)
        >>> v, gate = torch.randn(1, 100, 4, 8), torch.randn(1, 100, 4)
        >>> log_decay, beta = torch.nn.functional.logsigmoid(gate + 4), torch.sigmoid(gate)
        >>> o, state = gated_delta_rule(q, k, v, log_decay, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 8]), torch.Size([1, 4, 16, 8]))
    """
    op = "gated_delta_rule"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B T Hq Dk", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    given = DeltaTensors(q, k, v, log_decay, beta, initial_state, cu_seqlens)
    delta_shape(op, given, scale=scale, qk_l2norm=qk_l2norm, l2norm_eps=l2norm_eps)
    with without_autocast(q.device):
        o, state = DELTA_FWD(*given, scale, qk_l2norm, l2norm_eps, backend)
    return o, state if output_final_state else None
