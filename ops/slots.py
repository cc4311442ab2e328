"""Rows of a pool in plain torch: read from their slots, and put back without a look at the host."""

from __future__ import annotations

import torch
from torch import Tensor


def read(pool: Tensor, slots: Tensor) -> Tensor:
    """What the slots hold, (N, …); anything where a row is skipped (−1). The pool is not empty."""
    return pool[slots.clamp(min=0).long()]


def write(pool: Tensor, slots: Tensor, before: Tensor, after: Tensor) -> None:
    """Put `after` (N, …), N > 0, in the place of `before`, but where a row is skipped (−1).

    A skipped row writes what a live one writes, the same bits to the same place: which rows to
    leave out is not known on the host. Without any live row, a slot gets what it holds.
    """
    live = slots >= 0
    row = torch.arange(len(slots), device=slots.device)
    writer = torch.where(live, row, live.long().argmax())
    live = live.view(-1, *[1] * (pool.ndim - 1))
    place = slots.clamp(min=0).long()[writer]
    pool.index_copy_(0, place, torch.where(live, after, before)[writer])
