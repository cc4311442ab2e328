"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

A program has one head's memory. ROWS: of M, and of the open chunk, that are read at a time, with
`num_stages` blocks of them on their way; of loose rows one, no copy to shared memory takes those.
REGISTERS: most of a thread, so that a multiprocessor has room for enough programs to wait for
memory. The kernel that folds has a config by a rule, which no sweep changes.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..omega.op import OmegaShape
from ..triton_runtime import LEAST, padded
from .op import PACKAGE

OP = "omega_step_"
KERNELS, FOLD_KERNELS = f"{PACKAGE}.triton_kernels", f"{PACKAGE}.triton_fold"
MOST_WIDTH = MOST_VALUES = 256
# Tokens and heads share a counter of 31 bits.
MOST_CHUNK, MOST_HEADS = (1 << 16) - 1, (1 << 15) - 1
FOLD_SIDE = 32  # of a tile of M
# Rows of a chunk that are added to a tile at a time, and stages, with which all of a chunk of 64
# and a window of 4 are in flight; fewer at a time where there are two products, or parts of one.
FOLD_ROWS, FOLD_ROWS_OF_MANY = (32, 4), (16, 6)
FOLD_PROGRAMS = 4  # for each multiprocessor
NUMBERS = (8, 16)  # of a block of rows, for each thread; loose ones each take an address
LOOSE_NUMBERS = 4
ROOMY = 128  # registers with which the greater number, fp32 and momentum do not spill
FEW_HEADS = 4  # for each multiprocessor: then the time of one program counts


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element of a key.
        width, values: of a state, padded.
        loose: rows are not a multiple of 16 bytes long, or start anywhere.
        momentum: whether there is a second state.
        heads: of all rows, rounded up to a power of two.
    """

    size: int
    width: int
    values: int
    loose: bool
    momentum: bool
    heads: int


def bucket(shape: OmegaShape) -> Key:
    """The `Bucket` of a call."""
    size = shape.dtype.itemsize
    return Bucket(
        size,
        padded(shape.wide),
        padded(shape.values),
        not shape.aligned or bool(shape.wide * size % 16 or shape.values * size % 16),
        shape.momentum,
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
    )


def refusal(shape: OmegaShape) -> str | None:
    """None, or why no config serves this call."""
    if shape.feature_map == "symmetric":
        return "takes the feature maps identity and elementwise, this is symmetric"
    limits = (
        ("chunk_size", shape.chunk_size, MOST_CHUNK),
        ("heads", shape.heads, MOST_HEADS),
        ("the width of features", shape.wide, MOST_WIDTH),
        ("the width of v", shape.values, MOST_VALUES),
    )
    for name, length, most in limits:
        if length > most:
            return f"takes {name} up to {most}, this is {length}"
    return None


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    widest = max(bucket.width, bucket.values)
    numbers = config["ROWS"] * widest // (32 * config.num_warps)
    least, most = NUMBERS
    if bucket.size == 4 or config["REGISTERS"] < ROOMY:
        most = least
    if bucket.loose:
        least = most = LOOSE_NUMBERS
    if bucket.loose != (config.num_stages == 1):
        return f"is for {'aligned' if bucket.loose else 'loose'} rows"
    if not least <= numbers <= most:
        return f"is for other sizes: {numbers} numbers a thread"
    if config["REGISTERS"] < ROOMY and (bucket.momentum or widest > 128):
        return f"has {config['REGISTERS']} registers a thread, {ROOMY} are needed"
    states = config["ROWS"] * bucket.values * 4 * (1 + bucket.momentum)
    rows = config["ROWS"] * (bucket.width * bucket.size + bucket.values * 4 + 16)
    shared = config.num_stages * max(states, rows)
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default(key: Key, device: Device) -> Config:
    """Few warps where heads are many: what every warp does again is then done less often."""
    bucket = Bucket(*key)
    fitting = SPACE_FWD.fitting(key, device)
    if not fitting:
        raise ValueError(f"{OP}/fwd: no config fits {bucket} on {device.arch}")
    few = bucket.heads <= FEW_HEADS * device.multiprocessors
    wanted = max(1, max(bucket.width, bucket.values) // (32 if few else 64))

    def worth(config: Config) -> tuple[int, int, int]:
        return -abs(config.num_warps - wanted), -config["ROWS"], -abs(config.num_stages - 3)

    return max(fitting, key=worth)


def fold_config(key: Key) -> Config:
    """Small tiles, so that the heads of few rows are many programs.

    A warp multiplies 16 of their rows, more warps would do the same again. With 64 rows the four
    of them took wgmma, whose TF32 operands lie in shared memory in one order alone.
    """
    bucket = Bucket(*key)
    width, values = min(bucket.width, FOLD_SIDE), min(bucket.values, FOLD_SIDE)
    rows, stages = FOLD_ROWS
    if bucket.loose:
        rows, stages, values = LEAST, 1, LEAST
    elif bucket.momentum or bucket.size == 4:
        rows, stages = FOLD_ROWS_OF_MANY
    return Config.make(width // LEAST, stages, "mma", FOLD_D=width, FOLD_V=values, FOLD_ROWS=rows)


def fold_programs(config: Config, shape: OmegaShape, device: Device) -> int:
    """As many as can run at a time, or as there are tiles, if that is less.

    A call seldom folds more than a row in chunk_size, of which only the device knows which. One
    program for each row and head would be thousands that end at once, in front of few with work;
    one for each row, whose heads it folds in turn, none to end but a long one. So each program
    looks at all rows, which is as long as looking at one, and folds every n-th tile that it finds:
    of 4096 heads 64 fold in a call, a tile or two a program, and of 16 heads each tile has its own.
    """
    tiles = -(-shape.wide // config["FOLD_D"]) * -(-shape.values // config["FOLD_V"])
    return min(shape.batch * shape.heads * tiles, FOLD_PROGRAMS * device.multiprocessors)


def _config(rows: int, stages: int, warps: int, registers: int = ROOMY) -> Config:
    return Config.make(warps, stages, "fma", ROWS=rows, REGISTERS=registers)


def _loose(rows: int, warps: int) -> Config:
    return _config(rows, 1, warps)


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _config(32, 3, 1),
        _config(16, 3, 1),
        _config(8, 3, 1),
        _config(8, 4, 1),
        _config(32, 3, 2),
        _config(16, 2, 2),
        _config(16, 3, 2),
        _config(16, 4, 2),
        _config(8, 3, 2),
        _config(8, 4, 2),
        _config(8, 4, 2, 96),
        _config(32, 3, 4),
        _config(16, 2, 4),
        _config(16, 3, 4),
        _config(16, 3, 4, 96),
        _config(8, 4, 4),
        _config(8, 4, 4, 96),
        _config(64, 2, 8),
        _config(32, 3, 8),
        _config(32, 3, 8, 80),
        _config(16, 3, 8),
        _config(16, 3, 8, 80),
        _config(8, 4, 8),
        _loose(8, 1),
        _loose(8, 2),
        _loose(8, 4),
        _loose(8, 8),
        _loose(4, 8),
    ),
    fits=_fits,
    bucket=bucket,
    default=_default,
    sources=(KERNELS, FOLD_KERNELS),
    near=("heads",),
)
