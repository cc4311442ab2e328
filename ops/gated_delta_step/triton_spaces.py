"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

A program has V columns of a memory. The rows of all of them are its threads' registers, and on
their way from memory together.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..gated_delta.op import DeltaShape
from ..triton_runtime import padded
from .op import PACKAGE

OP = "gated_delta_step_"
KERNELS = f"{PACKAGE}.triton_kernels"
MOST_WIDTH = 256
MOST_COLUMNS = 128  # of a bucket
NUMBERS = (8, 64)  # of a memory, for each thread
MOST_PROGRAMS = (1 << 31) - 1
FEW = 4  # programs for each multiprocessor, under which narrower ones make more


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        width: of a memory, padded.
        values: of a memory, padded, at most `MOST_COLUMNS`.
        heads: of all rows, rounded up to a power of two.
    """

    width: int
    values: int
    heads: int


def bucket(shape: DeltaShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        padded(shape.width),
        min(padded(shape.values), MOST_COLUMNS),
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
    )


def refusal(shape: DeltaShape) -> str | None:
    """None, or why no config serves this call."""
    if shape.width > MOST_WIDTH:
        return f"takes keys up to {MOST_WIDTH} wide, this is {shape.width}"
    if shape.batch * shape.heads * -(-shape.values // 8) > MOST_PROGRAMS:
        return "takes fewer rows, heads and values in one call"
    return None


def _numbers(config: Config, bucket: Bucket) -> int:
    return bucket.width * config["V"] // (32 * config.num_warps)


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    least, most = NUMBERS
    if config["V"] > bucket.values:
        return f"is for memories of more than {config['V'] // 2} columns"
    numbers = _numbers(config, bucket)
    if not least <= numbers <= most:
        return f"is for other sizes: {numbers} numbers a thread"
    return None


def _default(key: Key, device: Device) -> Config:
    """32 numbers a thread; 32 columns, a line of memory, or half of one where programs are few."""
    bucket = Bucket(*key)
    fitting = SPACE_FWD.fitting(key, device)
    few = bucket.heads * bucket.values // 32 < FEW * device.multiprocessors
    columns = 16 if few else 32

    def worth(config: Config) -> tuple[int, int]:
        return -abs(config["V"] - columns), -abs(_numbers(config, bucket) - 32)

    return max(fitting, key=worth)


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=tuple(
        Config.make(warps, 1, "fma", V=columns)
        for columns, warps in (
            (32, 4), (32, 2), (32, 8), (16, 1), (16, 2), (16, 4), (64, 4), (64, 8), (64, 2),
            (128, 8), (128, 4), (8, 1), (8, 2), (32, 1),
        )
    ),
    fits=_fits,
    bucket=bucket,
    default=_default,
    sources=(KERNELS,),
    near=("heads",),
)  # fmt: skip
