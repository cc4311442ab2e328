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

from .hopper_fwd import CHUNK, barriers, left_operand, product

WALK_RUNTIME = ("tokens", "heads", "chunks", "older", "stride_ah", "stride_ar")
COLUMNS = gl.constexpr(32)  # of the memory that a program has
WIDTH = gl.constexpr(64)  # of a padded key
HALF = gl.constexpr(32)
STEPS = gl.constexpr(34)  # tiles of a memory: of pairs, of the upper half's squares, of numbers
OLDER = gl.constexpr(16)  # keys of the chunk before that a chunk may see
ROOT2 = gl.constexpr(1.4142135623730951)


@gluon.constexpr_function
def features(columns):
    """The layout of features as the left operand of a product of COLUMNS columns."""
    return gl.DotOperandLayout(0, product(columns), 2)


@gluon.constexpr_function
def along_tokens():
    """A layout of [tokens, numbers] whose threads have 8 tokens of a number."""
    return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])


@gluon.constexpr_function
def of_pairs_of(type_name, code):
    """PTX for two 16-bit numbers in each register."""
    return code.replace("TYPE", "bf16x2" if type_name == "bf16" else "f16x2")


@gluon.jit
def times(x, by):
    """x · by, both of one 16-bit type."""
    x, by = gl.broadcast(x, by)
    CODE: gl.constexpr = of_pairs_of(x.dtype.name, "mul.rn.TYPE $0, $1, $2;")
    return gl.inline_asm_elementwise(CODE, "=r,r,r", [x, by], x.dtype, is_pure=True, pack=2)


@gluon.jit
def one_of(x, by, other, by_other, mask):
    """x · by where bits of `mask` are set, else other · by_other. (The compiler's own selection
    takes every number out of its pair.)
    """
    x, by = gl.broadcast(x, by)
    other, by_other = gl.broadcast(other, by_other)
    x, mask = gl.broadcast(x, mask)
    CODE: gl.constexpr = of_pairs_of(
        x.dtype.name,
        "{ .reg .b32 x, y; mul.rn.TYPE x, $1, $2; mul.rn.TYPE y, $3, $4; "
        "lop3.b32 $0, $5, x, y, 0xCA; }",
    )
    arguments = [x, by, other, by_other, mask]
    return gl.inline_asm_elementwise(
        CODE, "=r,r,r,r,r,r", arguments, x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def place_program(number, cu, tokens, heads, chunks, VALUES: gl.constexpr, PACKED: gl.constexpr):
    """Of a program: its memory's number, sequence, row of the batch, head and first column; the
    sequence's first token, its end, its number of chunks and its first slot.
    """
    blocks: gl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    head = number // blocks % heads
    sequence = number // blocks // heads
    batch = sequence
    begin = tokens * 0
    end = tokens
    slot0 = sequence * chunks
    if PACKED:
        batch = begin
        begin = gl.load(cu + sequence)
        end = gl.load(cu + sequence + 1)
        slot0 = begin // CHUNK + sequence
    count = gl.cdiv(end - begin, CHUNK)
    return number, sequence, batch, head, number % blocks * COLUMNS, begin, end, count, slot0


@gluon.jit
def rate_of(ends, place, c, heads):
    """A of a chunk's last token: 1 where there is no such chunk."""
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    at = (slot0 + c).to(gl.int64) * heads + head
    return gl.load(ends + at * 3, mask=(c >= 0) & (c < count), other=1.0)


@gluon.jit
def coefficient(a, r: gl.constexpr, head, stride_ah, stride_ar, DEFAULTS: gl.constexpr):
    """a_r of a head; DEFAULTS: all of them where no tensor holds any."""
    if DEFAULTS is None:
        return gl.load(a + head * stride_ah + r * stride_ar).to(gl.float32)
    else:
        return gl.to_tensor(DEFAULTS[r]).to(gl.float32)


# ---- advance ------------------------------------------------------------------------------------


@gluon.jit
def scaled(x, keys, turned, place, s):
    """Features of a step, transposed: x_s x_c from row s on, x_{H+s} x_{H+c} before it."""
    F: gl.constexpr = features(COLUMNS)
    by = keys.index(place * WIDTH + s).load(gl.SliceLayout(0, F))
    by_beyond = keys.index(place * WIDTH + HALF + s).load(gl.SliceLayout(0, F))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, F))
    mask = gl.where(c >= s, -1, 0).to(gl.int16)
    beyond = turned.index(place).load(F)
    return one_of(x, by[None, :], beyond, by_beyond[None, :], mask[:, None])


@gluon.jit
def advance(
    WHO: gl.constexpr,
    tiles, bars, packed, ends, weights, place, heads,
    HALO: gl.constexpr, NUMBERS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: every other tile of the memory, from span to span."""
    low_t, wrote_t, keys_t, turned_t, older_t, older_turned_t = tiles
    ready, taken, wrote = bars
    of_numbers, of_pairs = weights
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = low_t.dtype
    OUT: gl.constexpr = product(COLUMNS)
    F: gl.constexpr = features(COLUMNS)
    TILES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, OUT))
    e = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    memory = packed + number.to(gl.int64) * (STEPS * WIDTH * COLUMNS)
    cells = c[:, None] * COLUMNS + e[None, :]
    SIZE: gl.constexpr = WIDTH * COLUMNS
    spans = gl.cdiv(count, 2)
    of_chunks = keys_t._reinterpret(dtype, [4, WIDTH, CHUNK], TILES)
    of_older = older_t._reinterpret(dtype, [2, WIDTH, OLDER], TILES)
    nothing = gl.zeros([WIDTH, COLUMNS], gl.float32, OUT)
    for n in range(spans + 1):
        buffer = (n + 1) % 2  # of the span before
        rate = rate_of(ends, place, 2 * n - 2, heads) * rate_of(ends, place, 2 * n - 1, heads)
        mbarrier.wait(wrote, n & 1)
        x0 = of_chunks.index(2 * buffer).load(F)
        x1 = of_chunks.index(2 * buffer + 1).load(F)
        older_wrote = wrote_t.index(2 + buffer)
        if HALO:
            x2 = of_older.index(buffer).load(F)
            older_wrote = older_wrote.slice(CHUNK - OLDER, OLDER)
        for m in range(HALF // 2):
            s = 2 * m + WHO
            tile = gl.load(memory + s * SIZE + cells)
            acc = warpgroup_mma(
                scaled(x0, keys_t, turned_t, 2 * buffer, s), wrote_t.index(0), nothing,
                use_acc=False, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma(
                scaled(x1, keys_t, turned_t, 2 * buffer + 1, s), wrote_t.index(1), acc,
                is_async=True,
            )  # fmt: skip
            if HALO:
                acc = warpgroup_mma(
                    scaled(x2, older_t, older_turned_t, buffer, s), older_wrote, acc, is_async=True
                )
            weight = of_pairs * gl.where(c == s, 1.0, ROOT2)
            weight = gl.where(gl.where(c >= s, c, s + HALF) < NUMBERS, weight, 0.0)
            acc = warpgroup_mma_wait(0, deps=[acc])
            tile = rate * tile - weight[:, None] * acc
            gl.store(memory + s * SIZE + cells, tile)
            if n < spans:
                at = n * STEPS + s
                slot = at % SLOTS
                mbarrier.wait(taken.index(slot), ((at // SLOTS) & 1) ^ 1)
                low_t.index(slot).store((weight[:, None] * tile).to(dtype))
                fence_async_shared()
                mbarrier.arrive(ready.index(slot), count=1)
        # Squares of the upper half, or the numbers.
        weight = gl.where((c >= HALF) & (c < NUMBERS), of_pairs, 0.0)
        if WHO == 1:
            weight = gl.where(c < NUMBERS, of_numbers, 0.0)
        tile = gl.load(memory + (HALF + WHO) * SIZE + cells)
        of_x0 = x0
        of_x1 = x1
        if WHO == 0:
            of_x0 = times(x0, x0)
            of_x1 = times(x1, x1)
        acc = warpgroup_mma(of_x0, wrote_t.index(0), nothing, use_acc=False, is_async=True)
        acc = warpgroup_mma(of_x1, wrote_t.index(1), acc, is_async=True)
        if HALO:
            of_x2 = x2
            if WHO == 0:
                of_x2 = times(x2, x2)
            acc = warpgroup_mma(of_x2, older_wrote, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        tile = rate * tile - weight[:, None] * acc
        gl.store(memory + (HALF + WHO) * SIZE + cells, tile)
        if n < spans:
            at = n * STEPS + HALF + WHO
            slot = at % SLOTS
            mbarrier.wait(taken.index(slot), ((at // SLOTS) & 1) ^ 1)
            low_t.index(slot).store((weight[:, None] * tile).to(dtype))
            fence_async_shared()
            mbarrier.arrive(ready.index(slot), count=1)


# ---- look ---------------------------------------------------------------------------------------


@gluon.jit
def copy_halves(x, at, tile, bar):
    """Both halves of the width of a tile of rows."""
    row, head, first = at
    tma.async_copy_global_to_shared(x, [row, head, first, 0], bar, tile.index(0))
    tma.async_copy_global_to_shared(x, [row, head, first, HALF], bar, tile.index(1))


@gluon.jit
def halves(tile, there, LAYOUT: gl.constexpr):
    """Both halves of the width of rows in shared memory; 0 but where `there`."""
    SIZE: gl.constexpr = tile.shape[3]
    low = tile.index(0).reshape([SIZE, HALF]).load(LAYOUT)
    high = tile.index(1).reshape([SIZE, HALF]).load(LAYOUT)
    return gl.where(there[:, None], low, 0.0), gl.where(there[:, None], high, 0.0)


@gluon.jit
def turn(low, high, place, columns):
    """Store rows transposed, as the place-th tile of `columns`, a row there for each number."""
    SIZE: gl.constexpr = columns.shape[1]
    L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = columns._reinterpret(columns.dtype, [columns.shape[0] // HALF, HALF, SIZE], L)
    low = gl.convert_layout(low, along_tokens())
    high = gl.convert_layout(high, along_tokens())
    parts.index(2 * place).permute((1, 0)).store(low)
    parts.index(2 * place + 1).permute((1, 0)).store(high)


@gluon.jit
def turn_keys(low, high, place, columns, turned):
    """What `turn` does; and once more, the upper half first, where operands are loaded from."""
    turn(low, high, place, columns)
    SIZE: gl.constexpr = turned.shape[2]
    parts = turned._reinterpret(turned.dtype, [turned.shape[0] * 2, HALF, SIZE], turned.layout)
    parts.index(2 * place).permute((1, 0)).store(gl.convert_layout(high, along_tokens()))
    parts.index(2 * place + 1).permute((1, 0)).store(gl.convert_layout(low, along_tokens()))


@gluon.jit
def found(low, high, at, columns, s, tile, acc):
    """acc, and what tokens find in the tile of step s."""
    F: gl.constexpr = features(COLUMNS)
    by = columns.index(at + s).load(gl.SliceLayout(1, F))
    by_beyond = columns.index(at + HALF + s).load(gl.SliceLayout(1, F))
    c = gl.arange(0, HALF, layout=gl.SliceLayout(0, F))
    mask = gl.where(c >= s, -1, 0).to(gl.int16)
    lower = one_of(low, by[:, None], high, by_beyond[:, None], mask[None, :])
    acc = warpgroup_mma(lower, tile.slice(0, HALF), acc, is_async=True)
    return warpgroup_mma(times(high, by[:, None]), tile.slice(HALF, HALF), acc, is_async=True)


@gluon.jit
def found_last(low, high, squares, numbers, acc):
    """acc, and what tokens find in the tile of squares, and in that of numbers."""
    acc = warpgroup_mma(times(high, high), squares.slice(HALF, HALF), acc, is_async=True)
    acc = warpgroup_mma(low, numbers.slice(0, HALF), acc, is_async=True)
    return warpgroup_mma(high, numbers.slice(HALF, HALF), acc, is_async=True)


@gluon.jit
def owed(low, high, keys, a1, a2, ROWS_: gl.constexpr, FROM: gl.constexpr):
    """−κ(X Kᵀ) with κ(x) = a_1 x + a_2 x², as the left operand of a product with what keys write:
    of ROWS_ keys from the FROM-th row of a tile on.
    """
    L: gl.constexpr = product(ROWS_)
    ALL: gl.constexpr = keys.shape[3]
    of_low = keys.index(0).reshape([ALL, HALF]).slice(FROM, ROWS_).permute((1, 0))
    of_high = keys.index(1).reshape([ALL, HALF]).slice(FROM, ROWS_).permute((1, 0))
    acc = gl.zeros([CHUNK, ROWS_], gl.float32, L)
    low = gl.convert_layout(low, features(ROWS_))
    high = gl.convert_layout(high, features(ROWS_))
    acc = warpgroup_mma(low, of_low, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(high, of_high, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return left_operand(-acc * (a1 + a2 * acc), COLUMNS, keys.dtype)


@gluon.jit
def without(acc, low, high, written, older_written, a1, a2, HALO: gl.constexpr):
    """acc less what a chunk's tokens and older ones wrote: pairs of their keys and of the rows of
    what each wrote. The older ones are the last rows of theirs.
    """
    keys, by = written
    for half in gl.static_range(2):
        part = owed(low, high, keys, a1, a2, HALF, half * HALF)
        acc = warpgroup_mma(part, by.slice(half * HALF, HALF), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    if HALO:
        older_keys, by_older = older_written
        ALL: gl.constexpr = older_keys.shape[3]
        part = owed(low, high, older_keys, a1, a2, OLDER, ALL - OLDER)
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
def look(
    WHO: gl.constexpr,
    operands, outs, of_inputs, tiles, low_t, queries_t, bars, older_errors, tail_length, writes,
    ends, kappa, place, tokens, heads, older,
    DOT: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr,
    VALUES: gl.constexpr, HALO: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: every other chunk, and what follows from it for the next one."""
    q, k, v, k_older, tail_k = operands
    looked, errors = outs
    q_t, v_t = of_inputs
    k_t, k_older_t, wrote_t, keys_t, turned_t, older_t, older_turned_t, own_t = tiles
    ready, taken, wrote, copied, first_wrote, first_done, second_done = bars
    a1, a2 = kappa
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = low_t.dtype
    OUT: gl.constexpr = product(COLUMNS)
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT))
    e = v0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, features(COLUMNS)))
    nothing = gl.zeros([CHUNK, COLUMNS], gl.float32, OUT)
    OF_OLDER: gl.constexpr = 2 * OLDER * WIDTH if HALO > 0 and WHO == 0 else 0
    BYTES: gl.constexpr = 2 * CHUNK * (2 * WIDTH + COLUMNS) + OF_OLDER
    own_k = k_t[WHO]
    written_by_none(
        WHO, tiles, older_errors, errors, writes, ends, place, heads, TAIL, VALUES, HALO
    )
    fence_async_shared()
    mbarrier.arrive(wrote, count=1)
    for n in range(gl.cdiv(count, 2)):
        c = 2 * n + WHO
        first = begin + c * CHUNK
        rate = rate_of(ends, place, 2 * n, heads)
        rate_second = rate_of(ends, place, 2 * n + 1, heads)
        if WHO == 0:
            mbarrier.wait(second_done, (n & 1) ^ 1)
        mbarrier.expect(copied, BYTES)
        copy_halves(q, (batch, head, first), q_t, copied)
        copy_halves(k, (batch, head, first), own_k, copied)
        tma.async_copy_global_to_shared(v, [batch, head, first, v0], copied, v_t.index(0))
        if HALO > 0 and WHO == 0:
            if TAIL and n == 0:
                copy_halves(tail_k, (sequence, head, older - OLDER), k_older_t, copied)
            else:
                copy_halves(k_older, (batch, head, first - OLDER), k_older_t, copied)
        mbarrier.wait(copied, n & 1)
        q_low, q_high = halves(q_t, row < CHUNK, features(COLUMNS))
        k_low, k_high = halves(own_k, first + row < end, features(COLUMNS))
        turn(q_low, q_high, 0, queries_t)
        own = n % 2 * 2 + WHO
        turn_keys(k_low, k_high, own, keys_t, turned_t)
        if HALO > 0 and WHO == 0:
            known = gl.where(n == 0, older if TAIL else 0, OLDER)
            if LENGTHS:
                length = gl.minimum(gl.load(tail_length + sequence), older)
                known = gl.where(n == 0, length, OLDER)
            SOME: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
            i = gl.arange(0, OLDER, layout=gl.SliceLayout(1, SOME))
            o_low, o_high = halves(k_older_t, i >= OLDER - known, SOME)
            turn_keys(o_low, o_high, n % 2, older_t, older_turned_t)
            k_older_t.index(0).reshape([OLDER, HALF]).store(o_low)
            k_older_t.index(1).reshape([OLDER, HALF]).store(o_high)
            fence_async_shared()
        of_q = nothing
        of_k = nothing
        for s in range(HALF):
            at = n * STEPS + s
            slot = at % SLOTS
            mbarrier.wait(ready.index(slot), (at // SLOTS) & 1)
            of_q = found(q_low, q_high, 0, queries_t, s, low_t.index(slot), of_q)
            if DOT:
                of_q = warpgroup_mma_wait(0, deps=[of_q])
            else:
                of_k = found(k_low, k_high, own * WIDTH, keys_t, s, low_t.index(slot), of_k)
                of_q, of_k = warpgroup_mma_wait(0, deps=[of_q, of_k])
            mbarrier.arrive(taken.index(slot), count=1)
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

        values = v_t.index(0).reshape([CHUNK, COLUMNS])
        if WHO == 1:
            mbarrier.wait(first_wrote, n & 1)
            by_first = (k_t[0], own_t.index(0))
            by_older = (k_older_t, own_t.index(2))
            of_q = without(rate * of_q, q_low, q_high, by_first, by_older, a1, a2, HALO)
            if not DOT:
                of_k = without(rate * of_k, k_low, k_high, by_first, by_older, a1, a2, HALO)
        there = first + t < end
        to = ((batch * tokens + first + t).to(gl.int64) * heads + head)[:, None] * VALUES
        gl.store(looked + to + e[None, :], of_q, mask=there[:, None] & (e < VALUES)[None, :])
        R = of_k - values.load(OUT).to(gl.float32)
        keep_errors(errors, R, there, place, c, heads, VALUES, HALO, False)
        write, there = write_of(writes, place, c, heads, HALO, False)
        W = gl.where(there[:, None], write[:, None] * R, 0.0)
        if WHO == 0:
            own_t.index(0).store(W.to(dtype))
            fence_async_shared()
            mbarrier.arrive(first_wrote, count=1)
            W_end = rate_second * W
            if HALO:
                if not DOT:
                    of_k = without(
                        rate * of_k, k_low, k_high, (k_t[0], own_t.index(0)),
                        (k_older_t, own_t.index(2)), a1, a2, HALO,
                    )  # fmt: skip
                R = of_k - values.load(OUT).to(gl.float32)
                write, there = write_of(writes, place, c + 1, heads, HALO, True)
                keep_errors(errors, R, there, place, c + 1, heads, VALUES, HALO, True)
                again = gl.where(there[:, None], write[:, None] * R, 0.0)
                own_t.index(1).store(again.to(dtype))
                W_end += again
            wrote_t.index(0).store(W_end.to(dtype))
            fence_async_shared()
            if HALO:
                mbarrier.arrive(first_done, count=1)
        else:
            wrote_t.index(1).store(W.to(dtype))
            fence_async_shared()
            if HALO:
                mbarrier.wait(first_done, n & 1)
                if not DOT:
                    of_k = without(
                        rate_second * of_k, k_low, k_high, (k_t[1], wrote_t.index(1)),
                        (k_t[0], own_t.index(1)), a1, a2, HALO,
                    )  # fmt: skip
                R = of_k - values.load(OUT).to(gl.float32)
                write, there = write_of(writes, place, c + 1, heads, HALO, True)
                keep_errors(errors, R, there, place, c + 1, heads, VALUES, HALO, True)
                again = gl.where(there[:, None], write[:, None] * R, 0.0)
                own_t.index(2).store(again.to(dtype))
                again = rate_of(ends, place, 2 * n + 3, heads) * again
                wrote_t.index(2 + (n + 1) % 2).store(again.to(dtype))
                fence_async_shared()
            mbarrier.arrive(second_done, count=1)
        mbarrier.arrive(wrote, count=1)


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
    first_k_t = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, HALF], k.layout)
    second_k_t = gl.allocate_shared_memory(dtype, [2, 1, 1, CHUNK, HALF], k.layout)
    first_v_t = gl.allocate_shared_memory(dtype, [1, 1, 1, CHUNK, COLUMNS], v.layout)
    second_v_t = gl.allocate_shared_memory(dtype, [1, 1, 1, CHUNK, COLUMNS], v.layout)
    first_queries_t = gl.allocate_shared_memory(dtype, [WIDTH, CHUNK], LINE)
    second_queries_t = gl.allocate_shared_memory(dtype, [WIDTH, CHUNK], LINE)
    keys_t = gl.allocate_shared_memory(dtype, [4 * WIDTH, CHUNK], LINE)
    OPERAND: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    turned_t = gl.allocate_shared_memory(dtype, [4, WIDTH, CHUNK], OPERAND)
    k_older_t = first_k_t
    older_t = keys_t
    older_turned_t = turned_t
    if HALO:
        k_older_t = gl.allocate_shared_memory(dtype, [2, 1, 1, OLDER, HALF], k_older.layout)
        older_t = gl.allocate_shared_memory(dtype, [2 * WIDTH, OLDER], LINE)
        SMALL: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
        older_turned_t = gl.allocate_shared_memory(dtype, [2, WIDTH, OLDER], SMALL)
    ready = barriers(SLOTS, 1)
    taken = barriers(SLOTS, 2)  # by both that look
    wrote = barriers(1, 2)
    alone = barriers(5, 1)
    of_memory = (low_t, wrote_t, keys_t, turned_t, older_t, older_turned_t)
    tiles = (
        (first_k_t, second_k_t), k_older_t, wrote_t, keys_t, turned_t, older_t, older_turned_t,
        own_t,
    )  # fmt: skip
    first_bars = (
        ready, taken, wrote.index(0), alone.index(0), alone.index(2), alone.index(3), alone.index(4)
    )  # fmt: skip
    second_bars = (
        ready, taken, wrote.index(0), alone.index(1), alone.index(2), alone.index(3), alone.index(4)
    )  # fmt: skip
    operands = (q, k, v, k_older, tail_k)
    weights = (gl.sqrt_rn(a1), gl.sqrt_rn(a2))
    gl.warp_specialize(
        [
            (
                look,
                (
                    0, operands, (looked, errors), (first_q_t, first_v_t), tiles, low_t,
                    first_queries_t, first_bars, older_errors, tail_length, writes, ends, (a1, a2),
                    place, tokens, heads, older, DOT, PACKED, TAIL, LENGTHS, VALUES, HALO, SLOTS,
                ),
            ),
            (
                look,
                (
                    1, operands, (looked, errors), (second_q_t, second_v_t), tiles, low_t,
                    second_queries_t, second_bars, older_errors, tail_length, writes, ends,
                    (a1, a2),
                    place, tokens, heads, older, DOT, PACKED, TAIL, LENGTHS, VALUES, HALO, SLOTS,
                ),
            ),
            (
                advance,
                (
                    0, of_memory, (ready, taken, wrote.index(0)), packed, ends, weights, place,
                    heads, HALO, NUMBERS, SLOTS,
                ),
            ),
            (
                advance,
                (
                    1, of_memory, (ready, taken, wrote.index(0)), packed, ends, weights, place,
                    heads, HALO, NUMBERS, SLOTS,
                ),
            ),
        ],
        [4, 4, 4],
        [LOOK_REGISTERS, ADVANCE_REGISTERS, ADVANCE_REGISTERS],
    )  # fmt: skip
