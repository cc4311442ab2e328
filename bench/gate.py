"""Correctness before time: a contender that fails here gets no number.

Two checks, each against the float64 reference and judged by the error of the same reference in the
case's own dtype:

- `small`: our ops only, three fresh inputs of the case's kind at a ragged size that the reference
  can hold, everything that is returned and every gradient, on memory that arrives full of NaN.
- `tail`: every contender at the timed size. Of one key head, the last rows' outputs and dq need
  only those rows' scores, and with a causal mask nothing else contributes to the last keys' dk, dv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops import alloc
from .cases import Case
from .ours import Contender, Inputs, Work, make_inputs
from .timing import first_line, free_memory

SEEDS = 3
TAIL = 256
# Of the yardstick's error. Peers are checked for computing the right function, not for rounding.
OURS, PEERS = 1.5, 3.0
MAXIMUM = 4.0  # of the yardstick's largest single error
# A tensor of fewer than FEW elements (a parameter a head) is a handful of sums over all rows, which
# cancel: its errors are single draws on both sides, so the limit is wide and the largest says no
# more than the norm. A wrong formula is off by far more.
FEW, FEW_FACTOR = 128, 8.0
FLOORS = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass
class Verdict:
    """Outcome of a gate.

    Attributes:
        ok: whether the contender may be timed.
        worst: the tensor closest to (or furthest past) its limit.
        error: that tensor's relative error ‖x − ref‖ / ‖ref‖.
        limit: what it had to stay under.
        failures: one line a tensor that failed.
    """

    ok: bool = True
    worst: str = ""
    error: float = 0.0
    limit: float = 0.0
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As a record keeps it."""
        return dict(self.__dict__)


@dataclass
class _Error:
    relative: float
    maximum: float
    plain_relative: float
    plain_maximum: float
    peak: float  # largest magnitude of the reference
    elements: int


def check(
    contender: Contender, inputs: Inputs, work: Work, seed: int, factor: float = 0
) -> Verdict:
    """Run the checks that apply to a contender.

    Args:
        contender: what is checked.
        inputs: the inputs it will be timed on.
        work: built on those inputs.
        seed: of the small inputs; draw a fresh one for each run.
        factor: allowed multiple of the plain error; 0 is the default of its kind.
    """
    factor = factor or (OURS if contender.ours else PEERS)
    verdict = Verdict()
    floor = FLOORS[contender.case.torch_dtype]
    try:
        if contender.ours:
            _judge(verdict, _small(contender, inputs.q.device, seed), factor, floor, "small")
        _judge(verdict, _tail(contender, inputs, work), factor, floor, "full size")
    except Exception as error:
        verdict.ok = False
        verdict.failures.append(first_line(error))
    return verdict


def _judge(
    verdict: Verdict, errors: dict[str, _Error], factor: float, floor: float, where: str
) -> None:
    for name, error in errors.items():
        few = error.elements < FEW
        limit = max((FEW_FACTOR if few else factor) * error.plain_relative, floor)
        maximum = math.inf if few else max(MAXIMUM * error.plain_maximum, floor * error.peak)
        # Written so that a NaN fails.
        if not (error.relative <= limit and error.maximum <= maximum):
            verdict.ok = False
            verdict.failures.append(
                f"{where} {name}: error {error.relative:.1e} (limit {limit:.1e}), "
                f"largest {error.maximum:.1e} (limit {maximum:.1e})"
            )
        if not verdict.limit or not error.relative / limit <= verdict.error / verdict.limit:
            verdict.worst, verdict.error, verdict.limit = f"{where} {name}", error.relative, limit


def _compare(got: Tensor, plain: Tensor, truth: Tensor) -> _Error:
    if got.shape != truth.shape:
        raise ValueError(f"shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    got, plain, truth = (x.detach().double() for x in (got, plain, truth))
    norm = truth.norm().clamp(min=1e-300)
    return _Error(
        relative=float((got - truth).norm() / norm),
        maximum=float((got - truth).abs().max()),
        plain_relative=float((plain - truth).norm() / norm),
        plain_maximum=float((plain - truth).abs().max()),
        peak=float(truth.abs().max()),
        elements=truth.numel(),
    )


def _worst(errors: list[_Error]) -> _Error:
    # max() would drop a NaN that is not first.
    relative = torch.tensor([e.relative for e in errors]).max().item()
    maximum = torch.tensor([e.maximum for e in errors]).max().item()
    return _Error(
        relative,
        maximum,
        max(e.plain_relative for e in errors),
        max(e.plain_maximum for e in errors),
        max(e.peak for e in errors),
        errors[0].elements,
    )


def _reference(
    function: str,
    dtype: torch.dtype,
    operands: dict[str, Tensor],
    parameters: dict[str, Tensor],
    rules: dict[str, Any],
    grad_outputs: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    """Results and gradients of the reference, operands and parameters in `dtype`, by name."""
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in operands.items()}
    # Below float64 the parameters stay fp32, as the op reads them.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    extra = {n: x.detach().to(wide).requires_grad_() for n, x in parameters.items()}
    call: dict[str, Any] = {**leaves, **rules}
    outputs: tuple[Tensor, ...]
    if function == "polar":
        call.update(extra)
        outputs = reference.polar_attention(**call)[:2]
        leaves.update(extra)
    else:
        outputs = reference.softmax_attention(**call)[:1]
    upstream = tuple(g.to(x.dtype) for g, x in zip(grad_outputs, outputs, strict=True))
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), upstream)
    named: dict[str, Tensor] = dict(zip(("out", "count"), outputs, strict=False))
    named.update({f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)})
    return named


def _small(contender: Contender, device: torch.device, seed: int) -> dict[str, _Error]:
    case = contender.case.small()
    errors: dict[str, list[_Error]] = {}
    for index in range(SEEDS):
        generator = torch.Generator(device).manual_seed(seed + index)
        inputs = make_inputs(case, generator)
        with alloc.poison():
            work = contender.build(case, inputs)
            with work.context():
                outputs = work.forward()
                gradients = work.backward(outputs)
        got = dict(zip(("out", "count"), outputs, strict=False))
        got.update({f"d_{n}": g for n, g in zip(work.leaves, gradients, strict=True)})
        operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        rules = {"window": case.window, "cu_seqlens": inputs.cu_seqlens}
        truth, plain = (
            _reference(
                contender.function, dtype, operands, inputs.parameters, rules, work.grad_outputs
            )
            for dtype in (torch.float64, case.torch_dtype)
        )
        for name in truth:
            errors.setdefault(name, []).append(_compare(got[name], plain[name], truth[name]))
    free_memory(device)
    return {name: _worst(found) for name, found in errors.items()}


def _tail(contender: Contender, inputs: Inputs, work: Work) -> dict[str, _Error]:
    case = contender.case
    rows = min(TAIL, case.length)
    with work.context():
        outputs = work.forward()
        gradients = dict(zip(work.leaves, work.backward(outputs), strict=True))
    # The last batch entry and the last key head: the largest offsets.
    head = case.heads_k - 1
    heads = slice(head * case.group, case.heads_q)
    last = slice(case.tokens - rows, case.tokens)
    operands = {
        "q": inputs.q[-1:, last, heads],
        "k": inputs.k[-1:, case.tokens - case.length :, head:],
        "v": inputs.v[-1:, case.tokens - case.length :, head:],
    }
    parameters = {name: x[heads] for name, x in inputs.parameters.items()}
    upstream = (inputs.d_out[-1:, last, heads], inputs.d_count[-1:, last, heads])
    truth, plain = (
        _reference(
            contender.function, dtype, operands, parameters, {"window": case.window},
            upstream if contender.function == "polar" else upstream[:1],
        )
        for dtype in (torch.float64, case.torch_dtype)
    )  # fmt: skip
    got: dict[str, Tensor] = {
        "out": _tokens_first(outputs[0], case)[-1:, last, heads],
        "d_q": _tokens_first(gradients["q"], case)[-1:, last, heads],
        "d_k": _tokens_first(gradients["k"], case)[-1:, last, head:],
        "d_v": _tokens_first(gradients["v"], case)[-1:, last, head:],
    }
    if contender.function == "polar":
        got["count"] = outputs[1][-1:, last, heads]
    errors = {}
    for name, value in got.items():
        cut = slice(-rows, None) if name in ("d_k", "d_v") else slice(None)
        errors[name] = _compare(value, plain[name][:, cut], truth[name][:, cut])
    return errors


def _tokens_first(x: Tensor, case: Case) -> Tensor:
    """A result as (B, T, H, D), whichever of the two layouts the call returned.

    The head counts differ from the token count in every case, so the shape says which it is.
    """
    return x if x.shape[1] == case.tokens else x.transpose(1, 2)
