"""A large matrix divided by its norm, in two launches.

Each program sums the squares of a run of neighbours; then each adds up all sums, in fixed order,
and divides its own run.
"""

import triton
import triton.language as tl

RUNTIME = ("size", "cols", "width", "parts", "each", "eps", "scale")


@triton.jit(do_not_specialize=RUNTIME)
def sum_squares(
    x, sums, size: tl.int64, parts: tl.int32, each: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """sums[matrix, part] in fp32 of x (B, size); a part is `each` numbers, a multiple of BLOCK."""
    matrix = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    x += matrix.to(tl.int64) * size
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, each, BLOCK):
        at = part.to(tl.int64) * each + start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit(do_not_specialize=RUNTIME)
def divide_by_norm(
    x, sums, out, size: tl.int64, cols: tl.int32, width: tl.int32, parts: tl.int32,
    each: tl.int32, eps: tl.float32, scale: tl.float32,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out = scale·x/(norm + eps), 0 for a zero matrix; its rows of `cols` are `width` apart."""
    matrix = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    index = tl.arange(0, PARTS)
    own = tl.load(sums + matrix * parts + index, mask=index < parts, other=0.0)
    norm = tl.sqrt(tl.sum(own))
    factor = tl.where(norm == 0.0, 0.0, scale / (norm + eps))
    x += matrix.to(tl.int64) * size
    out += matrix.to(tl.int64) * (size // cols) * width
    for start in range(0, each, BLOCK):
        at = part.to(tl.int64) * each + start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * factor
        to = at // cols * width + at % cols
        tl.store(out + to, value.to(out.dtype.element_ty), mask=at < size)
