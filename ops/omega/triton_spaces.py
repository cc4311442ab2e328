"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

Chunks and windows belong to the function; what is left to choose is how many columns of the memory
a program takes. CHAIN_V, `num_warps` and `num_stages` are those of the walk along the sequence,
which wants as many programs as there are multiprocessors; READ_V and READ_WARPS those of the reads.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..triton_runtime import padded
from .op import PACKAGE, OmegaShape

OP = "omega_memory"
KERNELS, KERNELS_BWD = f"{PACKAGE}.triton_fwd", f"{PACKAGE}.triton_bwd"
MOST_CHUNK, MOST_HALO = 128, 64
MOST_WIDTH, MOST_VALUES = 128, 256
# With rows of less than 64 columns, and in fp32 with momentum, ptxas (of Triton 3.6) forms some
# descriptors of wgmma from registers that it never set; two warps multiply without wgmma. It does
# so for reads by eight warps, too.
WIDE, NARROW_WARPS = 64, 2


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        width, values: of a state, padded.
        chunk: tokens of a chunk, padded.
        halo: older tokens that a chunk sees, padded; 0 without any.
        momentum: whether there is a second state.
        heads: of all sequences, rounded up to a power of two.
    """

    size: int
    width: int
    values: int
    chunk: int
    halo: int
    momentum: bool
    heads: int


def halo_of(shape: OmegaShape) -> int:
    """Rows of a tile of older keys."""
    return padded(shape.window - 1) if shape.window > 1 else 0


def bucket(shape: OmegaShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        shape.dtype.itemsize,
        padded(shape.wide),
        padded(shape.values),
        padded(shape.chunk_size),
        halo_of(shape),
        shape.momentum,
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
    )


def refusal(shape: OmegaShape) -> str | None:
    """None, or why no config serves this call."""
    limits = (
        ("chunk_size", shape.chunk_size, MOST_CHUNK),
        ("window − 1", shape.window - 1, min(MOST_HALO, shape.chunk_size)),
        ("the width of features", shape.wide, MOST_WIDTH),
        ("the width of v", shape.values, MOST_VALUES),
    )
    for name, length, most in limits:
        if length > most:
            return f"takes {name} up to {most}, this is {length}"
    return None


def _columns(config: Config, bucket: Bucket, warps: str, *parallel: str) -> str | None:
    """None, or why the columns of a config's tiles are not for a bucket."""
    for tile in ("CHAIN_V", *parallel):
        if config[tile] > bucket.values:
            return f"{tile} is {config[tile]}, there are {bucket.values} columns"
    narrow = bucket.values < WIDE or (bucket.size == 4 and bucket.momentum)
    if narrow != (config[warps] == NARROW_WARPS):
        return f"is for tiles that {'wgmma serves' if narrow else 'wgmma does not serve'}"
    return None


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    reason = _columns(config, bucket, "READ_WARPS", "READ_V")
    if reason is not None:
        return reason
    rows = bucket.chunk + bucket.halo
    states = 1 + bucket.momentum
    chain = bucket.size * (
        config.num_stages * rows * (bucket.width + config["CHAIN_V"])
        + (rows + states * bucket.width) * config["CHAIN_V"]
    )
    read = bucket.size * (
        (2 * bucket.chunk + bucket.halo) * bucket.width
        + rows * (bucket.chunk + config["READ_V"])
        + states * bucket.width * config["READ_V"]
    )
    if max(chain, read) + 1024 > device.shared_bytes:
        return f"needs {max(chain, read)} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default(key: Key, device: Device) -> Config:
    """The widest columns of a walk that still leave no multiprocessor without one."""
    bucket = Bucket(*key)
    fitting = SPACE_FWD.fitting(key, device)
    if not fitting:
        raise ValueError(f"{OP}/fwd: no config fits {bucket} on {device.arch}")

    def worth(config: Config) -> tuple[bool, int, int]:
        programs = bucket.heads * -(-bucket.values // config["CHAIN_V"])
        full = programs >= 0.75 * device.multiprocessors
        return full, config["CHAIN_V"] if full else -config["CHAIN_V"], config["READ_V"]

    return max(fitting, key=worth)


def _config(chain_v: int, stages: int, read_v: int, read_warps: int = 4) -> Config:
    return Config.make(4, stages, "wgmma", CHAIN_V=chain_v, READ_V=read_v, READ_WARPS=read_warps)


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _config(16, 3, 16, NARROW_WARPS),
        _config(16, 3, 64),
        _config(32, 3, 32, NARROW_WARPS),
        _config(32, 3, 64),
        _config(32, 3, 128),
        _config(64, 3, 64),
        _config(64, 3, 128),
        _config(64, 2, 64),
    ),
    fits=_fits,
    bucket=bucket,
    default=_default,
    sources=(KERNELS, f"{PACKAGE}.triton_chunks"),
)


def _fits_bwd(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    reason = _columns(config, bucket, "WARPS", "PULL_V", "VALUES_V")
    if reason is not None:
        return reason
    rows = bucket.chunk + bucket.halo
    states = 1 + bucket.momentum
    chain = config["CHAIN_V"] * states * bucket.width * (4 * config.num_stages + bucket.size)
    chain += bucket.size * config.num_stages * bucket.chunk * bucket.width
    chunks = bucket.size * (
        2 * bucket.width * config["VALUES_V"]
        + (bucket.chunk + rows) * bucket.width
        + rows * bucket.chunk
        + bucket.chunk * config["VALUES_V"]
    )
    shared = max(chain, chunks)
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default_bwd(key: Key, device: Device) -> Config:
    bucket = Bucket(*key)
    fitting = SPACE_BWD.fitting(key, device)
    if not fitting:
        raise ValueError(f"{OP}/bwd: no config fits {bucket} on {device.arch}")

    def worth(config: Config) -> tuple[bool, int, int]:
        programs = bucket.heads * -(-bucket.values // config["CHAIN_V"])
        full = programs >= 0.75 * device.multiprocessors
        return full, config["CHAIN_V"] if full else -config["CHAIN_V"], config["PULL_V"]

    return max(fitting, key=worth)


def _config_bwd(chain_v: int, stages: int, columns: int, warps: int, pull_warps: int = 4) -> Config:
    return Config.make(
        4, stages, "wgmma", CHAIN_V=chain_v, PULL_V=columns, PULL_WARPS=pull_warps,
        VALUES_V=columns, WARPS=warps,
    )  # fmt: skip


SPACE_BWD = Space(
    op=OP,
    pass_="bwd",
    backend="triton",
    configs=(
        _config_bwd(16, 2, 16, NARROW_WARPS, NARROW_WARPS),
        _config_bwd(16, 2, 64, 8),
        _config_bwd(32, 2, 32, NARROW_WARPS, NARROW_WARPS),
        _config_bwd(32, 2, 64, 4),
        _config_bwd(32, 2, 64, 8),
        _config_bwd(64, 2, 64, 4),
        _config_bwd(64, 2, 64, 8),
    ),
    fits=_fits_bwd,
    bucket=bucket,
    default=_default_bwd,
    sources=(KERNELS, KERNELS_BWD, f"{PACKAGE}.triton_chunks"),
)
