"""The delta rewrite in plain torch: any device and dtype, both passes explicit.

Of each head, F = φ(K) (M, P), G = F Fᵀ, w = 1/d (0 where the memory is empty), N = F A:

    d = F z + eps + stril(G) γ         γ = clip(1 − d / (‖f‖² + eps_norm), 0, 1)
    (I + L) E = V − w ∘ N              L = stril(w ∘ G ∘ βᵀ)
    A' = A + Fᵀ (β ∘ E)                z' = z + Fᵀ γ

In mode "parallel" L = 0 and d is of z alone. Backward, with dA' and dz' of what follows:

    dN_q = dy / s      ds = −⟨dN_q, y⟩      dA' += gᵀ dN_q       dz' += gᵀ ds
    U = F dA'          dE = β ∘ U           dβ = U ∘ E           dF = (β ∘ E) dA'ᵀ + γ dz'ᵀ
    (I + L)ᵀ X = dE    dV = X               dN = −w ∘ X          dA = dA' + Fᵀ dN
    dL = −stril(X Eᵀ)  dw = −⟨X, N⟩ + …     dd = −w² dw          dz = dz' + Fᵀ dd

All in fp32 (float64 for float64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from .. import slots
from .features import Features, features, features_back
from .op import RewriteShape, RewriteTensors

SPACE_FWD = SPACE_BWD = None


def supports(shape: RewriteShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: RewriteShape, given: RewriteTensors) -> tuple[Tensor | None, ...]:
    """y (B, Tq, H, Dv) in v's dtype, state, normalizer, E; None for what the call has not.

    With slots the pools are written, and y is all that is returned.
    """
    if given.slots is None:
        return _rewrite(shape, given)
    y = None if given.q is None else given.v.new_zeros(*given.q.shape[:3], shape.values)
    if shape.batch == 0 or shape.pool == 0:
        return y, None, None, None
    pools = given.state, given.normalizer
    held = [slots.read(pool, given.slots) for pool in pools]
    read, *after = _rewrite(shape, given._replace(state=held[0], normalizer=held[1]))
    for pool, before, new in zip(pools, held, after[:2], strict=True):
        if new is not None:
            slots.write(pool, given.slots, before, new)
    if y is not None and read is not None:
        y = torch.where((given.slots >= 0)[:, None, None, None], read, y)
    return y, None, None, None


def _rewrite(shape: RewriteShape, given: RewriteTensors) -> tuple[Tensor | None, ...]:
    memory = _memory(shape, given)
    after, change = memory, None
    if shape.tokens:
        x = _operands(shape, given)
        w = _weights(shape, x, memory)
        change = _change(shape, x, w, memory)
        after = _behind(x, w, memory, change)
    y = None
    if given.q is not None:
        g = features(_rows(given.q, shape), shape.order, shape.normalize)
        y = _read(shape, g.f, after)[0].transpose(1, 2).to(given.v.dtype).contiguous()
    if change is None:
        return y, None, None, None
    return y, after.state.contiguous(), after.normalizer.contiguous(), change.contiguous()


def rebuild(shape: RewriteShape, given: RewriteTensors, change: Tensor) -> Tensor:
    """The state before a call, from the one behind it, which stands in its place in `given`.

    Of the normalizer the one before the call is saved: it is small.
    """
    x = _operands(shape, given)
    before = given.state - x.f.mT @ (x.beta * change)
    return before.masked_fill(_empty(given)[..., None], 0.0)


def bwd(
    shape: RewriteShape,
    d_y: Tensor,
    d_state: Tensor,
    d_normalizer: Tensor,
    given: RewriteTensors,
    change: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of k, v, beta, state, normalizer and q; None if there are no queries.

    `change` is E if it was saved.
    """
    memory, x = _memory(shape, given), _operands(shape, given)
    w = after = None
    if shape.tokens:
        w = _weights(shape, x, memory)
        change = _change(shape, x, w, memory) if change is None else change
        after = _behind(x, w, memory, change)
    d_after = _Memory(
        d_state.to(shape.acc) if shape.tokens else torch.zeros_like(memory.state),
        d_normalizer.to(shape.acc) if shape.tokens else torch.zeros_like(memory.normalizer),
    )
    d_q = None
    if given.q is not None:
        d_q, d_after = _read_backward(shape, given.q, d_y, after or memory, d_after)
    if w is None or change is None:
        return (*(y.new_zeros(y.shape) for y in x.given), *_of_memory(given, d_after), d_q)
    d_f, d_v, d_beta, d_before = _write_backward(shape, x, w, memory, change, d_after)
    d_k = features_back(x.k, x.features, d_f, shape.order)
    grads = (
        d.transpose(1, 2).reshape(y.shape).to(y.dtype).contiguous()
        for d, y in zip((d_k, d_v, d_beta), x.given, strict=True)
    )
    return (*grads, *_of_memory(given, d_before), d_q)


# ---- operands -----------------------------------------------------------------------------------


class _Memory(NamedTuple):
    state: Tensor  # (B, H, P, Dv)
    normalizer: Tensor  # (B, H, P)


class _Operands(NamedTuple):
    """What is written, in fp32, heads in front of tokens."""

    given: tuple[Tensor, Tensor, Tensor]
    k: Tensor  # (B, H, M, dk)
    v: Tensor  # (B, H, M, Dv)
    beta: Tensor  # (B, H, M, 1 or Dv)
    features: Features
    nothing: Tensor  # (B, H, M), whether a token finds an empty memory

    @property
    def f(self) -> Tensor:
        """F (B, H, M, P)."""
        return self.features.f


def _rows(x: Tensor, shape: RewriteShape) -> Tensor:
    return x.transpose(1, 2).to(shape.acc)


def _empty(given: RewriteTensors) -> Tensor:
    """(B, 1, 1), which memories are empty."""
    first = given.first
    if first is None:
        first = torch.zeros(given.k.shape[0], dtype=torch.bool, device=given.k.device)
    return first[:, None, None]


def _memory(shape: RewriteShape, given: RewriteTensors) -> _Memory:
    """What the call finds; zeros in rows that are first, whatever is there."""
    if given.first is None:
        return _Memory(given.state, given.normalizer)
    empty = _empty(given)
    return _Memory(
        given.state.masked_fill(empty[..., None], 0.0), given.normalizer.masked_fill(empty, 0.0)
    )


def _of_memory(given: RewriteTensors, d: _Memory) -> _Memory:
    """Gradients of the memories that came with the call: none where they were not looked at."""
    if given.first is None:
        return _Memory(d.state.contiguous(), d.normalizer.contiguous())
    empty = _empty(given)
    return _Memory(d.state.masked_fill(empty[..., None], 0.0), d.normalizer.masked_fill(empty, 0.0))


def _operands(shape: RewriteShape, given: RewriteTensors) -> _Operands:
    k, v, beta = given.k, given.v, given.beta
    gate = beta if shape.channels else beta[..., None]
    rows = _rows(k, shape)
    found = features(rows, shape.order, shape.normalize)
    place = torch.arange(shape.tokens, device=k.device)
    new = place == 0 if shape.sequential else place >= 0
    nothing = (_empty(given) & new).expand(shape.batch, shape.heads, -1)
    return _Operands(
        (k, v, beta), rows, _rows(v, shape), gate.transpose(1, 2), found, nothing
    )  # fmt: skip


class _Weights(NamedTuple):
    """Scalars of each token (B, H, M, 1), and what joins them (B, H, M, M) if it is asked for."""

    d: Tensor
    w: Tensor
    gamma: Tensor
    size: Tensor  # ‖f‖² + eps_norm
    inside: Tensor  # whether γ is between its bounds
    gram: Tensor | None


def _weights(shape: RewriteShape, x: _Operands, memory: _Memory) -> _Weights:
    f = x.f
    nothing = x.nothing[..., None]
    gram = f @ f.mT if shape.sequential else None
    size = f.square().sum(-1, keepdim=True) + shape.eps_norm
    d = f @ memory.normalizer[..., None] + shape.eps
    gamma = torch.ones_like(d)
    inside = torch.zeros_like(nothing)
    if not shape.denominator:
        w = torch.where(nothing, 0.0, gamma)
        return _Weights(d, w, torch.zeros_like(d), size, inside, gram)  # z stays as it is
    if gram is None:
        if shape.correction:
            gamma = 1 - d / size
    else:
        gamma = torch.zeros_like(d)
        d = d.clone()
        for i in range(shape.tokens):
            d[:, :, i] += gram[:, :, i : i + 1].matmul(gamma)[:, :, 0]
            mine = (
                1 - d[:, :, i] / size[:, :, i] if shape.correction else torch.ones_like(d[:, :, i])
            )
            gamma[:, :, i] = torch.where(nothing[:, :, i], 1.0, mine.clamp(0, 1))
    if shape.correction:
        open_ = 1 - d / size
        inside = (open_ > 0) & (open_ < 1) & ~nothing
    gamma = torch.where(nothing, 1.0, gamma.clamp(0, 1))
    return _Weights(d, torch.where(nothing, 0.0, 1 / d), gamma, size, inside, gram)


# ---- forward ------------------------------------------------------------------------------------


def _change(shape: RewriteShape, x: _Operands, w: _Weights, memory: _Memory) -> Tensor:
    """E."""
    right = x.v - w.w * (x.f @ memory.state)
    if w.gram is None:
        return right
    if not shape.channels:
        lower = (w.w * w.gram * x.beta.mT).tril(-1)
        return solve_triangular(lower, right, upper=False, unitriangular=True)
    joined = (w.w * w.gram).tril(-1)
    change = torch.zeros_like(right)
    for i in range(shape.tokens):
        change[:, :, i] = right[:, :, i] - (joined[:, :, i : i + 1] @ (x.beta * change))[:, :, 0]
    return change


def _behind(x: _Operands, w: _Weights, memory: _Memory, change: Tensor) -> _Memory:
    """The memory behind what is written."""
    return _Memory(
        memory.state + x.f.mT @ (x.beta * change),
        memory.normalizer + (x.f.mT @ w.gamma)[..., 0],
    )


def _read(shape: RewriteShape, g: Tensor, memory: _Memory) -> tuple[Tensor, Tensor]:
    """y (B, H, Tq, Dv), and s (B, H, Tq, 1)."""
    read = g @ memory.state
    if not shape.denominator:
        return read, torch.ones_like(read[..., :1])
    s = g @ memory.normalizer[..., None] + shape.eps
    return read / s, s


# ---- backward -----------------------------------------------------------------------------------


def _read_backward(
    shape: RewriteShape, q: Tensor, d_y: Tensor, after: _Memory, d_after: _Memory
) -> tuple[Tensor, _Memory]:
    """The gradient of q, and of the memory that it reads, added to what it has."""
    rows = _rows(q, shape)
    g = features(rows, shape.order, shape.normalize)
    y, s = _read(shape, g.f, after)
    d_read = _rows(d_y, shape) / s
    d_g = d_read @ after.state.mT
    d_state = d_after.state + g.f.mT @ d_read
    d_normalizer = d_after.normalizer
    if shape.denominator:
        d_s = -(d_read * y).sum(-1, keepdim=True)
        d_g = d_g + d_s * after.normalizer[:, :, None]
        d_normalizer = d_normalizer + (g.f.mT @ d_s)[..., 0]
    d_q = features_back(rows, g, d_g, shape.order).transpose(1, 2).to(q.dtype).contiguous()
    return d_q, _Memory(d_state, d_normalizer)


def _write_backward(
    shape: RewriteShape, x: _Operands, w: _Weights, memory: _Memory, change: Tensor, d: _Memory
) -> tuple[Tensor, Tensor, Tensor, _Memory]:
    """Gradients of F, v, β, and of the memory before."""
    f, beta = x.f, x.beta
    written = f @ d.state
    d_change = beta * written
    d_f = (beta * change) @ d.state.mT
    d_beta = written * change
    if not shape.channels:
        d_beta = d_beta.sum(-1, keepdim=True)
    d_v, d_gram, d_w, d_beta_more = _solve_backward(shape, x, w, change, d_change)
    d_beta = d_beta + d_beta_more
    d_old = -w.w * d_v
    d_before = d.state + f.mT @ d_old
    d_f = d_f + d_old @ memory.state.mT
    d_normalizer = d.normalizer.clone()
    if shape.denominator:
        d_w = d_w - (d_v * (f @ memory.state)).sum(-1, keepdim=True)
        d_d = -w.w.square() * d_w
        d_gamma = f @ d.normalizer[..., None]
        d_f = d_f + w.gamma * d.normalizer[:, :, None]
        if shape.full:
            d_d, d_gamma = _gamma_backward(shape, w, d_d, d_gamma)
            pull = torch.where(w.inside, 2 * d_gamma * w.d / w.size.square(), 0.0)
            d_f = d_f + pull * f
        d_f = d_f + d_d * memory.normalizer[:, :, None]
        if w.gram is not None:
            d_gram = d_gram + (d_d * w.gamma.mT).tril(-1)
        d_normalizer = d_normalizer + (f.mT @ d_d)[..., 0]
    if w.gram is not None:
        d_f = d_f + (d_gram + d_gram.mT) @ f
    return d_f, d_v, d_beta, _Memory(d_before, d_normalizer)


def _solve_backward(
    shape: RewriteShape, x: _Operands, w: _Weights, change: Tensor, d_change: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, and what the triangle L gives to G, w and β: nothing in parallel mode."""
    if w.gram is None:
        zero = torch.zeros_like(w.w)
        return d_change, zero, zero, zero
    if not shape.channels:
        lower = (w.w * w.gram * x.beta.mT).tril(-1)
        d_v = solve_triangular(lower.mT, d_change, upper=True, unitriangular=True)
        d_lower = -(d_v @ change.mT).tril(-1)
        d_w = (d_lower * w.gram * x.beta.mT).sum(-1, keepdim=True)
        d_beta = (d_lower * w.w * w.gram).sum(-2)[..., None]
        return d_v, d_lower * w.w * x.beta.mT, d_w, d_beta
    joined = (w.w * w.gram).tril(-1)
    d_v = d_change.clone()
    for i in reversed(range(shape.tokens)):
        later = joined[:, :, :, i : i + 1].mT @ d_v
        d_v[:, :, i] -= x.beta[:, :, i] * later[:, :, 0]
    d_joined = -(d_v @ (x.beta * change).mT).tril(-1)
    d_w = (d_joined * w.gram).sum(-1, keepdim=True)
    return d_v, d_joined * w.w, d_w, -(joined.mT @ d_v) * change


def _gamma_backward(
    shape: RewriteShape, w: _Weights, d_d: Tensor, d_gamma: Tensor
) -> tuple[Tensor, Tensor]:
    """What γ passes on to d, last token first: in sequential mode γ is part of each later d."""
    if w.gram is None:
        return d_d - torch.where(w.inside, d_gamma / w.size, 0.0), d_gamma
    d_d, d_gamma = d_d.clone(), d_gamma.clone()
    later = w.gram.tril(-1)
    for i in reversed(range(shape.tokens)):
        d_gamma[:, :, i] += (later[:, :, :, i : i + 1].mT @ d_d)[:, :, 0]
        share = torch.where(w.inside[:, :, i], d_gamma[:, :, i] / w.size[:, :, i], 0.0)
        d_d[:, :, i] -= share
    return d_d, d_gamma
