"""Walks of the backward of the Omega rule for Hopper, in Gluon: along a sequence, and back.

    omega_states      the walk of `hopper_fwd` once more, which leaves M at each chunk's begin, what
                      rounding took from it, and the errors R of each chunk's keys
    omega_scan_back   from the last chunk to the first: dM at each chunk's end, and dR

A program of either is one head of one sequence and COLUMNS columns of its memory, transposed, and
so are all the tiles that they leave. On the way back four roles share a program:

    produce   one warp; copies a chunk's tiles while later chunks are at work
    mix       two warpgroups, chunk after chunk in turn: X = −P ∘ Q Kᵀ and A ∘ Q
    walk      a warpgroup: dRᵀ = dYᵀ X − P ∘ dMᵀ Kᵀ, then dMᵀ ← A dMᵀ + dYᵀ (A ∘ Q) + dRᵀ K
    keep      one warp; copies to memory what walk leaves
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
    SCAN_RUNTIME,
    among_groups,
    barriers,
    columns_of_state,
    keep_rows,
    last_token,
    left_operand,
    opens,
    place_sequence,
    produce,
    product,
    walk,
)

MIXERS = gl.constexpr(2)


@gluon.jit
def _keep_states(
    outs, left, bars, place, heads,
    HALO: gl.constexpr, VALUES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    states, lost, errors, errors_older = outs
    M_t, R_t, R_older_t, lost_t = left
    ready, taken = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    PADDED: gl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS * COLUMNS
    for c in range(count):
        slot = c % SLOTS
        row = ((slot0 + c) * heads + head) * PADDED + v0
        mbarrier.wait(ready.index(slot), (c // SLOTS) & 1)
        tma.async_copy_shared_to_global(states, [row, 0], M_t.index(slot))
        tma.async_copy_shared_to_global(lost, [row, 0], lost_t.index(slot))
        tma.async_copy_shared_to_global(errors, [row, 0], R_t.index(slot))
        if HALO:
            tma.async_copy_shared_to_global(errors_older, [row, 0], R_older_t.index(slot))
        tma.store_wait(0)
        mbarrier.arrive(taken.index(slot), count=1)


@gluon.jit(do_not_specialize=SCAN_RUNTIME)
def omega_states(
    k, v, k_older, v_older, tail_k, tail_v, tail_length, cu, writes, ends, initial_state,
    states, lost, errors, errors_older,
    tokens: gl.int32, heads: gl.int32, chunks: gl.int32, older: gl.int32,
    DOT: gl.constexpr, INITIAL: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr,
    LENGTHS: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Operands as in `omega_scan`. For each slot and head, columns padded to a multiple of COLUMNS:
    states, lost (columns, D): M at the chunk's begin and its remainder; errors (columns, CHUNK),
    errors_older (columns, HALO): R. All are descriptors of matrices, in tiles of COLUMNS rows.
    """
    place = place_sequence(gl.program_id(0), cu, tokens, heads, chunks, VALUES, PACKED, GROUPS)
    dtype: gl.constexpr = k.dtype
    k_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k.layout)
    v_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, COLUMNS], v.layout)
    M_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, D], states.layout)
    lost_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, D], lost.layout)
    R_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, CHUNK], errors.layout)
    k_older_t = k_t
    v_older_t = v_t
    R_older_t = R_t
    if HALO:
        k_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, D], k_older.layout)
        v_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, COLUMNS], v_older.layout)
        R_older_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, HALO], errors_older.layout)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    ready = barriers(SLOTS, 1)
    taken = barriers(SLOTS, 1)
    copied = barriers(1, 1)
    gl.warp_specialize(
        [
            (
                walk,
                (
                    (k_t, v_t, k_older_t, v_older_t), (M_t, M_t, R_t, R_older_t, lost_t),
                    (full, free, ready, taken), writes, writes, ends, initial_state,
                    initial_state, initial_state, initial_state, place, heads,
                    DOT, False, INITIAL, False, HALO, WIDTH, VALUES, D, STAGES, SLOTS, True, False,
                ),
            ),
            (
                _keep_states,
                (
                    (states, lost, errors, errors_older), (M_t, R_t, R_older_t, lost_t),
                    (ready, taken), place, heads, HALO, VALUES, SLOTS,
                ),
            ),
            (
                produce,
                (
                    (k, k, v, k_older, v_older, tail_k, tail_v, k, k), tail_length,
                    (k_t, k_t, v_t, k_t, k_older_t, v_older_t, k_t),
                    (full, free, copied.index(0)), place, heads, older,
                    PACKED, TAIL, LENGTHS, HALO, D, STAGES, False,
                ),
            ),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


@gluon.jit
def _produce_back(
    operands, tail_length, tiles, bars, place, heads, older,
    PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr, HALO: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q, k, d_y, k_older, tail_k, shares, shares_older = operands
    q_t, k_t, d_y_t, k_older_t, shares_t, shares_older_t = tiles
    full, free, copied = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    ROWS: gl.constexpr = 2 * (CHUNK * (2 * D + COLUMNS) + HALO * D)  # bytes
    SHARES: gl.constexpr = 2 * CHUNK * (CHUNK + HALO)
    mended = begin * 0
    for n in range(count):
        c = count - 1 - n
        s = n % STAGES
        first = begin + c * CHUNK
        opening, row = opens(place, c, PACKED)
        mbarrier.wait(free.index(s), ((n // STAGES) & 1) ^ 1)
        mended = copy_rows(
            (q, k, d_y, k_older, tail_k),
            (q_t.index(s), k_t.index(s), d_y_t.index(s), k_older_t.index(s)),
            (row, batch, head, c, first, end, v0), opening, older, tail_length, full.index(s),
            copied, mended, ROWS, SHARES, PACKED, TAIL, LENGTHS, HALO, D, True,
        )  # fmt: skip
        of_slot = ((slot0 + c) * heads + head) * CHUNK
        tma.async_copy_global_to_shared(shares, [of_slot, 0], full.index(s), shares_t.index(s))
        if HALO:
            tma.async_copy_global_to_shared(
                shares_older, [of_slot, 0], full.index(s), shares_older_t.index(s)
            )


@gluon.jit
def copy_rows(
    operands, tiles, at, opening, older, tail_length, full, copied, mended,
    ROWS: gl.constexpr, BESIDE: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr,
    LENGTHS: gl.constexpr, HALO: gl.constexpr, D: gl.constexpr, UPSTREAM: gl.constexpr,
):  # fmt: skip
    """Queries, keys and (UPSTREAM) gradients of y of a chunk, ROWS bytes; the barrier `full` is
    told of them and of BESIDE bytes that come with them. Returns how often `copied` was used.

    opening: whether no token of the sequence is in front of it, but for row `at[0]` of the tails.
    """
    q, k, d_y, k_older, tail_k = operands
    q_t, k_t, d_y_t, k_older_t = tiles
    row, batch, head, c, first, end, v0 = at
    mend = c < 0
    if PACKED:
        mend = mend | (end - first < CHUNK)
    if HALO > 0 and (PACKED or LENGTHS):
        mend = mend | opening
    if mend:
        mbarrier.expect(copied, ROWS)
        _copy_all(operands, tiles, at, opening, older, copied, TAIL, HALO, UPSTREAM)
        mbarrier.wait(copied, mended & 1)
        keep_rows(q_t, 0, end - first, CHUNK, D)
        keep_rows(k_t, 0, end - first, CHUNK, D)
        if UPSTREAM:
            keep_rows(d_y_t, 0, end - first, CHUNK, COLUMNS)
        if HALO:
            known = gl.where(opening, older if TAIL else 0, HALO)
            if LENGTHS:
                length = gl.minimum(gl.load(tail_length + row), older)
                known = gl.where(opening, length, HALO)
            keep_rows(k_older_t, HALO - known, HALO, HALO, D)
        fence_async_shared()
        mbarrier.expect(full, BESIDE)
        mended += 1
    else:
        mbarrier.expect(full, ROWS + BESIDE)
        _copy_all(operands, tiles, at, opening, older, full, TAIL, HALO, UPSTREAM)
    return mended


@gluon.jit
def _copy_all(
    operands, tiles, at, opening, older, bar,
    TAIL: gl.constexpr, HALO: gl.constexpr, UPSTREAM: gl.constexpr,
):  # fmt: skip
    q, k, d_y, k_older, tail_k = operands
    q_t, k_t, d_y_t, k_older_t = tiles
    row, batch, head, c, first, end, v0 = at
    tma.async_copy_global_to_shared(k, [batch, head, first, 0], bar, k_t)
    tma.async_copy_global_to_shared(q, [batch, head, first, 0], bar, q_t)
    if UPSTREAM:
        tma.async_copy_global_to_shared(d_y, [batch, head, first, v0], bar, d_y_t)
    if HALO:
        if TAIL and opening:
            tma.async_copy_global_to_shared(tail_k, [row, head, older - HALO, 0], bar, k_older_t)
        else:
            tma.async_copy_global_to_shared(k_older, [batch, head, first - HALO, 0], bar, k_older_t)


@gluon.jit
def _mix(
    WHO: gl.constexpr, tiles, mixed, bars, rates, scales, place, heads,
    HALO: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    q_t, k_t, k_older_t, shares_t, shares_older_t = tiles
    X_t, X_older_t, AQ_t = mixed
    full, free, ready, taken = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = k_t.dtype
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(CHUNK)))
    t_wide = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(D)))
    for n in range(WHO, count, MIXERS):
        c = count - 1 - n
        s = n % STAGES
        slot = n % SLOTS
        of_slot = ((slot0 + c).to(gl.int64) * heads + head) * CHUNK
        scale = gl.load(scales + of_slot + t)
        rate = gl.load(rates + of_slot + t_wide) * gl.load(scales + of_slot + t_wide)
        mbarrier.wait(full.index(s), (n // STAGES) & 1)
        queries = q_t.index(s).reshape([CHUNK, D])
        scores = warpgroup_mma(
            queries, k_t.index(s).reshape([CHUNK, D]).permute((1, 0)),
            gl.zeros([CHUNK, CHUNK], gl.float32, product(CHUNK)), use_acc=False, is_async=True,
        )  # fmt: skip
        if HALO:
            scores_older = warpgroup_mma(
                queries, k_older_t.index(s).reshape([HALO, D]).permute((1, 0)),
                gl.zeros([CHUNK, HALO], gl.float32, product(HALO)), use_acc=False, is_async=True,
            )  # fmt: skip
        shares = -scale[:, None] * shares_t.index(s).load(product(CHUNK)).to(gl.float32)
        scaled = rate[:, None] * queries.load(product(D)).to(gl.float32)
        mbarrier.wait(taken.index(slot), ((n // SLOTS) & 1) ^ 1)
        AQ_t.index(slot).store(scaled.to(dtype))
        if HALO:
            t_older = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(HALO)))
            shares_older = shares_older_t.index(s).load(product(HALO)).to(gl.float32)
            shares_older *= -gl.load(scales + of_slot + t_older)[:, None]
            scores, scores_older = warpgroup_mma_wait(0, deps=[scores, scores_older])
            X_older_t.index(slot).store((shares_older * scores_older).to(dtype))
        else:
            scores = warpgroup_mma_wait(0, deps=[scores])
        X_t.index(slot).store((shares * scores).to(dtype))
        fence_async_shared()
        mbarrier.arrive(ready.index(slot), count=1)
        mbarrier.arrive(free.index(s), count=1)


@gluon.jit
def _walk_back(
    tiles, mixed, left, bars, writes, ends, d_last, d_initial, place, heads,
    DOT: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUPS: gl.constexpr,
    KEEPS: gl.constexpr,
):  # fmt: skip
    k_t, k_older_t, d_y_t = tiles
    X_t, X_older_t, AQ_t = mixed
    dM_t, dR_t, dR_older_t = left
    full, free, ready, taken, done, kept = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = k_t.dtype
    SOME: gl.constexpr = HALO if HALO else 16
    cells, inside = columns_of_state(place, heads, WIDTH, VALUES, D)
    if KEEPS:
        dM = gl.load(d_last + cells, mask=inside, other=0.0)
    else:
        of_sequence = (batch, batch, head, v0, begin, end, count, slot0)
        last, inside_last = columns_of_state(of_sequence, heads, WIDTH, VALUES, D)
        inside_last = inside_last & (sequence % GROUPS == GROUPS - 1)
        dM = gl.load(d_last + last, mask=inside_last, other=0.0)
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, product(CHUNK)))
    i = gl.arange(0, SOME, layout=gl.SliceLayout(0, product(SOME)))
    at = (slot0 + count - 1).to(gl.int64) * heads + head
    if count > 0:
        after = last_token(writes, writes, ends, at, i, j, False, HALO)
        for n in range(count):
            s = n % STAGES
            slot = n % SLOTS
            write, write_older, push, push_older, rate, carry, drop = after  # no momentum
            at -= gl.where(n + 1 < count, heads, 0)
            after = last_token(writes, writes, ends, at, i, j, False, HALO)
            low = dM.to(dtype)
            mbarrier.wait(full.index(s), (n // STAGES) & 1)
            keys = k_t.index(s).reshape([CHUNK, D])
            d_y = d_y_t.index(s).reshape([CHUNK, COLUMNS]).permute((1, 0))
            along = gl.zeros([COLUMNS, CHUNK], gl.float32, product(CHUNK))
            along = warpgroup_mma(
                left_operand(low, CHUNK, dtype), keys.permute((1, 0)), along, use_acc=False,
                is_async=True,
            )  # fmt: skip
            if HALO:
                keys_older = k_older_t.index(s).reshape([HALO, D])
                along_older = gl.zeros([COLUMNS, HALO], gl.float32, product(HALO))
                along_older = warpgroup_mma(
                    left_operand(low, HALO, dtype), keys_older.permute((1, 0)), along_older,
                    use_acc=False, is_async=True,
                )  # fmt: skip
            if KEEPS:
                mbarrier.wait(kept.index(slot), ((n // SLOTS) & 1) ^ 1)
                dM_t.index(slot).store(low)
            dM = rate * dM
            mbarrier.wait(ready.index(slot), (n // SLOTS) & 1)
            if HALO:
                along, along_older = warpgroup_mma_wait(0, deps=[along, along_older])
                dR_older = warpgroup_mma(
                    d_y, X_older_t.index(slot), write_older[None, :] * along_older, is_async=True
                )
            else:
                along = warpgroup_mma_wait(0, deps=[along])
            dR = warpgroup_mma(d_y, X_t.index(slot), write[None, :] * along, is_async=True)
            dM = warpgroup_mma(d_y, AQ_t.index(slot), dM, is_async=True)
            if HALO:
                dR, dR_older = warpgroup_mma_wait(1, deps=[dR, dR_older])
            else:
                dR = warpgroup_mma_wait(1, deps=[dR])
            if not DOT:
                dM = warpgroup_mma(left_operand(dR, D, dtype), keys, dM, is_async=True)
                if HALO:
                    dM = warpgroup_mma(
                        left_operand(dR_older, D, dtype), keys_older, dM, is_async=True
                    )
            if KEEPS:
                dR_t.index(slot).store(dR.to(dtype))
                if HALO:
                    dR_older_t.index(slot).store(dR_older.to(dtype))
                fence_async_shared()
                mbarrier.arrive(done.index(slot), count=1)
            dM = warpgroup_mma_wait(0, deps=[dM])
            mbarrier.arrive(taken.index(slot), count=1)
            mbarrier.arrive(free.index(s), count=1)
    gl.store(d_initial + cells, dM, mask=inside)


@gluon.jit
def _keep_back(
    outs, left, bars, place, heads,
    HALO: gl.constexpr, VALUES: gl.constexpr, SLOTS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    d_states, d_errors, d_errors_older = outs
    dM_t, dR_t, dR_older_t = left
    done, kept = bars
    sequence, batch, head, v0, begin, end, count, slot0 = place
    PADDED: gl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS * COLUMNS
    for n in range(count if KEEPS else 0):
        slot = n % SLOTS
        row = ((slot0 + count - 1 - n) * heads + head) * PADDED + v0
        mbarrier.wait(done.index(slot), (n // SLOTS) & 1)
        tma.async_copy_shared_to_global(d_states, [row, 0], dM_t.index(slot))
        tma.async_copy_shared_to_global(d_errors, [row, 0], dR_t.index(slot))
        if HALO:
            tma.async_copy_shared_to_global(d_errors_older, [row, 0], dR_older_t.index(slot))
        tma.store_wait(0)
        mbarrier.arrive(kept.index(slot), count=1)


@gluon.jit(do_not_specialize=SCAN_RUNTIME)
def omega_scan_back(
    q, k, d_y, k_older, tail_k, shares, shares_older, tail_length, cu, writes, ends, rates, scales,
    d_last, d_initial, d_states, d_errors, d_errors_older,
    tokens: gl.int32, heads: gl.int32, chunks: gl.int32, older: gl.int32,
    DOT: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr,
    HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, MIX_REGISTERS: gl.constexpr,
    GROUPS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    """Operands as in `omega_scan`; d_y as v there. d_last, d_initial (N, H, WIDTH, VALUES), fp32,
    of groups where there are any. d_states, d_errors, d_errors_older: as states, errors and
    errors_older of `omega_states`, dM at a chunk's end.

    Without KEEPS only d_initial is found, and for all groups but the first: from 0, and for the
    last one from d_last, which then is of sequences.
    """
    number = gl.program_id(0)
    if not KEEPS:
        blocks: gl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
        number = among_groups(number, blocks * heads, 1, GROUPS - 1, GROUPS)
    place = place_sequence(number, cu, tokens, heads, chunks, VALUES, PACKED, GROUPS)
    dtype: gl.constexpr = k.dtype
    q_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], q.layout)
    k_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k.layout)
    d_y_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, COLUMNS], d_y.layout)
    shares_t = gl.allocate_shared_memory(gl.float16, [STAGES, CHUNK, CHUNK], shares.layout)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    X_t = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, CHUNK], WIDE)
    AQ_t = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, D], WIDE)
    dM_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, D], d_states.layout)
    dR_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, CHUNK], d_errors.layout)
    k_older_t = k_t
    shares_older_t = shares_t
    X_older_t = X_t
    dR_older_t = dR_t
    if HALO:
        NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
        k_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, D], k_older.layout)
        shares_older_t = gl.allocate_shared_memory(
            gl.float16, [STAGES, CHUNK, HALO], shares_older.layout
        )
        X_older_t = gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, HALO], NARROW)
        dR_older_t = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, HALO], d_errors_older.layout)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)  # by walk and a mixer
    ready = barriers(SLOTS, 1)
    taken = barriers(SLOTS, 1)
    done = ready
    kept = taken
    if KEEPS:
        done = barriers(SLOTS, 1)
        kept = barriers(SLOTS, 1)
    copied = barriers(1, 1)
    gl.warp_specialize(
        [
            (
                _walk_back,
                (
                    (k_t, k_older_t, d_y_t), (X_t, X_older_t, AQ_t), (dM_t, dR_t, dR_older_t),
                    (full, free, ready, taken, done, kept), writes, ends, d_last, d_initial, place,
                    heads, DOT, HALO, WIDTH, VALUES, D, STAGES, SLOTS, GROUPS, KEEPS,
                ),
            ),
            (
                _mix,
                (
                    0, (q_t, k_t, k_older_t, shares_t, shares_older_t), (X_t, X_older_t, AQ_t),
                    (full, free, ready, taken), rates, scales, place, heads, HALO, D, STAGES, SLOTS,
                ),
            ),
            (
                _mix,
                (
                    1, (q_t, k_t, k_older_t, shares_t, shares_older_t), (X_t, X_older_t, AQ_t),
                    (full, free, ready, taken), rates, scales, place, heads, HALO, D, STAGES, SLOTS,
                ),
            ),
            (
                _produce_back,
                (
                    (q, k, d_y, k_older, tail_k, shares, shares_older), tail_length,
                    (q_t, k_t, d_y_t, k_older_t, shares_t, shares_older_t),
                    (full, free, copied.index(0)), place, heads, older,
                    PACKED, TAIL, LENGTHS, HALO, D, STAGES,
                ),
            ),
            (
                _keep_back,
                (
                    (d_states, d_errors, d_errors_older), (dM_t, dR_t, dR_older_t), (done, kept),
                    place, heads, HALO, VALUES, SLOTS, KEEPS,
                ),
            ),
        ],
        [4, 4, 1, 1],
        [MIX_REGISTERS, MIX_REGISTERS, 24, 24],
    )  # fmt: skip
