"""Symmetric features of degree 2 in the registers of Hopper's products, and what a walk on them
shares: sizes, the place of a program, rows of keys in shared memory and their transposes.

Features of a step are a product of numbers with one of their columns: see `polynomial.triton_rows`.
Two 16-bit numbers lie in a register, and stay together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_fwd import CHUNK, product

COLUMNS = gl.constexpr(32)  # of the memory that a program has
WIDTH = gl.constexpr(64)  # of a padded key
HALF = gl.constexpr(32)
STEPS = gl.constexpr(34)  # tiles of a memory: of pairs, of the upper half's squares, of numbers
OLDER = gl.constexpr(16)  # keys of the chunk before that a chunk may see
ROOT2 = gl.constexpr(1.4142135623730951)


@gluon.constexpr_function
def features(columns):
    """The layout of features as the left operand of a product of COLUMNS columns."""
    return gl.DotOperandLayout(0, product(columns), 2)


@gluon.constexpr_function
def along_tokens():
    """A layout of [tokens, numbers] whose threads have 8 tokens of a number."""
    return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])


@gluon.constexpr_function
def of_pairs_of(type_name, code):
    """PTX for two 16-bit numbers in each register."""
    return code.replace("TYPE", "bf16x2" if type_name == "bf16" else "f16x2")


@gluon.jit
def times(x, by):
    """x · by, both of one 16-bit type."""
    x, by = gl.broadcast(x, by)
    CODE: gl.constexpr = of_pairs_of(x.dtype.name, "mul.rn.TYPE $0, $1, $2;")
    return gl.inline_asm_elementwise(CODE, "=r,r,r", [x, by], x.dtype, is_pure=True, pack=2)


@gluon.jit
def one_of(x, by, other, by_other, mask):
    """x · by where bits of `mask` are set, else other · by_other. (The compiler's own selection
    takes every number out of its pair.)
    """
    x, by = gl.broadcast(x, by)
    other, by_other = gl.broadcast(other, by_other)
    x, mask = gl.broadcast(x, mask)
    CODE: gl.constexpr = of_pairs_of(
        x.dtype.name,
        "{ .reg .b32 x, y; mul.rn.TYPE x, $1, $2; mul.rn.TYPE y, $3, $4; "
        "lop3.b32 $0, $5, x, y, 0xCA; }",
    )
    arguments = [x, by, other, by_other, mask]
    return gl.inline_asm_elementwise(CODE, "=r,r,r,r,r,r", arguments, x.dtype, is_pure=True, pack=2)


@gluon.jit
def place_program(number, cu, tokens, heads, chunks, VALUES: gl.constexpr, PACKED: gl.constexpr):
    """Of a program: its memory's number, sequence, row of the batch, head and first column; the
    sequence's first token, its end, its number of chunks and its first slot.
    """
    blocks: gl.constexpr = (VALUES + COLUMNS - 1) // COLUMNS
    head = number // blocks % heads
    sequence = number // blocks // heads
    batch = sequence
    begin = tokens * 0
    end = tokens
    slot0 = sequence * chunks
    if PACKED:
        batch = begin
        begin = gl.load(cu + sequence)
        end = gl.load(cu + sequence + 1)
        slot0 = begin // CHUNK + sequence
    count = gl.cdiv(end - begin, CHUNK)
    return number, sequence, batch, head, number % blocks * COLUMNS, begin, end, count, slot0


@gluon.jit
def rate_of(ends, place, c, heads):
    """A of a chunk's last token: 1 where there is no such chunk."""
    number, sequence, batch, head, v0, begin, end, count, slot0 = place
    at = (slot0 + c).to(gl.int64) * heads + head
    return gl.load(ends + at * 3, mask=(c >= 0) & (c < count), other=1.0)


@gluon.jit
def coefficient(a, r: gl.constexpr, head, stride_ah, stride_ar, DEFAULTS: gl.constexpr):
    """a_r of a head; DEFAULTS: all of them where no tensor holds any."""
    if DEFAULTS is None:
        return gl.load(a + head * stride_ah + r * stride_ar).to(gl.float32)
    else:
        return gl.to_tensor(DEFAULTS[r]).to(gl.float32)


@gluon.jit
def rows_of(tiles, at):
    """A half of the width of rows in shared memory."""
    return tiles.index(at).reshape([tiles.shape[3], HALF])


@gluon.jit
def halves(tiles, buffer, there, LAYOUT: gl.constexpr):
    """Both halves of the width of rows in shared memory; 0 but where `there`."""
    low = rows_of(tiles, 2 * buffer).load(LAYOUT)
    high = rows_of(tiles, 2 * buffer + 1).load(LAYOUT)
    return gl.where(there[:, None], low, 0.0), gl.where(there[:, None], high, 0.0)


@gluon.jit
def turn(low, high, place, columns):
    """Store rows transposed, as the place-th tile of `columns`, a row there for each number."""
    SIZE: gl.constexpr = columns.shape[1]
    L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = columns._reinterpret(columns.dtype, [columns.shape[0] // HALF, HALF, SIZE], L)
    low = gl.convert_layout(low, along_tokens())
    high = gl.convert_layout(high, along_tokens())
    parts.index(2 * place).permute((1, 0)).store(low)
    parts.index(2 * place + 1).permute((1, 0)).store(high)


@gluon.jit
def turn_keys(low, high, place, columns, turned):
    """What `turn` does; and once more, the upper half first, where operands are loaded from."""
    turn(low, high, place, columns)
    SIZE: gl.constexpr = turned.shape[2]
    parts = turned._reinterpret(turned.dtype, [turned.shape[0] * 2, HALF, SIZE], turned.layout)
    parts.index(2 * place).permute((1, 0)).store(gl.convert_layout(high, along_tokens()))
    parts.index(2 * place + 1).permute((1, 0)).store(gl.convert_layout(low, along_tokens()))
