"""Triton kernels whose machine code is known in advance, for the tests of the compile report."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, steps):
    """One (M, N) tile of a matrix product of contiguous operands, `steps` blocks of K deep."""
    rows = tl.arange(0, M)
    cols = tl.arange(0, N)
    inner = tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        x = tl.load(a + step * M * K + rows[:, None] * K + inner[None, :])
        y = tl.load(b + step * K * N + inner[:, None] * N + cols[None, :])
        acc += tl.dot(x, y)
    tl.store(c + rows[:, None] * N + cols[None, :], acc)


@triton.jit
def double(x, y, BLOCK: tl.constexpr):
    """y = 2x over one block."""
    index = tl.arange(0, BLOCK)
    tl.store(y + index, tl.load(x + index) * 2)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["y"])
def scaled(x, y, n: tl.int32, scale: tl.float32, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """y = scale·x or x over the first n numbers: arguments of every kind that a launcher passes."""
    index = tl.arange(0, BLOCK)
    read = tl.load(x + index, mask=index < n)
    tl.store(y + index, read * scale if HOW == "scale" else read, mask=index < n)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    """Does not compile: a block of three elements."""
    tl.store(x + tl.arange(0, BLOCK), 0.0)


def not_a_kernel() -> None:
    """An attribute of this module that Triton cannot compile."""
