"""Newton–Schulz as an operator: compiled, exported, views, FLOPs, autocast, and what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops
from fastweights.ops import flops
from fastweights.ops.newton_schulz.coefficients import schedule
from fastweights.ops.newton_schulz.op import factor_shape, newton_schulz_shape
from helpers import contracts, inputs, oracle
from helpers.newton_schulz import Case

eager = importlib.import_module("fastweights.ops.newton_schulz.eager")
CPU = torch.device("cpu")
MATRIX, FACTOR = ops.newton_schulz, ops.gram_newton_schulz_factor
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OWN = [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]


CALLS = [
    pytest.param(MATRIX, Case(9, 14).arguments, {}, id="wide"),
    pytest.param(MATRIX, Case(14, 9, (2, 2)).arguments, {"coefficients": "polar_express"},
                 id="tall"),
    pytest.param(MATRIX, Case(9, 14, ()).arguments, {"compute_dtype": torch.float16}, id="fp16"),
    pytest.param(FACTOR, Case(9, 14).gram_arguments, {"steps": 3}, id="factor"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "make", "rules"), CALLS)
def test_contracts(function: Any, make: Any, rules: dict[str, Any]) -> None:
    arguments = make(0, torch.float32, CPU)
    call = partial(function, **rules)
    contracts.check_backward_twice(call, arguments)
    contracts.check_grad_out_untouched(call, arguments)
    contracts.check_expanded_grad_out(call, arguments)
    contracts.check_repeatable(
        lambda: tuple(contracts.forward_backward(call, arguments).values()), 2
    )


@pytest.mark.parametrize(("function", "make", "rules"), CALLS)
def test_fullgraph(function: Any, make: Any, rules: dict[str, Any]) -> None:
    for compiler in ("eager", "aot_eager"):
        arguments = make(0, torch.float32, CPU) | rules
        contracts.check_fullgraph(function, arguments, compiler=compiler)


@pytest.mark.parametrize("function", [MATRIX, FACTOR])
def test_fullgraph_with_dynamic_sizes(function: Callable[..., torch.Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 7):
        x = torch.randn(n, 6, 6)
        assert oracle.bit_equal(compiled(x), function(x))
    torch._dynamo.reset()


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MATRIX(x, coefficients="modded_nanogpt")

    x = torch.randn(2, 4, 6)
    exported = torch.export.export(Layer(), (x,)).module()
    assert oracle.bit_equal(exported(x), MATRIX(x, coefficients="modded_nanogpt"))


@pytest.mark.parametrize("layout", ["transposed", "spaced", "misaligned", "expanded", "batch"])
@pytest.mark.parametrize(("function", "make", "rules"), CALLS)
def test_views(function: Any, make: Any, rules: dict[str, Any], layout: str) -> None:
    ((name, x),) = make(0, torch.float32, CPU).items()
    x = x.contiguous()
    if layout == "transposed":
        view = inputs.embed(x.mT).mT
    elif layout == "spaced":
        view = inputs.spaced(x)
    elif layout == "misaligned":
        view = inputs.embed(x, pad=1, offset=1)
    elif layout == "expanded":
        x = x[..., :1, :].expand_as(x).contiguous()
        view = x[..., :1, :].expand_as(x)
    else:
        whole = torch.full((*x.shape[-2:], *x.shape[:-2]), torch.nan)
        whole.copy_(x.movedim((-2, -1), (0, 1)))
        view = whole.movedim((0, 1), (-2, -1))
    assert view.stride() != x.stride() or x.ndim == 2
    contracts.check_views(partial(function, **rules), {name: x}, {name: view})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_contiguous_and_of_the_right_dtype(dtype: torch.dtype) -> None:
    for size in ((4, 7), (7, 4)):
        x = inputs.embed(torch.randn(2, *size).to(dtype)).requires_grad_()
        out = MATRIX(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert out.dtype == grad.dtype == dtype
        assert out.is_contiguous()
        assert grad.is_contiguous()
        gram = inputs.embed(torch.eye(4).to(dtype)).requires_grad_()
        factor = FACTOR(gram)
        (grad,) = torch.autograd.grad(factor.sum(), gram)
        assert factor.dtype == torch.promote_types(dtype, torch.float32)
        assert grad.dtype == dtype
        assert factor.is_contiguous()
        assert grad.is_contiguous()


def test_opcheck() -> None:
    numbers = list(schedule("op", "polar_express", 5))
    wide = inputs.embed(torch.randn(2, 4, 6))
    samples = [
        (wide, numbers, 1e-7, torch.float32, "auto"),
        (wide.bfloat16(), numbers[:3], 1e-7, torch.float16, "eager"),
        (torch.randn(6, 4).double(), numbers, 1e-3, torch.float64, "auto"),
        (torch.randn(0, 6, 4), numbers, 1e-3, torch.float16, "auto"),
    ]
    grams = [
        (x @ x.mT, c, e, torch.float64 if x.dtype == torch.float64 else torch.float32, b)
        for x, c, e, _, b in samples
    ]
    for name, cases in (("newton_schulz", samples), ("gram_newton_schulz_factor", grams)):
        forward = getattr(torch.ops.fastweights, f"{name}_fwd").default
        backward = getattr(torch.ops.fastweights, f"{name}_bwd").default
        upstream = [torch.randn_like(forward(*case)) for case in cases]
        leaves = [(case[0].clone().requires_grad_(), *case[1:]) for case in cases]
        contracts.check_opcheck(forward, [*cases, *leaves])
        backwards = [(d, *case) for d, case in zip(upstream, cases, strict=True)]
        contracts.check_opcheck(backward, backwards)


# ---- FLOPs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("size", [(8, 20), (20, 8), (7, 7)], ids=str)
def test_flop_formulas_are_what_eager_multiplies(size: tuple[int, int], steps: int) -> None:
    n, m = sorted(size)
    x = torch.randn(3, *size)
    gram = torch.randn(3, n, n)
    rules = (steps, "muon", 1e-7, None)
    formulas = (
        (newton_schulz_shape("op", x, *rules), x, flops.newton_schulz_forward(n, m, steps),
         flops.newton_schulz_backward(n, m, steps)),
        (factor_shape("op", gram, *rules), gram, flops.gram_factor_forward(n, steps),
         flops.gram_factor_backward(n, steps)),
    )  # fmt: skip
    for shape, argument, forward, backward in formulas:
        with FlopCounterMode(display=False) as counter:
            eager.fwd(shape, argument)
        assert counter.get_total_flops() == 3 * forward
        with FlopCounterMode(display=False) as counter:
            eager.bwd(shape, argument, argument)
        assert counter.get_total_flops() == 3 * backward


def test_flops_under_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, 64, 32, requires_grad=True)
        gram = torch.empty(5, 32, 32, requires_grad=True)
        counts = []
        for function, argument in ((MATRIX, x), (FACTOR, gram)):
            with FlopCounterMode(display=False) as counter:
                out = function(argument)
                counts.append(counter.get_total_flops())
                out.sum().backward()
                counts.append(counter.get_total_flops() - counts[-1])
    n, m = 32, 64
    assert counts[0] == 6 * 5 * (4 * n * n * m + 2 * n**3)
    assert counts[1] == 6 * (5 * (10 * n * n * m + 4 * n**3) - 2 * n * n * m)
    assert counts[2] == 5 * 34 * n**3
    assert counts[3] == 5 * 100 * n**3


# ---- autocast, backends, and what is refused ----------------------------------------------------


def test_autocast_casts_the_matrix() -> None:
    x = Case(9, 14).matrices(0, CPU).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = MATRIX(x)
    assert out.dtype == torch.bfloat16
    half = x.detach().bfloat16().requires_grad_()
    assert oracle.bit_equal(out.detach(), MATRIX(half).detach())
    upstream = torch.randn(out.shape).bfloat16()
    (grad,) = torch.autograd.grad(out, x, upstream)
    (expected,) = torch.autograd.grad(MATRIX(half), half, upstream)
    assert grad.dtype == torch.float32
    assert oracle.bit_equal(grad.bfloat16(), expected)


def test_autocast_leaves_alone_what_is_not_its_business() -> None:
    """float64, a matrix whose compute dtype was asked for, and Gram matrices."""
    x = Case(9, 9).matrices(0, CPU)
    single, gram = x.float(), x.mT @ x
    single_gram = gram.float()
    calls = [
        lambda: MATRIX(x),
        lambda: MATRIX(single, compute_dtype=torch.float32),
        lambda: MATRIX(single, compute_dtype=torch.float16),
        lambda: FACTOR(gram),
        lambda: FACTOR(single_gram),
    ]
    for i, call in enumerate(calls):
        expected = call()
        with torch.autocast("cpu", torch.bfloat16):
            assert oracle.bit_equal(call(), expected), i


def test_explain_names_the_backend() -> None:
    x = torch.randn(2, 4, 6)
    assert ops.explain(MATRIX, x).backend == "eager"
    assert ops.explain(FACTOR, x @ x.mT, steps=3).backend == "eager"
    missing = ops.explain(MATRIX, x.to("meta"), backend="cuda")
    assert missing.backend is None
    assert "cuda" in missing.refused
    with ops.use_backend("eager"):
        assert ops.explain(MATRIX, x).why == "asked for"


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


RULE_REFUSALS = {
    "steps": ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
    "steps-float": ({"steps": 2.0}, TypeError, "steps must be an int, got float"),
    "eps": ({"eps": 0.0}, ValueError, "eps must be a finite number above 0, got 0.0"),
    "eps-negative": ({"eps": -1e-7}, ValueError, "eps must be a finite number above 0"),
    "eps-nan": ({"eps": float("nan")}, ValueError, "eps must be a finite number above 0"),
    "name": ({"coefficients": "moon"}, ValueError, "coefficients must be one of muon, modded"),
    "flat": ({"coefficients": (3.4, -4.7, 2.0)}, ValueError, "coefficients must be a name or"),
    "pairs": ({"coefficients": [(1.0, 2.0)]}, ValueError, "coefficients must be a name or"),
    "words": ({"coefficients": [("a", "b", "c")]}, ValueError, "coefficients must be a name or"),
    "infinite": (
        {"coefficients": [(1.0, float("inf"), 0.0)]}, ValueError, "coefficients must be a name or"),
    "none": ({"coefficients": []}, ValueError, "coefficients must be a name or"),
    "long": ({"coefficients": OWN, "steps": 1}, ValueError, "holds 2 triples, steps is 1"),
    "long-name": ({"coefficients": "polar_express", "steps": 4}, ValueError, "holds 5 triples"),
    "compute": ({"compute_dtype": torch.float64}, TypeError, "compute_dtype is torch.float64"),
    "compute-bf16": ({"compute_dtype": torch.bfloat16}, TypeError, "compute_dtype is torch.bf"),
    "compute-int": ({"compute_dtype": torch.int32}, TypeError, "compute_dtype is torch.int32"),
    "backend": ({"backend": "cublas"}, ValueError, "backend must be one of auto, eager"),
    "no-backend": ({"backend": "cuda"}, ValueError, "backend='cuda' cannot run this call"),
}  # fmt: skip
MATRIX_REFUSALS = {
    "list": ({"x": [[1.0]]}, TypeError, "x must be a torch.Tensor, got list"),
    "integers": ({"x": f(3, 4).int()}, TypeError, "x has dtype int32; accepted"),
    "vector": ({"x": f(3)}, ValueError, "x must have at least 2 dimensions (..., m, n)"),
    "compute-double": (
        {"x": f(3, 4).double(), "compute_dtype": torch.float32}, TypeError, "accepted for x of"),
}  # fmt: skip
FACTOR_REFUSALS = {
    "integers": ({"gram": f(3, 3).long()}, TypeError, "gram has dtype int64; accepted"),
    "vector": ({"gram": f(3)}, ValueError, "gram must have at least 2 dimensions (..., n, n)"),
    "square": ({"gram": f(2, 3, 4)}, ValueError, "gram has size 4 in dimension 2, expected 3"),
    "compute-fp16": ({"compute_dtype": torch.float16}, TypeError, "accepted for gram of"),
}


@pytest.mark.parametrize("name", RULE_REFUSALS | MATRIX_REFUSALS)
def test_refusals_name_the_argument(name: str) -> None:
    change, kind, message = (RULE_REFUSALS | MATRIX_REFUSALS)[name]
    check_refusal(MATRIX, {"x": f(3, 4)}, change, kind, message, "newton_schulz: ")


@pytest.mark.parametrize("name", RULE_REFUSALS | FACTOR_REFUSALS)
def test_refusals_of_the_factor_name_the_argument(name: str) -> None:
    change, kind, message = (RULE_REFUSALS | FACTOR_REFUSALS)[name]
    start = "newton_schulz: " if name == "no-backend" else "gram_newton_schulz_factor: "
    check_refusal(FACTOR, {"gram": f(3, 3)}, change, kind, message, start)


def check_refusal(
    function: Any, good: dict[str, Any], change: dict[str, Any], kind: Any, message: str, start: str
) -> None:
    function(**good)
    with pytest.raises(kind) as failure:
        function(**good | change)
    assert str(failure.value).startswith(start)
    assert message in str(failure.value)


def test_dtensor_is_refused() -> None:
    from torch import distributed
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(f(3, 3), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"x is a DTensor.*full_tensor"):
            MATRIX(x)
        with pytest.raises(TypeError, match="gram is a DTensor"):
            FACTOR(x)
    finally:
        distributed.destroy_process_group()
