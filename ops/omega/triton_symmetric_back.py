"""Backward of the Omega rule on symmetric features up to degree 2, which are never formed.

    omega_tables_symmetric      once for every token: P and A, as its read sees them
    omega_pull_symmetric        every chunk by itself: what its reads ask of its errors
    omega_walk_back_symmetric   along a span, backwards: the gradient of the memory tile after tile,
                                what a chunk's keys find there, and the gradients of its errors

What chunks then do by themselves is in `triton_symmetric_gradients`.

Spans go from the last to the first. Of one the memory at each chunk's begin is there, and comes its
gradient at each chunk's end, so that of one span alone, not of all chunks, memories are kept.
Operands are laid out as those of
`triton_symmetric`, of one span. Of a chunk, with dM at its end,

    L = φ(K) dM                     dR = −(P ∘ κ(Q Kᵀ))ᵀ dY − w ∘ L
    dφ(Q) = A ∘ dY Mᵀ               dφ(K) = dR Mᵀ − (w ∘ R) dMᵀ
    dM ← A_b dM + φ(Q)ᵀ (A ∘ dY) + φ(K)ᵀ dR

and what tokens give each other by κ(x) = a_1 x + a_2 x² costs the width of keys alone.
"""

import triton
import triton.language as tl

from ..polynomial.triton_rows import coefficient
from .triton_chunks import SIZES, load_rate, place_chunk, place_walk, shares
from .triton_symmetric import (
    cells_of,
    features_across,
    features_of,
    looked_at,
    place_span,
    step_weight,
    token_columns,
    token_rows,
    written_by,
)
from .triton_tables import _scale

WEIGHTS = ("stride_ah", "stride_ar")
TABLES_RUNTIME = SIZES
PULL_RUNTIME = (*SIZES, *WEIGHTS, "every", "span")
WALK_BACK_RUNTIME = PULL_RUNTIME


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
def table_part(
    table, scales, at, size, CHUNK: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """P [queries, keys], or transposed, of a table of KEYS keys; 0 behind the last query."""
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, KEYS)
    there = t < size
    scale = tl.load(scales + at * CHUNK + t, mask=there, other=0.0)
    first = table + at * (CHUNK * KEYS)
    if KEYS_FIRST:
        mask = there[None, :] & (i >= 0)[:, None]
        part = tl.load(first + (t[None, :] * KEYS + i[:, None]), mask=mask, other=0.0)
        part = part.to(tl.float32) * scale[None, :]
    else:
        mask = there[:, None] & (i >= 0)[None, :]
        part = tl.load(first + (t[:, None] * KEYS + i[None, :]), mask=mask, other=0.0)
        part = part.to(tl.float32) * scale[:, None]
    return part


@triton.jit
def wide_rows(
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
def store_wide(
    x, tile, at, v0, FIRST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    VALUES: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """All of `wide_rows`' rows."""
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
    _, _, slot, _, size, _, _ = place_span(place, cu, tokens, chunk, chunks, every, span, PACKED)
    if size > 0:
        at = slot.to(tl.int64) * heads + head
        to = place.to(tl.int64) * heads + head
        first = coefficient(a, 1, head, stride_ah, stride_ar, DEFAULTS)
        second = 0.0
        if PAIRS:
            second = coefficient(a, 2, head, stride_ah, stride_ar, DEFAULTS)
        dtype: tl.constexpr = k_rows.dtype.element_ty
        qt = token_columns(q_columns, to, True, False, 0, CHUNK, CHUNK, P)
        dy = wide_rows(y_rows, to, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, False)
        kt = token_rows(k_rows, to, True, False, HALO, KEYS, CHUNK, P)
        scores = tl.dot(kt, qt, input_precision=PRECISION)
        scores *= first + second * scores
        scores *= table_part(shares_own, scales, at, size, CHUNK, CHUNK, True)
        found = tl.dot(scores.to(dtype), dy, input_precision=PRECISION)
        store_wide(mixed, found, to, v0, HALO, KEYS, CHUNK, VALUES, V)
        if HALO > 0:
            kt = token_rows(k_rows, to, True, False, 0, KEYS, HALO, P)
            scores = tl.dot(kt, qt, input_precision=PRECISION)
            scores *= first + second * scores
            scores *= table_part(shares_older, scales, at, size, CHUNK, HALO, True)
            found = tl.dot(scores.to(dtype), dy, input_precision=PRECISION)
            store_wide(mixed, found, to, v0, 0, KEYS, HALO, VALUES, V)


@triton.jit
def _whole_step_back(
    memory, kept, s, weight, rate, q_columns, k_rows, k_columns, place, later, more, ahead,
    W_q, W, W_older, found, found_older,
    SQUARES: tl.constexpr, DOT: tl.constexpr, LOW: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, P: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
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
    tile *= weight[:, None]
    low = tile.to(dtype)
    lost = low
    if LOW:
        lost = (tile - low.to(tl.float32)).to(dtype)
    x = features_of(k_rows, place, more, SQUARES, HALO, KEYS, CHUNK, P)
    found = tl.dot(x, low, found, input_precision=PRECISION)
    if LOW:
        found = tl.dot(x, lost, found, input_precision=PRECISION)
    if HALO > 0:
        x = features_of(k_rows, place, more, SQUARES, 0, KEYS, HALO, P)
        found_older = tl.dot(x, low, found_older, input_precision=PRECISION)
        if LOW:
            found_older = tl.dot(x, lost, found_older, input_precision=PRECISION)
    return found, found_older


@triton.jit(do_not_specialize=WALK_BACK_RUNTIME)
def omega_walk_back_symmetric(
    q_columns, k_rows, k_columns, y_rows, cu, writes, ends, a, rates, scales, mixed, d_packed,
    d_kept, along, d_errors,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, stride_ah: tl.int64, stride_ar: tl.int64, every: tl.int32, span: tl.int32,
    DOT: tl.constexpr, LOW: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr,
    DEFAULTS: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, VALUES_P: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of the gradient of the memory of one head of one sequence, through a span of it.

    d_packed (N, H, blocks of V columns, STEPS, P, V), fp32: dM behind the span, and when done in
    front of it. d_kept (N · every, H, …), k's dtype: dM at the end of each chunk. along, d_errors
    (N · every, H, HALO + CHUNK, VALUES), fp32: L and dR. LOW: L from dM in two parts of k's dtype.
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
        place = (sequence * every + number - lowest).to(tl.int64) * heads + head
        later = place + heads
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
                weight = step_weight(a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
                tile += weight[:, None] * tl.where(keep, from_s, before_s)
                tl.store(memory + cells, tile)
                tl.store(to + cells, tile.to(dtype), mask=(cells >= 0) & more)
                tile *= weight[:, None]
                from_s = tl.where(keep, tile, 0.0).to(dtype)
                before_s = tl.where(keep, 0.0, tile).to(dtype)
                lost_from_s = from_s
                lost_before_s = before_s
                if LOW:
                    tile -= from_s.to(tl.float32) + before_s.to(tl.float32)
                    lost_from_s = tl.where(keep, tile, 0.0).to(dtype)
                    lost_before_s = tl.where(keep, 0.0, tile).to(dtype)
                found += looked_at(
                    k_rows, k_columns, place, s, more, from_s, before_s, lost_from_s,
                    lost_before_s, LOW, HALO, KEYS, CHUNK, P, PRECISION,
                )  # fmt: skip
                if HALO > 0:
                    found_older += looked_at(
                        k_rows, k_columns, place, s, more, from_s, before_s, lost_from_s,
                        lost_before_s, LOW, 0, KEYS, HALO, P, PRECISION,
                    )  # fmt: skip
            weight = step_weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            found, found_older = _whole_step_back(
                memory, to, H, weight, rate, q_columns, k_rows, k_columns, place, later, more,
                ahead, W_q, W, W_older, found, found_older, True, DOT, LOW, CHUNK, HALO, P, V,
                PRECISION,
            )  # fmt: skip
        weight = step_weight(a, H + 1, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
        found, found_older = _whole_step_back(
            memory, to, STEPS - 1, weight, rate, q_columns, k_rows, k_columns, place, later, more,
            ahead, W_q, W, W_older, found, found_older, False, DOT, LOW, CHUNK, HALO, P, V,
            PRECISION,
        )  # fmt: skip
        there = tl.where(more, tl.minimum(chunk, end - (begin + number * chunk)), 0)
        some = tl.where(more, CHUNK, 0)
        scale = tl.load(scales + at * CHUNK + t, mask=t < there, other=0.0)
        scale *= tl.load(rates + at * CHUNK + t, mask=t < there, other=0.0)
        dy = wide_rows(y_rows, place, v0, there, 0, CHUNK, CHUNK, VALUES_P, V, False)
        W_q = scale[:, None] * dy.to(tl.float32)
        write = tl.load(writes + at * KEYS + HALO + t, mask=t < some, other=0.0)
        W = wide_rows(mixed, place, v0, some, HALO, KEYS, CHUNK, VALUES, V, False)
        W = -W - write[:, None] * found
        if more:
            store_wide(along, found, place, v0, HALO, KEYS, CHUNK, VALUES, V)
            store_wide(d_errors, W, place, v0, HALO, KEYS, CHUNK, VALUES, V)
        if HALO > 0:
            write = tl.load(writes + at * KEYS + i, mask=i < some, other=0.0)
            W_older = wide_rows(mixed, place, v0, some, 0, KEYS, HALO, VALUES, V, False)
            W_older = -W_older - write[:, None] * found_older
            if more:
                store_wide(along, found_older, place, v0, 0, KEYS, HALO, VALUES, V)
                store_wide(d_errors, W_older, place, v0, 0, KEYS, HALO, VALUES, V)
        rate = tl.load(ends + at * 3, mask=more, other=1.0)
        tl.debug_barrier()  # other threads' tiles are loaded in the next turn
