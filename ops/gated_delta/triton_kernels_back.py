"""The gated delta rule backward: chunks side by side, a walk back along them, then the gradients.

With T, W, U and the states of `triton_kernels` made anew, and dS of the memory behind the chunk,

    dU = scale · Pᵀ dO + t ∘ K dS          `push` the first term, `walk_back` the rest
    dS ← e_C dS + e_0 (Qᵀ (scale · e / e_0 ∘ dO) − Wᵀ dU)      `walk_back`
    dX = Tᵀ dU        dV = β ∘ dX          `pull`

and the rest as in `eager`, by `of_queries`, `of_pairs` and `of_keys`, in that order: each adds to
the gradients of the gates. What is multiplied from both sides, dP and dN and their transposes, is
computed twice instead of transposed: operands that are transposed results are miscompiled on
Hopper. Gradients of heads that share a query, key or value are summed by `collect`.
"""

import triton
import triton.language as tl

from ..omega.triton_chunks import load_rows, place_chunk, place_walk
from .triton_kernels import CHUNK, SIZES, STRIDES_K, STRIDES_Q, decays, load_columns

STRIDES_O = ("stride_ob", "stride_ot", "stride_oh")
STRIDES_B = ("stride_bb", "stride_bt", "stride_bh")
PUSH_RUNTIME = (*SIZES, "heads_q", "heads_k", "scale", *STRIDES_Q, *STRIDES_K, *STRIDES_O)
WALK_RUNTIME = (*PUSH_RUNTIME, "stride_sn", "stride_sh", "stride_sr")
PULL_RUNTIME = (*SIZES, "heads_v", "stride_vb", "stride_vt", "stride_vh", *STRIDES_B)
GRADIENTS_RUNTIME = (*PUSH_RUNTIME, *STRIDES_B)
COLLECT_RUNTIME = (
    "tokens", "heads", "group", "blocks", "eps", "stride_xb", "stride_xt", "stride_xh",
)  # fmt: skip


@triton.jit(do_not_specialize=PUSH_RUNTIME)
def push(
    q, k, d_o, whole, rest, cu, pushed,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32,
    heads_q: tl.int32, heads_k: tl.int32, scale: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64,
    PACKED: tl.constexpr, Q_ALIGNED: tl.constexpr, K_ALIGNED: tl.constexpr,
    O_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """(scale · Pᵀ dO)ᵀ [WIDE, 64] of a slot and head, V columns of it."""
    BLOCKS: tl.constexpr = (VALUES + V - 1) // V
    v0 = tl.program_id(0) % BLOCKS * V
    head = tl.program_id(0) // BLOCKS % heads
    slot = tl.program_id(0) // BLOCKS // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, CHUNK, chunks, sequences, PACKED)
    if size > 0:
        i = tl.arange(0, CHUNK)
        there = i < size
        rows = first + i
        place = slot.to(tl.int64) * heads + head
        queries = load_rows(
            q, batch, head * heads_q // heads, rows, there, 0, stride_qb, stride_qt, stride_qh,
            WIDTH, D, Q_ALIGNED,
        )  # fmt: skip
        across = load_columns(
            k, batch, head * heads_k // heads, rows, there, 0, stride_kb, stride_kt, stride_kh,
            WIDTH, D, K_ALIGNED,
        )  # fmt: skip
        high = tl.load(whole + place * CHUNK + i)
        low = tl.load(rest + place * CHUNK + i)
        overlap = tl.dot(queries, across, input_precision=PRECISION)
        later = i[:, None] >= i[None, :]
        table = decays(later, high[:, None], low[:, None], high[None, :], low[None, :])
        upstream = load_columns(
            d_o, batch, head, rows, there, v0, stride_ob, stride_ot, stride_oh,
            VALUES, V, O_ALIGNED,
        )  # fmt: skip
        reads = (table * overlap).to(upstream.dtype)
        tile = scale * tl.dot(upstream, reads, input_precision=PRECISION)
        e = v0 + tl.arange(0, V)
        cells = place * (CHUNK * WIDE) + e[:, None] * CHUNK + i[None, :]
        tl.store(pushed + cells, tile.to(pushed.dtype.element_ty))


@triton.jit(do_not_specialize=WALK_RUNTIME)
def walk_back(
    q, k, w, d_o, pushed, whole, rest, after, total, opening, d_final, cu,
    d_states, d_change, d_initial,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32,
    heads_q: tl.int32, heads_k: tl.int32, scale: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64,
    stride_sn: tl.int64, stride_sh: tl.int64, stride_sr: tl.int64,
    PACKED: tl.constexpr, Q_ALIGNED: tl.constexpr, K_ALIGNED: tl.constexpr,
    O_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """V columns of the gradient of one head's memory, from a sequence's end to its begin.

    Of each slot and head it leaves dSᵀ [WIDE, D] as it is behind the chunk, and dUᵀ [WIDE, 64].
    """
    v0, head, sequence, batch, begin, end, slot, count = place_walk(
        cu, tokens, heads, CHUNK, chunks, VALUES, V, PACKED
    )
    head_q = head * heads_q // heads
    head_k = head * heads_k // heads
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, D)
    e = v0 + tl.arange(0, V)
    known = (e < VALUES)[:, None] & (d < WIDTH)[None, :]
    at = sequence.to(tl.int64) * stride_sn + head * stride_sh
    at += d.to(tl.int64)[None, :] * stride_sr + e[:, None]
    grad = tl.load(d_final + at, mask=known, other=0.0)
    for done in tl.range(0, count, num_stages=STAGES):
        number = count - 1 - done
        place = (slot + number).to(tl.int64) * heads + head
        rows = begin + number * CHUNK + i
        there = rows < end
        held = grad.to(d_states.dtype.element_ty)
        tl.store(d_states + place * (WIDE * D) + e[:, None] * D + d[None, :], held)
        across = load_columns(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        cells = place * (CHUNK * WIDE) + e[:, None] * CHUNK + i[None, :]
        mended = tl.dot(held, across, input_precision=PRECISION)
        mended *= tl.load(after + place * CHUNK + i)[None, :]
        mended += tl.load(pushed + cells).to(tl.float32)
        back = mended.to(d_change.dtype.element_ty)
        tl.store(d_change + cells, back)
        begun = scale * decays(
            i >= 0,
            tl.load(whole + place * CHUNK + i),
            tl.load(rest + place * CHUNK + i),
            tl.load(whole + place * CHUNK),
            tl.load(rest + place * CHUNK),
        )
        upstream = load_columns(
            d_o, batch, head, rows, there, v0, stride_ob, stride_ot, stride_oh,
            VALUES, V, O_ALIGNED,
        )  # fmt: skip
        left = (upstream.to(tl.float32) * begun[None, :]).to(upstream.dtype)
        queries = load_rows(
            q, batch, head_q, rows, there, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, Q_ALIGNED
        )
        kept = tl.load(w + place * (CHUNK * D) + i[:, None] * D + d[None, :])
        grad *= tl.load(total + place)
        front = tl.dot(left, queries, input_precision=PRECISION)
        front -= tl.dot(back, kept, input_precision=PRECISION)
        grad += tl.load(opening + place) * front
    at = (sequence.to(tl.int64) * heads + head) * (WIDTH * VALUES)
    tl.store(d_initial + (at + d[None, :] * VALUES + e[:, None]), grad, mask=known)


@triton.jit(do_not_specialize=PULL_RUNTIME)
def pull(
    v, beta, inverse, d_change, cu, d_right, d_v, d_beta,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32, heads_v: tl.int32,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_bb: tl.int64, stride_bt: tl.int64, stride_bh: tl.int64,
    PACKED: tl.constexpr, V_ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """dXᵀ [WIDE, 64] of a slot and head; dV (B, T, H, VALUES); the sum of dX ∘ V, (B, T, H)."""
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, CHUNK, chunks, sequences, PACKED)
    if size > 0:
        i = tl.arange(0, CHUNK)
        there = i < size
        rows = first + i
        place = slot.to(tl.int64) * heads + head
        at = batch.to(tl.int64) * stride_bb + head * stride_bh + rows.to(tl.int64) * stride_bt
        rate = tl.load(beta + at, mask=there, other=0.0)
        across = tl.load(inverse + place * (CHUNK * CHUNK) + i[None, :] * CHUNK + i[:, None])  # Tᵀ
        out = (batch.to(tl.int64) * tokens + rows) * heads + head
        total = tl.zeros([CHUNK], tl.float32)
        for v0 in tl.static_range(0, WIDE, V):
            e = v0 + tl.arange(0, V)
            cells = place * (CHUNK * WIDE) + e[None, :] * CHUNK + i[:, None]
            # The walk leaves no columns past the last values.
            back = tl.load(d_change + cells, mask=(e < VALUES)[None, :], other=0.0)
            tile = tl.dot(across, back, input_precision=PRECISION)
            tl.store(d_right + cells, tile.to(d_right.dtype.element_ty))
            values = load_rows(
                v, batch, head * heads_v // heads, rows, there, v0, stride_vb, stride_vt,
                stride_vh, VALUES, V, V_ALIGNED,
            )  # fmt: skip
            total += tl.sum(tile * values.to(tl.float32), 1)
            mask = there[:, None] & (e < VALUES)[None, :]
            grad = (tile * rate[:, None]).to(d_v.dtype.element_ty)
            tl.store(d_v + out[:, None] * VALUES + e[None, :], grad, mask=mask)
        tl.store(d_beta + out, total, mask=there)


@triton.jit(do_not_specialize=PUSH_RUNTIME)
def of_queries(
    q, k, d_o, whole, rest, states, change, cu, d_q, d_log_decay,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32,
    heads_q: tl.int32, heads_k: tl.int32, scale: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64,
    PACKED: tl.constexpr, Q_ALIGNED: tl.constexpr, K_ALIGNED: tl.constexpr,
    O_ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dQ (B, T, H, WIDTH) of a slot and head, and of the log-decays (B, T, H) what reads give."""
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, CHUNK, chunks, sequences, PACKED)
    if size > 0:
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, D)
        there = i < size
        rows = first + i
        place = slot.to(tl.int64) * heads + head
        d_reads = tl.zeros([CHUNK, CHUNK], tl.float32)  # dP
        read = tl.zeros([CHUNK, D], tl.float32)  # dO Sᵀ
        for v0 in tl.range(0, VALUES, V, num_stages=1):
            e = v0 + tl.arange(0, V)
            known = (e < VALUES)[:, None]  # the walks leave no columns past the last values
            upstream = load_rows(
                d_o, batch, head, rows, there, v0, stride_ob, stride_ot, stride_oh,
                VALUES, V, O_ALIGNED,
            )  # fmt: skip
            cells = place * (CHUNK * WIDE) + e[:, None] * CHUNK + i[None, :]
            written = tl.load(change + cells, mask=known, other=0.0)
            tile = place * (WIDE * D) + e[:, None] * D + d[None, :]
            state = tl.load(states + tile, mask=known, other=0.0)
            d_reads += tl.dot(upstream, written, input_precision=PRECISION)
            read += tl.dot(upstream, state, input_precision=PRECISION)
        queries = load_rows(
            q, batch, head * heads_q // heads, rows, there, 0, stride_qb, stride_qt, stride_qh,
            WIDTH, D, Q_ALIGNED,
        )  # fmt: skip
        head_k = head * heads_k // heads
        high = tl.load(whole + place * CHUNK + i)
        low = tl.load(rest + place * CHUNK + i)
        begun = scale * tl.exp2(tl.minimum(high + low, 0.0))
        p = i[:, None]
        s = i[None, :]
        read *= begun[:, None]
        start = tl.sum(queries.to(tl.float32) * read, 1)
        later = p >= s
        table = decays(later, high[:, None], low[:, None], high[None, :], low[None, :])
        d_reads *= scale * table
        keys = load_rows(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        read += tl.dot(d_reads.to(keys.dtype), keys, input_precision=PRECISION)
        out = (batch.to(tl.int64) * tokens + rows) * heads + head
        mask = there[:, None] & (d < WIDTH)[None, :]
        tl.store(
            d_q + (out[:, None] * WIDTH + d[None, :]), read.to(d_q.dtype.element_ty), mask=mask
        )
        across = load_columns(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        pairs = d_reads * tl.dot(queries, across, input_precision=PRECISION)
        grad = _between(pairs, start)
        tl.store(d_log_decay + out, grad, mask=there)


@triton.jit
def _between(pairs, start):
    """Gradients of log-decays from those of pairs (p, s), dE ∘ E, and of what came from the begin
    of the chunk to p: the sum of all that a token lies between, p from it on and s before it.
    """
    p = tl.arange(0, CHUNK)[:, None]
    s = tl.arange(0, CHUNK)[None, :]
    grad = tl.sum(tl.where(s < p, tl.cumsum(pairs, 0, reverse=True), 0.0), 1)
    return grad + tl.sum(tl.where(s >= p, start[None, :], 0.0), 1)


@triton.jit(do_not_specialize=GRADIENTS_RUNTIME)
def of_pairs(
    q, k, beta, d_o, whole, rest, change, d_right, cu, passed, mended, d_log_decay, d_beta,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32,
    heads_q: tl.int32, heads_k: tl.int32, scale: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64,
    stride_bb: tl.int64, stride_bt: tl.int64, stride_bh: tl.int64,
    PACKED: tl.constexpr, K_ALIGNED: tl.constexpr, O_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Of a slot and head, [64, 64]: (dP ∘ E)ᵀ (`passed`), and G + Gᵀ (`mended`); of the gates what
    pairs of keys give.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, CHUNK, chunks, sequences, PACKED)
    if size > 0:
        i = tl.arange(0, CHUNK)
        there = i < size
        rows = first + i
        place = slot.to(tl.int64) * heads + head
        d_reads_t = tl.zeros([CHUNK, CHUNK], tl.float32)  # dPᵀ
        d_triangle = tl.zeros([CHUNK, CHUNK], tl.float32)  # −dN
        d_triangle_t = tl.zeros([CHUNK, CHUNK], tl.float32)
        for v0 in tl.range(0, VALUES, V, num_stages=1):
            e = v0 + tl.arange(0, V)
            upstream = load_columns(
                d_o, batch, head, rows, there, v0, stride_ob, stride_ot, stride_oh,
                VALUES, V, O_ALIGNED,
            )  # fmt: skip
            known = e < VALUES  # the walks leave no columns past the last values
            cells = place * (CHUNK * WIDE) + e[None, :] * CHUNK + i[:, None]
            cells_t = place * (CHUNK * WIDE) + e[:, None] * CHUNK + i[None, :]
            written = tl.load(change + cells, mask=known[None, :], other=0.0)
            written_t = tl.load(change + cells_t, mask=known[:, None], other=0.0)
            right = tl.load(d_right + cells)
            right_t = tl.load(d_right + cells_t)
            d_reads_t += tl.dot(written, upstream, input_precision=PRECISION)
            d_triangle += tl.dot(right, written_t, input_precision=PRECISION)
            d_triangle_t += tl.dot(written, right_t, input_precision=PRECISION)
        at = batch.to(tl.int64) * stride_bb + head * stride_bh + rows.to(tl.int64) * stride_bt
        rate = tl.load(beta + at, mask=there, other=0.0)
        high = tl.load(whole + place * CHUNK + i)
        low = tl.load(rest + place * CHUNK + i)
        p = i[:, None]
        s = i[None, :]
        square = place * (CHUNK * CHUNK) + p * CHUNK + s
        table_t = decays(s >= p, high[None, :], low[None, :], high[:, None], low[:, None])
        d_reads_t *= scale * table_t
        tl.store(passed + square, d_reads_t.to(passed.dtype.element_ty))
        table = decays(p > s, high[:, None], low[:, None], high[None, :], low[None, :])
        d_triangle *= -table
        by_key = rate[:, None] * d_triangle
        both = by_key - tl.where(p < s, d_triangle_t * table_t, 0.0) * rate[None, :]
        tl.store(mended + square, both.to(mended.dtype.element_ty))

        head_k = head * heads_k // heads
        keys = load_rows(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        across = load_columns(
            k, batch, head_k, rows, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, K_ALIGNED
        )
        overlap = tl.dot(keys, across, input_precision=PRECISION)
        out = (batch.to(tl.int64) * tokens + rows) * heads + head
        grad = tl.load(d_beta + out, mask=there, other=0.0) + tl.sum(d_triangle * overlap, 1)
        tl.store(d_beta + out, grad, mask=there)
        grad = tl.load(d_log_decay + out, mask=there, other=0.0)
        grad += _between(by_key * overlap, tl.zeros([CHUNK], tl.float32))
        tl.store(d_log_decay + out, grad, mask=there)


@triton.jit(do_not_specialize=GRADIENTS_RUNTIME)
def of_keys(
    q, k, beta, whole, rest, after, total, states, change, d_states, d_right, passed, mended, cu,
    d_k, d_log_decay, d_beta,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunks: tl.int32,
    heads_q: tl.int32, heads_k: tl.int32, scale: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64,
    stride_bb: tl.int64, stride_bt: tl.int64, stride_bh: tl.int64,
    PACKED: tl.constexpr, Q_ALIGNED: tl.constexpr, K_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dK (B, T, H, WIDTH) of a slot and head; of the gates what the states give."""
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, CHUNK, chunks, sequences, PACKED)
    if size > 0:
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, D)
        there = i < size
        rows = first + i
        place = slot.to(tl.int64) * heads + head
        stored = tl.zeros([CHUNK, D], tl.float32)  # U dSᵀ
        forgot = tl.zeros([CHUNK, D], tl.float32)  # dX Sᵀ
        kept = 0.0
        for v0 in tl.range(0, VALUES, V, num_stages=1):
            e = v0 + tl.arange(0, V)
            known = e < VALUES  # the walks leave no columns past the last values
            cells = place * (CHUNK * WIDE) + e[None, :] * CHUNK + i[:, None]
            written = tl.load(change + cells, mask=known[None, :], other=0.0)
            right = tl.load(d_right + cells)
            tile = place * (WIDE * D) + e[:, None] * D + d[None, :]
            state = tl.load(states + tile, mask=known[:, None], other=0.0)
            d_state = tl.load(d_states + tile, mask=known[:, None], other=0.0)
            stored += tl.dot(written, d_state, input_precision=PRECISION)
            forgot += tl.dot(right, state, input_precision=PRECISION)
            kept += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
        at = batch.to(tl.int64) * stride_bb + head * stride_bh + rows.to(tl.int64) * stride_bt
        rate = tl.load(beta + at, mask=there, other=0.0)
        high = tl.load(whole + place * CHUNK + i)
        low = tl.load(rest + place * CHUNK + i)
        begun = tl.exp2(tl.minimum(high + low, 0.0))
        keys = load_rows(
            k, batch, head * heads_k // heads, rows, there, 0, stride_kb, stride_kt, stride_kh,
            WIDTH, D, K_ALIGNED,
        )  # fmt: skip
        wide = keys.to(tl.float32)
        told = begun * tl.sum(wide * forgot, 1)
        left = tl.load(after + place * CHUNK + i)
        stored *= left[:, None]
        ended = tl.sum(stored * wide, 1)
        grad = stored - (rate * begun)[:, None] * forgot
        square = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        grad += tl.dot(tl.load(mended + square), keys, input_precision=PRECISION)
        queries = load_rows(
            q, batch, head * heads_q // heads, rows, there, 0, stride_qb, stride_qt, stride_qh,
            WIDTH, D, Q_ALIGNED,
        )  # fmt: skip
        grad += tl.dot(tl.load(passed + square), queries, input_precision=PRECISION)
        out = (batch.to(tl.int64) * tokens + rows) * heads + head
        mask = there[:, None] & (d < WIDTH)[None, :]
        tl.store(
            d_k + (out[:, None] * WIDTH + d[None, :]), grad.to(d_k.dtype.element_ty), mask=mask
        )
        sums = tl.load(d_beta + out, mask=there, other=0.0) - told
        tl.store(d_beta + out, sums, mask=there)
        p = i[:, None]
        s = i[None, :]
        sums = tl.load(d_log_decay + out, mask=there, other=0.0) + kept * tl.load(total + place)
        # What is left of a token at the end, and what is forgotten of the begin.
        sums += tl.sum(tl.where(s < p, ended[None, :], 0.0), 1)
        sums -= tl.sum(tl.where(s >= p, (rate * told)[None, :], 0.0), 1)
        tl.store(d_log_decay + out, sums, mask=there)


@triton.jit(do_not_specialize=COLLECT_RUNTIME)
def collect(
    x, grads, out, tokens: tl.int32, heads: tl.int32, group: tl.int32, blocks: tl.int32,
    eps: tl.float32, stride_xb: tl.int64, stride_xt: tl.int64, stride_xh: tl.int64,
    NORM: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of `group` heads side by side, summed; NORM: of what was x, before it was
    brought to norm one. A program has ROWS tokens of one of `heads`.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % blocks
    batch = tl.program_id(0) // heads // blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    there = rows < tokens
    d = tl.arange(0, D)
    mask = there[:, None] & (d < WIDTH)[None, :]
    row = (batch.to(tl.int64) * tokens + rows) * heads + head
    grad = tl.zeros([ROWS, D], tl.float32)
    for member in range(group):
        at = (row * group + member)[:, None] * WIDTH + d[None, :]
        grad += tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        tile = load_rows(
            x, batch, head, rows, there, 0, stride_xb, stride_xt, stride_xh, WIDTH, D, ALIGNED
        ).to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(tile * tile, 1))
        least = tl.maximum(norm, eps)
        unit = tile / least[:, None]
        along = tl.where(norm < eps, 0.0, tl.sum(grad * unit, 1))
        grad = (grad - along[:, None] * unit) / least[:, None]
    at = row[:, None] * WIDTH + d[None, :]
    tl.store(out + at, grad.to(out.dtype.element_ty), mask=mask)
