"""Tokens one after another: of each head first its numbers, then its columns.

`numbers` walks d, γ and z through the tokens; no column takes part in it. `chain` keeps C columns
of A on chip, all P rows in one tile, while a token after the other looks up what its key holds and
adds its outer product. All in fp32, on features that `describe` of the backward has formed.
"""

import triton
import triton.language as tl

from .triton_kernels import _slot, _tile

RUNTIME = (
    "heads", "blocks", "tokens", "eps",
    "stride_zb", "stride_zh", "stride_yb", "stride_yh",
    "stride_vb", "stride_vm", "stride_vh", "stride_gb", "stride_gm", "stride_gh",
    "stride_ab", "stride_ah", "stride_ap", "stride_ob", "stride_oh", "stride_op",
)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def numbers(
    features, size, normalizer, normalizer_out, inverse, slots, first,
    heads: tl.int32, tokens: tl.int32, eps: tl.float32,
    stride_zb: tl.int64, stride_zh: tl.int64, stride_yb: tl.int64, stride_yh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, DENOMINATOR: tl.constexpr,
    CORRECTION: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """1 / d of each token of one head, and z behind them."""
    number = tl.program_id(0)
    head = number % heads
    row = (number // heads).to(tl.int64)
    slot, live, held = _slot(slots, first, row, POOL, FIRST)
    of_head = row * heads + head
    p = tl.arange(0, P)
    inside = p < WIDE
    here = normalizer + slot * stride_zb + head * stride_zh
    z = tl.load(here + p, mask=inside & held, other=0.0)
    for i in tl.range(0, tokens):
        at = of_head * tokens + i
        if DENOMINATOR:
            f = tl.load(features + at * WIDE + p, mask=inside, other=0.0)
            d = tl.sum(f * z, 0) + eps
            new = d * 0.0 + 1.0
            if CORRECTION:
                square = tl.load(size + at)
                some = square > 0.0
                new = tl.where(some, 1.0 - d / tl.where(some, square, 1.0), 0.0)
                new = tl.minimum(tl.maximum(new, 0.0), 1.0)
                new = tl.where(held | (i > 0), new, 1.0)
            z += new * f
            tl.store(inverse + at, 1.0 / d)
        else:
            tl.store(inverse + at, 1.0)
    to = normalizer_out + slot * stride_yb + head * stride_yh
    tl.store(to + p, z, mask=inside & live)


@triton.jit(do_not_specialize=RUNTIME)
def chain(
    features, inverse, v, beta, state, state_out, change, slots, first,
    heads: tl.int32, blocks: tl.int32, tokens: tl.int32,
    stride_vb: tl.int64, stride_vm: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_op: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, CHANGE: tl.constexpr, CHANNELS: tl.constexpr,
    ALIGNED: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """C columns of one head's memory; E, too, if an echo needs it."""
    number = tl.program_id(0)
    block = number % blocks
    head = number // blocks % heads
    row = (number // blocks // heads).to(tl.int64)
    slot, live, held = _slot(slots, first, row, POOL, FIRST)
    of_head = row * heads + head
    p = tl.arange(0, P)
    e = block * C + tl.arange(0, C)
    inside = p < WIDE
    known = e < VALUES
    both = inside[:, None] & known[None, :]
    here = state + slot * stride_ab + head * stride_ah
    a = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=both & held, other=0.0)
    v_here = v + row * stride_vb + head * stride_vh + e
    gate_here = beta + row * stride_gb + head * stride_gh
    for i in tl.range(0, tokens):
        at = of_head * tokens + i
        f = tl.load(features + at * WIDE + p, mask=inside, other=0.0)
        old = tl.sum(f[:, None] * a, 0) * tl.load(inverse + at)
        given = tl.load(v_here + i * stride_vm, mask=known & live, other=0.0).to(tl.float32)
        error = given - old
        if CHANGE:
            tl.store(change + at * VALUES + e, error, mask=known)
        if CHANNELS:
            error *= tl.load(gate_here + i * stride_gm + e, mask=known & live, other=0.0)
        else:
            error *= tl.load(gate_here + i * stride_gm, mask=live, other=0.0)
        a += f[:, None] * error[None, :]
    to = state_out + slot * stride_ob + head * stride_oh
    tl.store(_tile(to, p, e, stride_op, ALIGNED), a, mask=both & live)
