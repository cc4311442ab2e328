"""What the Gluon kernels of this op share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from ..common import count_tiles, deal, place_tile

CONSUMERS = gl.constexpr(2)  # warpgroups that multiply; one more warp copies
ROWS = gl.constexpr(64)  # of the tile of one consumer: the M of a wgmma


@gluon.jit
def opaque(x):
    """A number that all threads agree on, without the assembler knowing which.

    A tile that several loops multiply is indexed anew with it before each. Where the loops share
    the matrix descriptors of the tile, the assembler sets their uniform registers before the first
    loop only, behind the branch that skips it, and the next loop reads them unset.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """COUNT pairs: completed by copies, and by all consumers."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    return full, free


@gluon.jit
def hold(barrier):
    """Keep the words of a barrier for it alone up to here, in variants too that do not use it.

    Words of a barrier must not serve as data before it is invalidated (PTX ISA, mbarrier). Seen on
    Hopper: data there does not outlive the turn that another process gets on the GPU. Triton gives
    the words of a barrier that nothing uses to the scratch of other instructions.
    """
    mbarrier.invalidate(barrier)


@gluon.jit
def new_turns(counter):
    """What `draw` and `take` share. A program's first tile has its own number; later ones are drawn
    from `counter`, which starts at 0, so that programs of few or short steps serve more of them.
    """
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], LAYOUT)
    drawn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(drawn.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=CONSUMERS)
    return counter, numbers, drawn, taken


@gluon.jit
def draw(turns, n):
    """In the producer's n-th tile: the number of the tile after it, for the consumers too."""
    counter, numbers, drawn, taken = turns
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    number = gl.num_programs(0) + gl.atomic_add(counter, 1)
    slot = n % 2
    mbarrier.wait(taken.index(slot), ((n // 2) & 1) ^ 1)
    numbers.index(slot).store(gl.full([1], number, gl.int32, ONE))
    mbarrier.arrive(drawn.index(slot), count=1)
    return number


@gluon.jit
def take(turns, n):
    """At the end of a consumer's n-th tile: the number of the tile after it."""
    counter, numbers, drawn, taken = turns
    slot = n % 2
    mbarrier.wait(drawn.index(slot), (n // 2) & 1)
    number = gl.max(numbers.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(taken.index(slot), count=1)
    return number


@gluon.jit
def place_rows(number, sizes, cu_q, cu_k, PACKED: gl.constexpr):
    """Where a query tile lies: batch, head, its number in the head, sequence, its first row inside
    that, the sequence's first row and first key, and how many rows and keys it has.
    """
    tq, tk, heads_q, group, sequences, window, tiles, together = sizes
    TILE: gl.constexpr = CONSUMERS * ROWS
    row_tiles = count_tiles(tq, sequences, TILE, PACKED)
    rank, batch_head = deal(number, row_tiles, tiles, together)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    of_head = row_tiles - 1 - rank  # the causal rows with most keys come first
    sequence, tile, first_row, rows, first_key, keys = place_tile(
        of_head, tq, tk, sequences, cu_q, cu_k, TILE, PACKED
    )
    row0 = tile * TILE
    keys = gl.where(row0 < rows, keys, 0)  # a tile past the rows of its sequence has no steps
    rows = gl.where(row0 < rows, rows, 0)
    return batch, head, of_head, sequence, row0, first_row, first_key, rows, keys


@gluon.jit
def zero_chunks(COUNT: gl.constexpr, TILE_ROWS: gl.constexpr, CHUNK: gl.constexpr,
                 LAYOUT: gl.constexpr):  # fmt: skip
    """COUNT accumulators of [TILE_ROWS, CHUNK]."""
    chunks = ()
    for _ in gl.static_range(COUNT):
        chunks += (gl.zeros([TILE_ROWS, CHUNK], gl.float32, LAYOUT),)
    return chunks


@gluon.jit
def wait_chunks(chunks):
    """The accumulators, once all products are through."""
    if len(chunks) == 1:
        chunks = (warpgroup_mma_wait(0, deps=chunks),)
    else:
        chunks = warpgroup_mma_wait(0, deps=chunks)
    return chunks


@gluon.jit
def part_of(plan, PART: gl.constexpr):
    """First step and end of a part of the loop: needs masks, needs none, and needs them again."""
    begin, whole, whole_end, end = plan
    first = begin if PART == 0 else (whole if PART == 1 else whole_end)
    last = whole if PART == 0 else (whole_end if PART == 1 else end)
    return first, last


@gluon.jit
def hide(x, at, low, count):
    """x where low ≤ at < low + count, −inf elsewhere.

    Written out, as LLVM packs the outcomes of these comparisons into bits of words and takes them
    out again, which makes a step half as long again.
    """
    return gl.inline_asm_elementwise(
        """
        { .reg .pred seen;
        .reg .b32 from_low;
        sub.s32 from_low, $2, $3;
        setp.lt.u32 seen, from_low, $4;
        selp.f32 $0, $1, 0fFF800000, seen; }
        """,
        "=f,f,r,r,r",
        [x, at, low, count],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def clear_rows(tile, first, TILE_ROWS: gl.constexpr, COLS: gl.constexpr):
    """Zero rows `first` … of a 16-bit tile in shared memory, for wgmma to read; by one warp.

    Swizzled by 128 bytes, the tile is a row of blocks of 64 columns, each a pile of eight-row
    chunks of 1 KiB.
    """
    CHUNK: gl.constexpr = 8
    ACROSS: gl.constexpr = 64
    CHUNKS: gl.constexpr = TILE_ROWS // CHUNK
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    chunks = tile._reinterpret(tile.dtype, [COLS // ACROSS * CHUNKS, CHUNK, ACROSS], SWIZZLED)
    for chunk in range(first // CHUNK, CHUNKS):
        rows = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
        for block in gl.static_range(COLS // ACROSS):
            part = chunks.index(block * CHUNKS + chunk)
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
