"""A role of `omega_walk_spans`: the memory, tile after tile.

A tile is copied from the L2 cache ahead of its turn, gets what the span before wrote, and is stored
again; what it then is goes to who looks, in the type of keys and with the weights of its features.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_features import (
    COLUMNS,
    HALF,
    OLDER,
    ROOT2,
    STEPS,
    WIDTH,
    features,
    one_of,
    rate_of,
    times,
)
from .hopper_fwd import CHUNK, product


@gluon.constexpr_function
def in_line():
    """A line of a tile's numbers, four of a thread's side by side: in memory, a tile lies as the
    threads of a product have it.
    """
    size = 4 * 128 * 4
    return gl.DistributedLinearLayout(
        [[1], [2], [128], [256]], [[4], [8], [16], [32], [64]], [[512], [1024]], [], [size]
    )


@gluon.jit
def copy_tile(at, line):
    """Begin to copy a tile of the memory, each thread what it will load."""
    async_copy.async_copy_global_to_shared(
        line, at + gl.arange(0, WIDTH * COLUMNS, layout=in_line())
    )
    async_copy.commit_group()


@gluon.jit
def load_tile(line):
    """The tile that has been copied."""
    async_copy.wait_group(0)
    line = line.load(in_line())
    # Of a place: warp, 8 columns, row of 8, pair of columns, 8 rows, column of a pair.
    tile = line.reshape([4, 4, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape([WIDTH, COLUMNS])
    return gl.convert_layout(tile, product(COLUMNS), assert_trivial=True)


@gluon.jit
def store_tile(at, tile):
    """What `copy_tile` copies."""
    line = tile.reshape([4, 2, 8, 4, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    line = gl.convert_layout(line.reshape([WIDTH * COLUMNS]), in_line(), assert_trivial=True)
    gl.store(at + gl.arange(0, WIDTH * COLUMNS, layout=in_line()), line)


@gluon.jit
def scaled(x, keys, turned, place, s):
    """Features of a step, transposed: x_s x_c from row s on, x_{H+s} x_{H+c} before it."""
    F: gl.constexpr = features(COLUMNS)
    by = keys.index(place * WIDTH + s).load(gl.SliceLayout(0, F))
    by_beyond = keys.index(place * WIDTH + HALF + s).load(gl.SliceLayout(0, F))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, F))
    mask = gl.where(c >= s, -1, 0).to(gl.int16)
    beyond = turned.index(place).load(F)
    return one_of(x, by[None, :], beyond, by_beyond[None, :], mask[:, None])


@gluon.jit
def show(tile, at, low_t, ready, taken):
    """Give the at-th tile of all to who looks."""
    SLOTS: gl.constexpr = low_t.shape[0]
    slot = at % SLOTS
    mbarrier.wait(taken.index(slot), ((at // SLOTS) & 1) ^ 1)
    low_t.index(slot).store(tile.to(low_t.dtype))
    fence_async_shared()
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def advance(
    WHO: gl.constexpr,
    tiles, line, bars, packed, ends, weights, place, heads,
    HALO: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: every other tile of the memory, from span to span."""
    low_t, wrote_t, keys_t, turned_t, older_t, older_turned_t = tiles
    ready, taken, wrote = bars
    of_numbers, of_pairs = weights
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    dtype: gl.constexpr = low_t.dtype
    OUT: gl.constexpr = product(COLUMNS)
    F: gl.constexpr = features(COLUMNS)
    TILES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, OUT))
    memory = packed + number.to(gl.int64) * (STEPS * WIDTH * COLUMNS)
    SIZE: gl.constexpr = WIDTH * COLUMNS
    spans = gl.cdiv(count, 2)
    of_chunks = keys_t._reinterpret(dtype, [4, WIDTH, CHUNK], TILES)
    of_older = older_t._reinterpret(dtype, [2, WIDTH, OLDER], TILES)
    nothing = gl.zeros([WIDTH, COLUMNS], gl.float32, OUT)
    copy_tile(memory + WHO * SIZE, line)
    for n in range(spans + 1):
        buffer = (n + 1) % 2  # of the span before
        rate = rate_of(ends, place, 2 * n - 2, heads) * rate_of(ends, place, 2 * n - 1, heads)
        mbarrier.wait(wrote, n & 1)
        x0 = of_chunks.index(2 * buffer).load(F)
        x1 = of_chunks.index(2 * buffer + 1).load(F)
        older_wrote = wrote_t.index(2 + buffer)
        if HALO:
            x2 = of_older.index(buffer).load(F)
            older_wrote = older_wrote.slice(CHUNK - OLDER, OLDER)
        at = memory + WHO * SIZE
        for s in range(WHO, HALF, 2):
            acc = warpgroup_mma(
                scaled(x0, keys_t, turned_t, 2 * buffer, s), wrote_t.index(0), nothing,
                use_acc=False, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma(
                scaled(x1, keys_t, turned_t, 2 * buffer + 1, s), wrote_t.index(1), acc,
                is_async=True,
            )  # fmt: skip
            if HALO:
                acc = warpgroup_mma_wait(1, deps=[acc])
                acc = warpgroup_mma(
                    scaled(x2, older_t, older_turned_t, buffer, s), older_wrote, acc, is_async=True
                )
            weight = of_pairs * gl.where(c == s, 1.0, ROOT2)
            weight = gl.where(gl.where(c >= s, c, s + HALF) < NUMBERS, weight, 0.0)
            tile = load_tile(line)
            copy_tile(at + 2 * SIZE, line)
            acc = warpgroup_mma_wait(0, deps=[acc])
            tile = rate * tile - weight[:, None] * acc
            store_tile(at, tile)
            at += 2 * SIZE
            if n < spans:
                show(weight[:, None] * tile, n * STEPS + s, low_t, ready, taken)
        # Squares of the upper half, or the numbers.
        weight = gl.where((c >= HALF) & (c < NUMBERS), of_pairs, 0.0)
        of_x0 = x0
        of_x1 = x1
        if WHO == 0:
            of_x0 = times(x0, x0)
            of_x1 = times(x1, x1)
        else:
            weight = gl.where(c < NUMBERS, of_numbers, 0.0)
        acc = warpgroup_mma(of_x0, wrote_t.index(0), nothing, use_acc=False, is_async=True)
        acc = warpgroup_mma(of_x1, wrote_t.index(1), acc, is_async=True)
        if HALO:
            of_x2 = x2
            if WHO == 0:
                of_x2 = times(x2, x2)
            acc = warpgroup_mma(of_x2, older_wrote, acc, is_async=True)
        tile = load_tile(line)
        copy_tile(memory + WHO * SIZE, line)
        acc = warpgroup_mma_wait(0, deps=[acc])
        tile = rate * tile - weight[:, None] * acc
        store_tile(at, tile)
        if n < spans:
            show(weight[:, None] * tile, n * STEPS + HALF + WHO, low_t, ready, taken)
    async_copy.wait_group(0)
