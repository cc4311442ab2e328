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
MOST_WIDTH, MOST_ORDER, MOST_TOKENS = 128, 4, 128
LONG = 256  # queries
SEVERAL = 32  # tokens
WGMMA, HOPPER = 64, 90  # rows of a product, and the capability
LEAST_HELD, MOST_HELD = 8, 160  # numbers of a memory, of N and of E that a thread holds


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        wide: 2·dk, padded.
        order: of φ.
        tokens: M, padded; 0 if nothing is written.
        values: Dv, padded, at most 256.
        heads: of the batch, rounded up to a power of two.
        long: whether there are `LONG` queries or more.
    """

    size: int
    wide: int
    order: int
    tokens: int
    values: int
    heads: int
    long: bool


def bucket(shape: RewriteShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        shape.dtype.itemsize,
        padded(2 * shape.width),
        shape.order,
        padded(shape.tokens) if shape.tokens else 0,
        min(padded(shape.values), 256),
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
        shape.reads >= LONG,
    )


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
    columns, threads = config["C"], 32 * config.num_warps
    if columns > max(16, bucket.values):
        return f"C is {columns}, a memory has {bucket.values} columns"
    held = (bucket.order * bucket.wide + 2 * bucket.tokens) * columns // threads
    if held > MOST_HELD:
        return f"holds {held} numbers in each thread"
    if held < LEAST_HELD and config.num_warps > 4:
        return f"has {config.num_warps} warps for a small tile"
    if config.get("REGISTERS") and bucket.size == 4 and bucket.tokens > SEVERAL:
        return "has too few registers for the parts of fp32 numbers"
    return None


def _default_write(key: Key, device: Device) -> Config:
    """The first one: two programs of eight warps on a multiprocessor, one of which loads or stores
    while the other multiplies. Few tokens leave a thread registers enough. Without wgmma operands
    are in registers, too, and of 32 columns they spill.
    """
    bucket = Bucket(*key)
    fitting = SPACE_WRITE.fitting(key, device)
    if not fitting:
        raise ValueError(f"{SPACE_WRITE.name}: no config fits {bucket} on {device.arch}")
    if 0 < device.capability < HOPPER:
        return min(fitting, key=lambda c: (abs(c["C"] - 16), abs(c["K"] - 64), c.num_warps))
    if bucket.tokens > SEVERAL:
        return fitting[0]
    return next((c for c in fitting if c["C"] == 32 and not c.get("REGISTERS")), fitting[0])


def _fits_read(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if config["HALF"] != (bucket.size == 2):
        return "is for another element size"
    if config["C"] > max(16, bucket.values):
        return f"C is {config['C']}, a memory has {bucket.values} columns"
    rows, queries, columns = config["K"], config["T"], config["C"]
    shared = config.num_stages * 4 * rows * columns + bucket.size * rows * (queries + columns)
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default_read(key: Key, device: Device) -> Config:
    bucket = Bucket(*key)
    many = bucket.long and bucket.heads * bucket.values >= 16 * 128
    wanted = {"T": 128 if many else 64, "C": 128 if many else 64, "K": 64}
    return _best(SPACE_READ, key, device, wanted, 8 if many else 4)


def _best(space: Space, key: Key, device: Device, wanted: dict[str, int], warps: int) -> Config:
    """The fitting config that has most of the wanted tiles; of those the first."""
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.name}: no config fits {Bucket(*key)} on {device.arch}")

    def worth(config: Config) -> tuple[int, int, int]:
        same = sum(config[name] == n for name, n in wanted.items())
        return same, -abs(config.num_warps - warps), -config.num_stages

    return max(fitting, key=worth)


PREPARE_CONFIG = Config.make(4, 1, "fma", R=16, K=64)  # rows and features at a time


def _write(columns: int, warps: int, *, rows: int = 64, registers: int = 0) -> Config:
    """`registers`: the most of a thread, so that two programs share a multiprocessor."""
    tiles = {"C": columns, "K": rows} | ({"REGISTERS": registers} if registers else {})
    matrix = "wgmma" if rows >= WGMMA else "mma"
    return Config.make(warps, 1, matrix, atomic=False, **tiles)


SPACE_WRITE = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _write(32, 8, registers=128),
        _write(64, 8),
        _write(32, 8),
        _write(32, 4),
        _write(32, 8, rows=128),
        _write(16, 4),
        _write(16, 8),
        _write(16, 4, rows=32),
    ),
    fits=_fits_write,
    bucket=bucket,
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
        _read(4, 2, T=64, K=64, C=64),
        _read(4, 3, T=64, K=64, C=64),
        _read(4, 2, T=64, K=64, C=128),
        _read(8, 2, T=128, K=64, C=64),
        _read(8, 2, T=128, K=64, C=128),
        _read(8, 3, T=128, K=64, C=128),
        _read(8, 2, T=128, K=32, C=256),
        _read(8, 2, T=128, K=64, C=256),
        _read(8, 2, T=64, K=64, C=256),
        _read(4, 2, T=32, K=32, C=32, matrix="mma"),
        _read(4, 2, T=32, K=32, C=64, matrix="mma"),
        _read(4, 2, T=16, K=16, C=16, matrix="mma"),
        _read(4, 2, T=64, K=32, C=64, half=0, matrix="mma"),
        _read(4, 2, T=32, K=32, C=64, half=0, matrix="mma"),
        _read(4, 2, T=16, K=16, C=16, half=0, matrix="mma"),
    ),
    fits=_fits_read,
    bucket=bucket,
    default=_default_read,
    sources=(KERNELS,),
    near=("heads",),
)
