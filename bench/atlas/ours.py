"""Inputs of an Atlas case, and our own calls on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ops import atlas_memory
from ..cases import MODES
from ..family import Contender, Work, explained
from ..omega.cases import OmegaCase
from ..omega.ours import Inputs
from ..omega.ours import make_inputs as omega_inputs
from .cases import AtlasCase

__all__ = ["Inputs", "call", "contenders", "make_inputs", "rules"]


def make_inputs(case: AtlasCase, generator: torch.Generator) -> Inputs:
    """Those of the Omega rule with momentum, and output steps from 0.1 to 0.5, (B, T, H).

    Momenta are from 0.9 on, so that S holds a chunk and more: of a few tokens it has directions
    that are nothing but rounding, and Newton–Schulz makes them as large as the others. Steps are a
    tenth, with which the Omega rule stays bounded; Newton–Schulz does not see their size.
    """
    omega = OmegaCase(
        case.name, case.suites, case.batch, case.tokens, case.heads, case.width, case.window,
        case.chunk_size, momentum=True, dtype=case.dtype, device=case.device,
    )  # fmt: skip
    made = omega_inputs(omega, generator)
    step = made.leaves["step"].detach()

    def between(low: float, high: float) -> Tensor:
        x = torch.rand(step.shape, generator=generator, device=step.device, dtype=step.dtype)
        return (low + (high - low) * x).requires_grad_()

    made.leaves["step"] = (0.1 * step).requires_grad_()
    return replace(
        made,
        leaves=made.leaves | {"momentum": between(0.9, 1), "output_step": between(0.1, 0.5)},
    )


def rules(case: AtlasCase) -> dict[str, Any]:
    """What is not a tensor."""
    given: dict[str, Any] = {
        "window": case.window, "chunk_size": case.chunk_size, "ns_stride": case.ns_stride
    }  # fmt: skip
    return given | ({"feature_map": "symmetric"} if case.symmetric else {})


def call(case: AtlasCase, inputs: Inputs, backend: str) -> Work:
    """`atlas_memory` on a backend, without a note of what runs it."""

    def forward() -> tuple[Tensor, ...]:
        return (atlas_memory(**inputs.leaves, **rules(case), backend=backend)[0],)

    return Work(forward, inputs.leaves, (inputs.d_out,))


def contenders(case: AtlasCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        def build(case: AtlasCase, inputs: Inputs) -> Work:
            work = call(case, inputs, backend)
            options: dict[str, Any] = {**rules(case), "backend": backend}
            work.notes = explained(atlas_memory, **inputs.leaves, **options)
            return work

        mark = "" if backend == backends[0] else f" [{backend}]"
        return Contender(
            f"{case.contenders[0]}{mark}", case, "atlas", build, ours=True, modes=MODES
        )

    return [builder(backend) for backend in backends]
