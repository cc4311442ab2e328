r"""The Omega rule one token at a time, on caches that are changed in place.

With what an `OmegaCache` holds, M and S as they were where the open chunk began, token t makes

    r = φ(k) M − v      (A, a, B, P, U go on by its gates)
    y = A φ(q) M + a φ(q) S − Σ_i P_i ⟨φ(q), φ(k_i)⟩ R_i

over the rows i of the chunk and its window, r the last of them. M is read once for each token and
written once in chunk_size tokens, when a token finds its chunk full. "dot" has −v for r. Source:
ATLAS, arXiv 2505.23735, equations 8 to 16.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from ..omega.cache import OmegaCache
from ..omega.op import OmegaShape
from .op import PACKAGE, STEP, StepTensors, step_shape

__all__ = ["omega_step_"]


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: OmegaCache,
    slots: torch.Tensor,
    *,
    window: int = 1,
    chunk_size: int = 64,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    read_before: bool = False,
    concrete: bool = False,
    **rest: Any,
) -> OmegaShape:
    given = StepTensors._make((q, k, v, slots, *map(rest.get, StepTensors._fields[4:])))
    return step_shape(
        "omega_step_", given, cache, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before, concrete=concrete,
    )  # fmt: skip


@explainable(PACKAGE, _plan)
def omega_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: OmegaCache,
    slots: torch.Tensor,
    *,
    step: torch.Tensor,
    decay: torch.Tensor | None = None,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    momentum: torch.Tensor | None = None,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    chunk_size: int = 64,
    read_before: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """One token for each of N sequences whose memories lie in slots of a cache, in place.

    Tokens one after another give what one call of `omega_memory` gives for all of them, and
    `omega_extend` for pieces. Sequences need not be at the same place of their chunks. Nothing is
    read on the host, so that a step can be captured in a CUDA graph.

    Args:
        q, k: (N, H, d), bf16, fp16, fp32 or float64, any strides, of the dtype of the cache's keys.
        v: (N, H, Dv).
        cache: from `omega_cache`, `OmegaCache.from_state` or `omega_extend`, of any number of
            slots; written. The rules (window, chunk_size, losses, features) must be those of its
            earlier tokens.
        slots: int64 (N,), the memory of each row, all distinct; −1: the row is skipped, no memory
            changes and its y is 0. Values are checked on the CPU alone.
        step, decay, momentum: (N, H), fp32 (float64 for float64); as in `omega_memory`. momentum
            if and only if the cache has it.
        window_gates: (N, H, window).
        window, inner_loss, feature_map, coefficients, chunk_size, read_before: as in
            `omega_memory`.
        backend: "auto", "eager", "triton" or "cuda". Triton takes d and Dv up to 256, chunks below
            65,536, and is fast where rows are multiples of 16 bytes; fields of the cache whose last
            dimension is strided are copied, and copied back. The map "symmetric" runs on eager.

    Returns:
        y (N, H, Dv), contiguous, v's dtype.

    Not differentiable; `omega_extend` is.

    Raises:
        TypeError: wrong dtype, not a plain tensor, not an `OmegaCache`.
        ValueError: wrong shape, a cache for another window, chunk_size or for no momentum, an
            expanded tensor in the cache, a tensor that requires grad while gradients are recorded;
            slots that repeat or that the cache has not; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import omega_cache, omega_extend, omega_step_
        >>> rules = {"window": 4, "chunk_size": 16}
        >>> pool = omega_cache(8, 2, 16, 16, **rules)  # slots
        >>> x, step = torch.randn(3, 1, 40, 2, 16), torch.full((1, 40, 2), 0.1)
        >>> y, prompt = omega_extend(*x, omega_cache(1, 2, 16, 16, **rules), step=step, **rules)
        >>> for mine, new in zip(pool, prompt):  # the prompt's memory goes to slot 5
        ...     if mine is not None:
        ...         mine[5:6] = new
        >>> token, gate, slots = torch.randn(3, 2, 2, 16), torch.full((2, 2), 0.1), [5, -1]
        >>> y = omega_step_(*token, pool, torch.tensor(slots), step=gate, **rules)
        >>> y.shape, bool(y[1].any()), pool.filled.tolist()
        (torch.Size([2, 2, 16]), False, [0, 0, 0, 0, 0, 9, 0, 0])
    """
    op = "omega_step_"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "N H d", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    given = StepTensors(q, k, v, slots, step, decay, window_gates, momentum, coefficients)
    step_shape(
        op, given, cache, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before,
    )  # fmt: skip
    with without_autocast(q.device):
        return STEP(
            *given, *cache, window, chunk_size, inner_loss, feature_map, read_before, backend
        )
