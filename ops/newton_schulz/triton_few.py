"""Newton–Schulz on few matrices of more than 128 rows: every step in one launch.

A product of one such matrix is over before the next could be launched. Here all programs take the
tiles of a product in turn, meet, and go on to the next; they have to be on the device at once, for
which the launch is cooperative. With X of rows ≤ cols, in fp16 with zeros up to whole tiles:

    A = X Xᵀ    Z = a I + b A + c A²    X ← Z X

A and Z are symmetric: tiles on and below the diagonal are formed, and mirrored. Two places hold X
in turn, as the programs read all of it while they write the next.
"""

import triton
import triton.language as tl

from .triton_symmetric import lower_tile

RUNTIME = ("batch", "rows", "cols", "steps", "eps")


@triton.jit
def _meet(counter, times):
    """Wait for all programs for the `times`-th time; what one stored before, all see after."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")
    goal = times * tl.num_programs(0)
    arrived = tl.atomic_add(counter, 0, sem="acquire")
    while arrived < goal:
        arrived = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _place(
    matrix, row0, col0, rows, cols, TALL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Where a tile of X lies in a stack of (rows, cols), TALL: (cols, rows), and what exists of it.

    VECTOR: rows in memory are multiples of eight numbers.
    """
    if VECTOR and TALL:
        rows = rows // 8 * 8
    if VECTOR and not TALL:
        cols = cols // 8 * 8
    r = row0 + tl.arange(0, BLOCK)[:, None]
    c = col0 + tl.arange(0, BLOCK)[None, :]
    at = matrix * rows * cols + (c * rows + r if TALL else r * cols + c)
    return at, (r < rows) & (c < cols)


@triton.jit
def _multiply(
    left, left_width, row0, right, right_width, col0, depth,
    TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of left · right (TRANSPOSED: of left · rightᵀ), of matrices in whole tiles; fp32."""
    r = row0 + tl.arange(0, BLOCK)[:, None]
    c = col0 + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        a = tl.load(left + r * left_width + (start + k)[None, :])  # [BLOCK, BLOCK_K]
        if TRANSPOSED:
            b = tl.load(right + c[:, None] * right_width + (start + k)[None, :]).T
        else:
            b = tl.load(right + (start + k)[:, None] * right_width + c[None, :])
        acc = tl.dot(a, b, acc)
        # Read in each turn, so that Triton waits for its wgmma together: left to run into the next
        # turn, they make ptxas wait for every one (C7514).
        acc = tl.where(start >= 0, acc, 0.0)
    return acc


@triton.jit
def _store_mirrored(square, width, i, j, value, BLOCK: tl.constexpr):
    """Tile (i, j) of a symmetric matrix, and tile (j, i)."""
    r = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    value = value.to(square.dtype.element_ty)
    tl.store(square + (i * BLOCK + r) * width + j * BLOCK + c, value)
    if i != j:
        tl.store(square + (j * BLOCK + r) * width + i * BLOCK + c, value.T)


@triton.jit(do_not_specialize=RUNTIME)
def newton_schulz_few(
    x, out, iterates, squares, sums, counter, table,
    batch: tl.int32, rows: tl.int32, cols: tl.int32, steps: tl.int32, eps: tl.float32,
    TALL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Orthogonalise a contiguous stack; cooperative.

    With R = rows/BLOCK and C = cols/BLOCK, rounded up, and B matrices: `iterates` 2·B·R·C tiles
    and `squares` 2·B·R·R tiles of the compute dtype, `sums` B·R·C numbers in fp32 (R·C ≤ MOST),
    `counter` a zero, `table` a, b, c of each step in fp32. All in all no more than 2³¹ numbers.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    down = tl.cdiv(rows, BLOCK)
    across = tl.cdiv(cols, BLOCK)
    lower = down * (down + 1) // 2
    tiles = down * across
    width = across * BLOCK
    square_width = down * BLOCK
    size = square_width * width
    square_size = square_width * square_width

    # X / (‖X‖ + eps): the sums of squares of all tiles, then each tile anew.
    for number in tl.range(first, batch * tiles, programs, num_stages=1):
        tile = number % tiles
        at, exists = _place(
            number // tiles, tile // across * BLOCK, tile % across * BLOCK, rows, cols,
            TALL, VECTOR, BLOCK,
        )  # fmt: skip
        value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
        tl.store(sums + number, tl.sum(value * value))
    _meet(counter, 1)
    each = tl.arange(0, MOST)
    for number in tl.range(first, batch * tiles, programs, num_stages=1):
        matrix = number // tiles
        tile = number % tiles
        norm = tl.sqrt(tl.sum(tl.load(sums + matrix * tiles + each, mask=each < tiles, other=0.0)))
        factor = tl.where(norm == 0.0, 0.0, 1.0 / (norm + eps))
        row0 = tile // across * BLOCK
        col0 = tile % across * BLOCK
        at, exists = _place(matrix, row0, col0, rows, cols, TALL, VECTOR, BLOCK)
        value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32) * factor
        r = row0 + tl.arange(0, BLOCK)[:, None]
        to = iterates + matrix * size + r * width
        tl.store(to + col0 + tl.arange(0, BLOCK)[None, :], value.to(iterates.dtype.element_ty))

    for step in tl.range(0, steps, num_stages=1):
        a = tl.load(table + 3 * step)
        b = tl.load(table + 3 * step + 1)
        c = tl.load(table + 3 * step + 2)
        now = iterates + step % 2 * batch * size
        after = iterates + (step + 1) % 2 * batch * size
        _meet(counter, 3 * step + 2)
        for number in tl.range(first, batch * lower, programs, num_stages=1):
            i, j = lower_tile(number % lower)
            matrix = number // lower
            own = now + matrix * size
            gram = _multiply(
                own, width, i * BLOCK, own, width, j * BLOCK, width, True, BLOCK, BLOCK_K, STAGES
            )
            _store_mirrored(squares + matrix * square_size, square_width, i, j, gram, BLOCK)
        _meet(counter, 3 * step + 3)
        for number in tl.range(first, batch * lower, programs, num_stages=1):
            i, j = lower_tile(number % lower)
            matrix = number // lower
            own = squares + matrix * square_size
            r = i * BLOCK + tl.arange(0, BLOCK)[:, None]
            k = j * BLOCK + tl.arange(0, BLOCK)[None, :]
            gram = tl.load(own + r * square_width + k)  # on its way during the product
            z = c * _multiply(
                own, square_width, i * BLOCK, own, square_width, j * BLOCK, square_width, True,
                BLOCK, BLOCK_K, STAGES,
            )  # fmt: skip
            z += b * gram.to(tl.float32) + tl.where(r == k, a, 0.0)
            _store_mirrored(own + batch * square_size, square_width, i, j, z, BLOCK)
        _meet(counter, 3 * step + 4)
        for number in tl.range(first, batch * tiles, programs, num_stages=1):
            matrix = number // tiles
            row0 = number % tiles // across * BLOCK
            col0 = number % tiles % across * BLOCK
            value = _multiply(
                squares + (batch + matrix) * square_size, square_width, row0,
                now + matrix * size, width, col0, square_width, False, BLOCK, BLOCK_K, STAGES,
            )  # fmt: skip
            value = value.to(iterates.dtype.element_ty)
            if step + 1 < steps:
                r = row0 + tl.arange(0, BLOCK)[:, None]
                to = after + matrix * size + r * width + col0 + tl.arange(0, BLOCK)[None, :]
                tl.store(to, value)
            else:
                at, exists = _place(matrix, row0, col0, rows, cols, TALL, VECTOR, BLOCK)
                tl.store(out + at, value.to(out.dtype.element_ty), mask=exists)
