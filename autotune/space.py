"""Config spaces as data, and `choose`: the one question a launcher asks.

A `Space` belongs to one pass of one op on one backend. Its configs are frozen values that can be
hashed, printed, stored and sent to another process; `fits` drops those a device cannot hold;
`bucket` maps a call's shape to a short key without raw lengths, so that a new length is not a new
key; `default` is a closed-form rule from key and device to one of the configs.

Nothing here tunes: choosing reads a forced config, else what a sweep wrote into a table (`tables`),
else the default.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Key = tuple[Any, ...]

DEFAULT = "closed-form default"


@dataclass(frozen=True)
class Device:
    """What a config has to fit into.

    Attributes:
        arch: "sm_90", "sm_80", …; "cpu" under the Triton interpreter.
        shared_bytes: shared memory one block may use.
        registers: 32-bit registers of one multiprocessor.
        multiprocessors: how many there are.
        name: slug of the GPU's name, "nvidia-h200", by which tables are found; "" has no table.
    """

    arch: str
    shared_bytes: int
    registers: int = 65536
    multiprocessors: int = 1
    name: str = ""

    @property
    def capability(self) -> int:
        """Compute capability as one number (90 for sm_90); 0 on the CPU."""
        return int(self.arch.removeprefix("sm_").rstrip("a")) if self.arch != "cpu" else 0

    @staticmethod
    def of(device: torch.device) -> Device:
        """The limits of a torch device, or what `assume_device` says."""
        if _assumed:
            return _assumed[-1]
        if device.type != "cuda":
            # The interpreter has no limits; these keep every config of a space runnable there.
            return Device("cpu", shared_bytes=1 << 30)
        index = device.index if device.index is not None else torch.cuda.current_device()
        return _cuda_device(index)


_assumed: list[Device] = []


@contextlib.contextmanager
def assume_device(device: Device) -> Iterator[None]:
    """Let every `Device.of` return `device`: compiling for a GPU that is not here, tests."""
    _assumed.append(device)
    try:
        yield
    finally:
        _assumed.pop()


@functools.cache
def _cuda_device(index: int) -> Device:
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks two fields
    return Device(
        arch=f"sm_{properties.major}{properties.minor}",
        shared_bytes=properties.shared_memory_per_block_optin,
        registers=properties.regs_per_multiprocessor,
        multiprocessors=properties.multi_processor_count,
        name=slug(properties.name),
    )


def slug(name: str) -> str:
    """A device's name as a file name: "NVIDIA H200" is "nvidia-h200"."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel.

    Attributes:
        tiles: the kernel's compile-time numbers and flags, by name.
        num_warps: warps of one program.
        num_stages: depth of the software pipeline.
        matrix: matrix instructions expected in the machine code: "wgmma", "mma" or "fma".
        atomic: True if the kernel sums with floating-point atomics, so that its results may
            differ between runs in the last bits.
    """

    tiles: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 2
    matrix: str = "wgmma"
    atomic: bool = False

    @staticmethod
    def make(
        num_warps: int = 4,
        num_stages: int = 2,
        matrix: str = "wgmma",
        atomic: bool = False,
        **tiles: int,
    ) -> Config:
        """A config from keyword tiles: `Config.make(BLOCK_M=128, BLOCK_N=64, num_warps=8)`."""
        return Config(tuple(sorted(tiles.items())), num_warps, num_stages, matrix, atomic)

    def __getitem__(self, tile: str) -> int:
        for name, value in self.tiles:
            if name == tile:
                return value
        raise KeyError(tile)

    def get(self, tile: str, default: int = 0) -> int:
        """The tile of that name, or `default`."""
        return dict(self.tiles).get(tile, default)

    @property
    def name(self) -> str:
        """A short readable identity, used in tables, test ids and error messages."""
        parts = [f"{name.lower().replace('block_', 'b')}{int(value)}" for name, value in self.tiles]
        return "-".join([*parts, f"w{self.num_warps}", f"s{self.num_stages}"])


@dataclass(frozen=True, eq=False)  # one object is one space: compared and hashed as such
class Space:
    """All configs of one pass of one op on one backend.

    Attributes:
        op: the public function, "polar_attention"; it may be named otherwise than its folder.
        pass_: "fwd", "bwd", or a kernel of a pass ("bwd_dq").
        backend: "triton" or "cuda".
        configs: every config that may be chosen, on any device and for any key.
        fits: `fits(config, key, device)`: None, or the reason why the config cannot run.
        bucket: `bucket(shape)`: the key of a call; holds no raw length.
        default: `default(key, device)`: the closed-form choice; one of `configs`.
        sources: where the kernels are: modules of Triton kernels, files under csrc.
        near: fields of the key in which a measured row may differ from the call that it serves.
    """

    op: str
    pass_: str
    backend: str
    configs: tuple[Config, ...]
    fits: Callable[[Config, Key, Device], str | None]
    bucket: Callable[[Any], Key]
    default: Callable[[Key, Device], Config]
    sources: tuple[str, ...] = ()
    near: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The space in error messages and reports."""
        return f"{self.op}/{self.pass_}/{self.backend}"

    def fitting(self, key: Key, device: Device) -> list[Config]:
        """The configs that run for this key on this device."""
        return [config for config in self.configs if self.fits(config, key, device) is None]


_forced: dict[tuple[str, str, str], list[Config]] = {}


@contextlib.contextmanager
def use_config(space: Space, config: Config) -> Iterator[None]:
    """Force one config for a space: how sweeps and tests run each of them.

    Raises:
        ValueError: if the config is not in the space.
    """
    if config not in space.configs:
        raise ValueError(f"config {config.name} is not in {space.op}/{space.pass_}")
    stack = _forced.setdefault((space.op, space.pass_, space.backend), [])
    stack.append(config)
    try:
        yield
    finally:
        stack.pop()


@dataclass(frozen=True)
class Choice:
    """A config and the reason for it.

    Attributes:
        config: to be launched.
        why: what `explain` says of it.
        source: `source.fingerprint` of what was measured; None if nothing was.
    """

    config: Config
    why: str
    source: str | None = None


def choose(space: Space, key: Key, device: Device) -> Config:
    """The config to launch with: a forced one, else a measured one, else the closed-form default.

    Raises:
        ValueError: if the forced config does not fit this call; it is never replaced in silence.
        RuntimeError: every config that fits was measured to be wrong on this device.
    """
    return chosen(space, key, device).config


def chosen(space: Space, key: Key, device: Device) -> Choice:
    """As `choose`, with the reason."""
    stack = _forced.get((space.op, space.pass_, space.backend))
    if stack:
        reason = space.fits(stack[-1], key, device)
        if reason is not None:
            raise ValueError(
                f"config {stack[-1].name} of {space.op}/{space.pass_} cannot run here: {reason}"
            )
        return Choice(stack[-1], "forced")
    return _settled(space, key, device)


@functools.lru_cache(maxsize=4096)
def _settled(space: Space, key: Key, device: Device) -> Choice:
    """Files are read for a device's first key alone; later calls find their answer here."""
    if not device.name:
        return Choice(space.default(key, device), DEFAULT)
    from . import tables

    return tables.consult(space, key, device)


@functools.lru_cache(maxsize=4096)
def measured_ms(space: Space, key: Key, device: Device) -> tuple[str, float] | None:
    """What was timed for exactly this bucket on this GPU, and its milliseconds; None: nothing."""
    from . import tables

    row = tables.measured(space, key, device)
    return None if row is None else (f"{row.problem} {row.dtype}", row.ms)


def reload() -> None:
    """Forget what tables said: the next choice reads them again."""
    from . import tables

    _settled.cache_clear()
    measured_ms.cache_clear()
    tables.forget()
