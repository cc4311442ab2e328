"""What torch sees: shapes and checks, and one operator that writes its cache. Knows no backend.

    omega_step_  -> y (N, H, Dv), as v; the tensors of the cache are changed in place

The operator has no gradient: the public function refuses tensors that require one, because what
it writes could not be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, resolve
from ..omega.cache import OmegaCache, check_cache, check_int
from ..omega.op import LOSSES, RULES, OmegaShape, check_features, feature_width

PACKAGE = __package__


class StepTensors(NamedTuple):
    """The tensors of a call beside the cache, in the order in which the operator takes them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    step: torch.Tensor
    decay: torch.Tensor | None
    window_gates: torch.Tensor | None
    momentum: torch.Tensor | None
    coefficients: torch.Tensor | None


Cache = tuple[torch.Tensor | None, ...]


def check_pool(op: str, shape: OmegaShape, cache: OmegaCache) -> None:
    """Require slots for the memories of a call."""
    check_cache(op, shape, cache, pool=True)


def step_shape(
    op: str,
    given: StepTensors,
    cache: Any,
    *,
    window: int,
    chunk_size: int,
    inner_loss: str,
    feature_map: str,
    read_before: bool,
    concrete: bool = False,
    check: Callable[[str, OmegaShape, Any], None] = check_pool,
) -> OmegaShape:
    """Check every argument of a call and return its shape. All raising happens here.

    `batch` is the number of rows and `tokens` is 1; `aligned` speaks of the cache too. `check`: of
    the cache, of another rule.
    """
    q, k, v = given.q, given.k, given.v
    checks.tensor(op, "q", q, "N H d", checks.FLOATING)
    for name, x in (("k", k), ("v", v)):
        checks.tensor(op, name, x, "N H d" if name == "k" else "N H Dv", checks.FLOATING)
        checks.same_dtype(op, name, x, q.dtype, "q")
    checks.size(op, "k", k, 2, q.shape[2], "the width of q")
    for name, number in (("window", window), ("chunk_size", chunk_size)):
        check_int(op, name, number)
    checks.choice(op, "inner_loss", inner_loss, LOSSES)
    check_features(op, feature_map, q, given.coefficients)
    rules = (window, chunk_size, inner_loss, feature_map, read_before)
    for name, x in (("k", k), ("v", v)):
        _check_rows(op, name, x, q)
    gates = {"step": "N H", "decay": "N H", "momentum": "N H", "window_gates": "N H window"}
    for name, layout in gates.items():
        gate = getattr(given, name)
        if gate is not None or name == "step":
            check_gate(op, name, gate, layout, q)
    if given.window_gates is not None:
        checks.size(op, "window_gates", given.window_gates, 2, window, "window")
    check(op, unchecked_shape(given, cache, *rules, concrete=False), cache)
    checks.slots(op, "slots", given.slots, q.device, q.shape[0], cache.state.shape[0])
    written = {f"cache.{name}": x for name, x in cache._asdict().items() if x is not None}
    checks.writable(op, given._asdict(), written, "omega_extend")
    return unchecked_shape(given, cache, *rules, concrete=concrete)


def check_gate(op: str, name: str, x: torch.Tensor | None, layout: str, q: torch.Tensor) -> None:
    """Require a number for each row and head of q (N, H, d), or some."""
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    checks.tensor(op, name, x, layout, (acc,))
    assert x is not None
    _check_rows(op, name, x, q)


def _check_rows(op: str, name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    checks.same_device(op, name, x, q.device)
    for dim, of in enumerate(("rows", "heads")):
        checks.size(op, name, x, dim, q.shape[dim], f"the {of} of q")


def unchecked_shape(
    given: StepTensors, cache: Cache, window: int, chunk_size: int, inner_loss: str,
    feature_map: str, read_before: bool, *, concrete: bool,
) -> OmegaShape:  # fmt: skip
    """The shape of a call that was checked."""
    read = (x for x in (*given[:3], *cache[:5]) if x is not None)
    return OmegaShape(
        batch=given.k.shape[0],
        tokens=1,
        heads=given.k.shape[1],
        width=given.k.shape[2],
        wide=feature_width(feature_map, given.k.shape[2], given.coefficients),
        values=given.v.shape[2],
        window=window,
        chunk_size=chunk_size,
        dtype=given.k.dtype,
        device=given.k.device,
        dot=inner_loss == "dot",
        feature_map=feature_map,
        momentum=given.momentum is not None,
        packed=False,
        read_before=read_before,
        decay=given.decay is not None,
        aligned=not concrete or all(map(checks.aligned, read)),
    )


# ---- operator -----------------------------------------------------------------------------------

GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor slots, Tensor step, Tensor? decay, "
    "Tensor? window_gates, Tensor? momentum, Tensor? coefficients"
)
_CACHE = (
    "Tensor(a!) state, Tensor(b!)? state_momentum, Tensor(c!) keys, Tensor(d!) values, "
    "Tensor(e!) residuals, Tensor(f!) write, Tensor(g!)? momentum_write, Tensor(h!) state_decay, "
    "Tensor(i!)? carry, Tensor(j!)? momentum_decay, Tensor(k!) tail_length, Tensor(l!) filled"
)
_COUNT = len(StepTensors._fields)
_TENSORS = _COUNT + len(OmegaCache._fields)


class _Call(NamedTuple):
    """The arguments of the operator, sorted."""

    given: StepTensors
    cache: OmegaCache
    shape: OmegaShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operator trusts it."""
    given, cache = StepTensors(*arguments[:_COUNT]), OmegaCache(*arguments[_COUNT:_TENSORS])
    *rules, backend = arguments[_TENSORS:]
    return _Call(given, cache, unchecked_shape(given, cache, *rules, concrete=True), backend)


def _impl(call: _Call) -> torch.Tensor:
    module = resolve(PACKAGE, call.shape, call.backend)
    y: torch.Tensor = module.fwd(call.shape, call.given, call.cache)
    # A kernel writes behind torch's back: what autograd saved of the cache must be seen as changed.
    torch.autograd.graph.increment_version([x for x in call.cache if x is not None])
    return y


def _flops(call: _Call) -> int:
    """Each token's share of a whole chunk."""
    shape = call.shape
    b = shape.chunk_size
    a_chunk = flops.omega_forward(
        b, b, shape.window, shape.wide, shape.values, momentum=shape.momentum, pairs=shape.pairs
    )
    return shape.batch * shape.heads * a_chunk // b


def _no_gradient(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise RuntimeError("fastweights::omega_step_ has no gradient; omega_extend has")


STEP = declare(
    Operator(
        "omega_step_",
        f"({GIVEN}, {_CACHE}, {RULES}, str backend) -> Tensor",
        impl=lambda *args: _impl(_call(args)),
        fake=lambda *args: args[2].new_empty(args[2].shape),
        flops=lambda *args, **kwargs: _flops(_call(args)),
    ),
    backward=_no_gradient,
)
