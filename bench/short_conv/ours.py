"""Inputs of a short convolution, and our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import short_conv
from ..family import Contender, Work, explained
from .cases import ConvCase


@dataclass
class Inputs:
    """The leaves of a call by the names of its arguments, and the upstream gradient of y."""

    leaves: dict[str, Tensor]
    d_out: Tensor


def rules(case: ConvCase) -> dict[str, Any]:
    """Keyword arguments that are no tensors."""
    return {"activation": "silu" if case.silu else None, "residual": case.residual}


def make_inputs(case: ConvCase, generator: torch.Generator) -> Inputs:
    """Random numbers on the generator's device, weights so that sums stay of the size of z."""
    device, dtype = generator.device, case.torch_dtype

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    rows = (case.batch, case.tokens, case.channels)
    leaves = {"x": normal(*rows), "weight": normal(case.channels, case.taps) / case.taps**0.5}
    if case.gates:
        leaves |= {"gate_in": normal(*rows), "gate_out": normal(*rows)}
    return Inputs({name: x.requires_grad_() for name, x in leaves.items()}, normal(*rows))


def call(case: ConvCase, inputs: Inputs, backend: str) -> Work:
    """The op on a backend."""
    given = inputs.leaves | rules(case) | {"backend": backend}
    x, weight = given.pop("x"), given.pop("weight")
    notes = explained(short_conv, x, weight, **given)
    return Work(
        forward=lambda: (short_conv(x, weight, **given)[0],),
        leaves=inputs.leaves,
        grad_outputs=(inputs.d_out,),
        notes=notes,
    )


def contenders(case: ConvCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        mark = "" if backend == backends[0] else f" [{backend}]"
        name = f"{case.contenders[0]}{mark}"
        return Contender(name, case, case.op, lambda c, i: call(c, i, backend), ours=True)

    return [builder(backend) for backend in backends]
