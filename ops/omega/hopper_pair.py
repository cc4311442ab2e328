"""Forward of the Omega rule for few heads on Hopper, in Gluon: two multiprocessors for each.

Where a program for each head leaves half of the multiprocessors without one, the reads of
`hopper_fwd` go to another program: they would share tensor cores and issue slots with the walk,
which is a chain of small products and waits for each of them. What the walk leaves of each chunk,
M and R, crosses in a ring of RING chunks in global memory, small enough to stay in the L2 cache.

    walker    produce → walk → keep: a warp that copies M and R to the ring, and tells
    reader    produce, load: a warp that waits to be told and copies them from there → read × 2

Both are programs of one cooperative launch: all run at once, or none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .hopper_fwd import (
    CHUNK,
    COLUMNS,
    READERS,
    SCAN_RUNTIME,
    barriers,
    place_sequence,
    produce,
    read,
    walk,
)

EVERY = gl.constexpr(2)  # chunks that one word tells of


@gluon.jit
def _tell(counter, number):
    """Let another program know what is done."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; st.release.gpu.global.s32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [counter, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _until(counter, least):
    """Wait until another program has told at least that, and let copies see what it wrote; what it
    has told.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred later; .reg .s32 told; "
        "AGAIN: ld.acquire.gpu.global.s32 told, [$1]; setp.lt.s32 later, told, $2; "
        "@later bra AGAIN; fence.proxy.async; mov.s32 $0, told; }",
        "=r,l,r", [counter, least], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copied(LEFT: gl.constexpr):
    """Wait until all copies of this warp to memory but the last LEFT are there."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group " + LEFT + "; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _keep(
    rings, left, bars, counters, number, count,
    HALO: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    memories, errors, errors_older = rings
    M_t, R_t, R_older_t = left
    ready, taken = bars
    done, copied = counters
    known = number * 0
    for c in range(count):
        slot = c % SLOTS
        row = (number * RING + c % RING) * COLUMNS
        mbarrier.wait(ready.index(slot), (c // SLOTS) & 1)
        if known < c - RING + 1:
            known = _until(copied, c - RING + 1)
        tma.async_copy_shared_to_global(memories, [row, 0], M_t.index(slot))
        tma.async_copy_shared_to_global(errors, [row, 0], R_t.index(slot))
        if HALO:
            tma.async_copy_shared_to_global(errors_older, [row, 0], R_older_t.index(slot))
        if c > 0:  # what lies between is on its way while the next chunk is at work
            tma.store_wait(3 if HALO else 2)
            mbarrier.arrive(taken.index((c - 1) % SLOTS), count=1)
        if c % EVERY == EVERY - 1:
            if HALO:
                _copied("3")
            else:
                _copied("2")
            _tell(done, c)
    _copied("0")
    _tell(done, count)


@gluon.jit
def _load(
    rings, left, bars, counters, number, count,
    HALO: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    memories, errors, errors_older = rings
    M_t, R_t, R_older_t = left
    ready, taken = bars
    done, copied = counters
    known = number * 0
    for c in range(count):
        slot = c % SLOTS
        row = (number * RING + c % RING) * COLUMNS
        mbarrier.wait(taken.index(slot), ((c // SLOTS) & 1) ^ 1)
        if known < c + 1:
            known = _until(done, c + 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, 2 * COLUMNS * (D + CHUNK + HALO))
        tma.async_copy_global_to_shared(memories, [row, 0], bar, M_t.index(slot))
        tma.async_copy_global_to_shared(errors, [row, 0], bar, R_t.index(slot))
        if HALO:
            tma.async_copy_global_to_shared(errors_older, [row, 0], bar, R_older_t.index(slot))
        if c % (2 * EVERY) == 2 * EVERY - 1:
            mbarrier.wait(ready.index((c - 1) % SLOTS), ((c - 1) // SLOTS) & 1)
            _tell(copied, c)


@gluon.jit
def _walk_or_read(
    walks, tiles, left, bars, writes, ends, initial_state, state, rates, scales, y, place, tokens,
    heads,
    DOT: gl.constexpr, INITIAL: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr,
    VALUES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: the walk, or the reads of every other chunk."""
    q_t, k_t, v_t, shares_t, k_older_t, v_older_t, shares_older_t = tiles
    M_t, R_t, R_older_t = left
    if walks:
        walk(
            (k_t, v_t, k_older_t, v_older_t), (M_t, M_t, R_t, R_older_t, M_t), bars, writes, writes,
            ends, initial_state, initial_state, state, state, place, heads,
            DOT, False, INITIAL, False, HALO, WIDTH, VALUES, D, STAGES, SLOTS, False, True,
        )  # fmt: skip
    else:
        read(
            0, READERS, (q_t, k_t, shares_t, k_older_t, shares_older_t),
            (M_t, M_t, R_t, R_older_t), bars,
            rates, rates, scales, y, place, tokens, heads, False, HALO, VALUES, D, STAGES, SLOTS,
        )  # fmt: skip


@gluon.jit
def _read(
    walks, tiles, left, bars, rates, scales, y, place, tokens, heads,
    HALO: gl.constexpr, VALUES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: the reads of the other chunks; with a walk, nothing."""
    q_t, k_t, v_t, shares_t, k_older_t, v_older_t, shares_older_t = tiles
    M_t, R_t, R_older_t = left
    if walks == 0:
        read(
            1, READERS, (q_t, k_t, shares_t, k_older_t, shares_older_t),
            (M_t, M_t, R_t, R_older_t), bars,
            rates, rates, scales, y, place, tokens, heads, False, HALO, VALUES, D, STAGES, SLOTS,
        )  # fmt: skip


@gluon.jit
def _produce(
    walks, operands, tail_length, tiles, bars, place, heads, older,
    PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr, HALO: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Role of a warp: what a chunk brings, for either."""
    if walks:
        produce(
            operands, tail_length, tiles, bars, place, heads, older, PACKED, TAIL, LENGTHS, HALO, D,
            STAGES, False,
        )  # fmt: skip
    else:
        produce(
            operands, tail_length, tiles, bars, place, heads, older, PACKED, TAIL, LENGTHS, HALO, D,
            STAGES, True,
        )  # fmt: skip


@gluon.jit
def _cross(
    walks, rings, left, bars, counters, number, count,
    HALO: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Role of a warp: M and R of each chunk, from one program to the other."""
    if walks:
        _keep(rings, left, bars, counters, number, count, HALO, SLOTS, RING)
    else:
        _load(rings, left, bars, counters, number, count, HALO, D, SLOTS, RING)


@gluon.jit(do_not_specialize=SCAN_RUNTIME)
def omega_scan_pair(
    q, k, v, k_older, v_older, tail_k, tail_v, shares, shares_older, tail_length, cu,
    writes, ends, rates, scales, initial_state, y, state, memories, errors, errors_older, done,
    copied,
    tokens: gl.int32, heads: gl.int32, chunks: gl.int32, older: gl.int32,
    DOT: gl.constexpr, INITIAL: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr,
    LENGTHS: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
    READ_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `omega_scan`, by two programs side by side.

    memories, errors, errors_older: descriptors of the rings, RING · COLUMNS rows for each pair.
    done, copied: for each pair, chunks that are in the ring, and that have been copied from it;
    zeros before.
    """
    walks = gl.program_id(0) % 2 == 0
    number = gl.program_id(0) // 2
    place = place_sequence(number, cu, tokens, heads, chunks, VALUES, PACKED)
    sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = k.dtype
    q_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], q.layout)
    k_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k.layout)
    v_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, COLUMNS], v.layout)
    shares_t = gl.allocate_shared_memory(gl.float16, [STAGES, CHUNK, CHUNK], shares.layout)
    M_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, D], memories.layout)
    R_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, CHUNK], errors.layout)
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
        R_older_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, HALO], errors_older.layout)
    tiles = (q_t, k_t, v_t, shares_t, k_older_t, v_older_t, shares_older_t)
    left = (M_t, R_t, R_older_t)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    ready = barriers(SLOTS, 1)
    taken = barriers(SLOTS, 1)
    mended = barriers(1, 1)
    gl.warp_specialize(
        [
            (
                _walk_or_read,
                (
                    walks, tiles, left, (full, free, ready, taken), writes, ends, initial_state,
                    state, rates, scales, y, place, tokens, heads,
                    DOT, INITIAL, HALO, WIDTH, VALUES, D, STAGES, SLOTS,
                ),
            ),
            (
                _read,
                (
                    walks, tiles, left, (full, free, ready, taken), rates, scales, y, place, tokens,
                    heads, HALO, VALUES, D, STAGES, SLOTS,
                ),
            ),
            (
                _produce,
                (
                    walks, (q, k, v, k_older, v_older, tail_k, tail_v, shares, shares_older),
                    tail_length, tiles, (full, free, mended.index(0)), place, heads, older,
                    PACKED, TAIL, LENGTHS, HALO, D, STAGES,
                ),
            ),
            (
                _cross,
                (
                    walks, (memories, errors, errors_older), left, (ready, taken),
                    (done + number, copied + number), number, count, HALO, D, SLOTS, RING,
                ),
            ),
        ],
        [4, 1, 1],
        [READ_REGISTERS, 24, 24],
    )  # fmt: skip
