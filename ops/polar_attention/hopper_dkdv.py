"""dk and dv for Hopper, in Gluon (`triton_bwd` has the maths, prepare and the plain form).

    producer (1 warp)     TMA: the key tile once, then per step BLOCK_M rows of q and Gs and their
                          row vectors, STAGES deep
    consumer 0, 1 (4 warps each, 64 keys each), in transposed tiles [keys, rows]:
        Sᵀ = k·qᵀ and dPᵀ = v·Gsᵀ start together; u comes of the first while the second runs;
        dv += u·Gs runs while g is formed; then dk += g·q

    full [STAGES]  completed by the copies      free [STAGES]  all consumers
    own_full, own_free [BUFFERS]                the same of the tile that stays

As in the forward, one program a multiprocessor serves tile after tile, and heads are in chunks of
columns. dk and dv of 64 keys of a head wider than 128 do not fit the registers of one consumer.
Both consumers take the same 64 keys then, and consumer 0 forms dv, consumer 1 dk; the scores are
formed by both.

In a transposed tile the row vectors lie along the columns, so that a thread wants sixteen or more
values of each where the other orientation wants two. They stay in shared memory and are read where
they are used; the compiler's own pipeline fetches them before the first product, and spills.

Starting the products of the next step before the last ones of this step end makes the assembler
serialise all of them at width 128, for want of registers. At width 64 it fits tiles of 64 rows
alone, and gained less there than tiles of 128 rows do.

A single pass that also forms dq (g through shared memory, both consumers' keys in one product, the
sums by bulk reduce-add) was measured at width 128: 6.4 ms where this kernel and dq take 5.9, and
5.1 without the additions.

Serves calls without n_keys whose tensors TMA can address. Keys past the end need no mask: each key
is a row of its own in every product, and is not stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import LN2, LOG2E, count_tiles, deal, place_tile, row_bounds
from .hopper_common import (
    CONSUMERS,
    ROWS,
    draw,
    hide,
    hold,
    new_barriers,
    new_turns,
    opaque,
    part_of,
    store_rows,
    take,
    wait_chunks,
    zero_chunks,
)
from .triton_bwd_rows import E0, MINUS_LAM, RATE, RATE_E0, RATE_E1, row_base

RUNTIME = (
    "tq", "tk", "heads_q", "group", "sequences", "window", "padded", "tiles", "together", "scale",
)  # fmt: skip

KEYS = ROWS  # of one consumer


@gluon.jit
def _place_keys(number, sizes, cu_q, cu_k, PACKED: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where a key tile lies: batch, head, its first key inside the sequence, first key of the
    sequence and first of its padded rows, how many rows and keys it has.
    """
    tq, tk, heads_q, group, sequences, window, padded, tiles, together = sizes
    heads_k = heads_q // group
    key_tiles = count_tiles(tk, sequences, BLOCK_N, PACKED)
    rank, batch_head = deal(number, key_tiles, tiles, together)
    batch = batch_head // heads_k
    head_k = batch_head % heads_k
    # The causal keys that most rows see come first.
    sequence, tile, first_key, keys, first_row, rows = place_tile(
        rank, tk, tq, sequences, cu_k, cu_q, BLOCK_N, PACKED
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
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free, done = buffers
    all_rows, all_keys, heads_q, group, sequences, window, padded, tiles, together = sizes
    VECTORS: gl.constexpr = 4 if POLAR else 2
    BYTES: gl.constexpr = CHUNK * CHUNKS * 2  # of a row of one operand
    PARTS: gl.constexpr = BLOCK_N // KEYS
    i = all_rows * 0
    n = all_rows * 0
    number = gl.program_id(0)
    while number < tiles:
        after = draw(turns, n)
        batch, head_k, key0, first_key, base, tq, tk = _place_keys(
            number, sizes, cu_q, cu_k, PACKED, BLOCK_N
        )
        plan = row_bounds(key0, tq, tk, window, CAUSAL, False, WINDOW, False, BLOCK_M, BLOCK_N)
        own = n % BUFFERS
        mbarrier.wait(own_free.index(own), ((n // BUFFERS) & 1) ^ 1)
        arrived = own_full.index(own)
        mbarrier.expect(arrived, 2 * BLOCK_N * BYTES)
        for part in gl.static_range(PARTS):
            for c in gl.static_range(CHUNKS):
                at = [batch, head_k, first_key + key0 + part * KEYS, c * CHUNK]
                to = (own * PARTS + part) * CHUNKS + c
                tma.async_copy_global_to_shared(k, at, arrived, k_tiles.index(to))
                tma.async_copy_global_to_shared(v, at, arrived, v_tiles.index(to))
        for part in gl.static_range(3):
            if part < 2 or WINDOW:
                first, last = part_of(plan, part)
                steps = gl.maximum(last - first, 0) // BLOCK_M
                for step in range(steps * group):
                    row0 = first + step % steps * BLOCK_M
                    head = head_k * group + step // steps
                    row = (batch * heads_q + head) * padded + base + row0
                    stage = i % STAGES
                    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
                    ready = full.index(stage)
                    mbarrier.expect(ready, 2 * BLOCK_M * BYTES + VECTORS * BLOCK_M * 4)
                    for c in gl.static_range(CHUNKS):
                        query_tile = q_tiles.index(stage * CHUNKS + c)
                        grad_tile = gs_tiles.index(stage * CHUNKS + c)
                        at_padded = [row, c * CHUNK]
                        if PACKED:  # q is its padded copy: no tile meets another sequence
                            tma.async_copy_global_to_shared(q, at_padded, ready, query_tile)
                        else:
                            from_q = [batch, head, row0, c * CHUNK]
                            tma.async_copy_global_to_shared(q, from_q, ready, query_tile)
                        tma.async_copy_global_to_shared(gs, at_padded, ready, grad_tile)
                    vector = stage * VECTORS
                    _copy_vector(rows, MINUS_LAM, row, ready, row_tiles.index(vector))
                    if POLAR:
                        _copy_vector(rows, RATE, row, ready, row_tiles.index(vector + 1))
                        _copy_vector(rows, RATE_E0, row, ready, row_tiles.index(vector + 2))
                        _copy_vector(rows, RATE_E1, row, ready, row_tiles.index(vector + 3))
                    else:
                        _copy_vector(rows, E0, row, ready, row_tiles.index(vector + 1))
                    i += 1
        number = after
        n += 1


@gluon.jit
def _consume_step(
    i, here, dk, dv, buffers, factor, row0, keys, tq, tk, window,
    DK: gl.constexpr, DV: gl.constexpr, POLAR: gl.constexpr, MASKED: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """BLOCK_M rows into dk (if DK) and dv (if DV), a tuple of CHUNKS accumulators each."""
    k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free, done = buffers
    VECTORS: gl.constexpr = 4 if POLAR else 2
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage = i % STAGES
    vectors = stage * VECTORS
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    score = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    for c in gl.static_range(CHUNKS):
        key = k_tiles.index(here * CHUNKS + c).reshape([KEYS, CHUNK])
        query = q_tiles.index(stage * CHUNKS + c).reshape([BLOCK_M, CHUNK])
        score = warpgroup_mma(key, query.permute((1, 0)), score, use_acc=c > 0, is_async=True)
    if DK:
        du = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
        for c in gl.static_range(CHUNKS):
            value = v_tiles.index(here * CHUNKS + c).reshape([KEYS, CHUNK])
            grad = gs_tiles.index(stage * CHUNKS + c)
            du = warpgroup_mma(value, grad.permute((1, 0)), du, use_acc=c > 0, is_async=True)
    score = warpgroup_mma_wait(CHUNKS if DK else 0, deps=[score])
    minus_lam = row_tiles.index(vectors).load(S_LAYOUT)  # [1, M]
    if POLAR:
        rate = row_tiles.index(vectors + 1).load(S_LAYOUT)  # [1, M]
        exponent = score * rate + minus_lam
    else:
        exponent = score * factor + minus_lam
    if MASKED:
        # Of the keys: rows past the last one have no weight, and results of keys past it no reader.
        if CAUSAL:
            at = row0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
            first = keys - (tk - tq)  # that sees a key
            exponent = hide(exponent, at[None, :], first[:, None], window)
        elif WINDOW:
            exponent = gl.where((keys >= tk - window)[:, None], exponent, float("-inf"))
    u = gl.exp2(exponent)
    dv_new = ()
    if DV:
        weight = gl.convert_layout(u.to(q_tiles.dtype), A_LAYOUT)
        for c in gl.static_range(CHUNKS):
            grad = gs_tiles.index(stage * CHUNKS + c)
            dv_new += (warpgroup_mma(weight, grad, dv[c], is_async=True),)
    dk_new = ()
    if DK:
        du = warpgroup_mma_wait(CHUNKS if DV else 0, deps=[du])
        if POLAR:
            rate = row_tiles.index(vectors + 1).load(S_LAYOUT)  # again: no register keeps it
            rate_e0 = row_tiles.index(vectors + 2).load(S_LAYOUT)  # [1, M]
            rate_e1 = row_tiles.index(vectors + 3).load(S_LAYOUT)  # [1, M]
            g = u * (du * rate + (rate_e0 - rate_e1 * u))
        else:
            e0 = row_tiles.index(vectors + 1).load(S_LAYOUT)  # [1, M]
            g = u * (du + e0)
        g = gl.convert_layout(g.to(q_tiles.dtype), A_LAYOUT)
        for c in gl.static_range(CHUNKS):
            query = q_tiles.index(stage * CHUNKS + c).reshape([BLOCK_M, CHUNK])
            dk_new += (warpgroup_mma(g, query, dk[c], is_async=True),)
    settled = wait_chunks(dk_new + dv_new)
    mbarrier.arrive(free.index(stage), count=1)
    return settled[: len(dk)], settled[len(dk) :]


@gluon.jit
def _consume_rows(
    WHO: gl.constexpr, buffers, turns, results, sizes, scale, cu_q, cu_k,
    POLAR: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free, done = buffers
    dk_out, dv_out = results
    all_rows, total, heads_q, group, sequences, window, padded, tiles, together = sizes
    SHARED: gl.constexpr = BLOCK_N == KEYS  # the keys, by both consumers
    DK: gl.constexpr = not SHARED or WHO == 1
    DV: gl.constexpr = not SHARED or WHO == 0
    PART: gl.constexpr = 0 if SHARED else WHO
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    heads_k = heads_q // group
    i = total * 0
    n = total * 0
    number = gl.program_id(0)
    while number < tiles:
        batch, head_k, key0, first_key, base, tq, tk = _place_keys(
            number, sizes, cu_q, cu_k, PACKED, BLOCK_N
        )
        plan = row_bounds(key0, tq, tk, window, CAUSAL, False, WINDOW, False, BLOCK_M, BLOCK_N)
        own = n % BUFFERS
        first_mine = key0 + PART * KEYS
        keys = first_mine + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
        mine = own * (BLOCK_N // KEYS) + PART
        dk = zero_chunks(CHUNKS if DK else 0, KEYS, CHUNK, O_LAYOUT)
        dv = zero_chunks(CHUNKS if DV else 0, KEYS, CHUNK, O_LAYOUT)
        mbarrier.wait(own_full.index(own), (n // BUFFERS) & 1)
        for part in gl.static_range(3):
            if part < 2 or WINDOW:
                first, last = part_of(plan, part)
                steps = gl.maximum(last - first, 0) // BLOCK_M
                here = opaque(mine)
                for step in range(steps * group):
                    row0 = first + step % steps * BLOCK_M
                    dk, dv = _consume_step(
                        i, here, dk, dv, buffers, scale * LOG2E, row0, keys, tq, tk, window,
                        DK, DV, POLAR, part != 1, CAUSAL, WINDOW, BLOCK_M, CHUNK, CHUNKS, STAGES,
                        S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
                    i += 1
        if SHARED:  # the results leave through the tiles that the other one reads too
            mbarrier.arrive(done, count=1)
            mbarrier.wait(done, n & 1)
        at = ((batch.to(gl.int64) * total + first_key + first_mine) * heads_k + head_k) * WIDTH
        left = tk - first_mine
        for c in gl.static_range(CHUNKS):
            if DK:
                key_tile = k_tiles.index(mine * CHUNKS + c).reshape([KEYS, CHUNK])
                store_rows(
                    key_tile, dk[c] * (LN2 if POLAR else scale), dk_out, at + c * CHUNK,
                    heads_k * WIDTH, left, WIDTH - c * CHUNK, KEYS, CHUNK,
                )  # fmt: skip
            if DV:
                value_tile = v_tiles.index(mine * CHUNKS + c).reshape([KEYS, CHUNK])
                store_rows(
                    value_tile, dv[c], dv_out, at + c * CHUNK,
                    heads_k * WIDTH, left, WIDTH - c * CHUNK, KEYS, CHUNK,
                )  # fmt: skip
        mbarrier.arrive(own_free.index(own), count=1)
        number = take(turns, n)
        n += 1


@gluon.jit(do_not_specialize=RUNTIME)
def attention_bwd_dkdv(
    q, k, v, gs, rows, cu_q, cu_k, counter, dk_out, dv_out,
    tq: gl.int32, tk: gl.int32, heads_q: gl.int32, group: gl.int32, sequences: gl.int32,
    window: gl.int32, padded: gl.int32, tiles: gl.int32, together: gl.int32, scale: gl.float32,
    POLAR: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of `tiles` key tiles, one of one key head each."""
    VECTORS: gl.constexpr = 4 if POLAR else 2
    OWN: gl.constexpr = BUFFERS * (BLOCK_N // KEYS) * CHUNKS
    STREAMED: gl.constexpr = STAGES * CHUNKS
    k_tiles = gl.allocate_shared_memory(k.dtype, [OWN, 1, 1, KEYS, CHUNK], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [OWN, 1, 1, KEYS, CHUNK], v.layout)
    if PACKED:
        q_tiles = gl.allocate_shared_memory(q.dtype, [STREAMED, BLOCK_M, CHUNK], q.layout)
    else:
        q_tiles = gl.allocate_shared_memory(q.dtype, [STREAMED, 1, 1, BLOCK_M, CHUNK], q.layout)
    gs_tiles = gl.allocate_shared_memory(gs.dtype, [STREAMED, BLOCK_M, CHUNK], gs.layout)
    row_tiles = gl.allocate_shared_memory(rows.dtype, [STAGES * VECTORS, 1, BLOCK_M], rows.layout)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=CONSUMERS)
    own_full, own_free = new_barriers(BUFFERS)
    full, free = new_barriers(STAGES)

    buffers = (k_tiles, v_tiles, q_tiles, gs_tiles, row_tiles, own_full, own_free, full, free, done)
    turns = new_turns(counter)
    results = (dk_out, dv_out)
    sizes = (tq, tk, heads_q, group, sequences, window, padded, tiles, together)
    # Written out: a tuple with compile-time values has to stand in the call itself.
    gl.warp_specialize(
        [
            (_consume_rows, (
                0, buffers, turns, results, sizes, scale, cu_q, cu_k,
                POLAR, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_M, BLOCK_N, CHUNK, CHUNKS, STAGES,
                BUFFERS,
            )),
            (_consume_rows, (
                1, buffers, turns, results, sizes, scale, cu_q, cu_k,
                POLAR, CAUSAL, WINDOW, PACKED, WIDTH, BLOCK_M, BLOCK_N, CHUNK, CHUNKS, STAGES,
                BUFFERS,
            )),
            (_produce_rows, (
                q, k, v, gs, rows, buffers, turns, sizes, cu_q, cu_k,
                POLAR, CAUSAL, WINDOW, PACKED, BLOCK_M, BLOCK_N, CHUNK, CHUNKS, STAGES, BUFFERS,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
    hold(done)
