"""The Atlas memory, literally: the Omega rule, but what is written is an orthogonalised momentum.

Formulas, arguments and results are those of `fastweights.ops.atlas_memory`. With the G_t of
`omega_memory`, and t counted from 1 in each sequence,

    S_t = momentum_t S_{t−1} − G_t
    M_t = decay_t M_{t−1} + output_step_t NS(S_t)    where ns_stride divides t
    M_t = decay_t M_{t−1}                            elsewhere
    y_t = φ(q_t) M_t

NS is `newton_schulz` of each head's matrix, in fp32 (float64 for float64 inputs). Source: ATLAS,
arXiv 2505.23735, equations 32, 33, 57 and 58, with the signs of the last two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .newton_schulz import newton_schulz
from .omega import OmegaState, omega_memory


def atlas_memory(
    q: Tensor, k: Tensor, v: Tensor, *, step: Tensor, momentum: Tensor, output_step: Tensor,
    decay: Tensor | None = None, window_gates: Tensor | None = None, window: int = 1,
    inner_loss: str = "squared", feature_map: str = "identity", coefficients: Tensor | None = None,
    chunk_size: int = 64, ns_stride: int | None = None, ns_steps: int = 5,
    ns_coefficients: str | Sequence[Sequence[float]] = "muon", ns_eps: float = 1e-7,
    read_before: bool = False, initial_state: Tensor | None = None,
    initial_momentum: Tensor | None = None, tail_k: Tensor | None = None,
    tail_v: Tensor | None = None, tail_length: Tensor | None = None, return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, OmegaState | None]:  # fmt: skip
    """As `fastweights.ops.atlas_memory`."""
    stride = chunk_size if ns_stride is None else ns_stride

    def write(row: int, begin: int, t: int, velocity: Tensor) -> Tensor:
        if (t + 1) % stride:
            return torch.zeros_like(velocity)
        orthogonal = newton_schulz(
            velocity, steps=ns_steps, coefficients=ns_coefficients, eps=ns_eps
        )
        return output_step[row, begin + t, :, None, None].to(velocity.dtype) * orthogonal

    return omega_memory(
        q, k, v, step=step, decay=decay, window_gates=window_gates, window=window,
        momentum=momentum, inner_loss=inner_loss, feature_map=feature_map,
        coefficients=coefficients, chunk_size=chunk_size, read_before=read_before,
        initial_state=initial_state, initial_momentum=initial_momentum, tail_k=tail_k,
        tail_v=tail_v, tail_length=tail_length, return_state=return_state, cu_seqlens=cu_seqlens,
        write=write,
    )  # fmt: skip
