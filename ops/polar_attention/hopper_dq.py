"""dq for Hopper, in Gluon (`triton_bwd` has the maths, prepare and the plain form).

    producer (1 warp)     TMA: the q and Gs of a tile, then k and v tiles of BLOCK_N keys, STAGES
                          deep
    consumer 0, 1 (4 warps each, 64 rows each): S = q·kᵀ and dP = Gs·vᵀ start together; u comes of
        the first while the second runs; then dq += g·k

    full [STAGES]  completed by the copies      free [STAGES]  all consumers
    own_full, own_free [BUFFERS]                the same of the tile that stays

As in the forward, one program a multiprocessor serves tile after tile, and heads are in chunks of
columns. Starting the products of the next step before the last ones of this step end gained nothing
worth its lines.

Serves calls without n_keys whose tensors TMA can address.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import LN2, LOG2E, count_tiles, key_bounds, key_range
from .hopper_common import (
    CONSUMERS,
    ROWS,
    clear_rows,
    draw,
    hide,
    hold,
    new_barriers,
    new_turns,
    opaque,
    part_of,
    place_rows,
    store_rows,
    take,
    wait_chunks,
    zero_chunks,
)
from .triton_bwd_rows import E0, E1, MINUS_LAM, PAIR_SCALARS, RATE, row_base

RUNTIME = (
    "tq", "tk", "heads_q", "group", "sequences", "window", "partials", "padded", "row_stride",
    "tiles", "together", "scale",
)  # fmt: skip


@gluon.jit
def _place_rows(number, sizes, padded, cu_q, cu_k, PACKED: gl.constexpr):
    """As `hopper_common.place_rows`, with the tile's first row in the padded layout, whether its
    sequence is one (not padding), and the slot of its partial sums.
    """
    tq, tk, heads_q, group, sequences, window, tiles, together = sizes
    batch, head, of_head, sequence, row0, first_row, first_key, rows, keys = place_rows(
        number, sizes, cu_q, cu_k, PACKED
    )
    at_row = (batch * heads_q + head) * padded + row_base(cu_q, sequence, PACKED) + row0
    live = sequence < sequences
    if not PACKED:
        live = sequence == sequence
    slot = batch * count_tiles(tq, sequences, CONSUMERS * ROWS, PACKED) + of_head
    return batch, head, row0, first_row, first_key, at_row, rows, keys, live, slot


@gluon.jit
def _copy_keys(
    k, v, batch, head, row, buffers, stage, ready,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied = buffers
    mbarrier.expect(ready, 2 * BLOCK_N * CHUNK * CHUNKS * 2)
    for c in gl.static_range(CHUNKS):
        at = [batch, head, row, c * CHUNK]
        tma.async_copy_global_to_shared(k, at, ready, k_tiles.index(stage * CHUNKS + c))
        tma.async_copy_global_to_shared(v, at, ready, v_tiles.index(stage * CHUNKS + c))


@gluon.jit
def _produce_keys(
    q, k, v, gs, buffers, turns, sizes, padded, cu_q, cu_k,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied = buffers
    all_rows, all_keys, heads_q, group, sequences, window, tiles, together = sizes
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BYTES: gl.constexpr = CHUNK * CHUNKS * 2  # of a row of one operand
    i = all_rows * 0
    n = all_rows * 0
    cleared = all_rows * 0
    number = gl.program_id(0)
    while number < tiles:
        after = draw(turns, n)
        batch, head, row0, first_row, first_key, at_row, tq, tk, live, slot = _place_rows(
            number, sizes, padded, cu_q, cu_k, PACKED
        )
        plan = key_bounds(
            row0, row0, row0, tq, tk, row0, window, CAUSAL, False, WINDOW, BLOCK_M, BLOCK_N
        )
        own = n % BUFFERS
        mbarrier.wait(own_free.index(own), ((n // BUFFERS) & 1) ^ 1)
        arrived = own_full.index(own)
        mbarrier.expect(arrived, 2 * BLOCK_M * BYTES)
        for who in gl.static_range(CONSUMERS):
            for c in gl.static_range(CHUNKS):
                to = (own * CONSUMERS + who) * CHUNKS + c
                at = [batch, head, first_row + row0 + who * ROWS, c * CHUNK]
                tma.async_copy_global_to_shared(q, at, arrived, q_tiles.index(to))
                at_gs = [at_row + who * ROWS, c * CHUNK]
                tma.async_copy_global_to_shared(gs, at_gs, arrived, gs_tiles.index(to))
        for part in gl.static_range(3):
            if part > 0 or WINDOW:
                first, last = part_of(plan, part)
                for j in range(first, last, BLOCK_N):
                    stage = i % STAGES
                    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
                    ready = full.index(stage)
                    key_row = first_key + j
                    if PACKED and j + BLOCK_N > tk:
                        # Rows of the next sequence have no weight, but 0·NaN is NaN.
                        _copy_keys(
                            k, v, batch, head // group, key_row, buffers, stage, copied,
                            BLOCK_N, CHUNK, CHUNKS,
                        )  # fmt: skip
                        mbarrier.wait(copied, cleared & 1)
                        for c in gl.static_range(CHUNKS):
                            clear_rows(k_tiles.index(stage * CHUNKS + c), tk - j, BLOCK_N, CHUNK)
                            clear_rows(v_tiles.index(stage * CHUNKS + c), tk - j, BLOCK_N, CHUNK)
                        mbarrier.arrive(ready, count=1)
                        cleared += 1
                    else:
                        _copy_keys(
                            k, v, batch, head // group, key_row, buffers, stage, ready,
                            BLOCK_N, CHUNK, CHUNKS,
                        )  # fmt: skip
                    i += 1
        number = after
        n += 1


@gluon.jit
def _consume_keys_step(
    i, here, dq, pairs, wanted, buffers, vectors, j, low, high,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied = buffers
    minus_lam, e0, rate, e1 = vectors
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage = i % STAGES
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    score = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    for c in gl.static_range(CHUNKS):
        query = q_tiles.index(here * CHUNKS + c).reshape([ROWS, CHUNK])
        key = k_tiles.index(stage * CHUNKS + c).reshape([BLOCK_N, CHUNK])
        score = warpgroup_mma(query, key.permute((1, 0)), score, use_acc=c > 0, is_async=True)
    du = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    for c in gl.static_range(CHUNKS):
        grad = gs_tiles.index(here * CHUNKS + c)
        value = v_tiles.index(stage * CHUNKS + c).reshape([BLOCK_N, CHUNK])
        du = warpgroup_mma(grad, value.permute((1, 0)), du, use_acc=c > 0, is_async=True)
    score = warpgroup_mma_wait(CHUNKS, deps=[score])
    exponent = score * rate[:, None] + minus_lam[:, None]
    if MASKED:
        at = j + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        exponent = hide(exponent, at[None, :], low[:, None], (high - low)[:, None])
    u = gl.exp2(exponent)
    du = warpgroup_mma_wait(0, deps=[du])
    if POLAR:
        g = u * (du + (e0[:, None] - e1[:, None] * u))
    else:
        g = u * (du + e0[:, None])
    if NULL_VALUE:
        if wanted:
            pairs += gl.sum(g, 1)
    g = gl.convert_layout(g.to(k_tiles.dtype), A_LAYOUT)
    dq_new = ()
    for c in gl.static_range(CHUNKS):
        key = k_tiles.index(stage * CHUNKS + c).reshape([BLOCK_N, CHUNK])
        dq_new += (warpgroup_mma(g, key, dq[c], is_async=True),)
    dq_new = wait_chunks(dq_new)
    mbarrier.arrive(free.index(stage), count=1)
    return dq_new, pairs


@gluon.jit
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@gluon.jit
def _consume_keys(
    WHO: gl.constexpr, buffers, turns, operands, parameters, results, sizes, padded, row_stride,
    scale, cu_q, cu_k,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied = buffers
    rows_in, by_pairs = operands
    null_base, null_slope, length_gain = parameters
    dq_out, sums, partials = results
    total, all_keys, heads_q, group, sequences, window, tiles, together = sizes
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    R_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    i = total * 0
    n = total * 0
    number = gl.program_id(0)
    while number < tiles:
        batch, head, row0, first_row, first_key, at_row, tq, tk, live, slot = _place_rows(
            number, sizes, padded, cu_q, cu_k, PACKED
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
            # The end wants these, and would wait for them there.
            gain_n = gl.load(length_gain + head).to(gl.float32)
            bias = gl.load(null_base + head).to(gl.float32)
            slope_n = gl.load(null_slope + head).to(gl.float32)
        wanted = False
        if NULL_VALUE:
            of_pairs = gl.load(by_pairs + at_mine)
            wanted = gl.max(of_pairs, 0) > 0.0
        vectors = (minus_lam, e0, rate, e1)
        mine = own * CONSUMERS + WHO
        dq = zero_chunks(CHUNKS, ROWS, CHUNK, O_LAYOUT)
        pairs = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        mbarrier.wait(own_full.index(own), (n // BUFFERS) & 1)
        for part in gl.static_range(3):
            if part > 0 or WINDOW:
                first, last = part_of(plan, part)
                here = opaque(mine)
                for j in range(first, last, BLOCK_N):
                    dq, pairs = _consume_keys_step(
                        i, here, dq, pairs, wanted, buffers, vectors, j, low, high,
                        POLAR, NULL_VALUE, part != 1, BLOCK_N, CHUNK, CHUNKS, STAGES,
                        S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
                    i += 1
        factor = gl.convert_layout(rate * LN2, R_LAYOUT)
        first_mine = row0 + WHO * ROWS
        at = ((batch.to(gl.int64) * total + first_row + first_mine) * heads_q + head) * WIDTH
        left = tq - first_mine
        along = gl.zeros([ROWS], gl.float32, R_LAYOUT)
        for c in gl.static_range(CHUNKS):
            query_tile = q_tiles.index(mine * CHUNKS + c).reshape([ROWS, CHUNK])
            scaled = dq[c] * factor[:, None]
            if POLAR:
                along += gl.sum(query_tile.load(O_LAYOUT).to(gl.float32) * scaled, 1)
            store_rows(
                query_tile, scaled, dq_out, at + c * CHUNK, heads_q * WIDTH, left,
                WIDTH - c * CHUNK, ROWS, CHUNK,
            )  # fmt: skip
        if POLAR:
            # As store_dq of the plain kernel: dt = (q·dq)/t, and d_null of rows left to the pairs.
            rows_out = gl.convert_layout(rows, R_LAYOUT)
            inside = (rows_out < tq) & live
            low_out, high_out = key_range(rows_out, tq, tk, rows_out, window, CAUSAL, False, WINDOW)
            length = gl.maximum(high_out - low_out, 1).to(gl.float32)
            log_n = gl.log(length)
            log_n1 = gl.sqrt(gl.log(length + 1.0))
            t = 1.0 + gain_n * log_n
            nu = bias + slope_n * log_n1
            dt = gl.where(inside & (t != 0.0), along / gl.where(t == 0.0, 1.0, t), 0.0)
            d_null = along * 0.0
            if NULL_VALUE:
                d_null = gl.convert_layout(-pairs * of_pairs, R_LAYOUT)
            d_null = gl.where(inside, d_null, 0.0)
            place = (head.to(gl.int64) * partials + slot) * CONSUMERS + WHO
            at_sums = sums + place * PAIR_SCALARS
            d_base = d_null * t
            d_gain = (dt + d_null * nu) * log_n
            # One reduction: its warps meet once, not three times.
            d_base, d_slope, d_gain = gl.reduce((d_base, d_base * log_n1, d_gain), 0, _add_three)
            gl.store(at_sums, d_base)
            gl.store(at_sums + 1, d_slope)
            gl.store(at_sums + 2, d_gain)
        mbarrier.arrive(own_free.index(own), count=1)
        number = take(turns, n)
        n += 1


@gluon.jit(do_not_specialize=RUNTIME)
def attention_bwd_dq(
    q, k, v, gs, rows, by_pairs, null_base, null_slope, length_gain, cu_q, cu_k, counter,
    dq_out, sums,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, sequences: gl.int32,
    window: gl.int32, partials: gl.int32, padded: gl.int32, row_stride: gl.int64, tiles: gl.int32,
    together: gl.int32, scale: gl.float32,
    POLAR: gl.constexpr, NULL_VALUE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """dq of `tiles` query tiles, and each tile's parts of three parameter gradients."""
    OWN: gl.constexpr = BUFFERS * CONSUMERS * CHUNKS
    STREAMED: gl.constexpr = STAGES * CHUNKS
    q_tiles = gl.allocate_shared_memory(q.dtype, [OWN, 1, 1, ROWS, CHUNK], q.layout)
    gs_tiles = gl.allocate_shared_memory(gs.dtype, [OWN, ROWS, CHUNK], gs.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STREAMED, 1, 1, BLOCK_N, CHUNK], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STREAMED, 1, 1, BLOCK_N, CHUNK], v.layout)
    copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(copied, count=1)
    own_full, own_free = new_barriers(BUFFERS)
    full, free = new_barriers(STAGES)

    buffers = (q_tiles, gs_tiles, k_tiles, v_tiles, own_full, own_free, full, free, copied)
    turns = new_turns(counter)
    operands = (rows, by_pairs)
    parameters = (null_base, null_slope, length_gain)
    results = (dq_out, sums, partials)
    sizes = (tq, tk, heads_q, group, sequences, window, tiles, together)
    gl.warp_specialize(
        [
            (_consume_keys, (
                0, buffers, turns, operands, parameters, results, sizes, padded, row_stride, scale,
                cu_q, cu_k, POLAR, NULL_VALUE, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_N, CHUNK,
                CHUNKS, STAGES, BUFFERS,
            )),
            (_consume_keys, (
                1, buffers, turns, operands, parameters, results, sizes, padded, row_stride, scale,
                cu_q, cu_k, POLAR, NULL_VALUE, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_N, CHUNK,
                CHUNKS, STAGES, BUFFERS,
            )),
            (_produce_keys, (
                q, k, v, gs, buffers, turns, sizes, padded, cu_q, cu_k,
                CAUSAL, WINDOW, PACKED, BLOCK_N, CHUNK, CHUNKS, STAGES, BUFFERS,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
    hold(copied)
