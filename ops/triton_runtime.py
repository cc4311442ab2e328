"""Launching Triton kernels: alignment, tensor descriptors, cold-capture errors, compile reports.

A launcher names a kernel and its arguments once. `launch` runs it; inside `record_launches` the
same call yields the kernel's signature instead, which is how `autotune compile` sees exactly what
a launch would compile. Nothing here imports Triton before a kernel is needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from ..autotune.compile import KernelSource
from ..autotune.space import Config, Device
from .checks import aligned

TMA_CAPABILITY = 90
LEAST = 16  # side of the smallest tile that products take

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_gluon() -> bool:
    """Whether Triton's lower-level dialect is what the Hopper kernels are written in (3.6 on)."""
    if not installed():
        return False
    major, minor = importlib.import_module("triton").__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)


def padded(length: int) -> int:
    """The power of two that a tile has for a side of this length."""
    return max(LEAST, 1 << max(length - 1, 0).bit_length())


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """How fp32 is multiplied on tensor cores: six products of bf16 parts keep fp32."""
    if dtype != torch.float32 or device.type == "cpu":
        return "ieee"  # the interpreter is exact
    return "bf16x6" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def bulk_copies(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors (TMA) can address all these tensors on this device."""
    capability = Device.of(device).capability
    # The interpreter (capability 0) runs descriptors too, which is how they are tested there.
    return (capability == 0 or capability >= TMA_CAPABILITY) and all(
        aligned(x) and x.numel() > 0 for x in tensors
    )


def head_tiles(x: torch.Tensor, rows: int, cols: int, *, gluon: bool = False) -> Any:
    """A host-made descriptor of (B, T, H, D) read as (B, H, T, D) in tiles of one head's rows.

    Gluon's descriptors also state the layout of the tile in shared memory.
    """
    batch, length, heads, width = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    # A dimension of size 1 may have any stride; the hardware wants a multiple of 16 bytes.
    strides = [
        16 if size == 1 else stride
        for size, stride in ((batch, stride_b), (heads, stride_h), (length, stride_t))
    ]
    sizes, strides, tile = [batch, heads, length, width], [*strides, 1], [1, 1, rows, cols]
    if gluon:
        return _gluon_descriptor_type()(x, sizes, strides, tile, _layout(tile, x.element_size()))
    return _descriptor_type()(x, sizes, strides, tile)


def stack_tiles(x: torch.Tensor, rows: int, cols: int) -> Any:
    """A host-made descriptor of a stack (B, n, m) in tiles of one matrix; rows may be spaced."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return _descriptor_type()(x, list(x.shape), [*strides[:2], 1], [1, rows, cols])


def matrix_tiles(x: torch.Tensor, rows: int, cols: int, *, gluon: bool = False) -> Any:
    """A host-made descriptor of a contiguous matrix in tiles of (rows, cols)."""
    sizes, strides, tile = list(x.shape), list(x.stride()), [rows, cols]
    if gluon:
        return _gluon_descriptor_type()(x, sizes, strides, tile, _layout(tile, x.element_size()))
    return _descriptor_type()(x, sizes, strides, tile)


@functools.cache
def _descriptor_type() -> Any:
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor


@functools.cache
def _gluon_descriptor_type() -> Any:
    return importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor


def _layout(tile: list[int], size: int) -> Any:
    """The shared-memory layout of a tile whose elements have `size` bytes."""
    return _shared_layout(len(tile), min(128, tile[-1] * size) if tile[-2] > 1 else 0, 8 * size)


@functools.cache
def _shared_layout(rank: int, swizzle: int, bits: int) -> Any:
    """What wgmma reads; without swizzle, of one row: its elements in a line."""
    layouts = importlib.import_module("triton.experimental.gluon.language")
    return layouts.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


@functools.cache
def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


_recorded: list[list[KernelSource]] = []
_warm: dict[tuple[Any, ...], Any] = {}  # compiled kernels


@contextlib.contextmanager
def record_launches() -> Iterator[list[KernelSource]]:
    """Collect the signatures of the launches inside the block instead of running them."""
    sources: list[KernelSource] = []
    _recorded.append(sources)
    try:
        yield sources
    finally:
        _recorded.pop()


def launch(
    op: str,
    kernel: tuple[str, str],
    programs: int,
    device: torch.device,
    config: Config,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    *,
    cooperative: bool = False,
) -> None:
    """Run `programs` programs of a kernel on the current stream of `device`.

    Args:
        op: name for error messages.
        kernel: (module, attribute).
        config: supplies `num_warps` and `num_stages`; its tile REGISTERS, if there is one, is the
            most that a thread may use.
        arguments: run-time arguments by name; None where a constant says it is not read.
        constants: compile-time arguments by name.
        cooperative: all programs run at once, or the launch fails.

    Raises:
        RuntimeError: a first launch while the stream is being captured.
    """
    if _recorded:
        _recorded[-1].append(_source(kernel, config, arguments, constants, cooperative))
        return
    if programs == 0:
        return
    function = _kernel(*kernel)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if device.type != "cuda":
        function[(programs,)](**arguments, **constants, **options)
        return
    if cooperative:
        options["launch_cooperative_grid"] = True
    if config.get("REGISTERS"):
        options["maxnreg"] = config["REGISTERS"]
    kinds = [_kind(x) for x in arguments.values() if type(x) is not int]  # most are, and all loose
    key = (*kernel, device.index, config, *constants.values(), *kinds)
    compiled = _warm.get(key)
    if compiled is not None:
        # Straight to the compiled kernel, without Triton looking for it again.
        values = arguments | constants
        with torch.cuda.device(device):
            compiled[(programs, 1, 1)](*[values[name] for name in function.arg_names])
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"fastweights::{op} (triton, {config.name}) is cold: call it once before capture"
        )
    _refuse_specialised_numbers(function, arguments)
    with torch.cuda.device(device):
        _warm[key] = function[(programs,)](**arguments, **constants, **options)


def _kind(x: Any) -> Any:
    """What of an argument the compiled kernel depends on."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if hasattr(x, "block_shape"):
        return x.base.dtype, *x.block_shape
    return None


def _refuse_specialised_numbers(function: Any, arguments: dict[str, Any]) -> None:
    """A kernel compiled for one value of a number must not be launched with another."""
    for parameter in function.params:
        value = arguments.get(parameter.name)
        if isinstance(value, int) and not parameter.do_not_specialize:
            raise TypeError(f"{function.__name__}: {parameter.name} is not in do_not_specialize")


def _source(
    kernel: tuple[str, str],
    config: Config,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    cooperative: bool,
) -> KernelSource:
    function = _kernel(*kernel)
    _refuse_specialised_numbers(function, arguments)
    annotations = {p.name: p.annotation_type for p in function.params if not p.is_constexpr}
    loose = {p.name for p in function.params if p.do_not_specialize_on_alignment}
    signature: dict[str, str] = {}
    absent: dict[str, None] = {}
    divisible: list[str] = []
    for name, value in arguments.items():
        if value is None:
            absent[name] = None  # Triton itself treats a None argument as a constant
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if name not in loose:
                divisible.append(name)
        elif annotations[name]:
            signature[name] = annotations[name]
        else:
            tile = ", ".join(map(str, value.block_shape))
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's have one
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}[{tile}]{layout}>"
    return KernelSource(
        module=kernel[0],
        name=kernel[1],
        signature=signature,
        constexprs={**constants, **absent},
        divisible=tuple(divisible),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        registers=config.get("REGISTERS"),
        cooperative=cooperative,
    )
