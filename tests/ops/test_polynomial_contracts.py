"""The polynomial ops as torch sees them: compiled, exported, FLOPs, autocast, what is refused."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops
from helpers import contracts, oracle
from helpers.polynomial import Case

op = importlib.import_module("fastweights.ops.polynomial.op")
CPU = torch.device("cpu")
CALLS = [
    Case("features"),
    Case("features", "tiled", coefficients="none"),
    Case("features", "elementwise", 3, "shared"),
    Case("features", "concat", 3, kept=(0, 3)),
    Case("features", degree=3, coefficients="zeros"),
    Case("read"),
    Case("read", coefficients="none", degree=1),
    Case("update", coefficients="shared", kept=(0, 1, 2)),
    Case("update", coefficients="none"),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_contracts(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    contracts.check_backward_twice(case.op, given)
    contracts.check_grad_out_untouched(case.op, given)
    contracts.check_expanded_grad_out(case.op, given)
    contracts.check_repeatable(
        lambda: tuple(contracts.forward_backward(case.op, given).values()), 2
    )


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_fullgraph(case: Case) -> None:
    contracts.check_fullgraph(case.op, case.arguments(0, torch.float32, CPU))


@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_fullgraph_with_dynamic_sizes(function: str) -> None:
    torch._dynamo.reset()
    case = Case(function)
    compiled = torch.compile(case.op, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (4, 7):
        given = case.but(tokens=tokens).arguments(0, torch.float32, CPU)
        assert oracle.bit_equal(compiled(**given), case.op(**given))
    torch._dynamo.reset()


def test_export() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coefficients = torch.nn.Parameter(torch.tensor([0.0, 1.0, 0.5]))

        def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            state = ops.polynomial_update(x, g, self.coefficients)
            return ops.polynomial_read(x, state, self.coefficients)

    x, g = torch.randn(1, 4, 2, 3), torch.randn(1, 4, 2, 5)
    layer = Layer()
    exported = torch.export.export(layer, (x, g)).module()
    assert oracle.bit_equal(exported(x, g), layer(x, g))


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_results_are_contiguous(case: Case) -> None:
    for name, x in contracts.forward_backward(
        case.op, case.arguments(0, torch.float32, CPU)
    ).items():
        assert x.is_contiguous(), name


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    names = {"features": ["x"], "read": ["x", "state"], "update": ["x", "g"]}[case.function]
    given["x"] = given["x"].transpose(0, 1).contiguous().transpose(0, 1)  # dense, other strides
    tensors = [given.get(name) for name in (*names, "coefficients")]
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    map_ = case.map
    rules = (map_.kind, map_.degree, map_.kept, map_.tile, "eager")
    forward = getattr(torch.ops.fastweights, f"polynomial_{case.function}_fwd").default
    backward = getattr(torch.ops.fastweights, f"polynomial_{case.function}_bwd").default
    contracts.check_opcheck(forward, [(*leaves, *rules), (*tensors, *rules)])
    upstream = torch.randn_like(forward(*tensors, *rules))
    samples = [
        (upstream, wanted, *tensors, *rules)
        for wanted in ([True, True], [True, False], [False, True])
    ]
    contracts.check_opcheck(backward, samples)


def test_flops() -> None:
    """Counted without running anything."""
    case = Case()
    rows, wide, values = 2 * 7 * 2, case.wide, 3
    counts = {
        "features": (rows * wide, 4 * rows * wide),
        "read": (2 * rows * wide * values, 4 * rows * wide * values),
        "update": (2 * rows * wide * values, 4 * rows * wide * values),
    }
    for function, (forward, backward) in counts.items():
        given = case.but(function=function).arguments(0, torch.float32, CPU)
        with FakeTensorMode():
            fake = {
                name: torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
                for name, x in given.items()
            }
            leaves = contracts.leaves(fake)
            with FlopCounterMode(display=False) as counter:
                out = case.but(function=function).op(**leaves)
                assert counter.get_total_flops() == forward
                out.sum().backward()
            assert counter.get_total_flops() == forward + backward
            frozen = leaves | {"x": fake["x"], "coefficients": fake["coefficients"]}
            if function == "features":
                continue
            with FlopCounterMode(display=False) as counter:
                case.but(function=function).op(**frozen).sum().backward()
            assert counter.get_total_flops() == forward + backward // 2


def test_autocast_casts_the_operands_of_products_alone() -> None:
    for function in ("read", "update"):
        case = Case(function)
        given = case.arguments(0, torch.float32, CPU)
        with torch.autocast("cpu", torch.bfloat16):
            out = case.op(**given)
        state = out if function == "update" else given["state"]
        assert state.dtype == torch.float32
        if function == "read":
            assert out.dtype == torch.bfloat16
        cast = {name: given[name].bfloat16() for name in ("x", "g") if name in given}
        assert oracle.bit_equal(out, case.op(**given | cast))
        wide = case.arguments(0, torch.float64, CPU)
        with torch.autocast("cpu", torch.bfloat16):
            assert case.op(**wide).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.polynomial_features(torch.randn(2, 3)).dtype == torch.float32


@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_no_second_derivative(function: str) -> None:
    case = Case(function)
    leaves = contracts.leaves(case.arguments(0, torch.float32, CPU))
    out = case.op(**leaves)
    (d_x,) = torch.autograd.grad(out.square().sum(), leaves["x"], create_graph=True)
    message = f"polynomial_{function}_bwd has no double backward; differentiate fastweights"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(d_x.sum(), leaves["x"])


# ---- what is refused ----------------------------------------------------------------------------

X, A = torch.ones(2, 7, 2, 5), torch.tensor([0.0, 1.0, 1.0])
S, G = torch.ones(2, 2, 20, 3), torch.ones(2, 7, 2, 3)
F, R, U = ops.polynomial_features, ops.polynomial_read, ops.polynomial_update
REFUSED = [
    (F, (X.int(),), {}, TypeError, "polynomial_features: x has dtype int32"),
    (F, ([1.0],), {}, TypeError, "x must be a torch.Tensor, got list"),
    (F, (torch.tensor(1.0),), {}, ValueError, "x must have at least 1 dimensions"),
    (F, (X[..., :0],), {}, ValueError, "x has width 0"),
    (F, (X, A.half()), {}, TypeError, "coefficients has dtype float16; accepted: float32"),
    (F, (X.double(), A), {}, TypeError, "coefficients has dtype float32; accepted: float64"),
    (F, (X, A[:2]), {}, ValueError, "coefficients has size 2 in dimension 0, expected 3"),
    (F, (X, A.expand(3, 3)), {}, ValueError, r"size 3 in dimension 0, expected 2 \(the heads"),
    (F, (X[0, 0, 0], A.expand(2, 3)), {}, ValueError, "coefficients are by head, x has no heads"),
    (F, (X, A + 1), {}, ValueError, r"coefficients\[..., 0\] is 1.0, but .*kept=\(0, 1, 2\)"),
    (R, (X, S, A + 1), {}, ValueError, r"polynomial_read: coefficients\[..., 0\]"),
    (F, (X,), {"degree": 0}, ValueError, "degree must be at least 1, got 0"),
    (F, (X,), {"degree": 2.0}, TypeError, "degree must be an int, got float"),
    (F, (X,), {"degree": True}, TypeError, "degree must be an int, got bool"),
    (F, (X,), {"tile": 0}, ValueError, "tile must be at least 1"),
    (F, (X,), {"kind": "cubic"}, ValueError, "kind must be one of symmetric, tiled, elementwise"),
    (F, (X,), {"kind": "tiled", "degree": 3}, ValueError, "degree is 3, the kind tiled has"),
    (F, (X,), {"kept": 2}, TypeError, "kept must be a sequence of ints, got 2"),
    (F, (X,), {"kept": ()}, ValueError, r"kept must hold degrees from 0 to 2 \(degree\)"),
    (F, (X,), {"kept": (2, 1)}, ValueError, "kept must hold degrees"),
    (F, (X,), {"kept": (1, 3)}, ValueError, "kept must hold degrees"),
    (F, (X,), {"backend": "cublas"}, ValueError, "backend must be one of auto, eager"),
    (R, (X[0], S), {}, ValueError, r"x must have 4 dimensions \(B, T, H, d\)"),
    (R, (X, S.bfloat16()), {}, TypeError, "state has dtype bfloat16; accepted: float32"),
    (R, (X, S[:1]), {}, ValueError, r"state has size 1 in dimension 0, expected 2 \(the batch"),
    (R, (X, S[:, :1]), {}, ValueError, r"state has size 1 in dimension 1"),
    (R, (X, S[:, :, 1:]), {}, ValueError, r"size 19 in dimension 2, expected 20 \(the features"),
    (R, (X, S), {"kept": (0, 1, 2)}, ValueError, "dimension 2, expected 21"),
    (U, (X, G.half()), {}, TypeError, "g has dtype float16, x has float32"),
    (U, (X, G[:, 1:]), {}, ValueError, r"g has size 6 in dimension 1, expected 7 \(the tokens"),
    (U, (X, G[..., 0]), {}, ValueError, r"g must have 4 dimensions"),
    (U, (X, G.to("meta")), {}, ValueError, "g is on meta, expected cpu"),
]


@pytest.mark.parametrize(
    ("function", "tensors", "rules", "error", "words"), REFUSED, ids=[row[4] for row in REFUSED]
)
def test_errors_name_the_argument(
    function: Any, tensors: Any, rules: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        function(*tensors, **rules)
    if "backend" not in rules:
        with pytest.raises(error, match=words):
            ops.explain(function, *tensors, **rules)


def test_a_first_coefficient_is_fine_where_it_has_features() -> None:
    assert F(X, A + 1, kept=(0, 1, 2)).shape[-1] == 21
    assert F(X, A + 1, kind="elementwise").shape == X.shape
    assert F(X, A + 1, kept=(2,)).shape[-1] == 15  # it was said


def test_explain() -> None:
    for function, tensors in ((F, (X,)), (R, (X, S)), (U, (X, G))):
        said = ops.explain(function, *tensors)
        assert said.backend == "eager"
        assert said.op == function.__name__
        with FakeTensorMode():
            fake = [torch.empty(x.shape) for x in tensors]
            assert ops.explain(function, *fake).backend == "eager"
