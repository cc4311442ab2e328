"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

A program has C channels of ROWS rows. The state in fp32 is most of what moves: a thread has 16
bytes of a row of it.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..short_conv.op import ConvShape
from ..short_conv.triton_spaces import LEAST_CHANNELS, MOST_CHANNELS, MOST_PROGRAMS, power
from .op import PACKAGE

OP = "short_conv_step_"
KERNELS = f"{PACKAGE}.triton_kernels"
SHARED = f"{PACKAGE.rpartition('.')[0]}.short_conv.triton_kernels"
WARPS = 16  # a multiprocessor, from which on a program has more than one row


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        channels: rounded up to a power of two, from `LEAST_CHANNELS` to `MOST_CHANNELS`.
        rows: of the call, rounded up to a power of two.
    """

    size: int
    channels: int
    rows: int


def bucket(shape: ConvShape) -> Key:
    """The `Bucket` of a call."""
    channels = min(max(power(shape.channels), LEAST_CHANNELS), MOST_CHANNELS)
    return Bucket(shape.dtype.itemsize, channels, power(shape.batch))


def refusal(shape: ConvShape) -> str | None:
    """None, or why no config serves this call."""
    if shape.batch * -(-shape.channels // LEAST_CHANNELS) > MOST_PROGRAMS:
        return "takes fewer rows and channels in one call"
    return None


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if config["C"] > bucket.channels:
        return f"is for rows of more than {config['C'] // 2} channels"
    return None


def _default(key: Key, device: Device) -> Config:
    """More rows a program, the weights read less often, where they are many."""
    bucket = Bucket(*key)
    fitting = SPACE_FWD.fitting(key, device)
    warps = bucket.rows * bucket.channels // (32 * 4)
    rows = warps // (WARPS * device.multiprocessors)

    def worth(config: Config) -> tuple[int, ...]:
        own = config["C"] // (32 * config.num_warps)
        return -abs(own - 4), -abs(config["ROWS"] - rows), -abs(config.num_warps - 2)

    return max(fitting, key=worth)


def _config(numbers: int, warps: int, rows: int) -> Config:
    return Config.make(warps, 1, "fma", C=32 * numbers * warps, ROWS=rows)


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        *(_config(4, warps, rows) for warps in (1, 2, 4) for rows in (1, 2, 4)),
        _config(2, 1, 1),
        _config(2, 2, 1),
        _config(2, 4, 2),
    ),
    fits=_fits,
    bucket=bucket,
    default=_default,
    sources=(KERNELS, SHARED),
    near=("rows",),
)
