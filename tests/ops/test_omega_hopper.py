"""The Omega rule on Hopper: what its kernels are fed with and leave to others, on the CPU.

The Gluon kernels themselves run on a GPU alone, see `test_omega_gpu.py`; those around them are
Triton's, and run under the interpreter.
"""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.autotune.compile import target_device
from fastweights.autotune.space import Device
from helpers import inputs
from helpers.omega import Case, shape_of, tensors_of

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_omega_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

CPU = torch.device("cpu")
TILE = 64
CASE = Case(batch=1, tokens=83, heads=2, window=4, chunk_size=TILE, momentum=False)
CASES = [
    CASE,
    CASE.but(decay=False),
    CASE.but(gates=False, read_before=True),
    CASE.but(window=1, read_before=True),
    CASE.but(window=17),
    CASE.but(packed=(0, 5, 5, 71), tokens=75),
]


def chunks_of(case: Case) -> list[tuple[int, int, int]]:
    """(slot, first token, tokens) of each chunk."""
    ends = case.packed or (0, case.tokens)
    found = []
    for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
        for number, first in enumerate(range(begin, end, TILE)):
            slot = (begin // TILE + sequence if case.packed else 0) + number
            found.append((slot, first, min(TILE, end - first)))
    return found


def weights(
    given: dict[str, Tensor], first: int, size: int, halo: int, window: int
) -> tuple[Tensor, Tensor]:
    """P (size + 1, H, halo + TILE) and A (size + 1, H) of a chunk, in front of its first token and
    after each; momentum, where there is any, pushes.
    """
    step = given["step"][0]
    heads = step.shape[1]
    P = [step.new_zeros(heads, halo + TILE)]
    U = P[0]
    A = [step.new_ones(heads)]
    for t in range(size):
        gates = given["window_gates"][0, first + t] if "window_gates" in given else None
        w = step[first + t, :, None] * (1 / window if gates is None else gates)
        w = w.expand(heads, window)
        keys = halo + t - torch.arange(window)
        written = step.new_zeros(heads, halo + TILE).index_add(1, keys, w)
        if "momentum" in given:
            U = given["momentum"][0, first + t, :, None] * U + written
            written = U
        a = given["decay"][0, first + t] if "decay" in given else torch.ones(heads).to(step)
        P.append(a[:, None] * P[-1] + written)
        A.append(a * A[-1])
    return torch.stack(P), torch.stack(A)


def launched(case: Case) -> tuple[Any, dict[str, Tensor], dict[str, Tensor | None]]:
    """A backward with its tables formed, the call's gates in float64, and the tables."""
    from fastweights.ops.omega.hopper_backward import HopperBackward

    given = case.arguments(0, torch.float32, CPU)
    shape, tensors = shape_of(given), tensors_of(given)
    state = torch.zeros(case.sequences, case.heads, case.width, case.values)
    call = HopperBackward(shape, tensors, torch.zeros_like(given["v"]), state, None)
    call.gates(bounded=True)
    names = ("step", "decay", "window_gates", "momentum")
    gates = {name: given[name].double().clone() for name in names if name in given}
    return call, gates, call.tables()


@pytest.mark.parametrize("case", [*CASES, CASE.but(momentum=True)], ids=lambda case: case.name)
def test_tables(case: Case) -> None:
    """P over a power of two, which keeps its digits in fp16; A over the same."""
    call, gates, tables = launched(case)
    seen = 0 if case.read_before else 1
    for slot, first, size in chunks_of(case):
        P, A = weights(gates, first, size, call.halo, case.window)
        P, A = P[seen : seen + size].transpose(0, 1), A[seen : seen + size].T
        scale = tables["scales"][slot, :, :size].double()
        assert scale.log2().frac().eq(0).all()
        got = tables["shares_own"][slot, :, :size].double()
        if call.halo:
            got = torch.cat((tables["shares_older"][slot, :, :size].double(), got), -1)
        assert got.abs().max() <= 8, "far from the end of fp16"
        error = (got * scale[..., None] - P).abs()
        assert (error <= 2**-10 * P.abs() + 2**-24 * scale[..., None]).all()
        assert torch.allclose(tables["rates"][slot, :, :size].double() * scale, A, rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_gates(case: Case) -> None:
    """Against those of the sum that the upstream gradients make of P and A, in float64."""
    call, gates, tables = launched(case)
    source = inputs.generator(1, CPU)
    each, halo = (call.slots, case.heads), call.halo

    def normal(*size: int) -> Tensor:
        return torch.randn(*each, *size, generator=source)

    found: dict[str, Tensor | None] = {
        "d_shares": normal(TILE, TILE),
        "d_shares_older": normal(TILE, halo) if halo else None,
        "d_rates": normal(TILE),
        "in_state": normal(TILE),
        "in_state_older": normal(halo) if halo else None,
        "of_states": normal(),
    }
    for name in ("d_shares", "d_shares_older", "d_rates"):  # of tokens that are not there
        if found[name] is not None:
            for slot, _, size in chunks_of(case):
                found[name][slot, :, size:] = float("nan")
    above = torch.ones(TILE, TILE, dtype=torch.bool).triu(1)  # keys that come later
    out = call.outputs()
    call.gates_back(tables, found, out)

    leaves = {name: x.requires_grad_() for name, x in gates.items()}
    total = torch.zeros((), dtype=torch.float64)
    seen = 0 if case.read_before else 1
    for slot, first, size in chunks_of(case):
        P, A = weights(leaves, first, size, halo, case.window)
        upstream = {name: None if x is None else x[slot].double() for name, x in found.items()}
        read = P[seen : seen + size].transpose(0, 1)
        of_own = upstream["d_shares"].masked_fill(above, 0)
        total = total + (of_own[:, :size] * read[..., halo:]).sum()
        total = total + (upstream["d_rates"][:, :size] * A[seen : seen + size].T).sum()
        total = total - (upstream["in_state"] * P[-1][:, halo:]).sum()
        total = total + (upstream["of_states"] * A[-1]).sum()
        if halo:
            total = total + (upstream["d_shares_older"][:, :size] * read[..., :halo]).sum()
            total = total - (upstream["in_state_older"] * P[-1][:, :halo]).sum()
    slopes = torch.autograd.grad(total, list(leaves.values()))
    there = slice(None) if case.packed is None else slice(case.packed[-1])
    for name, truth in zip(leaves, slopes, strict=True):
        got = out["d_gates" if name == "window_gates" else f"d_{name}"].double()
        error = (got - truth)[:, there].norm() / truth[:, there].norm()
        # The decay's is a product with P in fp16.
        assert error < (1e-3 if name == "decay" else 2e-6), f"{name}: {error:.1e}"


def test_who_is_served() -> None:
    """The kernels for Hopper are the default there, where their tiles are; elsewhere a reason."""
    from fastweights.ops.omega.triton_spaces import SPACE_BWD, SPACE_FWD, Bucket

    def config(case: Case, space: Any, device: Device, **changes: Any) -> Any:
        given = case.arguments(0, torch.bfloat16, CPU) | changes
        return space.default(space.bucket(shape_of(given)), device)

    hopper, other = target_device("sm_90"), target_device("sm_100")
    case = CASE.but(width=64, values=72)
    for space in (SPACE_FWD, SPACE_BWD):
        assert config(case, space, hopper).get("HOPPER")
        assert config(case.but(width=40), space, hopper).get("HOPPER")
        assert not config(case, space, other).get("HOPPER")
        for unserved in (
            case.but(chunk_size=37), case.but(window=18), case.but(values=70),
            case.but(width=128, momentum=True), case.but(chunk_size=4), case.but(chunk_size=128),
            case.but(chunk_size=16, momentum=True), case.but(chunk_size=16, window=10),
        ):  # fmt: skip
            assert not config(unserved, space, hopper).get("HOPPER"), unserved.name
        of_any = case.but(chunk_size=37, inner_loss="dot")
        assert config(of_any, space, hopper).get("HOPPER"), "the chunk of 'dot' is free"
        for short in (case.but(chunk_size=16), case.but(chunk_size=32, window=17)):
            served = bool(config(short, space, hopper).get("HOPPER"))
            assert served == (space is SPACE_FWD), short.name
    long = shape_of(case.arguments(0, torch.bfloat16, CPU))
    for batch, tokens, packed, tiled in (
        (1, 1 << 28, False, True), (1, 1 << 29, False, False), (1 << 14, 1 << 20, True, True),
        (1 << 14, 1 << 20, False, False),
    ):  # fmt: skip
        changed = replace(long, batch=batch, tokens=tokens, packed=packed)
        assert bool(Bucket(*SPACE_FWD.bucket(changed)).parts) == tiled, (batch, tokens)
    served = {
        space.pass_: bool(config(case.but(momentum=True), space, hopper).get("HOPPER"))
        for space in (SPACE_FWD, SPACE_BWD)
    }
    assert served == {"fwd": True, "bwd": False}
