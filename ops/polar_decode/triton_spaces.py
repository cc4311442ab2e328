"""Config space of the Triton backend: which tiles exist and fit, and how many splits there are.

BLOCK_N keys at a time, `num_stages` blocks of keys and of values on their way; of loose rows one,
no copy to shared memory takes those. EACH: programs that a multiprocessor should have, all of them
at once. SHARE: KiB of keys and values that a split reads at least.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..triton_runtime import padded
from .op import PACKAGE, DecodeShape

OP = "polar_decode"
KERNELS = f"{PACKAGE}.triton_kernels"
# Query heads of a program, by bytes of an element: from 64 on, products would be those of a
# warpgroup; those of fp32 are six, of parts that registers have to hold.
MOST_ROWS = {2: 32, 4: 16}
MOST_SPLITS = 1024
# A sequence of so many shares is not cut: one program reads 256 KiB in 3 µs or so, which is as long
# as the launch and the reading of a merge take.
WHOLE = 4
TILE = (4 << 10, 32 << 10)  # bytes of a block of keys, of narrow heads as many as there may be
LARGE = 16 << 10  # addresses of larger blocks spill, of more than two stages or by few warps
KEYS_PER_COLUMN = 4  # at a time at most, by the width of a head
LOOSE_NUMBERS = 16  # of a block of keys for each thread; each takes an address
SUMS = 64  # of rows of values, for each thread
WIDE = 128  # heads of fp32 from this on take all registers of eight warps
# A merge of few splits is one of many rows: small programs, of which many run at once. Of many, it
# is one of few rows, which should have all of them on their way.
FEW_SPLITS = 16
MERGE = {
    True: Config.make(4, 2, "fma", NUMBERS=2048),
    False: Config.make(8, 3, "fma", NUMBERS=8192),
}


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        width: of a head, padded.
        loose: rows are not a multiple of 16 bytes, or start anywhere.
        rows: query heads of a program, padded.
        programs: of one split, rounded up to a power of two.
        keys: that a sequence may see, rounded up to a power of two.
    """

    size: int
    width: int
    loose: bool
    rows: int
    programs: int
    keys: int


def rows_of(shape: DecodeShape) -> int:
    """Query heads of a program."""
    return min(padded(shape.group), MOST_ROWS[min(shape.dtype.itemsize, 4)])


def row_tiles(shape: DecodeShape) -> int:
    """Programs for the query heads of a key head."""
    return -(-shape.group // rows_of(shape))


def _rounded(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def bucket(shape: DecodeShape) -> Key:
    """The `Bucket` of a call."""
    keys = shape.max_context_len
    if shape.window is not None:
        keys = min(keys, shape.window)
    return Bucket(
        shape.dtype.itemsize,
        padded(shape.head_dim),
        not shape.aligned,
        rows_of(shape),
        _rounded(shape.batch * shape.heads_k * row_tiles(shape)),
        _rounded(keys),
    )


def splits_of(shape: DecodeShape, config: Config, device: Device) -> int:
    """Into how many splits each sequence is cut: by sizes alone, no length is known here.

    So many that the device is filled once and nothing is left for a second turn, each with SHARE to
    read. It changes with `max_context_len` in steps of powers of two.
    """
    if shape.num_splits is not None:
        return shape.num_splits
    keys = Bucket(*bucket(shape)).keys
    read = keys * 2 * shape.head_dim * shape.dtype.itemsize
    share = config["SHARE"] << 10
    if read <= WHOLE * share:
        return 1
    programs = max(shape.batch * shape.heads_k * row_tiles(shape), 1)
    fill = config["EACH"] * device.multiprocessors // programs
    return max(1, min(fill, read // share, MOST_SPLITS))


def merge_config(splits: int) -> Config:
    """Of the kernel that puts splits together, which no sweep changes."""
    return MERGE[splits <= FEW_SPLITS]


def merge_parts(config: Config, width: int) -> int:
    """Splits that a merge reads at a time."""
    return config["NUMBERS"] // padded(width)


def _bytes(config: Config, bucket: Bucket) -> int:
    """Shared memory of a program: blocks of keys and values, and what tiles change hands in."""
    tile = config["BLOCK_N"] * bucket.width * bucket.size
    blocks = 1 if bucket.loose else 2 * max(config.num_stages - 1, 1)
    changed = bucket.rows * (bucket.width + config["BLOCK_N"]) * bucket.size
    return blocks * tile + changed + 2048


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if bucket.loose != (config.num_stages == 1):
        return f"is for {'aligned' if bucket.loose else 'loose'} rows"
    numbers = config["BLOCK_N"] * bucket.width
    tile = numbers * bucket.size
    least, most = TILE
    least = min(least, KEYS_PER_COLUMN * bucket.width**2 * bucket.size)
    if bucket.loose:
        if numbers > LOOSE_NUMBERS * 32 * config.num_warps:
            return f"is for narrower heads: {numbers} numbers of a block of keys"
    elif not least <= tile <= most:
        return f"is for other widths: {tile} bytes of keys at a time"
    elif tile > LARGE and (config.num_stages > 2 or config.num_warps < 8):
        return f"is for narrower heads: {tile} bytes of keys at a time"
    few = bucket.size == 4 and bucket.width >= WIDE and config.num_warps < 8
    if few or bucket.rows * bucket.width > SUMS * 32 * config.num_warps:
        return f"has {config.num_warps} warps, too few for {bucket.rows} rows of {bucket.width}"
    if config["BLOCK_N"] > KEYS_PER_COLUMN * bucket.width:
        return f"is for wider heads than {bucket.width}"
    shared = _bytes(config, bucket)
    if shared > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    if config["EACH"] > 1 and config["EACH"] * shared > device.shared_bytes:
        return f"{config['EACH']} programs need {config['EACH'] * shared} bytes of shared memory"
    return None


def _default(key: Key, device: Device) -> Config:
    """Two programs for each multiprocessor, with 96 KiB of keys and values each on Hopper: what its
    memory needs to have on its way is a third of that.
    """
    bucket = Bucket(*key)
    fitting = SPACE_FWD.fitting(key, device)
    if not fitting:
        raise ValueError(f"{OP}/fwd: no config fits {bucket} on {device.arch}")
    tile = (16 << 10) // (bucket.width * bucket.size)

    def worth(config: Config) -> tuple[int, int, int, int, int]:
        return (
            -abs(config["BLOCK_N"] - min(max(tile, 16), 128)),
            -config.num_warps,
            -abs(config["EACH"] - 2),
            -abs(config.num_stages - 4),
            -abs(config["SHARE"] - 64),
        )

    return max(fitting, key=worth)


def _config(keys: int, warps: int, stages: int, each: int, share: int = 64) -> Config:
    return Config.make(warps, stages, "mma", BLOCK_N=keys, EACH=each, SHARE=share)


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _config(64, 4, 3, 2),
        _config(64, 4, 3, 3),
        _config(64, 4, 3, 2, 32),
        _config(64, 4, 3, 2, 128),
        _config(64, 4, 4, 2),
        _config(64, 4, 4, 1),
        _config(64, 4, 5, 1),
        _config(64, 4, 2, 3),
        _config(64, 8, 3, 2),
        _config(64, 8, 4, 1),
        _config(128, 4, 2, 2),
        _config(128, 4, 2, 3),
        _config(128, 4, 3, 1),
        _config(128, 4, 3, 2),
        _config(128, 4, 4, 2),
        _config(128, 8, 2, 2),
        _config(128, 8, 3, 1),
        _config(32, 4, 3, 2),
        _config(32, 4, 4, 4),
        _config(32, 4, 5, 2),
        _config(32, 4, 2, 1),
        _config(32, 8, 3, 2),
        _config(32, 2, 4, 4),
        _config(16, 4, 4, 2),
        _config(16, 4, 3, 2),
        _config(16, 4, 2, 1),
        _config(16, 8, 3, 2),
        _config(16, 8, 2, 1),
        *(_config(keys, warps, 1, 2) for keys in (16, 32, 64) for warps in (4, 8)),
    ),
    fits=_fits,
    bucket=bucket,
    default=_default,
    sources=(KERNELS,),
    near=("programs", "keys"),
)
