"""ARMT's delta rewrite, literally: one memory token after the other.

Formula, arguments and results are those of `fastweights.ops.delta_rewrite`, without `echo`. Of each
head, with f = φ(k_i), and A and z the memory that token i sees,

    d  = f·z + eps                      v̄ = f A / d
    γ  = clip(1 − d / (‖f‖² + eps_norm), 0, 1)
    A' = A + fᵀ (β ∘ (v − v̄))           z' = z + γ f

where an empty memory (`first`) has v̄ = 0 and γ = 1. In mode "parallel" every token sees the memory
from before the call, in "sequential" what the tokens before it have left. Then g = φ(q) reads
y = g A' / (g·z' + eps). Products with A run in the dtype of k, all between them in fp32 (float64
for float64 inputs): the "plain torch" that kernels are measured by. Source: ARMT, arXiv 2407.04841;
φ is DPFP of Schlag et al., arXiv 2102.11174.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rewrite(
    k: Tensor, v: Tensor, beta: Tensor, state: Tensor, normalizer: Tensor, *,
    q: Tensor | None = None, first: Tensor | None = None, order: int = 3, mode: str = "parallel",
    normalize: bool = True, denominator: bool = True, correction: bool = True,
    gamma_grad: str = "stop", eps: float = 1e-5, eps_norm: float | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """As `fastweights.ops.delta_rewrite`."""
    acc = torch.float64 if k.dtype == torch.float64 else torch.float32
    if eps_norm is None:
        eps_norm = 0.0 if normalize else 1e-5
    if first is None:
        first = torch.zeros(k.shape[0], dtype=torch.bool, device=k.device)
    empty = first[:, None, None]
    memory = torch.where(empty[..., None], 0.0, state.to(acc))
    total = torch.where(empty, 0.0, normalizer.to(acc))
    before = memory, total
    gate = (beta if beta.ndim == 4 else beta[..., None]).to(acc)
    keys = dpfp(k.to(acc), order, normalize)
    for i in range(k.shape[1]):
        f = keys[:, i]  # (B, H, P)
        seen, of_keys = before if mode == "parallel" else (memory, total)
        nothing = empty if mode == "parallel" or i == 0 else torch.zeros_like(empty)
        old = _times(f.to(k.dtype), seen)
        if denominator:
            d = (f * of_keys).sum(-1, keepdim=True) + eps
            old = old / d
            gamma = torch.ones_like(d)
            if correction:
                gamma = (1 - d / (f.square().sum(-1, keepdim=True) + eps_norm)).clamp(0, 1)
                gamma = gamma.detach() if gamma_grad == "stop" else gamma
            total = total + torch.where(nothing, 1.0, gamma) * f
        change = gate[:, i] * (v[:, i].to(acc) - torch.where(nothing, 0.0, old))
        outer = f.to(k.dtype)[..., None] @ change[:, :, None].to(k.dtype)
        memory = memory + outer.to(acc)
    if q is None:
        return None, memory, total
    reads = []
    for g in dpfp(q.to(acc), order, normalize).unbind(1):
        read = _times(g.to(k.dtype), memory)
        reads.append(read / ((g * total).sum(-1, keepdim=True) + eps) if denominator else read)
    y = torch.stack(reads, 1) if reads else memory.new_zeros(*q.shape[:3], v.shape[3])
    return y.to(v.dtype), memory, total


def dpfp(x: Tensor, order: int, normalize: bool) -> Tensor:
    """φ(x): (…, D) → (…, 2·order·D). With r = [relu(x), relu(−x)] of D' = 2 D numbers,

    h[(j − 1) D' + p] = r[p] · r[(p − j) mod D'],   j = 1 … order

    divided by its norm if `normalize`, which the length of x does not matter for then; φ is 0 if
    every product is.
    """
    if normalize:
        most = x.abs().amax(-1, keepdim=True)
        x = x / torch.where(most > 0, most, 1.0)
    r = torch.cat((x.relu(), (-x).relu()), -1)
    p = torch.arange(r.shape[-1], device=x.device)
    h = torch.cat([r * r[..., (p - j) % r.shape[-1]] for j in range(1, order + 1)], -1)
    if not normalize:
        return h
    most = h.amax(-1, keepdim=True)
    h = torch.where(most > 0, h / torch.where(most > 0, most, 1.0), 0.0)  # or squares underflow
    return h / torch.where(most > 0, h, 1.0).norm(dim=-1, keepdim=True)


def _times(row: Tensor, state: Tensor) -> Tensor:
    """(B, H, P) by (B, H, P, Dv)."""
    return (row[:, :, None] @ state.to(row.dtype)).to(state.dtype)[:, :, 0]
