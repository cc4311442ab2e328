r"""Newton–Schulz orthogonalisation: the polar factor of a matrix by products alone.

With the rows the shorter side (else on the transpose) and (a, b, c) the coefficients of each step,

    X = S / (‖S‖_F + eps)
    steps times:   A = X Xᵀ    X ← a X + (b A + c A²) X

sends each singular value x to a·x + b·x³ + c·x⁵ and leaves the singular vectors: X nears U Vᵀ of
S = U Σ Vᵀ. The same from the Gram matrix G = SᵀS alone, a symmetric factor Q with NS(S) = S Q:

    ν = √(tr G) + eps    R = G/ν²    Q = I
    steps times:   Z = a I + b R + c R²    Q ← Q Z    R ← Z R Z;    finally Q ← Q/ν

Coefficient sets and their sources are in `coefficients.py`; `fastweights.reference` holds both
functions literally. K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from .op import (
    FACTOR_FWD,
    MATRIX_FWD,
    PACKAGE,
    NewtonSchulzShape,
    factor_shape,
    newton_schulz_shape,
)

__all__ = ["gram_newton_schulz_factor", "newton_schulz"]

Coefficients = str | Sequence[Sequence[float]]


def _plan_matrix(
    x: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "muon",
    eps: float = 1e-7,
    compute_dtype: torch.dtype | None = None,
    concrete: bool = False,
    **_: Any,
) -> NewtonSchulzShape:
    return newton_schulz_shape(
        "newton_schulz", x, steps, coefficients, eps, compute_dtype, concrete
    )


def _plan_factor(
    gram: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "muon",
    eps: float = 1e-7,
    compute_dtype: torch.dtype | None = None,
    concrete: bool = False,
    **_: Any,
) -> NewtonSchulzShape:
    return factor_shape(
        "gram_newton_schulz_factor", gram, steps, coefficients, eps, compute_dtype, concrete
    )


@explainable(PACKAGE, _plan_matrix)
def newton_schulz(
    x: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "muon",
    eps: float = 1e-7,
    compute_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Orthogonalise each matrix of a stack: all of its singular values are brought near 1.

    Args:
        x: (..., m, n), bf16, fp16, fp32 or float64, any strides, any leading dimensions.
        steps: of the iteration, at least 1.
        coefficients: "muon", "modded_nanogpt", "polar_express" (safety scale 1.01),
            "polar_express_1.05", or a sequence of at most `steps` triples (a, b, c), the last of
            which repeats. A named set of five triples needs at least five steps, too.
        eps: added to the Frobenius norm. The result does not depend on the scale of x where
            ‖x‖ is far above it.
        compute_dtype: of the iterates. None: fp16 for 16-bit x, fp32 for fp32, float64 for
            float64. fp32 and 16-bit x may ask for fp16 or fp32. Products accumulate in fp32
            (float64), and so is the norm, whose square must not overflow there.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        (..., m, n), contiguous, x's dtype.

    Differentiable in x, through the normalisation too; x is all that is saved. There is no second
    derivative; `reference.newton_schulz` has. A zero matrix gives zeros and has gradient zero.
    Under autocast x is cast as a matmul operand is, unless `compute_dtype` was asked for.

    Raises:
        TypeError: wrong dtype of x or of the iterates, not a plain tensor, `steps` not an int.
        ValueError: fewer than two dimensions, `steps` < 1, `eps` ≤ 0, unknown, malformed or too
            many coefficients; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import newton_schulz
        >>> x = torch.randn(3, 16, 48)
        >>> out = newton_schulz(x, coefficients="modded_nanogpt")
        >>> out.shape, (torch.linalg.svdvals(out) - 1).abs().max() < 0.05
        (torch.Size([3, 16, 48]), tensor(True))
    """
    op = "newton_schulz"
    backend = requested(op, backend)
    checks.tensor(op, "x", x, "... m n", checks.FLOATING)
    if compute_dtype is None:
        (x,) = autocast_operands(x)
    shape = _plan_matrix(
        x, steps=steps, coefficients=coefficients, eps=eps, compute_dtype=compute_dtype
    )
    with without_autocast(x.device):
        return MATRIX_FWD(x, shape.coefficients, eps, shape.compute_dtype, backend)


@explainable(PACKAGE, _plan_factor)
def gram_newton_schulz_factor(
    gram: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "muon",
    eps: float = 1e-7,
    compute_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Q with newton_schulz(S) = S Q, from gram = SᵀS (n × n, for S of at least n rows) alone.

    For S with fewer rows than columns pass S Sᵀ; then newton_schulz(S) = Q S.

    Args:
        gram: (..., n, n), bf16, fp16, fp32 or float64, any strides. Taken to be symmetric and
            positive semidefinite, which is not checked. Its eigenvalues are squares: a gram in 16
            bits has lost the singular values of S below a few hundredths of the largest.
        steps, coefficients, eps: as in `newton_schulz`.
        compute_dtype: None, or what that means: fp32, and float64 for float64.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        (..., n, n), contiguous, fp32 (float64 for float64).

    Differentiable in gram; the gradient is that of the formula with all n² elements independent,
    gram is all that is saved. There is no second derivative; `reference.gram_newton_schulz_factor`
    has. A gram whose trace is 0 or less gives zeros and has gradient zero. Autocast does not cast
    gram.

    Raises:
        TypeError, ValueError: as `newton_schulz`, and ValueError for a gram that is not square.

    Example:
        >>> import torch
        >>> from fastweights.ops import gram_newton_schulz_factor, newton_schulz
        >>> s = torch.randn(48, 16)
        >>> torch.allclose(s @ gram_newton_schulz_factor(s.mT @ s), newton_schulz(s), atol=1e-4)
        True
    """
    op = "gram_newton_schulz_factor"
    backend = requested(op, backend)
    shape = _plan_factor(
        gram, steps=steps, coefficients=coefficients, eps=eps, compute_dtype=compute_dtype
    )
    with without_autocast(gram.device):
        return FACTOR_FWD(gram, shape.coefficients, eps, shape.compute_dtype, backend)
