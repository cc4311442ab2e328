"""What the reads of a chunk need of its gates alone, for a kernel that has no time to form it."""

import triton
import triton.language as tl

from .triton_chunks import load_sums, place_chunk, shares

TABLES_RUNTIME = ("tokens", "heads", "sequences", "chunk", "chunks", "window")


LOWEST = tl.constexpr(-32)  # exponent of the smallest scale of a row: less is as good as nothing


@triton.jit
def _scale(largest):
    """The power of two below each number, and one over it; 1 where there is no such number."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, LOWEST), 126)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return scale, ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=TABLES_RUNTIME)
def omega_tables(
    cu, whole, rest, m_whole, m_rest, carry, band, m_band, bound,
    shares_own, shares_older, rates, carries, scales,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, BEFORE: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, HALO: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
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
        at = slot.to(tl.int64) * heads + head
        t = tl.arange(0, CHUNK)
        seen = t - 1 if BEFORE else t  # the last token whose write is read
        seen_there = (seen >= 0) & (seen < size)
        of_row = row.to(tl.int64) * tokens + first + seen
        scale, inverse = _scale(tl.load(bound + of_row, mask=seen_there, other=0.0))
        tl.store(scales + at * CHUNK + t, scale)
        part = shares(
            whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, seen, t,
            DECAY, MOMENTUM, False, WINDOW, PRECISION, CHUNK,
        )  # fmt: skip
        to = at * (CHUNK * CHUNK) + t[:, None] * CHUNK + t[None, :]
        tl.store(shares_own + to, (part * inverse[:, None]).to(tl.float16))
        if HALO > 0:
            i = tl.arange(0, HALO)
            part = shares(
                whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, seen,
                i - HALO, DECAY, MOMENTUM, False, WINDOW, PRECISION, CHUNK,
            )  # fmt: skip
            to = at * (CHUNK * HALO) + t[:, None] * HALO + i[None, :]
            tl.store(shares_older + to, (part * inverse[:, None]).to(tl.float16))
        rate = inverse
        if DECAY:
            w, r = load_sums(whole, rest, row, tokens, first, seen, size)
            rate *= tl.exp2(w.to(tl.float32) + r)
        tl.store(rates + at * CHUNK + t, rate)
        if MOMENTUM:
            a = tl.load(carry + of_row, mask=seen_there, other=0.0)
            tl.store(carries + at * CHUNK + t, a * inverse)
