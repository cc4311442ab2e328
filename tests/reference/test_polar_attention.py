"""The reference against the formulas written out a third time: loops over 60-digit decimals.

The loops put the null into one softmax with the keys, as the definition does, and know nothing of
log-sum-exp, masks or tensors; their gradients are central differences with a step of 1e-20. So they
are right in every regime, also where the null takes all but 1e-8 of the mass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import pytest
import torch

from fastweights.reference import polar_attention, softmax_attention

EPS = Decimal("1e-6")
STEP = Decimal("1e-20")
PARAMETERS = ("null_value", "null_base", "null_slope", "length_gain", "magnitude_gain")

Loose = dict[str, dict[tuple[int, ...], Decimal]]  # tensors as index -> number
Seen = Callable[[int, int], range]  # keys seen by row i of batch b


def loosen(tensors: dict[str, torch.Tensor]) -> Loose:
    return {
        name: {i: Decimal(float(x[i])) for i in product(*map(range, x.shape))}
        for name, x in tensors.items()
    }


def loop_polar(x: Loose, sizes: Sequence[int], seen: Seen) -> Loose:
    batch, tq, heads, group, width = sizes
    scale = 1 / Decimal(width).sqrt()
    out: Loose = {"direction": {}, "count": {}, "lse": {}, "n_eff": {}, "null_mass": {}}
    for b, i, h in product(range(batch), range(tq), range(heads)):
        keys, g = seen(b, i), h // group
        nh = Decimal(max(len(keys), 1))
        t = 1 + x["length_gain"][h,] * nh.ln()
        nu = x["null_base"][h,] + x["null_slope"][h,] * (nh + 1).ln().sqrt()
        e = {}
        for j in keys:
            dot = sum(x["q"][b, i, h, d] * x["k"][b, j, g, d] for d in range(width))
            e[j] = (t * scale * dot).exp()
        null = (t * nu).exp()
        total = sum(e.values()) + null
        w = {j: p / total for j, p in e.items()}
        s = [
            sum(w[j] * x["v"][b, j, g, d] for j in keys) + null / total * x["null_value"][h, d]
            for d in range(width)
        ]
        norm = max(sum(c * c for c in s).sqrt(), EPS)
        real = sum(w.values(), Decimal(0))
        n_eff = real**2 / sum(p * p for p in w.values()) if keys else Decimal(1)
        grown = (2 * x["magnitude_gain"][h,] * (1 + n_eff * real).ln()).exp()
        for d in range(width):
            out["direction"][b, i, h, d] = s[d] / norm
        out["count"][b, i, h] = (grown - 1) / (grown + 1)
        out["lse"][b, i, h] = sum(e.values()).ln() if keys else Decimal("-Infinity")
        out["n_eff"][b, i, h] = n_eff
        out["null_mass"][b, i, h] = null / total
    return out


def derivative(f: Callable[[Loose], Decimal], x: Loose, name: str) -> torch.Tensor:
    flat = []
    for index, value in x[name].items():
        above = f(x | {name: x[name] | {index: value + STEP}})
        below = f(x | {name: x[name] | {index: value - STEP}})
        flat.append(float((above - below) / (2 * STEP)))
    return torch.tensor(flat, dtype=torch.float64)


def draw(sizes: Sequence[int], tk: int, null_base: float = 2.0) -> dict[str, torch.Tensor]:
    batch, tq, heads, group, width = sizes
    shapes = {
        "q": (batch, tq, heads, width),
        "k": (batch, tk, heads // group, width),
        "v": (batch, tk, heads // group, width),
        "null_value": (heads, width),
        **dict.fromkeys(PARAMETERS[1:], (heads,)),
    }
    x = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    centers = {"null_base": null_base, "null_slope": 0.97, "length_gain": 0.31}
    for name, center in (centers | {"magnitude_gain": 0.2}).items():
        x[name] = center + 0.05 * x[name]
    return x


def relative(got: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Error over the norm of what is expected, or over `least` if that is more."""
    finite = expected.isfinite()
    assert torch.equal(got[~finite], expected[~finite])
    got, expected = got[finite], expected[finite]
    difference = float((got - expected).norm())
    return difference / max(float(expected.norm()), least) if difference else 0.0


def window_of(n: int, window: int | None, first: int = 0) -> range:
    return range(first + (0 if window is None else max(0, n - window)), first + n)


I32 = torch.int32
N_KEYS = torch.tensor([[0, 9, 2], [3, -1, 1]], dtype=I32)

# name, (B, Tq, Hq, G, D), Tk, options, keys seen by row i of batch b
CASES: dict[str, tuple[tuple[int, ...], int, dict[str, Any], Seen]] = {
    "causal-group": ((2, 3, 4, 2, 2), 3, {}, lambda b, i: window_of(i + 1, None)),
    "window": ((1, 4, 1, 1, 2), 4, {"window": 2}, lambda b, i: window_of(i + 1, 2)),
    "continued": ((1, 2, 2, 1, 2), 4, {"window": 3}, lambda b, i: window_of(i + 3, 3)),
    "more-queries": ((1, 4, 1, 1, 2), 2, {}, lambda b, i: window_of(max(0, i - 1), None)),
    "full": ((1, 3, 2, 2, 2), 4, {"causal": False}, lambda b, i: window_of(4, None)),
    "n-keys": (
        (2, 3, 2, 2, 2),
        4,
        {"n_keys": N_KEYS},
        lambda b, i: window_of(min(4, max(0, int(N_KEYS[b, i]))), None),
    ),
    "packed": (
        (1, 4, 1, 1, 2),
        5,
        {
            "cu_seqlens": torch.tensor([0, 1, 1, 4], dtype=I32),
            "cu_seqlens_k": torch.tensor([0, 2, 3, 5], dtype=I32),
            "window": 2,
        },
        lambda b, i: window_of(2, 2) if i == 0 else window_of(i - 1, 2, first=3),
    ),
}
REGIMES = {
    "fresh": {},
    "null-wins": {"null_base": 8.0},
    "null-wins-by-far": {"null_base": 14.0},
    "no-null": {"null_base": -20.0},
}


def check_against_loops(
    name: str, null_base: float = 2.0, null_value: bool = True, tolerance: float = 2e-13
) -> None:
    sizes, tk, options, seen = CASES[name]
    x = draw(sizes, tk, null_base)
    x["null_value"] *= null_value
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    direction, count, stats = polar_attention(**leaves, **options, return_stats=True)
    upstream = loosen({"direction": torch.randn_like(direction), "count": torch.randn_like(count)})

    with localcontext() as context:
        context.prec = 60
        loose = loosen(x)
        expected = loop_polar(loose, sizes, seen)

        def loss(x: Loose) -> Decimal:
            out = loop_polar(x, sizes, seen)
            return sum(up * out[n][i] for n, ups in upstream.items() for i, up in ups.items())

        truth = {n: derivative(loss, loose, n) for n in x}

    results = {"direction": direction, "count": count, **stats._asdict()}
    for n, result in results.items():
        flat = torch.tensor([float(y) for y in expected[n].values()], dtype=torch.float64)
        assert relative(result.detach().reshape(-1), flat) < tolerance, n

    weights = {
        n: torch.tensor([float(y) for y in u.values()], dtype=torch.float64).reshape(
            results[n].shape
        )
        for n, u in upstream.items()
    }
    scalar = (direction * weights["direction"]).sum() + (count * weights["count"]).sum()
    grads = torch.autograd.grad(scalar, list(leaves.values()))
    # Without a null value the direction does not depend on the null: the terms of its gradient,
    # each of the size of the upstream's, cancel, and their rounding stays.
    least = 0.01 * float(torch.cat([w.reshape(-1) for w in weights.values()]).norm())
    for n, grad in zip(leaves, grads, strict=True):
        assert relative(grad.reshape(-1), truth[n], least) < tolerance, f"d {n}"


@pytest.mark.parametrize("name", CASES)
def test_equals_loops(name: str) -> None:
    check_against_loops(name)


@pytest.mark.parametrize("null_value", [True, False], ids=["value", "no_value"])
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_loops_in_every_regime(regime: str, null_value: bool) -> None:
    check_against_loops("window", **REGIMES[regime], null_value=null_value)


def test_softmax_equals_loops() -> None:
    sizes, tk, options, seen = CASES["n-keys"]
    x = draw(sizes, tk)
    out, lse = softmax_attention(x["q"], x["k"], x["v"], **options)
    for b, i, h in product(*map(range, lse.shape)):
        keys = list(seen(b, i))
        a = x["q"][b, i, h] @ x["k"][b, keys, h // 2].T / 2**0.5
        if not keys:
            assert lse[b, i, h] == -torch.inf
            assert not out[b, i, h].any()
            continue
        w = a.exp() / a.exp().sum()
        torch.testing.assert_close(out[b, i, h], w @ x["v"][b, keys, h // 2])
        torch.testing.assert_close(lse[b, i, h], a.exp().sum().log())


@pytest.mark.parametrize("name", ["causal-group", "n-keys", "packed"])
def test_twice_differentiable(name: str) -> None:
    sizes, tk, options, _ = CASES[name]
    x = draw(sizes, tk)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return polar_attention(**dict(zip(x, tensors, strict=True)), **options)

    leaves = tuple(t.requires_grad_() for t in x.values())
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_softmax_twice_differentiable() -> None:
    x = draw((1, 3, 2, 2, 2), 4)
    leaves = tuple(x[n].requires_grad_() for n in "qkv")

    def function(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return softmax_attention(*qkv, window=2)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("m", [1, 2, 7, 40])
def test_equal_keys_are_counted(m: int) -> None:
    x = draw((1, m, 2, 2, 4), m)
    x["k"][:] = x["k"][:, :1]
    stats = polar_attention(**x, return_stats=True)[2]
    expected = torch.arange(1, m + 1, dtype=torch.float64)[None, :, None].expand(1, m, 2)
    torch.testing.assert_close(stats.n_eff, expected, rtol=1e-13, atol=0)


def test_row_with_no_key() -> None:
    x = draw((1, 3, 2, 1, 4), 5)
    x["null_value"][1] = 1e-9  # its norm is below ε
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    n_keys = torch.tensor([0, 0, 0], dtype=I32)
    direction, count, stats = polar_attention(**leaves, n_keys=n_keys, return_stats=True)
    value = x["null_value"].detach()
    expected = torch.stack([value[0] / value[0].norm(), value[1] / 1e-6])
    torch.testing.assert_close(direction[0], expected.expand(3, 2, 4))
    assert not count.any()
    assert stats.lse.eq(-torch.inf).all()
    assert stats.n_eff.eq(1).all()
    assert stats.null_mass.eq(1).all()
    grads = torch.autograd.grad(direction.sum() + count.sum(), list(leaves.values()))
    for name, grad in zip(leaves, grads, strict=True):
        if name == "null_value":
            assert grad.isfinite().all()
            assert grad.any()
        else:
            assert not grad.any(), f"d {name}"


def test_no_keys_at_all() -> None:
    x = draw((1, 3, 2, 1, 4), 0)
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    direction, count = polar_attention(**leaves)
    value = x["null_value"].detach()
    torch.testing.assert_close(direction[0, 0], value / value.norm(dim=-1, keepdim=True))
    assert not count.any()
    grads = torch.autograd.grad(direction.sum() + count.sum(), list(leaves.values()))
    assert all(grad.isfinite().all() for grad in grads)


def test_padding_is_zero() -> None:
    x = draw((1, 5, 2, 1, 4), 6)
    x["q"][:, 3:] = torch.nan
    x["k"][:, 4:] = torch.nan
    x["v"][:, 4:] = torch.nan
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    lengths = {
        "cu_seqlens": torch.tensor([0, 2, 3], dtype=I32),
        "cu_seqlens_k": torch.tensor([0, 4, 4], dtype=I32),
    }
    direction, count, stats = polar_attention(**leaves, **lengths, return_stats=True)
    assert all(not y[:, 3:].any() for y in (direction, count, *stats))
    grads = torch.autograd.grad(direction.sum() + count.sum(), list(leaves.values()))
    by_name = dict(zip(leaves, grads, strict=True))
    assert all(grad.isfinite().all() for grad in grads)
    assert not by_name["q"][:, 3:].any()
    assert not by_name["k"][:, 4:].any()
    assert not by_name["v"][:, 4:].any()


def test_row_identity() -> None:
    x = draw((2, 9, 4, 2, 4), 9, null_base=1.0)
    x["q"][..., -1] = 1
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    direction, count = polar_attention(**leaves, window=5)
    loss = (direction * torch.randn_like(direction)).sum() + (count * torch.randn_like(count)).sum()
    dk, d_base = torch.autograd.grad(loss, [leaves["k"], leaves["null_base"]])
    defect = 2 * dk[..., -1].sum((0, 1)) + d_base.view(2, 2).sum(1)
    assert defect.abs().max() < 1e-12 * d_base.abs().max()


@pytest.mark.parametrize("null_base", [8.0, -20.0])
def test_single_precision_keeps_its_digits(null_base: float) -> None:
    """fp32 holds 1e-5 of every result and gradient where the null, or the real mass, is ~1e-8."""
    x = draw((1, 33, 2, 1, 8), 33, null_base)
    upstream = torch.randn(1, 33, 2, 8), torch.randn(1, 33, 2)
    runs = []
    for dtype in (torch.float64, torch.float32):
        leaves = [t.to(torch.float32).to(dtype).requires_grad_() for t in x.values()]
        results = polar_attention(**dict(zip(x, leaves, strict=True)))
        grads = torch.autograd.grad(results, leaves, [u.to(dtype) for u in upstream])
        runs.append([t.detach().double() for t in (*results, *grads)])
    for name, truth, got in zip(("direction", "count", *x), *runs, strict=True):
        assert relative(got, truth) < 1e-5, name


def test_trained_operating_point() -> None:
    """Logits of ±55 under a sharp length gain: one key wins and every gradient stays finite."""
    x = draw((1, 64, 2, 2, 16), 64)
    x["length_gain"] += 1
    x["q"] *= 14 / x["q"].norm(dim=-1, keepdim=True)
    x["k"] *= 4 / x["k"].norm(dim=-1, keepdim=True)
    x["k"][0, 40] = x["q"][0, 50, :1] * 4 / 14
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    direction, count, stats = polar_attention(**leaves, return_stats=True)
    assert stats.lse.max() > 55
    assert stats.n_eff[0, 50, 0] < 1.001
    grads = torch.autograd.grad(direction.sum() + count.sum(), list(leaves.values()))
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = {n: t.to(dtype) if n in "qkv" else t.float() for n, t in draw((1, 5, 2, 1, 4), 5).items()}
    direction, count, stats = polar_attention(**x, return_stats=True)
    out, lse = softmax_attention(x["q"], x["k"], x["v"])
    assert {direction.dtype, count.dtype, out.dtype} == {dtype}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {y.dtype for y in (*stats, lse)} == {wide}
