"""Gradients of a chunk's queries, keys, values and weights for Hopper, in Gluon.

With what both walks left (M, R, dM, dR), chunks do not wait for each other. X = −P ∘ L, L = Q Kᵀ,
are the weights of the errors in Y = A ∘ Q M + X R. One program a multiprocessor serves chunk after
chunk, of all columns of values; three roles share it:

    produce      one warp
    of_queries   dX = dY Rᵀ, dL = −P ∘ dX, dP = −L ∘ dX, dQ = A ∘ dY Mᵀ + dL K
    of_keys      dK = dLᵀ Q + dR Mᵀ − (P ∘ R) dMᵀ, and the same, transposed, of older keys; dV = −dR

P in the last two is that of the chunk's last token. Of older keys, and of those that the next chunk
sees as older ones, the sums stay at the edges, as in `omega_gradients`.
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

from .hopper_bwd import copy_rows
from .hopper_fwd import CHUNK, COLUMNS, barriers, keep_rows, left_operand, product
from .triton_chunks import place_chunk

GRADIENTS_RUNTIME = ("tokens", "heads", "sequences", "chunks", "slots", "older")


@gluon.jit
def _place(number, cu, sizes, PACKED: gl.constexpr):
    """Of a chunk and head: sequence, row, head, the chunk's number in the sequence, first token,
    tokens (0: nothing to do), the sequence's end, and the chunk's place among all.
    """
    tokens, heads, sequences, chunks = sizes
    slot = number // heads
    sequence, batch, c, first, size, _begin = place_chunk(
        slot, cu, tokens, CHUNK, chunks, sequences, PACKED
    )
    end = tokens
    if PACKED:
        end = gl.load(cu + sequence + 1)
    return sequence, batch, number % heads, c, first, size, end, number


@gluon.jit
def _produce(
    operands, tail_length, tiles, bars, cu, sizes, total, older,
    PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr, HALO: gl.constexpr,
    D: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    rows, shares, shares_older, blocks = operands
    q, k, d_y, k_older, tail_k = rows
    states, lost, errors, errors_older, d_states, d_errors, d_errors_older = blocks
    of_rows, shares_t, shares_older_t, of_blocks = tiles
    q_t, k_t, d_y_t, k_older_t = of_rows
    M_t, lost_t, R_t, R_older_t, dM_t, dR_t, dR_older_t = of_blocks
    full, free, block_full, block_free, copied = bars
    ROWS: gl.constexpr = 2 * (2 * CHUNK + HALO) * D  # bytes
    SHARES: gl.constexpr = 2 * CHUNK * (CHUNK + HALO)
    UPSTREAM: gl.constexpr = 2 * CHUNK * COLUMNS
    BLOCK: gl.constexpr = 2 * COLUMNS * (3 * D + 2 * (CHUNK + HALO))
    n = total * 0
    m = total * 0
    mended = total * 0
    number = gl.program_id(0)
    while number < total:
        sequence, batch, head, c, first, size, end, at = _place(number, cu, sizes, PACKED)
        if size > 0:
            s = n % STAGES
            mbarrier.wait(free.index(s), ((n // STAGES) & 1) ^ 1)
            mended = copy_rows(
                rows, (q_t.index(s), k_t.index(s), d_y_t.index(0), k_older_t.index(s)),
                (sequence, batch, head, c, first, end, 0), c == 0, older, tail_length,
                full.index(s), copied, mended, ROWS, SHARES, PACKED, TAIL, LENGTHS, HALO, D, False,
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                shares, [at * CHUNK, 0], full.index(s), shares_t.index(s)
            )
            if HALO:
                tma.async_copy_global_to_shared(
                    shares_older, [at * CHUNK, 0], full.index(s), shares_older_t.index(s)
                )
            for v in gl.static_range(BLOCKS):
                b = m % RING
                bar = block_full.index(b)
                here = [batch, head, first, v * COLUMNS]
                mbarrier.wait(block_free.index(b), ((m // RING) & 1) ^ 1)
                if PACKED and size < CHUNK:
                    mbarrier.expect(copied, UPSTREAM)
                    tma.async_copy_global_to_shared(d_y, here, copied, d_y_t.index(b))
                    mbarrier.wait(copied, mended & 1)
                    mended += 1
                    keep_rows(d_y_t.index(b), 0, size, CHUNK, COLUMNS)
                    fence_async_shared()
                    mbarrier.expect(bar, BLOCK)
                else:
                    mbarrier.expect(bar, BLOCK + UPSTREAM)
                    tma.async_copy_global_to_shared(d_y, here, bar, d_y_t.index(b))
                row = (at * BLOCKS + v) * COLUMNS
                tma.async_copy_global_to_shared(errors, [row, 0], bar, R_t.index(b))
                tma.async_copy_global_to_shared(d_errors, [row, 0], bar, dR_t.index(b))
                tma.async_copy_global_to_shared(states, [row, 0], bar, M_t.index(b))
                tma.async_copy_global_to_shared(lost, [row, 0], bar, lost_t.index(b))
                tma.async_copy_global_to_shared(d_states, [row, 0], bar, dM_t.index(b))
                if HALO:
                    tma.async_copy_global_to_shared(errors_older, [row, 0], bar, R_older_t.index(b))
                    tma.async_copy_global_to_shared(
                        d_errors_older, [row, 0], bar, dR_older_t.index(b)
                    )
                m += 1
            n += 1
        number += gl.num_programs(0)


@gluon.jit
def _of_queries(
    tiles, bars, outs, rates, scales, cu, sizes, total,
    PACKED: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    q_t, k_t, k_older_t, shares_t, shares_older_t, dL_t, dL_older_t, blocks = tiles
    d_y_t, M_t, lost_t, R_t, R_older_t, dM_t = blocks
    full, free, block_full, block_free, mixed, used = bars
    d_q, d_shares, d_shares_older, d_rates, of_states = outs
    tokens, heads, sequences, chunks = sizes
    dtype: gl.constexpr = k_t.dtype
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(CHUNK)))
    keys = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, product(CHUNK)))
    t_wide = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, product(D)))
    n = total * 0
    m = total * 0
    number = gl.program_id(0)
    while number < total:
        sequence, batch, head, c, first, size, end, place = _place(number, cu, sizes, PACKED)
        if size > 0:
            s = n % STAGES
            at = place.to(gl.int64)
            scale = gl.load(scales + at * CHUNK + t)
            rate = gl.load(rates + at * CHUNK + t_wide) * gl.load(scales + at * CHUNK + t_wide)
            dX = gl.zeros([CHUNK, CHUNK], gl.float32, product(CHUNK))
            QM = gl.zeros([CHUNK, D], gl.float32, product(D))
            if HALO:
                dX_older = gl.zeros([CHUNK, HALO], gl.float32, product(HALO))
            both = 0.0  # ⟨M, dM⟩
            for _v in gl.static_range(BLOCKS):
                b = m % RING
                mbarrier.wait(block_full.index(b), (m // RING) & 1)
                d_y = d_y_t.index(b).reshape([CHUNK, COLUMNS])
                dX = warpgroup_mma(d_y, R_t.index(b), dX, is_async=True)
                QM = warpgroup_mma(d_y, M_t.index(b), QM, is_async=True)
                QM = warpgroup_mma(d_y, lost_t.index(b), QM, is_async=True)
                wide = M_t.index(b).load(product(D)).to(gl.float32)
                wide += lost_t.index(b).load(product(D)).to(gl.float32)
                wide *= dM_t.index(b).load(product(D)).to(gl.float32)
                both += gl.sum(gl.sum(wide, 1), 0)
                if HALO:
                    dX_older = warpgroup_mma(d_y, R_older_t.index(b), dX_older, is_async=True)
                    dX, QM, dX_older = warpgroup_mma_wait(0, deps=[dX, QM, dX_older])
                else:
                    dX, QM = warpgroup_mma_wait(0, deps=[dX, QM])
                mbarrier.arrive(block_free.index(b), count=1)
                m += 1
            gl.store(of_states + at, both)
            mbarrier.wait(full.index(s), (n // STAGES) & 1)
            queries = q_t.index(s).reshape([CHUNK, D])
            rows = k_t.index(s).reshape([CHUNK, D])
            scores = warpgroup_mma(
                queries, rows.permute((1, 0)),
                gl.zeros([CHUNK, CHUNK], gl.float32, product(CHUNK)), use_acc=False, is_async=True,
            )  # fmt: skip
            shares = -scale[:, None] * shares_t.index(s).load(product(CHUNK)).to(gl.float32)
            dL = left_operand(shares * dX, D, dtype)
            mbarrier.wait(used, (n & 1) ^ 1)
            dL_t.store((shares * dX).to(dtype))
            if HALO:
                rows_older = k_older_t.index(s).reshape([HALO, D])
                scores_older = warpgroup_mma(
                    queries, rows_older.permute((1, 0)),
                    gl.zeros([CHUNK, HALO], gl.float32, product(HALO)), use_acc=False,
                    is_async=True,
                )  # fmt: skip
                t_older = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(HALO)))
                shares_older = shares_older_t.index(s).load(product(HALO)).to(gl.float32)
                shares_older *= -gl.load(scales + at * CHUNK + t_older)[:, None]
                dL_older = left_operand(shares_older * dX_older, D, dtype)
                dL_older_t.store((shares_older * dX_older).to(dtype))
            fence_async_shared()
            mbarrier.arrive(mixed, count=1)
            of_rate = gl.sum(queries.load(product(D)).to(gl.float32) * QM, 1)
            gl.store(d_rates + at * CHUNK + t_wide, of_rate)
            if HALO:
                scores, scores_older = warpgroup_mma_wait(0, deps=[scores, scores_older])
                i = gl.arange(0, HALO, layout=gl.SliceLayout(0, product(HALO)))
                to = (at * CHUNK + t_older)[:, None] * HALO + i[None, :]
                gl.store(d_shares_older + to, -scores_older * dX_older)
            else:
                scores = warpgroup_mma_wait(0, deps=[scores])
            to = (at * CHUNK + t)[:, None] * CHUNK + keys[None, :]
            gl.store(d_shares + to, -scores * dX)
            dQ = warpgroup_mma(dL, rows, rate[:, None] * QM, is_async=True)
            if HALO:
                dQ = warpgroup_mma(dL_older, rows_older, dQ, is_async=True)
            dQ = warpgroup_mma_wait(0, deps=[dQ])
            mbarrier.arrive(free.index(s), count=1)
            to = (batch * tokens + first + t_wide).to(gl.int64) * heads + head
            mask = (t_wide < size)[:, None] & (d < WIDTH)[None, :]
            gl.store(
                d_q + (to[:, None] * WIDTH + d[None, :]), dQ.to(d_q.dtype.element_ty), mask=mask
            )
            n += 1
        number += gl.num_programs(0)


@gluon.jit
def _store_keys(
    x, out, edge, at, row0, head, heads, first, size, end, older, v0,
    WIDTH: gl.constexpr, COLS: gl.constexpr, HALO: gl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's keys or values: those that the next chunk adds to stay at the edge."""
    t = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(COLS)))
    cols = v0 + gl.arange(0, COLS, layout=gl.SliceLayout(0, product(COLS)))
    there = t < size
    if HALO:
        shared = there & (t >= size - older) & (first + size < end)
        to = (at * HALO + HALO - size + t)[:, None] * WIDTH + cols[None, :]
        gl.store(edge + to, x, mask=shared[:, None] & (cols < WIDTH)[None, :])
        there = there & (shared == 0)
    to = ((row0 + first + t).to(gl.int64) * heads + head)[:, None] * WIDTH + cols[None, :]
    gl.store(out + to, x.to(out.dtype.element_ty), mask=there[:, None] & (cols < WIDTH)[None, :])


@gluon.jit
def _store_older(x, out, at, v0, WIDTH: gl.constexpr, COLS: gl.constexpr, HALO: gl.constexpr):
    """Gradients [COLS, HALO] of older keys or values."""
    i = gl.arange(0, HALO, layout=gl.SliceLayout(0, product(HALO)))
    cols = v0 + gl.arange(0, COLS, layout=gl.SliceLayout(1, product(HALO)))
    to = (at * HALO + i)[None, :] * WIDTH + cols[:, None]
    gl.store(out + to, x, mask=(cols < WIDTH)[:, None] & (i >= 0)[None, :])


@gluon.jit
def _of_keys(
    tiles, bars, outs, writes, cu, sizes, total, older,
    DOT: gl.constexpr, PACKED: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr,
    VALUES: gl.constexpr, D: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    RING: gl.constexpr,
):  # fmt: skip
    q_t, k_t, k_older_t, dL_t, dL_older_t, blocks = tiles
    M_t, R_t, R_older_t, dM_t, dR_t, dR_older_t = blocks
    full, free, block_full, block_free, mixed, used = bars
    d_k, d_v, edge_k, edge_v, older_k, older_v, in_state, in_state_older = outs
    tokens, heads, sequences, chunks = sizes
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, product(D)))
    n = total * 0
    m = total * 0
    number = gl.program_id(0)
    while number < total:
        sequence, batch, head, c, first, size, end, place = _place(number, cu, sizes, PACKED)
        if size > 0:
            s = n % STAGES
            at = place.to(gl.int64)
            row0 = batch * tokens
            write = -gl.load(writes + at * (HALO + CHUNK) + HALO + j)
            dK = gl.zeros([CHUNK, D], gl.float32, product(D))
            along = gl.zeros([CHUNK, D], gl.float32, product(D))  # R dMᵀ
            if HALO:
                i = gl.arange(0, HALO, layout=gl.SliceLayout(0, product(HALO)))
                write_older = -gl.load(writes + at * (HALO + CHUNK) + i)
                dK_older = gl.zeros([D, HALO], gl.float32, product(HALO))
                along_older = gl.zeros([D, HALO], gl.float32, product(HALO))
            for v in gl.static_range(BLOCKS):
                b = m % RING
                mbarrier.wait(block_full.index(b), (m // RING) & 1)
                M = M_t.index(b)
                dM = dM_t.index(b)
                if not DOT:
                    dK = warpgroup_mma(dR_t.index(b).permute((1, 0)), M, dK, is_async=True)
                along = warpgroup_mma(R_t.index(b).permute((1, 0)), dM, along, is_async=True)
                if HALO:
                    if not DOT:
                        dK_older = warpgroup_mma(
                            M.permute((1, 0)), dR_older_t.index(b), dK_older, is_async=True
                        )
                    along_older = warpgroup_mma(
                        dM.permute((1, 0)), R_older_t.index(b), along_older, is_async=True
                    )
                    x = -dR_older_t.index(b).load(product(HALO)).to(gl.float32)
                    _store_older(x, older_v, at, v * COLUMNS, VALUES, COLUMNS, HALO)
                x = -dR_t.index(b).permute((1, 0)).load(product(COLUMNS)).to(gl.float32)
                _store_keys(
                    x, d_v, edge_v, at, row0, head, heads, first, size, end, older, v * COLUMNS,
                    VALUES, COLUMNS, HALO,
                )  # fmt: skip
                if HALO:
                    dK, along, dK_older, along_older = warpgroup_mma_wait(
                        0, deps=[dK, along, dK_older, along_older]
                    )
                else:
                    dK, along = warpgroup_mma_wait(0, deps=[dK, along])
                mbarrier.arrive(block_free.index(b), count=1)
                m += 1
            mbarrier.wait(full.index(s), (n // STAGES) & 1)
            queries = q_t.index(s).reshape([CHUNK, D])
            x = k_t.index(s).reshape([CHUNK, D]).load(product(D)).to(gl.float32)
            gl.store(in_state + at * CHUNK + j, gl.sum(x * along, 1))
            dK += write[:, None] * along
            mbarrier.wait(mixed, n & 1)
            dK = warpgroup_mma(dL_t.permute((1, 0)), queries, dK, is_async=True)
            if HALO:
                x = k_older_t.index(s).reshape([HALO, D]).permute((1, 0)).load(product(HALO))
                gl.store(in_state_older + at * HALO + i, gl.sum(x.to(gl.float32) * along_older, 0))
                dK_older += write_older[None, :] * along_older
                dK_older = warpgroup_mma(
                    queries.permute((1, 0)), dL_older_t, dK_older, is_async=True
                )
                dK, dK_older = warpgroup_mma_wait(0, deps=[dK, dK_older])
                _store_older(dK_older, older_k, at, 0, WIDTH, D, HALO)
            else:
                dK = warpgroup_mma_wait(0, deps=[dK])
            mbarrier.arrive(used, count=1)
            mbarrier.arrive(free.index(s), count=1)
            _store_keys(
                dK, d_k, edge_k, at, row0, head, heads, first, size, end, older, 0, WIDTH, D, HALO
            )
            n += 1
        number += gl.num_programs(0)


@gluon.jit(do_not_specialize=GRADIENTS_RUNTIME)
def omega_chunk_gradients(
    q, k, d_y, k_older, tail_k, shares, shares_older, states, lost, errors, errors_older, d_states,
    d_errors, d_errors_older, tail_length, cu, writes, rates, scales,
    d_q, d_k, d_v, edge_k, edge_v, older_k, older_v, d_shares, d_shares_older, d_rates, in_state,
    in_state_older, of_states,
    tokens: gl.int32, heads: gl.int32, sequences: gl.int32, chunks: gl.int32, slots: gl.int32,
    older: gl.int32,
    DOT: gl.constexpr, PACKED: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr,
    HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, RING: gl.constexpr, KEYS_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Operands as the walks take and leave them. d_q, d_k, d_v as q, k, v, contiguous. edge_k,
    edge_v, older_k, older_v (slots, H, HALO, ·), fp32. For `omega_gates_back`, fp32: d_shares
    and d_shares_older as the tables of P, d_rates (slots, H, CHUNK) the
    gradient of A through reads; in_state (slots, H, CHUNK), in_state_older (slots, H, HALO):
    ⟨k dM, R⟩ of each key; of_states (slots, H): ⟨M, dM⟩.
    """
    BLOCKS: gl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    dtype: gl.constexpr = k.dtype
    q_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], q.layout)
    k_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k.layout)
    shares_t = gl.allocate_shared_memory(gl.float16, [STAGES, CHUNK, CHUNK], shares.layout)
    d_y_t = gl.allocate_shared_memory(dtype, [RING, 1, 1, CHUNK, COLUMNS], d_y.layout)
    M_t = gl.allocate_shared_memory(dtype, [RING, COLUMNS, D], states.layout)
    lost_t = gl.allocate_shared_memory(dtype, [RING, COLUMNS, D], lost.layout)
    dM_t = gl.allocate_shared_memory(dtype, [RING, COLUMNS, D], d_states.layout)
    R_t = gl.allocate_shared_memory(dtype, [RING, COLUMNS, CHUNK], errors.layout)
    dR_t = gl.allocate_shared_memory(dtype, [RING, COLUMNS, CHUNK], d_errors.layout)
    dL_t = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2))
    k_older_t = k_t
    shares_older_t = shares_t
    R_older_t = R_t
    dR_older_t = dR_t
    dL_older_t = dL_t
    if HALO:
        k_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, D], k_older.layout)
        shares_older_t = gl.allocate_shared_memory(
            gl.float16, [STAGES, CHUNK, HALO], shares_older.layout
        )
        R_older_t = gl.allocate_shared_memory(dtype, [RING, COLUMNS, HALO], errors_older.layout)
        dR_older_t = gl.allocate_shared_memory(dtype, [RING, COLUMNS, HALO], d_errors_older.layout)
        dL_older_t = gl.allocate_shared_memory(
            dtype, [CHUNK, HALO], gl.NVMMASharedLayout(32, 16, rank=2)
        )
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    block_full = barriers(RING, 1)
    block_free = barriers(RING, 2)
    mixed = barriers(1, 1)
    used = barriers(1, 1)
    copied = barriers(1, 1)
    gl.warp_specialize(
        [
            (
                _of_queries,
                (
                    (
                        q_t, k_t, k_older_t, shares_t, shares_older_t, dL_t, dL_older_t,
                        (d_y_t, M_t, lost_t, R_t, R_older_t, dM_t),
                    ),
                    (full, free, block_full, block_free, mixed.index(0), used.index(0)),
                    (d_q, d_shares, d_shares_older, d_rates, of_states), rates, scales, cu,
                    (tokens, heads, sequences, chunks), slots * heads,
                    PACKED, HALO, WIDTH, D, BLOCKS, STAGES, RING,
                ),
            ),
            (
                _of_keys,
                (
                    (
                        q_t, k_t, k_older_t, dL_t, dL_older_t,
                        (M_t, R_t, R_older_t, dM_t, dR_t, dR_older_t),
                    ),
                    (full, free, block_full, block_free, mixed.index(0), used.index(0)),
                    (
                        d_k, d_v, edge_k, edge_v, older_k, older_v, in_state, in_state_older,
                    ),
                    writes, cu, (tokens, heads, sequences, chunks), slots * heads, older,
                    DOT, PACKED, HALO, WIDTH, VALUES, D, BLOCKS, STAGES, RING,
                ),
            ),
            (
                _produce,
                (
                    (
                        (q, k, d_y, k_older, tail_k), shares, shares_older,
                        (
                            states, lost, errors, errors_older, d_states, d_errors, d_errors_older,
                        ),
                    ),
                    tail_length,
                    (
                        (q_t, k_t, d_y_t, k_older_t), shares_t, shares_older_t,
                        (M_t, lost_t, R_t, R_older_t, dM_t, dR_t, dR_older_t),
                    ),
                    (full, free, block_full, block_free, copied.index(0)), cu,
                    (tokens, heads, sequences, chunks), slots * heads, older,
                    PACKED, TAIL, LENGTHS, HALO, D, BLOCKS, STAGES, RING,
                ),
            ),
        ],
        [4, 1],
        [KEYS_REGISTERS, 24],
    )  # fmt: skip
