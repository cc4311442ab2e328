"""Where features and the rows of a state lie, for all kernels of the polynomial ops.

Degrees follow each other: a constant, the numbers in whole tiles, pairs (I ≤ J) of tiles of TILE
numbers, row after row, each TILE × TILE; a symmetric map has tiles of one number. Kernels that
multiply with a state go through its pairs in another order, by steps of as many columns as x has:
with H the half of the padded width P, step s < H has at column c

    c ≥ s    the pair (s, c)
    c < s    the pair (H + c, H + s), of the upper halves

which is every pair but the upper squares; step H has those, (c, c) in the columns from H on, and
step H + 1 the numbers by themselves. So the (P + 3)·P/2 rows take (P + 4)·P/2 columns.
"""

import triton
import triton.language as tl

from ..newton_schulz.triton_symmetric import lower_tile

ROOT2 = tl.constexpr(1.4142135623730951)


@triton.jit
def coefficient(a, r: tl.constexpr, head, stride_ah, stride_ar, DEFAULTS: tl.constexpr):
    """a_r of a head in fp32; DEFAULTS: all of them where no tensor holds any."""
    if DEFAULTS is None:
        return tl.load(a + head * stride_ah + r * stride_ar).to(tl.float32)
    else:
        return tl.full([], DEFAULTS[r], tl.float32)


@triton.jit
def root(a, r: tl.constexpr, head, stride_ah, stride_ar, DEFAULTS: tl.constexpr):
    """√a_r of a head: NaN below zero."""
    return tl.sqrt_rn(coefficient(a, r, head, stride_ah, stride_ar, DEFAULTS))


@triton.jit
def pair_at(place, TILES: tl.constexpr, TILE: tl.constexpr):
    """The numbers i and j of the pair at a place among all pairs, and whether in one tile."""
    PAIRS: tl.constexpr = TILES * (TILES + 1) // 2
    inside = place % (TILE * TILE)
    # Counted from the last one, rows of the upper triangle are those of a lower one.
    row, col = lower_tile(tl.minimum(tl.maximum(PAIRS - 1 - place // (TILE * TILE), 0), PAIRS - 1))
    left = TILES - 1 - row
    right = TILES - 1 - col
    return left * TILE + inside // TILE, right * TILE + inside % TILE, left == right


@triton.jit
def place_of(i, j, TILES: tl.constexpr, TILE: tl.constexpr):
    """The place of the pair of numbers i and j, of tiles I ≤ J, among all pairs."""
    left = i // TILE
    pair = left * TILES - left * (left - 1) // 2 + j // TILE - left
    return pair * (TILE * TILE) + i % TILE * TILE + j % TILE


@triton.jit
def row_of(
    step, c, pairs_weight, linear_weight,
    WIDTH: tl.constexpr, H: tl.constexpr, LINEAR_FROM: tl.constexpr, PAIRS_FROM: tl.constexpr,
):  # fmt: skip
    """The row of a state at a column of a step, its weight, and whether there is one."""
    keep = c >= step
    i = tl.where(keep, step, c + H)
    j = tl.where(keep, c, step + H)
    i = tl.where(step >= H, c, i)
    j = tl.where(step >= H, c, j)
    row = PAIRS_FROM + place_of(i, j, WIDTH, 1)
    weight = pairs_weight * tl.where(i == j, 1.0, ROOT2)
    exists = (j < WIDTH) & ((step < H) | (c >= H))
    linear = step > H
    row = tl.where(linear, LINEAR_FROM + c, row)
    weight = tl.where(linear, linear_weight, weight)
    exists = tl.where(linear, c < WIDTH, exists)
    return tl.where(exists, row, 0), weight, exists
