"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

A program holds memory and momentum of one head whole, so that the padded state is the tile. What is
left to choose: warps, the form of X Xᵀ (MIRROR, see `newton_schulz.triton_kernels`), and REGISTERS,
the most that a thread may have so that more programs run side by side. HALF: iterates of
Newton–Schulz in fp16, which is finer than what bf16 leaves of a momentum, but not than fp16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ...autotune.space import Config, Device, Key, Space
from ..newton_schulz.triton_spaces import KERNELS as NEWTON_SCHULZ
from ..omega import triton_spaces as omega
from ..omega.op import PACKAGE as OMEGA
from ..triton_runtime import padded
from .op import PACKAGE, AtlasShape

OP = "atlas_memory"
KERNELS, KERNELS_BWD = f"{PACKAGE}.triton_fwd", f"{PACKAGE}.triton_bwd"
MOST_VALUES = 128


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        half: whether iterates are fp16.
        width, values: of a state, padded.
        chunk: rows of a tile that holds a chunk.
        halo: older tokens that a chunk sees, padded; 0 without any.
        heads: of all sequences, rounded up to a power of two.
    """

    size: int
    half: bool
    width: int
    values: int
    chunk: int
    halo: int
    heads: int


def compute_dtype(shape: AtlasShape) -> torch.dtype:
    """Of the iterates of Newton–Schulz."""
    return torch.float16 if shape.dtype == torch.bfloat16 else torch.float32


def bucket(shape: AtlasShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        shape.dtype.itemsize,
        compute_dtype(shape) == torch.float16,
        padded(shape.wide),
        padded(shape.values),
        omega.rows_of(shape.chunk_size),
        omega.halo_of(shape),
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
    )


def refusal(shape: AtlasShape) -> str | None:
    """None, or why no config serves this call."""
    if shape.feature_map == "symmetric":
        return "takes features as wide as keys, not symmetric ones"
    if shape.ns_stride != shape.chunk_size:
        return f"meets Newton–Schulz once a chunk ({shape.chunk_size}), not every {shape.ns_stride}"
    if shape.values > MOST_VALUES:
        return f"takes the width of v up to {MOST_VALUES}, this is {shape.values}"
    return omega.refusal(replace(shape, dot=False))


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if config["HALF"] != bucket.half:
        return "is for iterates of another dtype"
    narrow = min(bucket.values, bucket.width) < omega.WIDE
    side = omega.WIDE if max(bucket.values, bucket.width) <= omega.WIDE else MOST_VALUES
    if config["SIDE"] != (0 if narrow else side):
        return "is for states of another size"
    compute = 2 if bucket.half else 4
    wide, square = bucket.width * bucket.values, min(bucket.width, bucket.values) ** 2
    steps = compute * ((1 + config["MIRROR"]) * wide + (1 if bucket.half else 2) * square)
    chunk = bucket.size * bucket.chunk * (bucket.width + bucket.values)
    needed = max(steps, chunk)
    if needed + 1024 > device.shared_bytes:
        return f"needs {needed} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _fits_bwd(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    reason = _fits(config, key, device)
    if reason is not None:
        return reason
    compute = 2 if bucket.half else 4
    wide, square = bucket.width * bucket.values, min(bucket.width, bucket.values) ** 2
    steps = compute * (2 * wide + 3 * square)
    chunk = bucket.size * (2 * bucket.chunk * (bucket.width + bucket.values) + 2 * wide)
    needed = max(steps, chunk)
    if needed + 1024 > device.shared_bytes:
        return f"needs {needed} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _default(space: Space, key: Key, device: Device) -> Config:
    fitting = space.fitting(key, device)
    if not fitting:
        bucket = Bucket(*key)
        raise ValueError(f"{space.op}/{space.pass_}: no config fits {bucket} on {device.arch}")
    return fitting[0]


def _config(half: int, side: int, warps: int, mirror: int, registers: int = 0) -> Config:
    """SIDE: of a state whose sides are both 64 or more, the longer one; else 0."""
    tiles = {"HALF": half, "SIDE": side, "MIRROR": mirror}
    if registers:
        tiles["REGISTERS"] = registers
    return Config.make(warps, 1, "wgmma" if warps >= 4 else "mma", atomic=False, **tiles)


SPACE_FWD: Space = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _config(1, 64, 4, 0, 128),
        _config(1, 64, 4, 0, 168),
        _config(1, 64, 4, 0),
        _config(1, 64, 4, 1, 128),
        _config(1, 64, 4, 1, 168),
        _config(1, 64, 4, 1),
        _config(1, 128, 8, 0),
        _config(1, 0, 2, 0),
        _config(0, 64, 4, 0),
        _config(0, 64, 8, 0),
        _config(0, 128, 8, 0),
        _config(0, 0, 2, 0),
    ),
    fits=_fits,
    bucket=bucket,
    default=lambda key, device: _default(SPACE_FWD, key, device),
    sources=(KERNELS, f"{OMEGA}.triton_chunks", NEWTON_SCHULZ),
)

SPACE_BWD: Space = Space(
    op=OP,
    pass_="bwd",
    backend="triton",
    configs=(
        _config(1, 64, 4, 0, 168),
        _config(1, 64, 4, 0),
        _config(1, 64, 4, 1, 168),
        _config(1, 64, 4, 1),
        _config(1, 128, 8, 0),
        _config(1, 0, 2, 0),
        _config(0, 64, 4, 0),
        _config(0, 0, 2, 0),
    ),
    fits=_fits_bwd,
    bucket=bucket,
    default=lambda key, device: _default(SPACE_BWD, key, device),
    sources=(KERNELS_BWD, KERNELS, f"{OMEGA}.triton_chunks", NEWTON_SCHULZ),
)
