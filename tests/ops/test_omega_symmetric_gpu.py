"""The Omega rule on symmetric features: compiled Triton kernels on a GPU, against float64.

Run with `pytest -n 14 -m gpu`. Compiling is most of the time, so a test loops over what shares a
truth or kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.ops import alloc, triton_runtime
from fastweights.ops.omega import triton as backend
from helpers import contracts, inputs, oracle
from helpers.omega import Case, shape_of

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OP = partial(ops.omega_memory, backend="triton")
WITH_STATE = partial(OP, return_state=True)
LITERAL = partial(reference.omega_memory, return_state=True)
SPACES = {"fwd": backend.SPACE_SYMMETRIC, "bwd": backend.SPACE_SYMMETRIC_BWD}
# Two chunks of 64 and a ragged one.
CASE = Case(
    batch=1, tokens=150, heads=3, width=64, values=64, window=4, chunk_size=64, momentum=False,
    degree=2, symmetric=True,
)  # fmt: skip
# Bytes of shared memory from which on every case here has a config.
ROOMY = 160 * 1024


def fitting(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> list[Config]:
    key = space.bucket(shape_of(case.arguments(0, dtype, device)))
    return space.fitting(key, Device.of(device))


def skip_unless_served(space: Space, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """On a GPU of little shared memory a case may have no config; elsewhere it must have one."""
    if not fitting(space, case, dtype, device):
        roomy = Device.of(device).shared_bytes >= ROOMY
        assert not roomy, f"no config of {space.pass_} is for {case.name}"
        pytest.skip(f"no config of {space.pass_} fits {case.name} here")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (CASE, BF16),
        (CASE.but(carried=True, batch=2, window=5), FP16),
        (CASE.but(decay=False, gates=False, window=1), BF16),
        (CASE.but(packed=(0, 70, 70, 134, 140), carried=True), BF16),
        (CASE.but(chunk_size=37, window=17, read_before=True, width=48, values=80), BF16),
        (CASE.but(chunk_size=16, width=16, inner_loss="dot", carried=True), BF16),
        (CASE.but(chunk_size=16, width=16, values=16), BF16),
        # Spans of two chunks: an odd number of them, sequences that begin anywhere, no memory read.
        (CASE.but(tokens=270, width=48, values=80, window=17, carried=True), BF16),
        (CASE.but(tokens=420, packed=(0, 150, 151, 285, 413), read_before=True), FP16),
        (CASE.but(tokens=200, inner_loss="dot", window=1, values=24), BF16),
        (CASE.but(degree=1, width=20, values=24), FP16),
        (CASE.but(width=33, values=20, tokens=70), FP32),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else str(x).removeprefix("torch."),
)
@pytest.mark.parametrize("pass_", SPACES)
def test_every_config(pass_: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """One truth serves all of them."""
    space, backward = SPACES[pass_], pass_ == "bwd"
    skip_unless_served(space, case, dtype, device)
    truth = oracle.Oracle(LITERAL, case.arguments, dtype, device, seeds=(0, 1), grads=backward)
    shape = shape_of(case.arguments(0, dtype, device))
    with oracle.collected() as failures:
        for config in contracts.every_config(space, shape):
            report = truth.measure(WITH_STATE).report()
            failures += [f"{config.name} {line}" for line in report]


def test_many_spans(device: torch.device) -> None:
    """Eleven chunks, more than a span has, of more heads than a program of the gates takes."""
    case = CASE.but(tokens=10 * 64 + 5, heads=9, carried=True, width=24, values=40)
    oracle.check_op(WITH_STATE, LITERAL, case.arguments, BF16, device, seeds=(0,))


def test_unaligned_views(device: torch.device) -> None:
    """Addresses and strides that are no multiples of 16 bytes, and the last axis strided."""
    for view in (partial(inputs.embed, pad=1, offset=1), inputs.spaced):

        def arguments(
            seed: int, dtype: torch.dtype, device: torch.device, view: Any = view
        ) -> dict[str, Any]:
            given = CASE.arguments(seed, dtype, device)
            return given | {name: view(given[name].contiguous()) for name in "qkv"}

        oracle.check_op(WITH_STATE, LITERAL, arguments, BF16, device, seeds=(0,))


def test_long_calls(device: torch.device) -> None:
    """8,192 tokens: results and gradients near to those of plain torch in float64."""
    given = CASE.but(tokens=8192, heads=2).arguments(0, BF16, device)
    exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
    upstream: oracle.Tensors = {}

    def draw(results: oracle.Tensors) -> oracle.Tensors:
        upstream.update(contracts.random_upstream(results))
        return upstream

    def same(results: oracle.Tensors) -> oracle.Tensors:
        return {name: x.to(results[name].dtype) for name, x in upstream.items()}

    with alloc.poison():
        found = oracle.run(OP, given, draw)
    truth = oracle.run(partial(ops.omega_memory, backend="eager"), exact, same)
    for got, wanted in zip(found, truth, strict=True):
        for name, x in got.items():
            distance = (x.double() - wanted[name]).norm() / wanted[name].norm()
            assert distance < 2e-2, f"{name}: {float(distance):.1e} apart"


@pytest.mark.parametrize("hopper", [False, True])
def test_pieces_are_the_whole(hopper: bool, device: torch.device) -> None:
    """Cut at a chunk's end, a call hands its fp32 state and its tail to the next: equal bits. Spans
    of two chunks begin elsewhere in a piece, so those of Hopper are as near as bf16 is.
    """
    case = CASE.but(tokens=300)
    given = case.arguments(0, BF16, device)
    configs = [c for c in fitting(SPACES["fwd"], case, BF16, device) if c.get("HOPPER") == hopper]
    if not configs:
        here = Device.of(device).capability == 90 and triton_runtime.has_gluon()
        assert hopper, "no config of all devices fits"
        assert not here, "no config is for Hopper"
        pytest.skip("the walk for Hopper is in the Gluon of Triton 3.6 or newer")
    with use_config(SPACES["fwd"], configs[0]):
        pieces(given, equal=not hopper)


def pieces(given: dict[str, Any], equal: bool) -> None:
    """Of 64, 192 and 44 tokens."""
    whole, at_end = WITH_STATE(**given)
    carried: dict[str, Any] = {}
    fixed = {"coefficients": given.pop("coefficients")}
    for begin, end in ((0, 64), (64, 256), (256, 300)):
        piece = {
            name: x[:, begin:end] if isinstance(x, torch.Tensor) else x for name, x in given.items()
        }
        y, left = WITH_STATE(**piece, **fixed, **carried)
        wanted = whole[:, begin:end]
        distance = (y.double() - wanted.double()).norm() / wanted.double().norm()
        assert torch.equal(y, wanted) if equal else distance < 2**-7, (begin, float(distance))
        carried = {"initial_state": left.state}
        carried |= {name: getattr(left, name) for name in ("tail_k", "tail_v", "tail_length")}
    if equal:
        oracle.assert_bit_equal(oracle.named(left), oracle.named(at_end))
    assert (left.state - at_end.state).norm() / at_end.state.norm() < 2**-7


# ---- as torch sees it ---------------------------------------------------------------------------

CONTRACTS = [CASE.but(carried=True), CASE.but(packed=(0, 70, 70, 134))]
by_name = pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)


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

    contracts.check_repeatable(run, 20)
    torch.cuda.synchronize(device)


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
    graph.replay()
    got = {str(i): x.detach().clone() for i, x in enumerate(captured)}
    expected = {str(i): x.detach() for i, x in enumerate(step())}
    oracle.assert_bit_equal(got, expected)


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


def test_memory_of_the_backward(device: torch.device) -> None:
    """Less than 2 GB above the inputs, where memories of all chunks would be 4.7 GB."""
    case = CASE.but(batch=4, tokens=8192, heads=16, decay=False, gates=False)
    given = contracts.leaves(case.arguments(0, BF16, device))
    tensors = [x for x in given.values() if oracle.is_floating(x)]
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y = OP(**given)[0]
    torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert torch.cuda.max_memory_allocated(device) - before < 2e9
