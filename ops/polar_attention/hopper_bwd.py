"""Backward kernels for Hopper, in Gluon (`triton_bwd` has the maths, prepare and the plain form).

    dkdv   producer (1 warp)     TMA: the key tile once, then per step BLOCK_M rows of q and Gs and
                                 their row vectors, STAGES deep
           consumer 0, 1 (4 warps each, 64 keys each), in transposed tiles [keys, rows]:
               Sᵀ = k·qᵀ and dPᵀ = v·Gsᵀ start together; u comes of the first while the second
               runs; dv += u·Gs runs while g is formed; then dk += g·q
    dq     producer              q and Gs once, then k and v tiles of BLOCK_N keys
           consumer 0, 1         64 rows each, [rows, keys]: S, dP, then dq += g·k

    full [STAGES]  completed by the copies      free [STAGES]  all consumers

In a transposed tile the row vectors lie along the columns, so that a thread wants sixteen or more
values of each where the other orientation wants two. They stay in shared memory and are read where
they are used; the compiler's own pipeline fetches them before the first product, and spills.

Starting the products of the next step before the last ones of this step end makes the assembler
serialise all of them at width 128, for want of registers, and was slower at width 64.

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
from .hopper_common import CONSUMERS, ROWS, clear_rows, store_rows
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
    "scale",
)  # fmt: skip

KEYS = ROWS  # of one consumer, in dkdv


@gluon.jit
def _part(plan, PART: gl.constexpr):
    """First row and end of a part: rows that see the tile in part, whole, and in part again."""
    begin, whole, whole_end, end = plan
    first = begin if PART == 0 else (whole if PART == 1 else whole_end)
    last = whole if PART == 0 else (whole_end if PART == 1 else end)
    return first, last


@gluon.jit
def _copy_vector(rows, vector: gl.constexpr, row, ready, tile):
    tma.async_copy_global_to_shared(rows, [vector, row], ready, tile)


@gluon.jit
def _produce(
    q, k, v, gs, rows, tiles, place, plan,
    POLAR: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_tiles, gs_tiles, row_tiles, keys_full, full, free = tiles
    batch, head_k, group, heads_q, key0, first_key, base, padded = place
    VECTORS: gl.constexpr = 4 if POLAR else 2
    mbarrier.expect(keys_full, 2 * CONSUMERS * KEYS * BLOCK_D * 2)
    for who in gl.static_range(CONSUMERS):
        at = [batch, head_k, first_key + key0 + who * KEYS, 0]
        tma.async_copy_global_to_shared(k, at, keys_full, k_tile.index(who))
        tma.async_copy_global_to_shared(v, at, keys_full, v_tile.index(who))
    i = key0 * 0
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
                    at = [batch, head, row0, 0]
                    tma.async_copy_global_to_shared(q, at, ready, q_tiles.index(stage))
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


@gluon.jit
def _consume_step(
    i, dk, dv, tiles, key, value, factor, row0, keys, tq, tk, window,
    POLAR: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_tiles, gs_tiles, row_tiles, keys_full, full, free = tiles
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
def _consume(
    WHO: gl.constexpr, tiles, results, place, sizes, plan,
    POLAR: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_tiles, gs_tiles, row_tiles, keys_full, full, free = tiles
    dk_out, dv_out = results
    batch, head_k, group, heads_q, key0, first_key, base, padded = place
    tq, tk, total_k, window, scale = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    keys = key0 + WHO * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    key = k_tile.index(WHO).reshape([KEYS, BLOCK_D])
    value = v_tile.index(WHO).reshape([KEYS, BLOCK_D])
    dk = gl.zeros([KEYS, BLOCK_D], gl.float32, O_LAYOUT)
    dv = gl.zeros([KEYS, BLOCK_D], gl.float32, O_LAYOUT)
    mbarrier.wait(keys_full, 0)
    i = key0 * 0
    for part in gl.static_range(3):
        if part < 2 or WINDOW:
            first, last = _part(plan, part)
            steps = gl.maximum(last - first, 0) // BLOCK_M
            for step in range(steps * group):
                row0 = first + step % steps * BLOCK_M
                dk, dv = _consume_step(
                    i, dk, dv, tiles, key, value, scale * LOG2E, row0, keys, tq, tk, window,
                    POLAR, part != 1, CAUSAL, WINDOW, BLOCK_M, BLOCK_D, STAGES,
                    S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
                i += 1
    heads_k = heads_q // group
    first = key0 + WHO * KEYS
    at = ((batch.to(gl.int64) * total_k + first_key + first) * heads_k + head_k) * WIDTH
    dk = dk * (LN2 if POLAR else scale)
    store_rows(key, dk, dk_out, at, heads_k * WIDTH, tk - first, WIDTH, KEYS, BLOCK_D)
    store_rows(value, dv, dv_out, at, heads_k * WIDTH, tk - first, WIDTH, KEYS, BLOCK_D)


@gluon.jit(do_not_specialize=RUNTIME)
def attention_bwd_dkdv(
    q, k, v, gs, rows, cu_q, cu_k, dk_out, dv_out,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, sequences: gl.int32,
    window: gl.int32, padded: gl.int32, scale: gl.float32,
    POLAR: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one key head."""
    BLOCK_N: gl.constexpr = CONSUMERS * KEYS
    VECTORS: gl.constexpr = 4 if POLAR else 2
    total_k = tk
    heads_k = heads_q // group
    key_tiles = count_tiles(total_k, sequences, BLOCK_N, PACKED)
    pid = gl.program_id(0)
    batch = pid // key_tiles // heads_k
    head_k = pid // key_tiles % heads_k
    # The causal keys that most rows see start first.
    sequence, tile, first_key, tk, _, tq = place_tile(
        pid % key_tiles, total_k, tq, sequences, cu_k, cu_q, BLOCK_N, PACKED
    )
    key0 = tile * BLOCK_N
    tq = gl.where(key0 < tk, tq, 0)  # a tile past the keys of its sequence has no steps
    plan = row_bounds(key0, tq, tk, window, CAUSAL, False, WINDOW, False, BLOCK_M, BLOCK_N)

    k_tile = gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, KEYS, BLOCK_D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, KEYS, BLOCK_D], v.layout)
    if PACKED:
        q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_M, BLOCK_D], q.layout)
    else:
        q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q.layout)
    gs_tiles = gl.allocate_shared_memory(gs.dtype, [STAGES, BLOCK_M, BLOCK_D], gs.layout)
    row_tiles = gl.allocate_shared_memory(rows.dtype, [STAGES * VECTORS, 1, BLOCK_M], rows.layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)

    tiles = (k_tile, v_tile, q_tiles, gs_tiles, row_tiles, keys_full, full, free)
    results = (dk_out, dv_out)
    place = (
        batch, head_k, group, heads_q, key0, first_key, row_base(cu_q, sequence, PACKED), padded,
    )  # fmt: skip
    sizes = (tq, tk, total_k, window, scale)
    # Written out: a tuple with compile-time values has to stand in the call itself.
    gl.warp_specialize(
        [
            (_consume, (
                0, tiles, results, place, sizes, plan,
                POLAR, CAUSAL, WINDOW, WIDTH, BLOCK_M, BLOCK_D, STAGES,
            )),
            (_consume, (
                1, tiles, results, place, sizes, plan,
                POLAR, CAUSAL, WINDOW, WIDTH, BLOCK_M, BLOCK_D, STAGES,
            )),
            (_produce, (
                q, k, v, gs, rows, tiles, place, plan,
                POLAR, WINDOW, PACKED, BLOCK_M, BLOCK_D, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _produce_keys(
    q, k, v, gs, tiles, place, plan,
    WINDOW: gl.constexpr, PACKED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tile, gs_tile, k_tiles, v_tiles, rows_full, full, free, copied = tiles
    batch, head, head_k, row0, first_row, first_key, at_row, tk = place
    mbarrier.expect(rows_full, 2 * CONSUMERS * ROWS * BLOCK_D * 2)
    for who in gl.static_range(CONSUMERS):
        at = [batch, head, first_row + row0 + who * ROWS, 0]
        tma.async_copy_global_to_shared(q, at, rows_full, q_tile.index(who))
        at = [at_row + who * ROWS, 0]
        tma.async_copy_global_to_shared(gs, at, rows_full, gs_tile.index(who))
    i = row0 * 0
    for part in gl.static_range(3):
        if part > 0 or WINDOW:
            first, last = _part(plan, part)
            for j in range(first, last, BLOCK_N):
                stage = i % STAGES
                mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
                where = [batch, head_k, first_key + j, 0]
                if PACKED and j + BLOCK_N > tk:
                    # Rows of the next sequence have no weight, but 0·NaN is NaN.
                    mbarrier.expect(copied, 2 * BLOCK_N * BLOCK_D * 2)
                    tma.async_copy_global_to_shared(k, where, copied, k_tiles.index(stage))
                    tma.async_copy_global_to_shared(v, where, copied, v_tiles.index(stage))
                    mbarrier.wait(copied, 0)
                    key = k_tiles.index(stage).reshape([BLOCK_N, BLOCK_D])
                    clear_rows(key, tk - j, BLOCK_N, BLOCK_D)
                    value = v_tiles.index(stage).reshape([BLOCK_N, BLOCK_D])
                    clear_rows(value, tk - j, BLOCK_N, BLOCK_D)
                    mbarrier.arrive(full.index(stage), count=1)
                else:
                    mbarrier.expect(full.index(stage), 2 * BLOCK_N * BLOCK_D * 2)
                    tma.async_copy_global_to_shared(
                        k, where, full.index(stage), k_tiles.index(stage)
                    )
                    tma.async_copy_global_to_shared(
                        v, where, full.index(stage), v_tiles.index(stage)
                    )
                i += 1


@gluon.jit
def _consume_keys_step(
    i, dq, pairs, wanted, tiles, query, grad, vectors, j, low, high,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    q_tile, gs_tile, k_tiles, v_tiles, rows_full, full, free, copied = tiles
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
    WHO: gl.constexpr, tiles, operands, parameters, results, where, sizes, plan,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tile, gs_tile, k_tiles, v_tiles, rows_full, full, free, copied = tiles
    rows_in, by_pairs = operands
    null_base, null_slope, length_gain = parameters
    dq_out, sums, partials = results
    batch, head, row0, first_row, at_tile, live, slot = where
    tq, tk, total, heads_q, window, row_stride, scale = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    rows = row0 + WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    low, high = key_range(rows, tq, tk, rows, window, CAUSAL, False, WINDOW)
    at_row = at_tile + WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    minus_lam = gl.load(rows_in + at_row + MINUS_LAM * row_stride)
    e0 = gl.load(rows_in + at_row + E0 * row_stride)
    rate = scale * LOG2E + e0 * 0.0
    e1 = e0
    if POLAR:
        rate = gl.load(rows_in + at_row + RATE * row_stride)
        e1 = gl.load(rows_in + at_row + E1 * row_stride)
    wanted = False
    if NULL_VALUE:
        of_pairs = gl.load(by_pairs + at_row)
        wanted = gl.max(of_pairs, 0) > 0.0
    vectors = (minus_lam, e0, rate, e1)
    query = q_tile.index(WHO).reshape([ROWS, BLOCK_D])
    grad = gs_tile.index(WHO)
    dq = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    pairs = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    mbarrier.wait(rows_full, 0)
    i = row0 * 0
    for part in gl.static_range(3):
        if part > 0 or WINDOW:
            first, last = _part(plan, part)
            for j in range(first, last, BLOCK_N):
                dq, pairs = _consume_keys_step(
                    i, dq, pairs, wanted, tiles, query, grad, vectors, j, low, high,
                    POLAR, NULL_VALUE, part != 1, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
                i += 1
    R_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    rows = gl.convert_layout(rows, R_LAYOUT)
    inside = rows < tq
    dq = dq * gl.convert_layout(rate * LN2, R_LAYOUT)[:, None]
    if POLAR:
        # As store_dq of the plain kernel: dt = (q·dq)/t, and d_null of rows left to the pairs.
        low, high = key_range(rows, tq, tk, rows, window, CAUSAL, False, WINDOW)
        length = gl.maximum(high - low, 1).to(gl.float32)
        log_n = gl.log(length)
        log_n1 = gl.sqrt(gl.log(length + 1.0))
        t = 1.0 + gl.load(length_gain + head).to(gl.float32) * log_n
        nu = gl.load(null_base + head).to(gl.float32)
        nu += gl.load(null_slope + head).to(gl.float32) * log_n1
        along = gl.sum(query.load(O_LAYOUT).to(gl.float32) * dq, 1)
        inside = inside & live
        dt = gl.where(inside & (t != 0.0), along / gl.where(t == 0.0, 1.0, t), 0.0)
        d_null = along * 0.0
        if NULL_VALUE:
            d_null = gl.where(inside, gl.convert_layout(-pairs * of_pairs, R_LAYOUT), 0.0)
        at_sums = sums + ((head * partials + slot) * CONSUMERS + WHO) * PAIR_SCALARS
        gl.store(at_sums, gl.sum(d_null * t, 0))
        gl.store(at_sums + 1, gl.sum(d_null * t * log_n1, 0))
        gl.store(at_sums + 2, gl.sum((dt + d_null * nu) * log_n, 0))
    row = row0 + WHO * ROWS
    at = ((batch.to(gl.int64) * total + first_row + row) * heads_q + head) * WIDTH
    store_rows(query, dq, dq_out, at, heads_q * WIDTH, tq - row, WIDTH, ROWS, BLOCK_D)


@gluon.jit(do_not_specialize=RUNTIME)
def attention_bwd_dq(
    q, k, v, gs, rows, by_pairs, null_base, null_slope, length_gain, cu_q, cu_k, dq_out, sums,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, sequences: gl.int32,
    window: gl.int32, partials: gl.int32, padded: gl.int32, row_stride: gl.int64,
    scale: gl.float32,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head, and this tile's parts of three parameter gradients."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    total = tq
    row_tiles = count_tiles(total, sequences, BLOCK_M, PACKED)
    pid = gl.program_id(0)
    batch = pid // row_tiles // heads_q
    head = pid // row_tiles % heads_q
    longest_first = row_tiles - 1 - pid % row_tiles  # the causal rows with most keys start first
    sequence, tile, first_row, tq, first_key, tk = place_tile(
        longest_first, total, tk, sequences, cu_q, cu_k, BLOCK_M, PACKED
    )
    row0 = tile * BLOCK_M
    tk = gl.where(row0 < tq, tk, 0)  # a tile past the rows of its sequence has no steps
    tq = gl.where(row0 < tq, tq, 0)
    plan = key_bounds(
        row0, row0, row0, tq, tk, row0, window, CAUSAL, False, WINDOW, BLOCK_M, BLOCK_N
    )

    q_tile = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q.layout)
    gs_tile = gl.allocate_shared_memory(gs.dtype, [CONSUMERS, ROWS, BLOCK_D], gs.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v.layout)
    rows_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(rows_full, count=1)
    mbarrier.init(copied, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)

    tiles = (q_tile, gs_tile, k_tiles, v_tiles, rows_full, full, free, copied)
    operands = (rows, by_pairs)
    parameters = (null_base, null_slope, length_gain)
    results = (dq_out, sums, partials)
    at_row = (batch * heads_q + head) * padded + row_base(cu_q, sequence, PACKED) + row0
    live = sequence < sequences
    if not PACKED:
        live = sequence == sequence
    place = (batch, head, head // group, row0, first_row, first_key, at_row, tk)
    where = (batch, head, row0, first_row, at_row, live, batch * row_tiles + longest_first)
    sizes = (tq, tk, total, heads_q, window, row_stride, scale)
    gl.warp_specialize(
        [
            (_consume_keys, (
                0, tiles, operands, parameters, results, where, sizes, plan,
                POLAR, NULL_VALUE, CAUSAL, WINDOW, WIDTH, BLOCK_N, BLOCK_D, STAGES,
            )),
            (_consume_keys, (
                1, tiles, operands, parameters, results, where, sizes, plan,
                POLAR, NULL_VALUE, CAUSAL, WINDOW, WIDTH, BLOCK_N, BLOCK_D, STAGES,
            )),
            (_produce_keys, (
                q, k, v, gs, tiles, place, plan, WINDOW, PACKED, BLOCK_N, BLOCK_D, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
