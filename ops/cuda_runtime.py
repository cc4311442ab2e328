"""CUDA C++ kernels at run time: source → NVRTC → cubin in the cache → module → launch.

An op's `cuda.py` names an instance of a kernel template (`Kernel`) and calls `launch`. The rest is
here: which headers a source takes in, what a cubin depends on, one compilation for all processes,
torch's current device and stream, and CUDA graphs, inside which nothing is compiled.

Imports neither CuPy nor NVRTC before they are needed. Of CuPy it uses the NVRTC binding, RawModule
(by path) and the driver's launch: CuPy's own takes several times as long on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..autotune.compile import CudaSource
from . import cache

CSRC = Path(__file__).resolve().parent.parent / "csrc"
INCLUDE = CSRC / "include"
FLAGS = ("-std=c++17", "-default-device", "-lineinfo")
_INCLUDED = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """An instance of a kernel template.

    Attributes:
        source: file under csrc, "newton_schulz/newton_schulz_sm90.cuh".
        name: C++ expression of the instance, "fastweights::newton_schulz<64, 4>".
    """

    source: str
    name: str


class Cubin(NamedTuple):
    """A compiled instance.

    Attributes:
        code: the machine code, an ELF file.
        symbol: name of the kernel in it.
    """

    code: bytes
    symbol: str


@functools.cache
def missing() -> str | None:
    """None, or what to install before kernels can be compiled and launched."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'fastweights[cuda13]' (or cuda12)"
    try:
        compiler_version()
    except Exception as error:  # CuPy raises what the loader of shared libraries says
        return f"NVRTC does not load ({error}): pip install 'fastweights[cuda13]' (or cuda12)"
    return None


def arch_flag(capability: int) -> str:
    """The architecture as NVRTC names it: 90 → "sm_90a", which alone has wgmma."""
    return f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"


# ---- compiling ----------------------------------------------------------------------------------


def compiled(kernel: Kernel, arch: str) -> Cubin:
    """The cubin of an instance for "sm_90a" and the like, out of the cache or the compiler.

    Needs no GPU. A cubin serves as long as the source, every header of ours that it takes in, the
    flags and the compiler are the same. Of several processes one compiles and the others wait. With
    FASTWEIGHTS_READONLY=1 it is compiled if the cache lacks it, and not kept.

    Raises:
        RuntimeError: CuPy or NVRTC is missing, or the source does not compile: with the compiler's
            first error.
        FileNotFoundError: there is no such source.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    key = _key(kernel, arch)
    found = _cached(key)
    if found is None:
        with cache.lock(f"cubin-{key}"):
            found = _cached(key)
            if found is None:
                found = _compile(kernel, arch)
                _keep(key, kernel, arch, found)
    return found


def _key(kernel: Kernel, arch: str) -> str:
    parts = (kernel.name, arch, *FLAGS, str(compiler_version()), *texts(CSRC / kernel.source))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:32]


def texts(source: Path) -> list[str]:
    """The text of a source and of every header of ours that it takes in, each once, in order.

    Raises:
        FileNotFoundError: no such source. Headers that are not in csrc belong to the compiler.
    """
    found: dict[Path, str] = {}

    def visit(path: Path) -> None:
        if path in found:
            return
        found[path] = path.read_text()
        for name in _INCLUDED.findall(found[path]):
            for folder in (path.parent, INCLUDE):
                header = (folder / name).resolve()
                if header.is_file():
                    visit(header)
                    break

    visit(source.resolve())
    return list(found.values())


def _cached(key: str) -> Cubin | None:
    entry = cache.find("cubin", key)
    if entry is None:
        return None
    notes = json.loads((entry / "kernel.json").read_text())
    return Cubin((entry / "kernel.cubin").read_bytes(), notes["symbol"])


def _keep(key: str, kernel: Kernel, arch: str, cubin: Cubin) -> None:
    if cache.read_only():
        return
    notes = {"source": kernel.source, "name": kernel.name, "arch": arch, "symbol": cubin.symbol}
    files = {"kernel.cubin": cubin.code, "kernel.json": json.dumps(notes, indent=1).encode()}
    cache.keep(files, "cubin", key)


def _compile(kernel: Kernel, arch: str) -> Cubin:
    nvrtc = _nvrtc()
    path = CSRC / kernel.source
    program = nvrtc.createProgram(path.read_text(), str(path), [], [])
    try:
        nvrtc.addNameExpression(program, kernel.name)
        options = [f"-arch={arch}", f"-I{INCLUDE}", f"-I{path.parent}", *FLAGS]
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(
                f"{kernel.source}, {kernel.name}, {arch}: "
                f"{first_error(nvrtc.getProgramLog(program)) or error}"
            ) from None
        code = nvrtc.getCUBIN(program)
        # CuPy 14 takes the last byte for the zero behind a text. The driver does not miss it, tools
        # that read the file do: an ELF file of 64 bits ends on a multiple of eight bytes.
        code += bytes(-len(code) % 8)
        return Cubin(code, nvrtc.getLoweredName(program, kernel.name))
    finally:
        nvrtc.destroyProgram(program)


def first_error(log: str) -> str:
    """The first line of a compiler's log that is an error, else its first line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


@functools.cache
def _nvrtc() -> Any:
    return importlib.import_module("cupy.cuda").nvrtc


@functools.cache
def compiler_version() -> tuple[int, int]:
    """Major and minor number of NVRTC."""
    return tuple(_nvrtc().getVersion())


# ---- launching ----------------------------------------------------------------------------------

_functions: dict[tuple[int, Kernel], Any] = {}
_recorded: list[list[CudaSource]] = []


@contextlib.contextmanager
def record_launches() -> Iterator[list[CudaSource]]:
    """Collect the launches inside the block instead of running them."""
    sources: list[CudaSource] = []
    _recorded.append(sources)
    try:
        yield sources
    finally:
        _recorded.pop()


def launch(
    op: str,
    kernel: Kernel,
    config: str,
    device: torch.device,
    *,
    grid: int,
    threads: int,
    shared: int,
    arguments: Sequence[Any],
) -> None:
    """Run `grid` blocks of `threads` threads on the current stream of `device`.

    Args:
        op: name for error messages.
        kernel: the instance.
        config: name of the config, for error messages.
        device: of all tensors.
        grid: blocks, along x.
        threads: of a block.
        shared: bytes of dynamic shared memory of a block.
        arguments: tensors, passed as their addresses, and NumPy scalars of the C++ types.

    Raises:
        RuntimeError: a first launch while the stream is being captured; or as `compiled`.
    """
    if _recorded:
        _recorded[-1].append(CudaSource(kernel.source, kernel.name, threads, shared))
        return
    if grid == 0:
        return
    stream = torch.cuda.current_stream(device)
    index = stream.device_index
    elsewhere = index != torch.cuda.current_device()
    with torch.cuda.device(index) if elsewhere else contextlib.nullcontext():
        function = _functions.get((index, kernel))
        if function is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"fastweights::{op} (cuda, {config}) is cold: call it once before capture"
                )
            function = _functions[index, kernel] = _Function(_load(kernel, device))
        function.allow(shared)
        holders = [_held(x) for x in arguments]
        addresses = (ctypes.c_void_p * len(holders))(*map(ctypes.addressof, holders))
        _driver().launchKernel(
            function.address, grid, 1, 1, threads, 1, 1, shared, stream.cuda_stream,
            ctypes.addressof(addresses), 0,
        )  # fmt: skip


class _Function:
    """A kernel on a device, and the most dynamic shared memory that it was allowed."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._shared = loaded.max_dynamic_shared_size_bytes
        self.address = loaded.kernel.ptr

    def allow(self, shared: int) -> None:
        if shared > self._shared:
            self._loaded.max_dynamic_shared_size_bytes = shared
            self._shared = shared


_NUMBERS = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.float32: ctypes.c_float}


def _held(argument: Any) -> Any:
    """What the driver copies an argument from: a tensor's address, a number, or a struct."""
    if isinstance(argument, torch.Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    number = _NUMBERS.get(type(argument))
    if number is not None:
        return number(argument.item())
    content = argument.tobytes()
    return (ctypes.c_char * len(content)).from_buffer_copy(content)


@functools.cache
def _driver() -> Any:
    return importlib.import_module("cupy.cuda").driver


def _load(kernel: Kernel, device: torch.device) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compiled(kernel, arch_flag(10 * major + minor))
    raw_module = importlib.import_module("cupy").RawModule
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.code)
        file.flush()
        return raw_module(path=file.name).get_function(cubin.symbol)
