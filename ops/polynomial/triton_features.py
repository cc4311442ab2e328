"""Features written out: φ(x), its adjoint, and powers of numbers by themselves.

`expand` is bound by what it writes. A program keeps its columns and goes through tiles of rows: two
products with matrices of zeros and ones pick the factors of each column out of x, exactly, since a
16-bit number times 1 plus zeros is itself (fp32 goes by parts that are). Gathering them would take
several instructions for each. A row of x that holds a NaN or an infinity has NaN everywhere.
"""

import triton
import triton.language as tl

from ..common import load_tile
from .triton_rows import ROOT2, coefficient, pair_at, place_of, root

ROWS = ("rows", "heads", "stride_xt", "stride_xh", "stride_ah", "stride_ar")
EXPAND_RUNTIME = (*ROWS, "parts")
CONTRACT_RUNTIME = (*ROWS, "stride_ut", "stride_uh", "tiles")


@triton.jit(do_not_specialize=EXPAND_RUNTIME)
def expand(
    x, a, out,
    rows: tl.int32, heads: tl.int32, parts: tl.int32,
    stride_xt: tl.int64, stride_xh: tl.int64, stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """φ of x (rows, heads, WIDTH) into contiguous (rows, heads, WIDE).

    A program has C columns of a head, and of its tiles of R rows every `parts`-th.
    """
    CHUNKS: tl.constexpr = (WIDE + C - 1) // C
    PAIRS_FROM: tl.constexpr = CONSTANT + LINEAR * TILES * TILE
    number = tl.program_id(0)
    part = number // CHUNKS % parts
    head = (number // CHUNKS // parts).to(tl.int64)
    cols = number % CHUNKS * C + tl.arange(0, C)  # [C]
    i = tl.full([C], -1, tl.int32)  # -1: the factor is 1
    j = i
    weight = tl.zeros([C], tl.float32)
    if PAIRS:
        i, j, same = pair_at(cols - PAIRS_FROM, TILES, TILE)
        weight = root(a, 2, head, stride_ah, stride_ar, DEFAULTS) * tl.where(same, 1.0, ROOT2)
    if LINEAR:
        linear = cols < PAIRS_FROM
        i = tl.where(linear, cols - CONSTANT, i)
        j = tl.where(linear, -1, j)
        of_linear = root(a, 1, head, stride_ah, stride_ar, DEFAULTS)
        weight = tl.where(linear, of_linear, weight)
    if CONSTANT:
        i = tl.where(cols == 0, -1, i)
        j = tl.where(cols == 0, -1, j)
        of_constant = root(a, 0, head, stride_ah, stride_ar, DEFAULTS)
        weight = tl.where(cols == 0, of_constant, weight)
    c = tl.arange(0, P)
    r = tl.arange(0, R)
    pick_left = (c[:, None] == i[None, :]).to(x.dtype.element_ty)  # [P, C]
    pick_right = (c[:, None] == j[None, :]).to(x.dtype.element_ty)
    one_right = tl.broadcast_to(tl.where(j < 0, 1.0, 0.0)[None, :], [R, C])
    one_left = tl.zeros([R, C], tl.float32)
    if CONSTANT:
        one_left = tl.broadcast_to(tl.where(i < 0, 1.0, 0.0)[None, :], [R, C])
    to = out + head * WIDE
    for tile in tl.range(part, tl.cdiv(rows, R), parts, num_stages=STAGES):
        values = load_tile(
            x, head * 0, head, tile * R, rows, 0, stride_xt, stride_xh,
            WIDTH, R, P, False, ALIGNED,
        )  # fmt: skip
        left = tl.dot(values, pick_left, one_left, input_precision=PRECISION)  # [R, C]
        right = tl.dot(values, pick_right, one_right, input_precision=PRECISION)
        phi = left * right * weight[None, :]
        at = (tile * R + r).to(tl.int64)[:, None] * (heads.to(tl.int64) * WIDE) + cols[None, :]
        there = (tile * R + r < rows)[:, None] & (cols < WIDE)[None, :]
        tl.store(to + at, phi.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=CONTRACT_RUNTIME)
def contract(
    upstream, x, a, d_x, sums,
    rows: tl.int32, heads: tl.int32, tiles: tl.int32,
    stride_ut: tl.int64, stride_uh: tl.int64,
    stride_xt: tl.int64, stride_xh: tl.int64, stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, CONSTANT: tl.constexpr, LINEAR: tl.constexpr, PAIRS: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The gradient of x for that of φ(x), into contiguous (rows, heads, WIDTH).

    And of each tile of rows what the coefficients' gradients are formed of, ⟨dφ_r, φ_r⟩ of the
    degrees 0, 1 and 2 into `sums` (heads, tiles, 3) in fp32. Pair after pair of a number i with all
    columns: rows of the upper triangle are contiguous.
    """
    PAIRS_FROM: tl.constexpr = CONSTANT + LINEAR * TILES * TILE
    number = tl.program_id(0)
    head = (number // tiles).to(tl.int64)
    row0 = number % tiles * R
    r = tl.arange(0, R)
    c = tl.arange(0, P)
    at = (row0 + r).to(tl.int64)
    there = row0 + r < rows
    columns = there[:, None] & (c < WIDTH)[None, :]
    source = x + head * stride_xh
    given = upstream + head * stride_uh
    values = tl.load(source + at[:, None] * stride_xt + c[None, :], mask=columns, other=0.0)
    values = values.to(tl.float32)  # [R, P]
    total = tl.zeros([R, P], tl.float32)
    of_pairs = tl.zeros([R], tl.float32)
    of_linear = 0.0
    of_constant = 0.0
    if PAIRS:
        pairs = root(a, 2, head, stride_ah, stride_ar, DEFAULTS)
        ahead = tl.load(
            given + at[:, None] * stride_ut + (PAIRS_FROM + place_of(0, c, TILES, TILE))[None, :],
            mask=columns, other=0.0,
        )  # fmt: skip
        factor_ahead = tl.load(source + at * stride_xt, mask=there, other=0.0)
        for i in tl.range(0, WIDTH, num_stages=1):
            d = ahead.to(tl.float32)
            factor = factor_ahead.to(tl.float32)
            after = tl.minimum(i + 1, WIDTH - 1)
            place = PAIRS_FROM + place_of(after, c, TILES, TILE)
            exists = (c // TILE >= after // TILE)[None, :]
            ahead = tl.load(
                given + at[:, None] * stride_ut + place[None, :], mask=columns & exists, other=0.0
            )
            factor_ahead = tl.load(source + at * stride_xt + after, mask=there, other=0.0)
            d *= (pairs * tl.where(c // TILE == i // TILE, 1.0, ROOT2))[None, :]
            along = tl.sum(d * values, 1)  # [R]
            total += d * factor[:, None] + tl.where((c == i)[None, :], along[:, None], 0.0)
            of_pairs += along * factor
    if LINEAR:
        d = tl.load(
            given + at[:, None] * stride_ut + CONSTANT + c[None, :], mask=columns, other=0.0
        )
        d = d.to(tl.float32) * root(a, 1, head, stride_ah, stride_ar, DEFAULTS)
        total += d
        of_linear = tl.sum(d * values)
    if CONSTANT:
        d = tl.load(given + at * stride_ut, mask=there, other=0.0).to(tl.float32)
        of_constant = tl.sum(d) * root(a, 0, head, stride_ah, stride_ar, DEFAULTS)
    to = d_x + head * WIDTH + at[:, None] * (heads.to(tl.int64) * WIDTH) + c[None, :]
    tl.store(to, total.to(d_x.dtype.element_ty), mask=columns)
    tl.store(sums + number.to(tl.int64) * 3, of_constant)
    tl.store(sums + number.to(tl.int64) * 3 + 1, of_linear)
    tl.store(sums + number.to(tl.int64) * 3 + 2, tl.sum(of_pairs))


@triton.jit(do_not_specialize=(*ROWS, "tiles"))
def powers(
    x, a, out,
    rows: tl.int32, heads: tl.int32, tiles: tl.int32,
    stride_xt: tl.int64, stride_xh: tl.int64, stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, PLACES: tl.constexpr, CONCAT: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Σ_r a_r x^r of each number, CONCAT: side by side, into contiguous (rows, heads, WIDE).

    PLACES: of each degree where it stands among those that are kept; −1: it is not.
    """
    number = tl.program_id(0)
    head = (number // tiles).to(tl.int64)
    rows_of = number % tiles * R + tl.arange(0, R)
    c = tl.arange(0, P)
    at = rows_of.to(tl.int64)[:, None]
    there = (rows_of < rows)[:, None] & (c < WIDTH)[None, :]
    values = tl.load(x + head * stride_xh + at * stride_xt + c[None, :], mask=there, other=0.0)
    values = values.to(tl.float32)
    to = out + head * WIDE + at * (heads.to(tl.int64) * WIDE) + c[None, :]
    total = tl.zeros([R, P], tl.float32)
    power = tl.full([R, P], 1.0, tl.float32)
    for r in tl.static_range(len(PLACES)):
        if r > 0:
            power *= values
        if PLACES[r] >= 0:
            term = coefficient(a, r, head, stride_ah, stride_ar, DEFAULTS) * power
            if CONCAT:
                tl.store(to + PLACES[r] * WIDTH, term.to(out.dtype.element_ty), mask=there)
            else:
                total += term
    if not CONCAT:
        tl.store(to, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=CONTRACT_RUNTIME)
def powers_back(
    upstream, x, a, d_x, sums,
    rows: tl.int32, heads: tl.int32, tiles: tl.int32,
    stride_ut: tl.int64, stride_uh: tl.int64,
    stride_xt: tl.int64, stride_xh: tl.int64, stride_ah: tl.int64, stride_ar: tl.int64,
    DEFAULTS: tl.constexpr, PLACES: tl.constexpr, CONCAT: tl.constexpr,
    WIDTH: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The gradient of x for that of `powers`; ⟨dφ, x^r⟩ of all degrees of a tile of rows into
    `sums` (heads, tiles, degrees), 0 for those that are not kept.
    """
    number = tl.program_id(0)
    head = (number // tiles).to(tl.int64)
    rows_of = number % tiles * R + tl.arange(0, R)
    c = tl.arange(0, P)
    at = rows_of.to(tl.int64)[:, None]
    there = (rows_of < rows)[:, None] & (c < WIDTH)[None, :]
    values = tl.load(x + head * stride_xh + at * stride_xt + c[None, :], mask=there, other=0.0)
    values = values.to(tl.float32)
    given = upstream + head * stride_uh + at * stride_ut + c[None, :]
    d = tl.zeros([R, P], tl.float32)
    if not CONCAT:
        d = tl.load(given, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros([R, P], tl.float32)
    below = tl.zeros([R, P], tl.float32)  # x^(r−1); of degree 0 nothing
    power = tl.full([R, P], 1.0, tl.float32)
    for r in tl.static_range(len(PLACES)):
        if r > 0:
            below = power
            power = power * values
        of_degree = 0.0
        if PLACES[r] >= 0:
            if CONCAT:
                d = tl.load(given + PLACES[r] * WIDTH, mask=there, other=0.0).to(tl.float32)
            slope = coefficient(a, r, head, stride_ah, stride_ar, DEFAULTS) * r
            total += slope * below * d
            of_degree = tl.sum(d * power)
        tl.store(sums + number.to(tl.int64) * len(PLACES) + r, of_degree)
    to = d_x + head * WIDTH + at * (heads.to(tl.int64) * WIDTH) + c[None, :]
    tl.store(to, total.to(d_x.dtype.element_ty), mask=there)
