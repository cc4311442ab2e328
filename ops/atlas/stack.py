"""What a chunk writes through Newton–Schulz, with the momenta formed: one stack of D × Dv matrices.

    S_l = B_l S − Kᵀ (U_l ∘ R)      O_l = NS(S_l)
    reads   Σ_l C_{t,l} φ(q_t) O_l                  the memory's   Σ_l C_{b,l} O_l

Nothing but sums goes from one l to the next: a stack is cut where it would be large, and backward
takes the parts as they come. Of long matrices NS(S) is S Q(SᵀS), or Q(S Sᵀ) S if their rows are the
longer side, with the factor Q of `gram_newton_schulz_factor`. It has to tell squares of singular
values apart: in float64, which is exact for fp32, but not for float64 itself, where a momentum of
few tokens would leave 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..newton_schulz import eager as newton_schulz
from ..newton_schulz.op import FACTOR_FWD, MATRIX_FWD, NewtonSchulzShape
from .op import AtlasShape

NUMBERS = 1 << 22  # of momenta that are orthogonalised at a time; backward keeps each step of them
# From so many times as long as wide on, 4 n² m + 34 n³ FLOPs by the Gram matrix are less than
# 20 n² m + 10 n³ of the five steps, even in float64.
LONG = 4


class Met(NamedTuple):
    """A chunk of b tokens with n keys, of which L tokens l meet Newton–Schulz."""

    q: Tensor  # φ (B, H, b, D)
    k: Tensor  # φ (B, H, n, D)
    error: Tensor  # R (B, H, n, Dv)
    velocity: Tensor  # S where the chunk began (B, H, D, Dv)
    push: Tensor  # U_l (B, H, L, n)
    drop: Tensor  # B_l (B, H, L)
    seen: Tensor  # C as reads see it (B, H, b, L)
    last: Tensor  # C_b (B, H, L)


Product = Callable[[Tensor, Tensor], Tensor]


def fwd(shape: AtlasShape, met: Met, product: Product) -> tuple[Tensor, Tensor]:
    """What reads (B, H, b, Dv) and the memory (B, H, D, Dv) get."""
    read = met.error.new_zeros(*met.q.shape[:3], met.error.shape[3])
    state = torch.zeros_like(met.velocity)
    for part in _parts(met):
        momenta = _momenta(part, product)
        written = orthogonal(shape, momenta)
        found = product(part.q[:, :, None], written)  # (B, H, l, b, Dv)
        read = read + (part.seen.mT[..., None] * found).sum(2)
        state = state + (part.last[..., None, None] * written).sum(2)
    return read, state


def bwd(shape: AtlasShape, met: Met, d_read: Tensor, d_state: Tensor, product: Product) -> Met:
    """The gradients of all of it."""
    acc = met.velocity.dtype
    d_q, d_k = torch.zeros_like(met.q, dtype=acc), torch.zeros_like(met.k, dtype=acc)
    d_error, d_velocity = torch.zeros_like(met.error), torch.zeros_like(met.velocity)
    rows: list[tuple[Tensor, ...]] = []
    for part in _parts(met):
        q, k, error, velocity, push, drop, seen, last = part
        momenta = _momenta(part, product)
        written = orthogonal(shape, momenta)
        weighed = seen.mT[..., None] * d_read[:, :, None]  # (B, H, l, b, Dv)
        d_q += product(weighed, written.mT).sum(2)
        found = product(q[:, :, None], written)
        d_written = product(q.mT[:, :, None], weighed)
        d_written = d_written + last[..., None, None] * d_state[:, :, None]
        d_momenta = orthogonal_backward(shape, d_written, momenta)

        pushing = product(k[:, :, None], d_momenta)  # (B, H, l, n, Dv)
        d_error -= (push[..., None] * pushing).sum(2)
        d_k -= product(push[..., None] * error[:, :, None], d_momenta.mT).sum(2)
        d_velocity += (drop[..., None, None] * d_momenta).sum(2)
        rows.append((
            -(error[:, :, None] * pushing).sum(-1),
            (d_momenta * velocity[:, :, None]).sum((-2, -1)),
            (found * d_read[:, :, None]).sum(-1),
            (written * d_state[:, :, None]).sum((-2, -1)),
        ))  # fmt: skip
    d_push, d_drop, d_seen, d_last = (
        (torch.cat(x, 2) for x in zip(*rows, strict=True)) if rows
        else (met.push, met.drop, met.seen.mT, met.last)
    )  # fmt: skip
    return Met(d_q, d_k, d_error, d_velocity, d_push, d_drop, d_seen.mT, d_last)


def _parts(met: Met) -> Iterator[Met]:
    """Some of the L at a time."""
    size = max(1, NUMBERS // max(1, met.velocity.numel()))
    for begin in range(0, met.drop.shape[2], size):
        here = slice(begin, begin + size)
        yield met._replace(
            push=met.push[:, :, here], drop=met.drop[:, :, here], seen=met.seen[..., here],
            last=met.last[:, :, here],
        )  # fmt: skip


def _momenta(met: Met, product: Product) -> Tensor:
    """S_l (B, H, l, D, Dv)."""
    pushed = met.push[..., None] * met.error[:, :, None]  # (B, H, l, n, Dv)
    kept = met.drop[..., None, None] * met.velocity[:, :, None]
    return kept - product(met.k.mT[:, :, None], pushed)


# ---- Newton–Schulz of stacks --------------------------------------------------------------------


def orthogonal(shape: AtlasShape, s: Tensor) -> Tensor:
    """NS of matrices (B, H, l, D, Dv); of a zero matrix 0. Autograd can follow it."""
    if s.numel() == 0:
        return s
    numbers, eps = shape.ns_numbers, shape.ns_eps
    if not _long(s):
        return MATRIX_FWD(s, numbers, eps, s.dtype, "eager")
    x = s.double()
    gram, tall = _gram(x)
    factor = FACTOR_FWD(gram, numbers, eps, x.dtype, "eager")
    return (x @ factor if tall else factor @ x).to(s.dtype)


def orthogonal_backward(shape: AtlasShape, d: Tensor, s: Tensor) -> Tensor:
    """The gradient of s for that of `orthogonal`; of a zero matrix 0."""
    if s.numel() == 0:
        return d
    stack, d_stack = s.flatten(0, 2), d.flatten(0, 2)
    if not _long(stack):
        of = ns_shape(shape, stack, factor=False)
        return newton_schulz.bwd(of, d_stack, stack).view_as(s)
    x, d_x = stack.double(), d_stack.double()
    gram, tall = _gram(x)
    of = ns_shape(shape, gram, factor=True)
    factor = newton_schulz.fwd(of, gram)
    d_gram = newton_schulz.bwd(of, x.mT @ d_x if tall else d_x @ x.mT, gram)
    both = d_gram + d_gram.mT
    found = d_x @ factor.mT + x @ both if tall else factor.mT @ d_x + both @ x
    return found.to(s.dtype).view_as(s)


def _long(x: Tensor) -> bool:
    n, m = sorted(x.shape[-2:])
    return x.dtype != torch.float64 and m >= LONG * n


def _gram(x: Tensor) -> tuple[Tensor, bool]:
    """xᵀx or x xᵀ, whichever is smaller, and whether it is the first."""
    tall = x.shape[-2] >= x.shape[-1]
    return (x.mT @ x if tall else x @ x.mT), tall


def ns_shape(shape: AtlasShape, x: Tensor, factor: bool) -> NewtonSchulzShape:
    """Of a call of Newton–Schulz on a stack (B, m, n) by the rules of an Atlas memory."""
    return NewtonSchulzShape(
        factor=factor,
        batch=x.shape[0],
        rows=x.shape[1],
        cols=x.shape[2],
        dtype=x.dtype,
        compute_dtype=x.dtype,
        device=x.device,
        coefficients=shape.ns_numbers,
        eps=shape.ns_eps,
    )
