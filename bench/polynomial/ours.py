"""Inputs of a call on polynomial features, and our own calls on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...ops import polynomial_features, polynomial_read, polynomial_update
from ..family import Contender, Work, explained
from .cases import FEATURES, READ, UPDATE, PolynomialCase

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    FEATURES: polynomial_features,
    READ: polynomial_read,
    UPDATE: polynomial_update,
}


@dataclass
class Inputs:
    """The leaves of a call in the order of its arguments, and the upstream gradient.

    x (B, T, H, d); for a read state (B, H, D, Dv) in fp32, for an update g (B, T, H, Dv).
    """

    leaves: dict[str, Tensor]
    d_out: Tensor


def make_inputs(case: PolynomialCase, generator: torch.Generator) -> Inputs:
    """Vectors of norm one on the generator's device, all else normal."""
    acc = torch.float64 if case.dtype == "fp64" else torch.float32

    def normal(*size: int, dtype: torch.dtype = case.torch_dtype) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)

    rows, heads = (case.batch, case.tokens, case.heads), (case.batch, case.heads)
    leaves = {"x": normalize(normal(*rows, case.width, dtype=acc), dim=-1).to(case.torch_dtype)}
    state = (*heads, case.wide, case.values)
    if case.function == READ:
        leaves["state"] = normal(*state, dtype=acc)
    elif case.function == UPDATE:
        leaves["g"] = normal(*rows, case.values)
    d_out = {
        FEATURES: lambda: normal(*rows, case.wide),
        READ: lambda: normal(*rows, case.values),
        UPDATE: lambda: normal(*state, dtype=acc),
    }[case.function]()
    return Inputs({name: x.requires_grad_() for name, x in leaves.items()}, d_out)


def contenders(case: PolynomialCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend; the first one's row carries the plain name, others "[backend]"."""

    def builder(backend: str) -> Contender:
        def build(case: PolynomialCase, inputs: Inputs) -> Work:
            function, tensors = FUNCTIONS[case.function], tuple(inputs.leaves.values())
            notes = explained(function, *tensors, backend=backend)
            return Work(
                forward=lambda: (function(*tensors, backend=backend),),
                leaves=inputs.leaves,
                grad_outputs=(inputs.d_out,),
                notes=notes,
            )

        mark = "" if backend == backends[0] else f" [{backend}]"
        return Contender(f"{case.function}{mark}", case, case.function, build, ours=True)

    return [builder(backend) for backend in backends]
