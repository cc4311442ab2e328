r"""The gated delta rule one token at a time, on memories that are changed in place, or not.

Of each head, with q and k divided by max(‖·‖, l2norm_eps) if `qk_l2norm`,

    S^ = exp(log_decay) S      S = S^ + kᵀ beta (v − k S^)      o = scale · q S

as `gated_delta_rule`, of which this is one token. `gated_delta_step_` writes the memories in slots
of a pool, `gated_delta_step` returns new ones and is differentiable.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from ..gated_delta.op import DELTA_FWD, DeltaShape
from ..gated_delta.op import PACKAGE as RULE
from .op import PACKAGE, STEP, StepTensors, one_token, step_shape

__all__ = ["gated_delta_step", "gated_delta_step_"]


def _plan_functional(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float = 1.0,
    qk_l2norm: bool = True,
    l2norm_eps: float = 1e-12,
    concrete: bool = False,
    **rest: Any,
) -> DeltaShape:
    given = StepTensors(q, k, v, log_decay, beta, state, None)
    return step_shape(
        "gated_delta_step", given, scale=scale, qk_l2norm=qk_l2norm, l2norm_eps=l2norm_eps
    )


@explainable(RULE, _plan_functional)
def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float = 1.0,
    qk_l2norm: bool = True,
    l2norm_eps: float = 1e-12,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of B sequences: what is read, and the memories after it.

    Args:
        q, k, v, log_decay, beta: as in `gated_delta_rule` without T: (B, Hq, Dk), (B, Hk, Dk),
            (B, Hv, Dv) and (B, H).
        state: (B, H, Dk, Dv), fp32 (float64 for float64), may be expanded.
        scale, qk_l2norm, l2norm_eps: as in `gated_delta_rule`.
        backend: "auto", "eager", "triton" or "cuda", of `gated_delta_rule`, which runs it.

    Returns:
        o (B, H, Dv), contiguous, v's dtype, and the new state, of the shape of `state`.

    Differentiable in all tensors, once, as `gated_delta_rule` is.

    Raises:
        TypeError: wrong dtype, gates or state in half precision, not a plain tensor.
        ValueError: wrong shape, heads that do not divide H, l2norm_eps not above 0; a backend that
            does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import gated_delta_step
        >>> x, state = torch.randn(3, 2, 4, 8), torch.zeros(2, 4, 8, 8)
        >>> o, state = gated_delta_step(*x, torch.zeros(2, 4), torch.ones(2, 4), state)
        >>> o.shape, state.shape
        (torch.Size([2, 4, 8]), torch.Size([2, 4, 8, 8]))
    """
    op = "gated_delta_step"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B Hq Dk", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    given = StepTensors(q, k, v, log_decay, beta, state, None)
    step_shape(op, given, scale=scale, qk_l2norm=qk_l2norm, l2norm_eps=l2norm_eps)
    with without_autocast(q.device):
        o, after = DELTA_FWD(*one_token(given, state), scale, qk_l2norm, l2norm_eps, backend)
    return o[:, 0], after


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float = 1.0,
    qk_l2norm: bool = True,
    l2norm_eps: float = 1e-12,
    concrete: bool = False,
    **rest: Any,
) -> DeltaShape:
    given = StepTensors(q, k, v, log_decay, beta, state_pool, slots)
    return step_shape(
        "gated_delta_step_", given, scale=scale, qk_l2norm=qk_l2norm, l2norm_eps=l2norm_eps
    )


@explainable(PACKAGE, _plan)
def gated_delta_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float = 1.0,
    qk_l2norm: bool = True,
    l2norm_eps: float = 1e-12,
    backend: str = "auto",
) -> torch.Tensor:
    """One token for each of B sequences whose memories lie in slots of a pool, in place.

    Tokens one after another give what one call of `gated_delta_rule` gives for all of them. Nothing
    is read on the host, so that a step can be captured in a CUDA graph.

    Args:
        q, k, v, log_decay, beta: as in `gated_delta_rule` without T: (B, Hq, Dk), (B, Hk, Dk),
            (B, Hv, Dv) and (B, H).
        state_pool: (S, H, Dk, Dv), fp32 (float64 for float64), of any number of slots; written. A
            sequence's first memory is zeros, or the final state of `gated_delta_rule`.
        slots: int64 or int32 (B,), the memory of each row, all distinct; −1: the row is skipped, no
            memory changes and its o is 0. Values are checked on the CPU alone.
        scale, qk_l2norm, l2norm_eps: as in `gated_delta_rule`.
        backend: "auto", "eager", "triton" or "cuda". Triton takes Dk up to 256, and is fast where
            memories lie at multiples of 16 bytes; a pool whose last dimension is strided is copied,
            and copied back.

    Returns:
        o (B, H, Dv), contiguous, v's dtype.

    Not differentiable; `gated_delta_step` is.

    Raises:
        TypeError: wrong dtype, gates or pool in half precision, not a plain tensor.
        ValueError: wrong shape, heads that do not divide H, l2norm_eps not above 0, an expanded
            pool, a tensor that requires grad while gradients are recorded; slots that repeat or
            that the pool has not; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import gated_delta_rule, gated_delta_step_
        >>> pool, gates = torch.zeros(8, 4, 16, 16), (torch.zeros(1, 10, 4), torch.ones(1, 10, 4))
        >>> prompt = torch.randn(3, 1, 10, 4, 16)
        >>> _, state = gated_delta_rule(*prompt, *gates, output_final_state=True)
        >>> pool[5] = state[0]
        >>> token, gates = torch.randn(3, 2, 4, 16), (torch.zeros(2, 4), torch.ones(2, 4))
        >>> o = gated_delta_step_(*token, *gates, pool, torch.tensor([5, -1]))
        >>> o.shape, bool(o[1].any()), torch.equal(pool[5], state[0])
        (torch.Size([2, 4, 16]), False, False)
    """
    op = "gated_delta_step_"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B Hq Dk", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    given = StepTensors(q, k, v, log_decay, beta, state_pool, slots)
    step_shape(op, given, scale=scale, qk_l2norm=qk_l2norm, l2norm_eps=l2norm_eps)
    with without_autocast(q.device):
        return STEP(*given, scale, qk_l2norm, l2norm_eps, backend)
