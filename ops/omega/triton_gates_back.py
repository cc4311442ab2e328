"""Gradients of steps, window gates and decays, from those of the weights that they make.

P of a key at token t is a_t times P at t − 1 and what t writes of it, A is a_t times A at t − 1. So
their gradients run from the last token to the first: dP at t is what reads at t add and a_{t+1}
times dP at t + 1. It is the gradient of what t writes of a key; that of the token's decay is
⟨dP_t, P_{t−1}⟩ + dA_t A_{t−1}.
"""

import triton
import triton.language as tl

from .triton_chunks import place_chunk

GATES_BACK_RUNTIME = ("tokens", "heads", "sequences", "chunk", "chunks", "window")


@triton.jit
def _rows(x, at, t, keys, size, known, CHUNK: tl.constexpr, KEYS: tl.constexpr):
    """Row t of the chunk's table of each head; zeros where it has none."""
    there = known & (t >= 0) & (t < size)
    to = ((at * CHUNK + t) * KEYS)[:, None] + keys[None, :]
    return tl.load(x + to, mask=there[:, None] & (keys >= 0)[None, :], other=0.0)


@triton.jit
def _numbers(
    d_rates, rates, scales, decay, at, of_token, heads, t, size, known,
    DECAY: tl.constexpr, SEEN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of each head: what reads at token t add to dA, A and the scale of P in front of it, and its
    decay.
    """
    row = at * CHUNK + t + SEEN
    upstream = tl.load(d_rates + row, mask=known & (t >= 0) & (t + SEEN < size), other=0.0)
    before = known & (t + SEEN > 0)
    scale = tl.load(scales + row - 1, mask=before, other=0.0)
    rate = tl.load(rates + row - 1, mask=before, other=0.0)
    rate = tl.where(t > 0, rate * scale, 1.0)
    a = upstream
    if DECAY:
        a = tl.load(decay + (of_token + t * heads), mask=known & (t >= 0), other=0.0)
    return upstream, scale, rate, a


@triton.jit(do_not_specialize=GATES_BACK_RUNTIME)
def omega_gates_back(
    step, decay, window_gates, cu, shares_own, shares_older, rates, scales, d_shares,
    d_shares_older, d_rates, in_state, in_state_older, of_states, d_writes, d_step, d_decay,
    d_gates,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, GATES: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One chunk of HEADS heads. Gates and their gradients as (B, T, H[, window]); tables of P as
    `omega_tables` leaves them, their gradients as `omega_chunk_gradients` does. d_writes (slots, H,
    CHUNK, window): room for the gradients of writes.

    A token after the other, keys side by side; what a token needs is loaded one ahead. Keys that
    come later gather what is never used.
    """
    slot = tl.program_id(0) // tl.cdiv(heads, HEADS)
    h = tl.program_id(0) % tl.cdiv(heads, HEADS) * HEADS + tl.arange(0, HEADS)
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, chunk, chunks, sequences, PACKED)
    if size > 0:
        known = h < heads
        at = slot.to(tl.int64) * heads + h  # [HEADS]
        of_token = (batch * tokens + first).to(tl.int64) * heads + h  # of the chunk's first
        keys = tl.arange(0, CHUNK)
        i = tl.arange(0, HALO) if HALO > 0 else keys
        SEEN: tl.constexpr = 1 if BEFORE else 0  # rows read what is there one token earlier
        t = size - 1
        # Through M after the last token.
        of_keys = (at * CHUNK)[:, None] + keys[None, :]
        all_known = known[:, None] & (keys >= 0)[None, :]
        dP = -tl.load(in_state + of_keys, mask=all_known, other=0.0)
        dP_older = dP
        dA = tl.load(of_states + at, mask=known, other=0.0)
        upstream = _rows(d_shares, at, t + SEEN, keys, size, known, CHUNK, CHUNK)
        shares = _rows(shares_own, at, t - 1 + SEEN, keys, size, known, CHUNK, CHUNK)
        upstream_older = upstream
        shares_of_older = shares
        if HALO > 0:
            older_known = known[:, None] & (i >= 0)[None, :]
            to = (at * HALO)[:, None] + i[None, :]
            dP_older = -tl.load(in_state_older + to, mask=older_known, other=0.0)
            upstream_older = _rows(d_shares_older, at, t + SEEN, i, size, known, CHUNK, HALO)
            shares_of_older = _rows(shares_older, at, t - 1 + SEEN, i, size, known, CHUNK, HALO)
        of_A, scale, rate, a = _numbers(
            d_rates, rates, scales, decay, at, of_token, heads, t, size, known, DECAY, SEEN, CHUNK
        )
        while t >= 0:
            # The next token's, before this one's are at work.
            upstream_next = _rows(d_shares, at, t - 1 + SEEN, keys, size, known, CHUNK, CHUNK)
            shares_next = _rows(shares_own, at, t - 2 + SEEN, keys, size, known, CHUNK, CHUNK)
            of_A_next, scale_next, rate_next, a_next = _numbers(
                d_rates, rates, scales, decay, at, of_token, heads, t - 1, size, known, DECAY, SEEN,
                CHUNK,
            )  # fmt: skip
            upstream_older_next = upstream_older
            shares_older_next = shares_of_older
            if HALO > 0:
                upstream_older_next = _rows(
                    d_shares_older, at, t - 1 + SEEN, i, size, known, CHUNK, HALO
                )
                shares_older_next = _rows(
                    shares_older, at, t - 2 + SEEN, i, size, known, CHUNK, HALO
                )
            dA += of_A
            dP += upstream
            of_t = ((at * CHUNK + t) * window)[:, None]
            lag = t - keys
            inside = known[:, None] & ((lag >= 0) & (lag < window))[None, :]
            tl.store(d_writes + (of_t + lag[None, :]), dP, mask=inside)
            if HALO > 0:
                dP_older += upstream_older
                lag_older = t - (i - HALO)
                inside_older = known[:, None] & (lag_older < window)[None, :]
                tl.store(d_writes + (of_t + lag_older[None, :]), dP_older, mask=inside_older)
            if DECAY:
                of_decay = tl.sum(dP * shares.to(tl.float32), 1)
                if HALO > 0:
                    of_decay += tl.sum(dP_older * shares_of_older.to(tl.float32), 1)
                of_a = of_token + t * heads
                tl.store(d_decay + of_a, scale * of_decay + rate * dA, mask=known)
                dP *= a[:, None]
                dA *= a
                dP_older *= a[:, None]
            upstream = upstream_next
            shares = shares_next
            upstream_older = upstream_older_next
            shares_of_older = shares_older_next
            of_A = of_A_next
            scale = scale_next
            rate = rate_next
            a = a_next
            t -= 1
        tl.debug_barrier()  # what other threads stored is read from here on
        there = known[:, None] & (keys < size)[None, :]
        of_gates = of_token[:, None] + (keys * heads)[None, :]
        s = tl.load(step + of_gates, mask=there, other=0.0)
        total = tl.zeros([HEADS, CHUNK], tl.float32)
        back = window * 0  # lag
        while back < window:
            gradient = tl.load(d_writes + (of_keys * window + back), mask=there, other=0.0)
            gate = tl.full([HEADS, CHUNK], 1.0, tl.float32) / window
            if GATES:
                gate = tl.load(window_gates + of_gates * window + back, mask=there, other=0.0)
                tl.store(d_gates + of_gates * window + back, gradient * s, mask=there)
            total += gradient * gate
            back += 1
        tl.store(d_step + of_gates, total, mask=there)
