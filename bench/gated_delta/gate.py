"""What a call of the gated delta rule is compared with.

On small inputs all of it with the literal loop of `fastweights.reference`, in float64 and in the
case's dtype. On the tensors that are timed loops over every token would take minutes, so the truth
is the eager backend in float64, which the tests hold to the loop, and the yardstick the chunks in
plain torch in the case's dtype, on some heads of the last row: the largest offsets. Heads do not
meet, so that all tokens and all gradients of these are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import reference
from ...ops import gated_delta_rule
from ..family import Results
from .cases import DeltaCase
from .ours import Inputs
from .peers import chunked

Named = dict[str, Tensor]


def everything(case: DeltaCase, inputs: Inputs, got: Named) -> Results:
    """Everything that is returned and every gradient."""

    def literally(given: Named) -> Tensor:
        return reference.gated_delta_rule(**given, qk_l2norm=case.l2norm)[0]

    backward = len(got) > 1
    truth = _differentiated(literally, _wide(inputs.leaves), inputs.d_out, backward)
    plain = _differentiated(literally, inputs.leaves, inputs.d_out, backward)
    return Results(got, truth, plain)


def sample(case: DeltaCase, inputs: Inputs, got: Named) -> Results:
    """The last heads of the last row: one of queries.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")
    shared = case.heads // case.groups

    def cut(x: Tensor) -> Tensor:
        return x[-1:, :, -(x.shape[2] // shared) :]

    def exactly(given: Named) -> Tensor:
        return gated_delta_rule(**given, qk_l2norm=case.l2norm, backend="eager")[0]

    def plainly(given: Named) -> Tensor:
        return chunked(**given, l2norm=case.l2norm)

    leaves = {name: cut(x.detach()) for name, x in inputs.leaves.items()}
    d_out, backward = cut(inputs.d_out), len(got) > 1
    truth = _differentiated(exactly, _wide(leaves), d_out, backward)
    plain = _differentiated(plainly, leaves, d_out, backward)
    return Results({name: cut(x) for name, x in got.items()}, truth, plain)


def _wide(leaves: Named) -> Named:
    return {name: x.double() for name, x in leaves.items()}


def _differentiated(
    call: Callable[[Named], Tensor], leaves: Named, d_out: Tensor, backward: bool
) -> Named:
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out = call(leaves)
    named = {"out": out.detach()}
    if backward:
        gradients = torch.autograd.grad(out, tuple(leaves.values()), d_out.to(out.dtype))
        named |= {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return named
