"""Forward of the Omega rule: what the gates amount to, the memory chunk after chunk, the reads.

    omega_gates    once for every token: logarithms of products of decays, what each write is worth
                   at its chunk's end
    omega_chain    along a sequence: M and S at the begin of every chunk, and after the last token
    omega_reads    every chunk by itself, from its M and S

Notation and formulas are those of `eager.py`. Products take operands in k's dtype and sum in fp32.
"""

import triton
import triton.language as tl

from .triton_chunks import (
    SIZES,
    ZERO,
    load_carry,
    load_older,
    load_rate,
    load_rows,
    place_chunk,
    place_walk,
    place_writes,
    shares,
    state_cells,
)

GATES_RUNTIME = SIZES
CHAIN_RUNTIME = (
    *SIZES,
    "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
)  # fmt: skip
READS_RUNTIME = (
    *SIZES, "stride_qb", "stride_qt", "stride_qh",
    "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
)  # fmt: skip


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _line(slope, offset, next_slope, next_offset):
    """One after the other: x → slope·x + offset."""
    return next_slope * slope, next_slope * offset + next_offset


@triton.jit
def _decayed(slope, bound, next_slope, next_bound):
    """One after the other: x → max(slope·x, bound)."""
    return next_slope * slope, tl.maximum(next_slope * bound, next_bound)


@triton.jit
def _logarithm(x):
    """log2 x as an exact whole number and a rest within ±½; NaN below 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # in [1, 2)
    large = mantissa > 1.4142135
    exponent = tl.where(large, exponent + 1, exponent)
    rest = tl.log2(tl.where(large, 0.5 * mantissa, mantissa))
    exponent = tl.where(x < 1.1754944e-38, -ZERO, exponent)  # what is not a normal number is 0
    return exponent, tl.where(x >= 0.0, rest, float("nan"))


@triton.jit(do_not_specialize=GATES_RUNTIME)
def omega_gates(
    step, decay, momentum, window_gates, cu,
    whole, rest, m_whole, m_rest, carry, left, push, by_push, band, m_band, bound, writes, pushes,
    ends,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, GATES: tl.constexpr, MOMENTUM: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, HEADS: tl.constexpr, BOUND: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One slot of HEADS heads. Gates come as (B, T, H[, window]), results as (B, H[, window], T).

    carry: a. left: what of a token's M is in M at the chunk's end, push and by_push: of its S in S
    and in M. band, m_band: P and U of a token and of the key `lag` before it. bound: with BOUND,
    what no P of a token is larger than. writes, pushes (slots, H, HALO + CHUNK): P and U of the
    last token, of the older keys first. ends (slots, H, 3): A, a and B of the last token.
    """
    slot = tl.program_id(0) // tl.cdiv(heads, HEADS)
    h = tl.program_id(0) % tl.cdiv(heads, HEADS) * HEADS + tl.arange(0, HEADS)  # [HEADS]
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, chunk, chunks, sequences, PACKED)
    t = tl.arange(0, CHUNK)  # [CHUNK]
    known = h < heads
    here = (t < size)[:, None] & known[None, :]
    later = (t + 1 < size)[:, None] & known[None, :]
    at = ((batch * tokens + first + t).to(tl.int64) * heads)[:, None] + h[None, :]
    row = (batch * heads + h).to(tl.int64)  # [HEADS]
    out = row[None, :] * tokens + (first + t)[:, None]
    final = (t == size - 1)[:, None]

    rate = tl.full([CHUNK, HEADS], 1.0, tl.float32)
    a = rate
    m = rate
    remaining = tl.where(here, 1.0, 0.0)
    if DECAY:
        a = tl.load(decay + at, mask=here, other=1.0)
        exponent, fraction = _logarithm(a)
        exponent = tl.cumsum(exponent, 0)
        fraction = tl.cumsum(fraction, 0)
        tl.store(whole + out, exponent, mask=here)
        tl.store(rest + out, fraction, mask=here)
        rate = tl.exp2(exponent.to(tl.float32) + fraction)
        a_next = tl.load(decay + at + heads, mask=later, other=1.0)
        remaining = tl.where(here, tl.associative_scan(a_next, 0, _product, reverse=True), 0.0)
    end = (slot * heads + h).to(tl.int64) * 3
    tl.store(ends + end, tl.sum(tl.where(final, rate, 0.0), 0), mask=known & (size > 0))
    tl.store(left + out, remaining, mask=here)
    if MOMENTUM:
        m = tl.load(momentum + at, mask=here, other=1.0)
        exponent, fraction = _logarithm(m)
        exponent = tl.cumsum(exponent, 0)
        fraction = tl.cumsum(fraction, 0)
        tl.store(m_whole + out, exponent, mask=here)
        tl.store(m_rest + out, fraction, mask=here)
        drop = tl.exp2(exponent.to(tl.float32) + fraction)
        _, carried = tl.associative_scan((a, drop), 0, _line)
        tl.store(carry + out, carried, mask=here)
        tl.store(ends + end + 1, tl.sum(tl.where(final, carried, 0.0), 0), mask=known & (size > 0))
        tl.store(ends + end + 2, tl.sum(tl.where(final, drop, 0.0), 0), mask=known & (size > 0))
        m_next = tl.load(momentum + at + heads, mask=later, other=1.0)
        pushed = tl.associative_scan(m_next, 0, _product, reverse=True)
        tl.store(push + out, pushed, mask=here)
        slope = tl.where(later, m_next, 0.0)
        _, both = tl.associative_scan((slope, remaining), 0, _line, reverse=True)
        tl.store(by_push + out, both - remaining, mask=here)

    s = tl.load(step + at, mask=here, other=0.0)
    largest = tl.zeros([CHUNK, HEADS], tl.float32)
    lag = window * 0
    while lag < window:
        w = s / window
        if GATES:
            w = s * tl.load(window_gates + at * window + lag, mask=here, other=0.0)
        to = out + (row * (window - 1) + lag)[None, :] * tokens
        inner = t > 0 if PARTS == 1 else t % (CHUNK // PARTS) > 0
        ok = here & inner[:, None] & (lag > 0)  # the token before, one lag less, same key
        if MOMENTUM:
            w += m * tl.load(m_band + (to - tokens - 1), mask=ok, other=0.0)
            tl.store(m_band + to, w, mask=here)
            largest = tl.maximum(largest, tl.abs(w))
        w += a * tl.load(band + (to - tokens - 1), mask=ok, other=0.0)
        tl.store(band + to, w, mask=here)
        if not MOMENTUM:
            largest = tl.maximum(largest, tl.abs(w))
        tl.debug_barrier()  # other threads' numbers are read in the next turn
        lag += 1
    if BOUND:
        if MOMENTUM:
            _, largest = tl.associative_scan((m, largest), 0, _decayed)
            _, largest = tl.associative_scan((a, largest), 0, _line)
        else:
            _, largest = tl.associative_scan((a, largest), 0, _decayed)
        tl.store(bound + out, largest, mask=here)
    place = (slot * heads + h).to(tl.int64)[None, :] * (HALO + CHUNK) + HALO
    _store_last(
        left, push, by_push, band, m_band, writes, pushes, row, place, known,
        t, first, size, tokens, window, MOMENTUM, 0, CHUNK, PARTS,
    )  # fmt: skip
    if HALO > 0:
        _store_last(
            left, push, by_push, band, m_band, writes, pushes, row, place - HALO, known,
            tl.arange(0, HALO), first, size, tokens, window, MOMENTUM, HALO, CHUNK, PARTS,
        )  # fmt: skip


@triton.jit
def _store_last(
    left, push, by_push, band, m_band, writes, pushes, row, place, known, cells, first, size,
    tokens, window, MOMENTUM: tl.constexpr, OLDER: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """P and U of a slot's last token for some rows of keys."""
    keys, begin, s = place_writes(cells, window, OLDER, CHUNK, PARTS)
    s = tl.minimum(s, size - 1)
    lag = s - keys
    ok = ((s >= begin) & (lag >= 0))[:, None] & known[None, :]
    at = row[None, :] * tokens + (first + s)[:, None]
    of_lag = at + (row * (window - 1))[None, :] * tokens + (lag * tokens)[:, None]
    written = tl.load(left + at, mask=ok, other=0.0) * tl.load(band + of_lag, mask=ok, other=0.0)
    pushed = written
    if MOMENTUM:
        u = tl.load(m_band + of_lag, mask=ok, other=0.0)
        written += tl.load(by_push + at, mask=ok, other=0.0) * u
        pushed = tl.load(push + at, mask=ok, other=0.0) * u
    to = place + cells[:, None]
    ok = (cells == cells)[:, None] & (known & (size > 0))[None, :]
    tl.store(writes + to, written, mask=ok)
    if MOMENTUM:
        tl.store(pushes + to, pushed, mask=ok)


@triton.jit
def _written(
    k, v, state, write, push, DOT: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """kᵀ (P ∘ R) and kᵀ (U ∘ R), R the errors of some keys."""
    error = -v.to(tl.float32)
    if not DOT:
        error += tl.dot(k, state, input_precision=PRECISION)
    kt = tl.trans(k)
    in_state = tl.dot(kt, (write[:, None] * error).to(k.dtype), input_precision=PRECISION)
    in_momentum = in_state
    if MOMENTUM:
        in_momentum = tl.dot(kt, (push[:, None] * error).to(k.dtype), input_precision=PRECISION)
    return in_state, in_momentum


@triton.jit(do_not_specialize=CHAIN_RUNTIME)
def omega_chain(
    k, v, tail_k, tail_v, tail_length, cu, writes, pushes, ends, initial_state, initial_momentum,
    states, momenta, states_low, momenta_low, state, velocity,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    DOT: tl.constexpr, MOMENTUM: tl.constexpr, INITIAL: tl.constexpr,
    INITIAL_MOMENTUM: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, LOW: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """V columns of the memory of one head of one sequence, through all of its chunks.

    states, momenta (slots, H, D, Dv), k's dtype: M and S at a chunk's begin; states_low,
    momenta_low: with LOW, what rounding took from them. state, velocity
    (N, H, D, Dv), fp32: after the last token. Small loads are made a chunk ahead: each would else
    be waited for between one product and the next.
    """
    v0, head, sequence, batch, begin, end, slot0, count = place_walk(
        cu, tokens, heads, chunk, chunks, VALUES, V, PACKED
    )
    cells, inside = state_cells(D, V, v0, WIDTH, VALUES)
    own = (sequence.to(tl.int64) * heads + head) * (WIDTH * VALUES)
    M = tl.zeros([D, V], tl.float32)
    S = M
    if INITIAL:
        M = tl.load(initial_state + own + cells, mask=inside, other=0.0)
    if INITIAL_MOMENTUM:
        S = tl.load(initial_momentum + own + cells, mask=inside, other=0.0)

    t = tl.arange(0, CHUNK)
    i = tl.arange(0, HALO) if HALO > 0 else t
    place = (slot0.to(tl.int64) * heads + head) * (HALO + CHUNK)
    some = count > 0
    write = tl.load(writes + (place + HALO + t), mask=(t >= 0) & some, other=0.0)
    push = write
    write_older = tl.load(writes + (place + i), mask=(i >= 0) & some, other=0.0)
    push_older = write_older
    at_end = ends + (slot0.to(tl.int64) * heads + head) * 3
    rate = tl.load(at_end, mask=some, other=0.0)
    carry = rate
    drop = rate
    if MOMENTUM:
        push = tl.load(pushes + (place + HALO + t), mask=(t >= 0) & some, other=0.0)
        push_older = tl.load(pushes + (place + i), mask=(i >= 0) & some, other=0.0)
        carry = tl.load(at_end + 1, mask=some, other=0.0)
        drop = tl.load(at_end + 2, mask=some, other=0.0)

    for number in tl.range(0, count, num_stages=STAGES):
        first = begin + number * chunk
        size = tl.minimum(chunk, end - first)
        place = ((slot0 + number + 1).to(tl.int64) * heads + head) * (HALO + CHUNK)
        at_end = ends + ((slot0 + number + 1).to(tl.int64) * heads + head) * 3
        more = number + 1 < count
        write_next = tl.load(writes + (place + HALO + t), mask=(t >= 0) & more, other=0.0)
        push_next = write_next
        older_next = write_older
        push_older_next = push_older
        if HALO > 0:
            older_next = tl.load(writes + (place + i), mask=(i >= 0) & more, other=0.0)
        rate_next = tl.load(at_end, mask=more, other=0.0)
        carry_next = carry
        drop_next = drop
        if MOMENTUM:
            push_next = tl.load(pushes + (place + HALO + t), mask=(t >= 0) & more, other=0.0)
            if HALO > 0:
                push_older_next = tl.load(pushes + (place + i), mask=(i >= 0) & more, other=0.0)
            carry_next = tl.load(at_end + 1, mask=more, other=0.0)
            drop_next = tl.load(at_end + 2, mask=more, other=0.0)

        low = M.to(k.dtype.element_ty)
        to = ((slot0 + number).to(tl.int64) * heads + head) * (WIDTH * VALUES)
        tl.store(states + to + cells, low, mask=inside)
        if LOW:
            lost = (M - low.to(tl.float32)).to(low.dtype)
            tl.store(states_low + to + cells, lost, mask=inside)
        M = rate * M
        if MOMENTUM:
            low_momentum = S.to(k.dtype.element_ty)
            tl.store(momenta + to + cells, low_momentum, mask=inside)
            if LOW:
                lost = (S - low_momentum.to(tl.float32)).to(low.dtype)
                tl.store(momenta_low + to + cells, lost, mask=inside)
            M += carry * S
            S = drop * S
        there = t < size
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, ALIGNED
        )
        vt = load_rows(
            v, batch, head, first + t, there, v0, stride_vb, stride_vt, stride_vh, VALUES, V,
            ALIGNED,
        )  # fmt: skip
        in_state, in_momentum = _written(kt, vt, low, write, push, DOT, MOMENTUM, PRECISION)
        M -= in_state
        if MOMENTUM:
            S -= in_momentum
        if HALO > 0:
            kt = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            vt = load_older(
                v, tail_v, tail_length, sequence, batch, head, heads, first, begin, window - 1, v0,
                stride_vb, stride_vt, stride_vh, VALUES, V, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            in_state, in_momentum = _written(
                kt, vt, low, write_older, push_older, DOT, MOMENTUM, PRECISION
            )
            M -= in_state
            if MOMENTUM:
                S -= in_momentum
        write = write_next
        push = push_next
        write_older = older_next
        push_older = push_older_next
        rate = rate_next
        carry = carry_next
        drop = drop_next

    tl.store(state + own + cells, M, mask=inside)
    if MOMENTUM:
        tl.store(velocity + own + cells, S, mask=inside)


@triton.jit
def _mixed(
    q, k, v, M, part, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(P ∘ q kᵀ) R of some keys, P given."""
    error = -v.to(tl.float32)
    if not DOT:
        error += tl.dot(k, M, input_precision=PRECISION)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [CHUNK, keys]
    return tl.dot((part * scores).to(k.dtype), error.to(k.dtype), input_precision=PRECISION)


@triton.jit(do_not_specialize=READS_RUNTIME)
def omega_reads(
    q, k, v, tail_k, tail_v, tail_length, cu, whole, rest, m_whole, m_rest, carry, band,
    m_band, states, momenta, y,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    DOT: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, TAIL: tl.constexpr, LENGTHS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of what the queries of one chunk and head read. Heads of a slot run side by side,
    as their gates lie in memory.
    """
    head = tl.program_id(0) % heads
    blocks = tl.cdiv(VALUES, V)
    v0 = tl.program_id(0) // heads % blocks * V
    slot = tl.program_id(0) // heads // blocks
    sequence, batch, _, first, size, begin = place_chunk(
        slot, cu, tokens, chunk, chunks, sequences, PACKED
    )
    if size > 0:
        row = batch * heads + head
        t = tl.arange(0, CHUNK)
        seen = t - 1 if BEFORE else t  # the last token whose write is read
        there = t < size
        qt = load_rows(
            q, batch, head, first + t, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, ALIGNED
        )
        cells, inside = state_cells(D, V, v0, WIDTH, VALUES)
        at = (slot.to(tl.int64) * heads + head) * (WIDTH * VALUES)
        M = tl.load(states + at + cells, mask=inside, other=0.0)
        read = tl.dot(qt, M, input_precision=PRECISION)  # [CHUNK, V]
        if DECAY:
            read *= load_rate(whole, rest, row, tokens, first, seen, size, DECAY)[:, None]
        if MOMENTUM:
            S = tl.load(momenta + at + cells, mask=inside, other=0.0)
            a = load_carry(carry, row, tokens, first, seen, size)
            read += a[:, None] * tl.dot(qt, S, input_precision=PRECISION)
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, ALIGNED
        )
        vt = load_rows(
            v, batch, head, first + t, there, v0, stride_vb, stride_vt, stride_vh, VALUES, V,
            ALIGNED,
        )  # fmt: skip
        part = shares(
            whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, seen, t,
            DECAY, MOMENTUM, False, WINDOW, GATES_PRECISION, CHUNK,
        )  # fmt: skip
        read -= _mixed(qt, kt, vt, M, part, DOT, PRECISION)
        if HALO > 0:
            kt = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            vt = load_older(
                v, tail_v, tail_length, sequence, batch, head, heads, first, begin, window - 1, v0,
                stride_vb, stride_vt, stride_vh, VALUES, V, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            part = shares(
                whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, seen,
                tl.arange(0, HALO) - HALO, DECAY, MOMENTUM, False, WINDOW, GATES_PRECISION, CHUNK,
            )  # fmt: skip
            read -= _mixed(qt, kt, vt, M, part, DOT, PRECISION)
        e = v0 + tl.arange(0, V)
        to = ((batch * tokens + first + t).to(tl.int64) * heads + head)[:, None] * VALUES
        mask = there[:, None] & (e < VALUES)[None, :]
        tl.store(y + (to + e[None, :]), read.to(y.dtype.element_ty), mask=mask)
