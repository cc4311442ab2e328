"""What torch sees: shapes and checks, the operators, autograd and FLOPs. Knows no backend.

    delta_rewrite_fwd       -> y, as v; state, normalizer in fp32 (float64 for float64)
    delta_rewrite_bwd       -> the gradients of the six tensors that have one
    delta_rewrite_echo_fwd  -> the same, a new echo, and E (B, H, M, Dv) for the backward
    delta_rewrite_echo_bwd  -> the gradients of the six tensors, and the state that was there before
    delta_rewrite_          -> y; the two pools are changed in place

What is not asked for is an empty tensor: y without queries, the memory without tokens to write.
The backward recomputes from the arguments. With an echo the state is not among what is saved: the
backward receives the one behind the call, as the echo's gradient, and takes back what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple, NoReturn

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, recomputed, resolve

PACKAGE = __package__
MODES = ("parallel", "sequential")
GAMMA_GRADS = ("stop", "full")


@dataclass(frozen=True)
class RewriteShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `batch` rows write `tokens` each (M) and read `reads` (Tq), 0 without queries. `width` is dk,
    `values` Dv. `channels`: β is of each channel. `first`: rows may be marked as empty. `full`: γ
    has a gradient. `pool`: slots of the memories' pool, 0 if each row has its own. `echo`: the
    backward rebuilds the state. `aligned`: base and strides of v and of the state are multiples of
    16 bytes. `backward`: it is that pass.
    """

    batch: int
    tokens: int
    reads: int
    heads: int
    width: int
    values: int
    dtype: torch.dtype
    device: torch.device
    channels: bool
    first: bool
    order: int
    sequential: bool
    normalize: bool
    denominator: bool
    correction: bool
    full: bool
    eps: float
    eps_norm: float
    pool: int = 0
    echo: bool = False
    aligned: bool = True
    backward: bool = False

    @property
    def acc(self) -> torch.dtype:
        """dtype of memories, gates and all accumulation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def wide(self) -> int:
        """P, how many features a key has."""
        return 2 * self.order * self.width

    @property
    def state(self) -> tuple[int, int, int, int]:
        """(B, H, P, Dv)."""
        return self.batch, self.heads, self.wide, self.values


class RewriteTensors(NamedTuple):
    """The tensors of a call, in the order in which the operators take them.

    With slots, `state` and `normalizer` are pools.
    """

    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    normalizer: torch.Tensor
    q: torch.Tensor | None
    first: torch.Tensor | None
    slots: torch.Tensor | None = None


class Rules(NamedTuple):
    """The numbers and flags of a call, in the order in which the operators take them."""

    order: int
    sequential: bool
    normalize: bool
    denominator: bool
    correction: bool
    full: bool
    eps: float
    eps_norm: float


DIFFERENTIABLE = 6  # of the tensors, the first ones
TENSORS = 7  # those of the operators that write no pool


def rules_of(
    op: str, order: Any, mode: str, normalize: bool, denominator: bool, correction: bool,
    gamma_grad: str, eps: float, eps_norm: float | None,
) -> Rules:  # fmt: skip
    """Check what is no tensor, and fill in what was left out."""
    if not isinstance(order, int) or isinstance(order, bool) or order < 1:
        raise ValueError(f"{op}: order must be an int of at least 1, got {order!r}")
    checks.choice(op, "mode", mode, MODES)
    checks.choice(op, "gamma_grad", gamma_grad, GAMMA_GRADS)
    checks.above_zero(op, "eps", eps)
    if eps_norm is None:
        eps_norm = 0.0 if normalize else 1e-5
    if not (isinstance(eps_norm, (int, float)) and isfinite(eps_norm) and eps_norm >= 0):
        raise ValueError(f"{op}: eps_norm must be a finite number of at least 0, got {eps_norm!r}")
    return Rules(
        order, mode == "sequential", bool(normalize), bool(denominator), bool(correction),
        gamma_grad == "full", float(eps), float(eps_norm),
    )  # fmt: skip


def rewrite_shape(
    op: str,
    given: RewriteTensors,
    rules: Rules,
    *,
    echo: Any = None,
    concrete: bool = False,
) -> RewriteShape:
    """Check every tensor of a call and return its shape. All raising happens here."""
    k, v, beta, q = given.k, given.v, given.beta, given.q
    checks.tensor(op, "k", k, "B M H dk", checks.FLOATING)
    for name, x, layout in (("v", v, "B M H Dv"), ("q", q, "B Tq H dk")):
        if x is not None or name == "v":
            checks.tensor(op, name, x, layout, checks.FLOATING)
            assert x is not None
            checks.same_dtype(op, name, x, k.dtype, "k")
            _alike(op, name, x, k, (0, 2))
    _alike(op, "v", v, k, (1,))
    if q is not None:
        checks.size(op, "q", q, 3, k.shape[3], "the width of k")
    acc = torch.float64 if k.dtype == torch.float64 else torch.float32
    by_channel = isinstance(beta, torch.Tensor) and beta.ndim == 4
    checks.tensor(op, "beta", beta, "B M H Dv" if by_channel else "B M H", (acc,))
    _alike(op, "beta", beta, k, (0, 1, 2))
    if by_channel:
        checks.size(op, "beta", beta, 3, v.shape[3], "the width of v")
    shape = unchecked_shape(given, rules, echo=echo is not None, concrete=False)
    _check_memory(op, given, shape)
    if given.first is not None:
        checks.tensor(op, "first", given.first, "B", (torch.bool,))
        _alike(op, "first", given.first, k, (0,))
    if echo is not None:
        _check_echo(op, echo, given, shape)
    if given.slots is not None:
        checks.slots(op, "slots", given.slots, k.device, k.shape[0], given.state.shape[0], of="k")
        operands: dict[str, torch.Tensor | None] = dict(given._asdict())
        names = {"state_pool": "state", "normalizer_pool": "normalizer"}
        written = {name: operands.pop(old) for name, old in names.items()}
        checks.writable(
            op, operands, {n: x for n, x in written.items() if x is not None}, "delta_rewrite"
        )
    return unchecked_shape(given, rules, echo=echo is not None, concrete=concrete)


_MEANING = {0: "the batch of k", 1: "the tokens of k", 2: "the heads of k"}


def _alike(op: str, name: str, x: torch.Tensor, k: torch.Tensor, dims: Sequence[int]) -> None:
    checks.same_device(op, name, x, k.device)
    for dim in dims:
        checks.size(op, name, x, dim, k.shape[dim], _MEANING[dim])


def _check_memory(op: str, given: RewriteTensors, shape: RewriteShape) -> None:
    """Require memories of the rows, or pools of them, in the dtype of accumulation."""
    pooled = given.slots is not None
    letter, suffix = ("S", "_pool") if pooled else ("B", "")
    for field, layout in (("state", "H P Dv"), ("normalizer", "H P")):
        name, x = field + suffix, getattr(given, field)
        checks.tensor(op, name, x, f"{letter} {layout}", (shape.acc,))
        checks.same_device(op, name, x, shape.device)
        rows = given.state.shape[0] if pooled else shape.batch
        checks.size(op, name, x, 0, rows, "slots of state_pool" if pooled else _MEANING[0])
        checks.size(op, name, x, 1, shape.heads, _MEANING[2])
        checks.size(op, name, x, 2, shape.wide, f"2 · order {shape.order} · dk {shape.width}")
    checks.size(op, f"state{suffix}", given.state, 3, shape.values, "the width of v")


def _check_echo(op: str, echo: Any, given: RewriteTensors, shape: RewriteShape) -> None:
    checks.tensor(op, "echo", echo, "B H P Dv", (shape.acc,))
    checks.same_device(op, "echo", echo, shape.device)
    for dim, size in enumerate(shape.state):
        checks.size(op, "echo", echo, dim, size, f"dimension {dim} of state")
    if not (shape.denominator and shape.correction):
        raise ValueError(
            f"{op}: echo needs denominator=True and correction=True: other memories may grow "
            "without bound, and what they held cannot be recovered from what they hold"
        )


def unchecked_shape(
    given: RewriteTensors, rules: Rules, *, echo: bool = False, concrete: bool = True
) -> RewriteShape:
    """The shape of a call that was checked."""
    k, v, q = given.k, given.v, given.q
    return RewriteShape(
        batch=k.shape[0],
        tokens=k.shape[1],
        reads=0 if q is None else q.shape[1],
        heads=k.shape[2],
        width=k.shape[3],
        values=v.shape[3],
        dtype=k.dtype,
        device=k.device,
        channels=given.beta.ndim == 4,
        first=given.first is not None,
        **rules._asdict(),
        pool=0 if given.slots is None else given.state.shape[0],
        echo=echo,
        aligned=not concrete or all(map(checks.aligned, (v, given.state))),
    )


# ---- operators ----------------------------------------------------------------------------------

_TENSORS = (
    "Tensor k, Tensor v, Tensor beta, Tensor state, Tensor normalizer, Tensor? q, Tensor? first"
)
_RULES = (
    "int order, bool sequential, bool normalize, bool denominator, bool correction, bool full, "
    "float eps, float eps_norm, str backend"
)
_GRADS = ", ".join(["Tensor"] * DIFFERENTIABLE)


class _Call(NamedTuple):
    """The arguments of an operator, sorted: what every function below needs of them."""

    given: RewriteTensors
    shape: RewriteShape
    backend: str


def _call(arguments: Sequence[Any], tensors: int = TENSORS, *, echo: bool = False) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    given = RewriteTensors(*arguments[:tensors])
    *rules, backend = arguments[tensors:]
    return _Call(given, unchecked_shape(given, Rules(*rules), echo=echo), backend)


def _fake(call: _Call) -> tuple[torch.Tensor, ...]:
    given, shape = call.given, call.shape
    y = given.v.new_empty(0)
    if given.q is not None:
        y = given.v.new_empty((*given.q.shape[:3], shape.values))
    if shape.tokens == 0:
        return y, given.state.new_empty(0), given.state.new_empty(0)
    return y, given.state.new_empty(shape.state), given.state.new_empty(shape.state[:3])


def _forward(call: _Call) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor | None, ...]
    found = resolve(PACKAGE, call.shape, call.backend).fwd(call.shape, call.given)
    y, state, normalizer, change = found
    given = call.given
    results = (
        given.v.new_empty(0) if y is None else y,
        given.state.new_empty(0) if state is None else state,
        given.state.new_empty(0) if normalizer is None else normalizer,
    )
    if not call.shape.echo:
        return results
    assert change is not None
    return (*results, _echo(call), change)


def _echo(call: _Call) -> torch.Tensor:
    """A zero of the shape of a state, which takes no memory."""
    return call.given.state.new_zeros(()).expand(call.shape.state)


def _echo_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    batch, heads, _, values = call.shape.state
    change = call.given.state.new_empty((batch, heads, call.shape.tokens, values))
    return (*_fake(call), _echo(call), change)


def _backward(upstream: Sequence[torch.Tensor], call: _Call) -> tuple[torch.Tensor, ...]:
    shape = replace(call.shape, backward=True)
    module = resolve(PACKAGE, shape, call.backend)
    return _filled(module.bwd(shape, *upstream, call.given, None), call)


def _filled(grads: Sequence[torch.Tensor | None], call: _Call) -> tuple[torch.Tensor, ...]:
    return tuple(call.given.k.new_empty(0) if g is None else g for g in grads)


def _backward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    return tuple(
        call.given.k.new_empty(0) if x is None else x.new_empty(x.shape)
        for x in call.given[:DIFFERENTIABLE]
    )


def _flops(call: _Call, backward: bool) -> int:
    count = flops.delta_rewrite_backward if backward else flops.delta_rewrite_forward
    shape = call.shape
    of_head = count(
        shape.tokens, shape.reads, shape.wide, shape.values, sequential=shape.sequential
    )
    return shape.batch * shape.heads * of_head


REWRITE_BWD = declare(
    Operator(
        "delta_rewrite_bwd",
        f"(Tensor d_y, Tensor d_state, Tensor d_normalizer, {_TENSORS}, {_RULES}) -> ({_GRADS})",
        impl=lambda *args: _backward(args[:3], _call(args[3:])),
        fake=lambda *args: _backward_fake(_call(args[3:])),
        flops=lambda *args, **kwargs: _flops(_call(args[3:]), backward=True),
    )
)


REWRITE_FWD = declare(
    Operator(
        "delta_rewrite_fwd",
        f"({_TENSORS}, {_RULES}) -> (Tensor, Tensor, Tensor)",
        impl=lambda *args: _forward(_call(args)),
        fake=lambda *args: _fake(_call(args)),
        flops=lambda *args, **kwargs: _flops(_call(args), backward=False),
    ),
    **recomputed(REWRITE_BWD, TENSORS, range(DIFFERENTIABLE)),
)


# ---- with an echo -------------------------------------------------------------------------------

# Saved in the place of the state: what was written, E, and the state behind the call, which comes
# as a gradient. The first argument of the backward's tensors after the upstream ones.
_BEHIND = "Tensor after, Tensor change"


def _echo_call(arguments: Sequence[Any]) -> _Call:
    """Of the backward: the state behind the call stands where the one before it did."""
    after, _change, k, v, beta, *others = arguments
    return _call((k, v, beta, after, *others), echo=True)


def _echo_backward(args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    call = _echo_call(args[3:])
    change = args[4]
    shape = replace(call.shape, backward=True)
    module = resolve(PACKAGE, shape, call.backend)
    before = module.rebuild(shape, call.given, change)
    given = call.given._replace(state=before)
    grads = module.bwd(shape, *args[:3], given, change)
    return (*_filled(grads, call), before)


def _echo_backward_fake(args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    call = _echo_call(args[3:])
    return (*_backward_fake(call), call.given.state.new_empty(call.shape.state))


ECHO_BWD = declare(
    Operator(
        "delta_rewrite_echo_bwd",
        f"(Tensor d_y, Tensor d_state, Tensor d_normalizer, {_BEHIND}, "
        f"{_TENSORS.replace('Tensor state, ', '')}, {_RULES}) -> ({_GRADS}, Tensor)",
        impl=lambda *args: _echo_backward(args),
        fake=lambda *args: _echo_backward_fake(args),
        flops=lambda *args, **kwargs: _flops(_echo_call(args[3:]), backward=True),
    )
)


def _save_with_echo(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    k, v, beta, _, normalizer, q, first = inputs[:TENSORS]
    change = output[4]
    ctx.mark_non_differentiable(change)
    ctx.save_for_backward(k, v, beta, normalizer, q, first, change)
    ctx.rules = inputs[TENSORS + 1 :]


def _echo_gradients(
    ctx: Any, d_y: torch.Tensor, d_state: torch.Tensor, d_normalizer: torch.Tensor,
    after: torch.Tensor, d_change: torch.Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    k, v, beta, normalizer, q, first, change = ctx.saved_tensors
    *grads, before = ECHO_BWD(
        d_y, d_state, d_normalizer, after, change, k, v, beta, normalizer, q, first, *ctx.rules
    )
    if q is None:
        grads[DIFFERENTIABLE - 1] = None
    return (*grads, None, before, *[None] * len(ctx.rules))


ECHO_FWD = declare(
    Operator(
        "delta_rewrite_echo_fwd",
        f"({_TENSORS}, Tensor echo, {_RULES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        impl=lambda *args: _forward(_call(_without_echo(args), echo=True)),
        fake=lambda *args: _echo_fake(_call(_without_echo(args), echo=True)),
        flops=lambda *args, **kwargs: _flops(_call(_without_echo(args)), backward=False),
    ),
    setup_context=_save_with_echo,
    backward=_echo_gradients,
)


def _without_echo(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return (*arguments[:TENSORS], *arguments[TENSORS + 1 :])


# ---- in place -----------------------------------------------------------------------------------


def _in_place(arguments: Sequence[Any]) -> _Call:
    *memory, slots, q, first = arguments[: TENSORS + 1]
    return _call((*memory, q, first, slots, *arguments[TENSORS + 1 :]), TENSORS + 1)


def _write(call: _Call) -> torch.Tensor:
    given = call.given
    y = resolve(PACKAGE, call.shape, call.backend).fwd(call.shape, given)[0]
    # A kernel writes behind torch's back: what autograd saved of a pool must be seen as changed.
    torch.autograd.graph.increment_version([given.state, given.normalizer])
    return given.v.new_empty(0) if y is None else y


def _no_gradient(ctx: Any, *grads: torch.Tensor) -> NoReturn:
    raise RuntimeError("fastweights::delta_rewrite_ has no gradient; delta_rewrite has")


REWRITE_IN_PLACE = declare(
    Operator(
        "delta_rewrite_",
        "(Tensor k, Tensor v, Tensor beta, Tensor(a!) state_pool, Tensor(b!) normalizer_pool, "
        f"Tensor slots, Tensor? q, Tensor? first, {_RULES}) -> Tensor",
        impl=lambda *args: _write(_in_place(args)),
        fake=lambda *args: _fake(_in_place(args))[0],
        flops=lambda *args, **kwargs: _flops(_in_place(args), backward=False),
    ),
    backward=_no_gradient,
)
