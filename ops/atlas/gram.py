"""What a chunk writes through Newton–Schulz, by products of momenta that are never formed.

One with far more rows than columns is orthogonalised by the factor of a small matrix, and all that
is asked of it is its product with queries, with keys and with what there is once a chunk. With
W_l = U_l ∘ R,

    S_l = B_l S − Kᵀ W_l              O_l = S_l F_l,  F_l = factor(G_l)
    G_l = B_l² SᵀS − B_l (Y_l + Y_lᵀ) + W_lᵀ K Kᵀ W_l,    Y_l = (K S)ᵀ W_l
    Z_l = Q S_l = B_l Q S − Q Kᵀ W_l
    reads   Σ_l C_{t,l} Z_l F_l       the memory's   S Σ_l C_{b,l} B_l F_l − Kᵀ Σ_l C_{b,l} W_l F_l

Its adjoint, with E_l = C_l ∘ dY, H_l = S_lᵀ dM and Γ_l = dG_l + dG_lᵀ:

    dF_l = Z_lᵀ E_l + C_{b,l} H_l     dZ_l = E_l F_lᵀ
    dS_l = Qᵀ dZ_l + C_{b,l} dM F_lᵀ + S_l Γ_l

from which dW_l = −K dS_l, dB_l = ⟨dS_l, S⟩, dS = Σ B_l dS_l, dQ = Σ dZ_l S_lᵀ, dK = −Σ W_l dS_lᵀ,
none of them with a D × Dv matrix for each l. All in float64: G tells squares of singular values
apart, and Γ is as large as their inverses.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..newton_schulz import eager as newton_schulz
from ..newton_schulz.op import NewtonSchulzShape
from .op import AtlasShape
from .stack import Met, ns_shape


def fwd(shape: AtlasShape, met: Met) -> tuple[Tensor, Tensor]:
    """What reads (B, H, b, Dv) and the memory (B, H, D, Dv) get."""
    at, acc = _chunk(shape, met), met.velocity.dtype
    read = (at.met.seen.mT[..., None] * (at.read @ at.factor)).sum(2)
    last = at.met.last[..., None, None] * at.factor
    state = at.met.velocity @ (at.share * last).sum(2)
    state = state - at.met.k.mT @ (at.pushed @ last).sum(2)
    return read.to(acc), state.to(acc)


def bwd(shape: AtlasShape, met: Met, d_read: Tensor, d_state: Tensor) -> Met:
    """The gradients of all of it."""
    at, acc = _chunk(shape, met), met.velocity.dtype
    q, k, error, velocity, push, _, seen, last = at.met
    d_read, d_state = d_read.double(), d_state.double()
    share, pushed, factor = at.share, at.pushed, at.factor
    last = last[..., None, None]

    by_state, by_keys = (
        velocity.mT @ d_state,
        k @ d_state,
    )  # SᵀdM (B, H, Dv, Dv), K dM (B, H, n, Dv)
    both = share * by_state[:, :, None] - pushed.mT @ by_keys[:, :, None]  # H
    weighed = seen.mT[..., None] * d_read[:, :, None]  # E (B, H, L, b, Dv)
    d_factor = at.read.mT @ weighed + last * both
    d_each = weighed @ factor.mT  # dZ
    d_gram = newton_schulz.bwd(at.rules, d_factor.flatten(0, 2), at.gram).view_as(d_factor)
    around = d_gram + d_gram.mT  # Γ

    # K dS_l; the rest of dW, and all else, are sums over l.
    scores = q @ k.mT
    d_pushed = scores.mT[:, :, None] @ d_each + last * (by_keys[:, :, None] @ factor.mT)
    d_pushed = -(d_pushed + at.keys @ around)
    inner = share * at.squares[:, :, None] - pushed.mT @ at.reads[:, :, None]  # S_lᵀ S
    d_drop = (d_each * (q @ velocity)[:, :, None]).sum((-2, -1))
    d_drop = d_drop + (factor * last * by_state[:, :, None] + around * inner).sum((-2, -1))

    read_sum, last_sum = (share * d_each).sum(2), (share * last * factor).sum(2)
    turned = pushed @ around  # W Γ
    turned_sum = (share * turned).sum(2)
    d_velocity = q.mT @ read_sum + d_state @ last_sum.mT - k.mT @ turned_sum
    d_velocity = d_velocity + velocity @ (share**2 * around).sum(2)
    pairs = (d_each @ pushed.mT).sum(2)  # Σ dZ Wᵀ (B, H, b, n)
    d_q = read_sum @ velocity.mT - pairs @ k
    written_sum = (last * (pushed @ factor)).sum(2)
    d_k = (turned @ pushed.mT).sum(2) @ k - turned_sum @ velocity.mT
    d_k = d_k - pairs.mT @ q - written_sum @ d_state.mT
    return Met._make(
        x.to(acc)
        for x in (
            d_q, d_k, (push[..., None] * d_pushed).sum(2), d_velocity,
            (error[:, :, None] * d_pushed).sum(-1), d_drop,
            ((at.read @ factor) * d_read[:, :, None]).sum(-1).mT, (factor * both).sum((-2, -1)),
        )
    )  # fmt: skip


class _Chunk(NamedTuple):
    """A chunk in float64, and what both passes form of it."""

    met: Met
    share: Tensor  # B_l (B, H, L, 1, 1)
    pushed: Tensor  # W (B, H, L, n, Dv)
    reads: Tensor  # K S (B, H, n, Dv)
    squares: Tensor  # SᵀS (B, H, Dv, Dv)
    keys: Tensor  # K S_l (B, H, L, n, Dv)
    read: Tensor  # Z (B, H, L, b, Dv)
    gram: Tensor  # G (B · H · L, Dv, Dv)
    factor: Tensor  # F (B, H, L, Dv, Dv)
    rules: NewtonSchulzShape


def _chunk(shape: AtlasShape, met: Met) -> _Chunk:
    met = Met._make(x.double() for x in met)
    share = met.drop[..., None, None]
    pushed = met.push[..., None] * met.error[:, :, None]
    reads, squares = met.k @ met.velocity, met.velocity.mT @ met.velocity
    spread = (met.k @ met.k.mT)[:, :, None] @ pushed
    cross = reads.mT[:, :, None] @ pushed
    gram = share**2 * squares[:, :, None] - share * (cross + cross.mT) + pushed.mT @ spread
    stack = gram.flatten(0, 2)
    rules = ns_shape(shape, stack, factor=True)
    read = share * (met.q @ met.velocity)[:, :, None] - (met.q @ met.k.mT)[:, :, None] @ pushed
    return _Chunk(
        met=met,
        share=share,
        pushed=pushed,
        reads=reads,
        squares=squares,
        keys=share * reads[:, :, None] - spread,
        read=read,
        gram=stack,
        factor=newton_schulz.fwd(rules, stack).view_as(gram),
        rules=rules,
    )
