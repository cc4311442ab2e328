"""Gradients of steps, window gates and decays, from those of the weights that they make."""

import triton
import triton.language as tl

from .triton_chunks import decays, load_sums, place_chunk, table_of_decays

GATES_BACK_RUNTIME = ("tokens", "heads", "sequences", "chunk", "chunks", "window")


@triton.jit
def _written(
    back, left, d_shares, shares, scales, in_state, at, size,
    BEFORE: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of KEYS keys: the gradient of what each token adds to P, [CHUNK, KEYS], and for each token
    the sum of it and P in front of the token, which is the gradient of its decay.
    """
    t = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEYS)
    to = (at * CHUNK + t)[:, None] * KEYS + keys[None, :]
    there = (t < size)[:, None] & (keys >= 0)[None, :]
    upstream = tl.load(d_shares + to, mask=there, other=0.0)  # [reading, keys]
    d_write = tl.dot(back, upstream, input_precision=PRECISION)
    d_write -= left[:, None] * tl.load(in_state + at * KEYS + keys)[None, :]
    row = t if BEFORE else t - 1
    there = (row >= 0) & (t < size)
    scale = tl.load(scales + at * CHUNK + row, mask=there, other=0.0)
    to = (at * CHUNK + row)[:, None] * KEYS + keys[None, :]
    before = tl.load(shares + to, mask=there[:, None] & (keys >= 0)[None, :], other=0.0)
    return d_write, tl.sum(d_write * (scale[:, None] * before.to(tl.float32)), 1)


@triton.jit(do_not_specialize=GATES_BACK_RUNTIME)
def omega_gates_back(
    step, window_gates, cu, whole, rest, shares_own, shares_older, scales, d_shares,
    d_shares_older, d_rates, in_state, in_state_older, of_states, d_step, d_decay, d_gates,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, GATES: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and head. Gates and their gradients as (B, T, H[, window]); tables of P as
    `omega_tables` leaves them, the gradients as `omega_chunk_gradients` does.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, chunk, chunks, sequences, PACKED)
    if size > 0:
        row = batch * heads + head
        at = slot.to(tl.int64) * heads + head
        t = tl.arange(0, CHUNK)
        there = t < size
        reading = tl.arange(0, CHUNK)
        seen = reading - 1 if BEFORE else reading
        back = table_of_decays(whole, rest, row, tokens, first, seen, t, size, DECAY, True)
        back = tl.where(there[:, None] & (reading < size)[None, :], back, 0.0)  # [written, reading]
        left = tl.where(there, 1.0, 0.0)
        if DECAY:
            w, r = load_sums(whole, rest, row, tokens, first, t * 0 + (size - 1), size)
            v, s = load_sums(whole, rest, row, tokens, first, t, size)
            left = decays(there, w, r, v, s)
        d_write, d_alpha = _written(
            back, left, d_shares, shares_own, scales, in_state, at, size, BEFORE, CHUNK, CHUNK,
            PRECISION,
        )  # fmt: skip
        older = d_write
        i = t
        if HALO > 0:
            i = tl.arange(0, HALO) - HALO
            older, of_older = _written(
                back, left, d_shares_older, shares_older, scales, in_state_older, at, size, BEFORE,
                CHUNK, HALO, PRECISION,
            )  # fmt: skip
            d_alpha += of_older
        of_gates = (batch * tokens + first + t).to(tl.int64) * heads + head
        if DECAY:
            d_rate = tl.load(d_rates + at * CHUNK + reading, mask=reading < size, other=0.0)
            d_rate = tl.sum(back * d_rate[None, :], 1) + left * tl.load(of_states + at)
            w, r = load_sums(whole, rest, row, tokens, first, t - 1, size)
            d_alpha += d_rate * tl.exp2(w.to(tl.float32) + r)
            tl.store(d_decay + of_gates, d_alpha, mask=there)
        # The gradient of a weight is that of its key at its token.
        s = tl.load(step + of_gates, mask=there, other=0.0)
        total = tl.zeros([CHUNK], tl.float32)
        lag = window * 0
        while lag < window:
            gradient = tl.sum(tl.where(t[None, :] == t[:, None] - lag, d_write, 0.0), 1)
            if HALO > 0:
                gradient += tl.sum(tl.where(i[None, :] == t[:, None] - lag, older, 0.0), 1)
            gate = tl.full([CHUNK], 1.0, tl.float32) / window
            if GATES:
                gate = tl.load(window_gates + of_gates * window + lag, mask=there, other=0.0)
                tl.store(d_gates + of_gates * window + lag, gradient * s, mask=there)
            total += gradient * gate
            lag += 1
        tl.store(d_step + of_gates, total, mask=there)
