"""Launching without a GPU: a kernel in Triton's place says what reaches it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastweights.autotune import Config
from fastweights.ops import triton_runtime as runtime

CONFIG = Config.make(num_warps=4, num_stages=2)
DEVICE = torch.device("cuda", 0)


class Kernel:
    """Takes launches as a JIT function does; `compiled` are the launches that went past it."""

    __name__ = "probe"
    arg_names = ("x", "n", "scale", "BLOCK")

    def __init__(self, loose: tuple[str, ...] = ("n", "scale")) -> None:
        self.params = [
            SimpleNamespace(name=name, do_not_specialize=name in loose) for name in self.arg_names
        ]
        self.first: list[dict[str, Any]] = []
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**arguments: Any) -> Any:
            self.first.append(arguments)
            return self.Compiled(self)

        return run

    class Compiled:
        def __init__(self, owner: Kernel) -> None:
            self.owner = owner

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *values: self.owner.compiled.append((grid, *values))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    fake = Kernel()
    monkeypatch.setattr(runtime, "_kernel", lambda module, name: fake)
    monkeypatch.setattr(runtime, "_warm", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


def launch(programs: int = 3, block: int = 64, config: Config = CONFIG, **arguments: Any) -> None:
    given = {"scale": 0.5, "n": 7, "x": torch.zeros(8), **arguments}
    runtime.launch("probe", ("m", "f"), programs, DEVICE, config, given, {"BLOCK": block})


def test_a_warm_launch_goes_straight_to_the_compiled_kernel(kernel: Kernel) -> None:
    x = torch.zeros(8)
    launch(x=x)
    launch(programs=5, x=x, n=9)
    assert len(kernel.first) == 1
    assert kernel.first[0]["num_warps"] == 4
    (grid, first, *rest) = kernel.compiled[0]
    assert grid == (5, 1, 1)
    assert first is x
    assert rest == [9, 0.5, 64]  # in the order of the kernel's parameters


def test_what_a_kernel_is_compiled_for_makes_another_launch_cold(kernel: Kernel) -> None:
    launch()
    launch(x=torch.zeros(8, dtype=torch.float16))
    launch(x=torch.zeros(9)[1:])  # not aligned to 16 bytes
    launch(x=None)
    launch(block=128)
    tile = SimpleNamespace(base=torch.zeros(8), block_shape=[1, 64])
    launch(x=tile)
    launch(x=SimpleNamespace(base=torch.zeros(8), block_shape=[1, 128]))
    assert len(kernel.first) == 7
    assert not kernel.compiled
    launch(x=tile)
    assert len(kernel.compiled) == 1


def test_a_config_may_limit_registers(kernel: Kernel) -> None:
    launch()
    launch(config=Config.make(4, 2, REGISTERS=96))
    assert [options.get("maxnreg") for options in kernel.first] == [None, 96]


def test_no_programs_no_launch(kernel: Kernel) -> None:
    launch(programs=0)
    assert not kernel.first


def test_a_cold_launch_in_a_capture_is_refused(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch()
    with pytest.raises(RuntimeError, match="is cold: call it once before capture"):
        launch(block=128)
    assert len(kernel.first) == 1


def test_a_number_that_triton_would_compile_in_is_refused(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_kernel", lambda module, name: Kernel(loose=("scale",)))
    with pytest.raises(TypeError, match="probe: n is not in do_not_specialize"):
        launch()
