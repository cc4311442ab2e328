"""Config space of the Triton backend. ROWS: heads of tokens that a program copies."""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..triton_runtime import padded
from .op import PACKAGE, WriteShape

OP = "paged_cache_write_"
KERNELS = f"{PACKAGE}.triton_kernels"
# Bytes of keys, and of values, for each thread: what is read is in flight until it is written.
BYTES = (16, 64)
LOOSE_NUMBERS = 8  # numbers instead, where each takes an address of its own
WIDEST = 1024


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        width: of a head, padded.
        loose: rows are not a multiple of 16 bytes, or start anywhere.
        rows: heads of all tokens, rounded up to a power of two.
    """

    size: int
    width: int
    loose: bool
    rows: int


def bucket(shape: WriteShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        shape.dtype.itemsize,
        padded(shape.head_dim),
        not shape.aligned,
        1 << max(shape.tokens * shape.heads - 1, 0).bit_length(),
    )


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    numbers = config["ROWS"] * bucket.width / (32 * config.num_warps)
    least, most = (x / bucket.size for x in BYTES)
    if bucket.loose:
        least, most = 1, LOOSE_NUMBERS
    if not least <= numbers <= most:
        return f"is for other widths: {numbers:g} numbers a thread"
    return None


def _default(key: Key, device: Device) -> Config:
    """Small programs where there are few rows, so that each multiprocessor has some."""
    bucket = Bucket(*key)
    fitting = SPACE_FWD.fitting(key, device)
    if not fitting:
        raise ValueError(f"{OP}/fwd: no config fits {bucket} on {device.arch}")
    wanted = bucket.rows // (4 * device.multiprocessors)

    def worth(config: Config) -> tuple[int, int]:
        return -abs(config["ROWS"] - max(wanted, 1)), -config.num_warps

    return max(fitting, key=worth)


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=tuple(
        Config.make(warps, 1, "fma", ROWS=rows)
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for warps in (1, 2, 4, 8)
        if rows < 64 * warps
    ),
    fits=_fits,
    bucket=bucket,
    default=_default,
    sources=(KERNELS,),
    near=("rows",),
)
