"""FLOP conventions against brute force, and what torch's counter sees without running anything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops
from fastweights.ops import flops
from helpers import polar


def brute_force(tq: int, tk: int, causal: bool, window: int | None) -> int:
    pairs = 0
    for i in range(tq):
        n = min(max(tk - tq + i + 1, 0), tk) if causal else tk
        first = 0 if window is None else max(0, n - window)
        pairs += n - first
    return pairs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 100])
def test_visible_pairs(causal: bool, window: int | None) -> None:
    for tq, tk in itertools.product((0, 1, 2, 7, 8, 13), repeat=2):
        got = flops.visible_pairs(tq, tk, causal=causal, window=window)
        assert got == brute_force(tq, tk, causal, window), (tq, tk)


def test_conventions() -> None:
    assert flops.attention_forward(10, 64, 3) == 4 * 10 * 64 * 3
    assert flops.attention_backward(10, 64, 3) == 10 * 10 * 64 * 3
    executed = [
        flops.attention_executed(10, 64, 3, form=form) // (10 * 64 * 3)
        for form in ("fwd", "single", "split")
    ]
    assert executed == [4, 10, 14]
    assert flops.matmul(2, 3, 5, 7, 11) == 2 * 2 * 3 * 5 * 77


def counted(case: polar.Case, **options: Any) -> tuple[int, int]:
    """FLOPs that torch counts for forward and for backward, on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = case.arguments(0, torch.bfloat16, torch.device("cpu")) | options
        for name in ("q", "k", "v"):
            arguments[name] = torch.empty(
                arguments[name].shape, dtype=torch.bfloat16, requires_grad=True
            )
        with FlopCounterMode(display=False) as forward:
            results = case.op(**arguments)
        with FlopCounterMode(display=False) as backward:
            (results[0].sum() + results[1].sum()).backward()
    return forward.get_total_flops(), backward.get_total_flops()


CASES = {
    "causal": (polar.Case(tq=70, hq=4, hk=2, batch=3), 3 * brute_force(70, 70, True, None)),
    "full": (polar.Case(tq=20, tk=50, hq=4, causal=False), 20 * 50),
    "window": (polar.Case(tq=70, hq=4, window=9), brute_force(70, 70, True, 9)),
    "continued": (polar.Case(tq=20, tk=50, hq=4), brute_force(20, 50, True, None)),
    "softmax": (polar.Case(tq=70, hq=4, polar=False), brute_force(70, 70, True, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_counts_useful_work(name: str) -> None:
    case, pairs = CASES[name]
    forward, backward = counted(case)
    assert forward == flops.attention_forward(pairs, case.d, 4)
    assert backward == flops.attention_backward(pairs, case.d, 4)


def test_packed_work_is_counted_by_the_hint() -> None:
    case = polar.Case(tq=60, hq=4, packed=(20, 20, 20))
    hinted, _ = counted(case, max_seqlen=20)
    assert hinted == flops.attention_forward(3 * brute_force(20, 20, True, None), case.d, 4)


def test_counting_needs_no_memory() -> None:
    """A call that would take 256 GB of logits: nothing is allocated or run."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(1, 131_072, 16, 128, dtype=torch.bfloat16)
        ops.softmax_attention(q, q, q)
    pairs = 131_072 * 131_073 // 2
    assert counter.get_total_flops() == 4 * pairs * 128 * 16


def chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, velocity: torch.Tensor,
    weights: torch.Tensor, *, momentum: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The products of one chunk of the Omega rule and one head: reads, and the memory after it."""
    error = k @ state - v
    y = q @ state - (weights * (q @ k.mT)) @ error
    after = state - k.mT @ (weights[-1, :, None] * error)
    if not momentum:
        return y, after
    return y + q @ velocity, after + velocity, velocity - k.mT @ (weights[0, :, None] * error)


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize(("b", "window"), [(8, 1), (8, 4), (5, 12)])
def test_products_of_the_omega_rule(b: int, window: int, momentum: bool) -> None:
    """Backward: two products for each of the forward, and all of those but the last again."""
    n, wide, values = b + window - 1, 6, 7
    sizes = ((b, wide), (n, wide), (n, values), (wide, values), (wide, values), (b, n))
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    with FlopCounterMode(display=False) as forward:
        results = chunk(*leaves, momentum=momentum)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    done = forward.get_total_flops()
    again = done - 2 * b * n * values
    assert flops.omega_forward(b, b, window, wide, values, momentum=momentum) == done
    wanted = backward.get_total_flops() + again
    assert flops.omega_backward(b, b, window, wide, values, momentum=momentum) == wanted
    for tokens, chunks in ((3 * b, {b: 3}), (2 * b + 3, {b: 2, 3: 1})):
        for count in (flops.omega_forward, flops.omega_backward):
            total = sum(
                many * count(size, size, window, wide, values, momentum=momentum)
                for size, many in chunks.items()
            )
            assert count(tokens, b, window, wide, values, momentum=momentum) == total
