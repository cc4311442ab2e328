"""What a short convolution is compared with, on small inputs and on those that are timed.

On small inputs with the reference, in float64 and in the case's dtype, all of it. On the tensors
that are timed with the eager backend, which the tests hold to the reference, on the last channels:
the largest offsets. Channels do not meet, so that all numbers of these are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import reference
from ...ops import short_conv
from ..family import Results
from .cases import ConvCase
from .ours import Inputs, rules

CHANNELS = 16  # of the full-size check

Named = dict[str, Tensor]


def everything(case: ConvCase, inputs: Inputs, got: Named) -> Results:
    """y and every gradient."""

    def call(leaves: Named) -> Tensor:
        return reference.short_conv(**leaves, **rules(case))[0]

    return _results(call, inputs.leaves, inputs.d_out, got)


def sample(case: ConvCase, inputs: Inputs, got: Named) -> Results:
    """The last channels.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")

    def call(leaves: Named) -> Tensor:
        return short_conv(**leaves, **rules(case), backend="eager")[0]

    def cut(name: str, x: Tensor) -> Tensor:
        return x[-CHANNELS:] if name.endswith("weight") else x[..., -CHANNELS:]

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
