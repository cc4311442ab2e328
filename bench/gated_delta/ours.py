"""Inputs of a call of the gated delta rule, and our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...ops import gated_delta_rule
from ..family import Contender, Work, explained
from .cases import DeltaCase


@dataclass
class Inputs:
    """The leaves of a call by the names of its arguments, and the upstream gradient."""

    leaves: dict[str, Tensor]
    d_out: Tensor


def make_inputs(case: DeltaCase, generator: torch.Generator) -> Inputs:
    """Random inputs on the generator's device: decays from 0.9 on, betas from 0 to 1."""
    acc = torch.float64 if case.dtype == "fp64" else torch.float32
    rows = (case.batch, case.tokens)

    def normal(heads: int) -> Tensor:
        size, device = (*rows, heads, case.width), generator.device
        return torch.randn(size, generator=generator, device=device, dtype=case.torch_dtype)

    def uniform() -> Tensor:
        size, device = (*rows, case.heads), generator.device
        return torch.rand(size, generator=generator, device=device, dtype=acc)

    shared = case.heads // case.groups
    q, k = normal(shared), normal(shared)
    if not case.l2norm:
        q, k = (normalize(x.to(acc), dim=-1).to(case.torch_dtype) for x in (q, k))
    leaves = {
        "q": q,
        "k": k,
        "v": normal(case.heads),
        "log_decay": (1 - 0.1 * uniform()).log(),
        "beta": uniform(),
    }
    return Inputs({name: x.requires_grad_() for name, x in leaves.items()}, normal(case.heads))


def call(case: DeltaCase, inputs: Inputs, backend: str) -> Work:
    """The op on a backend, without a note of what runs it."""

    def forward() -> tuple[Tensor, ...]:
        return (gated_delta_rule(**inputs.leaves, qk_l2norm=case.l2norm, backend=backend)[0],)

    return Work(forward, inputs.leaves, (inputs.d_out,))


def contenders(case: DeltaCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        def build(case: DeltaCase, inputs: Inputs) -> Work:
            work = call(case, inputs, backend)
            options: dict[str, Any] = {"qk_l2norm": case.l2norm, "backend": backend}
            work.notes = explained(gated_delta_rule, **inputs.leaves, **options)
            return work

        mark = "" if backend == backends[0] else f" [{backend}]"
        return Contender(f"{case.contenders[0]}{mark}", case, case.op, build, ours=True)

    return [builder(backend) for backend in backends]
