"""Paged decoding against its definition number by number, and against `polar_attention`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastweights import reference
from helpers.paged import CASES, Case, parameters, sequence

CPU = torch.device("cpu")


def by_hand(given: dict[str, Any], b: int, h: int) -> tuple[torch.Tensor, float]:
    """Direction and count of one head: weights over keys and the null, one after another."""
    k, v = (
        x[0, :, h * given["k_cache"].shape[2] // given["q"].shape[1]] for x in sequence(given, b)
    )
    n, q = len(k), given["q"][b, h]
    window = given["window"] or n
    low = max(n - window, 0)
    nh = max(n - low, 1)
    base, slope, gain, magnitude = (
        float(given[name][h])
        for name in ("null_base", "null_slope", "length_gain", "magnitude_gain")
    )
    t = 1 + gain * math.log(nh)
    logits = [t * float(q @ k[j]) / math.sqrt(len(q)) for j in range(low, n)]
    null = t * (base + slope * math.sqrt(math.log(nh + 1)))
    highest = max([*logits, null])
    total = sum(math.exp(a - highest) for a in [*logits, null])
    weights = [math.exp(a - highest) / total for a in logits]
    value = given["null_value"]
    s = torch.zeros_like(q) if value is None else math.exp(null - highest) / total * value[h]
    for weight, j in zip(weights, range(low, n), strict=True):
        s = s + weight * v[j]
    real = sum(weights)
    effective = real**2 / sum(w * w for w in weights) if weights else 1.0
    return s / max(float(s.norm()), 1e-6), math.tanh(magnitude * math.log1p(effective * real))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_definition(case: Case) -> None:
    given = case.arguments(0, torch.float64, CPU)
    direction, count = reference.polar_decode(**given)
    for b in range(len(case.lengths)):
        for h in range(case.heads[0]):
            wanted, amount = by_hand(given, b, h)
            torch.testing.assert_close(direction[b, h], wanted, rtol=1e-9, atol=1e-12)
            assert float(count[b, h]) == pytest.approx(amount, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.name)
def test_each_sequence_is_the_last_row_of_polar_attention(case: Case) -> None:
    given = case.arguments(0, torch.float64, CPU)
    direction, count = reference.polar_decode(**given)
    for b in range(len(case.lengths)):
        k, v = sequence(given, b)
        q = given["q"][b][None, None]
        row = reference.polar_attention(q, k, v, window=case.window, **parameters(given))
        torch.testing.assert_close((direction[b], count[b]), (row[0][0, 0], row[1][0, 0]))
