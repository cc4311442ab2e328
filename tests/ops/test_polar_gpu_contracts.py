"""Polar attention's compiled Triton kernels as torch sees them: autograd, compile, graphs, streams.

Numbers are tested in `test_polar_gpu.py`. Run with `pytest -n 8 -m gpu`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastweights import ops
from fastweights.ops.polar_attention import triton as backend
from helpers import contracts, oracle, polar
from helpers.polar import Case

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16

CONTRACTS = [
    Case(tq=200, hq=4, hk=2, d=64),
    Case(tq=200, hq=4, hk=2, d=64, packed=(23, 0, 130)),
    Case(tq=200, hq=4, hk=2, d=64, polar=False),
]


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)
def test_contracts(case: Case, device: torch.device) -> None:
    arguments = case.arguments(0, BF16, device)
    with contracts.deterministic():
        contracts.check_backward_twice(case.on_triton, arguments)
        contracts.check_grad_out_untouched(case.on_triton, arguments)
        contracts.check_expanded_grad_out(case.on_triton, arguments)


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
        direction, count, _ = case.on_triton(**arguments)
        outputs, grads = (direction, count), (upstream, upstream[..., 0])
        return (direction, count, *torch.autograd.grad(outputs, tensors, grads))

    with contracts.deterministic():
        graph, captured = contracts.captured(step, device)
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
        case.on_triton(**arguments)
    oracle.check_op(case.on_triton, case.reference, case.arguments, torch.float16, device)


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
    outputs = list(case.on_triton(**arguments)[:2])
    upstream = [torch.randn_like(x) for x in outputs]
    torch.autograd.grad(outputs, tensors, upstream)  # compiles
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.autograd.grad(list(case.on_triton(**again)[:2]), tensors, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.isfinite().all() for x in found)


def test_launches_on_the_tensors_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, {torch.cuda.device_count()} is here")
    case = Case(tq=100, hq=2, d=64)
    with torch.cuda.device(0):
        oracle.check_op(
            case.on_triton, case.reference, case.arguments, BF16, torch.device("cuda", 1)
        )
        assert torch.cuda.current_device() == 0


def test_every_launch_enters_the_tensors_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on one GPU: the guard is entered once for each kernel."""
    entered = []
    guard = torch.cuda.device

    class Recorded(guard):  # torch itself asks isinstance(x, torch.cuda.device)
        def __init__(self, index: Any) -> None:
            entered.append(index)
            super().__init__(index)

    monkeypatch.setattr(torch.cuda, "device", Recorded)
    case = Case(tq=100, hq=2, d=64)
    contracts.forward_backward(case.on_triton, case.arguments(0, BF16, device))
    ours = [index for index in entered if index == device]
    assert len(ours) >= 5, f"guards entered: {entered}"  # fwd, prepare, dkdv, dq, parameters


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_autocast(polar_mode: bool, device: torch.device) -> None:
    """fp32 q and k from a norm, bf16 v, fp32 parameters: runs in bf16, gradients keep dtypes."""
    case = Case(tq=100, hq=4, hk=2, d=64, polar=polar_mode)
    arguments = contracts.leaves(case.arguments(0, torch.float32, device))
    arguments["v"] = arguments["v"].detach().to(BF16).requires_grad_()
    with torch.autocast("cuda", dtype=BF16):
        first, second = case.on_triton(**arguments)[:2]
    assert first.dtype == BF16
    (first.float().sum() + second.float().sum()).backward()
    for name, x in arguments.items():
        assert x.grad.dtype == x.dtype, name
        assert x.grad.isfinite().all(), name
    cast = {n: x.detach().to(BF16) if n in "qkv" else x.detach() for n, x in arguments.items()}
    expected = case.on_triton(**cast)
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
    for dtype in (BF16, torch.float16, torch.float32):
        arguments = case.arguments(0, dtype, device) | {"scale": 4.0}
        for name, x in contracts.forward_backward(case.on_triton, arguments).items():
            assert x.isfinite().all(), (name, dtype)
        exact = {n: x.double() if oracle.is_floating(x) else x for n, x in arguments.items()}
        direction = case.on_triton(**arguments)[0]
        expected = case.reference(**exact)[0]
        apart = (direction.double() - expected).norm() / expected.norm()
        assert apart <= (5e-2 if dtype == BF16 else 2e-2), (float(apart), dtype)
        assert math.isclose(float(direction.double().norm(dim=-1).max()), 1.0, rel_tol=1e-2)
