"""What torch sees: shapes and checks, two operators, autograd and FLOPs. Knows no backend.

    atlas_memory_fwd  -> y, as v; state, momentum (N, H, D, Dv) in fp32 (float64 for float64)
    atlas_memory_bwd  -> the gradients of the thirteen tensors that have one, empty for absent ones

The tensors are those of `omega_memory` and the step of what Newton–Schulz returns. The operators
carry the coefficients of all of its steps as one list of numbers. The backward recomputes from the
arguments, which are all that is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, recomputed, resolve
from ..newton_schulz.coefficients import schedule
from ..omega import op as omega
from ..omega.cache import check_int
from ..omega.op import DIFFERENTIABLE, OmegaShape, OmegaTensors, check_gate, omega_shape

PACKAGE = __package__
_FIELDS = tuple(field.name for field in fields(OmegaShape))


@dataclass(frozen=True, kw_only=True)
class AtlasShape(OmegaShape):
    """Sizes and rules of the Omega rule, always with momentum; and those of Newton–Schulz.

    `ns_stride`: it meets every such token. `ns_numbers`: a₁, b₁, c₁, a₂, … of its steps.
    """

    ns_stride: int
    ns_numbers: tuple[float, ...]
    ns_eps: float


class AtlasTensors(NamedTuple):
    """The tensors of a call: those of `omega_memory`, and one more."""

    memory: OmegaTensors
    output_step: torch.Tensor


def atlas_shape(
    op: str,
    given: AtlasTensors,
    *,
    ns_stride: int | None,
    ns_steps: int,
    ns_coefficients: str | Sequence[Sequence[float]],
    ns_eps: float,
    **rules: Any,
) -> AtlasShape:
    """Check every argument of a call and return its shape; `rules` are those of `omega_shape`."""
    checks.tensor(op, "q", given.memory.q, "B T H d", checks.FLOATING)
    checks.tensor(op, "momentum", given.memory.momentum, "B T H", checks.FLOATING)
    shape = omega_shape(op, given.memory, **rules)
    check_gate(op, "output_step", given.output_step, "B T H", given.memory.q)
    return ns_rules(op, shape, ns_stride, ns_steps, ns_coefficients, ns_eps)


def ns_rules(
    op: str, shape: OmegaShape, ns_stride: int | None, ns_steps: int,
    ns_coefficients: str | Sequence[Sequence[float]], ns_eps: float,
) -> AtlasShape:  # fmt: skip
    """Check what is said of Newton–Schulz, and join it to the shape."""
    if ns_stride is None:
        ns_stride = shape.chunk_size
    check_int(op, "ns_stride", ns_stride)
    if shape.chunk_size % ns_stride:
        raise ValueError(
            f"{op}: ns_stride must divide chunk_size, which is {shape.chunk_size}, got {ns_stride}"
        )
    check_int(op, "ns_steps", ns_steps)
    checks.above_zero(op, "ns_eps", ns_eps)
    return with_rules(shape, ns_stride, schedule(op, ns_coefficients, ns_steps, "ns_"), ns_eps)


def with_rules(
    shape: OmegaShape, ns_stride: int, ns_numbers: Sequence[float], ns_eps: float
) -> AtlasShape:
    """The shape of a call that was checked."""
    # Not vars(shape), which torch 2.11 cannot trace.
    rules = {name: getattr(shape, name) for name in _FIELDS}
    return AtlasShape(
        **rules, ns_stride=ns_stride, ns_numbers=tuple(ns_numbers), ns_eps=ns_eps
    )  # fmt: skip


# ---- operators ----------------------------------------------------------------------------------

_TENSORS = f"{omega.TENSORS}, Tensor output_step"
NS_RULES = "SymInt ns_stride, float[] ns_numbers, float ns_eps"
_RULES = f"{omega.RULES}, {NS_RULES}, str backend"
_COUNT = len(OmegaTensors._fields)


class _Call(NamedTuple):
    """The arguments of a forward operator, sorted: what every function below needs of them."""

    given: AtlasTensors
    shape: AtlasShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    given = AtlasTensors(OmegaTensors(*arguments[:_COUNT]), arguments[_COUNT])
    window, chunk_size, loss, map_, before, *ns, backend = arguments[_COUNT + 1 :]
    shape = omega.unchecked_shape(given.memory, window, chunk_size, loss, map_, before, True)
    return _Call(given, with_rules(shape, *ns), backend)


def _forward_impl(call: _Call) -> tuple[torch.Tensor, ...]:
    module = resolve(PACKAGE, call.shape, call.backend)
    results: tuple[torch.Tensor, ...] = module.fwd(call.shape, call.given)
    return results


def _forward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    given = call.given.memory
    state = given.empty_state(call.shape)
    return given.v.new_empty(given.v.shape), state, torch.empty_like(state)


def _backward_impl(upstream: Sequence[torch.Tensor], call: _Call) -> tuple[torch.Tensor, ...]:
    shape = replace(call.shape, backward=True)
    grads = resolve(PACKAGE, shape, call.backend).bwd(shape, *upstream, call.given)
    return tuple(upstream[0].new_empty(0) if g is None else g for g in grads)


def _backward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    tensors = (*call.given.memory[:DIFFERENTIABLE], call.given.output_step)
    return tuple(
        call.given.output_step.new_empty(0, dtype=call.shape.dtype) if x is None
        else x.new_empty(x.shape)
        for x in tensors
    )  # fmt: skip


def _flops(call: _Call, backward: bool) -> int:
    """Packed calls are counted as N equal sequences: the real lengths live on the device."""
    count = flops.atlas_backward if backward else flops.atlas_forward
    shape = call.shape
    tokens = shape.tokens // max(1, shape.batch) if shape.packed else shape.tokens
    a_head = count(
        tokens, shape.chunk_size, shape.window, shape.wide, shape.values,
        stride=shape.ns_stride, steps=len(shape.ns_numbers) // 3,
    )  # fmt: skip
    return shape.batch * shape.heads * a_head


MEMORY_BWD = declare(
    Operator(
        "atlas_memory_bwd",
        f"(Tensor d_y, Tensor d_state, Tensor d_last_momentum, {_TENSORS}, {_RULES}) -> "
        f"({', '.join(['Tensor'] * (DIFFERENTIABLE + 1))})",
        impl=lambda *args: _backward_impl(args[:3], _call(args[3:])),
        fake=lambda *args: _backward_fake(_call(args[3:])),
        flops=lambda *args, **kwargs: _flops(_call(args[3:]), backward=True),
    )
)


MEMORY_FWD = declare(
    Operator(
        "atlas_memory_fwd",
        f"({_TENSORS}, {_RULES}) -> (Tensor, Tensor, Tensor)",
        impl=lambda *args: _forward_impl(_call(args)),
        fake=lambda *args: _forward_fake(_call(args)),
        flops=lambda *args, **kwargs: _flops(_call(args), backward=False),
    ),
    **recomputed(MEMORY_BWD, _COUNT + 1, (*range(DIFFERENTIABLE), _COUNT)),
)
