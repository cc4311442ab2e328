"""The gated delta rule, literally: token after token.

Formula, arguments and results are those of `fastweights.ops.gated_delta_rule`. Of each head, with
q and k divided by max(‖·‖, l2norm_eps) if `qk_l2norm`,

    S^  = exp(log_decay_t) S_{t−1}
    S_t = S^ + k_tᵀ beta_t (v_t − k_t S^)
    o_t = scale · q_t S_t

Head h of H reads head floor(h·Hx/H) of a tensor of Hx. Products run in the dtype of k, all between
them in fp32 (float64 for float64 inputs): the "plain torch" that kernels are measured by. Source:
Gated Delta Networks, arXiv 2412.06464, equation 10.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, scale: float = 1.0,
    qk_l2norm: bool = True, l2norm_eps: float = 1e-12, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `fastweights.ops.gated_delta_rule`."""
    acc = torch.float64 if k.dtype == torch.float64 else torch.float32
    batch, tokens, heads = beta.shape
    of_head = torch.arange(heads, device=k.device)
    q, k, v = (x[:, :, of_head * x.shape[2] // heads] for x in (q, k, v))
    if cu_seqlens is None:
        spans = [(0, tokens)]
        sequences, rows = batch, slice(None)
    else:
        ends = cu_seqlens.tolist()
        spans = [(ends[n], ends[n + 1]) for n in range(len(ends) - 1)]
        sequences, rows = len(spans), slice(0, 1)
    state = torch.zeros(sequences, heads, k.shape[3], v.shape[3], dtype=acc, device=k.device)
    if initial_state is not None:
        state = initial_state.to(acc)
    reads: list[Tensor] = []
    states: list[Tensor] = []
    for n, (begin, end) in enumerate(spans):
        memory = state if cu_seqlens is None else state[n : n + 1]
        for t in range(begin, end):
            query, key, value = q[rows, t], k[rows, t], v[rows, t].to(acc)
            if qk_l2norm:
                query, key = (_normalised(x, acc, l2norm_eps) for x in (query, key))
            memory = log_decay[rows, t].to(acc).exp()[..., None, None] * memory
            change = beta[rows, t].to(acc)[..., None] * (value - _times(key, memory))
            memory = memory + (key[..., None] @ change[:, :, None].to(key.dtype)).to(acc)
            reads.append(scale * _times(query, memory))
        states.append(memory)
    padding = torch.zeros_like(v[:, 0] if tokens else v.sum(1)).to(acc)
    reads += [padding] * (tokens - len(reads))
    o = torch.stack(reads, 1).to(v.dtype) if reads else torch.zeros_like(v)
    if not output_final_state:
        return o, None
    return o, torch.cat(states) if states else state


def _normalised(x: Tensor, acc: torch.dtype, eps: float) -> Tensor:
    wide = x.to(acc)
    return (wide / wide.norm(dim=-1, keepdim=True).clamp(min=eps)).to(x.dtype)


def _times(row: Tensor, state: Tensor) -> Tensor:
    """(B, H, Dk) by (B, H, Dk, Dv)."""
    return (row[:, :, None] @ state.to(row.dtype)).to(state.dtype)[:, :, 0]
