"""The gated delta rule's compiled kernels on a GPU, against float64 and as torch sees them.

Triton 3.4 to 3.7.0 miscompile kernels of this family on Hopper, some for a few configs alone: each
config of each kernel runs here. Run with `pytest -n 14 -m gpu`.
"""

from __future__ import annotations

import importlib
import itertools
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device
from fastweights.ops.gated_delta import triton as backend
from fastweights.ops.gated_delta import tuning
from helpers import contracts, inputs, oracle
from helpers.gated_delta import TOKENS, Case

pytestmark = pytest.mark.gpu

op = importlib.import_module("fastweights.ops.gated_delta.op")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
GRADS = backend.SPACE_BWD is not None
RULE = partial(ops.gated_delta_rule, output_final_state=True, backend="triton")
EAGER = partial(ops.gated_delta_rule, output_final_state=True, backend="eager")
LITERAL = partial(reference.gated_delta_rule, output_final_state=True)
BASE = Case(tokens=200, heads=(1, 1, 2), width=64, values=64, carried=True)
# Every config fits one of them.
SERVED = [
    BASE.but(width=width, values=values)
    for width, values in ((128, 128), (64, 64), (256, 256), (128, 64), (125, 130))
]
CASES = [
    *(BASE.but(tokens=tokens) for tokens in (1, 2, 63, 64, 65, 127, 1000)),
    *(BASE.but(tokens=tokens, width=128, values=128) for tokens in (64, 127, 1000)),
    BASE.but(heads=(4, 2, 1), scale=0.3),
    BASE.but(heads=(2, 1, 2), qk_l2norm=False, scale=-2.0),
    BASE.but(batch=3, heads=(4, 4, 16), width=128, values=128),
    BASE.but(packed=(0, 1, 64, 65, 200, 1000), tokens=1003, heads=(2, 4, 1)),
    BASE.but(packed=(0, 0, 130), tokens=130, carried=False, width=128, values=128),
    BASE.but(harsh=True),
    BASE.but(harsh=True, width=128, values=128, heads=(1, 2, 2)),
    # Widths that are no power of two, and values of another width.
    *(
        BASE.but(width=width, values=values, tokens=130)
        for width, values in (
            (1, 1), (6, 5), (16, 16), (32, 32), (40, 80), (80, 40), (96, 96), (100, 192),
            (192, 100), (256, 8), (33, 300),
        )
    ),
]  # fmt: skip


def exact(given: dict[str, Any]) -> dict[str, Any]:
    """The same in float64."""
    return {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}


def results(function: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All results, and the gradients where there are some."""
    if GRADS:
        return contracts.forward_backward(function, given)
    return oracle.named(function(**given))


def gaps(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative to the size of each tensor."""
    assert list(got) == list(wanted)
    found = {}
    for name, x in wanted.items():
        assert got[name].isfinite().all(), name
        found[name] = float((got[name].double() - x).norm() / x.norm().clamp(min=1e-300))
    return found


def shape_of(given: dict[str, Any]) -> Any:
    tensors = op.DeltaTensors(
        *(given[name] for name in TOKENS), given.get("initial_state"), given.get("cu_seqlens")
    )
    return op.unchecked_shape(tensors, given["scale"], given["qk_l2norm"], 1e-12)


# ---- against the loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("space", backend.SPACES, ids=lambda space: space.pass_)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: f"d{case.width}-v{case.values}")
def test_every_config(case: Case, space: Any, dtype: str, device: torch.device) -> None:
    """One truth serves all of them; each twice, for the same bits."""
    narrow = DTYPES[dtype]
    truth = oracle.Oracle(LITERAL, case.arguments, narrow, device, seeds=(0, 1), grads=GRADS)
    given = case.arguments(0, narrow, device)
    with oracle.collected() as failures:
        for config in contracts.every_config(space, shape_of(given)):
            try:
                failures += [f"{config.name} {line}" for line in truth.measure(RULE).report()]
                contracts.check_repeatable(lambda: tuple(results(RULE, given).values()), 2)
            except Exception as error:
                failures.append(f"{config.name} {type(error).__name__}: {error}")


@pytest.mark.parametrize("space", backend.SPACES, ids=lambda space: space.pass_)
def test_no_config_is_left_out(space: Any, device: torch.device) -> None:
    left = set(space.configs)
    for case in SERVED:
        key = space.bucket(shape_of(case.arguments(0, BF16, device)))
        left -= set(space.fitting(key, Device.of(device)))
    assert not left, {config.name for config in left}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-x{case.scale}")
def test_literal(case: Case, dtype: str, device: torch.device) -> None:
    """By the default configs, on views with NaN around them."""
    oracle.check_op(
        RULE, LITERAL, case.arguments, DTYPES[dtype], device, seeds=(0, 1), grads=GRADS,
        label=case.name,
    )  # fmt: skip


@pytest.mark.parametrize("size", [(6, 5), (64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_harsh_decays_in_fp32(seed: int, size: tuple[int, int], device: torch.device) -> None:
    """Log-decays from U(−30, 0), one of −1e4 and one of −inf: nothing is lost behind them."""
    for tokens in (127, 1000):
        case = BASE.but(tokens=tokens, width=size[0], values=size[1], harsh=True)
        given = case.arguments(seed, FP32, device)
        got = results(RULE, given)
        if GRADS:
            assert not got["d log_decay"][:, 2 * tokens // 3].any()
        found = gaps(got, results(EAGER, exact(given)))
        assert max(found.values()) < 1e-5, found


def test_one_harsh_decay_among_mild_ones_in_fp32(device: torch.device) -> None:
    given = BASE.but(tokens=127).arguments(3, FP32, device)
    given["log_decay"][:, 3] = -1e4
    found = gaps(results(RULE, given), results(EAGER, exact(given)))
    assert max(found.values()) < 1e-5, found


def test_equal_keys_in_fp32(device: torch.device) -> None:
    """All entries of the triangle are 0.9, and powers of it would be 1e15."""
    given = BASE.but(tokens=200).arguments(0, FP32, device)
    given["k"][:] = given["k"][:, :1]
    given["log_decay"].zero_()
    given["beta"].fill_(0.9)  # by 1 decays would have no gradient
    wanted = results(EAGER, exact(given))
    found = gaps(results(RULE, given), wanted)
    if GRADS:
        # That of the decays is small beside its terms: as near as plain torch in the same type.
        plain = gaps(results(EAGER, given), wanted)
        assert found.pop("d log_decay") < 1.5 * plain["d log_decay"], (found, plain)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_drift(dtype: str, device: torch.device) -> None:
    """Many chunks that hardly forget: as near to float64 as plain torch is, within the usual."""
    case = BASE.but(batch=1, tokens=4608)
    given = case.arguments(0, DTYPES[dtype], device)
    given["log_decay"].mul_(0.01)
    wanted = EAGER(**exact(given))
    for got, plain, x in zip(RULE(**given), EAGER(**given), wanted, strict=True):
        assert (got.double() - x).norm() <= 1.5 * (plain.double() - x).norm()


# ---- sequences and views ------------------------------------------------------------------------


def test_packed_sequences_are_those_apart(device: torch.device) -> None:
    """Bit for bit, gradients too."""
    starts = [0, 1, 64, 65, 200, 1000]
    given = BASE.but(batch=1, tokens=1003, carried=False).arguments(0, BF16, device)
    run = partial(ops.gated_delta_rule, backend="triton")
    o, _ = run(**given, cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device))
    for begin, end in itertools.pairwise(starts):
        alone = given | {name: given[name][:, begin:end] for name in TOKENS}
        assert torch.equal(run(**alone)[0], o[:, begin:end])
    assert not o[:, 1000:].any()


def test_a_call_continues_another(device: torch.device) -> None:
    given = BASE.but(tokens=512, carried=False, width=128, values=128).arguments(0, BF16, device)
    o, state = RULE(**given)
    half = [given | {name: given[name][:, at : at + 256] for name in TOKENS} for at in (0, 256)]
    first, middle = RULE(**half[0])
    second, last = RULE(**half[1], initial_state=middle)
    assert torch.equal(o, torch.cat((first, second), 1))
    assert torch.equal(state, last)


VIEWS: dict[str, Any] = {
    "last axis strided": inputs.spaced,
    "misaligned": partial(inputs.embed, pad=1, offset=1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, device: torch.device) -> None:
    plain = BASE.arguments(0, BF16, device)
    plain = {n: x.contiguous() if oracle.is_floating(x) else x for n, x in plain.items()}
    given = {n: VIEWS[view](x) if oracle.is_floating(x) else x for n, x in plain.items()}
    oracle.assert_bit_equal(results(RULE, given), results(RULE, plain))


def test_heads_in_groups_are_those_that_are_repeated(device: torch.device) -> None:
    given = BASE.but(heads=(1, 2, 4), width=128, values=128).arguments(0, BF16, device)
    wide = {n: given[n].repeat_interleave(4 // given[n].shape[2], 2) for n in ("q", "k")}
    oracle.assert_bit_equal(oracle.named(RULE(**given)), oracle.named(RULE(**given | wide)))


@pytest.mark.parametrize("problem", tuning.PROBLEMS[:3], ids=lambda problem: problem.name)
def test_large_calls_repeat_their_bits(problem: Any, device: torch.device) -> None:
    """At the sizes that are timed, on a GPU that is full; the last chunk of each is right."""
    given = problem.inputs(BF16, device, 0) | problem.call
    o, state = RULE(**given)
    for _ in range(5):
        again, last = RULE(**given)
        assert torch.equal(o, again)
        assert torch.equal(state, last)
    few = {name: given[name][:1, -2048:] for name in TOKENS}
    wanted, behind = EAGER(**exact(given | few))
    # Decays of 0.9 on average forget all that was 2,000 tokens ago.
    tail = o[:1, -512:].double() - wanted[:, -512:]
    assert tail.norm() <= 1e-2 * wanted[:, -512:].norm()
    assert (state[:1].double() - behind).norm() <= 1e-2 * behind.norm()


def test_offsets_past_two_billion(device: torch.device) -> None:
    """The last sequence of a batch whose scratch memory is beyond 2^31 numbers."""
    case = Case(batch=1, tokens=65, heads=(8, 8, 8), width=128, values=128)
    given = case.arguments(0, BF16, device)
    wide = {name: given[name].expand(8300, *given[name].shape[1:]) for name in TOKENS}
    o, state = RULE(**given | wide)
    one, last = RULE(**given)
    assert torch.equal(o[-1:], one)
    assert torch.equal(state[-1:], last)


# ---- as torch sees it ---------------------------------------------------------------------------


def test_a_cuda_graph(device: torch.device) -> None:
    """Replays on other numbers."""
    given = BASE.arguments(0, BF16, device)
    live = {n: x.clone() if oracle.is_floating(x) else x for n, x in given.items()}
    graph, (o, state) = contracts.captured(lambda: RULE(**live), device)
    for seed in (1, 2):
        for name, x in BASE.arguments(seed, BF16, device).items():
            if oracle.is_floating(x):
                live[name].copy_(x)
        graph.replay()
        wanted = RULE(**live)
        assert torch.equal(o, wanted[0])
        assert torch.equal(state, wanted[1])


def test_no_host_sync(device: torch.device) -> None:
    """Packed, too: offsets are read on the device."""
    case = BASE.but(packed=(0, 1, 64, 65, 200), batch=1)
    given = case.arguments(0, BF16, device)
    RULE(**given)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, _ = RULE(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert o[:, 0].any()


def test_opcheck(device: torch.device) -> None:
    given = BASE.arguments(0, BF16, device)
    tensors = [given[name].contiguous() for name in (*TOKENS, "initial_state")]
    contracts.check_opcheck(op.DELTA_FWD, [(*tensors, None, 1.0, True, 1e-12, "triton")])


def test_one_graph_of_inductor(device: torch.device) -> None:
    given = BASE.arguments(0, BF16, device)
    compiled = torch.compile(RULE, fullgraph=True)
    got = oracle.named(compiled(**given))
    torch._dynamo.reset()
    oracle.assert_bit_equal(got, oracle.named(RULE(**given)))


def test_autocast(device: torch.device) -> None:
    """Queries, keys and values alone are cast."""
    narrow = BASE.arguments(0, BF16, device)
    wide = narrow | {name: narrow[name].float() for name in ("q", "k", "v")}
    with torch.autocast("cuda", dtype=BF16):
        o, state = RULE(**wide)
    assert o.dtype == BF16
    oracle.assert_bit_equal(oracle.named((o, state)), oracle.named(RULE(**narrow)))
