"""From group to group: the memory at the begin of each, from what `omega_maps` says of them, and on
the way back its gradient at the end of each.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads"])
def omega_begins(
    maps, initial_state, begins,
    heads: tl.int32,
    INITIAL: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of a head's memories, transposed: M ← T M + O after each group but the last.

    maps (N · GROUPS, H, ROWS, D): Tᵀ, D rows, then Oᵀ; of the first group Oᵀ is the memory at its
    end. initial_state (N, H, WIDTH, VALUES), begins (N · GROUPS, H, WIDTH, VALUES), all fp32.
    """
    blocks: tl.constexpr = (VALUES + V - 1) // V
    number = tl.program_id(0)
    head = number // blocks % heads
    sequence = (number // blocks // heads).to(tl.int64)
    v = number % blocks * V + tl.arange(0, V)
    d = tl.arange(0, D)
    inside = (v < VALUES)[:, None] & (d < WIDTH)[None, :]
    cells = d[None, :] * VALUES + v[:, None]
    M = tl.zeros((V, D), tl.float32)
    if INITIAL:
        of_sequence = (sequence * heads + head) * (WIDTH * VALUES)
        M = tl.load(initial_state + of_sequence + cells, mask=inside, other=0.0)
    at = sequence * GROUPS * heads + head
    tl.store(begins + at * (WIDTH * VALUES) + cells, M, mask=inside)
    M = tl.load(maps + at * (ROWS * D) + (D + v)[:, None] * D + d[None, :])
    for _ in range(GROUPS - 2):
        at += heads
        tl.store(begins + at * (WIDTH * VALUES) + cells, M, mask=inside)
        slope = tl.load(maps + at * (ROWS * D) + d[:, None] * D + d[None, :])
        offset = tl.load(maps + at * (ROWS * D) + (D + v)[:, None] * D + d[None, :])
        M = offset + tl.dot(M, slope, input_precision=PRECISION)
    tl.store(begins + (at + heads) * (WIDTH * VALUES) + cells, M, mask=inside)


@triton.jit(do_not_specialize=["heads"])
def omega_ends(
    maps, d_last, d_begins, d_ends,
    heads: tl.int32,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V columns of a head's gradients at the ends of groups, from the last to the first, whose own
    begin is not asked for: dM ← Tᵀ dM + what reads within the group pull at.

    d_last (N, H, WIDTH, VALUES): the last end. d_begins (N · GROUPS, H, WIDTH, VALUES): dM at the
    begin of each group, had it ended in 0, of the last one in d_last; d_ends the same shape.
    """
    blocks: tl.constexpr = (VALUES + V - 1) // V
    number = tl.program_id(0)
    head = number // blocks % heads
    sequence = (number // blocks // heads).to(tl.int64)
    v = number % blocks * V + tl.arange(0, V)
    d = tl.arange(0, D)
    inside = (d < WIDTH)[:, None] & (v < VALUES)[None, :]
    cells = d[:, None] * VALUES + v[None, :]
    of_sequence = (sequence * heads + head) * (WIDTH * VALUES)
    dM = tl.load(d_last + of_sequence + cells, mask=inside, other=0.0)
    at = (sequence * GROUPS + GROUPS - 1) * heads + head
    tl.store(d_ends + at * (WIDTH * VALUES) + cells, dM, mask=inside)
    dM = tl.load(d_begins + at * (WIDTH * VALUES) + cells, mask=inside, other=0.0)
    for _ in range(GROUPS - 2):
        at -= heads
        tl.store(d_ends + at * (WIDTH * VALUES) + cells, dM, mask=inside)
        slope = tl.load(maps + at * (ROWS * D) + d[:, None] * D + d[None, :])
        offset = tl.load(d_begins + at * (WIDTH * VALUES) + cells, mask=inside, other=0.0)
        dM = offset + tl.dot(slope, dM, input_precision=PRECISION)
    tl.store(d_ends + (at - heads) * (WIDTH * VALUES) + cells, dM, mask=inside)
