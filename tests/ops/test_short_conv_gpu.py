"""The compiled short convolution and its step on a GPU, against float64 and as torch sees them.

Run with `pytest -n 14 -m gpu`. Compiling is most of the time, so a test loops over what shares a
truth or kernels.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device
from fastweights.ops import alloc
from fastweights.ops.short_conv import triton as backend
from fastweights.ops.short_conv import tuning
from fastweights.ops.short_conv_step import triton as step_backend
from fastweights.ops.short_conv_step import tuning as step_tuning
from helpers import contracts, inputs, oracle
from helpers.short_conv import TOKENS, Case, in_steps, one_step

pytestmark = pytest.mark.gpu

op = importlib.import_module("fastweights.ops.short_conv.op")
step_op = importlib.import_module("fastweights.ops.short_conv_step.op")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
CONV = partial(ops.short_conv, backend="triton", output_final_state=True)
EAGER = partial(ops.short_conv, backend="eager", output_final_state=True)  # held to the loop
LITERAL = partial(reference.short_conv, output_final_state=True)
STEP = partial(ops.short_conv_step_, backend="triton")
CANON = {"gates": "", "taps": 4, "residual": True}
ALL = {"taps": 4, "residual": True, "activation": "silu", "bias": True, "carried": True}
SPACES = {"fwd": backend.SPACE_FWD, "bwd": backend.SPACE_BWD}
LAYOUTS = {"aligned": torch.Tensor.contiguous, "loose": partial(inputs.embed, pad=1, offset=1)}


def shape_of(given: dict[str, Any], *, backward: bool = False) -> Any:
    """What the backend is told about a call."""
    tensors = op.ConvTensors._make(map(given.get, op.ConvTensors._fields))
    shape = op.unchecked_shape(tensors, given["activation"] or "none", given["residual"])
    return replace(shape, backward=backward)


def check(
    case: Case, dtype: torch.dtype, device: torch.device, truth: Any = EAGER, seeds: Any = (0, 1)
) -> None:
    oracle.check_op(CONV, truth, case.arguments, dtype, device, seeds=seeds, label=case.name)


# ---- against plain torch ------------------------------------------------------------------------

# As wide as the widest block and wider, through several runs; and narrower rows.
SERVED = [
    Case(2, 275, 2304, taps=3),
    Case(2, 131, 1040, **ALL),
    Case(1, 300, 520, **ALL, packed=(0, 67, 67, 69, 200, 290)),
    Case(3, 70, 130, **CANON),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pass_", SPACES)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: f"D{case.channels}")
def test_every_config(
    case: Case, pass_: str, layout: str, dtype: str, device: torch.device
) -> None:
    """One truth serves all of them."""
    view = LAYOUTS[layout]

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = case.arguments(seed, dtype, device)
        return {name: view(x) if oracle.is_floating(x) else x for name, x in given.items()}

    narrow, backward = DTYPES[dtype], pass_ == "bwd"
    truth = oracle.Oracle(EAGER, arguments, narrow, device, seeds=(0,), grads=backward)
    shape = shape_of(arguments(0, narrow, device), backward=backward)
    with oracle.collected() as failures:
        for config in contracts.every_config(SPACES[pass_], shape):
            failures += [f"{config.name} {line}" for line in truth.measure(CONV).report()]


def test_no_config_is_left_out(device: torch.device) -> None:
    """By the cases above."""
    for space in SPACES.values():
        left = set(space.configs)
        for case in SERVED:
            for dtype in (BF16, FP32):
                key = space.bucket(shape_of(case.arguments(0, dtype, device)))
                left -= set(space.fitting(key, Device.of(device)))
        assert not left, {config.name for config in left}


CASES = [
    Case(),
    Case(gates="", taps=1),
    Case(gates="i", taps=2, carried=True),
    Case(gates="i", taps=1, carried=True, activation="silu"),
    Case(gates="o", taps=3, bias=True),
    Case(gates="o", taps=2, residual=True),
    Case(**CANON, carried=True, activation="silu"),
    *(Case(**ALL, tokens=tokens, channels=64) for tokens in (0, 1, 2, 3, 63, 64, 65, 127)),
    Case(packed=(0, 0, 0, 1, 3, 19, 19), **ALL),
    Case(packed=(0, 15, 16, 17, 32, 33), tokens=40, **ALL),
    Case(packed=(0, 31, 64), tokens=64, taps=3, channels=96),
    Case(packed=(0, 1, 2, 3, 4, 5, 6), tokens=6, taps=4, carried=True),
    Case(packed=(0, 2, 19), taps=1, bias=True),
    Case(packed=(0, 5, 9), taps=2, gates="o", carried=True),
    Case(packed=(0,), taps=4),
    Case(packed=(0, 0), tokens=0, **ALL),
    Case(batch=0, **ALL),
    Case(channels=1, taps=4, activation="silu"),
    Case(channels=5, tokens=18, **ALL),
    Case(channels=130, tokens=18, **ALL),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"D{case.channels}-{case.name}")
def test_literal(case: Case, dtype: str, device: torch.device) -> None:
    """By the default configs, on views, from poisoned memory."""
    check(case, DTYPES[dtype], device, LITERAL, seeds=(0,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(dtype: str, device: torch.device) -> None:
    """Sums of weights over many runs; many packed sequences of all lengths from none on."""
    check(Case(4, 4099, 1024, taps=3), DTYPES[dtype], device, seeds=(0,))
    check(Case(1, 65537, 64, taps=4, gates="i"), DTYPES[dtype], device, seeds=(0,))
    case = Case(tokens=1010, channels=64, packed=(0, 1, 64, 65, 200, 1000), **ALL)
    check(case, DTYPES[dtype], device, seeds=(0,))
    lengths = torch.arange(90) % 47
    ends = (0, *lengths.cumsum(0).tolist())
    case = Case(tokens=ends[-1] + 9, channels=256, packed=ends, **ALL)
    check(case, DTYPES[dtype], device, seeds=(0,))


def test_offsets_past_two_billion(device: torch.device) -> None:
    """The last row's bits are those that it has alone."""
    x = torch.empty(3, 1 << 18, 4096, dtype=BF16, device=device)
    for row in x:
        row.normal_()
    weight = torch.randn(4096, 3, device=device)
    y, state = CONV(x, weight, gate_in=x)
    wanted, last = CONV(x[2:], weight, gate_in=x[2:])
    assert torch.equal(y[2:], wanted)
    assert torch.equal(state[2:], last)


def test_views_give_equal_bits(device: torch.device) -> None:
    given = Case(2, 33, 256, **ALL).arguments(0, BF16, device)
    run = partial(ops.short_conv, backend="triton")
    for view in (inputs.spaced, LAYOUTS["loose"], LAYOUTS["aligned"]):
        names = ("x", "gate_in", "gate_out", "weight", "initial_state")
        changed = {name: view(given[name]) for name in names}
        contracts.check_views(lambda **given: run(**given)[0], given, changed)


@pytest.mark.parametrize("cuts", [(1,), (2, 4, 5), (7, 7, 18)], ids=str)
def test_pieces_are_the_whole(cuts: tuple[int, ...], device: torch.device) -> None:
    given = Case(channels=64, **ALL).arguments(0, BF16, device)
    whole, last = CONV(**given)
    state, found = given["initial_state"], []
    for begin, end in itertools.pairwise((0, *cuts, 19)):
        piece = {name: given[name][:, begin:end] for name in TOKENS}
        y, state = CONV(**given | piece | {"initial_state": state})
        found.append(y)
    assert torch.equal(torch.cat(found, 1), whole)
    assert torch.equal(state, last)


# ---- as torch sees it ---------------------------------------------------------------------------


def test_contracts(device: torch.device) -> None:
    for case in (Case(**ALL), Case(**CANON), Case(packed=(0, 9, 17), taps=3, carried=True)):
        given = case.arguments(0, BF16, device)
        run = partial(ops.short_conv, backend="triton")

        def call(run: Any = run, **given: Any) -> torch.Tensor:
            return run(**given)[0]

        contracts.check_backward_twice(call, given)
        contracts.check_grad_out_untouched(call, given)
        contracts.check_expanded_grad_out(call, given)


def test_repeated_runs_have_equal_bits(device: torch.device) -> None:
    given = Case(4, 1000, 1024, **ALL).arguments(0, BF16, device)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(CONV, given).values()), 50)


def test_fullgraph(device: torch.device) -> None:
    given = Case(**ALL).arguments(0, BF16, device)
    contracts.check_fullgraph(lambda **given: CONV(**given), given)


def test_opcheck(device: torch.device) -> None:
    for case in (Case(**ALL), Case(packed=(0, 9, 17), taps=3, carried=True)):
        given = case.arguments(0, BF16, device)
        tensors = [given.get(name) for name in op.ConvTensors._fields]
        rules = (case.activation or "none", case.residual, "triton")
        leaves = [x.detach().requires_grad_() if oracle.is_floating(x) else x for x in tensors]
        contracts.check_opcheck(op.CONV_FWD, [(*leaves, *rules)])
        y, state = op.CONV_FWD(*tensors, *rules)
        contracts.check_opcheck(op.CONV_BWD, [(y, state, *tensors, *rules)])


def test_a_cuda_graph_of_both_passes(device: torch.device) -> None:
    """Replays follow what the tensors hold, the offsets of packed sequences among them."""
    given = Case(packed=(0, 9, 17), **ALL).arguments(0, BF16, device)
    tensors = [given.get(name) for name in op.ConvTensors._fields]
    d_y, d_state = torch.randn(1, 19, 6, device=device, dtype=BF16), torch.randn(2, 3, 6).to(device)

    def run() -> tuple[torch.Tensor, ...]:
        rules = ("silu", True, "triton")
        return *op.CONV_FWD(*tensors, *rules), *op.CONV_BWD(d_y, d_state, *tensors, *rules)

    graph, found = contracts.captured(run, device)
    given["cu_seqlens"].copy_(torch.tensor([0, 3, 19]))
    given["x"].normal_()
    given["gate_in"].normal_()
    given["gate_out"].normal_()
    graph.replay()
    for got, wanted in zip(found, run(), strict=True):
        assert torch.equal(got, wanted)


def test_no_host_sync(device: torch.device) -> None:
    given = Case(packed=(0, 9, 17), **ALL).arguments(0, BF16, device)
    contracts.forward_backward(CONV, given)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaves = contracts.leaves(given)
        y, state = CONV(**leaves)
        (y.float().sum() + state.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert leaves["x"].grad.isfinite().all()


def test_first_call_inside_capture_says_warm_up(device: torch.device) -> None:
    given = Case(taps=2, channels=40, residual=True, activation="silu").arguments(0, FP16, device)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold: call it once before capture"),
        torch.cuda.graph(graph),
    ):
        CONV(**given)
    contracts.forward_backward(CONV, given)


# ---- steps --------------------------------------------------------------------------------------

STEPS = [
    Case(tokens=7, carried=True),
    Case(tokens=7, **ALL),
    Case(tokens=7, **ALL, channels=130),
    Case(tokens=7, gates="", taps=4, residual=True, carried=True),
    Case(tokens=3, gates="i", taps=1, carried=True),
    Case(tokens=5, gates="o", taps=2, bias=True, carried=True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", STEPS, ids=lambda case: f"D{case.channels}-{case.name}")
def test_steps_are_the_loop(case: Case, dtype: str, device: torch.device) -> None:
    oracle.check_op(
        partial(in_steps, STEP), LITERAL, case.arguments, DTYPES[dtype], device, grads=False,
        label=case.name,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_config_of_a_step(layout: str, dtype: str, device: torch.device) -> None:
    case = Case(batch=9, tokens=5, channels=1040 if layout == "aligned" else 1037, **ALL)
    truth = oracle.Oracle(LITERAL, case.arguments, DTYPES[dtype], device, seeds=(0,), grads=False)
    given = one_step(case.arguments(0, DTYPES[dtype], device), 0)
    given["slots"] = torch.arange(9, device=device)
    given["state_pool"] = torch.zeros(9, 3, case.channels, device=device)
    tensors = step_op.StepTensors._make(map(given.get, step_op.StepTensors._fields))
    shape = step_op.unchecked_shape(tensors, "silu", True)
    met = set()
    with oracle.collected() as failures:
        for config in contracts.every_config(step_backend.SPACE_FWD, shape):
            met.add(config)
            run = partial(in_steps, STEP, view=LAYOUTS[layout])
            failures += [f"{config.name} {line}" for line in truth.measure(run).report()]
    assert met == set(step_backend.SPACE_FWD.configs)


def test_a_step_skips_rows_and_other_slots(device: torch.device) -> None:
    problem = replace(step_tuning.PROBLEMS[0], rows=700, channels=640)
    given = problem.inputs(BF16, device, 0) | problem.call
    given["slots"][::3] = -1
    for name in ("x", "gate_in", "gate_out"):
        given[name][::3] = torch.nan
    pool, before = given["state_pool"], given["state_pool"].clone()
    with alloc.poison():
        y = STEP(**given)
    wanted = ops.short_conv_step_(**given | {"state_pool": before}, backend="eager")
    assert not y[::3].any()
    torch.testing.assert_close(y, wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(pool, before)
    rest = torch.ones(700, dtype=torch.bool, device=device)
    rest[given["slots"][given["slots"] >= 0]] = False
    assert torch.equal(pool[rest], before[rest])


def test_a_cuda_graph_of_steps(device: torch.device) -> None:
    """Replays on a pool that moves on, rows named anew each time."""
    case = Case(batch=3, tokens=9, channels=64, **ALL)
    given = case.arguments(0, BF16, device)
    pools = [torch.zeros(8, 3, 64, device=device) for _ in range(2)]
    token = {n: x.clone() if n in TOKENS else x for n, x in one_step(given, 0).items()}
    named = torch.tensor([5, 0, 3], device=device)

    def step() -> tuple[torch.Tensor, ...]:
        return (STEP(**token, state_pool=pools[0], slots=named),)

    graph, (read,) = contracts.captured(step, device)
    pools[0].zero_()
    for t in range(9):
        for name in TOKENS:
            token[name].copy_(given[name][:, t])
        named.copy_(torch.where(torch.arange(3) == t % 4, -1, torch.tensor([5, 0, 3])))
        graph.replay()
        wanted = STEP(**token, state_pool=pools[1], slots=named.clone())
        assert torch.equal(read, wanted), t
    assert torch.equal(pools[0], pools[1])


def test_a_step_as_torch_sees_it(device: torch.device) -> None:
    given = one_step(Case(**ALL).arguments(0, BF16, device), 0)
    given |= {"state_pool": torch.randn(4, 3, 6, device=device)}
    given["slots"] = torch.tensor([2, -1], device=device)
    tensors = [given[name] for name in step_op.StepTensors._fields]
    contracts.check_opcheck(step_op.STEP, [(*tensors, "silu", True, "triton")])
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = STEP(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y[0].any()


def test_sweeps_take_their_problems(device: torch.device) -> None:
    """Every check of every problem runs by default and is right."""
    for problem in tuning.PROBLEMS:
        for small in problem.checks:
            given = small.inputs(BF16, device, 0) | small.call
            got = contracts.forward_backward(partial(ops.short_conv, backend="triton"), given)
            wide = {n: x.double() if oracle.is_floating(x) else x for n, x in given.items()}
            wanted = contracts.forward_backward(small.functions[1], wide)
            for name, x in wanted.items():
                gap = (got[name].double() - x).norm() / x.norm().clamp(min=1)
                assert gap < 0.02, (small.name, name, float(gap))
