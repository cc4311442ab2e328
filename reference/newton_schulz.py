"""Newton–Schulz orthogonalisation, literally: the odd polynomial step applied `steps` times.

Formulas, arguments and results are those of `fastweights.ops.newton_schulz`. Matrix products run in
the dtype of the input (or in `compute_dtype`), all between them in fp32 (float64 for float64
inputs), results are cast once at the end: the "plain torch" that kernels are measured by. Twice
differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Triple = tuple[float, float, float]


def _polar_express(safety: float) -> list[Triple]:
    """Polar Express, arXiv 2505.16932: p(x) becomes p(x / safety)."""
    triples = (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
    return [(a / safety, b / safety**3, c / safety**5) for a, b, c in triples]


SETS: dict[str, Sequence[Triple]] = {
    "muon": [(3.4445, -4.7750, 2.0315)],
    "modded_nanogpt": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    "polar_express": _polar_express(1.01),
    "polar_express_1.05": _polar_express(1.05),
}


def _each_step(coefficients: str | Sequence[Sequence[float]], steps: int) -> list[Sequence[float]]:
    triples = SETS[coefficients] if isinstance(coefficients, str) else coefficients
    if len(triples) > steps:
        raise ValueError(f"coefficients: {len(triples)} triples for {steps} steps")
    return [triples[min(j, len(triples) - 1)] for j in range(steps)]


def _arithmetic(
    x: Tensor, compute_dtype: torch.dtype | None
) -> tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor]]:
    """The dtype of all between products, and the product, whose operands are rounded first."""
    acc = torch.promote_types(x.dtype, torch.float32)
    dtype = x.dtype if compute_dtype is None else compute_dtype

    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left.to(dtype) @ right.to(dtype)).to(acc)

    return acc, product


def newton_schulz(
    x: Tensor, *, steps: int = 5, coefficients: str | Sequence[Sequence[float]] = "muon",
    eps: float = 1e-7, compute_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As `fastweights.ops.newton_schulz`; `compute_dtype` None is x's own dtype."""
    acc, product = _arithmetic(x, compute_dtype)
    tall = x.shape[-2] > x.shape[-1]
    s = (x.mT if tall else x).to(acc)
    squared = s.square().sum((-2, -1), keepdim=True)
    zero = squared == 0
    # The root of 0 has no derivative: a zero matrix is divided by 1 and then left out.
    norm = squared.masked_fill(zero, 1).sqrt()
    iterate = (s / (norm + eps)).masked_fill(zero, 0)
    for a, b, c in _each_step(coefficients, steps):
        gram = product(iterate, iterate.mT)
        iterate = a * iterate + product(b * gram + c * product(gram, gram), iterate)
    return (iterate.mT if tall else iterate).to(x.dtype).contiguous()


def gram_newton_schulz_factor(
    gram: Tensor, *, steps: int = 5, coefficients: str | Sequence[Sequence[float]] = "muon",
    eps: float = 1e-7, compute_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As `fastweights.ops.gram_newton_schulz_factor`; `compute_dtype` None is gram's own dtype."""
    acc, product = _arithmetic(gram, compute_dtype)
    g = gram.to(acc)
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    zero = trace <= 0
    norm = trace.masked_fill(zero, 1).sqrt() + eps
    r = g / norm.square()
    identity = torch.eye(g.shape[-1], dtype=acc, device=g.device)
    q = identity.expand_as(g)
    for a, b, c in _each_step(coefficients, steps):
        z = a * identity + b * r + c * product(r, r)
        q = product(q, z)
        r = product(product(z, r), z)
    return (q / norm).masked_fill(zero, 0).contiguous()
