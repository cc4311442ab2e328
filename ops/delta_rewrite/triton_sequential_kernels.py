"""Tokens one after another: of each head first its numbers, then its columns.

`numbers` walks d, γ and z through the tokens; no column takes part in it. `chain` keeps C columns
of A on chip, all P rows in one tile, while a token after the other looks up what its key holds and
adds its outer product. All in fp32, on features that `describe` of the backward has formed.

Backward, `chain_back` walks the gradient of A from the last token to the first, `chain_again` A
once more as the forward did, and `numbers_back` that of z. Each leaves its part of the gradient of
a token's features.
"""

import triton
import triton.language as tl

from .triton_kernels import _slot, _tile

RUNTIME = (
    "heads", "blocks", "tokens", "eps",
    "stride_zb", "stride_zh", "stride_yb", "stride_yh",
    "stride_vb", "stride_vm", "stride_vh", "stride_gb", "stride_gm", "stride_gh",
    "stride_ab", "stride_ah", "stride_ap", "stride_ob", "stride_oh", "stride_op", "total",
)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def numbers(
    features, size, normalizer, normalizer_out, inverse, gamma, found, slots, first,
    heads: tl.int32, tokens: tl.int32, eps: tl.float32,
    stride_zb: tl.int64, stride_zh: tl.int64, stride_yb: tl.int64, stride_yh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, KEEP: tl.constexpr, DENOMINATOR: tl.constexpr,
    CORRECTION: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """1 / d of each token of one head, and z behind them; d and γ, too, if they are to be kept."""
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
            if KEEP:
                tl.store(gamma + at, new)
                tl.store(found + at, d)
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


@triton.jit(do_not_specialize=RUNTIME)
def chain_back(
    features, inverse, beta, change, d_behind, got, upstream, d_v, d_beta, d_before, first,
    heads: tl.int32, blocks: tl.int32, tokens: tl.int32, total: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """C columns of the gradient of one head's memory, from the last token to the first.

    Of each token X, the gradients of v and of β (or a block's share), and (β ∘ E) dAᵀ. `total`:
    tokens of all heads.
    """
    number = tl.program_id(0)
    block = number % blocks
    head = number // blocks % heads
    row = (number // blocks // heads).to(tl.int64)
    of_head = row * heads + head
    p = tl.arange(0, P)
    e = block * C + tl.arange(0, C)
    inside = p < WIDE
    known = e < VALUES
    both = inside[:, None] & known[None, :]
    here = d_behind + row * stride_ab + head * stride_ah
    d = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=both, other=0.0)
    gate_here = beta + row * stride_gb + head * stride_gh
    for n in tl.range(0, tokens):
        i = tokens - 1 - n
        at = of_head * tokens + i
        to = ((row * tokens + i) * heads + head) * VALUES + e
        f = tl.load(features + at * WIDE + p, mask=inside, other=0.0)
        written = tl.sum(f[:, None] * d, 0)
        error = tl.load(change + at * VALUES + e, mask=known, other=0.0)
        share = written * error
        if CHANNELS:
            gate = tl.load(gate_here + i * stride_gm + e, mask=known, other=0.0)
            tl.store(d_beta + to, share, mask=known)
            written *= gate
            error *= gate
        else:
            gate_of_all = tl.load(gate_here + i * stride_gm)
            tl.store(d_beta + block * total + at, tl.sum(share, 0))
            written *= gate_of_all
            error *= gate_of_all
        tl.store(d_v + to, written.to(d_v.dtype.element_ty), mask=known)
        tl.store(upstream + at * VALUES + e, written, mask=known)
        part = tl.sum(d * error[None, :], 1)
        tl.store(got + (block * total + at) * WIDE + p, part, mask=inside)
        d -= f[:, None] * (written * tl.load(inverse + at))[None, :]
    if FIRST:
        d = tl.where(tl.load(first + row) == 0, d, 0.0)
    to_a = d_before + of_head * WIDE * VALUES
    tl.store(_tile(to_a, p, e, VALUES, False), d, mask=both)


@triton.jit(do_not_specialize=RUNTIME)
def chain_again(
    features, inverse, beta, change, upstream, state, got, of_w, first,
    heads: tl.int32, blocks: tl.int32, tokens: tl.int32, total: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """C columns of one head's memory through all tokens: −w X Aᵀ, added to `got`, and ⟨X, f A⟩."""
    number = tl.program_id(0)
    block = number % blocks
    head = number // blocks % heads
    row = (number // blocks // heads).to(tl.int64)
    slot, _live, held = _slot(first, first, row, False, FIRST)
    of_head = row * heads + head
    p = tl.arange(0, P)
    e = block * C + tl.arange(0, C)
    inside = p < WIDE
    known = e < VALUES
    both = inside[:, None] & known[None, :]
    here = state + slot * stride_ab + head * stride_ah
    a = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=both & held, other=0.0)
    gate_here = beta + row * stride_gb + head * stride_gh
    for i in tl.range(0, tokens):
        at = of_head * tokens + i
        f = tl.load(features + at * WIDE + p, mask=inside, other=0.0)
        x = tl.load(upstream + at * VALUES + e, mask=known, other=0.0)
        part = tl.sum(a * x[None, :], 1)
        tl.store(of_w + block * total + at, tl.sum(part * f, 0))
        pointers = got + (block * total + at) * WIDE + p
        before = tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, before - part * tl.load(inverse + at), mask=inside)
        error = tl.load(change + at * VALUES + e, mask=known, other=0.0)
        if CHANNELS:
            error *= tl.load(gate_here + i * stride_gm + e, mask=known, other=0.0)
        else:
            error *= tl.load(gate_here + i * stride_gm)
        a += f[:, None] * error[None, :]


@triton.jit(do_not_specialize=RUNTIME)
def numbers_back(
    features, size, inverse, gamma, found, of_w, normalizer, d_after, got, d_before, first,
    heads: tl.int32, blocks: tl.int32, tokens: tl.int32, total: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    FIRST: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The gradient of z of one head, from the last token to the first; `normalizer` is z'."""
    number = tl.program_id(0)
    head = number % heads
    row = (number // heads).to(tl.int64)
    of_head = row * heads + head
    _, _live, held = _slot(first, first, row, False, FIRST)
    p = tl.arange(0, P)
    inside = p < WIDE
    block = tl.arange(0, BLOCKS)
    z = tl.load(normalizer + of_head * WIDE + p, mask=inside, other=0.0)
    dz = tl.load(d_after + row * stride_zb + head * stride_zh + p, mask=inside, other=0.0)
    for n in tl.range(0, tokens):
        i = tokens - 1 - n
        at = of_head * tokens + i
        f = tl.load(features + at * WIDE + p, mask=inside, other=0.0)
        w = tl.load(inverse + at)
        new = tl.load(gamma + at)
        z -= new * f
        shares = tl.load(of_w + block * total + at, mask=block < blocks, other=0.0)
        dd = w * w * tl.sum(shares, 0)
        mine = new * dz
        if FULL:
            square = tl.load(size + at)
            d = tl.load(found + at)
            some = square > 0.0
            safe = tl.where(some, square, 1.0)
            loose = 1.0 - d / safe
            counts = some & (loose > 0.0) & (loose < 1.0) & (held | (i > 0))
            d_new = tl.sum(f * dz, 0)
            dd -= tl.where(counts, d_new / safe, 0.0)
            mine += tl.where(counts, 2.0 * d_new * d / (safe * safe), 0.0) * f
        mine += dd * z
        tl.store(got + (blocks * total + at) * WIDE + p, mine, mask=inside)
        dz += dd * f
    dz = tl.where(held, dz, 0.0)
    tl.store(d_before + of_head * WIDE + p, dz, mask=inside)
