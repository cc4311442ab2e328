"""Few heads on Hopper, in Gluon: what groups of the chunks of a sequence do to a memory.

From its begin to its end a group changes the memory by an affine map, M → T M + O, whatever M is.
Columns of T are what columns of I become where values are 0, those of O what 0 becomes. The first
group begins at the initial state, and its O is the memory at its end.

    produce   one warp; copies a chunk's keys and values while earlier chunks are at work
    walk      a warpgroup, as in `hopper_fwd`; there is nobody to leave anything for
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_fwd import (
    CHUNK,
    COLUMNS,
    SCAN_RUNTIME,
    among_groups,
    barriers,
    columns_of_state,
    place_sequence,
    produce,
    product,
    walk_along,
)


@gluon.jit
def _walk_group(
    tiles, bars, writes, ends, initial_state, maps, place, heads,
    DOT: gl.constexpr, INITIAL: gl.constexpr, HALO: gl.constexpr, WIDTH: gl.constexpr,
    VALUES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Role of a warpgroup: columns of T, which are in front of v's first, or of O."""
    k_t, v_t, k_older_t, v_older_t = tiles
    sequence, batch, head, v0, begin, end, count, slot0 = place
    row = D + v0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, product(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, product(D)))
    M = gl.where((begin > 0) & (row[:, None] == d[None, :]), 1.0, 0.0)
    if INITIAL:
        first = (batch, batch, head, v0, begin, end, count, slot0)
        cells, inside = columns_of_state(first, heads, WIDTH, VALUES, D)
        there = inside & (begin == 0) & (v0 >= 0)
        M += gl.load(initial_state + cells, mask=there, other=0.0)
    M, S = walk_along(
        M, M, tiles, (k_t, k_t, k_t, k_t, k_t), bars, writes, writes, ends, place, heads,
        DOT, False, HALO, D, STAGES, 1, False, False,
    )  # fmt: skip
    ROWS: gl.constexpr = D + (VALUES + COLUMNS - 1) // COLUMNS * COLUMNS
    at = (sequence.to(gl.int64) * heads + head) * (ROWS * D)
    gl.store(maps + at + row[:, None] * D + d[None, :], M)


@gluon.jit(do_not_specialize=SCAN_RUNTIME)
def omega_maps(
    k, v, k_older, v_older, tail_k, tail_v, tail_length, writes, ends, initial_state, maps,
    tokens: gl.int32, heads: gl.int32, chunks: gl.int32, older: gl.int32,
    DOT: gl.constexpr, INITIAL: gl.constexpr, TAIL: gl.constexpr, LENGTHS: gl.constexpr,
    HALO: gl.constexpr, WIDTH: gl.constexpr, VALUES: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """T and O of all groups of each sequence but the last, transposed; the first group has no T.

    maps (N · GROUPS, H, D + VALUES padded to a multiple of COLUMNS, D), fp32: rows of T, then of O.
    The others as in `omega_scan`.
    """
    blocks: gl.constexpr = D // COLUMNS + (VALUES + COLUMNS - 1) // COLUMNS
    number = among_groups(gl.program_id(0), blocks * heads, 0, GROUPS - 1, GROUPS)
    sequence, batch, head, v0, begin, end, count, slot0 = place_sequence(
        number, writes, tokens, heads, chunks, D + VALUES, False, GROUPS
    )
    v0 -= D  # copies of values from there are 0
    count = gl.where((begin == 0) & (v0 < 0), 0, count)
    place = (sequence, batch, head, v0, begin, end, count, slot0)
    dtype: gl.constexpr = k.dtype
    k_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k.layout)
    v_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, COLUMNS], v.layout)
    k_older_t = k_t
    v_older_t = v_t
    if HALO:
        k_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, D], k_older.layout)
        v_older_t = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, HALO, COLUMNS], v_older.layout)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    copied = barriers(1, 1)
    gl.warp_specialize(
        [
            (
                _walk_group,
                (
                    (k_t, v_t, k_older_t, v_older_t), (full, free, full, free), writes, ends,
                    initial_state, maps, place, heads,
                    DOT, INITIAL, HALO, WIDTH, VALUES, D, STAGES,
                ),
            ),
            (
                produce,
                (
                    (k, k, v, k_older, v_older, tail_k, tail_v, k, k), tail_length,
                    (k_t, k_t, v_t, k_t, k_older_t, v_older_t, k_t),
                    (full, free, copied.index(0)), place, heads, older,
                    False, TAIL, LENGTHS, HALO, D, STAGES, False,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
