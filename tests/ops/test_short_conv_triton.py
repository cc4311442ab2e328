"""The short convolution by Triton under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_short_conv_gpu.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device, choose
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device, use_config
from fastweights.ops import alloc
from fastweights.ops.short_conv import triton as backend
from fastweights.ops.short_conv import triton_spaces as spaces
from fastweights.ops.short_conv import tuning
from helpers import contracts, inputs, oracle
from helpers.short_conv import TOKENS, Case

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_short_conv_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

op = importlib.import_module("fastweights.ops.short_conv.op")
CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
CONV = partial(ops.short_conv, backend="triton", output_final_state=True)
LITERAL = partial(reference.short_conv, output_final_state=True)
CANON = {"gates": "", "taps": 4, "residual": True}
ALL = {"taps": 4, "residual": True, "activation": "silu", "bias": True, "carried": True}


def shape_of(given: dict[str, Any], *, backward: bool = False) -> Any:
    """What the backend is told about a call."""
    tensors = op.ConvTensors._make(map(given.get, op.ConvTensors._fields))
    shape = op.unchecked_shape(tensors, given["activation"] or "none", given["residual"])
    return replace(shape, backward=backward)


def check(case: Case, dtype: torch.dtype = FP32) -> None:
    oracle.check_op(CONV, LITERAL, case.arguments, dtype, CPU, seeds=(0,), label=case.name)


def outputs(**given: Any) -> torch.Tensor:
    return CONV(**given)[0]


# ---- against the loop ---------------------------------------------------------------------------

CASES = [
    Case(),
    Case(gates="", taps=1),
    Case(gates="i", taps=2, carried=True),
    Case(gates="i", taps=1, carried=True, activation="silu"),
    Case(gates="o", taps=3, bias=True),
    Case(gates="o", taps=2, residual=True),
    Case(**CANON),
    Case(**CANON, carried=True, activation="silu"),
    *(Case(**ALL, tokens=tokens, batch=1) for tokens in (0, 1, 2, 3, 63, 64, 65, 127)),
    Case(tokens=2, taps=4),
    Case(tokens=33, taps=3, activation="silu", carried=True),
    Case(tokens=32, taps=2, residual=True, bias=True),
    Case(packed=(0, 7, 7, 16), **ALL),
    Case(packed=(0, 0, 0, 1, 3, 19, 19), **ALL),
    Case(packed=(0, 15, 16, 17, 32, 33), tokens=40, **ALL),
    Case(packed=(0, 31, 64), tokens=64, taps=3),
    Case(packed=(0, 1, 2, 3, 4, 5, 6), tokens=6, taps=4, carried=True),
    Case(packed=(0, 1, 3, 19), **CANON),
    Case(packed=(0, 2, 19), taps=1, bias=True),
    Case(packed=(0, 5, 9), taps=2, gates="o", carried=True),
    Case(packed=(0,), taps=4),
    Case(packed=(0, 0), tokens=0, **ALL),
    Case(batch=0, **ALL),
    Case(130, 2, 3, taps=2, gates="i", bias=True),  # more runs than are added up at a time
    Case(channels=1, taps=4, activation="silu"),
    Case(channels=5, tokens=18, **ALL),
    Case(channels=130, tokens=18, batch=1, **ALL),
]


def named(case: Case) -> str:
    return f"D{case.channels}-{case.name}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_literal(case: Case) -> None:
    """y, the state, and the gradient of every tensor, on views, from poisoned memory."""
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(**CANON),
        Case(**ALL, tokens=65, batch=1),
        Case(packed=(0, 15, 15, 33), tokens=40, **ALL),
        Case(channels=130, tokens=9, taps=3),
    ],
    ids=named,
)
def test_fp16(case: Case) -> None:
    check(case, FP16)


def aligned(case: Case, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    given = case.arguments(seed, dtype, device)
    return {n: x.contiguous() if oracle.is_floating(x) else x for n, x in given.items()}


WIDE = Case(1, 19, 512, **ALL)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("layout", ["aligned", "loose"])
def test_every_config(layout: str, pass_: str) -> None:
    """Through more than one run or block of channels; one truth serves all of them."""
    case = WIDE if layout == "aligned" else WIDE.but(channels=509, packed=(0, 3, 17))
    arguments = partial(aligned, case) if layout == "aligned" else case.arguments
    truth = oracle.Oracle(LITERAL, arguments, FP16, CPU, seeds=(0,), grads=pass_ == "bwd")
    space = {"fwd": spaces.SPACE_FWD, "bwd": spaces.SPACE_BWD}[pass_]
    shape = shape_of(arguments(0, FP16, CPU), backward=pass_ == "bwd")
    with oracle.collected() as failures:
        for config in contracts.every_config(space, shape):
            failures += [f"{config.name} {line}" for line in truth.measure(CONV).report()]


def test_wider_configs() -> None:
    """Those that no narrower call takes."""
    case = Case(1, 17, 2048, taps=3)
    truth = oracle.Oracle(LITERAL, partial(aligned, case), FP16, CPU, seeds=(0,))
    shape = shape_of(case.arguments(0, FP16, CPU))
    with oracle.collected() as failures:
        for space in (spaces.SPACE_FWD, spaces.SPACE_BWD):
            for config in contracts.every_config(space, shape):
                if config["C"] > 512 and config["RUN"] != 32:
                    failures += [f"{config.name} {line}" for line in truth.measure(CONV).report()]


# ---- layouts ------------------------------------------------------------------------------------

VIEWS: dict[str, Any] = {
    "last axis strided": inputs.spaced,
    "misaligned": partial(inputs.embed, pad=1, offset=1),
    "contiguous": torch.Tensor.contiguous,
    "at the end of memory": inputs.at_the_end,
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_equal_bits(view: str) -> None:
    """Also of 16 channels, where contiguous rows are read 16 bytes at a time."""
    given = Case(2, 9, 16, **ALL).arguments(0, FP32, CPU)
    names = ("x", "gate_in", "gate_out", "weight", "bias", "initial_state")
    if view == "expanded":
        names = ("x", "gate_in", "gate_out", "initial_state")
        given |= {name: given[name][:1].repeat(2, 1, 1) for name in names}
    changed = {name: VIEWS[view](given[name]) for name in names}
    contracts.check_views(outputs, given, changed)


def test_slices_of_a_projection() -> None:
    """As LFM2's operator gets them."""
    whole = torch.randn(2, 11, 3 * 16)
    gate_in, gate_out, x = whole.chunk(3, -1)
    weight = torch.randn(16, 3)
    y, state = CONV(x, weight, gate_in=gate_in, gate_out=gate_out)
    wanted, last = LITERAL(x, weight, gate_in=gate_in, gate_out=gate_out)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("cuts", [(1,), (2, 4, 5), (7, 7, 18)], ids=str)
def test_pieces_are_the_whole(cuts: tuple[int, ...]) -> None:
    """Bit for bit, also in narrow types: the state is not rounded."""
    given = Case(**ALL).arguments(0, FP16, CPU)
    whole, last = CONV(**given)
    state, found = given["initial_state"], []
    for begin, end in itertools.pairwise((0, *cuts, 19)):
        piece = {name: given[name][:, begin:end] for name in TOKENS}
        y, state = CONV(**given | piece | {"initial_state": state})
        found.append(y)
    assert torch.equal(torch.cat(found, 1), whole)
    assert torch.equal(state, last)


def test_packed_sequences_are_separate_ones() -> None:
    given = Case(**ALL, batch=1).but(carried=False).arguments(0, FP32, CPU)

    def near(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, msg=name)

    contracts.check_packed(outputs, given, TOKENS, (7, 0, 2, 9), near)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinity_stays_in_its_sequence() -> None:
    case = Case(packed=(0, 6, 19), taps=4)
    given = case.arguments(0, FP32, CPU)
    given["x"][:, 5] = torch.inf
    y, state = CONV(**given)
    assert y[:, 6:].isfinite().all()
    assert state[1].isfinite().all()
    assert not y[:, 5].isfinite().any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_far_from_zero() -> None:
    """No NaN where exp overflows, in either pass."""
    x = torch.tensor([-1e4, -100.0, -80.0, 0.0, 80.0, 1e4]).view(1, 6, 1).requires_grad_()
    y, _ = CONV(x, torch.ones(1, 1), activation="silu")
    (d_x,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, torch.nn.functional.silu(x))
    assert d_x.flatten().tolist() == pytest.approx([0, 0, 0, 0.5, 1, 1], abs=1e-6)


# ---- as torch sees it ---------------------------------------------------------------------------

CALLS = [
    Case(**ALL, tokens=5),
    Case(**CANON, tokens=7),
    Case(packed=(0, 3, 7), tokens=8, activation="silu", carried=True),
    Case(tokens=3, taps=1, bias=True),
]


@pytest.mark.parametrize("case", CALLS, ids=named)
def test_contracts(case: Case) -> None:
    given = case.arguments(0, FP32, CPU)
    contracts.check_backward_twice(outputs, given)
    contracts.check_grad_out_untouched(outputs, given)
    contracts.check_expanded_grad_out(outputs, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(CONV, given).values()), 2)


def test_fullgraph() -> None:
    given = Case(**ALL).arguments(0, FP32, CPU)
    contracts.check_fullgraph(lambda **given: CONV(**given), given)


@pytest.mark.parametrize("case", CALLS, ids=named)
def test_opcheck(case: Case) -> None:
    given = case.arguments(0, FP32, CPU)
    tensors = [given.get(name) for name in op.ConvTensors._fields]
    rules = (case.activation or "none", case.residual, "triton")
    leaves = [x.detach().requires_grad_() if oracle.is_floating(x) else x for x in tensors]
    contracts.check_opcheck(op.CONV_FWD, [(*leaves, *rules)])
    y, state = op.CONV_FWD(*tensors, *rules)
    contracts.check_opcheck(op.CONV_BWD, [(y, state, *tensors, *rules)])


def test_backwards_take_the_forward_of_another_backend() -> None:
    """Nothing is saved but the arguments."""
    given = Case(**ALL).arguments(0, FP32, CPU)
    tensors = [given.get(name) for name in op.ConvTensors._fields]
    y, state = op.CONV_FWD(*tensors, "silu", True, "eager")
    with alloc.poison():
        mine = op.CONV_BWD(y, state, *tensors, "silu", True, "triton")
    for got, wanted in zip(mine, op.CONV_BWD(y, state, *tensors, "silu", True, "eager"),
                           strict=True):  # fmt: skip
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# ---- what it takes, and what not ----------------------------------------------------------------


def reason(arch: str = "sm_90", **changes: Any) -> str | None:
    shape = replace(tuning._compile_shape(), **changes)
    with assume_device(target_device(arch)):
        return backend.supports(shape, arch)


def test_supports() -> None:
    for changes in (
        {}, {"taps": 1}, {"channels": 1}, {"channels": 100_003}, {"tokens": 0}, {"batch": 0},
        {"packed": True, "batch": 1000}, {"dtype": FP32}, {"dtype": FP16}, {"tokens": 1 << 22},
    ):  # fmt: skip
        for arch in ("sm_80", "sm_86", "sm_90"):
            assert reason(arch, **changes) is None, changes
    assert "takes fewer tokens" in str(reason(batch=1 << 20, tokens=1 << 20))
    assert "sm_75 is older than sm_80" in str(
        backend.unsupported(replace(tuning._compile_shape(), device=CPU), "sm_75")
    )


def test_refusals_reach_the_caller() -> None:
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        CONV(**Case().arguments(0, torch.bfloat16, CPU))
    with pytest.raises(ValueError, match="float64 runs on eager only"):
        CONV(**Case().arguments(0, torch.float64, CPU))


def test_explain_names_the_configs() -> None:
    given = Case().arguments(0, FP32, CPU)
    said = ops.explain(ops.short_conv, **given, backend="triton")
    assert said.backend == "triton"
    assert set(said.configs) == {"fwd", "bwd"}


def test_defaults() -> None:
    """16 bytes a thread forward, four numbers backward; a call of few tokens gets short runs."""
    device = replace(target_device("sm_90"), multiprocessors=132)
    found = {}
    for name, changes in {
        "large": {}, "fp32": {"dtype": FP32}, "small": {"batch": 1, "tokens": 2048},
        "narrow": {"channels": 130}, "one channel": {"channels": 1},
    }.items():  # fmt: skip
        shape = replace(tuning._compile_shape(), **changes)
        key = spaces.bucket(shape)
        pair = [choose(space, key, device) for space in (spaces.SPACE_FWD, spaces.SPACE_BWD)]
        found[name] = [(config["C"], config["RUN"], config.num_warps) for config in pair]
    assert found == {
        "large": [(1024, 16, 4), (512, 64, 4)],
        "fp32": [(512, 32, 4), (512, 64, 4)],
        "small": [(1024, 16, 4), (512, 32, 4)],
        "narrow": [(256, 32, 1), (256, 32, 2)],
        "one channel": [(64, 16, 1), (64, 32, 1)],
    }


def test_one_signature_for_all_lengths_and_strides() -> None:
    """Compiled once for each rule: no length, stride or number of sequences is a constant."""
    found = contracts.run_uninterpreted(
        """
        import json, torch
        from dataclasses import replace
        from fastweights.autotune.compile import target_device
        from fastweights.autotune.space import assume_device, use_config
        from fastweights.ops import triton_runtime as runtime
        from fastweights.ops.short_conv import triton, tuning
        from fastweights.ops.short_conv.op import ConvTensors, unchecked_shape

        fwd, bwd = triton.SPACE_FWD.configs[0], triton.SPACE_BWD.configs[0]
        found = set()
        with assume_device(target_device("sm_90a")), runtime.record_launches() as sources:
            for tokens in range(1, 41):
                pad = 8 * (tokens % 3)
                x = torch.empty(2, tokens, 1024 + pad, dtype=torch.bfloat16, device="meta")
                x = x[..., :1024]
                weight = torch.empty(1024, 3, device="meta")
                given = ConvTensors(x, weight, None, x, x, None, None)
                shape = unchecked_shape(given, "none", False)
                state = torch.empty(2, 2, 1024, device="meta")
                with use_config(triton.SPACE_FWD, fwd), use_config(triton.SPACE_BWD, bwd):
                    triton.fwd(shape, given)
                    triton.bwd(replace(shape, backward=True), x, state, given)
        print(json.dumps([len(sources), len({repr(source) for source in sources})]))
        """
    )
    assert json.loads(found[-1]) == [120, 3]


def test_a_config_of_wider_rows_is_refused() -> None:
    given = Case().arguments(0, FP32, CPU)
    wide = next(config for config in spaces.SPACE_FWD.configs if config["C"] == 1024)
    with (
        use_config(spaces.SPACE_FWD, wide),
        pytest.raises(ValueError, match="is for rows of more than 512 channels"),
    ):
        CONV(**given)
    assert spaces.SPACE_FWD.fitting(spaces.bucket(shape_of(given)), Device.of(CPU))
