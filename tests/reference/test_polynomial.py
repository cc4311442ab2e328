"""Polynomial features one by one: the kernels that they make, their number and their order."""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import comb, factorial, sqrt

import pytest
import torch

from fastweights.reference import polynomial_features, polynomial_read, polynomial_update

WIDE = torch.float64


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=WIDE)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_products_of_symmetric_features_are_the_kernel(degree: int) -> None:
    x, y = normal(6, 5), normal(4, 5)
    a = torch.rand(degree + 1, dtype=WIDE)
    every = tuple(range(degree + 1))
    phi_x, phi_y = (polynomial_features(z, a, degree=degree, kept=every) for z in (x, y))
    assert phi_x.shape == (6, comb(5 + degree, degree))
    kernel = sum(a[r] * (x @ y.T) ** r for r in every)
    torch.testing.assert_close(phi_x @ phi_y.T, kernel, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tile", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [8, 5])
def test_tiles_make_the_same_kernel(width: int, tile: int) -> None:
    x, y = normal(6, width), normal(4, width)
    a = torch.rand(3, dtype=WIDE)
    rules = {"kind": "tiled", "tile": tile, "kept": (0, 1, 2)}
    phi_x, phi_y = (polynomial_features(z, a, **rules) for z in (x, y))
    padded = -(-width // tile) * tile
    assert phi_x.shape == (6, 1 + padded + padded * (padded + tile) // 2)
    dots = x @ y.T
    kernel = a[0] + a[1] * dots + a[2] * dots**2
    torch.testing.assert_close(phi_x @ phi_y.T, kernel, rtol=1e-13, atol=1e-13)


def test_tiles_of_one_number_are_the_symmetric_map() -> None:
    x = normal(3, 6)
    tiled = polynomial_features(x, kind="tiled", tile=1)
    torch.testing.assert_close(tiled, polynomial_features(x), rtol=1e-14, atol=0)


def test_order_and_weights_of_features() -> None:
    """Degree after degree, the last index fastest."""
    x = normal(4)
    a = torch.rand(4, dtype=WIDE)
    wanted = []
    for r in (1, 2, 3):
        for chosen in combinations_with_replacement(range(4), r):
            arrangements = factorial(r)
            product = 1.0
            for i in set(chosen):
                arrangements //= factorial(chosen.count(i))
            for i in chosen:
                product *= float(x[i])
            wanted.append(sqrt(float(a[r]) * arrangements) * product)
    got = polynomial_features(x, a, degree=3)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=WIDE), rtol=1e-13, atol=0)


def test_default_coefficients_bring_the_kernel_of_a_unit_vector_to_one() -> None:
    x = torch.nn.functional.normalize(normal(5, 7), dim=-1)
    for degree in (1, 2, 3):
        norm = polynomial_features(x, degree=degree).square().sum(-1)
        torch.testing.assert_close(norm, torch.ones(5, dtype=WIDE), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("width", "count"), [(16, 152), (48, 1224), (64, 2144), (128, 8384)])
def test_number_of_features(width: int, count: int) -> None:
    assert polynomial_features(torch.ones(1, width)).shape == (1, count)


def test_elementwise_and_concat() -> None:
    x = normal(2, 3)
    a = torch.tensor([0.0, 2.0, 3.0], dtype=WIDE)
    torch.testing.assert_close(polynomial_features(x, a, kind="elementwise"), 2 * x + 3 * x**2)
    both = torch.cat((2 * x, 3 * x**2), -1)
    torch.testing.assert_close(polynomial_features(x, a, kind="concat"), both)


def test_coefficients_by_head() -> None:
    x = normal(4, 3, 5)
    a = torch.rand(3, 3, dtype=WIDE)
    for kind in ("symmetric", "tiled", "elementwise", "concat"):
        whole = polynomial_features(x, a, kind=kind, tile=2)
        for h in range(3):
            alone = polynomial_features(x[:, h], a[h], kind=kind, tile=2)
            torch.testing.assert_close(whole[:, h], alone, rtol=1e-14, atol=0)


def test_a_zero_drops_its_degree_and_a_negative_coefficient_is_nan() -> None:
    x = normal(2, 4).requires_grad_()
    a = torch.tensor([0.0, 0.0, 0.5], dtype=WIDE, requires_grad=True)
    phi = polynomial_features(x, a)
    assert not phi[:, :4].any()
    torch.testing.assert_close(phi[:, 4:], polynomial_features(x, a, kept=(2,)))
    d_x, d_a = torch.autograd.grad(phi.square().sum(), (x, a))
    assert d_x.isfinite().all()
    assert d_a[1] == 0
    assert d_a[2] > 0
    assert polynomial_features(x, -a.detach())[:, 4:].isnan().all()


def test_a_read_gives_back_what_an_update_wrote() -> None:
    """⟨φ(q), φ(x)⟩ g for a memory of one row, for any query."""
    x, q, g = normal(1, 1, 2, 4), normal(1, 5, 2, 4), normal(1, 1, 2, 3)
    a = torch.tensor([0.0, 1.0, 0.7], dtype=WIDE)
    state = polynomial_update(x, g, a)
    assert state.shape == (1, 2, 14, 3)
    dots = (q * x).sum(-1, keepdim=True)
    wanted = (dots + 0.7 * dots**2) * g
    torch.testing.assert_close(polynomial_read(q, state, a), wanted, rtol=1e-13, atol=1e-13)


def test_results_are_in_the_dtypes_of_the_op() -> None:
    x, g = torch.randn(1, 3, 2, 4).bfloat16(), torch.randn(1, 3, 2, 2).bfloat16()
    state = polynomial_update(x, g)
    assert state.dtype == torch.float32
    assert polynomial_read(x, state).dtype == torch.bfloat16
    assert polynomial_features(x).dtype == torch.bfloat16
