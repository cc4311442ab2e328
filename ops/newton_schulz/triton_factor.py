"""The Newton–Schulz factor of Gram matrices that one program holds whole, in fp32.

With R = G/ν², ν = √tr G + eps, and Z = a I + b R + c R² of each step:

    Q ← Q Z    R ← Z R Z        every one of them symmetric, all commuting

so that no product needs a transpose. Backward runs the steps again and keeps R and Q before each of
them in a scratch; with Q' and R' after a step it walks back through

    dZ = Q dQ' + dR'·ZR + ZR·dR'    dR = Z dR' Z + b dZ + c (R dZ + dZ R)    dQ = dQ' Z

The last R' is not used, so there dR' = 0; the first Q is the identity. Formulas are `eager.py`'s.

PRECISION is that of `tl.dot`, or "stepwise": six products of bf16 parts as in bf16x6, those of the
leading parts in a sum of their own for every 16. So many a tensor core of Hopper sums at a time; it
drops what is below the last bit of its sum, so that a longer one falls behind one that rounds.
"""

import triton
import triton.language as tl

RUNTIME = ("batch", "n", "steps", "eps")


STEP = tl.constexpr(16)  # products that a tensor core sums at a time


@triton.jit
def _parts(x):
    """A tile in three tiles of bf16 that add up to it."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _sums(left, right, total):
    """total + left · right of bf16 tiles, each STEP of the depth in a sum of its own.

    A plain sum with `total` would become the one that the product starts from.
    """
    rows: tl.constexpr = left.shape[0]
    half: tl.constexpr = left.shape[1] // 2
    if half < STEP:
        return tl.fma(tl.dot(left, right), 1.0, total)
    else:
        first, second = tl.split(tl.permute(tl.reshape(left, (rows, 2, half)), (0, 2, 1)))
        columns: tl.constexpr = right.shape[1]
        upper, lower = tl.split(tl.permute(tl.reshape(right, (2, half, columns)), (1, 2, 0)))
        return _sums(second, lower, _sums(first, upper, total))


@triton.jit
def _product(left, right, PRECISION: tl.constexpr):
    if PRECISION == "stepwise":
        high, middle, low = _parts(left)
        other, beside, below = _parts(right)
        small = tl.dot(high, below)
        small = tl.dot(low, other, small)
        small = tl.dot(middle, beside, small)
        small = tl.dot(high, beside, small)
        small = tl.dot(middle, other, small)
        return _sums(high, other, small)
    else:
        return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _polynomial(r, eye, table, j, PRECISION: tl.constexpr):
    """Z of step j."""
    a = tl.load(table + 3 * j)
    b = tl.load(table + 3 * j + 1)
    c = tl.load(table + 3 * j + 2)
    return a * eye + b * r + c * _product(r, r, PRECISION)


@triton.jit
def _start(gram, at, inside, eye, eps):
    """G/ν², √tr G (1 where there is none), ν, and whether tr G ≤ 0."""
    g = tl.load(gram + at, mask=inside, other=0.0).to(tl.float32)  # [R, R]
    trace = tl.sum(tl.where(eye > 0.0, g, 0.0))
    zero = trace <= 0.0
    root = tl.sqrt(tl.where(zero, 1.0, trace))
    nu = root + eps
    return g / nu / nu, root, nu, zero


@triton.jit
def _tile(n, R: tl.constexpr):
    """Addresses in a matrix (n, n), which of them exist, and the identity."""
    row = tl.arange(0, R)
    col = tl.arange(0, R)
    inside = (row < n)[:, None] & (col < n)[None, :]
    eye = tl.where((row[:, None] == col[None, :]) & inside, 1.0, 0.0)
    return row[:, None] * n + col[None, :], inside, eye


@triton.jit(do_not_specialize=RUNTIME)
def gram_factor_fwd(
    gram, out, table, batch: tl.int32, n: tl.int32, steps: tl.int32, eps: tl.float32,
    PRECISION: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Q/ν of one contiguous matrix (n, n) of a stack, fp32; 0 where tr G ≤ 0.

    `table` holds a, b, c of each step in fp32.
    """
    at, inside, eye = _tile(n, R)
    at += tl.program_id(0).to(tl.int64) * n * n
    r, _, nu, zero = _start(gram, at, inside, eye, eps)
    z = _polynomial(r, eye, table, 0, PRECISION)
    q = z
    for j in tl.range(1, steps, num_stages=1):
        r = _product(_product(z, r, PRECISION), z, PRECISION)
        z = _polynomial(r, eye, table, j, PRECISION)
        q = _product(q, z, PRECISION)
    tl.store(out + at, tl.where(zero, 0.0, q / nu), mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def gram_factor_bwd(
    upstream, gram, out, scratch, table,
    batch: tl.int32, n: tl.int32, steps: tl.int32, eps: tl.float32,
    PRECISION: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """dG for `upstream`, that of the factor; contiguous stacks.

    `scratch`: (programs, steps, 2, R, R). A program takes every matrix whose turn it is.
    """
    tl.assume(steps > 0)
    side = tl.arange(0, R)
    kept = scratch + tl.program_id(0).to(tl.int64) * steps * (2 * R * R)
    kept += side[:, None] * R + side[None, :]  # [R, R]
    for matrix in tl.range(tl.program_id(0), batch, tl.num_programs(0), num_stages=1):
        at, inside, eye = _tile(n, R)
        at += matrix * (n.to(tl.int64) * n)
        r, root, nu, zero = _start(gram, at, inside, eye, eps)
        q = eye
        tl.debug_barrier()  # the scratch still serves the matrix before
        for j in tl.range(0, steps, num_stages=1):
            tl.store(kept + j * (2 * R * R), r)
            tl.store(kept + j * (2 * R * R) + R * R, q)
            z = _polynomial(r, eye, table, j, PRECISION)
            q = _product(q, z, PRECISION)
            r = _product(_product(z, r, PRECISION), z, PRECISION)
        tl.debug_barrier()

        d_q = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32) / nu
        d_r = tl.zeros([R, R], tl.float32)
        d_nu = 0.0
        for back in tl.range(0, steps, num_stages=1):
            j = steps - 1 - back
            b = tl.load(table + 3 * j + 1)
            c = tl.load(table + 3 * j + 2)
            r = tl.load(kept + j * (2 * R * R))
            q = tl.load(kept + j * (2 * R * R) + R * R)
            z = _polynomial(r, eye, table, j, PRECISION)
            zr = _product(z, r, PRECISION)
            d_z = _product(q, d_q, PRECISION)
            if back == 0:  # ⟨dOut, Q⟩ of the whole product Q is ⟨dZ, Z⟩ of its last factor
                d_nu = -tl.sum(d_z * z) / nu
            d_z += _product(d_r, zr, PRECISION)
            d_z += _product(zr, d_r, PRECISION)
            both = _product(r, d_z, PRECISION) + _product(d_z, r, PRECISION)
            d_r = _product(_product(z, d_r, PRECISION), z, PRECISION) + b * d_z + c * both
            d_q = _product(d_q, z, PRECISION)

        # ν divides Q once and G twice; √tr G depends on the diagonal alone.
        d_nu -= 2.0 * tl.sum(d_r * r) / nu
        d_gram = d_r / nu / nu + eye * (d_nu / (2.0 * root))
        d_gram = tl.where(zero, 0.0, d_gram)
        tl.store(out + at, d_gram.to(out.dtype.element_ty), mask=inside)
