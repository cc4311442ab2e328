"""Steps of the short convolution by Triton under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_short_conv_gpu.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import choose
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc
from fastweights.ops.short_conv_step import triton as backend
from fastweights.ops.short_conv_step import triton_spaces as spaces
from fastweights.ops.short_conv_step import tuning
from helpers import contracts, inputs, oracle
from helpers.short_conv import Case, in_steps, one_step, pool_of

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_short_conv_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

op = importlib.import_module("fastweights.ops.short_conv_step.op")
CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
STEP = partial(ops.short_conv_step_, backend="triton")
LITERAL = partial(reference.short_conv, output_final_state=True)
ALL = {"taps": 4, "residual": True, "activation": "silu", "bias": True, "carried": True}
CASES = [
    Case(tokens=5, carried=True),
    Case(tokens=6, **ALL),
    Case(tokens=6, **ALL, channels=130),
    Case(tokens=4, **ALL, batch=5, channels=5),
    Case(tokens=5, gates="", taps=4, residual=True, carried=True),
    Case(tokens=3, gates="i", taps=1, carried=True),
    Case(tokens=5, gates="o", taps=2, bias=True, carried=True),
    Case(tokens=5, gates="i", taps=3, activation="silu", carried=True),
]


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"D{case.channels}-{case.name}")
def test_steps_are_the_loop(case: Case, dtype: torch.dtype) -> None:
    """Rows are skipped now and then, and all that belongs to none is NaN."""
    oracle.check_op(
        partial(in_steps, STEP), LITERAL, case.arguments, dtype, CPU, seeds=(0,), grads=False,
        label=case.name,
    )  # fmt: skip


@pytest.mark.parametrize("channels", [512, 509])
def test_every_config(channels: int) -> None:
    """In rows that start at multiples of 16 bytes, and in others."""
    case = Case(batch=5, tokens=3, channels=channels, **ALL)
    truth = oracle.Oracle(LITERAL, case.arguments, FP16, CPU, seeds=(0,), grads=False)
    given = one_step(case.arguments(0, FP16, CPU), 0) | {"state_pool": torch.zeros(5, 3, channels)}
    given["slots"] = torch.arange(5)
    view = torch.Tensor.contiguous if channels % 8 == 0 else inputs.embed
    with oracle.collected() as failures:
        for config in contracts.every_config(backend.SPACE_FWD, shape_of(given)):
            run = partial(in_steps, STEP, view=view)
            failures += [f"{config.name} {line}" for line in truth.measure(run).report()]


def shape_of(given: dict[str, Any]) -> Any:
    tensors = op.StepTensors._make(map(given.get, op.StepTensors._fields))
    return op.unchecked_shape(tensors, given["activation"] or "none", given["residual"])


def token(case: Case = CASES[1], slots: Any = (2, -1)) -> dict[str, Any]:
    """The first token of a case, with a pool of four slots."""
    given = one_step(case.arguments(0, FP32, CPU), 0)
    pool = torch.randn(4, case.taps - 1, case.channels)
    return given | {"state_pool": pool, "slots": torch.tensor(slots)}


VIEWS: dict[str, Any] = {
    "last axis strided": inputs.spaced,
    "misaligned": partial(inputs.embed, pad=1, offset=1),
    "contiguous": torch.Tensor.contiguous,
    "at the end of memory": inputs.at_the_end,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_tokens_and_pools(view: str) -> None:
    """Two steps; a pool may be a view, and is written."""
    found = []
    for change in (VIEWS[view], inputs.embed):
        given = token(CASES[1].but(channels=16), (3, 0))
        given["state_pool"] = torch.arange(4.0 * 3 * 16).view(4, 3, 16).sin()
        for name in ("x", "gate_in", "gate_out", "weight", "bias", "state_pool"):
            given[name] = change(given[name])
        reads = [STEP(**given), STEP(**given)]
        found.append({"y": torch.stack(reads), "pool": given["state_pool"].contiguous()})
    oracle.assert_bit_equal(found[1], found[0])


def test_other_slots_keep_their_bits() -> None:
    """Skipped rows, slots that no row names; slot 0 is one like all others."""
    for slots in ((-1, -1, -1), (-1, 3, -1), (0, -1, 2), (2, -1, -1)):
        given = token(CASES[1].but(batch=3), slots)
        pool, before = given["state_pool"], given["state_pool"].clone()
        for name in ("x", "gate_in", "gate_out"):
            given[name][given["slots"] < 0] = torch.nan
        with alloc.poison():
            y = STEP(**given)
        changed = [slot for slot in range(4) if not torch.equal(pool[slot], before[slot])]
        assert changed == sorted(slot for slot in slots if slot >= 0)
        assert y.any(-1).tolist() == [slot >= 0 for slot in slots]


def test_nothing_to_do() -> None:
    """No rows, no channels, or no slots."""
    given = token()
    none = {name: given[name][:0] for name in ("x", "gate_in", "gate_out", "slots")}
    assert STEP(**given | none).shape == (0, 6)
    with alloc.poison():
        y = STEP(**given | {"state_pool": given["state_pool"][:0], "slots": -torch.ones(2).long()})
    assert not y.any()


def test_opcheck() -> None:
    given = token()
    tensors = [given[name] for name in op.StepTensors._fields]
    contracts.check_opcheck(op.STEP, [(*tensors, "silu", True, "triton")])


def test_steps_in_one_graph() -> None:
    """Two steps and a look at the pool between them."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = STEP(**given)
        return first, given["state_pool"] * 2, STEP(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = token() | {"state_pool": torch.ones(4, 3, 6)}
        found.append(oracle.named((*function(**given), given["state_pool"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])
    assert (found[0]["out3"] != 1).any(-1).any(-1).tolist() == [False, False, True, False]


def test_supports() -> None:
    def reason(arch: str, **changes: Any) -> str | None:
        with assume_device(target_device(arch)):
            return backend.supports(replace(tuning._compile_shape(), **changes), arch)

    for changes in ({}, {"taps": 1}, {"channels": 1}, {"batch": 0}, {"dtype": FP32}):
        for arch in ("sm_80", "sm_90"):
            assert reason(arch, **changes) is None
    assert "takes fewer rows" in str(reason("sm_90", batch=1 << 28))
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        STEP(**token() | {n: token()[n].bfloat16() for n in ("x", "gate_in", "gate_out")})
    assert set(ops.explain(ops.short_conv_step_, **token(), backend="triton").configs) == {"fwd"}


def test_rows_of_a_program_by_the_size_of_a_call() -> None:
    device = replace(target_device("sm_90"), multiprocessors=132)
    found = []
    for rows in (1, 256, 2048):
        shape = replace(tuning._compile_shape(), batch=rows)
        config = choose(spaces.SPACE_FWD, spaces.bucket(shape), device)
        found.append((config["C"], config["ROWS"], config.num_warps))
    assert found == [(256, 1, 2), (256, 1, 2), (256, 4, 2)]


def test_pools_of_the_helper_are_nan_elsewhere() -> None:
    """What the comparisons above rest on."""
    pool, slots = pool_of(torch.ones(2, 3, 6))
    assert pool[slots].eq(1).all()
    assert pool.isnan().flatten(1).all(1).sum() == len(pool) - 2
