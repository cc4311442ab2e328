"""What a call on polynomial features is compared with, on small inputs and on those that are timed.

On small inputs with the reference, in float64 and in the case's dtype, all of it. On the tensors
that are timed with the features in memory, which the tests hold to the reference, on some heads of
the last row: the largest offsets. Heads do not meet, so that all numbers of these are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import reference
from ...ops import polynomial_features
from ..family import Results
from .cases import FEATURES, READ, UPDATE, PolynomialCase
from .ours import Inputs
from .peers import expanded

HEADS = 2  # of the full-size check
LITERALLY: dict[str, Callable[..., Tensor]] = {
    FEATURES: reference.polynomial_features,
    READ: reference.polynomial_read,
    UPDATE: reference.polynomial_update,
}

Named = dict[str, Tensor]


def everything(case: PolynomialCase, inputs: Inputs, got: Named) -> Results:
    """Everything that is returned and every gradient."""

    def call(leaves: Named) -> Tensor:
        return LITERALLY[case.function](*leaves.values())

    return _results(call, inputs.leaves, inputs.d_out, got)


def sample(case: PolynomialCase, inputs: Inputs, got: Named) -> Results:
    """The last heads of the last row.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")
    one = PolynomialCase(
        case.name, case.suites, case.function, 1, case.tokens, min(HEADS, case.heads), case.width,
        case.values, dtype=case.dtype,
    )  # fmt: skip

    def call(leaves: Named) -> Tensor:
        if case.function == FEATURES:
            return polynomial_features(leaves["x"], backend="eager")
        return expanded(one, leaves, "eager")

    def cut(name: str, x: Tensor) -> Tensor:
        of_memory = name.endswith("state") or (case.function == UPDATE and name == "out")
        return x[-1:, -HEADS:] if of_memory else x[-1:, :, -HEADS:]

    leaves = {name: cut(name, x.detach()) for name, x in inputs.leaves.items()}
    mine = {name: cut(name, x) for name, x in got.items()}
    return _results(call, leaves, cut("out", inputs.d_out), mine)


def _results(call: Callable[[Named], Tensor], leaves: Named, d_out: Tensor, got: Named) -> Results:
    def run(dtype: torch.dtype | None) -> Named:
        given = {
            name: (x.detach() if dtype is None else x.detach().to(dtype)).requires_grad_()
            for name, x in leaves.items()
        }
        out = call(given)
        named = {"out": out.detach()}
        if "d_x" in got:
            gradients = torch.autograd.grad(out, tuple(given.values()), d_out.to(out.dtype))
            named |= {f"d_{name}": g for name, g in zip(given, gradients, strict=True)}
        return named

    return Results(got, run(torch.float64), run(None))
