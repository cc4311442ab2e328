"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

Chunks and windows belong to the function (but for the "dot" loss, whose errors meet no memory: any
chunk gives the same, and kernels take one of TILE tokens). What is left to choose is how many
columns of the memory a program takes. CHAIN_V, `num_warps` and `num_stages` are those of the walk
along the sequence, which wants as many programs as there are multiprocessors; READ_V and READ_WARPS
those of the reads.
The kernels for Hopper (HOPPER) have tiles of one size: `num_stages` of a chunk's operands, SLOTS of
what a walk leaves for others; in their gradients CHUNKS of the former and RING of the latter. They
may cut the sequences of few heads into GROUPS that walk side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from .. import triton_runtime as runtime
from ..triton_runtime import padded
from .op import PACKAGE, OmegaShape

OP = "omega_memory"
KERNELS, KERNELS_BWD = f"{PACKAGE}.triton_fwd", f"{PACKAGE}.triton_bwd"
TABLES, GATES_BACK = f"{PACKAGE}.triton_tables", f"{PACKAGE}.triton_gates_back"
HOPPER, HOPPER_BWD = f"{PACKAGE}.hopper_fwd", f"{PACKAGE}.hopper_bwd"
HOPPER_GRADIENTS = f"{PACKAGE}.hopper_gradients"
HOPPER_GROUPS, BETWEEN_GROUPS = f"{PACKAGE}.hopper_groups", f"{PACKAGE}.triton_groups"
HOPPER_SPLIT, SOLVE = f"{PACKAGE}.hopper_split", f"{PACKAGE}.triton_solve"
TILE, TILE_HALO = 64, 16  # tokens of a tile of the Hopper kernel, and of one of older keys
SPLIT_HALO = 32  # most of the latter where a tile has several chunks
LEAST_SPLIT = 8  # tokens of the shortest of those
FEW_WALKS = 32  # of the programs of a walk: so few leave most multiprocessors without one
# In chunks of a walk: one in `omega_maps`, a group in `omega_begins`, launching both.
MAPPING, BEGINNING, GROUPING = 0.45, 0.6, 4
GROUPS = (4, 8, 16, 32)
LEAST_LENGTH = 16  # chunks of a sequence that may be cut into groups
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
        chunk: rows of a tile that holds a chunk.
        halo: older tokens that a chunk sees, padded; 0 without any.
        momentum: whether there is a second state.
        heads: of all sequences, rounded up to a power of two.
        parts: chunks in a tile of TILE tokens that bulk copies bring; 0 where they cannot.
        tile_halo: `halo` of such a tile.
        length: chunks of a sequence, rounded down to a power of two, of calls that have so few
            heads that it may be cut into groups; else 0.
    """

    size: int
    width: int
    values: int
    chunk: int
    halo: int
    momentum: bool
    heads: int
    parts: int = 0
    tile_halo: int = 0
    length: int = 0


def walked(shape: OmegaShape) -> OmegaShape:
    """A call of the same function, in the chunks that kernels take."""
    return replace(shape, chunk_size=TILE) if shape.dot else shape


def rows_of(chunk: int) -> int:
    """Rows of a tile that holds a chunk.

    Not 32: Triton 3.6 compiles the backward of such tiles for Hopper to code that writes where it
    should not.
    """
    rows = padded(chunk)
    return 2 * rows if rows == 32 else rows


def halo_of(shape: OmegaShape, parts: int = 1) -> int:
    """Rows of a tile of older keys, as many of each of `parts` chunks."""
    if shape.window == 1:
        return 0
    return parts * max(padded(0) // parts, 1 << (shape.window - 2).bit_length())


def bucket(shape: OmegaShape) -> Key:
    """The `Bucket` of a call."""
    shape = walked(shape)
    parts = parts_of(shape)
    return Bucket(
        shape.dtype.itemsize,
        padded(shape.wide),
        padded(shape.values),
        rows_of(shape.chunk_size),
        halo_of(shape),
        shape.momentum,
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
        parts,
        halo_of(shape, max(parts, 1)),
        _length(shape, parts),
    )


def _length(shape: OmegaShape, parts: int) -> int:
    walks = shape.batch * shape.heads * -(-shape.values // TILE)
    chunks = -(-shape.tokens // TILE)
    if parts != 1 or shape.packed or shape.momentum or walks > FEW_WALKS or chunks < LEAST_LENGTH:
        return 0
    return 1 << (chunks.bit_length() - 1)


def tile_width(width: int) -> int:
    """Columns of a tile of the Hopper kernel."""
    return max(TILE, padded(width))


def parts_of(shape: OmegaShape) -> int:
    """Chunks of a tile of TILE tokens, 0 where bulk copies cannot bring those."""
    own = TILE * shape.batch  # what the last chunks of sequences may add
    tokens = shape.tokens if shape.packed else shape.batch * shape.tokens
    # Of the largest matrix of tiles, whose rows have 32 bits.
    most = max(1 + SPLIT_HALO / TILE, -(-shape.values // TILE))
    rows = (tokens + own) * shape.heads * most
    tiled = (
        shape.aligned
        and shape.chunk_size <= TILE
        and TILE % shape.chunk_size == 0
        and shape.dtype.itemsize == 2
        and shape.wide % 8 == shape.values % 8 == 0
        and 0 < rows < 2**31
        and min(shape.tokens, shape.wide, shape.values) > 0
    )
    return TILE // shape.chunk_size if tiled else 0


def refusal(shape: OmegaShape) -> str | None:
    """None, or why no config serves this call."""
    shape = walked(shape)
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


def _not_hopper(bucket: Bucket, device: Device) -> str | None:
    """None, or why the Gluon kernels cannot run."""
    if device.capability != 90:
        return f"is written for sm_90, this is {device.arch}"
    if not runtime.has_gluon():
        return "is written in Gluon, which needs Triton 3.6 or newer"
    if bucket.parts == 0 or (bucket.parts == 1 and bucket.halo > TILE_HALO):
        return (
            f"serves aligned 16-bit tensors in chunks of {TILE}, with windows up to {TILE_HALO + 1}"
        )
    return None


def _not_split(bucket: Bucket) -> str | None:
    """None, or why the Gluon kernels cannot take several chunks at once."""
    if bucket.parts > TILE // LEAST_SPLIT or bucket.tile_halo > SPLIT_HALO:
        return (
            f"takes short chunks from {LEAST_SPLIT} tokens on, and {SPLIT_HALO} older keys of all "
            f"in {TILE}"
        )
    if bucket.momentum:
        return "has no momentum in short chunks"
    return None


def _not_grouped(config: Config, bucket: Bucket, device: Device) -> str | None:
    """None, or why sequences are not cut into that many groups."""
    groups = config.get("GROUPS")
    if not groups:
        return None
    if bucket.length < groups:
        return f"is for few heads, without momentum or packing, and {groups} chunks or more"
    programs = groups * bucket.heads * -(-bucket.values // TILE)
    if programs > device.multiprocessors:
        return f"runs {programs} programs at once, there is room for {device.multiprocessors}"
    return None


def _steps(config: Config, bucket: Bucket, device: Device, passes: int) -> float:
    """How long the walks of a pass take, in chunks that one program takes alone, if it has `passes`
    of them; each with another one first in groups, but for the maps' own.
    """
    groups = config.get("GROUPS")
    if not groups:
        return passes * bucket.length
    blocks, wide = -(-bucket.values // TILE), tile_width(bucket.width) // TILE
    maps = bucket.heads * (blocks + (groups - 2) * (blocks + wide))
    rounds = -(-maps // device.multiprocessors)
    walks = MAPPING * rounds + 2 * passes - 1
    return walks * bucket.length / groups + passes * (BEGINNING * wide * groups + GROUPING)


def _room(shared: int, device: Device) -> str | None:
    """None, or why that many bytes of shared memory and those of barriers do not fit."""
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _fits_hopper(config: Config, bucket: Bucket, device: Device) -> str | None:
    width, older = tile_width(bucket.width), bucket.tile_halo
    if bucket.momentum and width > TILE:
        return f"has registers for a momentum of rows up to {TILE}"
    tile = TILE * (2 * width + 2 * TILE) + older * (width + 2 * TILE)
    if bucket.parts > 1:
        reason = _not_split(bucket)
        if reason is not None:
            return reason
        tile += (TILE + older) ** 2
    left = TILE * (width * (1 + bucket.momentum) + TILE + older)
    return _room(2 * (config.num_stages * tile + config["SLOTS"] * left), device)


def _fits_hopper_bwd(config: Config, bucket: Bucket, device: Device) -> str | None:
    width, older = tile_width(bucket.width), bucket.halo
    if bucket.momentum:
        return "has no momentum"
    if bucket.parts > 1:
        return f"serves chunks of {TILE}"
    keys = TILE + older
    tile = TILE * (width + TILE) + keys * (width + TILE)
    left = TILE * (2 * width + 2 * keys)
    walk = 2 * (config.num_stages * tile + config["SLOTS"] * left)
    rows = TILE * width + keys * (width + TILE)
    block = TILE * (TILE + 3 * width + 2 * keys)
    stages = config["CHUNKS"] if width == TILE else 1
    chunks = 2 * (stages * rows + config["RING"] * block + TILE * keys)
    return _room(max(walk, chunks), device)


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if config.get("HOPPER"):
        return (
            _not_grouped(config, bucket, device)
            or _not_hopper(bucket, device)
            or _fits_hopper(config, bucket, device)
        )
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
    return _room(max(chain, read), device)


def _default(space: Space, key: Key, device: Device, columns: str) -> Config:
    """The kernel for Hopper; or the widest columns of a walk that still leave no multiprocessor
    without one, then those of the other kernels.
    """
    bucket = Bucket(*key)
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.op}/{space.pass_}: no config fits {bucket} on {device.arch}")

    def worth(config: Config) -> tuple[bool, int, int]:
        programs = bucket.heads * -(-bucket.values // config["CHAIN_V"])
        full = programs >= 0.75 * device.multiprocessors
        return full, config["CHAIN_V"] if full else -config["CHAIN_V"], config[columns]

    hopper = [config for config in fitting if config.get("HOPPER")]
    if hopper and bucket.parts > 1:  # such walks are so slow that readers need no third slot
        return min(hopper, key=lambda config: config["SLOTS"])
    if hopper:
        passes = 2 if space.pass_ == "bwd" else 1
        return min(hopper, key=lambda config: _steps(config, bucket, device, passes))
    return max(fitting, key=worth)


def _config(chain_v: int, stages: int, read_v: int, read_warps: int = 4) -> Config:
    return Config.make(4, stages, "wgmma", CHAIN_V=chain_v, READ_V=read_v, READ_WARPS=read_warps)


def _hopper(stages: int, slots: int, groups: int | None = None) -> Config:
    """A config of `hopper_fwd`: its 4 warps walk, the others join in."""
    tiles = {"HOPPER": 1, "SLOTS": slots} | ({"GROUPS": groups} if groups else {})
    return Config.make(4, stages, "wgmma", atomic=False, **tiles)


SPACE_FWD: Space = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _hopper(2, 3),
        _hopper(3, 2),
        _hopper(2, 2),
        *(_hopper(2, 3, groups) for groups in GROUPS),
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
    default=lambda key, device: _default(SPACE_FWD, key, device, "READ_V"),
    sources=(
        KERNELS,
        f"{PACKAGE}.triton_chunks",
        TABLES,
        SOLVE,
        HOPPER,
        HOPPER_SPLIT,
        HOPPER_GROUPS,
        BETWEEN_GROUPS,
    ),
)


def _fits_bwd(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if config.get("HOPPER"):
        return (
            _not_grouped(config, bucket, device)
            or _not_hopper(bucket, device)
            or _fits_hopper_bwd(config, bucket, device)
        )
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
    return _room(max(chain, chunks), device)


def _config_bwd(chain_v: int, stages: int, columns: int, warps: int, pull_warps: int = 4) -> Config:
    return Config.make(
        4, stages, "wgmma", CHAIN_V=chain_v, PULL_V=columns, PULL_WARPS=pull_warps,
        VALUES_V=columns, WARPS=warps,
    )  # fmt: skip


def _hopper_bwd(stages: int, slots: int, chunks: int, groups: int | None = None) -> Config:
    """A config of `hopper_bwd` and `hopper_gradients`: 4 warps of each are its first role."""
    tiles = {"HOPPER": 1, "SLOTS": slots, "CHUNKS": chunks, "RING": 2}
    tiles |= {"GROUPS": groups} if groups else {}
    return Config.make(4, stages, "wgmma", atomic=False, **tiles)


SPACE_BWD: Space = Space(
    op=OP,
    pass_="bwd",
    backend="triton",
    configs=(
        _hopper_bwd(3, 2, 2),
        _hopper_bwd(2, 2, 2),
        *(_hopper_bwd(2, 2, 2, groups) for groups in GROUPS),
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
    default=lambda key, device: _default(SPACE_BWD, key, device, "PULL_V"),
    sources=(
        KERNELS,
        KERNELS_BWD,
        f"{PACKAGE}.triton_chunks",
        TABLES,
        GATES_BACK,
        HOPPER,
        HOPPER_BWD,
        HOPPER_GRADIENTS,
        HOPPER_GROUPS,
        BETWEEN_GROUPS,
    ),
)
