"""Backward of the Omega rule: the gradients that reads send into each chunk's memory, the walk back
along a sequence, and all gradients of a chunk from those of the memory at its end.

    omega_pull        every chunk by itself: what its reads add to the gradients of M and S
    omega_chain_back  along a sequence: gradients of M and S at the end of every chunk, and in front
                      of the first one
    omega_gradients   every chunk by itself
    omega_edges       keys that a chunk shares with the one behind it

Notation and formulas are those of `eager.py`. Tables of two tokens have keys in front, so that no
product needs the transpose of what was computed.
"""

import triton
import triton.language as tl

from .triton_chunks import (
    SIZES,
    decays,
    load_carry,
    load_older,
    load_rate,
    load_rows,
    load_sums,
    place_chunk,
    place_walk,
    shares,
    state_cells,
    table_of_decays,
)

STRIDES = (
    "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
    "stride_vb", "stride_vt", "stride_vh", "stride_yb", "stride_yt", "stride_yh",
)  # fmt: skip
PULL_RUNTIME = (*SIZES, *(name for name in STRIDES if name[7] != "v"))
CHAIN_RUNTIME = (*SIZES, "stride_kb", "stride_kt", "stride_kh")
GRADIENTS_RUNTIME = (*SIZES, *STRIDES)
EDGES_RUNTIME = SIZES


@triton.jit
def _pulled(q, k, d_y, part, PRECISION: tl.constexpr):
    """kᵀ (P ∘ q kᵀ)ᵀ dY of some keys."""
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [keys, CHUNK]
    mixed = tl.dot((part * scores).to(k.dtype), d_y, input_precision=PRECISION)
    return tl.dot(tl.trans(k), mixed.to(k.dtype), input_precision=PRECISION)


@triton.jit(do_not_specialize=PULL_RUNTIME)
def omega_pull(
    q, k, d_y, tail_k, tail_length, cu, whole, rest, m_whole, m_rest, carry, band, m_band,
    pull, pull_momentum,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_yb: tl.int64, stride_yt: tl.int64, stride_yh: tl.int64,
    DOT: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, TAIL: tl.constexpr, LENGTHS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PRECISION: tl.constexpr,
):  # fmt: skip
    """pull, pull_momentum (slots, H, D, Dv), fp32, V columns of one head."""
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
        seen = t - 1 if BEFORE else t
        there = t < size
        qt = load_rows(
            q, batch, head, first + t, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, ALIGNED
        )
        dy = load_rows(
            d_y, batch, head, first + t, there, v0, stride_yb, stride_yt, stride_yh, VALUES, V,
            ALIGNED,
        )  # fmt: skip
        wide = dy.to(tl.float32)
        rate = load_rate(whole, rest, row, tokens, first, seen, size, DECAY)
        scaled = (rate[:, None] * wide).to(qt.dtype)
        total = tl.dot(tl.trans(qt), scaled, input_precision=PRECISION)  # [D, V]
        if not DOT:
            kt = load_rows(
                k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D,
                ALIGNED,
            )  # fmt: skip
            part = shares(
                whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window,
                seen, t, DECAY, MOMENTUM, True, WINDOW, GATES_PRECISION, CHUNK,
            )  # fmt: skip
            total -= _pulled(qt, kt, dy, part, PRECISION)
            if HALO > 0:
                kt = load_older(
                    k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1,
                    0, stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
                )  # fmt: skip
                part = shares(
                    whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window,
                    seen, tl.arange(0, HALO) - HALO, DECAY, MOMENTUM, True, WINDOW,
                    GATES_PRECISION, CHUNK,
                )  # fmt: skip
                total -= _pulled(qt, kt, dy, part, PRECISION)
        cells, inside = state_cells(D, V, v0, WIDTH, VALUES)
        to = (slot.to(tl.int64) * heads + head) * (WIDTH * VALUES)
        tl.store(pull + to + cells, total, mask=inside)
        if MOMENTUM:
            a = load_carry(carry, row, tokens, first, seen, size)
            scaled = (a[:, None] * wide).to(qt.dtype)
            total = tl.dot(tl.trans(qt), scaled, input_precision=PRECISION)
            tl.store(pull_momentum + to + cells, total, mask=inside)


@triton.jit
def _sent_back(
    k, d_state, d_momentum, write, push, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr
):
    """kᵀ (P ∘ k dM + U ∘ k dS) of some keys."""
    error = write[:, None] * tl.dot(k, d_state, input_precision=PRECISION)
    if MOMENTUM:
        error += push[:, None] * tl.dot(k, d_momentum, input_precision=PRECISION)
    return tl.dot(tl.trans(k), error.to(k.dtype), input_precision=PRECISION)


@triton.jit(do_not_specialize=CHAIN_RUNTIME)
def omega_chain_back(
    k, tail_k, tail_length, cu, writes, pushes, ends, pull, pull_momentum, d_last, d_last_momentum,
    d_states, d_momenta, d_initial, d_initial_momentum,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    DOT: tl.constexpr, MOMENTUM: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """V columns of one head of one sequence. d_states, d_momenta (slots, H, D, Dv), k's dtype."""
    v0, head, sequence, batch, begin, end, slot0, count = place_walk(
        cu, tokens, heads, chunk, chunks, VALUES, V, PACKED
    )
    cells, inside = state_cells(D, V, v0, WIDTH, VALUES)
    own = (sequence.to(tl.int64) * heads + head) * (WIDTH * VALUES)
    dM = tl.load(d_last + own + cells, mask=inside, other=0.0)
    dS = dM
    if MOMENTUM:
        dS = tl.load(d_last_momentum + own + cells, mask=inside, other=0.0)
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, HALO) if HALO > 0 else t
    for turn in tl.range(0, count, num_stages=STAGES):
        number = count - 1 - turn
        first = begin + number * chunk
        size = tl.minimum(chunk, end - first)
        at = (slot0 + number).to(tl.int64) * heads + head
        place = at * (HALO + CHUNK)
        low = dM.to(k.dtype.element_ty)
        to = at * (WIDTH * VALUES)
        tl.store(d_states + to + cells, low, mask=inside)
        low_momentum = low
        before = tl.load(ends + at * 3) * dM
        before += tl.load(pull + to + cells, mask=inside, other=0.0)
        if MOMENTUM:
            low_momentum = dS.to(k.dtype.element_ty)
            tl.store(d_momenta + to + cells, low_momentum, mask=inside)
            dS = tl.load(ends + at * 3 + 1) * dM + tl.load(ends + at * 3 + 2) * dS
            dS += tl.load(pull_momentum + to + cells, mask=inside, other=0.0)
        dM = before
        if not DOT:
            kt = load_rows(
                k, batch, head, first + t, t < size, 0, stride_kb, stride_kt, stride_kh, WIDTH, D,
                ALIGNED,
            )  # fmt: skip
            write = tl.load(writes + (place + HALO + t))
            push = write
            if MOMENTUM:
                push = tl.load(pushes + (place + HALO + t))
            dM -= _sent_back(kt, low, low_momentum, write, push, MOMENTUM, PRECISION)
            if HALO > 0:
                kt = load_older(
                    k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1,
                    0, stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
                )  # fmt: skip
                write = tl.load(writes + (place + i))
                push = write
                if MOMENTUM:
                    push = tl.load(pushes + (place + i))
                dM -= _sent_back(kt, low, low_momentum, write, push, MOMENTUM, PRECISION)
    tl.store(d_initial + own + cells, dM, mask=inside)
    if MOMENTUM:
        tl.store(d_initial_momentum + own + cells, dS, mask=inside)


@triton.jit
def _store_keys(
    x, edge, tile, head, heads, rows, own, at_edge, shared, col0,
    OLDER: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows whose sum is complete go to x (B, T, H, ·); those that two chunks add to wait at the
    edge (slots, H, HALO, ·).
    """
    cols = col0 + tl.arange(0, COLS)
    fits = (cols < WIDTH)[None, :]
    if not OLDER:
        to = (rows.to(tl.int64) * heads + head)[:, None] * WIDTH + cols[None, :]
        tl.store(x + to, tile.to(x.dtype.element_ty), mask=own[:, None] & fits)
    if HALO > 0:
        to = at_edge[:, None] * WIDTH + cols[None, :]
        tl.store(edge + to, tile, mask=shared[:, None] & fits)


@triton.jit(do_not_specialize=GRADIENTS_RUNTIME)
def omega_gradients(
    q, k, v, d_y, tail_k, tail_v, tail_length, step, window_gates, cu,
    whole, rest, m_whole, m_rest, carry, band, m_band, writes, pushes,
    states, momenta, states_low, momenta_low, d_states, d_momenta,
    d_q, d_k, d_v, edge_k, edge_v, older_scores, older_weights, older_alpha, older_theta,
    d_step, d_decay, d_theta, d_gates,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_yb: tl.int64, stride_yt: tl.int64, stride_yh: tl.int64,
    OLDER: tl.constexpr, DOT: tl.constexpr, DECAY: tl.constexpr, GATES: tl.constexpr,
    MOMENTUM: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, LOW: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, GATES_PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk and head, V columns of values at a time.

    OLDER: of the keys in front of the chunk alone. What they add to gradients of the chunk's tokens
    is left in older_scores (slots, H, HALO, CHUNK), older_weights (B, H, window, T), older_alpha
    and older_theta (B, H, T), for the launch that serves the chunk's own keys. Of those that the
    chunk behind sees, too, d_k and d_v stay at the edge; so do the older ones'.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    sequence, batch, _, first, size, begin = place_chunk(
        slot, cu, tokens, chunk, chunks, sequences, PACKED
    )
    if size > 0:
        KEYS: tl.constexpr = HALO if OLDER else CHUNK
        row = batch * heads + head
        end = tokens
        if PACKED:
            end = tl.load(cu + sequence + 1)
        t = tl.arange(0, CHUNK)
        seen = t - 1 if BEFORE else t
        there = t < size
        j = tl.arange(0, KEYS)
        keys = j - HALO if OLDER else j
        qt = load_rows(
            q, batch, head, first + t, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, ALIGNED
        )
        if OLDER:
            kt = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
        else:
            kt = load_rows(
                k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D,
                ALIGNED,
            )  # fmt: skip
        at = slot.to(tl.int64) * heads + head
        place = at * (HALO + CHUNK) + HALO + keys
        write = tl.load(writes + place)
        push = write
        if MOMENTUM:
            push = tl.load(pushes + place)
        part = shares(
            whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, seen,
            keys, DECAY, MOMENTUM, True, WINDOW, GATES_PRECISION, CHUNK,
        )  # fmt: skip
        scores = tl.dot(kt, tl.trans(qt), input_precision=PRECISION)  # [KEYS, CHUNK]
        mixed = (part * scores).to(kt.dtype)

        shared = there & (t >= size - (window - 1)) & (first + size < end)
        own = there & ~shared
        at_edge = at * HALO + HALO - size + t
        if OLDER:
            shared = keys >= 1 - window
            own = shared
            at_edge = at * HALO + j
        rows = batch * tokens + first + keys
        dk = tl.zeros([KEYS, D], tl.float32)
        d_mixed = tl.zeros([KEYS, CHUNK], tl.float32)
        from_state = tl.zeros([D, CHUNK], tl.float32)
        from_momentum = from_state
        in_state = tl.zeros([KEYS], tl.float32)  # Σ R ∘ k dM
        in_momentum = in_state
        state_state = 0.0  # ⟨M, dM⟩
        momentum_state = 0.0
        momentum_momentum = 0.0
        for v0 in tl.range(0, VALUES, V, num_stages=1):
            dy = load_rows(
                d_y, batch, head, first + t, there, v0, stride_yb, stride_yt, stride_yh, VALUES, V,
                ALIGNED,
            )  # fmt: skip
            if OLDER:
                vt = load_older(
                    v, tail_v, tail_length, sequence, batch, head, heads, first, begin, window - 1,
                    v0, stride_vb, stride_vt, stride_vh, VALUES, V, HALO, ALIGNED, TAIL, LENGTHS,
                )  # fmt: skip
            else:
                vt = load_rows(
                    v, batch, head, first + t, there, v0, stride_vb, stride_vt, stride_vh, VALUES,
                    V, ALIGNED,
                )  # fmt: skip
            cells, inside = state_cells(D, V, v0, WIDTH, VALUES)
            cells = at * (WIDTH * VALUES) + cells
            M = tl.load(states + cells, mask=inside, other=0.0)
            dM = tl.load(d_states + cells, mask=inside, other=0.0)
            error = -vt.to(tl.float32)
            lost = M
            if LOW:
                lost = tl.load(states_low + cells, mask=inside, other=0.0)
            if not DOT:
                error += tl.dot(kt, M, input_precision=PRECISION)
                if LOW:
                    # Errors of what M has learned are small: rounding M would be much of them.
                    error += tl.dot(kt, lost, input_precision=PRECISION)
            d_mixed -= tl.dot(error.to(kt.dtype), tl.trans(dy), input_precision=PRECISION)
            along = tl.dot(kt, dM, input_precision=PRECISION)
            in_state += tl.sum(error * along, 1)
            d_error = write[:, None] * along + tl.dot(mixed, dy, input_precision=PRECISION)
            dk -= tl.dot(
                (write[:, None] * error).to(kt.dtype), tl.trans(dM), input_precision=PRECISION
            )
            if not OLDER:
                # Gradients of decays are sums of products with M that nearly cancel.
                from_state += tl.dot(M, tl.trans(dy), input_precision=PRECISION)
                wide = M.to(tl.float32)
                if LOW:
                    from_state += tl.dot(lost, tl.trans(dy), input_precision=PRECISION)
                    wide += lost.to(tl.float32)
                state_state += tl.sum(tl.sum(wide * dM.to(tl.float32), 1), 0)
            if MOMENTUM:
                dS = tl.load(d_momenta + cells, mask=inside, other=0.0)
                pushing = tl.dot(kt, dS, input_precision=PRECISION)
                in_momentum += tl.sum(error * pushing, 1)
                d_error += push[:, None] * pushing
                dk -= tl.dot(
                    (push[:, None] * error).to(kt.dtype), tl.trans(dS), input_precision=PRECISION
                )
                if not OLDER:
                    S = tl.load(momenta + cells, mask=inside, other=0.0)
                    from_momentum += tl.dot(S, tl.trans(dy), input_precision=PRECISION)
                    wide = S.to(tl.float32)
                    if LOW:
                        lost_momentum = tl.load(momenta_low + cells, mask=inside, other=0.0)
                        from_momentum += tl.dot(
                            lost_momentum, tl.trans(dy), input_precision=PRECISION
                        )
                        wide += lost_momentum.to(tl.float32)
                    momentum_state += tl.sum(tl.sum(wide * dM.to(tl.float32), 1), 0)
                    momentum_momentum += tl.sum(tl.sum(wide * dS.to(tl.float32), 1), 0)
            if not DOT:
                dk -= tl.dot(d_error.to(kt.dtype), tl.trans(M), input_precision=PRECISION)
            _store_keys(
                d_v, edge_v, d_error, head, heads, rows, own, at_edge, shared, v0, OLDER, HALO,
                VALUES, V,
            )  # fmt: skip

        d_scores = (d_mixed * part).to(kt.dtype)
        dk += tl.dot(d_scores, qt, input_precision=PRECISION)
        _store_keys(
            d_k, edge_k, dk, head, heads, rows, own, at_edge, shared, 0, OLDER, HALO, WIDTH, D
        )

        # Gradients of P: through reads, and at the last token through M. Then back along the chunk.
        back = table_of_decays(whole, rest, row, tokens, first, seen, t, size, DECAY, False)
        back = tl.where(there[:, None] & there[None, :], back, 0.0)  # [reading, written]
        last = t * 0 + (size - 1)
        left = _left(whole, rest, row, tokens, first, t, last, size, DECAY)
        scores = tl.dot(kt, tl.trans(qt), input_precision=PRECISION)
        d_write = tl.dot(d_mixed * scores, back, input_precision=GATES_PRECISION)
        d_write -= in_state[:, None] * left[None, :]
        before = part
        if not BEFORE and (DECAY or MOMENTUM):
            before = shares(
                whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, t - 1,
                keys, DECAY, MOMENTUM, True, WINDOW, GATES_PRECISION, CHUNK,
            )  # fmt: skip
        d_alpha = tl.sum(d_write * before, 0)
        d_m = d_alpha
        m_back = back
        left_momentum = left
        if MOMENTUM:
            m_back = table_of_decays(m_whole, m_rest, row, tokens, first, t, t, size, True, False)
            m_back = tl.where(there[:, None] & there[None, :], m_back, 0.0)
            left_momentum = _left(m_whole, m_rest, row, tokens, first, t, last, size, True)
            d_write = tl.dot(d_write, m_back, input_precision=GATES_PRECISION)
            d_write -= in_momentum[:, None] * left_momentum[None, :]
            pushed = shares(
                m_whole, m_rest, m_whole, m_rest, m_band, m_band, row, tokens, first, size,
                window, t - 1, keys, True, False, True, WINDOW, GATES_PRECISION, CHUNK,
            )  # fmt: skip
            d_m = tl.sum(d_write * pushed, 0)

        of_row = row.to(tl.int64) * tokens + first + t
        tables = at * (HALO * CHUNK)
        if OLDER:
            to = tables + j[:, None] * CHUNK + t[None, :]
            tl.store(older_scores + to, d_scores)
            if DECAY:
                tl.store(older_alpha + of_row, d_alpha, mask=there)
            if MOMENTUM:
                tl.store(older_theta + of_row, d_m, mask=there)
        else:
            wide_q = tl.trans(qt).to(tl.float32)  # [D, CHUNK]
            rate = load_rate(whole, rest, row, tokens, first, seen, size, DECAY)
            dq = rate[None, :] * from_state + tl.dot(
                tl.trans(kt), d_scores, input_precision=PRECISION
            )
            # Gradients of A: of each read, of the last token through M; then of every token.
            d_rate = tl.sum(wide_q * from_state, 0)
            d_rate = tl.sum(d_rate[:, None] * back, 0) + left * state_state
            d_alpha += d_rate * load_rate(whole, rest, row, tokens, first, t - 1, size, DECAY)
            if MOMENTUM:
                dq += load_carry(carry, row, tokens, first, seen, size)[None, :] * from_momentum
                d_carry = tl.sum(wide_q * from_momentum, 0)
                d_carry = tl.sum(d_carry[:, None] * back, 0) + left * momentum_state
                d_alpha += d_carry * load_carry(carry, row, tokens, first, t - 1, size)
                d_drop = tl.sum(d_carry[:, None] * m_back, 0) + left_momentum * momentum_momentum
                d_m += d_drop * load_rate(m_whole, m_rest, row, tokens, first, t - 1, size, True)
            if HALO > 0:
                kt = load_older(
                    k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1,
                    0, stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
                )  # fmt: skip
                to = tables + tl.arange(0, HALO)[:, None] * CHUNK + t[None, :]
                d_scores = tl.load(older_scores + to)
                dq += tl.dot(tl.trans(kt), d_scores, input_precision=PRECISION)
                if DECAY:
                    d_alpha += tl.load(older_alpha + of_row, mask=there, other=0.0)
                if MOMENTUM:
                    d_m += tl.load(older_theta + of_row, mask=there, other=0.0)
            d = tl.arange(0, D)
            to = (rows.to(tl.int64) * heads + head)[None, :] * WIDTH + d[:, None]
            tl.store(
                d_q + to, dq.to(d_q.dtype.element_ty), mask=there[None, :] & (d < WIDTH)[:, None]
            )
            to = rows.to(tl.int64) * heads + head
            if DECAY:
                tl.store(d_decay + to, d_alpha, mask=there)
            if MOMENTUM:
                tl.store(d_theta + to, d_m, mask=there)
        # The gradient of a weight is that of its key at its token.
        of_gates = (batch * tokens + first + t).to(tl.int64) * heads + head
        s = tl.load(step + of_gates, mask=there, other=0.0)
        total = tl.zeros([CHUNK], tl.float32)
        lag = window * 0
        while lag < window:
            gradient = tl.sum(tl.where(keys[:, None] == t[None, :] - lag, d_write, 0.0), 0)
            of_lag = of_row + (row.to(tl.int64) * (window - 1) + lag) * tokens
            if OLDER:
                tl.store(older_weights + of_lag, gradient, mask=there)
            else:
                if HALO > 0:
                    gradient += tl.load(older_weights + of_lag, mask=there, other=0.0)
                gate = tl.full([CHUNK], 1.0, tl.float32) / window
                if GATES:
                    gate = tl.load(window_gates + of_gates * window + lag, mask=there, other=0.0)
                    tl.store(d_gates + of_gates * window + lag, gradient * s, mask=there)
                total += gradient * gate
            lag += 1
        if not OLDER:
            tl.store(d_step + of_gates, total, mask=there)


@triton.jit
def _left(whole, rest, row, tokens, first, t, last, size, DECAY: tl.constexpr):
    """The decays behind each token t of a chunk up to its last one."""
    there = t < size
    left = tl.where(there, 1.0, 0.0)
    if DECAY:
        w, r = load_sums(whole, rest, row, tokens, first, last, size)
        v, s = load_sums(whole, rest, row, tokens, first, t, size)
        left = decays(there, w, r, v, s)
    return left


@triton.jit(do_not_specialize=EDGES_RUNTIME)
def omega_edges(
    edge, older, d_x, d_tail, tail_length, cu,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    PACKED: tl.constexpr, TAIL: tl.constexpr, LENGTHS: tl.constexpr,
    HALO: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys (or values) in front of a chunk: what the two chunks gave each, or,
    in front of a sequence, those of the tail (N, window − 1, H, ·).
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    sequence, batch, number, first, size, _ = place_chunk(
        slot, cu, tokens, chunk, chunks, sequences, PACKED
    )
    if size > 0:
        i = tl.arange(0, HALO) - HALO
        cols = tl.arange(0, COLS)
        known = i >= 1 - window
        mask = known[:, None] & (cols < WIDTH)[None, :]
        at = (slot.to(tl.int64) * heads + head) * HALO + HALO + i
        total = tl.load(older + (at[:, None] * WIDTH + cols[None, :]), mask=mask, other=0.0)
        if number > 0:
            at -= heads * HALO
            total += tl.load(edge + (at[:, None] * WIDTH + cols[None, :]), mask=mask, other=0.0)
            to = (batch * tokens + first + i).to(tl.int64) * heads + head
            to = to[:, None] * WIDTH + cols[None, :]
            tl.store(d_x + to, total.to(d_x.dtype.element_ty), mask=mask)
        elif TAIL:
            length = window - 1
            if LENGTHS:
                length = tl.minimum(tl.load(tail_length + sequence), length)
            total = tl.where((i >= -length)[:, None], total, 0.0)
            to = (sequence.to(tl.int64) * (window - 1) + (window - 1) + i) * heads + head
            to = to[:, None] * WIDTH + cols[None, :]
            tl.store(d_tail + to, total.to(d_tail.dtype.element_ty), mask=mask)
