r"""The Atlas memory: the Omega rule, but what is written is an orthogonalised momentum.

With the gradient G_t of a window of tokens as `omega_memory` takes it at the memory M^ before the
chunk, and t counted from 1 in each sequence,

    S_t = momentum_t S_{t−1} − G_t
    M_t = decay_t M_{t−1} + output_step_t NS(S_t)    where ns_stride divides t
    M_t = decay_t M_{t−1}                            elsewhere
    y_t = φ(q_t) M_t

NS brings all singular values of each head's D × Dv matrix near 1, as `newton_schulz` does: Muon in
the place of gradient descent. It takes the size out of S, so that `step` sets what the tokens of S
weigh against each other, and `output_step` alone how far M moves. Written literally in
`fastweights.reference`; source: ATLAS, arXiv 2505.23735, equations 32, 33, 57 and 58.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from ..omega import OmegaState
from ..omega.op import OmegaTensors, tails
from .op import MEMORY_FWD, PACKAGE, AtlasShape, AtlasTensors, atlas_shape

__all__ = ["atlas_memory"]


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    output_step: torch.Tensor,
    window: int = 1,
    chunk_size: int = 64,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    read_before: bool = False,
    ns_stride: int | None = None,
    ns_steps: int = 5,
    ns_coefficients: str | Sequence[Sequence[float]] = "muon",
    ns_eps: float = 1e-7,
    concrete: bool = False,
    **rest: Any,
) -> AtlasShape:
    memory = OmegaTensors._make((q, k, v, *map(rest.get, OmegaTensors._fields[3:])))
    return atlas_shape(
        "atlas_memory", AtlasTensors(memory, output_step), window=window, chunk_size=chunk_size,
        inner_loss=inner_loss, feature_map=feature_map, read_before=read_before,
        ns_stride=ns_stride, ns_steps=ns_steps, ns_coefficients=ns_coefficients, ns_eps=ns_eps,
        concrete=concrete,
    )  # fmt: skip


@explainable(PACKAGE, _plan)
def atlas_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    step: torch.Tensor,
    momentum: torch.Tensor,
    output_step: torch.Tensor,
    decay: torch.Tensor | None = None,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    chunk_size: int = 64,
    ns_stride: int | None = None,
    ns_steps: int = 5,
    ns_coefficients: str | Sequence[Sequence[float]] = "muon",
    ns_eps: float = 1e-7,
    read_before: bool = False,
    initial_state: torch.Tensor | None = None,
    initial_momentum: torch.Tensor | None = None,
    tail_k: torch.Tensor | None = None,
    tail_v: torch.Tensor | None = None,
    tail_length: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, OmegaState | None]:
    """Write every token into a momentum, its orthogonal factor into a memory, and read that.

    Args:
        q, k, v, step, decay, window_gates, window, inner_loss, feature_map, coefficients,
            chunk_size, read_before, initial_state, initial_momentum, tail_k, tail_v, tail_length,
            return_state, cu_seqlens: as in `omega_memory`.
        momentum: (B, T, H), 0 or more, multiplies S; required.
        output_step: (B, T, H), dtype as the gates, multiplies NS(S_t) at the tokens that have one;
            at others it is not read.
        ns_stride: tokens from one Newton–Schulz to the next, counted in each sequence; a divisor of
            chunk_size, so that chunks and strides begin together. 1: every token, as the paper has
            it. None: chunk_size, with which no token of a chunk reads what the chunk wrote. Tokens
            behind the last whole stride have none: they leave S, and M is read and decays.
        ns_steps, ns_coefficients, ns_eps: as `steps`, `coefficients` and `eps` of `newton_schulz`.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        y (B, T, H, Dv), contiguous, v's dtype; and `OmegaState`, or None if it was not asked for:
        its `momentum` is S after the last token.

    Differentiable in all floating arguments; the arguments are all that is saved. There is no
    second derivative; `reference.atlas_memory` has. A momentum of zeros is written as zeros and has
    the gradient 0. Newton–Schulz runs in fp32 (float64 for float64): of 16-bit inputs it brings
    what rounding leaves in the small singular directions of S to the size of the others.

    Raises:
        TypeError: wrong dtype, gates in half precision, not a plain tensor, window, chunk_size,
            ns_stride or ns_steps not an int.
        ValueError: wrong shape; an ns_stride that does not divide chunk_size; ns_steps below 1,
            ns_eps not above 0, ns_coefficients that are none; what `omega_memory` raises.

    Example:
        >>> import torch
        >>> from fastweights.ops import atlas_memory
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16), dim=-1).unbind(0)
        >>> v, step = torch.randn(1, 100, 2, 8), torch.full((1, 100, 2), 0.2)
        >>> gates = {"step": step, "momentum": 4 * step, "output_step": 0.1 * step}
        >>> y, left = atlas_memory(
        ...     q, k, v, **gates, window=4, chunk_size=16, ns_stride=4, return_state=True
        ... )
        >>> y.shape, left.state.shape, left.momentum.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 16, 8]), torch.Size([1, 2, 16, 8]))
    """
    op = "atlas_memory"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B T H d", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    memory = OmegaTensors(
        q, k, v, step, decay, window_gates, momentum, coefficients, initial_state,
        initial_momentum, tail_k, tail_v, tail_length, cu_seqlens,
    )  # fmt: skip
    given = AtlasTensors(memory, output_step)
    shape = atlas_shape(
        op, given, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before, ns_stride=ns_stride, ns_steps=ns_steps,
        ns_coefficients=ns_coefficients, ns_eps=ns_eps,
    )  # fmt: skip
    with without_autocast(q.device):
        y, state, last = MEMORY_FWD(
            *memory, output_step, window, chunk_size, inner_loss, feature_map, read_before,
            shape.ns_stride, shape.ns_numbers, ns_eps, backend,
        )  # fmt: skip
    if not return_state:
        return y, None
    return y, OmegaState(state, last, *tails(shape, memory))
