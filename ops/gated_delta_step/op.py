"""What torch sees: shapes and checks, and one operator that writes its pool. Knows no backend.

    gated_delta_step_  -> o (B, H, Dv), as v; state_pool (S, H, Dk, Dv) is changed in place

The operator has no gradient: the public function refuses tensors that require one, because what
it writes could not be followed. The twin that returns new memories is the rule's own operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, resolve
from ..gated_delta.op import (
    RULES,
    DeltaShape,
    DeltaTensors,
    check_numbers,
    check_operands,
    check_state,
)

PACKAGE = __package__


class StepTensors(NamedTuple):
    """The tensors of a call, in the order in which the operator takes them.

    Without slots, `state` has a memory for each row.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor | None


def step_shape(
    op: str, given: StepTensors, *, scale: float, qk_l2norm: bool, l2norm_eps: float
) -> DeltaShape:
    """Check every argument of a call and return its shape: `batch` rows of one token."""
    q, state, slots = given.q, given.state, given.slots
    check_operands(op, "B", *given[:5])
    check_numbers(op, scale, l2norm_eps)
    shape = unchecked_shape(given, scale, qk_l2norm, l2norm_eps)
    if slots is None:
        check_state(op, "state", state, shape, "B", shape.batch)
        return shape
    checks.tensor(op, "state_pool", state, "S H Dk Dv", (shape.acc,))
    check_state(op, "state_pool", state, shape, "S", state.shape[0])
    checks.slots(
        op, "slots", slots, q.device, q.shape[0], state.shape[0],
        dtypes=(torch.int64, torch.int32),
    )  # fmt: skip
    operands = given._asdict()
    checks.writable(op, operands, {"state_pool": operands.pop("state")}, "gated_delta_step")
    return shape


def one_token(given: StepTensors, state: torch.Tensor) -> DeltaTensors:
    """Sequences of one token each, behind the memories `state`."""
    q, k, v, log_decay, beta = (x[:, None] for x in given[:5])
    return DeltaTensors(q, k, v, log_decay, beta, state, None)


def unchecked_shape(
    given: StepTensors, scale: float, qk_l2norm: bool, l2norm_eps: float
) -> DeltaShape:
    """The shape of a call that was checked."""
    q, k, v = given.q, given.k, given.v
    return DeltaShape(
        batch=q.shape[0],
        tokens=1,
        heads=given.beta.shape[1],
        heads_q=q.shape[1],
        heads_k=k.shape[1],
        heads_v=v.shape[1],
        width=q.shape[2],
        values=v.shape[2],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        qk_l2norm=qk_l2norm,
        l2norm_eps=l2norm_eps,
        carried=True,
        packed=False,
    )


# ---- operator -----------------------------------------------------------------------------------

_COUNT = len(StepTensors._fields)


class _Call(NamedTuple):
    """The arguments of the operator, sorted."""

    given: StepTensors
    shape: DeltaShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operator trusts it."""
    given = StepTensors(*arguments[:_COUNT])
    *rules, backend = arguments[_COUNT:]
    return _Call(given, unchecked_shape(given, *rules), backend)


def _impl(call: _Call) -> torch.Tensor:
    o: torch.Tensor = resolve(PACKAGE, call.shape, call.backend).fwd(call.shape, call.given)
    # A kernel writes behind torch's back: what autograd saved of the pool must be seen as changed.
    torch.autograd.graph.increment_version([call.given.state])
    return o


def _fake(call: _Call) -> torch.Tensor:
    shape = call.shape
    return call.given.v.new_empty((shape.batch, shape.heads, shape.values))


def _flops(call: _Call) -> int:
    shape = call.shape
    return flops.gated_delta_forward(shape.batch * shape.heads, shape.width, shape.values)


def _no_gradient(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise RuntimeError("fastweights::gated_delta_step_ has no gradient; gated_delta_step has")


STEP = declare(
    Operator(
        "gated_delta_step_",
        "(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor(a!) state_pool, "
        f"Tensor slots, {RULES}) -> Tensor",
        impl=lambda *args: _impl(_call(args)),
        fake=lambda *args: _fake(_call(args)),
        flops=lambda *args, **kwargs: _flops(_call(args)),
    ),
    backward=_no_gradient,
)
