"""What torch sees: shapes and checks, two operators, autograd and FLOPs. Knows no backend.

    gated_delta_rule_fwd  -> o, as v; state (N, H, Dk, Dv) in fp32 (float64 for float64)
    gated_delta_rule_bwd  -> the gradients of the six tensors that have one, empty for no state

The backward recomputes from the arguments, which are all that is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, recomputed, resolve

PACKAGE = __package__


@dataclass(frozen=True)
class DeltaShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `batch` is the number of sequences, packed or not; `tokens` those of a row of the batch. `heads`
    is H, that of the memories; `width` is Dk, `values` Dv. `carried`: there is an initial state.
    `backward`: it is that pass.
    """

    batch: int
    tokens: int
    heads: int
    heads_q: int
    heads_k: int
    heads_v: int
    width: int
    values: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    qk_l2norm: bool
    l2norm_eps: float
    carried: bool
    packed: bool
    backward: bool = False

    @property
    def acc(self) -> torch.dtype:
        """dtype of states, gates and all accumulation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def state(self) -> tuple[int, int, int, int]:
        """(N, H, Dk, Dv)."""
        return self.batch, self.heads, self.width, self.values


class DeltaTensors(NamedTuple):
    """The tensors of a call, in the order in which the operators take them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


DIFFERENTIABLE = 6  # of them, the first ones


def delta_shape(
    op: str, given: DeltaTensors, *, scale: float, qk_l2norm: bool, l2norm_eps: float
) -> DeltaShape:
    """Check every argument of a call and return its shape. All raising happens here."""
    q = given.q
    check_operands(op, "B T", *given[:5])
    check_numbers(op, scale, l2norm_eps)
    if given.cu_seqlens is not None:
        checks.cu_seqlens(op, "cu_seqlens", given.cu_seqlens, q.device, q.shape[0], q.shape[1])
    shape = unchecked_shape(given, scale, qk_l2norm, l2norm_eps)
    if given.initial_state is not None:
        check_state(op, "initial_state", given.initial_state, shape, "N", shape.batch)
    return shape


def check_operands(
    op: str, front: str, q: torch.Tensor, k: Any, v: Any, log_decay: Any, beta: Any
) -> None:
    """Require q, k, v and gates that go together; `front`: the letters in front of the heads."""
    checks.tensor(op, "q", q, f"{front} Hq Dk", checks.FLOATING)
    meaning = {"B": "the batch of q", "T": "the tokens of q"}
    at = len(front.split())
    for name, x, layout in (("k", k, "Hk Dk"), ("v", v, "Hv Dv")):
        checks.tensor(op, name, x, f"{front} {layout}", checks.FLOATING)
        checks.same_dtype(op, name, x, q.dtype, "q")
    heads = max(q.shape[at], k.shape[at], v.shape[at])
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        checks.tensor(op, name, x, f"{front} H", (acc,))
    operands = {"k": k, "v": v, "log_decay": log_decay, "beta": beta}
    for name, x in operands.items():
        checks.same_device(op, name, x, q.device)
        for dim, letter in enumerate(front.split()):
            checks.size(op, name, x, dim, q.shape[dim], meaning[letter])
    checks.size(op, "k", k, at + 1, q.shape[at + 1], "the width of q")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if heads and (x.shape[at] == 0 or heads % x.shape[at]):
            raise ValueError(
                f"{op}: {name} has {x.shape[at]} heads, which does not divide {heads}, the most of "
                "q, k and v"
            )
    for name in ("log_decay", "beta"):
        checks.size(op, name, operands[name], at, heads, "the most heads of q, k and v")


def check_numbers(op: str, scale: float, l2norm_eps: float) -> None:
    """Require a finite scale, and an eps above 0."""
    if not (isinstance(scale, (int, float)) and isfinite(scale)):
        raise ValueError(f"{op}: scale must be a finite number, got {scale!r}")
    checks.above_zero(op, "l2norm_eps", l2norm_eps)


def check_state(op: str, name: str, state: Any, shape: DeltaShape, letter: str, rows: int) -> None:
    """Require (`rows`, H, Dk, Dv) in the dtype of accumulation."""
    layout = f"{letter} H Dk Dv"
    checks.tensor(op, name, state, layout, (shape.acc,))
    checks.same_device(op, name, state, shape.device)
    for dim, size in enumerate((rows, *shape.state[1:])):
        checks.size(op, name, state, dim, size, f"dimension {dim} of {layout}")


def unchecked_shape(
    given: DeltaTensors, scale: float, qk_l2norm: bool, l2norm_eps: float
) -> DeltaShape:
    """The shape of a call that was checked."""
    q, k, v, cu = given.q, given.k, given.v, given.cu_seqlens
    return DeltaShape(
        batch=q.shape[0] if cu is None else cu.shape[0] - 1,
        tokens=q.shape[1],
        heads=given.beta.shape[2],
        heads_q=q.shape[2],
        heads_k=k.shape[2],
        heads_v=v.shape[2],
        width=q.shape[3],
        values=v.shape[3],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        qk_l2norm=qk_l2norm,
        l2norm_eps=l2norm_eps,
        carried=given.initial_state is not None,
        packed=cu is not None,
    )


# ---- operators ----------------------------------------------------------------------------------

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)
RULES = "float scale, bool qk_l2norm, float l2norm_eps, str backend"
_COUNT = len(DeltaTensors._fields)


class _Call(NamedTuple):
    """The arguments of a forward operator, sorted: what every function below needs of them."""

    given: DeltaTensors
    shape: DeltaShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    given = DeltaTensors(*arguments[:_COUNT])
    *rules, backend = arguments[_COUNT:]
    return _Call(given, unchecked_shape(given, *rules), backend)


def _forward_impl(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = resolve(PACKAGE, call.shape, call.backend).fwd(call.shape, call.given)
    return o, state


def _forward_fake(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    v, shape = call.given.v, call.shape
    o = v.new_empty((*v.shape[:2], shape.heads, shape.values))
    return o, v.new_empty(shape.state, dtype=shape.acc)


def _backward_impl(
    d_o: torch.Tensor, d_state: torch.Tensor, call: _Call
) -> tuple[torch.Tensor, ...]:
    shape = replace(call.shape, backward=True)
    grads = resolve(PACKAGE, shape, call.backend).bwd(shape, d_o, d_state, call.given)
    return tuple(d_o.new_empty(0) if g is None else g for g in grads)


def _backward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    return tuple(
        call.given.q.new_empty(0) if x is None else x.new_empty(x.shape)
        for x in call.given[:DIFFERENTIABLE]
    )


def _flops(call: _Call, backward: bool) -> int:
    count = flops.gated_delta_backward if backward else flops.gated_delta_forward
    shape, beta = call.shape, call.given.beta
    return count(beta.shape[0] * beta.shape[1] * shape.heads, shape.width, shape.values)


DELTA_BWD = declare(
    Operator(
        "gated_delta_rule_bwd",
        f"(Tensor d_o, Tensor d_state, {_TENSORS}, {RULES}) -> "
        f"({', '.join(['Tensor'] * DIFFERENTIABLE)})",
        impl=lambda *args: _backward_impl(args[0], args[1], _call(args[2:])),
        fake=lambda *args: _backward_fake(_call(args[2:])),
        flops=lambda *args, **kwargs: _flops(_call(args[2:]), backward=True),
    )
)


DELTA_FWD = declare(
    Operator(
        "gated_delta_rule_fwd",
        f"({_TENSORS}, {RULES}) -> (Tensor, Tensor)",
        impl=lambda *args: _forward_impl(_call(args)),
        fake=lambda *args: _forward_fake(_call(args)),
        flops=lambda *args, **kwargs: _flops(_call(args), backward=False),
    ),
    **recomputed(DELTA_BWD, _COUNT, range(DIFFERENTIABLE)),
)
