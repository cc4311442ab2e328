"""Config spaces of the Triton backend: which tiles exist, which fit, which is the default.

Backward has two forms in one space. `split` (SINGLE = 0) runs a dk/dv kernel and a dq kernel; no
atomics, so it is what deterministic mode gets. `single` forms every score once and adds dq into an
fp32 buffer with atomic (bulk-reduce) additions; it does not form row sums, so it serves calls
without a null value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...autotune.space import Config, Device, Key, Space
from .. import triton_runtime as runtime
from .op import PACKAGE, AttentionShape

OP = "polar_attention"
# Of the bucket: what costs every tile about the same share of its time.
NEAR = ("null_value", "windowed", "deterministic")
MIN_BLOCK_D = 16
SHORT = 2048  # keys, see Bucket
HOPPER_WIDTHS = (64, 128, 192, 256)  # padded head widths of the Hopper kernels
HOPPER_KEYS = 64  # of one consumer of dkdv; as in hopper_dkdv
# wgmma reads past the end of a computed tile of fewer columns than this where rows are what it sums
# over (Triton 3.6, memcheck): that of dq in the single-pass form; all of fp32, whose operands are
# parts of them.
NARROWEST = 64
COMPUTED_TILE = f"its wgmma leaves shared memory where computed tiles are under {NARROWEST} wide"
HOPPER_SHARED_BYTES = 226 * 1024  # of the 227 KiB of a block: the rest is for barriers


def block_d(head_dim: int) -> int:
    """Head width padded to the power of two that tiles have."""
    return max(MIN_BLOCK_D, 1 << (head_dim - 1).bit_length())


def padded_width(head_dim: int) -> int:
    """Head width as configs are chosen for it: that of a tile, or 192."""
    return 192 if 128 < head_dim <= 192 else block_d(head_dim)


def hopper_chunks(width: int) -> tuple[int, int]:
    """Columns of a chunk, and how many chunks a padded width has in the Hopper kernels."""
    return {192: (64, 3), 256: (128, 2)}.get(width, (width, 1))


class HopperTiles(NamedTuple):
    """Shared memory of a Hopper kernel, in bytes.

    Attributes:
        own: of the tile that stays while the others stream.
        streamed: of all stages of the others.
    """

    own: int
    streamed: int

    @property
    def buffers(self) -> int:
        """How many tiles that stay there is room for: with two, the next one comes early."""
        return 2 if 2 * self.own + self.streamed <= HOPPER_SHARED_BYTES else 1

    @property
    def shared(self) -> int:
        """All of it."""
        return self.buffers * self.own + self.streamed


def hopper_fwd_tiles(config: Config, size: int, width: int) -> HopperTiles:
    """Of the forward kernel: q stays, k and v stream."""
    row = size * width
    return HopperTiles(config["BLOCK_M"] * row, 2 * config["BLOCK_N"] * config.num_stages * row)


def hopper_dkdv_tiles(config: Config, size: int, width: int) -> HopperTiles:
    """Of dkdv: k and v stay, q, Gs and four row vectors stream."""
    row = size * width
    streamed = config["BLOCK_M"] * config.num_stages * (2 * row + 16)
    return HopperTiles(2 * config["BLOCK_N"] * row, streamed)


def hopper_dq_tiles(config: Config, size: int, width: int) -> HopperTiles:
    """Of dq: q and Gs stay, k and v stream."""
    row = size * width
    return HopperTiles(2 * config["DQ_M"] * row, 2 * config["DQ_N"] * config["DQ_STAGES"] * row)


class Bucket(NamedTuple):
    """What a choice of config depends on.

    Attributes:
        size: bytes of an element.
        width: `padded_width`.
        polar: False in softmax mode.
        null_value: whether there is a null value.
        windowed: whether a window hides keys.
        deterministic: whether atomics are forbidden.
        short: whether no row is said to see more than SHORT keys.
        plain: without n_keys, not empty, addressable by bulk copies: what the Hopper kernels want.
    """

    size: int
    width: int
    polar: bool
    null_value: bool
    windowed: bool
    deterministic: bool
    short: bool
    plain: bool


def bucket(shape: AttentionShape) -> Key:
    """The `Bucket` of a call."""
    return Bucket(
        size=shape.dtype.itemsize,
        width=padded_width(shape.head_dim),
        polar=shape.polar,
        null_value=shape.null_value,
        windowed=windowed(shape),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        short=_most_keys(shape) <= SHORT,
        plain=shape.aligned and not shape.has_n_keys and min(shape.batch, shape.tq, shape.tk) > 0,
    )


def _most_keys(shape: AttentionShape) -> int:
    """How many keys a row may see; if packed, as far as the hints say."""
    keys = shape.tk
    if shape.packed:
        keys = shape.max_seqlen_k or shape.max_seqlen or keys
    return min(keys, shape.window or keys)


def windowed(shape: AttentionShape) -> bool:
    """Whether the window hides a key; one that cannot is no window, bit for bit."""
    return shape.window is not None and shape.window < shape.tk


def _config(m: int, n: int, warps: int, stages: int, **tiles: Any) -> Config:
    wide = warps >= 4 and m >= 64
    return Config.make(
        BLOCK_M=m,
        BLOCK_N=n,
        num_warps=warps,
        num_stages=stages,
        matrix="wgmma" if wide else "mma",
        **tiles,
    )


def _fits_fwd(config: Config, key: Key, device: Device) -> str | None:
    size, width = key[:2]
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    warps = config.num_warps
    if config.get("HOPPER"):
        reason = _not_hopper(key, device)
        if reason is not None:
            return reason
        warps = m // 16
        shared = hopper_fwd_tiles(config, size, width).shared
    else:
        width = block_d(width)
        shared = size * width * (m + 2 * n * config.num_stages)
    registers = m * (width + n) // (32 * warps)
    return _limits(config, key, device, shared, registers, most=192)


def _not_hopper(key: Key, device: Device) -> str | None:
    """None, or why the Gluon kernels cannot run."""
    if device.capability != 90:
        return f"is written for sm_90, this is {device.arch}"
    if not runtime.has_gluon():
        return "is written in Gluon, which needs Triton 3.6 or newer"
    if not Bucket(*key).plain or Bucket(*key).width not in HOPPER_WIDTHS:
        names = ", ".join(map(str, HOPPER_WIDTHS))
        return f"serves aligned tensors, without n_keys, with heads padded to {names}"
    return None


def _limits(
    config: Config, key: Key, device: Device, shared: int, registers: int, most: int
) -> str | None:
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    if registers > most:
        return f"needs about {registers} registers a thread for its accumulators"
    if config.get("HALF", 1) != (key[0] == 2):
        return "is for another element size"
    narrow = block_d(key[1]) < NARROWEST and device.capability == 90
    if narrow and key[0] == 4 and config.matrix == "wgmma":
        return COMPUTED_TILE
    return None


def _best(
    space: Space, preferred: dict[int, tuple[Config, ...]], key: Key, device: Device
) -> Config:
    """The first preferred config that fits, else the largest tile that does."""
    fitting = space.fitting(key, device)
    width = min(max(Bucket(*key).width, 64), 256)
    for config in preferred[width]:
        if config in fitting:
            return config
    return max(
        fitting,
        key=lambda config: (not config.get("SINGLE"), config["BLOCK_M"], config["BLOCK_N"]),
    )


def _default_fwd(key: Key, device: Device) -> Config:
    preferred = _PREFERRED_FWD_SHORT if Bucket(*key).short else _PREFERRED_FWD
    return _best(SPACE_FWD, preferred, key, device)


def _hopper(n: int, stages: int) -> Config:
    """A config of `hopper_fwd`: its 4 warps are the first consumer's, the rest join in."""
    return _config(128, n, 4, stages, HALF=1, HOPPER=1)


# Best first, as measured on an H200.
_FP32_FWD = _config(64, 32, 4, 2, HALF=0)
_WIDE_FWD = (_hopper(64, 2), _config(128, 64, 8, 2, HALF=1), _config(64, 32, 4, 3, HALF=1))
_PREFERRED_FWD = {
    64: (
        _config(64, 128, 4, 2, HALF=1),
        _config(64, 64, 4, 3, HALF=1),
        _config(32, 64, 4, 2, HALF=0),
    ),
    128: (_hopper(128, 2), _config(64, 64, 4, 3, HALF=1), _config(64, 64, 4, 2, HALF=1), _FP32_FWD),
    192: _WIDE_FWD,
    256: _WIDE_FWD,
}
# A tile of few steps loses more to the step that it starts with alone.
_PREFERRED_FWD_SHORT = {**_PREFERRED_FWD, 128: (_hopper(64, 3), *_PREFERRED_FWD[128])}

SPACE_FWD = Space(
    op=OP,
    pass_="fwd",
    backend="triton",
    configs=(
        _hopper(128, 2),
        _hopper(64, 3),
        _hopper(64, 2),
        *(
            _config(m, n, warps, stages, HALF=1)
            for m, n, warps, stages in (
                (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3),
                (128, 64, 4, 2), (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3),
                (64, 32, 4, 3), (32, 32, 4, 2),
            )
        ),
        *(
            _config(m, n, warps, stages, HALF=0)
            for m, n, warps, stages in (
                (128, 32, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1),
            )
        ),
    ),
    fits=_fits_fwd,
    bucket=bucket,
    default=_default_fwd,
    sources=(f"{PACKAGE}.triton_fwd", f"{PACKAGE}.hopper_fwd"),
    near=NEAR,
)  # fmt: skip


def _fits_bwd(config: Config, key: Key, device: Device) -> str | None:
    size, width, null_value = key[0], block_d(key[1]), Bucket(*key).null_value
    if Bucket(*key).deterministic and config.atomic:
        return "adds with atomics, and deterministic algorithms are on"
    if null_value and config["SINGLE"]:
        return "does not form the row sums that the gradient of a strong null needs"
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    single = config["SINGLE"]
    if config.get("HOPPER"):
        return _fits_hopper_bwd(config, key, device)
    if single and min(m, width) < NARROWEST and device.capability == 90:
        return COMPUTED_TILE
    shared = size * width * 2 * (n + m * config.num_stages) + 16 * m * config.num_stages
    shared += single * (size * m * n + 4 * m * width)
    registers = (2 * n * width + 2 * n * m + single * m * width) // (32 * config.num_warps)
    reason = _limits(config, key, device, shared, registers, most=256)
    if reason is not None or single:
        return reason
    m, n, stages = config["DQ_M"], config["DQ_N"], config["DQ_STAGES"]
    shared = size * width * 2 * (m + n * stages)
    registers = m * (width + 2 * n) // (32 * config["DQ_WARPS"])
    return _limits(config, key, device, shared, registers, most=224)


def _fits_hopper_bwd(config: Config, key: Key, device: Device) -> str | None:
    reason = _not_hopper(key, device)
    if reason is not None:
        return reason
    size, width = key[:2]
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    accumulators = n // HOPPER_KEYS  # of a consumer: dk and dv of its own keys, or one of them
    if accumulators == 1 and width <= 128:
        return "its consumers form the same scores, which only wide heads ask for"
    shared = hopper_dkdv_tiles(config, size, width).shared
    registers = HOPPER_KEYS * (accumulators * width + 2 * m) // 128
    reason = _limits(config, key, device, shared, registers, most=192)
    if reason is not None:
        return reason
    m, n = config["DQ_M"], config["DQ_N"]
    shared = hopper_dq_tiles(config, size, width).shared
    return _limits(config, key, device, shared, m * (width + 2 * n) // 256, most=192)


def _default_bwd(key: Key, device: Device) -> Config:
    return _best(SPACE_BWD, _PREFERRED_BWD, key, device)


def _single(m: int, n: int, warps: int, stages: int, half: int = 1) -> Config:
    tiles = _config(n, m, warps, stages)  # keys are the rows of the products of this kernel
    return Config.make(
        warps, stages, tiles.matrix, atomic=True, BLOCK_M=m, BLOCK_N=n, SINGLE=1, HALF=half
    )


def _split(dkdv: tuple[int, int, int, int], dq: tuple[int, int, int, int], half: int = 1) -> Config:
    m, n, warps, stages = dkdv
    matrix = _config(n, m, warps, stages).matrix
    dq_m, dq_n, dq_warps, dq_stages = dq
    return Config.make(
        warps, stages, matrix, BLOCK_M=m, BLOCK_N=n, SINGLE=0, HALF=half,
        DQ_M=dq_m, DQ_N=dq_n, DQ_WARPS=dq_warps, DQ_STAGES=dq_stages,
    )  # fmt: skip


def _hopper_split(m: int, stages: int, dq_n: int, dq_stages: int, n: int = 128) -> Config:
    """A config of `hopper_dkdv` and `hopper_dq`: both have two consumers of 64 rows or keys each.

    With n = 64 keys the consumers of dkdv share them: one forms dk, the other dv.
    """
    return Config.make(
        4, stages, "wgmma", BLOCK_M=m, BLOCK_N=n, SINGLE=0, HALF=1, HOPPER=1,
        DQ_M=128, DQ_N=dq_n, DQ_WARPS=4, DQ_STAGES=dq_stages,
    )  # fmt: skip


_HOPPER_64 = _hopper_split(128, 2, 128, 3)
_HOPPER_128 = _hopper_split(64, 2, 128, 2)
_HOPPER_192 = _hopper_split(64, 3, 64, 2, n=64)
_HOPPER_256 = _hopper_split(64, 2, 32, 3, n=64)
_BWD_64 = _split((64, 64, 4, 4), (64, 64, 4, 3))
_BWD_128 = _split((64, 64, 4, 2), (128, 64, 8, 3))
_BWD_256 = _split((32, 64, 8, 2), (64, 64, 8, 2))
_BWD_SMALL = _split((32, 64, 4, 2), (64, 32, 4, 2))
_FP32_BWD = _split((32, 64, 8, 1), (64, 32, 4, 1), half=0)
_PREFERRED_BWD = {
    64: (_HOPPER_64, _BWD_64, _BWD_SMALL, _split((32, 32, 4, 1), (32, 32, 4, 1), half=0)),
    128: (_HOPPER_128, _BWD_128, _BWD_SMALL, _FP32_BWD),
    192: (_HOPPER_192, _BWD_256),
    256: (_HOPPER_256, _BWD_256),
}

SPACE_BWD = Space(
    op=OP,
    pass_="bwd",
    backend="triton",
    configs=(
        _HOPPER_64,
        _HOPPER_128,
        _HOPPER_192,
        _HOPPER_256,
        _hopper_split(64, 3, 64, 3),
        _hopper_split(64, 4, 64, 4),
        _hopper_split(64, 3, 32, 4, n=64),
        _BWD_64,
        _BWD_128,
        _BWD_256,
        _BWD_SMALL,
        _split((64, 64, 4, 2), (64, 64, 4, 2)),
        _split((64, 64, 4, 2), (128, 128, 8, 2)),
        _split((32, 64, 4, 2), (64, 32, 4, 3)),
        _split((64, 128, 8, 2), (128, 64, 8, 2)),
        _split((32, 32, 4, 1), (32, 32, 4, 1)),
        _single(64, 128, 8, 2),
        _single(64, 64, 4, 2),
        _single(32, 32, 4, 1),
        _FP32_BWD,
        _split((16, 64, 4, 1), (64, 16, 4, 1), half=0),
        _split((32, 32, 4, 1), (32, 32, 4, 1), half=0),
        _split((16, 32, 4, 1), (16, 32, 4, 1), half=0),
        _split((16, 16, 4, 1), (16, 16, 4, 1), half=0),
        _single(32, 32, 4, 1, half=0),
    ),
    fits=_fits_bwd,
    bucket=bucket,
    default=_default_bwd,
    sources=tuple(f"{PACKAGE}.{name}" for name in ("triton_bwd", "hopper_dkdv", "hopper_dq")),
    near=NEAR,
)
