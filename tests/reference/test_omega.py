"""The literal Omega rule: what it reduces to, and that calls can be cut, packed and derived."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.reference.omega import features, omega_gradient, omega_memory

WIDE = torch.float64
B, T, H, D, DV = 2, 19, 2, 5, 4


def arguments(seed: int = 0, tokens: int = T, window: int = 3, batch: int = B) -> dict[str, Any]:
    """Everything that a call can be given, float64; keys of norm one."""
    source = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=source, dtype=WIDE)

    def between(*size: int) -> Tensor:
        return torch.rand(size, generator=source, dtype=WIDE)

    k = normal(batch, tokens, H, D)
    return {
        "q": normal(batch, tokens, H, D),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(batch, tokens, H, DV),
        "step": between(batch, tokens, H) / window,
        "decay": 1 - 0.2 * between(batch, tokens, H),
        "window_gates": between(batch, tokens, H, window),
        "window": window,
        "momentum": 0.9 * between(batch, tokens, H),
    }


def cut(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The tokens from `begin` to `end`."""
    return {name: x[:, begin:end] if isinstance(x, Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("momentum", [True, False])
def test_one_token_at_a_time(momentum: bool) -> None:
    """Chunks of one, written out for one head; the error is taken at the state not yet decayed."""
    given = arguments(window=1) | {"window_gates": None}
    if not momentum:
        given["momentum"] = None
    y, _ = omega_memory(**given, chunk_size=1)
    q, k, v = (given[name][1, :, 1] for name in "qkv")
    step, decay = given["step"][1, :, 1], given["decay"][1, :, 1]
    state, velocity = torch.zeros(D, DV, dtype=WIDE), torch.zeros(D, DV, dtype=WIDE)
    for t in range(T):
        gradient = step[t] * torch.outer(k[t], k[t] @ state - v[t])
        carried = given["momentum"][1, t, 1] * velocity if momentum else 0
        velocity = carried - gradient
        state = decay[t] * state + velocity
        torch.testing.assert_close(y[1, t, 1], q[t] @ state, rtol=1e-12, atol=1e-12)


def test_gates_at_lag_zero_alone_are_a_window_of_one() -> None:
    given = arguments(window=4)
    gates = given["window_gates"].clone()
    gates[..., 1:] = 0
    wide, _ = omega_memory(**given | {"window_gates": gates}, chunk_size=4)
    narrow, _ = omega_memory(**given | {"window_gates": gates[..., :1], "window": 1}, chunk_size=4)
    torch.testing.assert_close(wide, narrow, rtol=1e-12, atol=1e-12)


def test_no_gates_are_gates_of_one_over_the_window() -> None:
    given = arguments(window=4)
    even = torch.full_like(given["window_gates"], 0.25)
    with_gates, _ = omega_memory(**given | {"window_gates": even}, chunk_size=4)
    without, _ = omega_memory(**given | {"window_gates": None}, chunk_size=4)
    torch.testing.assert_close(with_gates, without, rtol=1e-12, atol=1e-12)


def test_gated_delta_rule() -> None:
    """That one takes its error at the decayed state: step = decay·beta and values v/decay."""
    given = arguments(window=1) | {"window_gates": None, "momentum": None}
    alpha, beta = given["decay"], given["step"]
    changed = {"step": alpha * beta, "v": given["v"] / alpha[..., None]}
    y, _ = omega_memory(**given | changed, chunk_size=1)
    state = torch.zeros(B, H, D, DV, dtype=WIDE)
    for t in range(T):
        q, k, v = (given[name][:, t] for name in "qkv")
        state = alpha[:, t, :, None, None] * state
        error = beta[:, t, :, None] * (v - torch.einsum("bhd,bhdv->bhv", k, state))
        state = state + k[..., None] * error[..., None, :]
        read = torch.einsum("bhd,bhdv->bhv", q, state)
        torch.testing.assert_close(y[:, t], read, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_dot_loss_is_gated_linear_attention(chunk_size: int) -> None:
    """Whatever the chunk: its gradient does not depend on the state."""
    given = arguments(window=1) | {"window_gates": None, "momentum": None, "inner_loss": "dot"}
    y, _ = omega_memory(**given, chunk_size=chunk_size)
    log_rate = given["decay"].log().cumsum(1)
    rate = (log_rate[:, :, None] - log_rate[:, None]).exp()  # (B, t, i, H)
    scores = torch.einsum("bthd,bihd->btih", given["q"], given["k"]) * rate
    scores = scores * torch.ones(T, T, dtype=WIDE).tril()[..., None]
    wanted = torch.einsum("btih,bih,bihv->bthv", scores, given["step"], given["v"])
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_symmetric_features_are_their_kernel(degree: int) -> None:
    """The dot loss is then attention with Σ_r a_r (q·k)^r, and errors are kernel regression's."""
    given = arguments(window=1) | {"window_gates": None, "momentum": None, "decay": None}
    a = torch.rand(H, degree + 1, dtype=WIDE)
    a[:, 0] = 0
    rules = {"feature_map": "symmetric", "coefficients": a}
    dots = torch.einsum("bthd,bihd->bhti", given["q"], given["k"])
    keys = torch.einsum("bthd,bihd->bhti", given["k"], given["k"])

    def kernel(x: Tensor) -> Tensor:
        return sum(a[:, r, None, None] * x**r for r in range(degree + 1))

    weights = (kernel(dots) * given["step"].transpose(1, 2)[:, :, None]).tril()
    wanted = (weights @ given["v"].transpose(1, 2)).transpose(1, 2)
    y, _ = omega_memory(**given, **rules, inner_loss="dot")
    torch.testing.assert_close(y, wanted, rtol=1e-11, atol=1e-11)

    # Chunks of one: r_t = Σ_{i<t} κ(k_t, k_i) c_i − v_t, c_t = −step_t r_t.
    y, _ = omega_memory(**given, **rules, chunk_size=1)
    value, step = given["v"].transpose(1, 2), given["step"].transpose(1, 2)
    system = torch.eye(T, dtype=WIDE) + kernel(keys).tril(-1) * step[:, :, None]
    error = torch.linalg.solve(system, value)
    wanted = ((kernel(dots) * step[:, :, None]).tril() @ error).transpose(1, 2)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)


def test_full_window_is_gradient_descent_on_all_tokens() -> None:
    given = arguments(window=T) | {"decay": None, "momentum": None}
    given["window_gates"] = torch.ones(B, T, H, T, dtype=WIDE)
    _, left = omega_memory(**given, chunk_size=1, return_state=True)
    assert left is not None
    k, v, step = (given[name][0, :, 0] for name in ("k", "v", "step"))
    state = torch.zeros(D, DV, dtype=WIDE)
    for t in range(T):
        seen = slice(0, t + 1)
        state = state - step[t] * k[seen].T @ (k[seen] @ state - v[seen])
    torch.testing.assert_close(left.state[0, 0], state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [1, 3, 12])
@pytest.mark.parametrize("cuts", [(4,), (4, 8, 12), (8, 16)], ids=str)
def test_pieces_that_end_with_a_chunk_are_the_whole(window: int, cuts: tuple[int, ...]) -> None:
    given = arguments(window=window)
    whole, last = omega_memory(**given, chunk_size=4, return_state=True)
    carried: dict[str, Any] = {}
    reads = []
    for begin, end in zip((0, *cuts), (*cuts, T), strict=True):
        y, left = omega_memory(**cut(given, begin, end), chunk_size=4, return_state=True, **carried)
        assert left is not None
        reads.append(y)
        carried = {"initial_state": left.state, "initial_momentum": left.momentum}
        carried |= {"tail_k": left.tail_k, "tail_v": left.tail_v, "tail_length": left.tail_length}
    torch.testing.assert_close(torch.cat(reads, 1), whole, rtol=1e-12, atol=1e-12)
    assert last is not None
    assert left is not None
    for name, x in last._asdict().items():
        torch.testing.assert_close(getattr(left, name), x, rtol=1e-12, atol=1e-12)


def test_state_without_the_tail_is_another_function() -> None:
    given = arguments(window=5)
    whole, _ = omega_memory(**given, chunk_size=4)
    _, left = omega_memory(**cut(given, 0, 8), chunk_size=4, return_state=True)
    assert left is not None
    y, _ = omega_memory(
        **cut(given, 8, T), chunk_size=4, initial_state=left.state, initial_momentum=left.momentum
    )
    assert (y - whole[:, 8:]).norm() > 0.01 * whole[:, 8:].norm()


def test_packed_sequences_are_separate_ones() -> None:
    given = arguments(batch=1)
    bounds = [0, 7, 7, 16]
    state = torch.randn(3, H, D, DV, dtype=WIDE)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    y, left = omega_memory(
        **given, chunk_size=4, initial_state=state, cu_seqlens=cu_seqlens, return_state=True
    )
    assert left is not None
    for n, (begin, end) in enumerate(pairwise(bounds)):
        alone, after = omega_memory(
            **cut(given, begin, end), chunk_size=4, initial_state=state[n : n + 1],
            return_state=True,
        )  # fmt: skip
        assert after is not None
        torch.testing.assert_close(y[:, begin:end], alone, rtol=0, atol=0)
        for name, x in after._asdict().items():
            torch.testing.assert_close(getattr(left, name)[n : n + 1], x, rtol=0, atol=0)
    assert not y[:, 16:].any()
    assert left.tail_length.tolist() == [2, 0, 2]


def test_no_tokens_leave_the_state_as_it_is() -> None:
    state = torch.randn(B, H, D, DV, dtype=WIDE)
    y, left = omega_memory(**arguments(tokens=0), initial_state=state, return_state=True)
    assert left is not None
    assert y.shape == (B, 0, H, DV)
    torch.testing.assert_close(left.state, state, rtol=0, atol=0)
    assert left.tail_length.tolist() == [0, 0]


def test_reading_before_the_write_sees_the_state_of_the_token_before() -> None:
    given = arguments() | {"q": torch.eye(D, dtype=WIDE)[0].expand(B, T, H, D)}
    after, _ = omega_memory(**given, chunk_size=4)
    before, _ = omega_memory(**given, chunk_size=4, read_before=True)
    torch.testing.assert_close(before[:, 1:], after[:, :-1], rtol=0, atol=0)
    assert not before[:, 0].any()


def test_elementwise_features() -> None:
    x = torch.randn(3, H, D, dtype=WIDE)
    torch.testing.assert_close(features(x, "elementwise", None), (x + x**2 / 2) / 1.5)
    a = torch.randn(H, 4, dtype=WIDE)
    wanted = sum(a[:, r, None] * x**r for r in range(4))
    torch.testing.assert_close(features(x, "elementwise", a), wanted)
    with pytest.raises(ValueError, match="feature_map"):
        features(x, "cubic", None)


@pytest.mark.parametrize("loss", ["squared", "dot"])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("halo", [0, 2])
def test_one_chunk_by_its_scans(loss: str, momentum: bool, halo: int) -> None:
    """The scans of `omega_gradient` give what the loop gives, read by read and at the end."""
    given = arguments(tokens=6 + halo) | {"inner_loss": loss}
    if not momentum:
        given["momentum"] = None
    state, velocity = torch.randn(2, B, H, D, DV, dtype=WIDE).unbind(0)
    tail = {"tail_k": given["k"][:, :halo], "tail_v": given["v"][:, :halo]} if halo else {}
    inner = cut(given, halo, 6 + halo)
    y, left = omega_memory(
        **inner, chunk_size=6, initial_state=state, initial_momentum=velocity, return_state=True,
        **tail,
    )  # fmt: skip
    assert left is not None
    chunk = {name: x for name, x in inner.items() if name not in ("q", "k", "v")}
    got = omega_gradient(given["k"], given["v"], state, **chunk)

    def by_head(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    q, k, r = by_head(inner["q"]), by_head(given["k"]), by_head(got.residual)
    read = by_head(got.decay)[..., None] * (q @ state) - (got.write * (q @ k.mT)) @ r
    after = got.decay[:, -1, :, None, None] * state
    after = after - k.mT @ (got.write[:, :, -1, :, None] * r)
    if momentum:
        assert got.carry is not None
        assert got.momentum_decay is not None
        read = read + by_head(got.carry)[..., None] * (q @ velocity)
        after = after + got.carry[:, -1, :, None, None] * velocity
        moved = got.momentum_decay[:, -1, :, None, None] * velocity - got.gradient
        torch.testing.assert_close(moved, left.momentum, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(by_head(read), y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(after, left.state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("feature_map", ["identity", "elementwise"])
def test_gradients(feature_map: str) -> None:
    given = arguments(tokens=5, batch=1)
    names = [name for name, x in given.items() if isinstance(x, Tensor)]
    state, velocity = torch.randn(2, 1, H, D, DV, dtype=WIDE).unbind(0)
    leaves = [given[name].requires_grad_() for name in names]
    leaves += [state.requires_grad_(), velocity.requires_grad_()]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        changed = dict(zip((*names, "initial_state", "initial_momentum"), tensors, strict=True))
        y, left = omega_memory(
            **given | changed, chunk_size=2, feature_map=feature_map, return_state=True
        )
        assert left is not None
        assert left.momentum is not None
        return y, left.state, left.momentum

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_are_near_float64(dtype: torch.dtype) -> None:
    given = arguments()
    narrow = {
        name: x.to(dtype if name in "qkv" else torch.float32) if isinstance(x, Tensor) else x
        for name, x in given.items()
    }
    same = {name: x.double() if isinstance(x, Tensor) else x for name, x in narrow.items()}
    y, _ = omega_memory(**narrow, chunk_size=4)
    exact, _ = omega_memory(**same, chunk_size=4)
    assert y.dtype == dtype
    assert (y.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()
