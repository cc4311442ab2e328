"""Polynomial features one by one, and what a memory over them is read and written with.

    symmetric      ⟨φ(x), φ(y)⟩ = Σ_r a_r (x·y)^r: of degree r a feature for each i₁ ≤ … ≤ i_r,
                   √(a_r r!/Π_j m_j!) x_{i₁} ⋯ x_{i_r}, m_j = how many of the indices are j
    tiled          the same sum up to degree 2: x cut into tiles, and of two tiles I ≤ J all
                   products x_i x_j · √(a₂ · (1 if I = J else 2))
    elementwise    Σ_r a_r x^r of each number
    concat         a_r x^r side by side

Features are formed in fp32 (float64 for float64 inputs) and rounded once, products run in the dtype
of x: the "plain torch" that kernels are measured by. Source: ATLAS, arXiv 2505.23735, equations 5
and 22; the weights make the features' products the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import factorial, prod

import torch
from torch import Tensor


def polynomial_features(
    x: Tensor, coefficients: Tensor | None = None, *, degree: int = 2, kind: str = "symmetric",
    tile: int = 8, kept: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """As `fastweights.ops.polynomial_features`."""
    wide = x if x.dtype == torch.float64 else x.float()
    if coefficients is None:
        numbers = [0.0] + [1 / factorial(r) for r in range(1, degree + 1)]
        coefficients = wide.new_tensor([number / sum(numbers) for number in numbers])
    a = coefficients.to(wide.dtype)
    if kept is None:
        kept = range(0 if kind == "elementwise" else 1, degree + 1)
    if kind in ("elementwise", "concat"):
        parts = [a[..., r, None] * wide**r for r in kept]
        out = sum(parts, torch.zeros_like(wide)) if kind == "elementwise" else torch.cat(parts, -1)
        return out.to(x.dtype)
    if kind == "tiled":
        wide = torch.cat((wide, wide.new_zeros(*x.shape[:-1], -x.shape[-1] % tile)), -1)
    elif kind != "symmetric":
        raise ValueError(f"kind must be symmetric, tiled, elementwise or concat, got {kind!r}")
    columns = []
    for r in kept:
        indices = _multisets(0, wide.shape[-1], r)
        if kind == "tiled" and r == 2:
            indices = _tile_pairs(wide.shape[-1], tile)
        for chosen in indices:
            product = torch.ones_like(wide[..., 0])
            for i in chosen:
                product = product * wide[..., i]
            if kind == "tiled":
                weight = 1 if len({i // tile for i in chosen}) < 2 else 2
            else:
                weight = factorial(r) // prod(factorial(chosen.count(i)) for i in set(chosen))
            columns.append(_root(a[..., r] * weight) * product)
    return torch.stack(columns, -1).to(x.dtype)


def _multisets(first: int, width: int, r: int) -> Iterator[tuple[int, ...]]:
    """All first ≤ i₁ ≤ … ≤ i_r < width, the last index fastest."""
    if r == 0:
        yield ()
        return
    for i in range(first, width):
        for rest in _multisets(i, width, r - 1):
            yield (i, *rest)


def _tile_pairs(width: int, tile: int) -> Iterator[tuple[int, int]]:
    """All (i, j) of each two tiles I ≤ J."""
    for left in range(0, width, tile):
        for right in range(left, width, tile):
            for i in range(left, left + tile):
                for j in range(right, right + tile):
                    yield i, j


def _root(a: Tensor) -> Tensor:
    """√a; a zero drops its degree and has the gradient 0, where the root has none."""
    zero = a == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, a).sqrt())


def polynomial_read(
    x: Tensor, state: Tensor, coefficients: Tensor | None = None, *, degree: int = 2,
    kept: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """As `fastweights.ops.polynomial_read`."""
    phi = polynomial_features(x, coefficients, degree=degree, kept=kept).transpose(1, 2)
    return (phi @ state.to(x.dtype)).transpose(1, 2)


def polynomial_update(
    x: Tensor, g: Tensor, coefficients: Tensor | None = None, *, degree: int = 2,
    kept: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """As `fastweights.ops.polynomial_update`."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    phi = polynomial_features(x, coefficients, degree=degree, kept=kept).transpose(1, 2)
    return (phi.mT @ g.transpose(1, 2)).to(acc)
