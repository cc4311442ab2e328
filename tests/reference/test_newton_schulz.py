"""The reference against the formulas written out a third time: loops over 60-digit decimals.

The loops know no tensor and no transpose: every matrix multiplies its Gram matrix from the left
there. Their gradients are central differences with a step of 1e-20.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch

from fastweights.reference import gram_newton_schulz_factor, newton_schulz
from fastweights.reference.newton_schulz import SETS
from helpers.newton_schulz import LEADING, SHAPES, Case, orthogonal, scheduled

STEP = Decimal("1e-20")
EPS = Decimal("1e-7")
CPU = torch.device("cpu")
# Two computations in float64 of numbers up to about 1 agree to a few hundred roundings.
EXACT = 1e-13

Rows = list[list[Decimal]]


def product(x: Rows, y: Rows) -> Rows:
    return [[sum(a * b for a, b in zip(row, col, strict=True)) for col in zip(*y, strict=True)]
            for row in x]  # fmt: skip


def combine(*terms: tuple[Any, Rows]) -> Rows:
    rows, cols = len(terms[0][1]), len(terms[0][1][0])
    return [
        [sum((Decimal(f) * x[i][j] for f, x in terms), Decimal(0)) for j in range(cols)]
        for i in range(rows)
    ]


def transpose(x: Rows) -> Rows:
    return [list(row) for row in zip(*x, strict=True)]


def loop_newton_schulz(s: Rows, triples: Sequence[Sequence[float]]) -> Rows:
    norm = sum(v * v for row in s for v in row).sqrt() + EPS
    x = [[v / norm for v in row] for row in s]
    for a, b, c in triples:
        gram = product(transpose(x), x)  # from the right, whatever the shape
        x = combine((a, x), (b, product(x, gram)), (c, product(product(x, gram), gram)))
    return x


def loop_factor(g: Rows, triples: Sequence[Sequence[float]]) -> Rows:
    n = len(g)
    identity = [[Decimal(i == j) for j in range(n)] for i in range(n)]
    norm = sum(g[i][i] for i in range(n)).sqrt() + EPS
    r = [[v / norm**2 for v in row] for row in g]
    q = identity
    for a, b, c in triples:
        z = combine((a, identity), (b, r), (c, product(r, r)))
        q = product(q, z)
        r = product(product(z, r), z)
    return [[v / norm for v in row] for row in q]


def loosen(x: torch.Tensor) -> Rows:
    return [[Decimal(v) for v in row] for row in x.tolist()]


def tighten(x: Rows) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in x], dtype=torch.float64)


def differences(f: Callable[[Rows], Rows], x: Rows, weights: Rows) -> torch.Tensor:
    """Gradient of Σ weights·f(x)."""

    def loss(i: int, j: int, step: Decimal) -> Decimal:
        moved = [list(row) for row in x]
        moved[i][j] += step
        terms = zip(weights, f(moved), strict=True)
        return sum((a * b for v, w in terms for a, b in zip(v, w, strict=True)), Decimal(0))

    return tighten(
        [[(loss(i, j, STEP) - loss(i, j, -STEP)) / (2 * STEP) for j in range(len(x[0]))]
         for i in range(len(x))]
    )  # fmt: skip


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    assert got.shape == truth.shape
    return float((got.detach() - truth).norm() / truth.norm())


SCHEDULES = [("muon", 1), ("muon", 3), ("modded_nanogpt", 5), ("polar_express", 5)]
SCHEDULES += [("polar_express_1.05", 6), (((2, -1.5, 0.5), (1.875, -1.25, 0.375)), 4)]


@pytest.mark.parametrize(("coefficients", "steps"), SCHEDULES)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 2), (1, 4), (3, 3)])
def test_equals_loops(size: tuple[int, int], coefficients: Any, steps: int) -> None:
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(size, dtype=torch.float64)
    got = newton_schulz(x, steps=steps, coefficients=coefficients)
    (grad,) = torch.autograd.grad(got, x, weights)
    triples = scheduled(coefficients, steps)
    with localcontext() as context:
        context.prec = 60
        loose = loosen(x.detach())
        assert relative(got, tighten(loop_newton_schulz(loose, triples))) < EXACT
        expected = differences(lambda s: loop_newton_schulz(s, triples), loose, loosen(weights))
    # A lone number is its own sign up to eps: a gradient of 1e-7 made of terms of size 1.
    scale = max(float(expected.norm()), 1.0)
    assert float((grad - expected).norm()) < 10 * EXACT * scale


@pytest.mark.parametrize(("coefficients", "steps"), SCHEDULES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_factor_equals_loops(n: int, coefficients: Any, steps: int) -> None:
    s = torch.randn(n + 2, n, dtype=torch.float64)
    gram = (s.mT @ s).requires_grad_()
    weights = torch.randn(n, n, dtype=torch.float64)
    got = gram_newton_schulz_factor(gram, steps=steps, coefficients=coefficients)
    (grad,) = torch.autograd.grad(got, gram, weights)
    triples = scheduled(coefficients, steps)
    with localcontext() as context:
        context.prec = 60
        loose = loosen(gram.detach())
        assert relative(got, tighten(loop_factor(loose, triples))) < EXACT
        expected = differences(lambda g: loop_factor(g, triples), loose, loosen(weights))
    assert relative(grad, expected) < 10 * EXACT


def polynomial(x: torch.Tensor, coefficients: Any, steps: int = 5) -> torch.Tensor:
    for a, b, c in scheduled(coefficients, steps):
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_acts_on_singular_values_alone(size: tuple[int, int], coefficients: str) -> None:
    x = torch.randn(size, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    expected = u * polynomial(s / (x.norm() + 1e-7), coefficients) @ vt
    assert relative(newton_schulz(x, coefficients=coefficients), expected) < EXACT


# Spec 4.1: where singular values of 0.01 to 1 land after five steps, and one of 0.001.
INTERVALS = {
    "muon": (0.682, 1.134, 0.47),
    "modded_nanogpt": (0.978, 1.032, None),
    "polar_express": (0.870, 1.124, 0.846),
    "polar_express_1.05": (0.846, 1.124, 0.729),
}


def test_every_set_has_an_interval() -> None:
    assert set(INTERVALS) == set(SETS)


@pytest.mark.parametrize("coefficients", SETS)
def test_singular_values_land_where_the_set_says(coefficients: str) -> None:
    low, high, small = INTERVALS[coefficients]

    def landed(s: torch.Tensor) -> torch.Tensor:
        """Matrices of norm 1 with the singular values s and √(1 − s²), in a random basis."""
        spectrum = torch.stack([s, (1 - s**2).clamp(min=0).sqrt()], -1)
        u, v = orthogonal(2, 1), orthogonal(2, 2)
        out = newton_schulz(u * spectrum[:, None] @ v, coefficients=coefficients)
        return (u.mT @ out @ v.mT)[:, 0, 0]

    after = landed(torch.linspace(0.01, 1, 20_001, dtype=torch.float64))
    # The published ends are rounded to three digits; eps moves nothing in them.
    assert abs(float(after.min()) - low) < 6e-4
    assert abs(float(after.max()) - high) < 6e-4
    if small is not None:
        tolerance = 6e-3 if coefficients == "muon" else 6e-4
        value = float(landed(torch.tensor([0.001], dtype=torch.float64)))
        assert abs(value - small) < tolerance


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_leading_dimensions_are_a_stack(leading: tuple[int, ...]) -> None:
    case = Case(5, 7, leading)
    x, gram = (
        f(0, torch.float64, CPU)[name]
        for f, name in ((case.arguments, "x"), (case.gram_arguments, "gram"))
    )
    for function, argument in ((newton_schulz, x), (gram_newton_schulz_factor, gram)):
        got = function(argument)
        assert got.shape == argument.shape
        assert got.is_contiguous()
        flat = zip(got.flatten(0, -3) if leading else [got],
                   argument.reshape(-1, *argument.shape[-2:]), strict=True)  # fmt: skip
        for one, alone in flat:
            torch.testing.assert_close(one, function(alone), rtol=EXACT, atol=EXACT)


def test_factor_times_matrix_is_the_matrix_form() -> None:
    s = Case(65, 33).matrices(0, CPU)
    assert relative(s @ gram_newton_schulz_factor(s.mT @ s), newton_schulz(s)) < EXACT
    t = s.mT
    assert relative(gram_newton_schulz_factor(t @ t.mT) @ t, newton_schulz(t)) < EXACT


# ---- zero, second derivatives, dtypes ------------------------------------------------------------


@pytest.mark.parametrize("function", [newton_schulz, gram_newton_schulz_factor])
def test_zero_gives_zero_with_zero_derivatives(function: Callable[..., torch.Tensor]) -> None:
    stack = torch.stack([torch.zeros(3, 3), torch.eye(3) + 0.1]).double().requires_grad_()
    out = function(stack)
    assert not out[0].any()
    (grad,) = torch.autograd.grad(out.square().sum() + out.sum(), stack, create_graph=True)
    assert not grad[0].any()
    assert grad[1].any()
    (second,) = torch.autograd.grad(grad.square().sum(), stack)
    assert not second[0].any()
    assert second.isfinite().all()


@pytest.mark.parametrize("size", [(3, 4), (4, 3)])
def test_gradgradcheck(size: tuple[int, int]) -> None:
    x = torch.randn(2, *size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: newton_schulz(x, steps=2), x)


def test_gradgradcheck_of_the_factor() -> None:
    s = torch.randn(5, 3, dtype=torch.float64)
    gram = (s.mT @ s).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda g: gram_newton_schulz_factor(g, steps=2), gram)


@pytest.mark.parametrize("asked", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_run_in_the_dtype_of_the_input(
    dtype: torch.dtype, asked: torch.dtype | None
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        seen: set[torch.dtype]

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                self.seen |= {x.dtype for x in args}
            return function(*args, **kwargs or {})

    s = torch.randn(6, 4).to(dtype)
    for function, x in ((newton_schulz, s), (gram_newton_schulz_factor, s.mT @ s)):
        with Products() as products:
            products.seen = set()
            out = function(x, compute_dtype=asked)
        assert products.seen == {asked or dtype}
        assert out.dtype == (dtype if function is newton_schulz else torch.float32)


def test_more_triples_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 triples for 4 steps"):
        newton_schulz(torch.eye(2), steps=4, coefficients="modded_nanogpt")
