r"""The short convolution one token at a time, on states that are changed in place.

Of each channel, and with z_{t−1} … z_{t−K+1} the state in a row's slot,

    z = gate_in · x
    y = gate_out · (act(Σ_j weight_j z_{t−K+1+j} + bias) + z)    the last z with `residual` alone

and the state moves on by one: its oldest row falls out, z comes last. As `short_conv`, of which
this is one token.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import explainable, requested, without_autocast
from ..short_conv.op import ConvShape
from .op import PACKAGE, STEP, StepTensors, step_shape

__all__ = ["short_conv_step_"]


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    concrete: bool = False,
    **rest: Any,
) -> ConvShape:
    given = StepTensors._make(
        (x, weight, state_pool, slots, *map(rest.get, StepTensors._fields[4:]))
    )
    return step_shape("short_conv_step_", given, activation=activation, residual=residual)


@explainable(PACKAGE, _plan)
def short_conv_step_(
    x: torch.Tensor,
    weight: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gate_in: torch.Tensor | None = None,
    gate_out: torch.Tensor | None = None,
    activation: str | None = None,
    residual: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """One token for each of B sequences whose states lie in slots of a pool, in place.

    Tokens one after another give what one call of `short_conv` gives for all of them. Nothing is
    read on the host, so that a step can be captured in a CUDA graph.

    Args:
        x: (B, D), bf16, fp16, fp32 or float64, any strides.
        weight, bias, activation, residual: as in `short_conv`.
        state_pool: (S, K − 1, D), fp32 (float64 for float64), of any number of slots; written. A
            sequence's first state is zeros, or the final state of `short_conv`.
        slots: int64 (B,), the state of each row, all distinct; −1: the row is skipped, no state
            changes and its y is 0. Values are checked on the CPU alone.
        gate_in, gate_out: (B, D), dtype as x.
        backend: "auto", "eager", "triton" or "cuda". Triton is fast where rows lie at multiples of
            16 bytes; a pool whose last dimension is strided is copied, and copied back.

    Returns:
        y (B, D), contiguous, x's dtype.

    Not differentiable; `short_conv` is.

    Raises:
        TypeError: wrong dtype, not a plain tensor.
        ValueError: wrong shape, K above 4, an expanded pool, a tensor that requires grad while
            gradients are recorded; slots that repeat or that the pool has not; a backend that does
            not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import short_conv, short_conv_step_
        >>> weight, prompt, pool = torch.randn(8, 3), torch.randn(1, 5, 8), torch.zeros(4, 2, 8)
        >>> _, state = short_conv(prompt, weight, residual=True, output_final_state=True)
        >>> pool[2] = state[0]
        >>> token, slots = torch.randn(2, 8), torch.tensor([2, -1])
        >>> y = short_conv_step_(token, weight, pool, slots, residual=True)
        >>> torch.equal(pool[2, 1], token[0]), bool(y[1].any())
        (True, False)
    """
    backend = requested("short_conv_step_", backend)
    given = StepTensors(x, weight, state_pool, slots, bias, gate_in, gate_out)
    step_shape("short_conv_step_", given, activation=activation, residual=residual)
    with without_autocast(x.device):
        return STEP(*given, activation or "none", residual, backend)
