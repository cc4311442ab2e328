"""Short chunks of one tile, untied: what each error owes to those of the chunks before it.

A tile has PARTS chunks. Each of them writes the memory that the next one meets, so that the errors
of all its rows of keys (`triton_chunks.place_writes`) obey

    R + N R = E    E = A ∘ K M − V, with M and the decay A up to the row's chunk, from the tile's
                   begin; N holds P of the last token before the row's chunk times K Kᵀ

N goes from each chunk to later ones alone, so (I + N)⁻¹ = I − S, and S follows block by block:

    S_gj = N_gj − Σ_{j < m < g} N_gm S_mj

S depends on keys and gates alone: every tile has a program of its own, and a walk along the
sequence then takes R = E − S E in one step. (I is left out: what an error owes to itself is exact.)
"""

import triton
import triton.language as tl

from .triton_chunks import load_tokens, place_chunk, place_writes

SOLVE_RUNTIME = (
    "tokens", "heads", "sequences", "chunk", "chunks", "window",
    "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
)  # fmt: skip


@triton.jit
def _cells(i, part, LENGTH: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr):
    """Of rows of a chunk: where they are among all of a tile, own ones first, and which exist.

    A chunk has 2 LENGTH rows: its own tokens, and as many older ones, of which the last EACH count.
    """
    own = i < LENGTH
    older = i - (2 * LENGTH - EACH)
    cells = tl.where(own, part * LENGTH + i, CHUNK + part * EACH + older)
    return cells, own | (older >= 0)


@triton.jit
def _from_begin(rates, scales, row, start, BEFORE: tl.constexpr):
    """A at the begin of the chunks whose first tokens are `start`."""
    at = row + (start if BEFORE else start - 1)
    rate = tl.load(rates + at, mask=start > 0, other=1.0)
    return rate * tl.load(scales + at, mask=start > 0, other=1.0)


@triton.jit(do_not_specialize=SOLVE_RUNTIME)
def omega_solve(
    k, v, tail_k, tail_v, tail_length, cu, shares_own, shares_older, rates, scales,
    solved, begins, k_older, v_older,
    tokens: tl.int32, heads: tl.int32, sequences: tl.int32, chunk: tl.int32, chunks: tl.int32,
    window: tl.int32,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, LENGTHS: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, HALO: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile and head. shares_own, shares_older, rates, scales: from `omega_tables`.

    solved (slots, H, rows, rows): −S of the CHUNK + HALO rows, own ones first. begins (slots, H,
    HALO + CHUNK): A of each, older ones first, as `writes` has them. k_older, v_older (slots, HALO,
    H, ·): the older rows.
    """
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    sequence, batch, _, first, size, begin = place_chunk(
        slot, cu, tokens, chunk, chunks, sequences, PACKED
    )
    if size > 0:
        LENGTH: tl.constexpr = CHUNK // PARTS
        EACH: tl.constexpr = HALO // PARTS
        ROWS: tl.constexpr = CHUNK + HALO
        at = slot.to(tl.int64) * heads + head
        to = solved + at * (ROWS * ROWS)
        i = tl.arange(0, 2 * LENGTH)
        own = i < LENGTH
        token = tl.where(own, i, i - 2 * LENGTH)  # from the chunk's first on

        # Loads first: each would else be waited for by itself.
        keys = ()
        for g in tl.static_range(PARTS):
            known = (g * LENGTH + token < size) & (token > -window)
            tile = load_tokens(
                k, tail_k, tail_length, sequence, batch, head, heads, g * LENGTH + token, known,
                first, begin, window - 1, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, ALIGNED,
                TAIL and g == 0, LENGTHS,
            )  # fmt: skip
            keys += (tile,)
        scale = ()  # of P as each chunk finds it, and P of the rows of those before
        parts = ()
        for g in tl.static_range(1, PARTS):
            of_query = at * CHUNK + (g * LENGTH if BEFORE else g * LENGTH - 1)
            scale += (tl.load(scales + of_query),)
            for j in tl.static_range(g):
                cols, exist = _cells(i, j, LENGTH, EACH, CHUNK)
                part = tl.load(shares_own + (of_query * CHUNK + cols), mask=own, other=0.0)
                if HALO > 0:
                    of_row = of_query * HALO + cols - CHUNK
                    part += tl.load(shares_older + of_row, mask=exist & (i >= LENGTH), other=0.0)
                parts += (part,)
        cells = tl.arange(0, CHUNK)
        from_begin = _from_begin(rates, scales, at * CHUNK, cells // LENGTH * LENGTH, BEFORE)
        if HALO > 0:
            older = tl.arange(0, HALO)
            newer, start, _last = place_writes(older, window, HALO, CHUNK, PARTS)
            known = (newer < size) & (start - newer < window)
            key = load_tokens(
                k, tail_k, tail_length, sequence, batch, head, heads, newer, known, first, begin,
                window - 1, 0, stride_kb, stride_kt, stride_kh, WIDTH, D, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            value = load_tokens(
                v, tail_v, tail_length, sequence, batch, head, heads, newer, known, first, begin,
                window - 1, 0, stride_vb, stride_vt, stride_vh, VALUES, V, ALIGNED, TAIL, LENGTHS,
            )  # fmt: skip
            older_from_begin = _from_begin(rates, scales, at * CHUNK, start, BEFORE)
            row = ((slot.to(tl.int64) * HALO + older) * heads + head)[:, None]
            d = tl.arange(0, D)[None, :]
            e = tl.arange(0, V)[None, :]
            tl.store(k_older + (row * WIDTH + d), key, mask=d < WIDTH)
            tl.store(v_older + (row * VALUES + e), value, mask=e < VALUES)
            tl.store(begins + (at * ROWS + older), older_from_begin)
        tl.store(begins + (at * ROWS + HALO + cells), from_begin)
        for row in tl.range(0, ROWS, 16):
            rows = (row + tl.arange(0, 16))[:, None] * ROWS
            zeros = tl.zeros([16, 16], solved.dtype.element_ty)
            for col in tl.static_range(0, ROWS, 16):
                tl.store(to + (rows + (col + tl.arange(0, 16))[None, :]), zeros)
        tl.debug_barrier()  # other threads write between the zeros

        # −S, column after column of blocks, so that few are at hand; all of −N for what follows.
        weights = ()
        for j in tl.static_range(PARTS - 2, -1, -1):
            cols, exist = _cells(i, j, LENGTH, EACH, CHUNK)
            column = ()
            found = ()
            for g in tl.static_range(j + 1, PARTS):
                part = parts[g * (g - 1) // 2 + j].to(tl.float32) * scale[g - 1]
                block = tl.dot(keys[g], tl.trans(keys[j]), input_precision=PRECISION)
                block *= -part[None, :]
                column += (block.to(k.dtype.element_ty),)
                for m in tl.static_range(j + 1, g):
                    weight = weights[(PARTS - 2 - m) * (PARTS - 1 - m) // 2 + g - m - 1]
                    block += tl.dot(weight, found[m - j - 1], input_precision=PRECISION)
                found += (block.to(k.dtype.element_ty),)
                rows, there = _cells(i, g, LENGTH, EACH, CHUNK)
                tl.store(
                    to + (rows[:, None] * ROWS + cols[None, :]), found[g - j - 1],
                    mask=there[:, None] & exist[None, :],
                )  # fmt: skip
            weights += column
