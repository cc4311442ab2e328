"""The Atlas memory's Triton kernels under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_atlas_gpu.py`. A program of a chunk and head takes half a
second of the interpreter in both passes: calls here are of a few, with one seed each. Momenta hold
a chunk and more (`helpers.atlas.full`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device, choose
from fastweights.ops import alloc
from fastweights.ops.atlas import triton as backend
from fastweights.ops.atlas import triton_forward, triton_spaces
from helpers import contracts, inputs, oracle
from helpers.atlas import Case, full, shape_of

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_atlas_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

CPU = torch.device("cpu")
FP32, FP16 = torch.float32, torch.float16
OP = partial(ops.atlas_memory, backend="triton")
WITH_STATE = partial(OP, return_state=True)
LITERAL = partial(reference.atlas_memory, return_state=True)
SPACES = {"fwd": backend.SPACE_FWD, "bwd": backend.SPACE_BWD}
# Two heads of two chunks, the second a ragged one.
BASE = Case(batch=1, tokens=13, stride=None)


def check(case: Case, dtype: torch.dtype = FP32) -> None:
    """y, the state and the tail, and gradients from all of them, against the loops."""
    arguments = partial(full, case)
    oracle.check_op(WITH_STATE, LITERAL, arguments, dtype, CPU, seeds=(0,), label=case.name)


def one(**changes: Any) -> Case:
    """One head of one row."""
    return BASE.but(**{"heads": 1} | changes)


# ---- against the loops --------------------------------------------------------------------------

RULES = [
    BASE,
    one(decay=False, gates=False, carried=True),
    one(inner_loss="dot", carried=True),
    one(read_before=True, tokens=11, batch=2, carried=True),
    one(read_before=True, tokens=16),
    one(degree=2, carried=True),
    one(ns_steps=3, ns_coefficients=[(3.0, -3.2, 1.2), (1.5, -0.5, 0.0)]),
]
PACKED = [
    one(tokens=19, packed=(0, 5, 5, 16), carried=True),
    one(tokens=12, packed=(0, 3, 3, 4, 10), carried=True, window=4, degree=3),
    one(tokens=10, packed=(0, 0, 8), read_before=True, carried=True),
]
SIZES = [
    one(chunk_size=1, window=1, tokens=3),
    one(chunk_size=37, tokens=50, window=5),
    one(chunk_size=64, tokens=64, window=4),
    one(chunk_size=16, tokens=1, carried=True),
    one(tokens=8, window=1),
    one(chunk_size=9, window=9, tokens=20, carried=True),
    BASE.but(heads=9, tokens=3),
    one(width=20, values=36),
    one(width=33, values=3),
    one(width=4, values=20),
    one(width=1, values=1),
    one(tokens=0, carried=True),
    one(batch=0),
]


@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
def test_rules(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed(case: Case) -> None:
    """Empty sequences, and padding full of NaN behind the last one."""
    check(case)


@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.name)
def test_sizes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [one(), PACKED[0], SIZES[1]], ids=lambda case: case.name)
def test_fp16(case: Case) -> None:
    check(case, FP16)


def test_rows_of_a_tail_that_do_not_exist() -> None:
    """They may hold anything."""
    case = one(batch=3, tokens=5, carried=True)

    def arguments(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        given = full(case, seed, dtype, device)
        for n, length in enumerate(given["tail_length"].tolist()):
            for name in ("tail_k", "tail_v"):
                given[name][n, : case.window - 1 - length] = float("nan")
        return given

    oracle.check_op(WITH_STATE, LITERAL, arguments, FP32, CPU, seeds=(0,))


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, by norm."""
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("name", ["decay", "momentum"])
def test_extreme_gates(name: str, value: float) -> None:
    """Nothing is divided by a gate, and a gate of 0 has a gradient."""
    given = full(one(tokens=11, carried=True), 0, FP32, CPU)
    given[name] = given[name].clone()
    given[name][:, ::3] = value
    exact = {n: x.double() if oracle.is_floating(x) else x for n, x in given.items()}
    with alloc.poison():
        got = contracts.forward_backward(OP, given)
    wanted = contracts.forward_backward(reference.atlas_memory, exact)
    assert wanted[f"d {name}"][:, ::3].any()
    for part in ("out0", f"d {name}", "d k", "d initial_state"):
        assert apart(got[part], wanted[part]) < 1e-4, part


def test_a_momentum_of_zeros() -> None:
    """Writes zeros, and has the gradient 0 instead of 1/eps."""
    given = full(one(tokens=16), 0, FP32, CPU)
    given["step"] = torch.zeros_like(given["step"])
    got = contracts.forward_backward(OP, given)
    assert not any(x.any() for x in got.values())


@pytest.mark.parametrize("mirror", [0, 1])
def test_iterates_in_half_precision(mirror: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bf16 has on a GPU: Newton–Schulz in fp16, of a momentum of which nothing is rounding."""
    case = one(width=64, values=61, chunk_size=64, tokens=65)
    given = full(case, 0, FP32, CPU)
    exact = {n: x.double() if oracle.is_floating(x) else x for n, x in given.items()}
    wanted = contracts.forward_backward(partial(ops.atlas_memory, backend="eager"), exact)
    for module in (triton_spaces, triton_forward, importlib.import_module(BACKWARD)):
        monkeypatch.setattr(module, "compute_dtype", lambda shape: FP16)
    with contextlib.ExitStack() as stack:
        for space in SPACES.values():
            config = next(x for x in fitting(space, case) if x["MIRROR"] == mirror)
            stack.enter_context(use_config(space, config))
        got = contracts.forward_backward(OP, given)
    found = {name: apart(got[name], wanted[name]) for name in wanted}
    print(found)
    assert 1e-5 < found["out0"] < 1e-2
    assert all(found[name] < 5e-2 for name in ("d q", "d k", "d v", "d output_step"))


# ---- every config -------------------------------------------------------------------------------

BACKWARD = "fastweights.ops.atlas.triton_backward"


def fitting(space: Space, case: Case) -> list[Config]:
    return space.fitting(space.bucket(shape_of(full(case, 0, FP32, CPU))), Device.of(CPU))


def test_no_config_is_left_out() -> None:
    for space in SPACES.values():
        left = set(space.configs)
        with assume_device(target_device("sm_90")):
            for width in (16, 64, 128):
                for dtype in (torch.bfloat16, FP32):
                    given = full(one(width=width, values=width, chunk_size=64), 0, dtype, CPU)
                    left -= set(space.fitting(space.bucket(shape_of(given)), Device.of(CPU)))
        assert not left, {config.name for config in left}


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_defaults_are_of_the_space_on_every_device(target: str) -> None:
    """Where any fits: not the widest state in fp32, nor everywhere its backward."""
    device = target_device(target)
    for space in SPACES.values():
        for width in (6, 64, 128):
            for dtype in (torch.bfloat16, FP32):
                given = full(one(width=width, values=width, chunk_size=64), 0, dtype, CPU)
                key = space.bucket(shape_of(given))
                configs = space.fitting(key, device)
                assert configs or width == 128 or (dtype == FP32 and width == 64)
                if configs:
                    assert choose(space, key, device) in configs


# ---- as torch sees it ---------------------------------------------------------------------------


def test_views_and_contracts() -> None:
    given = full(one(tokens=5), 0, FP32, CPU)
    turned = {name: x.contiguous() for name, x in given.items() if isinstance(x, torch.Tensor)}
    contracts.check_views(OP, given, turned)
    contracts.check_expanded_grad_out(OP, given)
    contracts.check_views(OP, given, {name: inputs.spaced(turned[name]) for name in "qkv"})


def test_both_backends_take_each_others_results() -> None:
    """A sequence begun by one and continued by the other; what is saved is the arguments alone."""
    given = full(one(tokens=24), 0, FP32, CPU)
    whole = ops.atlas_memory(**given, backend="eager")[0]
    names = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
    _, left = WITH_STATE(**given | {n: given[n][:, :8] for n in names})
    carried = {
        "initial_state": left.state, "initial_momentum": left.momentum, "tail_k": left.tail_k,
        "tail_v": left.tail_v, "tail_length": left.tail_length,
    }  # fmt: skip
    rest = given | {n: given[n][:, 8:] for n in names} | carried
    y = ops.atlas_memory(**rest, backend="eager")[0]
    torch.testing.assert_close(y, whole[:, 8:], rtol=1e-4, atol=1e-5)


REFUSED = [
    ({"stride": 4}, "meets Newton–Schulz once a chunk"),
    ({"symmetric": True, "degree": 2}, "not symmetric ones"),
    ({"values": 130}, "the width of v up to 128"),
    ({"width": 130}, "the width of features up to 128"),
    ({"chunk_size": 129}, "chunk_size up to 128"),
    ({"chunk_size": 4, "window": 8}, "window − 1 up to 4"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_refused_says_why(changes: Any, words: str) -> None:
    given = one(**changes).arguments(0, FP32, CPU)
    with pytest.raises(ValueError, match=words):
        OP(**given)
    with pytest.raises(ValueError, match="float64"):
        OP(**BASE.arguments(0, torch.float64, CPU))


def test_auto_goes_past_what_no_gpu_has_checked() -> None:
    shape = shape_of(BASE.arguments(0, FP32, CPU))
    assert backend.yields(shape, "cpu") is None
    assert "not been checked" in str(backend.yields(shape, "sm_90"))
