"""Newton–Schulz in plain torch on stacks (B, m, n): any device and dtype.

Both passes are explicit. Forward, with X₀ = S / (‖S‖ + eps) and rows ≤ cols:

    A = X Xᵀ    Z = b A + c A²    X ← a X + Z X

Backward recomputes the X, A and Z of all steps from S; then for each step, last one first,

    D = dZ + dZᵀ, dZ = dX Xᵀ    T = (b/2) D + c A D    dX ← a dX + Z dX + (T + Tᵀ) X

which is the derivative because A is symmetric: T + Tᵀ = dA + dAᵀ.

Iterates are rounded to the compute dtype once a product, which accumulates in fp32 (float64) and
adds its second operand before it is rounded. The norm, the upstream gradient's size and all that
the two divide and multiply stay in fp32 (float64). The derivative is linear in the upstream
gradient, so that is brought to norm 1 before it meets fp16, and its size comes back at the end.

Operands are laid out once, rows contiguous and not longer in number than columns: sums then run in
one order, and neither strides nor transposition change a bit of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .coefficients import Triple
from .op import NewtonSchulzShape

SPACE_FWD = SPACE_BWD = None


def supports(shape: NewtonSchulzShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: NewtonSchulzShape, x: Tensor) -> Tensor:
    """The orthogonalised matrices, or the factors if x holds Gram matrices; contiguous."""
    if shape.factor:
        return _factor(shape, x.contiguous())
    wide = _wide(shape, x)
    iterate = _normalised(shape, wide, _norm(shape, wide))
    for triple, scale in _steps(shape):
        iterate = _step(iterate, triple, scale).after()
    return (iterate.mT if shape.tall else iterate).to(x.dtype).contiguous()


def bwd(shape: NewtonSchulzShape, upstream: Tensor, x: Tensor) -> Tensor:
    """The gradient of x (or of the Gram matrices) for that of `fwd`'s result; contiguous."""
    if x.numel() == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if shape.factor:
        return _factor_bwd(shape, upstream.contiguous(), x.contiguous())
    d = _matrix_bwd(shape, _wide(shape, upstream), _wide(shape, x))
    return (d.mT if shape.tall else d).to(x.dtype).contiguous()


# ---- the matrix itself, rows ≤ cols --------------------------------------------------------------


def _wide(shape: NewtonSchulzShape, x: Tensor) -> Tensor:
    """The matrices with rows ≤ cols, contiguous."""
    return (x.mT if shape.tall else x).contiguous()


def _product(
    left: Tensor, right: Tensor, plus: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """alpha·left·right + beta·plus, rounded once to the dtype of `left`.

    On a CPU fp16 operands are widened: the sums are the same, and without AVX-512 torch's own fp16
    product takes 60 times as long (torch 2.13, 256 × 256). On a GPU partial sums are fp32 unless
    `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` lets some be fp16.
    """
    dtype = left.dtype
    if left.device.type == "cpu" and dtype == torch.float16:
        left, right = left.float(), right.float()
        plus = None if plus is None else plus.float()
    if plus is None:
        out = torch.bmm(left, right)
    else:
        out = torch.baddbmm(plus, left, right, beta=beta, alpha=alpha)
    return out.to(dtype)


def _norm(shape: NewtonSchulzShape, x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=shape.statistic_dtype)


def _normalised(shape: NewtonSchulzShape, x: Tensor, norm: Tensor) -> Tensor:
    """first_scale·X₀ in the compute dtype, rounded once; a zero matrix stays zero."""
    out = torch.empty_like(x, dtype=shape.compute_dtype)
    return torch.div(x, (norm + shape.eps) / shape.first_scale, out=out)


def _steps(shape: NewtonSchulzShape) -> list[tuple[Triple, float]]:
    """The coefficients of each step, and by what its iterate is larger than it should be."""
    return [(t, 1.0 if j else shape.first_scale) for j, t in enumerate(shape.triples)]


class _Step(NamedTuple):
    """One step: its coefficients, scale, the iterate scale·X, and what is formed of it."""

    triple: Triple
    scale: float
    iterate: Tensor
    gram: Tensor  # scale²·A
    z: Tensor

    def after(self) -> Tensor:
        """The next iterate, a X + Z X."""
        beta, alpha = self.triple[0] / self.scale, 1 / self.scale
        return _product(self.z, self.iterate, self.iterate, beta=beta, alpha=alpha)


def _step(iterate: Tensor, triple: Triple, scale: float) -> _Step:
    _, b, c = triple
    gram = _product(iterate, iterate.mT)
    z = _product(gram, gram, gram, beta=b / scale**2, alpha=c / scale**4)
    return _Step(triple, scale, iterate, gram, z)


def _matrix_bwd(shape: NewtonSchulzShape, upstream: Tensor, x: Tensor) -> Tensor:
    dtype = shape.statistic_dtype
    norm = _norm(shape, x)
    iterate = _normalised(shape, x, norm)
    steps: list[_Step] = []
    for triple, scale in _steps(shape):
        if steps:
            iterate = steps[-1].after()
        steps.append(_step(iterate, triple, scale))

    # The largest element goes first: squares of gradients leave fp32 sooner than gradients do.
    d = upstream.to(dtype)
    peak = d.abs().amax((1, 2), keepdim=True)
    d = d / peak.masked_fill(peak == 0, 1)
    length = _norm(shape, d)
    length = length.masked_fill(length == 0, 1) / shape.first_scale
    d = (d / length).to(shape.compute_dtype)
    for step in reversed(steps):
        a, b, c = step.triple
        d_z = _product(d, step.iterate.mT)
        both = (d_z + d_z.mT) / step.scale
        t = _product(step.gram, both, both, beta=b / 2, alpha=c / step.scale**2)
        d = _product(step.z, d, d, beta=a)
        d = _product(t + t.mT, step.iterate, d, alpha=1 / step.scale)

    # dS = (dX₀ − X₀⟨dX₀, X₀⟩·ν/‖S‖)/ν, ν = ‖S‖ + eps. A zero matrix has the gradient 0, not 1/eps.
    nu = norm + shape.eps
    unit, d = x.to(dtype) / nu, d.to(dtype)
    zero = norm == 0
    along = (d * unit).sum((1, 2), keepdim=True) * (nu / norm.masked_fill(zero, 1))
    return (d - unit * along) * (length / nu).masked_fill(zero, 0) * peak


# ---- the factor of a Gram matrix -----------------------------------------------------------------


class _Gram(NamedTuple):
    """A Gram matrix on its way: R = G/ν², ν = √tr G + eps, and where tr G ≤ 0."""

    r: Tensor
    root: Tensor  # √tr G, 1 where there is none; (B, 1, 1)
    nu: Tensor  # (B, 1, 1)
    zero: Tensor  # (B, 1, 1)


def _gram(shape: NewtonSchulzShape, gram: Tensor) -> _Gram:
    g = gram.to(shape.compute_dtype)
    trace = g.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    zero = trace <= 0
    root = trace.masked_fill(zero, 1).sqrt()
    nu = root + shape.eps
    return _Gram(g / nu / nu, root, nu, zero)


def _polynomial(r: Tensor, triple: Triple) -> Tensor:
    """Z = a I + b R + c R²."""
    a, b, c = triple
    z = torch.baddbmm(r, r, r, beta=b, alpha=c)
    z.diagonal(dim1=1, dim2=2).add_(a)
    return z


def _factor(shape: NewtonSchulzShape, gram: Tensor) -> Tensor:
    start = _gram(shape, gram)
    r = start.r
    q = None
    for j, triple in enumerate(shape.triples):
        z = _polynomial(r, triple)
        q = z if q is None else q @ z
        if j + 1 < shape.steps:
            r = z @ r @ z
    assert q is not None
    return (q / start.nu).masked_fill(start.zero, 0)


def _factor_bwd(shape: NewtonSchulzShape, upstream: Tensor, gram: Tensor) -> Tensor:
    """With Q' = QZ and R' = ZRZ of each step, last one first; all but dQ and dR are symmetric.

        dZ = Q dQ' + dR'·ZR + ZR·dR'    dR = Z dR' Z + b dZ + c (R dZ + dZ R)    dQ = dQ' Z

    The last R' is not used, so there dR' = 0; the first Q is the identity.
    """
    start = _gram(shape, gram)
    r, q = start.r, None
    saved: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
    for j, triple in enumerate(shape.triples):
        z = _polynomial(r, triple)
        last = j + 1 == shape.steps
        zr = None if last else z @ r
        saved.append((r, z, q, zr))
        if zr is not None:
            r = zr @ z
            q = z if q is None else q @ z

    d_q = upstream.to(shape.compute_dtype) / start.nu
    d_r: Tensor | None = None
    d_nu = torch.zeros_like(start.nu)
    for (_, b, c), (r, z, q, zr) in zip(reversed(shape.triples), reversed(saved), strict=True):
        d_z = d_q if q is None else q @ d_q
        if d_r is None:
            # ⟨dOut, Q⟩ of the whole product Q is ⟨dZ, Z⟩ of its last factor.
            d_nu = -(d_z * z).sum((1, 2), keepdim=True) / start.nu
        if d_r is not None and zr is not None:
            d_z = torch.baddbmm(torch.baddbmm(d_z, d_r, zr), zr, d_r)
        through = torch.baddbmm(torch.baddbmm(d_z, r, d_z, beta=b, alpha=c), d_z, r, alpha=c)
        d_r = through if d_r is None else torch.baddbmm(through, z @ d_r, z)
        if q is not None:
            d_q = d_q @ z
    assert d_r is not None

    # ν divides Q once and G twice; √tr G depends on the diagonal alone.
    d_nu = d_nu - 2 * (d_r * start.r).sum((1, 2), keepdim=True) / start.nu
    d_gram = d_r / start.nu / start.nu
    d_gram.diagonal(dim1=1, dim2=2).add_((d_nu / (2 * start.root))[:, 0])
    return d_gram.masked_fill(start.zero, 0).to(gram.dtype)
