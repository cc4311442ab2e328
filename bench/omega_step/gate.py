"""What a step is compared with: the eager backend in float64, which the tests hold to the loops.

y, and everything that the call wrote. Plain torch is the eager backend in the case's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...autotune.check import Call, mapped, named
from ...ops.omega_step.tuning import EAGER
from ..family import Results, Work
from .cases import OmegaStepCase
from .ours import Inputs, StepWork, problem

SAMPLE = 8  # rows of the full-size check


def everything(case: OmegaStepCase, inputs: Inputs, work: Work, got: dict[str, Tensor]) -> Results:
    """Every row and slot."""
    assert isinstance(work, StepWork)
    return _results(case, inputs.given, got | named(work.cache))


def sample(case: OmegaStepCase, inputs: Inputs, work: Work, got: dict[str, Tensor]) -> Results:
    """A few rows, first and last among them, and their slots.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    assert isinstance(work, StepWork)
    got = got | named(work.cache)
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")
    given = inputs.given
    count = min(case.rows, SAMPLE)
    index = torch.linspace(0, case.rows - 1, count, device=got["out"].device).long()
    slots = given["slots"][index]
    rows = {
        name: x[index] for name, x in given.items() if isinstance(x, Tensor) and name != "slots"
    }
    rows["slots"] = torch.arange(count, device=slots.device)
    cache = mapped(lambda x: x[slots], given["cache"])
    mine = {name: x[index if name == "out" else slots] for name, x in got.items()}
    return _results(case, given | rows | {"cache": cache}, mine)


def _results(case: OmegaStepCase, given: dict[str, Any], got: dict[str, Tensor]) -> Results:
    compared = problem(case).compared
    call = Call(given, written=("cache",), compared=compared)
    return Results(compared(got), call.run(EAGER, dtype=torch.float64), call.run(EAGER))
