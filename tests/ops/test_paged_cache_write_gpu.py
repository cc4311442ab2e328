"""Compiled cache writes on a GPU, against the loop. Run with `pytest -n 14 -m gpu`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device
from fastweights.autotune.compile import target_device
from fastweights.ops.paged_cache_write import triton as backend
from fastweights.ops.paged_cache_write import tuning
from helpers import contracts, inputs, oracle
from helpers.paged import LAYOUTS, lay_out

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
op = importlib.import_module("fastweights.ops.paged_cache_write.op")
SIZES = [
    (width, layout, dtype)
    for width, layout, dtype in (
        (128, "contiguous", BF16),
        (64, "pair", FP16),
        (16, "contiguous", BF16),
        (256, "heads_first", FP32),
        (100, "contiguous", BF16),
        (128, "misaligned", BF16),
        (128, "spaced", FP32),
        (5, "odd_stride", FP16),
        (1000, "odd_stride", BF16),
    )
]


def operands(
    device: torch.device, width: int = 128, layout: str = "contiguous",
    dtype: torch.dtype = BF16, index: torch.dtype = torch.int64, page_size: int = 16,
) -> dict[str, Any]:  # fmt: skip
    """301 tokens to shuffled slots, every third skipped."""
    source, pages, tokens = inputs.generator(0, device), 40, 301
    k, v = (inputs.embed(inputs.normal((tokens, 3, width), source, dtype)) for _ in range(2))
    k_cache, v_cache = (
        lay_out(inputs.normal((pages, page_size, 3, width), source, dtype), layout)
        for _ in range(2)
    )
    slots = torch.randperm(pages * page_size, generator=source, device=device)[:tokens]
    slots[1::3] = -1
    k[1::3] = torch.nan
    tensors = (k, v, k_cache, v_cache, slots.to(index))
    return dict(zip(op.WriteTensors._fields, tensors, strict=True))


def check(given: dict[str, Any], name: str = "triton") -> None:
    wanted = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    reference.paged_cache_write_(**given | wanted)
    ops.paged_cache_write_(**given, backend=name)
    oracle.assert_bit_equal({name: given[name] for name in wanted}, wanted)


@pytest.mark.parametrize(("width", "layout", "dtype"), SIZES)
def test_every_config(width: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
    given = operands(device, width, layout, dtype)
    shape = op.unchecked_shape(op.WriteTensors(**given), concrete=True)
    for _ in contracts.every_config(backend.SPACE_FWD, shape):
        check(operands(device, width, layout, dtype))


def test_no_config_is_left_out(device: torch.device) -> None:
    left = set(backend.SPACE_FWD.configs)
    for size in SIZES:
        given = operands(device, *size)
        shape = op.unchecked_shape(op.WriteTensors(**given), concrete=True)
        key = backend.SPACE_FWD.bucket(shape)
        for limits in (Device.of(device), target_device("sm_90")):
            left -= set(backend.SPACE_FWD.fitting(key, limits))
    assert not left, {config.name for config in left}


@pytest.mark.parametrize("name", ["triton", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, name: str, device: torch.device) -> None:
    for dtype in (BF16, FP32):
        for index in (torch.int64, torch.int32):
            check(operands(device, 64, layout, dtype, index), name)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 48, 20])
def test_page_sizes(page_size: int, device: torch.device) -> None:
    check(operands(device, page_size=page_size))


def test_large_offsets(device: torch.device) -> None:
    """Pages whose first numbers lie 2^32 behind the first one's."""
    given = operands(device)
    apart = 2**32 // 39 // 64 * 64 + 64
    for name in ("k_cache", "v_cache"):
        buffer = torch.empty(39 * apart + 16 * 3 * 128, dtype=BF16, device=device)
        far = buffer.as_strided((40, 16, 3, 128), (apart, 384, 128, 1))
        far.copy_(given[name])
        given[name] = far
    wanted = {name: given[name].contiguous() for name in ("k_cache", "v_cache")}
    reference.paged_cache_write_(**given | wanted)
    ops.paged_cache_write_(**given, backend="triton")
    oracle.assert_bit_equal({name: given[name].contiguous() for name in wanted}, wanted)


def test_full_size_and_no_host_sync(device: torch.device) -> None:
    problem = tuning.PROBLEMS[2]
    given = problem.inputs(BF16, device, 0)
    before = {name: given[name].clone() for name in problem.written}
    ops.paged_cache_write_(**given, backend="triton")  # compiles
    for name in problem.written:
        given[name].copy_(before[name])
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.paged_cache_write_(**given, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, x in (("k_cache", given["k"]), ("v_cache", given["v"])):
        rows = before[name].flatten(0, 1)
        rows[given["slot_mapping"]] = x
        assert torch.equal(given[name].flatten(0, 1), rows)


def test_writes_in_one_graph_of_inductor(device: torch.device) -> None:
    def call(given: dict[str, Any]) -> torch.Tensor:
        ops.paged_cache_write_(**given, backend="triton")
        seen = given["v_cache"] * 2
        again = given | {"slot_mapping": given["slot_mapping"].flip(0)}
        ops.paged_cache_write_(**again, backend="triton")
        return seen

    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        given = operands(device)
        given["k"].nan_to_num_(0.5)
        found.append(oracle.named((function(given), given["k_cache"], given["v_cache"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])


def test_opcheck(device: torch.device) -> None:
    contracts.check_opcheck(op.WRITE, [(*operands(device).values(), "triton")])


def test_auto_picks_triton_on_the_gpu(device: torch.device) -> None:
    assert ops.explain(ops.paged_cache_write_, **operands(device)).backend == "triton"
