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

AHEAD = tl.constexpr(3)  # stages of the loop of prepare in Polar mode
RARE_STEP = tl.constexpr(4)  # rows of a step of prepare over rare rows
ROW_TILE = tl.constexpr(128)  # rows of a program of prepare; unit of the padded row layout
PAIR_SCALARS = tl.constexpr(3)  # of the dq and finish kernels: base, slope, length gain
PARTIAL_SCALARS = tl.constexpr(4)  # of prepare: those and the magnitude gain; then D of the value

# What the matrix `vectors` holds of each padded row. Softmax mode has the first three; those from
# RARE_NULL on are notes of prepare to itself. A rare row has one key, or a norm under the clamp.
MINUS_LAM = tl.constexpr(0)  # −lam in base 2; −inf for rows that have no key or do not exist
E0 = tl.constexpr(1)
HIGH = tl.constexpr(2)  # with n_keys: one past the last key seen, the bits of an int32
RATE = tl.constexpr(3)  # t·scale·log₂e
E1 = tl.constexpr(4)
RATE_E0 = tl.constexpr(5)  # the products that dkdv takes
RATE_E1 = tl.constexpr(6)
RARE_NULL = tl.constexpr(7)  # w_null of rare rows, −1 in others; written where a tile has any
NOTES = tl.constexpr(8)  # from here on four numbers of a row side by side: the places are one
TO_REAL = tl.constexpr(0)  # w_real/max(norm, ε)
TO_NULL = tl.constexpr(1)  # w_null/max(norm, ε); 0 in rare rows
PULL = tl.constexpr(2)  # what c adds to d_null; +inf where d_null is left to the pairs
D_LOG_MASS = tl.constexpr(3)  # written where a tile has rare rows


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
def _load_step(
    out, d_out, batch, head, first, stop, total, heads_q, stride_gb, stride_gt, stride_gh,
    WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """c and its gradient of STEP rows, [S, D] each; zeros from row `stop` on."""
    stride_t = heads_q.to(tl.int64) * WIDTH
    c = load_tile(
        out, batch, head, first, stop, total * stride_t, stride_t, WIDTH,
        WIDTH, STEP, BLOCK_D, False, False,
    )  # fmt: skip
    dc = load_tile(
        d_out, batch, head, first, stop, stride_gb, stride_gt, stride_gh,
        WIDTH, STEP, BLOCK_D, False, ALIGNED,
    )  # fmt: skip
    return c, dc


@triton.jit
def _store_step(
    gs, grad, q, q_rows, base, first, first_row, stop, batch, head,
    stride_qb, stride_qt, stride_qh,
    PACKED: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gs of STEP rows; if packed, also their rows of the padded copy of q."""
    cols = tl.arange(0, BLOCK_D)
    rows = first + tl.arange(0, STEP)
    at = (base + rows)[:, None] * WIDTH + cols[None, :]
    mask = (rows >= 0)[:, None] & (cols < WIDTH)[None, :]
    tl.store(gs + at, grad.to(gs.dtype.element_ty), mask=mask)
    if PACKED:
        query = load_tile(
            q, batch, head, first_row + first, stop, stride_qb, stride_qt, stride_qh,
            WIDTH, STEP, BLOCK_D, False, ALIGNED,
        )  # fmt: skip
        tl.store(q_rows + at, query, mask=mask)


@triton.jit
def _share(along, square):
    """What the projection takes off: (dc·c)/|c|², nothing where c is zero.

    |c|² is that of the rounded c, not 1: projecting with it leaves a smaller row defect.
    """
    flat = square == 0.0
    return tl.where(flat, 0.0, along / tl.where(flat, 1.0, square))


@triton.jit
def _logit_terms(length, head, null_base, null_slope, length_gain):
    """log n, √log(n + 1), and with them t and ν, of rows that see n keys."""
    log_n = tl.log(length)
    log_n1 = tl.sqrt(tl.log(length + 1.0))
    t = 1.0 + tl.load(length_gain + head).to(tl.float32) * log_n
    nu = tl.load(null_base + head).to(tl.float32)
    nu += tl.load(null_slope + head).to(tl.float32) * log_n1
    return log_n, log_n1, t, nu


@triton.jit
def _store_scalars(at_sums, d_null, log_n, log_n1, t, nu, base=0.0, slope=0.0, length=0.0):
    """Three partial sums of this program: what d_null adds to the ones given."""
    tl.store(at_sums, base + tl.sum(d_null * t, 0))
    tl.store(at_sums + 1, slope + tl.sum(d_null * t * log_n1, 0))
    tl.store(at_sums + 2, length + tl.sum(d_null * nu * log_n, 0))


@triton.jit
def _project_rare(
    first, batch, head, batch_head, at_rows, base, group, total, heads_q, tq, tk, seen_by, window,
    padding, first_row, first_key, null_value, null_base, null_slope, length_gain,
    d_out, out, rho, v, gs, vectors, by_pairs, at_sums, row_stride,
    stride_vb, stride_vt, stride_vh, stride_gb, stride_gt, stride_gh,
    NULL_VALUE: tl.constexpr, CAUSAL: tl.constexpr, N_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """All that prepare leaves out of the rare ones among STEP rows: Gs, e0, d_null, partial sums.

    Under the clamp s/ε is linear in s: no projection, and s itself has a gradient, kappa = d_s·s.
    A row of one key has its only value at hand, so that c need not be the rounded one. And as its
    score gradient and d_null add up to nothing, e0 is chosen to give just that: Gs·v + e0 − e1
    would reach it as a difference of large terms, and miss by the rounding of Gs.
    """
    cols = tl.arange(0, BLOCK_D)
    rows = first + tl.arange(0, STEP)  # [S]
    live = (rows < tq) & (padding == 0)
    at_vector = vectors + base + rows
    note_rows = vectors + NOTES * row_stride + (base + rows) * 4
    stop = first_row + tl.where(padding, 0, tq)
    c, dc = _load_step(
        out, d_out, batch, head, first_row + first, stop, total, heads_q,
        stride_gb, stride_gt, stride_gh, WIDTH, STEP, BLOCK_D, ALIGNED,
    )  # fmt: skip
    c = c.to(tl.float32)
    dc = dc.to(tl.float32)
    w_null = tl.load(at_vector + RARE_NULL * row_stride)
    rare = w_null >= 0.0
    norm = tl.load(rho + at_rows + rows, mask=live, other=1.0)
    clamped = norm <= EPS
    longest = tl.maximum(norm, EPS)
    scaled = 1.0 / longest
    w_real = tl.load(note_rows + TO_REAL) * longest
    low, high = key_range(rows, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW)
    one = live & (high - low == 1)
    at_v = v + batch * stride_vb + (batch_head % heads_q // group).to(tl.int64) * stride_vh
    at_v += (first_key + low).to(tl.int64)[:, None] * stride_vt + cols[None, :]
    only = tl.load(at_v, mask=one[:, None] & (cols < WIDTH)[None, :], other=0.0).to(tl.float32)
    if NULL_VALUE:
        value = tl.load(null_value + head * WIDTH + cols, mask=cols < WIDTH, other=0.0)
        value = value.to(tl.float32)
        whole = w_real[:, None] * only + w_null[:, None] * value[None, :]
        c = tl.where(one[:, None], whole * scaled[:, None], c)
    along = tl.sum(dc * c, 1)  # [S]
    share = tl.where(clamped, 0.0, _share(along, tl.sum(c * c, 1)))
    d_s = (dc - share[:, None] * c) * scaled[:, None]  # [S, D]
    kappa = tl.where(clamped, along, 0.0)
    d_log_mass = tl.load(note_rows + D_LOG_MASS)
    e0 = d_log_mass * (3.0 - w_real) - w_real * kappa
    d_null = -w_null * (d_log_mass + kappa)
    grad = w_real[:, None] * d_s
    if NULL_VALUE:
        d_null += w_null * tl.sum(d_s * value[None, :], 1)
    e1 = tl.load(at_vector + E1 * row_stride)
    rounded = grad.to(gs.dtype.element_ty)
    score = -d_null
    keyless = tl.load(at_vector + MINUS_LAM * row_stride) == float("-inf")
    d_null = tl.where(rare & (keyless == 0), d_null, 0.0)
    if NULL_VALUE:
        cancels = w_null * tl.sum(c * value[None, :], 1) > 0.5 * norm
        # what Gs·v + e0 − e1 was before Gs is rounded
        score = tl.where(cancels, e0 - e1 + tl.sum(grad * only, 1), score)
        d_null = tl.where(cancels, 0.0, d_null)
        left = cancels & (keyless == 0)
        tl.store(by_pairs + base + rows, tl.where(left, 1.0, 0.0), mask=rare)
        part = tl.sum(tl.where(rare[:, None], w_null[:, None] * d_s, 0.0), 0)
        at_value = at_sums + PARTIAL_SCALARS + cols
        part += tl.load(at_value, mask=cols < WIDTH, other=0.0)
        tl.store(at_value, part, mask=cols < WIDTH)
    e0 = tl.where(one, score + e1 - tl.sum(rounded.to(tl.float32) * only, 1), e0)
    e0 = tl.where(keyless, 0.0, e0)
    tl.store(at_vector + E0 * row_stride, e0, mask=rare)
    rate = tl.load(at_vector + RATE * row_stride)
    tl.store(at_vector + RATE_E0 * row_stride, rate * e0, mask=rare)
    length = tl.maximum(high - low, 1).to(tl.float32)
    log_n, log_n1, t, nu = _logit_terms(length, head, null_base, null_slope, length_gain)
    base_sum = tl.load(at_sums)
    slope_sum = tl.load(at_sums + 1)
    length_sum = tl.load(at_sums + 2)
    _store_scalars(at_sums, d_null, log_n, log_n1, t, nu, base_sum, slope_sum, length_sum)
    at = (base + rows)[:, None] * WIDTH + cols[None, :]
    mask = rare[:, None] & (cols < WIDTH)[None, :]
    tl.store(gs + at, tl.where(keyless[:, None], 0.0, rounded), mask=mask)


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
    value = tl.zeros([BLOCK_D], tl.float32)
    if NULL_VALUE:
        value = tl.load(null_value + head * WIDTH + cols, mask=cols < WIDTH, other=0.0)
        value = value.to(tl.float32)
    # A tile without rows has nothing to write.
    end = tl.where(row0 < tq, row0 + ROW_TILE, row0)
    stop = first_row + tl.where(padding, 0, tl.minimum(tq, end))
    # First all that takes no sum over D, a row a thread; the loop below would do it once for each
    # thread that holds a part of the row. What it needs of this, it finds in `vectors`.
    rows = row0 + tl.arange(0, ROW_TILE)  # [R]
    live = (rows < tq) & (padding == 0)
    position = first_row + rows.to(tl.int64)
    at_rows = batch_head.to(tl.int64) * total + first_row
    at_tile = vectors + base + rows
    note_tile = vectors + NOTES * row_stride + (base + rows) * 4
    lam = tl.load(lse + at_rows + rows, mask=live, other=float("-inf"))
    keyless = lam == float("-inf")
    tl.store(at_tile + MINUS_LAM * row_stride, tl.where(keyless, float("-inf"), -lam * LOG2E))
    low, high = key_range(rows, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW)
    if N_KEYS:
        tl.store(at_tile + HIGH * row_stride, high.to(tl.float32, bitcast=True))
    at_sums = sums
    if POLAR:
        at_sums = sums + (head * partials + slot) * (PARTIAL_SCALARS + WIDTH)
        length = tl.maximum(high - low, 1).to(tl.float32)
        log_n, log_n1, t, nu = _logit_terms(length, head, null_base, null_slope, length_gain)
        gain_m = tl.load(magnitude_gain + head).to(tl.float32)
        norm = tl.load(rho + at_rows + rows, mask=live, other=1.0)
        effective = tl.load(n_eff + at_rows + rows, mask=live, other=1.0)
        gap = (lam - t * nu) * LOG2E
        w_real = 1.0 / (1.0 + tl.exp2(-gap))
        w_null = 1.0 / (1.0 + tl.exp2(gap))
        mass = tl.where(keyless, 0.0, effective * w_real)
        log_mass = log1p(mass)
        decay = tl.exp(-2.0 * tl.abs(gain_m * log_mass))
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))  # 1 − tanh², without cancelling
        at_count = batch * stride_cb + position * stride_ct + head * stride_ch
        d_amount = tl.load(d_count + at_count, mask=live, other=0.0).to(tl.float32)
        tl.store(at_sums + 3, tl.sum(d_amount * slope * log_mass, 0))
        d_log_mass = mass * (d_amount * gain_m * slope / (1.0 + mass))  # mass·dLoss/d mass
        e0 = tl.where(keyless, 0.0, d_log_mass * (3.0 - w_real))
        e1 = 2.0 * d_log_mass * effective
        rate = t * (scale * LOG2E)
        tl.store(at_tile + E0 * row_stride, e0)
        tl.store(at_tile + E1 * row_stride, e1)
        tl.store(at_tile + RATE * row_stride, rate)
        tl.store(at_tile + RATE_E0 * row_stride, rate * e0)
        tl.store(at_tile + RATE_E1 * row_stride, rate * e1)
        scaled = 1.0 / tl.maximum(norm, EPS)
        rare = live & (norm <= EPS)
        if not NULL_VALUE:
            rare = rare & (keyless == 0)
        rare = rare | (live & (high - low == 1))
        rare_first = tl.min(tl.where(rare, rows, row0 + ROW_TILE), 0)
        rare_end = tl.max(tl.where(rare, rows + 1, row0), 0)
        tl.store(note_tile + TO_REAL, tl.where(keyless, 0.0, w_real * scaled))
        if NULL_VALUE:
            tl.store(note_tile + TO_NULL, tl.where(rare, 0.0, w_null * scaled))
        regular = live & (keyless == 0) & (rare == 0)
        d_null = tl.where(regular, -w_null * d_log_mass, 0.0)
        if not NULL_VALUE:
            _store_scalars(at_sums, d_null, log_n, log_n1, t, nu)
        if rare_first < rare_end:
            tl.store(at_tile + RARE_NULL * row_stride, tl.where(rare, w_null, -1.0))
            tl.store(note_tile + D_LOG_MASS, d_log_mass)
    tl.debug_barrier()

    steps = tl.arange(0, STEP)  # [S]
    at_steps = vectors + base + steps
    note_steps = vectors + NOTES * row_stride + (base + steps) * 4
    if POLAR:
        sum_value = tl.zeros([STEP, BLOCK_D], tl.float32)
        # No integers are loaded in this loop: where loads run ahead of their use, Triton 3.6
        # miscompiles vectors of them.
        for first in tl.range(row0, end, STEP, num_stages=AHEAD):
            c, dc = _load_step(
                out, d_out, batch, head, first_row + first, stop, total, heads_q,
                stride_gb, stride_gt, stride_gh, WIDTH, STEP, BLOCK_D, ALIGNED,
            )  # fmt: skip
            c = c.to(tl.float32)
            dc = dc.to(tl.float32)
            note = note_steps + first * 4
            to_real = tl.load(note + TO_REAL)
            to_null = to_real
            if NULL_VALUE:
                to_null = tl.load(note + TO_NULL)
            share = _share(tl.sum(dc * c, 1), tl.sum(c * c, 1))
            u = dc - share[:, None] * c  # d_s·norm
            if NULL_VALUE:
                # d_s·value from sums that need not wait for the share. Where the null makes up
                # most of s, it cancels down to the rounding of c; the dq kernel forms d_null of
                # such a row as minus the sum over its pairs.
                of_c = tl.sum(c * value[None, :], 1)
                of_dc = tl.sum(dc * value[None, :], 1)
                pull = to_null * (of_dc - share * of_c)
                pull = tl.where(to_null * of_c > 0.5, float("inf"), pull)
                tl.store(note + PULL, pull)
                sum_value += to_null[:, None] * u
            # Not u times 0 where no key is seen: u may be infinite.
            grad = tl.where((to_real == 0.0)[:, None], 0.0, to_real[:, None] * u)
            _store_step(
                gs, grad, q, q_rows, base, first, first_row, stop, batch, head,
                stride_qb, stride_qt, stride_qh, PACKED, WIDTH, STEP, BLOCK_D, ALIGNED,
            )  # fmt: skip
        if NULL_VALUE:
            tl.debug_barrier()
            pull = tl.load(note_tile + PULL, mask=live, other=0.0)
            left = regular & (pull == float("inf"))
            tl.store(by_pairs + base + rows, tl.where(left, 1.0, 0.0))
            d_null = tl.where(left | (regular == 0), 0.0, d_null + pull)
            sums_value = tl.sum(sum_value, 0)
            tl.store(at_sums + PARTIAL_SCALARS + cols, sums_value, mask=cols < WIDTH)
            # `partials` is positive, but the compiler does not know it: these terms are computed
            # again rather than kept in registers all through the loop.
            low, high = key_range(
                rows, tq + tl.minimum(partials, 0), tk, seen_by, window, CAUSAL, N_KEYS, WINDOW
            )
            length = tl.maximum(high - low, 1).to(tl.float32)
            log_n, log_n1, t, nu = _logit_terms(length, head, null_base, null_slope, length_gain)
            _store_scalars(at_sums, d_null, log_n, log_n1, t, nu)
        # Few tiles have rare rows, and most of those one. They come last: nothing else is kept in
        # registers by then.
        for first in tl.range(rare_first // RARE_STEP * RARE_STEP, rare_end, RARE_STEP):
            tl.debug_barrier()  # what is added to has been written
            _project_rare(
                first, batch, head, batch_head, at_rows, base, group, total, heads_q, tq, tk,
                seen_by, window, padding, first_row, first_key, null_value, null_base,
                null_slope, length_gain, d_out, out, rho, v, gs, vectors, by_pairs, at_sums,
                row_stride, stride_vb, stride_vt, stride_vh, stride_gb, stride_gt, stride_gh,
                NULL_VALUE, CAUSAL, N_KEYS, WINDOW, WIDTH, RARE_STEP, BLOCK_D, ALIGNED, EPS,
            )  # fmt: skip
    else:
        for first in tl.range(row0, end, STEP):
            c, dc = _load_step(
                out, d_out, batch, head, first_row + first, stop, total, heads_q,
                stride_gb, stride_gt, stride_gh, WIDTH, STEP, BLOCK_D, ALIGNED,
            )  # fmt: skip
            unseen = tl.load(at_steps + MINUS_LAM * row_stride + first) == float("-inf")
            at_d_lse = d_count + at_rows + first + steps
            d_lse = tl.load(at_d_lse, mask=first_row + first + steps < stop, other=0.0)
            e0 = d_lse - tl.sum(dc.to(tl.float32) * c.to(tl.float32), 1)
            tl.store(at_steps + E0 * row_stride + first, tl.where(unseen, 0.0, e0))
            grad = tl.where(unseen[:, None], 0.0, dc)
            _store_step(
                gs, grad, q, q_rows, base, first, first_row, stop, batch, head,
                stride_qb, stride_qt, stride_qh, PACKED, WIDTH, STEP, BLOCK_D, ALIGNED,
            )  # fmt: skip


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
    NULL_VALUE: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of one head in fixed order and cast to each parameter's dtype.

    With a null value a head has one program for its four scalars and one for COLS columns each.
    """
    blocks = tl.cdiv(WIDTH, COLS) + 1 if NULL_VALUE else 1
    head = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if block == 0:
        base = tl.zeros([BLOCK_P], tl.float32)
        slope = tl.zeros([BLOCK_P], tl.float32)
        length = tl.zeros([BLOCK_P], tl.float32)
        magnitude = tl.zeros([BLOCK_P], tl.float32)
        for first in tl.range(0, partials, BLOCK_P):
            slots = first + tl.arange(0, BLOCK_P)
            mask = slots < partials
            at = sums + (head * partials + slots) * (PARTIAL_SCALARS + WIDTH)
            base += tl.load(at, mask=mask, other=0.0)
            slope += tl.load(at + 1, mask=mask, other=0.0)
            length += tl.load(at + 2, mask=mask, other=0.0)
            magnitude += tl.load(at + 3, mask=mask, other=0.0)
        for first in tl.range(0, partials_dq, BLOCK_P):
            slots = first + tl.arange(0, BLOCK_P)
            mask = slots < partials_dq
            at = sums_dq + (head * partials_dq + slots) * PAIR_SCALARS
            base += tl.load(at, mask=mask, other=0.0)
            slope += tl.load(at + 1, mask=mask, other=0.0)
            length += tl.load(at + 2, mask=mask, other=0.0)
        tl.store(d_base + head, tl.sum(base, 0).to(d_base.dtype.element_ty))
        tl.store(d_slope + head, tl.sum(slope, 0).to(d_slope.dtype.element_ty))
        tl.store(d_length_gain + head, tl.sum(length, 0).to(d_length_gain.dtype.element_ty))
        sum_magnitude = tl.sum(magnitude, 0).to(d_magnitude_gain.dtype.element_ty)
        tl.store(d_magnitude_gain + head, sum_magnitude)
    elif NULL_VALUE:
        cols = (block - 1) * COLS + tl.arange(0, COLS)
        value = tl.zeros([BLOCK_P, COLS], tl.float32)
        for first in tl.range(0, partials, BLOCK_P):
            slots = first + tl.arange(0, BLOCK_P)
            at_value = sums + (head * partials + slots) * (PARTIAL_SCALARS + WIDTH)
            at_value += PARTIAL_SCALARS
            mask_value = (slots < partials)[:, None] & (cols < WIDTH)[None, :]
            value += tl.load(at_value[:, None] + cols[None, :], mask=mask_value, other=0.0)
        sum_value = tl.sum(value, 0).to(d_value.dtype.element_ty)
        tl.store(d_value + head * WIDTH + cols, sum_value, mask=cols < WIDTH)
