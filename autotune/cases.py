"""What a sweep measures: one case for each bucket of each config space that a problem meets."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from . import check
from .compile import Source
from .space import Config, Device, Key, Space, use_config
from .tables import named

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BACKENDS = ("cuda", "triton")
QUICK = 8  # configs of a case under --effort quick


@dataclass(frozen=True)
class Case:
    """One bucket of one space, and the problem that stands for it."""

    problem: Any
    dtype: str
    space: Space
    key: Key

    @property
    def name(self) -> str:
        """What identifies the case in logs."""
        return f"{self.space.name} {json.dumps(named(self.key), sort_keys=True)}"

    @property
    def label(self) -> str:
        """What a reader sees."""
        return f"{self.space.name} {self.problem.name} {self.dtype}"

    @property
    def backward(self) -> bool:
        """Whether the space's kernels form gradients."""
        return self.space.pass_.startswith("bwd")

    @property
    def function(self) -> Callable[..., Any]:
        """The public function on the space's backend."""
        return partial(self.problem.functions[0], backend=self.space.backend)

    def configs(self, device: Device, effort: str) -> list[Config]:
        """The candidates: the closed-form default, then the others that fit."""
        default = self.space.default(self.key, device)
        fitting = self.space.fitting(self.key, device)
        found = [default, *(config for config in fitting if config != default)]
        return found[:QUICK] if effort == "quick" else found

    def call(self, problem: Any, device: torch.device, seed: int) -> check.Call:
        """A call of the case's own problem, or of one of its small ones."""
        arguments = problem.inputs(DTYPES[self.dtype], device, seed) | problem.call
        return check.Call(arguments, getattr(problem, "written", ()), self.backward, seed)

    def calls(self, device: torch.device) -> list[check.Call]:
        """One call of each problem that the case runs."""
        problems = (self.problem, *self.problem.checks)
        return [self.call(problem, device, seed=0) for problem in problems]

    def sources(self, config: Config, calls: Sequence[check.Call]) -> list[Source]:
        """The kernels that the calls launch with a config; none is launched."""
        from ..ops import cuda_runtime, triton_runtime

        found: dict[str, Source] = {}
        for call in calls:
            with (
                use_config(self.space, config),
                triton_runtime.record_launches() as triton,
                cuda_runtime.record_launches() as cuda,
            ):
                call.run(self.function, {})
            sources: list[Source] = [*triton, *cuda]
            found |= {repr(source): source for source in sources}
        return list(found.values())


def tuning_of(op: str) -> ModuleType:
    """The tuning file of an op, by its folder's name, or any module of that kind by its own.

    Raises:
        ValueError: there is none.
    """
    module = op if "." in op else f"fastweights.ops.{op}.tuning"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no op {op!r} with a tuning.py") from None


def problems_of(tuning: ModuleType, shapes: Sequence[dict[str, Any]] | None) -> list[Any]:
    """The problems of a tuning file, or those that `shapes` describe.

    Raises:
        ValueError: a shape that the tuning file does not take.
    """
    if shapes is None:
        return list(tuning.PROBLEMS)
    try:
        return [tuning.problem(**shape) for shape in shapes]
    except TypeError as error:
        raise ValueError(f"shapes: {error}") from None


def collect(
    problems: Sequence[Any], device: torch.device, dtypes: Sequence[str] | None = None
) -> list[Case]:
    """A case for each bucket that is met, on every backend that runs here; the first one stays."""
    from ..ops import dispatch

    here = Device.of(device)
    found: dict[tuple[Space, Key], Case] = {}
    for problem in problems:
        for dtype in dtypes or problem.dtypes:
            function = problem.functions[0]
            arguments = problem.inputs(DTYPES[dtype], device, 0) | problem.call
            package, shape = dispatch.planned(function, **arguments)
            for backend in BACKENDS:
                if dispatch.refusal(package, backend, shape, here.arch) is not None:
                    continue
                spaces = dispatch.spaces(package, backend, shape, here)
                for space in spaces.values():
                    case = Case(problem, dtype, space, space.bucket(shape))
                    if not (case.backward and _no_backward(package, backend, shape, here)):
                        found.setdefault((space, case.key), case)
    return list(found.values())


def _no_backward(package: str, backend: str, shape: Any, here: Device) -> bool:
    """Whether a backend leaves the backward of a call to another."""
    from ..ops import dispatch

    if not hasattr(shape, "backward"):
        return False
    return dispatch.refusal(package, backend, replace(shape, backward=True), here.arch) is not None
