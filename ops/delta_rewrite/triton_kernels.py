"""The delta rewrite on a GPU: features, then memories that are read once and written once, reads.

`prepare` forms φ of tokens and queries, and what a token's scalars are: w = 1/d and γ. `rewrite`
keeps C columns of A on chip, all P rows in tiles of K, while the tokens look up what their keys
held (F A), form E, and add Fᵀ (β ∘ E); no program needs what another one of them computes. `read`
multiplies φ(q) with the new memory, tile by tile.

Features are stored in the dtype of k, as operands of products; those of tokens in fp32 as well, for
z'. z is read by `prepare` alone, so that it can be changed in place.
"""

import triton
import triton.language as tl

# Squares of products of numbers up to one: those of 1e-35 are still above zero, and a sum of a
# thousand is below infinity.
LIFT = tl.constexpr(2.0**55)
RUNTIME = (
    "heads", "blocks", "tokens", "tiles", "key_tiles", "reads", "eps", "eps_norm",
    "stride_kb", "stride_km", "stride_kh", "stride_vb", "stride_vm", "stride_vh",
    "stride_bb", "stride_bm", "stride_bh", "stride_qb", "stride_qm", "stride_qh",
    "stride_ab", "stride_ah", "stride_ap", "stride_zb", "stride_zh",
    "stride_ob", "stride_oh", "stride_op", "stride_yb", "stride_yh",
)  # fmt: skip


@triton.jit
def _unit(x, at, there, WIDTH: tl.constexpr, W: tl.constexpr):
    """1 / max |x| of rows that start at `at`; 1 for a row of zeros."""
    c = tl.arange(0, W)
    mask = there[:, None] & (c < WIDTH)[None, :]
    values = tl.load(x + at[:, None] + c[None, :], mask=mask, other=0.0)
    size = tl.max(tl.abs(values.to(tl.float32)), 1)
    return 1.0 / tl.where(size > 0.0, size, 1.0)


@triton.jit
def _rectified(x, at, p, mask, WIDTH: tl.constexpr):
    """Numbers p of r = [relu(x), relu(−x)] of each row."""
    up = p < WIDTH
    pointers = x + at[:, None] + tl.where(up, p, p - WIDTH)[None, :]
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return tl.maximum(tl.where(up[None, :], values, -values), 0.0)


@triton.jit
def _products(x, at, place, there, unit, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Features at `place` before they are normalised: r[p] · r[p − j] of rows of x times `unit`."""
    p = place % (2 * WIDTH)
    shifted = p - (place // (2 * WIDTH) + 1) % (2 * WIDTH)
    shifted = tl.where(shifted < 0, shifted + 2 * WIDTH, shifted)
    mask = there[:, None] & (place < WIDE)[None, :]
    left = _rectified(x, at, p, mask, WIDTH) * unit[:, None]
    return left * (_rectified(x, at, shifted, mask, WIDTH) * unit[:, None])


@triton.jit
def _slot(slots, first, row, POOL: tl.constexpr, FIRST: tl.constexpr):
    """A row's slot, whether there is one, and whether the memory in it counts."""
    slot = row
    if POOL:
        slot = tl.load(slots + row)
    live = slot >= 0
    held = live
    if FIRST:
        held = live & (tl.load(first + row) == 0)
    return tl.maximum(slot, 0), live, held


@triton.jit
def _tile(x, rows, cols, stride, ALIGNED: tl.constexpr):
    """Pointers to [rows, cols] of a matrix that starts at x, whose rows are `stride` apart."""
    pointers = x + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (16, 16))
    return pointers


@triton.jit(do_not_specialize=RUNTIME)
def prepare(
    k, q, features, wide_features, query_features, normalizer, slots, first, inverse, gamma,
    heads: tl.int32, tiles: tl.int32, key_tiles: tl.int32, tokens: tl.int32, reads: tl.int32,
    eps: tl.float32, eps_norm: tl.float32,
    stride_kb: tl.int64, stride_km: tl.int64, stride_kh: tl.int64,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr, WIDER: tl.constexpr,
    NORMALIZE: tl.constexpr, DENOMINATOR: tl.constexpr, CORRECTION: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Features of R rows of k or, behind those, of q; w and γ of tokens. Skipped: zeros."""
    number = tl.program_id(0)
    tile = number % tiles
    head = number // tiles % heads
    row = (number // tiles // heads).to(tl.int64)
    slot, live, held = _slot(slots, first, row, POOL, FIRST)
    of_key = tile < key_tiles
    of_head = row * heads + head
    if of_key:
        rows = k + row * stride_kb + head * stride_kh
        stride = stride_km
        count = tokens
    else:
        rows = q + row * stride_qb + head * stride_qh
        stride = stride_qm
        count = reads
        tile -= key_tiles
    i = tile * R + tl.arange(0, R)
    real = i < count
    there = real & live
    at = i.to(tl.int64) * stride
    unit = tl.full([R], 1.0, tl.float32)
    factor = unit
    square = tl.zeros([R], tl.float32)
    if NORMALIZE:
        unit = _unit(rows, at, there, WIDTH, W)
        for p0 in tl.range(0, WIDE, K):
            h = _products(rows, at, p0 + tl.arange(0, K), there, unit, WIDTH, WIDE) * LIFT
            square += tl.sum(h * h, 1)
        some = square > 0.0
        factor = tl.where(some, LIFT / tl.sqrt_rn(tl.where(some, square, 1.0)), 0.0)
        square = tl.where(some, 1.0, 0.0)
    z_here = normalizer + slot * stride_zb + head * stride_zh
    d = tl.zeros([R], tl.float32)
    for p0 in tl.range(0, WIDE, K):
        place = p0 + tl.arange(0, K)
        f = _products(rows, at, place, there, unit, WIDTH, WIDE) * factor[:, None]  # [R, K]
        mask = real[:, None] & (place < WIDE)[None, :]
        pointers = (of_head * count + i.to(tl.int64))[:, None] * WIDE + place[None, :]
        kind: tl.constexpr = query_features.dtype.element_ty
        tl.store(query_features + pointers, f.to(kind), mask=mask & (not of_key))
        if KEYS:
            tl.store(features + pointers, f.to(features.dtype.element_ty), mask=mask & of_key)
            if WIDER:
                tl.store(wide_features + pointers, f, mask=mask & of_key)
            if DENOMINATOR:
                z = tl.load(z_here + place, mask=(place < WIDE) & held & of_key, other=0.0)
                d += tl.sum(f * z[None, :], 1)
                if not NORMALIZE:
                    square += tl.sum(f * f, 1)
    if KEYS:
        of_token = of_head * tokens + i.to(tl.int64)
        new = tl.full([R], 1.0, tl.float32)
        w = new
        if DENOMINATOR:
            d += eps
            w = 1.0 / d
            if CORRECTION:
                square += eps_norm
                some = square > 0.0
                new = tl.where(some, 1.0 - d / tl.where(some, square, 1.0), 0.0)
                new = tl.where(held, tl.minimum(tl.maximum(new, 0.0), 1.0), 1.0)
        tl.store(inverse + of_token, w, mask=real & of_key)
        tl.store(gamma + of_token, new, mask=real & of_key)


@triton.jit(do_not_specialize=RUNTIME)
def rewrite(
    features, wide_features, inverse, gamma, v, beta, state, normalizer, state_out, normalizer_out,
    change, slots, first,
    heads: tl.int32, blocks: tl.int32, tokens: tl.int32,
    stride_vb: tl.int64, stride_vm: tl.int64, stride_vh: tl.int64,
    stride_bb: tl.int64, stride_bm: tl.int64, stride_bh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_op: tl.int64,
    stride_yb: tl.int64, stride_yh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, CHANGE: tl.constexpr, CHANNELS: tl.constexpr,
    DENOMINATOR: tl.constexpr, ALIGNED: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    K: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """C columns of one head's memory, in PARTS tiles of K rows; the first ones also write z'."""
    number = tl.program_id(0)
    block = number % blocks
    head = number // blocks % heads
    row = (number // blocks // heads).to(tl.int64)
    slot, live, held = _slot(slots, first, row, POOL, FIRST)
    i = tl.arange(0, M)
    e = block * C + tl.arange(0, C)
    there = i < tokens
    known = e < VALUES
    here = state + slot * stride_ab + head * stride_ah
    a = ()
    for n in tl.static_range(PARTS):
        p = n * K + tl.arange(0, K)
        mask = (p < WIDE)[:, None] & known[None, :]
        part = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=mask & held, other=0.0)
        a += (part,)

    of_head = row * heads + head
    keys = features + of_head * tokens * WIDE
    old = tl.zeros([M, C], tl.float32)  # N
    for n in tl.static_range(PARTS):
        p = n * K + tl.arange(0, K)
        mask = there[:, None] & (p < WIDE)[None, :]
        f = tl.load(_tile(keys, i, p, WIDE, False), mask=mask, other=0.0).to(tl.float32)  # [M, K]
        old = tl.dot(f, a[n], old, input_precision=PRECISION)
    if DENOMINATOR:
        old *= tl.load(inverse + of_head * tokens + i, mask=there, other=0.0)[:, None]
    write = (there & live)[:, None] & known[None, :]
    row_v = v + row * stride_vb + head * stride_vh
    error = tl.load(_tile(row_v, i, e, stride_vm, False), mask=write, other=0.0).to(tl.float32)
    error -= old  # [M, C]
    if CHANGE:
        to = change + of_head * tokens * VALUES
        tl.store(_tile(to, i, e, VALUES, False), error, mask=there[:, None] & known[None, :])
    row_b = beta + row * stride_bb + head * stride_bh
    if CHANNELS:
        error *= tl.load(_tile(row_b, i, e, stride_bm, False), mask=write, other=0.0)
    else:
        gate = row_b + i.to(tl.int64) * stride_bm
        error *= tl.load(gate, mask=there & live, other=0.0)[:, None]

    there_to = state_out + slot * stride_ob + head * stride_oh
    for n in tl.static_range(PARTS):
        p = n * K + tl.arange(0, K)
        mask = (p < WIDE)[:, None] & there[None, :]
        f = tl.load(keys + i[None, :] * WIDE + p[:, None], mask=mask, other=0.0)  # [K, M]
        new = tl.dot(f.to(tl.float32), error, a[n], input_precision=PRECISION)
        mask = (p < WIDE)[:, None] & known[None, :]
        tl.store(_tile(there_to, p, e, stride_op, ALIGNED), new, mask=mask & live)

    if block == 0:
        new_rows = tl.load(gamma + of_head * tokens + i, mask=there, other=0.0)
        of_z = normalizer + slot * stride_zb + head * stride_zh
        to_z = normalizer_out + slot * stride_yb + head * stride_yh
        of_keys = wide_features + of_head * tokens * WIDE
        for p0 in tl.range(0, WIDE, 16):
            place = p0 + tl.arange(0, 16)
            z = tl.load(of_z + place, mask=(place < WIDE) & held, other=0.0)
            if DENOMINATOR:
                both = there[:, None] & (place < WIDE)[None, :]
                key = tl.load(of_keys + i[:, None] * WIDE + place[None, :], mask=both, other=0.0)
                z += tl.sum(key * new_rows[:, None], 0)
            tl.store(to_z + place, z, mask=(place < WIDE) & live)


@triton.jit(do_not_specialize=RUNTIME)
def read(
    features, state, normalizer, slots, first, y,
    heads: tl.int32, blocks: tl.int32, tiles: tl.int32, reads: tl.int32, eps: tl.float32,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, DENOMINATOR: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    T: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """T queries and C columns of one head; columns of one tile follow each other."""
    number = tl.program_id(0)
    block = number % blocks
    tile = number // blocks % tiles
    head = number // blocks // tiles % heads
    row = (number // blocks // tiles // heads).to(tl.int64)
    slot, _live, held = _slot(slots, first, row, POOL, FIRST)
    t = tile * T + tl.arange(0, T)
    e = block * C + tl.arange(0, C)
    there = t < reads
    known = e < VALUES
    queries = features + (row * heads + head) * reads * WIDE
    here = state + slot * stride_ab + head * stride_ah
    z_here = normalizer + slot * stride_zb + head * stride_zh
    kind: tl.constexpr = features.dtype.element_ty
    found = tl.zeros([T, C], tl.float32)
    s = tl.zeros([T], tl.float32)
    for p0 in tl.range(0, WIDE, K, num_stages=STAGES):
        p = p0 + tl.arange(0, K)
        inside = p < WIDE
        mask = there[:, None] & inside[None, :]
        g = tl.load(_tile(queries, t, p, WIDE, ROWS_ALIGNED), mask=mask, other=0.0)  # [T, K]
        mask = (inside & held)[:, None] & known[None, :]
        a = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=mask, other=0.0)  # [K, C]
        if DENOMINATOR:
            z = tl.load(z_here + p, mask=inside & held, other=0.0)
            s += tl.sum(g.to(tl.float32) * z[None, :], 1)
        found = tl.dot(g, a.to(kind), found, input_precision=PRECISION)
    if DENOMINATOR:
        found = found / (s + eps)[:, None]
    to = y + ((row * reads + t.to(tl.int64)) * heads + head)[:, None] * VALUES + e[None, :]
    tl.store(to, found.to(y.dtype.element_ty), mask=there[:, None] & known[None, :])
