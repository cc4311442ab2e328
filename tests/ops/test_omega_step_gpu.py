"""Compiled steps of the Omega rule on a GPU, against float64 and as torch sees them.

Run with `pytest -n 14 -m gpu`. Compiling is most of the time, so a test loops over what shares a
truth or kernels.
"""

from __future__ import annotations

import importlib
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
from fastweights.ops.omega_step import tuning
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

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
STEP = partial(ops.omega_step_, backend="triton")
LITERAL = partial(reference.omega_memory, return_state=True)
step_op = importlib.import_module("fastweights.ops.omega_step.op")
# Three heads through two folds; three sequences, each some tokens behind the one before.
D64 = Case(batch=3, tokens=37, heads=3, width=64, values=64, window=4, chunk_size=16)
D128 = D64.but(width=128, values=128)
FEW = D64.but(tokens=21, chunk_size=8)


def stepped(case: Case, view: Any = inputs.embed, **given: Any) -> Any:
    """y and the state after single steps of sequences that are not at the same place."""
    starts = [5 * n % 7 for n in range(case.batch)]
    return in_steps(case, given, starts, view, backend="triton")


def check(case: Case, dtype: torch.dtype, device: torch.device, seeds: Any = (0, 1)) -> None:
    oracle.check_op(
        partial(stepped, case), LITERAL, case.arguments, dtype, device, seeds=seeds, grads=False,
        label=case.name,
    )  # fmt: skip


# ---- against the loops --------------------------------------------------------------------------

SERVED = [
    D64.but(width=width, values=values, momentum=momentum)
    for width, values in ((64, 64), (128, 128), (32, 32), (16, 16), (128, 256), (13, 61))
    for momentum in (False, True)
]
LAYOUTS = {"aligned": torch.Tensor.contiguous, "loose": partial(inputs.embed, pad=1, offset=1)}


def fitting(case: Case, dtype: torch.dtype, device: torch.device, layout: str) -> Any:
    """What the backend sees of a step, and the configs that fit it."""
    view = LAYOUTS[layout]
    shape = step_shape_of(step_operands(case, dtype, device, view))
    space = backend.SPACE_FWD
    return shape, space.fitting(space.bucket(shape), Device.of(device))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: f"d{case.width}-v{case.values}")
def test_every_config(case: Case, layout: str, device: torch.device) -> None:
    """In bf16; one truth serves all of them."""
    shape, configs = fitting(case, BF16, device, layout)
    assert configs, f"no config is for {case.name}"
    truth = oracle.Oracle(LITERAL, case.arguments, BF16, device, seeds=(0, 1), grads=False)
    run = partial(stepped, case, LAYOUTS[layout])
    with oracle.collected() as failures:
        for config in contracts.every_config(backend.SPACE_FWD, shape):
            failures += [f"{config.name} {line}" for line in truth.measure(run).report()]


def test_no_config_is_left_out(device: torch.device) -> None:
    """By the cases above; those that fit none of them here have to elsewhere."""
    left = set(backend.SPACE_FWD.configs)
    for case in SERVED:
        for layout in LAYOUTS:
            left -= set(fitting(case, BF16, device, layout)[1])
    with assume_device(target_device("sm_90")):
        for case in SERVED:
            for layout in LAYOUTS:
                left -= set(fitting(case, BF16, device, layout)[1])
    # Keys and values of 256 columns from any address.
    wide = D64.but(width=250, values=250, momentum=False, tokens=17)
    left -= set(fitting(wide, BF16, device, "loose")[1])
    assert not left, {config.name for config in left}
    check(wide, BF16, device, seeds=(0,))


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_types(dtype: str, width: int, momentum: bool, device: torch.device) -> None:
    check(D64.but(width=width, values=width, momentum=momentum), DTYPES[dtype], device)


RULES = [
    FEW.but(decay=False, momentum=False, gates=False, window=1),
    FEW.but(decay=False, carried=True),
    FEW.but(gates=False, momentum=False, carried=True, window=5),
    FEW.but(inner_loss="dot", carried=True),
    FEW.but(inner_loss="dot", momentum=False, decay=False, read_before=True),
    FEW.but(read_before=True, carried=True),
    FEW.but(degree=2, carried=True, momentum=False),
    FEW.but(degree=0, read_before=True),
    FEW.but(width=48, values=80),
    FEW.but(width=80, values=48, momentum=False, carried=True),
    FEW.but(width=100, values=20, momentum=False),
    FEW.but(width=6, values=5),
    FEW.but(width=256, values=256, momentum=False),
    FEW.but(width=256, values=256),
    FEW.but(chunk_size=1, window=1, momentum=False),
    FEW.but(chunk_size=1, window=5, carried=True),
    FEW.but(chunk_size=2, window=12, carried=True),
    FEW.but(chunk_size=17, window=18, momentum=False, carried=True),
    FEW.but(chunk_size=10, window=40, tokens=45, carried=True),
    FEW.but(chunk_size=37, window=9, tokens=80, momentum=False),
    FEW.but(chunk_size=64, tokens=131, momentum=False),
    FEW.but(chunk_size=200, tokens=203, batch=1, momentum=False),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, (FP16, BF16, FP32)[turn % 3], id=f"d{case.width}-{case.name}")
        for turn, case in enumerate(RULES)
    ],
)
def test_rules(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """By the default configs, on views."""
    check(case, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(dtype: str, device: torch.device) -> None:
    """Of tokens and of the cache, which gets copied and copied back."""
    case = FEW.but(momentum=False, batch=1)
    oracle.check_op(
        partial(stepped, case, inputs.spaced), LITERAL, case.arguments, DTYPES[dtype], device,
        seeds=(0,), grads=False,
    )  # fmt: skip


@pytest.mark.parametrize("value", [0.0, 1 - 1e-7, 9.36e-14])
@pytest.mark.parametrize("name", ["decay", "momentum"])
def test_extreme_gates(name: str, value: float, device: torch.device) -> None:
    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = FEW.arguments(seed, dtype, device)
        given[name][:, ::3] = value
        return given

    for dtype in (BF16, FP32):
        oracle.check_op(
            partial(stepped, FEW), LITERAL, arguments, dtype, device, seeds=(0,), grads=False
        )


@pytest.mark.parametrize("case", [D64, D128.but(momentum=False)], ids=["D64", "D128"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_drift(dtype: str, case: Case, device: torch.device) -> None:
    """A prompt, then 400 steps through 25 folds: as near to float64 as plain torch is."""
    case = case.but(tokens=500, batch=1)
    given = case.arguments(0, DTYPES[dtype], device)
    rules = rules_of(given)
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    wanted, last = ops.omega_memory(**exact, return_state=True)
    assert last is not None
    _, cache = ops.omega_extend(**cut(given, 0, 100), cache=start(case, given), **rules)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    found = []
    for name in ("triton", "eager"):
        mine = OmegaCache._make(None if x is None else x.clone() for x in cache)
        reads = []
        for t in range(100, 500):
            token = {name: x[:, 0] for name, x in cut(given, t, t + 1).items()}
            reads.append(ops.omega_step_(**token, cache=mine, slots=slots, backend=name, **rules))
        read = torch.stack(reads, 1).double() - wanted[:, 100:]
        state = state_of(mine, given).state - last.state
        found.append((read.norm() / wanted[:, 100:].norm(), state.norm() / last.state.norm()))
    for got, plain in zip(*found, strict=True):
        assert got <= max(1.5 * plain, 2e-6), (float(got), float(plain))


# ---- pools --------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [True, False])
def test_other_slots_keep_their_bits(momentum: bool, device: torch.device) -> None:
    """Skipped rows, and slots that no row names; slot 0 is one like all others."""
    case = D64.but(batch=3, tokens=20, momentum=momentum)
    given = case.arguments(0, BF16, device)
    rules = rules_of(given)
    _, cache = ops.omega_extend(**cut(given, 0, 16), cache=start(case, given), **rules)
    pool = poisoned_pool(cache, torch.tensor([0, 4, 6], device=device))
    for t, named in enumerate(([-1, -1, -1], [-1, 4, -1], [0, -1, 6], [6, -1, -1])):
        before = [None if x is None else x.clone() for x in pool]
        slots = torch.tensor(named, device=device)
        token = {name: x[:, 0].clone() for name, x in cut(given, 16 + t, 17 + t).items()}
        for x in token.values():
            x[slots < 0] = torch.nan
        with alloc.poison():
            y = STEP(**token, cache=pool, slots=slots, **rules)
        others = [slot for slot in range(8) if slot not in named]
        assert_same(
            [None if x is None else x[others] for x in pool],
            [None if x is None else x[others] for x in before],
        )
        for slot, read in zip(named, y, strict=True):
            assert bool(read.any()) == (slot >= 0)
            assert slot < 0 or pool.filled[slot] == before[-1][slot] % 16 + 1


def problem_inputs(
    rows: int, device: torch.device, momentum: bool = True
) -> tuple[tuning.Problem, dict[str, Any]]:
    problem = tuning.Problem("", rows, 5, 64, 64, chunk_size=16, momentum=momentum)
    return problem, problem.inputs(BF16, device, 0) | problem.call


def copied(given: dict[str, Any]) -> dict[str, Any]:
    cache = OmegaCache._make(None if x is None else x.clone() for x in given["cache"])
    return given | {"cache": cache}


def test_rows_in_another_order_give_equal_bits(device: torch.device) -> None:
    """And more rows than run at a time; counters of heads are gone when a call ends."""
    problem, given = problem_inputs(700, device)
    first = copied(given)
    y = STEP(**first)
    order = torch.randperm(700, device=device)
    rows = ("q", "k", "v", "step", "decay", "window_gates", "momentum", "slots")
    second = copied(given | {name: given[name][order] for name in rows})
    again = STEP(**second)
    oracle.assert_bit_equal({"y": again}, {"y": y[order]})
    assert_same(second["cache"], first["cache"])
    before = given["cache"].filled
    assert torch.equal(first["cache"].filled, before % problem.chunk_size + 1)


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
@pytest.mark.parametrize("width", [64, 128])
def test_all_rows_fold_at_once(width: int, momentum: bool, device: torch.device) -> None:
    """Many tiles for each program; M and S have the bits of calls with a tile for each program."""
    problem = tuning.Problem("", 600, 5, width, width, chunk_size=16, momentum=momentum)
    given = problem.inputs(BF16, device, 0) | problem.call
    given["cache"].filled.fill_(16)
    whole, few = copied(given), copied(given)
    STEP(**whole)
    rows = ("q", "k", "v", "step", "decay", "window_gates", "momentum", "slots")
    for first in range(0, 600, 20):
        part = {name: given[name][first : first + 20] for name in rows if name in given}
        STEP(**few | part)
    assert_same(few["cache"][:2], whole["cache"][:2])
    assert (whole["cache"].state != given["cache"].state).flatten(1).any(1).all()


def test_repeated_runs_have_equal_bits(device: torch.device) -> None:
    """While matrix products of another stream disturb the timing, and with all that is written."""
    _, given = problem_inputs(200, device)
    stream = torch.cuda.Stream(device)
    x = torch.randn(2048, 2048, device=device, dtype=BF16)
    product = torch.empty_like(x)
    stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> Any:
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.mm(x, x, out=product)
        mine = copied(given)
        return {"y": STEP(**mine)} | oracle.named(mine["cache"])

    first = run()
    for i in range(1, 50):
        oracle.assert_bit_equal(run(), first, f"run {i}")
    torch.cuda.synchronize(device)


def test_more_programs_than_65535(device: torch.device) -> None:
    """The last row's bits are those that it has alone."""
    problem = tuning.Problem("", 4200, 16, 16, 16, chunk_size=4)
    given = problem.inputs(BF16, device, 0) | problem.call
    rows = ("q", "k", "v", "step", "decay", "window_gates", "slots")
    alone = copied(given | {name: given[name][-1:] for name in rows})
    whole = copied(given)
    assert torch.equal(STEP(**whole)[-1:], STEP(**alone))
    slot = int(given["slots"][-1])
    assert_same([x[slot] for x in whole["cache"] if x is not None],
                [x[slot] for x in alone["cache"] if x is not None])  # fmt: skip


# ---- as torch sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [True, False])
def test_a_cuda_graph_fills_caches_through_two_folds(momentum: bool, device: torch.device) -> None:
    """Replays of one captured step on caches that fill, rows at different places."""
    case = D64.but(tokens=40, momentum=momentum)
    given = case.arguments(0, BF16, device)
    rules = rules_of(given)
    _, cache = ops.omega_extend(**cut(given, 0, 3), cache=start(case, given), **rules)
    slots = torch.tensor([5, 0, 3], device=device)
    pools = [poisoned_pool(cache, slots) for _ in range(2)]
    token = {name: x[:, 0].clone() for name, x in cut(given, 3, 4).items()}
    named = slots.clone()

    def step() -> tuple[torch.Tensor, ...]:
        return (STEP(**token, cache=pools[0], slots=named, **rules),)

    kept = [None if x is None else x.clone() for x in pools[0]]
    graph, (read,) = contracts.captured(step, device)
    for x, before in zip(pools[0], kept, strict=True):
        if x is not None:
            x.copy_(before)  # warming up has written
    for t in range(3, 40):
        for name, x in cut(given, t, t + 1).items():
            token[name].copy_(x[:, 0])
        named.copy_(torch.where(torch.arange(3, device=device) == t % 4, -1, slots))
        graph.replay()
        fresh = {name: x.clone() for name, x in token.items()}
        wanted = STEP(**fresh, cache=pools[1], slots=named.clone(), **rules)
        assert torch.equal(read, wanted), t
    assert_same(pools[0], pools[1])
    assert pools[0].filled[slots].min() >= 1


def test_first_call_inside_capture_says_warm_up(device: torch.device) -> None:
    """And leaves the stream usable."""
    case = FEW.but(width=24, values=40, window=3, read_before=True)  # compiled by no other test
    given = step_operands(case, FP16, device)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold: call it once before capture"),
        torch.cuda.graph(graph),
    ):
        STEP(**given)
    check(case, FP16, device, seeds=(0,))


def test_no_host_sync(device: torch.device) -> None:
    _, given = problem_inputs(40, device)
    STEP(**copied(given))  # compiles
    mine = copied(given)
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = STEP(**mine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y.isfinite().all()


def test_steps_in_one_graph_of_inductor(device: torch.device) -> None:
    """Two steps, and a look at the cache between them."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = STEP(**given) + 1.0
        return first, given["cache"].write * 2, STEP(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        given = step_operands(FEW, BF16, device)
        results = function(**given)
        found.append(oracle.named(results) | oracle.named(given["cache"]))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])


def test_opcheck(device: torch.device) -> None:
    samples = []
    for case in (FEW, FEW.but(momentum=False, gates=False, decay=False)):
        given = step_operands(case, BF16, device)
        tensors = [given.get(name) for name in step_op.StepTensors._fields]
        rules = (case.window, case.chunk_size, case.inner_loss, "identity", False, "triton")
        samples.append((*tensors, *given["cache"], *rules))
    contracts.check_opcheck(step_op.STEP, samples)


def test_autocast(device: torch.device) -> None:
    """fp32 queries, keys and values for a cache of bf16."""
    narrow = step_operands(FEW, BF16, device)
    wide = copied(narrow | {name: narrow[name].float() for name in "qkv"})
    with torch.autocast("cuda", dtype=BF16):
        y = STEP(**wide)
    assert y.dtype == BF16
    assert torch.equal(y, STEP(**narrow))


def test_auto_picks_triton_on_the_gpu(device: torch.device) -> None:
    said = ops.explain(ops.omega_step_, **step_operands(FEW, BF16, device))
    assert said.backend == "triton"
    assert set(said.configs) == {"fwd"}
    wide = step_operands(FEW.but(width=260, momentum=False), BF16, device)
    assert ops.explain(ops.omega_step_, **wide).backend == "eager"
