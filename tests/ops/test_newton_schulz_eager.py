"""The eager backend of Newton–Schulz: against the reference, and its properties."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.ops.newton_schulz.coefficients import SETS, schedule
from helpers import contracts, oracle
from helpers.newton_schulz import LEADING, SHAPES, Case, everyday, orthogonal, scheduled

op = importlib.import_module("fastweights.ops.newton_schulz.op")
CPU = torch.device("cpu")
EXACT = 1e-12
MATRIX, FACTOR = ops.newton_schulz, ops.gram_newton_schulz_factor
OWN = [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]

# Every set that a number of steps allows; a set of five is cut to the steps as a user's own list.
RULES = [
    pytest.param(steps, name if len(SETS[name]) <= steps else SETS[name][:steps],
                 id=f"{name}-{steps}")
    for name in SETS for steps in range(1, 8)
]  # fmt: skip
RULES += [pytest.param(steps, OWN, id=f"own-{steps}") for steps in (2, 5)]


def case_id(case: Case) -> str:
    return case.name


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    assert got.shape == truth.shape
    norm = float(truth.detach().norm())
    difference = float((got.detach().double() - truth.detach()).norm())
    return difference / norm if norm else difference


def check_exact(function: Any, literal: Any, arguments: dict[str, Any], **rules: Any) -> None:
    """Results and gradients in float64."""
    got = contracts.forward_backward(partial(function, **rules), arguments)
    truth = contracts.forward_backward(partial(literal, **rules), arguments)
    assert list(got) == list(truth)
    for name, x in got.items():
        assert relative(x, truth[name]) <= EXACT, name


# ---- against the reference ----------------------------------------------------------------------


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_equals_reference(size: tuple[int, int], leading: tuple[int, ...]) -> None:
    case = Case(*size, leading)
    check_exact(MATRIX, reference.newton_schulz, case.arguments(0, torch.float64, CPU))
    arguments = case.gram_arguments(0, torch.float64, CPU)
    check_exact(FACTOR, reference.gram_newton_schulz_factor, arguments)


@pytest.mark.parametrize(("steps", "coefficients"), RULES)
@pytest.mark.parametrize("size", [(5, 8), (8, 5)], ids=str)
def test_equals_reference_by_every_set(
    size: tuple[int, int], steps: int, coefficients: Any
) -> None:
    case = Case(*size)
    rules = {"steps": steps, "coefficients": coefficients}
    check_exact(MATRIX, reference.newton_schulz, case.arguments(0, torch.float64, CPU), **rules)
    arguments = case.gram_arguments(0, torch.float64, CPU)
    check_exact(FACTOR, reference.gram_newton_schulz_factor, arguments, **rules)


@pytest.mark.parametrize("eps", [1e-7, 0.3, 30.0])
def test_eps_is_added_to_the_norm(eps: float) -> None:
    case = Case(6, 9)
    check_exact(MATRIX, reference.newton_schulz, case.arguments(0, torch.float64, CPU), eps=eps)
    arguments = case.gram_arguments(0, torch.float64, CPU)
    check_exact(FACTOR, reference.gram_newton_schulz_factor, arguments, eps=eps)


@pytest.mark.parametrize("kind", ["condition", "deficient"])
@pytest.mark.parametrize("size", [(48, 96), (65, 33), (64, 64)], ids=str)
def test_equals_reference_where_singular_values_are_small(size: tuple[int, int], kind: str) -> None:
    arguments = Case(*size, kind=kind).arguments(0, torch.float64, CPU)
    check_exact(MATRIX, reference.newton_schulz, arguments)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACCURACY = [
    Case(1, 40),
    Case(33, 65, (3,)),
    Case(65, 33, (3,)),
    Case(200, 200, ()),
    Case(64, 64, kind="condition"),
    Case(48, 96, kind="condition"),
    Case(64, 64, kind="deficient"),
    Case(65, 33, kind="deficient"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ACCURACY, ids=case_id)
def test_error_of_each_dtype(case: Case, dtype: torch.dtype) -> None:
    literal = reference.newton_schulz
    if dtype == torch.float16 and case.kind != "normal":
        literal = everyday(torch.float16)
    oracle.check_op(MATRIX, literal, case.arguments, dtype, CPU, label=case.name, backend="eager")


@pytest.mark.parametrize("case", ACCURACY, ids=case_id)
def test_fp32_matrices_with_fp16_iterates(case: Case) -> None:
    """What Muon asks for."""
    oracle.check_op(
        MATRIX, everyday(torch.float16), case.arguments, torch.float32, CPU, label=case.name,
        compute_dtype=torch.float16,
    )  # fmt: skip


@pytest.mark.parametrize("case", ACCURACY, ids=case_id)
def test_16_bit_matrices_with_fp32_iterates(case: Case) -> None:
    """Only the matrix and the result are rounded: half a unit in the last place."""
    x = case.arguments(0, torch.bfloat16, CPU)["x"]
    got = MATRIX(x, compute_dtype=torch.float32)
    assert got.dtype == torch.bfloat16
    assert relative(got, reference.newton_schulz(x.double())) < 2.0**-9


@pytest.mark.parametrize("case", [c for c in ACCURACY if c.kind == "normal"], ids=case_id)
def test_error_of_the_factor(case: Case) -> None:
    for dtype in DTYPES:
        oracle.check_op(
            FACTOR, reference.gram_newton_schulz_factor, case.gram_arguments, dtype, CPU,
            label=f"{case.name} {dtype}",
        )  # fmt: skip


# ---- scales: of the matrix, of the upstream gradient, of the first step --------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_does_not_depend_on_the_scale_of_the_matrix(dtype: torch.dtype) -> None:
    arguments = Case(33, 65).arguments(0, dtype, CPU)
    expected = contracts.forward_backward(partial(MATRIX, eps=1e-30), arguments)
    # Powers of two are exact but where fp16 gradients are subnormal.
    limit = 2.0**-11 if dtype == torch.float16 else 1e-6
    for power in (-3, 3) if dtype == torch.float16 else (-40, 40):
        scaled = {"x": arguments["x"] * 2.0**power}
        got = contracts.forward_backward(partial(MATRIX, eps=1e-30), scaled)
        assert relative(got["out"], expected["out"].double()) < limit
        assert relative(got["d x"] * 2.0**power, expected["d x"].double()) < limit


@pytest.mark.parametrize("power", [-100, -40, 0, 40, 100])
def test_upstream_gradient_of_any_size(power: int) -> None:
    """Backward is linear in it, also through fp16 iterates."""
    x = Case(33, 65).matrices(0, CPU).float().requires_grad_()
    out = MATRIX(x, compute_dtype=torch.float16)
    upstream = torch.randn_like(out)
    (plain,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
    (scaled,) = torch.autograd.grad(out, x, upstream * 2.0**power)
    torch.testing.assert_close(scaled * 2.0**-power, plain, rtol=1e-6, atol=0)
    assert plain.any()


def test_upstream_gradient_of_zero() -> None:
    x = Case(6, 9).matrices(0, CPU).requires_grad_()
    upstream = torch.zeros(2, 6, 9, dtype=torch.float64)
    upstream[1] = 1
    (grad,) = torch.autograd.grad(MATRIX(x), x, upstream)
    assert not grad[0].any()
    assert grad[1].any()


def shape_of(x: torch.Tensor, **rules: Any) -> Any:
    """What a backend is told about `newton_schulz(x)`."""
    rules = {"steps": 5, "coefficients": "muon", "eps": 1e-7, "compute_dtype": None} | rules
    return op.newton_schulz_shape("newton_schulz", x, **rules)


@pytest.mark.parametrize(
    ("rows", "cols", "scale"),
    [
        (1 << 13, 1 << 13, 1), (1 << 13, (1 << 13) + 1, 2), (1 << 14, 1 << 14, 2),
        (1 << 14, (1 << 14) + 1, 4), (1, 1 << 30, 4), (64, 64, 1),
    ],
)  # fmt: skip
def test_first_step_of_large_fp16_matrices_is_scaled(rows: int, cols: int, scale: int) -> None:
    x = torch.empty(rows, cols, dtype=torch.float16, device="meta")
    assert shape_of(x).first_scale == scale
    assert shape_of(x, compute_dtype=torch.float32).first_scale == 1


@pytest.mark.parametrize("coefficients", ["muon", "polar_express"])
@pytest.mark.parametrize("case", [c for c in ACCURACY if c.cols > 1], ids=case_id)
def test_scaled_first_step_is_the_same_step(
    case: Case, coefficients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit brought down every size takes it; by 2⁴ at 64 × 64."""
    monkeypatch.setattr(op, "LARGE", 16)
    assert shape_of(torch.empty(64, 64, dtype=torch.float16)).first_scale == 16
    literal = partial(everyday(torch.float16), coefficients=coefficients)
    oracle.check_op(
        partial(MATRIX, coefficients=coefficients), literal, case.arguments, torch.float16, CPU,
        label=case.name,
    )  # fmt: skip


def test_scaled_first_step_saves_small_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 2⁻²⁰ of the norm are a few subnormal steps of fp16 without it."""
    x = Case(8, 64, strided=False).matrices(0, CPU)
    x[:, 1:] *= 2.0**-17
    truth = reference.newton_schulz(x.float().double())[:, 1:]
    errors = []
    for large in (1 << 26, 1):
        monkeypatch.setattr(op, "LARGE", large)
        got = MATRIX(x.float(), compute_dtype=torch.float16)[:, 1:]
        errors.append(relative(got, truth))
    assert errors[1] < errors[0] / 2


# ---- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_orthogonal_factors_come_through(size: tuple[int, int]) -> None:
    x = Case(*size).matrices(0, CPU)
    u, v = orthogonal(size[0], 1), orthogonal(size[1], 2)
    assert relative(MATRIX(u @ x @ v), u @ MATRIX(x) @ v) < EXACT


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("size", [(33, 65), (1, 9), (200, 20)], ids=str)
def test_transposition(size: tuple[int, int], dtype: torch.dtype) -> None:
    """The same products of the same numbers: bit for bit, in the gradient too."""
    arguments = Case(*size).arguments(0, dtype, CPU)
    upstream = torch.randn(arguments["x"].shape).to(dtype)
    runs = []
    for turn in (lambda x: x, lambda x: x.mT):
        x = turn(arguments["x"]).contiguous().requires_grad_()
        out = MATRIX(x)
        (grad,) = torch.autograd.grad(out, x, turn(upstream).contiguous())
        runs.append({"out": turn(out.detach()), "d x": turn(grad)})
    oracle.assert_bit_equal(runs[1], runs[0])


@pytest.mark.parametrize("function", [MATRIX, FACTOR])
def test_permuting_the_stack_permutes_the_result(function: Callable[..., torch.Tensor]) -> None:
    case = Case(20, 12, (5,))
    make = case.arguments if function is MATRIX else case.gram_arguments
    (x,) = make(0, torch.float32, CPU).values()
    order = torch.tensor([3, 0, 4, 1, 2])
    runs = []
    for first, last in ((slice(None), order), (order, slice(None))):
        leaf = x[first].clone().requires_grad_()
        out = function(leaf)
        (grad,) = torch.autograd.grad(out, leaf, out.detach() + 1)
        runs.append({"out": out.detach()[last], "d x": grad[last]})
    oracle.assert_bit_equal(runs[1], runs[0])


@pytest.mark.parametrize("coefficients", SETS)
def test_factor_times_matrix(coefficients: str) -> None:
    s = Case(65, 33).matrices(0, CPU)
    expected = MATRIX(s, coefficients=coefficients)
    assert relative(s @ FACTOR(s.mT @ s, coefficients=coefficients), expected) < EXACT
    t = s.mT
    assert relative(FACTOR(t @ t.mT, coefficients=coefficients) @ t, expected.mT) < EXACT


def test_factor_of_an_ill_conditioned_matrix_in_fp32() -> None:
    """Squaring costs digits: at a condition of 1e3 a few hundred times fp32's rounding."""
    s = Case(128, 64, kind="condition").matrices(0, CPU).float()
    truth = reference.newton_schulz(s.double())
    direct = relative(MATRIX(s), truth)
    gram = relative(s @ FACTOR(s.mT @ s), truth)
    assert direct < 100 * torch.finfo(torch.float32).eps
    assert gram < 1e4 * torch.finfo(torch.float32).eps


# Spec 4.1: singular values of 0.01 to 1 land here after five steps.
INTERVALS = {
    "muon": (0.682, 1.134),
    "modded_nanogpt": (0.978, 1.032),
    "polar_express": (0.870, 1.124),
    "polar_express_1.05": (0.846, 1.124),
}


@pytest.mark.parametrize("coefficients", SETS)
def test_singular_values_land_where_the_set_says(coefficients: str) -> None:
    low, high = INTERVALS[coefficients]
    s = torch.linspace(0.01, 1, 2001, dtype=torch.float64)
    x = torch.diag_embed(torch.stack([s, (1 - s**2).clamp(min=0).sqrt()], -1))
    for dtype, slack in ((torch.float64, 6e-4), (torch.float16, 6e-4 + 2.0**-8)):
        after = MATRIX(x.to(dtype), coefficients=coefficients)[:, 0, 0].double()
        assert abs(float(after.min()) - low) < slack
        assert abs(float(after.max()) - high) < slack


def test_sets_are_those_of_the_reference() -> None:
    assert list(SETS) == list(reference.newton_schulz.__globals__["SETS"])
    for name in SETS:
        expected = [number for triple in scheduled(name, 5) for number in triple]
        assert schedule("op", name, 5) == tuple(expected)
    assert schedule("op", OWN, 4) == (*OWN[0], *OWN[1], *OWN[1], *OWN[1])


# ---- zero ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("size", [(6, 9), (9, 6), (1, 1)], ids=str)
def test_zero_gives_zero_with_zero_gradient(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(3, *size)
    x[1] = 0
    gram = x.mT @ x + torch.eye(size[1]) * (torch.arange(3) != 1)[:, None, None]
    for function, argument in ((MATRIX, x), (FACTOR, gram)):
        leaf = argument.to(dtype).requires_grad_()
        out = function(leaf)
        (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        for got in (out.detach(), grad):
            assert not got[1].any()
            assert got.isfinite().all()
            assert got[0].any() or size == (1, 1)


def test_gram_of_negative_trace_counts_as_zero_and_nan_stays() -> None:
    gram = torch.stack([-1e-9 * torch.eye(3), torch.full((3, 3), torch.nan), torch.eye(3)])
    out = FACTOR(gram)
    assert not out[0].any()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()
    x = torch.stack([torch.full((3, 4), torch.nan), torch.ones(3, 4)])
    out = MATRIX(x)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_matrices_without_elements(size: tuple[int, int]) -> None:
    x = torch.empty(2, *size, requires_grad=True)
    out = MATRIX(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("size", [(4, 6), (6, 4), (1, 3), (4, 4)], ids=str)
def test_gradcheck(size: tuple[int, int], coefficients: str) -> None:
    x = Case(*size).matrices(0, CPU).requires_grad_()
    assert torch.autograd.gradcheck(partial(MATRIX, coefficients=coefficients), x)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_gradcheck_of_the_factor(steps: int) -> None:
    gram = Case(7, 4).gram_arguments(0, torch.float64, CPU)["gram"].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(partial(FACTOR, steps=steps), gram)


def test_radial_direction_has_no_gradient() -> None:
    """The result does not change along x itself, where eps is far below the norm."""
    x = Case(6, 9).matrices(0, CPU).requires_grad_()
    (grad,) = torch.autograd.grad(MATRIX(x, eps=1e-12), x, torch.randn(2, 6, 9).double())
    along = (grad * x).sum((-2, -1)) / grad.norm() / x.norm()
    assert along.abs().max() < 1e-11


@pytest.mark.parametrize("function", [MATRIX, FACTOR])
def test_backward_saves_the_input_alone(function: Callable[..., torch.Tensor]) -> None:
    x = Case(8, 8).matrices(0, CPU).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]
    assert saved[0].shape == x.shape


@pytest.mark.parametrize("function", [MATRIX, FACTOR])
def test_double_backward_says_no(function: Callable[..., torch.Tensor]) -> None:
    x = torch.eye(3).requires_grad_()
    (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    expected = rf"{function.__name__}_bwd has no double backward.*reference\.{function.__name__} "
    with pytest.raises(RuntimeError, match=expected):
        grad.sum().backward()
