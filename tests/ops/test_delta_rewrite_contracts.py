"""The delta rewrite as torch sees it: operators, graphs, gradients, slots, errors."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops
from helpers import contracts, inputs, oracle
from helpers.delta_rewrite import MEMORY, WRITTEN, Case

op = importlib.import_module("fastweights.ops.delta_rewrite.op")
eager = importlib.import_module("fastweights.ops.delta_rewrite.eager")
CPU = torch.device("cpu")
OP, IN_PLACE = ops.delta_rewrite, ops.delta_rewrite_
CALLS = [
    Case(batch=5, first=True),
    Case(mode="sequential", channels=True, reads=None),
    Case(tokens=0),
]
RULES = (3, False, True, True, True, False, 1e-5, 0.0, "eager")
TENSORS = op.RewriteTensors._fields[: op.TENSORS]


def operands(
    case: Case = CALLS[0], dtype: torch.dtype = torch.float32, slots: Any = (2, -1)
) -> dict[str, Any]:
    """A call in place: its rows in slots of a pool of 5."""
    given = case.but(batch=len(slots), first=False).arguments(0, dtype, CPU)
    del given["gamma_grad"]
    state, normalizer = (given.pop(name) for name in MEMORY)
    pools = {
        f"{name}_pool": inputs.embed(torch.rand(5, *x.shape[1:], dtype=x.dtype))
        for name, x in zip(MEMORY, (state, normalizer), strict=True)
    }
    return given | pools | {"slots": torch.tensor(slots)}


# ---- operators and gradients --------------------------------------------------------------------


@pytest.mark.parametrize("case", CALLS[:2], ids=lambda case: case.name)
def test_backward(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    contracts.check_backward_twice(OP, given)
    contracts.check_grad_out_untouched(OP, given | {"first": None})
    contracts.check_expanded_grad_out(OP, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(OP, given).values()), 2)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    tensors = [given.get(name) for name in TENSORS]
    tensors = [x.nan_to_num() if oracle.is_floating(x) else x for x in tensors]
    leaves = [x.detach().requires_grad_() if oracle.is_floating(x) else x for x in tensors]
    contracts.check_opcheck(op.REWRITE_FWD, [(*leaves, *RULES)])
    found = op.REWRITE_FWD(*tensors, *RULES)
    contracts.check_opcheck(op.REWRITE_BWD, [(*found, *tensors, *RULES)])


def test_opcheck_with_an_echo() -> None:
    given = CALLS[0].but(first=False).arguments(0, torch.float32, CPU)
    tensors = [given.get(name) for name in TENSORS]
    echo = torch.zeros(()).expand(given["state"].shape)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.ECHO_FWD, (*tensors, echo, *RULES), test_utils=tests)
    y, state, normalizer, _, change = op.ECHO_FWD(*tensors, echo, *RULES)
    others = [x for name, x in zip(TENSORS, tensors, strict=True) if name != "state"]
    arguments = (y, state, normalizer, state, change, *others, *RULES)
    contracts.check_opcheck(op.ECHO_BWD, [arguments])


@pytest.mark.parametrize("reads", [9, None])
def test_opcheck_in_place(reads: int | None) -> None:
    given = operands(CALLS[0].but(reads=reads))
    names = (*WRITTEN, "state_pool", "normalizer_pool", "slots", "q")
    first = torch.tensor([True, False])
    arguments = (*(given.get(name) for name in names), first, *RULES)
    contracts.check_opcheck(op.REWRITE_IN_PLACE, [arguments])


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_fullgraph(case: Case) -> None:
    given = case.but(first=False).arguments(0, torch.float32, CPU)
    contracts.check_fullgraph(lambda **given: OP(**given), given)


def test_a_chain_with_an_echo_in_one_graph() -> None:
    """Forward and backward; the seed is added to the loss, which is not scaled."""
    given = Case(batch=2).arguments(0, torch.float32, CPU)

    def loss(**given: Any) -> torch.Tensor:
        state, z = (given[name] for name in MEMORY)
        rest = {name: x for name, x in given.items() if name not in MEMORY}
        echo, total = rest.pop("zero").expand(state.shape), 0.0
        for _ in range(3):
            y, state, z, echo = OP(state=state, normalizer=z, echo=echo, **rest)
            total = total + y.square().sum()
        return total + (echo * state.detach()).sum()

    one = {"out": torch.ones(())}
    given["zero"] = torch.zeros(())
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = [oracle.run(function, given, lambda results: one) for function in (loss, compiled)]
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1][0] | found[1][1], found[0][0] | found[0][1])


def test_export_for_any_number_of_tokens() -> None:
    class Memory(torch.nn.Module):
        def forward(self, given: dict[str, torch.Tensor]) -> Any:
            return OP(**given)

    def tensors(tokens: int, reads: int) -> dict[str, torch.Tensor]:
        given = Case(tokens=tokens, reads=reads).arguments(0, torch.float32, CPU)
        return {name: given[name].contiguous() for name in (*WRITTEN, *MEMORY, "q")}

    sizes = {"q": {1: torch.export.Dim("reads")}}
    sizes |= {name: {1: torch.export.Dim("tokens")} for name in WRITTEN}
    shapes = (sizes | dict.fromkeys(MEMORY),)
    program = torch.export.export(Memory(), (tensors(10, 30),), dynamic_shapes=shapes)
    for size in ((3, 40), (12, 5)):
        given = tensors(*size)
        got, wanted = (oracle.named(x(given)) for x in (program.module(), Memory()))
        oracle.assert_bit_equal(got, wanted)


def test_what_is_saved_and_no_second_derivative() -> None:
    given = CALLS[0].arguments(0, torch.float32, CPU)
    leaves = contracts.leaves(given)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = OP(**leaves)[0]
    own = {x.data_ptr() for x in leaves.values() if isinstance(x, torch.Tensor)}
    assert {x.data_ptr() for x in saved} == own
    (d,) = torch.autograd.grad(y.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="delta_rewrite_bwd has no double backward"):
        d.sum().backward()


def test_views_give_equal_bits() -> None:
    given = Case(channels=True).arguments(0, torch.float32, CPU)
    for name in (*WRITTEN, *MEMORY, "q"):
        contracts.check_views(OP, given, {name: inputs.spaced(given[name])})
    turned = given["state"].mT.contiguous().mT
    contracts.check_views(OP, given, {"state": turned})


def test_an_expanded_state_gathers_its_gradient() -> None:
    """One memory of all sequences, a parameter."""
    given = Case(batch=3).arguments(0, torch.float64, CPU)
    start = given["state"][:1].clone().requires_grad_()
    OP(**given | {"state": start.expand(3, -1, -1, -1)})[0].sum().backward()
    leaf = start.detach().repeat(3, 1, 1, 1).requires_grad_()
    OP(**given | {"state": leaf})[0].sum().backward()
    torch.testing.assert_close(start.grad, leaf.grad.sum(0, keepdim=True))


def test_flops() -> None:
    case = Case(batch=2, tokens=5, reads=9, heads=3, width=4, values=8)
    write, read = 2 * 3 * 5 * 24 * 8, 2 * 3 * 9 * 24 * 8
    given = case.arguments(0, torch.float32, CPU)
    with FlopCounterMode(display=False) as counter:
        OP(**contracts.leaves(given))[0].sum().backward()
    assert counter.get_total_flops() == (4 + 10) * write + (2 + 6) * read
    triangle = 2 * 3 * 5 * 5 * (2 * 24 + 8)
    with FlopCounterMode(display=False) as counter:
        OP(**given | {"mode": "sequential", "q": None})
    assert counter.get_total_flops() == 4 * write + triangle


def test_autocast_casts_keys_values_and_queries_alone() -> None:
    given = Case().arguments(0, torch.float32, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        y, state, _ = OP(**given)
        in_place = IN_PLACE(**operands())
    assert y.dtype == in_place.dtype == torch.bfloat16
    assert state.dtype == torch.float32


def test_explain() -> None:
    for said in (
        ops.explain(OP, **Case().arguments(0, torch.float32, CPU)),
        ops.explain(IN_PLACE, **operands()),
    ):
        assert said.backend == "eager"
        assert set(said.refused) == {"cuda", "triton"}


# ---- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_both_twins_give_equal_bits(mode: str, dtype: torch.dtype) -> None:
    given = operands(Case(mode=mode), dtype, slots=(3, 0, 4))
    slots, first = given["slots"], torch.tensor([False, True, False])
    plain = {name: x for name, x in given.items() if name not in ("slots",)}
    for name in MEMORY:
        plain[name] = plain.pop(f"{name}_pool")[slots]
    y, state, normalizer = OP(**plain, first=first)
    assert torch.equal(IN_PLACE(**given, first=first), y)
    assert torch.equal(given["state_pool"][slots], state)
    assert torch.equal(given["normalizer_pool"][slots], normalizer)


def test_other_slots_keep_their_bits() -> None:
    """Skipped rows, slots that no row names; slot 0 is one like all others."""
    for slots in ([-1, -1, -1], [-1, 3, -1], [0, -1, 2], [2, -1, -1]):
        given = operands(slots=slots)
        for name in (*WRITTEN, "q"):
            given[name][given["slots"] < 0] = torch.nan
        pools = [given[f"{name}_pool"] for name in MEMORY]
        before = [pool.clone() for pool in pools]
        y = IN_PLACE(**given, first=torch.tensor([False, False, True]))
        for pool, old in zip(pools, before, strict=True):
            changed = [slot for slot in range(5) if not torch.equal(pool[slot], old[slot])]
            assert changed == sorted(slot for slot in slots if slot >= 0)
        assert y.flatten(1).any(1).tolist() == [slot >= 0 for slot in slots]


def test_reading_alone_leaves_a_pool_as_it_is() -> None:
    given = operands(Case(tokens=0))
    before = given["state_pool"].clone()
    assert IN_PLACE(**given)[0].any()
    assert torch.equal(given["state_pool"], before)


def test_nothing_to_do() -> None:
    """No rows, or no slots."""
    given = operands()
    none = {name: given[name][:0] for name in (*WRITTEN, "q", "slots")}
    assert IN_PLACE(**given | none).shape == (0, 9, 2, 10)
    empty = {f"{name}_pool": given[f"{name}_pool"][:0] for name in MEMORY}
    assert not IN_PLACE(**given | empty | {"slots": torch.tensor([-1, -1])}).any()


def test_calls_in_place_in_one_graph() -> None:
    """Two of them and a look at the pools in between."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = IN_PLACE(**given)
        seen = given["state_pool"] * 2, given["normalizer_pool"] * 2
        return first, *seen, IN_PLACE(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        given = operands()
        found.append(oracle.named((*function(**given), given["state_pool"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])


def test_a_call_needs_nothing_on_the_host() -> None:
    """Fake tensors have no values to look at."""
    mode = FakeTensorMode()
    given = operands()
    names = (*WRITTEN, "state_pool", "normalizer_pool", "q")
    fakes = [mode.from_tensor(given[name]) for name in names]
    first, slots = (mode.from_tensor(x) for x in (torch.ones(2).bool(), given["slots"]))
    tensors = op.RewriteTensors(*fakes, first, slots)
    rules = op.rules_of("x", 3, "sequential", True, True, True, "stop", 1e-5, None)
    with mode:
        shape = op.rewrite_shape("x", tensors, rules)
        assert eager.fwd(shape, tensors)[0].shape == (2, 9, 2, 10)


def test_autograd_sees_that_a_pool_was_written() -> None:
    weight = torch.ones((), requires_grad=True)
    for name in ("state_pool", "normalizer_pool"):
        given = operands()
        seen = (weight * given[name]).sum()
        IN_PLACE(**given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            seen.backward()


# ---- errors -------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": lambda x: x[0]}, ValueError, "k must have 4 dimensions"),
    ({"k": lambda x: None}, TypeError, "k must be a torch.Tensor, got NoneType"),
    ({"v": lambda x: x.half()}, TypeError, "v has dtype float16, k has float32"),
    ({"v": lambda x: x[:, 1:]}, ValueError, "v has size 6 in dimension 1, expected 7"),
    ({"q": lambda x: x[..., 1:]}, ValueError, "q has size 5 in dimension 3, expected 6"),
    ({"q": lambda x: x[:, :, 1:]}, ValueError, "q has size 1 in dimension 2, expected 2"),
    ({"beta": lambda x: x.bfloat16()}, TypeError, "beta has dtype bfloat16; accepted: float32"),
    ({"beta": lambda x: x[..., None]}, ValueError, "beta has size 1 in dimension 3, expected 10"),
    ({"beta": lambda x: x[:, :, 1:]}, ValueError, "beta has size 1 in dimension 2, expected 2"),
    ({"state": lambda x: x.half()}, TypeError, "state has dtype float16"),
    ({"state": lambda x: x[:, :, 1:]}, ValueError, "state has size 35 in dimension 2, expected 36"),
    ({"state": lambda x: x[..., 1:]}, ValueError, "state has size 9 in dimension 3, expected 10"),
    ({"normalizer": lambda x: x[:1]}, ValueError, "normalizer has size 1 in dimension 0"),
    ({"order": lambda x: 2}, ValueError, "expected 24 .2 · order 2 · dk 6"),
    ({"order": lambda x: 0}, ValueError, "order must be an int of at least 1, got 0"),
    ({"first": lambda x: torch.ones(2)}, TypeError, "first has dtype float32; accepted: bool"),
    ({"first": lambda x: torch.ones(3).bool()}, ValueError, "first has size 3 in dimension 0"),
    ({"mode": lambda x: "both"}, ValueError, "mode must be one of parallel, sequential"),
    ({"gamma_grad": lambda x: "half"}, ValueError, "gamma_grad must be one of stop, full"),
    ({"eps": lambda x: 0.0}, ValueError, "eps must be a finite number above 0, got 0.0"),
    ({"eps_norm": lambda x: -1.0}, ValueError, "eps_norm must be a finite number of at least 0"),
    ({"echo": lambda x: torch.zeros(2)}, ValueError, "echo must have 4 dimensions"),
    ({"backend": lambda x: "cuda"}, ValueError, "backend='cuda' cannot run this call"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = Case().arguments(0, torch.float32, CPU)
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=words):
        OP(**given | changed)


@pytest.mark.parametrize("name", ["denominator", "correction"])
def test_an_echo_is_refused_where_memories_may_grow(name: str) -> None:
    given = Case().arguments(0, torch.float32, CPU)
    echo = torch.zeros(()).expand(given["state"].shape)
    with pytest.raises(ValueError, match="echo needs denominator=True and correction=True"):
        OP(**given | {name: False, "echo": echo})


REFUSED_IN_PLACE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slots": lambda x: x.int()}, TypeError, "slots has dtype int32; accepted: int64"),
    ({"slots": lambda x: x[:1]}, ValueError, "slots has size 1 in dimension 0, expected 2"),
    ({"slots": lambda x: torch.tensor([5, 0])}, ValueError, "slots must be -1 … 4"),
    ({"slots": lambda x: torch.tensor([1, 1])}, ValueError, "slots must be distinct"),
    ({"state_pool": lambda x: x[..., 1:]}, ValueError, "state_pool has size 9 in dimension 3"),
    ({"state_pool": lambda x: x[:1].expand_as(x)}, ValueError, "state_pool is expanded"),
    ({"normalizer_pool": lambda x: x[:4]}, ValueError, "normalizer_pool has size 4 in dimension 0"),
    ({"normalizer_pool": lambda x: x.half()}, TypeError, "normalizer_pool has dtype float16"),
    ({"k": lambda x: x.requires_grad_()}, ValueError, "k requires grad; .* or delta_rewrite"),
    ({"state_pool": lambda x: x.requires_grad_()}, ValueError, "state_pool requires grad"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED_IN_PLACE)
def test_errors_in_place(changes: Any, error: type[Exception], words: str) -> None:
    given = operands()
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=f"delta_rewrite_: {words}"):
        IN_PLACE(**given | changed)


def test_no_gradient_in_place() -> None:
    given = operands()
    given["k"].requires_grad_()
    with torch.no_grad():
        assert not IN_PLACE(**given).requires_grad
