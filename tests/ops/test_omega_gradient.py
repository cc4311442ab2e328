"""One chunk of the Omega rule against its literal scans, and what `omega_memory` makes of it."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from helpers import contracts, inputs, oracle
from helpers.omega import Case

CPU = torch.device("cpu")
WIDE = torch.float64
OP = ops.omega_gradient


def arguments(
    case: Case, older: int, seed: int = 0, dtype: torch.dtype = WIDE, device: torch.device = CPU
) -> dict[str, Any]:
    """A call on a chunk of case.tokens − older tokens, its tensors views with NaN around them."""
    given = case.arguments(seed, dtype, device)
    acc = WIDE if dtype == WIDE else torch.float32
    source = inputs.generator(seed + 100, device)
    state = torch.randn(case.batch, case.heads, case.wide, case.values, generator=source)
    chunk = {
        name: x[:, older:] if isinstance(x, torch.Tensor) and x.ndim > 2 else x
        for name, x in given.items()
        if name not in ("q", "k", "v", "chunk_size", "read_before")
    }
    kept = {"k": given["k"], "v": given["v"], "state": inputs.embed(state.to(acc))}
    return kept | chunk


def named(result: Any) -> dict[str, torch.Tensor]:
    """The fields that are there."""
    return {name: x for name, x in result._asdict().items() if x is not None}


def run(function: Any, given: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Results, and gradients of all floating arguments for random upstream gradients."""
    leaves = contracts.leaves(given)
    results = named(function(**leaves))
    kept = {name: x for name, x in results.items() if x.requires_grad}
    upstream = contracts.random_upstream(kept, seed)
    floating = {name: x for name, x in leaves.items() if oracle.is_floating(x)}
    grads = torch.autograd.grad(
        list(kept.values()), list(floating.values()), list(upstream.values()),
        materialize_grads=True,
    )  # fmt: skip
    gradients = {f"d {name}": g for name, g in zip(floating, grads, strict=True)}
    return {name: x.detach() for name, x in results.items()} | gradients


CASES = [
    (Case(tokens=9, window=window, momentum=momentum, inner_loss=loss), older)
    for (window, older), momentum, loss in itertools.product(
        ((1, 0), (3, 0), (3, 1), (3, 2), (12, 4)), (True, False), ("squared", "dot")
    )
] + [
    (Case(tokens=9, gates=False, decay=False, momentum=False), 2),
    (Case(tokens=9, degree=3), 2),
    (Case(tokens=9, width=4, degree=2, symmetric=True), 2),
    (Case(tokens=9, degree=2, momentum=False), 1),
    (Case(tokens=1, window=1), 0),
    (Case(batch=0, tokens=9), 1),
]


@pytest.mark.parametrize(("case", "older"), CASES, ids=lambda x: getattr(x, "name", f"h{x}"))
def test_literal(case: Case, older: int) -> None:
    """Every field, and the gradient of every argument through all of them."""
    given = arguments(case, older)
    got, wanted = run(OP, given), run(reference.omega_gradient, given)
    assert list(got) == list(wanted)
    for name, x in wanted.items():
        assert got[name].shape == x.shape, name
        assert got[name].dtype == x.dtype, name
        gap = (got[name] - x).norm()
        assert gap <= 1e-12 * max(1.0, float(x.norm())), (name, gap)


@pytest.mark.parametrize("momentum", [True, False])
def test_gates_of_zero_have_gradients(momentum: bool) -> None:
    given = arguments(Case(tokens=9, momentum=momentum), 2)
    for name in ("decay", "momentum") if momentum else ("decay",):
        given[name] = given[name].clone()
        given[name][:, 2::3] = 0
    got, wanted = run(OP, given), run(reference.omega_gradient, given)
    for name, x in wanted.items():
        assert (got[name] - x).norm() <= 1e-12 * max(1.0, float(x.norm())), name
    assert got["d decay"][:, 2::3].all()


@pytest.mark.parametrize("older", [0, 1, 2])
@pytest.mark.parametrize("loss", ["squared", "dot"])
@pytest.mark.parametrize("momentum", [True, False])
def test_omega_memory_of_one_chunk_follows(momentum: bool, loss: str, older: int) -> None:
    """y from P and R, M and S at the end from the last row of each."""
    case = Case(tokens=8 + older, momentum=momentum, inner_loss=loss)
    given = arguments(case, older)
    q = case.arguments(7, WIDE, CPU)["q"][:, older:]
    state = given.pop("state")
    velocity = torch.randn(state.shape, dtype=WIDE) if momentum else None
    k, v = given.pop("k"), given.pop("v")
    tail = {}
    if older:
        missing = torch.full((case.batch, 2 - older, case.heads, 1), float("nan"), dtype=WIDE)
        for name, x in (("tail_k", k), ("tail_v", v)):
            nothing = missing.expand(-1, -1, -1, x.shape[-1])
            tail[name] = torch.cat((nothing, x[:, :older]), 1)
        tail["tail_length"] = torch.full((case.batch,), older, dtype=torch.int32)
    y, left = ops.omega_memory(
        q, k[:, older:], v[:, older:], **given, **tail, chunk_size=8, initial_state=state,
        initial_momentum=velocity, return_state=True,
    )  # fmt: skip
    assert left is not None
    chunk = OP(k, v, state, **given)

    q, k, residual, y = (x.transpose(1, 2) for x in (q, k, chunk.residual, y))
    rate = chunk.decay.transpose(1, 2)[..., None]
    read = rate * (q @ state) - (chunk.write * (q @ k.mT)) @ residual
    after = rate[:, :, -1:] * state - k.mT @ (chunk.write[:, :, -1, :, None] * residual)
    if momentum:
        assert chunk.carry is not None
        assert chunk.momentum_decay is not None
        carry, drop = (x.transpose(1, 2)[..., None] for x in (chunk.carry, chunk.momentum_decay))
        read = read + carry * (q @ velocity)
        after = after + carry[:, :, -1:] * velocity
        moved = drop[:, :, -1:] * velocity - chunk.gradient
        torch.testing.assert_close(moved, left.momentum, rtol=1e-12, atol=1e-12)
    elif case.decay:
        plain = OP(**given | {"k": k.transpose(1, 2), "v": v, "state": state, "decay": None})
        moved = ops.omega_memory(
            q.transpose(1, 2), k.transpose(1, 2)[:, older:], v[:, older:],
            **given | tail | {"decay": None}, chunk_size=8, initial_state=state, return_state=True,
        )[1]  # fmt: skip
        assert moved is not None
        torch.testing.assert_close(state - plain.gradient, moved.state, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(read, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, left.state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [True, False])
def test_gradcheck(momentum: bool) -> None:
    """First and second derivatives."""
    given = arguments(Case(1, 4, 1, 3, 2, 2, momentum=momentum, degree=2), 1)
    names = [name for name, x in given.items() if oracle.is_floating(x)]
    leaves = [given[name].contiguous().requires_grad_() for name in names]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(named(OP(**given | dict(zip(names, tensors, strict=True)))).values())

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """By the yardstick of plain torch in the same dtype."""

    def made(seed: int, to: torch.dtype, device: torch.device) -> dict[str, Any]:
        return arguments(Case(tokens=19), 2, seed, to, device)

    def fields(function: Any) -> Any:
        return lambda **given: tuple(named(function(**given)).values())

    oracle.check_op(fields(OP), fields(reference.omega_gradient), made, dtype, CPU)


def test_fullgraph() -> None:
    given = arguments(Case(tokens=9), 2, dtype=torch.float32)
    contracts.check_fullgraph(lambda **given: tuple(named(OP(**given)).values()), given)


def test_an_expanded_state_gets_one_gradient() -> None:
    given = arguments(Case(tokens=9), 2)
    memory = given["state"][0].clone().requires_grad_()
    OP(**given | {"state": memory.expand(2, -1, -1, -1)}).gradient.square().sum().backward()
    parts = given["state"][:1].expand(2, -1, -1, -1).clone().requires_grad_()
    OP(**given | {"state": parts}).gradient.square().sum().backward()
    assert memory.grad is not None
    assert parts.grad is not None
    torch.testing.assert_close(memory.grad, parts.grad.sum(0), rtol=1e-12, atol=1e-12)


def test_autocast_casts_keys_and_values_alone() -> None:
    given = arguments(Case(tokens=9), 2, dtype=torch.float32)
    rounded = given | {name: given[name].bfloat16() for name in ("k", "v")}
    with torch.autocast("cpu", torch.bfloat16):
        got = OP(**given)
    wanted = OP(**rounded)
    for name, x in named(wanted).items():
        assert x.dtype == torch.float32, name
        assert torch.equal(getattr(got, name), x), name


def test_views_give_equal_bits() -> None:
    given = arguments(Case(tokens=9), 2, dtype=torch.float32)
    run = partial(contracts.check_views, lambda **x: tuple(named(OP(**x)).values()), given)
    for name in ("k", "v", "state", "step", "window_gates"):
        run({name: inputs.spaced(given[name].contiguous())})


REFUSED = [
    ({"k": lambda x: x[..., 0]}, ValueError, "k must have 4 dimensions"),
    ({"k": lambda x: x[:, :5]}, ValueError, "v has size 9 in dimension 1, expected 5"),
    ({"v": lambda x: x.double()}, TypeError, "v has dtype float64, k has float32"),
    ({"v": lambda x: None}, TypeError, "v must be a torch.Tensor"),
    ({"v": lambda x: x[:, :, :1]}, ValueError, "v has size 1 in dimension 2"),
    ({"state": lambda x: x.bfloat16()}, TypeError, "state has dtype bfloat16"),
    ({"state": lambda x: x[:1]}, ValueError, "state has size 1 in dimension 0"),
    ({"state": lambda x: x[:, :, :-1]}, ValueError, "state has size 5 in dimension 2"),
    ({"step": lambda x: x.half()}, TypeError, "step has dtype float16"),
    ({"step": lambda x: None}, TypeError, "step must be a torch.Tensor"),
    ({"step": lambda x: x[:, :, :1]}, ValueError, "step has size 1 in dimension 2"),
    ({"decay": lambda x: x[:, 1:]}, ValueError, r"decay has size 6 in .* \(the tokens of step\)"),
    ({"momentum": lambda x: x[:1]}, ValueError, r"momentum has size 1 .* \(the batch of k\)"),
    ({"window_gates": lambda x: x[..., 1:]}, ValueError, "window_gates has size 2"),
    ({"window": lambda x: 2, "window_gates": lambda x: None}, ValueError, "k has 9 rows for the 7"),
    ({"window": lambda x: 0}, ValueError, "window must be at least 1"),
    ({"window": lambda x: 3.0}, TypeError, "window must be an int"),
    ({"inner_loss": lambda x: "cubic"}, ValueError, "inner_loss must be one of squared, dot"),
    ({"feature_map": lambda x: "cubic"}, ValueError, "feature_map must be one of"),
    ({"coefficients": lambda x: torch.ones(2)}, ValueError, "coefficients were given"),
    (
        {"coefficients": lambda x: torch.ones(3, 2), "feature_map": lambda x: "elementwise"},
        ValueError, r"coefficients has size 3 .* \(the heads of k\)",
    ),
    ({"backend": lambda x: "triton"}, ValueError, "backend='triton'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = arguments(Case(tokens=9), 2, dtype=torch.float32)
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=f"omega_gradient: {words}"):
        OP(**given | changed)


def test_a_chunk_has_a_token() -> None:
    given = arguments(Case(tokens=9, decay=False, momentum=False, gates=False), 2)
    with pytest.raises(ValueError, match="step must hold at least one token"):
        OP(**given | {"step": given["step"][:, :0]})
