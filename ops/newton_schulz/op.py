"""What torch sees: shapes and checks, four operators, autograd and FLOPs. Knows no backend.

    newton_schulz_fwd              -> out, as x
    newton_schulz_bwd              -> dx, as x
    gram_newton_schulz_factor_fwd  -> factor, fp32 (float64 for float64)
    gram_newton_schulz_factor_bwd  -> d gram, as gram

The operators carry the coefficients of each step as one list of 3·steps numbers. Both backwards
recompute from the input, the one tensor that is saved. Backends get stacks of one leading
dimension, (B, m, n), and return such stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2, prod
from typing import Any, NamedTuple

import torch

from .. import checks, flops
from ..dispatch import Operator, declare, resolve
from .coefficients import Triple, schedule

PACKAGE = __package__

# Above this many elements a normalised fp16 matrix has typical elements of 2⁻¹³ and less, of which
# many are subnormal. Its first step then runs on a multiple of it, see `first_scale`.
LARGE = 1 << 26


@dataclass(frozen=True)
class NewtonSchulzShape:
    """One call's sizes and rules: all that backends and config spaces may depend on.

    `factor`: the call asks for the factor of a Gram matrix, not for the matrix itself. `batch` is
    the number of matrices, `coefficients` a₁, b₁, c₁, a₂, …. `aligned`: the input starts and
    strides by multiples of 16 bytes. `backward`: which pass asks; a backend may run one alone.
    """

    factor: bool
    batch: int
    rows: int
    cols: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    coefficients: tuple[float, ...]
    eps: float
    aligned: bool = True
    backward: bool = False

    @property
    def triples(self) -> list[Triple]:
        """(a, b, c) of each step."""
        numbers = iter(self.coefficients)
        return list(zip(numbers, numbers, numbers, strict=True))

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.coefficients) // 3

    @property
    def tall(self) -> bool:
        """Whether the iteration runs on the transposed matrix, whose rows are the shorter side."""
        return self.rows > self.cols

    @property
    def statistic_dtype(self) -> torch.dtype:
        """dtype of the norm and of all accumulation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def first_scale(self) -> float:
        """Power of two by which the normalised matrix is multiplied before its first step.

        With it a typical element, 1/√(rows·cols), is at least 2⁻¹³; 1 wherever that is so anyway.
        The first step takes it out again.
        """
        elements = self.rows * self.cols
        if self.compute_dtype != torch.float16 or elements <= LARGE:
            return 1.0
        return 2.0 ** ceil(log2(elements / LARGE) / 2)


# dtype of the input -> the dtypes that iterates may have, the default first.
_MATRIX = {
    torch.bfloat16: (torch.float16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
    torch.float32: (torch.float32, torch.float16),
    torch.float64: (torch.float64,),
}
# Eigenvalues of a Gram matrix are squares: at a condition of 1e3 they span six decades, of which
# 16 bits keep three.
_FACTOR = {
    torch.bfloat16: (torch.float32,),
    torch.float16: (torch.float32,),
    torch.float32: (torch.float32,),
    torch.float64: (torch.float64,),
}


def newton_schulz_shape(
    op: str,
    x: torch.Tensor,
    steps: int,
    coefficients: str | Sequence[Sequence[float]],
    eps: float,
    compute_dtype: torch.dtype | None,
    concrete: bool = False,
) -> NewtonSchulzShape:
    """Check every argument of a `newton_schulz` call and return its shape.

    `concrete` allows to ask tensors for their addresses, which a traced call must not.
    """
    checks.tensor(op, "x", x, "... m n", checks.FLOATING)
    numbers, compute_dtype = _rules(
        op, "x", x, steps, coefficients, eps, compute_dtype, _MATRIX[x.dtype]
    )
    return _shape(False, x, numbers, eps, compute_dtype, concrete)


def factor_shape(
    op: str,
    gram: torch.Tensor,
    steps: int,
    coefficients: str | Sequence[Sequence[float]],
    eps: float,
    compute_dtype: torch.dtype | None,
    concrete: bool = False,
) -> NewtonSchulzShape:
    """Check every argument of a `gram_newton_schulz_factor` call and return its shape."""
    checks.tensor(op, "gram", gram, "... n n", checks.FLOATING)
    checks.size(op, "gram", gram, gram.ndim - 1, gram.shape[-2], "its rows; gram must be square")
    numbers, compute_dtype = _rules(
        op, "gram", gram, steps, coefficients, eps, compute_dtype, _FACTOR[gram.dtype]
    )
    return _shape(True, gram, numbers, eps, compute_dtype, concrete)


def _rules(
    op: str,
    name: str,
    x: torch.Tensor,
    steps: int,
    coefficients: str | Sequence[Sequence[float]],
    eps: float,
    compute_dtype: torch.dtype | None,
    accepted: tuple[torch.dtype, ...],
) -> tuple[tuple[float, ...], torch.dtype]:
    """The numbers of all steps and the dtype of the iterates."""
    if not isinstance(steps, int):
        raise TypeError(f"{op}: steps must be an int, got {type(steps).__name__}")
    checks.positive(op, "steps", steps)
    checks.above_zero(op, "eps", eps)
    if compute_dtype is None:
        compute_dtype = accepted[0]
    if compute_dtype not in accepted:
        raise TypeError(
            f"{op}: compute_dtype is {compute_dtype}; accepted for {name} of {x.dtype}: "
            f"{', '.join(map(str, accepted))}"
        )
    return schedule(op, coefficients, steps), compute_dtype


def _shape(
    factor: bool,
    x: torch.Tensor,
    coefficients: Sequence[float],
    eps: float,
    compute_dtype: torch.dtype,
    concrete: bool,
) -> NewtonSchulzShape:
    return NewtonSchulzShape(
        factor=factor,
        batch=prod(x.shape[:-2]),
        rows=x.shape[-2],
        cols=x.shape[-1],
        dtype=x.dtype,
        compute_dtype=compute_dtype,
        device=x.device,
        coefficients=tuple(coefficients),
        eps=eps,
        aligned=not concrete or checks.aligned(x),
    )


# ---- operators ----------------------------------------------------------------------------------

_RULES = "float[] coefficients, float eps, ScalarType compute_dtype, str backend"


class _Call(NamedTuple):
    """The arguments of a forward operator, sorted: what every function below needs of them."""

    x: torch.Tensor
    shape: NewtonSchulzShape
    backend: str

    @property
    def stack(self) -> torch.Tensor:
        """The input as (B, m, n): a view where its strides allow it, else a copy."""
        return _stack(self.x)


def _stack(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(prod(x.shape[:-2]), *x.shape[-2:])


def _matrix_call(*args: Any) -> _Call:
    return _call(False, *args)


def _factor_call(*args: Any) -> _Call:
    return _call(True, *args)


def _call(
    factor: bool,
    x: torch.Tensor,
    coefficients: Sequence[float],
    eps: float,
    compute_dtype: torch.dtype,
    backend: str,
) -> _Call:
    """No checks: the public function made them, and the operators trust it."""
    return _Call(x, _shape(factor, x, coefficients, eps, compute_dtype, True), backend)


def _forward_impl(call: _Call) -> torch.Tensor:
    module = resolve(PACKAGE, call.shape, call.backend)
    return module.fwd(call.shape, call.stack).view(call.x.shape)


def _backward_impl(upstream: torch.Tensor, call: _Call) -> torch.Tensor:
    shape = replace(call.shape, backward=True)
    module = resolve(PACKAGE, shape, call.backend)
    return module.bwd(shape, _stack(upstream), call.stack).view(call.x.shape)


def _forward_fake(call: _Call) -> torch.Tensor:
    dtype = call.shape.statistic_dtype if call.shape.factor else call.x.dtype
    return call.x.new_empty(call.x.shape, dtype=dtype)


def _backward_fake(upstream: torch.Tensor, call: _Call) -> torch.Tensor:
    return call.x.new_empty(call.x.shape)


def _flops(call: _Call, backward: bool) -> int:
    shape = call.shape
    if shape.factor:
        factor = flops.gram_factor_backward if backward else flops.gram_factor_forward
        return shape.batch * factor(shape.rows, shape.steps)
    matrix = flops.newton_schulz_backward if backward else flops.newton_schulz_forward
    n, m = sorted((shape.rows, shape.cols))
    return shape.batch * matrix(n, m, shape.steps)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.rules = inputs[1:]


def _declare(name: str, argument: str, call: Callable[..., _Call]) -> Any:
    """The forward operator; its backward takes the upstream gradient, then the same arguments."""
    backward = declare(
        Operator(
            f"{name}_bwd",
            f"(Tensor d_out, Tensor {argument}, {_RULES}) -> Tensor",
            impl=lambda d_out, *args: _backward_impl(d_out, call(*args)),
            fake=lambda d_out, *args: _backward_fake(d_out, call(*args)),
            flops=lambda d_out, *args, **kwargs: _flops(call(*args), backward=True),
        )
    )

    def through(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return (backward(d_out, x, *ctx.rules), *[None] * len(ctx.rules))

    return declare(
        Operator(
            f"{name}_fwd",
            f"(Tensor {argument}, {_RULES}) -> Tensor",
            impl=lambda *args: _forward_impl(call(*args)),
            fake=lambda *args: _forward_fake(call(*args)),
            flops=lambda *args, **kwargs: _flops(call(*args), backward=False),
        ),
        setup_context=_setup,
        backward=through,
    )


MATRIX_FWD = _declare("newton_schulz", "x", _matrix_call)
FACTOR_FWD = _declare("gram_newton_schulz_factor", "gram", _factor_call)
