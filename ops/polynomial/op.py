"""What torch sees: shapes and checks, six operators, autograd and FLOPs. Knows no backend.

    polynomial_features_fwd  -> φ(x), as x                 _bwd -> d x, d coefficients
    polynomial_read_fwd      -> φ(x) S, as x               _bwd -> d x, d S, d coefficients
    polynomial_update_fwd    -> φ(x)ᵀ G, fp32 (float64)    _bwd -> d x, d G, d coefficients

All three are ⟨φ(x) S, G⟩ = Σ_t φ(x_t) S G_tᵀ seen from one side: the read is its derivative by G,
the update that by S, and the gradient of x is one and the same thing in both backwards. Backwards
recompute from the arguments, which are all that is saved; gradients nobody asks for are empty.
Backends get x as (B, T, H, d); of features that is (1, rows, heads, d), with one head if
coefficients are not by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, resolve
from .maps import KINDS, FeatureMap, kept_of

PACKAGE = __package__


@dataclass(frozen=True)
class PolynomialShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `function`: "features", "read" or "update". `width` is that of x, `wide` of its features,
    `values` of S and G, 0 for features. `by_head`: coefficients are (H, degree+1). `aligned`: x and
    what comes with it start and stride by 16 bytes. `backward`: which pass asks.
    """

    function: str
    batch: int
    tokens: int
    heads: int
    width: int
    values: int
    map: FeatureMap
    by_head: bool
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True
    backward: bool = False

    @property
    def wide(self) -> int:
        """D."""
        return self.map.wide(self.width)

    @property
    def acc(self) -> torch.dtype:
        """dtype of states, coefficients and all accumulation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Gradients(NamedTuple):
    """Of one call; None where there is nothing to differentiate, or nobody asked."""

    x: torch.Tensor | None
    other: torch.Tensor | None
    coefficients: torch.Tensor | None


class Arguments(NamedTuple):
    """A call as the operators take it: x; S, G or None; and the rules of the map."""

    x: torch.Tensor
    other: torch.Tensor | None
    coefficients: torch.Tensor | None
    map: FeatureMap


def arguments(
    op: str,
    x: torch.Tensor,
    other: torch.Tensor | None,
    coefficients: torch.Tensor | None,
    *,
    degree: int,
    kept: Sequence[int] | None,
    kind: str = "symmetric",
    tile: int = 1,
) -> Arguments:
    """Check every argument of a call. All raising happens here."""
    function = op.removeprefix("polynomial_")
    checks.tensor(op, "x", x, "... d" if function == "features" else "B T H d", checks.FLOATING)
    if x.shape[-1] == 0:
        raise ValueError(f"{op}: x has width 0, at least 1 is needed")
    for name, number in (("degree", degree), ("tile", tile)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{op}: {name} must be an int, got {type(number).__name__}")
        checks.positive(op, name, number)
    checks.choice(op, "kind", kind, KINDS)
    if kind == "tiled" and degree > 2:
        raise ValueError(f"{op}: degree is {degree}, the kind tiled has at most 2")
    chosen = _kept(op, kind, degree, kept)
    map_ = FeatureMap(kind, degree, chosen, tile if kind == "tiled" else 1)
    _check_coefficients(op, x, coefficients, map_, by_default=kept is None)
    if function == "read":
        _check_state(op, x, other, map_.wide(x.shape[-1]))
    if function == "update":
        _check_rows(op, x, other)
    return Arguments(x, other, coefficients, map_)


def _kept(op: str, kind: str, degree: int, kept: Sequence[int] | None) -> tuple[int, ...]:
    """The degrees that have features."""
    if kept is None:
        return kept_of(kind, degree)
    if not isinstance(kept, (tuple, list)) or not all(type(r) is int for r in kept):
        raise TypeError(f"{op}: kept must be a sequence of ints, got {kept!r}")
    if not kept or sorted({*kept} & {*range(degree + 1)}) != list(kept):
        raise ValueError(
            f"{op}: kept must hold degrees from 0 to {degree} (degree), increasing, got {kept!r}"
        )
    return tuple(kept)


def _check_coefficients(
    op: str, x: torch.Tensor, a: torch.Tensor | None, map_: FeatureMap, *, by_default: bool
) -> None:
    if a is None:
        return
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    layout = "H degree+1" if isinstance(a, torch.Tensor) and a.ndim == 2 else "degree+1"
    checks.tensor(op, "coefficients", a, layout, (acc,))
    checks.same_device(op, "coefficients", a, x.device)
    if a.ndim == 2:
        if x.ndim < 2:
            raise ValueError(f"{op}: coefficients are by head, x has no heads: {tuple(x.shape)}")
        checks.size(op, "coefficients", a, 0, x.shape[-2], "the heads of x")
    checks.size(op, "coefficients", a, a.ndim - 1, map_.degree + 1, "degree + 1")
    if by_default and 0 not in map_.kept:
        check_no_constant(op, a, f" unless kept says so: kept={(0, *map_.kept)}")


def check_no_constant(op: str, a: torch.Tensor, unless: str = "") -> None:
    """Require a_0 = 0. As for packed offsets, values are looked at where that costs no sync."""
    if checks.readable(a):
        first = a.detach()[..., 0]
        if bool((first != 0).any()):
            raise ValueError(
                f"{op}: coefficients[..., 0] is {first.tolist()}, but degree 0 has no features"
                f"{unless}"
            )


def _check_state(op: str, x: torch.Tensor, state: torch.Tensor | None, wide: int) -> None:
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    checks.tensor(op, "state", state, "B H D Dv", (acc,))
    assert state is not None
    checks.same_device(op, "state", state, x.device)
    checks.size(op, "state", state, 0, x.shape[0], "the batch of x")
    checks.size(op, "state", state, 1, x.shape[2], "the heads of x")
    checks.size(op, "state", state, 2, wide, "the features of x")


def _check_rows(op: str, x: torch.Tensor, g: torch.Tensor | None) -> None:
    checks.tensor(op, "g", g, "B T H Dv", checks.FLOATING)
    assert g is not None
    checks.same_dtype(op, "g", g, x.dtype, "x")
    checks.same_device(op, "g", g, x.device)
    for dim, of in enumerate(("batch", "tokens", "heads")):
        checks.size(op, "g", g, dim, x.shape[dim], f"the {of} of x")


# ---- operators ----------------------------------------------------------------------------------

_OTHER = {"features": "", "read": "Tensor state, ", "update": "Tensor g, "}
_MAP = "str kind, int degree, int[] kept, int tile"


class _Call(NamedTuple):
    """The arguments of a forward operator, sorted: what every function below needs of them."""

    x: torch.Tensor  # (B, T, H, d)
    other: torch.Tensor | None
    coefficients: torch.Tensor | None
    shape: PolynomialShape
    backend: str
    front: Sequence[int]  # the dimensions of the given x before its width


def shape_of(function: str, given: Arguments, *, concrete: bool) -> PolynomialShape:
    """The shape of a call that was checked, its x as (B, T, H, d).

    `concrete` allows to ask tensors for their addresses, which a traced call must not.
    """
    x, other, coefficients, map_ = given
    by_head = coefficients is not None and coefficients.ndim == 2
    if other is None:
        heads = x.shape[-2] if by_head else 1
        batch, tokens = 1, prod(x.shape[: -2 if by_head else -1])
    else:
        batch, tokens, heads = x.shape[:3]
    return PolynomialShape(
        function=function,
        batch=batch,
        tokens=tokens,
        heads=heads,
        width=x.shape[-1],
        values=0 if other is None else other.shape[-1],
        map=map_,
        by_head=by_head,
        dtype=x.dtype,
        device=x.device,
        aligned=not concrete or all(checks.aligned(t) for t in (x, other) if t is not None),
    )


def _call(function: str, arguments: Sequence[Any]) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    x, *rest = arguments
    other = rest.pop(0) if function != "features" else None
    coefficients, kind, degree, kept, tile, backend = rest
    given = Arguments(x, other, coefficients, FeatureMap(kind, degree, tuple(kept), tile))
    shape = shape_of(function, given, concrete=True)
    return _Call(_by_head(shape, x), other, coefficients, shape, backend, x.shape[:-1])


def _by_head(shape: PolynomialShape, x: torch.Tensor) -> torch.Tensor:
    """x, or the gradient of its features, as (B, T, H, ·): a view where its strides allow it."""
    if shape.function != "features":
        return x
    return x.reshape(1, shape.tokens, shape.heads, x.shape[-1])


def _forward_impl(call: _Call) -> torch.Tensor:
    shape = call.shape
    module = resolve(PACKAGE, shape, call.backend)
    out: torch.Tensor = module.fwd(shape, call.x, call.other, call.coefficients)
    return out.view(*call.front, shape.wide) if shape.function == "features" else out


def _forward_fake(call: _Call) -> torch.Tensor:
    x, shape = call.x, call.shape
    if shape.function == "features":
        return x.new_empty(*call.front, shape.wide)
    if shape.function == "read":
        return x.new_empty(*x.shape[:3], shape.values)
    size = (shape.batch, shape.heads, shape.wide, shape.values)
    return x.new_empty(size, dtype=shape.acc)


def _backward_impl(
    upstream: torch.Tensor, call: _Call, wanted: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    shape = replace(call.shape, backward=True)
    module = resolve(PACKAGE, shape, call.backend)
    grads = module.bwd(
        shape, _by_head(shape, upstream), call.x, call.other, call.coefficients, tuple(wanted)
    )
    empty = call.x.new_empty
    d_x = empty(0) if grads.x is None or not wanted[0] else grads.x
    d_a = grads.coefficients
    if d_a is None or call.coefficients is None or not wanted[0]:
        d_a = empty(0, dtype=shape.acc)
    if shape.function == "features":
        return d_x.view(*call.front, shape.width) if wanted[0] else d_x, d_a
    return d_x, empty(0) if grads.other is None else grads.other, d_a


def _backward_fake(call: _Call, wanted: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    x, other, a = call.x, call.other, call.coefficients
    d_x = x.new_empty((*call.front, call.shape.width) if wanted[0] else 0)
    d_a = x.new_empty(a.shape if wanted[0] and a is not None else 0, dtype=call.shape.acc)
    if other is None:
        return d_x, d_a
    return d_x, other.new_empty(other.shape) if wanted[1] else x.new_empty(0), d_a


def _flops(call: _Call) -> int:
    shape = call.shape
    rows = shape.batch * shape.tokens * shape.heads
    if shape.function == "features":
        return flops.polynomial_features_forward(rows, shape.wide)
    return flops.polynomial_product(rows, shape.wide, shape.values)


def _backward_flops(call: _Call, wanted: Sequence[bool]) -> int:
    shape = call.shape
    rows = shape.batch * shape.tokens * shape.heads
    if shape.function == "features":
        return flops.polynomial_features_backward(rows, shape.wide) if wanted[0] else 0
    return sum(wanted) * flops.polynomial_product(rows, shape.wide, shape.values)


def _declare(function: str) -> Any:
    """The forward operator; its backward takes the upstream gradient and what is wanted, too.

    `wanted`: the gradients of x and the coefficients; that of what comes with x.
    """
    name, count = f"polynomial_{function}", 2 if function == "features" else 3
    tensors = f"Tensor x, {_OTHER[function]}Tensor? coefficients"
    backward = declare(
        Operator(
            f"{name}_bwd",
            f"(Tensor upstream, bool[] wanted, {tensors}, {_MAP}, str backend) -> "
            f"({', '.join(['Tensor'] * count)})",
            impl=lambda d, wanted, *args: _backward_impl(d, _call(function, args), wanted),
            fake=lambda d, wanted, *args: _backward_fake(_call(function, args), wanted),
            flops=lambda d, wanted, *args, **kwargs: _backward_flops(_call(function, args), wanted),
        )
    )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.rules = inputs[count:]

    def through(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]  # behind the keys of dispatch
        wanted = [needed[0] or needed[count - 1], count == 3 and needed[1]]
        grads = backward(upstream, wanted, *tensors, *ctx.rules)
        kept = [g if need else None for g, need in zip(grads, needed, strict=False)]
        return (*kept, *[None] * len(ctx.rules))

    return declare(
        Operator(
            f"{name}_fwd",
            f"({tensors}, {_MAP}, str backend) -> Tensor",
            impl=lambda *args: _forward_impl(_call(function, args)),
            fake=lambda *args: _forward_fake(_call(function, args)),
            flops=lambda *args, **kwargs: _flops(_call(function, args)),
        ),
        setup_context=setup,
        backward=through,
    )


FEATURES_FWD = _declare("features")
READ_FWD = _declare("read")
UPDATE_FWD = _declare("update")
