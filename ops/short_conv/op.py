"""What torch sees: shapes and checks, two operators, autograd and FLOPs. Knows no backend.

    short_conv_fwd  -> y, as x; state (N, K − 1, D) in fp32 (float64 for float64)
    short_conv_bwd  -> the gradients of the six tensors that have one, empty for absent ones

The backward recomputes from the arguments, which are all that is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, recomputed, resolve

PACKAGE = __package__
MOST_TAPS = 4
ACTIVATIONS = ("none", "silu")


@dataclass(frozen=True)
class ConvShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `batch` is the number of sequences, packed or not; `tokens` those of a row of the batch. `silu`,
    `residual`, `bias`, `gate_in`, `gate_out`, `carried` (an initial state): what there is of each.
    `backward`: it is that pass.
    """

    batch: int
    tokens: int
    channels: int
    taps: int
    dtype: torch.dtype
    device: torch.device
    silu: bool
    residual: bool
    bias: bool
    gate_in: bool
    gate_out: bool
    carried: bool
    packed: bool
    backward: bool = False

    @property
    def acc(self) -> torch.dtype:
        """dtype of the state and of all sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class ConvTensors(NamedTuple):
    """The tensors of a call, in the order in which the operators take them."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    gate_in: torch.Tensor | None
    gate_out: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


DIFFERENTIABLE = 6  # of them, the first ones


def conv_shape(op: str, given: ConvTensors, *, activation: str | None, residual: bool) -> ConvShape:
    """Check every argument of a call and return its shape. All raising happens here."""
    x = given.x
    checks.tensor(op, "x", x, "B T D", checks.FLOATING)
    check_taps(op, x, given.weight, given.bias, activation)
    for name, gate in (("gate_in", given.gate_in), ("gate_out", given.gate_out)):
        if gate is None:
            continue
        checks.tensor(op, name, gate, "B T D", checks.FLOATING)
        checks.same_dtype(op, name, gate, x.dtype, "x")
        checks.same_device(op, name, gate, x.device)
        for dim, of in enumerate(("batch", "tokens", "channels")):
            checks.size(op, name, gate, dim, x.shape[dim], f"the {of} of x")
    if given.cu_seqlens is not None:
        checks.cu_seqlens(op, "cu_seqlens", given.cu_seqlens, x.device, x.shape[0], x.shape[1])
    shape = unchecked_shape(given, activation or "none", residual)
    if given.initial_state is not None:
        check_state(op, "initial_state", given.initial_state, shape, "N", shape.batch)
    return shape


def check_taps(op: str, x: torch.Tensor, weight: Any, bias: Any, activation: str | None) -> None:
    """Require a weight, a bias or None, and an activation that go with x (…, D)."""
    checks.tensor(op, "weight", weight, "D K", checks.FLOATING)
    if bias is not None:
        checks.tensor(op, "bias", bias, "D", checks.FLOATING)
    for name, y in (("weight", weight), ("bias", bias)):
        if y is not None:
            checks.same_device(op, name, y, x.device)
            checks.size(op, name, y, 0, x.shape[-1], "the channels of x")
    if not 1 <= weight.shape[1] <= MOST_TAPS:
        raise ValueError(f"{op}: weight must have 1 to {MOST_TAPS} taps, got {weight.shape[1]}")
    if activation is not None:
        checks.choice(op, "activation", activation, ACTIVATIONS[1:])


def check_state(
    op: str, name: str, state: torch.Tensor, shape: ConvShape, letter: str, rows: int
) -> None:
    """Require (`rows`, K − 1, D) in the dtype of sums."""
    layout = f"{letter} K-1 D"
    checks.tensor(op, name, state, layout, (shape.acc,))
    checks.same_device(op, name, state, shape.device)
    for dim, size in enumerate((rows, shape.taps - 1, shape.channels)):
        checks.size(op, name, state, dim, size, f"dimension {dim} of {layout}")


def unchecked_shape(given: ConvTensors, activation: str, residual: bool) -> ConvShape:
    """The shape of a call that was checked."""
    x, cu = given.x, given.cu_seqlens
    return ConvShape(
        batch=x.shape[0] if cu is None else cu.shape[0] - 1,
        tokens=x.shape[1],
        channels=x.shape[2],
        taps=given.weight.shape[1],
        dtype=x.dtype,
        device=x.device,
        silu=activation == "silu",
        residual=residual,
        bias=given.bias is not None,
        gate_in=given.gate_in is not None,
        gate_out=given.gate_out is not None,
        carried=given.initial_state is not None,
        packed=cu is not None,
    )


# ---- operators ----------------------------------------------------------------------------------

_TENSORS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? gate_in, Tensor? gate_out, "
    "Tensor? initial_state, Tensor? cu_seqlens"
)
RULES = "str activation, bool residual, str backend"
_COUNT = len(ConvTensors._fields)


class _Call(NamedTuple):
    """The arguments of a forward operator, sorted: what every function below needs of them."""

    given: ConvTensors
    shape: ConvShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    given = ConvTensors(*arguments[:_COUNT])
    activation, residual, backend = arguments[_COUNT:]
    return _Call(given, unchecked_shape(given, activation, residual), backend)


def _forward_impl(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    y, state = resolve(PACKAGE, call.shape, call.backend).fwd(call.shape, call.given)
    return y, state


def _forward_fake(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    x, shape = call.given.x, call.shape
    state = x.new_empty((shape.batch, shape.taps - 1, shape.channels), dtype=shape.acc)
    return x.new_empty(x.shape), state


def _backward_impl(
    d_y: torch.Tensor, d_state: torch.Tensor, call: _Call
) -> tuple[torch.Tensor, ...]:
    shape = replace(call.shape, backward=True)
    grads = resolve(PACKAGE, shape, call.backend).bwd(shape, d_y, d_state, call.given)
    return tuple(d_y.new_empty(0) if g is None else g for g in grads)


def _backward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    return tuple(
        call.given.x.new_empty(0) if x is None else x.new_empty(x.shape)
        for x in call.given[:DIFFERENTIABLE]
    )


def _flops(call: _Call, backward: bool) -> int:
    shape, x = call.shape, call.given.x
    tokens = x.shape[0] * x.shape[1]
    if not backward:
        return flops.short_conv_forward(tokens, shape.channels, shape.taps)
    again = shape.silu or shape.gate_out
    return flops.short_conv_backward(tokens, shape.channels, shape.taps, again=again)


CONV_BWD = declare(
    Operator(
        "short_conv_bwd",
        f"(Tensor d_y, Tensor d_state, {_TENSORS}, {RULES}) -> "
        f"({', '.join(['Tensor'] * DIFFERENTIABLE)})",
        impl=lambda *args: _backward_impl(args[0], args[1], _call(args[2:])),
        fake=lambda *args: _backward_fake(_call(args[2:])),
        flops=lambda *args, **kwargs: _flops(_call(args[2:]), backward=True),
    )
)


CONV_FWD = declare(
    Operator(
        "short_conv_fwd",
        f"({_TENSORS}, {RULES}) -> (Tensor, Tensor)",
        impl=lambda *args: _forward_impl(_call(args)),
        fake=lambda *args: _forward_fake(_call(args)),
        flops=lambda *args, **kwargs: _flops(_call(args), backward=False),
    ),
    **recomputed(CONV_BWD, _COUNT, range(DIFFERENTIABLE)),
)
