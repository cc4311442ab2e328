"""A step in plain torch: any device and dtype, in fp32 (float64 for float64).

The memories of a call are copied out of their slots, take the token as `omega_extend` would, and
are copied back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import slots
from ..omega.cache import OmegaCache
from ..omega.extend import advance
from ..omega.op import OmegaShape, OmegaTensors
from .op import StepTensors

SPACE_FWD = SPACE_BWD = None


def supports(shape: OmegaShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: OmegaShape, given: StepTensors, cache: OmegaCache) -> Tensor:
    """y (N, H, Dv) in v's dtype; the cache is written."""

    def join(before: OmegaCache, count: Tensor) -> tuple[Tensor, OmegaCache]:
        return advance(shape, one_token(given), before, count)

    return in_slots(given, cache, join)


def in_slots(
    given: StepTensors, cache: Any, join: Callable[[Any, Tensor], tuple[Tensor, Any]]
) -> Tensor:
    """y (N, H, Dv) in v's dtype of a token that joins the memories in its slots, which are written.

    `join`: of what the slots hold and of a count of 0 or 1, reads (N, 1, H, Dv) and what is then.
    """
    y = given.v.new_zeros(given.v.shape)
    if given.v.shape[0] == 0 or cache.state.shape[0] == 0:
        return y
    live = given.slots >= 0
    held = cache._make(None if x is None else slots.read(x, given.slots) for x in cache)
    read, after = join(held, live.long())
    for x, before, new in zip(cache, held, after, strict=True):
        if x is not None and new is not None:
            slots.write(x, given.slots, before, new)
    return torch.where(live[:, None, None], read[:, 0].to(y.dtype), y)


def one_token(given: StepTensors) -> OmegaTensors:
    """Sequences of one token each."""
    rows = (
        given.q, given.k, given.v, given.step, given.decay, given.window_gates, given.momentum
    )  # fmt: skip
    tokens = [None if x is None else x[:, None] for x in rows]
    return OmegaTensors._make((*tokens, given.coefficients, *[None] * 6))
