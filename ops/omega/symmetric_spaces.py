"""Config space of the forward on symmetric features: columns of the memory, and of the reads.

V, `num_warps` and `num_stages` are those of the walk along the sequence, READ_V and READ_WARPS of
the reads. The walk for Hopper (HOPPER) has tiles of one size, and SLOTS for what goes from who adds
to the memory to who looks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from .. import triton_runtime as runtime
from ..triton_runtime import padded
from .op import PACKAGE, OmegaShape
from .triton_spaces import OP, halo_of, parts_of, rows_of, walked

KERNELS, HOPPER = f"{PACKAGE}.triton_symmetric", f"{PACKAGE}.hopper_symmetric"
MOST_WIDTH, MOST_CHUNK, MOST_HALO, MOST_VALUES = 64, 64, 64, 256
# Of the walk for Hopper: tokens of a chunk and older ones, columns of the memory.
CHUNK, OLDER, COLUMNS = 64, 16, 32


class SymmetricBucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        width, values: of a key and of a value, padded.
        chunk: rows of a tile that holds a chunk.
        halo: older tokens that a chunk sees, padded; 0 without any.
        heads: of all sequences, rounded up to a power of two.
        hopper: whether the walk for Hopper takes the call's rules and views.
    """

    size: int
    width: int
    values: int
    chunk: int
    halo: int
    heads: int
    hopper: bool


def bucket(shape: OmegaShape) -> Key:
    """The `SymmetricBucket` of a call."""
    shape = walked(shape)
    return SymmetricBucket(
        shape.dtype.itemsize,
        padded(shape.width),
        padded(shape.values),
        rows_of(shape.chunk_size),
        halo_of(shape),
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
        shape.wide > shape.width and parts_of(replace(shape, wide=shape.width)) == 1,
    )


def refusal(shape: OmegaShape) -> str | None:
    """None, or why no config serves this call."""
    shape, width = walked(shape), shape.width
    if shape.wide not in (width, width + width * (width + 1) // 2):
        return "takes symmetric features up to degree 2"
    if shape.momentum:
        return "has no momentum on symmetric features"
    if shape.backward:
        return "has no backward on symmetric features"
    limits = (
        ("the width of q", shape.width, MOST_WIDTH),
        ("chunk_size", shape.chunk_size, MOST_CHUNK),
        ("window − 1", shape.window - 1, min(MOST_HALO, shape.chunk_size)),
        ("the width of v", shape.values, MOST_VALUES),
    )
    for name, length, most in limits:
        if length > most:
            return f"takes {name} up to {most} on symmetric features, this is {length}"
    return None


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = SymmetricBucket(*key)
    if config.get("HOPPER"):
        return _not_hopper(bucket, device)
    for tile in ("V", "READ_V"):
        if config[tile] > bucket.values:
            return f"{tile} is {config[tile]}, there are {bucket.values} columns"
    rows = bucket.chunk + bucket.halo
    # x of queries, keys and those before, by halves; a tile on its way, and what it is made of.
    shared = bucket.size * (
        6 * rows * bucket.width + 2 * config["V"] * (bucket.width * (config.num_stages + 1) + rows)
    )
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _not_hopper(bucket: SymmetricBucket, device: Device) -> str | None:
    """None, or why the walk for Hopper does not serve such a call."""
    if device.capability != 90:
        return f"is written for sm_90, this is {device.arch}"
    if not runtime.has_gluon():
        return "is written in Gluon, which needs Triton 3.6 or newer"
    if bucket.size != 2:
        return "takes 16-bit types"
    if not bucket.hopper or bucket.width != CHUNK or bucket.halo > OLDER:
        return (
            f"serves aligned views, features of pairs of 33 to {CHUNK} numbers, chunks of {CHUNK}, "
            f"windows up to {OLDER + 1}"
        )
    return None


def _hopper(slots: int, read_v: int, read_warps: int = 4) -> Config:
    """A config of `hopper_symmetric`: its 4 warps look, the others join in."""
    tiles = {"HOPPER": 1, "V": COLUMNS, "SLOTS": slots}
    return Config.make(4, 1, "wgmma", atomic=False, READ_V=read_v, READ_WARPS=read_warps, **tiles)


def _config(columns: int, warps: int, stages: int, read_v: int, read_warps: int = 4) -> Config:
    return Config.make(warps, stages, "wgmma", V=columns, READ_V=read_v, READ_WARPS=read_warps)


def _default(key: Key, device: Device) -> Config:
    """The widest columns of a walk that still leave no multiprocessor without one."""
    bucket = SymmetricBucket(*key)
    fitting = SPACE_SYMMETRIC.fitting(key, device)
    if not fitting:
        raise ValueError(f"{SPACE_SYMMETRIC.name}: no config fits {bucket} on {device.arch}")

    hopper = [config for config in fitting if config.get("HOPPER")]
    if hopper:
        return hopper[0]

    def worth(config: Config) -> tuple[bool, int, int]:
        programs = bucket.heads * -(-bucket.values // config["V"])
        full = programs >= 0.75 * device.multiprocessors
        return full, config["V"] if full else -config["V"], config["READ_V"]

    return max(fitting, key=worth)


SPACE_SYMMETRIC: Space = Space(
    op=OP,
    pass_="fwd_symmetric",
    backend="triton",
    configs=(
        _hopper(4, 64),
        _hopper(2, 64),
        _hopper(2, 32),
        _hopper(2, 64, 8),
        _config(16, 4, 2, 16),
        _config(16, 4, 2, 64),
        _config(32, 4, 2, 32),
        _config(32, 4, 2, 64),
        _config(32, 4, 3, 64),
        _config(32, 8, 2, 64),
    ),
    fits=_fits,
    bucket=bucket,
    default=_default,
    sources=(
        KERNELS,
        HOPPER,
        f"{PACKAGE}.hopper_advance",
        f"{PACKAGE}.hopper_features",
        f"{PACKAGE}.triton_fwd",
        f"{PACKAGE}.triton_chunks",
    ),
)
