"""What the reads of a chunk need of its gates alone, for a kernel that has no time to form it."""

import triton
import triton.language as tl

from .triton_chunks import load_band, load_sums, place_chunk, place_writes, shares

TABLES_RUNTIME = ("tokens", "heads", "sequences", "chunk", "chunks", "window")
BEHIND = tl.constexpr(
    -(1 << 24)
)  # below any sum of whole numbers of a slot, so that nothing is left
LOWEST = tl.constexpr(-32)  # exponent of the smallest scale of a row: less is as good as nothing


@triton.jit
def _scale(largest):
    """The power of two below each number, one over it, and its exponent."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, LOWEST), 126)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse, exponent.to(tl.float32)


@triton.jit
def _load_keys(
    whole, rest, band, row, tokens, first, size, window,
    DECAY: tl.constexpr, KEYS: tl.constexpr, OLDER: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Of KEYS rows of keys, the slot's own ones or OLDER ones: the last token that writes each, P
    there, and the two parts of its logarithm.
    """
    keys, begin, s = place_writes(tl.arange(0, KEYS), window, OLDER, CHUNK, PARTS)
    last = load_band(band, row, s - keys, window, tokens, first, s, size)
    last = tl.where(s >= begin, last, 0.0)
    v = last
    u = last
    if DECAY:
        v, u = load_sums(whole, rest, row, tokens, first, s, size)
    return s, last, v.to(tl.float32), u


@triton.jit
def _behind(of_keys, seen, low, r, inverse, DECAY: tl.constexpr):
    """P [queries, keys] over the scale of each query, all as if behind the window.

    low, r: the two parts of each query's logarithm over its scale.
    """
    s, last, v, u = of_keys
    if DECAY:
        part = tl.exp2(low[:, None] - v[None, :] + (r[:, None] - u[None, :])) * last[None, :]
    else:
        part = inverse[:, None] * last[None, :]
    return tl.where(seen[:, None] >= s[None, :], part, 0.0).to(tl.float16)


@triton.jit
def _store_shares(
    out, part, exact, rows, size, window, seen,
    KEYS: tl.constexpr, OLDER: tl.constexpr, LAGS: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """P of rows of keys: `part`, and over it on the diagonals of keys in the window, `exact`
    [queries, LAGS], what the band says.
    """
    to = rows * KEYS
    tl.store(out + (to[:, None] + tl.arange(0, KEYS)[None, :]), part)
    if LAGS > 0:
        tl.debug_barrier()  # other threads' numbers are replaced
        lag = tl.arange(0, LAGS)
        LENGTH: tl.constexpr = CHUNK // PARTS
        chunk = seen // LENGTH
        behind = seen - chunk * LENGTH  # tokens of the same chunk in front of the one that is seen
        cell = behind[:, None] - lag[None, :] + OLDER // PARTS
        inside = ((seen >= 0) & (seen < size))[:, None] & (lag < window - 1)[None, :]
        inside = inside & (cell >= 0) & (cell < KEYS // PARTS)
        cell += (chunk * (KEYS // PARTS))[:, None]
        tl.store(out + (to[:, None] + cell), exact, mask=inside)


@triton.jit(do_not_specialize=TABLES_RUNTIME)
def omega_tables(
    cu, whole, rest, m_whole, m_rest, carry, band, m_band, bound,
    shares_own, shares_older, rates, carries, scales,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr,
    LAGS: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head, as each query sees it: P of the chunk's own keys (slots, H, CHUNK,
    CHUNK) and of the older ones (slots, H, CHUNK, HALO), A and a, all over the query's scale, and
    the scales (slots, H, CHUNK), powers of two.

    P is fp16, which has three more bits than bf16; with a scale for each query it is in range.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    _, batch, _, first, size, _ = place_chunk(slot, cu, tokens, chunk, chunks, sequences, PACKED)
    if size > 0:
        row = batch * heads + head
        t = tl.arange(0, CHUNK)
        rows = (slot.to(tl.int64) * heads + head) * CHUNK + t
        seen = t - 1 if BEFORE else t  # the last token whose write is read
        there = (seen >= 0) & (seen < size)
        of_row = row.to(tl.int64) * tokens + first + seen
        # Loads first: each would else be waited for by itself.
        largest = tl.load(bound + of_row, mask=there, other=0.0)
        if not MOMENTUM:
            own = _load_keys(
                whole, rest, band, row, tokens, first, size, window, DECAY, CHUNK, 0, CHUNK, PARTS
            )
        if DECAY:
            w, r = load_sums(whole, rest, row, tokens, first, seen, size)
        scale, inverse, exponent = _scale(largest)
        tl.store(scales + rows, scale)
        exact = scale
        if LAGS > 0 and not MOMENTUM:
            lag = tl.arange(0, LAGS)
            of_lag = (row.to(tl.int64) * window + lag)[None, :] * tokens + (first + seen)[:, None]
            inside = there[:, None] & (lag < window - 1)[None, :]
            exact = tl.load(band + of_lag, mask=inside, other=0.0) * inverse[:, None]
            exact = exact.to(tl.float16)
        rate = inverse
        if DECAY:
            rate *= tl.exp2(w.to(tl.float32) + r)
        tl.store(rates + rows, rate)
        if MOMENTUM:
            a = tl.load(carry + of_row, mask=there, other=0.0)
            tl.store(carries + rows, a * inverse)
            P = shares(
                whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, seen,
                t, DECAY, True, False, WINDOW, PRECISION, CHUNK,
            )  # fmt: skip
            to = rows[:, None] * CHUNK + t[None, :]
            tl.store(shares_own + to, (P * inverse[:, None]).to(tl.float16))
            if HALO > 0:
                i = tl.arange(0, HALO)
                P = shares(
                    whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window,
                    seen, i - HALO, DECAY, True, False, WINDOW, PRECISION, CHUNK,
                )  # fmt: skip
                to = rows[:, None] * HALO + i[None, :]
                tl.store(shares_older + to, (P * inverse[:, None]).to(tl.float16))
        else:
            low = inverse
            rests = inverse
            if DECAY:  # queries behind the last token have read nothing
                low = tl.where(seen < size, w.to(tl.float32) - exponent, BEHIND)
                rests = r
            else:
                inverse = tl.where(seen < size, inverse, 0.0)
            part = _behind(own, seen, low, rests, inverse, DECAY)
            if HALO > 0:
                older = _load_keys(
                    whole, rest, band, row, tokens, first, size, window, DECAY, HALO, HALO, CHUNK,
                    PARTS,
                )  # fmt: skip
            _store_shares(
                shares_own, part, exact, rows, size, window, seen, CHUNK, 0, LAGS, CHUNK, PARTS
            )
            if HALO > 0:
                part = _behind(older, seen, low, rests, inverse, DECAY)
                _store_shares(
                    shares_older, part, exact, rows, size, window, seen, HALO, HALO, LAGS, CHUNK,
                    PARTS,
                )  # fmt: skip
