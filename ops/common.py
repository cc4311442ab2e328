"""Triton pieces shared by kernels: tiles in and out, visibility, packed sequences, scalar maths.

Those that create no tensor (visibility, packing, scalar maths) also serve Gluon kernels. Imports
Triton; only kernel files import it, so that `import fastweights` stays light.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    x, batch, head, first, end, stride_b, stride_t, stride_h,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TMA: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows `first … first + ROWS` of one head as [ROWS, COLS]; zeros past `end` and past WIDTH.

    With TMA, `x` is a tensor descriptor over (B, H, T, D) and zeros appear only past the tensor
    itself: a caller that packs sequences masks the rows of the next one.
    """
    if TMA:
        tile = x.load([batch.to(tl.int32), head.to(tl.int32), first, 0]).reshape([ROWS, COLS])
    else:
        rows = first + tl.arange(0, ROWS)  # [ROWS]
        cols = tl.arange(0, COLS)  # [COLS]
        at = batch * stride_b + head * stride_h + rows.to(tl.int64)[:, None] * stride_t
        pointers = x + (at + cols[None, :])
        if ALIGNED:  # base and strides are multiples of 16 bytes: loads may be that wide
            pointers = tl.multiple_of(pointers, (16, 16))
        mask = (rows < end)[:, None] & (cols < WIDTH)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def find_sequence(cu, tile, sequences, ROWS: tl.constexpr):
    """Which packed sequence owns a tile, and which of its tiles it is.

    Sequence s owns the tiles from cu[s] // ROWS + s on, so a grid of total // ROWS + N + 1 tiles
    serves any lengths without the host knowing them. Index N is the padding behind the last one.
    """
    low = sequences * 0
    high = sequences + 1
    while high - low > 1:
        middle = (low + high) // 2
        starts_before = tl.load(cu + middle) // ROWS + middle <= tile
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return low, tile - (tl.load(cu + low) // ROWS + low)


@triton.jit
def count_tiles(total, sequences, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Tiles of ROWS rows that cover `total` rows."""
    return total // ROWS + sequences + 1 if PACKED else tl.cdiv(total, ROWS)


@triton.jit
def deal(number, tiles, all_tiles, together):
    """Which tile a program serves: its rank in a head, which has `tiles`, longest first; the head.

    Heads come in sections of `together`, whose tiles of one rank go before any of the next. Head
    after head would leave the longest tiles of the last one to the end, when nothing else is left
    to run beside them; all heads at once would find nothing of what they share in L2.
    """
    section = number // (tiles * together)
    first = section * together
    heads = tl.minimum(together, all_tiles // tiles - first)
    left = number - first * tiles
    return left // heads, first + left % heads


@triton.jit
def place_tile(
    tile, total, other_total, sequences, cu, other_cu, ROWS: tl.constexpr, PACKED: tl.constexpr
):
    """Where a tile lies: its sequence, its number inside that; first row and rows of the sequence;
    the same two on the other axis (keys for queries, queries for keys). Sequence number
    `sequences` is the padding behind the last one.
    """
    sequence = sequences * 0
    first = sequences * 0
    other_first = sequences * 0
    if PACKED:
        sequence, tile = find_sequence(cu, tile, sequences, ROWS)
        last = tl.minimum(sequence + 1, sequences)
        first = tl.load(cu + sequence)
        other_first = tl.load(other_cu + sequence)
        total = tl.where(sequence == sequences, total, tl.load(cu + last)) - first
        other_total = tl.load(other_cu + last) - other_first
    return sequence, tile, first, total, other_first, other_total


@triton.jit
def key_range(
    rows, tq, tk, n_keys, window,
    CAUSAL: tl.constexpr, N_KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The keys low ≤ j < high that each row sees; rows past `tq` see none."""
    if N_KEYS:
        high = tl.load(n_keys + rows, mask=rows < tq, other=0)
        high = tl.minimum(tl.maximum(high, 0), tk)
    elif CAUSAL:
        high = tl.minimum(tl.maximum(tk - tq + rows + 1, 0), tk)
    else:
        high = tk + rows * 0
    high = tl.where(rows < tq, high, 0)
    low = rows * 0
    if WINDOW:
        low = tl.maximum(high - window, 0)
    return low, high


@triton.jit
def key_bounds(
    low, high, row0, tq, tk, n_keys, window,
    CAUSAL: tl.constexpr, N_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key steps of a row tile: [begin, full) and [full_end, end) need masks, [full, full_end) none.

    `low` and `high` are the tile's key ranges; all but `end` are multiples of BLOCK.
    """
    if N_KEYS:
        inside = row0 + tl.arange(0, ROWS) < tq
        end = tl.max(high, 0)
        high_min = tl.min(tl.where(inside, high, end), 0)
        low_max = tl.max(low, 0)
        low_min = tl.min(tl.where(inside, low, low_max), 0)
    else:
        row1 = tl.minimum(row0 + ROWS, tq) - 1
        low_min, high_min = key_range(row0, tq, tk, n_keys, window, CAUSAL, N_KEYS, WINDOW)
        low_max, end = key_range(row1, tq, tk, n_keys, window, CAUSAL, N_KEYS, WINDOW)
    begin = low_min // BLOCK * BLOCK
    full = tl.minimum(tl.cdiv(low_max, BLOCK), tl.cdiv(end, BLOCK)) * BLOCK
    full_end = tl.maximum(high_min // BLOCK * BLOCK, full)
    return begin, full, full_end, end


@triton.jit
def row_bounds(
    key0, tq, tk, window,
    CAUSAL: tl.constexpr, N_KEYS: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row steps of a tile of BLOCK keys: [begin, whole) and [whole_end, end) need masks.

    All in steps of ROWS from `begin` on. RAGGED asks for masks where keys lie past `tk`.
    """
    key1 = tl.minimum(key0 + BLOCK, tk) - 1
    begin = key0 * 0
    end = tq
    whole = begin
    whole_end = tq
    if N_KEYS:
        whole = tq
    elif CAUSAL:
        shift = tk - tq
        begin = tl.maximum(key0 - shift, 0) // ROWS * ROWS
        whole = tl.maximum(key1 - shift, 0)
        if WINDOW:
            end = tl.minimum(tq, key1 + window - shift)
            whole_end = tl.minimum(tq, key0 + window - shift)
    elif WINDOW:
        end = tl.where(key1 >= tk - window, tq, 0)
        whole = tl.where(key0 >= tk - window, 0, tq)
    if RAGGED:
        whole = tl.where(key0 + BLOCK > tk, tq, whole)
    end = begin + tl.cdiv(tl.maximum(end - begin, 0), ROWS) * ROWS
    whole = begin + tl.cdiv(tl.maximum(whole - begin, 0), ROWS) * ROWS
    whole = tl.minimum(whole, end)
    if WINDOW:
        whole_end = begin + tl.maximum(whole_end - begin, 0) // ROWS * ROWS
        whole_end = tl.minimum(tl.maximum(whole_end, whole), end)
    else:
        whole_end = end
    return begin, whole, whole_end, end


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0 without losing small x."""
    one_plus = 1.0 + x
    lost = one_plus - 1.0
    return tl.where(lost == 0.0, x, tl.log(one_plus) * (x / tl.where(lost == 0.0, 1.0, lost)))


@triton.jit
def tanh(x):
    """tanh with relative accuracy near zero: a series below 0.1, where 1 − e^−2x would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0.0, -far, far))
