"""Backward of the Omega rule on symmetric features up to degree 2, which are never formed.

    omega_tables_symmetric      once for every token: P and A, as its read sees them
    omega_pull_symmetric        every chunk by itself: what its reads ask of its errors
    omega_walk_back_symmetric   along a span, backwards: the gradient of the memory tile after tile,
                                what a chunk's keys find there, and the gradients of its errors
    omega_pairs_back            every chunk by itself: gradients between its tokens, and of gates
    omega_features_back         every chunk by itself: gradients of tokens through their features

Spans go from the last to the first. Of one the memory at each chunk's begin is there, and comes its
gradient at each chunk's end, so that of one span alone, not of all chunks, memories are kept.
Operands are laid out as those of `triton_symmetric`. Of a chunk, with dM at its end,

    L = φ(K) dM                     dR = −(P ∘ κ(Q Kᵀ))ᵀ dY − w ∘ L
    dφ(Q) = A ∘ dY Mᵀ               dφ(K) = dR Mᵀ − (w ∘ R) dMᵀ
    dM ← A_b dM + φ(Q)ᵀ (A ∘ dY) + φ(K)ᵀ dR

and what tokens give each other by κ(x) = a_1 x + a_2 x² costs the width of keys alone.
"""

import triton
import triton.language as tl

from ..polynomial.triton_rows import coefficient
from .triton_bwd import _store_keys
from .triton_chunks import SIZES, load_rate, place_chunk, place_walk, shares
from .triton_symmetric import (
    cells_of,
    features_across,
    features_of,
    looked_at,
    step_weight,
    token_column,
    token_columns,
    token_rows,
    written_by,
)
from .triton_tables import _scale

WEIGHTS = ("stride_ah", "stride_ar")
TABLES_RUNTIME = SIZES
PULL_RUNTIME = (*SIZES, *WEIGHTS, "every", "span")
WALK_BACK_RUNTIME = PULL_RUNTIME
PAIRS_RUNTIME = PULL_RUNTIME
FEATURES_RUNTIME = PULL_RUNTIME
INNER_RUNTIME = (*SIZES, "every", "span")
QUERIES, OWN, OLDER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def place_span(
    place, cu, tokens, chunk, chunks, every, span, PACKED: tl.constexpr,
):  # fmt: skip
    """Of a chunk of a span: its sequence, row of the batch, slot, first token, tokens (none:
    nothing to do) and the end of the sequence.
    """
    sequence = place // every
    number = span * every + place % every
    begin = tokens * 0
    end = tokens
    batch = sequence
    slot = sequence * chunks + number
    if PACKED:
        batch = begin
        begin = tl.load(cu + sequence)
        end = tl.load(cu + sequence + 1)
        slot = begin // chunk + sequence + number
    first = begin + number * chunk
    return sequence, batch, slot, first, tl.minimum(chunk, end - first), end


@triton.jit(do_not_specialize=TABLES_RUNTIME)
def omega_tables_symmetric(
    cu, whole, rest, band, bound, shares_own, shares_older, rates, scales,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `omega_tables` leaves, of chunks of any length and with P in the dtype of its room."""
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _sequence, batch, _number, first, size, _begin = place_chunk(
        slot, cu, tokens, chunk, chunks, sequences, PACKED
    )
    if size > 0:
        row = batch * heads + head
        t = tl.arange(0, CHUNK)
        seen = t - 1 if BEFORE else t
        there = (seen >= 0) & (seen < size)
        rows = (slot.to(tl.int64) * heads + head) * CHUNK + t
        largest = tl.load(bound + row.to(tl.int64) * tokens + first + seen, mask=there, other=0.0)
        scale, inverse, _exponent = _scale(largest)
        tl.store(scales + rows, scale)
        rate = load_rate(whole, rest, row, tokens, first, seen, size, DECAY)
        tl.store(rates + rows, rate * inverse)
        P = shares(
            whole, rest, whole, rest, band, band, row, tokens, first, size, window, seen, t, DECAY,
            False, False, WINDOW, PRECISION, CHUNK,
        )  # fmt: skip
        P = (P * inverse[:, None]).to(shares_own.dtype.element_ty)
        tl.store(shares_own + rows[:, None] * CHUNK + t[None, :], P)
        if HALO > 0:
            i = tl.arange(0, HALO)
            P = shares(
                whole, rest, whole, rest, band, band, row, tokens, first, size, window, seen,
                i - HALO, DECAY, False, False, WINDOW, PRECISION, CHUNK,
            )  # fmt: skip
            P = (P * inverse[:, None]).to(shares_older.dtype.element_ty)
            tl.store(shares_older + rows[:, None] * HALO + i[None, :], P)


@triton.jit
def _parts(
    table, scales, at, size, CHUNK: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """P [queries, keys], or transposed, of a table of KEYS keys; 0 behind the last query."""
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, KEYS)
    scale = tl.load(scales + at * CHUNK + t, mask=t < size, other=0.0)
    if KEYS_FIRST:
        to = t[None, :] * KEYS + i[:, None]
        part = tl.load(
            table + at * (CHUNK * KEYS) + to, mask=(t < size)[None, :] & (i >= 0)[:, None], other=0.0
        )
        part = part.to(tl.float32) * scale[None, :]
    else:
        to = t[:, None] * KEYS + i[None, :]
        part = tl.load(
            table + at * (CHUNK * KEYS) + to, mask=(t < size)[:, None] & (i >= 0)[None, :], other=0.0
        )
        part = part.to(tl.float32) * scale[:, None]
    return part


@triton.jit
def _wide_rows(
    x, at, v0, size, FIRST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    VALUES: tl.constexpr, V: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """[ROWS, V], or transposed: columns of rows FIRST on of x (slots, H, KEYS, VALUES); zeros from
    row `size` on.
    """
    i = tl.arange(0, ROWS)
    e = v0 + tl.arange(0, V)
    pointers = x + at * (KEYS * VALUES) + FIRST * VALUES
    if TRANSPOSED:
        return tl.load(
            pointers + (i[None, :] * VALUES + e[:, None]),
            mask=(i < size)[None, :] & (e < VALUES)[:, None], other=0.0,
        )  # fmt: skip
    else:
        return tl.load(
            pointers + (i[:, None] * VALUES + e[None, :]),
            mask=(i < size)[:, None] & (e < VALUES)[None, :], other=0.0,
        )  # fmt: skip


@triton.jit
def _store_wide(
    x, tile, at, v0, FIRST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    VALUES: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """All of `_wide_rows`' rows."""
    i = tl.arange(0, ROWS)
    e = v0 + tl.arange(0, V)
    to = x + at * (KEYS * VALUES) + FIRST * VALUES + (i[:, None] * VALUES + e[None, :])
    tl.store(to, tile.to(x.dtype.element_ty), mask=(i >= 0)[:, None] & (e < VALUES)[None, :])


@triton.jit(do_not_specialize=PULL_RUNTIME)
def omega_pull_symmetric(
    q_columns, k_rows, y_rows, cu, a, shares_own, shares_older, scales, mixed,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, stride_ah: tl.int64, stride_ar: tl.int64, every: tl.int32, span: tl.int32,
    PACKED: tl.constexpr, PAIRS: tl.constexpr, DEFAULTS: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, VALUES: tl.constexpr, VALUES_P: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mixed (N · every, H, HALO + CHUNK, VALUES), fp32: (P ∘ κ(Q Kᵀ))ᵀ dY of one chunk, V columns.

    y_rows: dY as `omega_lay_out` leaves it.
    """
    KEYS: tl.constexpr = HALO + CHUNK
    head = tl.program_id(0) % heads
    blocks = tl.cdiv(VALUES, V)
    v0 = tl.program_id(0) // heads % blocks * V
    place = tl.program_id(0) // heads // blocks
    _, _, slot, _, size, _ = place_span(place, cu, tokens, chunk, chunks, every, span, PACKED)
    if size > 0:
        at = slot.to(tl.int64) * heads + head
        to = place.to(tl.int64) * heads + head
        first = coefficient(a, 1, head, stride_ah, stride_ar, DEFAULTS)
        second = 0.0
        if PAIRS:
            second = coefficient(a, 2, head, stride_ah, stride_ar, DEFAULTS)
        dtype: tl.constexpr = k_rows.dtype.element_ty
        qt = token_columns(q_columns, at, True, False, 0, CHUNK, CHUNK, P)
        dy = _wide_rows(y_rows, at, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, False)
        kt = token_rows(k_rows, at, True, False, HALO, KEYS, CHUNK, P)
        scores = tl.dot(kt, qt, input_precision=PRECISION)
        scores *= first + second * scores
        scores *= _parts(shares_own, scales, at, size, CHUNK, CHUNK, True)
        found = tl.dot(scores.to(dtype), dy, input_precision=PRECISION)
        _store_wide(mixed, found, to, v0, HALO, KEYS, CHUNK, VALUES, V)
        if HALO > 0:
            kt = token_rows(k_rows, at, True, False, 0, KEYS, HALO, P)
            scores = tl.dot(kt, qt, input_precision=PRECISION)
            scores *= first + second * scores
            scores *= _parts(shares_older, scales, at, size, CHUNK, HALO, True)
            found = tl.dot(scores.to(dtype), dy, input_precision=PRECISION)
            _store_wide(mixed, found, to, v0, 0, KEYS, HALO, VALUES, V)


@triton.jit
def _whole_step_back(
    memory, kept, s, weight, rate, q_columns, k_rows, k_columns, at, later, more, ahead,
    W_q, W, W_older, found, found_older,
    SQUARES: tl.constexpr, DOT: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A step whose features are one tile: what the chunk behind sends, then what keys find."""
    KEYS: tl.constexpr = HALO + CHUNK
    dtype: tl.constexpr = k_rows.dtype.element_ty
    cells = cells_of(s, P, V)
    tile = rate * tl.load(memory + cells)
    x = features_across(q_columns, later, ahead, SQUARES, 0, CHUNK, CHUNK, P)
    sent = tl.dot(x, W_q.to(dtype), input_precision=PRECISION)
    if not DOT:
        x = features_across(k_columns, later, ahead, SQUARES, HALO, KEYS, CHUNK, P)
        sent = tl.dot(x, W.to(dtype), sent, input_precision=PRECISION)
        if HALO > 0:
            x = features_across(k_columns, later, ahead, SQUARES, 0, KEYS, HALO, P)
            sent = tl.dot(x, W_older.to(dtype), sent, input_precision=PRECISION)
    tile += weight[:, None] * sent
    tl.store(memory + cells, tile)
    tl.store(kept + cells, tile.to(dtype), mask=(cells >= 0) & more)
    low = (weight[:, None] * tile).to(dtype)
    x = features_of(k_rows, at, more, SQUARES, HALO, KEYS, CHUNK, P)
    found = tl.dot(x, low, found, input_precision=PRECISION)
    if HALO > 0:
        x = features_of(k_rows, at, more, SQUARES, 0, KEYS, HALO, P)
        found_older = tl.dot(x, low, found_older, input_precision=PRECISION)
    return found, found_older


@triton.jit(do_not_specialize=WALK_BACK_RUNTIME)
def omega_walk_back_symmetric(
    q_columns, k_rows, k_columns, y_rows, cu, writes, ends, a, rates, scales, mixed, d_packed,
    d_kept, along, d_errors,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, stride_ah: tl.int64, stride_ar: tl.int64, every: tl.int32, span: tl.int32,
    DOT: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, DEFAULTS: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    VALUES_P: tl.constexpr, P: tl.constexpr, V: tl.constexpr, STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of the gradient of the memory of one head of one sequence, through a span of it.

    d_packed (N, H, blocks of V columns, STEPS, P, V), fp32: dM behind the span, and when done in
    front of it. d_kept (N · every, H, …), k's dtype: dM at the end of each chunk. along, d_errors
    (N · every, H, HALO + CHUNK, VALUES), fp32: L and dR.
    """
    H: tl.constexpr = P // 2
    KEYS: tl.constexpr = HALO + CHUNK
    BLOCK: tl.constexpr = STEPS * P * V
    dtype: tl.constexpr = k_rows.dtype.element_ty
    v0, head, sequence, _, begin, end, slot0, count = place_walk(
        cu, tokens, heads, chunk, chunks, VALUES, V, PACKED
    )
    blocks: tl.constexpr = (VALUES + V - 1) // V
    a_place = heads.to(tl.int64) * (blocks * BLOCK)
    mine = (head.to(tl.int64) * blocks + v0 // V) * BLOCK
    memory = d_packed + sequence * a_place + mine
    lowest = span * every
    highest = tl.minimum(lowest + every, count)
    turns = tl.where(highest > lowest, highest - lowest + 1, 0)
    c = tl.arange(0, P)
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, HALO) if HALO > 0 else t
    rate = tl.full([], 1.0, tl.float32)
    W_q = tl.zeros([CHUNK, V], tl.float32)
    W = W_q
    W_older = tl.zeros([HALO, V], tl.float32) if HALO > 0 else W
    for turn in tl.range(0, turns, num_stages=1):
        number = highest - 1 - turn
        more = number >= lowest  # else there is but what the first one sends
        ahead = turn > 0
        at = (slot0 + number).to(tl.int64) * heads + head
        later = at + heads
        place = (sequence * every + number - lowest).to(tl.int64) * heads + head
        to = d_kept + (sequence * every + number - lowest) * a_place + mine
        found = tl.zeros([CHUNK, V], tl.float32)
        found_older = tl.zeros([HALO, V], tl.float32) if HALO > 0 else found
        if PAIRS:
            for s in tl.range(0, H, num_stages=1):
                cells = cells_of(s, P, V)
                tile = rate * tl.load(memory + cells)
                from_s = tl.zeros([P, V], tl.float32)
                from_s, before_s = written_by(
                    q_columns, later, s, ahead, W_q, from_s, from_s, 0, CHUNK, CHUNK, P, PRECISION
                )
                if not DOT:
                    from_s, before_s = written_by(
                        k_columns, later, s, ahead, W, from_s, before_s, HALO, KEYS, CHUNK, P,
                        PRECISION,
                    )  # fmt: skip
                    if HALO > 0:
                        from_s, before_s = written_by(
                            k_columns, later, s, ahead, W_older, from_s, before_s, 0, KEYS, HALO, P,
                            PRECISION,
                        )  # fmt: skip
                keep = (c >= s)[:, None]
                weight = step_weight(
                    a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS
                )
                tile += weight[:, None] * tl.where(keep, from_s, before_s)
                tl.store(memory + cells, tile)
                tl.store(to + cells, tile.to(dtype), mask=(cells >= 0) & more)
                tile *= weight[:, None]
                from_s = tl.where(keep, tile, 0.0).to(dtype)
                before_s = tl.where(keep, 0.0, tile).to(dtype)
                found += looked_at(
                    k_rows, k_columns, at, s, more, from_s, before_s, from_s, before_s, False,
                    HALO, KEYS, CHUNK, P, PRECISION,
                )  # fmt: skip
                if HALO > 0:
                    found_older += looked_at(
                        k_rows, k_columns, at, s, more, from_s, before_s, from_s, before_s, False,
                        0, KEYS, HALO, P, PRECISION,
                    )  # fmt: skip
            weight = step_weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            found, found_older = _whole_step_back(
                memory, to, H, weight, rate, q_columns, k_rows, k_columns, at, later, more, ahead,
                W_q, W, W_older, found, found_older, True, DOT, CHUNK, HALO, P, V, PRECISION,
            )  # fmt: skip
        weight = step_weight(a, H + 1, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
        found, found_older = _whole_step_back(
            memory, to, STEPS - 1, weight, rate, q_columns, k_rows, k_columns, at, later, more,
            ahead, W_q, W, W_older, found, found_older, False, DOT, CHUNK, HALO, P, V, PRECISION,
        )  # fmt: skip
        there = tl.where(more, tl.minimum(chunk, end - (begin + number * chunk)), 0)
        some = tl.where(more, CHUNK, 0)
        scale = tl.load(scales + at * CHUNK + t, mask=t < there, other=0.0)
        scale *= tl.load(rates + at * CHUNK + t, mask=t < there, other=0.0)
        dy = _wide_rows(y_rows, at, v0, there, 0, CHUNK, CHUNK, VALUES_P, V, False)
        W_q = scale[:, None] * dy.to(tl.float32)
        write = tl.load(writes + at * KEYS + HALO + t, mask=t < some, other=0.0)
        W = _wide_rows(mixed, place, v0, some, HALO, KEYS, CHUNK, VALUES, V, False)
        W = -W - write[:, None] * found
        if more:
            _store_wide(along, found, place, v0, HALO, KEYS, CHUNK, VALUES, V)
            _store_wide(d_errors, W, place, v0, HALO, KEYS, CHUNK, VALUES, V)
        if HALO > 0:
            write = tl.load(writes + at * KEYS + i, mask=i < some, other=0.0)
            W_older = _wide_rows(mixed, place, v0, some, 0, KEYS, HALO, VALUES, V, False)
            W_older = -W_older - write[:, None] * found_older
            if more:
                _store_wide(along, found_older, place, v0, 0, KEYS, HALO, VALUES, V)
                _store_wide(d_errors, W_older, place, v0, 0, KEYS, HALO, VALUES, V)
        rate = tl.load(ends + at * 3, mask=more, other=1.0)
        tl.debug_barrier()  # other threads' tiles are loaded in the next turn


@triton.jit
def _between(
    q_rows, q_columns, k_rows, k_columns, y_rows, errors, table, scales, d_table, at, to, size,
    first, second, dq,
    FROM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr,
    VALUES: tl.constexpr, VALUES_P: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What queries and ROWS keys of a chunk give each other: dQ with it, dK; the gradients of P
    are stored, those of the coefficients returned.
    """
    KEYS: tl.constexpr = HALO + CHUNK
    dtype: tl.constexpr = k_rows.dtype.element_ty
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, ROWS)
    upstream = tl.zeros([CHUNK, ROWS], tl.float32)
    for v0 in tl.range(0, VALUES, V, num_stages=1):
        dy = _wide_rows(y_rows, at, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, False)
        R = _wide_rows(errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, True)
        upstream = tl.dot(dy, R, upstream, input_precision=PRECISION)
    qt = token_rows(q_rows, at, True, False, 0, CHUNK, CHUNK, P)
    kt = token_columns(k_columns, at, True, False, FROM, KEYS, ROWS, P)
    x = tl.dot(qt, kt, input_precision=PRECISION)
    out = d_table + at * (CHUNK * ROWS) + t[:, None] * ROWS + i[None, :]
    tl.store(out, -upstream * x * (first + second * x))
    upstream *= -_parts(table, scales, at, size, CHUNK, ROWS, False)
    of_first = tl.sum(tl.sum(upstream * x, 1), 0)
    of_second = tl.sum(tl.sum(upstream * x * x, 1), 0)
    d_scores = (upstream * (first + 2.0 * second * x)).to(dtype)
    kt = token_rows(k_rows, at, True, False, FROM, KEYS, ROWS, P)
    dq = tl.dot(d_scores, kt, dq, input_precision=PRECISION)

    upstream = tl.zeros([ROWS, CHUNK], tl.float32)
    for v0 in tl.range(0, VALUES, V, num_stages=1):
        dy = _wide_rows(y_rows, at, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, True)
        R = _wide_rows(errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False)
        upstream = tl.dot(R, dy, upstream, input_precision=PRECISION)
    qt = token_columns(q_columns, at, True, False, 0, CHUNK, CHUNK, P)
    x = tl.dot(kt, qt, input_precision=PRECISION)
    upstream *= -_parts(table, scales, at, size, CHUNK, ROWS, True)
    d_scores = (upstream * (first + 2.0 * second * x)).to(dtype)
    qt = token_rows(q_rows, at, True, False, 0, CHUNK, CHUNK, P)
    dk = tl.dot(d_scores, qt, input_precision=PRECISION)
    return dq, dk, of_first, of_second


@triton.jit
def _of_errors(
    errors, along, d_errors, left_m, left_d, in_state, d_v, edge_v, at, to, write, rows, own,
    at_edge, shared, head, heads, place,
    FROM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr,
    VALUES: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Of ROWS keys: ⟨R, L⟩, gradients of values, and what meets M and dM in `omega_features_back`.
    """
    KEYS: tl.constexpr = HALO + CHUNK
    i = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for v0 in tl.range(0, VALUES, V, num_stages=1):
        R = _wide_rows(errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False).to(tl.float32)
        L = _wide_rows(along, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False)
        dR = _wide_rows(d_errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False)
        total += tl.sum(R * L, 1)
        _store_wide(left_m, dR, to, v0, FROM, KEYS, ROWS, VALUES, V)
        _store_wide(left_d, -write[:, None] * R, to, v0, FROM, KEYS, ROWS, VALUES, V)
        _store_keys(
            d_v, edge_v, -dR, head, heads, rows, own, at_edge, shared, v0, FROM == 0 and HALO > 0,
            HALO, VALUES, V,
        )  # fmt: skip
    tl.store(in_state + at * ROWS + i, total)


@triton.jit(do_not_specialize=PAIRS_RUNTIME)
def omega_pairs_back(
    q_rows, q_columns, k_rows, k_columns, y_rows, cu, writes, a, rates, scales, shares_own,
    shares_older, looked, errors, along, d_errors, left_q, left_m, left_d, d_q_rows, d_k_rows,
    d_shares, d_shares_older, d_rates, in_state, in_state_older, of_weights, d_v, edge_v, older_v,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, stride_ah: tl.int64, stride_ar: tl.int64, every: tl.int32, span: tl.int32,
    PACKED: tl.constexpr, PAIRS: tl.constexpr, DEFAULTS: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, VALUES: tl.constexpr, VALUES_P: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and head of a span. d_q_rows, d_k_rows (N · every, H, CHUNK or HALO + CHUNK, P),
    fp32: gradients of tokens by other tokens. left_q, left_m, left_d (N · every, H, …, VALUES), k's
    dtype: A ∘ dY, dR, −w ∘ R. of_weights (slots, H, 2): the gradients of a_1 and a_2 by tokens. The
    rest is what `omega_gates_back` takes, and dV.
    """
    KEYS: tl.constexpr = HALO + CHUNK
    head = tl.program_id(0) % heads
    place = tl.program_id(0) // heads
    _, batch, slot, at_first, size, end = place_span(
        place, cu, tokens, chunk, chunks, every, span, PACKED
    )
    if size > 0:
        at = slot.to(tl.int64) * heads + head
        to = place.to(tl.int64) * heads + head
        t = tl.arange(0, CHUNK)
        there = t < size
        first = coefficient(a, 1, head, stride_ah, stride_ar, DEFAULTS)
        second = 0.0
        if PAIRS:
            second = coefficient(a, 2, head, stride_ah, stride_ar, DEFAULTS)
        dq = tl.zeros([CHUNK, P], tl.float32)
        dq, dk, of_first, of_second = _between(
            q_rows, q_columns, k_rows, k_columns, y_rows, errors, shares_own, scales, d_shares, at,
            to, size, first, second, dq, HALO, CHUNK, CHUNK, HALO, VALUES, VALUES_P, P, V,
            PRECISION,
        )  # fmt: skip
        _store_wide(d_k_rows, dk, to, 0, HALO, KEYS, CHUNK, P, P)
        if HALO > 0:
            dq, dk, of_first_older, of_second_older = _between(
                q_rows, q_columns, k_rows, k_columns, y_rows, errors, shares_older, scales,
                d_shares_older, at, to, size, first, second, dq, 0, HALO, CHUNK, HALO, VALUES,
                VALUES_P, P, V, PRECISION,
            )  # fmt: skip
            _store_wide(d_k_rows, dk, to, 0, 0, KEYS, HALO, P, P)
            of_first += of_first_older
            of_second += of_second_older
        _store_wide(d_q_rows, dq, to, 0, 0, CHUNK, CHUNK, P, P)
        tl.store(of_weights + at * 2, of_first)
        tl.store(of_weights + at * 2 + 1, of_second)

        rate = tl.load(scales + at * CHUNK + t, mask=there, other=0.0)
        rate *= tl.load(rates + at * CHUNK + t, mask=there, other=0.0)
        of_rate = tl.zeros([CHUNK], tl.float32)
        for v0 in tl.range(0, VALUES, V, num_stages=1):
            dy = _wide_rows(y_rows, at, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, False)
            dy = dy.to(tl.float32)
            found = _wide_rows(looked, to, v0, size, 0, CHUNK, CHUNK, VALUES, V, False)
            of_rate += tl.sum(dy * found, 1)
            _store_wide(left_q, rate[:, None] * dy, to, v0, 0, CHUNK, CHUNK, VALUES, V)
        tl.store(d_rates + at * CHUNK + t, of_rate)
        shared, own, at_edge = _edges_of(t, at, size, window, at_first, end, HALO)
        write = tl.load(writes + at * KEYS + HALO + t)
        _of_errors(
            errors, along, d_errors, left_m, left_d, in_state, d_v, edge_v, at, to, write,
            batch * tokens + at_first + t, own, at_edge, shared, head, heads, place, HALO, CHUNK,
            CHUNK, HALO, VALUES, V,
        )  # fmt: skip
        if HALO > 0:
            i = tl.arange(0, HALO)
            write = tl.load(writes + at * KEYS + i)
            known = i - HALO >= 1 - window
            _of_errors(
                errors, along, d_errors, left_m, left_d, in_state_older, d_v, older_v, at, to,
                write, i, known, at * HALO + i, known, head, heads, place, 0, HALO, CHUNK, HALO,
                VALUES, V,
            )  # fmt: skip


@triton.jit
def _edges_of(t, at, size, window, first, end, HALO: tl.constexpr):
    """Of a chunk's tokens: which the next chunk sees, too, which it does not; places at the edge."""
    there = t < size
    shared = there & (t >= size - (window - 1)) & (first + size < end)
    return shared, there & (shared == 0), at * HALO + HALO - size + t


@triton.jit
def _through_memory(
    left, memory, slopes, s, to, mine, v0,
    FIRST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """slopes [ROWS, P] and left Mᵀ, of COLS columns and one step of a memory in blocks of V."""
    e = v0 + tl.arange(0, COLS)
    c = tl.arange(0, P)
    cells = (e // V * BLOCK + e % V)[:, None] + (c * V)[None, :]
    there = (e < VALUES)[:, None] & (c >= 0)[None, :]
    tile = tl.load(memory + mine + s * (P * V) + cells, mask=there, other=0.0)
    rows = _wide_rows(left, to, v0, ROWS, FIRST, KEYS, ROWS, VALUES, COLS, False)
    return tl.dot(rows, tile.to(rows.dtype), slopes, input_precision=PRECISION)


@triton.jit
def _slopes(
    left, left_d, kept, d_kept, s, to, mine,
    KIND: tl.constexpr, DOT: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, VALUES: tl.constexpr, P: tl.constexpr, V: tl.constexpr, COLS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[ROWS, P]: gradients of the features of a step, but for their weights."""
    slopes = tl.zeros([ROWS, P], tl.float32)
    for v0 in tl.range(0, VALUES, COLS, num_stages=1):
        if KIND == QUERIES or not DOT:
            slopes = _through_memory(
                left, kept, slopes, s, to, mine, v0, FIRST, KEYS, ROWS, VALUES, P, V, COLS, BLOCK,
                PRECISION,
            )  # fmt: skip
        if KIND != QUERIES:
            slopes = _through_memory(
                left_d, d_kept, slopes, s, to, mine, v0, FIRST, KEYS, ROWS, VALUES, P, V, COLS,
                BLOCK, PRECISION,
            )  # fmt: skip
    return slopes


@triton.jit(do_not_specialize=FEATURES_RUNTIME)
def omega_features_back(
    x_rows, x_columns, cu, a, left, left_d, kept, d_kept, d_rows, room, of_degrees, d_x, edge,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, stride_ah: tl.int64, stride_ar: tl.int64, every: tl.int32, span: tl.int32,
    KIND: tl.constexpr, DOT: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr,
    DEFAULTS: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, P: tl.constexpr, V: tl.constexpr, COLS: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, own keys or older keys (KIND) of one chunk and head of a span.

    x_rows, x_columns: the tokens. left: A ∘ dY, or dR; left_d: −w ∘ R. kept, d_kept: M and dM of
    the span. d_rows: what other tokens give. room, as d_rows: for numbers on their way to other
    threads. of_degrees (slots, H, 2): ⟨φ, dφ⟩ of the numbers and of the pairs. d_x as x, contiguous;
    edge (slots, H, HALO, WIDTH), fp32: of keys that two chunks see.
    """
    H: tl.constexpr = P // 2
    ROWS: tl.constexpr = HALO if KIND == OLDER else CHUNK
    FIRST: tl.constexpr = HALO if KIND == OWN else 0
    KEYS: tl.constexpr = CHUNK if KIND == QUERIES else HALO + CHUNK
    BLOCK: tl.constexpr = STEPS * P * V
    blocks: tl.constexpr = (VALUES + V - 1) // V
    head = tl.program_id(0) % heads
    place = tl.program_id(0) // heads
    _, batch, slot, at_first, size, end = place_span(
        place, cu, tokens, chunk, chunks, every, span, PACKED
    )
    if size > 0:
        at = slot.to(tl.int64) * heads + head
        to = place.to(tl.int64) * heads + head
        mine = to * (blocks * BLOCK)
        c = tl.arange(0, P)
        i = tl.arange(0, ROWS)
        dx = tl.zeros([ROWS, P], tl.float32)
        of_pairs = 0.0
        if PAIRS:
            d_upper = tl.zeros([ROWS, P], tl.float32)  # of column H + c
            for s in tl.range(0, H, num_stages=1):
                slopes = _slopes(
                    left, left_d, kept, d_kept, s, to, mine, KIND, DOT, FIRST, KEYS, ROWS, VALUES,
                    P, V, COLS, BLOCK, PRECISION,
                )  # fmt: skip
                weight = step_weight(
                    a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS
                )
                slopes *= weight[None, :]
                low = token_column(x_columns, at, s, True, FIRST, KEYS, ROWS, P)
                high = token_column(x_columns, at, H + s, True, FIRST, KEYS, ROWS, P)
                keep = (c >= s)[None, :]
                kept_slopes = tl.where(keep, slopes, 0.0)
                x = token_rows(x_rows, at, True, False, FIRST, KEYS, ROWS, P).to(tl.float32)
                of_low = tl.sum(kept_slopes * x, 1)
                dx += kept_slopes * low[:, None] + tl.where((c == s)[None, :], of_low[:, None], 0.0)
                kept_slopes = tl.where(keep, 0.0, slopes)
                x = token_rows(x_rows, at, True, True, FIRST, KEYS, ROWS, P).to(tl.float32)
                of_high = tl.sum(kept_slopes * x, 1)
                dx += tl.where((c == H + s)[None, :], of_high[:, None], 0.0)
                d_upper += kept_slopes * high[:, None]
            slopes = _slopes(
                left, left_d, kept, d_kept, H, to, mine, KIND, DOT, FIRST, KEYS, ROWS, VALUES, P, V,
                COLS, BLOCK, PRECISION,
            )  # fmt: skip
            weight = step_weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            x = token_rows(x_rows, at, True, False, FIRST, KEYS, ROWS, P).to(tl.float32)
            dx += 2.0 * slopes * weight[None, :] * x
            room_rows = room + to * (KEYS * P) + FIRST * P
            tl.store(room_rows + i[:, None] * P + c[None, :], d_upper)
            tl.debug_barrier()  # other threads' numbers are loaded
            shifted = i[:, None] * P + c[None, :] - H
            dx += tl.load(room_rows + shifted, mask=(i >= 0)[:, None] & (c >= H)[None, :], other=0.0)
            of_pairs = 0.5 * tl.sum(tl.sum(dx * x, 1), 0)
        slopes = _slopes(
            left, left_d, kept, d_kept, STEPS - 1, to, mine, KIND, DOT, FIRST, KEYS, ROWS, VALUES,
            P, V, COLS, BLOCK, PRECISION,
        )  # fmt: skip
        weight = step_weight(a, H + 1, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
        slopes *= weight[None, :]
        x = token_rows(x_rows, at, True, False, FIRST, KEYS, ROWS, P).to(tl.float32)
        tl.store(of_degrees + at * 2, tl.sum(tl.sum(slopes * x, 1), 0))
        tl.store(of_degrees + at * 2 + 1, of_pairs)
        dx += slopes + _wide_rows(d_rows, to, 0, ROWS, FIRST, KEYS, ROWS, P, P, False)
        rows = batch * tokens + at_first + i
        if KIND == QUERIES:
            out = (rows.to(tl.int64) * heads + head)[:, None] * WIDTH + c[None, :]
            tl.store(
                d_x + out, dx.to(d_x.dtype.element_ty),
                mask=(i < size)[:, None] & (c < WIDTH)[None, :],
            )  # fmt: skip
        else:
            shared, own, at_edge = _edges_of(i, at, size, window, at_first, end, HALO)
            if KIND == OLDER:
                shared = i - HALO >= 1 - window
                at_edge = at * HALO + i
            _store_keys(
                d_x, edge, dx, head, heads, rows, own, at_edge, shared, 0, KIND == OLDER, HALO,
                WIDTH, P,
            )  # fmt: skip


@triton.jit(do_not_specialize=INNER_RUNTIME)
def omega_inner(
    kept, d_kept, cu, of_states,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, every: tl.int32, span: tl.int32,
    PACKED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """of_states (slots, H): ⟨M, dM⟩ of a chunk of a span, of memories of SIZE cells."""
    head = tl.program_id(0) % heads
    place = tl.program_id(0) // heads
    _, _, slot, _, size, _ = place_span(place, cu, tokens, chunk, chunks, every, span, PACKED)
    if size > 0:
        mine = (place.to(tl.int64) * heads + head) * SIZE
        cells = tl.arange(0, TILE)
        total = tl.zeros([TILE], tl.float32)
        for low in tl.range(0, SIZE, TILE, num_stages=1):
            there = low + cells < SIZE
            M = tl.load(kept + mine + low + cells, mask=there, other=0.0)
            dM = tl.load(d_kept + mine + low + cells, mask=there, other=0.0)
            total += M * dM.to(tl.float32)
        tl.store(of_states + slot.to(tl.int64) * heads + head, tl.sum(total, 0))
