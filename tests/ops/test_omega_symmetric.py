"""The Omega rule on symmetric features: Triton's kernels under the interpreter."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, use_config
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops.omega import symmetric_back
from fastweights.ops.omega import triton as backend
from helpers import inputs, oracle
from helpers.omega import Case, shape_of

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(),
        reason="compiled kernels run instead, see test_omega_symmetric_gpu.py",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

CPU, FP32 = torch.device("cpu"), torch.float32
CASE = Case(
    batch=2, tokens=19, heads=2, width=6, values=5, chunk_size=8, momentum=False, degree=2,
    symmetric=True,
)  # fmt: skip
CASES = [
    CASE,
    CASE.but(window=1, gates=False, decay=False),
    CASE.but(carried=True),
    CASE.but(packed=(0, 5, 5, 14), carried=True),
    CASE.but(read_before=True, width=17, values=18, batch=1, carried=True),
    CASE.but(inner_loss="dot", chunk_size=100, carried=True),
    CASE.but(degree=1, carried=True),
]
OP = partial(ops.omega_memory, backend="triton", return_state=True)
LITERAL = partial(reference.omega_memory, return_state=True)


def check(case: Case, dtype: torch.dtype = FP32, *, grads: bool = False, **changes: Any) -> None:
    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return case.arguments(seed, dtype, device) | changes

    oracle.check_op(OP, LITERAL, arguments, dtype, CPU, seeds=(0,), grads=grads, label=case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case) -> None:
    check(case)


def test_forward_in_fp16() -> None:
    check(CASE.but(window=4, batch=1), torch.float16)


@pytest.mark.parametrize("coefficients", [None, (0.0, 0.7, 0.0), (0.0, 0.0, 0.4)])
def test_weights(coefficients: tuple[float, ...] | None) -> None:
    """Those of the defaults; and degrees that have none keep what memory they began with."""
    a = None if coefficients is None else torch.tensor(coefficients)
    check(CASE.but(batch=1, carried=True), coefficients=a)


INTERPRETED = [config for config in backend.SPACE_SYMMETRIC.configs if not config.get("HOPPER")]


@pytest.mark.parametrize("config", INTERPRETED, ids=lambda config: config.name)
def test_every_config(config: Config) -> None:
    """But those for Hopper, which the interpreter does not run."""
    dtype = FP32 if config["READ_WARPS"] == 2 else torch.float16  # what it serves
    with use_config(backend.SPACE_SYMMETRIC, config):
        check(CASE.but(width=17, values=70, batch=1, heads=1, tokens=11), dtype)


@pytest.mark.parametrize("case", [CASE.but(carried=True), CASE.but(packed=(0, 5, 19))])
def test_nothing_behind_the_tensors_is_read(case: Case) -> None:
    """The last chunk is a ragged one, and the walk goes one chunk further."""
    given = case.arguments(0, FP32, CPU)
    guarded = {
        name: inputs.at_the_end(x) if oracle.is_floating(x) else x for name, x in given.items()
    }
    y, left = OP(**guarded)
    wanted, state = OP(**given)
    assert torch.equal(y, wanted)
    assert torch.equal(left.state, state.state)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_read_is_the_features_times_the_state(backend: str) -> None:
    """Rows of a state are in the order of `polynomial_features`: nothing written, all read."""
    given = CASE.arguments(0, FP32, CPU)
    _, left = ops.omega_memory(**given, return_state=True, backend=backend)
    again = {name: x for name, x in given.items() if name != "decay"}
    again |= {"step": torch.zeros_like(given["step"]), "initial_state": left.state}
    y, _ = ops.omega_memory(**again, backend=backend)
    phi = ops.polynomial_features(given["q"], given["coefficients"])
    torch.testing.assert_close(y, torch.einsum("bthd,bhdv->bthv", phi, left.state))


# ---- backward -----------------------------------------------------------------------------------

# Of two chunks each, so that there are several spans, and one more chunk.
SMALL = CASE.but(batch=1, heads=1)


@pytest.fixture
def _short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_back, "SPAN_CHUNKS", 2)


@pytest.mark.parametrize(
    "case",
    [
        CASE.but(carried=True),
        CASE.but(window=1, gates=False, decay=False),
        CASE.but(packed=(0, 5, 5, 14), carried=True),
        CASE.but(read_before=True, width=17, values=18, batch=1, carried=True),
        CASE.but(inner_loss="dot", tokens=70, heads=1, batch=1, carried=True),
        CASE.but(degree=1, carried=True),
        SMALL.but(values=70, tokens=11),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.usefixtures("_short_spans")
def test_backward(case: Case) -> None:
    """The dot loss in chunks of 64, which is what it is walked in."""
    check(case, grads=True)


@pytest.mark.parametrize("chunks", [1, 8])
def test_backward_in_spans_of_any_length(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_back, "SPAN_CHUNKS", chunks)
    check(SMALL, grads=True)


@pytest.mark.usefixtures("_short_spans")
def test_backward_in_fp16() -> None:
    check(CASE.but(window=4, batch=1), torch.float16, grads=True)


@pytest.mark.parametrize("coefficients", [None, (0.0, 0.7, 0.0), (0.0, 0.0, 0.4)])
def test_backward_of_weights(coefficients: tuple[float, ...] | None) -> None:
    """Of all heads at once; a degree without features has the gradient 0."""
    a = None if coefficients is None else torch.tensor(coefficients)
    check(SMALL.but(heads=2, tokens=11, carried=True), grads=True, coefficients=a)


@pytest.mark.parametrize(
    "config", backend.SPACE_SYMMETRIC_BWD.configs, ids=lambda config: config.name
)
def test_every_config_of_backward(config: Config) -> None:
    dtype = FP32 if config["WARPS"] == 2 else torch.float16  # what it serves
    with use_config(backend.SPACE_SYMMETRIC_BWD, config):
        check(SMALL.but(values=40, tokens=11), dtype, grads=True)


def test_who_has_the_walk_for_hopper() -> None:
    """Aligned 16-bit calls in chunks of 64, of keys that are neither narrow nor wide."""
    device = target_device("sm_90")
    space = backend.SPACE_SYMMETRIC

    def walked_in_spans(device: Device = device, **changes: Any) -> bool:
        case = CASE.but(**{"width": 64, "values": 64, "chunk_size": 64, "tokens": 80} | changes)
        shape = replace(shape_of(case.arguments(0, torch.bfloat16, CPU)), aligned=True)
        return any(config.get("HOPPER") for config in space.fitting(space.bucket(shape), device))

    for changes in (
        {}, {"width": 40}, {"values": 200}, {"window": 17}, {"window": 1}, {"packed": (0, 3, 80)},
        {"inner_loss": "dot", "chunk_size": 16},
    ):  # fmt: skip
        assert walked_in_spans(**changes), changes
    for changes in (
        {"width": 32},
        {"width": 41},
        {"window": 18},
        {"chunk_size": 32},
        {"degree": 1},
    ):
        assert not walked_in_spans(**changes), changes
    assert not walked_in_spans(target_device("sm_80"))
    assert not walked_in_spans(target_device("sm_100"))


def test_a_decay_of_zero_has_a_gradient() -> None:
    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = SMALL.but(carried=True).arguments(seed, dtype, device)
        given["decay"][:, ::3] = 0.0
        return given

    oracle.check_op(OP, LITERAL, arguments, FP32, CPU, seeds=(0,))


# ---- what it takes, and what not ----------------------------------------------------------------


def reason(**changes: Any) -> str | None:
    case = CASE.but(batch=1, tokens=3, heads=1, width=4).but(**changes)
    with assume_device(target_device("sm_90")):
        return backend.supports(shape_of(case.arguments(0, torch.bfloat16, CPU)), "sm_90")


def test_supports() -> None:
    for changes in ({}, {"degree": 1}, {"width": 64, "values": 256}, {"chunk_size": 64}):
        assert reason(**changes) is None, changes
    assert "symmetric features up to degree 2" in str(reason(degree=3))
    assert "has no momentum on symmetric features" in str(reason(momentum=True))
    assert "the width of q up to 64 on symmetric features, this is 65" in str(reason(width=65))
    assert "takes chunk_size up to 64" in str(reason(chunk_size=65))
    assert "takes window − 1 up to 8 on symmetric features, this is 9" in str(reason(window=10))


def test_the_backward_waits_for_a_check_on_a_gpu() -> None:
    shape = shape_of(CASE.arguments(0, torch.bfloat16, CPU))
    assert backend.yields(shape, "sm_90") is None
    back = dataclasses.replace(shape, backward=True)
    assert "has not passed all checks on a GPU" in str(backend.yields(back, "sm_90"))
    assert backend.yields(shape_of(Case().arguments(0, FP32, CPU)), "sm_90") is None
