"""Muon: against torch.optim.Muon and the formula, its groups, its state, sharded parameters."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights import reference
from fastweights.graphs import Muon
from helpers import oracle

muon = sys.modules["fastweights.graphs.muon"]
ROOT = Path(__file__).resolve().parent.parent.parent
SHAPES = [(64, 64), (32, 96), (96, 32), (1, 24), (24, 1)]
MODES = [None, "original", "match_rms_adamw"]
# torch.optim.Muon rounds each of its 15 products to bf16, 8 bits of mantissa: half a unit each.
BF16_STEPS = 15 * 2.0**-9


def ratio(mode: str | None, shape: tuple[int, int]) -> float:
    if mode == "match_rms_adamw":
        return 0.2 * sqrt(max(shape))
    return sqrt(max(1, shape[0] / shape[1]))


def parameters(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Leaves with gradients, equal in every call."""
    source = torch.Generator().manual_seed(1)
    made = []
    for shape in shapes:
        p = torch.randn(shape, generator=source).to(dtype).requires_grad_()
        p.grad = torch.randn(shape, generator=source).to(dtype)
        made.append(p)
    return made


def values(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(i): p.detach().clone() for i, p in enumerate(tensors)}


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.double() - truth.double()).norm() / truth.double().norm())


# ---- one step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "heavy-ball"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_step_equals_torch(mode: str | None, nesterov: bool) -> None:
    """Three steps, each compared by what it adds; then the momentum, which is not rounded."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "nesterov": nesterov}
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    a = Muon(ours, adjust_lr_fn=mode, **options)
    b = torch.optim.Muon(theirs, adjust_lr_fn=mode, **options)
    for _ in range(3):
        before = values(ours)
        for p, q in zip(ours, theirs, strict=True):
            q.data.copy_(p.data)
        a.step()
        b.step()
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            step = q.detach() - before[str(i)]
            assert relative(p.detach() - before[str(i)], step) < BF16_STEPS, SHAPES[i]
            p.grad = q.grad = torch.randn(p.shape)
    for p, q in zip(ours, theirs, strict=True):
        assert oracle.bit_equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("coefficients", ["muon", "polar_express", [(1.5, -0.5, 0.0)]], ids=str)
def test_step_is_the_formula(coefficients: Any, mode: str | None) -> None:
    tensors = parameters(*SHAPES, dtype=torch.float64)
    before, grads = values(tensors), [p.grad.clone() for p in tensors]
    optimiser = Muon(
        tensors, lr=0.1, weight_decay=0.3, momentum=0.9, ns_coefficients=coefficients, ns_steps=6,
        adjust_lr_fn=mode,
    )  # fmt: skip
    optimiser.step()
    for i, p in enumerate(tensors):
        # The first momentum is 0.1·g, and Nesterov's 0.9·0.1·g + 0.1·g is a multiple of g too.
        direction = reference.newton_schulz(grads[i] * 0.19, coefficients=coefficients, steps=6)
        expected = before[str(i)] * (1 - 0.1 * 0.3) - 0.1 * ratio(mode, SHAPES[i]) * direction
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weight_decay_and_dtype(dtype: torch.dtype) -> None:
    (p,) = parameters((8, 8), dtype=dtype)
    p.grad.zero_()
    before = p.detach().clone()
    Muon([p], lr=0.5, weight_decay=0.25).step()
    assert p.dtype == dtype
    assert torch.equal(p.detach(), before * (1 - 0.5 * 0.25))  # a zero gradient moves nothing


# ---- stacks, groups, closures -------------------------------------------------------------------


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that `newton_schulz` is called with from now on."""
    seen: list[tuple[int, ...]] = []
    real = muon.newton_schulz

    def spy(x: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return real(x, **options)

    monkeypatch.setattr(muon, "newton_schulz", spy)
    return seen


def test_equal_shapes_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(6, 8), (8, 6), (6, 8), (5, 5), (6, 8)]
    stacked = parameters(*shapes)
    optimiser = Muon(stacked, lr=0.1)
    calls = watch(monkeypatch)
    optimiser.step()
    monkeypatch.undo()
    assert calls == [(3, 6, 8), (1, 8, 6), (1, 5, 5)]
    alone = parameters(*shapes)
    for p in alone:
        Muon([p], lr=0.1).step()
    oracle.assert_bit_equal(values(stacked), values(alone))


def test_no_gradient_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = parameters((6, 8), (6, 8))
    tensors[0].grad = None
    before = values(tensors)
    optimiser = Muon(tensors, lr=0.1)
    calls = watch(monkeypatch)
    optimiser.step()
    assert calls == [(1, 6, 8)]
    assert torch.equal(tensors[0].detach(), before["0"])
    assert not torch.equal(tensors[1].detach(), before["1"])
    assert tensors[0] not in optimiser.state


def test_groups_have_their_own_options() -> None:
    tensors = parameters((6, 8), (6, 8), (6, 8))
    alone = parameters((6, 8), (6, 8), (6, 8))
    own = {"lr": 0.5, "weight_decay": 0.0, "nesterov": False, "ns_coefficients": "polar_express"}
    optimiser = Muon([{"params": tensors[:1]}, {"params": tensors[1:2], **own}], lr=0.1)
    optimiser.add_param_group({"params": tensors[2:], "momentum": 0.0})
    optimiser.step()
    Muon(alone[:1], lr=0.1).step()
    Muon(alone[1:2], **own).step()
    Muon(alone[2:], lr=0.1, momentum=0.0).step()
    oracle.assert_bit_equal(values(tensors), values(alone))


def test_schedulers_change_the_learning_rate() -> None:
    (p,) = parameters((6, 8))
    optimiser = Muon([p], lr=0.4, weight_decay=0.0, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 1, gamma=0.25)
    sizes = []
    for _ in range(2):
        before = p.detach().clone()
        optimiser.step()
        scheduler.step()
        sizes.append(float((p.detach() - before).norm()))
    assert sizes[1] == pytest.approx(0.25 * sizes[0], rel=1e-5)


def test_closure_runs_with_gradients() -> None:
    (p,) = parameters((6, 8))
    optimiser = Muon([p], lr=0.1)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = float(p.detach().square().sum())
    assert float(optimiser.step(closure).detach()) == pytest.approx(before)
    assert float(p.detach().square().sum()) < before


def test_step_under_autocast_is_the_same_step() -> None:
    one, two = parameters((6, 8)), parameters((6, 8))
    Muon(one, lr=0.1).step()
    with torch.autocast("cpu", torch.bfloat16):
        Muon(two, lr=0.1).step()
    oracle.assert_bit_equal(values(two), values(one))


# ---- state --------------------------------------------------------------------------------------


def run(optimiser: Muon, tensors: list[torch.Tensor], steps: range) -> None:
    for i in steps:
        source = torch.Generator().manual_seed(i)
        for p in tensors:
            p.grad = torch.randn(p.shape, generator=source)
        optimiser.step()


def test_state_dict_round_trip() -> None:
    shapes = [(6, 8), (8, 6), (6, 8)]
    whole = parameters(*shapes)
    options: dict[str, Any] = {"lr": 0.1, "ns_coefficients": [(3.0, -3.2, 1.2)], "ns_steps": 3}
    run(Muon(whole, **options), whole, range(6))

    pieces = parameters(*shapes)
    first = Muon(pieces, **options)
    run(first, pieces, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = Muon(pieces)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.param_groups[0]["ns_steps"] == 3
    run(second, pieces, range(3, 6))
    oracle.assert_bit_equal(values(pieces), values(whole))


# ---- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["original", "match_rms_adamw"])
def test_trains_a_small_mlp(mode: str) -> None:
    """To a fifteenth of the loss in 100 steps; biases go to another optimiser."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = torch.sin(x @ torch.randn(8, 4))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
        torch.nn.Linear(64, 4),
    )  # fmt: skip
    matrices = [p for p in model.parameters() if p.ndim == 2]
    lr = 0.05 if mode == "original" else 0.03
    optimisers = [
        Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn=mode),
        torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.01),
    ]
    losses = []
    for _ in range(100):
        loss = torch.nn.functional.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        model.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
    assert losses[-1] < losses[0] / 15, losses[::10]


# ---- sharded parameters -------------------------------------------------------------------------

SHARDED = """
import sys
import torch
from torch import distributed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from fastweights.graphs import Muon

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.init_process_group(
    "gloo", store=distributed.FileStore(store, world), rank=rank, world_size=world
)
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
plain, sharded = [], []
for placement in (Shard(0), Shard(1), Replicate(), Shard(0)):
    weight, grad = torch.randn(2, 5, 9).unbind(0)  # five rows: uneven on two ranks
    p = weight.clone().requires_grad_()
    p.grad = grad.clone()
    plain.append(p)
    q = distribute_tensor(weight, mesh, [placement]).requires_grad_()
    q.grad = distribute_tensor(grad, mesh, [placement])
    sharded.append(q)
a, b = Muon(plain, lr=0.1), Muon(sharded, lr=0.1)
for _ in range(2):
    a.step()
    b.step()
for p, q in zip(plain, sharded):
    buffer = b.state[q]["momentum_buffer"]
    assert buffer.placements == q.placements == q.grad.placements
    assert torch.equal(q.detach().full_tensor(), p.detach())
    assert torch.equal(buffer.full_tensor(), a.state[p]["momentum_buffer"])
distributed.destroy_process_group()
print("equal")
"""


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_step_equals_the_whole_one(world: int, tmp_path: Path) -> None:
    # The torch that CI pins has gloo, so that this runs there; some builds of torch leave it out,
    # and then no process group exists that ranks without a GPU could form.
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch is built without gloo, over which the ranks of the test talk")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(world), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=120)
            assert out.strip() == "equal", error
    finally:
        for rank in ranks:
            rank.kill()


# ---- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lr": ({"lr": -0.1}, ValueError, "lr must be at least 0, got -0.1"),
    "decay": ({"weight_decay": -1.0}, ValueError, "weight_decay must be at least 0, got -1"),
    "momentum": ({"momentum": 1.0}, ValueError, "momentum must be in [0, 1), got 1.0"),
    "mode": ({"adjust_lr_fn": "adam"}, ValueError, "adjust_lr_fn must be one of original, match"),
    "steps": ({"ns_steps": 0}, ValueError, "steps must be at least 1, got 0"),
    "coefficients": ({"ns_coefficients": "moon"}, ValueError, "coefficients must be one of muon"),
    "eps": ({"eps": 0.0}, ValueError, "eps must be a finite number above 0"),
    "compute": ({"compute_dtype": torch.bfloat16}, TypeError, "compute_dtype is torch.bfloat16"),
    "backend": ({"backend": "cublas"}, ValueError, "backend must be one of auto, eager"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_are_refused_by_name(name: str) -> None:
    options, kind, message = REFUSED[name]
    Muon(parameters((2, 2)))
    with pytest.raises(kind) as failure:
        Muon(parameters((2, 2)), **options)
    assert message in str(failure.value)


def test_parameters_are_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"parameter 0\.bias has shape \(3,\); only 2-D"):
        Muon(model.named_parameters())
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 has shape \(3,\); only 2-D"):
        Muon(model.parameters())
    optimiser = Muon([model[0].weight])
    with pytest.raises(ValueError, match="parameter 0 of group 1 has shape"):
        optimiser.add_param_group({"params": [model[0].bias]})
    assert len(optimiser.param_groups) == 1
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 has dtype torch\.complex64"):
        Muon([torch.ones(2, 2, dtype=torch.complex64, requires_grad=True)])


def test_import_is_lazy() -> None:
    code = (
        "import sys, fastweights.graphs as graphs\n"
        "print('fastweights.graphs.muon' in sys.modules, graphs.Muon.__name__)\n"
        "graphs.Moon"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "Muon"]
    assert "has no attribute 'Moon'" in done.stderr
