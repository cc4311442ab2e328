"""Forward of the Atlas memory where Newton–Schulz meets the end of each chunk.

    atlas_gates    once for every token: what reads find of M, what each write is worth in S
    atlas_walk     along a sequence: S, its orthogonal factor, M, and what the queries read

Notation is that of `eager.py`. M changes between two chunks alone. So all that is read of it at a
chunk's begin are a few rows with the decays up to each: the chunk's tokens but the last of a whole
chunk, which reads what its chunk wrote, and that last one of the chunk before. With `read_before`,
where a token reads what those before it left, they are the chunk's own tokens.

Memory and momentum are held as their transposes, Dv × D: then they, and what is written of the
errors, are left operands of products, which come from registers, and each right operand is a tile
of tokens as it was loaded, or its transpose. Products take operands in k's dtype and sum in fp32;
those of Newton–Schulz take COMPUTE.
"""

import triton
import triton.language as tl

from ..newton_schulz.triton_kernels import _gram as gram_of
from ..newton_schulz.triton_kernels import _norm as norm_of
from ..newton_schulz.triton_kernels import _polynomial as polynomial
from ..omega.triton_chunks import SIZES, load_older, load_rows, place_chunk, place_walk

WALK_RUNTIME = (
    *SIZES, "steps", "eps", "stride_qb", "stride_qt", "stride_qh",
    "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
)  # fmt: skip


@triton.jit
def _times(a, b):
    return a * b


@triton.jit(do_not_specialize=SIZES)
def atlas_gates(
    step, decay, momentum, window_gates, output_step, cu, sums, rates, pushes, ends,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, GATES: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One slot of HEADS heads. Gates come as (B, T, H[, window]).

    rates (slots, H, CHUNK): at j the product of the decays of the chunk's first j tokens. sums
    (B, H, T): the step of a token, and what is left of it in S at the chunk's end. pushes (slots,
    H, HALO + CHUNK): U of the last token, of the older keys first. ends (slots, H, 3): A and B of
    the last token, and between them the output step, 0 where the chunk is not whole.
    """
    slot = tl.program_id(0) // tl.cdiv(heads, HEADS)
    h = tl.program_id(0) % tl.cdiv(heads, HEADS) * HEADS + tl.arange(0, HEADS)  # [HEADS]
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, chunk, chunks, sequences, PACKED)
    t = tl.arange(0, CHUNK)  # [CHUNK]
    known = h < heads
    some = known & (size > 0)
    here = (t < size)[:, None] & known[None, :]
    at = ((batch * tokens + first + t).to(tl.int64) * heads)[:, None] + h[None, :]
    place = (slot * heads + h).to(tl.int64)  # [HEADS]
    of_slot = (place * CHUNK)[None, :] + t[:, None]

    rate = tl.full([HEADS], 1.0, tl.float32)
    before = tl.full([CHUNK, HEADS], 1.0, tl.float32)
    if DECAY:
        inside = ((t > 0) & (t <= size))[:, None] & known[None, :]
        before = tl.load(decay + (at - heads), mask=inside, other=1.0)
        before = tl.associative_scan(before, 0, _times)
        a = tl.load(decay + at, mask=here, other=1.0)
        a = tl.associative_scan(a, 0, _times)
        rate = tl.sum(tl.where((t == size - 1)[:, None], a, 0.0), 0)
    tl.store(rates + of_slot, before, mask=(t >= 0)[:, None] & some[None, :])
    out = tl.load(
        output_step + ((batch * tokens + first + chunk - 1).to(tl.int64) * heads + h),
        mask=some & (size == chunk), other=0.0,
    )  # fmt: skip
    m = tl.load(momentum + at, mask=here, other=1.0)
    m = tl.associative_scan(m, 0, _times)
    drop = tl.sum(tl.where((t == size - 1)[:, None], m, 0.0), 0)
    tl.store(ends + place * 3, rate, mask=some)
    tl.store(ends + place * 3 + 1, out, mask=some)
    tl.store(ends + place * 3 + 2, drop, mask=some)

    later = (t + 1 < size)[:, None] & known[None, :]
    left = tl.load(momentum + (at + heads), mask=later, other=1.0)
    left = tl.associative_scan(left, 0, _times, reverse=True)
    row = (batch * heads + h).to(tl.int64) * tokens + first  # [HEADS]
    s = tl.load(step + at, mask=here, other=0.0)
    tl.store(sums + (row[None, :] + t[:, None]), left * s, mask=here)
    tl.debug_barrier()  # what other threads stored is read from here on
    to = (place * (HALO + CHUNK))[None, :]
    u = _pushes(
        sums, window_gates, batch, first, size, tokens, heads, window, h, known, row, t, GATES
    )
    tl.store(pushes + (to + (HALO + t)[:, None]), u, mask=(t >= 0)[:, None] & some[None, :])
    if HALO > 0:
        i = tl.arange(0, HALO)
        u = _pushes(
            sums, window_gates, batch, first, size, tokens, heads, window, h, known, row, i - HALO,
            GATES,
        )  # fmt: skip
        tl.store(pushes + (to + i[:, None]), u, mask=(i >= 0)[:, None] & some[None, :])


@triton.jit
def _pushes(
    sums, window_gates, batch, first, size, tokens, heads, window, h, known, row, keys,
    GATES: tl.constexpr,
):  # fmt: skip
    """U of a chunk's last token for some keys, which count from the chunk's first."""
    total = tl.zeros([keys.shape[0], h.shape[0]], tl.float32)
    lag = window * 0
    while lag < window:
        t = keys + lag  # who writes the key
        ok = ((t >= 0) & (t < size))[:, None] & known[None, :]
        share = tl.load(sums + (row[None, :] + t[:, None]), mask=ok, other=0.0)
        if GATES:
            at = ((batch * tokens + first + t).to(tl.int64) * heads)[:, None] + h[None, :]
            total += share * tl.load(window_gates + (at * window + lag), mask=ok, other=0.0)
        else:
            total += share / window
        lag += 1
    return total


@triton.jit
def orthogonal(
    s, table, steps, eps, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MIRROR: tl.constexpr,
    TALL: tl.constexpr,
):  # fmt: skip
    """Newton–Schulz of a tile in fp32, in COMPUTE; MIRROR as in `newton_schulz`. TALL: it has more
    rows than columns, and is taken transposed, since the larger Gram matrix would be singular.
    """
    if TALL:
        s = tl.trans(s)
    x = (s / (norm_of(s) + eps)).to(COMPUTE)
    if MIRROR:
        mirrored = tl.trans(x)
    for j in tl.range(0, steps, num_stages=1):
        a = tl.load(table + 3 * j)
        b = tl.load(table + 3 * j + 1)
        c = tl.load(table + 3 * j + 2)
        gram = gram_of(x, mirrored if MIRROR else tl.trans(x), PRECISION)
        z = polynomial(gram, b, c, PRECISION).to(COMPUTE)
        x = tl.dot(z, x, a * x.to(tl.float32), input_precision=PRECISION).to(COMPUTE)
        if MIRROR:
            ahead = a * mirrored.to(tl.float32)
            mirrored = tl.dot(mirrored, z, ahead, input_precision=PRECISION).to(COMPUTE)
    return tl.trans(x) if TALL else x


@triton.jit
def cells_of(D: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """Places of a tile [V, D] in a state (D × Dv), and which of them exist."""
    d = tl.arange(0, D)
    e = tl.arange(0, V)
    return d[None, :] * VALUES + e[:, None], (d < WIDTH)[None, :] & (e < VALUES)[:, None]


@triton.jit
def _pushed(k, v, M, push, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """(U ∘ R)ᵀ K [V, D] of some keys, whose errors are R."""
    error = -tl.trans(v).to(tl.float32)  # [V, keys]
    if not DOT:
        error += tl.dot(M, tl.trans(k), input_precision=PRECISION)
    return tl.dot((error * push[None, :]).to(k.dtype), k, input_precision=PRECISION)


@triton.jit(do_not_specialize=WALK_RUNTIME)
def atlas_walk(
    q, k, v, tail_k, tail_v, tail_length, cu, rates, pushes, ends, table, initial_state,
    initial_momentum, states, momenta, y, state, velocity,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32, steps: tl.int32, eps: tl.float32,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    DOT: tl.constexpr, BEFORE: tl.constexpr, INITIAL: tl.constexpr,
    INITIAL_MOMENTUM: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, ALIGNED: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr,
    HALO: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr, NS_PRECISION: tl.constexpr,
    MIRROR: tl.constexpr,
):  # fmt: skip
    """The memory of one head of one sequence, through all of its chunks.

    y (B, T, H, Dv). state, velocity (N, H, D, Dv), fp32: after the last token. M is in state all
    the time: registers are what bounds how many programs hide each other's waiting. With KEEP,
    which reads nothing, states (slots, H, D, Dv) has M at each chunk's begin and momenta S at its
    end, both in fp32.
    """
    _, head, sequence, batch, begin, end, slot0, count = place_walk(
        cu, tokens, heads, chunk, chunks, VALUES, V, PACKED
    )
    cells, inside = cells_of(D, V, WIDTH, VALUES)
    own = (sequence.to(tl.int64) * heads + head) * (WIDTH * VALUES)
    parked = state + own + cells
    S = tl.zeros([V, D], tl.float32)
    M = S
    if INITIAL:
        M = tl.load(initial_state + own + cells, mask=inside, other=0.0)
    if INITIAL_MOMENTUM:
        S = tl.load(initial_momentum + own + cells, mask=inside, other=0.0)
    tl.store(parked, M, mask=inside)
    tl.debug_barrier()  # what other threads stored is read from here on
    t = tl.arange(0, CHUNK)
    e = tl.arange(0, V)
    for number in tl.range(0, count, num_stages=1):
        first = begin + number * chunk
        size = tl.minimum(chunk, end - first)
        there = t < size
        at = (slot0 + number).to(tl.int64) * heads + head
        M = tl.load(parked, mask=inside, other=0.0)
        low = M.to(k.dtype.element_ty)
        if KEEP:
            tl.store(states + at * (WIDTH * VALUES) + cells, M, mask=inside)
        else:
            # Rows as the head of this file has them, from token `row` on.
            row = first + t - (0 if BEFORE else 1)
            reads = (t < chunk) & (row >= begin) & (row < end)
            qt = load_rows(
                q, batch, head, row, reads, 0, stride_qb, stride_qt, stride_qh, WIDTH, D, ALIGNED
            )
            rate = tl.load(rates + at * CHUNK + t)
            read = rate[None, :] * tl.dot(low, tl.trans(qt), input_precision=PRECISION)
            to = ((batch * tokens + row).to(tl.int64) * heads + head)[:, None] * VALUES
            mask = reads[:, None] & (e < VALUES)[None, :]
            tl.store(y + (to + e[None, :]), tl.trans(read).to(y.dtype.element_ty), mask=mask)
        kt = load_rows(
            k, batch, head, first + t, there, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, ALIGNED
        )
        vt = load_rows(
            v, batch, head, first + t, there, 0, stride_vb, stride_vt, stride_vh, VALUES, V, ALIGNED
        )
        push = tl.load(pushes + at * (HALO + CHUNK) + HALO + t)
        S = tl.load(ends + at * 3 + 2) * S - _pushed(kt, vt, low, push, DOT, PRECISION)
        if HALO > 0:
            kt = load_older(
                k, tail_k, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_kb, stride_kt, stride_kh, WIDTH, D, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            vt = load_older(
                v, tail_v, tail_length, sequence, batch, head, heads, first, begin, window - 1, 0,
                stride_vb, stride_vt, stride_vh, VALUES, V, HALO, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            push = tl.load(pushes + at * (HALO + CHUNK) + tl.arange(0, HALO))
            S -= _pushed(kt, vt, low, push, DOT, PRECISION)
        if KEEP:
            tl.store(momenta + at * (WIDTH * VALUES) + cells, S, mask=inside)
        tl.debug_barrier()  # M is loaded again: no register holds it in between
        if size == chunk:
            O = orthogonal(S, table, steps, eps, COMPUTE, NS_PRECISION, MIRROR, VALUES > WIDTH)
            M = tl.load(ends + at * 3) * tl.load(parked, mask=inside, other=0.0)
            M += tl.load(ends + at * 3 + 1) * O.to(tl.float32)
        else:
            M = tl.load(ends + at * 3) * tl.load(parked, mask=inside, other=0.0)
        tl.store(parked, M, mask=inside)
        tl.debug_barrier()
    tl.store(velocity + own + cells, S, mask=inside)
    if not KEEP and not BEFORE:
        # The last token of a whole last chunk reads what it left.
        if (count > 0) & ((end - begin) % chunk == 0):
            d = tl.arange(0, D)
            of_query = batch.to(tl.int64) * stride_qb + head * stride_qh
            of_query += (end - 1).to(tl.int64) * stride_qt
            query = tl.load(q + (of_query + d), mask=d < WIDTH, other=0.0).to(tl.float32)
            M = tl.load(parked, mask=inside, other=0.0)
            read = tl.sum(M * query[None, :], 1)
            to = ((batch * tokens + end - 1).to(tl.int64) * heads + head) * VALUES
            tl.store(y + (to + e), read.to(y.dtype.element_ty), mask=e < VALUES)
