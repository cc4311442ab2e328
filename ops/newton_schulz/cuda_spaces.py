"""Config spaces of the CUDA C++ backend: which instances exist, which serve a call, the default.

An instance is built for matrices padded to ROWS × COLS, the shorter side first, and what it is
follows from them:

    16², 32²           mma.sync   a warp a matrix, in registers          newton_schulz_sm80.cuh
    up to 128 × 256    wgmma      a block a matrix                       newton_schulz_sm90.cuh
    256²               wgmma      a block a matrix, A as a triangle      newton_schulz_256_sm90.cuh

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
SM_BYTES = 228 * 1024  # shared memory of a multiprocessor of Hopper
SYSTEM_BYTES = 1024  # of a block's share, the system's


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        rows: the shorter side, padded: to 16 or 32 if both sides are that short, else to tiles.
        cols: the longer side, likewise.
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
    return Bucket(rows, cols)


def tiles(config: Config) -> tuple[int, int]:
    """Rows and columns of tiles of an instance."""
    return config["ROWS"] // TILE, config["COLS"] // TILE


def shared_bytes(config: Config, pass_: str) -> int:
    """Shared memory of a block, in backward without the iterates that it keeps beside the first."""
    if config["ROWS"] <= WARP_SIDE:
        return 0
    rows, cols = tiles(config)
    if rows == 4:
        return SCRATCH_BYTES + (rows * cols + rows * (rows + 1) // 2) * TILE_BYTES
    grams = 1 if pass_ == "fwd" else 2
    matrices = 1 if pass_ == "fwd" else 2
    return SCRATCH_BYTES + (grams * rows * rows + matrices * rows * cols) * TILE_BYTES


def _share(config: Config) -> int:
    """Shared memory of a block if EACH of them divide a multiprocessor's."""
    return SM_BYTES // max(1, config["EACH"]) - SYSTEM_BYTES


def kept(config: Config, steps: int) -> int:
    """Iterates that a block of backward keeps in shared memory: all there is room for."""
    rows, cols = tiles(config)
    room = _share(config) - shared_bytes(config, "bwd")
    return min(steps, 1 + room // (rows * cols * TILE_BYTES))


def _fits(config: Config, key: Key, device: Device, pass_: str) -> str | None:
    if (config["ROWS"], config["COLS"]) != key:
        return f"is for matrices padded to {config['ROWS']} × {config['COLS']}, this is {key}"
    if config.matrix == "wgmma" and device.capability != 90:
        return f"is written for sm_90, this is {device.arch}"
    if device.capability < 80:
        return f"is written for sm_80 and newer, this is {device.arch}"
    needed = shared_bytes(config, pass_)
    if needed > device.shared_bytes:
        return f"needs {needed} bytes of shared memory, a block has {device.shared_bytes}"
    if needed > _share(config):
        return f"{config['EACH']} blocks of {needed} bytes do not fit into a multiprocessor"
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
    rows, cols = key
    return f"has no {pass_} kernel for matrices padded to {rows} × {cols} on {device.arch}"


def _best(space: Space, key: Key, device: Device) -> Config:
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.op}/{space.pass_}: {refusal(space, key, device)}")
    return fitting[0]


def _default_fwd(key: Key, device: Device) -> Config:
    return _best(SPACE_FWD, key, device)


def _default_bwd(key: Key, device: Device) -> Config:
    return _best(SPACE_BWD, key, device)


def _configs(rows: int, cols: int, *each: int) -> tuple[Config, ...]:
    """Configs of one instance, the default first."""
    warp = rows <= WARP_SIDE
    return tuple(
        Config.make(
            WARPS if warp else 4 * rows // TILE, 1, "mma" if warp else "wgmma",
            ROWS=rows, COLS=cols, EACH=blocks,
        )
        for blocks in each
    )  # fmt: skip


SMALL, LARGE, LARGEST = (
    f"newton_schulz/{name}.cuh"
    for name in ("newton_schulz_sm80", "newton_schulz_sm90", "newton_schulz_256_sm90")
)

# EACH: as many as `__launch_bounds__` makes room for in registers, then others.
SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="cuda",
    configs=(
        *_configs(16, 16, 0, 8, 16),
        *_configs(32, 32, 0, 4, 8),
        *_configs(64, 64, 4, 0, 3, 6),
        *_configs(64, 128, 2, 0, 3),
        *_configs(64, 192, 2, 0, 1),
        *_configs(64, 256, 2, 0, 1),
        *_configs(128, 128, 2, 0, 1),
        *_configs(128, 192, 1, 0),
        *_configs(128, 256, 1, 0),
        *_configs(256, 256, 1, 0),
    ),
    fits=_fits_fwd,
    bucket=bucket,
    default=_default_fwd,
    sources=(SMALL, LARGE, LARGEST),
)

SPACE_BWD = Space(
    op=OP,
    pass_="bwd",
    backend="cuda",
    configs=(
        *_configs(64, 64, 3, 2, 4),
        *_configs(64, 128, 1, 2),
        *_configs(64, 192, 1, 2),
        *_configs(64, 256, 1, 2),
        *_configs(128, 128, 1),
        *_configs(128, 192, 1),
        *_configs(128, 256, 1),
        *_configs(256, 256, 1),
    ),
    fits=_fits_bwd,
    bucket=bucket,
    default=_default_bwd,
    sources=(SMALL, LARGE, LARGEST),
)
