"""Paged decoding by Triton under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_polar_decode_gpu.py`. A program takes some milliseconds of the
interpreter for each block of keys.
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
from fastweights.ops import alloc
from fastweights.ops.polar_decode import triton as backend
from fastweights.ops.polar_decode import triton_spaces, tuning
from helpers import contracts, oracle
from helpers.paged import CASES, LAYOUTS, Case, lay_out

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_polar_decode_gpu"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    # The logarithm of a row without keys, which is −∞ as it should be.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]

CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
DECODE = partial(ops.polar_decode, backend="triton")
op = importlib.import_module("fastweights.ops.polar_decode.op")


def check(case: Case, dtype: torch.dtype = FP32, **options: Any) -> None:
    oracle.check_op(
        DECODE, reference.polar_decode, case.arguments, dtype, CPU, seeds=(0,), grads=False,
        label=case.name, **options,
    )  # fmt: skip


# ---- against the loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case, splits: int) -> None:
    check(case, num_splits=splits)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_page_sizes(page_size: int) -> None:
    """Blocks of 16, 64 and 128 keys: within a page, a page, several pages."""
    case = Case(lengths=(300, 17), page_size=page_size, width=32, heads=(2, 1))
    truth = oracle.Oracle(
        reference.polar_decode, case.arguments, FP32, CPU, seeds=(0,), grads=False
    )
    for width in (16, 64, 128):
        config = next(c for c in backend.SPACE_FWD.configs if c["BLOCK_N"] == width)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "choose", lambda *_, config=config: config)
            truth.check(DECODE, f"{width} keys", num_splits=2)


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[7], CASES[13]], ids=lambda c: c.name)
def test_fp16(case: Case) -> None:
    check(case, FP16, num_splits=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_caches(layout: str) -> None:
    check(Case(layout=layout), num_splits=2)


def test_caches_that_lie_differently() -> None:
    """Of keys and of values each has its own strides; the table is a view."""
    given = Case(layout="contiguous").arguments(0, FP32, CPU)
    wanted = DECODE(**given)
    wide = torch.full((4, 9), -7, dtype=torch.int32)
    wide[:, 1:9:2] = given["block_tables"][:, :4]
    views = {
        "v_cache": lay_out(given["v_cache"], "pair"),
        "block_tables": wide[:, 1:9:2],
        "q": given["q"].transpose(1, 2).contiguous().transpose(1, 2),
    }
    oracle.assert_bit_equal(oracle.named(DECODE(**given | views)), oracle.named(wanted))


def fitted(width: int, dtype: torch.dtype, layout: str) -> tuple[Case, Any]:
    case = Case(lengths=(70, 0, 5), width=width, page_size=48, layout=layout)
    given = case.arguments(0, dtype, CPU)
    tensors = op.DecodeTensors(*(given[name] for name in op.DecodeTensors._fields))
    return case, op.unchecked_shape(tensors, None, 70, None, concrete=True)


@pytest.mark.parametrize("layout", ["contiguous", "odd_stride"])
@pytest.mark.parametrize("width", [32, 128])
def test_every_config(width: int, layout: str) -> None:
    """Of which the interpreter sees the number of keys at a time alone."""
    case, shape = fitted(width, FP32, layout)
    truth = oracle.Oracle(
        reference.polar_decode, case.arguments, FP32, CPU, seeds=(0,), grads=False
    )
    with oracle.collected() as failures:
        for config in contracts.every_config(backend.SPACE_FWD, shape):
            failures += [f"{config.name} {line}" for line in truth.measure(DECODE).report()]


def test_no_config_is_left_out() -> None:
    left = set(backend.SPACE_FWD.configs)
    with assume_device(target_device("sm_90")):
        for layout in ("contiguous", "odd_stride"):
            for width in (16, 32, 64, 128, 256):
                for dtype in (FP16, FP32):
                    _, shape = fitted(width, dtype, layout)
                    key = backend.SPACE_FWD.bucket(shape)
                    left -= set(backend.SPACE_FWD.fitting(key, Device.of(CPU)))
    assert not left, {config.name for config in left}


def test_merged_in_turns() -> None:
    """Splits of which a merge takes several tiles, and which are more than there are blocks."""
    case = Case(lengths=(640, 100), width=256, heads=(1, 1), page_size=64, layout="contiguous")
    for splits in (16, 17, 40, 1000):
        check(case, num_splits=splits)


def test_groups_in_tiles() -> None:
    """More query heads of a key head than a program has."""
    for heads in ((17, 1), (70, 2)):
        check(Case(lengths=(20, 33), heads=heads), FP16, num_splits=2)
        check(Case(lengths=(20, 33), heads=heads), num_splits=1)


def test_equal_bits_for_the_same_splits() -> None:
    """Whatever the batch around a sequence, the bound of lengths and what lies behind them."""
    case = Case(lengths=(40, 3, 33), layout="contiguous")
    given = case.arguments(0, FP32, CPU) | {"num_splits": 2}
    wanted = oracle.named(DECODE(**given))
    order = torch.tensor([2, 0, 1])
    rows = {name: given[name][order] for name in ("q", "block_tables", "context_lens")}
    got = {name: x[order.argsort()] for name, x in oracle.named(DECODE(**given | rows)).items()}
    oracle.assert_bit_equal(got, wanted)
    tables = torch.nn.functional.pad(given["block_tables"], (0, 3), value=12345)
    caches = {name: given[name].nan_to_num(1e4) for name in ("k_cache", "v_cache")}
    changes = {"block_tables": tables, "max_context_len": 64, **caches}
    oracle.assert_bit_equal(oracle.named(DECODE(**given | changes)), wanted)


def test_nothing_to_do() -> None:
    given = Case().arguments(0, FP32, CPU)
    none = {name: given[name][:0] for name in ("q", "block_tables", "context_lens")}
    assert DECODE(**given | none)[0].shape == (0, 4, 16)
    empty = {name: given[name][:0] for name in ("k_cache", "v_cache")}
    empty["context_lens"] = torch.zeros(4, dtype=torch.int32)
    empty["block_tables"] = given["block_tables"][:, :0]
    for splits in (1, 2):
        with alloc.poison():
            direction, count = DECODE(**given | empty, num_splits=splits)
        wanted = given["null_value"] / given["null_value"].norm(dim=-1, keepdim=True)
        torch.testing.assert_close(direction, wanted.expand_as(direction))
        assert not count.any()


# ---- as torch sees it ---------------------------------------------------------------------------


def test_opcheck() -> None:
    given = Case().arguments(0, FP32, CPU)
    tensors = [given[name] for name in op.DecodeTensors._fields]
    contracts.check_opcheck(op.DECODE, [(*tensors, 9, 40, 2, "triton")])


def test_in_one_graph() -> None:
    given = Case().arguments(0, FP32, CPU)
    wanted = oracle.named(DECODE(**given))
    compiled = torch.compile(DECODE, fullgraph=True, backend="aot_eager")
    got = oracle.named(compiled(**given))
    torch._dynamo.reset()
    oracle.assert_bit_equal(got, wanted)


# ---- choices ------------------------------------------------------------------------------------


def shaped(**changes: Any) -> Any:
    shape = replace(tuning._compile_shape(), device=torch.device("cuda:0"), num_splits=None)
    return replace(shape, **changes)


def reason(arch: str = "sm_90", **changes: Any) -> str | None:
    with assume_device(target_device(arch)):
        return backend.supports(shaped(**changes), arch)


def test_supports() -> None:
    assert reason() is None
    assert reason("sm_86") is None
    assert "takes num_splits up to 1024" in str(reason(num_splits=1025))
    assert "takes block tables for up to" in str(reason(blocks=2**25))
    with assume_device(Device("sm_75", 65536)):
        assert "older than sm_80" in str(backend.supports(shaped(), "sm_75"))
    assert "bfloat16 wrongly" in str(backend.supports(shaped(), "cpu"))
    for width in (40, 64, 80, 96, 100, 128, 192, 256):
        for dtype in (torch.bfloat16, FP32):
            assert reason(head_dim=width, dtype=dtype) is None
            assert reason(head_dim=width, dtype=dtype, aligned=False) is None


def test_auto_waits_for_a_check_of_large_groups() -> None:
    assert backend.yields(shaped(heads_q=16, heads_k=1), "sm_90") is None
    assert "not yet checked" in str(backend.yields(shaped(heads_q=17, heads_k=1), "sm_90"))
    assert backend.yields(shaped(heads_q=17, heads_k=1), "cpu") is None


def test_explain() -> None:
    given = Case().arguments(0, FP32, CPU)
    said = ops.explain(ops.polar_decode, **given, backend="triton")
    assert said.backend == "triton"
    assert said.configs["fwd"] in backend.SPACE_FWD.configs


def splits(**changes: Any) -> int:
    shape = shaped(**changes)
    device = target_device("sm_90")
    config = backend.SPACE_FWD.default(backend.SPACE_FWD.bucket(shape), device)
    return triton_spaces.splits_of(shape, config, device)


def test_splits_fill_the_device_once() -> None:
    """132 multiprocessors with two programs each."""
    long = {"batch": 1, "heads_q": 8, "heads_k": 2}
    assert splits(**long, max_context_len=65536) == 132
    assert splits(**long, max_context_len=40000) == 132
    assert splits(**long, max_context_len=2048) == 16  # 64 KiB each
    assert splits(**long, max_context_len=2048, window=100) == 1
    assert splits(batch=64, heads_k=4, max_context_len=8192) == 1
    assert splits(batch=32, heads_k=4, max_context_len=8192) == 2
    assert splits(batch=1, heads_q=16, heads_k=16, max_context_len=512) == 1
    assert splits(batch=1, heads_q=16, heads_k=16, max_context_len=4096) == 16
    assert splits(num_splits=7) == 7


@pytest.mark.parametrize("length", [3000, 4096])
def test_splits_change_with_the_bound_in_powers_of_two(length: int) -> None:
    assert splits(max_context_len=length) == splits(max_context_len=4096)


KEYS = """
import json, torch
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import triton_runtime as runtime
from fastweights.ops.polar_decode import op, triton
from helpers.paged import Case

seen = set()
with assume_device(target_device("sm_90")), runtime.record_launches() as sources:
    for turn in range(40):
        lengths = tuple(1 + 37 * turn + n for n in range(1 + turn % 5))
        layout = ("contiguous", "pair", "heads_first")[turn % 3]
        case = Case(lengths, (4, 2), 64, layout=layout, spare=turn % 4)
        given = case.arguments(0, torch.bfloat16, torch.device("cpu"))
        tensors = op.DecodeTensors(*(given[name] for name in op.DecodeTensors._fields))
        shape = op.unchecked_shape(tensors, None, 4000, 5, concrete=True)
        triton.fwd(shape, tensors)
seen = {repr(source) for source in sources}
print(json.dumps([len(sources), len(seen)]))
"""


def test_forty_lengths_and_views_compile_once() -> None:
    """Both kernels each; the merge once."""
    (line,) = contracts.run_uninterpreted(KEYS)
    assert json.loads(line) == [80, 2]


COMPILED = """
import json
from fastweights.autotune.compile import target_device
from fastweights.ops.polar_decode import tuning
quick = tuning.compile_cases("sm_90", True)
every = tuning.compile_cases("sm_90", False)
configs = {case.config for case in every}
print(json.dumps([len(quick), len(configs), len(tuning.SPACE_FWD.configs)]))
"""


def test_compile_reports_leave_no_config_out() -> None:
    (line,) = contracts.run_uninterpreted(COMPILED)
    quick, compiled, configs = json.loads(line)
    assert quick == 2
    assert compiled == configs
