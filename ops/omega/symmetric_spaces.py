"""Config spaces on symmetric features: columns of the memory, and of the reads.

V and `num_warps` are those of the walk along the sequence, READ_V and READ_WARPS of the reads or,
in backward, of what they ask; WARPS are those of its gradients. The walk for Hopper (HOPPER) has
tiles of one size, and SLOTS for tiles on their way to who looks.

The walk of all devices has two warps, which multiply without wgmma: with it Triton 3.6 made one
that was wrong on Hopper. Reads have them in fp32 and where tiles are narrow, for the reason that
`triton_spaces` gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from .. import triton_runtime as runtime
from ..triton_runtime import padded
from .op import PACKAGE, OmegaShape
from .triton_spaces import GATES_BACK, NARROW_WARPS, OP, WIDE, halo_of, parts_of, rows_of, walked

KERNELS, HOPPER = f"{PACKAGE}.triton_symmetric", f"{PACKAGE}.hopper_symmetric"
KERNELS_BACK = f"{PACKAGE}.triton_symmetric_back"
KERNELS_GRADIENTS = f"{PACKAGE}.triton_symmetric_gradients"
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
    narrow = bucket.size == 4 or config["READ_V"] < WIDE
    for warps in ("READ_WARPS", "WARPS"):
        if config.get(warps) and narrow != (config[warps] == NARROW_WARPS):
            return f"is for reads that {'wgmma serves' if narrow else 'wgmma does not serve'}"
    # x by rows and by columns, a tile and what it is made of, on their way to products.
    columns = max(config["V"], config["READ_V"])
    rows = bucket.chunk + bucket.halo
    shared = bucket.size * (2 * rows * bucket.width + (3 * bucket.width + rows) * columns)
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


def _config(columns: int, warps: int, read_v: int, read_warps: int) -> Config:
    return Config.make(warps, 1, "wgmma", V=columns, READ_V=read_v, READ_WARPS=read_warps)


def _default(space: Space, key: Key, device: Device) -> Config:
    """The widest columns of a walk, so small a program, that still leave every second
    multiprocessor two of them.
    """
    bucket = SymmetricBucket(*key)
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.name}: no config fits {bucket} on {device.arch}")

    hopper = [config for config in fitting if config.get("HOPPER")]
    if hopper:
        return hopper[0]

    def worth(config: Config) -> tuple[bool, int, int]:
        programs = bucket.heads * -(-bucket.values // config["V"])
        full = programs >= 1.5 * device.multiprocessors
        return full, config["V"] if full else -config["V"], config["READ_V"]

    return max(fitting, key=worth)


SPACE_SYMMETRIC: Space = Space(
    op=OP,
    pass_="fwd_symmetric",
    backend="triton",
    configs=(
        _hopper(4, 64),
        _hopper(4, 64, 8),
        _hopper(4, 32),
        _config(16, NARROW_WARPS, 16, NARROW_WARPS),
        _config(16, NARROW_WARPS, 32, NARROW_WARPS),
        _config(16, NARROW_WARPS, 64, 4),
    ),
    fits=_fits,
    bucket=bucket,
    default=lambda key, device: _default(SPACE_SYMMETRIC, key, device),
    sources=(
        KERNELS,
        HOPPER,
        f"{PACKAGE}.hopper_advance",
        f"{PACKAGE}.hopper_features",
        f"{PACKAGE}.triton_fwd",
        f"{PACKAGE}.triton_chunks",
    ),
)


def _config_bwd(columns: int, read_v: int, warps: int) -> Config:
    return Config.make(
        NARROW_WARPS, 1, "wgmma", V=columns, READ_V=read_v, READ_WARPS=warps, WARPS=warps
    )


SPACE_SYMMETRIC_BWD: Space = Space(
    op=OP,
    pass_="bwd_symmetric",
    backend="triton",
    configs=(
        _config_bwd(16, 16, NARROW_WARPS),
        _config_bwd(16, 32, NARROW_WARPS),
        _config_bwd(16, 64, 4),
    ),
    fits=_fits,
    bucket=bucket,
    default=lambda key, device: _default(SPACE_SYMMETRIC_BWD, key, device),
    sources=(
        KERNELS,
        KERNELS_BACK,
        KERNELS_GRADIENTS,
        f"{PACKAGE}.triton_fwd",
        f"{PACKAGE}.triton_bwd",
        f"{PACKAGE}.triton_chunks",
        f"{PACKAGE}.triton_tables",
        GATES_BACK,
    ),
)
