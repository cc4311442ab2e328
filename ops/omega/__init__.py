r"""The Omega rule on a linear memory: each token writes by one gradient step on a window of tokens.

With x = φ(k), the memory M (D × Dv) of a head, and M^ as it was after the last token of the chunk
of `chunk_size` tokens before,

    G_t = Σ_j w_{t,j} x_{t−j}ᵀ (x_{t−j} M^ − v_{t−j})    w_{t,j} = step_t · window_gates_{t,j}
    S_t = momentum_t S_{t−1} − G_t                       S_t = −G_t without momentum
    M_t = decay_t M_{t−1} + S_t
    y_t = φ(q_t) M_t

over lags j = 0 … window − 1. The chunk is part of the function, not a tile: errors of all its
tokens, and of older ones in their windows, are those at M^. With the inner loss "dot" −v stands for
the error, and chunks make no difference. Written literally in `fastweights.reference`; source:
ATLAS, arXiv 2505.23735, equations 8 to 16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from .gradient import OmegaGradient, omega_gradient
from .health import OmegaHealth, omega_health
from .op import MEMORY_FWD, PACKAGE, OmegaShape, OmegaTensors, omega_shape, tails
from .step_rule import omega_step_size

__all__ = [
    "OmegaGradient",
    "OmegaHealth",
    "OmegaState",
    "omega_exact",
    "omega_gradient",
    "omega_health",
    "omega_memory",
    "omega_step_size",
]


class OmegaState(NamedTuple):
    """What a call leaves to the next one.

    Attributes:
        state: M after the last token, (N, H, D, Dv), fp32 (float64 for float64).
        momentum: S, the same shape; None without momentum.
        tail_k: the last window − 1 keys, (N, window − 1, H, d), the newest last.
        tail_v: their values, (N, window − 1, H, Dv).
        tail_length: how many of them exist, int32 (N,); the others, in front, are 0.
    """

    state: torch.Tensor
    momentum: torch.Tensor | None
    tail_k: torch.Tensor
    tail_v: torch.Tensor
    tail_length: torch.Tensor


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int = 1,
    chunk_size: int = 64,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    read_before: bool = False,
    concrete: bool = False,
    **rest: Any,
) -> OmegaShape:
    given = OmegaTensors._make((q, k, v, *map(rest.get, OmegaTensors._fields[3:])))
    return omega_shape(
        "omega_memory", given, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before, concrete=concrete,
    )  # fmt: skip


@explainable(PACKAGE, _plan)
def omega_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    step: torch.Tensor,
    decay: torch.Tensor | None = None,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    momentum: torch.Tensor | None = None,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    chunk_size: int = 64,
    read_before: bool = False,
    initial_state: torch.Tensor | None = None,
    initial_momentum: torch.Tensor | None = None,
    tail_k: torch.Tensor | None = None,
    tail_v: torch.Tensor | None = None,
    tail_length: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, OmegaState | None]:
    """Write every token into a memory by the Omega rule, and read it with every query.

    Args:
        q, k: (B, T, H, d), bf16, fp16, fp32 or float64, any strides; neither is scaled or
            normalised here.
        v: (B, T, H, Dv) of q's dtype.
        step: (B, T, H), of the gradient. Gates are fp32 (float64 for float64) and stay so under
            autocast.
        decay: (B, T, H) in [0, 1], multiplies the memory before token t's write; None: 1.
        window_gates: (B, T, H, window), the share of the token `lag` before in token t's write;
            lag 0 is token t itself. None: 1/window each.
        window: tokens that a write looks at, its own among them, at least 1.
        momentum: (B, T, H), 0 or more, multiplies S; None: no S. Triton takes logarithms of decay
            and momentum: a negative one gives NaN there from its token on.
        inner_loss: "squared", the error x M − v, or "dot", −v in its place.
        feature_map: "identity"; "elementwise": φ(x) = Σ_r a_r x^r number by number; or "symmetric":
            products of up to p numbers, ⟨φ(x), φ(y)⟩ = Σ_r a_r (x·y)^r. The rows of its states are
            those of `polynomial_features(kind="symmetric")`: D = Σ_r C(d+r−1, r) over r = 1 … p.
        coefficients: a_0, a_1, … a_p, (p + 1,) or (H, p + 1), dtype as the gates; None:
            (0, 1, ½)/1.5. Of "symmetric" a_0 has to be 0 (on a CPU that is checked), a zero drops
            its degree and has the gradient 0, and one below zero gives NaN.
        chunk_size: tokens whose errors are taken at the same memory; any number from 1 on.
        read_before: y_t = φ(q_t) M_{t−1}, without token t's own write.
        initial_state, initial_momentum: (N, H, D, Dv), dtype as the gates; None: 0.
        tail_k, tail_v, tail_length: the keys and values in front of the first token, as the call
            before returned them. A call goes on where another ended if that one's tokens filled its
            last chunk; else it starts a new one.
        return_state: also return `OmegaState`.
        cu_seqlens: int32 (N+1,): N sequences packed along T, B = 1; chunks, windows and states
            start anew in each. Tokens after the last are padding: y is 0 there. N = B without it.
        backend: "auto", "eager", "triton" or "cuda". Triton takes chunks up to 128, window − 1
            up to 64 and no more than a chunk, features up to 128 and values up to 256 wide; with
            "dot", whose errors meet no memory, chunks of any length. On Hopper chunks of 64 are
            fastest, in forward those of 8, 16 and 32, too, of aligned 16-bit tensors without
            momentum. Of the map "symmetric" Triton takes degrees up to 2, without momentum, keys up
            to 64 and values up to 256 wide in chunks up to 64; "auto" takes eager.

    Returns:
        y (B, T, H, Dv), contiguous, v's dtype; and `OmegaState`, or None if it was not asked for.

    Differentiable in all floating arguments; the arguments are all that is saved. There is no
    second derivative; `reference.omega_memory` has.

    Raises:
        TypeError: wrong dtype, gates in half precision, not a plain tensor, window or chunk_size
            not an int.
        ValueError: wrong shape; momentum's start without momentum, half of a tail, coefficients
            that do not go with the map; a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import omega_memory
        >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 100, 2, 16), dim=-1).unbind(0)
        >>> v, step = torch.randn(1, 100, 2, 16), torch.full((1, 100, 2), 0.2)
        >>> y, left = omega_memory(q, k, v, step=step, window=4, chunk_size=16, return_state=True)
        >>> y.shape, left.state.shape, left.tail_k.shape
        (torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]), torch.Size([1, 3, 2, 16]))
    """
    op = "omega_memory"
    backend = requested(op, backend)
    checks.tensor(op, "q", q, "B T H d", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    given = OmegaTensors(
        q, k, v, step, decay, window_gates, momentum, coefficients, initial_state,
        initial_momentum, tail_k, tail_v, tail_length, cu_seqlens,
    )  # fmt: skip
    shape = omega_shape(
        op, given, window=window, chunk_size=chunk_size, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before,
    )  # fmt: skip
    with without_autocast(q.device):
        y, state, last = MEMORY_FWD(
            *given, window, chunk_size, inner_loss, feature_map, read_before, backend
        )
    if not return_state:
        return y, None
    return y, OmegaState(state, last if shape.momentum else None, *tails(shape, given))


def omega_exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    step: torch.Tensor,
    decay: torch.Tensor | None = None,
    window_gates: torch.Tensor | None = None,
    window: int = 1,
    momentum: torch.Tensor | None = None,
    inner_loss: str = "squared",
    feature_map: str = "identity",
    coefficients: torch.Tensor | None = None,
    read_before: bool = False,
    initial_state: torch.Tensor | None = None,
    initial_momentum: torch.Tensor | None = None,
    tail_k: torch.Tensor | None = None,
    tail_v: torch.Tensor | None = None,
    tail_length: torch.Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, OmegaState | None]:
    """`omega_memory` with chunks of one token, sixteen at a time by a triangular solve.

    Arguments, results and errors are those of `omega_memory`, of which a chunk of one is the rule
    without delay: every error is taken at the memory as the token before left it. In plain torch
    and fp32 (float64 for float64) on any device, differentiable more than once. A solve takes
    (16 · window)² · Dv multiplications, which is meant for short windows.

    Args:
        backend: "auto" or "eager".

    Raises:
        ValueError: another backend, and what `omega_memory` raises.

    Example:
        >>> import torch
        >>> from fastweights.ops import omega_exact, omega_memory
        >>> x, step = torch.randn(3, 1, 40, 2, 8, dtype=torch.float64), torch.full((1, 40, 2), 0.05)
        >>> y, _ = omega_exact(*x, step=step.double(), window=3)
        >>> torch.allclose(y, omega_memory(*x, step=step.double(), window=3, chunk_size=1)[0])
        True
    """
    op = "omega_exact"
    if requested(op, backend) not in ("auto", "eager"):
        raise ValueError(f"{op}: backend={backend!r}: this op has no such implementation")
    checks.tensor(op, "q", q, "B T H d", checks.FLOATING)
    q, k, v = autocast_operands(q, k, v)
    given = OmegaTensors(
        q, k, v, step, decay, window_gates, momentum, coefficients, initial_state,
        initial_momentum, tail_k, tail_v, tail_length, cu_seqlens,
    )  # fmt: skip
    from . import exact

    shape = omega_shape(
        op, given, window=window, chunk_size=exact.BLOCK, inner_loss=inner_loss,
        feature_map=feature_map, read_before=read_before,
    )  # fmt: skip
    with without_autocast(q.device):
        y, state, last = exact.run(shape, given)
    return y, OmegaState(state, last, *tails(shape, given)) if return_state else None
