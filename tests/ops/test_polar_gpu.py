"""Polar attention's compiled Triton kernels on a GPU. Run with `pytest -n 8 -m gpu`.

Compiling is most of the time, so a test loops over what shares kernels: one truth serves all
configs of a width and dtype, one compiled config serves all lengths.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config, verify
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops.polar_attention import triton as backend
from helpers import contracts, inputs, oracle, polar
from helpers.polar import RULES, SOFTMAX_RULES, Case

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = tuple(DTYPES)
LENGTHS = (1, 7, 63, 64, 65, 127, 1000, 4097)
WIDTHS = (32, 64, 128, 192, 256)  # one for each width that heads are padded to
BF16 = torch.bfloat16


def of_length(tokens: int, d: int) -> Case:
    """Grouped heads; fewer of them where the float64 truth is large."""
    if tokens > 1000:
        return Case(tq=tokens, hq=2, hk=1, d=d)
    return Case(tq=tokens, batch=2 if tokens < 100 else 1, hq=4, hk=2, d=d)


def fitting(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> list[Config]:
    return space.fitting(space.bucket(case.shape(dtype, device)), Device.of(device))


def suited(case: Case, config: Config) -> Case:
    """The case as a config takes it: the single form of backward has no null value."""
    return case.for_form(config.get("SINGLE"))


def first(case: Case, dtype: torch.dtype, device: torch.device, single: int) -> Config:
    """The first config of one form of backward."""
    configs = fitting(backend.SPACE_BWD, case, dtype, device)
    return next(config for config in configs if config["SINGLE"] == single)


# ---- every config against float64 ---------------------------------------------------------------


def fits(space: Space, config: Config, d: int, dtype: str, device: torch.device) -> bool:
    case = suited(of_length(64, d), config)
    return config in fitting(space, case, DTYPES[dtype], device)


def fitted(space: Space, config: Config, device: torch.device) -> set[tuple[int, str]]:
    pairs = itertools.product(WIDTHS, NAMES)
    return {(w, dtype) for w, dtype in pairs if fits(space, config, w, dtype, device)}


def _share(space: Space, d: int, dtype: str, device: torch.device) -> list[Config]:
    """The configs to run at this width in this dtype.

    fp32 runs all that fit. Of the 16-bit types each takes every other width of a config, so that
    each config meets both types and every width it fits, without the full product. Where that
    leaves none of those that fit, the first of them runs.
    """
    share, able = [], []
    for i, config in enumerate(space.configs):
        widths = [w for w in WIDTHS if fits(space, config, w, dtype, device)]
        if d not in widths:
            continue
        able.append(config)
        turn = (i + widths.index(d) + NAMES.index(dtype)) % 2 == 0
        if dtype == "fp32" or len(widths) == 1 or turn:
            share.append(config)
    return share or able[:1]


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_every_config(pass_: str, d: int, dtype: str, device: torch.device) -> None:
    space = backend.SPACE_FWD if pass_ == "fwd" else backend.SPACE_BWD
    configs = _share(space, d, dtype, device)
    assert configs, f"no config of {pass_} is for D={d} in {dtype}"
    with oracle.collected() as failures:
        for tokens, form in itertools.product(LENGTHS, (0, 1)):
            case = of_length(tokens, d).for_form(form)
            formed = [config for config in configs if config.get("SINGLE") == form]
            if not formed or not case.measurable(DTYPES[dtype]):
                continue
            seeds = (0, 1, 2) if tokens <= 1000 else (0,)
            truth = oracle.Oracle(
                case.reference, case.arguments, DTYPES[dtype], device,
                seeds=seeds, grads=pass_ == "bwd",
            )  # fmt: skip
            for config in formed:
                with use_config(space, config):
                    report = truth.measure(case.on_triton).report()
                failures += [f"{config.name} T={tokens} {line}" for line in report]
            del truth


def test_every_config_meets_every_dtype_and_width(device: torch.device) -> None:
    """The shares above leave nothing out, and none of them is empty."""
    elsewhere = target_device("sm_80" if Device.of(device).capability == 90 else "sm_90")
    for space in (backend.SPACE_FWD, backend.SPACE_BWD):
        for w, dtype in itertools.product(WIDTHS, NAMES):
            assert _share(space, w, dtype, device), f"{space.pass_} D={w} {dtype}"
        for config in space.configs:
            able = fitted(space, config, device)
            if not able:  # Hopper's own, or what is refused there
                with assume_device(elsewhere):
                    assert fitted(space, config, device), f"{config.name} fits no width"
            met = {(w, t) for w, t in able if config in _share(space, w, t, device)}
            for part in (0, 1):
                assert {x[part] for x in met} == {x[part] for x in able}, config.name


ALL_RULES = (*RULES, *SOFTMAX_RULES)


@pytest.mark.parametrize("index", range(len(ALL_RULES)), ids=[case.name for case in ALL_RULES])
def test_rules(index: int, device: torch.device) -> None:
    """Each rule in one dtype, over the interpreter suite's lengths and over five times as many."""
    dtype = DTYPES[NAMES[index % 3]]
    if not ALL_RULES[index].measurable(dtype):
        dtype = torch.float32
    single = index // 3 % 2 if dtype.itemsize == 2 else 0
    case = ALL_RULES[index].for_form(single)
    with oracle.collected() as failures:
        for sized in (case, case.longer(5)):
            if single:  # on sm_90 for no smaller width
                sized = sized.but(d=64)
            config = first(sized, dtype, device, single)
            truth = oracle.Oracle(sized.reference, sized.arguments, dtype, device)
            with use_config(backend.SPACE_BWD, config):
                report = truth.measure(sized.on_triton).report()
            failures += [f"{sized.name} {config.name} {line}" for line in report]


@pytest.mark.parametrize("index", range(len(ALL_RULES)), ids=[case.name for case in ALL_RULES])
def test_rules_at_common_widths(index: int, device: torch.device) -> None:
    """Each rule at a width that Hopper kernels serve, by the default configs in 16 bits."""
    d, dtype = (64, 128)[index % 2], (BF16, torch.float16)[index // 2 % 2]
    with oracle.collected() as failures:
        for times in (1, 7):
            case = ALL_RULES[index].longer(times).but(d=d)
            if not case.measurable(dtype):
                continue
            truth = oracle.Oracle(case.reference, case.arguments, dtype, device)
            failures += [f"{case.name} {x}" for x in truth.measure(case.on_triton).report()]


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_packed_rows_of_one_key(d: int, device: torch.device) -> None:
    """Sequences of one token: the loop over tiles that need masks has no turns there."""
    case = Case(tq=1600, hq=4, hk=2, d=d, packed=(1, 63, 0, 135, 1, 501, 800))
    oracle.check_op(case.on_triton, case.reference, case.arguments, BF16, device, label=case.name)


def test_more_tiles_than_multiprocessors(device: torch.device) -> None:
    """A program of the Hopper kernels then serves several tiles, with both of its buffers."""
    for d in (64, 128, 192, 256):
        case = Case(tq=1100, batch=3, hq=16, hk=8, d=d)
        oracle.check_op(
            case.on_triton, case.reference, case.arguments, BF16, device, label=case.name
        )


@pytest.mark.parametrize("null_base", [-20.0, 6.0, 10.0])
def test_null_value_that_wins_or_loses(null_base: float, device: torch.device) -> None:
    """Parameter gradients too, though all of them are as small as the loser's mass."""
    case = Case(tq=500, hq=4, hk=2, d=64, null_base=null_base)
    for name, dtype in DTYPES.items():
        if case.measurable(dtype):
            oracle.check_op(
                case.on_triton, case.reference, case.arguments, dtype, device, label=name
            )


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("d", [40, 80, 96, 100, 192])
def test_padded_widths(d: int, dtype: str, device: torch.device) -> None:
    """Widths that no tile has; 100 in 16 bits also has strides that descriptors refuse."""
    case = Case(tq=1000, hq=4, hk=2, d=d, layout="contiguous" if d == 100 else "fused")
    oracle.check_op(
        case.on_triton, case.reference, case.arguments, DTYPES[dtype], device, label=case.name
    )


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_layouts(layout: str, device: torch.device) -> None:
    for dtype in (torch.float16, BF16):
        for single in (0, 1):
            case = Case(tq=300, hq=4, hk=2, d=64, layout=layout).for_form(single)
            config = first(case, dtype, device, single)
            with use_config(backend.SPACE_BWD, config):
                oracle.check_op(
                    case.on_triton, case.reference, case.arguments, dtype, device,
                    label=f"{case.name} {config.name}",
                )  # fmt: skip


# ---- repeatability ------------------------------------------------------------------------------


@contextlib.contextmanager
def second_load(device: torch.device) -> Iterator[Callable[[], None]]:
    """A function that queues matrix products on another stream, to disturb the timing."""
    stream = torch.cuda.Stream(device)
    x = torch.randn(2048, 2048, device=device, dtype=BF16)
    y = torch.empty_like(x)
    stream.wait_stream(torch.cuda.current_stream(device))

    def queue() -> None:
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.mm(x, x, out=y)

    yield queue
    torch.cuda.synchronize(device)


@pytest.mark.parametrize(
    "case",
    [
        Case(tq=1000, batch=2, hq=4, hk=2, d=128),
        Case(tq=1000, hq=4, hk=2, d=64, packed=(1, 0, 400, 333, 200)),
    ],
    ids=lambda case: case.name,
)
def test_deterministic_mode_repeats_every_bit(case: Case, device: torch.device) -> None:
    arguments = case.arguments(0, BF16, device)
    with contracts.deterministic(), second_load(device) as disturb:

        def run() -> Any:
            disturb()
            return tuple(contracts.forward_backward(case.on_triton, arguments).values())

        contracts.check_repeatable(run, 50)


def test_deterministic_mode_refuses_atomics(device: torch.device) -> None:
    case = Case(tq=64, d=64).for_form(single=1)
    config = first(case, BF16, device, single=1)
    assert config.atomic
    arguments = case.arguments(0, BF16, device)
    with (
        contracts.deterministic(),
        use_config(backend.SPACE_BWD, config),
        pytest.raises(ValueError, match="deterministic algorithms are on"),
    ):
        contracts.forward_backward(case.on_triton, arguments)


def test_atomic_error_is_stable_in_ten_runs(device: torch.device) -> None:
    case = Case(tq=1000, hq=4, hk=2, d=64).for_form(single=1)
    config = first(case, BF16, device, single=1)
    truth = oracle.Oracle(case.reference, case.arguments, BF16, device)
    errors = []
    with use_config(backend.SPACE_BWD, config), second_load(device) as disturb:
        for _ in range(10):
            disturb()
            comparison = truth.measure(case.on_triton)
            comparison.check(config.name)
            errors.append(comparison.judge("d q")["frobenius"].error)
    assert max(errors) <= 1.05 * min(errors), errors


# ---- equalities ---------------------------------------------------------------------------------


def near(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-3) -> None:
    """Equal up to another order of rounding; one wrong row of a thousand is 3e-2."""
    got, expected = got.double(), expected.double()
    assert not got.isnan().any(), f"{name} holds NaN"
    distance, size = float((got - expected).norm()), float(expected.norm())
    assert distance <= tolerance * size + 1e-30, f"{name}: {distance / max(size, 1e-30):.2e} apart"


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_packed_equals_separate(polar_mode: bool, device: torch.device) -> None:
    case = Case(tq=1050, hq=4, hk=2, d=64, polar=polar_mode)
    lengths = (1, 63, 1, 0, 135, 800)
    arguments = case.arguments(0, torch.float16, device)
    for name in "qkv":
        arguments[name][:, sum(lengths) :] = float("nan")

    def compare(name: str, packed: torch.Tensor, alone: torch.Tensor) -> None:
        if packed.numel():
            finite = ~alone.isinf()
            assert torch.equal(packed.isinf(), alone.isinf()), name
            near(name, packed[finite], alone[finite], 5e-3)

    contracts.check_packed(case.on_triton, arguments, ["q", "k", "v"], lengths, compare)


def test_window_past_the_sequence_is_no_window(device: torch.device) -> None:
    case = Case(tq=1000, hq=4, hk=2, d=64)
    arguments = case.arguments(0, BF16, device)
    with contracts.deterministic():
        expected = contracts.forward_backward(case.on_triton, arguments)
        for window in (1000, 5000, 2**31):
            got = contracts.forward_backward(case.on_triton, arguments | {"window": window})
            oracle.assert_bit_equal(got, expected, f"window {window}")


def test_continuation_is_the_tail_of_the_whole(device: torch.device) -> None:
    for window in (None, 300):
        case = Case(tq=1000, hq=4, hk=2, d=64, window=window)
        arguments = case.arguments(0, BF16, device)
        whole = oracle.named(case.on_triton(**arguments))
        tail = oracle.named(case.on_triton(**(arguments | {"q": arguments["q"][:, 617:]})))
        for name, x in tail.items():
            near(name, x, whole[name][:, 617:])


def test_grouped_heads_equal_expanded_heads(device: torch.device) -> None:
    case = Case(tq=500, hq=8, hk=2, d=64)
    arguments = case.arguments(0, BF16, device)
    expanded = arguments | {n: arguments[n].repeat_interleave(4, 2) for n in "kv"}
    with contracts.deterministic():
        got = contracts.forward_backward(case.on_triton, arguments)
        expected = contracts.forward_backward(case.on_triton, expanded)
    for name, x in expected.items():
        if name in ("d k", "d v"):
            summed = x.float().unflatten(2, (2, 4)).sum(3)
            near(name, got[name], summed, 5e-3)
        else:
            near(name, got[name], x, 1e-6)


@pytest.mark.parametrize("dtype", NAMES)
def test_row_identity(dtype: str, device: torch.device) -> None:
    tolerance = 1e-5 if dtype == "fp32" else 2e-3
    for case in (
        Case(tq=1000, hq=4, hk=2, d=64),
        Case(tq=300, tk=700, hq=4, hk=2, d=128, window=200),
        Case(tq=700, hq=4, hk=2, d=96, packed=(1, 299, 300)),
        Case(tq=500, hq=4, hk=2, d=64, null_base=6.0),
    ):
        polar.check_row_identity(case, DTYPES[dtype], device, tolerance, backend="triton")


def test_fp32_is_ieee_unless_tf32_is_asked_for(device: torch.device) -> None:
    case = Case(tq=300, hq=2, d=64)
    truth = oracle.Oracle(case.reference, case.arguments, torch.float32, device)
    truth.check(case.on_triton, "highest")
    torch.set_float32_matmul_precision("high")
    try:
        loose = truth.measure(case.on_triton).judge("out0")["frobenius"].error
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 1e-5 < loose < 1e-2, f"TF32 was asked for, error {loose:.1e}"


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["deterministic", "default"])
def test_beyond_two_to_the_31_elements(mode: str, device: torch.device) -> None:
    """q has 2.3e9 elements and k's offsets in the fused buffer pass 3e9; a window keeps it cheap.

    Only the last rows of the last heads get an upstream gradient, and are compared with the
    reference run on the slice that they see.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if free < 60 * 2**30:
        pytest.skip(f"needs 60 GB of free GPU memory, {free / 2**30:.0f} are")
    tokens, hq, hk, d, window, rows = 140_000, 128, 32, 128, 128, 200
    source = inputs.generator(0, device)
    fused = torch.empty(1, tokens, hq + 2 * hk, d, dtype=BF16, device=device)
    fused.normal_(generator=source)
    q, k, v = (x.detach().requires_grad_() for x in fused.split([hq, hk, hk], dim=2))
    assert q.numel() > 2**31
    assert k.stride(1) * tokens > 2**31
    head = Case(hq=hq, hk=hk, d=d)._parameters(source, device)
    upstream = torch.zeros(1, tokens, hq, d, dtype=BF16, device=device)
    upstream[:, -rows:, -4:].normal_(generator=source)
    block = contracts.deterministic() if mode == "deterministic" else contextlib.nullcontext()
    with block:
        direction, count = ops.polar_attention(q, k, v, window=window, backend="triton", **head)
        dq, dk, dv = torch.autograd.grad(direction, (q, k, v), upstream)

    seen = rows + window - 1
    # The last four query heads are the last group: one key head.
    part = {
        "q": q.detach()[:, -rows:, -4:],
        "k": k.detach()[:, -seen:, -1:],
        "v": v.detach()[:, -seen:, -1:],
        **{name: x[-4:] for name, x in head.items()},
        "window": window,
    }

    def sliced(results: oracle.Tensors) -> oracle.Tensors:
        return {"out0": upstream[:, -rows:, -4:].to(results["out0"].dtype)}

    plain = oracle.run(reference.polar_attention, part, sliced)
    exact_part = {n: x.double() if oracle.is_floating(x) else x for n, x in part.items()}
    exact = oracle.run(reference.polar_attention, exact_part, sliced)
    got = {
        "out0": direction.detach()[:, -rows:, -4:],
        "out1": count.detach()[:, -rows:, -4:],
        "d q": dq[:, -rows:, -4:],
        "d k": dk[:, -seen:, -1:],
        "d v": dv[:, -seen:, -1:],
    }
    for name, x in got.items():
        i = 1 if name.startswith("d ") else 0
        verify.compare(x, exact[i][name], plain[i][name], name=name)
    for name, x, untouched in (
        ("dq", dq, tokens - rows - 1),
        ("dk", dk, tokens - seen - 1),
        ("dv", dv, tokens - seen - 1),
    ):
        for first in range(0, untouched, 10_000):  # in parts that torch indexes by 32 bits
            part_of_x = x[0, first : min(first + 10_000, untouched)]
            where = part_of_x.nonzero()
            assert not where.numel(), (
                f"{name}: {len(where)} of (token, head, column) from {first} on, first "
                f"{where[0].tolist()} = {part_of_x[tuple(where[0])]}, last {where[-1].tolist()}"
            )


def test_a_hundred_thousand_tokens_without_a_window(device: torch.device) -> None:
    """T = 131,072: the last rows see every key."""
    tokens, rows = 131_072, 64
    case = Case(tq=tokens, hq=2, hk=1, d=128)
    arguments = case.arguments(0, BF16, device)
    got = oracle.named(case.on_triton(**arguments))
    part = arguments | {"q": arguments["q"][:, -rows:]}
    plain = oracle.named(case.reference(**part))
    exact_part = {n: x.double() if oracle.is_floating(x) else x for n, x in part.items()}
    exact = oracle.named(case.reference(**exact_part))
    for name, x in got.items():
        verify.compare(x[:, -rows:], exact[name], plain[name], name=name, dtype=BF16)


def compiled_kernels() -> int:
    """Compiled variants of every kernel of the op, over all devices of this process."""
    from triton.runtime.jit import JITFunction

    family = f"{ops.polar_attention.__module__}."
    modules = [module for name, module in sys.modules.items() if name.startswith(family)]
    kernels = {
        id(x): x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)
    }
    return sum(
        len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values()
    )


def test_forty_lengths_compile_once(device: torch.device) -> None:
    case = Case(tq=1003, hq=4, hk=2, d=64)
    contracts.forward_backward(case.on_triton, case.arguments(0, BF16, device))
    before = compiled_kernels()
    assert before >= 4
    for i in range(40):
        other = case.but(tq=1 + 61 * i, batch=1 + i % 2, hq=2 + 2 * (i % 3))
        other = other.but(layout=("fused", "transposed", "contiguous")[i % 3])
        contracts.forward_backward(other.on_triton, other.arguments(0, BF16, device))
    assert compiled_kernels() == before
