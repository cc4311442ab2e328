"""Steps of the gated delta rule by Triton under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_gated_delta_step_gpu.py`.
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
from fastweights.autotune import choose
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc
from fastweights.ops.gated_delta_step import triton as backend
from fastweights.ops.gated_delta_step import triton_spaces as spaces
from fastweights.ops.gated_delta_step import tuning
from helpers import contracts, inputs, oracle
from helpers.gated_delta import TOKENS, Case, in_steps, one_step

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="compiled kernels run instead, see test_gated_delta_step_gpu.py",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

op = importlib.import_module("fastweights.ops.gated_delta_step.op")
CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
STEP = partial(ops.gated_delta_step_, backend="triton")
LITERAL = partial(reference.gated_delta_rule, output_final_state=True)
BASE = Case(tokens=7, carried=True)
CASES = [
    BASE,
    BASE.but(batch=3, heads=(4, 2, 1), scale=0.3),
    BASE.but(heads=(1, 1, 3), qk_l2norm=False),
    BASE.but(heads=(2, 2, 4), width=16, values=32),
    BASE.but(tokens=11, harsh=True),
    BASE.but(tokens=11, harsh=True, qk_l2norm=False, heads=(1, 2, 2)),
    BASE.but(tokens=4, width=1, values=1),
    BASE.but(tokens=4, width=33, values=3),
    BASE.but(tokens=4, width=5, values=130),
    BASE.but(tokens=4, width=130, values=5, batch=1),
    BASE.but(tokens=3, width=40, values=80, batch=1),
    BASE.but(tokens=3, width=192, values=20, batch=1),
    BASE.but(tokens=4, width=128, values=128, batch=1, heads=(1, 1, 1)),
]


def named(case: Case) -> str:
    return f"{case.name}-x{case.scale}"


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_steps_are_the_loop(case: Case, dtype: torch.dtype) -> None:
    """Rows are skipped now and then, and all that belongs to none is NaN."""
    index = torch.int32 if dtype == FP16 else torch.int64
    oracle.check_op(
        partial(in_steps, STEP, index=index), LITERAL, case.arguments, dtype, CPU, seeds=(0,),
        grads=False, label=case.name,
    )  # fmt: skip


def operands(case: Case = BASE, slots: Any = (2, -1)) -> dict[str, Any]:
    """The first token of a case, with a pool of four slots."""
    given = one_step(case.arguments(0, FP32, CPU), 0)
    pool = torch.randn(4, max(case.heads), case.width, case.values)
    return given | {"state_pool": pool, "slots": torch.tensor(slots)}


def shape_of(given: dict[str, Any]) -> Any:
    tensors = op.StepTensors(*(given[name] for name in TOKENS), given["state_pool"], given["slots"])
    return op.unchecked_shape(tensors, given["scale"], given["qk_l2norm"], 1e-12)


@pytest.mark.parametrize("size", [(64, 64), (13, 24), (125, 130), (250, 20)], ids=str)
def test_every_config(size: tuple[int, int]) -> None:
    """Memories that lie aligned and whole, and others."""
    width, values = size
    case = BASE.but(tokens=3, batch=1, heads=(1, 1, 2), width=width, values=values)
    truth = oracle.Oracle(LITERAL, case.arguments, FP16, CPU, seeds=(0,), grads=False)
    view = torch.Tensor.contiguous if width == 64 else inputs.embed
    with oracle.collected() as failures:
        for config in contracts.every_config(backend.SPACE_FWD, shape_of(operands(case, (1,)))):
            run = partial(in_steps, STEP, view=view)
            failures += [f"{config.name} {line}" for line in truth.measure(run).report()]


def test_no_config_is_left_out() -> None:
    with assume_device(target_device("sm_90")):
        left = set(spaces.SPACE_FWD.configs)
        for size in tuning.SIZES:
            key = spaces.bucket(tuning._compile_shape(*size))
            left -= set(spaces.SPACE_FWD.fitting(key, target_device("sm_90")))
    assert not left, {config.name for config in left}


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
        given = operands(BASE.but(width=16, values=24), (3, 0))
        given["state_pool"] = torch.arange(4.0 * 2 * 16 * 24).view(4, 2, 16, 24).sin()
        for name in (*TOKENS, "state_pool"):
            given[name] = change(given[name])
        reads = [STEP(**given), STEP(**given)]
        found.append({"o": torch.stack(reads), "pool": given["state_pool"].contiguous()})
    oracle.assert_bit_equal(found[1], found[0])


def test_heads_in_groups_are_those_that_are_repeated() -> None:
    """Bit for bit, though no tensor of all heads is formed."""
    given = operands(BASE.but(heads=(1, 2, 4), width=16, values=16), (3, 0))
    pool = given["state_pool"].clone()
    wide = {
        name: given[name].repeat_interleave(4 // given[name].shape[1], 1) for name in ("q", "k")
    }
    found = {"o": STEP(**given), "pool": given["state_pool"]}
    wanted = {"o": STEP(**given | wide | {"state_pool": pool}), "pool": pool}
    oracle.assert_bit_equal(found, wanted)


def test_a_decay_of_minus_infinity_forgets() -> None:
    given = operands(BASE, (1, 3))
    given["log_decay"] = torch.full((2, 2), -torch.inf)
    empty = given | {"state_pool": torch.zeros(4, 2, 6, 5), "log_decay": torch.zeros(2, 2)}
    assert torch.equal(STEP(**given), STEP(**empty))
    assert torch.equal(given["state_pool"][[1, 3]], empty["state_pool"][[1, 3]])


def test_keys_of_nothing() -> None:
    """A vector of zeros stays one when it is normalised."""
    given = operands()
    given["k"].zero_()
    given["q"].zero_()
    before = given["state_pool"].clone()
    assert not STEP(**given).any()
    wanted = given["log_decay"][0].exp()[:, None, None] * before[2]
    torch.testing.assert_close(given["state_pool"][2], wanted)


def test_other_slots_keep_their_bits() -> None:
    """Skipped rows, slots that no row names; slot 0 is one like all others."""
    for slots in ((-1, -1, -1), (-1, 3, -1), (0, -1, 2), (2, -1, -1)):
        given = operands(BASE.but(batch=3), slots)
        pool, before = given["state_pool"], given["state_pool"].clone()
        for name in TOKENS:
            given[name][given["slots"] < 0] = torch.nan
        with alloc.poison():
            o = STEP(**given)
        changed = [slot for slot in range(4) if not torch.equal(pool[slot], before[slot])]
        assert changed == sorted(slot for slot in slots if slot >= 0)
        assert o.any(-1).any(-1).tolist() == [slot >= 0 for slot in slots]


def test_nothing_to_do() -> None:
    """No rows, or no slots."""
    given = operands()
    none = {name: given[name][:0] for name in (*TOKENS, "slots")}
    assert STEP(**given | none).shape == (0, 2, 5)
    with alloc.poison():
        o = STEP(**given | {"state_pool": given["state_pool"][:0], "slots": -torch.ones(2).long()})
    assert not o.any()


def test_opcheck() -> None:
    given = operands()
    tensors = [given[name] for name in (*TOKENS, "state_pool", "slots")]
    contracts.check_opcheck(op.STEP, [(*tensors, 1.0, True, 1e-12, "triton")])


def test_steps_in_one_graph() -> None:
    """Two steps and a look at the pool between them."""

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        first = STEP(**given)
        return first, given["state_pool"] * 2, STEP(**given)

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = operands() | {"state_pool": torch.ones(4, 2, 6, 5)}
        found.append(oracle.named((*function(**given), given["state_pool"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])


# ---- what it takes, and what not ----------------------------------------------------------------


def test_supports() -> None:
    def reason(arch: str, **changes: Any) -> str | None:
        with assume_device(target_device(arch)):
            return backend.supports(replace(tuning._compile_shape(64, 64), **changes), arch)

    for changes in (
        {}, {"width": 1, "values": 1}, {"width": 256, "values": 1000}, {"batch": 0},
        {"dtype": FP32}, {"width": 129, "values": 7},
    ):  # fmt: skip
        for arch in ("sm_80", "sm_86", "sm_90"):
            assert reason(arch, **changes) is None, changes
    assert "takes keys up to 256 wide, this is 257" in str(reason("sm_90", width=257))
    assert "takes fewer rows" in str(reason("sm_90", batch=1 << 26))


def test_refusals_reach_the_caller() -> None:
    with pytest.raises(ValueError, match="cannot run this call: takes keys up to 256 wide"):
        STEP(**operands(BASE.but(width=257)))
    given = operands()
    half = {name: given[name].bfloat16() for name in ("q", "k", "v")}
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        STEP(**given | half)


def test_explain_and_auto() -> None:
    said = ops.explain(ops.gated_delta_step_, **operands(), backend="triton")
    assert (said.backend, set(said.configs)) == ("triton", {"fwd"})


def test_columns_by_the_number_of_heads() -> None:
    """A line of memory each, or half of one where programs would be few."""
    device = replace(target_device("sm_90"), multiprocessors=132)
    found = {}
    for batch, width, values in ((64, 128, 128), (1, 128, 128), (256, 64, 64), (64, 256, 256),
                                 (64, 16, 16)):  # fmt: skip
        shape = replace(tuning._compile_shape(width, values), batch=batch)
        config = choose(spaces.SPACE_FWD, spaces.bucket(shape), device)
        found[batch, width] = (config["V"], config.num_warps)
    assert found == {
        (64, 128): (32, 4),
        (1, 128): (16, 2),
        (256, 64): (32, 2),
        (64, 256): (32, 8),
        (64, 16): (16, 1),
    }


def test_one_signature_for_all_rows_heads_and_strides() -> None:
    found = contracts.run_uninterpreted(
        """
        import json
        from dataclasses import replace
        from fastweights.autotune.compile import target_device
        from fastweights.autotune.space import assume_device
        from fastweights.ops.gated_delta_step import tuning

        config, shapes = tuning.SPACE_FWD.configs[0], []
        with assume_device(target_device("sm_90a")):
            for n in range(1, 41):
                shape = tuning._compile_shape(128, 128)
                shape = replace(shape, batch=n, heads=n, heads_q=n, heads_k=1, heads_v=n, scale=n)
                shapes += [repr(case.source) for case in tuning._recorded(config, shape)]
        print(json.dumps([len(shapes), len(set(shapes))]))
        """
    )
    assert json.loads(found[-1]) == [40, 1]
