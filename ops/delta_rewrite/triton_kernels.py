"""The delta rewrite on a GPU: features, then memories that are read and written, then reads.

`prepare` forms φ of tokens, and what their scalars are: w = 1/d and γ. `rewrite` takes C columns of
A, and goes through their P rows twice, tile by tile with loads ahead: to look up what the keys held
(F A), of which it forms E, and to add Fᵀ (β ∘ E); no program needs what another one computes. A
memory comes from DRAM once, as the programs that run at a time hold less than the L2 does. Then
`prepare` forms φ of queries with 1/s, which needs z', and `read` (`triton_read`) multiplies.

Products take the call's dtype, as those of plain torch do; with an echo, fp32. Features are stored
in that dtype, in rows of multiples of 16 bytes; those of tokens in fp32 as well, for z'. `rewrite`
leaves A' in the dtype of products, too, if queries follow.
"""

import triton
import triton.language as tl

# Squares of products of numbers up to one: those of 1e-35 are still above zero, and a sum of a
# thousand is below infinity.
LIFT = tl.constexpr(2.0**55)
RUNTIME = (
    "heads", "blocks", "splits", "tokens", "tiles", "rows", "reads", "eps", "eps_norm",
    "stride_kb", "stride_km", "stride_kh", "stride_qb", "stride_qm", "stride_qh",
    "stride_xb", "stride_xm", "stride_xh", "stride_vb", "stride_vm", "stride_vh",
    "stride_bb", "stride_bm", "stride_bh",
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


@triton.jit
def _shifted(x, at, c, there, J: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers c − J of rows of x that start at `at`, as r goes on from relu(x) to relu(−x): those
    in front of a row are the last ones, negated. By two loads of neighbours: of indices that no
    compiler sees to be in order, a warp would read one column.
    """
    back = J % WIDTH
    inside = there & (c >= back) & (c < WIDTH)
    values = tl.load(x + (at + (c - back)), mask=inside, other=0.0).to(tl.float32)
    if J % WIDTH > 0:
        last = tl.load(x + (at + (c + (WIDTH - back))), mask=there & (c < back), other=0.0)
        values = tl.where(c < back, -last.to(tl.float32), values)
    if J // WIDTH % 2 == 1:
        values = -values
    return values


@triton.jit
def _features(
    x, at, c, there, WIDTH: tl.constexpr, ORDER: tl.constexpr, AXIS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """φ of rows of x that start at `at`, in 2·ORDER parts of WIDTH places, c along AXIS; and ‖φ‖²,
    of size 1 along AXIS.

    Of r = [relu(x), relu(−x)] part 2j − 2 is r[c]·r[c − j], and part 2j − 1 the same of c + WIDTH,
    where all signs of x are the other ones.
    """
    values = _shifted(x, at, c, there, 0, WIDTH)
    size = tl.max(tl.abs(values), AXIS, keep_dims=True)
    unit = 1.0 / tl.where(size > 0.0, size, 1.0)
    if not NORMALIZE:
        unit = tl.full(size.shape, 1.0, tl.float32)
    values *= unit
    up = tl.maximum(values, 0.0)
    down = tl.maximum(-values, 0.0)
    squares = tl.zeros(values.shape, tl.float32)
    parts = ()
    for j in tl.static_range(1, ORDER + 1):
        other = _shifted(x, at, c, there, j, WIDTH) * unit
        both = up * tl.maximum(other, 0.0), down * tl.maximum(-other, 0.0)
        for n in tl.static_range(2):
            lifted = both[n]
            if NORMALIZE:
                lifted = both[n] * LIFT
            squares += lifted * lifted
        parts += both
    square = tl.sum(squares, AXIS, keep_dims=True)
    factor = tl.full(size.shape, 1.0, tl.float32)
    if NORMALIZE:
        some = square > 0.0
        factor = tl.where(some, LIFT / tl.sqrt_rn(tl.where(some, square, 1.0)), 0.0)
        square = tl.where(some, 1.0, 0.0)
    scaled = ()
    for n in tl.static_range(2 * ORDER):
        scaled += (parts[n] * factor,)
    return scaled, square


@triton.jit
def _newness(d, square, held, eps_norm):
    """γ of tokens with ‖φ‖² = square."""
    square += eps_norm
    some = square > 0.0
    new = tl.where(some, 1.0 - d / tl.where(some, square, 1.0), 0.0)
    return tl.where(held, tl.minimum(tl.maximum(new, 0.0), 1.0), 1.0)


@triton.jit(do_not_specialize=RUNTIME)
def prepare(
    x, features, wide_features, normalizer, slots, first, inverse, gamma,
    heads: tl.int32, tiles: tl.int32, rows: tl.int32, eps: tl.float32, eps_norm: tl.float32,
    stride_xb: tl.int64, stride_xm: tl.int64, stride_xh: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr, WIDER: tl.constexpr,
    NORMALIZE: tl.constexpr, DENOMINATOR: tl.constexpr, CORRECTION: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr, ORDER: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Features of R rows of x, each in ROW places, and 1/d of each; of tokens γ, too.

    What is behind a row's features, and all of a skipped row, is zeros.
    """
    number = tl.program_id(0)
    tile = number % tiles
    head = number // tiles % heads
    row = (number // tiles // heads).to(tl.int64)
    slot, live, held = _slot(slots, first, row, POOL, FIRST)
    i = tile * R + tl.arange(0, R)
    real = i < rows
    of_x = x + row * stride_xb + head * stride_xh
    c = tl.arange(0, W)
    f, square = _features(
        of_x, (i.to(tl.int64) * stride_xm)[:, None], c[None, :], (real & live)[:, None],
        WIDTH, ORDER, 1, NORMALIZE,
    )  # fmt: skip
    inside = c < WIDTH
    number_of_row = (row * heads + head) * rows + i.to(tl.int64)
    to = (number_of_row * ROW)[:, None]
    kind: tl.constexpr = features.dtype.element_ty
    z_here = normalizer + slot * stride_zb + head * stride_zh
    products = tl.zeros([R, W], tl.float32)
    mask = real[:, None] & inside[None, :]
    for n in tl.static_range(2 * ORDER):
        place = n * WIDTH + c
        tl.store(features + to + place[None, :], f[n].to(kind), mask=mask)
        if WIDER:
            tl.store(wide_features + to + place[None, :], f[n], mask=mask)
        if DENOMINATOR:
            z = tl.load(z_here + place, mask=inside & held, other=0.0)
            products += f[n] * z[None, :]
    if ROW > WIDE:
        behind = WIDE + tl.arange(0, 8)
        mask = real[:, None] & (behind < ROW)[None, :]
        tl.store(features + to + behind[None, :], tl.zeros([R, 8], kind), mask=mask)
        if WIDER:
            zeros = tl.zeros([R, 8], tl.float32)
            tl.store(wide_features + to + behind[None, :], zeros, mask=mask)
    d = tl.sum(products, 1) + eps
    if DENOMINATOR:
        tl.store(inverse + number_of_row, 1.0 / d, mask=real)
    if KEYS:
        new = tl.full([R], 1.0, tl.float32)
        if DENOMINATOR and CORRECTION:
            new = _newness(d, tl.sum(square, 1), held, eps_norm)
        tl.store(gamma + number_of_row, new, mask=real)


@triton.jit(do_not_specialize=RUNTIME)
def rewrite(
    features, wide_features, inverse, gamma, v, beta, state, normalizer, state_out, normalizer_out,
    to_read, change, slots, first,
    heads: tl.int32, blocks: tl.int32, tokens: tl.int32,
    stride_vb: tl.int64, stride_vm: tl.int64, stride_vh: tl.int64,
    stride_bb: tl.int64, stride_bm: tl.int64, stride_bh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_op: tl.int64,
    stride_yb: tl.int64, stride_yh: tl.int64,
    POOL: tl.constexpr, FIRST: tl.constexpr, READ: tl.constexpr, CHANGE: tl.constexpr,
    CHANNELS: tl.constexpr, DENOMINATOR: tl.constexpr, ALIGNED: tl.constexpr,
    V_ALIGNED: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    ROW: tl.constexpr, K: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """C columns of one head's memory, twice by tiles of K rows: the second time from the L2."""
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
    of_head = row * heads + head
    keys = features + of_head * tokens * ROW
    kind: tl.constexpr = features.dtype.element_ty

    # Asked for before the memory is, which takes longer.
    write = (there & live)[:, None] & known[None, :]
    row_v = v + row * stride_vb + head * stride_vh
    wanted = tl.load(_tile(row_v, i, e, stride_vm, V_ALIGNED), mask=write, other=0.0)
    row_b = beta + row * stride_bb + head * stride_bh
    if CHANNELS:
        gate = tl.load(_tile(row_b, i, e, stride_bm, False), mask=write, other=0.0)
    else:
        gate = tl.load(row_b + i.to(tl.int64) * stride_bm, mask=there & live, other=0.0)[:, None]

    old = tl.zeros([M, C], tl.float32)  # N
    for p0 in tl.range(0, WIDE, K, num_stages=STAGES):
        p = p0 + tl.arange(0, K)
        mask = there[:, None] & (p < ROW)[None, :]
        f = tl.load(_tile(keys, i, p, ROW, True), mask=mask, other=0.0)  # [M, K]
        mask = ((p < WIDE) & held)[:, None] & known[None, :]
        a = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=mask, other=0.0)
        old = tl.dot(f, a.to(kind), old, input_precision=PRECISION)
    if DENOMINATOR:
        old *= tl.load(inverse + of_head * tokens + i, mask=there, other=0.0)[:, None]
    error = wanted.to(tl.float32) - old  # [M, C]
    if CHANGE:
        to = change + of_head * tokens * VALUES
        tl.store(_tile(to, i, e, VALUES, False), error, mask=there[:, None] & known[None, :])
    error *= gate
    error = error.to(kind)

    there_to = state_out + slot * stride_ob + head * stride_oh
    for p0 in tl.range(0, WIDE, K, num_stages=STAGES):
        p = p0 + tl.arange(0, K)
        mask = there[:, None] & (p < ROW)[None, :]
        f = tl.load(_tile(keys, i, p, ROW, True), mask=mask, other=0.0)  # [M, K]
        inside = p < WIDE
        mask = (inside & held)[:, None] & known[None, :]
        a = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=mask, other=0.0)
        new = tl.dot(tl.trans(f), error, a, input_precision=PRECISION)
        mask = (inside & live)[:, None]
        tl.store(_tile(there_to, p, e, stride_op, ALIGNED), new, mask=mask & known[None, :])
        if READ:
            copy = to_read + of_head * WIDE * COLUMNS
            pair: tl.constexpr = to_read.dtype.element_ty
            mask = mask & (e < COLUMNS)[None, :]
            tl.store(_tile(copy, p, e, COLUMNS, True), new.to(pair), mask=mask)

    # z': each program forms some of it.
    new_rows = tl.load(gamma + of_head * tokens + i, mask=there, other=0.0)
    of_z = normalizer + slot * stride_zb + head * stride_zh
    to_z = normalizer_out + slot * stride_yb + head * stride_yh
    of_keys = wide_features + of_head * tokens * ROW
    for n in tl.range(block, tl.cdiv(WIDE, 32), blocks):
        place = n * 32 + tl.arange(0, 32)
        z = tl.load(of_z + place, mask=(place < WIDE) & held, other=0.0)
        if DENOMINATOR:
            both = there[:, None] & (place < WIDE)[None, :]
            key = tl.load(of_keys + i[:, None] * ROW + place[None, :], mask=both, other=0.0)
            z += tl.sum(key * new_rows[:, None], 0)
        tl.store(to_z + place, z, mask=(place < WIDE) & live)
