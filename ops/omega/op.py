"""What torch sees: shapes and checks, two operators, autograd and FLOPs. Knows no backend.

    omega_memory_fwd  -> y, as v; state, momentum (N, H, D, Dv) in fp32 (float64 for float64)
    omega_memory_bwd  -> the gradients of the twelve tensors that have one, empty for absent ones

Without momentum the third result is empty. The backward recomputes from the arguments, which are
all that is saved. The tail of a call is cut from its keys and values outside of the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, recomputed, resolve
from ..polynomial.maps import of_coefficients
from ..polynomial.op import check_no_constant

PACKAGE = __package__
LOSSES = ("squared", "dot")
MAPS = ("identity", "elementwise", "symmetric")


@dataclass(frozen=True)
class OmegaShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `batch` is the number of sequences, packed or not; `tokens` those of a row of the batch.
    `width` is that of a key, `wide` of its features, `values` of a value. `dot`: the inner loss is
    −⟨φ(k) M, v⟩ instead of the squared error. `momentum`, `decay`: whether there are any.
    `aligned`: q, k and v start and stride by 16 bytes. `backward`: it is that pass.
    """

    batch: int
    tokens: int
    heads: int
    width: int
    wide: int
    values: int
    window: int
    chunk_size: int
    dtype: torch.dtype
    device: torch.device
    dot: bool
    feature_map: str
    momentum: bool
    packed: bool
    read_before: bool
    decay: bool = True
    aligned: bool = True
    backward: bool = False

    @property
    def acc(self) -> torch.dtype:
        """dtype of states, gates and all accumulation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def pairs(self) -> int:
        """The width in which ⟨φ(q), φ(k)⟩ of two tokens can be formed.

        Of symmetric features it is Σ_r a_r (q·k)^r.
        """
        return self.width if self.feature_map == "symmetric" else self.wide


class OmegaTensors(NamedTuple):
    """The tensors of a call, in the order in which the operators take them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    step: torch.Tensor
    decay: torch.Tensor | None
    window_gates: torch.Tensor | None
    momentum: torch.Tensor | None
    coefficients: torch.Tensor | None
    initial_state: torch.Tensor | None
    initial_momentum: torch.Tensor | None
    tail_k: torch.Tensor | None
    tail_v: torch.Tensor | None
    tail_length: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    def empty_state(self, shape: OmegaShape) -> torch.Tensor:
        """A new state of zeros, (N, H, D, Dv)."""
        size = (shape.batch, shape.heads, shape.wide, shape.values)
        return self.k.new_zeros(size, dtype=shape.acc)


DIFFERENTIABLE = 12  # of them, the first ones


def omega_shape(
    op: str,
    given: OmegaTensors,
    *,
    window: int,
    chunk_size: int,
    inner_loss: str,
    feature_map: str,
    read_before: bool,
    concrete: bool = False,
) -> OmegaShape:
    """Check every argument of a call and return its shape. All raising happens here."""
    q, k, v = given.q, given.k, given.v
    checks.tensor(op, "q", q, "B T H d", checks.FLOATING)
    for name, x in (("k", k), ("v", v)):
        checks.tensor(op, name, x, "B T H d" if name == "k" else "B T H Dv", checks.FLOATING)
        checks.same_dtype(op, name, x, q.dtype, "q")
        checks.same_device(op, name, x, q.device)
        for dim, of in enumerate(("batch", "tokens", "heads")):
            checks.size(op, name, x, dim, q.shape[dim], f"the {of} of q")
    checks.size(op, "k", k, 3, q.shape[3], "the width of q")
    for name, number in (("window", window), ("chunk_size", chunk_size)):
        if not isinstance(number, int):
            raise TypeError(f"{op}: {name} must be an int, got {type(number).__name__}")
        checks.positive(op, name, number)
    checks.choice(op, "inner_loss", inner_loss, LOSSES)
    check_features(op, feature_map, q, given.coefficients)
    shape = unchecked_shape(
        given, window, chunk_size, inner_loss, feature_map, read_before, concrete
    )
    _check_gates(op, shape, given)
    if given.cu_seqlens is not None:
        checks.cu_seqlens(op, "cu_seqlens", given.cu_seqlens, q.device, q.shape[0], q.shape[1])
    _check_carried(op, shape, given)
    return shape


def unchecked_shape(
    given: OmegaTensors, window: int, chunk_size: int, inner_loss: str, feature_map: str,
    read_before: bool, concrete: bool,
) -> OmegaShape:  # fmt: skip
    """The shape of a call that was checked."""
    k, cu = given.k, given.cu_seqlens
    return OmegaShape(
        batch=k.shape[0] if cu is None else cu.shape[0] - 1,
        tokens=k.shape[1],
        heads=k.shape[2],
        width=k.shape[3],
        wide=feature_width(feature_map, k.shape[3], given.coefficients),
        values=given.v.shape[3],
        window=window,
        chunk_size=chunk_size,
        dtype=k.dtype,
        device=k.device,
        dot=inner_loss == "dot",
        feature_map=feature_map,
        momentum=given.momentum is not None,
        packed=cu is not None,
        read_before=read_before,
        decay=given.decay is not None,
        aligned=not concrete or all(map(checks.aligned, (given.q, k, given.v))),
    )


def _check_gates(op: str, shape: OmegaShape, given: OmegaTensors) -> None:
    """Gates are fp32 (float64 for float64): a decay of 0.999 is 1 in bf16."""
    gates = {
        "step": (given.step, "B T H"),
        "decay": (given.decay, "B T H"),
        "momentum": (given.momentum, "B T H"),
        "window_gates": (given.window_gates, "B T H window"),
    }
    for name, (x, layout) in gates.items():
        if x is not None or name == "step":
            check_gate(op, name, x, layout, given.q)
    if given.window_gates is not None:
        checks.size(op, "window_gates", given.window_gates, 3, shape.window, "window")


def check_gate(op: str, name: str, x: torch.Tensor | None, layout: str, q: torch.Tensor) -> None:
    """Require a number for each token and head of q (B, T, H, d), or some."""
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    checks.tensor(op, name, x, layout, (acc,))
    assert x is not None
    checks.same_device(op, name, x, q.device)
    for dim, of in enumerate(("batch", "tokens", "heads")):
        checks.size(op, name, x, dim, q.shape[dim], f"the {of} of q")


def check_features(op: str, feature_map: str, q: torch.Tensor, a: torch.Tensor | None) -> None:
    """Require a map that q (…, H, d) has features of, and coefficients that go with it."""
    checks.choice(op, "feature_map", feature_map, MAPS)
    symmetric = feature_map == "symmetric"
    if symmetric and q.shape[-1] == 0:
        raise ValueError(f"{op}: q has width 0, feature_map symmetric needs at least 1")
    if a is None:
        return
    if feature_map == "identity":
        raise ValueError(f"{op}: coefficients were given, feature_map is identity")
    layout = "H degree+1" if isinstance(a, torch.Tensor) and a.ndim == 2 else "degree+1"
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    checks.tensor(op, "coefficients", a, layout, (acc,))
    checks.same_device(op, "coefficients", a, q.device)
    if a.ndim == 2:
        checks.size(op, "coefficients", a, 0, q.shape[-2], "the heads of q")
    least = 2 if symmetric else 1  # a_0 and a_1, or a_0
    if a.shape[-1] < least:
        raise ValueError(
            f"{op}: coefficients must hold at least {least} numbers for feature_map {feature_map}, "
            f"got shape {tuple(a.shape)}"
        )
    if symmetric:
        check_no_constant(op, a)


def feature_width(feature_map: str, width: int, coefficients: torch.Tensor | None) -> int:
    """D of keys of a width."""
    if feature_map == "identity":
        return width
    return of_coefficients(feature_map, coefficients).wide(width)


def _check_carried(op: str, shape: OmegaShape, given: OmegaTensors) -> None:
    """What a call takes over from the one before."""
    state = (shape.batch, shape.heads, shape.wide, shape.values)
    older = shape.window - 1
    accepted = {
        "initial_state": (given.initial_state, "N H D Dv", shape.acc, state),
        "initial_momentum": (given.initial_momentum, "N H D Dv", shape.acc, state),
        "tail_k": (
            given.tail_k, "N window-1 H d", shape.dtype,
            (shape.batch, older, shape.heads, shape.width),
        ),
        "tail_v": (
            given.tail_v, "N window-1 H Dv", shape.dtype,
            (shape.batch, older, shape.heads, shape.values),
        ),
        "tail_length": (given.tail_length, "N", torch.int32, (shape.batch,)),
    }  # fmt: skip
    for name, (x, layout, dtype, size) in accepted.items():
        if x is None:
            continue
        checks.tensor(op, name, x, layout, (dtype,))
        checks.same_device(op, name, x, shape.device)
        for dim, length in enumerate(size):
            checks.size(op, name, x, dim, length, f"dimension {dim} of {layout}")
    if given.initial_momentum is not None and given.momentum is None:
        raise ValueError(f"{op}: initial_momentum was given without momentum")
    if (given.tail_k is None) != (given.tail_v is None):
        raise ValueError(f"{op}: tail_k and tail_v must be given together")
    if given.tail_length is not None and given.tail_k is None:
        raise ValueError(f"{op}: tail_length was given without tail_k and tail_v")


def tails(shape: OmegaShape, given: OmegaTensors) -> tuple[torch.Tensor, ...]:
    """tail_k, tail_v (N, window − 1, H, ·), the newest last, and tail_length (N,) int32 of a call.

    Plain torch, differentiable, without a look at any length on the host.
    """
    older, device = shape.window - 1, shape.device
    batch = torch.arange(shape.batch, device=device)
    if given.cu_seqlens is None:
        row, begin = batch, torch.zeros_like(batch)
        end = torch.full_like(batch, shape.tokens)
    else:
        row, begin, end = torch.zeros_like(batch), given.cu_seqlens[:-1], given.cu_seqlens[1:]
    before = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    if given.tail_k is not None:
        before = torch.full_like(before, older)
    if given.tail_length is not None:
        before = given.tail_length
    length = (end - begin + before).clamp(max=older).to(torch.int32)
    at = end[:, None] - older + torch.arange(older, device=device)  # (N, window − 1), in tokens
    fresh = (at >= begin[:, None])[..., None, None]
    there = (torch.arange(older, device=device) >= older - length[:, None])[..., None, None]
    found = []
    for x, tail in ((given.k, given.tail_k), (given.v, given.tail_v)):
        if x.shape[1] == 0:
            rows = x.new_zeros(shape.batch, older, *x.shape[2:])
        else:
            rows = x[row[:, None], at.clamp(0, max(x.shape[1] - 1, 0))]
        if tail is not None:  # its rows move up by the tokens of the call
            index = (torch.arange(older, device=device) + (end - begin)[:, None]).clamp(
                0, older - 1
            )
            moved = tail[batch[:, None], index] if older else tail
            rows = torch.where(fresh, rows, moved)
        found.append(torch.where(there, rows, 0))
    return (*found, length)


# ---- operators ----------------------------------------------------------------------------------

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor step, Tensor? decay, Tensor? window_gates, "
    "Tensor? momentum, Tensor? coefficients, Tensor? initial_state, Tensor? initial_momentum, "
    "Tensor? tail_k, Tensor? tail_v, Tensor? tail_length, Tensor? cu_seqlens"
)
RULES = "SymInt window, SymInt chunk_size, str inner_loss, str feature_map, bool read_before"
_COUNT = len(OmegaTensors._fields)


class _Call(NamedTuple):
    """The arguments of a forward operator, sorted: what every function below needs of them."""

    given: OmegaTensors
    shape: OmegaShape
    backend: str


def _call(arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    given = OmegaTensors(*arguments[:_COUNT])
    window, chunk_size, inner_loss, feature_map, read_before, backend = arguments[_COUNT:]
    shape = unchecked_shape(given, window, chunk_size, inner_loss, feature_map, read_before, True)
    return _Call(given, shape, backend)


def _forward_impl(call: _Call) -> tuple[torch.Tensor, ...]:
    module = resolve(PACKAGE, call.shape, call.backend)
    y, state, momentum = module.fwd(call.shape, call.given)
    return y, state, state.new_empty(0) if momentum is None else momentum


def _forward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    given, shape = call.given, call.shape
    state = given.empty_state(shape)
    y = given.v.new_empty(given.v.shape)
    return y, state, torch.empty_like(state) if shape.momentum else state.new_empty(0)


def _backward_impl(upstream: Sequence[torch.Tensor], call: _Call) -> tuple[torch.Tensor, ...]:
    d_y, d_state, d_momentum = upstream
    shape = replace(call.shape, backward=True)
    module = resolve(PACKAGE, shape, call.backend)
    grads = module.bwd(shape, d_y, d_state, d_momentum if shape.momentum else None, call.given)
    return tuple(d_y.new_empty(0) if g is None else g for g in grads)


def _backward_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    return tuple(
        call.given.q.new_empty(0) if x is None else x.new_empty(x.shape)
        for x in call.given[:DIFFERENTIABLE]
    )


def _flops(call: _Call, backward: bool) -> int:
    """Packed calls are counted as N equal sequences: the real lengths live on the device."""
    count = flops.omega_backward if backward else flops.omega_forward
    shape = call.shape
    tokens = shape.tokens // max(1, shape.batch) if shape.packed else shape.tokens
    a_head = count(
        tokens, shape.chunk_size, shape.window, shape.wide, shape.values,
        momentum=shape.momentum, pairs=shape.pairs,
    )  # fmt: skip
    return shape.batch * shape.heads * a_head


MEMORY_BWD = declare(
    Operator(
        "omega_memory_bwd",
        f"(Tensor d_y, Tensor d_state, Tensor d_last_momentum, {TENSORS}, {RULES}, str backend) -> "
        f"({', '.join(['Tensor'] * DIFFERENTIABLE)})",
        impl=lambda *args: _backward_impl(args[:3], _call(args[3:])),
        fake=lambda *args: _backward_fake(_call(args[3:])),
        flops=lambda *args, **kwargs: _flops(_call(args[3:]), backward=True),
    )
)


MEMORY_FWD = declare(
    Operator(
        "omega_memory_fwd",
        f"({TENSORS}, {RULES}, str backend) -> (Tensor, Tensor, Tensor)",
        impl=lambda *args: _forward_impl(_call(args)),
        fake=lambda *args: _forward_fake(_call(args)),
        flops=lambda *args, **kwargs: _flops(_call(args), backward=False),
    ),
    **recomputed(MEMORY_BWD, _COUNT, range(DIFFERENTIABLE)),
)
