r"""Polynomial features, and the memories over them: read and written without ever being expanded.

With coefficients a_r ≥ 0 of degrees r, the kind "symmetric" has for each i₁ ≤ … ≤ i_r a feature

    φ(x)_{i₁…i_r} = √(a_r · r!/Π_j m_j!) · x_{i₁} ⋯ x_{i_r}      m_j: how many of the indices are j

so that ⟨φ(x), φ(y)⟩ = Σ_r a_r (x·y)^r. Of it and of a memory S (D × Dv)

    polynomial_features   φ(x)
    polynomial_read       φ(x) S
    polynomial_update     φ(x)ᵀ G = Σ_t φ(x_t)ᵀ G_t

of which the last two build tiles of φ where they are multiplied. Written literally in
`fastweights.reference`; source: ATLAS, arXiv 2505.23735, equations 5 and 22.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from .op import (
    FEATURES_FWD,
    PACKAGE,
    READ_FWD,
    UPDATE_FWD,
    PolynomialShape,
    arguments,
    shape_of,
)

__all__ = ["polynomial_features", "polynomial_read", "polynomial_update"]


def _plan_features(
    x: torch.Tensor, coefficients: torch.Tensor | None = None, *, degree: int = 2,
    kind: str = "symmetric", tile: int = 8, kept: Sequence[int] | None = None,
    concrete: bool = False, **_: Any,
) -> PolynomialShape:  # fmt: skip
    given = arguments(
        "polynomial_features", x, None, coefficients, degree=degree, kept=kept, kind=kind, tile=tile
    )
    return shape_of("features", given, concrete=concrete)


def _plan_read(
    x: torch.Tensor, state: torch.Tensor, coefficients: torch.Tensor | None = None, *,
    degree: int = 2, kept: Sequence[int] | None = None, concrete: bool = False, **_: Any,
) -> PolynomialShape:  # fmt: skip
    given = arguments("polynomial_read", x, state, coefficients, degree=degree, kept=kept)
    return shape_of("read", given, concrete=concrete)


def _plan_update(
    x: torch.Tensor, g: torch.Tensor, coefficients: torch.Tensor | None = None, *,
    degree: int = 2, kept: Sequence[int] | None = None, concrete: bool = False, **_: Any,
) -> PolynomialShape:  # fmt: skip
    given = arguments("polynomial_update", x, g, coefficients, degree=degree, kept=kept)
    return shape_of("update", given, concrete=concrete)


@explainable(PACKAGE, _plan_features)
def polynomial_features(
    x: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    *,
    degree: int = 2,
    kind: str = "symmetric",
    tile: int = 8,
    kept: Sequence[int] | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Expand the last dimension of x into polynomial features.

    Args:
        x: (..., d), bf16, fp16, fp32 or float64, any strides; (..., H, d) if coefficients are by
            head.
        coefficients: a_0 … a_degree, (degree+1,) or (H, degree+1), fp32 (float64 for float64);
            None: (0, 1, 1/2!, …)/Σ. A zero drops its degree: its features are 0, and its gradient
            is 0 where a root is taken of it. One below zero gives NaN there.
        degree: the highest one, at least 1.
        kind: which features, and D of them:
            "symmetric": as above, degree after degree, the last index fastest; of degree r
                C(d+r−1, r).
            "tiled": the same sum of products up to degree 2, for kernels: x is filled with zeros to
                whole tiles, d' wide, and of two tiles I ≤ J degree 2 has all products
                √(a_2 · (1 if I = J else 2)) x_i x_j; d'(d'+tile)/2.
            "elementwise": Σ_r a_r x^r of each number; D = d.
            "concat": a_r x^r side by side; d of each degree.
        tile: numbers of a tile of "tiled".
        kept: the degrees that have features, increasing. D must not depend on values, so that
            degrees are left out by this alone. None: all but degree 0, whose coefficient then has
            to be 0 (on a CPU that is checked); of "elementwise", which it costs nothing, all.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        (..., D), contiguous, x's dtype.

    Differentiable in x and the coefficients, the arguments are all that is saved. There is no
    second derivative; `reference.polynomial_features` has. Features are formed in fp32 (float64)
    and rounded once. A NaN or an infinity in a row of x may make all features of that row NaN.

    Raises:
        TypeError: wrong dtype, not a plain tensor, degree, tile or kept not of ints.
        ValueError: wrong shape; degree or tile below 1, "tiled" above degree 2, degrees in `kept`
            that do not exist or increase; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import polynomial_features
        >>> x, y = torch.randn(2, 5, 16, dtype=torch.float64).unbind(0)
        >>> a = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
        >>> phi = polynomial_features(x, a)
        >>> kernel = x @ y.T + 0.5 * (x @ y.T) ** 2
        >>> phi.shape, torch.allclose(phi @ polynomial_features(y, a).T, kernel)
        (torch.Size([5, 152]), True)
    """
    op = "polynomial_features"
    backend = requested(op, backend)
    given = arguments(op, x, None, coefficients, degree=degree, kept=kept, kind=kind, tile=tile)
    map_ = given.map
    with without_autocast(x.device):
        return FEATURES_FWD(x, coefficients, map_.kind, map_.degree, map_.kept, map_.tile, backend)


@explainable(PACKAGE, _plan_read)
def polynomial_read(
    x: torch.Tensor,
    state: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    *,
    degree: int = 2,
    kept: Sequence[int] | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Read a memory of symmetric features: φ(x) @ state, without φ in memory.

    Args:
        x: (B, T, H, d), bf16, fp16, fp32 or float64, any strides.
        state: (B, H, D, Dv), fp32 (float64 for float64), also under autocast; its rows are in the
            order of `polynomial_features(kind="symmetric")`.
        coefficients, degree, kept: as in `polynomial_features`.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        (B, T, H, Dv), contiguous, x's dtype. Products are in that dtype and sums in fp32.

    Differentiable in x, state and the coefficients; the arguments are all that is saved. There is
    no second derivative; `reference.polynomial_read` has.

    Raises:
        TypeError, ValueError: as `polynomial_features`, and ValueError for a state that does not
            fit x or has another number of rows than x has features.

    Example:
        >>> import torch
        >>> from fastweights.ops import polynomial_features, polynomial_read
        >>> x, state = torch.randn(1, 10, 2, 8), torch.randn(1, 2, 44, 5)
        >>> out = polynomial_read(x, state)
        >>> phi = polynomial_features(x).transpose(1, 2)
        >>> torch.allclose(out, (phi @ state).transpose(1, 2), atol=1e-5)
        True
    """
    op = "polynomial_read"
    backend = requested(op, backend)
    checks.tensor(op, "x", x, "B T H d", checks.FLOATING)
    (x,) = autocast_operands(x)
    map_ = arguments(op, x, state, coefficients, degree=degree, kept=kept).map
    with without_autocast(x.device):
        return READ_FWD(
            x, state, coefficients, map_.kind, map_.degree, map_.kept, map_.tile, backend
        )


@explainable(PACKAGE, _plan_update)
def polynomial_update(
    x: torch.Tensor,
    g: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    *,
    degree: int = 2,
    kept: Sequence[int] | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """What rows g write into a memory of symmetric features: φ(x)ᵀ @ g, without φ in memory.

    Args:
        x: (B, T, H, d), bf16, fp16, fp32 or float64, any strides.
        g: (B, T, H, Dv) of x's dtype.
        coefficients, degree, kept: as in `polynomial_features`.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        (B, H, D, Dv), contiguous, fp32 (float64 for float64): the sum over all tokens, its rows in
        the order of `polynomial_features(kind="symmetric")`.

    Differentiable in x, g and the coefficients; the arguments are all that is saved. There is no
    second derivative; `reference.polynomial_update` has.

    Raises:
        TypeError, ValueError: as `polynomial_features`, and both for a g that does not fit x.

    Example:
        >>> import torch
        >>> from fastweights.ops import polynomial_features, polynomial_update
        >>> x, g = torch.randn(1, 10, 2, 8), torch.randn(1, 10, 2, 5)
        >>> phi = polynomial_features(x).transpose(1, 2)
        >>> torch.allclose(polynomial_update(x, g), phi.mT @ g.transpose(1, 2), atol=1e-5)
        True
    """
    op = "polynomial_update"
    backend = requested(op, backend)
    checks.tensor(op, "x", x, "B T H d", checks.FLOATING)
    checks.tensor(op, "g", g, "B T H Dv", checks.FLOATING)
    x, g = autocast_operands(x, g)
    map_ = arguments(op, x, g, coefficients, degree=degree, kept=kept).map
    with without_autocast(x.device):
        return UPDATE_FWD(x, g, coefficients, map_.kind, map_.degree, map_.kept, map_.tile, backend)
