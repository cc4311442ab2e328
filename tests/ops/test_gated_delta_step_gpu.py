"""Compiled steps of the gated delta rule on a GPU, against float64 and as torch sees them.

Run with `pytest -n 14 -m gpu`.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device
from fastweights.ops import alloc
from fastweights.ops.gated_delta_step import triton as backend
from fastweights.ops.gated_delta_step import tuning
from helpers import contracts, inputs, oracle
from helpers.gated_delta import TOKENS, Case, in_steps, one_step

pytestmark = pytest.mark.gpu

op = importlib.import_module("fastweights.ops.gated_delta_step.op")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
STEP = partial(ops.gated_delta_step_, backend="triton")
LITERAL = partial(reference.gated_delta_rule, output_final_state=True)
BASE = Case(batch=3, tokens=9, heads=(2, 2, 4), carried=True)
LAYOUTS = {"aligned": torch.Tensor.contiguous, "loose": partial(inputs.embed, pad=1, offset=1)}
# Every config fits one of them.
SERVED = [
    BASE.but(width=width, values=values)
    for width, values in ((128, 128), (64, 64), (256, 256), (16, 16), (32, 128), (125, 130))
]
CASES = [
    BASE.but(heads=(4, 2, 1), scale=0.3),
    BASE.but(heads=(1, 1, 3), qk_l2norm=False),
    BASE.but(tokens=11, harsh=True),
    BASE.but(tokens=11, harsh=True, qk_l2norm=False, heads=(1, 2, 2), width=64, values=64),
    BASE.but(width=1, values=1),
    BASE.but(width=33, values=3),
    BASE.but(width=5, values=130),
    BASE.but(width=250, values=20),
    BASE.but(width=64, values=300),
    # Widths that are no power of two, and values of another width.
    *(
        BASE.but(width=width, values=values, tokens=5)
        for width, values in ((40, 80), (80, 40), (96, 96), (100, 192), (192, 100), (256, 8))
    ),
    BASE.but(batch=17, heads=(8, 8, 32), width=128, values=128, tokens=4),
]


def operands(case: Case, dtype: torch.dtype, device: torch.device, slots: Any) -> dict[str, Any]:
    """The first token of a case, with a pool of four slots."""
    given = one_step(case.arguments(0, dtype, device), 0)
    pool = torch.randn(4, max(case.heads), case.width, case.values, device=device)
    return given | {"state_pool": pool, "slots": torch.tensor(slots, device=device)}


def shape_of(given: dict[str, Any]) -> Any:
    tensors = op.StepTensors(*(given[name] for name in TOKENS), given["state_pool"], given["slots"])
    return op.unchecked_shape(tensors, given["scale"], given["qk_l2norm"], 1e-12)


# ---- against the loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: f"d{case.width}-v{case.values}")
def test_every_config(case: Case, layout: str, dtype: str, device: torch.device) -> None:
    """One truth serves all of them."""
    narrow = DTYPES[dtype]
    truth = oracle.Oracle(LITERAL, case.arguments, narrow, device, seeds=(0, 1), grads=False)
    run = partial(in_steps, STEP, view=LAYOUTS[layout])
    shape = shape_of(operands(case, narrow, device, (2, -1, 0)))
    with oracle.collected() as failures:
        for config in contracts.every_config(backend.SPACE_FWD, shape):
            failures += [f"{config.name} {line}" for line in truth.measure(run).report()]


def test_no_config_is_left_out(device: torch.device) -> None:
    left = set(backend.SPACE_FWD.configs)
    for case in SERVED:
        key = backend.SPACE_FWD.bucket(shape_of(operands(case, BF16, device, (2, -1, 0))))
        left -= set(backend.SPACE_FWD.fitting(key, Device.of(device)))
    assert not left, {config.name for config in left}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-x{case.scale}")
def test_steps_are_the_loop(case: Case, dtype: str, device: torch.device) -> None:
    """By the default configs, on views."""
    index = torch.int32 if dtype == "fp16" else torch.int64
    oracle.check_op(
        partial(in_steps, STEP, index=index), LITERAL, case.arguments, DTYPES[dtype], device,
        seeds=(0, 1), grads=False, label=case.name,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_drift(dtype: str, device: torch.device) -> None:
    """A thousand steps that hardly forget: as near to float64 as plain torch is."""
    case = Case(1, 1000, (2, 2, 2), 64, 64, carried=True)
    given = case.arguments(0, DTYPES[dtype], device)
    given["log_decay"].mul_(0.01)
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    wanted, last = ops.gated_delta_rule(**exact, output_final_state=True)
    found = []
    for name in ("triton", "eager"):
        pool = given["initial_state"].clone()
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        step = partial(ops.gated_delta_step_, backend=name, state_pool=pool, slots=slots)
        reads = torch.stack([step(**one_step(given, t)) for t in range(1000)], 1).double()
        gaps = ((reads - wanted).norm() / wanted.norm(), (pool - last).norm() / last.norm())
        found.append(gaps)
    for got, plain in zip(*found, strict=True):
        assert got <= max(1.5 * plain, 2e-6), (float(got), float(plain))


# ---- pools --------------------------------------------------------------------------------------


def test_heads_in_groups_are_those_that_are_repeated(device: torch.device) -> None:
    given = operands(BASE.but(heads=(1, 2, 4), width=64, values=64), BF16, device, (3, 0, -1))
    pool = given["state_pool"].clone()
    wide = {
        name: given[name].repeat_interleave(4 // given[name].shape[1], 1) for name in ("q", "k")
    }
    found = {"o": STEP(**given), "pool": given["state_pool"]}
    wanted = {"o": STEP(**given | wide | {"state_pool": pool}), "pool": pool}
    oracle.assert_bit_equal(found, wanted)


def test_a_decay_of_minus_infinity_forgets(device: torch.device) -> None:
    given = operands(BASE, BF16, device, (1, 3, -1))
    given["log_decay"] = torch.full((3, 4), -torch.inf, device=device)
    empty = given | {
        "state_pool": torch.zeros_like(given["state_pool"]),
        "log_decay": torch.zeros(3, 4, device=device),
    }
    assert torch.equal(STEP(**given), STEP(**empty))
    assert torch.equal(given["state_pool"][[1, 3]], empty["state_pool"][[1, 3]])


def test_other_slots_keep_their_bits(device: torch.device) -> None:
    """Of many rows, a third of them skipped and NaN."""
    problem = replace(tuning.PROBLEMS[0], rows=300, heads=5, width=64, values=64)
    given = problem.inputs(BF16, device, 0) | problem.call
    given["slots"][::3] = -1
    for name in TOKENS:
        given[name][::3] = torch.nan
    pool, before = given["state_pool"], given["state_pool"].clone()
    mine = before.clone()
    with alloc.poison():
        o = STEP(**given)
    wanted = ops.gated_delta_step_(**given | {"state_pool": mine}, backend="eager")
    assert not o[::3].any()
    torch.testing.assert_close(o, wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(pool, mine, rtol=1e-4, atol=1e-4)
    rest = torch.ones(300, dtype=torch.bool, device=device)
    rest[given["slots"][given["slots"] >= 0]] = False
    assert torch.equal(pool[rest], before[rest])


def test_rows_in_another_order_give_equal_bits(device: torch.device) -> None:
    """And repeated runs."""
    problem = tuning.PROBLEMS[0]
    given = problem.inputs(BF16, device, 0) | problem.call
    order = torch.randperm(256, device=device)
    begin = given["state_pool"]
    found = []
    for rows in (slice(None), slice(None), order):
        pool = begin.clone()
        named = {name: given[name][rows] for name in (*TOKENS, "slots")}
        found.append((STEP(**given | named | {"state_pool": pool}), pool))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0][order], found[2][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][1], found[2][1])


def test_offsets_past_two_billion(device: torch.device) -> None:
    """The last slot of a pool of 2^31 numbers and more."""
    pool = torch.zeros(1026, 32, 256, 256, device=device)
    case = BASE.but(batch=1, heads=(32, 32, 32), width=256, values=256, tokens=1)
    given = operands(case, BF16, device, (1025,))
    small = given["state_pool"]
    pool[1025] = small[3]
    o = STEP(**given | {"state_pool": pool})
    wanted = STEP(**given | {"slots": torch.tensor([3], device=device)})
    assert torch.equal(o, wanted)
    assert torch.equal(pool[1025], small[3])
    assert not pool[0].any()


# ---- as torch sees it ---------------------------------------------------------------------------


def test_a_cuda_graph_of_steps(device: torch.device) -> None:
    """Replays on a pool that moves on, rows named anew each time."""
    case = BASE.but(width=64, values=64)
    given = case.arguments(0, BF16, device)
    pools = [torch.zeros(8, 4, 64, 64, device=device) for _ in range(2)]
    token = {n: x.clone() if n in TOKENS else x for n, x in one_step(given, 0).items()}
    slots = torch.tensor([5, 0, 3], device=device)
    named = slots.clone()

    def step() -> tuple[torch.Tensor, ...]:
        return (STEP(**token, state_pool=pools[0], slots=named),)

    graph, (read,) = contracts.captured(step, device)
    pools[0].zero_()
    for t in range(case.tokens):
        for name in TOKENS:
            token[name].copy_(given[name][:, t])
        named.copy_(torch.where(torch.arange(3, device=device) == t % 4, -1, slots))
        graph.replay()
        wanted = STEP(**token, state_pool=pools[1], slots=named.clone())
        assert torch.equal(read, wanted), t
    assert torch.equal(pools[0], pools[1])


def test_first_call_inside_capture_says_warm_up(device: torch.device) -> None:
    given = operands(BASE.but(width=24, values=40, qk_l2norm=False), FP16, device, (2, 1, 0))
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold: call it once before capture"),
        torch.cuda.graph(graph),
    ):
        STEP(**given)
    assert STEP(**given).isfinite().all()


def test_no_host_sync(device: torch.device) -> None:
    given = operands(BASE, BF16, device, (2, -1, 0))
    STEP(**given)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = STEP(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert o[0].any()


def test_opcheck(device: torch.device) -> None:
    given = operands(BASE, BF16, device, (2, -1, 0))
    tensors = [given[name] for name in (*TOKENS, "state_pool", "slots")]
    contracts.check_opcheck(op.STEP, [(*tensors, 1.0, True, 1e-12, "triton")])


def test_steps_in_one_graph_of_inductor(device: torch.device) -> None:
    """Two steps, and a look at the pool between them."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = STEP(**given)
        return first, given["state_pool"] * 2, STEP(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        given = operands(BASE, BF16, device, (2, -1, 0))
        given["state_pool"] = torch.ones(4, 4, 6, 5, device=device)
        found.append(oracle.named((*function(**given), given["state_pool"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])


def test_autocast(device: torch.device) -> None:
    """Queries, keys and values alone are cast."""
    narrow = operands(BASE, BF16, device, (2, -1, 0))
    pool = narrow["state_pool"].clone()
    wide = narrow | {name: narrow[name].float() for name in ("q", "k", "v")} | {"state_pool": pool}
    with torch.autocast("cuda", dtype=BF16):
        o = STEP(**wide)
    assert o.dtype == BF16
    assert torch.equal(o, STEP(**narrow))
    assert torch.equal(pool, narrow["state_pool"])
