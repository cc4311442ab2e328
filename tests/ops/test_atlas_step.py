"""The Atlas memory in single steps on slots of a pool, against the literal loops."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from fastweights.ops import AtlasCache, flops
from helpers import contracts, oracle
from helpers.atlas import Case, cut, in_steps, rules_of, start, step_operands
from helpers.omega_cache import poisoned_pool

op = importlib.import_module("fastweights.ops.atlas_step.op")
eager = importlib.import_module("fastweights.ops.atlas_step.eager")
CPU = torch.device("cpu")
SQUARED = {"width": 4, "values": 3, "symmetric": True, "degree": 2}
CASES = [
    Case(stride=1, window=1),
    Case(stride=None, window=5, carried=True),
    Case(stride=2, window=12, chunk_size=4, read_before=True, carried=True),
    Case(stride=3, chunk_size=6, inner_loss="dot", decay=False, gates=False),
    Case(stride=1, chunk_size=1, degree=2),
    Case(**SQUARED, stride=4, carried=True),
    Case(batch=5, stride=8, chunk_size=16, ns_coefficients="polar_express"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_are_the_whole(case: Case) -> None:
    """Sequences that are some tokens apart, in a pool whose other slots are NaN."""
    given = case.arguments(0, torch.float64, CPU)
    got = oracle.named(in_steps(case, given, [5 * n % 7 for n in range(case.batch)]))
    for name, x in oracle.named(reference.atlas_memory(**given, return_state=True)).items():
        assert got[name].dtype == x.dtype, name
        gap = (got[name].double() - x.double()).norm()
        assert gap <= 1e-11 * max(1.0, float(x.double().norm())), (name, gap)


def test_other_slots_keep_their_bits() -> None:
    """Skipped rows, slots that no row names; slot 0 is one like all others, its chunk full."""
    case = Case(3, 7, window=4, chunk_size=3, stride=1)
    given = case.arguments(0, torch.float32, CPU)
    _, cache = ops.atlas_extend(**cut(given, 0, 3), cache=start(case, given), **rules_of(given))
    pool = poisoned_pool(cache, torch.tensor([0, 4, 6]))
    for t, slots in enumerate(([-1, -1, -1], [-1, 4, -1], [0, -1, 6], [6, -1, -1])):
        before = AtlasCache._make(x.clone() for x in pool)
        token = {name: x[:, 0].clone() for name, x in cut(given, 3 + t, 4 + t).items()}
        for x in token.values():
            x[torch.tensor(slots) < 0] = torch.nan
        y = ops.atlas_step_(**token, cache=pool, slots=torch.tensor(slots), **rules_of(given))
        others = [slot for slot in range(8) if slot not in slots]
        oracle.assert_bit_equal(
            {name: x[others] for name, x in pool._asdict().items()},
            {name: x[others] for name, x in before._asdict().items()},
        )
        for slot, read in zip(slots, y, strict=True):
            assert bool(read.any()) == (slot >= 0)
            assert slot < 0 or pool.filled[slot] == before.filled[slot] % 3 + 1


def test_nothing_to_do() -> None:
    """No rows, or no slots."""
    given = step_operands(Case())
    nothing = {name: given[name][:0] for name in given if name in (*cut_names(given), "slots")}
    assert ops.atlas_step_(**given | nothing).shape == (0, 2, 5)
    empty = AtlasCache._make(x[:0] for x in given["cache"])
    slots = torch.tensor([-1, -1])
    assert not ops.atlas_step_(**given | {"cache": empty, "slots": slots}).any()


def cut_names(given: dict[str, Any]) -> list[str]:
    """What has a row a token."""
    rules = {"cache", "slots", "coefficients"}
    return [n for n, x in given.items() if isinstance(x, torch.Tensor) and n not in rules]


# ---- as torch sees it ---------------------------------------------------------------------------

STEPS = [Case(), Case(**SQUARED, window=1, stride=1, gates=False, decay=False)]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = step_operands(case)
    fields = op.omega.StepTensors._fields
    tensors = (*map(given.get, fields), given["output_step"])
    rules = (
        case.window, case.chunk_size, case.inner_loss, given.get("feature_map", "identity"),
        case.read_before, case.stride, [3.4445, -4.7750, 2.0315] * 5, 1e-7, "eager",
    )  # fmt: skip
    contracts.check_opcheck(op.STEP, [(*tensors, *given["cache"], *rules)])


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_steps_in_one_graph(case: Case) -> None:
    """Two steps and a look at the cache between them."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = ops.atlas_step_(**given)
        seen = given["cache"].momentum_write * 2
        return first, seen, ops.atlas_step_(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = step_operands(case)
        results = function(**given)
        found.append(oracle.named(results) | oracle.named(given["cache"]))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])
    assert found[0]["filled"].tolist()[:2] == [case.chunk_size, 2]


def test_a_step_needs_nothing_on_the_host() -> None:
    """Fake tensors have no values to look at."""
    case = Case(degree=2)
    mode = FakeTensorMode()
    given = step_operands(case)
    cache = AtlasCache._make(mode.from_tensor(x) for x in given["cache"])
    faked = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    memory = op.omega.StepTensors._make(map(faked.get, op.omega.StepTensors._fields))
    tensors = op.StepTensors(memory, faked["output_step"])
    with mode:
        shape = op.step_shape(
            "atlas_step_", tensors, cache, window=3, chunk_size=8, inner_loss="squared",
            feature_map="elementwise", read_before=False, ns_stride=4, ns_steps=5,
            ns_coefficients="muon", ns_eps=1e-7,
        )  # fmt: skip
        assert eager.fwd(shape, tensors, cache).shape == (2, 2, 5)


def test_flops() -> None:
    """Two rows of two heads, each an eighth of a chunk."""
    given = step_operands(Case())
    with FlopCounterMode(display=False) as counter:
        ops.atlas_step_(**given)
    chunk = flops.atlas_forward(8, 8, 3, 6, 5, stride=4, steps=5)
    assert counter.get_total_flops() == 4 * chunk // 8


def test_autograd_sees_that_a_cache_was_written() -> None:
    given = step_operands(Case())
    weight = torch.ones((), requires_grad=True)
    seen = (weight * given["cache"].momentum_write).nansum()
    with torch.no_grad():
        ops.atlas_step_(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.backward()


REFUSED = [
    ("q", lambda x: x[..., 0], ValueError, "q must have 3 dimensions"),
    ("momentum", lambda x: None, TypeError, "momentum must be a torch.Tensor, got NoneType"),
    ("output_step", lambda x: x.half(), TypeError, "output_step has dtype float16"),
    ("output_step", lambda x: x[:1], ValueError, "output_step has size 1 in dimension 0"),
    ("output_step", lambda x: x.clone().requires_grad_(), ValueError, "output_step requires grad"),
    ("decay", lambda x: x[:, :1], ValueError, "decay has size 1 in dimension 1"),
    ("ns_stride", lambda x: 3, ValueError, "ns_stride must divide chunk_size, which is 8, got 3"),
    ("chunk_size", lambda x: 12, ValueError, "cache.keys has size 10 in dimension 1, expected 14"),
    ("slots", lambda x: x.new_tensor([1, 1]), ValueError, "slots must be distinct"),
    ("slots", lambda x: x.int(), TypeError, "slots has dtype int32"),
    ("cache", tuple, TypeError, "cache must be an AtlasCache, got tuple"),
    ("cache.memory", lambda x: x.half(), TypeError, "cache.memory has dtype float16"),
    ("cache.memory", lambda x: x[:1].expand(6, -1, -1, -1), ValueError, "cache.memory is expanded"),
    ("cache.decay", lambda x: x.clone().requires_grad_(), ValueError, "cache.decay requires grad"),
]


@pytest.mark.parametrize(("name", "change", "error", "words"), REFUSED)
def test_errors_name_the_argument(
    name: str, change: Any, error: type[Exception], words: str
) -> None:
    given = step_operands(Case())
    before = AtlasCache._make(x.clone() for x in given["cache"])
    field = name.removeprefix("cache.")
    changed = {name: change(given.get(name))} if field == name else {
        "cache": given["cache"]._replace(**{field: change(getattr(given["cache"], field))})
    }  # fmt: skip
    with pytest.raises(error, match=f"atlas_step_: {words}"):
        ops.atlas_step_(**given | changed)
    oracle.assert_bit_equal(oracle.named(given["cache"]), oracle.named(before))


def test_explain_and_backends() -> None:
    given = step_operands(Case())
    assert ops.explain(ops.atlas_step_, **given).backend == "eager"
    with pytest.raises(ValueError, match="backend='triton' cannot run this call"):
        ops.atlas_step_(**given, backend="triton")
