"""Inputs of the delta rewrite, and our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ops import delta_rewrite, delta_rewrite_
from ..family import Contender, Work, explained
from .cases import FUNCTIONAL, RewriteCase

MEMORY = ("state", "normalizer")


@dataclass
class Inputs:
    """The arguments of a functional call by name: k, v, beta, state, normalizer, and q if any; of
    training those of its results' gradients, too.
    """

    given: dict[str, Tensor]
    upstream: tuple[Tensor, ...] = ()


@dataclass
class RewriteWork(Work):
    """`memory` is that of the last pool, which the calls so far have left; None of a functional
    call.
    """

    memory: dict[str, Tensor] | None = field(default=None, kw_only=True)


def make_inputs(case: RewriteCase, generator: torch.Generator) -> Inputs:
    """Random tokens, and memories that look as after some segments, on the generator's device.

    The same tokens are written again and again while a call is timed: the memory then holds them.
    """
    acc = torch.float64 if case.dtype == "fp64" else torch.float32

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device, dtype=acc)

    rows, memory = (case.rows, case.tokens, 1), (case.rows, 1, case.wide)
    given = {
        "k": normal(*rows, case.width).to(case.torch_dtype),
        "v": normal(*rows, case.values).to(case.torch_dtype),
        "beta": normal(*rows).sigmoid(),
        "state": 0.3 * normal(*memory, case.values),
        "normalizer": 0.5 * case.wide**-0.5 * normal(*memory).abs(),
    }
    if case.reads:
        given["q"] = normal(case.rows, case.reads, 1, case.width).to(case.torch_dtype)
    if not case.trained:
        return Inputs(given)
    y = normal(case.rows, case.reads, 1, case.values).to(case.torch_dtype)
    upstream = y, normal(*memory, case.values), normal(*memory)
    return Inputs({name: x.requires_grad_() for name, x in given.items()}, upstream)


def contenders(case: RewriteCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        def build(case: RewriteCase, inputs: Inputs) -> Work:
            call = _functional if case.function == FUNCTIONAL else _in_place
            return call(case, inputs, backend)

        mark = "" if backend == backends[0] else f" [{backend}]"
        modes = ("fwd", "bwd") if case.trained else ("fwd",)
        return Contender(f"{case.function}{mark}", case, case.op, build, ours=True, modes=modes)

    return [builder(backend) for backend in backends]


def _functional(case: RewriteCase, inputs: Inputs, backend: str) -> Work:
    given: dict[str, Any] = inputs.given | {"backend": backend}
    notes = explained(delta_rewrite, **given)
    leaves, upstream = (inputs.given, inputs.upstream) if case.trained else ({}, (given["k"],))
    return RewriteWork(lambda: delta_rewrite(**given), leaves, upstream, notes=notes)


def _in_place(case: RewriteCase, inputs: Inputs, backend: str) -> Work:
    """Each of the case's calls writes a pool of its own, of which it names the slots backwards."""
    tokens: dict[str, Any] = {n: x for n, x in inputs.given.items() if n not in MEMORY}
    slots = torch.arange(case.rows, device=inputs.given["k"].device).flip(0)
    pools = [
        {f"{name}_pool": inputs.given[name].flip(0) for name in MEMORY} for _ in range(case.calls)
    ]
    given = tokens | {"slots": slots, "backend": backend}
    notes = explained(delta_rewrite_, **given, **pools[0])

    def forward() -> tuple[Tensor, ...]:
        found = [delta_rewrite_(**given, **pool) for pool in pools]
        # Without queries nothing comes back; the pool stands for it.
        return tuple(pools[-1]["state_pool"] if y is None else y for y in found[-1:])

    memory = {name: pools[-1][f"{name}_pool"] for name in MEMORY}
    return RewriteWork(forward, {}, (given["k"],), notes=notes, memory=memory)
