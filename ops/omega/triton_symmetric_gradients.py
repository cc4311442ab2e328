"""Gradients on symmetric features that chunks form by themselves, of one span after the other.

    omega_pairs_back      between the tokens of a chunk, and of its gates
    omega_features_back   of queries, own keys or older keys through their features
    omega_inner           ⟨M, dM⟩

M at a chunk's begin, dM at its end and dR are those that the walks of the span left; notation is
that of `triton_symmetric_back`. Of the features of a step, x_s x_c from column s on and
x_{H+s} x_{H+c} before it, gradients of a column go to column c of the tokens, and by their sums to
column s; of the upper ones to columns H + c and H + s.
"""

import triton
import triton.language as tl

from ..polynomial.triton_rows import coefficient
from .triton_bwd import _store_keys
from .triton_chunks import SIZES
from .triton_symmetric import place_span, step_weight, token_column, token_columns, token_rows
from .triton_symmetric_back import PULL_RUNTIME, store_wide, table_part, wide_rows

PAIRS_RUNTIME = PULL_RUNTIME
FEATURES_RUNTIME = PULL_RUNTIME
INNER_RUNTIME = (*SIZES, "every", "span")
QUERIES, OWN, OLDER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
    for v0 in tl.static_range(0, VALUES, V):
        dy = wide_rows(y_rows, to, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, False)
        R = wide_rows(errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, True)
        upstream = tl.dot(dy, R.to(dtype), upstream, input_precision=PRECISION)
    qt = token_rows(q_rows, to, True, False, 0, CHUNK, CHUNK, P)
    kt = token_columns(k_columns, to, True, False, FROM, KEYS, ROWS, P)
    x = tl.dot(qt, kt, input_precision=PRECISION)
    out = d_table + at * (CHUNK * ROWS) + t[:, None] * ROWS + i[None, :]
    tl.store(out, -upstream * x * (first + second * x))
    upstream *= -table_part(table, scales, at, size, CHUNK, ROWS, False)
    of_first = tl.sum(tl.sum(upstream * x, 1), 0)
    of_second = tl.sum(tl.sum(upstream * x * x, 1), 0)
    d_scores = (upstream * (first + 2.0 * second * x)).to(dtype)
    kt = token_rows(k_rows, to, True, False, FROM, KEYS, ROWS, P)
    dq = tl.dot(d_scores, kt, dq, input_precision=PRECISION)

    upstream = tl.zeros([ROWS, CHUNK], tl.float32)
    for v0 in tl.static_range(0, VALUES, V):
        dy = wide_rows(y_rows, to, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, True)
        R = wide_rows(errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False)
        upstream = tl.dot(R.to(dtype), dy, upstream, input_precision=PRECISION)
    qt = token_columns(q_columns, to, True, False, 0, CHUNK, CHUNK, P)
    x = tl.dot(kt, qt, input_precision=PRECISION)
    upstream *= -table_part(table, scales, at, size, CHUNK, ROWS, True)
    d_scores = (upstream * (first + 2.0 * second * x)).to(dtype)
    qt = token_rows(q_rows, to, True, False, 0, CHUNK, CHUNK, P)
    dk = tl.dot(d_scores, qt, input_precision=PRECISION)
    return dq, dk, of_first, of_second


@triton.jit
def _of_errors(
    errors, along, d_errors, left_m, left_d, in_state, d_v, edge_v, at, to, write, rows, own,
    at_edge, shared, head, heads, place,
    FROM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr,
    VALUES: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Of ROWS keys: ⟨R, L⟩, gradients of values, and what then meets M and dM."""
    KEYS: tl.constexpr = HALO + CHUNK
    i = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for v0 in tl.static_range(0, VALUES, V):
        R = wide_rows(errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False)
        L = wide_rows(along, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False)
        dR = wide_rows(d_errors, to, v0, ROWS, FROM, KEYS, ROWS, VALUES, V, False)
        total += tl.sum(R * L, 1)
        store_wide(left_m, dR, to, v0, FROM, KEYS, ROWS, VALUES, V)
        store_wide(left_d, -write[:, None] * R, to, v0, FROM, KEYS, ROWS, VALUES, V)
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
    _, batch, slot, at_first, size, _, end = place_span(
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
        store_wide(d_k_rows, dk, to, 0, HALO, KEYS, CHUNK, P, P)
        if HALO > 0:
            dq, dk, of_first_older, of_second_older = _between(
                q_rows, q_columns, k_rows, k_columns, y_rows, errors, shares_older, scales,
                d_shares_older, at, to, size, first, second, dq, 0, HALO, CHUNK, HALO, VALUES,
                VALUES_P, P, V, PRECISION,
            )  # fmt: skip
            store_wide(d_k_rows, dk, to, 0, 0, KEYS, HALO, P, P)
            of_first += of_first_older
            of_second += of_second_older
        store_wide(d_q_rows, dq, to, 0, 0, CHUNK, CHUNK, P, P)
        tl.store(of_weights + at * 2, of_first)
        tl.store(of_weights + at * 2 + 1, of_second)

        rate = tl.load(scales + at * CHUNK + t, mask=there, other=0.0)
        rate *= tl.load(rates + at * CHUNK + t, mask=there, other=0.0)
        of_rate = tl.zeros([CHUNK], tl.float32)
        for v0 in tl.static_range(0, VALUES, V):
            dy = wide_rows(y_rows, to, v0, size, 0, CHUNK, CHUNK, VALUES_P, V, False)
            dy = dy.to(tl.float32)
            found = wide_rows(looked, to, v0, size, 0, CHUNK, CHUNK, VALUES, V, False)
            of_rate += tl.sum(dy * found, 1)
            store_wide(left_q, rate[:, None] * dy, to, v0, 0, CHUNK, CHUNK, VALUES, V)
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
    """Of a chunk's tokens: which the next chunk sees, too, which not; and places at the edge."""
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
    rows = wide_rows(left, to, v0, ROWS, FIRST, KEYS, ROWS, VALUES, COLS, False)
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
    for v0 in tl.static_range(0, VALUES, COLS):
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
    threads. of_degrees (slots, H, 2): ⟨φ, dφ⟩ of the numbers and of the pairs. d_x as x,
    contiguous; edge (slots, H, HALO, WIDTH), fp32: of keys that two chunks see.
    """
    H: tl.constexpr = P // 2
    ROWS: tl.constexpr = HALO if KIND == OLDER else CHUNK
    FIRST: tl.constexpr = HALO if KIND == OWN else 0
    KEYS: tl.constexpr = CHUNK if KIND == QUERIES else HALO + CHUNK
    BLOCK: tl.constexpr = STEPS * P * V
    blocks: tl.constexpr = (VALUES + V - 1) // V
    head = tl.program_id(0) % heads
    place = tl.program_id(0) // heads
    _, batch, slot, at_first, size, _, end = place_span(
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
                weight = step_weight(a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
                slopes *= weight[None, :]
                low = token_column(x_columns, to, s, True, FIRST, KEYS, ROWS, P)
                high = token_column(x_columns, to, H + s, True, FIRST, KEYS, ROWS, P)
                keep = (c >= s)[None, :]
                kept_slopes = tl.where(keep, slopes, 0.0)
                x = token_rows(x_rows, to, True, False, FIRST, KEYS, ROWS, P).to(tl.float32)
                of_low = tl.sum(kept_slopes * x, 1)
                dx += kept_slopes * low[:, None] + tl.where((c == s)[None, :], of_low[:, None], 0.0)
                kept_slopes = tl.where(keep, 0.0, slopes)
                x = token_rows(x_rows, to, True, True, FIRST, KEYS, ROWS, P).to(tl.float32)
                of_high = tl.sum(kept_slopes * x, 1)
                dx += tl.where((c == H + s)[None, :], of_high[:, None], 0.0)
                d_upper += kept_slopes * high[:, None]
            slopes = _slopes(
                left, left_d, kept, d_kept, H, to, mine, KIND, DOT, FIRST, KEYS, ROWS, VALUES, P, V,
                COLS, BLOCK, PRECISION,
            )  # fmt: skip
            weight = step_weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            x = token_rows(x_rows, to, True, False, FIRST, KEYS, ROWS, P).to(tl.float32)
            dx += 2.0 * slopes * weight[None, :] * x
            room_rows = room + to * (KEYS * P) + FIRST * P
            tl.store(room_rows + i[:, None] * P + c[None, :], d_upper)
            tl.debug_barrier()  # other threads' numbers are loaded
            shifted = i[:, None] * P + c[None, :] - H
            dx += tl.load(
                room_rows + shifted, mask=(i >= 0)[:, None] & (c >= H)[None, :], other=0.0
            )
            of_pairs = 0.5 * tl.sum(tl.sum(dx * x, 1), 0)
        slopes = _slopes(
            left, left_d, kept, d_kept, STEPS - 1, to, mine, KIND, DOT, FIRST, KEYS, ROWS, VALUES,
            P, V, COLS, BLOCK, PRECISION,
        )  # fmt: skip
        weight = step_weight(a, H + 1, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
        slopes *= weight[None, :]
        x = token_rows(x_rows, to, True, False, FIRST, KEYS, ROWS, P).to(tl.float32)
        tl.store(of_degrees + at * 2, tl.sum(tl.sum(slopes * x, 1), 0))
        tl.store(of_degrees + at * 2 + 1, of_pairs)
        dx += slopes + wide_rows(d_rows, to, 0, ROWS, FIRST, KEYS, ROWS, P, P, False)
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
    _, _, slot, _, size, _, _ = place_span(place, cu, tokens, chunk, chunks, every, span, PACKED)
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
