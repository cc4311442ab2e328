"""What torch sees: shapes and checks, and one operator that writes its cache. Knows no backend.

    atlas_step_  -> y (N, H, Dv), as v; the tensors of the cache are changed in place

The operator has no gradient: the public function refuses tensors that require one, because what
it writes could not be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .. import checks, flops
from ..atlas.cache import AtlasCache
from ..atlas.op import NS_RULES, AtlasShape, ns_rules, with_rules
from ..dispatch import Operator, declare, resolve
from ..omega.cache import check_fields
from ..omega.op import RULES, OmegaShape
from ..omega_step import op as omega
from ..omega_step.op import GIVEN, check_gate

PACKAGE = __package__


class StepTensors(NamedTuple):
    """The tensors of a call beside the cache: those of `omega_step_`, and one more."""

    memory: omega.StepTensors
    output_step: torch.Tensor


def step_shape(
    op: str,
    given: StepTensors,
    cache: AtlasCache,
    *,
    ns_stride: int | None,
    ns_steps: int,
    ns_coefficients: str | Sequence[Sequence[float]],
    ns_eps: float,
    **rules: Any,
) -> AtlasShape:
    """Check every argument of a call and return its shape; `rules` are those of `omega_step_`."""
    q = given.memory.q
    checks.tensor(op, "q", q, "N H d", checks.FLOATING)
    checks.tensor(op, "momentum", given.memory.momentum, "N H", checks.FLOATING)
    check_gate(op, "output_step", given.output_step, "N H", q)
    shape = omega.step_shape(op, given.memory, cache, check=_check_pool, **rules)
    checks.writable(op, {"output_step": given.output_step}, {}, "atlas_extend")
    return ns_rules(op, shape, ns_stride, ns_steps, ns_coefficients, ns_eps)


def _check_pool(op: str, shape: OmegaShape, cache: AtlasCache) -> None:
    """Require slots for the memories of a call."""
    if not isinstance(cache, AtlasCache):
        raise TypeError(f"{op}: cache must be an AtlasCache, got {type(cache).__name__}")
    check_fields(op, shape, cache._asdict(), pool=True)


# ---- operator -----------------------------------------------------------------------------------

_CACHE = (
    "Tensor(a!) state, Tensor(b!) memory, Tensor(c!) state_momentum, Tensor(d!) keys, "
    "Tensor(e!) values, Tensor(f!) residuals, Tensor(g!) momentum_write, Tensor(h!) state_decay, "
    "Tensor(i!) momentum_decay, Tensor(j!) tail_length, Tensor(k!) filled"
)
_COUNT = len(omega.StepTensors._fields)
_TENSORS = _COUNT + 1 + len(AtlasCache._fields)


class _Call(NamedTuple):
    """The arguments of the operator, sorted."""

    given: StepTensors
    cache: AtlasCache
    shape: AtlasShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operator trusts it."""
    given = StepTensors(omega.StepTensors(*arguments[:_COUNT]), arguments[_COUNT])
    cache = AtlasCache(*arguments[_COUNT + 1 : _TENSORS])
    window, chunk_size, loss, map_, before, *ns, backend = arguments[_TENSORS:]
    shape = omega.unchecked_shape(
        given.memory, cache, window, chunk_size, loss, map_, before, concrete=True
    )
    return _Call(given, cache, with_rules(shape, *ns), backend)


def _impl(call: _Call) -> torch.Tensor:
    module = resolve(PACKAGE, call.shape, call.backend)
    y: torch.Tensor = module.fwd(call.shape, call.given, call.cache)
    # A kernel writes behind torch's back: what autograd saved of the cache must be seen as changed.
    torch.autograd.graph.increment_version(list(call.cache))
    return y


def _flops(call: _Call) -> int:
    """Each token's share of a whole chunk."""
    shape = call.shape
    b = shape.chunk_size
    a_chunk = flops.atlas_forward(
        b, b, shape.window, shape.wide, shape.values, stride=shape.ns_stride,
        steps=len(shape.ns_numbers) // 3,
    )  # fmt: skip
    return shape.batch * shape.heads * a_chunk // b


def _no_gradient(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise RuntimeError("fastweights::atlas_step_ has no gradient; atlas_extend has")


STEP = declare(
    Operator(
        "atlas_step_",
        f"({GIVEN}, Tensor output_step, {_CACHE}, {RULES}, {NS_RULES}, str backend) -> Tensor",
        impl=lambda *args: _impl(_call(args)),
        fake=lambda *args: args[2].new_empty(args[2].shape),
        flops=lambda *args, **kwargs: _flops(_call(args)),
    ),
    backward=_no_gradient,
)
