r"""The Atlas memory one token at a time, on caches that are changed in place.

With what an `AtlasCache` holds, M and S as they were where the open chunk began, token t makes

    r = φ(k) M − v      (B, U and the decay since the last O go on by its gates)
    where ns_stride divides t: M_t = decay · M_{t−1} + output_step NS(B S − Σ_i φ(k_i)ᵀ U_i R_i)
    y = φ(q) M_t

over the rows i of the chunk and its window, r the last of them. "dot" has −v for r. Source: ATLAS,
arXiv 2505.23735, equations 32, 33, 57 and 58.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import checks
from ..atlas.cache import AtlasCache
from ..atlas.op import AtlasShape
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from ..omega_step.op import StepTensors as OmegaStepTensors
from .op import PACKAGE, STEP, StepTensors, step_shape

__all__ = ["atlas_step_"]


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: AtlasCache,
    slots: torch.Tensor,
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
    fields = OmegaStepTensors._fields[4:]
    memory = OmegaStepTensors._make((q, k, v, slots, *map(rest.get, fields)))
    return step_shape(
        "atlas_step_", StepTensors(memory, output_step), cache, window=window,
        chunk_size=chunk_size, inner_loss=inner_loss, feature_map=feature_map,
        read_before=read_before, ns_stride=ns_stride, ns_steps=ns_steps,
        ns_coefficients=ns_coefficients, ns_eps=ns_eps, concrete=concrete,
    )  # fmt: skip


@explainable(PACKAGE, _plan)
def atlas_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: AtlasCache,
    slots: torch.Tensor,
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
    backend: str = "auto",
) -> torch.Tensor:
    """One token for each of N sequences whose memories lie in slots of a cache, in place.

    Tokens one after another give what one call of `atlas_memory` gives for all of them, and
    `atlas_extend` for pieces. Sequences need not be at the same place of their chunks. Nothing is
    read on the host but on a CPU: elsewhere plain torch runs a Newton–Schulz for every row and
    token, and uses it where there is one.

    Args:
        q, k: (N, H, d), bf16, fp16, fp32 or float64, any strides, of the dtype of the cache's keys.
        v: (N, H, Dv).
        cache: from `atlas_cache`, `AtlasCache.from_state` or `atlas_extend`, of any number of
            slots; written. The rules (window, chunk_size, losses, features, Newton–Schulz) must be
            those of its earlier tokens.
        slots: int64 (N,), the memory of each row, all distinct; −1: the row is skipped, no memory
            changes and its y is 0. Values are checked on the CPU alone.
        step, momentum, output_step, decay: (N, H), fp32 (float64 for float64); as in
            `atlas_memory`.
        window_gates: (N, H, window).
        window, inner_loss, feature_map, coefficients, chunk_size, ns_stride, ns_steps,
            ns_coefficients, ns_eps, read_before: as in `atlas_memory`.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        y (N, H, Dv), contiguous, v's dtype.

    Not differentiable; `atlas_extend` is.

    Raises:
        TypeError: wrong dtype, not a plain tensor, not an `AtlasCache`.
        ValueError: wrong shape, a cache for another window or chunk_size, an expanded tensor in the
            cache, a tensor that requires grad while gradients are recorded; slots that repeat or
            that the cache has not; what `atlas_memory` says of Newton–Schulz; a backend that does
            not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import atlas_cache, atlas_extend, atlas_step_
        >>> rules = {"window": 4, "chunk_size": 16, "ns_stride": 4}
        >>> sizes = {"window": 4, "chunk_size": 16}
        >>> pool = atlas_cache(8, 2, 16, 16, **sizes)  # slots
        >>> gates = dict.fromkeys(("step", "momentum", "output_step"), torch.full((1, 40, 2), 0.1))
        >>> x = torch.randn(3, 1, 40, 2, 16)
        >>> y, prompt = atlas_extend(*x, atlas_cache(1, 2, 16, 16, **sizes), **gates, **rules)
        >>> for mine, new in zip(pool, prompt):  # the prompt's memory goes to slot 5
        ...     mine[5:6] = new
        >>> gates = {name: gate[0, :2] for name, gate in gates.items()}
        >>> token, slots = torch.randn(3, 2, 2, 16), torch.tensor([5, -1])
        >>> y = atlas_step_(*token, pool, slots, **gates, **rules)
        >>> y.shape, bool(y[1].any()), pool.filled.tolist()
        (torch.Size([2, 2, 16]), False, [0, 0, 0, 0, 0, 9, 0, 0])
    """
    op = "atlas_step_"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "N H d", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    memory = OmegaStepTensors(q, k, v, slots, step, decay, window_gates, momentum, coefficients)
    given = StepTensors(memory, output_step)
    shape = step_shape(
        op, given, cache, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before, ns_stride=ns_stride, ns_steps=ns_steps,
        ns_coefficients=ns_coefficients, ns_eps=ns_eps,
    )  # fmt: skip
    with without_autocast(q.device):
        return STEP(
            *memory, output_step, *cache, window, chunk_size, inner_loss, feature_map, read_before,
            shape.ns_stride, shape.ns_numbers, ns_eps, backend,
        )  # fmt: skip
