"""The delta rewrite's compiled kernels on a GPU, against float64 and as torch sees them.

Run with `pytest -n 14 -m gpu`. Compiling is most of the time: where every size does not need every
dtype, they take turns.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device, use_config
from fastweights.ops import alloc
from fastweights.ops.delta_rewrite import triton as backend
from fastweights.ops.delta_rewrite import triton_spaces as spaces
from fastweights.ops.delta_rewrite import tuning
from helpers import contracts, inputs, oracle
from helpers.delta_rewrite import MEMORY, WRITTEN, Case

pytestmark = pytest.mark.gpu

op = importlib.import_module("fastweights.ops.delta_rewrite.op")
dispatch = importlib.import_module("fastweights.ops.dispatch")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
OP = partial(ops.delta_rewrite, backend="triton")
IN_PLACE = partial(ops.delta_rewrite_, backend="triton")
BASE = Case(batch=5, first=True, width=64, values=192, tokens=10, reads=100)


def check(case: Case, dtype: torch.dtype, device: torch.device, seeds: Any = (0, 1)) -> None:
    """Results and gradients; of views with NaN around them, into poisoned memory."""
    oracle.check_op(
        OP, reference.delta_rewrite, case.arguments, dtype, device, seeds=seeds, label=case.name
    )


def shape_of(case: Case, dtype: torch.dtype, device: torch.device) -> Any:
    """What the backend is told about a call."""
    given = case.arguments(0, dtype, device)
    return dispatch.planned(ops.delta_rewrite, **given)[1]


def without_empty(case: Case, dtype: torch.dtype) -> Case:
    """In fp16 plain torch's gradients of reads of a nearly empty memory are infinite."""
    return case.but(first=False) if dtype == FP16 else case


# ---- against float64 ----------------------------------------------------------------------------

SIZES: list[dict[str, Any]] = [
    {"width": 2, "values": 1, "tokens": 1, "reads": 1, "first": False},
    {"width": 5, "values": 17, "tokens": 3, "reads": 130},
    {"width": 8, "values": 16, "tokens": 16, "reads": 64},
    {"width": 21, "values": 100, "tokens": 17, "reads": 65},
    {"width": 32, "values": 128, "tokens": 4, "reads": 9},
    {"width": 48, "values": 61, "tokens": 33, "reads": 100},
    {"width": 64, "values": 768, "tokens": 10, "reads": 522},
    {"width": 64, "values": 257, "tokens": 128, "reads": 300},
    {"width": 63, "values": 250, "tokens": 127, "reads": 63},
    {"width": 128, "values": 130, "tokens": 64, "reads": 129},
    {"width": 100, "values": 300, "tokens": 128, "reads": 257},
]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        pytest.param(size, dtype, id=f"D{size['width']}-V{size['values']}-{dtype}")
        for turn, size in enumerate(SIZES)
        for dtype in ("bf16", ("fp16", "fp32")[turn % 2])
    ],
)
def test_sizes(size: dict[str, int], dtype: str, device: torch.device) -> None:
    check(BASE.but(**size), DTYPES[dtype], device)


RULES = [
    BASE.but(channels=True, heads=3),
    BASE.but(normalize=False, gamma_grad="full"),
    BASE.but(gamma_grad="full"),
    BASE.but(denominator=False, order=2),
    BASE.but(correction=False, order=4),
    BASE.but(order=1, width=16),
    BASE.but(tokens=1, mode="sequential", first=False),
    BASE.but(tokens=0, first=False),
    BASE.but(reads=None),
    BASE.but(reads=0, batch=1),
]


@pytest.mark.parametrize("case", [BASE.but(tokens=1), BASE.but(tokens=0)], ids=lambda c: c.name)
def test_empty_memories(case: Case, device: torch.device) -> None:
    """Reads divide by `eps` alone there, which gradients of 16 bits do not outlive."""
    check(case, FP32, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
def test_rules(case: Case, dtype: str, device: torch.device) -> None:
    if case.order == 1:
        case = without_empty(case, DTYPES[dtype])
    check(case, DTYPES[dtype], device)


IN_TURN = [
    BASE.but(mode="sequential"),
    BASE.but(mode="sequential", channels=True, heads=3, values=100, tokens=33),
    BASE.but(mode="sequential", normalize=False, width=21, values=17),
    BASE.but(mode="sequential", denominator=False, order=2, tokens=128, reads=None),
    BASE.but(mode="sequential", correction=False, order=4, width=128, values=61),
    BASE.but(mode="sequential", tokens=128, values=300, width=8, first=False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", IN_TURN, ids=lambda case: case.name)
def test_tokens_one_after_another(case: Case, dtype: str, device: torch.device) -> None:
    check(case, DTYPES[dtype], device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_one_number(dtype: str, device: torch.device) -> None:
    """The forward: the length of a key has no gradient, and one of these has nothing else."""
    case = BASE.but(width=1, values=1, tokens=1, reads=1)
    oracle.check_op(
        OP, reference.delta_rewrite, case.arguments, DTYPES[dtype], device, seeds=(0, 1),
        grads=False,
    )  # fmt: skip


# Each config serves one of these; M is what tells kernels of one config apart most.
SERVED = [
    BASE.but(batch=2, tokens=128, reads=150, values=300),
    BASE.but(batch=2, tokens=10, reads=300, values=768),
    BASE.but(batch=2, tokens=17, reads=300, values=768),
    BASE.but(batch=2, tokens=0, reads=300, values=300),
    BASE.but(batch=2, tokens=40, width=30, values=61, reads=70),
    BASE.but(batch=2, tokens=9, width=9, values=20, reads=17),
    BASE.but(batch=2, tokens=70, width=128, values=130, reads=40),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_config(case: Case, dtype: str, device: torch.device) -> None:
    """Of all kernels; one truth serves all of them."""
    case = without_empty(case, DTYPES[dtype])
    truth = oracle.Oracle(
        reference.delta_rewrite, case.arguments, DTYPES[dtype], device, seeds=(0, 1)
    )  # fmt: skip
    shape = shape_of(case, DTYPES[dtype], device)
    with oracle.collected() as failures:
        for space in backend.spaces(shape).values():
            for config in contracts.every_config(space, shape):
                found = truth.measure(OP).report()
                failures += [f"{space.name} {config.name} {line}" for line in found]


def test_no_config_is_left_out(device: torch.device) -> None:
    here = Device.of(device)
    left = {(space.name, config) for space in tuning.SPACES for config in space.configs}
    for case in SERVED:
        for dtype in DTYPES.values():
            for space in tuning.SPACES:
                key = space.bucket(shape_of(case, dtype, device))
                left -= {(space.name, config) for config in space.fitting(key, here)}
    if here.arch == "sm_90":  # elsewhere some do not fit
        assert not left, {config.name for _, config in left}


@pytest.mark.parametrize("dtype", DTYPES)
def test_drift_over_100_segments(dtype: str, device: torch.device) -> None:
    """Memory and reads: as near to float64 as plain torch is, which eager computes in fp32."""
    case = Case(batch=2, heads=1, width=64, values=96, tokens=10, reads=20)
    memories: dict[str, Any] = {}
    reads: dict[str, torch.Tensor] = {}
    for name in ("exact", "triton", "plain"):
        acc = torch.float64 if name == "exact" else FP32
        memory = [
            torch.zeros(2, 1, case.wide, 96, dtype=acc, device=device),
            torch.zeros(2, 1, case.wide, dtype=acc, device=device),
        ]
        for s in range(100):
            given = case.arguments(s, DTYPES[dtype], device)
            if name == "exact":
                given = {n: x.double() if oracle.is_floating(x) else x for n, x in given.items()}
            given |= dict(zip(MEMORY, memory, strict=True))
            call = OP if name == "triton" else reference.delta_rewrite
            y, *memory = call(**given)
        memories[name], reads[name] = memory, y
    for place, what in enumerate(MEMORY):
        wanted = memories["exact"][place]
        gaps = [
            float((memories[name][place].double() - wanted).norm() / wanted.norm())
            for name in ("triton", "plain")
        ]
        assert gaps[0] <= max(1.5 * gaps[1], 1e-6 if dtype == "fp32" else 1e-3), (what, gaps)


@pytest.mark.parametrize("normalize", [True, False])
def test_keys_without_a_feature(normalize: bool, device: torch.device) -> None:
    """Of gradients plain torch in fp16 leaves infinities: a query divides by `eps` alone."""

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = BASE.but(normalize=normalize).arguments(seed, dtype, device)
        for name in ("k", "q"):
            given[name][:, 2] = 0
            given[name][:, 4] = 0
            given[name][:, 4, :, 0] = 2.0
        return given

    for dtype in DTYPES.values():
        oracle.check_op(
            OP, reference.delta_rewrite, arguments, dtype, device, seeds=(0,), grads=dtype != FP16
        )


@pytest.mark.parametrize("scale", [1e-4, 1e-30, 1e15])
def test_keys_of_any_length(scale: float, device: torch.device) -> None:
    given = BASE.but(first=False).arguments(0, FP32, device)
    scaled = given | {name: given[name] * scale for name in ("k", "q")}
    for got, wanted in zip(OP(**scaled), OP(**given), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# ---- echo and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_as_auto_will_run_them(dtype: str, device: torch.device) -> None:
    case = BASE.but(heads=2)
    given = case.arguments(0, DTYPES[dtype], device)
    assert ops.explain(ops.delta_rewrite, **given).backend == "triton"
    oracle.check_op(
        ops.delta_rewrite, reference.delta_rewrite, case.arguments, DTYPES[dtype], device
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_echo_recovers_the_state(dtype: str, device: torch.device) -> None:
    """Through 32 segments written by these kernels: what is taken off is what was added."""
    case = Case(batch=1, heads=1, width=64, values=96, tokens=10, reads=None)
    state = torch.zeros(1, 1, case.wide, 96, device=device)
    z = torch.zeros(1, 1, case.wide, device=device)
    echo = torch.zeros((), device=device, requires_grad=True).expand(state.shape)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for s in range(32):
        given = contracts.leaves(case.arguments(s, DTYPES[dtype], device))
        held = echo * 1.0
        held.register_hook(partial(lambda before, x: found.append((x, before)), state.detach()))
        first = torch.tensor([s == 0], device=device)
        given |= {"state": state, "normalizer": z}
        _, state, z, echo = ops.delta_rewrite(**given, first=first, echo=held)
    ((echo * state.detach()).sum() + state.sum()).backward()
    assert len(found) == 32
    for wanted, got in found:
        assert (got - wanted).abs().max() <= 1e-5 * state.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_echo_gives_the_same_gradients(dtype: str, device: torch.device) -> None:
    """As a call without one does, of two chained."""
    case = Case(batch=2, heads=2, width=64, values=96, tokens=10, reads=70)
    given = [contracts.leaves(case.arguments(s, DTYPES[dtype], device)) for s in range(2)]
    found = []
    for echo in (True, False):
        state, z = (given[0][name] for name in MEMORY)
        held = torch.zeros((), device=device, requires_grad=True).expand(state.shape)
        loss = torch.zeros((), device=device)
        for x in given:
            rest = {n: value for n, value in x.items() if n not in MEMORY}
            more = {"echo": held} if echo else {}
            y, state, z, *after = OP(**rest, state=state, normalizer=z, **more)
            held = after[0] if echo else held
            loss = loss + y.float().square().mean()
        loss = loss + state.sin().mean() + z.square().mean()
        loss = loss + (held * state.detach()).sum() * echo
        leaves = [x[n] for x in given for n in (*WRITTEN, "q")]
        leaves += [given[0][name] for name in MEMORY]
        found.append(torch.autograd.grad(loss, leaves))
    for got, wanted in zip(*found, strict=True):
        gap = (got.double() - wanted.double()).norm() / wanted.double().norm()
        assert gap <= (1e-5 if dtype == "fp32" else 1e-2)


def test_repeated_backwards_have_equal_bits(device: torch.device) -> None:
    given = BASE.but(tokens=128, values=600, reads=300).arguments(0, BF16, device)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(OP, given).values()), 20)


# ---- pools --------------------------------------------------------------------------------------


def pooled(case: Case, dtype: torch.dtype, slots: list[int], device: torch.device) -> Any:
    given = case.but(batch=len(slots), first=False).arguments(0, dtype, device)
    del given["gamma_grad"]
    for name in MEMORY:
        x = given.pop(name)
        pool = torch.rand(9, *x.shape[1:], generator=inputs.generator(1, device), device=device)
        given[f"{name}_pool"] = inputs.embed(pool)
    return given | {"slots": torch.tensor(slots, device=device)}


@pytest.mark.parametrize("tokens", [10, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_is_the_functional_call(dtype: str, tokens: int, device: torch.device) -> None:
    """Bits of rows and slots, those that nobody names; NaN in skipped rows; every config."""
    case = BASE.but(values=300, tokens=tokens)
    shape = shape_of(case, DTYPES[dtype], device)
    space = spaces.SPACE_WHOLE if spaces.is_whole(shape) else spaces.SPACE_WRITE
    for config in contracts.every_config(space, shape):
        given = pooled(case, DTYPES[dtype], [4, -1, 0, 8, -1], device)
        first = torch.tensor([False, True, True, False, False], device=device)
        live = given["slots"] >= 0
        for name in (*WRITTEN, "q"):
            given[name][~live] = torch.nan
        pools = {name: given[f"{name}_pool"].clone() for name in MEMORY}
        rows = given["slots"][live]
        skipped = ("slots", "state_pool", "normalizer_pool")
        plain = {
            n: x[live] if isinstance(x, torch.Tensor) else x
            for n, x in given.items()
            if n not in skipped
        }
        with alloc.poison():
            y = IN_PLACE(**given, first=first)
            wanted = OP(**plain, **{n: x[rows] for n, x in pools.items()}, first=first[live])
        assert not y[~live].any()
        assert torch.equal(y[live], wanted[0]), config.name
        for name, after in zip(MEMORY, wanted[1:], strict=True):
            pools[name][rows] = after
            assert torch.equal(given[f"{name}_pool"], pools[name]), config.name


@pytest.mark.parametrize("view", ["spaced", "misaligned", "contiguous"])
def test_views(view: str, device: torch.device) -> None:
    change = {
        "spaced": inputs.spaced,
        "misaligned": partial(inputs.embed, pad=1, offset=1),
        "contiguous": torch.Tensor.contiguous,
    }[view]
    given = pooled(BASE, BF16, [4, 0, 2], device)
    other = {n: x.clone() if oracle.is_floating(x) else x for n, x in given.items()}
    names = (*WRITTEN, "q", "state_pool", "normalizer_pool")
    other |= {name: change(other[name]) for name in names}
    found = [{"y": IN_PLACE(**x)} | {n: x[n] for n in names[-2:]} for x in (other, given)]
    for name, x in found[1].items():
        torch.testing.assert_close(found[0][name], x, rtol=2e-2, atol=2e-3, msg=name)


def test_repeated_runs_have_equal_bits(device: torch.device) -> None:
    """While products of another stream disturb the timing."""
    given = pooled(BASE.but(tokens=128, values=600), BF16, list(range(9)), device)
    pools = {n: given[n].clone() for n in ("state_pool", "normalizer_pool")}
    stream = torch.cuda.Stream(device)
    x = torch.randn(2048, 2048, device=device, dtype=BF16)
    product = torch.empty_like(x)
    stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> Any:
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.mm(x, x, out=product)
        mine = {n: pool.clone() for n, pool in pools.items()}
        return {"y": IN_PLACE(**given | mine)} | mine

    first = run()
    for i in range(1, 50):
        oracle.assert_bit_equal(run(), first, f"run {i}")
    torch.cuda.synchronize(device)


def test_rows_in_another_order_give_equal_bits(device: torch.device) -> None:
    """And more programs than 65,535."""
    case = Case(batch=3000, heads=2, width=8, values=200, tokens=3, reads=20, repeated=False)
    given = case.arguments(0, BF16, device)
    order = torch.randperm(case.batch, device=device)
    tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    least = min(spaces.SPACE_WRITE.configs, key=lambda c: (c["C"], c["K"]))
    with use_config(spaces.SPACE_WRITE, least):
        first = OP(**given)
        second = OP(**given | {n: x[order] for n, x in tensors.items()})
    for x, y in zip(first, second, strict=True):
        assert torch.equal(y, x[order])


def test_offsets_past_two_to_the_31(device: torch.device) -> None:
    """A pool of 10 GB: the last slot's bits are those that it has alone."""
    case = Case(batch=1, heads=1, width=64, values=2048, tokens=16, reads=40)
    given = case.arguments(0, BF16, device)
    del given["gamma_grad"]
    state, z = given.pop("state"), given.pop("normalizer")
    slots = 3200
    pool = torch.empty(slots, 1, case.wide, 2048, device=device)
    pool[-1] = state[0]
    normalizers = torch.empty(slots, 1, case.wide, device=device)
    normalizers[-1] = z[0]
    assert pool.numel() > 2**31
    last = torch.tensor([slots - 1], device=device)
    y = IN_PLACE(**given, state_pool=pool, normalizer_pool=normalizers, slots=last)
    alone, after, _ = OP(**given, state=state.contiguous(), normalizer=z.contiguous())
    assert torch.equal(y, alone)
    assert torch.equal(pool[-1:], after)


# ---- as torch sees it ---------------------------------------------------------------------------


def test_a_cuda_graph_walks_a_diagonal(device: torch.device) -> None:
    """One captured call, replayed for segments of three layers that start one after another."""
    case = BASE.but(batch=3, tokens=16)
    given = pooled(case, BF16, [4, 0, 2], device)
    other = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    first = torch.ones(3, dtype=torch.bool, device=device)

    def step() -> tuple[torch.Tensor, ...]:
        return (IN_PLACE(**given, first=first),)

    slots = given["slots"].clone()
    kept = {n: given[n].clone() for n in ("state_pool", "normalizer_pool")}
    graph, (read,) = contracts.captured(step, device)
    for name, x in kept.items():
        given[name].copy_(x)  # warming up has written
    layer = torch.arange(3, device=device)
    for t in range(7):
        fresh = case.arguments(t + 1, BF16, device)
        for name in (*WRITTEN, "q"):
            given[name].copy_(fresh[name])
            other[name] = fresh[name]
        segment = t - layer
        given["slots"].copy_(torch.where((segment >= 0) & (segment < 5), slots, -1))
        first.copy_(segment == 0)
        graph.replay()
        wanted = IN_PLACE(**other | {"slots": given["slots"].clone()}, first=first)
        assert torch.equal(read, wanted)
        for name in kept:
            assert torch.equal(given[name], other[name])


def test_a_cold_call_refuses_to_be_captured(device: torch.device) -> None:
    case = BASE.but(width=37, values=77, tokens=3)
    given = pooled(case, FP16, [0], device)
    graph = torch.cuda.CUDAGraph()
    cold = pytest.raises(RuntimeError, match="is cold: call it once before capture")
    with cold, torch.cuda.graph(graph):
        IN_PLACE(**given)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode: str, device: torch.device) -> None:
    given = BASE.but(first=False).arguments(0, BF16, device)
    compiled: Any = torch.compile(lambda **x: OP(**x), fullgraph=True, mode=mode)
    wanted = OP(**given)
    for _ in range(3):
        got = compiled(**given)
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)
    torch._dynamo.reset()


def test_auto_takes_these_kernels(device: torch.device) -> None:
    given = BASE.arguments(0, BF16, device)
    assert ops.explain(ops.delta_rewrite, **given).backend == "triton"
