"""Newton–Schulz's CUDA C++ launcher: which kernel serves a call, and what is refused. No GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from fastweights.autotune import use_config
from fastweights.autotune.compile import ARCHITECTURES, target_device
from fastweights.autotune.space import Device, assume_device
from fastweights.ops import cuda_runtime, explain, newton_schulz
from fastweights.ops.newton_schulz import cuda as backend
from fastweights.ops.newton_schulz import cuda_spaces
from fastweights.ops.newton_schulz.coefficients import SETS, schedule
from helpers import newton_schulz as inputs

op = importlib.import_module("fastweights.ops.newton_schulz.op")
BF16 = torch.bfloat16
SPACES = {"fwd": backend.SPACE_FWD, "bwd": backend.SPACE_BWD}
needs_compiler = pytest.mark.skipif(
    cuda_runtime.missing() is not None, reason=str(cuda_runtime.missing())
)


def stack(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def shape_of(x: torch.Tensor, *, backward: bool = False, **rules: Any) -> Any:
    rules = {"steps": 5, "coefficients": "muon", "eps": 1e-7, "compute_dtype": None} | rules
    return op.replace(op.newton_schulz_shape("newton_schulz", x, **rules), backward=backward)


def launched(x: torch.Tensor, pass_: str) -> Any:
    """What a call would launch."""
    shape = shape_of(x, backward=pass_ == "bwd")
    with cuda_runtime.record_launches() as sources:
        out = backend.fwd(shape, x) if pass_ == "fwd" else backend.bwd(shape, x, x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert out.is_contiguous()
    return sources


@pytest.mark.parametrize(
    ("size", "target", "names"),
    [
        ((9, 5, 12), "sm_90", ("small<1", "small_backward<1")),
        ((9, 32, 17), "sm_80", ("small<2", "small_backward<2")),
        ((9, 33, 33), "sm_90", ("schulz<1, 1, false", "schulz_backward<1, 1, false")),
        ((9, 64, 33), "sm_90", ("schulz<1, 1, true", "schulz_backward<1, 1, true")),
        ((9, 250, 7), "sm_90", ("schulz<1, 4, true", "schulz_backward<1, 4, true")),
        ((9, 128, 129), "sm_90", ("schulz<2, 3, false", "schulz_backward<2, 3, false")),
        ((9, 129, 129), "sm_90", ("256<false", "256_backward<false")),
        ((9, 256, 200), "sm_90", ("256<true", "256_backward<true")),
        ((9, 64, 64), "sm_80", ("stack<1, 1, false", "stack_backward<1, 1, false")),
        ((9, 128, 250), "sm_80", ("stack<2, 4, false", "stack_backward<2, 4, false")),
    ],
    ids=str,
)
def test_which_kernel(size: tuple[int, ...], target: str, names: tuple[str, str]) -> None:
    with assume_device(target_device(target)):
        for pass_, name in zip(("fwd", "bwd"), names, strict=True):
            (source,) = launched(stack(*size), pass_)
            assert name in source.name, source.name
            assert source.shared <= ARCHITECTURES[target].block_shared
            assert (cuda_runtime.CSRC / source.file).is_file()


@pytest.mark.parametrize(
    ("size", "name"),
    [((9, 64, 257), "wide<1, 8, false"), ((9, 1024, 7), "wide<1, 16, true"),
     ((9, 65, 512), "wide<2, 8, false")],
    ids=str,
)  # fmt: skip
def test_which_kernel_serves_wide_ones(size: tuple[int, ...], name: str) -> None:
    with assume_device(target_device("sm_90")):
        (source,) = launched(stack(*size), "fwd")
    assert name in source.name
    assert source.threads == 512
    assert source.shared <= ARCHITECTURES["sm_90"].block_shared


@pytest.mark.parametrize("size", [(0, 64, 64), (3, 0, 9), (3, 9, 0)], ids=str)
def test_nothing_to_launch(size: tuple[int, ...]) -> None:
    with assume_device(target_device("sm_90")):
        assert launched(stack(*size), "fwd") == []
        assert launched(stack(*size), "bwd") == []


@needs_compiler
def test_supports() -> None:
    def reason(x: torch.Tensor, **rules: Any) -> str:
        return str(backend.supports(shape_of(x, **rules), Device.of(x.device).arch))

    with assume_device(target_device("sm_90")):
        for side in (1, 16, 17, 64, 65, 128, 129, 256):
            for other in (1, 33, 64, 100, 256):
                for x in (stack(2, side, other), stack(2, other, side)):
                    assert reason(x) == reason(x, backward=True) == "None"
        assert "padded to 256 × 320" in reason(stack(2, 200, 300))
        for size in ((8, 300), (600, 64), (64, 1024), (100, 512)):
            assert reason(stack(2, *size)) == "None"
            assert "no backward kernel" in reason(stack(2, *size), backward=True)
        assert "padded to 128 × 1024" in reason(stack(2, 100, 700))
        assert "padded to 64 × 1088" in reason(stack(2, 8, 1025))
        assert "fp16" in reason(stack(2, 64, 64, dtype=torch.float32))
        assert "fp16" in reason(stack(2, 64, 64), compute_dtype=torch.float32)
        own = {"coefficients": [(2.0, -1.5, 0.5)]}
        assert "at most 16 steps" in reason(stack(2, 64, 64), steps=17, **own)
        assert reason(stack(2, 64, 64), steps=16, **own) == "None"
        steep = {"coefficients": [(3.4445, -4.775, 2.0315)], "steps": 11}
        assert "range of fp16" in reason(stack(2, 64, 64), backward=True, **steep)
        assert reason(stack(2, 64, 64), **steep) == "None"
        factor = op.factor_shape("f", stack(2, 64, 64), 5, "muon", 1e-7, None)
        assert "no CUDA C++ kernel" in str(backend.supports(factor, "sm_90"))
    with assume_device(target_device("sm_80")):
        assert reason(stack(2, 128, 256), backward=True) == "None"
        assert "padded to 256 × 256" in reason(stack(2, 200, 200))
    with assume_device(target_device("sm_86")):
        assert "backward kernel" in reason(stack(2, 128, 256), backward=True)
    assert backend.supports(shape_of(stack(2, 4, 4)), "cpu") == "the tensors are on the CPU"


@pytest.mark.parametrize("pass_", SPACES)
def test_blocks_fit_beside_each_other(pass_: str) -> None:
    """EACH of them have room in the shared memory of a multiprocessor, also with all iterates."""
    device = target_device("sm_90")
    for config in SPACES[pass_].configs:
        for steps in (1, 5):
            needs = cuda_spaces.memory(
                config, pass_, steps, cuda_spaces.block_bytes(config, device)
            )
            assert needs.shared <= device.shared_bytes
            if config["ROWS"] > cuda_spaces.WARP_SIDE:
                together = max(1, config["EACH"]) * (needs.shared + cuda_spaces.SYSTEM_BYTES)
                assert together <= device.shared_bytes + cuda_spaces.SYSTEM_BYTES
            x = config["ROWS"] * config["COLS"] * 2
            if needs.kept:
                assert needs.workspace == (steps - needs.kept) * x
                assert 1 <= needs.kept <= steps


def test_every_config_is_some_call_s() -> None:
    for pass_, space in SPACES.items():
        for config in space.configs:
            with assume_device(target_device("sm_90")), use_config(space, config):
                (source,) = launched(stack(3, config["ROWS"], config["COLS"]), pass_)
            assert source.threads == 32 * config.num_warps


def test_coefficients_travel_as_one_struct() -> None:
    table = backend._table((1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    numbers = torch.frombuffer(bytearray(table.tobytes()), dtype=torch.float32)
    assert numbers.tolist() == [1, 2, 3, 4, 5, 6] + [0] * 42


@pytest.mark.parametrize("name", SETS)
def test_scaled_coefficients_are_the_same_iteration(name: str) -> None:
    """In float64 to its rounding; c is one, so that kernels may leave out its product."""
    plain = tuple(schedule("op", name, 5))
    scale, scaled = backend.scaled(plain)
    assert scaled[2::3] == (1.0,) * 5
    assert 0.5 < scale < 2
    start = inputs.orthogonal(20, 0).double() @ torch.linspace(0, 1, 20).double().diag()

    def run(x: torch.Tensor, numbers: tuple[float, ...]) -> torch.Tensor:
        for a, b, c in zip(*(iter(numbers),) * 3, strict=True):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    torch.testing.assert_close(run(scale * start, scaled), run(start, plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("c", [0.0, -0.5, 1e-3, 100.0])
def test_coefficients_that_cannot_be_scaled_stay(c: float) -> None:
    plain = (1.5, -0.5, c, 2.0, -1.5, 0.5)
    assert backend.scaled(plain) == (1.0, plain)


@needs_compiler
def test_explain_says_why_auto_went_past() -> None:
    with assume_device(target_device("sm_90")):
        said = explain(newton_schulz, stack(1, 200, 256))
    assert said.backend == "triton"
    assert "slower for fewer than" in said.refused["cuda"]


def test_what_is_left_to_others() -> None:
    """Few large matrices, for which a block each is slow."""
    for size in ((1, 200, 256), (8, 256, 256)):
        assert backend.yields(shape_of(stack(*size)), "sm_90") is not None
    for size in ((1, 128, 256), (9, 256, 256), (1, 64, 1000)):
        assert backend.yields(shape_of(stack(*size)), "sm_90") is None
