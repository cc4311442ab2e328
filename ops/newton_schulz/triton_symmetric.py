"""Products of large matrices that are known to be symmetric: half the tiles, mirrored.

Everything that Newton–Schulz forms of a Gram matrix R, and R itself, is a polynomial in R. Such
matrices are symmetric and commute, so that each product of two of them is one more.
"""

import triton
import triton.language as tl

RUNTIME = ("n", "k", "tiles", "alpha", "beta", "gamma")


@triton.jit
def lower_tile(number):
    """Row and column of the number-th tile of the lower triangle, row after row."""
    row = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)  # the root is rounded
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@triton.jit(do_not_specialize=RUNTIME)
def symmetric_product(
    left, right, plus, out,
    n: tl.int32, k: tl.int32, tiles: tl.int32, alpha: tl.float32, beta: tl.float32,
    gamma: tl.float32,
    PLUS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = alpha·left·rightᵀ + beta·plus + gamma·I, (B, n, n), of operands (B, n, k).

    All four are descriptors of tiles. A program has one on or below the diagonal.
    """
    number = tl.program_id(0)
    matrix = number // tiles
    i, j = lower_tile(number % tiles)
    row0 = i * BLOCK
    col0 = j * BLOCK
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in tl.range(0, tl.cdiv(k, BLOCK_K), num_stages=STAGES):
        a = left.load([matrix, row0, step * BLOCK_K]).reshape([BLOCK, BLOCK_K])
        b = right.load([matrix, col0, step * BLOCK_K]).reshape([BLOCK, BLOCK_K])
        acc = tl.dot(a, b.T, acc)  # [BLOCK, BLOCK]
    value = acc * alpha
    if PLUS:
        tile = plus.load([matrix, row0, col0]).reshape([BLOCK, BLOCK])
        value += beta * tile.to(tl.float32)
    rows = row0 + tl.arange(0, BLOCK)
    cols = col0 + tl.arange(0, BLOCK)
    value += tl.where(rows[:, None] == cols[None, :], gamma, 0.0)
    value = value.to(out.dtype)
    out.store([matrix, row0, col0], value.reshape([1, BLOCK, BLOCK]))
    if i != j:
        out.store([matrix, col0, row0], value.T.reshape([1, BLOCK, BLOCK]))
