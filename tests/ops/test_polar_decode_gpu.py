"""Compiled paged decoding on a GPU, against float64 and as torch sees it.

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
from fastweights.ops.polar_decode import triton as backend
from fastweights.ops.polar_decode import tuning
from helpers import contracts, inputs, oracle
from helpers.paged import CASES, LAYOUTS, Case, last_row, lay_out, parameters

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
DECODE = partial(ops.polar_decode, backend="triton")
op = importlib.import_module("fastweights.ops.polar_decode.op")
# Lengths around blocks of keys, none, and one that each of five splits has some of.
LENGTHS = (1000, 0, 1, 63, 64, 65, 257)
D128 = Case(LENGTHS, (8, 2), 128, 64, layout="contiguous")


def check(case: Case, dtype: torch.dtype, device: torch.device, **options: Any) -> None:
    oracle.check_op(
        DECODE, reference.polar_decode, case.arguments, dtype, device, seeds=(0, 1), grads=False,
        label=case.name, **options,
    )  # fmt: skip


def tensors_of(given: dict[str, Any]) -> Any:
    return op.DecodeTensors(*(given[name] for name in op.DecodeTensors._fields))


def shape_of(given: dict[str, Any]) -> Any:
    rules = (given["window"], given["max_context_len"], given.get("num_splits"))
    return op.unchecked_shape(tensors_of(given), *rules, concrete=True)


# ---- against the loop ---------------------------------------------------------------------------

SERVED = [
    (D128.but(width=width, heads=heads, layout=layout), dtype)
    for width, heads, layout, dtype in (
        (128, (8, 2), "contiguous", BF16),
        (128, (2, 2), "pair", FP16),
        (128, (40, 1), "contiguous", BF16),
        (64, (8, 2), "contiguous", BF16),
        (32, (8, 2), "contiguous", FP16),
        (16, (8, 2), "contiguous", BF16),
        (256, (8, 2), "contiguous", BF16),
        (96, (6, 2), "pair", BF16),
        (128, (8, 2), "contiguous", FP32),
        (64, (8, 2), "pair", FP32),
        (256, (4, 2), "contiguous", FP32),
        (128, (8, 2), "odd_stride", BF16),
        (64, (8, 2), "misaligned", FP16),
        (100, (8, 2), "spaced", BF16),
        (16, (8, 2), "odd_stride", BF16),
        (256, (4, 2), "odd_stride", BF16),
        (64, (8, 2), "odd_stride", FP32),
    )
]


@pytest.mark.parametrize(
    ("case", "dtype"), SERVED, ids=lambda x: x.name if isinstance(x, Case) else str(x)
)
def test_every_config(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Cut and not cut, in pages that hold a block of keys and in pages that do not."""
    with oracle.collected() as failures:
        for page_size in (256, 16):
            case = case.but(page_size=page_size)
            truth = oracle.Oracle(
                reference.polar_decode, case.arguments, dtype, device, seeds=(0,), grads=False
            )
            shape = shape_of(case.arguments(0, dtype, device))
            for config in contracts.every_config(backend.SPACE_FWD, shape):
                for splits in (1, 5):
                    label = f"{config.name} page {page_size}, {splits} splits"
                    lines = truth.measure(DECODE, num_splits=splits).report()
                    failures += [f"{label} {line}" for line in lines]


def test_no_config_is_left_out(device: torch.device) -> None:
    """By the cases above; those that fit none of them here have to elsewhere."""
    left = set(backend.SPACE_FWD.configs)
    for limits in (Device.of(device), target_device("sm_90")):
        for case, dtype in SERVED:
            key = backend.SPACE_FWD.bucket(shape_of(case.arguments(0, dtype, device)))
            with assume_device(limits):
                left -= set(backend.SPACE_FWD.fitting(key, limits))
    assert not left, {config.name for config in left}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case, dtype: str, device: torch.device) -> None:
    """By the default configs."""
    for splits in (None, 3):
        check(case, DTYPES[dtype], device, num_splits=splits)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 48, 1])
def test_page_sizes(page_size: int, window: int | None, device: torch.device) -> None:
    case = D128.but(page_size=page_size, window=window)
    for splits in (1, 4):
        check(case, BF16, device, num_splits=splits)


@pytest.mark.parametrize("width", [5, 40, 64, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_and_layouts(dtype: str, width: int, device: torch.device) -> None:
    for turn, layout in enumerate(LAYOUTS):
        case = D128.but(width=width, layout=layout, lengths=(300, 7, 0))
        check(case, DTYPES[dtype], device, num_splits=1 + 2 * (turn % 2))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (16, 1), (17, 1), (64, 2), (100, 1)])
def test_groups(heads: tuple[int, int], device: torch.device) -> None:
    for splits in (1, 4):
        check(D128.but(heads=heads), BF16, device, num_splits=splits)


@pytest.mark.parametrize("base", [-20.0, 2.0, 6.0, 10.0])
@pytest.mark.parametrize("null_value", [True, False])
def test_the_null(null_value: bool, base: float, device: torch.device) -> None:
    """It wins, or loses, in every sequence."""
    for dtype in (BF16, FP32):
        case = D128.but(base=base, null_value=null_value, loud=base < 0)
        check(case, dtype, device, num_splits=3)


def test_caches_that_lie_differently(device: torch.device) -> None:
    given = D128.arguments(0, BF16, device)
    wanted = DECODE(**given)
    wide = torch.full((7, 40), -7, dtype=torch.int32, device=device)
    blocks = given["block_tables"].shape[1]
    wide[:, 1 : 2 * blocks : 2] = given["block_tables"]
    views = {
        "v_cache": lay_out(given["v_cache"], "heads_first"),
        "block_tables": wide[:, 1 : 2 * blocks : 2],
    }
    oracle.assert_bit_equal(oracle.named(DECODE(**given | views)), oracle.named(wanted))


def test_each_sequence_is_the_last_row_of_polar_attention(device: torch.device) -> None:
    given = D128.arguments(0, FP32, device)
    direction, count = DECODE(**given)
    for b, n in enumerate(D128.lengths):
        if n:
            row = last_row(given, b, "triton")
            torch.testing.assert_close((direction[b], count[b]), row, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("problem", tuning.PROBLEMS[:4], ids=lambda problem: problem.name)
def test_full_sizes(problem: Any, device: torch.device) -> None:
    """As many splits as the backend likes; a few sequences against the loop in float64."""
    given = problem.inputs(BF16, device, 0) | problem.call
    direction, count = DECODE(**given)
    rows = torch.tensor([0, problem.batch - 1], device=device)
    pages = given["block_tables"][rows].long()
    few = given | {name: given[name][rows] for name in ("q", "context_lens")}
    few["block_tables"] = torch.arange(pages.numel(), device=device).int().view(pages.shape)
    few |= {name: given[name][pages.flatten()] for name in ("k_cache", "v_cache")}
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in few.items()}
    truth, plain = reference.polar_decode(**exact), reference.polar_decode(**few)
    for got, wanted, yard in zip((direction[rows], count[rows]), truth, plain, strict=True):
        error = (got.double() - wanted).norm() / wanted.norm()
        allowed = 1.5 * (yard.double() - wanted).norm() / wanted.norm()
        assert error <= max(float(allowed), 1e-3), (float(error), float(allowed))


def test_large_offsets(device: torch.device) -> None:
    """A page whose first number lies more than 2^32 behind the first one's."""
    case = D128.but(lengths=(200, 64), heads=(4, 2), page_size=64)
    given = case.arguments(0, BF16, device)
    wanted = oracle.named(DECODE(**given))
    pages = given["k_cache"].shape[0]
    apart = -(-(2**32) // (pages - 1)) // 64 * 64 + 64
    for name in ("k_cache", "v_cache"):
        buffer = torch.empty(apart * (pages - 1) + 64 * 2 * 128, dtype=BF16, device=device)
        far = buffer.as_strided((pages, 64, 2, 128), (apart, 256, 128, 1))
        far.copy_(given[name])
        given[name] = far
        assert far.stride(0) * (pages - 1) > 2**32
    oracle.assert_bit_equal(oracle.named(DECODE(**given)), wanted)


def test_more_programs_than_65535(device: torch.device) -> None:
    """The last sequence's bits are those that it has alone."""
    problem = tuning.Problem("", 40000, 8, 2, 40, 64, 16)
    given = problem.inputs(BF16, device, 0) | problem.call | {"num_splits": 2}
    rows = ("q", "block_tables", "context_lens")
    alone = DECODE(**given | {name: given[name][-1:] for name in rows})
    whole = DECODE(**given)
    for got, wanted in zip(whole, alone, strict=True):
        assert torch.equal(got[-1:], wanted)


def test_repeated_runs_have_equal_bits(device: torch.device) -> None:
    """While matrix products of another stream disturb the timing."""
    given = D128.arguments(0, BF16, device)
    stream = torch.cuda.Stream(device)
    x = torch.randn(2048, 2048, device=device, dtype=BF16)
    stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> Any:
        with torch.cuda.stream(stream):
            torch.mm(x, x)
        return DECODE(**given, num_splits=7)

    contracts.check_repeatable(run, 100)
    torch.cuda.synchronize(device)


def test_equal_bits_for_the_same_splits(device: torch.device) -> None:
    """Whatever the batch around a sequence and what lies behind it."""
    given = D128.arguments(0, BF16, device) | {"num_splits": 3}
    wanted = oracle.named(DECODE(**given))
    order = torch.randperm(len(LENGTHS), device=device)
    rows = {name: given[name][order] for name in ("q", "block_tables", "context_lens")}
    got = {name: x[order.argsort()] for name, x in oracle.named(DECODE(**given | rows)).items()}
    oracle.assert_bit_equal(got, wanted)
    caches = {name: given[name].nan_to_num(1e4) for name in ("k_cache", "v_cache")}
    oracle.assert_bit_equal(oracle.named(DECODE(**given | caches)), wanted)


# ---- as torch sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("splits", [None, 1, 6])
def test_a_cuda_graph_serves_growing_lengths(
    splits: int | None, window: int | None, device: torch.device
) -> None:
    """One captured step writes each token's key and value and reads all, sequences far apart."""
    tokens, page_size, heads, width = 600, 32, (8, 2), 64
    source = inputs.generator(0, device)
    given = D128.but(heads=heads, width=width).arguments(0, BF16, device)
    blocks = tokens // page_size + 1
    tables = torch.randperm(3 * blocks, generator=source, device=device).int().view(3, blocks)
    shape = (3 * blocks, page_size, heads[1], width)
    k_cache, v_cache = torch.full((2, *shape), torch.nan, dtype=BF16, device=device)
    q = inputs.normal((3, heads[0], width), source, BF16)
    k, v = (inputs.normal((3, heads[1], width), source, BF16) for _ in range(2))
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    slots = torch.full((3,), -1, dtype=torch.int64, device=device)
    call = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables,
        "context_lens": lengths, "window": window, "max_context_len": tokens,
        "num_splits": splits, **parameters(given),
    }  # fmt: skip

    def step() -> tuple[torch.Tensor, ...]:
        ops.paged_cache_write_(k, v, k_cache, v_cache, slots, backend="triton")
        return DECODE(**call)

    graph, results = contracts.captured(step, device)
    row = torch.arange(3, device=device)
    for time in range(tokens):
        at = torch.tensor([time, time - 250, time // 3], device=device)
        for x in (q, k, v):
            x.copy_(inputs.normal(tuple(x.shape), source, BF16))
        now = at.clamp(min=0)
        page = tables[row, now // page_size].long()
        slots.copy_(torch.where(at >= 0, page * page_size + now % page_size, -1))
        lengths.copy_((at + 1).clamp(min=0))
        graph.replay()
        if time % 37 in (0, 1) or time == tokens - 1:
            got = oracle.named(tuple(x.clone() for x in results))
            oracle.assert_bit_equal(got, oracle.named(DECODE(**call)), f"token {time}")
            exact = {n: x.double() if oracle.is_floating(x) else x for n, x in call.items()}
            truth = oracle.named(reference.polar_decode(**exact))
            plain = oracle.named(reference.polar_decode(**call))
            for name, x in truth.items():
                error, yard = ((y[name].double() - x).norm() for y in (got, plain))
                assert error <= max(1.5 * yard, 1e-3 * x.norm()), (time, name)


def test_first_call_inside_capture_says_warm_up(device: torch.device) -> None:
    """And leaves the stream usable."""
    case = D128.but(width=24, page_size=24, lengths=(50,))  # compiled by no other test
    given = case.arguments(0, FP16, device)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold: call it once before capture"),
        torch.cuda.graph(graph),
    ):
        DECODE(**given)
    check(case, FP16, device)


def test_no_host_sync(device: torch.device) -> None:
    """Of no backend."""
    given = D128.arguments(0, BF16, device)
    for name in ("triton", "eager"):
        ops.polar_decode(**given, backend=name)  # compiles
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            direction, _ = ops.polar_decode(**given, backend=name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert direction.isfinite().all()


@pytest.mark.parametrize("case", [CASES[0], CASES[5], D128], ids=lambda case: case.name)
def test_eager(case: Case, device: torch.device) -> None:
    """On a GPU it looks at whole tables."""
    run = partial(ops.polar_decode, backend="eager")
    for dtype in (BF16, FP32):
        oracle.check_op(
            run, reference.polar_decode, case.arguments, dtype, device, seeds=(0,), grads=False
        )


def test_in_one_graph_of_inductor(device: torch.device) -> None:
    def call(given: dict[str, Any]) -> Any:
        direction, count = DECODE(**given)
        return direction * 2, DECODE(**given | {"q": direction}), count + 1

    given = D128.arguments(0, BF16, device)
    wanted = oracle.named(call(given))
    got = oracle.named(torch.compile(call, fullgraph=True)(given))
    torch._dynamo.reset()
    oracle.assert_bit_equal(got, wanted)


def test_opcheck(device: torch.device) -> None:
    given = D128.arguments(0, BF16, device)
    samples = [(*tensors_of(given), window, 1000, splits, "triton")
               for window, splits in ((None, None), (77, 4), (None, 1))]  # fmt: skip
    contracts.check_opcheck(op.DECODE, samples)


def test_autocast(device: torch.device) -> None:
    """fp32 queries for caches of bf16, which are not copied."""
    given = D128.arguments(0, BF16, device)
    with torch.autocast("cuda", dtype=BF16):
        got = DECODE(**given | {"q": given["q"].float()})
    oracle.assert_bit_equal(oracle.named(got), oracle.named(DECODE(**given)))


def test_auto_says_which_backend_and_why(device: torch.device) -> None:
    """A call that asks for Triton gets it, or an error."""
    given = D128.arguments(0, BF16, device)
    assert ops.explain(ops.polar_decode, **given).backend == "triton"
    assert ops.explain(ops.polar_decode, **given, backend="triton").backend == "triton"
    with pytest.raises(ValueError, match="takes num_splits up to 1024, this is 2000"):
        DECODE(**given, num_splits=2000)


def test_a_bound_that_is_exceeded_costs_no_key(device: torch.device) -> None:
    """A captured step has the bound of its capture; longer sequences are right all the same."""
    given = D128.arguments(0, BF16, device) | {"num_splits": 4}
    wanted = oracle.named(DECODE(**given))
    oracle.assert_bit_equal(oracle.named(DECODE(**given | {"max_context_len": 700})), wanted)
    given["block_tables"].clamp_(min=0)
    given["context_lens"][0] = 10**6  # read as what the table has room for
    DECODE(**given)
    torch.cuda.synchronize(device)
