"""The Omega rule in plain torch against the literal loops, and as torch sees it."""

from __future__ import annotations

import importlib
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from fastweights.ops import flops
from helpers import contracts, inputs, oracle
from helpers.omega import Case

op = importlib.import_module("fastweights.ops.omega.op")
CPU = torch.device("cpu")
WIDE = torch.float64
OP = ops.omega_memory


def named(result: tuple[torch.Tensor, Any]) -> dict[str, torch.Tensor]:
    """y and the fields of the state that are there."""
    y, left = result
    fields = {} if left is None else left._asdict()
    return {"y": y} | {name: x for name, x in fields.items() if x is not None}


def both(
    case: Case, seed: int = 0, functions: tuple[Any, Any] = (OP, reference.omega_memory)
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results and gradients of all floating arguments, ours and those of the loops; float64."""
    return both_of(case.arguments(seed, WIDE, CPU) | {"return_state": True}, seed, functions)


def both_of(
    given: dict[str, Any], seed: int = 0, functions: tuple[Any, Any] = (OP, reference.omega_memory)
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same of the arguments of a call."""
    found = []
    for function in functions:
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
        found.append({name: x.detach() for name, x in results.items()} | gradients)
    return found[0], found[1]


def assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], most: float) -> None:
    """Relative to the size of each tensor."""
    assert list(got) == list(wanted)
    for name, x in wanted.items():
        assert got[name].shape == x.shape, name
        assert got[name].dtype == x.dtype, name
        gap = (got[name].double() - x.double()).norm()
        assert gap <= most * max(1.0, float(x.double().norm())), (name, gap)


# ---- against the loops --------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("window", [1, 4, 5, 12])
@pytest.mark.parametrize("chunk_size", [1, 4, 8, 16, 37, 64])
def test_literal(chunk_size: int, window: int, momentum: bool) -> None:
    """Ragged ends, windows longer than a chunk."""
    case = Case(1, 75, 2, 5, 4, window, chunk_size, momentum)
    given = case.arguments(0, WIDE, CPU) | {"return_state": True}
    assert_near(named(OP(**given)), named(reference.omega_memory(**given)), 1e-12)


CASES = [
    Case(window=c, chunk_size=b, momentum=m, inner_loss=loss, carried=s)
    for c, b, m, loss, s in itertools.product(
        (1, 3), (1, 8), (True, False), ("squared", "dot"), (True, False)
    )
] + [
    Case(gates=False, carried=True),
    Case(decay=False, momentum=False, window=1, gates=False),
    Case(read_before=True, carried=True),
    Case(read_before=True, momentum=False),
    Case(degree=3, carried=True),
    Case(degree=1, window=1, inner_loss="dot"),
    Case(window=12, chunk_size=4, carried=True),
    Case(packed=(0, 7, 7, 16), carried=True),
    Case(packed=(0, 4, 19), momentum=False, degree=2),
    Case(tokens=0, carried=True),
    Case(batch=0),
]
SYMMETRIC = [
    Case(width=4, symmetric=True, degree=p, window=c, momentum=m, inner_loss=loss, carried=s)
    for p, c, m, loss, s in (
        (1, 1, True, "squared", False), (2, 3, True, "squared", True),
        (2, 1, False, "dot", True), (2, 12, False, "squared", False),
        (3, 3, True, "dot", False), (3, 1, False, "squared", True),
    )
] + [
    Case(width=3, symmetric=True, degree=4, chunk_size=1, read_before=True, carried=True),
    Case(width=4, symmetric=True, degree=2, packed=(0, 7, 7, 16), carried=True),
    Case(width=1, symmetric=True, degree=2, gates=False, decay=False),
    Case(symmetric=True, degree=2, tokens=0, carried=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES + SYMMETRIC, ids=lambda case: case.name)
def test_gradients(case: Case) -> None:
    """Of every tensor, from y, the state and the tail."""
    got, wanted = both(case)
    assert_near(got, wanted, 1e-11)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_zero_coefficient_drops_its_degree(zero: int) -> None:
    """Nothing is written to its rows and nothing read; its coefficient has the gradient 0."""
    case = Case(width=4, symmetric=True, degree=3)
    given = case.arguments(0, WIDE, CPU) | {"return_state": True}
    given["coefficients"][:, zero] = 0
    got, wanted = both_of(given)
    assert_near(got, wanted, 1e-11)
    assert not got["d coefficients"][:, [0, zero]].any()
    kept = [r for r in (1, 2, 3) if r != zero]
    assert got["d coefficients"][:, kept].all()
    rows = got["state"].split([math.comb(3 + r, r) for r in (1, 2, 3)], 2)
    assert [bool(part.any()) for part in rows] == [r != zero for r in (1, 2, 3)]


def test_symmetric_features_by_default() -> None:
    """(0, 1, ½)/1.5, with which a unit key's product with itself is 1; one state, two ways."""
    case = Case(width=4, symmetric=True, degree=2)
    given = case.arguments(0, WIDE, CPU)
    given["coefficients"] = torch.tensor([0, 1, 0.5], dtype=WIDE) / 1.5
    said = OP(**given, return_state=True)
    del given["coefficients"]
    got = OP(**given, return_state=True)
    assert_near(named(got), named(said), 1e-14)
    assert_near(named(got), named(reference.omega_memory(**given, return_state=True)), 1e-12)


def test_the_state_is_that_of_polynomial_reads() -> None:
    """Rows in the order of `polynomial_features`, so that it can be read without a token."""
    case = Case(width=4, symmetric=True, degree=3)
    given = case.arguments(0, WIDE, CPU)
    y, left = OP(**given, return_state=True)
    read = ops.polynomial_read(given["q"], left.state, given["coefficients"], degree=3)
    torch.testing.assert_close(read[:, -1], y[:, -1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 1 - 1e-7, float(torch.tensor(-30.0).exp()), 1.0])
@pytest.mark.parametrize("gate", ["decay", "momentum", "step", "window_gates"])
def test_extreme_gates(gate: str, value: float) -> None:
    """Nothing is divided by a gate, and a gate of 0 has a gradient."""
    case = Case(tokens=21)
    given = case.arguments(1, WIDE, CPU)
    scale = given["step"].max() / 3 if gate == "step" else 1.0
    given[gate] = torch.full_like(given[gate], value) * scale
    given[gate][:, ::3] *= 0.5
    got = contracts.forward_backward(lambda **x: OP(**x)[0], given)
    wanted = contracts.forward_backward(lambda **x: reference.omega_memory(**x)[0], given)
    assert_near(got, wanted, 1e-11)
    assert all(x.isfinite().all() for x in got.values())


def test_gradcheck() -> None:
    case = Case(1, 5, 1, 3, 2, 2, 2, degree=2, carried=True)
    given = case.arguments(0, WIDE, CPU)
    names = [name for name, x in given.items() if oracle.is_floating(x)]
    leaves = [given[name].contiguous().requires_grad_() for name in names]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = dict(zip(names, tensors, strict=True))
        results = named(OP(**given | changed, return_state=True))
        return tuple(x for x in results.values() if oracle.is_floating(x))

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_pieces_are_the_whole(size: int) -> None:
    """Pieces of `size` chunks; a call hands state and tail to the next."""
    case = Case(1, 150, window=5, chunk_size=2)
    given = case.arguments(0, WIDE, CPU)
    whole = named(OP(**given, return_state=True))
    carried: dict[str, Any] = {}
    reads = []
    for begin in range(0, 150, 2 * size):
        piece = {
            name: x[:, begin : begin + 2 * size] if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }
        y, left = OP(**piece, **carried, return_state=True)
        assert left is not None
        reads.append(y)
        carried = {"initial_state": left.state, "initial_momentum": left.momentum}
        carried |= {name: getattr(left, name) for name in ("tail_k", "tail_v", "tail_length")}
    assert_near({"y": torch.cat(reads, 1)}, {"y": whole.pop("y")}, 1e-12)
    rest = named((y, left))
    rest.pop("y")
    assert_near(rest, whole, 1e-12)


def test_packed_sequences_are_separate_ones() -> None:
    case = Case(packed=(0, 7, 7, 16), carried=True)
    given = case.arguments(0, WIDE, CPU)
    y, left = OP(**given, return_state=True)
    assert left is not None
    of_sequences = ("initial_state", "initial_momentum", "tail_k", "tail_v", "tail_length")
    for n, (begin, end) in enumerate(((0, 7), (7, 7), (7, 16))):
        alone = {}
        for name, x in given.items():
            if name in of_sequences:
                alone[name] = x[n : n + 1]
            elif name != "cu_seqlens":
                alone[name] = x[:, begin:end] if isinstance(x, torch.Tensor) else x
        wanted = named(OP(**alone, return_state=True))
        got = {name: x[n : n + 1] for name, x in named((y, left)).items() if name != "y"}
        assert_near({"y": y[:, begin:end]} | got, wanted, 1e-13)
    assert not y[:, 16:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        Case(carried=True), Case(degree=2, chunk_size=4),
        Case(width=4, symmetric=True, degree=2, carried=True),
    ],
    ids=str,
)  # fmt: skip
def test_narrow_types(case: Case, dtype: torch.dtype) -> None:
    """By the yardstick of plain torch in the same dtype."""

    def made(seed: int, to: torch.dtype, device: torch.device) -> dict[str, Any]:
        return case.arguments(seed, to, device)

    run = partial(call_without_state, OP)
    oracle.check_op(run, partial(call_without_state, reference.omega_memory), made, dtype, CPU)


def call_without_state(function: Any, **given: Any) -> torch.Tensor:
    """y alone."""
    return function(**given)[0]


# ---- without delay ------------------------------------------------------------------------------

EXACT = [
    Case(window=c, momentum=m, inner_loss=loss, carried=s, read_before=b)
    for c, m, loss, s, b in itertools.product(
        (1, 3), (True, False), ("squared", "dot"), (True, False), (True, False)
    )
] + [
    Case(tokens=50, window=6, momentum=False),
    Case(degree=2, carried=True),
    Case(width=4, symmetric=True, degree=2, carried=True),
    Case(packed=(0, 7, 7, 16), carried=True),
    Case(tokens=0, carried=True),
]  # fmt: skip


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_exact(case: Case) -> None:
    """Blocks of sixteen tokens against the loop over single ones, with gradients."""

    def single(**given: Any) -> Any:
        return reference.omega_memory(**given | {"chunk_size": 1})

    def exact(**given: Any) -> Any:
        given.pop("chunk_size")
        return ops.omega_exact(**given)

    got, wanted = both(case, functions=(exact, single))
    assert_near(got, wanted, 1e-11)


def test_exact_in_narrow_types_and_under_autocast() -> None:
    given = Case(carried=True).arguments(0, torch.float32, CPU)
    given.pop("chunk_size")
    exact = ops.omega_exact(**given)[0]
    carried = {name: given[name].bfloat16() for name in ("tail_k", "tail_v")}
    with torch.autocast("cpu", torch.bfloat16):
        y, left = ops.omega_exact(**given | carried, return_state=True)
    assert left is not None
    assert y.dtype == torch.bfloat16
    assert left.state.dtype == torch.float32
    assert (y - exact).norm() < 0.02 * exact.norm()
    with pytest.raises(ValueError, match="omega_exact: backend='triton'"):
        ops.omega_exact(**given, backend="triton")
    with pytest.raises(TypeError, match="omega_exact: step has dtype"):
        ops.omega_exact(**given | {"step": given["step"].half()})


# ---- as torch sees it ---------------------------------------------------------------------------

CALLS = [
    Case(carried=True), Case(momentum=False, gates=False, packed=(0, 9, 19)), Case(degree=2),
    Case(symmetric=True, degree=2),
]  # fmt: skip


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_contracts(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    call = partial(call_without_state, OP)
    contracts.check_backward_twice(call, given)
    contracts.check_grad_out_untouched(call, given)
    contracts.check_expanded_grad_out(call, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(call, given).values()), 2)


@pytest.mark.parametrize("case", [CALLS[0], *CALLS[2:]], ids=lambda case: case.name)
def test_fullgraph(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU) | {"return_state": True}

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        y, left = OP(**given)
        assert left is not None
        return y, left.state, left.tail_k, left.tail_v

    contracts.check_fullgraph(call, given)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    given["v"] = given["v"].transpose(1, 2).contiguous().transpose(1, 2)  # dense, other strides
    tensors = [given.get(name) for name in op.OmegaTensors._fields]
    leaves = [
        x.detach().requires_grad_() if x is not None and oracle.is_floating(x) else x
        for x in tensors
    ]
    rules = (case.window, case.chunk_size, case.inner_loss, given.get("feature_map", "identity"),
             case.read_before, "eager")  # fmt: skip
    contracts.check_opcheck(op.MEMORY_FWD, [(*leaves, *rules)])


def test_flops() -> None:
    """Counted without running anything: two chunks of 8 and one of 3, two heads, two rows."""
    case = Case()
    with FakeTensorMode():
        given = {
            name: torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
            for name, x in case.arguments(0, torch.float32, CPU).items()
        }
        leaves = contracts.leaves(given)
        with FlopCounterMode(display=False) as counter:
            y = OP(**leaves)[0]
            y.sum().backward()
    forward = backward = 0
    for b, count in ((8, 2), (3, 1)):
        n, state = b + 2, 6 * 5
        forward += count * ((4 * b + 6 * n) * state + 2 * b * n * (6 + 5))
        backward += count * ((12 * b + 18 * n) * state + 2 * b * n * (3 * 6 + 2 * 5))
    assert flops.omega_forward(19, 8, 3, 6, 5, momentum=True) == forward
    assert flops.omega_backward(19, 8, 3, 6, 5, momentum=True) == backward
    assert counter.get_total_flops() == 4 * (forward + backward)


def test_flops_of_symmetric_features() -> None:
    """Products of two tokens are those of their keys: a chunk of 8, width 6 and 27 features."""
    given = Case(tokens=8, symmetric=True, degree=2, momentum=False).arguments(0, WIDE, CPU)
    with FlopCounterMode(display=False) as counter:
        OP(**given)
    b, n = 8, 10
    assert counter.get_total_flops() == 4 * ((2 * b + 4 * n) * 27 * 5 + 2 * b * n * (6 + 5))


def test_autocast_casts_queries_keys_and_values_alone() -> None:
    given = Case(carried=True).arguments(0, torch.float32, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        y, left = OP(**given | {"tail_k": None, "tail_v": None, "tail_length": None},
                     return_state=True)  # fmt: skip
    assert left is not None
    assert y.dtype == torch.bfloat16
    assert left.state.dtype == torch.float32


def test_views_give_equal_bits() -> None:
    given = Case().arguments(0, torch.float32, CPU)
    want = OP(**given)[0]
    for name in ("q", "k", "v", "step", "window_gates"):
        for view in (inputs.spaced, partial(inputs.embed, pad=1, offset=1)):
            got = OP(**given | {name: view(given[name].contiguous())})[0]
            assert torch.equal(got, want), name


REFUSED = [
    ({"q": lambda x: x.double()}, TypeError, "k has dtype"),
    ({"k": lambda x: x[..., :-1]}, ValueError, "k has size 5 in dimension 3"),
    ({"v": lambda x: x[:, :-1]}, ValueError, "v has size 18 in dimension 1"),
    ({"step": lambda x: x.bfloat16()}, TypeError, "step has dtype bfloat16"),
    ({"decay": lambda x: x.half()}, TypeError, "decay has dtype float16"),
    ({"momentum": lambda x: x[:, :, :1]}, ValueError, "momentum has size 1 in dimension 2"),
    ({"window_gates": lambda x: x[..., :2]}, ValueError, "window_gates has size 2"),
    ({"window": lambda x: 0}, ValueError, "window must be at least 1"),
    ({"window": lambda x: 2.0}, TypeError, "window must be an int"),
    ({"chunk_size": lambda x: 0}, ValueError, "chunk_size must be at least 1"),
    ({"inner_loss": lambda x: "cubic"}, ValueError, "inner_loss must be one of squared, dot"),
    ({"initial_state": lambda x: x[:1]}, ValueError, "initial_state has size 1"),
    ({"tail_v": lambda x: None}, ValueError, "tail_k and tail_v must be given together"),
    ({"tail_length": lambda x: x.long()}, TypeError, "tail_length has dtype int64"),
    ({"momentum": lambda x: None}, ValueError, "initial_momentum was given without momentum"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = Case(carried=True).arguments(0, torch.float32, CPU)
    with pytest.raises(error, match=words):
        OP(**given | {name: change(given[name]) for name, change in changes.items()})


def test_more_errors() -> None:
    given = Case().arguments(0, torch.float32, CPU)
    with pytest.raises(ValueError, match="coefficients were given, feature_map is identity"):
        OP(**given, coefficients=torch.ones(2))
    with pytest.raises(ValueError, match="feature_map must be one of"):
        OP(**given, feature_map="cubic")
    symmetric = {"feature_map": "symmetric"}
    with pytest.raises(ValueError, match=r"coefficients\[..., 0\] is 1.0, but degree 0 has no"):
        OP(**given, **symmetric, coefficients=torch.ones(3))
    with pytest.raises(ValueError, match="coefficients must hold at least 2 numbers"):
        OP(**given, **symmetric, coefficients=torch.zeros(1))
    with pytest.raises(ValueError, match="coefficients has size 3 in dimension 0"):
        OP(**given, **symmetric, coefficients=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="initial_state has size 6 in dimension 2, expected 27"):
        OP(**given, **symmetric, initial_state=torch.zeros(2, 2, 6, 5))
    with pytest.raises(ValueError, match="q has width 0"):
        OP(**given | {name: given[name][..., :0] for name in "qk"}, **symmetric)
    with pytest.raises(ValueError, match="tail_length was given without"):
        OP(**given, tail_length=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens needs batch size 1"):
        OP(**given, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="backend='cuda' cannot run this call"):
        OP(**given, backend="cuda")


def test_explain_checks_as_the_call_does() -> None:
    given = Case(carried=True).arguments(0, torch.float32, CPU)
    assert ops.explain(OP, **given).backend == "eager"
    with pytest.raises(TypeError, match="step has dtype"):
        ops.explain(OP, **given | {"step": given["step"].half()})
