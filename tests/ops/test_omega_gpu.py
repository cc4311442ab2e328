"""The Omega rule's compiled Triton kernels on a GPU, against float64 and as torch sees them.

Run with `pytest -n 14 -m gpu`. Compiling is most of the time, so a test loops over what shares a
truth or kernels.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config, verify
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc, triton_runtime
from fastweights.ops.omega import triton as backend
from helpers import contracts, inputs, oracle
from helpers.omega import Case, shape_of, streams

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
OP = partial(ops.omega_memory, backend="triton")
WITH_STATE = partial(OP, return_state=True)
LITERAL = partial(reference.omega_memory, return_state=True)
SPACES = {"fwd": backend.SPACE_FWD, "bwd": backend.SPACE_BWD}
# Three chunks of 64 and a ragged one, of more heads than one program of the gates takes.
D64 = Case(batch=1, tokens=197, heads=9, width=64, values=64, window=4, chunk_size=64)
D128 = D64.but(width=128, values=128)
FEW = D64.but(heads=3, tokens=150)


def check(case: Case, dtype: torch.dtype, device: torch.device, seeds: Any = (0, 1, 2)) -> None:
    """y, the state and the tail, and gradients from all of them, against the loops."""
    oracle.check_op(
        WITH_STATE, LITERAL, case.arguments, dtype, device, seeds=seeds, label=case.name
    )


def fitting(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> list[Config]:
    key = space.bucket(shape_of(case.arguments(0, dtype, device)))
    return space.fitting(key, Device.of(device))


# Bytes of shared memory from which on every case here has a config.
ROOMY = {BF16: 160 * 1024, FP16: 160 * 1024, FP32: 200 * 1024}


def skip_unless_served(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """On a GPU of little shared memory a case may have no config; elsewhere it must have one."""
    if not fitting(space, case, dtype, device):
        roomy = Device.of(device).shared_bytes >= ROOMY[dtype]
        assert not roomy, f"no config of {space.pass_} is for {case.name}"
        pytest.skip(f"no config of {space.pass_} fits {case.name} here")


# ---- against the loops --------------------------------------------------------------------------

NARROW = D64.but(width=16, values=16)
SERVED = [
    D64.but(width=wide.width, values=wide.width, chunk_size=chunk_size, momentum=momentum)
    for wide in (D64, D128, NARROW, NARROW.but(width=32))
    for chunk_size in (64, 16)
    for momentum in (False, True)
]
# So long, and of so few heads, that it may be cut into as many groups as there are configs.
SERVED.append(D64.but(heads=1, tokens=32 * 64 + 5, momentum=False))


@pytest.mark.parametrize("case", SERVED, ids=lambda case: f"d{case.width}-{case.name}")
@pytest.mark.parametrize("pass_", SPACES)
def test_every_config(pass_: str, case: Case, device: torch.device) -> None:
    """In bf16; one truth serves all of them."""
    space = SPACES[pass_]
    skip_unless_served(space, case, BF16, device)
    backward = pass_ == "bwd"
    truth = oracle.Oracle(LITERAL, case.arguments, BF16, device, grads=backward)
    shape = shape_of(case.arguments(0, BF16, device))
    with oracle.collected() as failures:
        for config in contracts.every_config(space, shape):
            report = truth.measure(WITH_STATE).report()
            failures += [f"{config.name} {line}" for line in report]


def test_no_config_is_left_out(device: torch.device) -> None:
    """By the cases above; those that fit none of them here have to elsewhere."""
    for space in SPACES.values():
        left = set(space.configs)
        for case in SERVED:
            left -= set(fitting(space, case, BF16, device))
        with assume_device(target_device("sm_90")):
            for case in SERVED:
                left -= set(fitting(space, case, BF16, device))
        assert not left, {config.name for config in left}


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_types(dtype: str, momentum: bool, device: torch.device) -> None:
    check(FEW.but(momentum=momentum), DTYPES[dtype], device)


RULES = [
    FEW.but(decay=False, momentum=False, gates=False, window=1),
    FEW.but(decay=False, carried=True, batch=2),
    FEW.but(gates=False, momentum=False, carried=True, batch=3, window=5),
    FEW.but(inner_loss="dot", carried=True),
    FEW.but(inner_loss="dot", momentum=False, decay=False),
    FEW.but(read_before=True, momentum=False, carried=True),
    FEW.but(read_before=True),
    FEW.but(degree=2, carried=True, momentum=False),
    FEW.but(packed=(0, 70, 70, 134, 140), carried=True),
    FEW.but(packed=(0, 1, 64, 65, 150), momentum=False),
    FEW.but(packed=(0, 50, 120), degree=2, momentum=False),
    FEW.but(width=48, values=80),
    FEW.but(width=80, values=48, momentum=False, carried=True),
    FEW.but(width=100, values=20, momentum=False),
    FEW.but(values=256, momentum=False),
    FEW.but(width=6, values=5),
    FEW.but(chunk_size=37),
    FEW.but(chunk_size=37, window=17, carried=True, momentum=False),
    FEW.but(window=5, momentum=False),
    FEW.but(window=9, momentum=False),
    FEW.but(window=17),
    FEW.but(window=18, momentum=False, carried=True),
    FEW.but(window=65, momentum=False),
    FEW.but(chunk_size=128, tokens=300, momentum=False),
    FEW.but(chunk_size=1, window=2, tokens=40, momentum=False),
    FEW.but(chunk_size=16, momentum=False, carried=True, batch=2, window=5),
    FEW.but(chunk_size=16, momentum=False, window=1, gates=False, decay=False),
    FEW.but(chunk_size=16, momentum=False, read_before=True, packed=(0, 70, 70, 134, 140)),
    FEW.but(chunk_size=32, momentum=False, window=17, carried=True, read_before=True, batch=2),
    FEW.but(chunk_size=32, momentum=False, packed=(0, 1, 64, 65, 150), carried=True),
    FEW.but(chunk_size=32, momentum=False, width=128, values=80),
    FEW.but(chunk_size=8, momentum=False, packed=(0, 50, 120), carried=True),
    FEW.but(chunk_size=8, momentum=False, window=1, width=80, values=128),
    FEW.but(chunk_size=8, inner_loss="dot", carried=True, window=3),
    FEW.but(tokens=11),
    FEW.but(tokens=1, carried=True),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, (FP16, BF16, BF16)[turn % 3], id=f"v{case.values}-{case.name}")
        for turn, case in enumerate(RULES)
    ],
)
def test_rules(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """By the default configs, and by others where those are for Hopper; padding behind packed
    sequences is NaN.
    """
    check(case, dtype, device, seeds=(0, 1))
    with contextlib.ExitStack() as stack:
        for space in SPACES.values():
            configs = fitting(space, case, dtype, device)
            others = [config for config in configs if not config.get("HOPPER")]
            if others == configs:
                return
            stack.enter_context(use_config(space, others[-1]))
        check(case, dtype, device, seeds=(0,))


FEW_HEADS = FEW.but(width=128, values=128, momentum=False, tokens=1100)


@pytest.mark.parametrize(
    "case",
    [
        FEW_HEADS.but(carried=True, batch=2, heads=2),
        FEW_HEADS.but(inner_loss="dot", window=1, gates=False),
        FEW_HEADS.but(read_before=True, window=17, values=80),
        FEW_HEADS.but(width=48, values=64, decay=False, carried=True),
        FEW_HEADS.but(width=64, values=24, tokens=1025, heads=8, gates=False),
    ],
    ids=lambda case: f"d{case.width}-{case.name}",
)
def test_rules_of_few_heads(case: Case, device: torch.device) -> None:
    """In groups, where a GPU has kernels for them."""
    truth = oracle.Oracle(LITERAL, case.arguments, BF16, device, seeds=(0,))
    tried = 0
    with oracle.collected() as failures:
        for space in SPACES.values():
            for config in fitting(space, case, BF16, device):
                if config.get("GROUPS"):
                    tried += 1
                    with use_config(space, config):
                        report = truth.measure(WITH_STATE).report()
                        failures += [f"{space.name} {config.name} {line}" for line in report]
    if tried == 0:  # walks side by side are Gluon's, for Hopper; where they exist, one must fit
        hopper = Device.of(device).capability == 90 and triton_runtime.has_gluon()
        assert not hopper, f"no config cuts {case.name} into groups"
        pytest.skip("groups are kernels for Hopper, in the Gluon of Triton 3.6 or newer")


@pytest.mark.parametrize(
    "case",
    [
        FEW.but(packed=(0, 70, 70, 134, 140), carried=True),
        FEW.but(chunk_size=37, window=17, momentum=False),
        FEW.but(width=128, values=128, momentum=False),
    ],
    ids=lambda case: f"d{case.width}-{case.name}",
)
def test_rules_in_fp32(case: Case, device: torch.device) -> None:
    """Where it has configs: the widest do not fit everywhere."""
    for space in SPACES.values():
        skip_unless_served(space, case, FP32, device)
    check(case, FP32, device, seeds=(0,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_views(dtype: str, device: torch.device) -> None:
    """Addresses and strides that are no multiples of 16 bytes, and the last axis strided."""
    for view in (partial(inputs.embed, pad=1, offset=1), inputs.spaced):

        def arguments(
            seed: int, dtype: torch.dtype, device: torch.device, view: Any = view
        ) -> dict[str, Any]:
            given = FEW.but(momentum=False).arguments(seed, dtype, device)
            return given | {name: view(given[name].contiguous()) for name in "qkv"}

        oracle.check_op(WITH_STATE, LITERAL, arguments, DTYPES[dtype], device, seeds=(0,))


def test_fp32_is_ieee_unless_tf32_is_asked_for(device: torch.device) -> None:
    truth = oracle.Oracle(LITERAL, FEW.but(momentum=False).arguments, FP32, device, seeds=(0,))
    truth.check(WITH_STATE, "highest")
    torch.set_float32_matmul_precision("high")
    try:
        loose = truth.measure(WITH_STATE).judge("out0")["frobenius"].error
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 1e-5 < loose < 1e-2, f"TF32 was asked for, error {loose:.1e}"


# ---- gates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1 - 1e-7, 9.36e-14])
@pytest.mark.parametrize("name", ["decay", "momentum"])
def test_extreme_gates(name: str, value: float, device: torch.device) -> None:
    """A product of decays never loses what it is made of, and 0 has a gradient."""

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = FEW.arguments(seed, dtype, device)
        given[name][:, ::3] = value
        return given

    for dtype in (BF16, FP32):
        oracle.check_op(WITH_STATE, LITERAL, arguments, dtype, device, seeds=(0,))


def test_a_negative_decay_gives_nan(device: torch.device) -> None:
    """From its token on its head is lost, and that head alone."""
    given = FEW.arguments(0, BF16, device)
    given["decay"][0, 70, 1] = -0.5
    with alloc.poison():
        y, left = WITH_STATE(**given)
    assert y[0, 70:, 1].isnan().all()
    assert left.state[0, 1].isnan().all()
    for head in (0, 2):
        assert y[0, :, head].isfinite().all()
        assert left.state[0, head].isfinite().all()


# ---- long calls ---------------------------------------------------------------------------------

TOKENS = 8192


@pytest.mark.parametrize("chunk_size", [64, 16, 8])
@pytest.mark.parametrize("stream", list(streams(2)))
def test_streams_that_make_the_plain_rule_diverge(
    stream: str, chunk_size: int, device: torch.device
) -> None:
    """Gates at their maximum for 8,192 tokens: results as near to float64 as plain torch's.

    Its gradients are no yardstick: it forms them in fp32. A hundredth is two or three roundings of
    operands in bf16. In short chunks steps are larger, and what a step is worth hangs on errors so
    small that the rounding of M is more than them in plain torch, too: there, no worse than that.
    """
    k, v = (x.to(device, BF16) for x in streams(TOKENS, 64)[stream])
    gate = torch.ones(1, TOKENS, 2, device=device)
    step = ops.omega_step_size(k, gate, chunk_size=chunk_size)
    given = {"q": k, "k": k, "v": v, "step": step, "window": 4, "chunk_size": chunk_size}
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    upstream: oracle.Tensors = {}

    def call(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, left = ops.omega_memory(**arguments, return_state=True)
        assert left is not None
        return y, left.state

    def draw(results: oracle.Tensors) -> oracle.Tensors:
        upstream.update(contracts.random_upstream(results))
        return upstream

    def same(results: oracle.Tensors) -> oracle.Tensors:
        return {name: x.to(results[name].dtype) for name, x in upstream.items()}

    with alloc.poison():
        results, gradients = oracle.run(call, given | {"backend": "triton"}, draw)
    plain, plain_slopes = oracle.run(call, given | {"backend": "eager"}, same)
    truth, slopes = oracle.run(call, exact, same)
    size = float(v.double().norm(dim=-1).square().mean().sqrt())
    assert results["out1"].norm(dim=(2, 3)).max() < 8 * size
    for name, x in results.items():
        verify.compare(x, truth[name], plain[name], name=name, dtype=BF16)
    for name, x in gradients.items():
        assert x.isfinite().all(), name
        distance, of_plain = (
            float((slope.double() - slopes[name]).norm() / slopes[name].norm())
            for slope in (x, plain_slopes[name])
        )
        most = 1e-2 if chunk_size == 64 else max(1e-2, of_plain)
        assert distance <= most, f"{name}: {distance:.1e} apart, plain torch {of_plain:.1e}"


def test_more_programs_than_65535(device: torch.device) -> None:
    """70,000 tokens of eight rows: a row's bits are those that it has alone, gradients too."""
    case = Case(batch=8, tokens=70_000, width=16, values=16, window=4, chunk_size=16)
    assert case.batch * case.heads * (case.tokens // case.chunk_size) > 65_535
    given = case.arguments(0, BF16, device)
    upstream = torch.randn(given["v"].shape, device=device).to(BF16)
    alone = {name: x[7:] if oracle.is_floating(x) else x for name, x in given.items()}
    results, gradients = oracle.run(OP, given, lambda _: {"out0": upstream})
    wanted, slopes = oracle.run(OP, alone, lambda _: {"out0": upstream[7:]})
    for got, row in ((results, wanted), (gradients, slopes)):
        oracle.assert_bit_equal({name: x[7:] for name, x in got.items()}, row, "row 7")
        assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize("case", [FEW, D128.but(momentum=False)], ids=["D64", "D128"])
def test_pieces_are_the_whole(case: Case, device: torch.device) -> None:
    """Cut at a chunk's end, a call hands its fp32 state and its tail to the next: equal bits."""
    given = case.but(tokens=300).arguments(0, BF16, device)
    whole, at_end = WITH_STATE(**given)
    carried: dict[str, Any] = {}
    for begin, end in ((0, 64), (64, 256), (256, 300)):
        piece = {
            name: x[:, begin:end] if isinstance(x, torch.Tensor) else x for name, x in given.items()
        }
        y, left = WITH_STATE(**piece, **carried)
        assert torch.equal(y, whole[:, begin:end]), begin
        carried = {"initial_state": left.state, "initial_momentum": left.momentum}
        carried |= {name: getattr(left, name) for name in ("tail_k", "tail_v", "tail_length")}
    oracle.assert_bit_equal(oracle.named(left), oracle.named(at_end))


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
def test_packed_sequences_are_separate_ones(momentum: bool, device: torch.device) -> None:
    """Bit for bit, gradients too."""
    given = FEW.but(momentum=momentum, tokens=260).arguments(0, BF16, device)
    tokens = [name for name, x in given.items() if isinstance(x, torch.Tensor)]
    for name in tokens:
        given[name][:, 250:] = float("nan")

    def compare(name: str, packed: torch.Tensor, alone: torch.Tensor) -> None:
        oracle.assert_bit_equal({name: packed}, {name: alone})

    contracts.check_packed(OP, given, tokens, (1, 64, 0, 150, 35), compare)


# ---- as torch sees it ---------------------------------------------------------------------------

CONTRACTS = [
    FEW.but(carried=True),
    FEW.but(momentum=False, packed=(0, 70, 70, 134)),
    D128.but(heads=2, momentum=False),
]
by_name = pytest.mark.parametrize(
    "case", CONTRACTS, ids=[f"d{case.width}-{case.name}" for case in CONTRACTS]
)


@by_name
def test_contracts(case: Case, device: torch.device) -> None:
    arguments = case.arguments(0, BF16, device)
    contracts.check_backward_twice(OP, arguments)
    contracts.check_grad_out_untouched(OP, arguments)
    contracts.check_expanded_grad_out(OP, arguments)


@by_name
def test_repeated_runs_have_equal_bits(case: Case, device: torch.device) -> None:
    """While matrix products of another stream disturb the timing."""
    arguments = case.arguments(0, BF16, device)
    stream = torch.cuda.Stream(device)
    x = torch.randn(2048, 2048, device=device, dtype=BF16)
    y = torch.empty_like(x)
    stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> Any:
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.mm(x, x, out=y)
        return tuple(contracts.forward_backward(OP, arguments).values())

    contracts.check_repeatable(run, 50)
    torch.cuda.synchronize(device)


@by_name
def test_fullgraph(case: Case, device: torch.device) -> None:
    """Between other operations, as in a model, compiled by inductor."""

    def block(**arguments: Any) -> tuple[torch.Tensor, ...]:
        arguments["q"] = arguments["q"] * 2.0
        y, left = WITH_STATE(**arguments)
        assert left is not None
        return y.flatten(2) + 1.0, left.state

    contracts.check_fullgraph(block, case.arguments(0, BF16, device))


@by_name
def test_cuda_graph_replays(case: Case, device: torch.device) -> None:
    arguments = contracts.leaves(case.arguments(0, BF16, device))
    tensors = [x for x in arguments.values() if oracle.is_floating(x)]
    upstream = torch.randn(arguments["v"].shape, device=device).to(BF16)

    def step() -> tuple[torch.Tensor, ...]:
        y, left = WITH_STATE(**arguments)
        outputs = (y, left.state)
        grads = torch.autograd.grad(
            outputs, tensors, (upstream, left.state.detach()), materialize_grads=True
        )
        return (*outputs, *grads)

    graph, captured = contracts.captured(step, device)
    for seed in range(5):
        fresh = case.arguments(seed, BF16, device)
        with torch.no_grad():
            for name, x in arguments.items():
                if isinstance(x, torch.Tensor):
                    x.copy_(fresh[name])
        graph.replay()
        got = {str(i): x.detach().clone() for i, x in enumerate(captured)}
        expected = {str(i): x.detach() for i, x in enumerate(step())}
        oracle.assert_bit_equal(got, expected, f"replay {seed}")


def test_default_features_in_a_cuda_graph(device: torch.device) -> None:
    """Their coefficients are numbers that no replay copies from the host."""
    given = FEW.but(momentum=False).arguments(0, BF16, device) | {"feature_map": "elementwise"}
    upstream = torch.randn(given["v"].shape, device=device).to(BF16)
    given = contracts.leaves(given)
    leaves = [given["q"], given["k"]]

    def step() -> tuple[torch.Tensor, ...]:
        y = OP(**given)[0]
        return (y, *torch.autograd.grad(y, leaves, upstream))

    graph, captured = contracts.captured(step, device)
    graph.replay()
    got = {str(i): x.detach().clone() for i, x in enumerate(captured)}
    oracle.assert_bit_equal(got, {str(i): x.detach() for i, x in enumerate(step())})


def test_first_call_inside_capture_says_warm_up(device: torch.device) -> None:
    """And leaves the stream usable."""
    case = FEW.but(width=24, values=40, window=3, read_before=True)  # compiled by no other test
    arguments = case.arguments(0, FP16, device)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold: call it once before capture"),
        torch.cuda.graph(graph),
    ):
        OP(**arguments)
    check(case, FP16, device, seeds=(0,))


@by_name
def test_no_host_sync(case: Case, device: torch.device) -> None:
    arguments = contracts.leaves(case.arguments(0, BF16, device))
    tensors = [x for x in arguments.values() if oracle.is_floating(x)]
    outputs = [OP(**arguments)[0]]
    upstream = [torch.randn_like(x) for x in outputs]
    torch.autograd.grad(outputs, tensors, upstream)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, left = WITH_STATE(**arguments)
        found = torch.autograd.grad([y, left.state], tensors, [upstream[0], left.state.detach()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.isfinite().all() for x in (y, left.state, *found))


def test_opcheck(device: torch.device) -> None:
    samples = []
    for case in (FEW.but(carried=True), FEW.but(momentum=False, packed=(0, 70, 134))):
        given = {
            name: x.contiguous() if isinstance(x, torch.Tensor) else x
            for name, x in case.arguments(0, BF16, device).items()
        }
        leaves = contracts.leaves(given)
        names = (
            "q", "k", "v", "step", "decay", "window_gates", "momentum", "coefficients",
            "initial_state", "initial_momentum", "tail_k", "tail_v", "tail_length", "cu_seqlens",
        )  # fmt: skip
        rules = (case.window, case.chunk_size, "squared", "identity", False, "triton")
        samples.append((*(leaves.get(name) for name in names), *rules))
    contracts.check_opcheck(torch.ops.fastweights.omega_memory_fwd.default, samples)


def test_autocast(device: torch.device) -> None:
    """fp32 keys from a norm run in bf16; gates and states stay fp32; gradients keep dtypes."""
    arguments = contracts.leaves(FEW.arguments(0, FP32, device))
    with torch.autocast("cuda", dtype=BF16):
        y, left = WITH_STATE(**arguments)
    assert y.dtype == BF16
    assert left.state.dtype == FP32
    (y.float().sum() + left.state.sum()).backward()
    for name, x in arguments.items():
        if oracle.is_floating(x):
            assert x.grad.dtype == x.dtype, name
            assert x.grad.isfinite().all(), name
    cast = {
        name: x.detach().to(BF16) if name in "qkv" else x.detach()
        for name, x in arguments.items()
        if oracle.is_floating(x)
    }
    rules = {name: x for name, x in arguments.items() if not isinstance(x, torch.Tensor)}
    assert oracle.bit_equal(y.detach(), OP(**cast, **rules)[0])


def test_auto_picks_triton_on_the_gpu(device: torch.device) -> None:
    arguments = FEW.arguments(0, BF16, device)
    said = ops.explain(ops.omega_memory, **arguments)
    assert said.backend in ("triton", "cuda")
    assert set(said.configs) == {"fwd", "bwd"}
    wide = FEW.but(width=160, momentum=False).arguments(0, BF16, device)
    assert ops.explain(ops.omega_memory, **wide).backend == "eager"
