"""Forward of the Omega rule on symmetric features up to degree 2, which are never formed.

    repack                   a memory in rows of the features' order, or in tiles as the walk has it
    omega_walk_symmetric     along a sequence: the memory tile after tile, what its chunks' queries
                             find there, and the errors of their keys
    omega_reads_symmetric    every chunk by itself: what queries find, and what its tokens wrote

The memory of a head is too large for a multiprocessor and lies in the L2 cache, in the tiles of
`polynomial.triton_rows`. Features of step s are, but for their weights, x_s x_c from column s on,
and x_{H+s} x_{H+c} before it: a product of x with the rows of a tile from s on, scaled by x_s, and
one of the upper half of x with the others, scaled by x_{H+s}. So x itself, of queries and of keys,
stays where products take it from through a whole chunk. A tile is loaded and stored once a chunk:
what the chunk before wrote is added on the way, just before this one's tokens look at it.
"""

import triton
import triton.language as tl

from ..polynomial.triton_rows import coefficient, root, row_of
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
    HOPPER: tl.constexpr,
):  # fmt: skip
    """One tile of (N · H, blocks of V columns, STEPS, P, V), from or to the rows of a state
    (N, H, WIDE, VALUES), both fp32. Without PAIRS the only step is that of the numbers. HOPPER:
    tiles of 64 × 32 lie as `hopper_symmetric.load_tile` takes them.
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
    cells = c[:, None] * V + v[None, :]
    if HOPPER:
        of_row = c // 16 * 512 + c % 8 * 16 + c % 16 // 8 * 2
        cells = of_row[:, None] + (v // 8 * 128 + v % 8 // 2 * 4 + v % 2)[None, :]
    tile = packed + number * (P * V) + cells
    rows = state + head * (WIDE * VALUES) + row[:, None] * VALUES + cols[None, :]
    if PACK:
        tl.store(tile, tl.load(rows, mask=inside, other=0.0))
    else:
        tl.store(rows, tl.load(tile), mask=inside)


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
def _cells(memory, s, P: tl.constexpr, V: tl.constexpr):
    return memory + s * (P * V) + tl.arange(0, P)[:, None] * V + tl.arange(0, V)[None, :]


@triton.jit
def _found(x, upper, low, high, from_s, before_s, PRECISION: tl.constexpr):
    """What tokens with columns `low` and `high` find in a tile's rows from s on, and before."""
    found = low[:, None] * tl.dot(x, from_s, input_precision=PRECISION)
    return found + high[:, None] * tl.dot(upper, before_s, input_precision=PRECISION)


@triton.jit
def _written(x, W, factor, acc, PRECISION: tl.constexpr):
    """Features of tokens, transposed, times what each writes: xᵀ (factor ∘ W)."""
    rows = (factor[:, None] * W).to(x.dtype)
    return tl.dot(tl.trans(x), rows, acc, input_precision=PRECISION)


@triton.jit
def _whole_step(
    memory, s, weight, rate, writes, tokens, found,
    DOT: tl.constexpr, HALO: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A step whose features are one tile: what the chunk before wrote, then what tokens find."""
    before, W, older_before, W_older = writes
    keys, older, queries = tokens
    R, R_older, Y = found
    dtype: tl.constexpr = keys.dtype
    cells = _cells(memory, s, P, V)
    tile = rate * tl.load(cells)
    written = tl.dot(tl.trans(before), W.to(dtype), input_precision=PRECISION)
    if HALO > 0:
        written = tl.dot(
            tl.trans(older_before), W_older.to(dtype), written, input_precision=PRECISION
        )
    tile -= weight[:, None] * written
    tl.store(cells, tile)
    low = (weight[:, None] * tile).to(dtype)
    if not DOT:
        R = tl.dot(keys, low, R, input_precision=PRECISION)
        if HALO > 0:
            R_older = tl.dot(older, low, R_older, input_precision=PRECISION)
    Y = tl.dot(queries, low, Y, input_precision=PRECISION)
    return R, R_older, Y


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
    V: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """V columns of the memory of one head of one sequence, through all of its chunks.

    q_columns, k_columns (B, H, WIDTH, T): q and k once more. packed (N, H, blocks of V columns,
    STEPS, P, V), fp32: the memory, before the first token, and when done after the last.
    looked (slots, H, CHUNK, VALUES), fp32: φ(q) M of each token, M at its chunk's begin. errors
    (slots, H, HALO + CHUNK, VALUES), k's dtype: R of a chunk's keys, of the older ones first.
    """
    H: tl.constexpr = P // 2
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
    inside = (e < VALUES)[None, :]
    rate = tl.full([], 1.0, tl.float32)
    W = tl.zeros([CHUNK, V], tl.float32)
    W_older = tl.zeros([HALO, V], tl.float32) if HALO > 0 else W
    for number in tl.range(0, count + 1, num_stages=1):
        first = begin + number * chunk
        before = first - chunk  # the chunk whose writes are added
        more = number < count  # else there are but those
        seen = tl.minimum(older, (count - number) * chunk)  # older tokens, at most a chunk
        there = (t < tl.minimum(chunk, end - first)) & more
        there_before = (t < tl.minimum(chunk, end - before)) & (number > 0)
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, P, ALIGNED
        )
        k_upper = load_rows(
            k, batch, head, first + t, there, H, stride_kb, stride_kt, stride_kh, WIDTH, P, ALIGNED
        )
        qt = load_rows(
            q, batch, head, first + t, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, P, ALIGNED
        )
        q_upper = load_rows(
            q, batch, head, first + t, there, H, stride_qb, stride_qt, stride_qh, WIDTH, P, ALIGNED
        )
        bt = load_rows(
            k, batch, head, before + t, there_before, 0, stride_kb, stride_kt, stride_kh, WIDTH, P,
            ALIGNED,
        )  # fmt: skip
        b_upper = load_rows(
            k, batch, head, before + t, there_before, H, stride_kb, stride_kt, stride_kh, WIDTH, P,
            ALIGNED,
        )  # fmt: skip
        vt = load_rows(
            v, batch, head, first + t, there, v0, stride_vb, stride_vt, stride_vh, VALUES, V,
            ALIGNED,
        )  # fmt: skip
        R = -vt.to(tl.float32)
        Y = tl.zeros([CHUNK, V], tl.float32)
        R_older = R
        ot = kt
        ot_before = bt
        if HALO > 0:
            ot = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, seen, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            o_upper = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, seen, H,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            ot_before = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, before, begin, older, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            o_upper_before = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, before, begin, older, H,
                stride_kb, stride_kt, stride_kh, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            vt = load_older(
                v, tail_v, tail_length, sequence, batch, head, heads, first, begin, seen, v0,
                stride_vb, stride_vt, stride_vh, VALUES, V, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            R_older = -vt.to(tl.float32)
        if PAIRS:
            for s in tl.range(0, H, num_stages=STAGES):
                cells = _cells(memory, s, P, V)
                tile = rate * tl.load(cells)
                low = _column(k_columns, of_head, before + t, there_before, s, tokens, WIDTH)
                high = _column(k_columns, of_head, before + t, there_before, s + H, tokens, WIDTH)
                nothing = tl.zeros([P, V], tl.float32)
                from_s = _written(bt, W, low, nothing, PRECISION)
                before_s = _written(b_upper, W, high, nothing, PRECISION)
                if HALO > 0:
                    low, high = _older_columns(
                        k_columns, tail_k, tail_length, sequence, head, heads, of_head, before,
                        begin, older, s, H, tokens, WIDTH, HALO, TAIL, LENGTHS,
                    )  # fmt: skip
                    from_s = _written(ot_before, W_older, low, from_s, PRECISION)
                    before_s = _written(o_upper_before, W_older, high, before_s, PRECISION)
                keep = (c >= s)[:, None]
                weight = _weight(a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
                tile -= weight[:, None] * tl.where(keep, from_s, before_s)
                tl.store(cells, tile)
                tile = weight[:, None] * tile
                from_s = tl.where(keep, tile, 0.0).to(dtype)
                before_s = tl.where(keep, 0.0, tile).to(dtype)
                if not DOT:
                    low = _column(k_columns, of_head, first + t, there, s, tokens, WIDTH)
                    high = _column(k_columns, of_head, first + t, there, s + H, tokens, WIDTH)
                    R += _found(kt, k_upper, low, high, from_s, before_s, PRECISION)
                    if HALO > 0:
                        low, high = _older_columns(
                            k_columns, tail_k, tail_length, sequence, head, heads, of_head, first,
                            begin, seen, s, H, tokens, WIDTH, HALO, TAIL, LENGTHS,
                        )  # fmt: skip
                        R_older += _found(ot, o_upper, low, high, from_s, before_s, PRECISION)
                low = _column(q_columns, of_head, first + t, there, s, tokens, WIDTH)
                high = _column(q_columns, of_head, first + t, there, s + H, tokens, WIDTH)
                Y += _found(qt, q_upper, low, high, from_s, before_s, PRECISION)
            # Squares of the lower half have no weight here: they were among the pairs.
            weight = _weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            R, R_older, Y = _whole_step(
                memory, H, weight, rate, (bt * bt, W, ot_before * ot_before, W_older),
                (kt * kt, ot * ot, qt * qt), (R, R_older, Y), DOT, HALO, P, V, PRECISION,
            )  # fmt: skip
        weight = _weight(a, H + 1, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
        R, R_older, Y = _whole_step(
            memory, STEPS - 1, weight, rate, (bt, W, ot_before, W_older), (kt, ot, qt),
            (R, R_older, Y), DOT, HALO, P, V, PRECISION,
        )  # fmt: skip
        at = (slot0 + number).to(tl.int64) * heads + head
        to = (at * CHUNK + t)[:, None] * VALUES + e[None, :]
        tl.store(looked + to, Y, mask=there[:, None] & inside)
        place = at * (HALO + CHUNK)
        write = tl.load(writes + place + HALO + t, mask=(t >= 0) & more, other=0.0)
        W = write[:, None] * R
        to = (place + HALO + t)[:, None] * VALUES + e[None, :]
        tl.store(errors + to, R.to(dtype), mask=(t >= 0)[:, None] & inside & more)
        if HALO > 0:
            write = tl.load(writes + place + i, mask=(i >= 0) & more, other=0.0)
            W_older = write[:, None] * R_older
            to = (place + i)[:, None] * VALUES + e[None, :]
            tl.store(errors + to, R_older.to(dtype), mask=(i >= 0)[:, None] & inside & more)
        rate = tl.load(ends + at * 3, mask=more, other=1.0)
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
        of_slot = (slot.to(tl.int64) * heads + head) * CHUNK + t
        read = tl.load(looked + of_slot[:, None] * VALUES + e[None, :], mask=mask, other=0.0)
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
