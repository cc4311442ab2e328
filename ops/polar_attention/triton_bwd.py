"""Backward kernels. Per row i, with lam the log-sum of its real logits (base 2) and

    rate = t·scale·log₂e        Gs = w_R·dLoss/ds        e0, e1 from the count (spec of the op)

every pair gives u = 2^(rate·q·k − lam), the real weight, and g = u·(Gs·v + e0 − e1·u), so that

    dq = t·scale·Σ_j g·k        dk = scale·Σ_i t·g·q        dv = Σ_i u·Gs

    prepare    per row: Gs, −lam, e0, e1, rate and their products, and partial sums of the
               parameter gradients
    dkdv       keys stay, queries stream, in transposed tiles [N, M]: dk and dv in registers, summed
               over the query heads of the group; SINGLE also adds its part of dq to a buffer
    dq         queries stay, keys stream: no atomics (the other half of the split form)
    finish     the buffer of SINGLE → dq, and the length-gain partial sums
    parameters partial sums → parameter gradients, in fixed order

−lam and e0 are added behind the products: as the initial value of an accumulator the first would be
−lam/rate, and t may be 0. (Folding rate into q would save dkdv a row vector, but rounds q anew: a
row of few keys then misses its log-sum by more than 16 bits allow.)

Rows live in a padded layout (B·Hq, padded) where each sequence starts at a multiple of ROW_TILE and
owns whole tiles; rows that do not exist hold Gs = 0 and −lam = −inf, hence u = 0: no loop masks
rows.

The transposed tiles keep every product's operands as they come: no product takes the transpose of
another's result, which Triton 3.4 to 3.7 miscompiles on Hopper.
"""

import triton
import triton.language as tl

from ..common import (
    LN2,
    LOG2E,
    count_tiles,
    deal,
    key_bounds,
    key_range,
    load_tile,
    place_tile,
    row_bounds,
)
from .triton_bwd_rows import (
    E0,
    E1,
    HIGH,
    MINUS_LAM,
    PAIR_SCALARS,
    RATE,
    RATE_E0,
    RATE_E1,
    load_padded,
    load_query,
    load_vector,
    row_base,
    store_dq,
)

RUNTIME = (
    "tq", "tk", "heads_q", "group", "sequences", "window", "partials", "together",
    "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
    "stride_vb", "stride_vt", "stride_vh", "stride_nb", "padded", "row_stride", "scale",
)  # fmt: skip
VIEWS = ("q", "k", "v")  # ALIGNED says what holds of their addresses


@triton.jit
def _pairs_by_key(
    dk, dv, key, value, q, gs, vectors, dq,
    batch, head_k, group, heads_q, base, tq, tk, key0, window, begin, end, scale,
    padded, row_stride, stride_qb, stride_qt, stride_qh,
    POLAR: tl.constexpr, SINGLE: tl.constexpr, REDUCE: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, N_KEYS: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Query tiles of rows begin … end of every head of the group, one flat loop."""
    tiles = tl.maximum(tl.cdiv(end - begin, BLOCK_M), 0)
    for step in tl.range(0, tiles * group, num_stages=STAGES):
        row0 = begin + step % tiles * BLOCK_M
        head = head_k * group + step // tiles
        batch_head = batch * heads_q + head
        row = batch_head * padded + base + row0
        # Every load comes before the first product: a wait between products in flight makes the
        # compiler run them one by one.
        query = load_query(
            q, batch, head, row0, tq, row, stride_qb, stride_qt, stride_qh, WIDTH, BLOCK_M, BLOCK_D,
            PACKED, TMA, ALIGNED,
        )  # fmt: skip
        grad = load_padded(gs, row, WIDTH, BLOCK_M, BLOCK_D, TMA)  # [M, D]
        minus_lam = load_vector(vectors, MINUS_LAM, row, row_stride, BLOCK_M, TMA)  # [M]
        if POLAR:
            rate = load_vector(vectors, RATE, row, row_stride, BLOCK_M, TMA)
            rate_e0 = load_vector(vectors, RATE_E0, row, row_stride, BLOCK_M, TMA)
            rate_e1 = load_vector(vectors, RATE_E1, row, row_stride, BLOCK_M, TMA)
        else:
            e0 = load_vector(vectors, E0, row, row_stride, BLOCK_M, TMA)
        if N_KEYS:
            past = load_vector(vectors, HIGH, row, row_stride, BLOCK_M, TMA)
        score = tl.dot(key, query.T, input_precision=PRECISION)  # [N, M]
        du = tl.dot(value, grad.T, input_precision=PRECISION)  # [N, M]
        if POLAR:
            score = score * rate[None, :]
        else:
            score = score * (scale * LOG2E)
        u = tl.exp2(score + minus_lam[None, :])
        if MASKED:
            rows = row0 + tl.arange(0, BLOCK_M)  # [M]
            keys = key0 + tl.arange(0, BLOCK_N)  # [N]
            low, high = key_range(rows, tq, tk, rows, window, CAUSAL, False, WINDOW)
            if N_KEYS:
                high = past.to(tl.int32, bitcast=True)
                low = tl.maximum(high - window, 0) if WINDOW else low * 0
            seen = (keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :])
            u = tl.where(seen, u, 0.0)
        dv = tl.dot(u.to(grad.dtype), grad, dv, input_precision=PRECISION)  # [N, D]
        if POLAR:
            du = du * rate[None, :] + (rate_e0[None, :] - rate_e1[None, :] * u)
        else:
            du += e0[None, :]
        g = (u * du).to(query.dtype)
        dk = tl.dot(g, query, dk, input_precision=PRECISION)  # [N, D]
        if SINGLE:
            part = tl.dot(key.T, g, input_precision=PRECISION)  # [D, M]
            if REDUCE:
                dq.atomic_add([batch_head.to(tl.int32) * BLOCK_D, base + row0], part)
            else:
                cols = tl.arange(0, BLOCK_D)
                rows_dq = base + row0 + tl.arange(0, BLOCK_M)
                at_dq = (batch_head * BLOCK_D + cols)[:, None] * padded + rows_dq[None, :]
                mask = (cols < WIDTH)[:, None] & (rows_dq >= 0)[None, :]
                tl.atomic_add(dq + at_dq, part, mask=mask, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=VIEWS)
def attention_bwd_dkdv(
    q, k, v, gs, vectors, cu_q, cu_k, dk_out, dv_out, dq,
    tq: tl.int32, tk: tl.int32, heads_q: tl.int32, group: tl.int32, sequences: tl.int32,
    window: tl.int32, together: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    padded: tl.int64, row_stride: tl.int64, scale: tl.float32,
    POLAR: tl.constexpr, SINGLE: tl.constexpr, REDUCE: tl.constexpr, CAUSAL: tl.constexpr,
    N_KEYS: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one key head; with SINGLE its part of dq as well."""
    total_k = tk
    heads_k = heads_q // group
    tiles = count_tiles(total_k, sequences, BLOCK_N, PACKED)
    pid = tl.program_id(0)
    rank, batch_head = deal(pid, tiles, tl.num_programs(0), together)
    batch = (batch_head // heads_k).to(tl.int64)
    head_k = (batch_head % heads_k).to(tl.int64)
    sequence, tile, first_key, tk, _, tq = place_tile(
        rank, total_k, tq, sequences, cu_k, cu_q, BLOCK_N, PACKED
    )
    key0 = tile * BLOCK_N
    if key0 >= tk:
        return
    base = row_base(cu_q, sequence, PACKED)
    keys = key0 + tl.arange(0, BLOCK_N)  # [N]
    # [N, D]
    key = load_tile(
        k, batch, head_k, first_key + key0, first_key + tk, stride_kb, stride_kt, stride_kh, WIDTH,
        BLOCK_N, BLOCK_D, TMA, ALIGNED,
    )  # fmt: skip
    # [N, D]
    value = load_tile(
        v, batch, head_k, first_key + key0, first_key + tk, stride_vb, stride_vt, stride_vh, WIDTH,
        BLOCK_N, BLOCK_D, TMA, ALIGNED,
    )  # fmt: skip
    if PACKED:  # keys of the next sequence, or padding that may hold NaN
        key = tl.where((keys < tk)[:, None], key, 0.0)
        value = tl.where((keys < tk)[:, None], value, 0.0)

    begin, whole, whole_end, end = row_bounds(
        key0, tq, tk, window, CAUSAL, N_KEYS, WINDOW, True, BLOCK_M, BLOCK_N
    )
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for part in tl.static_range(3):  # rows that see the tile in part, whole, and in part again
        if part < 2 or WINDOW:
            first = begin if part == 0 else (whole if part == 1 else whole_end)
            last = whole if part == 0 else (whole_end if part == 1 else end)
            dk, dv = _pairs_by_key(
                dk, dv, key, value, q, gs, vectors, dq,
                batch, head_k, group, heads_q, base, tq, tk, key0, window, first, last,
                scale, padded, row_stride, stride_qb, stride_qt, stride_qh,
                POLAR, SINGLE, REDUCE, part != 1, CAUSAL, N_KEYS, WINDOW, PACKED, WIDTH,
                BLOCK_M, BLOCK_N, BLOCK_D, TMA, ALIGNED, PRECISION, STAGES,
            )  # fmt: skip

    cols = tl.arange(0, BLOCK_D)
    position = batch * total_k + first_key + keys.to(tl.int64)
    at = (position * heads_k + head_k)[:, None] * WIDTH + cols[None, :]
    mask = (keys < tk)[:, None] & (cols < WIDTH)[None, :]
    tl.store(dk_out + at, (dk * (LN2 if POLAR else scale)).to(dk_out.dtype.element_ty), mask=mask)
    tl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=mask)


@triton.jit
def _pairs_by_query(
    dq, pairs, wanted, query, grad, k, v, rate, minus_lam, e0, e1, low, high,
    batch, head_k, first_key, tk, begin, end,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    POLAR: tl.constexpr, NULL_VALUE: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Key tiles begin … end of one query tile."""
    for j in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # [N, D]
        key = load_tile(
            k, batch, head_k, first_key + j, first_key + tk, stride_kb, stride_kt, stride_kh, WIDTH,
            BLOCK_N, BLOCK_D, TMA, ALIGNED,
        )  # fmt: skip
        # [N, D]
        value = load_tile(
            v, batch, head_k, first_key + j, first_key + tk, stride_vb, stride_vt, stride_vh, WIDTH,
            BLOCK_N, BLOCK_D, TMA, ALIGNED,
        )  # fmt: skip
        keys = j + tl.arange(0, BLOCK_N)  # [N]
        if MASKED and RAGGED:
            key = tl.where((keys < end)[:, None], key, 0.0)
            value = tl.where((keys < end)[:, None], value, 0.0)
        score = tl.dot(query, key.T, input_precision=PRECISION)  # [M, N]
        du = tl.dot(grad, value.T, input_precision=PRECISION)  # [M, N]
        u = tl.exp2(score * rate[:, None] + minus_lam[:, None])
        if MASKED:
            seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
            u = tl.where(seen, u, 0.0)
        du += e0[:, None]
        if POLAR:
            du -= e1[:, None] * u
        g = u * du
        if NULL_VALUE:
            if wanted:
                pairs += tl.sum(g, 1)
        dq = tl.dot(g.to(key.dtype), key, dq, input_precision=PRECISION)  # [M, D]
    return dq, pairs


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=VIEWS)
def attention_bwd_dq(
    q, k, v, gs, vectors, by_pairs, null_base, null_slope, length_gain, n_keys, cu_q, cu_k,
    dq_out, sums,
    tq: tl.int32, tk: tl.int32, heads_q: tl.int32, group: tl.int32, sequences: tl.int32,
    window: tl.int32, partials: tl.int32, together: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_nb: tl.int64, padded: tl.int64, row_stride: tl.int64, scale: tl.float32,
    POLAR: tl.constexpr, NULL_VALUE: tl.constexpr, CAUSAL: tl.constexpr, N_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head, without atomics."""
    total = tq
    tiles = count_tiles(total, sequences, BLOCK_M, PACKED)
    pid = tl.program_id(0)
    rank, batch_head = deal(pid, tiles, tl.num_programs(0), together)
    batch = (batch_head // heads_q).to(tl.int64)
    head = (batch_head % heads_q).to(tl.int64)
    head_k = head // group
    of_head = tiles - 1 - rank  # the causal rows with most keys start first
    slot = batch_head // heads_q * tiles + of_head
    sequence, tile, first_row, tq, first_key, tk = place_tile(
        of_head, total, tk, sequences, cu_q, cu_k, BLOCK_M, PACKED
    )
    row0 = tile * BLOCK_M
    if row0 >= tq:
        if POLAR:
            for scalar in tl.static_range(PAIR_SCALARS):
                tl.store(sums + (head * partials + slot) * PAIR_SCALARS + scalar, 0.0)
        return
    rows = row0 + tl.arange(0, BLOCK_M)  # [M]
    inside = rows < tq
    live = inside
    if PACKED:
        live = inside & (sequence < sequences)
    seen_by = n_keys
    if N_KEYS:
        seen_by = n_keys + batch * stride_nb + first_row
    low, high = key_range(rows, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW)
    begin, full, full_end, end = key_bounds(
        low, high, row0, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW, BLOCK_M, BLOCK_N
    )

    row = batch_head.to(tl.int64) * padded + row_base(cu_q, sequence, PACKED) + row0
    # [M, D]
    query = load_query(
        q, batch, head, row0, tq, row, stride_qb, stride_qt, stride_qh, WIDTH, BLOCK_M, BLOCK_D,
        PACKED, TMA, ALIGNED,
    )  # fmt: skip
    grad = load_padded(gs, row, WIDTH, BLOCK_M, BLOCK_D, TMA)  # [M, D]
    minus_lam = load_vector(vectors, MINUS_LAM, row, row_stride, BLOCK_M, False)
    e0 = load_vector(vectors, E0, row, row_stride, BLOCK_M, False)
    rate = tl.zeros([BLOCK_M], tl.float32) + scale * LOG2E
    e1 = e0
    if POLAR:
        rate = load_vector(vectors, RATE, row, row_stride, BLOCK_M, False)
        e1 = load_vector(vectors, E1, row, row_stride, BLOCK_M, False)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pairs = tl.zeros([BLOCK_M], tl.float32)
    wanted = False
    if NULL_VALUE:
        of_pairs = tl.load(by_pairs + row + tl.arange(0, BLOCK_M))
        wanted = tl.max(of_pairs, 0) > 0.0
    for part in tl.static_range(3):  # left edge, whole tiles, right edge
        if part > 0 or WINDOW:
            first = begin if part == 0 else (full if part == 1 else full_end)
            # Past `end` lie rows of others, NaN among them: `full` may not lead there.
            last = tl.minimum(full, end) if part == 0 else (full_end if part == 1 else end)
            dq, pairs = _pairs_by_query(
                dq, pairs, wanted, query, grad, k, v, rate, minus_lam, e0, e1, low, high,
                batch, head_k, first_key, tk, first, last,
                stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                POLAR, NULL_VALUE, part != 1, PACKED or N_KEYS, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D,
                TMA, ALIGNED, PRECISION, STAGES,
            )  # fmt: skip
    length = tl.maximum(high - low, 1).to(tl.float32)
    d_null = pairs
    if NULL_VALUE:
        d_null = -pairs * of_pairs
    store_dq(
        dq * (rate * LN2)[:, None], d_null, query, null_base, null_slope, length_gain, length,
        dq_out, sums, batch, head, first_row + rows.to(tl.int64), inside, live, total, heads_q,
        partials, slot, POLAR, WIDTH, BLOCK_D,
    )  # fmt: skip
