"""Steps that keep the Omega rule bounded, and the figures that say whether it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fastweights import ops
from fastweights.reference.omega import features
from helpers import contracts, inputs
from helpers.omega import streams

CPU = torch.device("cpu")
WIDE = torch.float64
TOKENS = 8192


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Hundreds of chunks of small products: two threads spend their time waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def literal(
    k: Tensor, gate: Tensor, chunk_size: int, ends: list[int], map_: str = "identity",
    coefficients: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Token after token; `ends` of sequences, 0 first."""
    x = features(k, map_, coefficients)
    most = min(1.0, 1.6 / chunk_size**0.5)
    rows = []
    for t in range(k.shape[1]):
        begin = max((end for end in ends if end <= t), default=0)
        first = t - (t - begin) % chunk_size
        count = sum(((x[:, t] * x[:, i]).sum(-1) ** 2 for i in range(first, t + 1)), 0 * gate[:, t])
        rows.append(most * gate[:, t] / count.clamp(min=1))
    return torch.stack(rows, 1)


def unit(*size: int, seed: int = 0, dtype: torch.dtype = WIDE) -> Tensor:
    source = inputs.generator(seed, CPU)
    return normalize(torch.randn(size, generator=source, dtype=WIDE), dim=-1).to(dtype)


def gates(*size: int, seed: int = 1, dtype: torch.dtype = WIDE) -> Tensor:
    return torch.rand(size, generator=inputs.generator(seed, CPU), dtype=WIDE).to(dtype)


# ---- the rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [None, [0, 19], [0, 4, 4, 17], [0, 1, 12], [0]], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 19, 64])
def test_literal(chunk_size: int, ends: list[int] | None) -> None:
    """Ragged chunks; sequences that begin anywhere, that are empty, with padding behind."""
    batch = 2 if ends is None else 1
    k = inputs.embed(unit(batch, 19, 2, 3))
    gate = inputs.embed(gates(batch, 19, 2))
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    got = ops.omega_step_size(k, gate, chunk_size=chunk_size, cu_seqlens=cu)
    wanted = literal(k, gate, chunk_size, ends or [0])
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_keys_are_taken_as_they_are(dtype: torch.dtype) -> None:
    k, gate = unit(2, 40, 2, 16, dtype=dtype), gates(2, 40, 2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = ops.omega_step_size(k, gate, chunk_size=16)
    assert got.dtype == torch.float32
    wanted = literal(k.double(), gate.double(), 16, [0])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("map_", ["elementwise", "symmetric"])
def test_features_are_those_of_the_memory(map_: str) -> None:
    k, gate = 2 * unit(2, 20, 2, 3), gates(2, 20, 2)
    a = 0.5 + gates(2, 3, seed=5)
    if map_ == "symmetric":
        a[:, 0] = 0
    got = ops.omega_step_size(k, gate, chunk_size=8, feature_map=map_, coefficients=a)
    torch.testing.assert_close(got, literal(k, gate, 8, [0], map_, a))


def test_gradcheck() -> None:
    """Keys longer than one: at the floor of n there is a kink."""
    k, gate, a = 1.5 * unit(1, 7, 2, 3), gates(1, 7, 2), 0.7 + gates(3, seed=5)
    leaves = [x.requires_grad_() for x in (k, gate, a)]
    for cu in (None, torch.tensor([0, 3, 7], dtype=torch.int32)):

        def call(k: Tensor, gate: Tensor, a: Tensor, cu: Tensor | None = cu) -> Tensor:
            return ops.omega_step_size(
                k, gate, chunk_size=4, feature_map="elementwise", coefficients=a, cu_seqlens=cu
            )

        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)


def test_no_token_looks_ahead() -> None:
    k, gate = unit(1, 24, 2, 4).requires_grad_(), gates(1, 24, 2)
    step = ops.omega_step_size(k, gate, chunk_size=8)
    for t in (0, 5, 8, 15, 23):
        (grad,) = torch.autograd.grad(step[:, t].sum(), k, retain_graph=True)
        assert not grad[:, t + 1 :].any(), t
        assert not grad[:, : t - t % 8].any(), t
        assert grad[:, t].any() or t % 8 == 0, t


def test_step_sizes_that_are_known() -> None:
    same = unit(1, 1, 2, 4).expand(1, 20, 2, 4)
    ones = torch.ones(1, 20, 2, dtype=WIDE)
    got = ops.omega_step_size(same, ones, chunk_size=16, eta_max=0.3)
    count = torch.arange(20) % 16 + 1
    torch.testing.assert_close(got, (0.3 / count)[None, :, None].expand(1, 20, 2).to(WIDE))
    fixed = ops.omega_step_size(same, ones / 2, chunk_size=16, step_rule="fixed")
    torch.testing.assert_close(fixed, torch.full_like(fixed, 0.95 / 16))
    wider = ops.omega_step_size(same, ones, chunk_size=16, step_rule="fixed", eta_max=0.2)
    torch.testing.assert_close(wider, torch.full_like(fixed, 0.2))
    single = ops.omega_step_size(same, ones, chunk_size=1)
    torch.testing.assert_close(single, ones)
    assert ops.omega_step_size(same[:, :0], ones[:, :0], chunk_size=16).shape == (1, 0, 2)


def test_keys_of_nothing_have_a_finite_step() -> None:
    k = torch.zeros(1, 9, 2, 4, requires_grad=True)
    step = ops.omega_step_size(k, torch.ones(1, 9, 2), chunk_size=4)
    assert torch.equal(step, torch.full_like(step, 0.8))
    (grad,) = torch.autograd.grad(step.sum(), k)
    assert not grad.any()


@pytest.mark.parametrize("packed", [False, True])
def test_fullgraph(packed: bool) -> None:
    given: dict[str, Any] = {
        "k": unit(1, 19, 2, 4, dtype=torch.float32), "gate": gates(1, 19, 2, dtype=torch.float32)
    }  # fmt: skip
    if packed:
        given["cu_seqlens"] = torch.tensor([0, 7, 16], dtype=torch.int32)
    contracts.check_fullgraph(lambda **x: ops.omega_step_size(**x, chunk_size=8), given)


REFUSED = [
    ({"k": None}, TypeError, "k must be a torch.Tensor"),
    ({"k": torch.ones(1, 4, 2)}, ValueError, "k must have 4 dimensions"),
    ({"gate": torch.ones(1, 4, 2).bfloat16()}, TypeError, "gate has dtype bfloat16"),
    ({"gate": torch.ones(1, 5, 2)}, ValueError, r"gate has size 5 .* \(the tokens of k\)"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
    ({"chunk_size": 4.0}, TypeError, "chunk_size must be an int"),
    ({"step_rule": "plain"}, ValueError, "step_rule must be one of normalised, fixed"),
    ({"eta_max": 0.0}, ValueError, "eta_max must be a finite number above 0"),
    ({"feature_map": "cubic"}, ValueError, "feature_map must be one of"),
    ({"coefficients": torch.ones(2)}, ValueError, "coefficients were given"),
    (
        {"feature_map": "elementwise", "coefficients": torch.ones(3, 2)}, ValueError,
        r"coefficients has size 3 .* \(the heads of k\)",
    ),
    ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, ValueError, "cu_seqlens ends at 5"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = {"k": torch.ones(1, 4, 2, 3), "gate": torch.ones(1, 4, 2), "chunk_size": 4}
    with pytest.raises(error, match=f"omega_step_size: {words}"):
        ops.omega_step_size(**given | changes)


# ---- streams that make the plain rule diverge ---------------------------------------------------


STREAMS = streams(TOKENS)


def scanned(k: Tensor, v: Tensor, step: Tensor, window: int, chunk_size: int) -> float:
    """The largest norm that a head's state has after any of sixteen pieces; no decay."""
    carried: dict[str, Any] = {}
    largest = 0.0
    for begin in range(0, TOKENS, 512):
        piece = (x[:, begin : begin + 512] for x in (k, k, v, step))
        q, keys, values, size = piece
        y, left = ops.omega_memory(
            q, keys, values, step=size, window=window, chunk_size=chunk_size, return_state=True,
            **carried,
        )  # fmt: skip
        assert left is not None
        carried = {"initial_state": left.state, "tail_k": left.tail_k, "tail_v": left.tail_v}
        norm = left.state.norm(dim=(2, 3)).max()
        largest = max(largest, float(norm if norm.isfinite() and y.isfinite().all() else math.inf))
    return largest


RULES = [
    (rule, window, chunk_size)
    for rule in ("normalised", "fixed")
    for window, chunk_size in ((1, 64), (4, 64), (4, 16), (8, 256))
]


def test_the_third_stream_is_what_it_says() -> None:
    k, _ = STREAMS["mean cosine 0.3"]
    cosines = torch.einsum("thd,ihd->hti", k[0, :512], k[0, 512:1024])
    assert (cosines.mean((1, 2)) - 0.3).abs().max() < 0.02
    assert (k.norm(dim=-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("rule", "window", "chunk_size"), RULES)
def test_gates_at_their_maximum_keep_the_state_bounded(
    rule: str, window: int, chunk_size: int, stream: str
) -> None:
    """By a few times the size of a value; the first stream's memory is exact: one value."""
    k, v = STREAMS[stream]
    full = torch.ones(1, TOKENS, 2)
    step = ops.omega_step_size(k, full, chunk_size=chunk_size, step_rule=rule)
    largest = scanned(k, v, step, window, chunk_size)
    size = float(v.norm(dim=-1).square().mean().sqrt())
    assert largest < 8 * size, (largest, size)


def test_the_plain_rule_diverges() -> None:
    """What the rule is for: a step of 0.1 for each of 64 equal tokens."""
    k, v = STREAMS["one repeated token"]
    assert scanned(k, v, torch.full((1, TOKENS, 2), 0.1), 1, 64) > 1e4
    k, v = STREAMS["Zipf-32"]
    assert scanned(k, v, torch.full((1, TOKENS, 2), 0.3), 1, 64) > 1e16


@pytest.mark.parametrize("stream", STREAMS)
def test_gradients_are_finite(stream: str) -> None:
    """Through memory and rule, to keys before they are normalised, values and the gate's logit."""
    k, v = (x.clone().requires_grad_() for x in STREAMS[stream])
    logit = torch.full((1, TOKENS, 2), 20.0, requires_grad=True)  # its sigmoid is 1
    keys = normalize(k, dim=-1)
    step = ops.omega_step_size(keys, logit.sigmoid(), chunk_size=64)
    y, left = ops.omega_memory(
        keys, keys, v, step=step, window=4, chunk_size=64, return_state=True
    )  # fmt: skip
    assert left is not None
    loss = y.square().mean() + left.state.square().mean()
    grads = torch.autograd.grad(loss, (k, v, logit))
    assert all(grad.isfinite().all() for grad in grads)
    assert max(float(grad.abs().max()) for grad in grads) < 1
    assert grads[0].any()
    assert grads[1].any()


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_small_features_do_not_step_further(chunk_size: int) -> None:
    """Features shorter than one: n alone would be below 1 and the memory diverge."""
    k = unit(1, 1, 1, 16, dtype=torch.float32).expand(1, 2048, 1, 16)
    v = torch.ones(1, 2048, 1, 4)
    given: dict[str, Any] = {"feature_map": "elementwise", "chunk_size": chunk_size}
    step = ops.omega_step_size(k, torch.ones(1, 2048, 1), **given)
    y, left = ops.omega_memory(k, k, v, step=step, **given, return_state=True)
    assert left is not None
    torch.testing.assert_close(y[:, -1], v[:, -1], rtol=1e-3, atol=1e-3)
    most = 1.6 / math.sqrt(chunk_size)
    x = features(k, "elementwise", None)
    literally = most / (x[0, 0, 0] @ x[0, 0, 0]) ** 2 / (torch.arange(2048) % chunk_size + 1)
    y, _ = ops.omega_memory(k, k, v, step=literally[None, :, None], **given)
    assert not (y[:, -1] - v[:, -1]).abs().max() < 1


# ---- health -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("momentum", [False, True])
def test_lambda_is_that_of_each_chunk(momentum: bool, packed: bool) -> None:
    """Against eigenvalues of what `omega_gradient` gives, at most r^(1/64) above."""
    tokens, window = 30, 3
    k = unit(1, tokens, 2, 5)
    given: dict[str, Any] = {
        "step": gates(1, tokens, 2), "decay": 1 - 0.2 * gates(1, tokens, 2, seed=2),
        "window_gates": gates(1, tokens, 2, window, seed=3),
    }  # fmt: skip
    if momentum:
        given["momentum"] = gates(1, tokens, 2, seed=4)
    state = torch.zeros(2 if packed else 1, 2, 5, 4, dtype=WIDE)
    bounds = [(0, 8), (8, 16), (16, 24), (24, 30)]
    starts, cu = [0], None
    if packed:
        bounds, starts = [(0, 8), (8, 11), (11, 19), (19, 27)], [0, 11]
        cu = torch.tensor([0, 11, 27], dtype=torch.int32)
    got = ops.omega_health(k, state, **given, window=window, chunk_size=8, cu_seqlens=cu)
    wanted = torch.zeros(2, dtype=WIDE)
    for begin, end in bounds:
        front = max(max(s for s in starts if s <= begin), begin - window + 1)
        chunk = ops.omega_gradient(
            k[:, front:end], torch.zeros(1, end - front, 2, 4, dtype=WIDE), state[:1],
            **{name: x[:, begin:end] for name, x in given.items()}, window=window,
        )  # fmt: skip
        x = k[0, front:end].transpose(0, 1)
        matrix = x.mT @ (chunk.write[0, :, -1, :, None] * x)
        wanted = torch.maximum(wanted, torch.linalg.eigvalsh(matrix).amax(-1))
    assert (got.lambda_max >= wanted * (1 - 1e-12)).all()
    assert (got.lambda_max <= wanted * 5 ** (1 / 64)).all()


def test_lambda_of_a_run_of_equal_tokens_is_the_sum_of_its_steps() -> None:
    k = unit(1, 1, 2, 80).expand(1, 64, 2, 80)
    step = gates(1, 64, 2)
    got = ops.omega_health(k, torch.zeros(1, 2, 80, 3, dtype=WIDE), step=step)
    torch.testing.assert_close(got.lambda_max, step.sum(1)[0])
    nothing = ops.omega_health(0 * k, torch.zeros(1, 2, 80, 3, dtype=WIDE), step=step)
    assert not nothing.lambda_max.any()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("rule", ["normalised", "fixed"])
def test_lambda_under_the_rule_is_below_two(rule: str, stream: str) -> None:
    k = STREAMS[stream][0][:, :1024]
    full = torch.ones(1, 1024, 2)
    given = {"window": 4, "chunk_size": 64}
    state = torch.zeros(1, 2, 16, 16)
    step = ops.omega_step_size(k, full, chunk_size=64, step_rule=rule)
    assert ops.omega_health(k, state, step=step, **given).lambda_max.max() < 2
    plain = ops.omega_health(k, state, step=0.3 * full, **given)
    assert plain.lambda_max.max() > 2


def test_half_lives_and_norms() -> None:
    k = unit(2, 50, 2, 5)
    state = torch.randn(2, 2, 5, 4, dtype=WIDE)
    lives = torch.arange(1, 101, dtype=WIDE).reshape(2, 50, 1) * torch.tensor([1.0, 3.0])
    given: dict[str, Any] = {"step": gates(2, 50, 2), "decay": 0.5 ** (1 / lives)}
    got = ops.omega_health(k, state, **given, quantiles=(0, 0.5, 1))
    wanted = torch.tensor([[1, 3], [51, 153], [100, 300]], dtype=WIDE)
    torch.testing.assert_close(got.half_life, wanted)
    torch.testing.assert_close(got.state_norm, state.flatten(2).norm(dim=-1).amax(0))
    extreme = torch.tensor([0.0, 1.0], dtype=WIDE).expand(2, 50, 2)
    got = ops.omega_health(k, state, **given | {"decay": extreme})
    assert got.half_life[:, 0].tolist() == [0, 0, 0]
    assert got.half_life[:, 1].tolist() == [math.inf] * 3
    assert (ops.omega_health(k, state, step=given["step"]).half_life == math.inf).all()


def test_padding_has_no_half_life() -> None:
    k, step = unit(1, 20, 1, 5), gates(1, 20, 1)
    decay = torch.full((1, 20, 1), 0.5, dtype=WIDE)
    decay[:, 12:] = 0.999
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    state = torch.zeros(2, 1, 5, 4, dtype=WIDE)
    got = ops.omega_health(k, state, step=step, decay=decay, cu_seqlens=cu, quantiles=(0, 1))
    torch.testing.assert_close(got.half_life, torch.ones(2, 1, dtype=WIDE))


def test_health_is_detached() -> None:
    k, step = unit(1, 9, 2, 5).requires_grad_(), gates(1, 9, 2).requires_grad_()
    state = torch.zeros(1, 2, 5, 4, dtype=WIDE, requires_grad=True)
    assert not any(x.requires_grad for x in ops.omega_health(k, state, step=step))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k": torch.ones(1, 0, 2, 3)}, ValueError, "k must hold at least one token"),
        ({"state": torch.ones(1, 2, 4, 3)}, ValueError, "state has size 4 in dimension 2"),
        ({"state": torch.ones(1, 2, 3, 3).half()}, TypeError, "state has dtype float16"),
        ({"decay": torch.ones(1, 4, 2).half()}, TypeError, "decay has dtype float16"),
        ({"quantiles": (0.5, 1.5)}, ValueError, r"quantiles must lie in \[0, 1\], got 1.5"),
    ],
)
def test_errors_of_health(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"k": torch.ones(1, 4, 2, 3), "state": torch.ones(1, 2, 3, 3)}
    with pytest.raises(error, match=f"omega_health: {words}"):
        ops.omega_health(**given | {"step": torch.ones(1, 4, 2)} | changes)
