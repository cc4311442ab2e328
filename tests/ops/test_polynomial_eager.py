"""Polynomial features, reads and updates in plain torch, against the loops."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

from fastweights import ops
from helpers import contracts, inputs, oracle
from helpers.polynomial import COEFFICIENTS, Case

eager = importlib.import_module("fastweights.ops.polynomial.eager")
CPU = torch.device("cpu")
WIDE = torch.float64
NARROW = [torch.float32, torch.float16, torch.bfloat16]

DEGREES = {
    "symmetric": (1, 2, 3, 4), "tiled": (1, 2), "elementwise": (1, 2, 5), "concat": (1, 2, 5)
}  # fmt: skip
MAPS = [(kind, degree) for kind, degrees in DEGREES.items() for degree in degrees]
FEATURES = [
    Case("features", kind, degree, coefficients)
    for (kind, degree), coefficients in itertools.product(MAPS, COEFFICIENTS)
] + [
    Case("features", kind, degree, "heads", kept)
    for kind, degree in MAPS
    for kept in ((0,), (degree,), tuple(range(degree + 1)), tuple(range(0, degree + 1, 2)))
]  # fmt: skip
PRODUCTS = [
    Case(function, "symmetric", degree, coefficients, kept)
    for function in ("read", "update")
    for degree, coefficients in itertools.product((1, 2, 3), COEFFICIENTS)
    for kept in (None, (degree,), tuple(range(degree + 1)))
]
SIZES = [
    {"tokens": 0}, {"tokens": 1}, {"batch": 0}, {"width": 1}, {"width": 8}, {"width": 17},
    {"values": 1}, {"values": 9, "heads": 1}, {"tile": 1}, {"tile": 8, "width": 16},
    {"tile": 3, "width": 3}, {"heads": 3, "width": 11},
]  # fmt: skip


def assert_near(case: Case, most: float = 1e-11, seed: int = 0) -> None:
    """Results and gradients of every tensor, float64, relative to the size of each."""
    given = case.arguments(seed, WIDE, CPU)
    got = contracts.forward_backward(case.op, given)
    wanted = contracts.forward_backward(case.literal, given)
    assert list(got) == list(wanted)
    for name, x in wanted.items():
        assert got[name].shape == x.shape, name
        assert got[name].dtype == x.dtype, name
        assert x.isfinite().all(), name
        gap = (got[name] - x).norm()
        assert gap <= most * max(1.0, float(x.norm())), (name, gap)


# ---- against the loops --------------------------------------------------------------------------


@pytest.mark.parametrize("case", FEATURES + PRODUCTS, ids=lambda case: case.name)
def test_literal(case: Case) -> None:
    assert_near(case)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: dict[str, int]) -> None:
    for kind in ("symmetric", "tiled", "elementwise", "concat"):
        assert_near(Case(kind=kind).but(**size))
    for function in ("read", "update"):
        assert_near(Case(function, coefficients="zeros").but(**size))


@pytest.mark.parametrize("numbers", [1, 100, 300])
@pytest.mark.parametrize("function", ["read", "update"])
def test_pieces(function: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token at a time, one and two, all but the last."""
    monkeypatch.setattr(eager, "FEATURES", numbers)
    assert_near(Case(function, tokens=5))


@pytest.mark.parametrize("layout", ["spaced", "transposed", "misaligned", "expanded"])
@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_views(function: str, layout: str) -> None:
    """Other strides of every tensor, the same bits."""
    case = Case(function)
    given = case.arguments(0, torch.float32, CPU)
    tensors = {name: x.contiguous() for name, x in given.items() if isinstance(x, torch.Tensor)}
    turned = {}
    for name, x in tensors.items():
        if layout == "spaced":
            turned[name] = inputs.spaced(x)
        elif layout == "transposed":
            turned[name] = inputs.embed(x.transpose(0, 1)).transpose(0, 1)
        elif layout == "misaligned":
            turned[name] = inputs.embed(x, pad=1, offset=1)
        else:
            tensors[name] = x[:1].expand_as(x).contiguous()
            turned[name] = tensors[name][:1].expand_as(x)
    contracts.check_views(case.op, given | tensors, turned)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
def test_any_leading_dimensions(dimensions: int) -> None:
    size = (2, 3, 2, 1, 4)[-dimensions:]
    x = torch.randn(size, dtype=WIDE)
    whole = ops.polynomial_features(x)
    assert whole.shape == (*size[:-1], 14)
    rows = ops.polynomial_features(x.reshape(-1, 4))
    assert torch.equal(whole.reshape(-1, 14), rows)


# ---- gradients ----------------------------------------------------------------------------------

CHECKED = [
    *[Case("features", kind, degree) for kind, degree in MAPS],
    Case("features", coefficients="none"),
    Case("features", kept=(0, 2)),
    *[Case(function, degree=3, kept=(0, 1, 3)) for function in ("read", "update")],
    *[Case(function, coefficients="shared") for function in ("read", "update")],
]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_gradcheck(case: Case) -> None:
    given = case.but(batch=1, tokens=2, width=3, values=2, tile=2).arguments(0, WIDE, CPU)
    names = [name for name, x in given.items() if oracle.is_floating(x)]
    leaves = []
    for name in names:
        x = given[name].contiguous()
        if name == "coefficients" and case.kept is None and case.kind != "elementwise":
            given["kept"] = case.map.kept  # the first coefficient may be moved away from 0
        leaves.append(x.requires_grad_())

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return case.op(**given | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_a_zero_coefficient_has_the_gradient_zero(function: str) -> None:
    case = Case(function, coefficients="zeros")
    given = case.arguments(0, WIDE, CPU)
    found = contracts.forward_backward(case.op, given)
    zero = given["coefficients"] == 0
    assert zero.sum() == 4
    assert not found["d coefficients"][zero].any()
    assert found["d coefficients"][~zero].all()
    assert all(x.isfinite().all() for x in found.values())


def test_features_of_a_zero_coefficient_are_zero() -> None:
    """The others are those of a call without the degree."""
    x, a = torch.randn(3, 4), torch.tensor([0.0, 0.3, 0.0])
    phi = ops.polynomial_features(x, a)
    assert torch.equal(phi[:, :4], ops.polynomial_features(x, a, kept=(1,)))
    assert not phi[:, 4:].any()


def test_a_negative_coefficient_is_nan() -> None:
    x = torch.randn(3, 4)
    phi = ops.polynomial_features(x, torch.tensor([0.0, 1.0, -1.0]))
    assert phi[:, :4].isfinite().all()
    assert phi[:, 4:].isnan().all()


@pytest.mark.parametrize("wanted", ["x", "other", "coefficients"])
@pytest.mark.parametrize("function", ["read", "update"])
def test_gradients_come_alone_as_they_come_together(function: str, wanted: str) -> None:
    case = Case(function)
    given = case.arguments(0, WIDE, CPU)
    name = {"other": "state" if function == "read" else "g"}.get(wanted, wanted)
    together = contracts.forward_backward(case.op, given)
    leaf = given[name].detach().requires_grad_()
    out = case.op(**given | {name: leaf})
    upstream = contracts.random_upstream({"out": out})["out"]
    (alone,) = torch.autograd.grad(out, leaf, upstream)
    assert oracle.bit_equal(alone, together[f"d {name}"])


# ---- narrow types -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        *[Case("features", kind, degree, "zeros") for kind, degree in MAPS if degree < 4],
        *[Case(f, degree=p, tokens=20) for f in ("read", "update") for p in (1, 2, 3)],
        Case("read", coefficients="none", width=24, values=8, tokens=30, scale=0.3),
        Case("update", coefficients="none", width=24, values=8, tokens=30, scale=0.3),
    ],
    ids=lambda case: case.name,
)
def test_narrow_types(case: Case, dtype: torch.dtype) -> None:
    """By the yardstick of plain torch in the same dtype."""
    oracle.check_op(case.op, case.literal, case.arguments, dtype, CPU)


def test_features_are_rounded_once() -> None:
    given: dict[str, Any] = {"x": torch.randn(9, 6).bfloat16(), "coefficients": torch.rand(3)}
    given["coefficients"][0] = 0
    for kind in ("symmetric", "tiled", "concat"):
        exact = ops.polynomial_features(
            given["x"].double(), given["coefficients"].double(), kind=kind
        )
        got = ops.polynomial_features(**given, kind=kind).double()
        assert ((got - exact).abs() <= 2**-8 * exact.abs()).all()
