"""Correctness before time: a contender that fails here gets no number.

Two checks by the rule of `autotune.verify`: the error against the float64 reference, judged by that
of plain torch in the case's own dtype. What both compute is the family's to say.

- `small`: our ops only, three fresh inputs of the case's kind at a size that the reference can
  hold, everything that is returned and every gradient, on memory that arrives full of NaN.
- `full size`: every contender on the tensors that are timed, where the reference can follow, ours
  again on poisoned memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..autotune.timing import first_line, free_memory
from ..autotune.verify import Comparison
from ..ops import alloc
from .family import Contender, Family, Results, Work

SEEDS = 3


@dataclass
class Verdict:
    """Outcome of a gate.

    Attributes:
        ok: whether the contender may be timed.
        worst: the tensor closest to (or furthest past) its limit.
        error: that tensor's relative error ‖x − ref‖ / ‖ref‖.
        limit: what it had to stay under.
        failures: one line a tensor that failed.
        ratios: worst error ÷ plain torch's of the results that the family wants recorded.
    """

    ok: bool = True
    worst: str = ""
    error: float = 0.0
    limit: float = 0.0
    failures: list[str] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As a record keeps it: None for what is no number, ratios where there are some."""
        kept = self.__dict__ | {"error": self.error if math.isfinite(self.error) else None}
        ratios = {name: x for name, x in kept.pop("ratios").items() if math.isfinite(x)}
        return kept | ({"ratios": ratios} if ratios else {})


def check(
    family: Family[Any, Any], contender: Contender, inputs: Any, work: Work, seed: int
) -> Verdict | None:
    """Run the checks that apply to a contender; None if it has no result to check.

    Args:
        family: whose contender it is.
        contender: what is checked.
        inputs: the inputs it will be timed on.
        work: built on those inputs.
        seed: of the small inputs; draw a fresh one for each run.
    """
    if not contender.checked:
        return None
    verdict = Verdict()
    try:
        if contender.ours:
            device = work.grad_outputs[0].device
            small = _small(family, contender, device, seed)
            _judge(verdict, small, "small", family.ratios)
        full = _full(family, contender, inputs, work)
        _judge(verdict, full, "full size", family.ratios)
    except Exception as error:
        verdict.ok = False
        verdict.failures.append(first_line(error))
    return verdict


def _judge(verdict: Verdict, comparison: Comparison, where: str, ratios: Mapping[str, str]) -> None:
    if not comparison.rows:
        raise ValueError(f"{where}: nothing was compared")
    for name in comparison.rows:
        norm, largest = comparison.judge(name).values()
        if not (norm.ok and largest.ok):
            verdict.ok = False
            verdict.failures.append(
                f"{where} {name}: error {norm.error:.1e} (limit {norm.limit:.1e}), "
                f"largest {largest.error:.1e} (limit {largest.limit:.1e})"
            )
        if not verdict.limit or norm.error / norm.limit > verdict.error / verdict.limit:
            verdict.worst, verdict.error, verdict.limit = f"{where} {name}", norm.error, norm.limit
        if name in ratios and norm.plain:
            called, ratio = ratios[name], norm.error / norm.plain
            verdict.ratios[called] = max(ratio, verdict.ratios.get(called, 0.0))


def _run(family: Family[Any, Any], work: Work, backward: bool = True) -> dict[str, Tensor]:
    """Results and gradients of one call, by name."""
    with work.context():
        outputs = work.forward()
        got = dict(zip(family.outputs, outputs, strict=False))
        if not backward:
            return got
        gradients = work.backward(outputs)
    return got | {f"d_{n}": g for n, g in zip(work.leaves, gradients, strict=True)}


def _add(comparison: Comparison, results: Results) -> None:
    for name, truth in results.truth.items():
        got, plain = results.got[name], results.plain[name]
        comparison.add(name, got.detach(), truth.detach(), plain.detach())


def _small(
    family: Family[Any, Any], contender: Contender, device: torch.device, seed: int
) -> Comparison:
    small = replace(contender, case=contender.case.small())
    comparison = Comparison(small.case.torch_dtype, family.factor(small))
    for index in range(SEEDS):
        generator = torch.Generator(device).manual_seed(seed + index)
        inputs = family.inputs(small.case, generator)
        with alloc.poison():
            work = small.build(small.case, inputs)
            got = _run(family, work, "bwd" in contender.modes)
        _add(comparison, family.whole(small, small.case, inputs, work, got))
    free_memory(device)
    return comparison


def _full(family: Family[Any, Any], contender: Contender, inputs: Any, work: Work) -> Comparison:
    comparison = Comparison(contender.case.torch_dtype, family.factor(contender))
    # A peer's backward is run, and compiled, only where it is timed.
    timed = contender.ours or contender.case.modes != ("fwd",)
    with alloc.poison():
        got = _run(family, work, timed and "bwd" in contender.modes)
    _add(comparison, family.part(contender, contender.case, inputs, work, got))
    return comparison
