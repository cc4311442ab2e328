"""Forward kernel: one program a tile of BLOCK_M query rows of one head, keys streaming by.

Per row, over real keys only (a = t·scale·q·k in base-2 logarithms):

    m' = max(m, max a)   α = 2^(m − m')   p = 2^(a − m')
    l ← αl + Σp          s2 ← α²·s2 + Σp²          acc ← α·acc + p·V

and once at the end the null is folded in. max p = 1 inside this frame, so l ≥ 1 and s2 ≥ 1: no
clamp anywhere. Tiles that every row sees whole run in a loop without masks.
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
    log1p,
    place_tile,
    tanh,
)

RUNTIME = (
    "tq", "tk", "heads_q", "group", "sequences", "window", "together",
    "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh",
    "stride_vb", "stride_vt", "stride_vh", "stride_nb", "scale",
)  # fmt: skip

VIEWS = ("q", "k", "v")  # may start at any byte: ALIGNED says what holds, not the signature


@triton.jit
def _stream(
    acc, m, l, s2, q, k, v, batch, head_k, first_key, tk, begin, end, low, high, rate,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    COUNT: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Let the keys begin ≤ j < end pass by; `low` and `high` matter in a MASKED run."""
    for j in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # [N, D]
        key = load_tile(
            k, batch, head_k, first_key + j, first_key + tk, stride_kb, stride_kt, stride_kh, WIDTH,
            BLOCK_N, BLOCK_D, TMA, ALIGNED,
        )  # fmt: skip
        score = tl.dot(q, key.T, input_precision=PRECISION)  # [M, N]
        if MASKED:
            at = j + tl.arange(0, BLOCK_N)  # [N]
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            score = tl.where(seen, score * rate[:, None], float("-inf"))
            m_new = tl.maximum(m, tl.max(score, 1))
            # A row that has seen no key yet keeps −inf; shifting by 0 keeps its p at 0, not NaN.
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(score - shift[:, None])
            alpha = tl.exp2(m - shift)
        else:
            m_new = tl.maximum(m, tl.max(score, 1) * rate)
            p = tl.exp2(score * rate[:, None] - m_new[:, None])
            alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        if COUNT:
            s2 = s2 * (alpha * alpha) + tl.sum(p * p, 1)
        acc = acc * alpha[:, None]
        # [N, D]
        value = load_tile(
            v, batch, head_k, first_key + j, first_key + tk, stride_vb, stride_vt, stride_vh, WIDTH,
            BLOCK_N, BLOCK_D, TMA, ALIGNED,
        )  # fmt: skip
        if MASKED and RAGGED:  # rows behind the last visible key may hold anything, NaN included
            at_v = j + tl.arange(0, BLOCK_N)
            value = tl.where((at_v < end)[:, None], value, 0.0)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)  # [M, D]
        m = m_new
    return acc, m, l, s2


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=VIEWS)
def attention_fwd(
    q, k, v, null_value, null_base, null_slope, length_gain, magnitude_gain,
    n_keys, cu_q, cu_k, out, count, lse, n_eff, rho, null_mass,
    tq: tl.int32, tk: tl.int32, heads_q: tl.int32, group: tl.int32, sequences: tl.int32,
    window: tl.int32, together: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_nb: tl.int64, scale: tl.float32,
    POLAR: tl.constexpr, NULL_VALUE: tl.constexpr, CAUSAL: tl.constexpr, N_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """direction, count and statistics (POLAR), or out and lse, of one query tile of one head."""
    total = tq  # rows of the output; tq and tk become those of this sequence
    tiles = count_tiles(total, sequences, BLOCK_M, PACKED)
    pid = tl.program_id(0)
    rank, batch_head = deal(pid, tiles, tl.num_programs(0), together)
    batch = (batch_head // heads_q).to(tl.int64)
    head = (batch_head % heads_q).to(tl.int64)
    head_k = head // group
    of_head = tiles - 1 - rank  # the causal rows with most keys start first
    sequence, tile, first_row, tq, first_key, tk = place_tile(
        of_head, total, tk, sequences, cu_q, cu_k, BLOCK_M, PACKED
    )
    row0 = tile * BLOCK_M
    if row0 >= tq:
        return
    rows = row0 + tl.arange(0, BLOCK_M)  # [M], counted inside the sequence
    seen_by = n_keys
    if N_KEYS:
        seen_by = n_keys + batch * stride_nb + first_row
    low, high = key_range(rows, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW)
    begin, full, full_end, end = key_bounds(
        low, high, row0, tq, tk, seen_by, window, CAUSAL, N_KEYS, WINDOW, BLOCK_M, BLOCK_N
    )

    length = tl.maximum(high - low, 1).to(tl.float32)  # nh, [M]
    t = tl.full([BLOCK_M], 1.0, tl.float32)
    if POLAR:
        t = 1.0 + tl.load(length_gain + head).to(tl.float32) * tl.log(length)
    rate = t * (scale * LOG2E)

    # [M, D]
    query = load_tile(
        q, batch, head, first_row + row0, first_row + tq, stride_qb, stride_qt, stride_qh, WIDTH,
        BLOCK_M, BLOCK_D, TMA, ALIGNED,
    )  # fmt: skip
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    s2 = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(3):  # left edge, whole tiles, right edge
        if part > 0 or WINDOW:
            first = begin if part == 0 else (full if part == 1 else full_end)
            # Past `end` lie rows of others, NaN among them: `full` may not lead there.
            last = tl.minimum(full, end) if part == 0 else (full_end if part == 1 else end)
            acc, m, l, s2 = _stream(
                acc, m, l, s2, query, k, v, batch, head_k, first_key, tk, first, last, low, high,
                rate, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                POLAR, part != 1, PACKED or N_KEYS, WIDTH, BLOCK_N, BLOCK_D, TMA, ALIGNED,
                PRECISION, STAGES,
            )  # fmt: skip

    keyless = l == 0.0
    inverse = 1.0 / tl.where(keyless, 1.0, l)  # [M]
    log_sum = (m + tl.log2(l)) * LN2  # −inf for a row with no key
    inside = rows < tq
    at_row = batch_head.to(tl.int64) * total + first_row + rows  # into (B, H, T)
    cols = tl.arange(0, BLOCK_D)
    if POLAR:
        log_n1 = tl.sqrt(tl.log(length + 1.0))
        base = tl.load(null_base + head).to(tl.float32)
        nu = base + tl.load(null_slope + head).to(tl.float32) * log_n1
        # Real mass against the null, base 2. As backward forms it: most of the error of w_real
        # then cancels in w_real/rho.
        gap = (log_sum - t * nu) * LOG2E
        w_real = 1.0 / (1.0 + tl.exp2(-gap))
        w_null = 1.0 / (1.0 + tl.exp2(gap))
        acc = acc * (w_real * inverse)[:, None]
        if NULL_VALUE:
            value = tl.load(null_value + head * WIDTH + cols, mask=cols < WIDTH, other=0.0)
            acc += w_null[:, None] * value.to(tl.float32)[None, :]
        norm = tl.sqrt(tl.sum(acc * acc, 1))
        acc = acc * (1.0 / tl.maximum(norm, EPS))[:, None]
        effective = tl.where(keyless, 1.0, l * l / tl.where(keyless, 1.0, s2))
        mass = tl.where(keyless, 0.0, effective * w_real)
        gain = tl.load(magnitude_gain + head).to(tl.float32)
        amount = tanh(gain * log1p(mass))
        if PACKED:
            padding = sequence == sequences
            amount = tl.where(padding, 0.0, amount)
            acc = tl.where(padding, 0.0, acc)
            effective = tl.where(padding, 0.0, effective)
            norm = tl.where(padding, 0.0, norm)
            w_null = tl.where(padding, 0.0, w_null)
        at_count = (batch * total + first_row + rows) * heads_q + head  # into (B, T, H)
        tl.store(count + at_count, amount.to(count.dtype.element_ty), mask=inside)
        tl.store(n_eff + at_row, effective, mask=inside)
        tl.store(rho + at_row, norm, mask=inside)
        tl.store(null_mass + at_row, w_null, mask=inside)
    else:
        acc = acc * inverse[:, None]
    if PACKED:
        log_sum = tl.where(sequence == sequences, 0.0, log_sum)
    tl.store(lse + at_row, log_sum, mask=inside)
    at = ((batch * total + first_row + rows) * heads_q + head)[:, None] * WIDTH + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
