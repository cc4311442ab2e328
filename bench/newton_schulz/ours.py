"""Inputs of a Newton–Schulz case, and our own calls on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...autotune.space import Device
from ...ops import dispatch, newton_schulz
from ...ops.newton_schulz.op import PACKAGE, newton_schulz_shape
from ..cases import MODES
from ..family import Contender, Work, explained
from .cases import EPS, NewtonSchulzCase


@dataclass
class Inputs:
    """The leaf x (B, m, n) and the upstream gradient d_out of the same shape."""

    x: Tensor
    d_out: Tensor


def make_inputs(case: NewtonSchulzCase, generator: torch.Generator) -> Inputs:
    """Normal matrices on the generator's device."""

    def normal() -> Tensor:
        size = (case.batch, case.rows, case.cols)
        device, dtype = generator.device, case.torch_dtype
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    return Inputs(normal().requires_grad_(), normal())


def contenders(case: NewtonSchulzCase, backends: tuple[str, ...]) -> list[Contender]:
    """The op on each backend.

    The first backend's row carries the plain name, to which the targets refer; others are marked
    "[backend]".
    """

    def builder(backend: str) -> Contender:
        def build(case: NewtonSchulzCase, inputs: Inputs) -> Work:
            rules = {"steps": case.steps, "coefficients": case.coefficients, "backend": backend}
            notes = explained(newton_schulz, inputs.x, **rules)
            return Work(
                forward=lambda: (newton_schulz(inputs.x, **rules),),
                leaves={"x": inputs.x},
                grad_outputs=(inputs.d_out,),
                notes=notes,
            )

        mark = "" if backend == backends[0] else f" [{backend}]"
        modes = tuple(m for m in MODES if m != "bwd" or _has_backward(case, backend))
        return Contender(f"{case.op}{mark}", case, case.op, build, ours=True, modes=modes)

    return [builder(backend) for backend in backends]


def _has_backward(case: NewtonSchulzCase, backend: str) -> bool:
    """Whether a backend runs the backward of a case, as far as its forward can run here at all."""
    if backend == "auto" or (case.device == "cuda" and not torch.cuda.is_available()):
        return True
    x = torch.empty(1, case.rows, case.cols, dtype=case.torch_dtype, device=case.device)
    shape = newton_schulz_shape(case.op, x, case.steps, case.coefficients, EPS, None)
    arch = Device.of(x.device).arch
    if dispatch.refusal(PACKAGE, backend, shape, arch) is not None:
        return True  # said by the forward
    return dispatch.refusal(PACKAGE, backend, replace(shape, backward=True), arch) is None
