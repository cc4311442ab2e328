"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..triton_runtime import padded
from .op import PACKAGE, DeltaShape

OP = "gated_delta_rule"
KERNELS = f"{PACKAGE}.triton_kernels"
BACKWARD = f"{PACKAGE}.triton_kernels_back"
CHUNK = 64  # tokens
NARROWEST = 64  # side of a tile: Hopper's products of narrower ones are miscompiled here and there
MOST_WIDTH = 256
MOST_VALUES = 1024
MOST_NUMBERS = 64  # that a thread sums up; with more, registers spill
MOST_PROGRAMS = (1 << 31) - 1


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        width: of a memory, padded.
        values: of a memory, padded, at most 128.
        size: bytes of a number.
        walks: heads of all sequences, rounded up to a power of two.
    """

    width: int
    values: int
    size: int
    walks: int


def side(length: int) -> int:
    """The side of a tile that takes a whole width."""
    return max(NARROWEST, padded(length))


def wide(values: int) -> int:
    """Values as they lie in scratch memory: whole tiles of any config."""
    return -(-values // 128) * 128 if values > NARROWEST else NARROWEST


def bucket(shape: DeltaShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        side(shape.width),
        min(side(shape.values), 128),
        shape.dtype.itemsize,
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
    )


def slots(shape: DeltaShape) -> int:
    """Chunks of all sequences; packed ones leave some empty."""
    if shape.packed:
        return shape.batch and shape.tokens // CHUNK + shape.batch
    return shape.batch * -(-shape.tokens // CHUNK)


def refusal(shape: DeltaShape) -> str | None:
    """None, or why no config serves this call."""
    if shape.width > MOST_WIDTH:
        return f"takes keys up to {MOST_WIDTH} wide, this is {shape.width}"
    if shape.values > MOST_VALUES:
        return f"takes values up to {MOST_VALUES} wide, this is {shape.values}"
    most_heads = shape.heads * -(-shape.values // NARROWEST)
    rows = shape.batch * shape.tokens * max(shape.heads_q, shape.heads_k)
    if max((slots(shape) + shape.batch) * most_heads, rows) > MOST_PROGRAMS:
        return "takes fewer tokens, heads and values in one call"
    return None


# ---- what a program holds -----------------------------------------------------------------------


def _prepared(config: Config, bucket: Bucket) -> int:
    return (2 * CHUNK * bucket.width + CHUNK * config["V"]) * bucket.size + 8 * CHUNK * CHUNK


def _walked(config: Config, bucket: Bucket) -> int:
    row = 2 * bucket.width + config["V"]
    return config.num_stages * CHUNK * row * bucket.size


def _read(config: Config, bucket: Bucket) -> int:
    rows = 2 * CHUNK + config["V"]
    return (rows * bucket.width + CHUNK * (config["V"] + CHUNK)) * bucket.size


def _walked_back(config: Config, bucket: Bucket) -> int:
    row = 3 * bucket.width + 2 * config["V"]
    return config.num_stages * CHUNK * row * bucket.size


def _pulled(config: Config, bucket: Bucket) -> int:
    return (CHUNK * CHUNK + 2 * CHUNK * config["V"]) * bucket.size


def _differentiated(config: Config, bucket: Bucket) -> int:
    products = 2 * CHUNK * config["V"] + bucket.width * config["V"]
    return max(products, 2 * CHUNK * bucket.width + CHUNK * CHUNK) * bucket.size


def _paired(config: Config, bucket: Bucket) -> int:
    products = 5 * CHUNK * config["V"]
    return max(products, 2 * CHUNK * bucket.width) * bucket.size


def _memory(config: Config, bucket: Bucket) -> int:
    return config["V"] * bucket.width


def _one_row(config: Config, bucket: Bucket) -> int:
    return CHUNK * bucket.width


def _two_rows(config: Config, bucket: Bucket) -> int:
    # The widest spill, too, by eight warps, the most there is.
    return 2 * CHUNK * (bucket.width if config.num_warps < 8 else min(bucket.width, 128))


def _space(
    pass_: str,
    tiles: tuple[tuple[int, int, int], ...],
    shared: Callable[[Config, Bucket], int],
    held: Callable[[Config, Bucket], int] | None,
    default: Callable[[Bucket, list[Config]], Config],
) -> Space:
    """`tiles`: columns, warps and stages; `held`: numbers that it sums up, if many."""

    def fits(config: Config, key: Key, device: Device) -> str | None:
        bucket = Bucket(*key)
        if config["V"] > bucket.values:
            return f"is for memories of more than {config['V'] // 2} columns"
        if held and held(config, bucket) // (32 * config.num_warps) > MOST_NUMBERS:
            return "what it sums up does not fit into its registers"
        if shared(config, bucket) > device.shared_bytes:
            return "does not fit into shared memory"
        return None

    def chosen(key: Key, device: Device) -> Config:
        return default(Bucket(*key), space.fitting(key, device))

    space = Space(
        op=OP,
        pass_=pass_,
        backend="triton",
        configs=tuple(Config.make(warps, stages, V=v) for v, warps, stages in tiles),
        fits=fits,
        bucket=bucket,
        default=chosen,
        sources=(BACKWARD, KERNELS) if pass_.startswith("bwd") else (KERNELS,),
        near=("walks",),
    )
    return space


def _nearest(columns: int, warps: int, stages: int) -> Callable[[Bucket, list[Config]], Config]:
    def default(bucket: Bucket, fitting: list[Config]) -> Config:
        def gap(config: Config) -> tuple[int, int, int]:
            return (
                abs(config["V"] - min(columns, bucket.values)),
                abs(config.num_warps - warps),
                abs(config.num_stages - stages),
            )

        return min(fitting, key=gap)

    return default


SPACE_PREPARE = _space(
    "fwd_prepare",
    ((64, 4, 1), (128, 4, 1), (64, 8, 1), (128, 8, 1)),
    _prepared,
    None,
    _nearest(64, 4, 1),
)
SPACE_WALK = _space(
    "fwd",
    (
        (64, 4, 3), (64, 4, 2), (64, 4, 4), (64, 4, 1),
        (128, 8, 3), (128, 8, 2), (128, 8, 1), (64, 8, 2), (64, 8, 1),
    ),
    _walked,
    _memory,
    _nearest(64, 4, 3),
)  # fmt: skip
SPACE_OUTPUT = _space(
    "fwd_output",
    ((128, 8, 1), (64, 4, 1), (128, 4, 1), (64, 8, 1)),
    _read,
    None,
    _nearest(128, 8, 1),
)
SPACE_WALK_BACK = _space(
    "bwd",
    ((64, 4, 2), (64, 4, 3), (64, 4, 1), (128, 8, 2), (128, 8, 1), (64, 8, 1)),
    _walked_back,
    _memory,
    _nearest(64, 4, 2),
)
SPACE_PUSH = _space(
    "bwd_push",
    ((128, 8, 1), (64, 4, 1), (128, 4, 1), (64, 8, 1)),
    _read,
    None,
    _nearest(128, 8, 1),
)
SPACE_PULL = _space(
    "bwd_pull",
    ((64, 4, 1), (128, 4, 1), (128, 8, 1), (64, 8, 1)),
    _pulled,
    None,
    _nearest(64, 4, 1),
)
SPACE_QUERIES = _space(
    "bwd_queries",
    ((64, 4, 1), (64, 8, 1), (128, 8, 1)),
    _differentiated,
    _one_row,
    _nearest(64, 8, 1),
)
SPACE_PAIRS = _space(
    "bwd_pairs",
    ((64, 4, 1), (64, 8, 1), (128, 8, 1)),
    _paired,
    None,
    _nearest(64, 4, 1),
)
SPACE_KEYS = _space(
    "bwd_keys",
    ((64, 8, 1), (64, 4, 1), (128, 8, 1)),
    _differentiated,
    _two_rows,
    _nearest(64, 8, 1),
)
