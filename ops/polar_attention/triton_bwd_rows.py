"""Backward kernels over rows: everything that is linear in T (see `triton_bwd` for the whole).

prepare    Gs, −lam, e0, rate, e1 of each row, and partial sums of the parameter gradients
finish     the buffer of the single-pass form → dq, and its partial sums
parameters partial sums → parameter gradients, in fixed order
"""

import triton
import triton.language as tl

from ..common import LN2, LOG2E, count_tiles, key_range, load_tile, log1p, place_tile

RUNTIME = (
    "tq", "tk", "heads_q", "group", "sequences", "window", "partials",
    "stride_qb", "stride_qt", "stride_qh", "stride_vb", "stride_vt", "stride_vh",
    "stride_gb", "stride_gt", "stride_gh", "stride_cb", "stride_ct", "stride_ch", "stride_nb",
    "padded", "row_stride", "scale",
)  # fmt: skip
VIEWS = ("q", "v", "d_out", "d_count")  # ALIGNED says what holds of their addresses

ONE_STEP = tl.constexpr(8)  # rows of a step of prepare over rows of one key
ROW_TILE = tl.constexpr(128)  # rows of a program of prepare; unit of the padded row layout
PAIR_SCALARS = tl.constexpr(3)  # of the dq and finish kernels: base, slope, length gain
PARTIAL_SCALARS = tl.constexpr(4)  # of prepare: those and the magnitude gain; then D of the value

# What the matrix `vectors` holds of each padded row. Softmax mode has the first three; those from
# W_REAL on are notes of prepare to itself.
MINUS_LAM = tl.constexpr(0)  # −lam in base 2; −inf for rows that have no key or do not exist
E0 = tl.constexpr(1)
HIGH = tl.constexpr(2)  # with n_keys: one past the last key seen, the bits of an int32
RATE = tl.constexpr(3)  # t·scale·log₂e
E1 = tl.constexpr(4)
RATE_E0 = tl.constexpr(5)  # the products that dkdv takes
RATE_E1 = tl.constexpr(6)
W_REAL = tl.constexpr(7)
W_NULL = tl.constexpr(8)
W_ONE = tl.constexpr(9)  # w_null of a row of one key, where W_NULL is 0
D_LOG_MASS = tl.constexpr(10)
D_NULL = tl.constexpr(11)  # +inf where it is left to the pairs


@triton.jit
def row_base(cu_q, sequence, PACKED: tl.constexpr):
    """Where the rows of a sequence start in the padded layout."""
    base = sequence * 0
    if PACKED:
        base = (tl.load(cu_q + sequence) // ROW_TILE + sequence) * ROW_TILE
    return base


@triton.jit
def load_vector(
    vectors, WHICH: tl.constexpr, row, row_stride, ROWS: tl.constexpr, TMA: tl.constexpr
):
    """ROWS values of one of the row vectors from `row` on.

    With TMA, `vectors` is a descriptor: the copy lands in shared memory, from where each thread
    reads the columns it holds. By pointers the same is one 4-byte copy a value and thread.
    """
    if TMA:
        values = vectors.load([WHICH, row.to(tl.int32)]).reshape([ROWS])
    else:
        values = tl.load(vectors + WHICH * row_stride + row + tl.arange(0, ROWS))
    return values


@triton.jit
def load_padded(
    x, row, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """ROWS rows of a padded operand from `row` on, [ROWS, COLS]; zeros past WIDTH."""
    if TMA:
        tile = x.load([row.to(tl.int32), 0])
    else:
        cols = tl.arange(0, COLS)
        at = (row + tl.arange(0, ROWS))[:, None] * WIDTH + cols[None, :]
        tile = tl.load(x + at, mask=(cols < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def load_query(
    q, batch, head, row0, tq, row, stride_b, stride_t, stride_h,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PACKED: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Query rows of a tile, zeros where there is none: q itself, or its padded copy if packed."""
    if PACKED:
        tile = load_padded(q, row, WIDTH, ROWS, COLS, TMA)
    else:
        tile = load_tile(
            q, batch, head, row0, tq, stride_b, stride_t, stride_h, WIDTH, ROWS, COLS, TMA, ALIGNED
        )
    return tile


@triton.jit
def store_dq(
    dq, d_null, query, null_base, null_slope, length_gain, length, dq_out, sums,
    batch, head, position, inside, live, total, heads_q, partials, slot,
    POLAR: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write dq, and this tile's parts of three parameter gradients.

    d_null is dLoss/d(t·ν) of the rows that prepare left to the pairs, 0 elsewhere. The sum over
    pairs of dt is (q·dq)/t; where t is exactly 0 the term is 0.
    """
    cols = tl.arange(0, BLOCK_D)
    at = ((batch * total + position) * heads_q + head)[:, None] * WIDTH + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    if POLAR:
        log_n = tl.log(length)
        t = 1.0 + tl.load(length_gain + head).to(tl.float32) * log_n
        along = tl.sum(query.to(tl.float32) * dq, 1)
        dt = tl.where(live & (t != 0.0), along / tl.where(t == 0.0, 1.0, t), 0.0)
        log_n1 = tl.sqrt(tl.log(length + 1.0))
        nu = tl.load(null_base + head).to(tl.float32)
        nu += tl.load(null_slope + head).to(tl.float32) * log_n1
        at_sums = sums + (head * partials + slot) * PAIR_SCALARS
        tl.store(at_sums, tl.sum(d_null * t, 0))
        tl.store(at_sums + 1, tl.sum(d_null * t * log_n1, 0))
        tl.store(at_sums + 2, tl.sum((dt + d_null * nu) * log_n, 0))
    tl.store(dq_out + at, dq.to(dq_out.dtype.element_ty), mask=mask)


@triton.jit
def _project(
    sum_value, first, batch, head, batch_head, group, total, heads_q, tq, tk, seen_by,
    window, padding, first_row, first_key, base, value, d_out, d_count, out, rho, q, v,
    q_rows, gs, vectors, row_stride, stride_qb, stride_qt, stride_qh, stride_vb, stride_vt,
    stride_vh, stride_gb, stride_gt, stride_gh,
    POLAR: tl.constexpr, NULL_VALUE: tl.constexpr, CAUSAL: tl.constexpr, N_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, ONE: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Gs, e0 and d_null of STEP rows, or (ONE) of those among them that have one key.

    A row of one key has its only value at hand, so that c need not be the rounded one. And as its
    score gradient and d_null add up to nothing, e0 is chosen to give just that: Gs·v + e0 − e1
    would reach it as a difference of large terms, and miss by the rounding of Gs.
    """
    cols = tl.arange(0, BLOCK_D)
    rows = first + tl.arange(0, STEP)  # [S]
    live = (rows < tq) & (padding == 0)
    position = first_row + rows.to(tl.int64)
    at_row = batch_head.to(tl.int64) * total + position
    at_vector = vectors + base + rows
    at_out = ((batch * total + position) * heads_q + head)[:, None] * WIDTH + cols[None, :]
    mask = live[:, None] & (cols < WIDTH)[None, :]
    c = tl.load(out + at_out, mask=mask, other=0.0).to(tl.float32)
    stop = first_row + tl.where(padding, 0, tq)
    dc = load_tile(
        d_out, batch, head, first_row + first, stop, stride_gb, stride_gt, stride_gh,
        WIDTH, STEP, BLOCK_D, False, ALIGNED,
    ).to(tl.float32)  # fmt: skip
    keyless = tl.load(at_vector + MINUS_LAM * row_stride) == float("-inf")
    written = rows >= 0
    if POLAR:
        w_real = tl.load(at_vector + W_REAL * row_stride)
        w_null = tl.load(at_vector + (W_ONE if ONE else W_NULL) * row_stride)
        d_log_mass = tl.load(at_vector + D_LOG_MASS * row_stride)
        norm = tl.load(rho + at_row, mask=live, other=1.0)
        if ONE:
            low, high = key_range(rows, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW)
            written = live & (high - low == 1)
            at_v = v + batch * stride_vb + (head // group) * stride_vh
            at_v += (first_key + low).to(tl.int64)[:, None] * stride_vt + cols[None, :]
            mask_v = written[:, None] & (cols < WIDTH)[None, :]
            only = tl.load(at_v, mask=mask_v, other=0.0).to(tl.float32)
            if NULL_VALUE:
                c = w_real[:, None] * only + w_null[:, None] * value[None, :]
                c = c * (1.0 / tl.maximum(norm, EPS))[:, None]
        along = tl.sum(dc * c, 1)  # [S]
        clamped = norm <= EPS
        # |c|² of the rounded c, not 1: projecting with it leaves a smaller row defect.
        square = tl.sum(c * c, 1)
        flat = clamped | (square == 0.0)
        share = tl.where(flat, 0.0, along / tl.where(flat, 1.0, square))
        d_s = (dc - share[:, None] * c) * (1.0 / tl.maximum(norm, EPS))[:, None]  # [S, D]
        kappa = tl.where(clamped, along, 0.0)
        e0 = d_log_mass * (3.0 - w_real) - w_real * kappa
        d_null = -w_null * (d_log_mass + kappa)
        grad = w_real[:, None] * d_s
        cancels = rows < 0
        if NULL_VALUE:
            # Where the null makes up most of s, d_s·value cancels down to the rounding of c; the dq
            # kernel forms d_null of such a row as minus the sum over its pairs.
            cancels = w_null * tl.sum(c * value[None, :], 1) > 0.5 * norm
            d_null += w_null * tl.sum(d_s * value[None, :], 1)
            counted = live
            if ONE:
                counted = written
            sum_value += tl.where(counted[:, None], w_null[:, None] * d_s, 0.0)
        if ONE:
            e1 = tl.load(at_vector + E1 * row_stride)
            rounded = grad.to(gs.dtype.element_ty).to(tl.float32)
            score = -d_null
            if NULL_VALUE:  # what Gs·v + e0 − e1 was before Gs is rounded
                score = tl.where(cancels, e0 - e1 + tl.sum(grad * only, 1), score)
            e0 = score + e1 - tl.sum(rounded * only, 1)
        e0 = tl.where(keyless, 0.0, e0)
        d_null = tl.where(cancels, float("inf"), d_null)
        tl.store(at_vector + D_NULL * row_stride, tl.where(keyless, 0.0, d_null), mask=written)
    else:
        d_lse = tl.load(d_count + at_row, mask=live, other=0.0)
        e0 = tl.where(keyless, 0.0, d_lse - tl.sum(dc * c, 1))
        grad = dc
    tl.store(at_vector + E0 * row_stride, e0, mask=written)
    grad = tl.where(keyless[:, None], 0.0, grad)
    at_padded = (base + rows)[:, None] * WIDTH + cols[None, :]
    wide = written[:, None] & (cols < WIDTH)[None, :]
    tl.store(gs + at_padded, grad.to(gs.dtype.element_ty), mask=wide)
    if PACKED and not ONE:
        query = load_tile(
            q, batch, head, first_row + first, stop, stride_qb, stride_qt, stride_qh,
            WIDTH, STEP, BLOCK_D, False, ALIGNED,
        )  # fmt: skip
        tl.store(q_rows + at_padded, query, mask=wide)
    return sum_value


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=VIEWS)
def attention_bwd_prepare(
    q, v, d_out, d_count, out, lse, n_eff, rho,
    null_value, null_base, null_slope, length_gain, magnitude_gain, n_keys, cu_q, cu_k,
    q_rows, gs, vectors, by_pairs, sums,
    tq: tl.int32, tk: tl.int32, heads_q: tl.int32, group: tl.int32, sequences: tl.int32,
    window: tl.int32, partials: tl.int32, padded: tl.int64, row_stride: tl.int64,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gt: tl.int64, stride_gh: tl.int64,
    stride_cb: tl.int64, stride_ct: tl.int64, stride_ch: tl.int64, stride_nb: tl.int64,
    scale: tl.float32,
    POLAR: tl.constexpr, NULL_VALUE: tl.constexpr, CAUSAL: tl.constexpr, N_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """ROW_TILE rows of one head, STEP at a time. `sums` is (Hq, partials, 4 + D) fp32."""
    total = tq
    tiles = count_tiles(total, sequences, ROW_TILE, PACKED)
    pid = tl.program_id(0)
    batch_head = pid // tiles
    batch = (batch_head // heads_q).to(tl.int64)
    head = (batch_head % heads_q).to(tl.int64)
    slot = batch_head // heads_q * tiles + pid % tiles  # of this program among the head's partials
    sequence, tile, first_row, tq, first_key, tk = place_tile(
        pid % tiles, total, tk, sequences, cu_q, cu_k, ROW_TILE, PACKED
    )
    padding = sequence < 0
    if PACKED:
        padding = sequence == sequences
    row0 = tile * ROW_TILE
    cols = tl.arange(0, BLOCK_D)  # [D]
    base = batch_head.to(tl.int64) * padded + row_base(cu_q, sequence, PACKED)
    seen_by = n_keys
    if N_KEYS:
        seen_by = n_keys + batch * stride_nb + first_row
    if POLAR:
        gain_n = tl.load(length_gain + head).to(tl.float32)
        gain_m = tl.load(magnitude_gain + head).to(tl.float32)
        bias = tl.load(null_base + head).to(tl.float32)
        slope_n = tl.load(null_slope + head).to(tl.float32)
    value = tl.zeros([BLOCK_D], tl.float32)
    if NULL_VALUE:
        value = tl.load(null_value + head * WIDTH + cols, mask=cols < WIDTH, other=0.0)
        value = value.to(tl.float32)
    # First all that takes no sum over D, a row a thread; the loop below would do it once for each
    # thread that holds a part of the row. What it needs of this, it finds in `vectors`.
    rows = row0 + tl.arange(0, ROW_TILE)  # [R]
    live = (rows < tq) & (padding == 0)
    position = first_row + rows.to(tl.int64)
    at_row = batch_head.to(tl.int64) * total + position
    at_tile = vectors + base + rows
    lam = tl.load(lse + at_row, mask=live, other=float("-inf"))
    keyless = lam == float("-inf")
    tl.store(at_tile + MINUS_LAM * row_stride, tl.where(keyless, float("-inf"), -lam * LOG2E))
    low, high = key_range(rows, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW)
    if N_KEYS:
        tl.store(at_tile + HIGH * row_stride, high.to(tl.float32, bitcast=True))
    if POLAR:
        length = tl.maximum(high - low, 1).to(tl.float32)
        log_n = tl.log(length)
        log_n1 = tl.sqrt(tl.log(length + 1.0))
        t = 1.0 + gain_n * log_n
        nu = bias + slope_n * log_n1
        one = live & (high - low == 1)
        any_one = tl.max(one.to(tl.int32), 0) > 0
        effective = tl.load(n_eff + at_row, mask=live, other=1.0)
        gap = (lam - t * nu) * LOG2E
        w_real = 1.0 / (1.0 + tl.exp2(-gap))
        w_null = 1.0 / (1.0 + tl.exp2(gap))
        mass = tl.where(keyless, 0.0, effective * w_real)
        log_mass = log1p(mass)
        decay = tl.exp(-2.0 * tl.abs(gain_m * log_mass))
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))  # 1 − tanh², without cancelling
        at_count = batch * stride_cb + position * stride_ct + head * stride_ch
        d_amount = tl.load(d_count + at_count, mask=live, other=0.0).to(tl.float32)
        d_log_mass = mass * (d_amount * gain_m * slope / (1.0 + mass))  # mass·dLoss/d mass
        e1 = 2.0 * d_log_mass * effective
        rate = t * (scale * LOG2E)
        tl.store(at_tile + RATE * row_stride, rate)
        tl.store(at_tile + E1 * row_stride, e1)
        tl.store(at_tile + RATE_E1 * row_stride, rate * e1)
        tl.store(at_tile + W_REAL * row_stride, w_real)
        tl.store(at_tile + W_NULL * row_stride, tl.where(one, 0.0, w_null))
        tl.store(at_tile + W_ONE * row_stride, w_null)
        tl.store(at_tile + D_LOG_MASS * row_stride, d_log_mass)
        sum_magnitude = tl.sum(d_amount * slope * log_mass, 0)
    tl.debug_barrier()

    # A tile without rows has nothing to write.
    end = tl.where(row0 < tq, row0 + ROW_TILE, row0)
    sum_value = tl.zeros([STEP, BLOCK_D], tl.float32)
    for first in tl.range(row0, end, STEP):
        sum_value = _project(
            sum_value, first, batch, head, batch_head, group, total, heads_q, tq, tk, seen_by,
            window, padding, first_row, first_key, base, value, d_out, d_count, out, rho, q, v,
            q_rows, gs, vectors, row_stride, stride_qb, stride_qt, stride_qh, stride_vb, stride_vt,
            stride_vh, stride_gb, stride_gt, stride_gh,
            POLAR, NULL_VALUE, CAUSAL, N_KEYS, WINDOW, PACKED, False, WIDTH, STEP, BLOCK_D, ALIGNED,
            EPS,
        )  # fmt: skip
    if POLAR:
        sum_one = tl.zeros([ONE_STEP, BLOCK_D], tl.float32)
        if any_one:  # few tiles have such rows: done again here, they cost the others no registers
            tl.debug_barrier()
            for first in tl.range(row0, end, ONE_STEP):
                sum_one = _project(
                    sum_one, first, batch, head, batch_head, group, total, heads_q, tq, tk, seen_by,
                    window, padding, first_row, first_key, base, value, d_out, d_count, out, rho,
                    q, v, q_rows, gs, vectors, row_stride, stride_qb, stride_qt,
                    stride_qh, stride_vb, stride_vt, stride_vh, stride_gb, stride_gt, stride_gh,
                    POLAR, NULL_VALUE, CAUSAL, N_KEYS, WINDOW, PACKED, True, WIDTH, ONE_STEP,
                    BLOCK_D, ALIGNED, EPS,
                )  # fmt: skip

        tl.debug_barrier()
        tl.store(at_tile + RATE_E0 * row_stride, rate * tl.load(at_tile + E0 * row_stride))
        d_null_rows = tl.load(at_tile + D_NULL * row_stride, mask=live, other=0.0)
        if NULL_VALUE:
            left = d_null_rows == float("inf")
            tl.store(by_pairs + base + rows, tl.where(left, 1.0, 0.0))
            d_null_rows = tl.where(left, 0.0, d_null_rows)
        at = sums + (head * partials + slot) * (PARTIAL_SCALARS + WIDTH)
        tl.store(at, tl.sum(d_null_rows * t, 0))
        tl.store(at + 1, tl.sum(d_null_rows * t * log_n1, 0))
        tl.store(at + 2, tl.sum(d_null_rows * nu * log_n, 0))
        tl.store(at + 3, sum_magnitude)
        if NULL_VALUE:
            sums_value = tl.sum(sum_value, 0) + tl.sum(sum_one, 0)
            tl.store(at + PARTIAL_SCALARS + cols, sums_value, mask=cols < WIDTH)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=VIEWS)
def attention_bwd_finish(
    q, null_base, null_slope, length_gain, n_keys, cu_q, cu_k, dq, dq_out, sums,
    tq: tl.int32, tk: tl.int32, heads_q: tl.int32, sequences: tl.int32, window: tl.int32,
    partials: tl.int32, stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_nb: tl.int64, padded: tl.int64, scale: tl.float32,
    POLAR: tl.constexpr, CAUSAL: tl.constexpr, N_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """dq of the single-pass form: the fp32 buffer (B·Hq, D, padded) scaled, transposed, cast."""
    total = tq
    tiles = count_tiles(total, sequences, BLOCK_M, PACKED)
    pid = tl.program_id(0)
    batch_head = pid // tiles
    batch = (batch_head // heads_q).to(tl.int64)
    head = (batch_head % heads_q).to(tl.int64)
    slot = batch_head // heads_q * tiles + pid % tiles
    sequence, tile, first_row, tq, _, tk = place_tile(
        pid % tiles, total, tk, sequences, cu_q, cu_k, BLOCK_M, PACKED
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
    cols = tl.arange(0, BLOCK_D)
    base = row_base(cu_q, sequence, PACKED)
    at = (batch_head.to(tl.int64) * BLOCK_D + cols)[:, None] * padded + (base + rows)[None, :]
    mask = (cols < WIDTH)[:, None] & inside[None, :]
    acc = tl.trans(tl.load(dq + at, mask=mask, other=0.0))  # [M, D]
    acc *= LN2 if POLAR else scale
    length = tl.full([BLOCK_M], 1.0, tl.float32)
    query = acc
    if POLAR:
        seen_by = n_keys
        if N_KEYS:
            seen_by = n_keys + batch * stride_nb + first_row
        low, high = key_range(rows, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW)
        length = tl.maximum(high - low, 1).to(tl.float32)
        row = batch_head.to(tl.int64) * padded + base + row0
        query = load_query(
            q, batch, head, row0, tq, row, stride_qb, stride_qt, stride_qh,
            WIDTH, BLOCK_M, BLOCK_D, PACKED, False, ALIGNED,
        )  # fmt: skip
    store_dq(
        acc, tl.zeros([BLOCK_M], tl.float32), query, null_base, null_slope, length_gain, length,
        dq_out, sums, batch, head,
        first_row + rows.to(tl.int64), inside, live, total, heads_q, partials, slot,
        POLAR, WIDTH, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=("partials", "partials_dq"))
def attention_bwd_parameters(
    sums, sums_dq, d_value, d_base, d_slope, d_length_gain, d_magnitude_gain,
    partials: tl.int32, partials_dq: tl.int32,
    NULL_VALUE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of one head in fixed order and cast to each parameter's dtype."""
    head = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    base = tl.zeros([BLOCK_P], tl.float32)
    slope = tl.zeros([BLOCK_P], tl.float32)
    length = tl.zeros([BLOCK_P], tl.float32)
    magnitude = tl.zeros([BLOCK_P], tl.float32)
    value = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for first in tl.range(0, partials, BLOCK_P):
        slots = first + tl.arange(0, BLOCK_P)
        mask = slots < partials
        at = sums + (head * partials + slots) * (PARTIAL_SCALARS + WIDTH)
        base += tl.load(at, mask=mask, other=0.0)
        slope += tl.load(at + 1, mask=mask, other=0.0)
        length += tl.load(at + 2, mask=mask, other=0.0)
        magnitude += tl.load(at + 3, mask=mask, other=0.0)
        if NULL_VALUE:
            mask_v = mask[:, None] & (cols < WIDTH)[None, :]
            value += tl.load(at[:, None] + PARTIAL_SCALARS + cols[None, :], mask=mask_v, other=0.0)
    for first in tl.range(0, partials_dq, BLOCK_P):
        slots = first + tl.arange(0, BLOCK_P)
        mask = slots < partials_dq
        at_dq = sums_dq + (head * partials_dq + slots) * PAIR_SCALARS
        base += tl.load(at_dq, mask=mask, other=0.0)
        slope += tl.load(at_dq + 1, mask=mask, other=0.0)
        length += tl.load(at_dq + 2, mask=mask, other=0.0)
    tl.store(d_base + head, tl.sum(base, 0).to(d_base.dtype.element_ty))
    tl.store(d_slope + head, tl.sum(slope, 0).to(d_slope.dtype.element_ty))
    tl.store(d_length_gain + head, tl.sum(length, 0).to(d_length_gain.dtype.element_ty))
    tl.store(d_magnitude_gain + head, tl.sum(magnitude, 0).to(d_magnitude_gain.dtype.element_ty))
    if NULL_VALUE:
        total = tl.sum(value, 0).to(d_value.dtype.element_ty)
        tl.store(d_value + head * WIDTH + cols, total, mask=cols < WIDTH)
