"""Inputs of a step, and our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...autotune.check import mapped
from ...ops import OmegaCache, omega_step_
from ...ops.omega_step.tuning import Problem
from ..family import Contender, Work, explained
from .cases import OmegaStepCase


@dataclass
class Inputs:
    """The arguments of a call, `cache` among them as it is before it, by name."""

    given: dict[str, Any]


@dataclass
class StepWork(Work):
    """A call on a pool of its own: `cache` is what the calls so far have left."""

    cache: OmegaCache | None = field(default=None, kw_only=True)


def problem(case: OmegaStepCase) -> Problem:
    """The problem that a sweep would time for the case; it makes the inputs."""
    sizes = (case.rows, case.heads, case.width, case.width)
    return Problem(case.name, *sizes, case.window, case.chunk_size, case.momentum)


def make_inputs(case: OmegaStepCase, generator: torch.Generator) -> Inputs:
    """Random tokens and memories on the generator's device.

    The same token joins its memory again and again while a call is timed. Steps are small enough
    for that to keep a memory bounded: those of a chunk add up to one on average.
    """
    device = generator.device
    seed = int(torch.randint(2**31, (), generator=generator, device=device))
    made = problem(case)
    given = made.inputs(case.torch_dtype, device, seed) | made.call
    given["step"] *= 2 / case.chunk_size**0.5
    return Inputs(given)


def contenders(case: OmegaStepCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        def build(case: OmegaStepCase, inputs: Inputs) -> Work:
            cache = mapped(torch.clone, inputs.given["cache"])
            given = inputs.given | {"cache": cache, "backend": backend}
            tensors = {name: given.pop(name) for name in ("q", "k", "v")}
            notes = explained(omega_step_, *tensors.values(), **given)

            def forward() -> tuple[Tensor, ...]:
                return (omega_step_(**tensors, **given),)

            return StepWork(forward, {}, (tensors["q"],), notes=notes, cache=cache)

        mark = "" if backend == backends[0] else f" [{backend}]"
        name = f"{case.contenders[0]}{mark}"
        return Contender(name, case, case.op, build, ours=True, modes=("fwd",))

    return [builder(backend) for backend in backends]
