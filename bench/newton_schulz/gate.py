"""What a Newton–Schulz call is compared with: float64, and the error of torch's own products.

Truth is the reference in float64, and its autograd. The yardstick is the eager peer in the case's
dtype, on the same inputs; so each ratio says how much closer to float64 a contender is than what
users run today. Beside the result and its gradient stands ‖UUᵀ − I‖ of the shorter side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import reference
from ..family import Results
from .cases import EPS, NewtonSchulzCase
from .ours import Inputs
from .peers import eager

FACTOR = 1.2  # allowed error over that of eager torch, 16-bit dtypes
SAMPLE = 8  # matrices of the full-size check


def everything(case: NewtonSchulzCase, inputs: Inputs, got: dict[str, Tensor]) -> Results:
    """All matrices of the stack."""
    return _results(case, inputs.x, inputs.d_out, got)


def sample(case: NewtonSchulzCase, inputs: Inputs, got: dict[str, Tensor]) -> Results:
    """A few matrices, first and last among them.

    Raises:
        ValueError: some other matrix is not finite: poisoned memory that was never written.
    """
    for name, value in got.items():
        bad = int((~value.isfinite()).flatten(1).any(1).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {case.batch} matrices are not finite")
    count = min(case.batch, SAMPLE)
    index = torch.linspace(0, case.batch - 1, count, device=inputs.x.device).long()
    mine = {name: value[index] for name, value in got.items()}
    return _results(case, inputs.x[index], inputs.d_out[index], mine)


def _results(case: NewtonSchulzCase, x: Tensor, d_out: Tensor, got: dict[str, Tensor]) -> Results:
    def literally(x: Tensor) -> Tensor:
        return reference.newton_schulz(x, steps=case.steps, coefficients=case.coefficients, eps=EPS)

    truth = _iterated(literally, x.double(), d_out.double())
    plain = _iterated(lambda x: eager(x, case.triples), x, d_out)
    mine = got | {"orthogonality": _gram(got["out"])}
    plain["orthogonality"] = _gram(plain["out"])
    identity = torch.eye(min(case.rows, case.cols), dtype=torch.float64, device=x.device)
    truth["orthogonality"] = identity.expand_as(mine["orthogonality"])
    return Results(mine, {name: truth[name] for name in mine}, plain)


def _iterated(call: Callable[[Tensor], Tensor], x: Tensor, d_out: Tensor) -> dict[str, Tensor]:
    leaf = x.detach().requires_grad_()
    out = call(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, d_out)
    return {"out": out.detach(), "d_x": gradient}


def _gram(out: Tensor) -> Tensor:
    wide = (out.mT if out.shape[1] > out.shape[2] else out).detach().double()
    return wide @ wide.mT
