"""What the Gluon kernels of this op share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

CONSUMERS = gl.constexpr(2)  # warpgroups that multiply; one more warp copies
ROWS = gl.constexpr(64)  # of the tile of one consumer: the M of a wgmma


@gluon.jit
def count_mine(tiles):
    """How many of `tiles` tiles this program serves; see `my_tile`."""
    pid = gl.program_id(0)
    grid = gl.num_programs(0)
    rounds = tiles // grid
    place = gl.where((rounds & 1) == 1, grid - 1 - pid, pid)
    return rounds + gl.where(place < tiles % grid, 1, 0)


@gluon.jit
def my_tile(n):
    """The n-th tile of this program. Rounds go there and back, lest one gets only the long ones."""
    pid = gl.program_id(0)
    grid = gl.num_programs(0)
    return n * grid + gl.where((n & 1) == 1, grid - 1 - pid, pid)


@gluon.jit
def clear_rows(tile, first, TILE_ROWS: gl.constexpr, COLS: gl.constexpr):
    """Zero rows `first` … of a tile in shared memory, for wgmma to read; by one warp."""
    CHUNK: gl.constexpr = 8
    ACROSS: gl.constexpr = 32 if COLS >= 256 else COLS // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [1, 1], [1, 0])
    for chunk in gl.static_range(TILE_ROWS // CHUNK):
        if first < (chunk + 1) * CHUNK:
            part = tile.slice(chunk * CHUNK, CHUNK, dim=0)
            rows = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
            part.store(gl.where(rows[:, None] < first, part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def store_rows(
    tile, x, out, first, stride, rows,
    WIDTH: gl.constexpr, TILE_ROWS: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """Write the first `rows` rows of a wgmma result to out + first + i·stride, by four warps.

    On its way it lies in `tile`, shared memory that nobody else reads any more: from there a warp
    stores whole lines, where straight from the accumulators it would store eight pieces of sixteen
    bytes an instruction.
    """
    ACROSS: gl.constexpr = 32 if COLS >= 256 else COLS // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    tile.store(x.to(out.dtype.element_ty))
    row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    at = first + row.to(gl.int64)[:, None] * stride + col[None, :]
    mask = (row < rows)[:, None] & (col < WIDTH)[None, :]
    gl.store(out + at, tile.load(LAYOUT), mask=mask)
    fence_async_shared()  # the next to write there may be a copy
