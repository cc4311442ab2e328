"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

A program holds its matrix whole, so the padded matrix is the tile: a config serves matrices whose
shorter side is padded to ROWS and whose longer side to at most COLS. What is left to choose:
warps, the form of X Xᵀ (MIRROR, see `triton_kernels`), and EACH, programs of a multiprocessor that
take matrices in turn; 0: a program for each matrix. HALF: 16-bit iterates.

Chosen by the compile report for sm_90 (Triton 3.6), not yet by measurement. Not here: 64 × 64 with
MIRROR = 0 and EACH = 0, 64 × 128 and 128 × 128 with MIRROR = 1, fp32 by wgmma and all of backward
with 128 rows, where ptxas leaves descriptors of wgmma unset; more than 32,768 elements, and fp32
beyond 64 × 64, which spill by the kilobyte.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...autotune.space import Config, Device, Key, Space
from .. import triton_runtime as runtime
from ..triton_runtime import padded
from .op import PACKAGE, NewtonSchulzShape

OP = "newton_schulz"
KERNELS = f"{PACKAGE}.triton_kernels"
FACTOR_KERNELS = f"{PACKAGE}.triton_factor"
MOST_ROWS = 128


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element of the iterates.
        rows: the shorter side, padded.
        cols: the longer side, padded.
    """

    size: int
    rows: int
    cols: int


def bucket(shape: NewtonSchulzShape) -> Key:
    """The `Bucket` of a call."""
    rows, cols = sorted((shape.rows, shape.cols))
    return Bucket(shape.compute_dtype.itemsize, padded(rows), padded(cols))


def _shared(config: Config, key: Key, pass_: str) -> int:
    """About what operands take in shared memory: X, Xᵀ, A and Z; in backward D and dX, too."""
    size, rows, cols = Bucket(*key)
    wide, square = size * rows * cols, size * rows * rows
    if pass_ == "bwd":
        return (1 + config["MIRROR"]) * wide + 3 * square
    return (1 + config["MIRROR"]) * wide + 2 * square


def _fits(config: Config, key: Key, device: Device, pass_: str) -> str | None:
    size, rows, cols = Bucket(*key)
    if config["HALF"] != (size == 2):
        return "is for another element size"
    if config["ROWS"] != rows:
        return f"is for matrices whose shorter side is padded to {config['ROWS']}, this is {rows}"
    if cols > config["COLS"]:
        return f"holds at most {config['COLS']} columns, these are padded to {cols}"
    shared = _shared(config, key, pass_)
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _fits_fwd(config: Config, key: Key, device: Device) -> str | None:
    return _fits(config, key, device, "fwd")


def _fits_bwd(config: Config, key: Key, device: Device) -> str | None:
    return _fits(config, key, device, "bwd")


def refusal(space: Space, key: Key, device: Device) -> str | None:
    """None, or why no config of the space serves this call."""
    size, rows, cols = Bucket(*key)
    if rows > MOST_ROWS:
        return f"holds matrices whole, with a shorter side of at most {MOST_ROWS}"
    if space.fitting(key, device):
        return None
    kind = {2: "16-bit", 4: "fp32"}[size]
    pass_ = {"fwd": "forward", "bwd": "backward"}[space.pass_]
    return f"cannot hold {rows} × {cols} (padded) {kind} matrices whole in {pass_}"


def _best(space: Space, key: Key, device: Device) -> Config:
    """The fitting config with the fewest columns; of those the first."""
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.op}/{space.pass_}: {refusal(space, key, device)}")
    return min(fitting, key=lambda config: config["COLS"])


def _default_fwd(key: Key, device: Device) -> Config:
    return _best(SPACE_FWD, key, device)


def _default_bwd(key: Key, device: Device) -> Config:
    return _best(SPACE_BWD, key, device)


def _configs(
    half: int, each: int, *tiles: tuple[int, int, int], mirror: tuple[int, ...] = (1, 0)
) -> tuple[Config, ...]:
    """The forms `mirror` of each (rows, cols, warps)."""
    return tuple(
        Config.make(
            warps, 1, _matrix(rows, cols, warps, form and each == 0),  # in backward EACH > 0
            ROWS=rows, COLS=cols, MIRROR=form, EACH=each, HALF=half,
        )
        for rows, cols, warps in tiles
        for form in mirror
    )  # fmt: skip


def _matrix(rows: int, cols: int, warps: int, mirror: int) -> str:
    """wgmma takes 64 rows; the product Xᵀ Z, which forward alone has, as many as X has columns."""
    return "wgmma" if warps >= 4 and max(rows, cols if mirror else 0) >= 64 else "mma"


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        *_configs(
            1, 0, (16, 64, 1), (16, 256, 4), (32, 32, 1), (32, 64, 2), (32, 256, 8),
        ),
        *_configs(1, 0, (64, 64, 4), mirror=(1,)),
        *_configs(
            1, 0, (16, 1024, 8), (64, 64, 2), (64, 128, 8), (64, 256, 8), (128, 128, 8),
            (128, 256, 8), mirror=(0,),
        ),
        *_configs(1, 0, (64, 256, 8), mirror=(1,)),
        *_configs(1, 3, (64, 64, 4)),
        *_configs(1, 1, (128, 128, 8), mirror=(0,)),
        *_configs(0, 0, (16, 64, 4), (32, 64, 4), (64, 64, 2), mirror=(0,)),
    ),
    fits=_fits_fwd,
    bucket=bucket,
    default=_default_fwd,
    sources=(KERNELS,),
    near=("cols",),
)  # fmt: skip

SPACE_BWD = Space(
    op=OP,
    pass_="bwd",
    backend="triton",
    configs=(
        *_configs(1, 8, (16, 64, 1), (32, 32, 1), (32, 64, 2)),
        *_configs(1, 2, (16, 256, 4), (32, 256, 8), (64, 64, 4), (64, 64, 8), (64, 128, 8)),
        *_configs(1, 1, (64, 256, 8)),
        *_configs(0, 2, (16, 64, 4), (32, 64, 4)),
        *_configs(0, 2, (64, 64, 2), mirror=(0,)),
    ),
    fits=_fits_bwd,
    bucket=bucket,
    default=_default_bwd,
    sources=(KERNELS,),
    near=("cols",),
)


def _factor_bucket(shape: NewtonSchulzShape) -> Key:
    return (padded(shape.rows),)


def _factor_fits(config: Config, key: Key, device: Device) -> str | None:
    if config["ROWS"] != key[0]:
        return f"is for matrices padded to {config['ROWS']}, this is {key[0]}"
    return None


def _factor_space(pass_: str, each: int, *tiles: tuple[int, int]) -> Space:
    """Configs by (rows, warps), the default of each size first."""
    space = Space(
        op="gram_newton_schulz_factor",
        pass_=pass_,
        backend="triton",
        configs=tuple(Config.make(warps, 1, "mma", ROWS=rows, EACH=each) for rows, warps in tiles),
        fits=_factor_fits,
        bucket=_factor_bucket,
        default=lambda key, device: space.fitting(key, device)[0],
        sources=(FACTOR_KERNELS,),
    )
    return space


# Not here: 64 rows by eight warps, which take twice as long as by four (H200).
SPACE_FACTOR_FWD = _factor_space("fwd", 0, (16, 1), (32, 2), (32, 4), (64, 4))
SPACE_FACTOR_BWD = _factor_space("bwd", 4, (16, 1), (32, 2), (32, 4), (64, 4))


def precision(shape: NewtonSchulzShape) -> str:
    """How iterates are multiplied."""
    return runtime.precision(shape.compute_dtype, shape.device)


def factor_precision(shape: NewtonSchulzShape) -> str:
    """How the factor of a Gram matrix is multiplied: one given in fp32 is worth longer sums."""
    usual = precision(shape)
    return "stepwise" if usual == "bf16x6" and shape.dtype == torch.float32 else usual
