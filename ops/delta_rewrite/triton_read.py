"""Reads of the delta rewrite: y = φ(q) A' / s, a product of many rows."""

import triton
import triton.language as tl

from .triton_kernels import RUNTIME, _slot, _tile


@triton.jit(do_not_specialize=RUNTIME)
def read(
    features, state, inverse, slots, first, y,
    heads: tl.int32, blocks: tl.int32, tiles: tl.int32, reads: tl.int32,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, DENOMINATOR: tl.constexpr, COPY: tl.constexpr,
    BULK: tl.constexpr, ALIGNED: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr, ROW: tl.constexpr, T: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """T queries and C columns of one head; columns of one tile follow each other.

    COPY: `state` is (B·H, P, COLUMNS), as `rewrite` leaves it, rows of 16-byte multiples; otherwise
    memories or a pool of them. BULK: `features` and `state`, a copy, are descriptors.
    """
    number = tl.program_id(0)
    block = number % blocks
    tile = number // blocks % tiles
    of_head = (number // blocks // tiles).to(tl.int64)
    row = of_head // heads
    head = of_head % heads
    slot, live, held = _slot(slots, first, row, POOL, FIRST)
    t = tile * T + tl.arange(0, T)
    e = block * C + tl.arange(0, C)
    there = t < reads
    found = tl.zeros([T, C], tl.float32)
    if BULK:
        for p0 in tl.range(0, WIDE, K, num_stages=STAGES):
            g = features.load([of_head.to(tl.int32), tile * T, p0]).reshape([T, K])
            a = state.load([of_head.to(tl.int32), p0, block * C]).reshape([K, C])
            found = tl.dot(g, a, found, input_precision=PRECISION)
        found = tl.where(live, found, 0.0)  # nobody has written what is there
    else:
        queries = features + of_head * reads * ROW
        kind: tl.constexpr = features.dtype.element_ty
        if COPY:
            here = state + of_head * WIDE * COLUMNS
            stride = tl.full([], COLUMNS, tl.int64)
            columns = e < COLUMNS
            counts = live
        else:
            here = state + slot * stride_ab + head * stride_ah
            stride = stride_ap
            columns = e < VALUES
            counts = held
        for p0 in tl.range(0, WIDE, K, num_stages=STAGES):
            p = p0 + tl.arange(0, K)
            mask = there[:, None] & (p < ROW)[None, :]
            g = tl.load(_tile(queries, t, p, ROW, True), mask=mask, other=0.0)  # [T, K]
            mask = ((p < WIDE) & counts)[:, None] & columns[None, :]
            a = tl.load(_tile(here, p, e, stride, ALIGNED), mask=mask, other=0.0)  # [K, C]
            found = tl.dot(g, a.to(kind), found, input_precision=PRECISION)
    if DENOMINATOR:
        of_row = inverse + of_head * reads + t
        found *= tl.load(of_row, mask=there, other=0.0)[:, None]
    to = y + ((row * reads + t.to(tl.int64)) * heads + head)[:, None] * VALUES + e[None, :]
    tl.store(to, found.to(y.dtype.element_ty), mask=there[:, None] & (e < VALUES)[None, :])
