"""Forward of the Omega rule on symmetric features up to degree 2, which are never formed.

    repack                   a memory in rows of the features' order, or in tiles as the walk has it
    omega_lay_out            tokens chunk after chunk, as rows and as columns
    omega_walk_symmetric     along a sequence: the memory tile after tile, what its chunks' queries
                             find there, and the errors of their keys
    omega_reads_symmetric    every chunk by itself: what queries find, and what its tokens wrote

The memory of a head is too large for a multiprocessor and lies in the L2 cache, in the tiles of
`polynomial.triton_rows`. Features of step s are, but for their weights, x_s x_c from column s on,
and x_{H+s} x_{H+c} before it: a product of x with the rows of a tile from s on, scaled by x_s, and
one of the upper half of x with the others, scaled by x_{H+s}. A tile is loaded and stored once a
chunk: what the chunk before wrote is added on the way, just before this one's tokens look at it.

Tokens are laid out chunk after chunk first, the older keys of each in front of its own, so that
the walk loads every operand of a product as the product takes it, in each step again: Triton 3.6
multiplies wrongly on Hopper where a tile is kept, or transposed, through a loop like this.
"""

import triton
import triton.language as tl

from ..polynomial.triton_rows import coefficient, root, row_of
from .triton_chunks import SIZES, load_older, load_rate, load_rows, place_chunk, place_walk, shares

LAY_OUT_RUNTIME = (*SIZES, "stride_b", "stride_t", "stride_h", "every", "span")
WALK_RUNTIME = (*SIZES, "stride_ah", "stride_ar", "every", "span")
READS_RUNTIME = (
    *SIZES, "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
    "stride_ah", "stride_ar",
)  # fmt: skip
# What a walk keeps: the memory after the last token; at each span's begin; at each chunk's, of one
# span.
STATE, MARKS, SPAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def repack(
    packed, state,
    PACK: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    VALUES: tl.constexpr, STEPS: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    HOPPER: tl.constexpr,
):  # fmt: skip
    """One tile of (N · H, blocks of V columns, STEPS, P, V), from or to the rows of a state
    (N, H, WIDE, VALUES), both fp32. Without PAIRS the only step is that of the numbers. HOPPER:
    tiles of 64 × 32 lie as `hopper_advance.load_tile` takes them.
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
def place_span(
    place, cu, tokens, chunk, chunks, every, span, PACKED: tl.constexpr,
):  # fmt: skip
    """Of a chunk of a span: its sequence, row of the batch, slot, first token, tokens (none:
    nothing to do); first token of the sequence, and the one behind its last.
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
    return sequence, batch, slot, first, tl.minimum(chunk, end - first), begin, end


@triton.jit(do_not_specialize=LAY_OUT_RUNTIME)
def omega_lay_out(
    x, tail, tail_length, cu, rows, columns,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_b: tl.int64, stride_t: tl.int64, stride_h: tl.int64, every: tl.int32, span: tl.int32,
    SPANS: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr,
    WIDTH: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Tokens of one chunk and head of x (B, T, H, WIDTH), the HALO ones in front of it first.

    rows (slots, H, HALO + CHUNK, P), and with COLUMNS columns (slots, H, P, HALO + CHUNK); zeros
    where there is no token, and past WIDTH. With SPANS of the chunks of one span, as `place_span`
    numbers them.
    """
    KEYS: tl.constexpr = HALO + CHUNK
    head = tl.program_id(0) % heads
    place = tl.program_id(0) // heads
    if SPANS:
        sequence, batch, _slot, first, size, begin, _end = place_span(
            place, cu, tokens, chunk, chunks, every, span, PACKED
        )
    else:
        sequence, batch, _slot, first, size, begin = place_chunk(
            place, cu, tokens, chunk, chunks, sequences, PACKED
        )
    if size > 0:
        at = (place.to(tl.int64) * heads + head) * (KEYS * P)
        t = tl.arange(0, CHUNK)
        c = tl.arange(0, P)
        tile = load_rows(
            x, batch, head, first + t, t < size, 0, stride_b, stride_t, stride_h, WIDTH, P, ALIGNED
        )
        tl.store(rows + at + (HALO + t)[:, None] * P + c[None, :], tile)
        if COLUMNS:
            tl.store(columns + at + (HALO + t)[:, None] + c[None, :] * KEYS, tile)
        if HALO > 0:
            i = tl.arange(0, HALO)
            tile = load_older(
                x, tail, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_b, stride_t, stride_h, WIDTH, P, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            tl.store(rows + at + i[:, None] * P + c[None, :], tile)
            if COLUMNS:
                tl.store(columns + at + i[:, None] + c[None, :] * KEYS, tile)


@triton.jit
def step_weight(
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
def cells_of(s, P: tl.constexpr, V: tl.constexpr):
    """Places of a step's tile [P, V] in a memory."""
    return s * (P * V) + tl.arange(0, P)[:, None] * V + tl.arange(0, V)[None, :]


@triton.jit
def token_rows(
    rows, at, some, UPPER: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """[ROWS, P]: tokens of a chunk from row FIRST on; UPPER: the upper half of their columns. Zeros
    past P, and all where `some` is False.
    """
    FROM: tl.constexpr = P // 2 if UPPER else 0
    i = tl.arange(0, ROWS)
    c = tl.arange(0, P)
    pointers = rows + at * (KEYS * P) + (FIRST * P + FROM) + (i[:, None] * P + c[None, :])
    return tl.load(pointers, mask=(i >= 0)[:, None] & (c < P - FROM)[None, :] & some, other=0.0)


@triton.jit
def token_columns(
    columns, at, some, UPPER: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """`token_rows` as [P, ROWS]."""
    FROM: tl.constexpr = P // 2 if UPPER else 0
    i = tl.arange(0, ROWS)
    c = tl.arange(0, P)
    pointers = columns + at * (KEYS * P) + (FROM * KEYS + FIRST) + (c[:, None] * KEYS + i[None, :])
    return tl.load(pointers, mask=(i >= 0)[None, :] & (c < P - FROM)[:, None] & some, other=0.0)


@triton.jit
def token_column(
    columns, at, s, some, FIRST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """[ROWS]: column s of `token_rows`, fp32."""
    i = tl.arange(0, ROWS)
    pointers = columns + at * (KEYS * P) + (s * KEYS + FIRST) + i
    return tl.load(pointers, mask=(i >= 0) & some, other=0.0).to(tl.float32)


@triton.jit
def looked_at(
    rows, columns, at, s, some, from_s, before_s, lost_from_s, lost_before_s,
    LOW: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[ROWS, V]: what tokens find in the rows of a tile from s on, and before; with LOW also in
    what rounding took from them.
    """
    H: tl.constexpr = P // 2
    x = token_rows(rows, at, some, False, FIRST, KEYS, ROWS, P)
    found = tl.dot(x, from_s, input_precision=PRECISION)
    if LOW:
        found = tl.dot(x, lost_from_s, found, input_precision=PRECISION)
    low = token_column(columns, at, s, some, FIRST, KEYS, ROWS, P)
    total = low[:, None] * found
    x = token_rows(rows, at, some, True, FIRST, KEYS, ROWS, P)
    found = tl.dot(x, before_s, input_precision=PRECISION)
    if LOW:
        found = tl.dot(x, lost_before_s, found, input_precision=PRECISION)
    high = token_column(columns, at, H + s, some, FIRST, KEYS, ROWS, P)
    return total + high[:, None] * found


@triton.jit
def written_by(
    columns, at, s, some, W, from_s, before_s,
    FIRST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[P, V] each, added to from_s and before_s: features of tokens, transposed, times W."""
    H: tl.constexpr = P // 2
    dtype: tl.constexpr = columns.dtype.element_ty
    x = token_columns(columns, at, some, False, FIRST, KEYS, ROWS, P)
    low = token_column(columns, at, s, some, FIRST, KEYS, ROWS, P)
    from_s = tl.dot(x, (low[:, None] * W).to(dtype), from_s, input_precision=PRECISION)
    x = token_columns(columns, at, some, True, FIRST, KEYS, ROWS, P)
    high = token_column(columns, at, H + s, some, FIRST, KEYS, ROWS, P)
    before_s = tl.dot(x, (high[:, None] * W).to(dtype), before_s, input_precision=PRECISION)
    return from_s, before_s


@triton.jit
def features_of(
    rows, at, some, SQUARES: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """[ROWS, P]: features of a step that are one tile, the squares or the numbers."""
    x = token_rows(rows, at, some, False, FIRST, KEYS, ROWS, P)
    if SQUARES:
        x = x * x
    return x


@triton.jit
def features_across(
    columns, at, some, SQUARES: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """`features_of` as [P, ROWS]."""
    x = token_columns(columns, at, some, False, FIRST, KEYS, ROWS, P)
    if SQUARES:
        x = x * x
    return x


@triton.jit
def _whole_step(
    load_from, store_to, s, weight, rate, k_rows, k_columns, q_rows, at, before, more, behind,
    W, W_older, R, R_older, Y,
    SQUARES: tl.constexpr, DOT: tl.constexpr, READ: tl.constexpr, LOW: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A step whose features are one tile: what the chunk before wrote, then what tokens find."""
    KEYS: tl.constexpr = HALO + CHUNK
    dtype: tl.constexpr = k_rows.dtype.element_ty
    cells = cells_of(s, P, V)
    tile = rate * tl.load(load_from + cells)
    x = features_across(k_columns, before, behind, SQUARES, HALO, KEYS, CHUNK, P)
    written = tl.dot(x, W.to(dtype), input_precision=PRECISION)
    if HALO > 0:
        x = features_across(k_columns, before, behind, SQUARES, 0, KEYS, HALO, P)
        written = tl.dot(x, W_older.to(dtype), written, input_precision=PRECISION)
    tile -= weight[:, None] * written
    tl.store(store_to + cells, tile)
    tile *= weight[:, None]
    low = tile.to(dtype)
    lost = low
    if LOW:
        lost = (tile - low.to(tl.float32)).to(dtype)
    if not DOT:
        x = features_of(k_rows, at, more, SQUARES, HALO, KEYS, CHUNK, P)
        R = tl.dot(x, low, R, input_precision=PRECISION)
        if LOW:
            R = tl.dot(x, lost, R, input_precision=PRECISION)
        if HALO > 0:
            x = features_of(k_rows, at, more, SQUARES, 0, KEYS, HALO, P)
            R_older = tl.dot(x, low, R_older, input_precision=PRECISION)
            if LOW:
                R_older = tl.dot(x, lost, R_older, input_precision=PRECISION)
    if READ:
        x = features_of(q_rows, at, more, SQUARES, 0, CHUNK, CHUNK, P)
        Y = tl.dot(x, low, Y, input_precision=PRECISION)
        if LOW:
            Y = tl.dot(x, lost, Y, input_precision=PRECISION)
    return R, R_older, Y


@triton.jit(do_not_specialize=WALK_RUNTIME)
def omega_walk_symmetric(
    q_rows, q_columns, k_rows, k_columns, v_rows, cu, writes, ends, a, packed, marks, kept, looked,
    errors,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, stride_ah: tl.int64, stride_ar: tl.int64, every: tl.int32, span: tl.int32,
    KEEP: tl.constexpr, DOT: tl.constexpr, LOW: tl.constexpr, PACKED: tl.constexpr,
    PAIRS: tl.constexpr, DEFAULTS: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    VALUES_P: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of the memory of one head of one sequence, through chunks of it.

    q_rows, k_rows, v_rows, q_columns, k_columns: as `omega_lay_out` leaves them, values VALUES_P
    wide. packed (N, H, blocks of V columns, STEPS, P, V), fp32: the memory before the first token.
    A span has `every` chunks. KEEP:

        STATE    all chunks; packed becomes the memory after the last token
        MARKS    marks (spans, H, blocks, STEPS, P, V), fp32: the memory at each span's begin
        SPAN     the chunks of span `span` of every sequence, from its mark on; kept
                 (N · every, H, …), fp32: the memory at the begin of each

    looked (slots, H, CHUNK, VALUES), fp32: φ(q) M of each token, M at its chunk's begin. errors
    (slots, H, HALO + CHUNK, VALUES): R of a chunk's keys, of the older ones first. With
    SPAN they are of the chunks of `kept`, and so are the tokens. LOW: R and φ(q) M from M in two
    parts of k's dtype.
    """
    H: tl.constexpr = P // 2
    KEYS: tl.constexpr = HALO + CHUNK
    READ: tl.constexpr = KEEP != MARKS
    BLOCK: tl.constexpr = STEPS * P * V
    dtype: tl.constexpr = k_rows.dtype.element_ty
    v0, head, sequence, _, begin, _, slot0, count = place_walk(
        cu, tokens, heads, chunk, chunks, VALUES, V, PACKED
    )
    blocks: tl.constexpr = (VALUES + V - 1) // V
    a_place = heads.to(tl.int64) * (blocks * BLOCK)
    mine = (head.to(tl.int64) * blocks + v0 // V) * BLOCK
    mark = span_of(sequence, begin, chunk, chunks, every, PACKED)
    lowest = count * 0
    highest = count + 1
    load_from = packed + sequence * a_place + mine
    store_to = load_from
    if KEEP == MARKS:
        highest = tl.where(count > 0, (count - 1) // every * every + 1, 0)
    if KEEP == SPAN:
        lowest = span * every
        highest = tl.minimum(lowest + every, count)
        load_from = marks + (mark + span) * a_place + mine
    c = tl.arange(0, P)
    t = tl.arange(0, CHUNK)
    i = tl.arange(0, HALO) if HALO > 0 else t
    e = v0 + tl.arange(0, V)
    inside = (e < VALUES)[None, :]
    rate = tl.full([], 1.0, tl.float32)
    W = tl.zeros([CHUNK, V], tl.float32)
    W_older = tl.zeros([HALO, V], tl.float32) if HALO > 0 else W
    for number in tl.range(lowest, highest, num_stages=1):
        more = number < count  # else there is but what the last one wrote
        behind = number > lowest
        at = (slot0 + number).to(tl.int64) * heads + head
        out = at
        if KEEP == MARKS:
            store_to = marks + (mark + (number + every - 1) // every) * a_place + mine
        if KEEP == SPAN:
            store_to = kept + (sequence * every + number - lowest) * a_place + mine
            out = (sequence * every + number - lowest).to(tl.int64) * heads + head
        before = out - heads
        R = -_values(v_rows, out, HALO, v0, more, KEYS, CHUNK, VALUES_P, V)
        Y = tl.zeros([CHUNK, V], tl.float32)
        R_older = R
        if HALO > 0:
            R_older = -_values(v_rows, out, 0, v0, more, KEYS, HALO, VALUES_P, V)
        if PAIRS:
            for s in tl.range(0, H, num_stages=1):
                cells = cells_of(s, P, V)
                tile = rate * tl.load(load_from + cells)
                from_s = tl.zeros([P, V], tl.float32)
                from_s, before_s = written_by(
                    k_columns, before, s, behind, W, from_s, from_s, HALO, KEYS, CHUNK, P, PRECISION
                )
                if HALO > 0:
                    from_s, before_s = written_by(
                        k_columns, before, s, behind, W_older, from_s, before_s, 0, KEYS, HALO, P,
                        PRECISION,
                    )  # fmt: skip
                keep = (c >= s)[:, None]
                weight = step_weight(a, s, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
                tile -= weight[:, None] * tl.where(keep, from_s, before_s)
                tl.store(store_to + cells, tile)
                tile *= weight[:, None]
                from_s = tl.where(keep, tile, 0.0).to(dtype)
                before_s = tl.where(keep, 0.0, tile).to(dtype)
                lost_from_s = from_s
                lost_before_s = before_s
                if LOW:
                    tile -= from_s.to(tl.float32) + before_s.to(tl.float32)
                    lost_from_s = tl.where(keep, tile, 0.0).to(dtype)
                    lost_before_s = tl.where(keep, 0.0, tile).to(dtype)
                if not DOT:
                    R += looked_at(
                        k_rows, k_columns, out, s, more, from_s, before_s, lost_from_s,
                        lost_before_s, LOW, HALO, KEYS, CHUNK, P, PRECISION,
                    )  # fmt: skip
                    if HALO > 0:
                        R_older += looked_at(
                            k_rows, k_columns, out, s, more, from_s, before_s, lost_from_s,
                            lost_before_s, LOW, 0, KEYS, HALO, P, PRECISION,
                        )  # fmt: skip
                if READ:
                    Y += looked_at(
                        q_rows, q_columns, out, s, more, from_s, before_s, lost_from_s,
                        lost_before_s, LOW, 0, CHUNK, CHUNK, P, PRECISION,
                    )  # fmt: skip
            # Squares of the lower half have no weight here: they were among the pairs.
            weight = step_weight(a, H, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
            R, R_older, Y = _whole_step(
                load_from, store_to, H, weight, rate, k_rows, k_columns, q_rows, out, before, more,
                behind, W, W_older, R, R_older, Y, True, DOT, READ, LOW, CHUNK, HALO, P, V,
                PRECISION,
            )  # fmt: skip
        weight = step_weight(a, H + 1, c, head, stride_ah, stride_ar, PAIRS, H, WIDTH, DEFAULTS)
        R, R_older, Y = _whole_step(
            load_from, store_to, STEPS - 1, weight, rate, k_rows, k_columns, q_rows, out, before,
            more, behind, W, W_older, R, R_older, Y, False, DOT, READ, LOW, CHUNK, HALO, P, V,
            PRECISION,
        )  # fmt: skip
        if READ:
            to = (out * CHUNK + t)[:, None] * VALUES + e[None, :]
            tl.store(looked + to, Y, mask=(t >= 0)[:, None] & inside & more)
            to = (out * KEYS + HALO + t)[:, None] * VALUES + e[None, :]
            tl.store(
                errors + to, R.to(errors.dtype.element_ty), mask=(t >= 0)[:, None] & inside & more
            )
        write = tl.load(writes + at * KEYS + HALO + t, mask=(t >= 0) & more, other=0.0)
        W = write[:, None] * R
        if HALO > 0:
            if READ:
                to = (out * KEYS + i)[:, None] * VALUES + e[None, :]
                tl.store(
                    errors + to, R_older.to(errors.dtype.element_ty),
                    mask=(i >= 0)[:, None] & inside & more,
                )  # fmt: skip
            write = tl.load(writes + at * KEYS + i, mask=(i >= 0) & more, other=0.0)
            W_older = write[:, None] * R_older
        rate = tl.load(ends + at * 3, mask=more, other=1.0)
        load_from = store_to
        tl.debug_barrier()  # other threads' tiles are loaded in the next turn


@triton.jit
def span_of(sequence, begin, chunk, chunks, every, PACKED: tl.constexpr):
    """The first span of a sequence among those of all."""
    if PACKED:
        first = begin // (chunk * every) + sequence
    else:
        first = sequence * ((chunks + every - 1) // every)
    return first.to(tl.int64)


@triton.jit
def _values(
    rows, at, first, v0, some, KEYS: tl.constexpr, ROWS: tl.constexpr, VALUES_P: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """[ROWS, V], fp32: columns of the values of a chunk's tokens from row `first` on."""
    i = first + tl.arange(0, ROWS)
    e = v0 + tl.arange(0, V)
    to = at * (KEYS * VALUES_P) + i[:, None] * VALUES_P + e[None, :]
    there = ((i >= 0) & some)[:, None] & (e < VALUES_P)[None, :]
    return tl.load(rows + to, mask=there, other=0.0).to(tl.float32)


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
