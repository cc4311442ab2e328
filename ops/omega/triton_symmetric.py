"""Forward of the Omega rule on symmetric features up to degree 2, which are never in memory.

    repack                   a memory in rows of the features' order, or in tiles as the walk has it
    omega_walk_symmetric     along a sequence: the memory tile after tile, what its chunks' queries
                             find there, and the errors of their keys
    omega_reads_symmetric    every chunk by itself: what queries find, and what its tokens wrote

The memory of a head is too large for a multiprocessor and lies in the L2 cache, in the tiles of
`polynomial.triton_rows`: features of a tile, but for their weights, are products of a column of x
with the rest of it. A tile is loaded and stored once a chunk: what the chunk before wrote is added
on the way, just before this one's tokens look at it.
"""

import triton
import triton.language as tl

from ..polynomial.triton_rows import coefficient, root, row_of
from ..polynomial.triton_state import anchored, beside, halves, step_features
from .triton_chunks import (
    SIZES,
    load_older,
    load_rate,
    load_rows,
    place_chunk,
    place_walk,
    shares,
)

WALK_RUNTIME = (
    *SIZES, "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
    "stride_vb", "stride_vt", "stride_vh", "stride_ah", "stride_ar",
)  # fmt: skip
READS_RUNTIME = (
    *SIZES, "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
    "stride_ah", "stride_ar",
)  # fmt: skip


@triton.jit
def repack(
    packed, state,
    PACK: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    VALUES: tl.constexpr, STEPS: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One tile of (N · H, blocks of V columns, STEPS, P, V), from or to the rows of a state
    (N, H, WIDE, VALUES), both fp32. Without PAIRS the only step is that of the numbers.
    """
    H: tl.constexpr = P // 2
    blocks: tl.constexpr = (VALUES + V - 1) // V
    number = tl.program_id(0).to(tl.int64)
    step = (number % STEPS).to(tl.int32)
    if not PAIRS:
        step += H + 1
    head = number // (STEPS * blocks)
    c = tl.arange(0, P)
    v = tl.arange(0, V)
    cols = (number // STEPS % blocks).to(tl.int32) * V + v
    row, _, exists = row_of(step, c, 1.0, 1.0, WIDTH, H, 0, WIDTH)
    inside = exists[:, None] & (cols < VALUES)[None, :]
    tile = packed + number * (P * V) + c[:, None] * V + v[None, :]
    rows = state + head * (WIDE * VALUES) + row[:, None] * VALUES + cols[None, :]
    if PACK:
        tl.store(tile, tl.load(rows, mask=inside, other=0.0))
    else:
        tl.store(rows, tl.load(tile), mask=inside)


@triton.jit
def _upper_squares(high, T: tl.constexpr, H: tl.constexpr, dtype: tl.constexpr):
    """Features of the squares of the upper half."""
    return beside(tl.zeros_like(high), high * high, T, 2 * H).to(dtype)


@triton.jit
def _pairs_down(x, partner, low, high, s, dtype: tl.constexpr):
    """`step_features` transposed, [P, tokens]: of x and what stands beside its columns."""
    keep = (tl.arange(0, x.shape[0]) >= s)[:, None]
    factor = tl.where(keep, low[None, :], high[None, :])
    return (factor * tl.where(keep, x, partner)).to(dtype)


@triton.jit
def _column(columns, of_head, rows, there, s, tokens, WIDTH: tl.constexpr):
    """Column s of tokens `rows`, 0 past the last column. columns: (B, H, WIDTH, tokens)."""
    at = (of_head * WIDTH + s) * tokens + rows
    return tl.load(columns + at, mask=there & (s < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _older_columns(
    columns, tail, tail_length, sequence, head, heads, of_head, first, begin, older, s,
    H: tl.constexpr, tokens, WIDTH: tl.constexpr, HALO: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr,
):  # fmt: skip
    """Columns s and H + s of the tokens of `load_older`."""
    i = tl.arange(0, HALO) - HALO
    rows = first + i
    known = i >= -older
    there = (rows >= begin) & known
    low = _column(columns, of_head, rows, there, s, tokens, WIDTH)
    high = _column(columns, of_head, rows, there, s + H, tokens, WIDTH)
    if TAIL:
        length = older
        if LENGTHS:
            length = tl.minimum(tl.load(tail_length + sequence), older)
        before = rows - begin
        there = (before < 0) & (before >= -length) & known
        at = ((sequence.to(tl.int64) * older + older + before) * heads + head) * WIDTH + s
        low += tl.load(tail + at, mask=there & (s < WIDTH), other=0.0).to(tl.float32)
        high += tl.load(tail + at + H, mask=there & (s + H < WIDTH), other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _weight(
    a, step, c, head, stride_ah, stride_ar,
    PAIRS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, DEFAULTS: tl.constexpr,
):  # fmt: skip
    """Of the features of a step, 0 where there is none."""
    of_numbers = root(a, 1, head, stride_ah, stride_ar, DEFAULTS)
    of_pairs = of_numbers
    if PAIRS:
        of_pairs = root(a, 2, head, stride_ah, stride_ar, DEFAULTS)
    _, weight, exists = row_of(step, c, of_pairs, of_numbers, WIDTH, H, 0, 0)
    return tl.where(exists, weight, 0.0)


@triton.jit
def _tiles_down(x, upper, ANCHOR: tl.constexpr, H: tl.constexpr):
    """x [tokens, P] transposed, and what stands beside its columns: the other column of a pair in
    the halves, for the upper half itself. `upper`: x from column H on. ANCHOR: as `anchored`.
    """
    P: tl.constexpr = 2 * H
    c = tl.arange(0, P)
    partner = tl.trans(tl.where((c < H)[None, :], upper, x))
    x = tl.trans(x)
    if ANCHOR:
        unit = (c[:, None] == c[None, :]).to(x.dtype)
        x = tl.dot(unit, x)
        partner = tl.dot(unit, partner)
    return x.to(tl.float32), partner.to(tl.float32)


@triton.jit
def _cells(memory, s, P: tl.constexpr, V: tl.constexpr):
    return memory + s * (P * V) + tl.arange(0, P)[:, None] * V + tl.arange(0, V)[None, :]


@triton.jit
def _look(
    memory, s, weight, tokens, found,
    DOT: tl.constexpr, HALO: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a tile of the memory adds to what has been found: keys, older ones and queries, by their
    features without weights.
    """
    keys, older, queries = tokens
    R, R_older, Y = found
    low = (weight[:, None] * tl.load(_cells(memory, s, P, V))).to(queries.dtype)
    if not DOT:
        R = tl.dot(keys, low, R, input_precision=PRECISION)
        if HALO > 0:
            R_older = tl.dot(older, low, R_older, input_precision=PRECISION)
    Y = tl.dot(queries, low, Y, input_precision=PRECISION)
    return R, R_older, Y


@triton.jit
def _write(
    memory, s, weight, rate, keys, W, older, W_older,
    HALO: tl.constexpr, P: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the memory at a chunk's end."""
    cells = _cells(memory, s, P, V)
    tile = rate * tl.load(cells)
    written = tl.dot(keys, W, input_precision=PRECISION)
    if HALO > 0:
        written = tl.dot(older, W_older, written, input_precision=PRECISION)
    tl.store(cells, tile - weight[:, None] * written)


@triton.jit(do_not_specialize=WALK_RUNTIME)
def omega_walk_symmetric(
    q, k, v, q_columns, k_columns, tail_k, tail_v, tail_length, cu, writes, ends, a, packed, looked,
    errors,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_ah: tl.int64, stride_ar: tl.int64,
    DOT: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, LENGTHS: tl.constexpr,
    ALIGNED: tl.constexpr, PAIRS: tl.constexpr, DEFAULTS: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr, STEPS: tl.constexpr, ANCHOR: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """V columns of the memory of one head of one sequence, through all of its chunks.

    q_columns, k_columns (B, H, WIDTH, T): q and k once more. packed (N, H, blocks of V columns,
    STEPS, P, V), fp32: the memory, before the first token, and when done after the last.
    looked (B, T, H, VALUES), fp32: φ(q) M of each token, M at its chunk's begin. errors (slots, H,
    HALO + CHUNK, VALUES), k's dtype: R of a chunk's keys, of the older ones first.
    """
    H: tl.constexpr = P // 2
    OLDER: tl.constexpr = HALO if HALO > 0 else CHUNK
    v0, head, sequence, batch, begin, end, slot0, count = place_walk(
        cu, tokens, heads, chunk, chunks, VALUES, V, PACKED
    )
    blocks: tl.constexpr = (VALUES + V - 1) // V
    of_head = batch.to(tl.int64) * heads + head
    memory = (sequence.to(tl.int64) * heads + head) * blocks + v0 // V
    memory = packed + memory * (STEPS * P * V)
    dtype: tl.constexpr = k.dtype.element_ty
    older = window - 1
    c = tl.arange(0, P)
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, HALO) if HALO > 0 else t
    e = v0 + tl.arange(0, V)
    for number in tl.range(0, count, num_stages=1):
        first = begin + number * chunk
        there = t < tl.minimum(chunk, end - first)
        at = (slot0 + number).to(tl.int64) * heads + head
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, P, ALIGNED
        )
        k_low, k_high = halves(anchored(kt, ANCHOR, P), CHUNK, H)
        qt = load_rows(
            q, batch, head, first + t, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, P, ALIGNED
        )
        q_low, q_high = halves(anchored(qt, ANCHOR, P), CHUNK, H)
        vt = load_rows(
            v, batch, head, first + t, there, v0, stride_vb, stride_vt, stride_vh, VALUES, V,
            ALIGNED,
        )  # fmt: skip
        R = -vt.to(tl.float32)
        Y = tl.zeros([CHUNK, V], tl.float32)
        o_low = k_low
        o_high = k_high
        R_older = R
        if HALO > 0:
            kt = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, older, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            o_low, o_high = halves(anchored(kt, ANCHOR, P), HALO, H)
            vt = load_older(
                v, tail_v, tail_length, sequence, batch, head, heads, first, begin, older, v0,
                stride_vb, stride_vt, stride_vh, VALUES, V, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            R_older = -vt.to(tl.float32)

        # All tokens look at the memory.
        if PAIRS:
            for s in tl.range(0, H, num_stages=STAGES):
                low = _column(k_columns, of_head, first + t, there, s, tokens, WIDTH)
                high = _column(k_columns, of_head, first + t, there, s + H, tokens, WIDTH)
                of_keys = step_features(s, low, high, k_low, k_high, CHUNK, H).to(dtype)
                low = _column(q_columns, of_head, first + t, there, s, tokens, WIDTH)
                high = _column(q_columns, of_head, first + t, there, s + H, tokens, WIDTH)
                of_queries = step_features(s, low, high, q_low, q_high, CHUNK, H).to(dtype)
                of_older = of_keys
                if HALO > 0:
                    low, high = _older_columns(
                        k_columns, tail_k, tail_length, sequence, head, heads, of_head, first,
                        begin, older, s, H, tokens, WIDTH, HALO, TAIL, LENGTHS,
                    )  # fmt: skip
                    of_older = step_features(s, low, high, o_low, o_high, HALO, H).to(dtype)
                weight = _weight(a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
                R, R_older, Y = _look(
                    memory, s, weight, (of_keys, of_older, of_queries), (R, R_older, Y),
                    DOT, HALO, P, V, PRECISION,
                )  # fmt: skip
            weight = _weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            squares = (
                _upper_squares(k_high, CHUNK, H, dtype),
                _upper_squares(o_high, OLDER, H, dtype),
                _upper_squares(q_high, CHUNK, H, dtype),
            )
            R, R_older, Y = _look(
                memory, H, weight, squares, (R, R_older, Y), DOT, HALO, P, V, PRECISION
            )
        numbers = _weight(a, H + 1, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
        themselves = (
            beside(k_low, k_high, CHUNK, P).to(dtype),
            beside(o_low, o_high, OLDER, P).to(dtype),
            beside(q_low, q_high, CHUNK, P).to(dtype),
        )
        R, R_older, Y = _look(
            memory, STEPS - 1, numbers, themselves, (R, R_older, Y), DOT, HALO, P, V, PRECISION
        )
        to = (((batch * tokens + first + t).to(tl.int64) * heads + head) * VALUES)[:, None]
        tl.store(looked + to + e[None, :], Y, mask=there[:, None] & (e < VALUES)[None, :])

        # Keys write what they have found, once all have looked.
        tl.debug_barrier()
        place = at * (HALO + CHUNK)
        write = tl.load(writes + place + HALO + t)
        W = (write[:, None] * R).to(dtype)
        to = (place + HALO + t)[:, None] * VALUES + e[None, :]
        inside = (e < VALUES)[None, :]
        tl.store(errors + to, R.to(dtype), mask=(t >= 0)[:, None] & inside)
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, P, ALIGNED
        )
        kt_upper = load_rows(
            k, batch, head, first + t, there, H, stride_kb, stride_kt, stride_kh, WIDTH, P, ALIGNED
        )
        B, B_partner = _tiles_down(kt, kt_upper, ANCHOR, H)
        BO = B
        BO_partner = B
        W_older = W
        if HALO > 0:
            write = tl.load(writes + place + i)
            W_older = (write[:, None] * R_older).to(dtype)
            to = (place + i)[:, None] * VALUES + e[None, :]
            tl.store(errors + to, R_older.to(dtype), mask=(i >= 0)[:, None] & inside)
            ot = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, older, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            ot_upper = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, older, H,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            BO, BO_partner = _tiles_down(ot, ot_upper, ANCHOR, H)
        rate = tl.load(ends + at * 3)
        if PAIRS:
            for s in tl.range(0, H, num_stages=STAGES):
                low = _column(k_columns, of_head, first + t, there, s, tokens, WIDTH)
                high = _column(k_columns, of_head, first + t, there, s + H, tokens, WIDTH)
                of_keys = _pairs_down(B, B_partner, low, high, s, dtype)
                of_older = of_keys
                if HALO > 0:
                    low, high = _older_columns(
                        k_columns, tail_k, tail_length, sequence, head, heads, of_head, first,
                        begin, older, s, H, tokens, WIDTH, HALO, TAIL, LENGTHS,
                    )  # fmt: skip
                    of_older = _pairs_down(BO, BO_partner, low, high, s, dtype)
                weight = _weight(a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
                _write(
                    memory, s, weight, rate, of_keys, W, of_older, W_older, HALO, P, V, PRECISION
                )
            weight = _weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            _write(
                memory, H, weight, rate, (B * B).to(dtype), W, (BO * BO).to(dtype), W_older,
                HALO, P, V, PRECISION,
            )  # fmt: skip
        _write(
            memory, STEPS - 1, numbers, rate, B.to(dtype), W, BO.to(dtype), W_older,
            HALO, P, V, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # other threads' tiles are loaded in the next turn


@triton.jit(do_not_specialize=READS_RUNTIME)
def omega_reads_symmetric(
    q, k, tail_k, tail_length, cu, a, whole, rest, band, looked, errors, y,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_ah: tl.int64, stride_ar: tl.int64,
    DECAY: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, DEFAULTS: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    GATES_PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of what the queries of one chunk and head read: A ∘ φ(Q) M − (P ∘ κ(Q Kᵀ)) R with
    κ(x) = a_1 x + a_2 x², M and R as `omega_walk_symmetric` leaves them.
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
        e = v0 + tl.arange(0, V)
        to = (((batch * tokens + first + t).to(tl.int64) * heads + head) * VALUES)[:, None]
        to = to + e[None, :]
        mask = there[:, None] & (e < VALUES)[None, :]
        read = tl.load(looked + to, mask=mask, other=0.0)
        if DECAY:
            read *= load_rate(whole, rest, row, tokens, first, seen, size, DECAY)[:, None]
        first_degree = coefficient(a, 1, head, stride_ah, stride_ar, DEFAULTS)
        second_degree = 0.0
        if PAIRS:
            second_degree = coefficient(a, 2, head, stride_ah, stride_ar, DEFAULTS)
        qt = load_rows(
            q, batch, head, first + t, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, P, ALIGNED
        )
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, P, ALIGNED
        )
        at = (slot.to(tl.int64) * heads + head) * (HALO + CHUNK)
        part = shares(
            whole, rest, whole, rest, band, band, row, tokens, first, size, window, seen, t, DECAY,
            False, False, WINDOW, GATES_PRECISION, CHUNK,
        )  # fmt: skip
        cells = (at + HALO + t)[:, None] * VALUES + e[None, :]
        R = tl.load(errors + cells, mask=mask, other=0.0)
        read -= _mixed(qt, kt, R, part, first_degree, second_degree, PRECISION)
        if HALO > 0:
            i = tl.arange(0, HALO)
            kt = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            part = shares(
                whole, rest, whole, rest, band, band, row, tokens, first, size, window, seen,
                i - HALO, DECAY, False, False, WINDOW, GATES_PRECISION, CHUNK,
            )  # fmt: skip
            cells = (at + i)[:, None] * VALUES + e[None, :]
            R = tl.load(errors + cells, mask=(e < VALUES)[None, :] & (i >= 0)[:, None], other=0.0)
            read -= _mixed(qt, kt, R, part, first_degree, second_degree, PRECISION)
        tl.store(y + to, read.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _mixed(q, k, R, shares_, first_degree, second_degree, PRECISION: tl.constexpr):
    """(P ∘ κ(q kᵀ)) R."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = scores * (first_degree + second_degree * scores)
    return tl.dot((shares_ * scores).to(q.dtype), R, input_precision=PRECISION)
