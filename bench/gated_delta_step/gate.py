"""What a step is compared with: the eager backend in float64, which the tests hold to the loop.

o, and the memories that the call left. Plain torch is the eager backend in the case's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...autotune.check import Call
from ...ops.gated_delta_step.tuning import EAGER
from ..family import Results, Work
from .cases import DeltaStepCase
from .ours import Inputs, StepWork

SAMPLE = 8  # rows of the full-size check


def everything(case: DeltaStepCase, inputs: Inputs, work: Work, got: dict[str, Tensor]) -> Results:
    """Every row and slot."""
    return _results(inputs.given, got | _left(work))


def sample(case: DeltaStepCase, inputs: Inputs, work: Work, got: dict[str, Tensor]) -> Results:
    """A few rows, first and last among them, and their slots.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    got = got | _left(work)
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")
    given = inputs.given
    count = min(case.rows, SAMPLE)
    index = torch.linspace(0, case.rows - 1, count, device=got["out"].device).long()
    slots = given["slots"][index]
    rows = {name: given[name][index] for name in ("q", "k", "v", "log_decay", "beta")}
    rows["slots"] = torch.arange(count, device=slots.device)
    rows["state_pool"] = given["state_pool"][slots]
    mine = {name: x[index if name == "out" else slots] for name, x in got.items()}
    return _results(given | rows, mine)


def _left(work: Work) -> dict[str, Tensor]:
    assert isinstance(work, StepWork)
    assert work.pool is not None
    return {"state_pool": work.pool}


def _results(given: dict[str, Any], got: dict[str, Tensor]) -> Results:
    call = Call(given, written=("state_pool",))
    return Results(got, call.run(EAGER, dtype=torch.float64), call.run(EAGER))
