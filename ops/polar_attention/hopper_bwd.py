"""Backward kernels for Hopper, in Gluon (`triton_bwd` has the maths, prepare and the plain form).

    dkdv   producer (1 warp)     TMA: the key tile once, then per step BLOCK_M rows of q and Gs and
                                 their row vectors, STAGES deep
           consumer 0, 1 (4 warps each, 64 keys each), in transposed tiles [keys, rows]:
               Sᵀ = k·qᵀ and dPᵀ = v·Gsᵀ start together; u comes of the first while the second
               runs; dv += u·Gs runs while g is formed; then dk += g·q
    dq     producer              q and Gs once, then k and v tiles of BLOCK_N keys
           consumer 0, 1         64 rows each, [rows, keys]: S, dP, then dq += g·k

    full [STAGES]  completed by the copies      free [STAGES]  all consumers
    own_full, own_free [BUFFERS]                the same of the tile that stays

As in the forward, one program a multiprocessor serves tile after tile.

In a transposed tile the row vectors lie along the columns, so that a thread wants sixteen or more
values of each where the other orientation wants two. They stay in shared memory and are read where
they are used; the compiler's own pipeline fetches them before the first product, and spills.

Starting dkdv's products of the next step before the last ones of this step end makes the assembler
serialise all of them at width 128, for want of registers. At width 64 it fits tiles of 64 rows
alone, and gained less there than tiles of 128 rows do. In dq it gained nothing worth its lines.

Serves calls without n_keys whose tensors TMA can address. In dkdv keys past the end need no mask:
each key is a row of its own in every product, and is not stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import LN2, LOG2E, count_tiles, key_bounds, key_range, place_tile, row_bounds
from .hopper_common import (
    CONSUMERS,
    ROWS,
    clear_rows,
    draw,
    new_barriers,
    new_turns,
    opaque,
    place_rows,
    store_rows,
    take,
)
from .triton_bwd_rows import (
    E0,
    E1,
    MINUS_LAM,
    PAIR_SCALARS,
    RATE,
    RATE_E0,
    RATE_E1,
    row_base,
)

RUNTIME = (
    "tq", "tk", "heads_q", "group", "sequences", "window", "partials", "padded", "row_stride",
    "tiles", "scale",
)  # fmt: skip

KEYS = ROWS  # of one consumer, in dkdv


@gluon.jit
def _part(plan, PART: gl.constexpr):
    """First row and end of a part: rows that see the tile in part, whole, and in part again."""
    begin, whole, whole_end, end = plan
    first = begin if PART == 0 else (whole if PART == 1 else whole_end)
    last = whole if PART == 0 else (whole_end if PART == 1 else end)
    return first, last


# ---- dk and dv ----------------------------------------------------------------------------------


@gluon.jit
def _place_keys(number, sizes, cu_q, cu_k, PACKED: gl.constexpr):
    """Where a key tile lies: batch, head, its first key inside the sequence, first key of the
    sequence and first of its padded rows, how many rows and keys it has.
    """
    tq, tk, heads_q, group, sequences, window, padded, tiles = sizes
    BLOCK_N: gl.constexpr = CONSUMERS * KEYS
    heads_k = heads_q // group
    key_tiles = count_tiles(tk, sequences, BLOCK_N, PACKED)
    batch = number // key_tiles // heads_k
    head_k = number // key_tiles % heads_k
    # The causal keys that most rows see come first.
    sequence, tile, first_key, keys, first_row, rows = place_tile(
        number % key_tiles, tk, tq, sequences, cu_k, cu_q, BLOCK_N, PACKED
    )
    key0 = tile * BLOCK_N
    rows = gl.where(key0 < keys, rows, 0)  # a tile past the keys of its sequence has no steps
    return batch, head_k, key0, first_key, row_base(cu_q, sequence, PACKED), rows, keys


@gluon.jit
def _copy_vector(rows, vector: gl.constexpr, row, ready, tile):
    tma.async_copy_global_to_shared(rows, [vector, row], ready, tile)


@gluon.jit
def _produce_rows(
    q, k, v, gs, rows, buffers, turns, sizes, cu_q, cu_k,
    POLAR: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free = buffers
    all_rows, all_keys, heads_q, group, sequences, window, padded, tiles = sizes
    VECTORS: gl.constexpr = 4 if POLAR else 2
    BLOCK_N: gl.constexpr = CONSUMERS * KEYS
    i = all_rows * 0
    n = all_rows * 0
    number = gl.program_id(0)
    while number < tiles:
        after = draw(turns, n)
        batch, head_k, key0, first_key, base, tq, tk = _place_keys(
            number, sizes, cu_q, cu_k, PACKED
        )
        plan = row_bounds(key0, tq, tk, window, CAUSAL, False, WINDOW, False, BLOCK_M, BLOCK_N)
        own = n % BUFFERS
        mbarrier.wait(own_free.index(own), ((n // BUFFERS) & 1) ^ 1)
        mbarrier.expect(own_full.index(own), 2 * BLOCK_N * BLOCK_D * 2)
        for who in gl.static_range(CONSUMERS):
            at = [batch, head_k, first_key + key0 + who * KEYS, 0]
            mine = own * CONSUMERS + who
            tma.async_copy_global_to_shared(k, at, own_full.index(own), k_tiles.index(mine))
            tma.async_copy_global_to_shared(v, at, own_full.index(own), v_tiles.index(mine))
        for part in gl.static_range(3):
            if part < 2 or WINDOW:
                first, last = _part(plan, part)
                steps = gl.maximum(last - first, 0) // BLOCK_M
                for step in range(steps * group):
                    row0 = first + step % steps * BLOCK_M
                    head = head_k * group + step // steps
                    row = (batch * heads_q + head) * padded + base + row0
                    stage = i % STAGES
                    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
                    ready = full.index(stage)
                    mbarrier.expect(ready, 2 * BLOCK_M * BLOCK_D * 2 + VECTORS * BLOCK_M * 4)
                    if PACKED:  # q is its padded copy: no tile meets another sequence
                        tma.async_copy_global_to_shared(q, [row, 0], ready, q_tiles.index(stage))
                    else:
                        from_q = [batch, head, row0, 0]
                        tma.async_copy_global_to_shared(q, from_q, ready, q_tiles.index(stage))
                    tma.async_copy_global_to_shared(gs, [row, 0], ready, gs_tiles.index(stage))
                    to = stage * VECTORS
                    _copy_vector(rows, MINUS_LAM, row, ready, row_tiles.index(to))
                    if POLAR:
                        _copy_vector(rows, RATE, row, ready, row_tiles.index(to + 1))
                        _copy_vector(rows, RATE_E0, row, ready, row_tiles.index(to + 2))
                        _copy_vector(rows, RATE_E1, row, ready, row_tiles.index(to + 3))
                    else:
                        _copy_vector(rows, E0, row, ready, row_tiles.index(to + 1))
                    i += 1
        number = after
        n += 1


@gluon.jit
def _consume_step(
    i, dk, dv, buffers, key, value, factor, row0, keys, tq, tk, window,
    POLAR: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free = buffers
    VECTORS: gl.constexpr = 4 if POLAR else 2
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage = i % STAGES
    vectors = stage * VECTORS
    query = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
    grad = gs_tiles.index(stage)
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    score = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    score = warpgroup_mma(key, query.permute((1, 0)), score, use_acc=False, is_async=True)
    du = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    du = warpgroup_mma(value, grad.permute((1, 0)), du, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    minus_lam = row_tiles.index(vectors).load(S_LAYOUT)  # [1, M]
    if POLAR:
        rate = row_tiles.index(vectors + 1).load(S_LAYOUT)  # [1, M]
        u = gl.exp2(score * rate + minus_lam)
    else:
        u = gl.exp2(score * factor + minus_lam)
    if MASKED:
        at = row0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
        high = tk + at * 0
        if CAUSAL:
            high = gl.minimum(gl.maximum(tk - tq + at + 1, 0), tk)
        seen = keys[:, None] < high[None, :]
        if WINDOW:
            seen = seen & (keys[:, None] >= (high - window)[None, :])
        u = gl.where(seen, u, 0.0)
    weight = gl.convert_layout(u.to(q_tiles.dtype), A_LAYOUT)
    dv = warpgroup_mma(weight, grad, dv, is_async=True)
    du = warpgroup_mma_wait(1, deps=[du])
    if POLAR:
        rate = row_tiles.index(vectors + 1).load(S_LAYOUT)  # again: no register keeps it
        rate_e0 = row_tiles.index(vectors + 2).load(S_LAYOUT)  # [1, M]
        rate_e1 = row_tiles.index(vectors + 3).load(S_LAYOUT)  # [1, M]
        g = u * (du * rate + (rate_e0 - rate_e1 * u))
    else:
        e0 = row_tiles.index(vectors + 1).load(S_LAYOUT)  # [1, M]
        g = u * (du + e0)
    g = gl.convert_layout(g.to(q_tiles.dtype), A_LAYOUT)
    dk = warpgroup_mma(g, query, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    mbarrier.arrive(free.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume_rows(
    WHO: gl.constexpr, buffers, turns, results, sizes, scale, cu_q, cu_k,
    POLAR: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free = buffers
    dk_out, dv_out = results
    all_rows, total, heads_q, group, sequences, window, padded, tiles = sizes
    BLOCK_N: gl.constexpr = CONSUMERS * KEYS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    heads_k = heads_q // group
    i = total * 0
    n = total * 0
    number = gl.program_id(0)
    while number < tiles:
        batch, head_k, key0, first_key, base, tq, tk = _place_keys(
            number, sizes, cu_q, cu_k, PACKED
        )
        plan = row_bounds(key0, tq, tk, window, CAUSAL, False, WINDOW, False, BLOCK_M, BLOCK_N)
        own = n % BUFFERS
        keys = key0 + WHO * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
        mine = own * CONSUMERS + WHO
        dk = gl.zeros([KEYS, BLOCK_D], gl.float32, O_LAYOUT)
        dv = gl.zeros([KEYS, BLOCK_D], gl.float32, O_LAYOUT)
        mbarrier.wait(own_full.index(own), (n // BUFFERS) & 1)
        for part in gl.static_range(3):
            if part < 2 or WINDOW:
                first, last = _part(plan, part)
                steps = gl.maximum(last - first, 0) // BLOCK_M
                here = opaque(mine)
                key = k_tiles.index(here).reshape([KEYS, BLOCK_D])
                value = v_tiles.index(here).reshape([KEYS, BLOCK_D])
                for step in range(steps * group):
                    row0 = first + step % steps * BLOCK_M
                    dk, dv = _consume_step(
                        i, dk, dv, buffers, key, value, scale * LOG2E, row0, keys, tq, tk, window,
                        POLAR, part != 1, CAUSAL, WINDOW, BLOCK_M, BLOCK_D, STAGES,
                        S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
                    i += 1
        first_mine = key0 + WHO * KEYS
        at = ((batch.to(gl.int64) * total + first_key + first_mine) * heads_k + head_k) * WIDTH
        left = tk - first_mine
        dk = dk * (LN2 if POLAR else scale)
        key_tile = k_tiles.index(mine).reshape([KEYS, BLOCK_D])
        store_rows(key_tile, dk, dk_out, at, heads_k * WIDTH, left, WIDTH, KEYS, BLOCK_D)
        value_tile = v_tiles.index(mine).reshape([KEYS, BLOCK_D])
        store_rows(value_tile, dv, dv_out, at, heads_k * WIDTH, left, WIDTH, KEYS, BLOCK_D)
        mbarrier.arrive(own_free.index(own), count=1)
        number = take(turns, n)
        n += 1


@gluon.jit(do_not_specialize=RUNTIME)
def attention_bwd_dkdv(
    q, k, v, gs, rows, cu_q, cu_k, counter, dk_out, dv_out,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, sequences: gl.int32,
    window: gl.int32, padded: gl.int32, tiles: gl.int32, scale: gl.float32,
    POLAR: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of `tiles` key tiles, one of one key head each."""
    VECTORS: gl.constexpr = 4 if POLAR else 2
    OWN: gl.constexpr = BUFFERS * CONSUMERS
    k_tiles = gl.allocate_shared_memory(k.dtype, [OWN, 1, 1, KEYS, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [OWN, 1, 1, KEYS, BLOCK_D], v.layout)
    if PACKED:
        q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_M, BLOCK_D], q.layout)
    else:
        q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q.layout)
    gs_tiles = gl.allocate_shared_memory(gs.dtype, [STAGES, BLOCK_M, BLOCK_D], gs.layout)
    row_tiles = gl.allocate_shared_memory(rows.dtype, [STAGES * VECTORS, 1, BLOCK_M], rows.layout)
    own_full, own_free = new_barriers(BUFFERS)
    full, free = new_barriers(STAGES)

    buffers = (k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free)
    turns = new_turns(counter)
    results = (dk_out, dv_out)
    sizes = (tq, tk, heads_q, group, sequences, window, padded, tiles)
    # Written out: a tuple with compile-time values has to stand in the call itself.
    gl.warp_specialize(
        [
            (_consume_rows, (
                0, buffers, turns, results, sizes, scale, cu_q, cu_k,
                POLAR, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_M, BLOCK_D, STAGES, BUFFERS,
            )),
            (_consume_rows, (
                1, buffers, turns, results, sizes, scale, cu_q, cu_k,
                POLAR, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_M, BLOCK_D, STAGES, BUFFERS,
            )),
            (_produce_rows, (
                q, k, v, gs, rows, buffers, turns, sizes, cu_q, cu_k,
                POLAR, CAUSAL, WINDOW, PACKED, BLOCK_M, BLOCK_D, STAGES, BUFFERS,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


# ---- dq -----------------------------------------------------------------------------------------


@gluon.jit
def _place_rows(number, sizes, cu_q, cu_k, PACKED: gl.constexpr):
    """As `hopper_common.place_rows`, with the tile's first row in the padded layout, whether its
    sequence is one (not padding), and the slot of its partial sums.
    """
    tq, tk, heads_q, group, sequences, window, padded, tiles = sizes
    batch, head, of_head, sequence, row0, first_row, first_key, rows, keys = place_rows(
        number, tq, tk, heads_q, sequences, cu_q, cu_k, PACKED
    )
    at_row = (batch * heads_q + head) * padded + row_base(cu_q, sequence, PACKED) + row0
    live = sequence < sequences
    if not PACKED:
        live = sequence == sequence
    slot = batch * count_tiles(tq, sequences, CONSUMERS * ROWS, PACKED) + of_head
    return batch, head, row0, first_row, first_key, at_row, rows, keys, live, slot


@gluon.jit
def _produce_keys(
    q, k, v, gs, buffers, turns, sizes, cu_q, cu_k,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied = buffers
    all_rows, all_keys, heads_q, group, sequences, window, padded, tiles = sizes
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    i = all_rows * 0
    n = all_rows * 0
    cleared = all_rows * 0
    number = gl.program_id(0)
    while number < tiles:
        after = draw(turns, n)
        batch, head, row0, first_row, first_key, at_row, tq, tk, live, slot = _place_rows(
            number, sizes, cu_q, cu_k, PACKED
        )
        plan = key_bounds(
            row0, row0, row0, tq, tk, row0, window, CAUSAL, False, WINDOW, BLOCK_M, BLOCK_N
        )
        own = n % BUFFERS
        mbarrier.wait(own_free.index(own), ((n // BUFFERS) & 1) ^ 1)
        mbarrier.expect(own_full.index(own), 2 * BLOCK_M * BLOCK_D * 2)
        for who in gl.static_range(CONSUMERS):
            mine = own * CONSUMERS + who
            at = [batch, head, first_row + row0 + who * ROWS, 0]
            tma.async_copy_global_to_shared(q, at, own_full.index(own), q_tiles.index(mine))
            at_gs = [at_row + who * ROWS, 0]
            tma.async_copy_global_to_shared(gs, at_gs, own_full.index(own), gs_tiles.index(mine))
        for part in gl.static_range(3):
            if part > 0 or WINDOW:
                first, last = _part(plan, part)
                for j in range(first, last, BLOCK_N):
                    stage = i % STAGES
                    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
                    ready = full.index(stage)
                    where = [batch, head // group, first_key + j, 0]
                    if PACKED and j + BLOCK_N > tk:
                        # Rows of the next sequence have no weight, but 0·NaN is NaN.
                        mbarrier.expect(copied, 2 * BLOCK_N * BLOCK_D * 2)
                        tma.async_copy_global_to_shared(k, where, copied, k_tiles.index(stage))
                        tma.async_copy_global_to_shared(v, where, copied, v_tiles.index(stage))
                        mbarrier.wait(copied, cleared & 1)
                        clear_rows(k_tiles.index(stage), tk - j, BLOCK_N, BLOCK_D)
                        clear_rows(v_tiles.index(stage), tk - j, BLOCK_N, BLOCK_D)
                        mbarrier.arrive(ready, count=1)
                        cleared += 1
                    else:
                        mbarrier.expect(ready, 2 * BLOCK_N * BLOCK_D * 2)
                        tma.async_copy_global_to_shared(k, where, ready, k_tiles.index(stage))
                        tma.async_copy_global_to_shared(v, where, ready, v_tiles.index(stage))
                    i += 1
        number = after
        n += 1


@gluon.jit
def _consume_keys_step(
    i, dq, pairs, wanted, buffers, query, grad, vectors, j, low, high,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied = buffers
    minus_lam, e0, rate, e1 = vectors
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage = i % STAGES
    key = k_tiles.index(stage).reshape([BLOCK_N, BLOCK_D])
    value = v_tiles.index(stage).reshape([BLOCK_N, BLOCK_D])
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    score = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    score = warpgroup_mma(query, key.permute((1, 0)), score, use_acc=False, is_async=True)
    du = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    du = warpgroup_mma(grad, value.permute((1, 0)), du, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    u = gl.exp2(score * rate[:, None] + minus_lam[:, None])
    if MASKED:
        at = j + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
        u = gl.where(seen, u, 0.0)
    du = warpgroup_mma_wait(0, deps=[du])
    if POLAR:
        g = u * (du + (e0[:, None] - e1[:, None] * u))
    else:
        g = u * (du + e0[:, None])
    if NULL_VALUE:
        if wanted:
            pairs += gl.sum(g, 1)
    g = gl.convert_layout(g.to(k_tiles.dtype), A_LAYOUT)
    dq = warpgroup_mma(g, key, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(free.index(stage), count=1)
    return dq, pairs


@gluon.jit
def _consume_keys(
    WHO: gl.constexpr, buffers, turns, operands, parameters, results, sizes, row_stride, scale,
    cu_q, cu_k,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied = buffers
    rows_in, by_pairs = operands
    null_base, null_slope, length_gain = parameters
    dq_out, sums, partials = results
    total, all_keys, heads_q, group, sequences, window, padded, tiles = sizes
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    R_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    i = total * 0
    n = total * 0
    number = gl.program_id(0)
    while number < tiles:
        batch, head, row0, first_row, first_key, at_row, tq, tk, live, slot = _place_rows(
            number, sizes, cu_q, cu_k, PACKED
        )
        plan = key_bounds(
            row0, row0, row0, tq, tk, row0, window, CAUSAL, False, WINDOW, BLOCK_M, BLOCK_N
        )
        own = n % BUFFERS
        rows = row0 + WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        low, high = key_range(rows, tq, tk, rows, window, CAUSAL, False, WINDOW)
        at_mine = at_row + WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        minus_lam = gl.load(rows_in + at_mine + MINUS_LAM * row_stride)
        e0 = gl.load(rows_in + at_mine + E0 * row_stride)
        rate = scale * LOG2E + e0 * 0.0
        e1 = e0
        if POLAR:
            rate = gl.load(rows_in + at_mine + RATE * row_stride)
            e1 = gl.load(rows_in + at_mine + E1 * row_stride)
        wanted = False
        if NULL_VALUE:
            of_pairs = gl.load(by_pairs + at_mine)
            wanted = gl.max(of_pairs, 0) > 0.0
        vectors = (minus_lam, e0, rate, e1)
        mine = own * CONSUMERS + WHO
        dq = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
        pairs = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        mbarrier.wait(own_full.index(own), (n // BUFFERS) & 1)
        for part in gl.static_range(3):
            if part > 0 or WINDOW:
                first, last = _part(plan, part)
                here = opaque(mine)
                query = q_tiles.index(here).reshape([ROWS, BLOCK_D])
                grad = gs_tiles.index(here)
                for j in range(first, last, BLOCK_N):
                    dq, pairs = _consume_keys_step(
                        i, dq, pairs, wanted, buffers, query, grad, vectors, j, low, high,
                        POLAR, NULL_VALUE, part != 1, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
                    i += 1
        dq = dq * gl.convert_layout(rate * LN2, R_LAYOUT)[:, None]
        query_tile = q_tiles.index(mine).reshape([ROWS, BLOCK_D])
        if POLAR:
            # As store_dq of the plain kernel: dt = (q·dq)/t, and d_null of rows left to the pairs.
            rows_out = gl.convert_layout(rows, R_LAYOUT)
            inside = (rows_out < tq) & live
            low_out, high_out = key_range(rows_out, tq, tk, rows_out, window, CAUSAL, False, WINDOW)
            length = gl.maximum(high_out - low_out, 1).to(gl.float32)
            log_n = gl.log(length)
            log_n1 = gl.sqrt(gl.log(length + 1.0))
            t = 1.0 + gl.load(length_gain + head).to(gl.float32) * log_n
            nu = gl.load(null_base + head).to(gl.float32)
            nu += gl.load(null_slope + head).to(gl.float32) * log_n1
            along = gl.sum(query_tile.load(O_LAYOUT).to(gl.float32) * dq, 1)
            dt = gl.where(inside & (t != 0.0), along / gl.where(t == 0.0, 1.0, t), 0.0)
            d_null = along * 0.0
            if NULL_VALUE:
                d_null = gl.convert_layout(-pairs * of_pairs, R_LAYOUT)
            d_null = gl.where(inside, d_null, 0.0)
            place = (head.to(gl.int64) * partials + slot) * CONSUMERS + WHO
            at_sums = sums + place * PAIR_SCALARS
            gl.store(at_sums, gl.sum(d_null * t, 0))
            gl.store(at_sums + 1, gl.sum(d_null * t * log_n1, 0))
            gl.store(at_sums + 2, gl.sum((dt + d_null * nu) * log_n, 0))
        first_mine = row0 + WHO * ROWS
        at = ((batch.to(gl.int64) * total + first_row + first_mine) * heads_q + head) * WIDTH
        left = tq - first_mine
        store_rows(query_tile, dq, dq_out, at, heads_q * WIDTH, left, WIDTH, ROWS, BLOCK_D)
        mbarrier.arrive(own_free.index(own), count=1)
        number = take(turns, n)
        n += 1


@gluon.jit(do_not_specialize=RUNTIME)
def attention_bwd_dq(
    q, k, v, gs, rows, by_pairs, null_base, null_slope, length_gain, cu_q, cu_k, counter,
    dq_out, sums,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, sequences: gl.int32,
    window: gl.int32, partials: gl.int32, padded: gl.int32, row_stride: gl.int64, tiles: gl.int32,
    scale: gl.float32,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """dq of `tiles` query tiles, and each tile's parts of three parameter gradients."""
    OWN: gl.constexpr = BUFFERS * CONSUMERS
    q_tiles = gl.allocate_shared_memory(q.dtype, [OWN, 1, 1, ROWS, BLOCK_D], q.layout)
    gs_tiles = gl.allocate_shared_memory(gs.dtype, [OWN, ROWS, BLOCK_D], gs.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v.layout)
    copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(copied, count=1)
    own_full, own_free = new_barriers(BUFFERS)
    full, free = new_barriers(STAGES)

    buffers = (q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied)
    turns = new_turns(counter)
    operands = (rows, by_pairs)
    parameters = (null_base, null_slope, length_gain)
    results = (dq_out, sums, partials)
    sizes = (tq, tk, heads_q, group, sequences, window, padded, tiles)
    gl.warp_specialize(
        [
            (_consume_keys, (
                0, buffers, turns, operands, parameters, results, sizes, row_stride, scale,
                cu_q, cu_k, POLAR, NULL_VALUE, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_N, BLOCK_D,
                STAGES, BUFFERS,
            )),
            (_consume_keys, (
                1, buffers, turns, operands, parameters, results, sizes, row_stride, scale,
                cu_q, cu_k, POLAR, NULL_VALUE, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_N, BLOCK_D,
                STAGES, BUFFERS,
            )),
            (_produce_keys, (
                q, k, v, gs, buffers, turns, sizes, cu_q, cu_k,
                CAUSAL, WINDOW, PACKED, BLOCK_N, BLOCK_D, STAGES, BUFFERS,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
