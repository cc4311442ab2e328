"""The gated delta rule in single steps, in place on slots of a pool and not, against the loop."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from helpers import contracts, inputs, oracle
from helpers.gated_delta import TOKENS, Case

op = importlib.import_module("fastweights.ops.gated_delta_step.op")
eager = importlib.import_module("fastweights.ops.gated_delta_step.eager")
CPU = torch.device("cpu")
WIDE = torch.float64
STEP, STEP_ = ops.gated_delta_step, ops.gated_delta_step_
RULES = ("scale", "qk_l2norm")
CASES = [
    Case(tokens=9, carried=True),
    Case(batch=5, tokens=7, heads=(4, 2, 1), scale=0.3, carried=True),
    Case(tokens=7, heads=(1, 1, 3), qk_l2norm=False, carried=True),
    Case(tokens=11, harsh=True, carried=True),
]


def row(given: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of a step but for memories: token t of each sequence."""
    rules = {name: given[name] for name in RULES}
    return rules | {name: given[name][:, t] for name in TOKENS}


def operands(case: Case = CASES[0], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A step in place: the first row in slot 2 of 4, others skipped."""
    given = row(case.arguments(0, dtype, CPU), 0)
    heads, acc = max(case.heads), given["beta"].dtype
    pool = torch.randn(4, heads, case.width, case.values, dtype=acc)
    slots = torch.tensor([2] + [-1] * (case.batch - 1))
    return given | {"state_pool": pool, "slots": slots}


def assert_near(got: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    assert got.dtype == wanted.dtype, name
    gap = (got - wanted).norm()
    assert gap <= 1e-12 * wanted.norm(), (name, gap)


# ---- against the loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_are_the_whole(case: Case, index: torch.dtype) -> None:
    """Sequences that are some tokens apart, in a pool whose other slots are NaN."""
    given = case.arguments(0, WIDE, CPU)
    wanted, last = reference.gated_delta_rule(**given, output_final_state=True)
    begins, sequence = torch.arange(case.batch) * 5 % 7, torch.arange(case.batch)
    slots = sequence.flip(0) * 2 + 1
    pool = torch.full((2 * case.batch + 2, *last.shape[1:]), float("nan"), dtype=WIDE)
    pool[slots] = given["initial_state"]
    o = torch.zeros_like(wanted)
    for time in range(case.tokens + 6):
        token = time - begins
        live = (token >= 0) & (token < case.tokens)
        rows = {name: given[name] for name in RULES}
        for name in TOKENS:
            x = given[name][sequence, token.clamp(0, case.tokens - 1)]
            x[~live] = float("nan")
            rows[name] = inputs.embed(x)
        read = STEP_(**rows, state_pool=pool, slots=torch.where(live, slots, -1).to(index))
        assert not read[~live].any()
        o[live, token[live]] = read[live]
    assert_near(o, wanted, "o")
    assert_near(pool[slots], last, "state")
    rest = [slot for slot in range(len(pool)) if slot not in slots.tolist()]
    assert pool[rest].isnan().all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_functional_steps_are_the_whole(case: Case) -> None:
    """Gradients too, through all steps."""
    given = case.arguments(0, WIDE, CPU)

    def steps(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        state, reads = given["initial_state"], []
        for t in range(case.tokens):
            o, state = STEP(**row(given, t), state=state)
            reads.append(o)
        return torch.stack(reads, 1), state

    got = contracts.forward_backward(steps, given)
    literal = contracts.forward_backward(
        lambda **given: reference.gated_delta_rule(**given, output_final_state=True), given
    )
    assert list(got) == list(literal)
    for name, x in literal.items():
        assert_near(got[name], x, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_steps_give_equal_bits(dtype: torch.dtype) -> None:
    """And the functional one leaves its memories as they were."""
    given = operands(CASES[1].but(batch=4), dtype)
    pool, slots = given.pop("state_pool"), torch.arange(4)
    del given["slots"]
    before = pool.clone()
    o, after = STEP(**given, state=pool)
    assert torch.equal(pool, before)
    assert o.dtype == dtype
    assert torch.equal(STEP_(**given, state_pool=pool, slots=slots), o)
    assert torch.equal(pool, after)


def test_other_slots_keep_their_bits() -> None:
    """Skipped rows, slots that no row names; slot 0 is one like all others."""
    given = operands(Case(batch=3, tokens=1))
    for slots in ([-1, -1, -1], [-1, 3, -1], [0, -1, 2], [2, -1, -1]):
        pool = given["state_pool"]
        before = pool.clone()
        token = {name: given[name].clone() for name in TOKENS}
        for x in token.values():
            x[torch.tensor(slots) < 0] = torch.nan
        o = STEP_(**given | token | {"slots": torch.tensor(slots)})
        changed = [slot for slot in range(4) if not torch.equal(pool[slot], before[slot])]
        assert changed == sorted(slot for slot in slots if slot >= 0)
        assert o.any(-1).any(-1).tolist() == [slot >= 0 for slot in slots]


def test_nothing_to_do() -> None:
    """No rows, or no slots."""
    given = operands()
    none = {name: given[name][:0] for name in (*TOKENS, "slots")}
    assert STEP_(**given | none).shape == (0, 2, 5)
    empty = {"state_pool": given["state_pool"][:0], "slots": torch.tensor([-1, -1])}
    assert not STEP_(**given | empty).any()


# ---- as torch sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = operands(case)
    names = (*TOKENS, "state_pool", "slots")
    arguments = [given[name] for name in names]
    contracts.check_opcheck(op.STEP, [(*arguments, 1.0, True, 1e-12, "eager")])


def test_steps_in_one_graph() -> None:
    """Two steps in place and a look at the pool between them, and a functional one."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = STEP_(**given)
        seen = given["state_pool"] * 2
        token = {name: given[name] for name in (*TOKENS, *RULES)}
        return first, seen, STEP_(**given), *STEP(**token, state=given["state_pool"][:2])

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = operands() | {"state_pool": torch.ones(4, 2, 6, 5)}
        found.append(oracle.named((*function(**given), given["state_pool"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])
    changed = (found[0]["out5"] != 1).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False]


def test_a_step_needs_nothing_on_the_host() -> None:
    """Fake tensors have no values to look at."""
    mode = FakeTensorMode()
    given = operands(CASES[1])
    names = (*TOKENS, "state_pool", "slots")
    tensors = op.StepTensors(*(mode.from_tensor(given[name]) for name in names))
    with mode:
        shape = op.step_shape("step", tensors, scale=1.0, qk_l2norm=True, l2norm_eps=1e-12)
        assert eager.fwd(shape, tensors).shape == (5, 4, 5)


def test_flops_and_backends() -> None:
    given = operands(CASES[1])
    with FlopCounterMode(display=False) as counter:
        STEP_(**given)
    assert counter.get_total_flops() == 5 * 4 * 6 * 6 * 5
    assert ops.explain(STEP_, **given).backend == "eager"
    state = given.pop("state_pool")[:1].expand(5, -1, -1, -1)
    del given["slots"]
    assert ops.explain(STEP, **given, state=state).backend == "eager"
    with pytest.raises(ValueError, match="backend='cuda' cannot run this call"):
        STEP(**given, state=state, backend="cuda")


def test_autograd_sees_that_a_pool_was_written() -> None:
    given = operands()
    weight = torch.ones((), requires_grad=True)
    seen = (weight * given["state_pool"]).sum()
    STEP_(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.backward()


def test_autocast_casts_queries_keys_and_values_alone() -> None:
    given = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert STEP_(**given).dtype == torch.bfloat16
    assert given["state_pool"].dtype == torch.float32


REFUSED = [
    ({"q": lambda x: x[:, None]}, ValueError, "q must have 3 dimensions"),
    ({"k": lambda x: x[:1]}, ValueError, "k has size 1 in dimension 0, expected 2"),
    ({"v": lambda x: x.half()}, TypeError, "v has dtype float16, q has float32"),
    ({"beta": lambda x: x.half()}, TypeError, "beta has dtype float16"),
    ({"log_decay": lambda x: x[:, :1]}, ValueError, "log_decay has size 1 in dimension 1"),
    ({"slots": lambda x: x.short()}, TypeError, "slots has dtype int16; accepted: int64, int32"),
    ({"slots": lambda x: x[:1]}, ValueError, "slots has size 1 in dimension 0"),
    ({"slots": lambda x: torch.tensor([4, 0])}, ValueError, "slots must be -1 … 3"),
    ({"slots": lambda x: torch.tensor([1, 1])}, ValueError, "slots must be distinct"),
    ({"state_pool": lambda x: x[..., 1:]}, ValueError, "state_pool has size 4 in dimension 3"),
    ({"state_pool": lambda x: x.half()}, TypeError, "state_pool has dtype float16"),
    ({"state_pool": lambda x: x[:1].expand_as(x)}, ValueError, "state_pool is expanded"),
    ({"state_pool": lambda x: x.requires_grad_()}, ValueError, "state_pool requires grad"),
    ({"k": lambda x: x.requires_grad_()}, ValueError, "k requires grad; .* or gated_delta_step"),
    ({"l2norm_eps": lambda x: -1.0}, ValueError, "l2norm_eps must be a finite number above 0"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = operands()
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=words):
        STEP_(**given | changed)


def test_errors_of_the_functional_step() -> None:
    given = operands()
    del given["slots"]
    with pytest.raises(ValueError, match="gated_delta_step: state has size 4 in dimension 0"):
        STEP(**{name: given[name] for name in TOKENS}, state=given["state_pool"])
