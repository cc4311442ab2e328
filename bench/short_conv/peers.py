"""A copy of as many bytes as a call moves, and the same function in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from ..family import Contender, Work, copy
from .cases import ConvCase
from .ours import Inputs, call, rules

NAMES = {
    "copy": "a copy of half as many bytes as the forward moves, each read and written",
    "eager": "the op's eager backend: a few passes over memory in torch",
    "compiled": "taps as shifted slices in torch, fp32 in between, under torch.compile",
}


def shifted(
    x: Tensor, weight: Tensor, gate_in: Tensor | None = None, gate_out: Tensor | None = None, *,
    activation: str | None, residual: bool,
) -> Tensor:  # fmt: skip
    """y of `short_conv` without bias, state or packed sequences."""
    acc = torch.promote_types(x.dtype, torch.float32)
    z = x.to(acc) if gate_in is None else x.to(acc) * gate_in.to(acc)
    taps = weight.shape[1]
    rows, weight = pad(z, (0, 0, taps - 1, 0)), weight.to(acc)
    y = sum((weight[:, j] * rows[:, j : j + z.shape[1]] for j in range(taps)), torch.zeros_like(z))
    if activation is not None:
        y = silu(y)
    if residual:
        y = y + z
    return (y if gate_out is None else y * gate_out.to(acc)).to(x.dtype)


def contenders(case: ConvCase, names: tuple[str, ...]) -> list[Contender]:
    """The peers of a case among `names`."""
    built = {
        "copy": Contender("copy", case, "copy", _copy, modes=("fwd",), checked=False),
        "eager": Contender("eager", case, case.op, lambda c, i: call(c, i, "eager")),
        "compiled": Contender("compiled", case, case.op, _compiled),
    }
    return [built[name] for name in case.peers if name in names]


def _copy(case: ConvCase, inputs: Inputs) -> Work:
    return copy(case, inputs.d_out)


def _compiled(case: ConvCase, inputs: Inputs) -> Work:
    from torch._functorch import config

    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    compiled: Any = torch.compile(shifted, dynamic=False, fullgraph=True)

    def forward() -> tuple[Tensor, ...]:
        return (compiled(**inputs.leaves, **rules(case)),)

    work = Work(forward, inputs.leaves, (inputs.d_out,))
    # Compiled here: a backward that donates its saved tensors cannot be differentiated twice.
    with config.patch(donated_buffer=False):
        outputs = work.forward()
        if case.modes != ("fwd",):
            work.backward(outputs)
    return work
