"""Config spaces of the CUDA C++ backend: which instances exist, which serve a call, the default.

An instance is built for matrices padded to ROWS × COLS, the shorter side first. Which kernel it is
follows from them and from the matrix instruction:

    16², 32²          mma     a warp a matrix, in registers       newton_schulz_sm80.cuh
    up to 128 × 256   mma     a block a matrix                    newton_schulz_stack_sm80.cuh
    up to 128 × 256   wgmma   the same on Hopper                  newton_schulz_sm90.cuh
    256²              wgmma   a block a matrix, A as a triangle   newton_schulz_256_sm90.cuh
    64 × 1024,        wgmma   a block of four warpgroups a        newton_schulz_wide_sm90.cuh
    128 × 512                 matrix, X in place; forward alone

What is left to choose is EACH, blocks of a multiprocessor that take matrices in turn; 0: a block
for each matrix.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from .op import NewtonSchulzShape

OP = "newton_schulz"
TILE = 64  # side of a tile in shared memory
TILE_BYTES = 2 * TILE * TILE
SCRATCH_BYTES = 1024
WARP_SIDE = 32  # of the largest matrix that a warp holds
WARPS = 4  # of a block whose warps have a matrix each
WIDEST = 4 * TILE  # columns of the instances whose warpgroups each own a row of tiles
SYSTEM_BYTES = 1024  # of a block's shared memory, the system's


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        rows: the shorter side, padded: to 16 or 32 if both sides are that short, else to tiles.
        cols: the longer side, likewise; beyond 256 to 512 or 1024.
    """

    rows: int
    cols: int


def bucket(shape: NewtonSchulzShape) -> Key:
    """The `Bucket` of a call."""
    short, long = sorted((shape.rows, shape.cols))
    if long <= WARP_SIDE:
        side = 16 if long <= 16 else 32
        return Bucket(side, side)
    rows, cols = (-(-max(side, 1) // TILE) * TILE for side in (short, long))
    if rows > 2 * TILE:  # one instance holds all of these
        return Bucket(4 * TILE, max(4 * TILE, cols))
    if WIDEST < cols <= 1024:
        return Bucket(rows, 512 if cols <= 512 else 1024)
    return Bucket(rows, cols)


class Memory(NamedTuple):
    """What a block takes.

    Attributes:
        shared: bytes of shared memory.
        workspace: bytes of device memory.
        kept: iterates of a backward in shared memory, for kernels that ask.
    """

    shared: int
    workspace: int = 0
    kept: int = 0


def memory(config: Config, pass_: str, steps: int, block_bytes: int) -> Memory:
    """What a block takes in `steps` steps where it may have `block_bytes` of shared memory."""
    rows, cols, backward = config["ROWS"], config["COLS"], pass_ == "bwd"
    if rows <= WARP_SIDE:
        return Memory(WARPS * steps * 2 * rows * cols if backward else 0)
    down, across = rows // TILE, cols // TILE
    x, gram = down * across * TILE_BYTES, down * down * TILE_BYTES
    if down == 4:
        if backward:
            return Memory(SCRATCH_BYTES + 28 * TILE_BYTES, (steps + 1) * x)
        return Memory(SCRATCH_BYTES + x + down * (down + 1) // 2 * TILE_BYTES)
    if cols > WIDEST:
        parts = 4 // down
        return Memory(SCRATCH_BYTES + x + gram + (parts - 1) * down**2 * 2 * TILE_BYTES)
    if not backward:
        return Memory(SCRATCH_BYTES + (x if config.matrix == "mma" else 2 * x) + gram)
    if config.matrix == "mma":
        return Memory(SCRATCH_BYTES + 2 * x + gram, (steps - 1) * x)
    least = SCRATCH_BYTES + 2 * gram + x
    kept = max(1, min(steps, (block_bytes - least) // x))
    return Memory(least + kept * x, (steps - kept) * x, kept)


def block_bytes(config: Config, device: Device) -> int:
    """Shared memory that a block may have if EACH of them are to run at once."""
    of_all = device.shared_bytes + SYSTEM_BYTES
    return of_all // max(1, config["EACH"]) - SYSTEM_BYTES


def _fits(config: Config, key: Key, device: Device, pass_: str) -> str | None:
    if (config["ROWS"], config["COLS"]) != tuple(key):
        sizes = f"{config['ROWS']} × {config['COLS']}"
        return f"is for matrices padded to {sizes}, these are to {key[0]} × {key[1]}"
    if config.matrix == "wgmma" and device.capability != 90:
        return f"is written for sm_90, this is {device.arch}"
    if device.capability < 80:
        return f"is written for sm_80 and newer, this is {device.arch}"
    least = memory(config, pass_, 1, 0).shared
    if least > device.shared_bytes:
        return f"needs {least} bytes of shared memory, a block has {device.shared_bytes}"
    if least > block_bytes(config, device):
        return f"{config['EACH']} blocks of {least} bytes do not fit into a multiprocessor"
    return None


def _fits_fwd(config: Config, key: Key, device: Device) -> str | None:
    return _fits(config, key, device, "fwd")


def _fits_bwd(config: Config, key: Key, device: Device) -> str | None:
    return _fits(config, key, device, "bwd")


@functools.lru_cache(maxsize=4096)
def refusal(space: Space, key: Key, device: Device) -> str | None:
    """None, or why no config of the space serves this call."""
    if space.fitting(key, device):
        return None
    pass_ = {"fwd": "forward", "bwd": "backward"}[space.pass_]
    return f"has no {pass_} kernel for matrices padded to {key[0]} × {key[1]} on {device.arch}"


def _first(space: Space, key: Key, device: Device) -> Config:
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.op}/{space.pass_}: {refusal(space, key, device)}")
    return fitting[0]


def _default_fwd(key: Key, device: Device) -> Config:
    return _first(SPACE_FWD, key, device)


def _default_bwd(key: Key, device: Device) -> Config:
    return _first(SPACE_BWD, key, device)


def _configs(
    matrix: str, rows: int, cols: int, *each: int, warps: int | None = None
) -> tuple[Config, ...]:
    """Configs of one instance, the default first; four warps own a row of tiles."""
    if warps is None:
        warps = WARPS if rows <= WARP_SIDE else 4 * rows // TILE
    tiles = {"ROWS": rows, "COLS": cols}
    if matrix == "mma" and rows > WARP_SIDE:
        tiles["MMA"] = 1  # beside an instance by wgmma of the same size
    return tuple(
        Config.make(warps, 1, matrix, atomic=False, EACH=blocks, **tiles) for blocks in each
    )


SOURCES = tuple(
    f"newton_schulz/newton_schulz_{name}.cuh"
    for name in ["sm80", "stack_sm80", "sm90", "256_sm90", "256_backward_sm90", "wide_sm90"]
)

STACKS = [(rows, cols) for rows in (64, 128) for cols in (64, 128, 192, 256) if cols >= rows]

# EACH: as many as `__launch_bounds__` makes registers leave room for. Forward, a block for each
# matrix was the fastest on an H200, or within 2 % of it.
SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="cuda",
    configs=(
        *_configs("mma", 16, 16, 0, 8, 16),
        *_configs("mma", 32, 32, 0, 4, 8),
        *_configs("wgmma", 64, 64, 0, 6, 5),
        *_configs("wgmma", 64, 128, 0, 4, 3),
        *_configs("wgmma", 64, 192, 3, 0, 2),
        *_configs("wgmma", 64, 256, 3, 0, 2),
        *_configs("wgmma", 128, 128, 0, 2, 1),
        *_configs("wgmma", 128, 192, 0, 1),
        *_configs("wgmma", 128, 256, 0, 1),
        *_configs("wgmma", 256, 256, 1, 0),
        *_configs("wgmma", 64, 512, 1, 0, warps=16),
        *_configs("wgmma", 64, 1024, 1, 0, warps=16),
        *_configs("wgmma", 128, 512, 1, 0, warps=16),
        *(config for rows, cols in STACKS for config in _configs("mma", rows, cols, 0)),
    ),
    fits=_fits_fwd,
    bucket=bucket,
    default=_default_fwd,
    sources=SOURCES,
)

SPACE_BWD = Space(
    op=OP,
    pass_="bwd",
    backend="cuda",
    configs=(
        *_configs("mma", 16, 16, 4, 8),
        *_configs("mma", 32, 32, 3, 4),
        *_configs("wgmma", 64, 64, 4, 3, 2),
        *_configs("wgmma", 64, 128, 3, 2),
        *_configs("wgmma", 64, 192, 2, 1),
        *_configs("wgmma", 64, 256, 2, 1),
        *_configs("wgmma", 128, 128, 1),
        *_configs("wgmma", 128, 192, 1),
        *_configs("wgmma", 128, 256, 1),
        *_configs("wgmma", 256, 256, 1, warps=8),  # they own two
        *(
            config
            for rows, cols in STACKS
            for config in _configs("mma", rows, cols, 2 if rows == 64 else 1)
        ),
    ),
    fits=_fits_bwd,
    bucket=bucket,
    default=_default_bwd,
    sources=SOURCES,
)
