"""The Omega rule on a linear memory, literally: token after token, every gradient formed whole.

Formulas, arguments and results are those of `fastweights.ops.omega_memory`. With x = φ(k) and the
memory M as it was after the last token of the chunk before, M^:

    G_t = Σ_j w_{t,j} x_{t−j}ᵀ (x_{t−j} M^ − v_{t−j})    w_{t,j} = step_t · window_gates_{t,j}
    S_t = momentum_t S_{t−1} − G_t                       S_t = −G_t without momentum
    M_t = decay_t M_{t−1} + S_t
    y_t = φ(q_t) M_t

Tokens of earlier chunks in the window meet the M^ of the present one. The inner loss "dot" has −v
in place of the error. Products run in the dtype of k, all between them in fp32 (float64 for float64
inputs): the "plain torch" that kernels are measured by. Source: ATLAS, arXiv 2505.23735, equations
8 to 16 with the sign of the value term of equation 11 set right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .polynomial import polynomial_features


class OmegaState(NamedTuple):
    """What a call leaves to the next one: M and S, and the keys and values still in the window.

    `state` and `momentum` (N, H, D, Dv), `tail_k` (N, window − 1, H, d), `tail_v` with Dv, the
    newest last; of them the last `tail_length` (N,) int32 exist.
    """

    state: Tensor
    momentum: Tensor | None
    tail_k: Tensor
    tail_v: Tensor
    tail_length: Tensor


class OmegaGradient(NamedTuple):
    """One chunk of b tokens with n − b older ones in front, see `omega_gradient`."""

    residual: Tensor
    write: Tensor
    momentum_write: Tensor | None
    decay: Tensor
    carry: Tensor | None
    momentum_decay: Tensor | None
    gradient: Tensor


# What is added to the memory, of the row of the batch, the sequence's first token there, t and S_t.
Write = Callable[[int, int, int, Tensor], Tensor]


class _Sequence(NamedTuple):
    """The tokens of one sequence: (T, H, …), older keys and values in front of k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    step: Tensor
    decay: Tensor | None
    gates: Tensor
    momentum: Tensor | None
    begin: tuple[int, int]  # row of the batch, first token


def features(x: Tensor, feature_map: str, coefficients: Tensor | None) -> Tensor:
    """φ(x) of the last dimension: x itself, Σ_r a_r x^r of each of its numbers, or all products.

    `coefficients` a_0, a_1, … (p + 1,), or (H, p + 1) for x (..., H, d).
    """
    if feature_map == "identity":
        return x
    if feature_map not in ("elementwise", "symmetric"):
        raise ValueError(
            f"feature_map must be identity, elementwise or symmetric, got {feature_map!r}"
        )
    degree = 2 if coefficients is None else coefficients.shape[-1] - 1
    return polynomial_features(x, coefficients, degree=degree, kind=feature_map)


def omega_memory(
    q: Tensor, k: Tensor, v: Tensor, *, step: Tensor, decay: Tensor | None = None,
    window_gates: Tensor | None = None, window: int = 1, momentum: Tensor | None = None,
    inner_loss: str = "squared", feature_map: str = "identity", coefficients: Tensor | None = None,
    chunk_size: int = 64, read_before: bool = False, initial_state: Tensor | None = None,
    initial_momentum: Tensor | None = None, tail_k: Tensor | None = None,
    tail_v: Tensor | None = None, tail_length: Tensor | None = None, return_state: bool = False,
    cu_seqlens: Tensor | None = None, write: Write | None = None,
) -> tuple[Tensor, OmegaState | None]:  # fmt: skip
    """As `fastweights.ops.omega_memory`; another rule may `write` something else than S_t."""
    acc = torch.float64 if k.dtype == torch.float64 else torch.float32
    batch, tokens, heads = k.shape[:3]
    older = window - 1
    if cu_seqlens is None:
        spans = [(n, 0, tokens) for n in range(batch)]
    else:
        ends = cu_seqlens.tolist()
        spans = [(0, ends[n], ends[n + 1]) for n in range(len(ends) - 1)]
    gates = window_gates
    if gates is None:
        gates = step.new_full((*step.shape, window), 1 / window)
    wide = features(k[:0], feature_map, coefficients).shape[-1]
    zero = torch.zeros(heads, wide, v.shape[-1], dtype=acc, device=k.device)

    reads: list[Tensor] = []
    states: list[Tensor] = []
    velocities: list[Tensor] = []
    tails_k: list[Tensor] = []
    tails_v: list[Tensor] = []
    lengths: list[int] = []
    for n, (row, begin, end) in enumerate(spans):
        there = 0 if tail_k is None else older
        if tail_length is not None:
            there = int(tail_length[n])
        here = slice(begin, end)
        keys, values = k[row, here], v[row, here]
        if tail_k is not None and tail_v is not None:
            keys = torch.cat((tail_k[n, older - there :], keys))
            values = torch.cat((tail_v[n, older - there :], values))
        sequence = _Sequence(
            features(q[row, here], feature_map, coefficients),
            features(keys, feature_map, coefficients),
            values,
            step[row, here],
            None if decay is None else decay[row, here],
            gates[row, here],
            None if momentum is None else momentum[row, here],
            (row, begin),
        )
        state = zero if initial_state is None else initial_state[n].to(acc)
        velocity = zero if initial_momentum is None else initial_momentum[n].to(acc)
        read, state, velocity = _scan(
            sequence, state, velocity, chunk_size, inner_loss == "dot", read_before,
            write,
        )  # fmt: skip
        reads.append(read)
        kept = min(older, len(keys))
        states.append(state)
        velocities.append(velocity)
        tails_k.append(_tail(keys, kept, older))
        tails_v.append(_tail(values, kept, older))
        lengths.append(kept)
    y = torch.zeros(v.shape, dtype=acc, device=v.device)
    if cu_seqlens is None and reads:
        y = torch.stack(reads)
    elif reads:  # tokens behind the last sequence are padding
        y = torch.cat((*reads, y[0, spans[-1][2] :]))[None]
    y = y.to(v.dtype)
    if not return_state:
        return y, None
    return y, OmegaState(
        _stacked(states, zero),
        None if momentum is None else _stacked(velocities, zero),
        _stacked(tails_k, k.new_zeros(older, *k.shape[2:])),
        _stacked(tails_v, v.new_zeros(older, *v.shape[2:])),
        torch.tensor(lengths, dtype=torch.int32, device=k.device),
    )


def _tail(x: Tensor, kept: int, room: int) -> Tensor:
    """The last `kept` rows of x at the end of `room`."""
    return torch.cat((x.new_zeros(room - kept, *x.shape[1:]), x[len(x) - kept :]))


def _stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    """All parts, each of the shape of `like`."""
    return torch.stack(parts) if parts else like.new_zeros(0, *like.shape)


def _scan(
    x: _Sequence, state: Tensor, velocity: Tensor, chunk_size: int, dot: bool, read_before: bool,
    write: Write | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Reads (T, H, Dv), and M and S (H, D, Dv) after the last token."""
    dtype, acc = x.k.dtype, state.dtype
    tokens, window = x.gates.shape[0], x.gates.shape[2]
    halo = x.k.shape[0] - tokens

    def times(row: Tensor, matrix: Tensor) -> Tensor:
        """(H, D) by (H, D, Dv)."""
        return (row[:, None] @ matrix.to(dtype)).to(acc)[:, 0]

    anchor = state
    reads = []
    for t in range(tokens):
        if t % chunk_size == 0:
            anchor = state
        gradient = torch.zeros_like(state)
        for lag in range(min(window, halo + t + 1)):
            key, value = x.k[halo + t - lag], x.v[halo + t - lag].to(acc)
            error = -value if dot else times(key, anchor) - value
            weight = (x.step[t] * x.gates[t, :, lag]).to(acc)
            outer = (key[:, :, None] @ error[:, None].to(dtype)).to(acc)
            gradient = gradient + weight[:, None, None] * outer
        before = state
        velocity = (
            -gradient if x.momentum is None
            else x.momentum[t, :, None, None].to(acc) * velocity - gradient
        )  # fmt: skip
        kept = state if x.decay is None else x.decay[t, :, None, None].to(acc) * state
        state = kept + (velocity if write is None else write(*x.begin, t, velocity))
        reads.append(times(x.q[t], before if read_before else state))
    empty = torch.zeros(0, *x.v.shape[1:], dtype=acc, device=x.v.device)
    return torch.stack(reads) if reads else empty, state, velocity


def omega_gradient(
    k: Tensor, v: Tensor, state: Tensor, *, step: Tensor, window_gates: Tensor | None = None,
    window: int = 1, decay: Tensor | None = None, momentum: Tensor | None = None,
    inner_loss: str = "squared", feature_map: str = "identity", coefficients: Tensor | None = None,
) -> OmegaGradient:  # fmt: skip
    """As `fastweights.ops.omega_gradient`: the scans of one chunk, row after row."""
    acc = torch.float64 if k.dtype == torch.float64 else torch.float32
    batch, tokens, heads = step.shape
    rows = k.shape[1]
    halo = rows - tokens
    x = features(k, feature_map, coefficients).transpose(1, 2)  # (B, H, n, D)
    value = v.transpose(1, 2).to(acc)
    read = (x @ state.to(k.dtype)).to(acc)
    residual = -value if inner_loss == "dot" else read - value  # (B, H, n, Dv)

    ones = step.new_ones(batch, heads).to(acc)
    rate, kept = ones, 0 * ones
    drop = ones
    pushed = torch.zeros(batch, heads, rows, dtype=acc, device=k.device)
    written = pushed
    total = pushed
    collected: list[tuple[Tensor, ...]] = []
    for t in range(tokens):
        alpha = ones if decay is None else decay[:, t].to(acc)
        theta = 0 * ones if momentum is None else momentum[:, t].to(acc)
        weight = torch.zeros_like(pushed)
        for lag in range(min(window, halo + t + 1)):
            gate = step[:, t] / window
            if window_gates is not None:
                gate = step[:, t] * window_gates[:, t, :, lag]
            one = torch.zeros(rows, dtype=acc, device=k.device)
            one[halo + t - lag] = 1
            weight = weight + gate.to(acc)[..., None] * one
        rate = alpha * rate
        drop = theta * drop
        kept = alpha * kept + drop
        pushed = theta[..., None] * pushed + weight
        written = alpha[..., None] * written + pushed
        total = total + weight
        collected.append((written, pushed, rate, kept, drop))
    columns = zip(*collected, strict=True)
    writes, pushes, rates, carries, drops = (
        torch.stack(column, dim) for column, dim in zip(columns, (2, 2, 1, 1, 1), strict=True)
    )
    last = total if momentum is None else pushed
    gradient = (x.mT @ (last[..., None] * residual).to(k.dtype)).to(acc)
    with_momentum = momentum is not None
    return OmegaGradient(
        residual.transpose(1, 2),
        writes,
        pushes if with_momentum else None,
        rates,
        carries if with_momentum else None,
        drops if with_momentum else None,
        gradient,
    )
