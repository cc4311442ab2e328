"""The gated delta rule in plain torch against the literal loop, and as torch sees it."""

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
from helpers.gated_delta import TOKENS, Case

op = importlib.import_module("fastweights.ops.gated_delta.op")
CPU = torch.device("cpu")
WIDE = torch.float64
OP = ops.gated_delta_rule
LITERAL = reference.gated_delta_rule


def gaps(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative to the size of each tensor."""
    assert list(got) == list(wanted)
    found = {}
    for name, x in wanted.items():
        assert got[name].shape == x.shape, name
        gap, size = (y.double().norm() for y in (got[name].double() - x, x))
        found[name] = float(gap / size.clamp(min=1e-300))
    return found


def assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], most: float) -> None:
    """As `gaps`, and of equal dtypes."""
    found = gaps(got, wanted)
    assert all(gap <= most for gap in found.values()), found
    assert all(got[name].dtype == x.dtype for name, x in wanted.items())


def read(function: Any, **given: Any) -> torch.Tensor:
    """o alone."""
    return function(**given)[0]


# ---- against the loop ---------------------------------------------------------------------------

CASES = [
    *(Case(tokens=tokens, carried=True) for tokens in (0, 1, 2, 63, 64, 65, 127)),
    Case(),
    Case(heads=(4, 2, 1), scale=0.3),
    Case(heads=(2, 2, 6), carried=True),
    Case(heads=(1, 3, 1), width=3, values=8),
    Case(heads=(2, 1, 2), qk_l2norm=False, scale=-2.0, carried=True),
    Case(heads=(2, 4, 1), packed=(0, 7, 7, 64), carried=True),
    Case(packed=(0, 1, 67)),
    Case(packed=(0,), heads=(2, 1, 1)),
    Case(packed=(0, 0), tokens=0, carried=True),
    Case(batch=0, carried=True),
    Case(tokens=9, width=1, values=1, qk_l2norm=False),
    Case(harsh=True, carried=True, tokens=127),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_literal(case: Case) -> None:
    """o, the state, and the gradient of every tensor from both."""
    given = case.arguments(0, WIDE, CPU) | {"output_final_state": True}
    got = contracts.forward_backward(OP, given)
    assert_near(got, contracts.forward_backward(LITERAL, given), 1e-12)


def test_gradcheck() -> None:
    given = Case(1, 5, (2, 1, 1), 3, 2, carried=True).arguments(0, WIDE, CPU)
    names = [name for name, x in given.items() if oracle.is_floating(x)]
    leaves = [given[name].contiguous().requires_grad_() for name in names]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return OP(**given | dict(zip(names, tensors, strict=True)), output_final_state=True)

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_harsh_decays_in_fp32(seed: int) -> None:
    """Log-decays from U(−30, 0), one of −1e4 and one of −inf: nothing is lost behind them."""
    given = Case(harsh=True, carried=True, tokens=127).arguments(seed, torch.float32, CPU)
    given["output_final_state"] = True
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    got = contracts.forward_backward(OP, given)
    assert all(x.isfinite().all() for x in got.values())
    assert not got["d log_decay"][:, 2 * 127 // 3].any()
    found = gaps(got, contracts.forward_backward(LITERAL, exact))
    assert max(found.values()) < 1e-5, found


def test_one_harsh_decay_among_mild_ones_in_fp32() -> None:
    """What a difference of running sums would lose: the mild decays behind a large one."""
    given = Case(tokens=127, carried=True).arguments(3, torch.float32, CPU)
    given["log_decay"][:, 3] = -1e4
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    found = gaps(contracts.forward_backward(OP, given), contracts.forward_backward(LITERAL, exact))
    assert max(found.values()) < 5e-6, found


@pytest.mark.parametrize("name", ["log_decay", "beta"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_extreme_gates(name: str, value: float) -> None:
    """No decay at all, or −inf everywhere; nothing written, or each row set."""
    given = Case(carried=True).arguments(1, WIDE, CPU)
    extreme = value if name == "beta" else {0.0: 0.0, 1.0: -float("inf")}[value]
    given[name] = torch.full_like(given[name], extreme)
    got = contracts.forward_backward(partial(read, OP), given)
    assert_near(got, contracts.forward_backward(partial(read, LITERAL), given), 1e-12)
    assert all(x.isfinite().all() for x in got.values())


def test_keys_and_queries_of_zero() -> None:
    """They write and read nothing; short ones are divided by eps."""
    given = Case(tokens=9).arguments(0, WIDE, CPU) | {"l2norm_eps": 0.5}
    given["k"][:, 2] = 0
    given["q"][:, 3] = 0
    given["k"][:, 4:6] *= 0.1
    got = contracts.forward_backward(partial(read, OP), given)
    assert_near(got, contracts.forward_backward(partial(read, LITERAL), given), 1e-12)
    assert not got["out"][:, 3].any()


def test_equal_keys_stay_bounded() -> None:
    """4,096 tokens of one key, each setting its row: the chunk's triangle is at its worst."""
    q = torch.ones(1, 4096, 1, 8)
    v = torch.randn(1, 4096, 1, 4, generator=inputs.generator(0, CPU))
    gates = torch.zeros(1, 4096, 1), torch.ones(1, 4096, 1)
    o, _ = OP(q, q, v, *gates)
    torch.testing.assert_close(o, v, rtol=0, atol=1e-5)


# ---- sequences and pieces -----------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1,), (64,), (3, 60, 66)], ids=str)
def test_pieces_are_the_whole(cuts: tuple[int, ...]) -> None:
    given = Case(carried=True, heads=(2, 1, 2)).arguments(0, WIDE, CPU)
    given["output_final_state"] = True
    whole = oracle.named(OP(**given))
    state, found = given["initial_state"], []
    for begin, end in itertools.pairwise((0, *cuts, 67)):
        piece = {name: given[name][:, begin:end] for name in TOKENS}
        o, state = OP(**given | piece | {"initial_state": state})
        found.append(o)
    assert_near(oracle.named((torch.cat(found, 1), state)), whole, 1e-12)


def test_packed_sequences_are_separate_ones() -> None:
    given = Case(batch=1, heads=(2, 1, 2)).arguments(0, WIDE, CPU)

    def near(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=name)

    contracts.check_packed(partial(read, OP), given, TOKENS, (7, 0, 51), near)


def test_an_expanded_state_gathers_its_gradient() -> None:
    """One memory of all sequences, a parameter."""
    given = Case(tokens=9).arguments(0, WIDE, CPU)
    grads = []
    for function in (OP, LITERAL):
        start = torch.ones(2, 6, 5, dtype=WIDE, requires_grad=True)
        read(function, **given, initial_state=start.expand(2, 2, 6, 5)).sum().backward()
        grads.append(start.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


# ---- narrow types -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [Case(carried=True), Case(heads=(4, 2, 1), width=16), Case(heads=(1, 1, 2), harsh=True)],
    ids=lambda case: case.name,
)
def test_narrow_types(case: Case, dtype: torch.dtype) -> None:
    literal = partial(LITERAL, output_final_state=True)
    oracle.check_op(
        partial(OP, output_final_state=True), literal, case.arguments, dtype, CPU, label=case.name
    )


# ---- as torch sees it ---------------------------------------------------------------------------

CALLS = [Case(heads=(4, 2, 1), carried=True), Case(packed=(0, 9, 17), tokens=19)]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_contracts(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    call = partial(read, OP)
    contracts.check_backward_twice(call, given)
    contracts.check_grad_out_untouched(call, given)
    contracts.check_expanded_grad_out(call, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(call, given).values()), 2)


def test_fullgraph() -> None:
    given = CALLS[0].arguments(0, torch.float32, CPU) | {"output_final_state": True}
    contracts.check_fullgraph(lambda **given: OP(**given), given)


def test_export_for_any_number_of_tokens() -> None:
    class Memory(torch.nn.Module):
        def forward(self, given: dict[str, torch.Tensor]) -> Any:
            return OP(**given, output_final_state=True)

    def tensors(tokens: int) -> dict[str, torch.Tensor]:
        given = CALLS[0].but(tokens=tokens).arguments(0, torch.float32, CPU)
        return {name: given[name].contiguous() for name in TOKENS}

    length = {1: torch.export.Dim("tokens")}
    shapes = (dict.fromkeys(TOKENS, length),)
    program = torch.export.export(Memory(), (tensors(40),), dynamic_shapes=shapes)
    for tokens in (1, 40, 67):
        given = tensors(tokens)
        assert_near(oracle.named(program.module()(given)), oracle.named(Memory()(given)), 0)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    tensors = [given.get(name) for name in op.DeltaTensors._fields]
    rules = (0.5, True, 1e-12, "eager")
    leaves = [x.detach().requires_grad_() if oracle.is_floating(x) else x for x in tensors]
    contracts.check_opcheck(op.DELTA_FWD, [(*leaves, *rules)])
    o, state = op.DELTA_FWD(*tensors, *rules)
    contracts.check_opcheck(op.DELTA_BWD, [(o, state, *tensors, *rules)])


def test_only_the_arguments_are_saved() -> None:
    given = CALLS[0].arguments(0, torch.float32, CPU)
    leaves = contracts.leaves(given)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = OP(**leaves)[0]
    own = {x.data_ptr() for x in leaves.values() if isinstance(x, torch.Tensor)}
    assert len(saved) == len(own)
    assert {x.data_ptr() for x in saved} == own
    (d,) = torch.autograd.grad(o.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule_bwd has no double backward"):
        d.sum().backward()


def test_flops() -> None:
    with FakeTensorMode():
        q, k, v = torch.empty(2, 9, 4, 6), torch.empty(2, 9, 2, 6), torch.empty(2, 9, 1, 5)
        gate = torch.empty(2, 9, 4)
        with FlopCounterMode(display=False) as counter:
            OP(q.requires_grad_(), k, v, gate, gate)[0].sum().backward()
    assert counter.get_total_flops() == (6 + 16) * 2 * 9 * 4 * 6 * 5


def test_autocast_casts_queries_keys_and_values_alone() -> None:
    given = Case().arguments(0, torch.float32, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        o, state = OP(**given, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32


def test_views_give_equal_bits() -> None:
    given = Case(carried=True, tokens=9).arguments(0, torch.float32, CPU)
    for name in (*TOKENS, "initial_state"):
        contracts.check_views(partial(read, OP), given, {name: inputs.spaced(given[name])})


REFUSED = [
    ({"q": lambda x: x[0]}, ValueError, "q must have 4 dimensions"),
    ({"k": lambda x: x.half()}, TypeError, "k has dtype float16, q has float32"),
    ({"k": lambda x: x[..., 1:]}, ValueError, "k has size 5 in dimension 3, expected 6"),
    ({"v": lambda x: x[:, 1:]}, ValueError, "v has size 66 in dimension 1, expected 67"),
    ({"q": lambda x: x.repeat(1, 1, 3, 1)[:, :, :5]}, ValueError, "k has 2 heads, which does not"),
    ({"v": lambda x: x[:, :, :0]}, ValueError, "v has 0 heads, which does not divide 2"),
    ({"log_decay": lambda x: x.bfloat16()}, TypeError, "log_decay has dtype bfloat16"),
    ({"beta": lambda x: x[:, :, :1]}, ValueError, "beta has size 1 in dimension 2, expected 2"),
    ({"beta": lambda x: None}, TypeError, "beta must be a torch.Tensor, got NoneType"),
    ({"scale": lambda x: float("nan")}, ValueError, "scale must be a finite number, got nan"),
    ({"l2norm_eps": lambda x: 0.0}, ValueError, "l2norm_eps must be a finite number above 0"),
    ({"initial_state": lambda x: x[:1]}, ValueError, "initial_state has size 1 in dimension 0"),
    ({"initial_state": lambda x: x.half()}, TypeError, "initial_state has dtype float16"),
    ({"cu_seqlens": lambda x: torch.tensor([0, 9])}, TypeError, "cu_seqlens has dtype int64"),
    ({"backend": lambda x: "cuda"}, ValueError, "backend='cuda' cannot run this call"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = Case(carried=True).arguments(0, torch.float32, CPU)
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=words):
        OP(**given | changed)


def test_explain() -> None:
    said = ops.explain(OP, **Case().arguments(0, torch.float32, CPU))
    assert said.backend == "eager"
    assert set(said.refused) == {"cuda", "triton"}
