"""Inputs of paged decoding, and our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import polar_decode
from ...ops.polar_decode.tuning import Problem
from ..family import Contender, Work, explained
from .cases import EXPANDED, OURS, DecodeCase


@dataclass
class Inputs:
    """The arguments of a call, by name."""

    given: dict[str, Any]

    def dense(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values of some sequences without pages, (B, S, Hk, D)."""
        given = self.given
        pages = given["block_tables"][rows].long()
        keys = given["max_context_len"]
        k, v = (given[name][pages].flatten(1, 2)[:, :keys] for name in ("k_cache", "v_cache"))
        return k, v


def make_inputs(case: DecodeCase, generator: torch.Generator) -> Inputs:
    """Random queries and full caches on the generator's device."""
    device = generator.device
    seed = int(torch.randint(2**31, (), generator=generator, device=device))
    problem = Problem(
        case.name, case.batch, case.heads_q, case.heads_k, case.keys, case.width, case.page_size,
        case.window,
    )  # fmt: skip
    return Inputs(problem.inputs(case.torch_dtype, device, seed) | problem.call)


def call(inputs: Inputs, backend: str) -> Work:
    """Our op on a backend.

    Raises:
        Unavailable: the backend does not support the call.
    """
    given = inputs.given | {"backend": backend}
    notes = explained(polar_decode, **given)

    def forward() -> tuple[Tensor, ...]:
        return polar_decode(**given)

    return Work(forward, {}, (given["q"],), notes=notes)


def contenders(case: DecodeCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend, and on expanded caches where the case asks for it.

    The first backend's rows carry plain names, to which the targets refer; others "[backend]".
    """
    found = []
    for backend in backends:
        mark = "" if backend == backends[0] else f" [{backend}]"

        def build(case: DecodeCase, inputs: Inputs, backend: str = backend) -> Work:
            return call(inputs, backend)

        rows = [(f"{OURS}{mark}", case)]
        if case.expanded:
            rows.append((f"{OURS}, {EXPANDED}{mark}", case.with_expanded_caches()))
        for name, sizes in rows:
            found.append(Contender(name, sizes, case.op, build, ours=True, modes=("fwd",)))
    return found
