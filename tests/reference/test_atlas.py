"""The literal Atlas memory: written out by singular values, and what it reduces to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.reference import atlas_memory, omega_memory

WIDE = torch.float64
B, T, H, D, DV = 2, 14, 2, 5, 4
MUON = (3.4445, -4.7750, 2.0315)
TOKENS = ("q", "k", "v", "step", "decay", "window_gates", "momentum", "output_step")


def arguments(batch: int = B, heads: int = H) -> dict[str, Any]:
    """Everything that a call can be given but what is carried; keys of norm one."""
    source = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(batch, T, heads, *size, generator=source, dtype=WIDE)

    def between(*size: int) -> Tensor:
        return torch.rand(batch, T, heads, *size, generator=source, dtype=WIDE)

    k = normal(D)
    return {
        "q": normal(D), "k": k / k.norm(dim=-1, keepdim=True), "v": normal(DV),
        "step": between(), "decay": 1 - 0.2 * between(), "window_gates": between(3), "window": 3,
        "momentum": 0.9 * between(), "output_step": between(), "chunk_size": 4,
    }  # fmt: skip


def cut(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The tokens from `begin` to `end`."""
    return {name: x[:, begin:end] if name in TOKENS else x for name, x in given.items()}


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_written_out_by_singular_values(stride: int, read_before: bool) -> None:
    """One head, its errors as sums; NS maps σ/‖S‖ by the polynomial five times."""
    given = arguments()
    y, left = atlas_memory(**given, ns_stride=stride, read_before=read_before, return_state=True)
    q, k, v, step, decay, gates, momentum, output = (given[name][1, :, 1] for name in TOKENS)
    memory = anchor = velocity = torch.zeros(D, DV, dtype=WIDE)
    for t in range(T):
        anchor = memory if t % 4 == 0 else anchor
        velocity = momentum[t] * velocity
        for lag in range(min(3, t + 1)):
            key, weight = k[t - lag], step[t] * gates[t, lag]
            velocity = velocity - weight * torch.outer(key, key @ anchor - v[t - lag])
        before, memory = memory, decay[t] * memory
        if (t + 1) % stride == 0:
            left_vectors, values, right_vectors = torch.linalg.svd(velocity, full_matrices=False)
            values = values / (velocity.norm() + 1e-7)
            for _ in range(5):
                values = sum(c * values**p for c, p in zip(MUON, (1, 3, 5), strict=True))
            memory = memory + output[t] * (left_vectors * values) @ right_vectors
        read = q[t] @ (before if read_before else memory)
        torch.testing.assert_close(y[1, t, 1], read, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(left.state[1, 1], memory, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(left.momentum[1, 1], velocity, rtol=1e-12, atol=1e-12)


def test_a_step_of_the_momentums_own_length_is_the_omega_rule() -> None:
    """With one step X ← X, NS(S) = S/(‖S‖ + eps), and output_step puts the length back."""
    given = arguments(batch=1, heads=1)
    del given["output_step"]
    wanted, last = omega_memory(**given, return_state=True)
    lengths = [
        omega_memory(**cut(given, 0, t + 1), return_state=True)[1].momentum.norm() + 1e-7
        for t in range(T)
    ]
    y, left = atlas_memory(
        **given, output_step=torch.stack(lengths)[None, :, None], ns_stride=1, ns_steps=1,
        ns_coefficients=[(1.0, 0.0, 0.0)], return_state=True,
    )  # fmt: skip
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(left.state, last.state, rtol=1e-12, atol=1e-12)


def test_the_stride_is_a_chunk_unless_said() -> None:
    given = arguments()
    torch.testing.assert_close(
        atlas_memory(**given)[0], atlas_memory(**given, ns_stride=4)[0], rtol=0, atol=0
    )


def test_pieces_that_end_with_a_chunk_are_the_whole() -> None:
    given = arguments() | {"ns_stride": 2}
    whole, last = atlas_memory(**given, return_state=True)
    carried: dict[str, Any] = {}
    reads = []
    for begin, end in ((0, 4), (4, 12), (12, T)):
        y, left = atlas_memory(**cut(given, begin, end), return_state=True, **carried)
        reads.append(y)
        carried = {"initial_state": left.state, "initial_momentum": left.momentum}
        carried |= {"tail_k": left.tail_k, "tail_v": left.tail_v, "tail_length": left.tail_length}
    torch.testing.assert_close(torch.cat(reads, 1), whole, rtol=1e-12, atol=1e-12)
    for name, x in last._asdict().items():
        torch.testing.assert_close(getattr(left, name), x, rtol=1e-12, atol=1e-12)


def test_packed_sequences_are_separate_ones() -> None:
    """Chunks and strides begin anew; of the tokens behind the last nothing is read."""
    given = arguments(batch=1) | {"ns_stride": 2}
    given["output_step"][:, 12:] = torch.nan
    bounds = [0, 5, 5, 12]
    y, left = atlas_memory(
        **given, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), return_state=True
    )
    for n, (begin, end) in enumerate(pairwise(bounds)):
        alone, after = atlas_memory(**cut(given, begin, end), return_state=True)
        torch.testing.assert_close(y[:, begin:end], alone, rtol=0, atol=0)
        for name, x in after._asdict().items():
            torch.testing.assert_close(getattr(left, name)[n : n + 1], x, rtol=0, atol=0)
    assert not y[:, 12:].any()


def test_a_momentum_of_zeros_has_the_gradient_zero() -> None:
    given = arguments() | {"ns_stride": 1}
    given["step"] = torch.zeros_like(given["step"])
    leaves = {name: given[name].requires_grad_() for name in TOKENS}
    y, _ = atlas_memory(**given | leaves)
    assert not y.any()
    for name, d in zip(TOKENS, torch.autograd.grad(y.sum(), list(leaves.values())), strict=True):
        assert not d.any(), name
