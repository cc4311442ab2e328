"""The delta rewrite's backward by Triton under the interpreter, against float64.

Compiled kernels are tested in `test_delta_rewrite_gpu.py`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device, use_config
from fastweights.ops import alloc
from fastweights.ops.delta_rewrite import triton_back_spaces as spaces
from helpers import contracts, inputs, oracle
from helpers.delta_rewrite import MEMORY, WRITTEN, Case

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_delta_rewrite_gpu"
    ),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # rows that do not exist
]

op = importlib.import_module("fastweights.ops.delta_rewrite.op")
dispatch = importlib.import_module("fastweights.ops.dispatch")
CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
OP = partial(ops.delta_rewrite, backend="triton")
BASE = Case(batch=2, heads=1, tokens=4, reads=5, width=3, values=10, first=True)


@contextlib.contextmanager
def smallest(case: Case, dtype: torch.dtype) -> Iterator[None]:
    """The smallest tiles that fit: several of each."""
    shape = dispatch.planned(ops.delta_rewrite, **case.arguments(0, dtype, CPU))[1]
    with contextlib.ExitStack() as stack:
        for space in (spaces.SPACE_BACK, spaces.SPACE_BACK_READS):
            fitting = space.fitting(space.bucket(shape), Device.of(CPU))
            least = min(fitting, key=lambda c: c["K"] * c["C"])
            stack.enter_context(use_config(space, least))
        yield


def check(case: Case, dtype: torch.dtype) -> None:
    """Every result and gradient, into poisoned memory, of views with NaN around them."""
    oracle.check_op(
        OP, reference.delta_rewrite, case.arguments, dtype, CPU, seeds=(0,), label=case.name
    )


CASES = [
    (BASE.but(values=18), FP16),
    (BASE.but(channels=True, gamma_grad="full", heads=2, first=False, batch=1), FP32),
    (BASE.but(normalize=False, order=2, gamma_grad="full"), FP32),
    (BASE.but(denominator=False, order=2, batch=1, first=False), FP32),
    (BASE.but(correction=False, order=4, batch=1, first=False), FP16),
    (BASE.but(tokens=1, mode="sequential"), FP32),
    (BASE.but(tokens=17, reads=None, batch=1, first=False), FP16),
    (BASE.but(tokens=0), FP32),
    (BASE.but(tokens=0, denominator=False, batch=1, first=False), FP16),
    (BASE.but(reads=0, batch=1, first=False, values=33, width=7), FP32),
    (BASE.but(batch=1, reads=17, width=1, values=1, order=1, first=False), FP32),
]


@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in CASES]
)
def test_rules_and_sizes(case: Case, dtype: torch.dtype) -> None:
    with smallest(case, dtype):
        check(case, dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_every_config(dtype: torch.dtype) -> None:
    """With rows and columns that no tile divides, and columns in several runs."""
    case = BASE.but(batch=1, first=False, width=11, values=66, tokens=3, reads=5)
    truth = oracle.Oracle(
        reference.delta_rewrite, case.arguments, dtype, CPU, seeds=(0,)
    )  # fmt: skip
    shape = dispatch.planned(ops.delta_rewrite, **case.arguments(0, dtype, CPU))[1]
    tried = 0
    searched = [spaces.SPACE_BACK_READS] + [spaces.SPACE_BACK] * (dtype == FP32)
    for space in searched:
        for config in contracts.every_config(space, shape):
            truth.check(OP, config.name)
            tried += 1
    assert tried >= (11 if dtype == FP32 else 7)


def chain(given: list[dict[str, Any]], *, echo: bool, backend: str = "triton") -> oracle.Tensors:
    """Gradients of a chain of calls, and of the memory in front of it."""
    leaves = [contracts.leaves(x) for x in given]
    state, z = (leaves[0][name] for name in MEMORY)
    zero = torch.zeros((), requires_grad=True)
    held = zero.expand(state.shape)
    loss = torch.zeros(())
    for s, x in enumerate(leaves):
        rest = {name: value for name, value in x.items() if name not in MEMORY}
        more = {"echo": held} if echo else {}
        y, state, z, *after = ops.delta_rewrite(
            **rest, state=state, normalizer=z, **more, backend=backend
        )
        held = after[0] if echo else held
        loss = loss + y.float().square().mean() * (s + 1)
    loss = loss + state.sin().mean() + z.square().mean()
    if echo:
        loss = loss + (held * state.detach()).sum()
    loss.backward()
    found = {name: leaves[0][name].grad for name in MEMORY}
    names = (*WRITTEN, "q")
    return found | {f"{n}{s}": x[n].grad for s, x in enumerate(leaves) for n in names}


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_an_echo_gives_the_same_gradients(dtype: torch.dtype) -> None:
    case = BASE.but(batch=1, first=False, tokens=5)
    given = [case.arguments(s, dtype, CPU) for s in range(2)]
    with alloc.poison():
        kept, rebuilt = (chain(given, echo=echo) for echo in (False, True))
    # In 16 bits the keys of the two differ: the echo takes those of fp32.
    bound = {"rtol": 1e-4, "atol": 1e-5} if dtype == FP32 else {"rtol": 2e-2, "atol": 2e-3}
    for name, x in kept.items():
        torch.testing.assert_close(rebuilt[name], x, **bound, msg=name)


def test_views_and_expanded_gradients() -> None:
    case = BASE.but(channels=True)
    given = case.arguments(0, FP32, CPU)
    other = dict(given)
    for name in (*WRITTEN, *MEMORY, "q"):
        other[name] = inputs.spaced(given[name])
    found = [contracts.forward_backward(OP, x) for x in (given, other)]
    oracle.assert_bit_equal(found[1], found[0], "spaced")
    contracts.check_expanded_grad_out(OP, given)


def test_repeated_runs_have_equal_bits_and_leave_what_is_given() -> None:
    given = BASE.but(tokens=7).arguments(0, FP16, CPU)
    contracts.check_backward_twice(OP, given)
    contracts.check_grad_out_untouched(OP, given)


@pytest.mark.parametrize("normalize", [True, False])
def test_keys_without_a_feature(normalize: bool) -> None:
    """Zeros, and a number without a neighbour; no division by zero gets out."""
    given = BASE.but(normalize=normalize, first=False, tokens=7).arguments(0, FP32, CPU)
    for name in ("k", "q"):
        given[name][:, 2] = 0
        given[name][:, 4] = 0
        given[name][:, 4, :, 0] = 2.0
    with alloc.poison():
        got = contracts.forward_backward(OP, given)
    wanted = contracts.forward_backward(partial(ops.delta_rewrite, backend="eager"), given)
    for name, x in wanted.items():
        scale = float(x.abs().max())
        torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_nothing_to_do() -> None:
    """No rows, no heads, neither tokens nor queries."""
    for case in (
        BASE.but(batch=0, first=False), BASE.but(heads=0), BASE.but(tokens=0, reads=0)
    ):  # fmt: skip
        given = case.arguments(0, FP32, CPU)
        found = []
        for backend in ("triton", "eager"):
            call = partial(ops.delta_rewrite, backend=backend)
            found.append(contracts.forward_backward(call, given))
        oracle.assert_bit_equal(found[0], found[1], case.name)
