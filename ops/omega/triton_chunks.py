"""What the kernels of the Omega rule share: where a chunk lies, its rows, decays, and weights P.

A *slot* is one chunk of one sequence, a *row* one head of one row of the batch. Gates come as
`omega_gates` leaves them, a row's tokens side by side. Where PARTS > 1, that many short chunks are
taken at once as if they were one, and a slot has all of them: see `place_writes`.

Products of decays are not scanned over two tokens. Each token holds the logarithm to base 2 of the
product from its chunk's first token on, in two parts: a whole number that is exact, and a small
rest. The decays after token s up to t are then 2 to the difference, to about 1e-6 whatever lies
before s; a decay of 0 is a whole number so low that nothing is left.
"""

import triton
import triton.language as tl

SIZES = ("tokens", "heads", "sequences", "chunk", "chunks", "window")  # run-time, of every kernel
ZERO = tl.constexpr(1 << 16)  # exponent of a decay of 0, beyond any sum of real ones


@triton.jit
def place_chunk(slot, cu, tokens, chunk, chunks, sequences, PACKED: tl.constexpr):
    """Of a slot: its sequence, row of the batch, number in the sequence; its first token there,
    its tokens (none: nothing to do), and the sequence's first token.

    Sequence s of packed ones owns the slots from cu[s] // chunk + s on.
    """
    begin = tokens * 0
    batch = begin
    end = tokens
    if PACKED:
        low = begin
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.load(cu + middle) // chunk + middle <= slot
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        sequence = low
        begin = tl.load(cu + sequence)
        end = tl.load(cu + sequence + 1)
        number = slot - (begin // chunk + sequence)
    else:
        sequence = slot // chunks
        number = slot % chunks
        batch = sequence
    first = begin + number * chunk
    return sequence, batch, number, first, tl.minimum(chunk, end - first), begin


@triton.jit
def place_walk(
    cu, tokens, heads, chunk, chunks, VALUES: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr
):
    """Of a program that walks along a sequence with V columns: its first column, head, sequence and
    row of the batch; the sequence's first token, the one behind its last, its first slot and how
    many it has.
    """
    blocks = tl.cdiv(VALUES, V)
    v0 = tl.program_id(0) % blocks * V
    head = tl.program_id(0) // blocks % heads
    sequence = tl.program_id(0) // blocks // heads
    batch = sequence
    begin = tokens * 0
    end = tokens
    slot = sequence * chunks
    if PACKED:
        batch = begin
        begin = tl.load(cu + sequence)
        end = tl.load(cu + sequence + 1)
        slot = begin // chunk + sequence
    return v0, head, sequence, batch, begin, end, slot, tl.cdiv(end - begin, chunk)


@triton.jit
def state_cells(D: tl.constexpr, V: tl.constexpr, v0, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """Places of a tile [D, V] in a state (D × Dv), and which of them exist."""
    d = tl.arange(0, D)
    e = v0 + tl.arange(0, V)
    return d[:, None] * VALUES + e[None, :], (d < WIDTH)[:, None] & (e < VALUES)[None, :]


@triton.jit
def load_rows(
    x, batch, head, rows, there, col0, stride_b, stride_t, stride_h,
    WIDTH: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Tokens `rows` of one head, columns from `col0` on, as [rows, COLS]; zeros where `there` is
    False and past WIDTH.
    """
    cols = col0 + tl.arange(0, COLS)  # [COLS]
    at = batch.to(tl.int64) * stride_b + head * stride_h + rows.to(tl.int64)[:, None] * stride_t
    pointers = x + (at + cols[None, :])
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (16, 16))
    return tl.load(pointers, mask=there[:, None] & (cols < WIDTH)[None, :], other=0.0)


@triton.jit
def place_writes(
    cells, window, OLDER: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Of rows of keys: their tokens, the first one of the chunk that writes each, and the last one
    that does. All count from the first token of the slot.

    With OLDER = 0 rows are the slot's own tokens. Else they are OLDER older ones, as many of each
    of its PARTS chunks, the oldest first: whoever writes them again finds another memory.
    """
    LENGTH: tl.constexpr = CHUNK // PARTS
    if OLDER == 0:
        begin = cells // LENGTH * LENGTH
        keys = cells
    else:
        EACH: tl.constexpr = OLDER // PARTS
        begin = cells // EACH * LENGTH
        keys = begin - EACH + cells % EACH
    return keys, begin, tl.minimum(keys + window - 1, begin + LENGTH - 1)


@triton.jit
def load_older(
    x, tail, tail_length, sequence, batch, head, heads, first, begin, older, col0,
    stride_b, stride_t, stride_h,
    WIDTH: tl.constexpr, COLS: tl.constexpr, HALO: tl.constexpr, ALIGNED: tl.constexpr,
    TAIL: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """The `older` tokens in front of token `first` as the last rows of [HALO, COLS], else zeros."""
    i = tl.arange(0, HALO) - HALO  # [HALO], −1 is the newest
    return load_tokens(
        x, tail, tail_length, sequence, batch, head, heads, i, i >= -older, first, begin, older,
        col0, stride_b, stride_t, stride_h, WIDTH, COLS, ALIGNED, TAIL, LENGTHS,
    )  # fmt: skip


@triton.jit
def load_tokens(
    x, tail, tail_length, sequence, batch, head, heads, i, known, first, begin, older, col0,
    stride_b, stride_t, stride_h,
    WIDTH: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr,
):  # fmt: skip
    """Tokens `i`, counted from token `first`, of a sequence; zeros where `known` is False.

    Those in front of the sequence are in `tail` (N, older, H, WIDTH), the newest last.
    """
    rows = first + i
    there = (rows >= begin) & known
    tile = load_rows(
        x, batch, head, rows, there, col0, stride_b, stride_t, stride_h, WIDTH, COLS, ALIGNED
    )
    if TAIL:
        length = older
        if LENGTHS:
            length = tl.minimum(tl.load(tail_length + sequence), older)
        before = rows - begin  # negative where the row is in the tail
        there = (before < 0) & (before >= -length) & known
        cols = col0 + tl.arange(0, COLS)
        at = ((sequence.to(tl.int64) * older + older + before)[:, None] * heads + head) * WIDTH
        mask = there[:, None] & (cols < WIDTH)[None, :]
        tile += tl.load(tail + (at + cols[None, :]), mask=mask, other=0.0)
    return tile


@triton.jit
def load_sums(whole, rest, row, tokens, first, at, size):
    """The two parts of the logarithm at tokens `at` of a chunk; 0 in front of it."""
    inside = (at >= 0) & (at < size)
    where = row.to(tl.int64) * tokens + first + at
    return tl.load(whole + where, mask=inside, other=0), tl.load(
        rest + where, mask=inside, other=0.0
    )


@triton.jit
def load_rate(whole, rest, row, tokens, first, at, size, DECAY: tl.constexpr):
    """A at tokens `at` of a chunk; 1 in front of it."""
    rate = tl.full(at.shape, 1.0, tl.float32)
    if DECAY:
        w, r = load_sums(whole, rest, row, tokens, first, at, size)
        rate = tl.exp2(w.to(tl.float32) + r)
    return rate


@triton.jit
def load_carry(carry, row, tokens, first, at, size):
    """a at tokens `at` of a chunk; 0 in front of it."""
    inside = (at >= 0) & (at < size)
    return tl.load(carry + row.to(tl.int64) * tokens + first + at, mask=inside, other=0.0)


@triton.jit
def decays(later, whole, rest, whole_before, rest_before):
    """The product of decays between two tokens, 0 where `later` is False."""
    exponent = (whole - whole_before).to(tl.float32) + (rest - rest_before)
    return tl.where(later, tl.exp2(tl.where(later, exponent, 0.0)), 0.0)


@triton.jit
def _down(x, FIRST: tl.constexpr):
    """A vector as a column, or as a row."""
    return x[:, None] if FIRST else x[None, :]


@triton.jit
def table_of_decays(
    whole, rest, row, tokens, first, at, after, size, DECAY: tl.constexpr,
    AFTER_FIRST: tl.constexpr,
):  # fmt: skip
    """[at, after] or [after, at]: the product of decays of the tokens behind `after` up to `at`; 0
    where `at` is in front of it, or behind the chunk.
    """
    later = _down(at, not AFTER_FIRST) >= _down(after, AFTER_FIRST)
    later = later & _down(at < size, not AFTER_FIRST)
    if DECAY:
        w, r = load_sums(whole, rest, row, tokens, first, at, size)
        v, s = load_sums(whole, rest, row, tokens, first, after, size)
        table = decays(
            later, _down(w, not AFTER_FIRST), _down(r, not AFTER_FIRST),
            _down(v, AFTER_FIRST), _down(s, AFTER_FIRST),
        )  # fmt: skip
    else:
        table = tl.where(later, 1.0, 0.0)
    return table


@triton.jit
def load_band(band, row, lag, window, tokens, first, at, size):
    """P of tokens `at` of a chunk and of the key `lag` before each; 0 outside the chunk."""
    inside = (at >= 0) & (at < size)
    where = (row.to(tl.int64) * window + lag) * tokens + first + at
    return tl.load(band + where, mask=inside, other=0.0)


@triton.jit
def _with_band(
    total, band, row, lag, window, tokens, first, size, at, keys, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    here = _down(at, not KEYS_FIRST) - _down(keys, KEYS_FIRST) == lag
    exact = load_band(band, row, lag, window, tokens, first, at, size)
    return tl.where(here, _down(exact, not KEYS_FIRST), total)


@triton.jit
def shares(
    whole, rest, m_whole, m_rest, band, m_band, row, tokens, first, size, window, at, keys,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, KEYS_FIRST: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """P [at, keys] or [keys, at]: what is left at a token of all that was written of a key.

    Both count from the chunk's first token, keys may be older. The last token s that writes a key
    is window − 1 behind it: later tokens have what P was there, decayed. Up to it P is the band.
    WINDOW: the window, or 0 for one that is not known to the compiler.
    """
    s = keys + (window - 1)
    total = table_of_decays(whole, rest, row, tokens, first, at, s, size, DECAY, KEYS_FIRST)
    last = load_band(band, row, window - 1, window, tokens, first, s, size)
    if MOMENTUM:
        t = tl.arange(0, CHUNK)
        in_state = table_of_decays(whole, rest, row, tokens, first, at, t, size, DECAY, KEYS_FIRST)
        in_momentum = table_of_decays(
            m_whole, m_rest, row, tokens, first, t, s, size, True, KEYS_FIRST
        )
        if KEYS_FIRST:
            both = tl.dot(in_momentum, in_state, input_precision=PRECISION)
        else:
            both = tl.dot(in_state, in_momentum, input_precision=PRECISION)
        pushed = load_band(m_band, row, window - 1, window, tokens, first, s, size)
        total = total * _down(last - pushed, KEYS_FIRST) + both * _down(pushed, KEYS_FIRST)
    else:
        total = total * _down(last, KEYS_FIRST)
    if WINDOW > 0:
        for lag in tl.static_range(WINDOW - 1):
            total = _with_band(
                total, band, row, lag, window, tokens, first, size, at, keys, KEYS_FIRST
            )
    else:
        lag = window * 0
        while lag < window - 1:
            total = _with_band(
                total, band, row, lag, window, tokens, first, size, at, keys, KEYS_FIRST
            )
            lag += 1
    return total
