"""Steps of the Omega rule by Triton under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_omega_step_gpu.py`. A program of one row and head takes about
40 ms of the interpreter: calls here are of a few, with one seed each.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import OmegaCache, alloc
from fastweights.ops.omega_step import triton as backend
from fastweights.ops.omega_step import triton_spaces, tuning
from helpers import contracts, inputs, oracle
from helpers.omega import Case
from helpers.omega_cache import (
    assert_same,
    cut,
    in_steps,
    poisoned_pool,
    rules_of,
    start,
    state_of,
    step_operands,
    step_shape_of,
)

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_omega_step_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
STEP = partial(ops.omega_step_, backend="triton")
LITERAL = partial(reference.omega_memory, return_state=True)
step_op = importlib.import_module("fastweights.ops.omega_step.op")
# Two heads through two folds, the second of two sequences three tokens behind the first.
BASE = Case(tokens=11, chunk_size=4)


def check(case: Case, dtype: torch.dtype = FP32) -> None:
    """y, the state and the tail after single steps, against the loops over the whole."""

    def stepped(**given: Any) -> Any:
        starts = [3 * n % 7 for n in range(case.batch)]
        return in_steps(case, given, starts, backend="triton")

    oracle.check_op(
        stepped, LITERAL, case.arguments, dtype, CPU, seeds=(0,), grads=False, label=case.name
    )


def one(**changes: Any) -> Case:
    """One head of one sequence."""
    return BASE.but(**{"batch": 1, "heads": 1} | changes)


# ---- against the loops --------------------------------------------------------------------------

RULES = [
    BASE,
    BASE.but(momentum=False),
    one(decay=False),
    one(decay=False, momentum=False, gates=False, window=1),
    one(decay=False, gates=False, carried=True),
    one(momentum=False, gates=False, window=4),
    one(inner_loss="dot", carried=True),
    one(inner_loss="dot", momentum=False, decay=False),
    one(read_before=True, carried=True),
    one(read_before=True, momentum=False, inner_loss="dot"),
    one(batch=3, carried=True),
    one(degree=2, carried=True),
    one(degree=0, momentum=False),
    one(degree=1, read_before=True, momentum=False, carried=True),
]
# Of windows and chunks: the older rows of a window overlap those that a fold brings up, or not.
SIZES = [
    one(chunk_size=1, window=1, tokens=4),
    one(chunk_size=1, window=5, tokens=7, carried=True),
    one(chunk_size=2, window=12, tokens=9, carried=True, momentum=False),
    one(chunk_size=4, window=4, momentum=False),
    one(chunk_size=4, window=5),
    one(chunk_size=4, window=6, carried=True),
    one(chunk_size=10, window=20, tokens=24, momentum=False),
    one(chunk_size=16, window=4, tokens=35),
    one(chunk_size=37, window=18, tokens=40, carried=True, momentum=False),
    one(width=20, values=36),
    one(width=33, values=3, momentum=False),
    one(width=1, values=1),
    one(width=16, values=16, momentum=False, carried=True),
    one(width=140, values=8, tokens=6, momentum=False),
    one(width=8, values=130, tokens=6, momentum=False),
    one(heads=5, tokens=6, momentum=False),
]


@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
def test_rules(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SIZES, ids=lambda case: f"d{case.width}-{case.name}")
def test_sizes(case: Case) -> None:
    check(case)


def test_default_coefficients() -> None:
    """They are constants of the kernel."""
    case = one(degree=2, tokens=9)
    given = case.arguments(0, FP32, CPU)
    del given["coefficients"]
    y, left = in_steps(case, given, backend="triton")
    wanted, last = LITERAL(**given)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(left.state, last.state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        one(carried=True, momentum=False, window=5),
        one(inner_loss="dot", read_before=True),
        one(degree=2, carried=True, momentum=False),
        one(width=16, values=32, chunk_size=10, window=4),
    ],
    ids=lambda case: case.name,
)
def test_fp16(case: Case) -> None:
    check(case, FP16)


FITTED = [one(tokens=4, width=d, values=d, chunk_size=3) for d in (16, 32, 64, 13)]


@pytest.mark.parametrize("case", FITTED, ids=lambda case: f"d{case.width}")
def test_every_config(case: Case) -> None:
    """One truth serves all that fit; in fp16, which more of them serve."""
    truth = oracle.Oracle(LITERAL, case.arguments, FP16, CPU, seeds=(0,), grads=False)
    shape = step_shape_of(step_operands(case, FP16, view=torch.Tensor.contiguous))
    with oracle.collected() as failures:
        for config in contracts.every_config(backend.SPACE_FWD, shape):

            def stepped(**given: Any) -> Any:
                given |= {name: given[name].contiguous() for name in "qkv"}
                return in_steps(case, given, view=torch.Tensor.contiguous, backend="triton")

            failures += [f"{config.name} {line}" for line in truth.measure(stepped).report()]


@pytest.mark.slow
def test_a_prompt_and_eighty_steps() -> None:
    """`omega_extend` over a prompt, then steps through five folds: the whole, in fp32."""
    case = one(tokens=113, chunk_size=16, window=4, width=16, values=16, momentum=False)
    given = case.arguments(3, FP32, CPU)
    rules = rules_of(given)
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    wanted, last = ops.omega_memory(**exact, return_state=True)
    assert last is not None
    y, cache = ops.omega_extend(**cut(given, 0, 33), cache=start(case, given), **rules)
    pool = poisoned_pool(cache, torch.tensor([2]))
    reads = [y]
    for t in range(33, 113):
        token = {name: inputs.embed(x[:, 0]) for name, x in cut(given, t, t + 1).items()}
        reads.append(STEP(**token, cache=pool, slots=torch.tensor([2]), **rules)[:, None])
    gap = (torch.cat(reads, 1) - wanted).norm() / wanted.norm()
    assert gap <= 2e-6, gap
    mine = state_of(OmegaCache._make(None if x is None else x[2:3] for x in pool), given)
    assert (mine.state - last.state).norm() <= 2e-6 * last.state.norm()


def test_caches_are_those_of_eager() -> None:
    """Token after token, all that means anything, in slots that no two steps name alike."""
    case = BASE.but(batch=3, carried=True, window=4, tokens=6)
    given = case.arguments(0, FP32, CPU)
    pools = [poisoned_pool(start(case, given), torch.tensor([0, 3, 7])) for _ in range(2)]
    problem = tuning.Problem("", 3, 2, 6, 5, case.window, case.chunk_size, True)
    for t, slots in enumerate(([0, 3, 7], [7, -1, 0], [3, 0, 7], [-1, -1, 7], [0, 3, 7])):
        token = {name: x[:, t] for name, x in cut(given, 0, 6).items()}
        found = []
        for pool, name in zip(pools, ("triton", "eager"), strict=True):
            with alloc.poison():
                y = ops.omega_step_(
                    **token, cache=pool, slots=torch.tensor(slots), backend=name, **rules_of(given)
                )
            live = [None if x is None else x[[0, 3, 7]] for x in pool]
            found.append(problem.compared(oracle.named(OmegaCache._make(live))) | {"y": y})
        for name, x in found[1].items():
            torch.testing.assert_close(found[0][name], x, rtol=1e-5, atol=1e-6, msg=f"{t} {name}")


# ---- folds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [True, False])
def test_rows_that_fold_are_found_among_many(momentum: bool) -> None:
    """At both ends of what a program looks at together, in tiles of more than one row and column;
    M and S move where a chunk is full, and nowhere else.
    """
    block = 2 * backend.SCANNED  # two warps
    rows = 2 * block + 40
    problem = tuning.Problem("", rows, 1, 40, 33, window=3, chunk_size=5, momentum=momentum)
    given = problem.inputs(FP32, CPU, 0) | problem.call
    cache, full = given["cache"], [4, 9, 14, 19, 24, 29]  # slot n holds n % 5 + 1 tokens
    assert cache.filled[full].tolist() == [5] * 6
    given["slots"] = torch.full((rows,), -1)
    ends = [0, block - 1, block, 2 * block - 1, 2 * block, rows - 1]
    given["slots"][ends] = torch.tensor(full)
    given["slots"][[1, block + 1]] = torch.tensor([3, 10])
    mine, other = (
        OmegaCache._make(None if x is None else x.clone() for x in cache) for _ in range(2)
    )
    y = STEP(**given | {"cache": mine})
    wanted = ops.omega_step_(**given | {"cache": other}, backend="eager")
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    for name in ("state", "momentum")[: 1 + momentum]:
        x, begin = getattr(mine, name), getattr(cache, name)
        torch.testing.assert_close(x, getattr(other, name), rtol=1e-5, atol=1e-5)
        moved = (x != begin).flatten(1).any(1).nonzero().flatten()
        assert moved.tolist() == full


def test_programs_that_fold() -> None:
    """As many as run at a time where heads are many, a tile each where they are few."""
    device = replace(target_device("sm_90"), multiprocessors=132)
    for batch, width, wanted in ((256, 64, 528), (1, 64, 64), (1, 16, 16), (1, 128, 256)):
        shape = shaped(batch=batch, width=width, values=width)
        config = triton_spaces.fold_config(backend.bucket(shape))
        assert triton_spaces.fold_programs(config, shape, device) == wanted


# ---- gates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1 - 1e-7])
@pytest.mark.parametrize("name", ["decay", "momentum"])
def test_extreme_gates(name: str, value: float) -> None:
    case = one(tokens=9)

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = case.arguments(seed, dtype, device)
        given[name][:, ::2] = value
        return given

    def stepped(**given: Any) -> Any:
        return in_steps(case, given, backend="triton")

    oracle.check_op(stepped, LITERAL, arguments, FP32, CPU, seeds=(0,), grads=False)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_step_of_infinity_stays_in_its_row() -> None:
    """Also where the decay is no argument."""
    given = step_operands(Case(decay=False, gates=False, momentum=False))
    given["step"][0, 1] = torch.inf
    y = STEP(**given)
    assert y[0, 0].isfinite().all()
    assert not y[0, 1].isfinite().all()


# ---- what a call leaves alone -------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [True, False])
def test_other_slots_keep_their_bits(momentum: bool) -> None:
    """Skipped rows, and slots that no row names; slot 0 is one like all others."""
    case = Case(3, 7, window=4, chunk_size=3, momentum=momentum)
    given = case.arguments(0, FP32, CPU)
    rules = rules_of(given)
    _, cache = ops.omega_extend(**cut(given, 0, 3), cache=start(case, given), **rules)
    pool = poisoned_pool(cache, torch.tensor([0, 4, 6]))
    for t, slots in enumerate(([-1, -1, -1], [-1, 4, -1], [0, -1, 6], [6, -1, -1])):
        before = [None if x is None else x.clone() for x in pool]
        token = {name: x[:, 0].clone() for name, x in cut(given, 3 + t, 4 + t).items()}
        for x in token.values():
            x[torch.tensor(slots) < 0] = torch.nan
        with alloc.poison():
            y = STEP(**token, cache=pool, slots=torch.tensor(slots), **rules)
        others = [slot for slot in range(8) if slot not in slots]
        assert_same(
            [None if x is None else x[others] for x in pool],
            [None if x is None else x[others] for x in before],
        )
        for slot, read in zip(slots, y, strict=True):
            assert bool(read.any()) == (slot >= 0)
            assert slot < 0 or pool.filled[slot] == before[-1][slot] % 3 + 1


@pytest.mark.parametrize("had", [0, 2, 3, 5, 6])
def test_rows_that_do_not_exist_are_not_read(had: int) -> None:
    """NaN there changes no bit, through a fold."""
    case = Case(1, 20, window=6, chunk_size=3, degree=2)
    given = case.arguments(0, FP32, CPU)
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
    found = []
    for begin in (cache, dirty):
        mine = OmegaCache._make(None if x is None else x.clone() for x in begin)
        reads = []
        for t in range(had, had + 4):
            token = {name: x[:, 0] for name, x in cut(given, t, t + 1).items()}
            reads.append(STEP(**token, cache=mine, slots=torch.tensor([0]), **rules))
        left = state_of(mine, given)
        found.append({"reads": torch.stack(reads)} | oracle.named(left))
    oracle.assert_bit_equal(found[1], found[0])
    assert all(x.isfinite().all() for x in found[1].values())


def test_rows_in_another_order_give_equal_bits() -> None:
    """Whichever program runs first, and whichever slots the memories lie in."""
    case = BASE.but(batch=4, tokens=6, chunk_size=5)
    given = case.arguments(0, FP32, CPU)
    rules = rules_of(given)
    _, cache = ops.omega_extend(**cut(given, 0, 5), cache=start(case, given), **rules)
    token = {name: x[:, 0] for name, x in cut(given, 5, 6).items()}
    found = []
    for order, slots in (([0, 1, 2, 3], [0, 1, 2, 3]), ([2, 0, 3, 1], [5, 2, 9, 0])):
        rows = {name: x[order] for name, x in token.items()}
        mine = OmegaCache._make(None if x is None else x[order] for x in cache)
        pool = poisoned_pool(mine, torch.tensor(slots))
        y = STEP(**rows, cache=pool, slots=torch.tensor(slots), **rules)
        back = torch.tensor(order).argsort()
        after = OmegaCache._make(None if x is None else x[slots][back] for x in pool)
        found.append({"y": y[back]} | oracle.named(state_of(after, given)) | {"f": after.filled})
    oracle.assert_bit_equal(found[1], found[0])


# ---- layouts ------------------------------------------------------------------------------------

VIEWS: dict[str, Any] = {
    "last axis strided": inputs.spaced,
    "misaligned": partial(inputs.embed, pad=1, offset=1),
    "contiguous": torch.Tensor.contiguous,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_tokens_and_caches(view: str) -> None:
    """Two steps, one of which folds; of a cache all fields may be views, and are written."""
    found = []
    for change in (VIEWS[view], inputs.embed):
        given = step_operands(Case(width=16, values=24, chunk_size=4, momentum=True), view=change)
        reads = [STEP(**given), STEP(**given)]
        cache = given["cache"]
        found.append({"y": torch.stack(reads)} | oracle.named(cache))
    for name, x in found[1].items():
        torch.testing.assert_close(
            found[0][name], x, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name
        )
    assert found[0]["filled"].tolist()[:2] == [4, 2]


def test_expanded_tokens() -> None:
    """One head's queries and gates for both."""
    given = step_operands(Case())
    wide = {
        name: given[name][:, :1].expand(given[name].shape)
        for name in ("q", "k", "v", "step", "decay", "momentum", "window_gates")
    }
    found = []
    for rows in (wide, {name: x.contiguous() for name, x in wide.items()}):
        cache = OmegaCache._make(None if x is None else x.clone() for x in given["cache"])
        found.append(STEP(**given | rows | {"cache": cache}))
    torch.testing.assert_close(found[0], found[1])


def test_nothing_to_do() -> None:
    """No rows, no heads' values, or no slots."""
    given = step_operands(Case())
    rows = ("q", "k", "v", "step", "decay", "window_gates", "momentum", "slots")
    nothing = {name: given[name][:0] for name in rows}
    assert STEP(**given | nothing).shape == (0, 2, 5)
    empty = OmegaCache._make(x[:0] for x in given["cache"])
    with alloc.poison():
        y = STEP(**given | {"cache": empty, "slots": torch.tensor([-1, -1])})
    assert not y.any()


# ---- as torch sees it ---------------------------------------------------------------------------


def test_opcheck() -> None:
    case = Case(degree=2, window=2)
    given = step_operands(case)
    tensors = [given.get(name) for name in step_op.StepTensors._fields]
    rules = (case.window, case.chunk_size, case.inner_loss, "elementwise", False, "triton")
    contracts.check_opcheck(step_op.STEP, [(*tensors, *given["cache"], *rules)])


def test_steps_in_one_graph() -> None:
    """Two steps and a look at the cache between them."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = STEP(**given)
        return first, given["cache"].write * 2, STEP(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = step_operands(Case())
        results = function(**given)
        found.append(oracle.named(results) | oracle.named(given["cache"]))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])


# ---- what it takes, and what not ----------------------------------------------------------------


def shaped(**changes: Any) -> Any:
    """A call of 256 rows and 16 heads."""
    shape = tuning._compile_shape(changes.pop("width", 64), changes.pop("values", 64))
    return replace(shape, **changes)


def reason(arch: str = "sm_90", **changes: Any) -> str | None:
    with assume_device(target_device(arch)):
        return backend.supports(shaped(**changes), arch)


def test_supports() -> None:
    for changes in (
        {}, {"chunk_size": 1}, {"chunk_size": 65535, "window": 1000}, {"window": 12},
        {"width": 256, "values": 256}, {"width": 250, "values": 3}, {"width": 1, "values": 1},
        {"aligned": False}, {"heads": 32767}, {"batch": 0}, {"feature_map": "elementwise"},
    ):  # fmt: skip
        for dtype in (torch.bfloat16, FP32):
            for momentum in (False, True):
                for arch in ("sm_80", "sm_86", "sm_90"):
                    assert reason(arch, dtype=dtype, momentum=momentum, **changes) is None, changes
    assert "width of features up to 256, this is 257" in str(reason(width=257))
    assert "width of v up to 256, this is 257" in str(reason(values=257))
    assert "identity and elementwise, this is symmetric" in str(reason(feature_map="symmetric"))
    assert "takes chunk_size up to 65535, this is 65536" in str(reason(chunk_size=65536))
    assert "takes heads up to 32767, this is 32768" in str(reason(heads=32768))


def test_refusals_reach_the_caller() -> None:
    given = step_operands(Case(width=257))
    with pytest.raises(ValueError, match="'triton' cannot run this call: takes the width of feat"):
        STEP(**given)
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        STEP(**step_operands(Case(), torch.bfloat16))


def test_explain_names_the_config() -> None:
    said = ops.explain(ops.omega_step_, **step_operands(Case()), backend="triton")
    assert said.backend == "triton"
    assert set(said.configs) == {"fwd"}


def test_warps_by_the_number_of_heads() -> None:
    """Few where heads are many."""
    device, space = target_device("sm_90"), backend.SPACE_FWD
    for width in (16, 32, 64, 128, 256):
        for dtype in (torch.bfloat16, FP32):
            few, many = (
                space.default(space.bucket(shaped(width=width, batch=n, dtype=dtype)), device)
                for n in (1, 256)
            )
            assert few.num_warps >= many.num_warps, (width, dtype)


# ---- compile keys -------------------------------------------------------------------------------

SIGNATURES = """
    import json
    import torch
    from fastweights.ops import OmegaCache, omega_cache, triton_runtime
    from fastweights.ops.omega_step import op, triton as backend
    from helpers import inputs

    VIEWS = {
        "embedded": lambda x: inputs.embed(x),
        "misaligned": lambda x: inputs.embed(x, pad=1, offset=1),
    }
    for name, view in VIEWS.items():
        keys = {"omega_fold": set(), "omega_step": set()}
        for i in range(40):
            rows, heads, window, chunk = 2 + i, 5 + i % 4, 1 + i % 9, 3 + 7 * i
            x, gate = torch.zeros(rows, heads, 24), torch.zeros(rows, heads)
            tokens = [view(x.bfloat16()) for _ in range(3)]
            gates = gate[..., None].expand(rows, heads, window)
            slots = torch.full((rows,), -1)
            given = op.StepTensors(*tokens, slots, gate, gate, gates, None, None)
            rules = {"window": window, "chunk_size": chunk}
            cache = omega_cache(3 + i, heads, 24, 24, **rules, dtype=torch.bfloat16)
            floating = lambda x: x is not None and x.is_floating_point()
            cache = OmegaCache._make(view(x) if floating(x) else x for x in cache)
            shape = op.step_shape(
                "test", given, cache, **rules, inner_loss="squared", feature_map="identity",
                read_before=False, concrete=True,
            )
            with triton_runtime.record_launches() as found:
                backend.fwd(shape, given, cache)
            for source in found:
                keys[source.name].add(repr(source))
        print(name, *map(len, keys.values()))
"""


def test_forty_sizes_and_views_compile_once() -> None:
    """One signature of each kernel whatever the rows, heads, windows, chunks and strides; one more
    unaligned.
    """
    lines = contracts.run_uninterpreted(SIGNATURES)
    assert [line.split() for line in lines] == [["embedded", "1", "1"], ["misaligned", "1", "1"]]


COMPILED = """
    import json
    from fastweights.ops.omega_step import triton_spaces, tuning
    for target in ("sm_80", "sm_90"):
        for quick in (True, False):
            cases = tuning.compile_cases(target, quick)
            print(json.dumps(sorted({case.config.name for case in cases})))
"""


def test_compile_reports_leave_no_config_out() -> None:
    every = sorted(config.name for config in backend.SPACE_FWD.configs)
    quick, whole, *others = map(json.loads, contracts.run_uninterpreted(COMPILED))
    assert whole == every
    assert others == [quick, every]
    default = backend.SPACE_FWD.default(
        backend.SPACE_FWD.bucket(tuning._compile_shape(64, 64)), Device("sm_90", 232448)
    )
    assert quick == [default.name]
