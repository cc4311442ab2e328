"""Forward of the Omega rule for Hopper, in Gluon: the walk along a sequence with its reads beside.

One program is one head of one sequence and COLUMNS columns of its memory. Four roles share it:

    produce   one warp; copies a chunk's tiles while earlier chunks are at work
    walk      a warpgroup; memory and momentum, transposed, are its accumulators:
              Rᵀ = Mᵀ Kᵀ − Vᵀ, then Mᵀ ← A Mᵀ + a Sᵀ − (P ∘ R)ᵀ K and Sᵀ ← B Sᵀ − (U ∘ R)ᵀ K
    read      two warpgroups, chunk after chunk in turn, from what walk leaves in shared memory:
              Y = A ∘ Q M + a ∘ Q S − (P ∘ Q Kᵀ) R

The keys of a chunk are its own, CHUNK of them, and HALO older ones, a tile of their own. P of the
reads comes from `omega_tables`, that of a chunk's last token, and its U, from `omega_gates`.
Notation and formulas are those of `eager.py`.
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

SCAN_RUNTIME = ("tokens", "heads", "chunks", "older")
CHUNK = gl.constexpr(64)  # tokens of a tile: the M of a wgmma
COLUMNS = gl.constexpr(64)  # of the memory that a program has: that M again
READERS = gl.constexpr(2)


@gluon.constexpr_function
def product(columns):
    """The layout of a product of CHUNK rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def left_operand(x, columns: gl.constexpr, dtype: gl.constexpr):
    """x as the left operand of a product of that many columns."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, product(columns), 2))


@gluon.jit
def minus(tile, columns: gl.constexpr):
    """Rows in shared memory, negative and transposed, as an accumulator."""
    return -tile.permute((1, 0)).load(product(columns)).to(gl.float32)


@gluon.jit
def keep_rows(tile, low, high, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Set all rows of a tile in shared memory but `low … high − 1` to 0, by one warp, for wgmma to
    read: with a weight of 0, too, NaN makes NaN.

    Swizzled by 128 bytes, the tile is a row of blocks of 64 columns, each a pile of eight-row
    pieces of 1 KiB.
    """
    PIECE: gl.constexpr = 8
    ACROSS: gl.constexpr = 64
    PIECES: gl.constexpr = ROWS // PIECE
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    pieces = tile._reinterpret(tile.dtype, [COLS // ACROSS * PIECES, PIECE, ACROSS], SWIZZLED)
    for piece in range(COLS // ACROSS * PIECES):
        row = piece % PIECES * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, LAYOUT))
        part = pieces.index(piece)
        keep = ((row >= low) & (row < high))[:, None]
        part.store(gl.where(keep, part.load(LAYOUT), 0.0))


@gluon.jit
def place_sequence(
    number, cu, tokens, heads, chunks, VALUES: gl.constexpr, PACKED: gl.constexpr,
    GROUPS: gl.constexpr = 1,
):  # fmt: skip
    """Of a program: its sequence, row of the batch, head and first column; the sequence's first
    token, its end, its number of chunks and its first slot.

    GROUPS: of a sequence's chunks, each as many but the last ones; a program has one of them as if
    it were a sequence, which begins behind token 0.
    """
    blocks: gl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    head = number // blocks % heads
    sequence = number // blocks // heads
    v0 = number % blocks * COLUMNS
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
    if GROUPS > 1:
        batch = sequence // GROUPS
        first = gl.minimum(sequence % GROUPS * gl.cdiv(chunks, GROUPS), chunks)
        begin = first * CHUNK
        count = gl.minimum(gl.cdiv(chunks, GROUPS), chunks - first)
        slot0 = batch * chunks + first
    return sequence, batch, head, v0, begin, end, count, slot0


@gluon.jit
def among_groups(number, each, FIRST: gl.constexpr, SOME: gl.constexpr, GROUPS: gl.constexpr):
    """Of a program that is the number-th of SOME groups of each sequence, from the FIRST on, with
    `each` programs a group: its number among those of all groups.
    """
    return number + (number // each // SOME * (GROUPS - SOME) + FIRST) * each


@gluon.jit
def opens(place, c, PACKED: gl.constexpr):
    """Whether no token of the sequence is in front of chunk c, and which tail then is: its row."""
    sequence, batch, head, v0, begin, end, count, slot0 = place
    opening = c == 0
    row = sequence
    if not PACKED:
        opening = opening & (begin == 0)
        row = batch
    return opening, row


@gluon.jit
def columns_of_state(
    place, heads, WIDTH: gl.constexpr, VALUES: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Places of a program's columns, transposed, in states (N, H, WIDTH, VALUES); which exist."""
    sequence, batch, head, v0, begin, end, count, slot0 = place
    e = v0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, product(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, product(D)))
    cells = (sequence.to(gl.int64) * heads + head) * (WIDTH * VALUES)
    cells += d[None, :] * VALUES + e[:, None]
    return cells, (e < VALUES)[:, None] & (d < WIDTH)[None, :]


@gluon.jit
def copy_keys(
    x, x_older, tail, at, col, opening, older, tile, tile_older, bar,
    TAIL: gl.constexpr, HALO: gl.constexpr,
):  # fmt: skip
    """Keys or values of a chunk, and those in front of it, from column `col` on."""
    row, batch, head, first = at
    tma.async_copy_global_to_shared(x, [batch, head, first, col], bar, tile)
    if HALO:
        if TAIL and opening:
            tma.async_copy_global_to_shared(tail, [row, head, older - HALO, col], bar, tile_older)
        else:
            tma.async_copy_global_to_shared(
                x_older, [batch, head, first - HALO, col], bar, tile_older
            )


@gluon.jit
def produce(
    operands, tail_length, tiles, bars, place, heads, older,
    PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr, HALO: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, READS: gl.constexpr,
):  # fmt: skip
    """Role of a warp: copies. READS: also what only the reads of a chunk take."""
    q, k, v, k_older, v_older, tail_k, tail_v, shares, shares_older = operands
    q_t, k_t, v_t, shares_t, k_older_t, v_older_t, shares_older_t = tiles
    full, free, copied = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    KEYS: gl.constexpr = 2 * (CHUNK + HALO) * (D + COLUMNS)  # bytes
    OF_READS: gl.constexpr = 2 * CHUNK * (D + CHUNK + HALO) if READS else 0
    mended = begin * 0
    for c in range(count):
        s = c % STAGES
        bar = full.index(s)
        first = begin + c * CHUNK
        opening, row = opens(place, c, PACKED)
        of_keys = (row, batch, head, first)
        # Rows of another sequence, and those that a tail has not, may hold anything.
        mend = c < 0
        if PACKED:
            mend = mend | (end - first < CHUNK)
        if HALO > 0 and (PACKED or LENGTHS):
            mend = mend | opening
        mbarrier.wait(free.index(s), ((c // STAGES) & 1) ^ 1)
        if mend:
            mbarrier.expect(copied, KEYS)
            copy_keys(
                k, k_older, tail_k, of_keys, 0, opening, older, k_t.index(s), k_older_t.index(s),
                copied, TAIL, HALO,
            )  # fmt: skip
            copy_keys(
                v, v_older, tail_v, of_keys, v0, opening, older, v_t.index(s), v_older_t.index(s),
                copied, TAIL, HALO,
            )  # fmt: skip
            mbarrier.wait(copied, mended & 1)
            mended += 1
            keep_rows(k_t.index(s), 0, end - first, CHUNK, D)
            keep_rows(v_t.index(s), 0, end - first, CHUNK, COLUMNS)
            if HALO:
                known = gl.where(opening, older if TAIL else 0, HALO)
                if LENGTHS:
                    length = gl.minimum(gl.load(tail_length + row), older)
                    known = gl.where(opening, length, HALO)
                keep_rows(k_older_t.index(s), HALO - known, HALO, HALO, D)
                keep_rows(v_older_t.index(s), HALO - known, HALO, HALO, COLUMNS)
            fence_async_shared()
            mbarrier.expect(bar, OF_READS)
        else:
            mbarrier.expect(bar, KEYS + OF_READS)
            copy_keys(
                k, k_older, tail_k, of_keys, 0, opening, older, k_t.index(s),
                k_older_t.index(s), bar, TAIL, HALO,
            )  # fmt: skip
            copy_keys(
                v, v_older, tail_v, of_keys, v0, opening, older, v_t.index(s),
                v_older_t.index(s), bar, TAIL, HALO,
            )  # fmt: skip
        if READS:
            of_slot = ((slot0 + c) * heads + head) * CHUNK
            tma.async_copy_global_to_shared(q, [batch, head, first, 0], bar, q_t.index(s))
            tma.async_copy_global_to_shared(shares, [of_slot, 0], bar, shares_t.index(s))
            if HALO:
                tma.async_copy_global_to_shared(
                    shares_older, [of_slot, 0], bar, shares_older_t.index(s)
                )


@gluon.jit
def last_token(writes, pushes, ends, at, i, j, MOMENTUM: gl.constexpr, HALO: gl.constexpr):
    """P and U of a chunk's last token, of its own and of older keys, all negative; A, a and B."""
    own = at * (HALO + CHUNK) + HALO + j
    write = -gl.load(writes + own)
    write_older = -gl.load(writes + at * (HALO + CHUNK) + i) if HALO else write
    push = -gl.load(pushes + own) if MOMENTUM else write
    push_older = push
    if MOMENTUM and HALO:
        push_older = -gl.load(pushes + at * (HALO + CHUNK) + i)
    rate = gl.load(ends + at * 3)
    carry = gl.load(ends + at * 3 + 1) if MOMENTUM else rate
    drop = gl.load(ends + at * 3 + 2) if MOMENTUM else rate
    return write, write_older, push, push_older, rate, carry, drop


@gluon.jit
def walk_along(
    M, S, tiles, left, bars, writes, pushes, ends, place, heads,
    DOT: gl.constexpr, MOMENTUM: gl.constexpr, HALO: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, LOW: gl.constexpr, LEAVES: gl.constexpr,
):  # fmt: skip
    """A program's columns of M and S, transposed, from before its first chunk to behind its last.
    LEAVES: M and R of each chunk in shared memory. LOW: also what rounding takes from M, which has
    its part in R, too.
    """
    k_t, v_t, k_older_t, v_older_t = tiles
    M_t, S_t, R_t, R_older_t, lost_t = left
    full, free, ready, taken = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = k_t.dtype
    SOME: gl.constexpr = HALO if HALO else 16
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, product(CHUNK)))
    i = gl.arange(0, SOME, layout=gl.SliceLayout(0, product(SOME)))
    at = slot0.to(gl.int64) * heads + head
    if count > 0:
        after = last_token(writes, pushes, ends, at, i, j, MOMENTUM, HALO)
        for c in range(count):
            s = c % STAGES
            slot = c % SLOTS
            write, write_older, push, push_older, rate, carry, drop = after
            at += gl.where(c + 1 < count, heads, 0)
            after = last_token(writes, pushes, ends, at, i, j, MOMENTUM, HALO)
            mbarrier.wait(full.index(s), (c // STAGES) & 1)
            keys = k_t.index(s).reshape([CHUNK, D])
            R = minus(v_t.index(s).reshape([CHUNK, COLUMNS]), CHUNK)
            low = M.to(dtype)
            if LOW:
                lost = (M - low.to(gl.float32)).to(dtype)
            if HALO:
                keys_older = k_older_t.index(s).reshape([HALO, D])
                R_older = minus(v_older_t.index(s).reshape([HALO, COLUMNS]), HALO)
            if LOW and not DOT:
                # Errors of what M has learned are small: rounding M would be much of them.
                R = warpgroup_mma(
                    left_operand(lost, CHUNK, dtype), keys.permute((1, 0)), R, is_async=True
                )
                if HALO:
                    R_older = warpgroup_mma(
                        left_operand(lost, HALO, dtype), keys_older.permute((1, 0)), R_older,
                        is_async=True,
                    )  # fmt: skip
            if not DOT:
                R = warpgroup_mma(
                    left_operand(low, CHUNK, dtype), keys.permute((1, 0)), R, is_async=True
                )
                if HALO:
                    R_older = warpgroup_mma(
                        left_operand(low, HALO, dtype),
                        keys_older.permute((1, 0)),
                        R_older,
                        is_async=True,
                    )
            if LEAVES:
                mbarrier.wait(taken.index(slot), ((c // SLOTS) & 1) ^ 1)
                M_t.index(slot).store(low)
            if LOW:
                lost_t.index(slot).store(lost)
            M = rate * M
            if MOMENTUM:
                S_t.index(slot).store(S.to(dtype))
                M += carry * S
                S = drop * S
            if not DOT:
                if HALO:
                    R, R_older = warpgroup_mma_wait(0, deps=[R, R_older])
                else:
                    R = warpgroup_mma_wait(0, deps=[R])
            M = warpgroup_mma(left_operand(write[None, :] * R, D, dtype), keys, M, is_async=True)
            if MOMENTUM:
                S = warpgroup_mma(left_operand(push[None, :] * R, D, dtype), keys, S, is_async=True)
            if LEAVES:
                R_t.index(slot).store(R.to(dtype))
            if HALO:
                M = warpgroup_mma(
                    left_operand(write_older[None, :] * R_older, D, dtype),
                    keys_older,
                    M,
                    is_async=True,
                )
                if MOMENTUM:
                    S = warpgroup_mma(
                        left_operand(push_older[None, :] * R_older, D, dtype), keys_older, S,
                        is_async=True,
                    )  # fmt: skip
                if LEAVES:
                    R_older_t.index(slot).store(R_older.to(dtype))
            if LEAVES:
                fence_async_shared()
                mbarrier.arrive(ready.index(slot), count=1)
            if MOMENTUM:
                M, S = warpgroup_mma_wait(0, deps=[M, S])
            else:
                M = warpgroup_mma_wait(0, deps=[M])
            mbarrier.arrive(free.index(s), count=1)
    return M, S


@gluon.jit
def walk(
    tiles, left, bars, writes, pushes, ends, initial_state, initial_momentum, state, velocity,
    place, heads,
    DOT: gl.constexpr, MOMENTUM: gl.constexpr, INITIAL: gl.constexpr,
    INITIAL_MOMENTUM: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr,
    VALUES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    LOW: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: the memory, chunk after chunk. LAST: write M and S after the last
    token. LOW: as in `walk_along`.
    """
    cells, inside = columns_of_state(place, heads, WIDTH, VALUES, D)
    M = gl.zeros([COLUMNS, D], gl.float32, product(D))
    S = M
    if INITIAL:
        M = gl.load(initial_state + cells, mask=inside, other=0.0)
    if INITIAL_MOMENTUM:
        S = gl.load(initial_momentum + cells, mask=inside, other=0.0)
    M, S = walk_along(
        M, S, tiles, left, bars, writes, pushes, ends, place, heads, DOT, MOMENTUM, HALO, D, STAGES,
        SLOTS, LOW, True,
    )  # fmt: skip
    if LAST:
        gl.store(state + cells, M, mask=inside)
    if LAST and MOMENTUM:
        gl.store(velocity + cells, S, mask=inside)


@gluon.jit
def read(
    WHO: gl.constexpr, OF: gl.constexpr,
    tiles, left, bars, rates, carries, scales, y, place, tokens, heads,
    MOMENTUM: gl.constexpr, HALO: gl.constexpr, VALUES: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup, one of OF: what the queries of every OF-th chunk read."""
    q_t, k_t, shares_t, k_older_t, shares_older_t = tiles
    M_t, S_t, R_t, R_older_t = left
    full, free, ready, taken = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = k_t.dtype
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(COLUMNS)))
    e = v0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, product(COLUMNS)))
    for c in range(WHO, count, OF):
        s = c % STAGES
        slot = c % SLOTS
        of_slot = ((slot0 + c).to(gl.int64) * heads + head) * CHUNK + t
        rate = gl.load(rates + of_slot)
        scale = gl.load(scales + of_slot)
        mbarrier.wait(full.index(s), (c // STAGES) & 1)
        queries = q_t.index(s).reshape([CHUNK, D])
        scores = warpgroup_mma(
            queries, k_t.index(s).reshape([CHUNK, D]).permute((1, 0)),
            gl.zeros([CHUNK, CHUNK], gl.float32, product(CHUNK)), use_acc=False, is_async=True,
        )  # fmt: skip
        shares = shares_t.index(s).load(product(CHUNK)).to(gl.float32)
        if HALO:
            scores_older = warpgroup_mma(
                queries, k_older_t.index(s).reshape([HALO, D]).permute((1, 0)),
                gl.zeros([CHUNK, HALO], gl.float32, product(HALO)), use_acc=False, is_async=True,
            )  # fmt: skip
            shares_older = shares_older_t.index(s).load(product(HALO)).to(gl.float32)
            scores, scores_older = warpgroup_mma_wait(0, deps=[scores, scores_older])
            mixed_older = left_operand(-shares_older * scores_older, COLUMNS, dtype)
        else:
            scores = warpgroup_mma_wait(0, deps=[scores])
        mixed = left_operand(-shares * scores, COLUMNS, dtype)
        mbarrier.wait(ready.index(slot), (c // SLOTS) & 1)
        Y = gl.zeros([CHUNK, COLUMNS], gl.float32, product(COLUMNS))
        Y = warpgroup_mma(queries, M_t.index(slot).permute((1, 0)), Y, use_acc=False, is_async=True)
        if MOMENTUM:
            of_S = gl.zeros([CHUNK, COLUMNS], gl.float32, product(COLUMNS))
            of_S = warpgroup_mma(
                queries, S_t.index(slot).permute((1, 0)), of_S, use_acc=False, is_async=True
            )
            Y, of_S = warpgroup_mma_wait(0, deps=[Y, of_S])
        else:
            Y = warpgroup_mma_wait(0, deps=[Y])
        mbarrier.arrive(free.index(s), count=1)
        Y = rate[:, None] * Y
        if MOMENTUM:
            Y += gl.load(carries + of_slot)[:, None] * of_S
        Y = warpgroup_mma(mixed, R_t.index(slot).permute((1, 0)), Y, is_async=True)
        if HALO:
            Y = warpgroup_mma(mixed_older, R_older_t.index(slot).permute((1, 0)), Y, is_async=True)
        Y = warpgroup_mma_wait(0, deps=[Y])
        mbarrier.arrive(taken.index(slot), count=1)
        token = begin + c * CHUNK + t
        to = ((batch * tokens + token).to(gl.int64) * heads + head)[:, None] * VALUES + e[None, :]
        mask = (token < end)[:, None] & (e < VALUES)[None, :]
        gl.store(y + to, (scale[:, None] * Y).to(dtype), mask=mask)


@gluon.jit
def barriers(SIZE: gl.constexpr, COUNT: gl.constexpr):
    """SIZE barriers that COUNT arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SIZE):
        mbarrier.init(bars.index(n), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=SCAN_RUNTIME)
def omega_scan(
    q, k, v, k_older, v_older, tail_k, tail_v, shares, shares_older, tail_length, cu,
    writes, pushes, ends, rates, carries, scales, initial_state, initial_momentum, y, state,
    velocity,
    tokens: gl.int32, heads: gl.int32, chunks: gl.int32, older: gl.int32,
    DOT: gl.constexpr, MOMENTUM: gl.constexpr, INITIAL: gl.constexpr,
    INITIAL_MOMENTUM: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr,
    LENGTHS: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, READ_REGISTERS: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """All chunks of one head of one sequence, COLUMNS columns of its memory; or those of a group,
    and states are of groups.

    q, k, v: descriptors of (B, H, T, ·) in tiles of CHUNK rows; k_older, v_older: of HALO rows;
    tail_k, tail_v: of (N, H, older, ·), HALO rows. shares, shares_older: of the results of
    `omega_tables`; rates, carries, scales: the others of them. The others as in `omega_chain`.
    """
    place = place_sequence(gl.program_id(0), cu, tokens, heads, chunks, VALUES, PACKED, GROUPS)
    dtype: gl.constexpr = k.dtype
    q_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], q.layout)
    k_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k.layout)
    v_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, COLUMNS], v.layout)
    shares_t = gl.allocate_shared_memory(gl.float16, [STAGES, CHUNK, CHUNK], shares.layout)
    LEFT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LEFT_OLDER: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
    M_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, D], LEFT)
    R_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, CHUNK], LEFT)
    S_t = M_t
    if MOMENTUM:
        S_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, D], LEFT)
    k_older_t = k_t
    v_older_t = v_t
    shares_older_t = shares_t
    R_older_t = R_t
    if HALO:
        k_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, D], k_older.layout)
        v_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, COLUMNS], v_older.layout)
        shares_older_t = gl.allocate_shared_memory(
            gl.float16, [STAGES, CHUNK, HALO], shares_older.layout
        )
        R_older_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, HALO], LEFT_OLDER)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)  # by walk and a reader
    ready = barriers(SLOTS, 1)
    taken = barriers(SLOTS, 1)
    copied = barriers(1, 1)
    gl.warp_specialize(
        [
            (
                walk,
                (
                    (k_t, v_t, k_older_t, v_older_t), (M_t, S_t, R_t, R_older_t, M_t),
                    (full, free, ready, taken), writes, pushes, ends, initial_state,
                    initial_momentum, state, velocity, place, heads,
                    DOT, MOMENTUM, INITIAL, INITIAL_MOMENTUM, HALO, WIDTH, VALUES, D, STAGES, SLOTS,
                    False, True,
                ),
            ),
            (
                read,
                (
                    0, READERS, (q_t, k_t, shares_t, k_older_t, shares_older_t),
                    (M_t, S_t, R_t, R_older_t),
                    (full, free, ready, taken), rates, carries, scales, y, place, tokens, heads,
                    MOMENTUM, HALO, VALUES, D, STAGES, SLOTS,
                ),
            ),
            (
                read,
                (
                    1, READERS, (q_t, k_t, shares_t, k_older_t, shares_older_t),
                    (M_t, S_t, R_t, R_older_t),
                    (full, free, ready, taken), rates, carries, scales, y, place, tokens, heads,
                    MOMENTUM, HALO, VALUES, D, STAGES, SLOTS,
                ),
            ),
            (
                produce,
                (
                    (q, k, v, k_older, v_older, tail_k, tail_v, shares, shares_older), tail_length,
                    (q_t, k_t, v_t, shares_t, k_older_t, v_older_t, shares_older_t),
                    (full, free, copied.index(0)), place, heads, older,
                    PACKED, TAIL, LENGTHS, HALO, D, STAGES, True,
                ),
            ),
        ],
        [4, 4, 1],
        [READ_REGISTERS, READ_REGISTERS, 24],
    )  # fmt: skip
