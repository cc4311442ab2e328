r"""ARMT's delta rewrite: memory tokens of a segment write a fast-weight memory, queries read it.

Of each head, with f = φ(k_i) of P = 2·order·dk features, and A and z the memory that token i sees,

    d  = f·z + eps                      v̄ = f A / d                      (what f held)
    γ  = clip(1 − d / (‖f‖² + eps_norm), 0, 1)                           (how new f is)
    A' = A + fᵀ (β ∘ (v − v̄))           z' = z + γ f
    y  = φ(q) A' / (φ(q)·z' + eps)

φ is DPFP: of r = [relu(x), relu(−x)], the products r[p] · r[p − j], j = 1 … order, indices modulo
2·dk, divided by their norm. "parallel" tokens all see the memory from before the call, "sequential"
ones what those before them have left. Written literally in `fastweights.reference`; source: ARMT,
arXiv 2407.04841; DPFP: Schlag et al., arXiv 2102.11174.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from .. import checks
from ..dispatch import autocast_operands, explainable, requested, without_autocast
from .op import (
    ECHO_FWD,
    PACKAGE,
    REWRITE_FWD,
    REWRITE_IN_PLACE,
    RewriteShape,
    RewriteTensors,
    Rules,
    rewrite_shape,
    rules_of,
)

__all__ = ["delta_rewrite", "delta_rewrite_"]

FEW = 16  # tokens that write at once, without denominators, and leave a memory bounded


def _plan(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    normalizer: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    order: int = 3,
    mode: str = "parallel",
    normalize: bool = True,
    denominator: bool = True,
    correction: bool = True,
    gamma_grad: str = "stop",
    eps: float = 1e-5,
    eps_norm: float | None = None,
    echo: torch.Tensor | None = None,
    concrete: bool = False,
    **rest: Any,
) -> RewriteShape:
    op = "delta_rewrite"
    rules = rules_of(op, order, mode, normalize, denominator, correction, gamma_grad, eps, eps_norm)
    given = RewriteTensors(k, v, beta, state, normalizer, q, first)
    return rewrite_shape(op, given, rules, echo=echo, concrete=concrete)


@explainable(PACKAGE, _plan)
def delta_rewrite(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    normalizer: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    order: int = 3,
    mode: str = "parallel",
    normalize: bool = True,
    denominator: bool = True,
    correction: bool = True,
    gamma_grad: str = "stop",
    eps: float = 1e-5,
    eps_norm: float | None = None,
    echo: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor | None, ...]:
    """Write M memory tokens of each row into its memory, and read the new memory with Tq queries.

    Args:
        k: (B, M, H, dk), bf16, fp16, fp32 or float64, any strides, before φ. M = 0 only reads.
        v: (B, M, H, Dv), dtype as k.
        beta: (B, M, H), or (B, M, H, Dv) for a gate of each channel; fp32 (float64 for float64),
            after its sigmoid. It does not enter z.
        state: A (B, H, P, Dv) with P = 2·order·dk, fp32 (float64 for float64), may be expanded.
        normalizer: z (B, H, P), dtype as state, 0 or more.
        q: (B, Tq, H, dk), dtype as k, before φ; reads the new memory. None: nothing is read.
        first: bool (B,), rows whose memory is empty: what `state` and `normalizer` hold there is
            not looked at and gets no gradient. In "sequential" that concerns the first token alone.
        order: ν of DPFP; from 2·dk on, products repeat.
        mode: "parallel" or "sequential"; the same for M = 1.
        normalize: divide φ by its norm, so that the length of k does not matter. False is the
            original ARMT.
        denominator: without it v̄ = f A, y = φ(q) A, and z stays as it is. In parallel mode with
            more than 16 tokens the memory then diverges; the first such call warns.
        correction: without it γ = 1.
        gamma_grad: "stop" takes γ for a constant in the backward, as ARMT does; "full" does not.
        eps: added to the denominators f·z and φ(q)·z'.
        eps_norm: added to ‖f‖². None: 0 if `normalize`, else 1e-5.
        echo: what lets a chain of calls be differentiated without keeping a memory for each, see
            below; needs denominators and correction.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        y (B, Tq, H, Dv), contiguous, v's dtype, or None without q; the new state and normalizer;
        and the new echo if one was given. With M = 0 the memory is returned as it came, zeros in
        rows that are first.

    Differentiable in k, v, beta, state, normalizer and q, once; `reference.delta_rewrite` twice.
    The backward keeps the arguments, `state` among them: P·Dv numbers for each call and head. With
    an echo it keeps M·Dv instead, and recovers the state before a call from the one behind it. The
    echo is a zero that takes no memory; as its "gradient" the state travels back:

        echo = torch.zeros((), requires_grad=True).expand(state.shape)
        for segment in segments:
            y, state, normalizer, echo = delta_rewrite(…, state, normalizer, …, echo=echo)
        loss = loss + (echo * state.detach()).sum()  # adds 0; not to be scaled with the loss

    Each row's memories have to be one unbroken chain of calls. Under autocast k, v and q are cast.

    Raises:
        TypeError: wrong dtype, gates or memory in half precision, not a plain tensor.
        ValueError: wrong shape, order below 1, eps not above 0, an echo of a memory that may grow;
            a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import delta_rewrite
        >>> k, v, beta = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 16), torch.rand(2, 4, 1)
        >>> state, normalizer = torch.zeros(2, 1, 48, 16), torch.zeros(2, 1, 48)
        >>> q, first = torch.randn(2, 10, 1, 8), torch.tensor([True, True])
        >>> y, state, normalizer = delta_rewrite(k, v, beta, state, normalizer, q=q, first=first)
        >>> y.shape, state.shape, normalizer.shape
        (torch.Size([2, 10, 1, 16]), torch.Size([2, 1, 48, 16]), torch.Size([2, 1, 48]))
    """
    op = "delta_rewrite"
    backend = requested(op, backend)
    rules = rules_of(op, order, mode, normalize, denominator, correction, gamma_grad, eps, eps_norm)
    checks.tensor(op, "k", k, "B M H dk", checks.FLOATING)
    k, v, q = _cast(k, v, q)
    given = RewriteTensors(k, v, beta, state, normalizer, q, first)
    rewrite_shape(op, given, rules, echo=echo)
    _warn(op, rules, k)
    with without_autocast(k.device):
        if echo is not None and k.shape[1]:
            found = ECHO_FWD(*given[:-1], echo, *rules, backend)
        else:
            found = REWRITE_FWD(*given[:-1], *rules, backend)
    y, *after = found[:3]
    if k.shape[1] == 0:
        after = _untouched(given)
    if echo is not None:
        after.append(found[3] if k.shape[1] else echo)
    return (y if q is not None else None, *after)


def _untouched(given: RewriteTensors) -> list[torch.Tensor]:
    """The memory of a call that writes nothing."""
    if given.first is None:
        return [given.state, given.normalizer]
    empty = given.first[:, None, None]
    return [
        given.state.masked_fill(empty[..., None], 0.0), given.normalizer.masked_fill(empty, 0.0)
    ]  # fmt: skip


def _plan_in_place(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    normalizer_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    order: int = 3,
    mode: str = "parallel",
    normalize: bool = True,
    denominator: bool = True,
    correction: bool = True,
    eps: float = 1e-5,
    eps_norm: float | None = None,
    concrete: bool = False,
    **rest: Any,
) -> RewriteShape:
    op = "delta_rewrite_"
    rules = rules_of(op, order, mode, normalize, denominator, correction, "stop", eps, eps_norm)
    given = RewriteTensors(k, v, beta, state_pool, normalizer_pool, q, first, slots)
    return rewrite_shape(op, given, rules, concrete=concrete)


@explainable(PACKAGE, _plan_in_place)
def delta_rewrite_(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    normalizer_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    order: int = 3,
    mode: str = "parallel",
    normalize: bool = True,
    denominator: bool = True,
    correction: bool = True,
    eps: float = 1e-5,
    eps_norm: float | None = None,
    backend: str = "auto",
) -> torch.Tensor | None:
    """`delta_rewrite` in place, on memories that lie in slots of a pool.

    A slot is a layer's memory of a sequence; the rows of a call may be any of them, such as those
    of a diagonal of layers. Nothing is read on the host, so that a call can be captured in a CUDA
    graph.

    Args:
        k, v, beta, q, first: as in `delta_rewrite`, of B rows. Where `first`, what a slot holds is
            replaced.
        state_pool: (S, H, P, Dv), fp32 (float64 for float64), of any number of slots; written.
        normalizer_pool: (S, H, P), written.
        slots: int64 (B,), the memory of each row, all distinct; −1: the row is skipped, no memory
            changes and its y is 0. Values are checked on the CPU alone.
        order, mode, normalize, denominator, correction, eps, eps_norm: as in `delta_rewrite`.
        backend: "auto", "eager", "triton" or "cuda".

    Returns:
        y (B, Tq, H, Dv), contiguous, v's dtype; None without q.

    Not differentiable; `delta_rewrite` is.

    Raises:
        TypeError: wrong dtype, gates or pools in half precision, not a plain tensor.
        ValueError: wrong shape, order below 1, eps not above 0, an expanded pool, a tensor that
            requires grad while gradients are recorded; slots that repeat or that the pool has not;
            a backend that does not support the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import delta_rewrite_
        >>> states, normalizers = torch.zeros(6, 1, 48, 16), torch.zeros(6, 1, 48)
        >>> k, v, beta = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 16), torch.rand(2, 4, 1)
        >>> q, slots = torch.randn(2, 10, 1, 8), torch.tensor([5, -1])
        >>> y = delta_rewrite_(k, v, beta, states, normalizers, slots, q=q)
        >>> y.shape, bool(y[1].any()), states.flatten(1).any(1).tolist()
        (torch.Size([2, 10, 1, 16]), False, [False, False, False, False, False, True])
    """
    op = "delta_rewrite_"
    backend = requested(op, backend)
    rules = rules_of(op, order, mode, normalize, denominator, correction, "stop", eps, eps_norm)
    checks.tensor(op, "k", k, "B M H dk", checks.FLOATING)
    k, v, q = _cast(k, v, q)
    given = RewriteTensors(k, v, beta, state_pool, normalizer_pool, q, first, slots)
    rewrite_shape(op, given, rules)
    _warn(op, rules, k)
    with without_autocast(k.device):
        y: torch.Tensor = REWRITE_IN_PLACE(
            k, v, beta, state_pool, normalizer_pool, slots, q, first, *rules, backend
        )
    return y if q is not None else None


def _cast(
    k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if q is None:
        k, v = autocast_operands(k, v)
    else:
        k, v, q = autocast_operands(k, v, q)
    return k, v, q


def _warn(op: str, rules: Rules, k: torch.Tensor) -> None:
    unstable = not (rules.denominator or rules.sequential) and k.shape[1] > FEW
    if unstable and not torch.compiler.is_compiling():  # a trace would break at a warning
        _warn_of_divergence()


@functools.cache
def _warn_of_divergence() -> None:
    """Once in a process."""
    warnings.warn(
        f"delta_rewrite: without denominators, more than {FEW} tokens that write in parallel make "
        "the memory diverge within tens of segments; mode='sequential' or denominator=True do not",
        stacklevel=4,
    )
