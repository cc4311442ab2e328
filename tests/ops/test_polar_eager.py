"""The eager backend of Polar and softmax attention: against the reference, and every contract.

Blocks are cut to 16 rows and 16 keys, so that tests of a few dozen tokens cross many of them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from helpers import contracts, inputs, oracle, polar
from helpers.polar import PARAMETERS, RULES, SOFTMAX_RULES, Case

eager = importlib.import_module("fastweights.ops.polar_attention.eager")
CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "KEYS", 16)
    monkeypatch.setattr(eager, "TILE", {"cpu": 1})


def case_id(case: Case) -> str:
    return case.name


def relative(got: torch.Tensor, truth: torch.Tensor, least: float = 0.0) -> float:
    """Error over the norm of the truth, or over `least` if that is more."""
    truth, finite = truth.double(), truth.isfinite()
    assert torch.equal(got[~finite].double(), truth[~finite])
    difference = float((got.double() - truth)[finite].norm())
    return difference / max(float(truth[finite].norm()), least) if difference else 0.0


def doubles(case: Case) -> Any:
    """Inputs of a float64 case with its parameters in float64 too."""

    def make(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        arguments = case.arguments(seed, dtype, device)
        return {n: x.double() if oracle.is_floating(x) else x for n, x in arguments.items()}

    return make


def check_exact(case: Case, label: str = "") -> None:
    oracle.check_op(
        case.op, case.reference, doubles(case), torch.float64, CPU, seeds=(0,),
        label=label or case.name, backend="eager",
    )  # fmt: skip


def trained(case: Case) -> Any:
    """The operating point of a trained layer at long context: logits of ±55, t up to 6."""

    def make(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        arguments = case.arguments(seed, torch.float64, device)
        arguments["length_gain"] = arguments["length_gain"] + 0.7
        length = arguments["q"].shape[-1] ** 0.5
        for name in ("q", "k"):
            x = arguments[name]
            arguments[name] = x * (length / x.norm(dim=-1, keepdim=True))
        arguments["k"][:, ::7] = arguments["q"][:, -1:, :: case.hq // case.hk]
        return {n: x.to(dtype) if n in "qkv" else x for n, x in arguments.items()}

    return make


# ---- against the reference ----------------------------------------------------------------------

MORE_RULES = (
    Case(tq=33, tk=50, hq=6, hk=2, d=3, n_keys="batch", batch=2, layout="transposed"),
    Case(tq=48, d=1, hq=1, layout="misaligned"),
    Case(tq=40, packed=(0, 16, 16, 0), packed_k=(3, 20, 5, 12), n_keys="batch", window=7),
    Case(tq=40, packed=(16, 16, 8), layout="odd_stride"),
    Case(tq=0, tk=5),
    Case(tq=0, tk=0, packed=(0, 0)),
    Case(tq=3, tk=0, packed=(2,), packed_k=(0,)),
    Case(batch=0, tq=5),
    Case(batch=0, tq=5, n_keys="batch"),
    Case(tq=40, null_base=30.0),
)


@pytest.mark.parametrize("case", [*RULES, *MORE_RULES, *SOFTMAX_RULES], ids=case_id)
def test_equals_reference(case: Case) -> None:
    check_exact(case)


@pytest.mark.parametrize(
    "case",
    [Case(tq=300, window=270), Case(tq=300, tk=600, hq=4, packed=(280, 20), packed_k=(290, 300))],
    ids=case_id,
)
def test_equals_reference_in_blocks_of_real_size(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    check_exact(case)


@pytest.mark.parametrize(
    "case", [c for c in RULES if c.packed or c.n_keys or c.window or c.tk], ids=case_id
)
def test_equals_reference_where_lengths_stay_on_the_device(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU no tile is skipped by reading a length tensor: every tile must then mask itself."""
    plan = eager._Plan.__init__

    def blind(self: Any, *arguments: Any) -> None:
        plan(self, *arguments)
        self.host = None

    monkeypatch.setattr(eager._Plan, "__init__", blind)
    check_exact(case)


def test_trained_operating_point() -> None:
    case = Case(tq=100, hq=4, hk=2, d=64)
    arguments = trained(case)(0, torch.float64, CPU)
    assert case.op(**arguments)[2].lse.max() > 40
    for dtype in (torch.float64, torch.float32):
        oracle.check_op(
            case.op, case.reference, trained(case), dtype, CPU, label=str(dtype), backend="eager"
        )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(tq=65, d=64, hq=4, hk=2, layout="transposed"),
        Case(tq=60, tk=80, packed=(5, 0, 33, 10), packed_k=(20, 7, 33, 0)),
        Case(tq=50, tk=70, n_keys="batch", batch=2, window=24),
        Case(tq=65, null_base=8.0),
        Case(tq=65, null_base=-20.0),
        Case(tq=1, null_value=False),
        Case(tq=40, tk=50, hq=4, hk=2, window=1, packed=(1, 30), packed_k=(9, 40)),
        Case(tq=65, d=64, hq=4, hk=2, polar=False),
    ],
    ids=case_id,
)
def test_error_of_each_dtype(case: Case, dtype: torch.dtype) -> None:
    oracle.check_op(case.op, case.reference, case.arguments, dtype, CPU, backend="eager")


@pytest.mark.parametrize("null_base", [8.0, 18.0, -20.0])
def test_single_precision_keeps_its_digits(null_base: float) -> None:
    """Also the parameters' gradients, though all of them are as small as the loser's mass."""
    case = Case(tq=65, hq=4, hk=2, null_base=null_base)
    runs = []
    for dtype in (torch.float64, torch.float32):
        exact = {n: x.float().to(dtype) for n, x in doubles(case)(0, torch.float32, CPU).items()}
        runs.append(contracts.forward_backward(case.op, exact))
    truth, got = runs
    for name, x in got.items():
        assert relative(x, truth[name]) < 2e-5, name


# ---- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(tq=50, hq=4, hk=2),
        Case(tq=40, tk=60, batch=2, window=9),
        Case(tq=40, packed=(0, 9, 25)),
        Case(tq=40, n_keys="row", null_base=8.0),
    ],
    ids=case_id,
)
def test_row_identity(case: Case) -> None:
    polar.check_row_identity(case, torch.float64, CPU, 1e-7)  # parameters, so their sums, are fp32
    polar.check_row_identity(case, torch.float32, CPU, 1e-5)


@pytest.mark.parametrize("window", [40, 41, 5000])
def test_window_past_the_sequence_is_no_window(window: int) -> None:
    case = Case(tq=40, hq=4, hk=2)
    arguments = case.arguments(0, torch.float64, CPU)
    got = contracts.forward_backward(case.op, arguments | {"window": window})
    oracle.assert_bit_equal(got, contracts.forward_backward(case.op, arguments))


def test_n_keys_spells_out_causal_and_full() -> None:
    case = Case(tq=20, tk=33, batch=2)
    arguments = case.arguments(0, torch.float64, CPU)
    for causal, n in ((True, torch.arange(14, 34)), (False, torch.full((20,), 99))):
        plain = contracts.forward_backward(case.op, arguments | {"causal": causal})
        spelled = contracts.forward_backward(case.op, arguments | {"n_keys": n.to(torch.int32)})
        oracle.assert_bit_equal(spelled, plain, f"causal={causal}")


@pytest.mark.parametrize("window", [None, 7])
def test_continuation_gives_the_last_rows(window: int | None) -> None:
    case = Case(tq=50, hq=4, hk=2, window=window)
    arguments = case.arguments(0, torch.float64, CPU)
    whole = oracle.named(case.op(**arguments))
    last = oracle.named(case.op(**arguments | {"q": arguments["q"][:, 37:]}))
    for name, x in last.items():
        assert relative(x, whole[name][:, 37:]) < 1e-14, name


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_packed_equals_separate(polar_mode: bool) -> None:
    case = Case(tq=70, hq=4, hk=2, polar=polar_mode)

    def near(name: str, packed: torch.Tensor, alone: torch.Tensor) -> None:
        assert relative(packed, alone) < 1e-12, name

    arguments = doubles(case)(0, torch.float64, CPU)
    contracts.check_packed(
        case.op, arguments, ("q", "k", "v"), (1, 0, 33, 16, 0, 11), near
    )  # fmt: skip


def test_equal_keys_are_counted() -> None:
    case = Case(tq=40, hq=4, hk=2)
    arguments = case.arguments(0, torch.float64, CPU)
    arguments["k"] = arguments["k"][:, :1].expand(-1, 40, -1, -1)
    n_eff = case.op(**arguments)[2].n_eff
    expected = torch.arange(1, 41, dtype=torch.float64)[None, :, None].expand(1, 40, 4)
    torch.testing.assert_close(n_eff, expected, rtol=1e-12, atol=0)


def test_row_with_no_key() -> None:
    case = Case(tq=3, tk=20, hq=2)
    arguments = contracts.leaves(doubles(case)(0, torch.float64, CPU))
    arguments["n_keys"] = torch.tensor([0, 5, -4], dtype=torch.int32)
    direction, count, stats = case.op(**arguments)
    value = arguments["null_value"].detach()
    unit = value / value.norm(dim=-1, keepdim=True)
    for i in (0, 2):
        torch.testing.assert_close(direction[0, i], unit)
        assert not count[0, i].any()
        assert [x[0, i].tolist() for x in stats] == [[-torch.inf] * 2, [1.0] * 2, [1.0] * 2]
    dq, d_base = torch.autograd.grad(
        direction[:, ::2].sum() + count.sum(), [arguments["q"], arguments["null_base"]],
        retain_graph=True,
    )  # fmt: skip
    assert not dq[:, ::2].any()
    assert d_base.isfinite().all()
    # The null cannot win more than all: its logit has gradient exactly 0 there.
    assert not torch.autograd.grad(direction[:, ::2].sum(), arguments["null_base"])[0].any()


@pytest.mark.parametrize("backward_nan", [False, True], ids=["forward", "upstream"])
def test_nan_outside_every_row_stays_outside(backward_nan: bool) -> None:
    """Keys past the last visible one, padding rows, and what comes upstream for them."""
    case = Case(tq=40, tk=50, packed=(9, 20), packed_k=(20, 17))
    arguments = contracts.leaves(case.arguments(0, torch.float64, CPU))
    results = polar.with_statistics(**arguments)[:2]
    upstream = [torch.ones_like(x) for x in results]
    if backward_nan:
        for x in upstream:
            x[:, 29:] = torch.nan
    tensors = [x for x in arguments.values() if oracle.is_floating(x)]
    grads = torch.autograd.grad(results, tensors, upstream)
    assert all(x.isfinite().all() for x in (*results, *grads))

    arguments = Case(tq=20, tk=40).arguments(0, torch.float64, CPU)
    arguments["n_keys"] = torch.full((20,), 21, dtype=torch.int32)
    for name in "kv":
        arguments[name][:, 21:] = torch.nan
    got = contracts.forward_backward(polar.with_statistics, arguments)
    assert all(x.isfinite().all() for x in got.values())


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("null_value", [True, False], ids=["value", "no_value"])
def test_gradcheck(null_value: bool) -> None:
    case = Case(tq=19, tk=21, hq=4, hk=2, d=3, window=18, null_value=null_value)
    arguments = contracts.leaves(doubles(case)(0, torch.float64, CPU))
    names = [n for n, x in arguments.items() if oracle.is_floating(x)]
    rest = {n: x for n, x in arguments.items() if n not in names}

    def function(*tensors: torch.Tensor) -> Any:
        return ops.polar_attention(**dict(zip(names, tensors, strict=True)), **rest)

    assert torch.autograd.gradcheck(function, [arguments[n] for n in names], fast_mode=True)


def test_gradcheck_softmax() -> None:
    case = Case(tq=19, hq=4, hk=2, d=3, polar=False)
    arguments = contracts.leaves(case.arguments(0, torch.float64, CPU))
    qkv = [arguments[n].contiguous().detach().requires_grad_() for n in "qkv"]
    assert torch.autograd.gradcheck(ops.softmax_attention, qkv, fast_mode=True)


@pytest.mark.parametrize("index", [0, 1], ids=["direction", "count"])
def test_one_result_alone_has_a_gradient(index: int) -> None:
    case = Case(tq=20)
    runs = []
    for function in (ops.polar_attention, reference.polar_attention):
        arguments = contracts.leaves(doubles(case)(0, torch.float64, CPU))
        tensors = list(arguments.values())
        loss = function(**arguments)[index].sum()
        runs.append(torch.autograd.grad(loss, tensors, allow_unused=True))
    for name, got, truth in zip(arguments, *runs, strict=True):
        expected = torch.zeros_like(got) if truth is None else truth
        assert relative(got, expected, 1.0) < 1e-12, name


def test_gradient_at_zero_t() -> None:
    """t = 0 takes the keys out of the row; its derivative is still there."""
    case = Case(tq=1, tk=20)
    runs = []
    for function in (ops.polar_attention, reference.polar_attention):
        arguments = doubles(case)(0, torch.float64, CPU)
        length = torch.tensor(20.0, dtype=torch.float64).log()
        arguments["length_gain"] = torch.full((2,), -1 / float(length), dtype=torch.float64)
        runs.append(contracts.forward_backward(function, arguments))
    for name, x in runs[0].items():
        assert relative(x, runs[1][name], 1.0) < 1e-12, name


def test_radial_upstream_has_no_gradient() -> None:
    """A direction cannot grow: exactly so for the rounded one that was returned.

    But not in rows of one key, where backward does not go by the rounded one.
    """
    case = Case(tq=40, tk=41, hq=4, hk=2, layout="contiguous")
    arguments = contracts.leaves(case.arguments(0, torch.bfloat16, CPU))
    direction, _ = ops.polar_attention(**arguments)
    tensors = [arguments[n] for n in ("v", "null_value", "null_base")]
    radial = torch.autograd.grad(direction, tensors, direction.detach(), retain_graph=True)
    other = torch.autograd.grad(direction, tensors, direction.detach().flip(1))
    for got, size in zip(radial, other, strict=True):
        assert got.norm() < 1e-5 * size.norm()


def test_parameters_keep_their_dtype() -> None:
    case = Case(tq=20)
    arguments = case.arguments(0, torch.bfloat16, CPU)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float16)
    for name, dtype in zip((*PARAMETERS, "null_value"), dtypes, strict=True):
        arguments[name] = arguments[name].to(dtype)
    got = contracts.forward_backward(case.op, arguments)
    for name in (*PARAMETERS, "null_value", "q", "k", "v"):
        assert got[f"d {name}"].dtype == arguments[name].dtype, name


def test_double_backward_says_no() -> None:
    case = Case(tq=8)
    for function, name in ((ops.polar_attention, "polar"), (ops.softmax_attention, "softmax")):
        arguments = contracts.leaves(
            case.but(polar=name == "polar").arguments(0, torch.float64, CPU)
        )
        loss = function(**arguments)[0].square().sum()
        (dq,) = torch.autograd.grad(loss, arguments["q"], create_graph=True)
        expected = rf"no double backward.*reference\.{name}_attention"
        with pytest.raises(RuntimeError, match=expected):
            torch.autograd.grad(dq.sum(), arguments["q"])


# ---- contracts ----------------------------------------------------------------------------------

CONTRACT_CASES = [
    Case(tq=40, hq=4, hk=2),
    Case(tq=40, packed=(7, 0, 20), null_value=False),
    Case(tq=40, hq=4, hk=2, polar=False),
]


@pytest.mark.parametrize("case", CONTRACT_CASES, ids=case_id)
def test_contracts(case: Case) -> None:
    arguments = case.arguments(0, torch.float32, CPU)
    contracts.check_backward_twice(case.op, arguments)
    contracts.check_grad_out_untouched(case.op, arguments)
    contracts.check_expanded_grad_out(case.op, arguments)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_views(layout: str) -> None:
    case = Case(tq=40, hq=4, hk=2, d=24)
    arguments = case.but(layout="contiguous").arguments(0, torch.float32, CPU)
    views = dict(zip("qkv", inputs.lay_out(*(arguments[n] for n in "qkv"), layout), strict=True))
    contracts.check_views(case.op, arguments, views)
    spaced = {n: inputs.spaced(arguments[n]) for n in "qkv"}
    contracts.check_views(case.op, arguments, spaced)


@pytest.mark.parametrize("case", CONTRACT_CASES, ids=case_id)
def test_fullgraph(case: Case) -> None:
    function = ops.polar_attention if case.polar else ops.softmax_attention
    contracts.check_fullgraph(function, case.arguments(0, torch.float32, CPU), compiler="aot_eager")


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_opcheck(polar_mode: bool) -> None:
    name = "polar_attention" if polar_mode else "softmax_attention"
    forward = getattr(torch.ops.fastweights, f"{name}_fwd").default
    backward = getattr(torch.ops.fastweights, f"{name}_bwd").default
    small = Case(tq=6, hq=2, hk=1, d=4, polar=polar_mode)
    cases = [
        (small, True),
        (small.but(layout="transposed", null_value=False), True),
        (small.but(packed=(2, 0, 3), layout="contiguous"), False),
        (small.but(tq=0, tk=0, layout="contiguous"), False),
    ]
    forwards, backwards = [], []
    for case, requires_grad in cases:
        arguments = case.arguments(0, torch.float32, CPU)
        plain = polar.operator_arguments(arguments)
        results = forward(*plain)
        # Statistics after direction, count and lse: n_eff and rho are saved, the null's mass not.
        saved = (results[0], *results[2:5]) if polar_mode else results
        upstream = [torch.randn_like(x) for x in results[:2]]
        backwards.append((*upstream, *saved, *plain))
        if requires_grad:
            arguments = contracts.leaves(arguments)
        forwards.append(polar.operator_arguments(arguments))
    contracts.check_opcheck(forward, forwards)
    contracts.check_opcheck(backward, backwards)


def test_results_are_contiguous() -> None:
    case = Case(tq=20, hq=4, hk=2, layout="transposed")
    arguments = contracts.leaves(case.arguments(0, torch.bfloat16, CPU))
    results = ops.polar_attention(**arguments)
    grads = torch.autograd.grad(
        results, list(arguments.values()), [torch.ones_like(x) for x in results]
    )
    assert all(x.is_contiguous() for x in (*results, *grads))


def test_flops_under_fake_tensors() -> None:
    batch, tokens, heads, width = 2, 48, 4, 16
    with FakeTensorMode():
        q = torch.empty(batch, tokens, heads, width, requires_grad=True)
        k = torch.empty(batch, tokens, 2, width)
        parameters = {name: torch.empty(heads) for name in PARAMETERS}
        with FlopCounterMode(display=False) as counter:
            direction, _ = ops.polar_attention(q, k, k, **parameters)
            forward = counter.get_total_flops()
            direction.sum().backward()
            both = counter.get_total_flops()
        with FlopCounterMode(display=False) as windowed:
            ops.softmax_attention(q, k, k, window=10)
    pairs = batch * heads * tokens * (tokens + 1) // 2
    assert forward == 4 * width * pairs
    assert both - forward == 10 * width * pairs
    pairs = batch * heads * sum(min(i + 1, 10) for i in range(tokens))
    assert windowed.get_total_flops() == 4 * width * pairs


# ---- autocast, and what is refused --------------------------------------------------------------


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_autocast_with_mixed_inputs(polar_mode: bool) -> None:
    case = Case(tq=40, hq=4, hk=2, polar=polar_mode)
    function = ops.polar_attention if polar_mode else ops.softmax_attention
    mixed = case.arguments(0, torch.float32, CPU)
    mixed["k"] = mixed["k"].bfloat16()
    halves = mixed | {n: mixed[n].bfloat16() for n in "qkv"}
    with torch.autocast("cpu", torch.bfloat16):
        got = contracts.forward_backward(function, mixed)
    expected = contracts.forward_backward(function, halves)
    assert got["out0"].dtype == torch.bfloat16
    for name, x in got.items():
        wide = name.startswith("d ") and name != "d k"
        assert x.dtype == (torch.float32 if wide else expected[name].dtype), name
        assert oracle.bit_equal(x.to(expected[name].dtype), expected[name]), name


def test_autocast_leaves_float64_alone() -> None:
    case = Case(tq=20)
    arguments = doubles(case)(0, torch.float64, CPU)
    plain = contracts.forward_backward(case.op, arguments)
    with torch.autocast("cpu", torch.bfloat16):
        oracle.assert_bit_equal(contracts.forward_backward(case.op, arguments), plain)


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


REFUSED = {
    "q-list": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor"),
    "q-integers": ({"q": f(1, 6, 4, 8).int()}, TypeError, "q has dtype int32"),
    "q-flat": ({"q": f(6, 4, 8)}, ValueError, "q must have 4 dimensions"),
    "k-dtype": ({"k": f(1, 6, 2, 8).half()}, TypeError, "k has dtype float16, q has float32"),
    "k-batch": ({"k": f(2, 6, 2, 8)}, ValueError, "k has size 2 in dimension 0, expected 1"),
    "v-tokens": ({"v": f(1, 5, 2, 8)}, ValueError, "v has size 5 in dimension 1, expected 6"),
    "v-width": ({"v": f(1, 6, 2, 4)}, ValueError, "v has size 4 in dimension 3, expected 8"),
    "v-heads": ({"v": f(1, 6, 4, 8)}, ValueError, "v has size 4 in dimension 2, expected 2"),
    "heads": ({"q": f(1, 6, 3, 8)}, ValueError, "q has 3 heads, not a multiple of the 2"),
    "width": (
        {"q": f(1, 6, 4, 257), "k": f(1, 6, 2, 257), "v": f(1, 6, 2, 257)},
        ValueError,
        "head width D of q is 257",
    ),
    "scale": ({"scale": -0.1}, ValueError, "scale must be at least 0, got -0.1"),
    "scale-nan": ({"scale": float("nan")}, ValueError, "scale must be at least 0, got nan"),
    "window": ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    "null_base": ({"null_base": f(3)}, ValueError, "null_base has size 3"),
    "null_slope": ({"null_slope": f(4, 1)}, ValueError, "null_slope must have 1 dimensions"),
    "length_gain": ({"length_gain": f(4).long()}, TypeError, "length_gain has dtype int64"),
    "null_value": ({"null_value": f(4, 7)}, ValueError, "null_value has size 7 in dimension 1"),
    "n_keys-dtype": ({"n_keys": f(6).long()}, TypeError, "n_keys has dtype int64"),
    "n_keys-size": ({"n_keys": i32(1, 2)}, ValueError, "n_keys has size 2"),
    "cu-k-alone": ({"cu_seqlens_k": i32(0, 6)}, ValueError, "cu_seqlens_k was given without"),
    "cu-falls": ({"cu_seqlens": i32(0, 4, 3)}, ValueError, "cu_seqlens must start at 0 and never"),
    "cu-start": ({"cu_seqlens": i32(1, 4)}, ValueError, "cu_seqlens must start at 0"),
    "cu-end": ({"cu_seqlens": i32(0, 7)}, ValueError, "cu_seqlens ends at 7, past the 6 tokens"),
    "cu-dtype": ({"cu_seqlens": i32(0, 6).long()}, TypeError, "cu_seqlens has dtype int64"),
    "cu-k-size": (
        {"cu_seqlens": i32(0, 6), "cu_seqlens_k": i32(0, 3, 6)},
        ValueError,
        "cu_seqlens_k has shape",
    ),
    "backend": ({"backend": "cublas"}, ValueError, "backend must be one of auto, eager"),
    "no-backend": ({"backend": "cuda"}, ValueError, "backend='cuda' cannot run this call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(name: str) -> None:
    change, kind, message = REFUSED[name]
    arguments = {"q": f(1, 6, 4, 8), "k": f(1, 6, 2, 8), "v": f(1, 6, 2, 8)}
    arguments |= {name: f(4) for name in PARAMETERS}
    ops.polar_attention(**arguments)
    with pytest.raises(kind) as failure:
        ops.polar_attention(**arguments | change)
    assert str(failure.value).startswith("polar_attention: ")
    assert message in str(failure.value)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the two passes grows with Tq·Tk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **kwargs or {})
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.numel())
            return out

    monkeypatch.undo()
    case = Case(tq=1500, d=8, hq=2, hk=1, layout="contiguous")
    arguments = case.arguments(0, torch.float32, CPU)
    shape = polar.shape_of(arguments)
    null, lengths = (
        polar.NullParameters(*(arguments.get(n) for n in ("null_value", *PARAMETERS))),
        (polar.Lengths(None, None, None)),
    )
    with Largest() as largest:
        out = eager.fwd(shape, *(arguments[n] for n in "qkv"), null, lengths)
        direction, count, lse, n_eff, rho, _ = out
        eager.bwd(
            shape, direction, count, *(arguments[n] for n in "qkv"), null, lengths, direction, lse,
            n_eff, rho,
        )  # fmt: skip
    assert largest.elements <= 2 * eager.KEYS**2
