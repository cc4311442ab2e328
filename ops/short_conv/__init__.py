r"""The causal depthwise convolution of up to four taps, with the gates around it.

Of each channel, and with z = 0 in front of a sequence without an initial state,

    z_t = gate_in_t · x_t
    p_t = Σ_j weight_j z_{t−K+1+j} + bias                     weight_{K−1} is the present token's
    y_t = gate_out_t · (act(p_t) + z_t)                       z_t with `residual` alone

LFM2's operator is both gates and no activation, [gate_in | gate_out | x] in the order of its
projection; a Canon layer is the residual alone. Written literally in `fastweights.reference`;
source: LFM2, arXiv 2511.23404; Canon layers, arXiv 2512.17351.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import explainable, requested, without_autocast
from .op import CONV_FWD, PACKAGE, ConvShape, ConvTensors, conv_shape

__all__ = ["short_conv"]


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    concrete: bool = False,
    **rest: Any,
) -> ConvShape:
    given = ConvTensors._make((x, weight, *map(rest.get, ConvTensors._fields[2:])))
    return conv_shape("short_conv", given, activation=activation, residual=residual)


@explainable(PACKAGE, _plan)
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gate_in: torch.Tensor | None = None,
    gate_out: torch.Tensor | None = None,
    activation: str | None = None,
    residual: bool = False,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve each channel with its K last tokens, and gate what goes in and comes out.

    Args:
        x: (B, T, D), bf16, fp16, fp32 or float64, any strides; T = 0 is allowed.
        weight: (D, K), K from 1 to 4, any floating dtype, read as fp32 (float64 if x is float64).
            `weight[:, K - 1]` is multiplied with the present token.
        bias: (D,), any floating dtype.
        gate_in, gate_out: (B, T, D), dtype as x.
        activation: None or "silu", of the sum with bias.
        residual: add z to what the activation gives.
        initial_state: (N, K − 1, D), fp32 (float64 for float64), the z of the tokens before, oldest
            first. N is B, or the number of packed sequences. None: zeros.
        output_final_state: return the same of the last tokens.
        cu_seqlens: int32 (N + 1,), starts of sequences that lie one behind the other along T of a
            batch of 1; tokens after the last one are padding.
        backend: "auto", "eager", "triton" or "cuda". Triton is fast where rows lie at multiples of
            16 bytes; a tensor whose last dimension is strided is copied.

    Returns:
        y (B, T, D), contiguous, x's dtype, 0 in padding; and the final state (N, K − 1, D), or None
        if it was not asked for. A call that is given it continues this one.

    Differentiable in all floating arguments, which are all that is saved. There is no second
    derivative; `reference.short_conv` has. Sums are in fp32 (float64 for float64). Autocast changes
    nothing: there is no product of matrices.

    Raises:
        TypeError: wrong dtype, not a plain tensor.
        ValueError: wrong shape, K above 4, an activation that is none, offsets that decrease or
            end behind T; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import short_conv
        >>> gate_in, gate_out, x = torch.randn(1, 10, 3 * 8).chunk(3, -1)
        >>> y, state = short_conv(
        ...     x, torch.randn(8, 3), gate_in=gate_in, gate_out=gate_out, output_final_state=True
        ... )
        >>> y.shape, torch.equal(state, (gate_in * x)[:, -2:])
        (torch.Size([1, 10, 8]), True)
    """
    backend = requested("short_conv", backend)
    given = ConvTensors(x, weight, bias, gate_in, gate_out, initial_state, cu_seqlens)
    conv_shape("short_conv", given, activation=activation, residual=residual)
    with without_autocast(x.device):
        y, state = CONV_FWD(*given, activation or "none", residual, backend)
    return y, state if output_final_state else None
