"""Forward of the Omega rule in short chunks for Hopper, in Gluon: a walk by tiles of several.

A tile of CHUNK tokens is walked through at once, as `omega_scan` walks through a chunk, by the same
roles. What its chunks owe each other is in −S, from `omega_solve`, and the errors of all take one
product more:

    Eᵀ = A ∘ Mᵀ Kᵀ − Vᵀ,   Rᵀ = Eᵀ + Eᵀ (−S)ᵀ,   then Mᵀ ← A Mᵀ − (P ∘ R)ᵀ K

The HALO older rows are those of every chunk. Notation is that of `triton_solve`.
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

from .hopper_fwd import (
    CHUNK,
    COLUMNS,
    READERS,
    barriers,
    columns_of_state,
    last_token,
    left_operand,
    minus,
    place_sequence,
    produce,
    product,
    read,
)

SPLIT_RUNTIME = ("tokens", "heads", "chunks")


@gluon.jit
def _produce_solved(
    operands, tiles, bars, place, heads, HALO: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Role of a warp: copies what `omega_solve` leaves, and weights of its older rows."""
    own, own_older, older_own, older, k_older, v_older, shares_older = operands
    own_t, own_older_t, older_own_t, older_t, k_older_t, v_older_t, shares_older_t = tiles
    full, free = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    ROWS: gl.constexpr = CHUNK + HALO
    BYTES: gl.constexpr = 2 * (ROWS * ROWS + HALO * (D + COLUMNS + CHUNK))
    for c in range(count):
        s = c % STAGES
        bar = full.index(s)
        of_slot = (slot0 + c) * heads + head
        row = of_slot * ROWS
        mbarrier.wait(free.index(s), ((c // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(own, [row, 0], bar, own_t.index(s))
        if HALO:
            tma.async_copy_global_to_shared(own_older, [row, CHUNK], bar, own_older_t.index(s))
            tma.async_copy_global_to_shared(older_own, [row + CHUNK, 0], bar, older_own_t.index(s))
            tma.async_copy_global_to_shared(older, [row + CHUNK, CHUNK], bar, older_t.index(s))
            tma.async_copy_global_to_shared(
                k_older, [slot0 + c, head, 0, 0], bar, k_older_t.index(s)
            )
            tma.async_copy_global_to_shared(
                v_older, [slot0 + c, head, 0, v0], bar, v_older_t.index(s)
            )
            tma.async_copy_global_to_shared(
                shares_older, [of_slot * CHUNK, 0], bar, shares_older_t.index(s)
            )


@gluon.jit
def _begins(begins, at, i, j, HALO: gl.constexpr):
    """A of a tile's own and older rows of keys, up to the chunk of each."""
    own = gl.load(begins + at * (HALO + CHUNK) + HALO + j)
    older = gl.load(begins + at * (HALO + CHUNK) + i) if HALO else own
    return own, older


@gluon.jit
def _walk_tiles(
    tiles, solved, left, bars, writes, ends, begins, initial_state, state, place, heads,
    INITIAL: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: the memory, tile after tile."""
    k_t, v_t, k_older_t, v_older_t = tiles
    own_t, own_older_t, older_own_t, older_t = solved
    M_t, R_t, R_older_t = left
    full, free, ready, taken = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = k_t.dtype
    SOME: gl.constexpr = HALO if HALO else 16
    cells, inside = columns_of_state(place, heads, WIDTH, VALUES, D)
    M = gl.zeros([COLUMNS, D], gl.float32, product(D))
    if INITIAL:
        M = gl.load(initial_state + cells, mask=inside, other=0.0)
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, product(CHUNK)))
    i = gl.arange(0, SOME, layout=gl.SliceLayout(0, product(SOME)))
    at = slot0.to(gl.int64) * heads + head
    if count > 0:
        after = last_token(writes, writes, ends, at, i, j, False, HALO)
        start_after, start_older_after = _begins(begins, at, i, j, HALO)
        for c in range(count):
            s = c % STAGES
            slot = c % SLOTS
            write, write_older, push, push_older, rate, carry, drop = after
            start = start_after
            start_older = start_older_after
            at += gl.where(c + 1 < count, heads, 0)
            after = last_token(writes, writes, ends, at, i, j, False, HALO)
            start_after, start_older_after = _begins(begins, at, i, j, HALO)
            mbarrier.wait(full.index(s), (c // STAGES) & 1)
            keys = k_t.index(s).reshape([CHUNK, D])
            low = M.to(dtype)
            E = gl.zeros([COLUMNS, CHUNK], gl.float32, product(CHUNK))
            E = warpgroup_mma(
                left_operand(low, CHUNK, dtype), keys.permute((1, 0)), E, use_acc=False,
                is_async=True,
            )  # fmt: skip
            if HALO:
                keys_older = k_older_t.index(s).reshape([HALO, D])
                E_older = gl.zeros([COLUMNS, HALO], gl.float32, product(HALO))
                E_older = warpgroup_mma(
                    left_operand(low, HALO, dtype), keys_older.permute((1, 0)), E_older,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                V_older = minus(v_older_t.index(s).reshape([HALO, COLUMNS]), HALO)
            V = minus(v_t.index(s).reshape([CHUNK, COLUMNS]), CHUNK)
            mbarrier.wait(taken.index(slot), ((c // SLOTS) & 1) ^ 1)
            M_t.index(slot).store(low)
            M = rate * M
            if HALO:
                E, E_older = warpgroup_mma_wait(0, deps=[E, E_older])
                E_older = start_older[None, :] * E_older + V_older
            else:
                E = warpgroup_mma_wait(0, deps=[E])
            E = start[None, :] * E + V
            R = warpgroup_mma(
                left_operand(E, CHUNK, dtype), own_t.index(s).permute((1, 0)), E, is_async=True
            )
            if HALO:
                R = warpgroup_mma(
                    left_operand(E_older, CHUNK, dtype), own_older_t.index(s).permute((1, 0)), R,
                    is_async=True,
                )  # fmt: skip
                R_older = warpgroup_mma(
                    left_operand(E, HALO, dtype), older_own_t.index(s).permute((1, 0)), E_older,
                    is_async=True,
                )  # fmt: skip
                R_older = warpgroup_mma(
                    left_operand(E_older, HALO, dtype), older_t.index(s).permute((1, 0)), R_older,
                    is_async=True,
                )  # fmt: skip
                R, R_older = warpgroup_mma_wait(0, deps=[R, R_older])
            else:
                R = warpgroup_mma_wait(0, deps=[R])
            M = warpgroup_mma(left_operand(write[None, :] * R, D, dtype), keys, M, is_async=True)
            R_t.index(slot).store(R.to(dtype))
            if HALO:
                M = warpgroup_mma(
                    left_operand(write_older[None, :] * R_older, D, dtype), keys_older, M,
                    is_async=True,
                )  # fmt: skip
                R_older_t.index(slot).store(R_older.to(dtype))
            fence_async_shared()
            mbarrier.arrive(ready.index(slot), count=1)
            M = warpgroup_mma_wait(0, deps=[M])
            mbarrier.arrive(free.index(s), count=1)
    gl.store(state + cells, M, mask=inside)


@gluon.jit(do_not_specialize=SPLIT_RUNTIME)
def omega_scan_split(
    q, k, v, k_older, v_older, shares, shares_older, own, own_older, older_own, older, cu, writes,
    ends, begins, rates, carries, scales, initial_state, y, state,
    tokens: gl.int32, heads: gl.int32, chunks: gl.int32,
    INITIAL: gl.constexpr, PACKED: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr,
    VALUES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    READ_REGISTERS: gl.constexpr,
):  # fmt: skip
    """All tiles of one head of one sequence, COLUMNS columns of its memory.

    own, own_older, older_own, older: descriptors of `solved`, in tiles of own or older rows and
    columns; begins, and k_older and v_older, descriptors, are from `omega_solve`, too. The others
    are as in `omega_scan`.
    """
    place = place_sequence(gl.program_id(0), cu, tokens, heads, chunks, VALUES, PACKED)
    dtype: gl.constexpr = k.dtype
    q_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], q.layout)
    k_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k.layout)
    v_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, COLUMNS], v.layout)
    shares_t = gl.allocate_shared_memory(gl.float16, [STAGES, CHUNK, CHUNK], shares.layout)
    own_t = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], own.layout)
    LEFT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    M_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, D], LEFT)
    R_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, CHUNK], LEFT)
    k_older_t = k_t
    v_older_t = v_t
    shares_older_t = shares_t
    own_older_t = own_t
    older_own_t = own_t
    older_t = own_t
    R_older_t = R_t
    if HALO:
        LEFT_OLDER: gl.constexpr = gl.NVMMASharedLayout(2 * HALO, 16, rank=2)
        k_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, D], k_older.layout)
        v_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, COLUMNS], v_older.layout)
        shares_older_t = gl.allocate_shared_memory(
            gl.float16, [STAGES, CHUNK, HALO], shares_older.layout
        )
        own_older_t = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, HALO], own_older.layout)
        older_own_t = gl.allocate_shared_memory(dtype, [STAGES, HALO, CHUNK], older_own.layout)
        older_t = gl.allocate_shared_memory(dtype, [STAGES, HALO, HALO], older.layout)
        R_older_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, HALO], LEFT_OLDER)
    full = barriers(STAGES, 2)  # by both that copy
    free = barriers(STAGES, 2)  # by walk and a reader
    ready = barriers(SLOTS, 1)
    taken = barriers(SLOTS, 1)
    copied = barriers(1, 1)
    gl.warp_specialize(
        [
            (
                _walk_tiles,
                (
                    (k_t, v_t, k_older_t, v_older_t),
                    (own_t, own_older_t, older_own_t, older_t), (M_t, R_t, R_older_t),
                    (full, free, ready, taken), writes, ends, begins, initial_state, state, place,
                    heads, INITIAL, HALO, WIDTH, VALUES, D, STAGES, SLOTS,
                ),
            ),
            (
                read,
                (
                    0, READERS, (q_t, k_t, shares_t, k_older_t, shares_older_t),
                    (M_t, M_t, R_t, R_older_t),
                    (full, free, ready, taken), rates, carries, scales, y, place, tokens, heads,
                    False, HALO, VALUES, D, STAGES, SLOTS,
                ),
            ),
            (
                read,
                (
                    1, READERS, (q_t, k_t, shares_t, k_older_t, shares_older_t),
                    (M_t, M_t, R_t, R_older_t),
                    (full, free, ready, taken), rates, carries, scales, y, place, tokens, heads,
                    False, HALO, VALUES, D, STAGES, SLOTS,
                ),
            ),
            (
                produce,
                (
                    (q, k, v, k, k, k, k, shares, k), cu,
                    (q_t, k_t, v_t, shares_t, k_t, k_t, k_t), (full, free, copied.index(0)), place,
                    heads, heads, PACKED, False, False, 0, D, STAGES, True,
                ),
            ),
            (
                _produce_solved,
                (
                    (own, own_older, older_own, older, k_older, v_older, shares_older),
                    (
                        own_t, own_older_t, older_own_t, older_t, k_older_t, v_older_t,
                        shares_older_t,
                    ),
                    (full, free), place, heads, HALO, D, STAGES,
                ),
            ),
        ],
        [4, 4, 1, 1],
        [READ_REGISTERS, READ_REGISTERS, 24, 24],
    )  # fmt: skip
