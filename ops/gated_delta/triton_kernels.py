"""The gated delta rule forward: chunks prepared side by side, a walk along them, then the reads.

In the names of `eager`, and with the triangle solved once for all memories,

    T = (I + N)⁻¹        e_0 W = T (β e ∘ K)        Y = T (β ∘ V)
    U = Y − e_0 W S      S ← e_C S + Kᵀ (t ∘ U)
    O = scale · (e ∘ Q S + P U)

`prepare` makes W and Y of each chunk, `walk` alone goes from chunk to chunk, `output` reads. The
walk holds Sᵀ, so that both of its products take what the last one left as their left operand, from
registers; Y, U and the states lie in memory as it needs them, values first. What a product takes
the other way round is loaded that way: operands that are transposed results are miscompiled on
Hopper.

A sum of log-decays is a whole number and a rest in [0, 1), to base 2, from integers that add up
exactly: the difference of two of them is that of the tokens between, whatever lies before them. No
exponent is above 0. A *slot* is one chunk of one sequence.
"""

import triton
import triton.language as tl

from ..omega.triton_chunks import load_rows, place_chunk, place_walk

CHUNK = tl.constexpr(64)
LOWEST = tl.constexpr(-720.0)  # a log-decay whose exponential is 0, and stays it in any sum
UNIT = tl.constexpr(1.4426950408889634 * (1 << 32))  # log2(e) in fixed point
SIZES = ("tokens", "heads", "sequences", "chunks")
STRIDES_K = ("stride_kb", "stride_kt", "stride_kh")
STRIDES_Q = ("stride_qb", "stride_qt", "stride_qh")
NORMALISE_RUNTIME = ("tokens", "heads", "blocks", "eps", "stride_xb", "stride_xt", "stride_xh")
PREPARE_RUNTIME = (
    *SIZES, "heads_k", "heads_v", *STRIDES_K, "stride_vb", "stride_vt", "stride_vh",
    "stride_gb", "stride_gt", "stride_gh", "stride_bb", "stride_bt", "stride_bh",
)  # fmt: skip
WALK_RUNTIME = (
    *SIZES, "heads_k", *STRIDES_K, "stride_sn", "stride_sh", "stride_sr",
)  # fmt: skip
OUTPUT_RUNTIME = (*SIZES, "heads_q", "heads_k", "scale", *STRIDES_Q, *STRIDES_K)


@triton.jit
def load_columns(
    x, batch, head, rows, there, col0, stride_b, stride_t, stride_h,
    WIDTH: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Tokens `rows` of one head, columns from `col0` on, as [D, rows]; zeros where `there` is False
    and past WIDTH.
    """
    d = col0 + tl.arange(0, D)
    at = batch.to(tl.int64) * stride_b + head * stride_h + rows.to(tl.int64)[None, :] * stride_t
    pointers = x + (at + d[:, None])
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (16, 16))
    return tl.load(pointers, mask=there[None, :] & (d < WIDTH)[:, None], other=0.0)


@triton.jit
def decays(later, whole, rest, whole_before, rest_before):
    """exp of the sum of log-decays between two tokens, 0 where `later` is False."""
    exponent = (whole - whole_before) + (rest - rest_before)
    exponent = tl.where(later, tl.minimum(exponent, 0.0), 0.0)
    return tl.where(later, tl.exp2(exponent), 0.0)


@triton.jit
def _inverse(triangle, PRECISION: tl.constexpr):
    """(I + N)⁻¹ of N that has nothing on and above the diagonal.

    The inverses of blocks on the diagonal, twice as wide each time: of [[A, 0], [B, C]] what is
    below is −C⁻¹ B A⁻¹. No number gets larger than those of the inverse, as powers of N would.
    """
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, triangle, 0.0)
    for level in tl.static_range(1, 6):
        below = (i // (2 << level) == j // (2 << level)) & (i // (1 << level) != j // (1 << level))
        left = tl.dot(inverse, tl.where(below, triangle, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=NORMALISE_RUNTIME)
def normalise(
    x, y, tokens: tl.int32, heads: tl.int32, blocks: tl.int32, eps: tl.float32,
    stride_xb: tl.int64, stride_xt: tl.int64, stride_xh: tl.int64,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of norm one, (B, T, H, WIDTH) contiguous; a program has ROWS tokens of a head."""
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % blocks
    batch = tl.program_id(0) // heads // blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    there = rows < tokens
    tile = load_rows(
        x, batch, head, rows, there, 0, stride_xb, stride_xt, stride_xh, WIDTH, D, ALIGNED
    ).to(tl.float32)
    norm = tl.maximum(tl.sqrt_rn(tl.sum(tile * tile, 1)), eps)
    d = tl.arange(0, D)
    at = ((batch.to(tl.int64) * tokens + rows)[:, None] * heads + head) * WIDTH + d[None, :]
    mask = there[:, None] & (d < WIDTH)[None, :]
    tl.store(y + at, (tile / norm[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=PREPARE_RUNTIME)
def prepare(
    k, v, log_decay, beta, cu, w, y, whole, rest, after, total, opening, inverses,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32,
    heads_k: tl.int32, heads_v: tl.int32,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gt: tl.int64, stride_gh: tl.int64,
    stride_bb: tl.int64, stride_bt: tl.int64, stride_bh: tl.int64,
    PACKED: tl.constexpr, KEEP: tl.constexpr, K_ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """W [64, D] and Yᵀ [WIDE, 64] of a slot and head, and of its tokens the sums of log-decays
    in two parts (`whole`, `rest`) and t (`after`); `total`: e_C. KEEP: T, too.

    W lacks the decay of the chunk's first token, `opening`: what all of it has in common would
    leave fp16 nothing of a W that a gradient is made of.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, CHUNK, chunks, sequences, PACKED)
    if size > 0:
        i = tl.arange(0, CHUNK)
        there = i < size
        rows = first + i
        wide = rows.to(tl.int64)
        at = batch.to(tl.int64) * stride_gb + head * stride_gh + wide * stride_gt
        gate = tl.load(log_decay + at, mask=there, other=0.0)
        at = batch.to(tl.int64) * stride_bb + head * stride_bh + wide * stride_bt
        rate = tl.load(beta + at, mask=there, other=0.0)
        rate = tl.where(gate != gate, gate, rate)  # a NaN is lost below
        fixed = (tl.maximum(gate, LOWEST).to(tl.float64) * UNIT).to(tl.int64)
        sums = tl.cumsum(fixed, 0)
        high = sums >> 32
        low = (sums - (high << 32)).to(tl.float32) * (1.0 / (1 << 32))
        high = high.to(tl.float32)
        last = tl.sum(fixed, 0)
        last_high = last >> 32
        last_low = (last - (last_high << 32)).to(tl.float32) * (1.0 / (1 << 32))
        last_high = last_high.to(tl.float32)
        place = slot.to(tl.int64) * heads + head
        tl.store(whole + place * CHUNK + i, high)
        tl.store(rest + place * CHUNK + i, low)
        tl.store(after + place * CHUNK + i, decays(i >= 0, last_high, last_low, high, low))
        tl.store(total + place, tl.exp2(tl.minimum(last_high + last_low, 0.0)))
        first_high = tl.sum(tl.where(i == 0, high, 0.0), 0)
        first_low = tl.sum(tl.where(i == 0, low, 0.0), 0)
        tl.store(opening + place, tl.exp2(tl.minimum(first_high + first_low, 0.0)))

        head_k = head * heads_k // heads
        head_v = head * heads_v // heads
        keys = load_rows(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        across = load_columns(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        overlap = tl.dot(keys, across, input_precision=PRECISION)
        later = i[:, None] > i[None, :]
        table = decays(later, high[:, None], low[:, None], high[None, :], low[None, :])
        inverse = _inverse(rate[:, None] * (table * overlap), SOLVE)
        if KEEP:
            to = inverses + place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
            tl.store(to, inverse.to(inverses.dtype.element_ty))
        begun = decays(i >= 0, high, low, first_high, first_low)
        left = (inverse * (rate * begun)[None, :]).to(keys.dtype)
        d = tl.arange(0, D)
        tile = tl.dot(left, keys, input_precision=PRECISION)
        to = w + place * (CHUNK * D) + i[:, None] * D + d[None, :]
        tl.store(to, tile.to(w.dtype.element_ty))
        left = (inverse * rate[None, :]).to(keys.dtype)
        for v0 in tl.static_range(0, WIDE, V):
            values = load_rows(
                v, batch, head_v, rows, there, v0, stride_vb, stride_vt, stride_vh,
                VALUES, V, V_ALIGNED,
            )  # fmt: skip
            e = v0 + tl.arange(0, V)
            tile = tl.dot(left, values, input_precision=PRECISION)
            to = y + place * (CHUNK * WIDE) + e[None, :] * CHUNK + i[:, None]
            tl.store(to, tile.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=WALK_RUNTIME)
def walk(
    k, w, y, after, total, opening, initial, cu, states, change, final,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32, heads_k: tl.int32,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_sn: tl.int64, stride_sh: tl.int64, stride_sr: tl.int64,
    PACKED: tl.constexpr, CARRIED: tl.constexpr, K_ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """V columns of one head's memory, all along a sequence.

    Of each slot and head it leaves Sᵀ [WIDE, D] as it was in front of the chunk, and Uᵀ
    [WIDE, 64]; at last the memory (N, H, WIDTH, VALUES).
    """
    v0, head, sequence, batch, begin, end, slot, count = place_walk(
        cu, tokens, heads, CHUNK, chunks, VALUES, V, PACKED
    )
    head_k = head * heads_k // heads
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, D)
    e = v0 + tl.arange(0, V)
    known = (e < VALUES)[:, None] & (d < WIDTH)[None, :]
    state = tl.zeros([V, D], tl.float32)
    if CARRIED:
        at = sequence.to(tl.int64) * stride_sn + head * stride_sh
        at += d.to(tl.int64)[None, :] * stride_sr + e[:, None]
        state += tl.load(initial + at, mask=known, other=0.0)
    for number in tl.range(0, count, num_stages=STAGES):
        place = (slot + number).to(tl.int64) * heads + head
        held = state.to(states.dtype.element_ty)
        tl.store(states + place * (WIDE * D) + e[:, None] * D + d[None, :], held)
        across = tl.load(w + place * (CHUNK * D) + i[None, :] * D + d[:, None])  # Wᵀ
        cells = place * (CHUNK * WIDE) + e[:, None] * CHUNK + i[None, :]
        mended = tl.load(y + cells).to(tl.float32)
        mended -= tl.load(opening + place) * tl.dot(held, across, input_precision=PRECISION)
        tl.store(change + cells, mended.to(change.dtype.element_ty))
        rows = begin + number * CHUNK + i
        keys = load_rows(
            k, batch, head_k, rows, rows < end, 0, stride_kb, stride_kt, stride_kh,
            WIDTH, D, K_ALIGNED,
        )  # fmt: skip
        left = mended * tl.load(after + place * CHUNK + i)[None, :]
        state *= tl.load(total + place)
        state += tl.dot(left.to(keys.dtype), keys, input_precision=PRECISION)
    at = (sequence.to(tl.int64) * heads + head) * (WIDTH * VALUES)
    tl.store(final + (at + d[None, :] * VALUES + e[:, None]), state, mask=known)


@triton.jit(do_not_specialize=OUTPUT_RUNTIME)
def output(
    q, k, whole, rest, states, change, cu, o,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32,
    heads_q: tl.int32, heads_k: tl.int32, scale: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    PACKED: tl.constexpr, Q_ALIGNED: tl.constexpr, K_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """V columns of o of a slot and head."""
    BLOCKS: tl.constexpr = (VALUES + V - 1) // V
    v0 = tl.program_id(0) % BLOCKS * V
    head = tl.program_id(0) // BLOCKS % heads
    slot = tl.program_id(0) // BLOCKS // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, CHUNK, chunks, sequences, PACKED)
    if size > 0:
        i = tl.arange(0, CHUNK)
        there = i < size
        rows = first + i
        head_q = head * heads_q // heads
        head_k = head * heads_k // heads
        place = slot.to(tl.int64) * heads + head
        queries = load_rows(
            q, batch, head_q, rows, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, Q_ALIGNED
        )
        across = load_columns(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        d = tl.arange(0, D)
        e = v0 + tl.arange(0, V)
        state = tl.load(states + place * (WIDE * D) + e[None, :] * D + d[:, None])
        high = tl.load(whole + place * CHUNK + i)
        low = tl.load(rest + place * CHUNK + i)
        read = tl.dot(queries, state, input_precision=PRECISION)
        read *= tl.exp2(tl.minimum(high + low, 0.0))[:, None]
        overlap = tl.dot(queries, across, input_precision=PRECISION)
        later = i[:, None] >= i[None, :]
        table = decays(later, high[:, None], low[:, None], high[None, :], low[None, :])
        written = tl.load(change + place * (CHUNK * WIDE) + e[None, :] * CHUNK + i[:, None])
        reads = (table * overlap).to(written.dtype)
        read += tl.dot(reads, written, input_precision=PRECISION)
        at = ((batch.to(tl.int64) * tokens + rows)[:, None] * heads + head) * VALUES + e[None, :]
        mask = there[:, None] & (e < VALUES)[None, :]
        tl.store(o + at, (scale * read).to(o.dtype.element_ty), mask=mask)
