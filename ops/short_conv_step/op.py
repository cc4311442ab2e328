"""What torch sees: shapes and checks, and one operator that writes its pool. Knows no backend.

    short_conv_step_  -> y (B, D), as x; state_pool (S, K − 1, D) is changed in place

The operator has no gradient: the public function refuses tensors that require one, because what
it writes could not be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, resolve
from ..short_conv.op import RULES, ConvShape, check_state, check_taps

PACKAGE = __package__


class StepTensors(NamedTuple):
    """The tensors of a call, in the order in which the operator takes them."""

    x: torch.Tensor
    weight: torch.Tensor
    state_pool: torch.Tensor
    slots: torch.Tensor
    bias: torch.Tensor | None
    gate_in: torch.Tensor | None
    gate_out: torch.Tensor | None


def step_shape(op: str, given: StepTensors, *, activation: str | None, residual: bool) -> ConvShape:
    """Check every argument of a call and return its shape: `batch` rows of one token."""
    x, pool = given.x, given.state_pool
    checks.tensor(op, "x", x, "B D", checks.FLOATING)
    check_taps(op, x, given.weight, given.bias, activation)
    for name, gate in (("gate_in", given.gate_in), ("gate_out", given.gate_out)):
        if gate is None:
            continue
        checks.tensor(op, name, gate, "B D", checks.FLOATING)
        checks.same_dtype(op, name, gate, x.dtype, "x")
        checks.same_device(op, name, gate, x.device)
        for dim, of in enumerate(("rows", "channels")):
            checks.size(op, name, gate, dim, x.shape[dim], f"the {of} of x")
    shape = unchecked_shape(given, activation or "none", residual)
    checks.tensor(op, "state_pool", pool, "S K-1 D", (shape.acc,))
    check_state(op, "state_pool", pool, shape, "S", pool.shape[0])
    checks.slots(op, "slots", given.slots, x.device, x.shape[0], pool.shape[0], of="x")
    checks.writable(op, given._asdict(), {"state_pool": pool}, "short_conv")
    return shape


def unchecked_shape(given: StepTensors, activation: str, residual: bool) -> ConvShape:
    """The shape of a call that was checked."""
    return ConvShape(
        batch=given.x.shape[0],
        tokens=1,
        channels=given.x.shape[1],
        taps=given.weight.shape[1],
        dtype=given.x.dtype,
        device=given.x.device,
        silu=activation == "silu",
        residual=residual,
        bias=given.bias is not None,
        gate_in=given.gate_in is not None,
        gate_out=given.gate_out is not None,
        carried=True,
        packed=False,
    )


# ---- operator -----------------------------------------------------------------------------------

_COUNT = len(StepTensors._fields)


class _Call(NamedTuple):
    """The arguments of the operator, sorted."""

    given: StepTensors
    shape: ConvShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operator trusts it."""
    given = StepTensors(*arguments[:_COUNT])
    activation, residual, backend = arguments[_COUNT:]
    return _Call(given, unchecked_shape(given, activation, residual), backend)


def _impl(call: _Call) -> torch.Tensor:
    y: torch.Tensor = resolve(PACKAGE, call.shape, call.backend).fwd(call.shape, call.given)
    # A kernel writes behind torch's back: what autograd saved of the pool must be seen as changed.
    torch.autograd.graph.increment_version([call.given.state_pool])
    return y


def _flops(call: _Call) -> int:
    return flops.short_conv_forward(call.shape.batch, call.shape.channels, call.shape.taps)


def _no_gradient(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise RuntimeError("fastweights::short_conv_step_ has no gradient; short_conv has")


STEP = declare(
    Operator(
        "short_conv_step_",
        "(Tensor x, Tensor weight, Tensor(a!) state_pool, Tensor slots, Tensor? bias, "
        f"Tensor? gate_in, Tensor? gate_out, {RULES}) -> Tensor",
        impl=lambda *args: _impl(_call(args)),
        fake=lambda *args: args[0].new_empty(args[0].shape),
        flops=lambda *args, **kwargs: _flops(_call(args)),
    ),
    backward=_no_gradient,
)
