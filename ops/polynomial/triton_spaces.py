"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

R rows and C columns of features; T tokens, V columns of a state and G steps of its rows.
"""

from __future__ import annotations

from typing import NamedTuple

from ...autotune.space import Config, Device, Key, Space
from ..triton_runtime import padded
from .op import PACKAGE, PolynomialShape

OP = "polynomial"
FEATURES, STATE = f"{PACKAGE}.triton_features", f"{PACKAGE}.triton_state"
MOST_WIDTH, MOST_POWERS = 128, 512
WIDE = 64  # columns of a state; ptxas (of Triton 3.6) forms bad descriptors for fewer by four warps
LONG = 1024  # tokens


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        width: of x, padded.
        values: of a state, padded, at most `MOST_WIDTH`; 0 for features.
        heads: of the batch, rounded up to a power of two.
        long: whether there are `LONG` tokens or more.
    """

    size: int
    width: int
    values: int
    heads: int
    long: bool


def bucket(shape: PolynomialShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        shape.dtype.itemsize,
        padded(shape.width),
        min(padded(shape.values), MOST_WIDTH) if shape.values else 0,
        1 << max(shape.batch * shape.heads - 1, 0).bit_length(),
        shape.tokens >= LONG,
    )


def by_itself(shape: PolynomialShape) -> bool:
    """Whether features are powers of single numbers, which have no config space."""
    return shape.map.kind in ("elementwise", "concat")


def refusal(shape: PolynomialShape) -> str | None:
    """None, or why no kernel serves this call."""
    most = MOST_POWERS if by_itself(shape) else MOST_WIDTH
    if shape.width > most:
        return f"takes x up to {most} wide, this is {shape.width}"
    degree = max(shape.map.kept)
    if degree > 2 and not by_itself(shape):
        return f"forms products up to degree 2, not {degree}"
    return None


def _size(config: Config, bucket: Bucket) -> str | None:
    """None, or why a config is not for elements or widths like these."""
    if config["HALF"] != (bucket.size == 2):
        return "is for another element size"
    if bucket.width > config["MOST"]:
        return f"takes x up to {config['MOST']} wide, this is padded to {bucket.width}"
    return None


def _shared(needed: int, device: Device) -> str | None:
    if needed + 1024 > device.shared_bytes:
        return f"needs {needed} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _fits_expand(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    rows, cols = config["R"], config["C"]
    numbers = config.num_stages * rows * bucket.width + 2 * bucket.width * cols + rows * cols
    return _size(config, bucket) or _shared(bucket.size * numbers, device)


def _fits_contract(config: Config, key: Key, device: Device) -> str | None:
    return None


def _columns(config: Config, bucket: Bucket) -> str | None:
    """None, or why the columns of a config are not for a state."""
    columns = config["V"]
    if columns > bucket.values:
        return f"V is {columns}, a state has {bucket.values} columns"
    if columns < min(bucket.values, WIDE if bucket.size == 2 else WIDE // 2):
        return f"is for states of up to {columns} columns"
    return None


def _fits_read(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    ahead = config.num_stages * bucket.width * config["V"]
    anchored = (config["T"] + bucket.width) * bucket.width
    return (
        _size(config, bucket)
        or _columns(config, bucket)
        or _shared(bucket.size * max(ahead, anchored), device)
    )


def _fits_pull(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    columns = config["V"]
    if config["NARROW"] == 0 and bucket.width < WIDE:
        return "its products are of at least 64 columns"
    ahead = config.num_stages * bucket.width * columns
    anchored = (config["T"] + columns) * columns
    return (
        _size(config, bucket)
        or _columns(config, bucket)
        or _shared(bucket.size * max(ahead, anchored), device)
    )


def _fits_update(config: Config, key: Key, device: Device) -> str | None:
    bucket = Bucket(*key)
    width, columns, tokens = bucket.width, config["V"], config["T"]
    ahead = config.num_stages * tokens * (width + columns)
    if bucket.size == 2:
        ahead += width * width  # the unit matrix
    features = config["G"] * tokens * width
    out = 4 * columns * config["G"] * width
    return (
        _size(config, bucket)
        or _columns(config, bucket)
        or _shared(max(bucket.size * (ahead + features), out), device)
    )


def _best(space: Space, key: Key, device: Device, wanted: dict[str, int]) -> Config:
    """The fitting config that has most of the wanted tiles; of those the first."""
    fitting = space.fitting(key, device)
    if not fitting:
        raise ValueError(f"{space.name}: no config fits {Bucket(*key)} on {device.arch}")
    return max(fitting, key=lambda config: sum(config[name] == n for name, n in wanted.items()))


def _default_expand(key: Key, device: Device) -> Config:
    return _best(SPACE_EXPAND, key, device, {})


def _default_contract(key: Key, device: Device) -> Config:
    return _best(SPACE_CONTRACT, key, device, {"R": 32 if Bucket(*key).width <= WIDE else 16})


def _default_read(key: Key, device: Device) -> Config:
    bucket = Bucket(*key)
    tokens = 128 if bucket.long else 64
    return _best(SPACE_READ, key, device, {"T": tokens, "V": bucket.values})


def _default_pull(key: Key, device: Device) -> Config:
    bucket = Bucket(*key)
    tokens = 128 if bucket.long else 64
    return _best(SPACE_PULL, key, device, {"T": tokens, "V": bucket.values})


def _default_update(key: Key, device: Device) -> Config:
    """Four steps a program load half as much, where there are enough programs then."""
    bucket = Bucket(*key)
    programs = bucket.heads * (bucket.width // 8 + 1)
    return _best(SPACE_UPDATE, key, device, {"G": 4 if programs >= device.multiprocessors else 2})


def _config(
    warps: int, stages: int, *, half: int = 1, most: int = MOST_WIDTH, matrix: str = "wgmma",
    **tiles: int,
) -> Config:  # fmt: skip
    """HALF: of 16-bit elements; MOST: the widest x, padded. NARROW: also of x under 64 wide."""
    return Config.make(warps, stages, matrix, atomic=False, HALF=half, MOST=most, **tiles)


SPACE_EXPAND = Space(
    op="polynomial_features",
    pass_="fwd",
    backend="triton",
    configs=(
        _config(4, 3, R=64, C=64),
        _config(4, 2, R=64, C=64),
        _config(4, 2, R=64, C=128, most=64),
        _config(8, 2, R=128, C=64),
        _config(8, 2, R=128, C=128, most=64),
        _config(4, 2, R=32, C=64, matrix="mma"),
        _config(8, 1, R=32, C=64, matrix="mma", half=0, most=64),
        _config(8, 1, R=16, C=64, matrix="mma", half=0),
        _config(4, 1, R=16, C=32, matrix="mma", half=0),
    ),
    fits=_fits_expand,
    bucket=bucket,
    default=_default_expand,
    sources=(FEATURES,),
)

SPACE_CONTRACT = Space(
    op="polynomial_features",
    pass_="bwd",
    backend="triton",
    configs=tuple(
        Config.make(warps, 1, "fma", R=rows) for rows, warps in ((16, 4), (32, 4), (32, 8))
    ),
    fits=_fits_contract,
    bucket=bucket,
    default=_default_contract,
    sources=(FEATURES,),
)

SPACE_READ = Space(
    op="polynomial_read",
    pass_="fwd",
    backend="triton",
    configs=(
        _config(8, 3, T=128, V=64),
        _config(8, 4, T=128, V=64),
        _config(4, 3, T=128, V=64, most=64),
        _config(4, 3, T=64, V=64),
        _config(8, 3, T=128, V=128),
        _config(4, 3, T=64, V=128, most=64),
        _config(2, 3, T=32, V=32, matrix="mma"),
        _config(2, 3, T=64, V=32, matrix="mma", most=64),
        _config(2, 3, T=64, V=16, matrix="mma", most=64),
        _config(2, 3, T=32, V=16, matrix="mma"),
        _config(4, 2, T=64, V=64, half=0, most=64),
        _config(4, 2, T=64, V=32, half=0),
        _config(2, 2, T=32, V=16, half=0, matrix="mma"),
    ),
    fits=_fits_read,
    bucket=bucket,
    default=_default_read,
    sources=(STATE,),
)

SPACE_PULL = Space(
    op="polynomial_read",
    pass_="bwd",
    backend="triton",
    configs=(
        _config(8, 3, T=128, V=64, NARROW=1),
        _config(8, 3, T=64, V=64, NARROW=1),
        _config(4, 3, T=64, V=64, NARROW=0),
        _config(8, 3, T=128, V=128, NARROW=0),
        _config(4, 3, T=64, V=128, NARROW=0, most=64),
        _config(2, 3, T=32, V=32, matrix="mma", NARROW=1),
        _config(2, 3, T=32, V=16, matrix="mma", NARROW=1),
        _config(4, 2, T=64, V=64, half=0, most=64, NARROW=0),
        _config(4, 2, T=64, V=32, half=0, NARROW=1),
        _config(2, 2, T=32, V=16, half=0, matrix="mma", NARROW=1),
    ),
    fits=_fits_pull,
    bucket=bucket,
    default=_default_pull,
    sources=(STATE,),
)

SPACE_UPDATE = Space(
    op="polynomial_update",
    pass_="fwd",
    backend="triton",
    configs=(
        _config(4, 3, T=64, V=64, G=4, most=64),
        _config(4, 2, T=64, V=64, G=4, most=64),
        _config(4, 3, T=64, V=64, G=2, most=64),
        _config(4, 2, T=64, V=64, G=2),
        _config(4, 3, T=32, V=64, G=2),
        _config(8, 3, T=128, V=64, G=4, most=64),
        _config(8, 2, T=128, V=64, G=2),
        _config(8, 2, T=64, V=128, G=2),
        _config(4, 2, T=64, V=32, G=2),
        _config(4, 2, T=32, V=32, G=2, matrix="mma"),
        _config(2, 2, T=32, V=32, G=2, matrix="mma", most=64),
        _config(2, 2, T=32, V=16, G=2, matrix="mma"),
        _config(8, 1, T=32, V=64, G=2, half=0, most=64),
        _config(8, 1, T=32, V=32, G=2, half=0, matrix="mma"),
        _config(4, 1, T=32, V=16, G=2, half=0, matrix="mma"),
    ),
    fits=_fits_update,
    bucket=bucket,
    default=_default_update,
    sources=(STATE,),
)
