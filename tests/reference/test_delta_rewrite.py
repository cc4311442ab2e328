"""The literal delta rewrite: written out number by number, and what it has to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.reference import delta_rewrite
from fastweights.reference.delta_rewrite import dpfp

WIDE = torch.float64
M, DK, DV, ORDER = 5, 3, 4, 2
P = 2 * ORDER * DK


def arguments(seed: int = 0, tokens: int = M) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=source, dtype=WIDE)

    return {
        "k": normal(1, tokens, 1, DK),
        "v": normal(1, tokens, 1, DV),
        "beta": normal(1, tokens, 1).sigmoid(),
        "state": normal(1, 1, P, DV),
        "normalizer": normal(1, 1, P).abs() / 4,
    }


def empty() -> dict[str, Tensor]:
    memory = {"state": torch.zeros(1, 1, P, DV), "normalizer": torch.zeros(1, 1, P)}
    return {name: x.to(WIDE) for name, x in memory.items()} | {"first": torch.ones(1).bool()}


def features(x: list[float], normalize: bool) -> list[float]:
    r = [max(a, 0.0) for a in x] + [max(-a, 0.0) for a in x]
    h = [r[p] * r[(p - j) % len(r)] for j in range(1, ORDER + 1) for p in range(len(r))]
    length = sum(a * a for a in h) ** 0.5 if normalize else 1.0
    return [a / length for a in h]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_written_out(mode: str, normalize: bool) -> None:
    given = arguments()
    q = arguments(1)["k"]
    y, state, normalizer = delta_rewrite(**given, q=q, order=ORDER, mode=mode, normalize=normalize)
    k, v, beta = (given[name][0, :, 0].tolist() for name in ("k", "v", "beta"))
    a, z = given["state"][0, 0].tolist(), given["normalizer"][0, 0].tolist()
    before = [list(row) for row in a], list(z)
    for i in range(M):
        f = features(k[i], normalize)
        rows, keys = before if mode == "parallel" else ([list(row) for row in a], list(z))
        d = sum(f[p] * keys[p] for p in range(P)) + 1e-5
        square = sum(p * p for p in f) + (0.0 if normalize else 1e-5)
        gamma = min(max(1 - d / square, 0.0), 1.0)
        for p in range(P):
            z[p] += gamma * f[p]
            for c in range(DV):
                old = sum(f[s] * rows[s][c] for s in range(P)) / d
                a[p][c] += f[p] * beta[i] * (v[i][c] - old)
    torch.testing.assert_close(state[0, 0], torch.tensor(a, dtype=WIDE), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(normalizer[0, 0], torch.tensor(z, dtype=WIDE))
    assert y is not None
    for i in range(M):
        g = features(q[0, i, 0].tolist(), normalize)
        s = sum(g[p] * z[p] for p in range(P)) + 1e-5
        read = [sum(g[p] * a[p][c] for p in range(P)) / s for c in range(DV)]
        torch.testing.assert_close(y[0, i, 0], torch.tensor(read, dtype=WIDE))


def read_back(rules: dict[str, Any], k: Tensor, v: Tensor, beta: float) -> Tensor:
    gate = torch.full(k.shape[:3], beta, dtype=WIDE)
    y, _, _ = delta_rewrite(k, v, gate, **empty(), q=k, order=ORDER, **rules)
    assert y is not None
    return y


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize("normalize", [True, False])
def test_what_is_written_is_read(mode: str, normalize: bool) -> None:
    """One key: β v, but for eps."""
    given = arguments(tokens=1)
    k, v = given["k"], given["v"]
    y = read_back({"mode": mode, "normalize": normalize}, k, v, 0.7)
    size = dpfp(k, ORDER, normalize).square().sum()
    torch.testing.assert_close(y, 0.7 * v * size / (size + 1e-5))


def test_equal_keys_of_a_segment() -> None:
    """Parallel copies of a key are averaged; in sequence the last one counts, with β = 1."""
    given = arguments(tokens=3)
    k, v = given["k"][:, :1].expand(-1, 3, -1, -1), given["v"]
    together = read_back({}, k, v, 1.0)
    torch.testing.assert_close(together, v.mean(1, keepdim=True).expand_as(v), rtol=1e-4, atol=1e-4)
    in_turn = read_back({"mode": "sequential"}, k, v, 1.0)
    torch.testing.assert_close(in_turn, v[:, 2:].expand_as(v), rtol=1e-4, atol=1e-4)


def test_modes_are_the_same_for_one_token() -> None:
    given = arguments(tokens=1)
    for x, y in zip(
        delta_rewrite(**given, order=ORDER)[1:],
        delta_rewrite(**given, order=ORDER, mode="sequential")[1:],
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, WIDE], ids=str)
def test_features_do_not_see_the_length_of_a_key(dtype: torch.dtype) -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    unit = dpfp(x, 3, True)
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(7, dtype=dtype))
    for scale in (2.0**-60, 2.0**60):
        assert torch.equal(dpfp(scale * x, 3, True), unit)
    assert not dpfp(torch.zeros(1, 6), 3, True).any()
    one = torch.zeros(1, 6)
    one[0, 2] = 3.0  # alone, it has no product with another
    assert not dpfp(one, 3, True).any()
