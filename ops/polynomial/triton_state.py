"""Reads and updates of a memory of symmetric features up to degree 2, and the gradient of x.

Tiles of φ are built where they are multiplied, as products of a column of x with the rest of it, by
the steps of `triton_rows`; no feature goes to memory. A state that they are multiplied with lies
there as tiles of x's dtype with the weights multiplied in, by `pack_steps` and `pack_square`.

In 16 bits x goes through a product with the unit matrix first, which is exact. It leaves x as
accumulators lie, and these, rounded, wgmma takes as its left operand from registers: else each tile
of φ would be laid out anew through shared memory. One thread then also holds the same places of the
two halves of a row, so that exchanging them moves nothing. A row of x that holds a NaN or an
infinity becomes NaN.
"""

import triton
import triton.language as tl

from ..common import load_tile
from .triton_rows import ROOT2, place_of, root, row_of

COEFFICIENTS = ("stride_ah", "stride_ar")
STATE = ("stride_sb", "stride_sh", "stride_sr")
X = ("stride_xb", "stride_xt", "stride_xh")
ROWS = ("stride_yb", "stride_yt", "stride_yh")
PACK_RUNTIME = ("heads", *STATE, *COEFFICIENTS)
READ_RUNTIME = ("tokens", "heads", "tiles", *X, *STATE, *COEFFICIENTS)
UPDATE_RUNTIME = ("tokens", "heads", *X, *ROWS, *COEFFICIENTS)
PULL_RUNTIME = ("tokens", "heads", "tiles", *X, *ROWS, *STATE, *COEFFICIENTS)


@triton.jit
def _state_rows(state, head, heads, rows, cols, exists, stride_sb, stride_sh, stride_sr):
    """Some rows and columns of a head's state in fp32, zeros where there is nothing."""
    at = (head // heads) * stride_sb + (head % heads) * stride_sh
    at += rows.to(tl.int64)[:, None] * stride_sr + cols[None, :]
    return tl.load(state + at, mask=exists, other=0.0)


@triton.jit(do_not_specialize=PACK_RUNTIME)
def pack_steps(
    state, a, packed,
    heads: tl.int32, stride_sb: tl.int64, stride_sh: tl.int64, stride_sr: tl.int64,
    stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """A state (B, H, D, VALUES) into (B·H, blocks of V columns, STEPS, P, V), weights within.

    Without PAIRS the only step is the last one, of the numbers by themselves.
    """
    BLOCKS: tl.constexpr = (VALUES + V - 1) // V
    H: tl.constexpr = P // 2
    number = tl.program_id(0).to(tl.int64)
    step = (number % STEPS).to(tl.int32)
    head = number // (STEPS * BLOCKS)
    of_pairs = 0.0
    of_linear = 0.0
    if PAIRS:
        of_pairs = root(a, 2, head % heads, stride_ah, stride_ar, DEFAULTS)
    else:
        step += H + 1
    if LINEAR:
        of_linear = root(a, 1, head % heads, stride_ah, stride_ar, DEFAULTS)
    c = tl.arange(0, P)
    v = tl.arange(0, V)
    cols = (number // STEPS % BLOCKS).to(tl.int32) * V + v
    row, weight, exists = row_of(
        step, c, of_pairs, of_linear, WIDTH, H, CONSTANT, CONSTANT + LINEAR * WIDTH
    )
    there = exists[:, None] & (cols < VALUES)[None, :]
    tile = _state_rows(state, head, heads, row, cols, there, stride_sb, stride_sh, stride_sr)
    tile = tile * weight[:, None]  # [P, V]
    to = packed + number * (P * V) + c[:, None] * V + v[None, :]
    tl.store(to, tl.where(there, tile, 0.0).to(packed.dtype.element_ty))


@triton.jit(do_not_specialize=PACK_RUNTIME)
def pack_square(
    state, a, packed,
    heads: tl.int32, stride_sb: tl.int64, stride_sh: tl.int64, stride_sr: tl.int64,
    stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """A state as `pull` multiplies with it, (B·H, blocks of V columns, STEPS, V, P).

    Step i has what the derivatives of x_i x_c by x_c are multiplied with, for all c: a pair comes
    twice, a square once and doubled. With LINEAR the last step has the numbers by themselves.
    """
    BLOCKS: tl.constexpr = (VALUES + V - 1) // V
    number = tl.program_id(0).to(tl.int64)
    step = (number % STEPS).to(tl.int32)
    head = number // (STEPS * BLOCKS)
    c = tl.arange(0, P)
    v = tl.arange(0, V)
    cols = (number // STEPS % BLOCKS).to(tl.int32) * V + v
    there = (c < WIDTH)[:, None] & (cols < VALUES)[None, :]
    row = tl.zeros([P], tl.int32)
    weight = tl.zeros([P], tl.float32)
    if PAIRS:
        i = tl.minimum(step, c)
        j = tl.minimum(tl.maximum(step, c), WIDTH - 1)
        row = CONSTANT + LINEAR * WIDTH + place_of(i, j, WIDTH, 1)
        weight = root(a, 2, head % heads, stride_ah, stride_ar, DEFAULTS)
        weight = weight * tl.where(c == step, 2.0, ROOT2)
    if LINEAR:
        linear = step == STEPS - 1
        row = tl.where(linear, CONSTANT + c, row)
        of_linear = root(a, 1, head % heads, stride_ah, stride_ar, DEFAULTS)
        weight = tl.where(linear, of_linear, weight)
    tile = _state_rows(state, head, heads, row, cols, there, stride_sb, stride_sh, stride_sr)
    tile = tl.where(there, tile * weight[:, None], 0.0)  # [P, V]
    to = packed + number * (P * V) + v[:, None] * P + c[None, :]
    tl.store(to, tl.trans(tile).to(packed.dtype.element_ty))


@triton.jit
def _columns_tile(
    y, batch, head, first, end, col0, stride_b, stride_t, stride_h,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """As `load_tile`, of the columns from `col0` on."""
    rows = first + tl.arange(0, ROWS)
    cols = col0 + tl.arange(0, COLS)
    at = batch * stride_b + head * stride_h + rows.to(tl.int64)[:, None] * stride_t
    pointers = y + (at + cols[None, :])
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (16, 16))
    return tl.load(pointers, mask=(rows < end)[:, None] & (cols < WIDTH)[None, :], other=0.0)


@triton.jit
def _anchored(values, ANCHOR: tl.constexpr, N: tl.constexpr):
    """The values in fp32; ANCHOR: as accumulators of products lie."""
    if ANCHOR:
        n = tl.arange(0, N)
        unit = (n[:, None] == n[None, :]).to(values.dtype)
        values = tl.dot(values, unit)
    return values.to(tl.float32)


@triton.jit
def _halves(values, T: tl.constexpr, H: tl.constexpr):
    """The columns below H, and those from H on."""
    return tl.split(values.reshape([T, 2, H]).permute(0, 2, 1))


@triton.jit
def _beside(left, right, T: tl.constexpr, N: tl.constexpr):
    """Two tiles beside each other, N columns in all."""
    return tl.join(left, right).permute(0, 2, 1).reshape([T, N])


@triton.jit
def _column(source, at, there, s, WIDTH: tl.constexpr):
    """x_s of each token."""
    return tl.load(source + at + s, mask=there & (s < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _columns(source, at, there, s, WIDTH: tl.constexpr, H: tl.constexpr):
    """The two columns of x that step s < H multiplies with."""
    return _column(source, at, there, s, WIDTH), _column(source, at, there, s + H, WIDTH)


@triton.jit
def _step_features(s, left, right, low, high, T: tl.constexpr, H: tl.constexpr):
    """Columns of step s < H without weights, of the halves of x and its columns s and H + s."""
    keep = (tl.arange(0, H) >= s)[None, :]
    first = tl.where(keep, left[:, None], right[:, None]) * tl.where(keep, low, high)
    return _beside(first, left[:, None] * high, T, 2 * H)


@triton.jit(do_not_specialize=READ_RUNTIME)
def read(
    x, packed, state, a, out,
    tokens: tl.int32, heads: tl.int32, tiles: tl.int32,
    stride_xb: tl.int64, stride_xt: tl.int64, stride_xh: tl.int64,
    stride_sb: tl.int64, stride_sh: tl.int64, stride_sr: tl.int64,
    stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr, ALIGNED: tl.constexpr,
    ANCHOR: tl.constexpr, PRECISION: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """φ(x) S of a tile of T tokens of a head and V columns, into contiguous (B, T, H, VALUES).

    `packed` is the state by `pack_steps`; of the state itself the constant's row is read.
    """
    BLOCKS: tl.constexpr = (VALUES + V - 1) // V
    H: tl.constexpr = P // 2
    number = tl.program_id(0)
    row0 = number % tiles * T
    block = number // tiles % BLOCKS
    head = (number // tiles // BLOCKS).to(tl.int64)
    batch = head // heads
    of_batch = head % heads
    c = tl.arange(0, P)
    v = tl.arange(0, V)
    rows = row0 + tl.arange(0, T)
    there = rows < tokens
    at = rows.to(tl.int64) * stride_xt
    values = load_tile(
        x, batch, of_batch, row0, tokens, stride_xb, stride_xt, stride_xh,
        WIDTH, T, P, False, ALIGNED,
    )  # fmt: skip
    values = _anchored(values, ANCHOR, P)  # [T, P]
    low, high = _halves(values, T, H)
    source = x + batch * stride_xb + of_batch * stride_xh
    tile = packed + (head * BLOCKS + block) * (STEPS * P * V) + c[:, None] * V + v[None, :]
    acc = tl.zeros([T, V], tl.float32)
    if PAIRS:
        # Columns are read a step ahead: they are few, and what comes of them is waited for.
        left, right = _columns(source, at, there, 0, WIDTH, H)
        for s in tl.range(0, H, num_stages=STAGES):
            after = tl.minimum(s + 1, H - 1)
            left_after, right_after = _columns(source, at, there, after, WIDTH, H)
            phi = _step_features(s, left, right, low, high, T, H).to(packed.dtype.element_ty)
            rows_of_step = tl.load(tile + s * (P * V))  # [P, V]
            acc = tl.dot(phi, rows_of_step, acc, input_precision=PRECISION)
            left = left_after
            right = right_after
        squares = _beside(tl.zeros_like(low), high * high, T, P).to(packed.dtype.element_ty)
        acc = tl.dot(squares, tl.load(tile + H * (P * V)), acc, input_precision=PRECISION)
    if LINEAR:
        last = tl.load(tile + (STEPS - 1) * (P * V))
        acc = tl.dot(values.to(packed.dtype.element_ty), last, acc, input_precision=PRECISION)
    cols = block * V + v
    if CONSTANT:
        row = state + batch * stride_sb + of_batch * stride_sh + cols
        weight = root(a, 0, of_batch, stride_ah, stride_ar, DEFAULTS)
        acc += (weight * tl.load(row, mask=cols < VALUES, other=0.0))[None, :]
    to = out + (batch * tokens * heads + of_batch) * VALUES
    to += rows.to(tl.int64)[:, None] * (heads * VALUES) + cols[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=there[:, None] & (cols < VALUES)[None, :])


@triton.jit
def _store_rows(
    out, acc, first_step, head, of_pairs, of_linear, block, tokens,
    CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Columns [V, N] of steps from `first_step` on into the rows of a state."""
    n = tl.arange(0, N)
    cols = block * V + tl.arange(0, V)
    step = first_step + n // P
    row, weight, exists = row_of(
        step, n % P, of_pairs, of_linear, WIDTH, P // 2, CONSTANT, CONSTANT + LINEAR * WIDTH
    )
    exists = exists & tl.where(step > P // 2, LINEAR, PAIRS)
    to = out + head * (WIDE * VALUES) + row[None, :] * VALUES + cols[:, None]
    tl.store(to, acc * weight[None, :], mask=exists[None, :] & (cols < VALUES)[:, None])


@triton.jit(do_not_specialize=UPDATE_RUNTIME)
def update(
    x, y, a, out,
    tokens: tl.int32, heads: tl.int32,
    stride_xb: tl.int64, stride_xt: tl.int64, stride_xh: tl.int64,
    stride_yb: tl.int64, stride_yt: tl.int64, stride_yh: tl.int64,
    stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, X_ALIGNED: tl.constexpr,
    Y_ALIGNED: tl.constexpr, ANCHOR: tl.constexpr, PRECISION: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, T: tl.constexpr, G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """φ(x)ᵀ y over all tokens, into contiguous (B, H, WIDE, VALUES) in fp32.

    A program has V columns of a head's state, and the rows of G steps, 2 or 4, or those of the last
    two steps and of the constant. It forms them transposed, [V, G·P]: y is what stays, φ what is
    new, and wgmma reads the left operand the less often the wider the right one is.
    """
    BLOCKS: tl.constexpr = (VALUES + V - 1) // V
    H: tl.constexpr = P // 2
    GROUPS: tl.constexpr = H // G + 1 if PAIRS else 1
    number = tl.program_id(0)
    group = number % GROUPS
    block = number // GROUPS % BLOCKS
    head = (number // GROUPS // BLOCKS).to(tl.int64)
    batch = head // heads
    of_batch = head % heads
    source = x + batch * stride_xb + of_batch * stride_xh
    r = tl.arange(0, T)
    of_pairs = 0.0
    of_linear = 0.0
    if PAIRS:
        of_pairs = root(a, 2, of_batch, stride_ah, stride_ar, DEFAULTS)
    if LINEAR:
        of_linear = root(a, 1, of_batch, stride_ah, stride_ar, DEFAULTS)
    if group < GROUPS - 1:
        s = group * G
        acc = tl.zeros([V, G * P], tl.float32)
        for first in tl.range(0, tokens, T, num_stages=STAGES):
            there = first + r < tokens
            at = (first + r).to(tl.int64) * stride_xt
            # Before the first product of the turn, which then waits for nothing but itself.
            left0, right0 = _columns(source, at, there, s, WIDTH, H)
            left1, right1 = _columns(source, at, there, s + 1, WIDTH, H)
            if G == 4:
                left2, right2 = _columns(source, at, there, s + 2, WIDTH, H)
                left3, right3 = _columns(source, at, there, s + 3, WIDTH, H)
            values = load_tile(
                x, batch, of_batch, first, tokens, stride_xb, stride_xt, stride_xh,
                WIDTH, T, P, False, X_ALIGNED,
            )  # fmt: skip
            given = _columns_tile(
                y, batch, of_batch, first, tokens, block * V, stride_yb, stride_yt, stride_yh,
                VALUES, T, V, Y_ALIGNED,
            )  # fmt: skip
            low, high = _halves(_anchored(values, ANCHOR, P), T, H)
            first_step = _step_features(s, left0, right0, low, high, T, H).to(given.dtype)
            next_step = _step_features(s + 1, left1, right1, low, high, T, H).to(given.dtype)
            phi = _beside(first_step, next_step, T, 2 * P)
            if G == 4:
                first_step = _step_features(s + 2, left2, right2, low, high, T, H).to(given.dtype)
                next_step = _step_features(s + 3, left3, right3, low, high, T, H).to(given.dtype)
                phi = _beside(phi, _beside(first_step, next_step, T, 2 * P), T, G * P)
            acc = tl.dot(tl.trans(given), phi, acc, input_precision=PRECISION)
        _store_rows(
            out, acc, s, head, of_pairs, of_linear, block, tokens,
            CONSTANT, LINEAR, PAIRS, WIDTH, VALUES, WIDE, P, V, G * P,
        )  # fmt: skip
    else:
        last = tl.zeros([V, 2 * P], tl.float32)
        constant = tl.zeros([V], tl.float32)
        for first in tl.range(0, tokens, T, num_stages=STAGES):
            values = load_tile(
                x, batch, of_batch, first, tokens, stride_xb, stride_xt, stride_xh,
                WIDTH, T, P, False, X_ALIGNED,
            )  # fmt: skip
            given = _columns_tile(
                y, batch, of_batch, first, tokens, block * V, stride_yb, stride_yt, stride_yh,
                VALUES, T, V, Y_ALIGNED,
            )  # fmt: skip
            values = _anchored(values, ANCHOR, P)
            both = _beside(values * values, values, T, 2 * P).to(given.dtype)
            last = tl.dot(tl.trans(given), both, last, input_precision=PRECISION)
            if CONSTANT:
                constant += tl.sum(given.to(tl.float32), 0)
        _store_rows(
            out, last, H, head, of_pairs, of_linear, block, tokens,
            CONSTANT, LINEAR, PAIRS, WIDTH, VALUES, WIDE, P, V, 2 * P,
        )  # fmt: skip
        if CONSTANT:
            cols = block * V + tl.arange(0, V)
            weight = root(a, 0, of_batch, stride_ah, stride_ar, DEFAULTS)
            tl.store(out + head * (WIDE * VALUES) + cols, constant * weight, mask=cols < VALUES)


@triton.jit(do_not_specialize=PULL_RUNTIME)
def pull(
    x, y, packed, state, a, d_x, sums,
    tokens: tl.int32, heads: tl.int32, tiles: tl.int32,
    stride_xb: tl.int64, stride_xt: tl.int64, stride_xh: tl.int64,
    stride_yb: tl.int64, stride_yt: tl.int64, stride_yh: tl.int64,
    stride_sb: tl.int64, stride_sh: tl.int64, stride_sr: tl.int64,
    stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr,
    SUMS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr,
    Y_ALIGNED: tl.constexpr, ANCHOR: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of x for that of Σ_t φ(x_t) S y_tᵀ, into contiguous (B, T, H, WIDTH).

    dx = Σ_i (x_i y) S_i + y S_1, S_i by `pack_square`: twice as many products as pairs ask for, and
    nothing else but a product of each y with each x_i. SUMS: ⟨dφ_r, φ_r⟩ of the degrees 0, 1, 2 of
    each tile into `sums` (B·H, tiles, 3). SCALED: rows of y are brought near 1 by powers of two,
    as products of small numbers leave fp16.
    """
    BLOCKS: tl.constexpr = (VALUES + V - 1) // V
    number = tl.program_id(0)
    row0 = number % tiles * T
    head = (number // tiles).to(tl.int64)
    batch = head // heads
    of_batch = head % heads
    c = tl.arange(0, P)
    v = tl.arange(0, V)
    rows = row0 + tl.arange(0, T)
    there = rows < tokens
    at = rows.to(tl.int64) * stride_xt
    source = x + batch * stride_xb + of_batch * stride_xh
    total = tl.zeros([T, P], tl.float32)
    linear = tl.zeros([T, P], tl.float32)
    of_constant = 0.0
    for block in tl.range(0, BLOCKS, num_stages=1):
        given = _columns_tile(
            y, batch, of_batch, row0, tokens, block * V, stride_yb, stride_yt, stride_yh,
            VALUES, T, V, Y_ALIGNED,
        )  # fmt: skip
        given = _anchored(given, ANCHOR, V)  # [T, V]
        if CONSTANT and SUMS:
            cols = block * V + v
            row = state + batch * stride_sb + of_batch * stride_sh + cols
            constant = tl.load(row, mask=cols < VALUES, other=0.0)
            of_constant += tl.sum(tl.sum(given * constant[None, :], 1), 0)
        acc = total
        if SCALED:
            acc = tl.zeros([T, P], tl.float32)
            size = _power_of_two(tl.max(tl.abs(given), 1))
            given = given * _inverse(size)[:, None]
        tile = packed + (head * BLOCKS + block) * (STEPS * P * V) + v[:, None] * P + c[None, :]
        if PAIRS:
            factor = _column(source, at, there, 0, WIDTH)
            for i in tl.range(0, WIDTH, num_stages=STAGES):
                factor_after = _column(source, at, there, tl.minimum(i + 1, WIDTH - 1), WIDTH)
                left = (factor[:, None] * given).to(packed.dtype.element_ty)
                acc = tl.dot(left, tl.load(tile + i * (P * V)), acc, input_precision=PRECISION)
                factor = factor_after
        if LINEAR:
            last = tl.load(tile + (STEPS - 1) * (P * V))
            by_itself = given.to(packed.dtype.element_ty)
            if not SUMS:
                acc = tl.dot(by_itself, last, acc, input_precision=PRECISION)
            elif SCALED:
                product = tl.dot(by_itself, last, input_precision=PRECISION)
                linear += product * size[:, None]
            else:
                linear = tl.dot(by_itself, last, linear, input_precision=PRECISION)
        if SCALED:
            total += acc * size[:, None]
        else:
            total = acc
    columns = there[:, None] & (c < WIDTH)[None, :]
    if SUMS:
        values = tl.load(source + at[:, None] + c[None, :], mask=columns, other=0.0)
        values = values.to(tl.float32)
        to = sums + number.to(tl.int64) * 3
        if CONSTANT:
            of_constant *= root(a, 0, of_batch, stride_ah, stride_ar, DEFAULTS)
        tl.store(to, of_constant)
        tl.store(to + 1, tl.sum(tl.sum(values * linear, 1), 0))
        tl.store(to + 2, 0.5 * tl.sum(tl.sum(values * total, 1), 0))  # φ_2 is of degree 2 in x
    to = d_x + (batch * tokens * heads + of_batch) * WIDTH
    to += rows.to(tl.int64)[:, None] * (heads * WIDTH) + c[None, :]
    tl.store(to, (total + linear).to(d_x.dtype.element_ty), mask=columns)


@triton.jit
def _power_of_two(x):
    """The largest power of two that is no larger than x ≥ 0; 0 below all normal numbers."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(power):
    """1/x of a power of two, 2¹²⁷ of 0."""
    bits = 0x7F000000 - power.to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True)
