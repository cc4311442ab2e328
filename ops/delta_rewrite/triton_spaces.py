"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

C columns of a memory; of reads, T queries that meet K rows of it at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..triton_runtime import padded
from .op import PACKAGE, RewriteShape

OP = "delta_rewrite"
KERNELS = f"{PACKAGE}.triton_kernels"
READ = f"{PACKAGE}.triton_read"
WHOLE = f"{PACKAGE}.triton_whole"
MOST_WIDTH, MOST_ORDER, MOST_TOKENS = 128, 4, 128
LONG = 256  # queries
# What one launch does: tokens, features in whole powers of two, and queries of all heads. Every
# block of columns forms the features of the queries, which more launches do but once.
FEW_TOKENS, FEW_FEATURES, FEW_READS, MOST_OF_A_HEAD = 16, 384, 8192, 64
WGMMA, HOPPER = 64, 90  # rows of a product, and the capability
# Numbers of N, or of a tile of A', in a thread; of fp32, which is multiplied in parts, of F, too.
MOST_HELD, MOST_WIDE = 64, 16
MOST_ON_CHIP = 96  # numbers of a memory in a thread, where one launch does all


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element of products; with an echo, what is written is fp32.
        wide: 2·dk, padded.
        order: of φ.
        tokens: M, padded; 0 if nothing is written.
        values: Dv, padded, at most 256.
        heads: of the batch, rounded up to a power of two.
        long: whether there are `LONG` queries or more.
        whole: whether it is one launch.
    """

    size: int
    wide: int
    order: int
    tokens: int
    values: int
    heads: int
    long: bool
    whole: bool


def one_by_one(shape: RewriteShape) -> bool:
    """Whether a token looks up what the one before it left."""
    return shape.sequential and shape.tokens > 1


def is_whole(shape: RewriteShape) -> bool:
    """Whether one launch does all of a call."""
    return (
        0 < shape.tokens <= FEW_TOKENS
        and shape.dtype.itemsize == 2
        and not shape.echo
        and not one_by_one(shape)
        and shape.order * padded(2 * shape.width) <= FEW_FEATURES
        and shape.batch * shape.heads * shape.reads <= FEW_READS
        # In a pool one program reads all of a head's queries, so that there have to be some heads.
        and (shape.pool == 0 or shape.reads <= MOST_OF_A_HEAD * shape.batch * shape.heads)
    )


def bucket(shape: RewriteShape) -> Key:
    """The `Bucket` of a call's reads."""
    return Bucket(
        shape.dtype.itemsize,
        padded(2 * shape.width),
        shape.order,
        padded(shape.tokens) if shape.tokens else 0,
        min(padded(shape.values), 256),
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
        shape.reads >= LONG,
        is_whole(shape),
    )


def write_bucket(shape: RewriteShape) -> Key:
    """The `Bucket` of what a call writes."""
    return Bucket(*bucket(shape))._replace(size=4 if shape.echo else shape.dtype.itemsize)


def refusal(shape: RewriteShape) -> str | None:
    """None, or why no kernel serves this call."""
    limits = (
        ("dk", shape.width, MOST_WIDTH),
        ("order", shape.order, MOST_ORDER),
        ("M", shape.tokens, MOST_TOKENS),
    )
    for name, length, most in limits:
        if length > most:
            return f"takes {name} up to {most}, this is {length}"
    return None


def _fits_write(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    columns, rows, tokens = config["C"], config["K"], bucket.tokens
    if bucket.whole:
        return "this call is one launch"
    if columns > max(16, bucket.values):
        return f"C is {columns}, a memory has {bucket.values} columns"
    held = max(tokens, rows) * columns // (32 * config.num_warps)
    if bucket.size == 4:
        held = max(held, tokens * rows // (32 * config.num_warps))
    if held > (MOST_HELD if bucket.size == 2 else MOST_WIDE):
        return f"holds {held} numbers in each thread"
    ahead = config.num_stages * (4 * rows * columns + bucket.size * tokens * rows)
    shared = ahead + bucket.size * columns * (rows + tokens)
    if shared + 2048 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default_write(key: Key, device: Device) -> Config:
    """Many columns read F seldom, and one program on a multiprocessor leaves the L2 room for what
    is read twice; memories too few for that are spread over more programs.
    """
    bucket = Bucket(*key)
    many = bucket.heads * bucket.values >= 16 * 128 and bucket.tokens >= WGMMA
    wanted = {"C": 128 if many else 32, "K": 64}
    return _best(SPACE_WRITE, key, device, wanted, 8 if many else 4)


def _fits_read(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if bucket.whole:
        return "this call is one launch"
    if config["HALF"] != (bucket.size == 2):
        return "is for another element size"
    if config["C"] > max(16, bucket.values):
        return f"C is {config['C']}, a memory has {bucket.values} columns"
    rows, queries, columns = config["K"], config["T"], config["C"]
    # Operands are in registers without wgmma, and those of a memory that is not there in 16 bits.
    converted = 0 < device.capability < HOPPER or bucket.tokens == 0
    if converted and queries * columns > 64 * 32 * config.num_warps:
        return "has too few registers for operands"
    # Without tokens the memory is not there in 16 bits.
    size = 4 if bucket.tokens == 0 else bucket.size
    shared = config.num_stages * rows * (size * columns + bucket.size * queries)
    shared += bucket.size * rows * columns * (bucket.tokens == 0)
    if shared + 2048 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default_read(key: Key, device: Device) -> Config:
    """Large products: tiles that are read least often. Few: programs enough for the device."""
    bucket = Bucket(*key)
    many = bucket.long and bucket.heads * bucket.values >= 16 * 128
    wanted = {"T": 128 if many else 64, "C": 256 if many else 64, "K": 64}
    return _best(SPACE_READ, key, device, wanted, 8 if many else 4)


def _fits_whole(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    columns = config["C"]
    if not bucket.whole:
        return "this call is several launches"
    if columns > max(16, bucket.values):
        return f"C is {columns}, a memory has {bucket.values} columns"
    held = bucket.order * bucket.wide * columns // (32 * config.num_warps)
    # Without wgmma operands of products are in registers, too.
    if held > MOST_ON_CHIP // (2 if 0 < device.capability < HOPPER else 1):
        return f"holds {held} numbers in each thread"
    shared = bucket.size * bucket.wide * (bucket.order * columns + config["T"])
    shared += 4 * bucket.wide // 2 * columns * config.num_stages  # of the memory, ahead
    if shared + 2048 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default_whole(key: Key, device: Device) -> Config:
    """Few blocks of columns, as each forms φ of all queries anew."""
    bucket = Bucket(*key)
    return _best(SPACE_WHOLE, key, device, {"C": 64, "T": 64 if bucket.long else 16}, 8)


def _best(space: Space, key: Key, device: Device, wanted: dict[str, int], warps: int) -> Config:
    """The fitting config that has most of the wanted tiles; of those the first."""
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.name}: no config fits {Bucket(*key)} on {device.arch}")

    def worth(config: Config) -> tuple[int, int, int]:
        same = sum(config[name] == n for name, n in wanted.items())
        return same, -abs(config.num_warps - warps), config["C"]

    return max(fitting, key=worth)


def _whole(columns: int, queries: int, warps: int) -> Config:
    matrix = "wgmma" if queries >= WGMMA else "mma"
    return Config.make(warps, 4, matrix, atomic=False, C=columns, T=queries)


SPACE_WHOLE = Space(
    op=OP,
    pass_="fwd_whole",
    backend="triton",
    configs=(
        _whole(64, 64, 8),
        _whole(64, 32, 8),
        _whole(32, 32, 8),
        _whole(32, 32, 4),
        _whole(16, 16, 4),
    ),
    fits=_fits_whole,
    bucket=bucket,
    default=_default_whole,
    sources=(KERNELS, WHOLE),
    near=("heads",),
)

PREPARE_CONFIG = Config.make(4, 1, "fma", R=8)  # rows at a time


def _write(columns: int, warps: int, stages: int, *, rows: int = 64) -> Config:
    matrix = "wgmma" if rows >= WGMMA else "mma"
    return Config.make(warps, stages, matrix, atomic=False, C=columns, K=rows)


SPACE_WRITE = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _write(128, 8, 3),
        _write(128, 8, 2),
        _write(64, 4, 2),
        _write(64, 8, 3),
        _write(32, 4, 3),
        _write(16, 4, 3),
        _write(32, 8, 2, rows=32),
        _write(32, 4, 2, rows=32),
        _write(16, 4, 2, rows=16),
    ),
    fits=_fits_write,
    bucket=write_bucket,
    default=_default_write,
    sources=(KERNELS,),
    near=("heads",),
)


def _read(warps: int, stages: int, *, half: int = 1, matrix: str = "wgmma", **tiles: int) -> Config:
    return Config.make(warps, stages, matrix, atomic=False, HALF=half, **tiles)


SPACE_READ = Space(
    op=OP,
    pass_="fwd_read",
    backend="triton",
    configs=(
        _read(8, 3, T=128, K=64, C=256),
        _read(8, 4, T=128, K=64, C=256),
        _read(4, 3, T=128, K=64, C=128),
        _read(8, 3, T=128, K=64, C=128),
        _read(4, 3, T=64, K=64, C=64),
        _read(4, 2, T=64, K=64, C=128),
        _read(4, 2, T=32, K=32, C=64, matrix="mma"),
        _read(4, 2, T=16, K=16, C=16, matrix="mma"),
        _read(4, 2, T=64, K=32, C=64, half=0, matrix="mma"),
        _read(4, 2, T=32, K=32, C=64, half=0, matrix="mma"),
        _read(4, 2, T=16, K=16, C=16, half=0, matrix="mma"),
    ),
    fits=_fits_read,
    bucket=bucket,
    default=_default_read,
    sources=(KERNELS, READ),
    near=("heads",),
)
