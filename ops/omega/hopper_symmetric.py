"""The walk on symmetric features of degree 2 for Hopper, in Gluon: two chunks at a time.

One program is one head of one sequence and COLUMNS columns of its memory, which lies in the L2
cache in the tiles of `polynomial.triton_rows`. It goes from span to span, a span being two chunks:
a memory is loaded and stored once a span, and what the second chunk would find in it by then comes
from products of tokens with tokens. Four warpgroups share it:

    look     two; each has a chunk's queries and keys, and finds in a tile what they look for:
             Q M and K M, M at the span's begin. Features are formed in registers, as operands of
             products. After the last tile they find the chunks' errors, one chunk after the other:
             R = K M − V, then for every token that comes later K M ← a K M − κ(K Kᵀ) (w ∘ R).
    advance  two, tile after tile in turn; what the span before wrote is added to a tile, which then
             goes to `look`: M ← a M − Φᵀ (w ∘ R)

Older keys of a chunk are the last ones of the chunk before, and who has that chunk finds their
errors: one further turn of the same update. Notation and formulas are those of `eager.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_advance import advance
from .hopper_features import (
    COLUMNS,
    HALF,
    OLDER,
    STEPS,
    WIDTH,
    coefficient,
    features,
    halves,
    one_of,
    place_program,
    rate_of,
    rows_of,
    times,
    turn,
    turn_keys,
)
from .hopper_fwd import CHUNK, barriers, left_operand, product

WALK_RUNTIME = ("tokens", "heads", "chunks", "older", "stride_ah", "stride_ar")


@gluon.jit
def copy_halves(x, at, tiles, buffer, bar):
    """Both halves of the width of a tile of rows."""
    row, head, first = at
    tma.async_copy_global_to_shared(x, [row, head, first, 0], bar, tiles.index(2 * buffer))
    tma.async_copy_global_to_shared(x, [row, head, first, HALF], bar, tiles.index(2 * buffer + 1))


@gluon.jit
def columns_of(columns, at, s):
    """Numbers s and H + s of rows: row s of their transposed tile, from `at` on."""
    ROWS: gl.constexpr = gl.SliceLayout(1, features(COLUMNS))
    by = columns.index(at + s).load(ROWS)
    return by[:, None], columns.index(at + HALF + s).load(ROWS)[:, None]


@gluon.jit
def found(low, high, by, by_beyond, s, tile, acc):
    """acc, and what tokens find in the lower half of the tile of step s."""
    c = gl.arange(0, HALF, layout=gl.SliceLayout(0, features(COLUMNS)))
    mask = gl.where(c >= s, -1, 0).to(gl.int16)
    lower = one_of(low, by, high, by_beyond, mask[None, :])
    return warpgroup_mma(lower, tile.slice(0, HALF), acc, is_async=True)


@gluon.jit
def found_last(low, high, squares, numbers, acc):
    """acc, and what tokens find in the tile of squares, and in that of numbers."""
    acc = warpgroup_mma(times(high, high), squares.slice(HALF, HALF), acc, is_async=True)
    acc = warpgroup_mma(low, numbers.slice(0, HALF), acc, is_async=True)
    return warpgroup_mma(high, numbers.slice(HALF, HALF), acc, is_async=True)


@gluon.jit
def owed(low, high, keys, buffer, a1, a2, ROWS_: gl.constexpr, FROM: gl.constexpr):
    """−κ(X Kᵀ) with κ(x) = a_1 x + a_2 x², as the left operand of a product with what keys write:
    of ROWS_ keys from the FROM-th row of a tile on.
    """
    L: gl.constexpr = product(ROWS_)
    of_low = rows_of(keys, 2 * buffer).slice(FROM, ROWS_).permute((1, 0))
    of_high = rows_of(keys, 2 * buffer + 1).slice(FROM, ROWS_).permute((1, 0))
    acc = gl.zeros([CHUNK, ROWS_], gl.float32, L)
    low = gl.convert_layout(low, features(ROWS_))
    high = gl.convert_layout(high, features(ROWS_))
    acc = warpgroup_mma(low, of_low, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(high, of_high, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return left_operand(-acc * (a1 + a2 * acc), COLUMNS, keys.dtype)


@gluon.jit
def without(acc, low, high, written, older_written, buffer, a1, a2, HALO: gl.constexpr):
    """acc less what a chunk's tokens and older ones wrote: pairs of their keys and of the rows of
    what each wrote. The older ones are the last rows of theirs.
    """
    keys, by = written
    part = owed(low, high, keys, buffer, a1, a2, CHUNK, 0)
    acc = warpgroup_mma(part, by, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if HALO:
        older_keys, by_older = older_written
        ALL: gl.constexpr = older_keys.shape[3]
        part = owed(low, high, older_keys, buffer, a1, a2, OLDER, ALL - OLDER)
        acc = warpgroup_mma(part, by_older.slice(CHUNK - OLDER, OLDER), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc


@gluon.jit
def write_of(writes, place, c, heads, HALO: gl.constexpr, OF_OLDER: gl.constexpr):
    """P of chunk c's last token, of its own keys or of its older ones, which are the last rows of a
    chunk before; and which rows there are.
    """
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(COLUMNS)))
    row = ((slot0 + c).to(gl.int64) * heads + head) * (HALO + CHUNK)
    if OF_OLDER:
        at = t - (CHUNK - OLDER)
        there = (at >= 0) & (c < count)
    else:
        at = t + HALO
        there = begin + c * CHUNK + t < end
    return gl.load(writes + row + at, mask=there, other=0.0), there


@gluon.jit
def keep_errors(
    errors, R, there, place, c, heads, VALUES: gl.constexpr, HALO: gl.constexpr,
    OF_OLDER: gl.constexpr,
):  # fmt: skip
    """Store R of chunk c's own keys, or that of its older ones, which are the last rows."""
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(COLUMNS)))
    e = v0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, product(COLUMNS)))
    row = ((slot0 + c).to(gl.int64) * heads + head) * (HALO + CHUNK) + t
    if OF_OLDER:
        row -= CHUNK - OLDER
    else:
        row += HALO
    mask = there[:, None] & (e < VALUES)[None, :]
    to = row[:, None] * VALUES + e[None, :]
    gl.store(errors + to, R.to(errors.dtype.element_ty), mask=mask)


@gluon.jit
def keep_looked(looked, found, there, place, c, heads, VALUES: gl.constexpr):
    """Store what chunk c's queries look for."""
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(COLUMNS)))
    e = v0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, product(COLUMNS)))
    to = ((slot0 + c).to(gl.int64) * heads + head) * CHUNK + t
    mask = there[:, None] & (e < VALUES)[None, :]
    gl.store(looked + to[:, None] * VALUES + e[None, :], found, mask=mask)


@gluon.jit
def written_by_none(
    WHO: gl.constexpr, tiles, older_errors, errors, writes, ends, place, heads,
    TAIL: gl.constexpr, VALUES: gl.constexpr, HALO: gl.constexpr,
):  # fmt: skip
    """As if a span before the first one had written nothing; but what the first chunk writes for a
    tail's keys.
    """
    k_t, k_older_t, wrote_t, keys_t, turned_t, older_t, older_turned_t, own_t = tiles
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = wrote_t.dtype
    OUT: gl.constexpr = product(COLUMNS)
    nothing = gl.zeros([CHUNK, COLUMNS], gl.float32, OUT)
    zero = gl.zeros([CHUNK, HALF], dtype, features(COLUMNS))
    turn_keys(zero, zero, 2 + WHO, keys_t, turned_t)
    wrote_t.index(WHO).store(nothing.to(dtype))
    if HALO > 0 and WHO == 0:
        none = gl.zeros([OLDER, HALF], dtype, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
        turn_keys(none, none, 1, older_t, older_turned_t)
    if HALO > 0 and WHO == 1:
        wrote_t.index(3).store(nothing.to(dtype))
        R = nothing
        write, there = write_of(writes, place, 0, heads, HALO, True)
        if TAIL:
            t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT))
            e = v0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
            at = (sequence.to(gl.int64) * heads + head) * HALO + t - (CHUNK - OLDER)
            R = gl.load(
                older_errors + at[:, None] * VALUES + e[None, :],
                mask=there[:, None] & (e < VALUES)[None, :], other=0.0,
            )  # fmt: skip
        keep_errors(errors, R, there, place, 0, heads, VALUES, HALO, True)
        R = write[:, None] * R
        own_t.index(2).store(R.to(dtype))
        wrote_t.index(2).store((rate_of(ends, place, 1, heads) * R).to(dtype))


@gluon.jit
def copy_queries(WHO: gl.constexpr, n, q, q_t, bar, place):
    """Begin to copy queries of a role's chunk of span n."""
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    mbarrier.expect(bar, 2 * CHUNK * WIDTH)
    copy_halves(q, (batch, head, begin + (2 * n + WHO) * CHUNK), q_t, 0, bar)


@gluon.jit
def copy_span(
    WHO: gl.constexpr, n, operands, inputs, copied, place, older, TAIL: gl.constexpr,
    HALO: gl.constexpr,
):  # fmt: skip
    """Begin to copy keys and values of a role's chunk of span n, and of the span its older keys."""
    q, k, v, k_older, tail_k = operands
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    k_t, v_t, k_older_t = inputs
    buffer = n % 2
    bar = copied.index(buffer)
    first = begin + (2 * n + WHO) * CHUNK
    OF_OLDER: gl.constexpr = 2 * OLDER * WIDTH if HALO > 0 and WHO == 0 else 0
    mbarrier.expect(bar, 2 * CHUNK * (WIDTH + COLUMNS) + OF_OLDER)
    copy_halves(k, (batch, head, first), k_t, buffer, bar)
    tma.async_copy_global_to_shared(v, [batch, head, first, v0], bar, v_t.index(buffer))
    if HALO > 0 and WHO == 0:
        if TAIL and n == 0:
            copy_halves(tail_k, (sequence, head, older - OLDER), k_older_t, buffer, bar)
        else:
            copy_halves(k_older, (batch, head, first - OLDER), k_older_t, buffer, bar)


@gluon.jit
def look(
    WHO: gl.constexpr,
    operands, outs, of_inputs, tiles, low_t, queries_t, bars, older_errors, tail_length, writes,
    ends, kappa, place, heads, older,
    DOT: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr,
    VALUES: gl.constexpr, HALO: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: every other chunk, and what follows from it for the next one."""
    q, k, v, k_older, tail_k = operands
    looked, errors = outs
    q_t, v_t = of_inputs
    k_t, k_older_t, wrote_t, keys_t, turned_t, older_t, older_turned_t, own_t = tiles
    turns, copied, asked, chain = bars
    ready, taken, wrote = turns
    first_wrote, first_done, second_done = chain
    a1, a2 = kappa
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = low_t.dtype
    OUT: gl.constexpr = product(COLUMNS)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, features(COLUMNS)))
    nothing = gl.zeros([CHUNK, COLUMNS], gl.float32, OUT)
    inputs = (k_t[WHO], v_t, k_older_t)
    written_by_none(
        WHO, tiles, older_errors, errors, writes, ends, place, heads, TAIL, VALUES, HALO
    )
    fence_async_shared()
    mbarrier.arrive(wrote, count=1)
    spans = gl.cdiv(count, 2)
    if spans > 0:
        copy_queries(WHO, 0, q, q_t, asked, place)
        copy_span(WHO, 0, operands, inputs, copied, place, older, TAIL, HALO)
    for n in range(spans):
        c = 2 * n + WHO
        first = begin + c * CHUNK
        buffer = n % 2
        own = 2 * buffer + WHO
        mbarrier.wait(asked, n & 1)
        q_low, q_high = halves(q_t, 0, row < CHUNK, features(COLUMNS))
        turn(q_low, q_high, 0, queries_t)
        mbarrier.wait(copied.index(buffer), (n // 2) & 1)
        k_low, k_high = halves(k_t[WHO], buffer, first + row < end, features(COLUMNS))
        turn_keys(k_low, k_high, own, keys_t, turned_t)
        if HALO > 0 and WHO == 0:
            known = gl.where(n == 0, older if TAIL else 0, OLDER)
            if LENGTHS:
                length = gl.minimum(gl.load(tail_length + sequence), older)
                known = gl.where(n == 0, length, OLDER)
            SOME: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
            i = gl.arange(0, OLDER, layout=gl.SliceLayout(1, SOME))
            o_low, o_high = halves(k_older_t, buffer, i >= OLDER - known, SOME)
            turn_keys(o_low, o_high, buffer, older_t, older_turned_t)
            rows_of(k_older_t, 2 * buffer).store(o_low)
            rows_of(k_older_t, 2 * buffer + 1).store(o_high)
        fence_async_shared()
        if WHO == 0:  # the second chunk's role still reads the first one's keys
            mbarrier.wait(second_done, (n & 1) ^ 1)
        if n + 1 < spans:
            copy_queries(WHO, n + 1, q, q_t, asked, place)
            copy_span(WHO, n + 1, operands, inputs, copied, place, older, TAIL, HALO)
        of_q = nothing
        of_k = nothing
        for s in range(HALF):
            at = n * STEPS + s
            slot = at % SLOTS
            mbarrier.wait(ready.index(slot), (at // SLOTS) & 1)
            tile = low_t.index(slot)
            upper = tile.slice(HALF, HALF)
            by, by_beyond = columns_of(queries_t, 0, s)
            of_q = found(q_low, q_high, by, by_beyond, s, tile, of_q)
            of_q = warpgroup_mma(times(q_high, by), upper, of_q, is_async=True)
            if DOT:
                of_q = warpgroup_mma_wait(0, deps=[of_q])
            else:
                by, by_beyond = columns_of(keys_t, own * WIDTH, s)
                of_k = found(k_low, k_high, by, by_beyond, s, tile, of_k)
                of_q = warpgroup_mma_wait(1, deps=[of_q])  # what operands were made in is free
                of_k = warpgroup_mma(times(k_high, by), upper, of_k, is_async=True)
                of_q, of_k = warpgroup_mma_wait(0, deps=[of_q, of_k])
            mbarrier.arrive(taken.index(slot), count=1)
        rate = rate_of(ends, place, 2 * n, heads)
        rate_second = rate_of(ends, place, 2 * n + 1, heads)
        write, there = write_of(writes, place, c, heads, HALO, False)
        write_again, there_again = write, there
        if HALO:
            write_again, there_again = write_of(writes, place, c + 1, heads, HALO, True)
        at = n * STEPS + HALF
        squares = at % SLOTS
        mbarrier.wait(ready.index(squares), (at // SLOTS) & 1)
        at += 1
        numbers = at % SLOTS
        mbarrier.wait(ready.index(numbers), (at // SLOTS) & 1)
        of_q = found_last(q_low, q_high, low_t.index(squares), low_t.index(numbers), of_q)
        if DOT:
            of_q = warpgroup_mma_wait(0, deps=[of_q])
        else:
            of_k = found_last(k_low, k_high, low_t.index(squares), low_t.index(numbers), of_k)
            of_q, of_k = warpgroup_mma_wait(0, deps=[of_q, of_k])
        mbarrier.arrive(taken.index(squares), count=1)
        mbarrier.arrive(taken.index(numbers), count=1)

        if WHO == 0:
            keep_looked(looked, of_q, there, place, c, heads, VALUES)
        # The chunks' errors, one after the other.
        values = v_t.index(buffer).reshape([CHUNK, COLUMNS])
        if WHO == 1:
            mbarrier.wait(first_wrote, n & 1)
            by_first = (k_t[0], own_t.index(0))
            by_older = (k_older_t, own_t.index(2))
            if not DOT:
                of_k = without(rate * of_k, k_low, k_high, by_first, by_older, buffer, a1, a2, HALO)
        R = of_k - values.load(OUT).to(gl.float32)
        W = gl.where(there[:, None], write[:, None] * R, 0.0)
        if WHO == 0:
            own_t.index(0).store(W.to(dtype))
            fence_async_shared()
            mbarrier.arrive(first_wrote, count=1)
        else:
            wrote_t.index(1).store(W.to(dtype))
            fence_async_shared()
        keep_errors(errors, R, there, place, c, heads, VALUES, HALO, False)
        if WHO == 0:
            W_end = rate_second * W
            if HALO:
                if not DOT:
                    of_k = without(
                        rate * of_k, k_low, k_high, (k_t[0], own_t.index(0)),
                        (k_older_t, own_t.index(2)), buffer, a1, a2, HALO,
                    )  # fmt: skip
                R = of_k - values.load(OUT).to(gl.float32)
                again = gl.where(there_again[:, None], write_again[:, None] * R, 0.0)
                own_t.index(1).store(again.to(dtype))
                W_end += again
            wrote_t.index(0).store(W_end.to(dtype))
            fence_async_shared()
            if HALO:
                mbarrier.arrive(first_done, count=1)
            mbarrier.arrive(wrote, count=1)
        else:
            if HALO:
                mbarrier.wait(first_done, n & 1)
                if not DOT:
                    of_k = without(
                        rate_second * of_k, k_low, k_high, (k_t[1], wrote_t.index(1)),
                        (k_t[0], own_t.index(1)), buffer, a1, a2, HALO,
                    )  # fmt: skip
                R = of_k - values.load(OUT).to(gl.float32)
                again = gl.where(there_again[:, None], write_again[:, None] * R, 0.0)
                decayed = rate_of(ends, place, 2 * n + 3, heads) * again
                wrote_t.index(2 + (n + 1) % 2).store(decayed.to(dtype))
                fence_async_shared()
            mbarrier.arrive(wrote, count=1)
            # `advance` goes on; there was time for queries now, before what they take is lost.
            of_q = without(rate * of_q, q_low, q_high, by_first, by_older, buffer, a1, a2, HALO)
            if HALO:
                own_t.index(2).store(again.to(dtype))
                fence_async_shared()
            mbarrier.arrive(second_done, count=1)
        if HALO:
            keep_errors(errors, R, there_again, place, c + 1, heads, VALUES, HALO, True)
        if WHO == 1:
            keep_looked(looked, of_q, there, place, c, heads, VALUES)


@gluon.jit(do_not_specialize=WALK_RUNTIME)
def omega_walk_spans(
    q, k, v, k_older, tail_k, tail_length, older_errors, cu, writes, ends, a, packed, looked,
    errors,
    tokens: gl.int32, heads: gl.int32, chunks: gl.int32, older: gl.int32,
    stride_ah: gl.int64, stride_ar: gl.int64,
    DOT: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr,
    DEFAULTS: gl.constexpr, NUMBERS: gl.constexpr, VALUES: gl.constexpr, HALO: gl.constexpr,
    SLOTS: gl.constexpr, LOOK_REGISTERS: gl.constexpr, ADVANCE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the memory of one head of one sequence, through all of its chunks.

    q, k: descriptors of (B, H, T, NUMBERS) in tiles of CHUNK rows and HALF columns, v: of COLUMNS
    columns; k_older: of OLDER rows, tail_k: of (N, H, older, NUMBERS). older_errors (N, H, HALO,
    VALUES), fp32: R of the tail's keys before the first chunk. The others as those of
    `omega_walk_symmetric`.
    """
    place = place_program(gl.program_id(0), cu, tokens, heads, chunks, VALUES, PACKED)
    head = place[3]
    a1 = coefficient(a, 1, head, stride_ah, stride_ar, DEFAULTS)
    a2 = coefficient(a, 2, head, stride_ah, stride_ar, DEFAULTS)
    dtype: gl.constexpr = k.dtype
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(64, 16, rank=2)
    low_t = gl.allocate_shared_memory(dtype, [SLOTS, WIDTH, COLUMNS], TILE)
    wrote_t = gl.allocate_shared_memory(dtype, [4, CHUNK, COLUMNS], TILE)
    own_t = gl.allocate_shared_memory(dtype, [3, CHUNK, COLUMNS], TILE)
    first_q_t = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, HALF], q.layout)
    second_q_t = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, HALF], q.layout)
    first_k_t = gl.allocate_shared_memory(dtype, [4, 1, 1, CHUNK, HALF], k.layout)
    second_k_t = gl.allocate_shared_memory(dtype, [4, 1, 1, CHUNK, HALF], k.layout)
    first_v_t = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, COLUMNS], v.layout)
    second_v_t = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, COLUMNS], v.layout)
    first_queries_t = gl.allocate_shared_memory(dtype, [WIDTH, CHUNK], LINE)
    second_queries_t = gl.allocate_shared_memory(dtype, [WIDTH, CHUNK], LINE)
    keys_t = gl.allocate_shared_memory(dtype, [4 * WIDTH, CHUNK], LINE)
    OPERAND: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    turned_t = gl.allocate_shared_memory(dtype, [4, WIDTH, CHUNK], OPERAND)
    k_older_t = first_k_t
    older_t = keys_t
    older_turned_t = turned_t
    if HALO:
        k_older_t = gl.allocate_shared_memory(dtype, [4, 1, 1, OLDER, HALF], k_older.layout)
        older_t = gl.allocate_shared_memory(dtype, [2 * WIDTH, OLDER], LINE)
        SMALL: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
        older_turned_t = gl.allocate_shared_memory(dtype, [2, WIDTH, OLDER], SMALL)
    ready = barriers(SLOTS, 1)
    taken = barriers(SLOTS, 2)  # by both that look
    wrote = barriers(1, 2)
    alone = barriers(3, 1)
    asked = barriers(2, 1)
    first_copied = barriers(2, 1)
    second_copied = barriers(2, 1)
    lines = gl.allocate_shared_memory(gl.float32, [2, WIDTH * COLUMNS], LINE)
    of_memory = (low_t, wrote_t, keys_t, turned_t, older_t, older_turned_t)
    tiles = (
        (first_k_t, second_k_t), k_older_t, wrote_t, keys_t, turned_t, older_t, older_turned_t,
        own_t,
    )  # fmt: skip
    chain = (alone.index(0), alone.index(1), alone.index(2))
    turns = (ready, taken, wrote.index(0))
    first_bars = (turns, first_copied, asked.index(0), chain)
    second_bars = (turns, second_copied, asked.index(1), chain)
    operands = (q, k, v, k_older, tail_k)
    weights = (gl.sqrt_rn(a1), gl.sqrt_rn(a2))
    gl.warp_specialize(
        [
            (
                look,
                (
                    0, operands, (looked, errors), (first_q_t, first_v_t), tiles, low_t,
                    first_queries_t, first_bars, older_errors, tail_length, writes, ends, (a1, a2),
                    place, heads, older, DOT, PACKED, TAIL, LENGTHS, VALUES, HALO, SLOTS,
                ),
            ),
            (
                look,
                (
                    1, operands, (looked, errors), (second_q_t, second_v_t), tiles, low_t,
                    second_queries_t, second_bars, older_errors, tail_length, writes, ends,
                    (a1, a2),
                    place, heads, older, DOT, PACKED, TAIL, LENGTHS, VALUES, HALO, SLOTS,
                ),
            ),
            (
                advance,
                (
                    0, of_memory, lines.index(0), turns, packed, ends, weights, place, heads,
                    HALO, NUMBERS,
                ),
            ),
            (
                advance,
                (
                    1, of_memory, lines.index(1), turns, packed, ends, weights, place, heads,
                    HALO, NUMBERS,
                ),
            ),
        ],
        [4, 4, 4],
        [LOOK_REGISTERS, ADVANCE_REGISTERS, ADVANCE_REGISTERS],
    )  # fmt: skip
