"""Backward of the Atlas memory where Newton–Schulz meets the end of each chunk.

    atlas_walk_back    along a sequence, last chunk first: gradients of M and S
    atlas_gradients    every chunk by itself: those of q, k and v, and of what the gates amount to
    atlas_gates_back   those of the gates

`atlas_walk` runs before, and keeps M at the begin of each chunk and S at its end. With dM and dS at
a chunk's end, O its orthogonal factor and `NS'` the derivative at S,

    G = dS + NS'(output_step dM)       dR = −U ∘ K G
    dM ← A_b dM + Qᵀ (A ∘ dY) + Kᵀ dR      dS ← B_b G

Its rows Q are those that read M at the chunk's begin, as in `triton_fwd`; so are tiles, transposed
in the walk. G is brought to a largest number of 1 before it meets a narrow dtype: it divides by the
size of S.
"""

import triton
import triton.language as tl

from ..newton_schulz.triton_kernels import _gram as gram_of
from ..newton_schulz.triton_kernels import _norm as norm_of
from ..newton_schulz.triton_kernels import _polynomial as polynomial
from ..omega.triton_bwd import _store_keys as store_keys
from ..omega.triton_chunks import (
    SIZES,
    load_older,
    load_rows,
    place_chunk,
    place_walk,
    state_cells,
)
from .triton_fwd import _times as times
from .triton_fwd import cells_of

_QK = ("stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh")
_Y = ("stride_yb", "stride_yt", "stride_yh")
WALK_BACK_RUNTIME = (*SIZES, "steps", "eps", *_QK, *_Y)
GRADIENTS_RUNTIME = (*SIZES, *_QK, "stride_vb", "stride_vt", "stride_vh", *_Y)


@triton.jit
def _iterates(
    s, at, turned, table, steps, eps, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    MIRROR: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The orthogonal factor of s in COMPUTE; the iterate before each step is left in the scratch.

    at, turned: its addresses there and those of its transpose, SIZE to the next iterate.
    """
    x = (s / (norm_of(s) + eps)).to(COMPUTE)
    for j in tl.range(0, steps, num_stages=1):
        tl.store(at + j * SIZE, x)
        a = tl.load(table + 3 * j)
        b = tl.load(table + 3 * j + 1)
        c = tl.load(table + 3 * j + 2)
        if MIRROR:
            tl.debug_barrier()
            mirrored = tl.load(turned + j * SIZE)
        else:
            mirrored = tl.trans(x)
        z = polynomial(gram_of(x, mirrored, PRECISION), b, c, PRECISION).to(COMPUTE)
        x = tl.dot(z, x, a * x.to(tl.float32), input_precision=PRECISION).to(COMPUTE)
    return x


@triton.jit
def _steps_back(
    given, at, table, steps, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MIRROR: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of the first iterate in COMPUTE, and its two scales, for `given`, that of the
    factor, from what `_iterates` left.
    """
    peak = tl.max(tl.abs(given))
    given = given / tl.where(peak == 0.0, 1.0, peak)
    length = norm_of(given)
    length = tl.where(length == 0.0, 1.0, length)
    d = (given / length).to(COMPUTE)  # [V, D]
    for back in tl.range(0, steps, num_stages=1):
        j = steps - 1 - back
        a = tl.load(table + 3 * j)
        b = tl.load(table + 3 * j + 1)
        c = tl.load(table + 3 * j + 2)
        iterate = tl.load(at + j * SIZE)
        mirrored = tl.trans(iterate)  # of a tile that was loaded
        gram = gram_of(iterate, mirrored, PRECISION)
        d_z = tl.dot(d, mirrored, input_precision=PRECISION)  # [V, V]
        both = (d_z + tl.trans(d_z)).to(COMPUTE)
        through = tl.dot(gram, both, input_precision=PRECISION)
        if MIRROR:
            through = tl.dot(both, gram, through, input_precision=PRECISION)
        else:
            through += tl.trans(through)
        through = (b * both.to(tl.float32) + c * through).to(COMPUTE)
        z = polynomial(gram, b, c, PRECISION).to(COMPUTE)
        after = tl.dot(z, d, a * d.to(tl.float32), input_precision=PRECISION)
        d = tl.dot(through, iterate, after, input_precision=PRECISION).to(COMPUTE)
    return d, length, peak


@triton.jit
def _through_norm(d, length, peak, s, eps):
    """The gradient of s for that of s / (‖s‖ + eps); a momentum of zeros has the gradient 0."""
    norm = norm_of(s)
    nu = norm + eps
    unit = s / nu
    d_unit = d.to(tl.float32)
    along = tl.sum(d_unit * unit) * (nu / tl.where(norm == 0.0, 1.0, norm))
    size = tl.where(norm == 0.0, 0.0, length / nu)
    return (d_unit - unit * along) * size * peak


@triton.jit
def _pulled(k, g, push, PRECISION: tl.constexpr):
    """dRᵀ K [V, D] of some keys, for Gᵀ as g."""
    d_error = -push[None, :] * tl.dot(g, tl.trans(k), input_precision=PRECISION)
    return tl.dot(d_error.to(k.dtype), k, input_precision=PRECISION)


@triton.jit(do_not_specialize=WALK_BACK_RUNTIME)
def atlas_walk_back(
    q, k, d_y, tail_k, tail_length, cu, rates, pushes, ends, table, initial_momentum, states,
    momenta, last, d_last, d_last_momentum, scratch, d_states, peaks, d_ends, d_initial,
    d_initial_momentum, d_q,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, steps: tl.int32, eps: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_yb: tl.int64, stride_yt: tl.int64, stride_yh: tl.int64,
    DOT: tl.constexpr, BEFORE: tl.constexpr, INITIAL_MOMENTUM: tl.constexpr,
    PACKED: tl.constexpr, TAIL: tl.constexpr, LENGTHS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    NS_PRECISION: tl.constexpr, MIRROR: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, back through its chunks.

    states, momenta: from `atlas_walk`; last (N, H, D, Dv): M after the last token. d_states (slots,
    H, D, Dv), k's dtype, times peaks (slots, H): G. d_ends (slots, H, 3): the gradients of `ends`.
    d_initial, d_initial_momentum (N, H, D, Dv): dM and dS, in front of the first token at the end.
    d_q: that of the last token, if its chunk is whole. scratch (programs, steps, V, D).
    """
    tl.assume(steps > 0)
    _, head, sequence, batch, begin, end, slot0, count = place_walk(
        cu, tokens, heads, chunk, chunks, VALUES, V, PACKED
    )
    cells, inside = cells_of(D, V, WIDTH, VALUES)
    SIZE: tl.constexpr = V * D
    STATE: tl.constexpr = WIDTH * VALUES
    own = (sequence.to(tl.int64) * heads + head) * STATE
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    kept = scratch + tl.program_id(0).to(tl.int64) * steps * SIZE
    TALL: tl.constexpr = VALUES > WIDTH
    kept_at = kept + e[:, None] * D + d[None, :]  # [V, D]
    turned = kept + d[:, None] + e[None, :] * D  # [D, V]
    if TALL:
        turned, kept_at = kept_at, turned
    dM = tl.load(d_last + own + cells, mask=inside, other=0.0)
    if not BEFORE:
        # The last token of a whole last chunk read what it left.
        if (count > 0) & ((end - begin) % chunk == 0):
            at = batch.to(tl.int64) * stride_qb + head * stride_qh
            at += (end - 1).to(tl.int64) * stride_qt
            query = tl.load(q + (at + d), mask=d < WIDTH, other=0.0).to(tl.float32)
            at = batch.to(tl.int64) * stride_yb + head * stride_yh
            at += (end - 1).to(tl.int64) * stride_yt
            upstream = tl.load(d_y + (at + e), mask=e < VALUES, other=0.0).to(tl.float32)
            dM += upstream[:, None] * query[None, :]
            M = tl.load(last + own + cells, mask=inside, other=0.0)
            to = ((batch * tokens + end - 1).to(tl.int64) * heads + head) * WIDTH
            d_query = tl.sum(M * upstream[:, None], 0)
            tl.store(d_q + (to + d), d_query.to(d_q.dtype.element_ty), mask=d < WIDTH)
    tl.store(d_initial + own + cells, dM, mask=inside)
    dS = tl.load(d_last_momentum + own + cells, mask=inside, other=0.0)
    tl.store(d_initial_momentum + own + cells, dS, mask=inside)
    tl.debug_barrier()  # what other threads stored is read from here on

    t = tl.arange(0, CHUNK)
    for back in tl.range(0, count, num_stages=1):
        number = count - 1 - back
        first = begin + number * chunk
        size = tl.minimum(chunk, end - first)
        at = (slot0 + number).to(tl.int64) * heads + head
        of_output = 0.0
        found = tl.zeros([V, D], tl.float32)
        if size == chunk:
            S = tl.load(momenta + at * STATE + cells, mask=inside, other=0.0)
            if TALL:
                S = tl.trans(S)
            O = _iterates(
                S, kept_at, turned, table, steps, eps, COMPUTE, NS_PRECISION, MIRROR, SIZE
            )
            dO = tl.load(d_initial + own + cells, mask=inside, other=0.0)  # ÷ output_step
            if TALL:
                dO = tl.trans(dO)
            of_output = tl.sum(O.to(tl.float32) * dO)
            tl.debug_barrier()  # iterates are read as others stored them
            dO *= tl.load(ends + at * 3 + 1)
            dX, length, largest = _steps_back(
                dO, kept_at, table, steps, COMPUTE, NS_PRECISION, MIRROR, SIZE
            )
            tl.debug_barrier()  # S is loaded again: no register held it in between
            S = tl.load(momenta + at * STATE + cells, mask=inside, other=0.0)
            if TALL:
                dX = tl.trans(dX)
            found = _through_norm(dX, length, largest, S, eps)
        tl.store(d_ends + at * 3 + 1, of_output)
        G = found + tl.load(d_initial_momentum + own + cells, mask=inside, other=0.0)
        before = tl.zeros([V, D], tl.float32)  # S where the chunk begins
        if number > 0:
            before = tl.load(momenta + (at - heads) * STATE + cells, mask=inside, other=0.0)
        elif INITIAL_MOMENTUM:
            before = tl.load(initial_momentum + own + cells, mask=inside, other=0.0)
        tl.store(d_ends + at * 3 + 2, tl.sum(G * before))
        dS = tl.load(ends + at * 3 + 2) * G
        tl.store(d_initial_momentum + own + cells, dS, mask=inside)
        peak = tl.max(tl.abs(G))
        peak = tl.where(peak == 0.0, 1.0, peak)
        low = (G / peak).to(k.dtype.element_ty)
        tl.store(d_states + at * STATE + cells, low, mask=inside)
        tl.store(peaks + at, peak)

        dM = tl.load(d_initial + own + cells, mask=inside, other=0.0)
        M = tl.load(states + at * STATE + cells, mask=inside, other=0.0)
        tl.store(d_ends + at * 3, tl.sum(dM * M))
        dM *= tl.load(ends + at * 3)
        if not DOT:
            kt = load_rows(
                k, batch, head, first + t, t < size, 0, stride_kb, stride_kt, stride_kh, WIDTH, D,
                ALIGNED,
            )  # fmt: skip
            push = tl.load(pushes + at * (HALO + CHUNK) + HALO + t)
            dM += peak * _pulled(kt, low, push, PRECISION)
            if HALO > 0:
                kt = load_older(
                    k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1,
                    0, stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
                )  # fmt: skip
                push = tl.load(pushes + at * (HALO + CHUNK) + tl.arange(0, HALO))
                dM += peak * _pulled(kt, low, push, PRECISION)
        row = first + t - (0 if BEFORE else 1)
        reads = (t < chunk) & (row >= begin) & (row < end)
        qt = load_rows(
            q, batch, head, row, reads, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, ALIGNED
        )
        dy = load_rows(
            d_y, batch, head, row, reads, 0, stride_yb, stride_yt, stride_yh, VALUES, V, ALIGNED
        )
        rate = tl.load(rates + at * CHUNK + t)
        asked = (rate[:, None] * qt.to(tl.float32)).to(qt.dtype)
        dM += tl.dot(tl.trans(dy), asked, input_precision=PRECISION)
        tl.debug_barrier()  # all have read dM
        tl.store(d_initial + own + cells, dM, mask=inside)
        tl.debug_barrier()


@triton.jit
def _of_keys(
    kt, vt, M, G, push, peak, DOT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Of some keys [rows, ·]: dU, dR and dK, of M and of G ÷ peak [D, V]."""
    error = -vt.to(tl.float32)
    if not DOT:
        error += tl.dot(kt, M, input_precision=PRECISION)
    along = tl.dot(kt, G, input_precision=PRECISION)
    d_push = -peak * tl.sum(error * along, 1)
    d_error = -push[:, None] * along  # ÷ peak
    written = (push[:, None] * error).to(kt.dtype)
    d_k = -tl.dot(written, tl.trans(G), input_precision=PRECISION)
    if not DOT:
        d_k += tl.dot(d_error.to(kt.dtype), tl.trans(M), input_precision=PRECISION)
    return d_push, peak * d_error, peak * d_k


@triton.jit(do_not_specialize=GRADIENTS_RUNTIME)
def atlas_gradients(
    q, k, v, d_y, tail_k, tail_v, tail_length, cu, rates, pushes, states, d_states, peaks,
    d_q, d_k, d_v, edge_k, edge_v, older_k, older_v, d_rates, d_pushes,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_yb: tl.int64, stride_yt: tl.int64, stride_yh: tl.int64,
    DOT: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and head. d_rates (slots, H, CHUNK) and d_pushes (slots, H, HALO + CHUNK): the
    gradients of `rates` and `pushes`. Keys that two chunks see wait at their edges, as in the Omega
    rule.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    sequence, batch, _, first, size, begin = place_chunk(
        slot, cu, tokens, chunk, chunks, sequences, PACKED
    )
    if size > 0:
        end = tokens
        if PACKED:
            end = tl.load(cu + sequence + 1)
        at = slot.to(tl.int64) * heads + head
        cells, inside = state_cells(D, V, 0, WIDTH, VALUES)
        M = tl.load(states + at * (WIDTH * VALUES) + cells, mask=inside, other=0.0)
        M = M.to(k.dtype.element_ty)
        t = tl.arange(0, CHUNK)
        row = first + t - (0 if BEFORE else 1)
        reads = (t < chunk) & (row >= begin) & (row < end)
        qt = load_rows(
            q, batch, head, row, reads, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, ALIGNED
        )
        dy = load_rows(
            d_y, batch, head, row, reads, 0, stride_yb, stride_yt, stride_yh, VALUES, V, ALIGNED
        )
        rate = tl.load(rates + at * CHUNK + t)
        pulled = tl.dot(dy, tl.trans(M), input_precision=PRECISION)  # [CHUNK, D]
        tl.store(d_rates + at * CHUNK + t, tl.sum(pulled * qt.to(tl.float32), 1))
        d = tl.arange(0, D)
        to = ((batch * tokens + row).to(tl.int64) * heads + head)[:, None] * WIDTH + d[None, :]
        d_query = (rate[:, None] * pulled).to(d_q.dtype.element_ty)
        tl.store(d_q + to, d_query, mask=reads[:, None] & (d < WIDTH)[None, :])

        G = tl.load(d_states + at * (WIDTH * VALUES) + cells, mask=inside, other=0.0)
        peak = tl.load(peaks + at)
        there = t < size
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, ALIGNED
        )
        vt = load_rows(
            v, batch, head, first + t, there, 0, stride_vb, stride_vt, stride_vh, VALUES, V, ALIGNED
        )
        place = at * (HALO + CHUNK) + HALO
        push = tl.load(pushes + place + t)
        d_push, d_error, dk = _of_keys(kt, vt, M, G, push, peak, DOT, PRECISION)
        tl.store(d_pushes + place + t, d_push)
        shared = there & (t >= size - (window - 1)) & (first + size < end)
        mine = there & ~shared
        at_edge = at * HALO + HALO - size + t
        rows = batch * tokens + first + t
        store_keys(
            d_v, edge_v, -d_error, head, heads, rows, mine, at_edge, shared, 0, False, HALO, VALUES,
            V,
        )  # fmt: skip
        store_keys(
            d_k, edge_k, dk, head, heads, rows, mine, at_edge, shared, 0, False, HALO, WIDTH, D
        )
        if HALO > 0:
            kt = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            vt = load_older(
                v, tail_v, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_vb, stride_vt, stride_vh, VALUES, V, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            i = tl.arange(0, HALO)
            push = tl.load(pushes + place - HALO + i)
            d_push, d_error, dk = _of_keys(kt, vt, M, G, push, peak, DOT, PRECISION)
            tl.store(d_pushes + place - HALO + i, d_push)
            known = i - HALO >= 1 - window
            at_edge = at * HALO + i
            rows = batch * tokens + first + i - HALO
            store_keys(
                d_v, older_v, -d_error, head, heads, rows, known, at_edge, known, 0, True, HALO,
                VALUES, V,
            )  # fmt: skip
            store_keys(
                d_k, older_k, dk, head, heads, rows, known, at_edge, known, 0, True, HALO, WIDTH, D
            )


@triton.jit
def _line(slope, offset, next_slope, next_offset):
    """One after the other: x → slope·x + offset."""
    return next_slope * slope, next_slope * offset + next_offset


@triton.jit
def _of_writers(
    d_pushes, window_gates, at_gates, place, t, size, heads, window, known, GATES: tl.constexpr
):
    """Σ over lags of the window gate of tokens t and the gradient of U of the key it writes."""
    total = tl.zeros([t.shape[0], known.shape[0]], tl.float32)
    ok = ((t >= 0) & (t < size))[:, None] & known[None, :]
    lag = window * 0
    while lag < window:
        of_key = tl.load(d_pushes + (place[None, :] + (t - lag)[:, None]), mask=ok, other=0.0)
        if GATES:
            to = (at_gates + (t * heads)[:, None]) * window + lag
            total += of_key * tl.load(window_gates + to, mask=ok, other=0.0)
        else:
            total += of_key / window
        lag += 1
    return total


@triton.jit(do_not_specialize=SIZES)
def atlas_gates_back(
    step, decay, momentum, window_gates, cu, rates, d_rates, d_pushes, d_ends,
    d_step, d_decay, d_theta, d_gates, d_output,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, GATES: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One slot of HEADS heads: gradients of gates (B, T, H[, window]) from those of what
    `atlas_gates` made of them. Nothing is divided: a gate of 0 has a gradient.
    """
    slot = tl.program_id(0) // tl.cdiv(heads, HEADS)
    h = tl.program_id(0) % tl.cdiv(heads, HEADS) * HEADS + tl.arange(0, HEADS)  # [HEADS]
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, chunk, chunks, sequences, PACKED)
    t = tl.arange(0, CHUNK)  # [CHUNK]
    known = h < heads
    some = known & (size > 0)
    here = (t < size)[:, None] & known[None, :]
    of_chunk = ((batch * tokens + first).to(tl.int64) * heads + h)[None, :]
    at = of_chunk + (t * heads)[:, None]
    place = (slot * heads + h).to(tl.int64)  # [HEADS]
    start = (t == 0)[:, None]
    if DECAY:
        # E after token t: what reads at t + 1 add, or at the chunk's end M itself, and a times E
        # after t + 1.
        later = (t + 1 < size)[:, None] & known[None, :]
        final = (t == size - 1)[:, None]
        read = (t + 1 < CHUNK)[:, None] & here
        of_rates = (place * CHUNK)[None, :] + t[:, None]
        offset = tl.load(d_rates + (of_rates + 1), mask=read, other=0.0)
        of_last = tl.load(d_ends + place * 3, mask=some, other=0.0)
        offset += tl.where(final, of_last[None, :], 0.0)
        slope = tl.load(decay + (at + heads), mask=later, other=0.0)
        _, total = tl.associative_scan((slope, offset), 0, _line, reverse=True)
        rate = tl.load(rates + of_rates, mask=here, other=0.0)
        tl.store(d_decay + at, rate * total, mask=here)

    left = tl.load(
        momentum + (at + heads), mask=(t + 1 < size)[:, None] & known[None, :], other=1.0
    )
    left = tl.associative_scan(left, 0, times, reverse=True)  # of a token's S at the chunk's end
    of_keys = place * (HALO + CHUNK) + HALO
    share = _of_writers(
        d_pushes, window_gates, of_chunk, of_keys, t, size, heads, window, known, GATES
    )
    tl.store(d_step + at, left * share, mask=here)
    # What is left of S before token t is its momentum times what is left behind it.
    previous = ((t > 0) & (t <= size))[:, None] & known[None, :]
    offset = _of_writers(
        d_pushes, window_gates, of_chunk, of_keys, t - 1, size, heads, window, known, GATES
    )
    offset *= tl.load(step + (at - heads), mask=previous, other=0.0)
    of_first = tl.load(d_ends + place * 3 + 2, mask=some, other=0.0)
    offset += tl.where(start, of_first[None, :], 0.0)
    slope = tl.load(momentum + (at - heads), mask=previous, other=0.0)
    _, total = tl.associative_scan((slope, offset), 0, _line)
    tl.store(d_theta + at, total * left, mask=here)
    if GATES:
        s = left * tl.load(step + at, mask=here, other=0.0)
        lag = window * 0
        while lag < window:
            of_key = tl.load(
                d_pushes + (of_keys[None, :] + (t - lag)[:, None]), mask=here, other=0.0
            )
            tl.store(d_gates + (at * window + lag), s * of_key, mask=here)
            lag += 1
    of_output = tl.load(d_ends + place * 3 + 1, mask=some, other=0.0)
    of_output = tl.where((t == chunk - 1)[:, None], of_output[None, :], 0.0)
    tl.store(d_output + at, of_output, mask=here)
