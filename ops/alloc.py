"""Where launchers get their outputs and workspaces, and how tests fill them with garbage.

Every tensor a kernel writes comes from `empty`. Under `poison()` it arrives full of NaN (bytes
0x7F for integers), so an element that a kernel forgets to write cannot pass a comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

_poisoned = 0


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Fill everything `empty` returns with NaN until the block ends."""
    global _poisoned
    _poisoned += 1
    try:
        yield
    finally:
        _poisoned -= 1


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A contiguous uninitialised tensor, or a poisoned one under `poison()`."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if _poisoned and out.numel():
        if dtype.is_floating_point:
            out.fill_(float("nan"))
        else:
            out.view(torch.uint8).fill_(0x7F)
    return out
