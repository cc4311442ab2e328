"""The gated delta rule in plain torch: any device and dtype, chunks, both passes explicit.

Let E_{p,s} be exp of the sum of the log-decays after token s up to p, for s ≤ p in a chunk, e_p the
same from the chunk's begin, and S the memory there. All writes U of the chunk solve one triangle:

    N = β ∘ stril(E ∘ K Kᵀ)        X = β ∘ (V − e ∘ K S)        (I + N) U = X
    P = tril(E ∘ Q Kᵀ)             O = scale · (e ∘ Q S + P U)
    S ← e_C S + Kᵀ (t ∘ U)         t the last row of E

Each sum of log-decays is formed by itself, over a masked square: a difference of two running sums
would lose the small behind the large, and −inf − (−inf) is no number. For the same reason a
log-decay's gradient is the sum of dE ∘ E over the pairs that it stands between.

Backward, with dO scaled and dS of the memory behind the chunk:

    dU = Pᵀ dO + t ∘ K dS          dP = tril(dO Uᵀ)
    (I + N)ᵀ dX = dU               dN = −stril(dX Uᵀ)        F = dP ∘ E        G = β ∘ dN ∘ E
    dQ = e ∘ dO Sᵀ + F K           dV = β ∘ dX
    dK = Fᵀ Q + (G + Gᵀ) K + t ∘ U dSᵀ − β ∘ e ∘ dX Sᵀ
    dS ← e_C dS + Qᵀ (e ∘ dO) − Kᵀ (β ∘ e ∘ dX)

All in fp32 (float64 for float64). Packed sequences are taken one by one: `cu_seqlens` is read on
the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from .op import DeltaShape, DeltaTensors

SPACE_FWD = SPACE_BWD = None
CHUNK = 64  # tokens


def supports(shape: DeltaShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: DeltaShape, given: DeltaTensors) -> tuple[Tensor, Tensor]:
    """o (B, T, H, Dv) in v's dtype, and the memory (N, H, Dk, Dv) after the last token."""
    size = (*given.v.shape[:2], shape.heads, shape.values)
    o, state = given.v.new_zeros(size), _first_state(shape, given)
    for rows, sequence, begin, end in _pieces(shape, given):
        memory = state[sequence]
        for chunk in _chunks(begin, end):
            x = _operands(shape, given, rows, chunk)
            d = _decays(x.log_decay)
            _, change = _writes(x, d, memory)
            read = d.start * (x.q @ memory) + _reads(x, d) @ change
            o[rows, chunk] = (shape.scale * read).transpose(1, 2).to(o.dtype)
            memory = _behind(x, d, change, memory)
        state[sequence] = memory
    return o, state


def bwd(
    shape: DeltaShape, d_o: Tensor, d_state: Tensor, given: DeltaTensors
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay, beta and initial_state; None if there was none."""
    grads = [x.new_zeros(x.shape) for x in given[:5]]
    first = _first_state(shape, given)
    d_first = torch.zeros_like(first)
    for rows, sequence, begin, end in _pieces(shape, given):
        memory, entries = first[sequence], []
        chunks = _chunks(begin, end)
        for chunk in chunks:
            entries.append(memory)
            x = _operands(shape, given, rows, chunk)
            d = _decays(x.log_decay)
            memory = _behind(x, d, _writes(x, d, memory)[1], memory)
        d_memory = d_state[sequence].contiguous()
        for chunk, memory in zip(reversed(chunks), reversed(entries), strict=True):
            x = _operands(shape, given, rows, chunk)
            d_read = shape.scale * d_o[rows, chunk].transpose(1, 2).to(shape.acc).contiguous()
            found, d_memory = _chunk_backward(x, d_read, d_memory, memory)
            put = _unnormalised(shape, given, rows, chunk, found)
            for grad, value in zip(grads, put, strict=True):
                grad[rows, chunk] = value.to(grad.dtype)
        d_first[sequence] = d_memory
    return (*grads, d_first if shape.carried else None)


# ---- sequences and their chunks -----------------------------------------------------------------


def _first_state(shape: DeltaShape, given: DeltaTensors) -> Tensor:
    """A memory for each sequence, to be written."""
    state = given.v.new_zeros(shape.state, dtype=shape.acc)
    return state if given.initial_state is None else state.copy_(given.initial_state)


def _pieces(shape: DeltaShape, given: DeltaTensors) -> list[tuple[slice, slice, int, int]]:
    """Rows of the batch, their states, first and last token: all at once, or packed one by one."""
    if given.cu_seqlens is None:
        return [(slice(None), slice(None), 0, shape.tokens)]
    ends = given.cu_seqlens.tolist()
    return [(slice(0, 1), slice(n, n + 1), ends[n], ends[n + 1]) for n in range(len(ends) - 1)]


def _chunks(begin: int, end: int) -> list[slice]:
    return [slice(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK)]


class _Operands(NamedTuple):
    """One chunk's tensors (B, H, C, …), in fp32; q and k of norm one if asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor  # (B, H, C, 1)


def _operands(shape: DeltaShape, given: DeltaTensors, rows: slice, chunk: slice) -> _Operands:
    q, k, v, log_decay, beta = (
        x[rows, chunk].transpose(1, 2).to(shape.acc).contiguous() for x in given[:5]
    )  # fmt: skip
    if shape.qk_l2norm:
        q, k = (x / _norm(x).clamp(min=shape.l2norm_eps) for x in (q, k))
    q, k, v = (_of_heads(x, shape.heads) for x in (q, k, v))
    return _Operands(q, k, v, log_decay, beta[..., None])


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hx, C, D) → (B, H, C, D), neighbours alike."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _unnormalised(
    shape: DeltaShape, given: DeltaTensors, rows: slice, chunk: slice, found: tuple[Tensor, ...]
) -> list[Tensor]:
    """Gradients of a chunk's operands → those of the arguments, (B, C, Hx, …)."""
    put = []
    for place, (x, d) in enumerate(zip(given[:5], found, strict=True)):
        assert x is not None
        if place < 3 and x.shape[2] != shape.heads:
            d = d.unflatten(1, (x.shape[2], -1)).sum(2)
        d = d.transpose(1, 2)
        if place < 2 and shape.qk_l2norm:
            wide = x[rows, chunk].to(shape.acc).contiguous()
            norm = _norm(wide)
            unit = wide / norm.clamp(min=shape.l2norm_eps)
            across = d - (d * unit).sum(-1, keepdim=True) * unit
            d = torch.where(norm < shape.l2norm_eps, d, across)
            d = d / norm.clamp(min=shape.l2norm_eps)
        put.append(d)
    return put


# ---- one chunk ----------------------------------------------------------------------------------


class _Decays(NamedTuple):
    pairs: Tensor  # E (B, H, C, C), 0 above the diagonal
    start: Tensor  # e (B, H, C, 1)
    end: Tensor  # t (B, H, C, 1)
    whole: Tensor  # e_C (B, H, 1, 1)


def _between(length: int, device: torch.device) -> Tensor:
    """(C, C + 1): whether token r lies after s, where column s + 1 stands for s and 0 for begin."""
    return torch.ones(length, length + 1, dtype=torch.bool, device=device).tril()


def _decays(log_decay: Tensor) -> _Decays:
    """Of log-decays (B, H, C)."""
    between = _between(log_decay.shape[-1], log_decay.device)
    summed = torch.where(between, log_decay[..., None], 0).cumsum(-2)
    # Row p is token p; what is not yet there decays to nothing.
    every = summed.exp() * between.new_ones(between.shape).tril(1)
    pairs, start = every[..., 1:], every[..., :1]
    return _Decays(pairs, start, pairs[..., -1:, :].mT, start[..., -1:, :])


def _log_decays_backward(d: _Decays, d_pairs: Tensor, d_start: Tensor, d_whole: Tensor) -> Tensor:
    """dE ∘ E, de ∘ e, de_C ∘ e_C → the gradient of the log-decays (B, H, C)."""
    d_start = d_start.clone()
    d_start[..., -1:, :] += d_whole
    every = torch.cat((d_start, d_pairs), -1)
    later = every.flip(-2).cumsum(-2).flip(-2)  # over p ≥ r
    between = _between(every.shape[-2], every.device)
    return torch.where(between, later, 0).sum(-1)


def _writes(x: _Operands, d: _Decays, memory: Tensor) -> tuple[Tensor, Tensor]:
    """N and U."""
    triangle = x.beta * (d.pairs * (x.k @ x.k.mT)).tril(-1)
    right = x.beta * (x.v - d.start * (x.k @ memory))
    return triangle, solve_triangular(triangle, right, upper=False, unitriangular=True)


def _reads(x: _Operands, d: _Decays) -> Tensor:
    """P."""
    return d.pairs * (x.q @ x.k.mT)


def _behind(x: _Operands, d: _Decays, change: Tensor, memory: Tensor) -> Tensor:
    """The memory behind a chunk."""
    return d.whole * memory + x.k.mT @ (d.end * change)


def _chunk_backward(
    x: _Operands, d_read: Tensor, d_memory: Tensor, memory: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of a chunk's operands and of the memory in front of it."""
    d = _decays(x.log_decay)
    triangle, change = _writes(x, d, memory)
    reads = _reads(x, d)
    held = x.k @ memory

    d_change = reads.mT @ d_read + d.end * (x.k @ d_memory)
    d_right = solve_triangular(triangle.mT, d_change, upper=True, unitriangular=True)
    d_reads = (d_read @ change.mT).tril()
    d_triangle = -(d_right @ change.mT).tril(-1)
    by_query = d_reads * d.pairs
    by_key = x.beta * d_triangle * d.pairs

    started, forgot = d.start * d_read, x.beta * d.start * d_right
    d_q = started @ memory.mT + by_query @ x.k
    stored = change @ d_memory.mT  # of U, by what its key has of dS
    d_k = by_query.mT @ x.q + (by_key + by_key.mT) @ x.k + d.end * stored - forgot @ memory.mT
    d_v = x.beta * d_right
    d_beta = (d_right * (x.v - d.start * held)).sum(-1)
    overlap = d.pairs * (x.k @ x.k.mT)
    d_beta = d_beta + (d_triangle * overlap).sum(-1)

    d_pairs = d_reads * reads + d_triangle * triangle
    d_pairs[..., -1, :] += (d.end * stored * x.k).sum(-1)
    d_start = (started * (x.q @ memory)).sum(-1, True) - (forgot * held).sum(-1, True)
    d_whole = d.whole * (d_memory * memory).sum((-2, -1), True)
    d_log_decay = _log_decays_backward(d, d_pairs, d_start, d_whole)
    front = d.whole * d_memory + x.q.mT @ started - x.k.mT @ forgot
    return (d_q, d_k, d_v, d_log_decay, d_beta), front
