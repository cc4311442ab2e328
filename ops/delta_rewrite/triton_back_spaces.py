"""Config spaces of the backward by Triton.

Of tokens K features and C columns of a product, of queries T rows, too.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..triton_runtime import padded
from .op import PACKAGE, RewriteShape

OP = "delta_rewrite"
BACK_KERNELS = f"{PACKAGE}.triton_back_kernels"
_SOURCES = (BACK_KERNELS, f"{PACKAGE}.triton_kernels")
LONG = 256  # queries
HOPPER = 90  # capability
MOST_VALUES = 256  # of a bucket
SEVERAL = 32  # tokens
MOST_HELD = 96  # numbers of sums that a thread has


class BackBucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        wide: P, padded, at most 256.
        tokens: M, padded; 0 if nothing is written.
        values: Dv, padded, at most 256.
        heads: of the batch, rounded up to a power of two.
        long: whether there are `LONG` queries or more.
    """

    size: int
    wide: int
    tokens: int
    values: int
    heads: int
    long: bool


def bucket(shape: RewriteShape) -> Key:
    """The `BackBucket` of a call."""
    return BackBucket(
        shape.dtype.itemsize,
        min(padded(shape.wide), MOST_VALUES),
        padded(shape.tokens) if shape.tokens else 0,
        min(padded(shape.values), MOST_VALUES),
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
        shape.reads >= LONG,
    )


def _too_wide(config: Config, bucket: BackBucket) -> str | None:
    if config["C"] > max(16, bucket.values):
        return f"C is {config['C']}, a memory has {bucket.values} columns"
    if config["K"] > max(16, bucket.wide):
        return f"K is {config['K']}, a memory has {bucket.wide} features"
    return None


def _fits_tokens(config: Config, key: Key, device: Device) -> str | None:
    bucket = BackBucket(*key)
    reason = _too_wide(config, bucket)
    if reason is not None:
        return reason
    threads = 32 * config.num_warps
    # Two sums [M, K], and the parts of fp32 numbers that are multiplied.
    held = 2 * bucket.tokens * max(config["K"], config["C"]) // threads
    if held > (MOST_HELD if bucket.size == 2 else MOST_HELD // 2):
        return f"holds {held} numbers in each thread"
    rows, columns, m = config["K"], config["C"], bucket.tokens
    shared = config.num_stages * 4 * max(columns * (rows + m), rows * (columns + m))
    return _fits_shared(shared, device)


def _fits_shared(shared: int, device: Device) -> str | None:
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _fits_reads(config: Config, key: Key, device: Device) -> str | None:
    bucket = BackBucket(*key)
    if config["HALF"] != (bucket.size == 2):
        return "is for another element size"
    reason = _too_wide(config, bucket)
    if reason is not None:
        return reason
    queries, rows, columns = config["T"], config["K"], config["C"]
    # A memory that nothing was written to comes in fp32.
    of_outer = bucket.size * queries * (rows + columns)
    of_answer = bucket.size * queries * columns + (4 + bucket.size) * columns * rows
    return _fits_shared(config.num_stages * max(of_outer, of_answer), device)


def _best(space: Space, key: Key, device: Device, wanted: dict[str, int], warps: int) -> Config:
    """The fitting config that has most of the wanted tiles; of those the first."""
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.name}: no config fits {BackBucket(*key)} on {device.arch}")

    def worth(config: Config) -> tuple[int, int]:
        same = sum(config[name] == n for name, n in wanted.items())
        return same, -abs(config.num_warps - warps)

    return max(fitting, key=worth)


def _default_tokens(key: Key, device: Device) -> Config:
    many = BackBucket(*key).tokens > SEVERAL
    return _best(SPACE_BACK, key, device, {"K": 64, "C": 64}, 8 if many else 4)


def _default_reads(key: Key, device: Device) -> Config:
    bucket = BackBucket(*key)
    if bucket.size == 2 and bucket.long and bucket.heads * bucket.values >= 16 * 128:
        return _best(SPACE_BACK_READS, key, device, {"T": 128, "K": 128, "C": 64}, 8)
    # Without wgmma the parts of fp32 numbers are in registers, and of more rows they spill.
    few = bucket.size == 4 and 0 < device.capability < HOPPER
    return _best(SPACE_BACK_READS, key, device, {"T": 32 if few else 64, "K": 64, "C": 64}, 4)


def _tokens(features: int, columns: int, warps: int, stages: int = 2) -> Config:
    return Config.make(warps, stages, "wgmma", atomic=False, K=features, C=columns)


def _reads(
    queries: int, features: int, columns: int, warps: int, stages: int, *, half: int = 1
) -> Config:
    matrix = "wgmma" if half and min(queries, features) >= 64 else "mma"
    return Config.make(
        warps, stages, matrix, atomic=False, T=queries, K=features, C=columns, HALF=half
    )


SPACE_BACK = Space(
    op=OP,
    pass_="bwd",
    backend="triton",
    configs=(
        _tokens(64, 64, 4),
        _tokens(64, 64, 8),
        _tokens(64, 64, 8, 3),
        _tokens(64, 128, 8),
        _tokens(128, 64, 8),
        _tokens(64, 32, 4),
        _tokens(32, 32, 4),
        _tokens(16, 16, 4, 1),
    ),
    fits=_fits_tokens,
    bucket=bucket,
    default=_default_tokens,
    sources=_SOURCES,
    near=("heads",),
)

SPACE_BACK_READS = Space(
    op=OP,
    pass_="bwd_read",
    backend="triton",
    configs=(
        _reads(64, 64, 64, 4, 2),
        _reads(64, 64, 64, 4, 3),
        _reads(128, 64, 64, 4, 3),
        _reads(128, 128, 64, 8, 2),
        _reads(128, 128, 64, 8, 3),
        _reads(32, 32, 32, 4, 2),
        _reads(16, 16, 16, 4, 2),
        _reads(64, 64, 64, 4, 2, half=0),
        _reads(64, 64, 64, 8, 2, half=0),
        _reads(32, 64, 64, 4, 2, half=0),
        _reads(16, 16, 16, 4, 2, half=0),
    ),
    fits=_fits_reads,
    bucket=bucket,
    default=_default_reads,
    sources=_SOURCES,
    near=("heads",),
)
