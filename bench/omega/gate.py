"""What a call of the Omega rule is compared with.

On small inputs all of it with the literal loops of `fastweights.reference`, in float64 and in the
case's dtype. On the tensors that are timed loops over every token would take minutes, so the truth
is the eager backend in float64, which the tests hold to the loops, and the yardstick the chunks in
plain torch in the case's dtype, on some heads of the last row: the largest offsets. Heads do not
meet, so that all tokens and all gradients of these are compared.

The gated delta rule is the Omega rule with chunks of one, a window of one, step·decay for the step
and v/decay for the values. What the first tokens read depends on them alone, and so does the
gradient of their queries: for those the loops are short.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import reference
from ...ops import omega_memory
from ..family import Results
from .cases import OmegaCase
from .ours import Inputs, operands, rules
from .peers import chunked

HEADS = 2  # of the full-size check
FIRST = 256  # tokens of the gated delta rule's

Named = dict[str, Tensor]


def everything(case: OmegaCase, inputs: Inputs, got: Named) -> Results:
    """Everything that is returned and every gradient."""

    def literally(given: Named) -> Tensor:
        return reference.omega_memory(**operands(case, given), **rules(case))[0]

    truth = _differentiated(literally, _wide(inputs.leaves), inputs.d_out)
    plain = _differentiated(literally, inputs.leaves, inputs.d_out)
    return Results(got, {name: truth[name] for name in got}, plain)


def sample(function: str, case: OmegaCase, inputs: Inputs, got: Named) -> Results:
    """The last heads of the last row; of the gated delta rule the first tokens of those.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")
    tokens = FIRST if function == "gated delta" else case.tokens

    def cut(x: Tensor) -> Tensor:
        return x[-1:, :tokens, -HEADS:]

    leaves = {name: cut(x.detach()) for name, x in inputs.leaves.items()}
    d_out = cut(inputs.d_out)
    if function == "gated delta":
        calls = [_gated_delta(case)] * 2
        got = {name: x for name, x in got.items() if name in ("out", "d_q")}
    else:
        calls = [
            lambda given: omega_memory(**operands(case, given), **rules(case), backend="eager")[0],
            lambda given: _plain(case, given),
        ]
    truth = _differentiated(calls[0], _wide(leaves), d_out)
    plain = _differentiated(calls[1], leaves, d_out)
    mine = {name: cut(x) for name, x in got.items()}
    return Results(mine, {name: truth[name] for name in mine}, plain)


def _gated_delta(case: OmegaCase) -> Callable[[Named], Tensor]:
    def call(given: Named) -> Tensor:
        given = operands(case, given)
        v = (given["v"] / given["decay"][..., None]).to(given["v"].dtype)
        step = given["step"] * given["decay"]
        return reference.omega_memory(
            given["q"], given["k"], v, step=step, decay=given["decay"], chunk_size=1
        )[0]

    return call


def _plain(case: OmegaCase, given: Named) -> Tensor:
    if case.symmetric:  # the maps of `chunked` would be D × D
        return omega_memory(**operands(case, given), **rules(case), backend="eager")[0]
    return chunked(**operands(case, given), **rules(case))


def _wide(leaves: Named) -> Named:
    return {name: x.double() for name, x in leaves.items()}


def _differentiated(call: Callable[[Named], Tensor], leaves: Named, d_out: Tensor) -> Named:
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out = call(leaves)
    gradients = torch.autograd.grad(
        out, tuple(leaves.values()), d_out.to(out.dtype), materialize_grads=True
    )
    named = {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"out": out.detach()} | named
