"""Correctness before time: a contender that fails here gets no number.

Two checks by the rule of `autotune.verify`: the error against the float64 reference, judged by that
of the same reference in the case's own dtype.

- `small`: our ops only, three fresh inputs of the case's kind at a ragged size that the reference
  can hold, everything that is returned and every gradient, on memory that arrives full of NaN.
- `full size`: every contender on the tensors that are timed. The last rows' outputs and dq need
  only those rows' scores, and with a causal mask nothing else contributes to the last keys' dk, dv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..autotune.timing import first_line, free_memory
from ..autotune.verify import FROBENIUS_FACTOR, Comparison
from ..ops import alloc
from .cases import Case
from .ours import Contender, Inputs, Work, make_inputs

SEEDS = 3
TAIL = 256  # rows of the full-size check
# Its key heads. One pair of a head can hold most of an fp32 error: over one head the ratio of two
# equally good computations reaches 1.5, over four it stays under 1.2.
HEADS = 4
PEERS = 3.0  # peers are checked for computing the right function, not for rounding


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
        """As a record keeps it: None for what is no number."""
        finite = math.isfinite(self.error)
        return self.__dict__ | {"error": self.error if finite else None}


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
    factor = factor or (FROBENIUS_FACTOR if contender.ours else PEERS)
    verdict = Verdict()
    try:
        if contender.ours:
            _judge(verdict, _small(contender, inputs.q.device, seed, factor), "small")
        _judge(verdict, _tail(contender, inputs, work, factor), "full size")
    except Exception as error:
        verdict.ok = False
        verdict.failures.append(first_line(error))
    return verdict


def _judge(verdict: Verdict, comparison: Comparison, where: str) -> None:
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


def _small(contender: Contender, device: torch.device, seed: int, factor: float) -> Comparison:
    case = contender.case.small()
    comparison = Comparison(case.torch_dtype, factor)
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
            comparison.add(name, got[name].detach(), truth[name].detach(), plain[name].detach())
    free_memory(device)
    return comparison


def _tail(contender: Contender, inputs: Inputs, work: Work, factor: float) -> Comparison:
    case = contender.case
    rows = min(TAIL, case.length)
    with work.context():
        outputs = work.forward()
        gradients = dict(zip(work.leaves, work.backward(outputs), strict=True))
    # The last batch entry and the last key heads: the largest offsets.
    head = max(case.heads_k - HEADS, 0)
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
    comparison = Comparison(case.torch_dtype, factor)
    for name, value in got.items():
        cut = slice(-rows, None) if name in ("d_k", "d_v") else slice(None)
        exact, yardstick = (x[name][:, cut].detach() for x in (truth, plain))
        comparison.add(name, value.detach(), exact, yardstick)
    return comparison


def _tokens_first(x: Tensor, case: Case) -> Tensor:
    """A result as (B, T, H, D), whichever of the two layouts the call returned.

    The head counts differ from the token count in every case, so the shape says which it is.
    """
    return x if x.shape[1] == case.tokens else x.transpose(1, 2)
