"""The Omega rule in pieces and in single steps, against the literal loops over whole sequences."""

from __future__ import annotations

import importlib
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from fastweights.ops import OmegaCache, OmegaState, flops
from helpers import contracts, oracle
from helpers.omega import Case
from helpers.omega_cache import (
    CARRIED,
    TOKENS,
    assert_same,
    cut,
    in_pieces,
    in_steps,
    poisoned_pool,
    rules_of,
    start,
    state_of,
    step_operands,
)

step_op = importlib.import_module("fastweights.ops.omega_step.op")
step_eager = importlib.import_module("fastweights.ops.omega_step.eager")
CPU = torch.device("cpu")
WIDE = torch.float64


def assert_near(
    got: tuple[torch.Tensor, OmegaState], wanted: tuple[torch.Tensor, Any], most: float
) -> None:
    """y and the state, relative to the size of each tensor."""
    found = oracle.named(got)
    for name, x in oracle.named(wanted).items():
        assert found[name].shape == x.shape, name
        assert found[name].dtype == x.dtype, name
        gap = (found[name].double() - x.double()).norm()
        assert gap <= most * max(1.0, float(x.double().norm())), (name, gap)


# ---- against the loops --------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("window", [1, 4, 5, 12])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 37, 64])
def test_pieces_and_steps_are_the_whole(chunk_size: int, window: int, momentum: bool) -> None:
    """Pieces of 1, 7 and 64 tokens, and single steps in which two sequences are 3 tokens apart."""
    case = Case(2, 71, 2, 5, 4, window, chunk_size, momentum)
    given = case.arguments(0, WIDE, CPU)
    wanted = reference.omega_memory(**given, return_state=True)
    for size in (1, 7, 64):
        assert_near(in_pieces(case, given, range(size, case.tokens, size)), wanted, 1e-12)
    assert_near(in_steps(case, given, starts=(0, 3)), wanted, 1e-12)


CASES = [
    Case(window=c, chunk_size=b, momentum=m, inner_loss=loss, carried=s, read_before=before)
    for c, b, m, loss, s, before in itertools.product(
        (1, 5), (1, 4), (True, False), ("squared", "dot"), (True, False), (True, False)
    )
] + [
    Case(gates=False, carried=True),
    Case(decay=False, momentum=False, window=1, gates=False),
    Case(degree=3, carried=True),
    Case(degree=0, window=12, chunk_size=4, carried=True),
    Case(degree=2, read_before=True, inner_loss="dot", momentum=False),
    Case(width=4, symmetric=True, degree=2, carried=True),
    Case(width=3, symmetric=True, degree=3, chunk_size=4, momentum=False),
    Case(window=12, chunk_size=4, carried=True, batch=5),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_options(case: Case) -> None:
    """Of the call, with pieces that are empty, short and longer than chunks."""
    given = case.arguments(1, WIDE, CPU)
    wanted = reference.omega_memory(**given, return_state=True)
    assert_near(in_pieces(case, given, (1, 1, 3, 14, 15)), wanted, 1e-12)
    starts = [5 * n % 7 for n in range(case.batch)]
    assert_near(in_steps(case, given, starts), wanted, 1e-12)


@pytest.mark.parametrize("symmetric", [False, True])
def test_default_coefficients(symmetric: bool) -> None:
    case = Case(width=4, degree=2, symmetric=symmetric)
    given = case.arguments(1, WIDE, CPU)
    del given["coefficients"]
    wanted = reference.omega_memory(**given, return_state=True)
    assert_near(in_pieces(case, given, (3, 14)), wanted, 1e-12)
    assert_near(in_steps(case, given), wanted, 1e-12)


@pytest.mark.parametrize("tokens", [1, 4, 9, 23])
@pytest.mark.parametrize("chunk_size", [1, 4, 6])
def test_pieces_of_sequences_at_different_places(chunk_size: int, tokens: int) -> None:
    """One call for five sequences, of which each has had another number of tokens."""
    case = Case(5, 30, window=4, chunk_size=chunk_size)
    given = case.arguments(2, WIDE, CPU)
    rules = rules_of(given)
    cache = start(case, given)
    heads, wanted = [], []
    for n in range(5):
        had = {name: x[n : n + 1] for name, x in cut(given, 0, n).items()}
        mine = OmegaCache._make(None if x is None else x[n : n + 1] for x in cache)
        heads.append(ops.omega_extend(**had, cache=mine, **rules)[1])
        whole = {name: x[n : n + 1] for name, x in cut(given, 0, n + tokens).items()}
        y, left = reference.omega_memory(**whole, **rules, return_state=True)
        wanted.append((y[:, n:], left))
    columns = zip(*heads, strict=True)
    joined = OmegaCache._make(None if None in column else torch.cat(column) for column in columns)
    assert joined.filled.unique().numel() > 1 or chunk_size == 1
    pieces = {
        name: torch.cat([given[name][n : n + 1, n : n + tokens] for n in range(5)])
        for name in cut(given, 0, 1)
    }
    y, after = ops.omega_extend(**pieces, cache=joined, **rules)
    for n in range(5):
        mine = OmegaCache._make(None if x is None else x[n : n + 1] for x in after)
        assert_near((y[n : n + 1], state_of(mine, given)), wanted[n], 1e-12)


def test_prefill_and_steps() -> None:
    """`omega_memory` over whole chunks, then steps; and with a ragged end, where a chunk begins."""
    case = Case(tokens=45, window=5, chunk_size=8, degree=1)
    given = case.arguments(3, WIDE, CPU)
    rules = rules_of(given)
    for prompt in (32, 29):
        head, rest = cut(given, 0, prompt), cut(given, prompt, 45)
        y, left = ops.omega_memory(**head, **rules, return_state=True)
        assert left is not None
        carried = {
            name: getattr(left, name.removeprefix("initial_"), left.momentum) for name in CARRIED
        }
        tail = case.but(tokens=45 - prompt, carried=True)
        got = in_steps(tail, rest | rules | carried, starts=(0, 4))
        wanted = reference.omega_memory(**rest, **rules, **carried, return_state=True)
        assert_near(got, wanted, 1e-12)
        if prompt % 8 == 0:  # then it is the same sequence
            whole, last = reference.omega_memory(**given, return_state=True)
            assert_near((torch.cat((y, got[0]), 1), got[1]), (whole, last), 1e-12)


def test_no_drift_in_single_precision() -> None:
    case = Case(1, 640, 1, 16, 16, window=4, chunk_size=16)
    given = case.arguments(0, torch.float32, CPU)
    wanted = ops.omega_memory(
        **{n: x.double() if oracle.is_floating(x) else x for n, x in given.items()}
    )[0]
    y, cache = ops.omega_extend(**cut(given, 0, 500), cache=start(case, given), **rules_of(given))
    assert (y - wanted[:, :500]).norm() <= 1e-5 * wanted[:, :500].norm()
    for t in range(500, 640):
        token = {name: x[:, 0] for name, x in cut(given, t, t + 1).items()}
        y = ops.omega_step_(**token, cache=cache, slots=torch.tensor([0]), **rules_of(given))
        assert (y - wanted[:, t]).norm() <= 1e-5 * wanted.norm() / 640**0.5, t


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [Case(carried=True), Case(degree=2, chunk_size=4)], ids=str)
def test_narrow_types(case: Case, dtype: torch.dtype) -> None:
    """By the yardstick of plain torch in the same dtype."""

    def made(seed: int, to: torch.dtype, device: torch.device) -> dict[str, Any]:
        return case.arguments(seed, to, device)

    def literal(**given: Any) -> torch.Tensor:
        return reference.omega_memory(**given)[0]

    def stepped(**given: Any) -> torch.Tensor:
        return in_steps(case, given, starts=(0, 2))[0]

    def extended(**given: Any) -> torch.Tensor:
        return in_pieces(case, given, (3, 14))[0]

    oracle.check_op(stepped, literal, made, dtype, CPU, grads=False)
    oracle.check_op(extended, literal, made, dtype, CPU)


# ---- gradients of pieces ------------------------------------------------------------------------

DIFFERENTIATED = [
    Case(carried=True),
    Case(window=6, chunk_size=2, carried=True, degree=2),
    Case(momentum=False, inner_loss="dot", read_before=True, decay=False, gates=False),
    Case(tokens=40, chunk_size=4),
    Case(width=4, window=6, chunk_size=2, symmetric=True, degree=2),
]


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=lambda case: case.name)
def test_gradients_of_pieces(case: Case) -> None:
    """Through the caches between the calls, from y and from the state."""
    given = case.arguments(0, WIDE, CPU)

    def cut_up(**given: Any) -> tuple[torch.Tensor, ...]:
        y, left = in_pieces(case, given, (3, 3, 4, 17))
        return tuple(oracle.named((y, left)).values())

    def literal(**given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(oracle.named(reference.omega_memory(**given, return_state=True)).values())

    got = contracts.forward_backward(cut_up, given)
    for name, x in contracts.forward_backward(literal, given).items():
        gap = (got[name].double() - x.double()).norm()
        assert gap <= 1e-11 * max(1.0, float(x.double().norm())), (name, gap)


def test_a_zero_coefficient_has_the_gradient_zero() -> None:
    """Through plain torch, too, where a root would have none."""
    case = Case(width=4, symmetric=True, degree=3)
    given = case.arguments(0, WIDE, CPU)
    given["coefficients"][0, 2] = 0

    def call(**given: Any) -> torch.Tensor:
        return in_pieces(case, given, (3, 14))[0]

    got = contracts.forward_backward(call, given)
    wanted = contracts.forward_backward(lambda **x: reference.omega_memory(**x)[0], given)
    for name, x in wanted.items():
        assert (got[name] - x).norm() <= 1e-11 * max(1.0, float(x.norm())), name
    assert not got["d coefficients"][0, 2]


@pytest.mark.parametrize("degree", [None, 2])
def test_gradients_pass_by_rows_of_a_tail_that_do_not_exist(degree: int | None) -> None:
    """They may hold NaN, from which not even a product with 0 is formed."""
    case = Case(3, 9, window=4, chunk_size=4, carried=True, degree=degree)
    given = case.arguments(0, WIDE, CPU)
    dirty = {name: given[name].clone() for name in ("tail_k", "tail_v")}
    nothing = torch.arange(case.window - 1) < case.window - 1 - given["tail_length"][:, None]
    assert nothing.any()
    for x in dirty.values():
        x[nothing] = torch.nan

    def cut_up(**given: Any) -> tuple[torch.Tensor, ...]:
        y, left = in_pieces(case, given, (2,))
        return y, left.state

    wanted = contracts.forward_backward(cut_up, given)
    got = contracts.forward_backward(cut_up, given | dirty)
    oracle.assert_bit_equal(got, wanted)
    assert wanted["d initial_state"].isfinite().all()


# ---- what a call leaves alone -------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [True, False])
def test_other_slots_keep_their_bits(momentum: bool) -> None:
    """Skipped rows, slots that no row names, the cache given to `omega_extend`.

    Slot 0 is one like all others, also for rows that are skipped, and its chunk is full.
    """
    case = Case(3, 7, window=4, chunk_size=3, momentum=momentum)
    given = case.arguments(0, torch.float32, CPU)
    rules = rules_of(given)
    given_cache = start(case, given)
    kept = [None if x is None else x.clone() for x in given_cache]
    _, cache = ops.omega_extend(**cut(given, 0, 3), cache=given_cache, **rules)
    assert_same(given_cache, kept)
    assert cache.filled.tolist() == [3, 3, 3]
    pool = poisoned_pool(cache, torch.tensor([0, 4, 6]))
    for t, slots in enumerate(([-1, -1, -1], [-1, 4, -1], [0, -1, 6], [6, -1, -1])):
        before = [None if x is None else x.clone() for x in pool]
        skipped = torch.tensor(slots) < 0
        token = {name: x[:, 0].clone() for name, x in cut(given, 3 + t, 4 + t).items()}
        for x in token.values():
            x[skipped] = torch.nan
        y = ops.omega_step_(**token, cache=pool, slots=torch.tensor(slots), **rules)
        others = [slot for slot in range(8) if slot not in slots]
        assert_same(
            [None if x is None else x[others] for x in pool],
            [None if x is None else x[others] for x in before],
        )
        for slot, read in zip(slots, y, strict=True):
            assert bool(read.any()) == (slot >= 0)
            assert slot < 0 or pool.filled[slot] == before[-1][slot] % 3 + 1


@pytest.mark.parametrize("had", [0, 2, 3, 5, 8])
def test_rows_that_do_not_exist_are_not_read(had: int) -> None:
    """NaN there changes no bit of what comes after."""
    case = Case(1, 20, window=6, chunk_size=3, degree=2)
    given = case.arguments(0, torch.float32, CPU)
    rules = rules_of(given)
    _, cache = ops.omega_extend(**cut(given, 0, had), cache=start(case, given), **rules)
    row = torch.arange(cache.keys.shape[1])
    older = case.window - 1
    there = (row >= older - cache.tail_length) & (row < older + cache.filled)
    nothing = ~there[None, :, None, None]
    dirty = cache._replace(
        keys=cache.keys.masked_fill(nothing, torch.nan),
        values=cache.values.masked_fill(nothing, torch.nan),
        residuals=cache.residuals.masked_fill(nothing | (cache.filled == 0), torch.nan),
    )
    token = {name: x[:, 0] for name, x in cut(given, had, had + 1).items()}
    assert not cache.write.masked_fill(there, 0).any()
    assert not cache.momentum_write.masked_fill(there, 0).any()
    found = []
    for start_from in (cache, dirty):
        y, after = ops.omega_extend(**cut(given, had, 20), cache=start_from, **rules)
        left = state_of(after, given)
        mine = OmegaCache._make(None if x is None else x.clone() for x in start_from)
        read = ops.omega_step_(**token, cache=mine, slots=torch.tensor([0]), **rules)
        found.append({"y": y, "read": read} | oracle.named(left) | oracle.named(mine.state))
    oracle.assert_bit_equal(found[1], found[0])
    assert all(x.isfinite().all() for x in found[1].values())


def test_a_cache_shares_no_memory_with_what_it_was_made_from() -> None:
    """A learned initial state is expanded over the batch."""
    case = Case(2, 6, window=3, chunk_size=2)
    given = case.arguments(0, torch.float32, CPU)
    rules = rules_of(given)
    learned = torch.randn(1, 2, 6, 5).expand(2, 2, 6, 5)
    left = start(case, given).to_state(window=3)._replace(state=learned)
    before = learned.clone()
    cache = OmegaCache.from_state(left, chunk_size=2)
    nothing, copied = ops.omega_extend(**cut(given, 0, 0), cache=cache, **rules)
    assert nothing.shape == (2, 0, 2, 5)
    for t in range(6):
        token = {name: x[:, 0] for name, x in cut(given, t, t + 1).items()}
        ops.omega_step_(**token, cache=cache, slots=torch.arange(2), **rules)
    assert torch.equal(learned, before)
    assert torch.equal(copied.state, before)
    assert not torch.equal(cache.state, before)


# ---- as torch sees it ---------------------------------------------------------------------------


STEPS = [Case(), Case(momentum=False, gates=False, decay=False), Case(degree=2, window=1)]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = step_operands(case)
    tensors = [given.get(name) for name in step_op.StepTensors._fields]
    rules = (case.window, case.chunk_size, case.inner_loss,
             given.get("feature_map", "identity"), case.read_before, "eager")  # fmt: skip
    contracts.check_opcheck(step_op.STEP, [(*tensors, *given["cache"], *rules)])


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_steps_in_one_graph(case: Case) -> None:
    """Two steps and a look at the cache between them."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = ops.omega_step_(**given)
        seen = given["cache"].write * 2
        return first, seen, ops.omega_step_(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = step_operands(case)
        results = function(**given)
        found.append(oracle.named(results) | oracle.named(given["cache"]))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])
    assert found[0]["filled"].tolist()[:2] == [case.chunk_size, 2]


def test_pieces_in_one_graph() -> None:
    """An open chunk, whole ones in the middle and two begun ones: one graph, also backwards."""
    case = Case(tokens=11, chunk_size=4, carried=True)
    given = case.arguments(0, torch.float32, CPU)

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        y, left = in_pieces(case, given, ())
        return y, left.state, left.tail_k, left.tail_v

    contracts.check_fullgraph(call, given)


def test_a_step_reads_nothing_on_the_host() -> None:
    """Fake tensors have no values to look at."""
    case = Case(degree=2)
    mode = FakeTensorMode()
    given = step_operands(case)
    faked = {
        name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()
    }
    cache = OmegaCache._make(None if x is None else mode.from_tensor(x) for x in given["cache"])
    tensors = step_op.StepTensors._make(map(faked.get, step_op.StepTensors._fields))
    with mode:
        shape = step_op.step_shape(
            "omega_step_", tensors, cache, window=3, chunk_size=8, inner_loss="squared",
            feature_map="elementwise", read_before=False,
        )  # fmt: skip
        y = step_eager.fwd(shape, tensors, cache)
    assert y.shape == (2, 2, 5)


def test_flops() -> None:
    """Two rows of two heads, each an eighth of a chunk of 8 tokens with 10 keys."""
    given = step_operands(Case())
    with FlopCounterMode(display=False) as counter:
        ops.omega_step_(**given)
    chunk = flops.omega_forward(8, 8, 3, 6, 5, momentum=True)
    assert counter.get_total_flops() == 4 * chunk // 8


def test_autograd_sees_that_a_cache_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a kernel, whose writes torch does not count."""

    def silent(shape: Any, given: Any, cache: OmegaCache) -> torch.Tensor:
        for x in cache:
            x.data.zero_()
        return given.v.new_zeros(given.v.shape)

    monkeypatch.setattr(step_op, "resolve", lambda *_: SimpleNamespace(fwd=silent))
    given = step_operands(Case())
    weight = torch.ones((), requires_grad=True)
    seen = (weight * given["cache"].write).nansum()
    versions = [x._version for x in given["cache"]]
    with torch.no_grad():
        ops.omega_step_(**given)
    assert [x._version for x in given["cache"]] == [before + 1 for before in versions]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.backward()


def test_inference_mode() -> None:
    wanted = ops.omega_step_(**step_operands(Case()))
    with torch.inference_mode():
        got = ops.omega_step_(**step_operands(Case()))
    assert torch.equal(got, wanted)


def test_autocast_casts_queries_keys_and_values_alone() -> None:
    given = step_operands(Case())
    cache = given["cache"]._replace(
        keys=given["cache"].keys.bfloat16(), values=given["cache"].values.bfloat16()
    )
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.omega_step_(**given | {"cache": cache})
        case = Case()
        whole = case.arguments(0, torch.float32, CPU)
        empty = ops.omega_cache(2, 2, 6, 5, window=3, chunk_size=8, momentum=True,
                                dtype=torch.bfloat16)  # fmt: skip
        z, after = ops.omega_extend(**whole, cache=empty)
    assert y.dtype == z.dtype == torch.bfloat16
    assert after.state.dtype == after.residuals.dtype == torch.float32
    assert after.keys.dtype == torch.bfloat16


def test_nothing_to_do() -> None:
    """No rows, or no slots."""
    given = step_operands(Case())
    nothing = {name: given[name][:0] for name in (*TOKENS, "slots")}
    assert ops.omega_step_(**given | nothing).shape == (0, 2, 5)
    empty = OmegaCache._make(x[:0] for x in given["cache"])
    slots = torch.tensor([-1, -1])
    assert not ops.omega_step_(**given | {"cache": empty, "slots": slots}).any()


# ---- errors -------------------------------------------------------------------------------------


def changed(given: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    """The arguments with one of them, or one field of the cache ("cache.keys"), changed."""
    field = name.removeprefix("cache.")
    if field == name:
        return given | {name: change(given[name])}
    cache = given["cache"]._replace(**{field: change(getattr(given["cache"], field))})
    return given | {"cache": cache}


REFUSED = [
    ("q", lambda x: x[..., 0], ValueError, "q must have 3 dimensions"),
    ("q", lambda x: x.double(), TypeError, "k has dtype"),
    ("k", lambda x: x[..., :-1], ValueError, "k has size 5 in dimension 2"),
    ("v", lambda x: x[:1], ValueError, "v has size 1 in dimension 0"),
    ("step", lambda x: x.bfloat16(), TypeError, "step has dtype bfloat16"),
    ("step", lambda x: None, TypeError, "step must be a torch.Tensor"),
    ("decay", lambda x: x[:, :1], ValueError, "decay has size 1 in dimension 1"),
    ("window_gates", lambda x: x[..., :2], ValueError, "window_gates has size 2"),
    ("momentum", lambda x: None, ValueError, "no momentum was given, cache was made for momentum"),
    ("window", lambda x: 2.0, TypeError, "window must be an int"),
    ("window", lambda x: 0, ValueError, "window must be at least 1"),
    ("chunk_size", lambda x: 9, ValueError, "cache.keys has size 10 in dimension 1, expected 11"),
    ("inner_loss", lambda x: "cubic", ValueError, "inner_loss must be one of"),
    ("slots", lambda x: x.int(), TypeError, "slots has dtype int32"),
    ("slots", lambda x: x[:1], ValueError, "slots has size 1"),
    ("slots", lambda x: x.new_tensor([1, 1]), ValueError, "slots must be distinct"),
    ("slots", lambda x: x.new_tensor([1, 6]), ValueError, "slots must be -1 … 5"),
    ("slots", lambda x: x.new_tensor([1, -2]), ValueError, "slots must be -1 … 5"),
    ("cache", tuple, TypeError, "cache must be an OmegaCache, got tuple"),
    ("cache.state", lambda x: x.half(), TypeError, "cache.state has dtype float16"),
    ("cache.keys", lambda x: x.half(), TypeError, "cache.keys has dtype float16"),
    ("cache.residuals", lambda x: x[..., 0], ValueError, "cache.residuals must have 4 dimensions"),
    ("cache.carry", lambda x: None, TypeError, "cache.carry must be a torch.Tensor"),
    ("cache.filled", lambda x: x.long(), TypeError, "cache.filled has dtype int64"),
    ("cache.filled", lambda x: x[:2], ValueError, "cache.filled has size 2"),
    ("cache.state", lambda x: x[:1].expand(6, -1, -1, -1), ValueError, "cache.state is expanded"),
    ("q", lambda x: x.clone().requires_grad_(), ValueError, "q requires grad"),
    ("cache.write", lambda x: x.clone().requires_grad_(), ValueError, "cache.write requires grad"),
]


@pytest.mark.parametrize(("name", "change", "error", "words"), REFUSED)
def test_errors_of_a_step(name: str, change: Any, error: type[Exception], words: str) -> None:
    given = step_operands(Case())
    before = [x.clone() for x in given["cache"]]
    with pytest.raises(error, match=f"omega_step_: {words}"):
        ops.omega_step_(**changed(given, name, change))
    assert_same(given["cache"], before)


def test_more_errors_of_a_step() -> None:
    given = step_operands(Case())
    with pytest.raises(ValueError, match="omega_step_: coefficients were given"):
        ops.omega_step_(**given, coefficients=torch.ones(2))
    with pytest.raises(ValueError, match="omega_step: backend='cuda' cannot run this call"):
        ops.omega_step_(**given, backend="cuda")
    plain = step_operands(Case(momentum=False))
    with pytest.raises(ValueError, match="momentum was given, cache was made for no momentum"):
        ops.omega_step_(**plain, momentum=plain["step"])
    parameter = torch.nn.Parameter(torch.ones(2))
    elementwise = step_operands(Case(degree=1)) | {"coefficients": parameter}
    with pytest.raises(ValueError, match="coefficients requires grad"):
        ops.omega_step_(**elementwise)
    with torch.no_grad():
        assert not ops.omega_step_(**elementwise).requires_grad


EXTENSIONS = [
    ("q", lambda x: x[0], ValueError, "q must have 4 dimensions"),
    ("step", lambda x: x.half(), TypeError, "step has dtype float16"),
    ("v", lambda x: x[:, :-1], ValueError, "v has size 18 in dimension 1"),
    ("chunk_size", lambda x: 9, ValueError, "cache.keys has size 10 in dimension 1, expected 11"),
    ("momentum", lambda x: None, ValueError, "no momentum was given"),
    ("cache", lambda x: None, TypeError, "cache must be an OmegaCache, got NoneType"),
    ("cache.state", lambda x: x[:1], ValueError, "cache.state has size 1 in dimension 0"),
    ("cache.keys", lambda x: x.double(), TypeError, "cache.keys has dtype float64"),
]


@pytest.mark.parametrize(("name", "change", "error", "words"), EXTENSIONS)
def test_errors_of_a_piece(name: str, change: Any, error: type[Exception], words: str) -> None:
    given = Case().arguments(0, torch.float32, CPU)
    given["cache"] = start(Case(), given)
    with pytest.raises(error, match=f"omega_extend: {words}"):
        ops.omega_extend(**changed(given, name, change))


def test_errors_of_caches() -> None:
    make = partial(ops.omega_cache, 2, 2, 6, 5)
    with pytest.raises(TypeError, match="omega_cache: window must be an int"):
        make(window=2.0)
    with pytest.raises(ValueError, match="omega_cache: chunk_size must be at least 1"):
        make(chunk_size=0)
    with pytest.raises(ValueError, match="omega_cache: batch must be at least 0"):
        ops.omega_cache(-1, 2, 6, 5)
    with pytest.raises(TypeError, match="omega_cache: dtype is"):
        make(dtype=torch.int32)
    cache = make(window=3, chunk_size=4)
    with pytest.raises(ValueError, match="window is 7, cache"):
        cache.to_state(window=7)
    with pytest.raises(ValueError, match="feature_map must be one of"):
        cache.to_state(window=3, feature_map="cubic")
    left = cache.to_state(window=3)
    with pytest.raises(TypeError, match="left must be an OmegaState, got tuple"):
        OmegaCache.from_state(tuple(left))
    for field, value, error, words in (
        ("state", left.state.double(), TypeError, "state has dtype float64"),
        ("momentum", left.state[:1], ValueError, "momentum has size 1"),
        ("tail_v", left.tail_v[:, :1], ValueError, "tail_v has size 1"),
        ("tail_length", None, TypeError, "tail_length must be a torch.Tensor"),
    ):
        with pytest.raises(error, match=f"OmegaCache.from_state: {words}"):
            OmegaCache.from_state(left._replace(**{field: value}))
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        OmegaCache.from_state(left, chunk_size=0)


def test_explain_checks_as_the_call_does() -> None:
    given = step_operands(Case())
    assert ops.explain(ops.omega_step_, **given).backend == "eager"
    with pytest.raises(ValueError, match="slots must be distinct"):
        ops.explain(ops.omega_step_, **given | {"slots": torch.tensor([0, 0])})
