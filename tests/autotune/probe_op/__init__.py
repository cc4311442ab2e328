"""An op without kernels, for the tests of sweeps: its configs take the time and make the mistakes
that they name. `double(x)` is 2x and has a backward; `count_(state, x)` adds x into `state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastweights.ops import dispatch


@dataclass(frozen=True)
class Shape:
    """What backends and spaces see."""

    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device
    in_place: bool = False


def _plan(x: torch.Tensor, state: torch.Tensor | None = None, **_: Any) -> Shape:
    return Shape(*x.shape, x.dtype, x.device, state is not None)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backend: str) -> torch.Tensor:
        ctx.backend = backend
        shape = _plan(x)
        return dispatch.resolve(__name__, shape, backend).fwd(shape, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shape = _plan(grad)
        return dispatch.resolve(__name__, shape, ctx.backend).bwd(shape, grad), None


@dispatch.explainable(__name__, _plan)
def double(x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """2x."""
    return _Double.apply(x, dispatch.requested("double", backend))


@dispatch.explainable(__name__, _plan)
def count_(state: torch.Tensor, x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Adds x into state, and returns 2x."""
    shape = _plan(x, state)
    return dispatch.resolve(__name__, shape, backend).count(shape, state, x)
