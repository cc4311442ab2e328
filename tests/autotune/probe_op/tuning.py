"""The tuning file of the tests' op."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastweights.autotune import Device, timing
from fastweights.autotune.space import assume_device

from . import count_, double, triton

GPU = Device("sm_90", shared_bytes=227 << 10, name="nvidia-test")

if "PROBE_CONFIGS" in os.environ:  # a process of its own, started by a test
    here = assume_device(GPU)  # kept: it would end with the object
    here.__enter__()
    timing.clock = triton.clock


@dataclass(frozen=True)
class Problem:
    """x of rows × cols."""

    name: str
    rows: int
    cols: int
    in_place: bool = False
    dtypes: tuple[str, ...] = ("fp32",)

    @property
    def call(self) -> dict[str, Any]:
        """None."""
        return {}

    @property
    def written(self) -> tuple[str, ...]:
        """Arguments that the call writes."""
        return ("state",) if self.in_place else ()

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two ragged ones."""
        return replace(self, rows=37), replace(self, rows=65)

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its definition."""
        return (count_, _count) if self.in_place else (double, lambda x: 2 * x)

    def inputs(self, dtype: torch.dtype, device: Any, seed: int) -> dict[str, torch.Tensor]:
        """Fresh random arguments."""
        generator = torch.Generator(device).manual_seed(seed)
        made = {
            name: torch.randn(self.rows, self.cols, generator=generator, device=device).to(dtype)
            for name in (("state", "x") if self.in_place else ("x",))
        }
        return made


def _count(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state += x
    return 2 * x


def problem(*, m: int, n: int, function: str = "double") -> Problem:
    """The problem of these sizes."""
    return Problem(f"{m}x{n}", m, n, function == "count_")


PROBLEMS = tuple(problem(m=512, n=n) for n in (16, 32, 64))
SPACES = tuple(triton.SPACES.values())
