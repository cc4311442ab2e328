"""The backward of the delta rewrite in parallel mode: rows first, then products, then rows again.

`describe` forms φ of rows and the numbers that each row has; `look` multiplies it with a memory,
`outer` adds its outer products to one, `contract` and `answer` multiply rows of columns with a
memory's. `rows_back` has the numbers of each row in the gradient, and φ's: a number of x is part of
products with those up to `order` places away, which are gathered. Sums over tiles that different
programs have go through memory and are added in one order.

Of the numbers, with f·⟨rows⟩ instead of columns:  ⟨X, F A⟩ = ⟨X Aᵀ, F⟩  and  ⟨dy, y⟩ = ⟨dy A'ᵀ, g⟩.
"""

import triton
import triton.language as tl

from .triton_kernels import LIFT, _products, _tile, _unit

RUNTIME = (
    "heads", "blocks", "parts", "tiles", "splits", "span", "count", "sums", "eps", "eps_norm",
    "stride_xb", "stride_xm", "stride_xh", "stride_yb", "stride_ym", "stride_yh",
    "stride_vb", "stride_vm", "stride_vh", "stride_gb", "stride_gm", "stride_gh",
    "stride_ab", "stride_ah", "stride_ap", "stride_db", "stride_dh", "stride_dp",
    "stride_zb", "stride_zh", "stride_part", "stride_sum",
)  # fmt: skip


@triton.jit
def _held(first, row, FIRST: tl.constexpr):
    """Whether a row's memory counts."""
    held = row >= 0
    if FIRST:
        held = tl.load(first + row) == 0
    return held


@triton.jit
def _turned(x, rows, cols, stride, ALIGNED: tl.constexpr):
    """Pointers to [cols, rows], the transpose of `_tile`."""
    pointers = x + (rows.to(tl.int64)[None, :] * stride + cols[:, None])
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (16, 16))
    return pointers


@triton.jit(do_not_specialize=RUNTIME)
def describe(
    x, normalizer, features, units, factors, inverse, gamma, found, size, first,
    heads: tl.int32, tiles: tl.int32, count: tl.int32, eps: tl.float32, eps_norm: tl.float32,
    stride_xb: tl.int64, stride_xm: tl.int64, stride_xh: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    KEYS: tl.constexpr, FIRST: tl.constexpr, NORMALIZE: tl.constexpr, DENOMINATOR: tl.constexpr,
    CORRECTION: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """φ of R rows, of queries divided by s; 1 / max |x|, 1 / ‖h‖, 1 / d, and of keys d, ‖f‖², γ."""
    number = tl.program_id(0)
    tile = number % tiles
    head = number // tiles % heads
    row = (number // tiles // heads).to(tl.int64)
    held = _held(first, row, FIRST)
    i = tile * R + tl.arange(0, R)
    there = i < count
    rows = x + row * stride_xb + head * stride_xh
    at = i.to(tl.int64) * stride_xm
    z_here = normalizer + row * stride_zb + head * stride_zh
    unit = tl.full([R], 1.0, tl.float32)
    if NORMALIZE:
        unit = _unit(rows, at, there, WIDTH, W)
    square = tl.zeros([R], tl.float32)
    d = tl.zeros([R], tl.float32)
    for p0 in tl.range(0, WIDE, K):
        place = p0 + tl.arange(0, K)
        h = _products(rows, at, place, there, unit, WIDTH, WIDE)
        if DENOMINATOR:
            z = tl.load(z_here + place, mask=(place < WIDE) & held, other=0.0)
            d += tl.sum(h * z[None, :], 1)
        if NORMALIZE:
            h *= LIFT
        square += tl.sum(h * h, 1)
    factor = tl.full([R], 1.0, tl.float32)
    if NORMALIZE:
        some = square > 0.0
        factor = tl.where(some, LIFT / tl.sqrt_rn(tl.where(some, square, 1.0)), 0.0)
        square = tl.where(some, 1.0, 0.0)
    w = tl.full([R], 1.0, tl.float32)
    new = w
    if DENOMINATOR:
        d = d * factor + eps
        w = 1.0 / d
    of_row = (row * heads + head) * count + i.to(tl.int64)
    tl.store(units + of_row, unit, mask=there)
    tl.store(factors + of_row, factor, mask=there)
    tl.store(inverse + of_row, w, mask=there)
    if KEYS:
        square += eps_norm
        if DENOMINATOR:
            if CORRECTION:
                some = square > 0.0
                new = tl.where(some, 1.0 - d / tl.where(some, square, 1.0), 0.0)
                new = tl.where(held, tl.minimum(tl.maximum(new, 0.0), 1.0), 1.0)
        tl.store(gamma + of_row, new, mask=there)
        tl.store(found + of_row, d, mask=there)
        tl.store(size + of_row, square, mask=there)
    else:
        factor *= w
    for p0 in tl.range(0, WIDE, K):
        place = p0 + tl.arange(0, K)
        f = _products(rows, at, place, there, unit, WIDTH, WIDE) * factor[:, None]
        mask = there[:, None] & (place < WIDE)[None, :]
        pointers = features + of_row[:, None] * WIDE + place[None, :]
        tl.store(pointers, f.to(features.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def add_rows(
    x, units, factors, weights, base, out, first,
    heads: tl.int32, parts: tl.int32, count: tl.int32,
    stride_xb: tl.int64, stride_xm: tl.int64, stride_xh: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    BASED: tl.constexpr, HELD: tl.constexpr, ZERO: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """base + φ(x)ᵀ weights, K numbers of it. HELD: nothing is in the base of a row that is first;
    ZERO: nor in its result.
    """
    number = tl.program_id(0)
    part = number % parts
    head = number // parts % heads
    row = (number // parts // heads).to(tl.int64)
    of_head = row * heads + head
    place = part * K + tl.arange(0, K)
    known = place < WIDE
    rows = x + row * stride_xb + head * stride_xh
    total = tl.zeros([K], tl.float32)
    if BASED:
        here = base + row * stride_zb + head * stride_zh
        total = tl.load(here + place, mask=known & _held(first, row, HELD), other=0.0)
    for t0 in tl.range(0, count, T):
        i = t0 + tl.arange(0, T)
        there = i < count
        of_row = of_head * count + i.to(tl.int64)
        unit = tl.load(units + of_row, mask=there, other=0.0)
        h = _products(rows, i.to(tl.int64) * stride_xm, place, there, unit, WIDTH, WIDE)
        scale = tl.load(factors + of_row, mask=there, other=0.0)
        f = h * scale[:, None]
        total += tl.sum(f * tl.load(weights + of_row, mask=there, other=0.0)[:, None], 0)
    if ZERO:
        total = tl.where(_held(first, row, ZERO), total, 0.0)
    tl.store(out + of_head * WIDE + place, total, mask=known)


@triton.jit(do_not_specialize=RUNTIME)
def look(
    features, state, inverse, v, beta, change, out, d_v, d_beta, first,
    heads: tl.int32, blocks: tl.int32, count: tl.int32,
    stride_vb: tl.int64, stride_vm: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    BACK: tl.constexpr, HELD: tl.constexpr, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """F times C columns of a memory, A or the gradient of A': what follows of it.

    E = V − w ∘ F A; or, BACK, of U = F dA' what v and β get, and X = β ∘ U. Of a gate of each token
    every block of columns has a share.
    """
    number = tl.program_id(0)
    block = number % blocks
    head = number // blocks % heads
    row = (number // blocks // heads).to(tl.int64)
    of_head = row * heads + head
    held = _held(first, row, HELD)
    i = tl.arange(0, M)
    e = block * C + tl.arange(0, C)
    there = i < count
    known = e < VALUES
    keys = features + of_head * count * WIDE
    here = state + row * stride_ab + head * stride_ah
    got = tl.zeros([M, C], tl.float32)
    for p0 in tl.range(0, WIDE, K, num_stages=STAGES):
        p = p0 + tl.arange(0, K)
        inside = p < WIDE
        f = tl.load(
            _tile(keys, i, p, WIDE, False), mask=there[:, None] & inside[None, :], other=0.0
        )
        mask = inside[:, None] & known[None, :]
        a = tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=mask & held, other=0.0)
        got = tl.dot(f.to(tl.float32), a, got, input_precision=PRECISION)
    mask = there[:, None] & known[None, :]
    own = of_head * count * VALUES
    if BACK:
        row_b = beta + row * stride_gb + head * stride_gh
        to = (row * count * heads + head) * VALUES
        change_here = tl.load(_tile(change + own, i, e, VALUES, False), mask=mask, other=0.0)
        shares = got * change_here
        if CHANNELS:
            gate = tl.load(_tile(row_b, i, e, stride_gm, False), mask=mask, other=0.0)
            tl.store(_tile(d_beta + to, i, e, heads * VALUES, False), shares, mask=mask)
            got *= gate
        else:
            gate = tl.load(row_b + i.to(tl.int64) * stride_gm, mask=there, other=0.0)
            total = (tl.num_programs(0) // blocks).to(tl.int64)
            at = (block * total + of_head) * count + i
            tl.store(d_beta + at, tl.sum(shares, 1), mask=there)
            got *= gate[:, None]
        kind: tl.constexpr = d_v.dtype.element_ty
        tl.store(_tile(d_v + to, i, e, heads * VALUES, False), got.to(kind), mask=mask)
    else:
        w = tl.load(inverse + of_head * count + i, mask=there, other=0.0)
        row_v = v + row * stride_vb + head * stride_vh
        given = tl.load(_tile(row_v, i, e, stride_vm, False), mask=mask, other=0.0)
        got = given.to(tl.float32) - got * w[:, None]
    tl.store(_tile(out + own, i, e, VALUES, False), got, mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def outer(
    features, y, gate, base, out, first,
    heads: tl.int32, blocks: tl.int32, parts: tl.int32, count: tl.int32,
    stride_yb: tl.int64, stride_ym: tl.int64, stride_yh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    BASED: tl.constexpr, HELD: tl.constexpr, ZERO: tl.constexpr, GATED: tl.constexpr,
    CHANNELS: tl.constexpr, MINUS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    T: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """base ± φᵀ (gate ∘ y), K rows and C columns of it; of the gate each token's number or, if
    CHANNELS, each column's. HELD: nothing is in the base of a row that is first; ZERO: nor in its
    result. ALIGNED, ROWS and FEATURES: of the base, of y, of φ.
    """
    number = tl.program_id(0)
    block = number % blocks
    part = number // blocks % parts
    head = number // blocks // parts % heads
    row = (number // blocks // parts // heads).to(tl.int64)
    of_head = row * heads + head
    p = part * K + tl.arange(0, K)
    e = block * C + tl.arange(0, C)
    inside = p < WIDE
    known = e < VALUES
    both = inside[:, None] & known[None, :]
    keys = features + of_head * count * WIDE
    rows = y + row * stride_yb + head * stride_yh
    gates = gate + row * stride_gb + head * stride_gh if GATED else gate
    total = tl.zeros([K, C], tl.float32)
    for t0 in tl.range(0, count, T, num_stages=STAGES):
        i = t0 + tl.arange(0, T)
        there = i < count
        f = tl.load(
            _turned(keys, i, p, WIDE, FEATURES), mask=inside[:, None] & there[None, :], other=0.0
        )
        mask = there[:, None] & known[None, :]
        r = tl.load(_tile(rows, i, e, stride_ym, ROWS), mask=mask, other=0.0)
        if GATED:
            if CHANNELS:
                r *= tl.load(_tile(gates, i, e, stride_gm, False), mask=mask, other=0.0)
            else:
                r *= tl.load(gates + i.to(tl.int64) * stride_gm, mask=there, other=0.0)[:, None]
            f = f.to(tl.float32)
        total = tl.dot(f, r, total, input_precision=PRECISION)
    if MINUS:
        total = -total
    if BASED:
        here = base + row * stride_ab + head * stride_ah
        held = _held(first, row, HELD)
        total += tl.load(_tile(here, p, e, stride_ap, ALIGNED), mask=both & held, other=0.0)
    if ZERO:
        total = tl.where(_held(first, row, ZERO), total, 0.0)
    to = out + of_head * WIDE * VALUES
    tl.store(_tile(to, p, e, VALUES, False), total.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=RUNTIME)
def contract(
    change, beta, upstream, d_behind, state, features, inverse, out, of_w, first,
    heads: tl.int32, parts: tl.int32, splits: tl.int32, span: tl.int32, count: tl.int32,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    stride_db: tl.int64, stride_dh: tl.int64, stride_dp: tl.int64,
    HELD: tl.constexpr, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr, UP_ALIGNED: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(β ∘ E) dA'ᵀ − w ∘ (X Aᵀ), K features of it, and their share of ⟨X Aᵀ, F⟩; of `span` columns.

    `upstream` is X, `d_behind` dA'.
    """
    number = tl.program_id(0)
    part = number % parts
    split = number // parts % splits
    head = number // parts // splits % heads
    row = (number // parts // splits // heads).to(tl.int64)
    of_head = row * heads + head
    held = _held(first, row, HELD)
    i = tl.arange(0, M)
    p = part * K + tl.arange(0, K)
    there = i < count
    inside = p < WIDE
    own = of_head * count * VALUES
    row_b = beta + row * stride_gb + head * stride_gh
    gate = tl.full([M], 1.0, tl.float32)
    if not CHANNELS:
        gate = tl.load(row_b + i.to(tl.int64) * stride_gm, mask=there, other=0.0)
    a_here = state + row * stride_ab + head * stride_ah
    d_here = d_behind + row * stride_db + head * stride_dh
    written = tl.zeros([M, K], tl.float32)
    old = tl.zeros([M, K], tl.float32)
    start = split * span
    stop = tl.minimum(start + span, VALUES)
    for e0 in tl.range(start, stop, C, num_stages=STAGES):
        e = e0 + tl.arange(0, C)
        known = e < VALUES
        mask = there[:, None] & known[None, :]
        turned = known[:, None] & inside[None, :]
        change_here = tl.load(_tile(change + own, i, e, VALUES, False), mask=mask, other=0.0)
        if CHANNELS:
            change_here *= tl.load(_tile(row_b, i, e, stride_gm, False), mask=mask, other=0.0)
        else:
            change_here *= gate[:, None]
        d = tl.load(_turned(d_here, p, e, stride_dp, UP_ALIGNED), mask=turned, other=0.0)  # [C, K]
        written = tl.dot(change_here, d, written, input_precision=PRECISION)
    for e0 in tl.range(start, stop, C, num_stages=STAGES):
        e = e0 + tl.arange(0, C)
        known = e < VALUES
        mask = there[:, None] & known[None, :]
        turned = known[:, None] & inside[None, :]
        x = tl.load(_tile(upstream + own, i, e, VALUES, False), mask=mask, other=0.0)
        a = tl.load(_turned(a_here, p, e, stride_ap, ALIGNED), mask=turned & held, other=0.0)
        old = tl.dot(x, a, old, input_precision=PRECISION)
    of_row = of_head * count + i
    w = tl.load(inverse + of_row, mask=there, other=0.0)
    mask = there[:, None] & inside[None, :]
    f = tl.load(features + of_row[:, None] * WIDE + p[None, :], mask=mask, other=0.0)
    total = (tl.num_programs(0) // (parts * splits)).to(tl.int64) * count
    tl.store(
        of_w + (split * parts + part) * total + of_row,
        tl.sum(old * f.to(tl.float32), 1), mask=there,
    )  # fmt: skip
    to = out + (split * total + of_row)[:, None] * WIDE + p[None, :]
    tl.store(to, written - old * w[:, None], mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def answer(
    d_y, state, out, first,
    heads: tl.int32, parts: tl.int32, tiles: tl.int32, count: tl.int32,
    stride_yb: tl.int64, stride_ym: tl.int64, stride_yh: tl.int64,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_ap: tl.int64,
    HELD: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dy A'ᵀ, T queries and K features of it."""
    number = tl.program_id(0)
    part = number % parts
    tile = number // parts % tiles
    head = number // parts // tiles % heads
    row = (number // parts // tiles // heads).to(tl.int64)
    held = _held(first, row, HELD)
    i = tile * T + tl.arange(0, T)
    p = part * K + tl.arange(0, K)
    there = i < count
    inside = p < WIDE
    rows = d_y + row * stride_yb + head * stride_yh
    here = state + row * stride_ab + head * stride_ah
    kind: tl.constexpr = d_y.dtype.element_ty
    got = tl.zeros([T, K], tl.float32)
    for e0 in tl.range(0, VALUES, C, num_stages=STAGES):
        e = e0 + tl.arange(0, C)
        known = e < VALUES
        mask = there[:, None] & known[None, :]
        r = tl.load(_tile(rows, i, e, stride_ym, ROWS), mask=mask, other=0.0)
        mask = known[:, None] & inside[None, :]
        a = tl.load(_turned(here, p, e, stride_ap, ALIGNED), mask=mask & held, other=0.0)  # [C, K]
        got = tl.dot(r, a.to(kind), got, input_precision=PRECISION)
    to = out + ((row * heads + head) * count + i.to(tl.int64))[:, None] * WIDE + p[None, :]
    tl.store(to, got, mask=there[:, None] & inside[None, :])


@triton.jit
def _gradient(
    got, d_after, z, place, mask, splits, stride_part, a, b, c, held,
    BEHIND: tl.constexpr, DENOMINATOR: tl.constexpr,
):  # fmt: skip
    """The gradient of features at `place`, but for what is a multiple of them."""
    pointers = got + place
    d = tl.load(pointers, mask=mask, other=0.0)
    for n in tl.range(1, splits):
        d += tl.load(pointers + n * stride_part, mask=mask, other=0.0)
    d *= a
    if DENOMINATOR:
        d += c * tl.load(z + place, mask=mask & held, other=0.0)
        if BEHIND:
            d += b * tl.load(d_after + place, mask=mask, other=0.0)
    return d


@triton.jit(do_not_specialize=RUNTIME)
def rows_back(
    x, units, factors, got, of_w, inverse, gamma, found, size, d_after, normalizer, of_beta,
    d_x, d_beta, weights, first,
    heads: tl.int32, tiles: tl.int32, count: tl.int32, splits: tl.int32, sums: tl.int32,
    blocks: tl.int32,
    stride_xb: tl.int64, stride_xm: tl.int64, stride_xh: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64, stride_part: tl.int64, stride_sum: tl.int64,
    KEYS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, NORMALIZE: tl.constexpr,
    DENOMINATOR: tl.constexpr, FULL: tl.constexpr, SHARED: tl.constexpr,
    ORDER: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The gradient of R rows of x, from the products `got` of `splits` parts, and of what each has
    divided by. SHARED: of β, too, from its `blocks` shares.

    Of keys dF = got + γ dz' + dd z, and of queries dg = got / s + ds z'; `weights`: dd, or ds.
    """
    number = tl.program_id(0)
    tile = number % tiles
    head = number // tiles % heads
    row = (number // tiles // heads).to(tl.int64)
    of_head = row * heads + head
    i = tile * R + tl.arange(0, R)
    there = i < count
    of_row = of_head * count + i.to(tl.int64)
    rows = x + row * stride_xb + head * stride_xh
    at = i.to(tl.int64) * stride_xm
    held = _held(first, row, HELD)
    z = normalizer + row * stride_zb + head * stride_zh
    d_after_here = d_after + of_head * WIDE if KEYS else d_after
    got_here = got + of_row[:, None] * WIDE
    unit = tl.load(units + of_row, mask=there, other=0.0)
    factor = tl.load(factors + of_row, mask=there, other=0.0)
    w = tl.load(inverse + of_row, mask=there, other=0.0)

    along = tl.zeros([R], tl.float32)  # ⟨got, f⟩
    of_z = tl.zeros([R], tl.float32)  # ⟨dz', f⟩
    for p0 in tl.range(0, WIDE, K):
        place = p0 + tl.arange(0, K)
        f = _products(rows, at, place, there, unit, WIDTH, WIDE) * factor[:, None]
        mask = there[:, None] & (place < WIDE)[None, :]
        pointers = got_here + place[None, :]
        part = tl.load(pointers, mask=mask, other=0.0)
        for n in tl.range(1, splits):
            part += tl.load(pointers + n * stride_part, mask=mask, other=0.0)
        along += tl.sum(part * f, 1)
        if KEYS and DENOMINATOR:
            dz = tl.load(d_after_here + place, mask=place < WIDE, other=0.0)
            of_z += tl.sum(f * dz[None, :], 1)

    a = tl.full([R], 1.0, tl.float32)
    b = tl.zeros([R], tl.float32)
    c = tl.zeros([R], tl.float32)
    more = tl.zeros([R], tl.float32)  # times f
    if KEYS:
        if DENOMINATOR:
            b = tl.load(gamma + of_row, mask=there, other=0.0)
            for n in tl.range(0, sums):
                c += tl.load(of_w + n * stride_sum + of_row, mask=there, other=0.0)
            c *= w * w
            d = tl.load(found + of_row, mask=there, other=1.0)
            square = tl.load(size + of_row, mask=there, other=1.0)
            if FULL:
                some = square > 0.0
                safe = tl.where(some, square, 1.0)
                loose = 1.0 - d / safe
                loose_here = some & (loose > 0.0) & (loose < 1.0) & _held(first, row, FIRST)
                c -= tl.where(loose_here, of_z / safe, 0.0)
                if not NORMALIZE:  # which takes away what is along f
                    more = tl.where(loose_here, 2.0 * of_z * d / (safe * safe), 0.0)
        if SHARED:
            total = tl.zeros([R], tl.float32)
            for n in tl.range(0, blocks):
                total += tl.load(of_beta + n * stride_sum + of_row, mask=there, other=0.0)
            to = (row * count + i.to(tl.int64)) * heads + head
            tl.store(d_beta + to, total, mask=there)
    elif DENOMINATOR:
        a = w
        c = -along * w * w
    if DENOMINATOR:
        tl.store(weights + of_row, c, mask=there)
    if NORMALIZE:
        if DENOMINATOR:
            # Of the sum itself, so that nothing along f is left where all of it is.
            along = tl.zeros([R], tl.float32)
            for p0 in tl.range(0, WIDE, K):
                place = p0 + tl.arange(0, K)
                f = _products(rows, at, place, there, unit, WIDTH, WIDE) * factor[:, None]
                mask = there[:, None] & (place < WIDE)[None, :]
                d_f = _gradient(
                    got_here, d_after_here, z, place[None, :], mask, splits, stride_part,
                    a[:, None], b[:, None], c[:, None], held, KEYS, DENOMINATOR,
                )  # fmt: skip
                along += tl.sum(d_f * f, 1)
        more = -along

    n_x: tl.constexpr = 2 * WIDTH
    column = tl.arange(0, W)
    mask = there[:, None] & (column < WIDTH)[None, :]
    own = tl.load(rows + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    # Of relu(x) and relu(−x) one is 0, and has no gradient.
    p = tl.where(own > 0.0, column[None, :], column[None, :] + WIDTH)
    r = tl.abs(own) * unit[:, None]
    d_r = tl.zeros([R, W], tl.float32)
    for j in tl.static_range(1, ORDER + 1):
        low = (p + (n_x - j % n_x)) % n_x
        high = (p + j % n_x) % n_x
        r_low = _number(rows, at, low, mask, WIDTH) * unit[:, None]
        r_high = _number(rows, at, high, mask, WIDTH) * unit[:, None]
        d_low = _gradient(
            got_here, d_after_here, z, (j - 1) * n_x + p, mask, splits, stride_part, a[:, None],
            b[:, None], c[:, None], held, KEYS, DENOMINATOR,
        )  # fmt: skip
        d_high = _gradient(
            got_here, d_after_here, z, (j - 1) * n_x + high, mask, splits, stride_part, a[:, None],
            b[:, None], c[:, None], held, KEYS, DENOMINATOR,
        )  # fmt: skip
        common = (more * factor)[:, None] * r
        d_r += (d_low + common * r_low) * r_low + (d_high + common * r_high) * r_high
    d_r = d_r * factor[:, None] * unit[:, None]
    d_own = tl.where(own > 0.0, d_r, tl.where(own < 0.0, -d_r, 0.0))
    to = ((row * count + i.to(tl.int64)) * heads + head)[:, None] * WIDTH + column[None, :]
    tl.store(d_x + to, d_own.to(d_x.dtype.element_ty), mask=mask)


@triton.jit
def _number(x, at, p, mask, WIDTH: tl.constexpr):
    """Numbers p of r, others in each row."""
    up = p < WIDTH
    pointers = x + at[:, None] + tl.where(up, p, p - WIDTH)
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return tl.maximum(tl.where(up, values, -values), 0.0)
