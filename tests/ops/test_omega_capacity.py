"""How many pairs a memory over polynomial features holds: as many as its features have rank.

Gaussian keys fill all C(d+p, p) monomials up to degree p. Keys of norm one do not: Σ x_j² = 1 makes
degree r − 2 a part of degree r, and C(d+p−1, p) + C(d+p−2, p−1) are left.
"""

from __future__ import annotations

from math import comb

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fastweights import ops

WIDE = torch.float64
SEEDS = range(3)


def of_sphere(width: int, degree: int) -> int:
    return comb(width + degree - 1, degree) + comb(width + degree - 2, degree - 1)


def pairs(count: int, width: int, unit: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Keys (count, width) and values (count, 4)."""
    source = torch.Generator().manual_seed(seed)
    k = torch.randn(count, width, generator=source, dtype=WIDE)
    return normalize(k, dim=-1) if unit else k, torch.randn(count, 4, generator=source, dtype=WIDE)


def largest_error(x: Tensor, v: Tensor) -> float:
    """Of any pair at the best memory, relative to the largest value."""
    memory = torch.linalg.lstsq(x, v, driver="gelsd").solution
    return float((x @ memory - v).abs().max() / v.abs().max())


def holds(
    count: int, width: int, degree: int, unit: bool, kept: tuple[int, ...], kind: str = "symmetric"
) -> bool:
    """Whether there is a memory without any error, for each seed."""
    errors = []
    for seed in SEEDS:
        k, v = pairs(count, width, unit, seed)
        a = torch.ones(degree + 1, dtype=WIDE)
        x = ops.polynomial_features(k, a, degree=degree, kind=kind, kept=kept)
        errors.append(largest_error(x, v))
    return max(errors) < 1e-6


@pytest.mark.parametrize("unit", [False, True], ids=["gaussian", "unit"])
@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("width", [4, 6, 8])
def test_capacity(width: int, degree: int, unit: bool) -> None:
    """Exactly the rank with the constant, and one more pair does not fit."""
    capacity = of_sphere(width, degree) if unit else comb(width + degree, degree)
    kept = tuple(range(degree + 1))
    assert holds(capacity, width, degree, unit, kept)
    assert not holds(capacity + 1, width, degree, unit, kept)


@pytest.mark.parametrize("width", [4, 6, 8])
def test_without_the_constant(width: int) -> None:
    """Keys of norm one lose nothing, it is part of degree 2; others lose the one feature."""
    for unit, capacity in ((True, of_sphere(width, 2)), (False, comb(width + 2, 2) - 1)):
        assert holds(capacity, width, 2, unit, (1, 2))
        assert not holds(capacity + 1, width, 2, unit, (1, 2))


def test_powers_of_single_numbers_hold_no_more_than_there_are() -> None:
    """Of "concat" p · d, with whatever keys: without products of different numbers."""
    for width in (4, 6, 8):
        for degree in (1, 2, 3):
            kept = tuple(range(1, degree + 1))
            assert holds(width * degree, width, degree, False, kept, "concat")
            assert not holds(width * degree + 1, width, degree, False, kept, "concat")


@pytest.mark.parametrize("unit", [False, True], ids=["gaussian", "unit"])
def test_descent_gets_there(unit: bool) -> None:
    """`omega_memory` over the pairs again and again, a chunk a pass, which is a gradient step.

    With fewer pairs than features their errors go; with more they stay at the least that there is.
    """
    width, passes = 4, 1000
    capacity = of_sphere(width, 2) if unit else comb(width + 2, 2) - 1
    a = torch.tensor([0.0, 1.0, 0.5], dtype=WIDE)
    found = {}
    for count in (capacity // 2, 2 * capacity):
        k, v = pairs(count, width, unit, seed=0)
        x = ops.polynomial_features(k, a)
        step = torch.full((1, count * passes, 1), 1.9, dtype=WIDE)
        step = step / torch.linalg.matrix_norm(x, ord=2) ** 2
        keys, values = (z.repeat(passes, 1)[None, :, None] for z in (k, v))
        _, left = ops.omega_memory(
            keys, keys, values, step=step, feature_map="symmetric", coefficients=a,
            chunk_size=count, return_state=True,
        )  # fmt: skip
        error = float((x @ left.state[0, 0] - v).norm() / v.norm())
        best = torch.linalg.lstsq(x, v, driver="gelsd").solution
        found[count] = (error, float((x @ best - v).norm() / v.norm()))
    few, many = found.values()
    assert few[0] < 1e-3
    assert many[1] > 0.3
    assert abs(many[0] - many[1]) < 1e-2 * many[1]
