"""Matrices with a spectrum of choice, and the everyday 16-bit iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastweights import reference
from fastweights.reference.newton_schulz import SETS

from . import inputs

SHAPES = ((1, 9), (9, 1), (8, 8), (33, 65), (65, 33), (48, 96), (200, 200))
LEADING = ((), (3,), (2, 3), (0,), (2, 0))


def singular_values(kind: str, count: int) -> torch.Tensor:
    """Float64 (count,): "condition" falls from 1 to 1e-3, "deficient" is half ones, half zeros."""
    if kind == "condition":
        return torch.logspace(0, -3, count, dtype=torch.float64)
    assert kind == "deficient", kind
    return (torch.arange(count) < (count + 1) // 2).double()


@dataclass(frozen=True)
class Case:
    """A stack of matrices of one size; `kind` "normal", "condition" or "deficient"."""

    rows: int = 33
    cols: int = 65
    leading: tuple[int, ...] = (2,)
    kind: str = "normal"
    strided: bool = True

    @property
    def name(self) -> str:
        """A readable test id."""
        front = "".join(f"{n}x" for n in self.leading)
        return f"{front}{self.rows}x{self.cols}-{self.kind}"

    def but(self, **changes: Any) -> Case:
        """The same case with some fields replaced."""
        return replace(self, **changes)

    def matrices(self, seed: int, device: torch.device) -> torch.Tensor:
        """Float64 (..., rows, cols), contiguous."""
        # Not the seed itself: upstream gradients are drawn from that, and would equal x.
        source = inputs.generator(seed + 100, device)
        size = (*self.leading, self.rows, self.cols)
        x = torch.randn(size, generator=source, dtype=torch.float64, device=device)
        if self.kind == "normal":
            return x
        u, _, vt = torch.linalg.svd(x, full_matrices=False)
        return u * singular_values(self.kind, min(self.rows, self.cols)).to(device) @ vt

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `newton_schulz`: a view with NaN around it, if `strided`."""
        x = self.matrices(seed, device).to(dtype)
        return {"x": inputs.embed(x) if self.strided else x}

    def gram_arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `gram_newton_schulz_factor`: the smaller Gram matrix."""
        x = self.matrices(seed, device)
        gram = (x @ x.mT if self.rows < self.cols else x.mT @ x).to(dtype)
        return {"gram": inputs.embed(gram) if self.strided else gram}


def orthogonal(n: int, seed: int = 0) -> torch.Tensor:
    """A random orthogonal matrix, float64."""
    source = inputs.generator(seed, torch.device("cpu"))
    return torch.linalg.qr(torch.randn(n, n, generator=source, dtype=torch.float64))[0]


def scheduled(coefficients: str | Sequence[Sequence[float]], steps: int) -> list[Sequence[float]]:
    """The triple of each step; a named set may be cut short here."""
    triples = SETS[coefficients] if isinstance(coefficients, str) else coefficients
    return [triples[min(j, len(triples) - 1)] for j in range(steps)]


def everyday(compute: torch.dtype) -> Callable[..., torch.Tensor]:
    """Plain torch whose iterates are in `compute`; the reference for float64, which is the truth.

    The reference keeps its iterates in fp32 and rounds operands of products alone. Where singular
    values lie at the rounding of fp16, no iterate that is stored in fp16 gets as close as that.
    """

    def run(
        x: torch.Tensor, *, steps: int = 5, coefficients: Any = "muon", eps: float = 1e-7
    ) -> torch.Tensor:
        if x.dtype == torch.float64:
            return reference.newton_schulz(x, steps=steps, coefficients=coefficients, eps=eps)
        wide = x.float()
        iterate = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + eps)).to(compute)
        tall = x.shape[-2] > x.shape[-1]
        iterate = iterate.mT if tall else iterate
        for a, b, c in scheduled(coefficients, steps):
            gram = iterate @ iterate.mT
            iterate = a * iterate + (b * gram + c * (gram @ gram)) @ iterate
        return (iterate.mT if tall else iterate).to(x.dtype)

    return run
