"""The delta rewrite of few tokens in one launch: features, the memory behind them, and reads of it.

A program forms C columns of one head's memory and reads them with every `splits`-th tile of
queries. It forms the features of all tokens itself, and those of its queries: cheaper than a launch
as long as they are few. With splits, several programs form the same columns, one of which stores
them; in a pool, where nobody may read any longer what is overwritten, there is one of each.
"""

import triton
import triton.language as tl

from .triton_kernels import RUNTIME, _features, _newness, _slot, _tile


@triton.jit
def _all_have_read(counter, programs):
    """Whether this program is the last one of those that read what one of them may then write."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.debug_barrier()
    return before == programs - 1


@triton.jit(do_not_specialize=RUNTIME)
def whole(
    k, v, beta, state, normalizer, state_out, normalizer_out, q, y, counters, slots, first,
    heads: tl.int32, blocks: tl.int32, splits: tl.int32, tokens: tl.int32, reads: tl.int32,
    eps: tl.float32, eps_norm: tl.float32,
    stride_kb: tl.int64, stride_km: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vm: tl.int64, stride_vh: tl.int64,
    stride_bb: tl.int64, stride_bm: tl.int64, stride_bh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_op: tl.int64,
    stride_yb: tl.int64, stride_yh: tl.int64,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, READ: tl.constexpr, CHANNELS: tl.constexpr,
    NORMALIZE: tl.constexpr, DENOMINATOR: tl.constexpr, CORRECTION: tl.constexpr,
    ALIGNED: tl.constexpr, V_ALIGNED: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    ORDER: tl.constexpr, W: tl.constexpr, M: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """C columns of one head, and one of `splits` shares of its queries; of a pool, all of them.

    All programs of a head read z. In a pool the last one that has overwrites it; `counters`, B·H
    zeros, say which one that is.
    """
    number = tl.program_id(0)
    split = number % splits
    block = number // splits % blocks
    head = number // splits // blocks % heads
    row = (number // splits // blocks // heads).to(tl.int64)
    slot, live, held = _slot(slots, first, row, POOL, FIRST)
    kind: tl.constexpr = k.dtype.element_ty
    e = block * C + tl.arange(0, C)
    known = e < VALUES
    c = tl.arange(0, W)
    inside = c < WIDTH
    here = state + slot * stride_ab + head * stride_ah
    z_here = normalizer + slot * stride_zb + head * stride_zh

    i = tl.arange(0, M)
    there = (i < tokens) & live
    of_k = k + row * stride_kb + head * stride_kh
    at = i.to(tl.int64) * stride_km
    # What is asked for first comes while features are formed.
    mask = there[:, None] & known[None, :]
    row_v = v + row * stride_vb + head * stride_vh
    wanted = tl.load(_tile(row_v, i, e, stride_vm, V_ALIGNED), mask=mask, other=0.0)
    row_b = beta + row * stride_bb + head * stride_bh
    if CHANNELS:
        gate = tl.load(_tile(row_b, i, e, stride_bm, False), mask=mask, other=0.0)
    else:
        gate = tl.load(row_b + i.to(tl.int64) * stride_bm, mask=there, other=0.0)[:, None]
    z = ()
    for n in tl.static_range(2 * ORDER):
        z += (tl.load(z_here + n * WIDTH + c, mask=inside & held, other=0.0),)
    f, square = _features(of_k, at[:, None], c[None, :], there[:, None], WIDTH, ORDER, 1, NORMALIZE)
    present = (inside & held)[:, None] & known[None, :]
    old = tl.zeros([M, C], tl.float32)  # N
    for n in tl.range(0, 2 * ORDER, num_stages=STAGES):  # that loads be ahead of products
        a = tl.load(_tile(here, n * WIDTH + c, e, stride_ap, ALIGNED), mask=present, other=0.0)
        mine = f[0]
        for other in tl.static_range(1, 2 * ORDER):
            mine = tl.where(n == other, f[other], mine)
        old = tl.dot(mine.to(kind), a.to(kind), old, input_precision=PRECISION)
    # Again, from a cache: kept, they would fill the registers twice over.
    before = ()
    for n in tl.static_range(2 * ORDER):
        pointers = _tile(here, n * WIDTH + c, e, stride_ap, ALIGNED)
        before += (tl.load(pointers, mask=present, other=0.0),)
    new_rows = tl.zeros([M], tl.float32)  # without denominators z stays as it is
    if DENOMINATOR:
        products = f[0] * z[0][None, :]
        for n in tl.static_range(1, 2 * ORDER):
            products += f[n] * z[n][None, :]
        d = tl.sum(products, 1) + eps
        old *= (1.0 / d)[:, None]
        new_rows = tl.full([M], 1.0, tl.float32)
        if CORRECTION:
            new_rows = _newness(d, tl.sum(square, 1), held, eps_norm)
    error = ((wanted.to(tl.float32) - old) * gate).to(kind)  # [M, C]

    of_head = row * heads + head
    to_here = state_out + slot * stride_ob + head * stride_oh
    after = ()
    z_after = ()
    for n in tl.static_range(2 * ORDER):
        new = tl.dot(tl.trans(f[n].to(kind)), error, before[n], input_precision=PRECISION)
        mask = (inside & live & (split == 0))[:, None] & known[None, :]
        tl.store(_tile(to_here, n * WIDTH + c, e, stride_op, ALIGNED), new, mask=mask)
        after += (new.to(kind),)
        z_after += (z[n] + tl.sum(f[n] * new_rows[:, None], 0),)
    if POOL:
        writes = _all_have_read(counters + of_head, blocks) & live
    else:
        writes = (split == 0) & (block == 0)
    to_z = normalizer_out + slot * stride_yb + head * stride_yh
    for n in tl.static_range(2 * ORDER):
        tl.store(to_z + n * WIDTH + c, z_after[n], mask=inside & writes)

    if READ:
        of_q = q + row * stride_qb + head * stride_qh
        for t0 in tl.range(split * T, reads, splits * T):
            t = t0 + tl.arange(0, T)
            asked = (t < reads) & live
            g, _of_queries = _features(
                of_q, (t.to(tl.int64) * stride_qm)[:, None], c[None, :], asked[:, None],
                WIDTH, ORDER, 1, NORMALIZE,
            )  # fmt: skip
            found = tl.zeros([T, C], tl.float32)
            sums = tl.zeros([T, W], tl.float32)
            for n in tl.static_range(2 * ORDER):
                found = tl.dot(g[n].to(kind), after[n], found, input_precision=PRECISION)
                sums += g[n] * z_after[n][None, :]
            if DENOMINATOR:
                found = found / (tl.sum(sums, 1) + eps)[:, None]
            to = y + ((row * reads + t.to(tl.int64)) * heads + head)[:, None] * VALUES + e[None, :]
            to_mask = (t < reads)[:, None] & known[None, :]
            tl.store(to, found.to(y.dtype.element_ty), mask=to_mask)
