"""The polynomial ops' compiled Triton kernels on a GPU, against float64 and as torch sees them.

Run with `pytest -n 14 -m gpu`. Compiling is most of the time: where every size or degree does not
need every dtype, they take turns.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.ops import alloc
from fastweights.ops.polynomial import triton_spaces as spaces
from helpers import contracts, inputs, oracle
from helpers.polynomial import Case

pytestmark = pytest.mark.gpu

op = importlib.import_module("fastweights.ops.polynomial.op")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
ALL = (
    spaces.SPACE_EXPAND, spaces.SPACE_CONTRACT, spaces.SPACE_READ, spaces.SPACE_PULL,
    spaces.SPACE_UPDATE,
)  # fmt: skip
FUNCTIONS = ("features", "read", "update")


def check(case: Case, dtype: torch.dtype, device: torch.device, seeds: Any = (0, 1, 2)) -> None:
    """Results and all gradients, of views with NaN around them into poisoned memory."""
    run = partial(case.op, backend="triton")
    oracle.check_op(run, case.literal, case.arguments, dtype, device, seeds=seeds, label=case.name)


def shape_of(case: Case, dtype: torch.dtype, device: torch.device) -> Any:
    """What the backend is told about a call."""
    given = case.arguments(0, dtype, device)
    other = given.get("state", given.get("g"))
    call = op.Arguments(given["x"], other, given.get("coefficients"), case.map)
    return op.shape_of(case.function, call, concrete=True)


# ---- against float64 ----------------------------------------------------------------------------

SIZES: list[dict[str, int]] = [
    {"width": 1, "values": 1, "tokens": 1},
    {"width": 5, "values": 3, "tokens": 130},
    {"width": 16, "values": 16, "tokens": 64},
    {"width": 31, "values": 33, "tokens": 65},
    {"width": 32, "values": 64, "tokens": 257},
    {"width": 48, "values": 20, "tokens": 100},
    {"width": 64, "values": 64, "tokens": 300},
    {"width": 63, "values": 130, "tokens": 127},
    {"width": 65, "values": 61, "tokens": 129},
    {"width": 128, "values": 128, "tokens": 200},
]


@pytest.mark.parametrize(
    ("function", "size", "dtype"),
    [
        pytest.param(function, size, dtype, id=f"{function}-{size['width']}-{dtype}")
        for turn, size in enumerate(SIZES)
        for other, function in enumerate(FUNCTIONS)
        for dtype in ("bf16", ("fp16", "fp32")[(turn + other) % 2])
    ],
)
def test_sizes(function: str, size: dict[str, int], dtype: str, device: torch.device) -> None:
    scale = size["width"] ** -0.25
    check(Case(function, coefficients="zeros", scale=scale).but(**size), DTYPES[dtype], device)


DEGREES = [
    (kept, coefficients)
    for kept in (None, (0, 1, 2), (2,), (1,), (0,), (0, 2))
    for coefficients in ("none", "shared", "heads")
    if (kept, coefficients) != ((0,), "none")  # the default of degree 0 is 0, and so would be all
]


@pytest.mark.parametrize(
    ("function", "kept", "coefficients", "dtype"),
    [
        (function, *degrees, tuple(DTYPES)[(turn + other) % 3])
        for turn, degrees in enumerate(DEGREES)
        for other, function in enumerate(FUNCTIONS)
    ],
)
def test_degrees(
    function: str, kept: Any, coefficients: str, dtype: str, device: torch.device
) -> None:
    case = Case(function, coefficients=coefficients, kept=kept, tokens=150, width=40, values=64)
    check(case, DTYPES[dtype], device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [None, (0, 2), (1,)])
@pytest.mark.parametrize("kind", ["tiled", "elementwise", "concat"])
def test_other_maps(kind: str, kept: Any, dtype: str, device: torch.device) -> None:
    for width, tile in ((64, 8), (37, 16), (9, 3)):
        check(Case(kind=kind, kept=kept, tokens=99, width=width, tile=tile), DTYPES[dtype], device)


def configs(device: torch.device) -> Iterator[tuple[Space, Config, Case, torch.dtype]]:
    """Every config with each size that it serves."""
    for space in ALL:
        function = space.op.removeprefix("polynomial_")
        for width, values in ((64, 64), (128, 128), (30, 64), (32, 20), (16, 16), (61, 100)):
            case = Case(function, tokens=333, width=width, values=values, scale=width**-0.25)
            for dtype in (BF16, FP32):
                key = space.bucket(shape_of(case, dtype, device))
                for config in space.fitting(key, Device.of(device)):
                    yield space, config, case, dtype


@pytest.mark.parametrize("space", ALL, ids=lambda space: f"{space.op}-{space.pass_}")
def test_every_config(space: Space, device: torch.device) -> None:
    """Twice, for the same bits."""
    met = set()
    with oracle.collected() as failures:
        for owner, config, case, dtype in configs(device):
            if owner is not space:
                continue
            met.add(config)
            with use_config(space, config):
                try:
                    check(case, dtype, device, seeds=(0, 1))
                    given = case.arguments(0, dtype, device)
                    run = partial(case.op, backend="triton")
                    contracts.check_repeatable(
                        lambda run=run, given=given: tuple(
                            contracts.forward_backward(run, given).values()
                        ),
                        5,
                    )
                except AssertionError as failure:
                    failures.append(f"{config.name} {case.name} {dtype}: {failure}")
    if Device.of(device).shared_bytes >= 227 * 1024:
        assert met == set(space.configs)


def test_more_programs_than_65535(device: torch.device) -> None:
    case = Case("read", coefficients="none", batch=1, heads=1, width=16, values=16)
    x = torch.randn(70_000, 1, 1, 16, device=device).to(BF16)
    state = torch.randn(1, 1, case.wide, 16, device=device).expand(70_000, 1, case.wide, 16)
    with alloc.poison():
        out = ops.polynomial_read(x, state, backend="triton")
    once = ops.polynomial_read(x.view(1, -1, 1, 16), state[:1], backend="triton")
    gap = (out.float().view(-1) - once.float().view(-1)).norm()
    assert gap < 1e-3 * once.float().norm()


# ---- contracts ----------------------------------------------------------------------------------

EVERYDAY = [Case(f, tokens=200, width=64, values=64, scale=0.35) for f in FUNCTIONS]
by_name = pytest.mark.parametrize("case", EVERYDAY, ids=lambda case: case.function)


@by_name
def test_views_give_equal_bits(case: Case, device: torch.device) -> None:
    """Contiguous tensors, views without alignment, and such that are copied."""
    given = case.arguments(0, BF16, device)
    turned = {name: x.contiguous() for name, x in given.items() if isinstance(x, torch.Tensor)}
    run = partial(case.op, backend="triton")
    contracts.check_views(run, given, turned)
    for view in (partial(inputs.embed, pad=1, offset=1), inputs.spaced):
        other = {name: view(x.contiguous()) for name, x in turned.items()}
        contracts.check_views(run, given, other)


@by_name
def test_contracts(case: Case, device: torch.device) -> None:
    given = case.arguments(0, BF16, device)
    run = partial(case.op, backend="triton")
    contracts.check_backward_twice(run, given)
    contracts.check_grad_out_untouched(run, given)
    contracts.check_expanded_grad_out(run, given)
    contracts.check_fullgraph(run, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(run, given).values()), 20)


@pytest.mark.parametrize("coefficients", ["heads", "none"])
@by_name
def test_cuda_graph_replays(case: Case, coefficients: str, device: torch.device) -> None:
    case = case.but(coefficients=coefficients)
    given = contracts.leaves(case.arguments(0, BF16, device))
    tensors = [x for x in given.values() if oracle.is_floating(x)]
    upstream = torch.randn_like(case.op(**given))

    def step() -> tuple[torch.Tensor, ...]:
        out = case.op(**given, backend="triton")
        return (out, *torch.autograd.grad(out, tensors, upstream))

    graph, captured = contracts.captured(step, device)
    for seed in range(3):
        fresh = case.arguments(seed, BF16, device)
        with torch.no_grad():
            for name, x in given.items():
                if isinstance(x, torch.Tensor):
                    x.copy_(fresh[name])
        graph.replay()
        got = {str(i): x.detach().clone() for i, x in enumerate(captured)}
        expected = {str(i): x.detach() for i, x in enumerate(step())}
        oracle.assert_bit_equal(got, expected, f"replay {seed}")


@by_name
def test_no_host_sync(case: Case, device: torch.device) -> None:
    given = contracts.leaves(case.arguments(0, BF16, device))
    tensors = [x for x in given.values() if oracle.is_floating(x)]
    out = case.op(**given)
    upstream = torch.randn_like(out)
    torch.autograd.grad(out, tensors, upstream)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = case.op(**given)
        found = torch.autograd.grad(out, tensors, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.isfinite().all() for x in (out, *found))


def test_auto_picks_triton_on_the_gpu(device: torch.device) -> None:
    for case in EVERYDAY:
        said = ops.explain(case.op, **case.arguments(0, BF16, device))
        assert said.backend == "triton"
        assert set(said.configs) == {"fwd", "bwd"}
    said = ops.explain(ops.polynomial_features, torch.ones(3, 200, device=device))
    assert said.backend == "eager"


def test_features_are_not_in_memory(device: torch.device) -> None:
    """A read of 16k tokens allocates far less than their features."""
    case = Case("read", batch=1, tokens=16_384, heads=4, width=64, values=64)
    given = case.arguments(0, BF16, device)
    case.op(**given)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    case.op(**given)
    peak = torch.cuda.max_memory_allocated(device) - before
    assert peak < 0.2 * 16_384 * 4 * case.wide * 2
