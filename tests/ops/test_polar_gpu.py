"""Polar attention's compiled Triton kernels on a GPU. Run with `pytest -n 8 -m gpu`.

Compiling is most of the time, so a test loops over what shares kernels: one truth serves all
configs of a width and dtype, one compiled config serves all lengths.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.ops.polar_attention import triton as backend
from helpers import contracts, inputs, oracle, polar
from helpers.polar import RULES, SOFTMAX_RULES, Case

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = tuple(DTYPES)
LENGTHS = (1, 7, 63, 64, 65, 127, 1000, 4097)
WIDTHS = (32, 64, 128, 256)  # one for each width that tiles are padded to
BF16 = torch.bfloat16


def triton(case: Case) -> Callable[..., Any]:
    """The op of a case on this backend."""

    def run(**arguments: Any) -> Any:
        return case.op(**arguments, backend="triton")

    return run


def of_length(tokens: int, d: int) -> Case:
    """Grouped heads; fewer of them where the float64 truth is large."""
    if tokens > 1000:
        return Case(tq=tokens, hq=2, hk=1, d=d)
    return Case(tq=tokens, batch=2 if tokens < 100 else 1, hq=4, hk=2, d=d)


def fitting(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> list[Config]:
    return space.fitting(space.bucket(case.shape(dtype, device)), Device.of(device))


def first(
    space: Space, case: Case, dtype: torch.dtype, device: torch.device, single: int
) -> Config:
    """The first config of one form of backward."""
    configs = fitting(space, case, dtype, device)
    return next(config for config in configs if config["SINGLE"] == single)


# ---- every config against float64 ---------------------------------------------------------------


def _share(space: Space, d: int, dtype: str, device: torch.device) -> list[Config]:
    """The configs to run at this width in this dtype.

    fp32 runs all that fit. Of the 16-bit types each takes every other width of a config, so that
    each config meets both types and every width it fits, without the full product.
    """
    share = []
    for i, config in enumerate(space.configs):
        widths = [
            w for w in WIDTHS if config in fitting(space, of_length(64, w), DTYPES[dtype], device)
        ]
        if d not in widths:
            continue
        turn = (i + widths.index(d) + NAMES.index(dtype)) % 2 == 0
        if dtype == "fp32" or len(widths) == 1 or turn:
            share.append(config)
    return share


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_every_config(pass_: str, d: int, dtype: str, device: torch.device) -> None:
    space = backend.SPACE_FWD if pass_ == "fwd" else backend.SPACE_BWD
    configs = _share(space, d, dtype, device)
    assert configs, f"no config of {pass_} is for D={d} in {dtype}"
    with oracle.collected() as failures:
        for tokens in LENGTHS:
            case = of_length(tokens, d)
            seeds = (0, 1, 2) if tokens <= 1000 else (0,)
            truth = oracle.Oracle(
                case.reference, case.arguments, DTYPES[dtype], device,
                seeds=seeds, grads=pass_ == "bwd",
            )  # fmt: skip
            for config in configs:
                with use_config(space, config):
                    report = truth.measure(triton(case)).report()
                failures += [f"{config.name} T={tokens} {line}" for line in report]
            del truth


def test_every_config_meets_every_dtype_and_width(device: torch.device) -> None:
    """The shares above leave nothing out."""
    for space in (backend.SPACE_FWD, backend.SPACE_BWD):
        for config in space.configs:
            fits = {
                (w, dtype)
                for w in WIDTHS
                for dtype in NAMES
                if config in fitting(space, of_length(64, w), DTYPES[dtype], device)
            }
            met = {(w, t) for w, t in fits if config in _share(space, w, t, device)}
            assert met, f"{config.name} fits no width"
            for part in (0, 1):
                assert {x[part] for x in met} == {x[part] for x in fits}, config.name


ALL_RULES = (*RULES, *SOFTMAX_RULES)


@pytest.mark.parametrize("index", range(len(ALL_RULES)), ids=[case.name for case in ALL_RULES])
def test_rules(index: int, device: torch.device) -> None:
    """Each rule in one dtype, over the interpreter suite's lengths and over five times as many."""
    case, dtype = ALL_RULES[index], DTYPES[NAMES[index % 3]]
    single = index // 3 % 2
    with oracle.collected() as failures:
        for sized in (case, case.longer(5)):
            config = first(backend.SPACE_BWD, sized, dtype, device, single)
            truth = oracle.Oracle(sized.reference, sized.arguments, dtype, device)
            with use_config(backend.SPACE_BWD, config):
                report = truth.measure(triton(sized)).report()
            failures += [f"{sized.name} {config.name} {line}" for line in report]


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("d", [40, 80, 96, 100, 192])
def test_padded_widths(d: int, dtype: str, device: torch.device) -> None:
    """Widths that no tile has; 100 in 16 bits also has strides that descriptors refuse."""
    case = Case(tq=1000, hq=4, hk=2, d=d, layout="contiguous" if d == 100 else "fused")
    oracle.check_op(
        triton(case), case.reference, case.arguments, DTYPES[dtype], device, label=case.name
    )


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_layouts(layout: str, device: torch.device) -> None:
    case = Case(tq=300, hq=4, hk=2, d=64, layout=layout)
    for dtype in (torch.float16, BF16):
        for single in (0, 1):
            config = first(backend.SPACE_BWD, case, dtype, device, single)
            with use_config(backend.SPACE_BWD, config):
                oracle.check_op(
                    triton(case), case.reference, case.arguments, dtype, device,
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
            return tuple(contracts.forward_backward(triton(case), arguments).values())

        contracts.check_repeatable(run, 50)


def test_deterministic_mode_refuses_atomics(device: torch.device) -> None:
    case = Case(tq=64)
    config = first(backend.SPACE_BWD, case, BF16, device, single=1)
    assert config.atomic
    arguments = case.arguments(0, BF16, device)
    with (
        contracts.deterministic(),
        use_config(backend.SPACE_BWD, config),
        pytest.raises(ValueError, match="deterministic algorithms are on"),
    ):
        contracts.forward_backward(triton(case), arguments)


def test_atomic_error_is_stable_in_ten_runs(device: torch.device) -> None:
    case = Case(tq=1000, hq=4, hk=2, d=64)
    config = first(backend.SPACE_BWD, case, BF16, device, single=1)
    truth = oracle.Oracle(case.reference, case.arguments, BF16, device)
    errors = []
    with use_config(backend.SPACE_BWD, config), second_load(device) as disturb:
        for _ in range(10):
            disturb()
            comparison = truth.measure(triton(case))
            comparison.check(config.name)
            errors.append(comparison.relative("d q")["frobenius"][0])
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

    contracts.check_packed(triton(case), arguments, ["q", "k", "v"], lengths, compare)


def test_window_past_the_sequence_is_no_window(device: torch.device) -> None:
    case = Case(tq=1000, hq=4, hk=2, d=64)
    arguments = case.arguments(0, BF16, device)
    with contracts.deterministic():
        expected = contracts.forward_backward(triton(case), arguments)
        for window in (1000, 5000, 2**31):
            got = contracts.forward_backward(triton(case), arguments | {"window": window})
            oracle.assert_bit_equal(got, expected, f"window {window}")


def test_continuation_is_the_tail_of_the_whole(device: torch.device) -> None:
    for window in (None, 300):
        case = Case(tq=1000, hq=4, hk=2, d=64, window=window)
        arguments = case.arguments(0, BF16, device)
        whole = oracle.named(triton(case)(**arguments))
        tail = oracle.named(triton(case)(**(arguments | {"q": arguments["q"][:, 617:]})))
        for name, x in tail.items():
            near(name, x, whole[name][:, 617:])


def test_grouped_heads_equal_expanded_heads(device: torch.device) -> None:
    case = Case(tq=500, hq=8, hk=2, d=64)
    arguments = case.arguments(0, BF16, device)
    expanded = arguments | {n: arguments[n].repeat_interleave(4, 2) for n in "kv"}
    with contracts.deterministic():
        got = contracts.forward_backward(triton(case), arguments)
        expected = contracts.forward_backward(triton(case), expanded)
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
    truth.check(triton(case), "highest")
    torch.set_float32_matmul_precision("high")
    try:
        loose = truth.measure(triton(case)).relative("out0")["frobenius"][0]
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
        oracle.compare(x, exact[i][name], plain[i][name], name=name)
    assert not dq[:, : -rows - 1].any()
    assert not dk[:, : -seen - 1].any()
    assert not dv[:, : -seen - 1].any()


def test_a_hundred_thousand_tokens_without_a_window(device: torch.device) -> None:
    """T = 131,072: the last rows see every key."""
    tokens, rows = 131_072, 64
    case = Case(tq=tokens, hq=2, hk=1, d=128)
    arguments = case.arguments(0, BF16, device)
    got = oracle.named(triton(case)(**arguments))
    part = arguments | {"q": arguments["q"][:, -rows:]}
    plain = oracle.named(case.reference(**part))
    exact_part = {n: x.double() if oracle.is_floating(x) else x for n, x in part.items()}
    exact = oracle.named(case.reference(**exact_part))
    for name, x in got.items():
        oracle.compare(x[:, -rows:], exact[name], plain[name], name=name, dtype=BF16)


def compiled_kernels() -> int:
    """Compiled variants of every kernel of the op, over all devices of this process."""
    from triton.runtime.jit import JITFunction

    from fastweights.ops.polar_attention import triton_bwd, triton_fwd

    kernels = {
        id(x): x
        for module in (triton_fwd, triton_bwd)
        for x in vars(module).values()
        if isinstance(x, JITFunction)
    }
    return sum(
        len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values()
    )


def test_forty_lengths_compile_once(device: torch.device) -> None:
    case = Case(tq=1003, hq=4, hk=2, d=64)
    contracts.forward_backward(triton(case), case.arguments(0, BF16, device))
    before = compiled_kernels()
    assert before >= 4
    for i in range(40):
        other = case.but(tq=1 + 61 * i, batch=1 + i % 2, hq=2 + 2 * (i % 3))
        other = other.but(layout=("fused", "transposed", "contiguous")[i % 3])
        contracts.forward_backward(triton(other), other.arguments(0, BF16, device))
    assert compiled_kernels() == before


# ---- contracts ----------------------------------------------------------------------------------

CONTRACTS = [
    Case(tq=200, hq=4, hk=2, d=64),
    Case(tq=200, hq=4, hk=2, d=64, packed=(23, 0, 130)),
    Case(tq=200, hq=4, hk=2, d=64, polar=False),
]


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)
def test_contracts(case: Case, device: torch.device) -> None:
    arguments = case.arguments(0, BF16, device)
    with contracts.deterministic():
        contracts.check_backward_twice(triton(case), arguments)
        contracts.check_grad_out_untouched(triton(case), arguments)
        contracts.check_expanded_grad_out(triton(case), arguments)


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)
def test_fullgraph(case: Case, device: torch.device) -> None:
    """Between other operations, as in a model, compiled by inductor."""

    def block(**arguments: Any) -> Any:
        arguments["q"] = arguments["q"] * 2.0
        first, second = case.op(**arguments)[:2]
        return first.flatten(2) + 1.0, second

    contracts.check_fullgraph(block, case.arguments(0, BF16, device))


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_opcheck(polar_mode: bool, device: torch.device) -> None:
    case = Case(tq=40, hq=2, polar=polar_mode)
    family = "polar_attention" if polar_mode else "softmax_attention"
    forward = getattr(torch.ops.fastweights, f"{family}_fwd").default
    empty = case.but(tq=0, layout="contiguous")
    calls = [c.arguments(0, BF16, device) for c in (case, case.but(layout="transposed"), empty)]
    samples = [polar.operator_arguments(call, "triton") for call in calls]
    differentiable = polar.operator_arguments(contracts.leaves(calls[0]), "triton")
    backward = []
    for sample in samples:
        saved = forward(*sample)
        kept = (saved[0], *saved[2:5]) if polar_mode else saved
        upstream = (torch.randn_like(saved[0]), torch.randn_like(saved[1]))
        backward.append((*upstream, *kept, *sample))
    with contracts.deterministic():
        contracts.check_opcheck(forward, [*samples, differentiable])
        contracts.check_opcheck(getattr(torch.ops.fastweights, f"{family}_bwd").default, backward)


@pytest.mark.parametrize("case", CONTRACTS[:2], ids=lambda case: case.name)
def test_cuda_graph_replays(case: Case, device: torch.device) -> None:
    arguments = contracts.leaves(case.arguments(0, BF16, device))
    tensors = [x for x in arguments.values() if oracle.is_floating(x)]
    upstream = torch.randn(case.batch, case.tq, case.hq, case.d, device=device).to(BF16)

    def step() -> tuple[torch.Tensor, ...]:
        direction, count, _ = triton(case)(**arguments)
        outputs, grads = (direction, count), (upstream, upstream[..., 0])
        return (direction, count, *torch.autograd.grad(outputs, tensors, grads))

    with contracts.deterministic():
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(10):
            fresh = case.arguments(seed, BF16, device)
            with torch.no_grad():
                for name, x in arguments.items():
                    if isinstance(x, torch.Tensor):
                        x.copy_(fresh[name])
            graph.replay()
            got = {str(i): x.detach().clone() for i, x in enumerate(captured)}
            expected = {str(i): x.detach() for i, x in enumerate(step())}
            oracle.assert_bit_equal(got, expected, f"replay {seed}")


def test_first_call_inside_capture_says_warm_up(device: torch.device) -> None:
    """And leaves the stream usable."""
    case = Case(tq=77, hq=2, d=48, window=19, n_keys="row")  # compiled by no other test
    arguments = case.arguments(0, torch.float16, device)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold: call it once before capture"),
        torch.cuda.graph(graph),
    ):
        triton(case)(**arguments)
    oracle.check_op(triton(case), case.reference, case.arguments, torch.float16, device)


@pytest.mark.parametrize(
    "case",
    [*CONTRACTS, Case(tq=200, hq=4, hk=2, d=64, n_keys="row")],
    ids=lambda case: case.name,
)
def test_no_host_sync(case: Case, device: torch.device) -> None:
    """Not even for new length tensors of equal values."""
    arguments = contracts.leaves(case.arguments(0, BF16, device))
    again = {
        name: x.clone() if isinstance(x, torch.Tensor) and not x.is_floating_point() else x
        for name, x in arguments.items()
    }
    tensors = [x for x in arguments.values() if oracle.is_floating(x)]
    outputs = list(triton(case)(**arguments)[:2])
    upstream = [torch.randn_like(x) for x in outputs]
    torch.autograd.grad(outputs, tensors, upstream)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.autograd.grad(list(triton(case)(**again)[:2]), tensors, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.isfinite().all() for x in found)


def test_launches_on_the_tensors_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, {torch.cuda.device_count()} is here")
    case = Case(tq=100, hq=2, d=64)
    with torch.cuda.device(0):
        oracle.check_op(triton(case), case.reference, case.arguments, BF16, torch.device("cuda", 1))
        assert torch.cuda.current_device() == 0


def test_every_launch_enters_the_tensors_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on one GPU: the guard is entered once for each kernel."""
    entered = []
    guard = torch.cuda.device

    def record(index: Any) -> Any:
        entered.append(index)
        return guard(index)

    monkeypatch.setattr(torch.cuda, "device", record)
    case = Case(tq=100, hq=2, d=64)
    contracts.forward_backward(triton(case), case.arguments(0, BF16, device))
    ours = [index for index in entered if index == device]
    assert len(ours) >= 5, f"guards entered: {entered}"  # fwd, prepare, dkdv, dq, parameters


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_autocast(polar_mode: bool, device: torch.device) -> None:
    """fp32 q and k from a norm, bf16 v, fp32 parameters: runs in bf16, gradients keep dtypes."""
    case = Case(tq=100, hq=4, hk=2, d=64, polar=polar_mode)
    arguments = contracts.leaves(case.arguments(0, torch.float32, device))
    arguments["v"] = arguments["v"].detach().to(BF16).requires_grad_()
    with torch.autocast("cuda", dtype=BF16):
        first, second = triton(case)(**arguments)[:2]
    assert first.dtype == BF16
    (first.float().sum() + second.float().sum()).backward()
    for name, x in arguments.items():
        assert x.grad.dtype == x.dtype, name
        assert x.grad.isfinite().all(), name
    cast = {n: x.detach().to(BF16) if n in "qkv" else x.detach() for n, x in arguments.items()}
    expected = triton(case)(**cast)
    assert oracle.bit_equal(first.detach(), expected[0])


def test_auto_picks_triton_on_the_gpu(device: torch.device) -> None:
    arguments = Case(tq=100, d=64).arguments(0, BF16, device)
    said = ops.explain(ops.polar_attention, **arguments)
    assert said.backend in ("triton", "cuda")
    assert set(said.configs) == {"fwd", "bwd"}
    single = ops.explain(ops.polar_attention, **arguments, backend="triton")
    assert single.configs["fwd"] in backend.SPACE_FWD.configs


def test_strong_logits_stay_finite(device: torch.device) -> None:
    """Nearly one-hot rows: logits of several hundred, in every dtype."""
    case = Case(tq=300, hq=4, hk=2, d=64)
    for dtype in DTYPES.values():
        arguments = case.arguments(0, dtype, device) | {"scale": 4.0}
        for name, x in contracts.forward_backward(triton(case), arguments).items():
            assert x.isfinite().all(), (name, dtype)
        exact = {n: x.double() if oracle.is_floating(x) else x for n, x in arguments.items()}
        direction = triton(case)(**arguments)[0]
        near("direction", direction, case.reference(**exact)[0], 2e-2 if dtype != BF16 else 5e-2)
        assert math.isclose(float(direction.double().norm(dim=-1).max()), 1.0, rel_tol=1e-2)
