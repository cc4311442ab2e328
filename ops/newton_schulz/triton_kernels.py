"""Newton–Schulz on stacks of matrices that one program holds whole: one launch a pass.

A program loads its matrix once, takes every step on chip and stores the result once. Backward runs
the steps again, leaves the iterate before each of them in a scratch of its own, and walks back
through them. Formulas are those of `eager.py`. Matrices come with rows ≤ cols, as strides of the
matrix or of its transpose, in tiles [R, C] padded with zeros: zeros add nothing to any product.

Products take iterates in the compute dtype and accumulate in fp32; a sum is rounded once. A and Z
are symmetric, so no product needs their transpose. For X Xᵀ there are two forms, since Triton 3.4
to 3.7 miscompile some products with the transpose of another's result on Hopper:

    MIRROR = 0    Xᵀ is the computed tile X, transposed
    MIRROR = 1    forward keeps Xᵀ, too: Xᵀ ← a Xᵀ + Xᵀ Z; backward reads it from the scratch
"""

import triton
import triton.language as tl

FORWARD_RUNTIME = (
    "batch", "rows", "cols", "steps", "eps",
    "stride_xb", "stride_xr", "stride_xc", "stride_ob", "stride_or", "stride_oc",
)  # fmt: skip
BACKWARD_RUNTIME = (*FORWARD_RUNTIME, "stride_ub", "stride_ur", "stride_uc")

ROWS_WHOLE = tl.constexpr(0)  # neighbours in a row are neighbours in memory
COLUMNS_WHOLE = tl.constexpr(1)  # neighbours in a column are: the matrix is read transposed


@triton.jit
def _addresses(
    x, matrix, zero, rows, cols, stride_b, stride_r, stride_c,
    ORDER: tl.constexpr, VECTOR: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Addresses [R, C] of the elements of one matrix of a stack, and which of them exist.

    ORDER: 0 and 1 as above, 2 for neither. With VECTOR > 1, base and strides are multiples of 16
    bytes, and rows (ORDER 1: columns) hold a multiple of VECTOR elements. `zero` is a 0 that the
    compiler cannot know: else it would form the addresses once for all matrices, and keep a pair
    of registers for each.
    """
    r = tl.arange(0, R)  # [R]
    c = tl.arange(0, C)  # [C]
    at = matrix * stride_b  # int64, as every stride is
    down = r.to(tl.int64)
    along = c.to(tl.int64)
    if ORDER != COLUMNS_WHOLE:
        down = (r + zero) * stride_r
    if ORDER != ROWS_WHOLE:
        along = (c + zero) * stride_c
    pointers = x + (at + down[:, None] + along[None, :])
    if VECTOR > 1:
        pointers = tl.multiple_of(pointers, (16, 16))
        if ORDER == ROWS_WHOLE:
            cols = cols // VECTOR * VECTOR
        else:
            rows = rows // VECTOR * VECTOR
    return pointers, (r < rows)[:, None] & (c < cols)[None, :]


@triton.jit
def _load(
    x, matrix, zero, rows, cols, stride_b, stride_r, stride_c,
    ORDER: tl.constexpr, VECTOR: tl.constexpr, EXACT: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One matrix in fp32, zeros where the tile is padding; EXACT: there is none."""
    pointers, mask = _addresses(
        x, matrix, zero, rows, cols, stride_b, stride_r, stride_c, ORDER, VECTOR, R, C
    )
    tile = tl.load(pointers) if EXACT else tl.load(pointers, mask=mask, other=0.0)
    return tile.to(tl.float32)  # [R, C]


@triton.jit
def _store(
    x, tile, matrix, zero, rows, cols, stride_b, stride_r, stride_c,
    ORDER: tl.constexpr, VECTOR: tl.constexpr, EXACT: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    pointers, mask = _addresses(
        x, matrix, zero, rows, cols, stride_b, stride_r, stride_c, ORDER, VECTOR, R, C
    )
    tile = tile.to(x.dtype.element_ty)
    if EXACT:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=mask)


@triton.jit
def _norm(x):
    """Frobenius norm of a tile in fp32."""
    return tl.sqrt(tl.sum(x * x))


@triton.jit
def _polynomial(gram, b, c, PRECISION: tl.constexpr):
    """Z = b A + c A² in fp32, of A in the compute dtype."""
    return b * gram.to(tl.float32) + c * tl.dot(gram, gram, input_precision=PRECISION)  # [R, R]


@triton.jit
def _gram(x, mirrored, PRECISION: tl.constexpr):
    """A = X Xᵀ in the compute dtype; `mirrored` is Xᵀ."""
    return tl.dot(x, mirrored, input_precision=PRECISION).to(x.dtype)  # [R, R]


@triton.jit
def _orthogonalise(
    x, out, table, matrix, rows, cols, steps, eps,
    stride_xb, stride_xr, stride_xc, stride_ob, stride_or, stride_oc,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MIRROR: tl.constexpr, EXACT: tl.constexpr,
    X_ORDER: tl.constexpr, X_VECTOR: tl.constexpr, O_ORDER: tl.constexpr, O_VECTOR: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Load one matrix of the stack, take all steps, store it."""
    zero = tl.load(table + 3 * steps).to(tl.int32)
    source = _load(
        x, matrix, zero, rows, cols, stride_xb, stride_xr, stride_xc,
        X_ORDER, X_VECTOR, EXACT, R, C,
    )  # fmt: skip
    iterate = (source / (_norm(source) + eps)).to(COMPUTE)  # [R, C]
    if MIRROR:
        mirrored = tl.trans(iterate)  # [C, R]
    for j in tl.range(0, steps, num_stages=1):
        a = tl.load(table + 3 * j)
        b = tl.load(table + 3 * j + 1)
        c = tl.load(table + 3 * j + 2)
        gram = _gram(iterate, mirrored if MIRROR else tl.trans(iterate), PRECISION)
        z = _polynomial(gram, b, c, PRECISION).to(COMPUTE)
        ahead = a * iterate.to(tl.float32)
        iterate = tl.dot(z, iterate, ahead, input_precision=PRECISION).to(COMPUTE)
        if MIRROR:
            ahead = a * mirrored.to(tl.float32)
            mirrored = tl.dot(mirrored, z, ahead, input_precision=PRECISION).to(COMPUTE)
    _store(
        out, iterate, matrix, zero, rows, cols, stride_ob, stride_or, stride_oc,
        O_ORDER, O_VECTOR, EXACT, R, C,
    )  # fmt: skip


@triton.jit(do_not_specialize=FORWARD_RUNTIME)
def newton_schulz_fwd(
    x, out, table,
    batch: tl.int32, rows: tl.int32, cols: tl.int32, steps: tl.int32, eps: tl.float32,
    stride_xb: tl.int64, stride_xr: tl.int64, stride_xc: tl.int64,
    stride_ob: tl.int64, stride_or: tl.int64, stride_oc: tl.int64,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MIRROR: tl.constexpr, EACH: tl.constexpr,
    EXACT: tl.constexpr,
    X_ORDER: tl.constexpr, X_VECTOR: tl.constexpr, O_ORDER: tl.constexpr, O_VECTOR: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Orthogonalise one matrix of a stack; with EACH > 0 all those whose turn it is.

    `table` holds a, b, c of each step in fp32, then a 0.
    """
    if EACH == 0:
        _orthogonalise(
            x, out, table, tl.program_id(0), rows, cols, steps, eps,
            stride_xb, stride_xr, stride_xc, stride_ob, stride_or, stride_oc,
            COMPUTE, PRECISION, MIRROR, EXACT, X_ORDER, X_VECTOR, O_ORDER, O_VECTOR, R, C,
        )  # fmt: skip
    else:
        for matrix in tl.range(tl.program_id(0), batch, tl.num_programs(0), num_stages=1):
            _orthogonalise(
                x, out, table, matrix, rows, cols, steps, eps,
                stride_xb, stride_xr, stride_xc, stride_ob, stride_or, stride_oc,
                COMPUTE, PRECISION, MIRROR, EXACT, X_ORDER, X_VECTOR, O_ORDER, O_VECTOR, R, C,
            )  # fmt: skip


@triton.jit(do_not_specialize=BACKWARD_RUNTIME)
def newton_schulz_bwd(
    upstream, x, out, scratch, table,
    batch: tl.int32, rows: tl.int32, cols: tl.int32, steps: tl.int32, eps: tl.float32,
    stride_ub: tl.int64, stride_ur: tl.int64, stride_uc: tl.int64,
    stride_xb: tl.int64, stride_xr: tl.int64, stride_xc: tl.int64,
    stride_ob: tl.int64, stride_or: tl.int64, stride_oc: tl.int64,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MIRROR: tl.constexpr, EXACT: tl.constexpr,
    U_ORDER: tl.constexpr, U_VECTOR: tl.constexpr, X_ORDER: tl.constexpr, X_VECTOR: tl.constexpr,
    O_ORDER: tl.constexpr, O_VECTOR: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient of x for `upstream`, that of the result. `scratch`: (programs, steps + 1, R, C).

    Both loops take `steps` turns, which the compiler is told are some: ptxas (Triton 3.6) prepares
    the operands of wgmma for a second loop behind the branch that skips the first one. With MIRROR,
    T + Tᵀ = b D + c (A D + D A) costs a second product instead of a transposition.
    """
    tl.assume(steps > 0)
    r = tl.arange(0, R)
    col = tl.arange(0, C)
    kept = scratch + tl.program_id(0).to(tl.int64) * (steps + 1) * (R * C)
    at = kept + r[:, None] * C + col[None, :]  # [R, C]
    turned = kept + col[:, None] + r[None, :] * C  # [C, R]
    for matrix in tl.range(tl.program_id(0), batch, tl.num_programs(0), num_stages=1):
        zero = tl.load(table + 3 * steps).to(tl.int32)
        source = _load(
            x, matrix, zero, rows, cols, stride_xb, stride_xr, stride_xc,
            X_ORDER, X_VECTOR, EXACT, R, C,
        )  # fmt: skip
        norm = _norm(source)
        iterate = (source / (norm + eps)).to(COMPUTE)  # [R, C]
        tl.debug_barrier()  # the scratch still serves the matrix before
        tl.store(at, iterate)
        for j in tl.range(0, steps, num_stages=1):  # the last iterate is not used, see above
            a = tl.load(table + 3 * j)
            b = tl.load(table + 3 * j + 1)
            c = tl.load(table + 3 * j + 2)
            if MIRROR:
                tl.debug_barrier()
                mirrored = tl.load(turned + j * (R * C))
            else:
                mirrored = tl.trans(iterate)
            z = _polynomial(_gram(iterate, mirrored, PRECISION), b, c, PRECISION).to(COMPUTE)
            iterate = tl.dot(
                z, iterate, a * iterate.to(tl.float32), input_precision=PRECISION
            ).to(COMPUTE)  # fmt: skip
            tl.store(at + (j + 1) * (R * C), iterate)
        tl.debug_barrier()

        # The largest element goes first: squares of gradients leave fp32 sooner than they do.
        given = _load(
            upstream, matrix, zero, rows, cols, stride_ub, stride_ur, stride_uc,
            U_ORDER, U_VECTOR, EXACT, R, C,
        )  # fmt: skip
        peak = tl.max(tl.abs(given))
        given = given / tl.where(peak == 0.0, 1.0, peak)
        length = _norm(given)
        length = tl.where(length == 0.0, 1.0, length)
        d = (given / length).to(COMPUTE)  # [R, C]
        for back in tl.range(0, steps, num_stages=1):
            j = steps - 1 - back
            a = tl.load(table + 3 * j)
            b = tl.load(table + 3 * j + 1)
            c = tl.load(table + 3 * j + 2)
            iterate = tl.load(at + j * (R * C))  # [R, C]
            mirrored = tl.trans(iterate)  # [C, R]; of a tile that was loaded
            gram = _gram(iterate, mirrored, PRECISION)  # [R, R]
            d_z = tl.dot(d, mirrored, input_precision=PRECISION)  # [R, R]
            both = (d_z + tl.trans(d_z)).to(COMPUTE)
            through = tl.dot(gram, both, input_precision=PRECISION)
            if MIRROR:
                through = tl.dot(both, gram, through, input_precision=PRECISION)
            else:
                through += tl.trans(through)
            through = (b * both.to(tl.float32) + c * through).to(COMPUTE)  # [R, R], T + Tᵀ
            z = _polynomial(gram, b, c, PRECISION).to(COMPUTE)  # [R, R]
            after = tl.dot(z, d, a * d.to(tl.float32), input_precision=PRECISION)
            d = tl.dot(through, iterate, after, input_precision=PRECISION).to(COMPUTE)

        # dS = (dX₀ − X₀⟨dX₀, X₀⟩·ν/‖S‖)/ν, ν = ‖S‖ + eps. A zero matrix has the gradient 0.
        source = _load(
            x, matrix, zero, rows, cols, stride_xb, stride_xr, stride_xc,
            X_ORDER, X_VECTOR, EXACT, R, C,
        )  # fmt: skip
        nu = norm + eps
        unit = source / nu
        d_unit = d.to(tl.float32)
        along = tl.sum(d_unit * unit) * (nu / tl.where(norm == 0.0, 1.0, norm))
        size = tl.where(norm == 0.0, 0.0, length / nu)
        _store(
            out, (d_unit - unit * along) * size * peak, matrix, zero, rows, cols,
            stride_ob, stride_or, stride_oc, O_ORDER, O_VECTOR, EXACT, R, C,
        )  # fmt: skip
