"""The short convolution in plain torch against the literal loop, and as torch sees it."""

from __future__ import annotations

import importlib
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from helpers import contracts, inputs, oracle
from helpers.short_conv import TOKENS, Case

op = importlib.import_module("fastweights.ops.short_conv.op")
CPU = torch.device("cpu")
WIDE = torch.float64
OP = ops.short_conv
LITERAL = reference.short_conv
CANON = {"gates": "", "taps": 4, "residual": True}
ALL = {"taps": 4, "residual": True, "activation": "silu", "bias": True, "carried": True}


def assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], most: float) -> None:
    """Relative to the size of each tensor."""
    assert list(got) == list(wanted)
    for name, x in wanted.items():
        assert got[name].shape == x.shape, name
        assert got[name].dtype == x.dtype, name
        gap = (got[name].double() - x.double()).norm()
        assert gap <= most * max(1.0, float(x.double().norm())), (name, gap)


def read(function: Any, **given: Any) -> torch.Tensor:
    """y alone."""
    return function(**given)[0]


# ---- against the loop ---------------------------------------------------------------------------

CASES = [
    Case(),
    Case(gates="", taps=1),
    Case(gates="i", taps=2, carried=True),
    Case(gates="o", taps=3, bias=True),
    Case(**CANON),
    Case(**CANON, carried=True, activation="silu"),
    *(Case(**ALL, tokens=tokens) for tokens in (0, 1, 2, 3, 63, 64, 65, 127)),
    Case(tokens=2, taps=4),
    Case(packed=(0, 7, 7, 16), **ALL),
    Case(packed=(0, 1, 3, 19), **CANON),
    Case(packed=(0, 2, 19), taps=1, bias=True),
    Case(packed=(0,), taps=4),
    Case(packed=(0, 0), tokens=0, **ALL),
    Case(batch=0, **ALL),
    Case(channels=1, taps=4, activation="silu"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_literal(case: Case) -> None:
    """y, the state, and the gradient of every tensor from both."""
    given = case.arguments(0, WIDE, CPU) | {"output_final_state": True}
    got = contracts.forward_backward(OP, given)
    assert_near(got, contracts.forward_backward(LITERAL, given), 1e-13)


def test_gradcheck() -> None:
    given = Case(1, 5, 2, **ALL).arguments(0, WIDE, CPU) | {"output_final_state": True}
    names = [name for name, x in given.items() if oracle.is_floating(x)]
    leaves = [given[name].contiguous().requires_grad_() for name in names]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return OP(**given | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("cuts", [(1,), (2, 4, 5), (7, 7, 18)], ids=str)
def test_pieces_are_the_whole(cuts: tuple[int, ...]) -> None:
    """Also in narrow types: the state is not rounded."""
    given = Case(**ALL).arguments(0, torch.bfloat16, CPU) | {"output_final_state": True}
    whole, last = OP(**given)
    state, found = given["initial_state"], []
    for begin, end in itertools.pairwise((0, *cuts, 19)):
        piece = {name: given[name][:, begin:end] for name in TOKENS}
        y, state = OP(**given | piece | {"initial_state": state})
        found.append(y)
    assert torch.equal(torch.cat(found, 1), whole)
    assert torch.equal(state, last)


def test_packed_sequences_are_separate_ones() -> None:
    given = Case(**ALL, batch=1).but(carried=False).arguments(0, WIDE, CPU)

    def near(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=name)

    contracts.check_packed(partial(read, OP), given, TOKENS, (7, 0, 2, 9), near)


def test_the_state_of_packed_sequences() -> None:
    given = Case(**ALL, packed=(0, 7, 7, 9)).arguments(0, WIDE, CPU)
    _, left = OP(**given, output_final_state=True)
    for n, (begin, end) in enumerate(((0, 7), (7, 7), (7, 9))):
        alone = given | {name: given[name][:, begin:end] for name in TOKENS}
        alone |= {"initial_state": given["initial_state"][n : n + 1], "cu_seqlens": None}
        _, wanted = OP(**alone, output_final_state=True)
        assert torch.equal(left[n : n + 1], wanted)


# ---- narrow types -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [Case(), Case(**CANON), Case(**ALL)], ids=lambda case: case.name)
def test_narrow_types(case: Case, dtype: torch.dtype) -> None:
    literal = partial(LITERAL, output_final_state=True)
    oracle.check_op(
        partial(OP, output_final_state=True), literal, case.arguments, dtype, CPU, label=case.name
    )


def test_parameters_of_another_dtype() -> None:
    """Read as fp32; their gradients come in their own dtype."""
    given = Case(**ALL).arguments(0, torch.bfloat16, CPU) | {"output_final_state": True}
    given |= {name: given[name].float() for name in ("weight", "bias")}
    got = contracts.forward_backward(OP, given)
    assert got["d weight"].dtype == got["d bias"].dtype == got["out1"].dtype == torch.float32
    assert got["out0"].dtype == got["d x"].dtype == torch.bfloat16
    wanted = contracts.forward_backward(LITERAL, given)
    assert_near({"d weight": got["d weight"]}, {"d weight": wanted["d weight"]}, 1e-6)


# ---- as torch sees it ---------------------------------------------------------------------------

CALLS = [Case(**ALL), Case(**CANON), Case(packed=(0, 9, 17), activation="silu", carried=True)]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_contracts(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    call = partial(read, OP)
    contracts.check_backward_twice(call, given)
    contracts.check_grad_out_untouched(call, given)
    contracts.check_expanded_grad_out(call, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(call, given).values()), 2)


def test_fullgraph() -> None:
    given = Case(**ALL).arguments(0, torch.float32, CPU) | {"output_final_state": True}
    contracts.check_fullgraph(lambda **given: OP(**given), given)


def test_export_for_any_number_of_tokens() -> None:
    class Conv(torch.nn.Module):
        def forward(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> Any:
            return OP(x, weight, gate_in=gate, gate_out=gate, output_final_state=True)

    def tensors(tokens: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(2, tokens, 6), torch.randn(2, tokens, 6), torch.ones(6, 4)

    length = {1: torch.export.Dim("tokens")}
    shapes = (length, length, None)
    program = torch.export.export(Conv(), tensors(9), dynamic_shapes=shapes)
    for tokens in (1, 9, 64):
        given = tensors(tokens)
        assert_near(oracle.named(program.module()(*given)), oracle.named(Conv()(*given)), 0)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    tensors = [given.get(name) for name in op.ConvTensors._fields]
    rules = (case.activation or "none", case.residual, "eager")
    leaves = [x.detach().requires_grad_() if oracle.is_floating(x) else x for x in tensors]
    contracts.check_opcheck(op.CONV_FWD, [(*leaves, *rules)])
    y, state = op.CONV_FWD(*tensors, *rules)
    contracts.check_opcheck(op.CONV_BWD, [(y, state, *tensors, *rules)])


def test_only_the_arguments_are_saved() -> None:
    given = Case(**ALL).arguments(0, torch.float32, CPU)
    leaves = contracts.leaves(given)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = OP(**leaves)[0]
    own = {x.data_ptr() for x in leaves.values() if isinstance(x, torch.Tensor)}
    assert len(saved) == len(own)
    assert {x.data_ptr() for x in saved} == own
    (d,) = torch.autograd.grad(y.sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="short_conv_bwd has no double backward"):
        d.sum().backward()


@pytest.mark.parametrize(("case", "passes"), [(Case(), 4), (Case(gates="i"), 3)], ids=str)
def test_flops(case: Case, passes: int) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 19, 6, requires_grad=True)
        gates = {"gate_in": x, "gate_out": x if "o" in case.gates else None}
        with FlopCounterMode(display=False) as counter:
            OP(x, torch.empty(6, 3), **gates)[0].sum().backward()
    assert counter.get_total_flops() == passes * 2 * 3 * 2 * 19 * 6


def test_nothing_is_read_on_the_host() -> None:
    """Fake tensors have no values to look at."""
    mode = FakeTensorMode()
    given = Case(packed=(0, 9, 17), **ALL).arguments(0, torch.float32, CPU)
    faked = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    eager = importlib.import_module("fastweights.ops.short_conv.eager")
    tensors = op.ConvTensors._make(map(faked.get, op.ConvTensors._fields))
    with mode:
        shape = op.conv_shape("short_conv", tensors, activation="silu", residual=True)
        y, state = eager.fwd(shape, tensors)
        assert eager.bwd(shape, y, state, tensors)[0].shape == (1, 19, 6)


def test_views_give_equal_bits() -> None:
    given = Case(**ALL).arguments(0, torch.float32, CPU)
    for name in ("x", "gate_in", "gate_out", "weight", "initial_state"):
        contracts.check_views(partial(read, OP), given, {name: inputs.spaced(given[name])})


REFUSED = [
    ({"x": lambda x: x[0]}, ValueError, "x must have 3 dimensions"),
    ({"x": lambda x: x.int()}, TypeError, "x has dtype int32"),
    ({"weight": lambda x: x[:-1]}, ValueError, "weight has size 5 in dimension 0, expected 6"),
    ({"weight": lambda x: torch.ones(6, 5)}, ValueError, "weight must have 1 to 4 taps, got 5"),
    ({"weight": lambda x: x[:, :0]}, ValueError, "weight must have 1 to 4 taps, got 0"),
    ({"bias": lambda x: x[:-1]}, ValueError, "bias has size 5 in dimension 0"),
    ({"gate_in": lambda x: x.half()}, TypeError, "gate_in has dtype float16, x has float32"),
    ({"gate_out": lambda x: x[:, :-1]}, ValueError, "gate_out has size 18 in dimension 1"),
    ({"activation": lambda x: "gelu"}, ValueError, "activation must be one of silu, got 'gelu'"),
    ({"initial_state": lambda x: x[:1]}, ValueError, "initial_state has size 1 in dimension 0"),
    ({"initial_state": lambda x: x.bfloat16()}, TypeError, "initial_state has dtype bfloat16"),
    ({"cu_seqlens": lambda x: torch.tensor([0, 9])}, TypeError, "cu_seqlens has dtype int64"),
    ({"backend": lambda x: "cuda"}, ValueError, "backend='cuda' cannot run this call"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = Case(**ALL).arguments(0, torch.float32, CPU)
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=words):
        OP(**given | changed)


def test_explain() -> None:
    said = ops.explain(OP, **Case(**ALL).arguments(0, torch.float32, CPU))
    assert said.backend == "eager"
    assert set(said.refused) == {"cuda", "triton"}


# ---- single tokens ------------------------------------------------------------------------------

STEP = ops.short_conv_step_
step = importlib.import_module("fastweights.ops.short_conv_step.op")


def row(given: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of a step but for pool and slots: token t of each sequence."""
    rest = {name: given[name] for name in ("weight", "bias", "activation", "residual")}
    return rest | {name: given[name][:, t] for name in TOKENS if name in given}


@pytest.mark.parametrize("dtype", [WIDE, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_steps_are_the_whole(taps: int, dtype: torch.dtype) -> None:
    """Now and then a row is skipped, and all that belongs to none is NaN.

    States are equal bit for bit; of silu torch rounds the last elements of a tensor otherwise.
    """
    case = Case(**ALL | {"taps": taps}, tokens=7)
    given = case.arguments(0, dtype, CPU)
    wanted, last = OP(**given, output_final_state=True)
    pool = torch.full((5, *last.shape[1:]), float("nan"), dtype=last.dtype)
    slots = torch.tensor([3, 0])
    pool[slots] = given["initial_state"]
    for t in range(7):
        for skipped in ([0, 1], [1, 0]) if t % 2 else ([0, 0],):
            mask = torch.tensor(skipped, dtype=torch.bool)
            token = row(given, t)
            for name in TOKENS:
                token[name] = token[name].masked_fill(mask[:, None], float("nan"))
            y = STEP(**token, state_pool=pool, slots=slots.masked_fill(mask, -1))
            assert not y[mask].any()
            close = torch.finfo(dtype).eps
            torch.testing.assert_close(y[~mask], wanted[~mask, t], rtol=4 * close, atol=close)
    assert torch.equal(pool[slots], last)
    assert pool[[1, 2, 4]].isnan().all()


def test_a_step_with_nothing_to_do() -> None:
    token = row(Case(**ALL).arguments(0, torch.float32, CPU), 0)
    pool = torch.randn(3, 3, 6)
    before = pool.clone()
    assert not STEP(**token, state_pool=pool, slots=torch.tensor([-1, -1])).any()
    assert torch.equal(pool, before)
    assert not STEP(**token, state_pool=pool[:0], slots=torch.tensor([-1, -1])).any()
    none = token | {name: token[name][:0] for name in TOKENS}
    assert STEP(**none, state_pool=pool, slots=torch.arange(0)).shape == (0, 6)


def test_opcheck_of_a_step() -> None:
    given = row(Case(**ALL).arguments(0, torch.float32, CPU), 0)
    given |= {"state_pool": torch.randn(4, 3, 6), "slots": torch.tensor([2, -1])}
    tensors = [given[name] for name in step.StepTensors._fields]
    contracts.check_opcheck(step.STEP, [(*tensors, "silu", True, "eager")])


def test_steps_in_one_graph() -> None:
    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = STEP(**given)
        return first, given["state_pool"] * 2, STEP(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = row(Case(**ALL).arguments(0, torch.float32, CPU), 0)
        given |= {"state_pool": torch.ones(4, 3, 6), "slots": torch.tensor([2, -1])}
        found.append(oracle.named((*function(**given), given["state_pool"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])
    assert (found[0]["out3"] != 1).any(-1).any(-1).tolist() == [False, False, True, False]


def test_autograd_sees_that_a_pool_was_written() -> None:
    given = row(Case(**ALL).arguments(0, torch.float32, CPU), 0)
    pool, weight = torch.ones(4, 3, 6), torch.ones((), requires_grad=True)
    seen = (weight * pool).sum()
    STEP(**given, state_pool=pool, slots=torch.tensor([2, -1]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.backward()


STEP_REFUSED = [
    ({"slots": lambda x: x.int()}, TypeError, "slots has dtype int32"),
    ({"slots": lambda x: x[:1]}, ValueError, "slots has size 1 .* .the rows of x"),
    ({"slots": lambda x: torch.tensor([4, 0])}, ValueError, "slots must be -1 … 3"),
    ({"slots": lambda x: torch.tensor([1, 1])}, ValueError, "slots must be distinct"),
    ({"state_pool": lambda x: x[:, 1:]}, ValueError, "state_pool has size 2 in dimension 1"),
    ({"state_pool": lambda x: x.half()}, TypeError, "state_pool has dtype float16"),
    ({"state_pool": lambda x: x[:1].expand(4, 3, 6)}, ValueError, "state_pool is expanded"),
    ({"weight": lambda x: x.requires_grad_()}, ValueError, "weight requires grad"),
    ({"gate_in": lambda x: x[:1]}, ValueError, "gate_in has size 1 in dimension 0"),
]


@pytest.mark.parametrize(("changes", "error", "words"), STEP_REFUSED)
def test_errors_of_a_step(changes: Any, error: type[Exception], words: str) -> None:
    given = row(Case(**ALL).arguments(0, torch.float32, CPU), 0)
    given |= {"state_pool": torch.randn(4, 3, 6), "slots": torch.tensor([2, -1])}
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=words):
        STEP(**given | changed)


def test_flops_and_backend_of_a_step() -> None:
    given = row(Case(**ALL).arguments(0, torch.float32, CPU), 0)
    given |= {"state_pool": torch.randn(4, 3, 6), "slots": torch.tensor([2, -1])}
    with FlopCounterMode(display=False) as counter:
        STEP(**given)
    assert counter.get_total_flops() == 2 * 4 * 2 * 6
    assert ops.explain(STEP, **given).backend == "eager"
