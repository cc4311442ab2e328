"""Inputs of a step, and our own calls on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ops import gated_delta_step_
from ...ops.gated_delta_step.tuning import Problem
from ..family import Contender, Work, explained
from .cases import DeltaStepCase


@dataclass
class Inputs:
    """The arguments of a call, `state_pool` among them as it is before it, by name."""

    given: dict[str, Any]


@dataclass
class StepWork(Work):
    """A call on a pool of its own: `pool` is what the calls so far have left."""

    pool: Tensor | None = field(default=None, kw_only=True)


def make_inputs(case: DeltaStepCase, generator: torch.Generator) -> Inputs:
    """Random tokens and memories on the generator's device, by the problem that a sweep times.

    The same token joins its memory again and again while a call is timed: what it finds there is
    then its own value, and decays.
    """
    device = generator.device
    seed = int(torch.randint(2**31, (), generator=generator, device=device))
    made = Problem(case.name, case.rows, case.heads, case.width, case.width, case.groups)
    return Inputs(made.inputs(case.torch_dtype, device, seed) | made.call)


def in_place(
    inputs: Inputs, function: Callable[..., Tensor], notes: dict[str, Any] | None = None
) -> StepWork:
    """Calls of a function that writes a pool, on a copy of the pool."""
    pool = inputs.given["state_pool"].clone()
    given = inputs.given | {"state_pool": pool}

    def forward() -> tuple[Tensor, ...]:
        return (function(**given),)

    return StepWork(forward, {}, (given["q"],), notes=notes or {}, pool=pool)


def ours(case: DeltaStepCase, inputs: Inputs, backend: str) -> StepWork:
    """The op on a backend."""
    given = inputs.given | {"backend": backend}
    tensors = [given.pop(name) for name in ("q", "k", "v")]
    notes = explained(gated_delta_step_, *tensors, **given)

    def function(**given: Any) -> Tensor:
        return gated_delta_step_(**given, backend=backend)

    return in_place(inputs, function, notes)


def contenders(case: DeltaStepCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        mark = "" if backend == backends[0] else f" [{backend}]"
        name = f"{case.contenders[0]}{mark}"
        return Contender(
            name, case, case.op, lambda c, i: ours(c, i, backend), ours=True, modes=("fwd",)
        )

    return [builder(backend) for backend in backends]
