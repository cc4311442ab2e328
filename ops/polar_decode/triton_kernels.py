"""One query a sequence over paged keys: splits of a sequence side by side, then a merge.

A program of `polar_decode` has the query heads of one key head, so that keys and values are read
once for all of them, and one split of the sequence: of its BLOCK_N-key blocks, which begin at
multiples of BLOCK_N, an equal share. Over real keys only (a in base-2 logarithms) it keeps

    m = max a    l = Σ 2^(a − m)    s2 = Σ 2^(2(a − m))    acc = Σ 2^(a − m) v

and writes them for `polar_merge`, which puts the splits together and folds the null in. Of a
sequence that is not cut the program itself does that. A split without blocks writes nothing: the
merge counts the others by the same rule.
"""

import triton
import triton.language as tl

from ..common import LN2, LOG2E, log1p, tanh

RUNTIME = (
    "heads_q", "heads_k", "group", "row_tiles", "splits", "capacity", "window", "plane", "scale",
    "stride_q_b", "stride_q_h", "stride_tables_b", "stride_tables_p",
    "stride_k_p", "stride_k_t", "stride_k_h", "stride_k_d",
    "stride_v_p", "stride_v_t", "stride_v_h", "stride_v_d",
)  # fmt: skip

HEADS = ("lengths", "null_base", "null_slope", "length_gain", "magnitude_gain")
VIEWS = ("q", "k", "v", "block_tables", *HEADS)  # may start at any byte


@triton.jit
def _visible(lengths, sequence, capacity, window, WINDOW: tl.constexpr):
    """The keys low ≤ j < high of a sequence."""
    high = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), capacity)
    low = high * 0
    if WINDOW:
        low = tl.maximum(high - window, 0)
    return low, high


@triton.jit
def _blocks(low, high, BLOCK_N: tl.constexpr):
    """The first block with a visible key, and how many have one."""
    first = low // BLOCK_N
    return first, tl.where(high > low, tl.cdiv(high, BLOCK_N) - first, 0)


@triton.jit
def _page(table, block, low, high, stride, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a block, or of each of its keys; 0 where no key is seen."""
    if PAGE % BLOCK_N == 0:
        first = block * BLOCK_N
        page = tl.load(table + stride * (first // PAGE), mask=first < high, other=0)
    else:
        at = block * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = (at >= low) & (at < high)
        page = tl.load(table + stride * (at // PAGE), mask=seen, other=0)  # [N]
    return page


@triton.jit
def _tile(x, start, cols, seen, stride_d, ALIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """Rows that begin at `start` as [N, D]; zeros where not seen, where anything may lie."""
    if ALIGNED:
        pointers = tl.multiple_of(x + (start[:, None] + cols[None, :]), (16, 16))
    else:
        pointers = x + (start[:, None] + (cols * stride_d)[None, :])
    return tl.load(pointers, mask=seen[:, None] & (cols < WIDTH)[None, :], other=0.0)


@triton.jit
def _length(gain, low, high):
    """nh, and t of heads with this length gain."""
    length = tl.maximum(high - low, 1).to(tl.float32)
    return length, 1.0 + gain * tl.log(length)


@triton.jit
def _finish(
    acc, m, l, s2, heads, inside, row, low, high,
    null_value, null_base, null_slope, length_gain, magnitude_gain, direction, count,
    NULL_VALUE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Fold the null into sums [R] and [R, D] and write their results; `row`: in (B, Hq)."""
    gain = tl.load(length_gain + heads, mask=inside, other=0.0).to(tl.float32)
    length, t = _length(gain, low, high)
    base = tl.load(null_base + heads, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(null_slope + heads, mask=inside, other=0.0).to(tl.float32)
    nu = base + slope * tl.sqrt(tl.log(length + 1.0))
    keyless = l == 0.0
    some = tl.where(keyless, 1.0, l)
    log_sum = (m + tl.log2(l)) * LN2  # −inf without keys
    gap = (log_sum - t * nu) * LOG2E  # real mass against the null, base 2
    w_real = 1.0 / (1.0 + tl.exp2(-gap))
    acc = acc * (w_real / some)[:, None]
    cols = tl.arange(0, BLOCK_D)
    known = inside[:, None] & (cols < WIDTH)[None, :]
    if NULL_VALUE:
        w_null = 1.0 / (1.0 + tl.exp2(gap))
        value = tl.load(null_value + heads[:, None] * WIDTH + cols[None, :], mask=known, other=0.0)
        acc += w_null[:, None] * value.to(tl.float32)
    norm = tl.sqrt(tl.sum(acc * acc, 1))
    acc = acc / tl.maximum(norm, EPS)[:, None]
    effective = l * l / tl.where(keyless, 1.0, s2)
    mass = tl.where(keyless, 0.0, effective * w_real)
    magnitude = tl.load(magnitude_gain + heads, mask=inside, other=0.0).to(tl.float32)
    tl.store(count + row, tanh(magnitude * log1p(mass)), mask=inside)
    at = row[:, None] * WIDTH + cols[None, :]
    tl.store(direction + at, acc.to(direction.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=VIEWS)
def polar_decode(
    q, k, v, block_tables, lengths, null_value, null_base, null_slope, length_gain, magnitude_gain,
    direction, count, partial, stats,
    heads_q: tl.int32, heads_k: tl.int32, group: tl.int32, row_tiles: tl.int32, splits: tl.int32,
    capacity: tl.int32, window: tl.int32, plane: tl.int64, scale: tl.float32,
    stride_q_b: tl.int64, stride_q_h: tl.int64,
    stride_tables_b: tl.int64, stride_tables_p: tl.int64,
    stride_k_p: tl.int64, stride_k_t: tl.int64, stride_k_h: tl.int64, stride_k_d: tl.int64,
    stride_v_p: tl.int64, stride_v_t: tl.int64, stride_v_h: tl.int64, stride_v_d: tl.int64,
    DIRECT: tl.constexpr, NULL_VALUE: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
    SAME: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """ROWS heads of a group and one split of a sequence; with DIRECT there is one split.

    `plane` is the number of splits of all heads: stats are three planes, m, l and s2. SAME: both
    caches have the same strides.
    """
    pid = tl.program_id(0)
    row_tile = pid % row_tiles
    head_k = (pid // row_tiles) % heads_k
    split = (pid // (row_tiles * heads_k)) % splits
    sequence = (pid // (row_tiles * heads_k * splits)).to(tl.int64)
    low, high = _visible(lengths, sequence, capacity, window, WINDOW)
    first, blocks = _blocks(low, high, BLOCK_N)
    share = blocks // splits
    more = blocks - share * splits  # the first splits have one block more
    begin = first + split * share + tl.minimum(split, more)
    end = begin + share + (split < more).to(tl.int32)
    if not DIRECT:
        if begin == end:
            return

    member = row_tile * ROWS + tl.arange(0, ROWS)  # [R]
    inside = member < group
    heads = head_k * group + member
    cols = tl.arange(0, BLOCK_D)
    row = sequence * heads_q + heads  # [R], in (B, Hq)
    gain = tl.load(length_gain + heads, mask=inside, other=0.0).to(tl.float32)
    _, t = _length(gain, low, high)
    rate = t * (scale * LOG2E)
    # [R, D]
    query = tl.load(
        q + sequence * stride_q_b + heads.to(tl.int64)[:, None] * stride_q_h + cols[None, :],
        mask=inside[:, None] & (cols < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    table = block_tables + sequence * stride_tables_b
    k += head_k.to(tl.int64) * stride_k_h
    v += head_k.to(tl.int64) * stride_v_h
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    s2 = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    next_page = _page(table, begin, low, high, stride_tables_p, PAGE, BLOCK_N)
    for block in tl.range(begin, end, num_stages=STAGES):
        page = next_page.to(tl.int64)
        next_page = _page(table, block + 1, low, high, stride_tables_p, PAGE, BLOCK_N)
        at = block * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
        seen = (at >= low) & (at < high)
        offset = (at % PAGE).to(tl.int64)
        to_key = page * stride_k_p + offset * stride_k_t
        key = _tile(k, to_key, cols, seen, stride_k_d, ALIGNED, WIDTH)  # [N, D]
        score = tl.dot(query, key.T, input_precision=PRECISION)  # [R, N]
        score = tl.where(seen[None, :], score * rate[:, None], float("-inf"))
        highest = tl.maximum(m, tl.max(score, 1))
        # Every block has a visible key; only keys of −inf leave the maximum there.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(score - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        s2 = s2 * (alpha * alpha) + tl.sum(p * p, 1)
        acc = acc * alpha[:, None]
        to_value = to_key
        if not SAME:
            to_value = page * stride_v_p + offset * stride_v_t
        value = _tile(v, to_value, cols, seen, stride_v_d, ALIGNED, WIDTH)  # [N, D]
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)  # [R, D]
        m = highest

    if DIRECT:
        _finish(
            acc, m, l, s2, heads, inside, row, low, high, null_value, null_base, null_slope,
            length_gain, magnitude_gain, direction, count, NULL_VALUE, WIDTH, BLOCK_D, EPS,
        )  # fmt: skip
    else:
        place = row * splits + split
        tl.store(stats + place, m, mask=inside)
        tl.store(stats + (plane + place), l, mask=inside)
        tl.store(stats + (2 * plane + place), s2, mask=inside)
        pointers = partial + (place[:, None] * WIDTH + cols[None, :])
        tl.store(pointers, acc, mask=inside[:, None] & (cols < WIDTH)[None, :])


@triton.jit(
    do_not_specialize=("heads_q", "splits", "capacity", "window", "plane"),
    do_not_specialize_on_alignment=HEADS,
)
def polar_merge(
    partial, stats, lengths, null_value, null_base, null_slope, length_gain, magnitude_gain,
    direction, count, heads_q: tl.int32, splits: tl.int32, capacity: tl.int32, window: tl.int32,
    plane: tl.int64,
    NULL_VALUE: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: its splits, PARTS of them at a time."""
    row = tl.program_id(0).to(tl.int64)
    low, high = _visible(lengths, row // heads_q, capacity, window, WINDOW)
    _, blocks = _blocks(low, high, BLOCK_N)
    live = tl.minimum(blocks, splits)
    cols = tl.arange(0, BLOCK_D)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    s2 = tl.zeros([1], tl.float32)
    acc = tl.zeros([PARTS, BLOCK_D], tl.float32)
    for split0 in tl.range(0, live, PARTS, num_stages=STAGES):
        split = split0 + tl.arange(0, PARTS)  # [S]
        there = split < live
        place = row * splits + split
        part_m = tl.load(stats + place, mask=there, other=float("-inf"))
        part_l = tl.load(stats + (plane + place), mask=there, other=0.0)
        part_s2 = tl.load(stats + (2 * plane + place), mask=there, other=0.0)
        pointers = partial + (place[:, None] * WIDTH + cols[None, :])
        part = tl.load(pointers, mask=there[:, None] & (cols < WIDTH)[None, :], other=0.0)
        highest = tl.maximum(m, tl.max(part_m, 0))  # [1]
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(part_m - shift)  # [S]
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(weight * part_l, 0)
        s2 = s2 * (alpha * alpha) + tl.sum(weight * weight * part_s2, 0)
        acc = acc * alpha[:, None] + weight[:, None] * part
        m = highest
    head = (row % heads_q) + tl.arange(0, 1)
    _finish(
        tl.sum(acc, 0)[None, :], m, l, s2, head, head >= 0, row + tl.arange(0, 1), low, high,
        null_value, null_base, null_slope, length_gain, magnitude_gain, direction, count,
        NULL_VALUE, WIDTH, BLOCK_D, EPS,
    )  # fmt: skip
