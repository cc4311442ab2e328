"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

A program has C channels and RUN tokens, of which AHEAD are on their way from memory, the limit of
all. A thread has up to 16 bytes of a row; backward holds three times as many numbers of each.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from .op import PACKAGE, ConvShape

OP = "short_conv"
KERNELS, BACKWARD = f"{PACKAGE}.triton_kernels", f"{PACKAGE}.triton_backward"
LEAST_CHANNELS, MOST_CHANNELS = 64, 2048  # of a bucket
THREAD_BYTES = 16  # of a row
BUSY = 16  # warps that a multiprocessor has at a time
MOST_PROGRAMS = (1 << 31) - 1


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        channels: rounded up to a power of two, from `LEAST_CHANNELS` to `MOST_CHANNELS`.
        gates: how many.
        numbers: channels of all tokens, in blocks of 2^16, rounded up to a power of two.
    """

    size: int
    channels: int
    gates: int
    numbers: int


def bucket(shape: ConvShape) -> Key:
    """The `Bucket` of a call."""
    rows = shape.tokens * (1 if shape.packed else shape.batch)
    blocks = -(-rows * shape.channels >> 16)
    channels = power(shape.channels)
    return Bucket(
        shape.dtype.itemsize,
        min(max(channels, LEAST_CHANNELS), MOST_CHANNELS),
        shape.gate_in + shape.gate_out,
        power(blocks),
    )


def power(length: int) -> int:
    """The power of two that is not below a length."""
    return 1 << max(length - 1, 0).bit_length()


def refusal(shape: ConvShape) -> str | None:
    """None, or why no config serves this call."""
    # The shortest run and the narrowest block bound the programs of any config.
    rows = 1 if shape.packed else shape.batch
    runs = rows * (-(-shape.tokens // 16)) + shape.batch
    if runs * -(-shape.channels // LEAST_CHANNELS) > MOST_PROGRAMS:
        return "takes fewer tokens and channels in one call"
    return None


def _fits(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    if config["C"] > bucket.channels:
        return f"is for rows of more than {config['C'] // 2} channels"
    numbers = config["C"] // (32 * config.num_warps)
    if numbers * bucket.size > THREAD_BYTES:
        return f"has {numbers} numbers a thread, which are more than {THREAD_BYTES} bytes"
    return None


def _best(
    space: Space, key: Key, device: Device, numbers: int, runs: tuple[int, int], waves: int
) -> Config:
    """`numbers` of a row for each thread; runs so long that all programs are some waves of them."""
    bucket = Bucket(*key)
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.name}: no config fits {bucket} on {device.arch}")
    warps = (bucket.numbers << 16) // (32 * numbers)  # were each to have one row
    run = power(warps // (BUSY * waves * device.multiprocessors))
    run = min(max(run, runs[0]), runs[1])

    def worth(config: Config) -> tuple[int, ...]:
        own = config["C"] // (32 * config.num_warps)
        near = (abs(own - numbers), abs(config["RUN"] - run), abs(config.num_warps - 4))
        return *(-gap for gap in near), config.get("AHEAD")

    return max(fitting, key=worth)


def _default_fwd(key: Key, device: Device) -> Config:
    return _best(SPACE_FWD, key, device, 16 // Bucket(*key).size, (16, 64), 8)


def _default_bwd(key: Key, device: Device) -> Config:
    """Half as many numbers a thread: there are rings of rows, gradients and sums of each."""
    return _best(SPACE_BWD, key, device, 4, (32, 128), 4)


def _fwd(numbers: int, warps: int, run: int, ahead: int) -> Config:
    return Config.make(warps, 1, "fma", C=32 * numbers * warps, RUN=run, AHEAD=ahead)


def _bwd(numbers: int, warps: int, run: int) -> Config:
    return Config.make(warps, 1, "fma", C=32 * numbers * warps, RUN=run)


SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _fwd(8, 4, 16, 1),
        _fwd(8, 4, 16, 2),
        _fwd(8, 4, 32, 1),
        _fwd(8, 4, 32, 2),
        _fwd(8, 4, 64, 2),
        _fwd(8, 8, 32, 2),
        _fwd(8, 2, 16, 1),
        _fwd(8, 2, 16, 2),
        _fwd(8, 2, 32, 2),
        _fwd(8, 1, 32, 2),
        _fwd(4, 4, 16, 1),
        _fwd(4, 4, 16, 2),
        _fwd(4, 4, 32, 1),
        _fwd(4, 4, 32, 2),
        _fwd(4, 4, 64, 2),
        _fwd(4, 8, 32, 2),
        _fwd(4, 2, 16, 2),
        _fwd(4, 2, 32, 2),
        _fwd(4, 1, 32, 2),
        _fwd(2, 4, 32, 2),
        _fwd(2, 1, 16, 1),
    ),
    fits=_fits,
    bucket=bucket,
    default=_default_fwd,
    sources=(KERNELS,),
    near=("numbers",),
)

SPACE_BWD = Space(
    op=OP,
    pass_="bwd",
    backend="triton",
    configs=(
        _bwd(8, 4, 64),
        _bwd(8, 4, 128),
        _bwd(8, 2, 64),
        _bwd(8, 1, 64),
        _bwd(4, 4, 32),
        _bwd(4, 4, 64),
        _bwd(4, 4, 128),
        _bwd(4, 8, 64),
        _bwd(4, 2, 32),
        _bwd(4, 2, 64),
        _bwd(4, 2, 128),
        _bwd(4, 1, 64),
        _bwd(2, 4, 64),
        _bwd(2, 4, 128),
        _bwd(2, 1, 32),
    ),
    fits=_fits,
    bucket=bucket,
    default=_default_bwd,
    sources=(BACKWARD, KERNELS),
    near=("numbers",),
)
