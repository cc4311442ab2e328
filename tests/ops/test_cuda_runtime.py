"""The run-time compiler of CUDA C++: all of it that needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastweights.ops import cache, cuda_runtime
from fastweights.ops.cuda_runtime import Cubin, Kernel, compiled

needs_compiler = pytest.mark.skipif(
    cuda_runtime.missing() is not None, reason=str(cuda_runtime.missing())
)

SOURCE = """
#include <fastweights/add.cuh>
#include "own.cuh"

template <int N>
__global__ void fill(float* x) { x[threadIdx.x] = add(N, OWN); }
"""
KERNEL = Kernel("probe/probe.cuh", "fill<3>")


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc of its own, and an empty cache."""
    folder = tmp_path / "csrc"
    for name, text in (
        ("probe/probe.cuh", SOURCE),
        ("probe/own.cuh", "#define OWN 4\n"),
        ("include/fastweights/add.cuh", "__device__ float add(float a, float b) { return a + b; }"),
        ("include/fastweights/other.cuh", "#define OTHER 1\n"),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(cuda_runtime, "CSRC", folder)
    monkeypatch.setattr(cuda_runtime, "INCLUDE", folder / "include")
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTWEIGHTS_READONLY", raising=False)
    return folder


def never(*_: object) -> Cubin:
    raise AssertionError("compiled again")


@needs_compiler
def test_compiles_once(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(KERNEL, "sm_90a")
    assert first.code[:4] == b"\x7fELF"
    assert first.symbol.encode() in first.code
    assert len(first.code) % 8 == 0  # whole, for tools that read it
    monkeypatch.setattr(cuda_runtime, "_compile", never)
    assert compiled(KERNEL, "sm_90a") == first
    for other in (Kernel(KERNEL.source, "fill<4>"), KERNEL):
        with pytest.raises(AssertionError, match="compiled again"):
            compiled(other, "sm_80")


@needs_compiler
@pytest.mark.parametrize(
    ("edited", "again"),
    [("probe/probe.cuh", True), ("probe/own.cuh", True), ("include/fastweights/add.cuh", True),
     ("include/fastweights/other.cuh", False)],
)  # fmt: skip
def test_an_edit_compiles_again(
    edited: str, again: bool, csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(KERNEL, "sm_90a")
    path = csrc / edited
    path.write_text(path.read_text() + "\n// edited\n")
    calls = []
    monkeypatch.setattr(cuda_runtime, "_compile", lambda *a: calls.append(a) or Cubin(b"", ""))
    compiled(KERNEL, "sm_90a")
    assert bool(calls) is again


@needs_compiler
def test_an_error_shows_the_first_line_of_the_compiler(csrc: Path) -> None:
    (csrc / "probe/own.cuh").write_text("#define OWN nowhere\n")
    with pytest.raises(RuntimeError, match=r"probe/probe\.cuh, fill<3>, sm_90a: .*error.*nowhere"):
        compiled(KERNEL, "sm_90a")
    assert cache.find("cubin") is None or not list((cache.home() / "cubin").iterdir())


@needs_compiler
def test_a_read_only_cache_is_not_written(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_READONLY", "1")
    assert compiled(KERNEL, "sm_90a").code[:4] == b"\x7fELF"
    assert not cache.home().exists()


@needs_compiler
def test_processes_compile_once(csrc: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""
import pathlib
from fastweights.ops import cuda_runtime as runtime
runtime.CSRC = pathlib.Path({str(csrc)!r}); runtime.INCLUDE = runtime.CSRC / "include"
compile = runtime._compile
def counted(*a):
    with open({str(log)!r}, "a") as file: file.write("compiled\\n")
    return compile(*a)
runtime._compile = counted
print(runtime.compiled(runtime.Kernel("probe/probe.cuh", "fill<3>"), "sm_90a").symbol)
"""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=os.environ, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    symbols = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(symbols) == 1
    assert log.read_text() == "compiled\n"


def test_missing_source(csrc: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cuda_runtime.texts(csrc / "nowhere.cuh")


def test_first_error() -> None:
    log = "warning: something\n\na.cu(3): error: no such thing\na.cu(4): error: neither this\n"
    assert cuda_runtime.first_error(log) == "a.cu(3): error: no such thing"
    assert cuda_runtime.first_error("") == ""


def test_arch() -> None:
    assert [cuda_runtime.arch_flag(x) for x in (80, 89, 90, 100)] == [
        "sm_80", "sm_89", "sm_90a", "sm_100a",
    ]  # fmt: skip


def test_arguments_are_held_as_the_kernel_reads_them() -> None:
    """Tensors by address, NumPy scalars and structs by value, each in the bytes of its C++ type."""
    x = torch.ones(3)
    struct = np.frombuffer(np.arange(6, dtype=np.float32).tobytes(), dtype="V24")[0]
    values = (x, np.int32(-7), np.int64(1 << 40), np.float32(0.25), struct)
    held = [bytes(cuda_runtime._held(value)) for value in values]
    assert int.from_bytes(held[0], "little") == x.data_ptr()
    assert held[1:] == [value.tobytes() for value in values[1:]]
    assert [len(content) for content in held] == [8, 4, 8, 4, 24]


def test_an_empty_grid_launches_nothing() -> None:
    cuda_runtime.launch(
        "probe", KERNEL, "c", torch.device("cpu"), grid=0, threads=1, shared=0, arguments=()
    )


# ---- the cache ----------------------------------------------------------------------------------


def test_an_entry_is_whole_and_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path))
    path = cache.keep({"a": b"1", "b": b"2"}, "cubin", "x")
    assert {x.name: x.read_bytes() for x in path.iterdir()} == {"a": b"1", "b": b"2"}
    assert cache.keep({"a": b"3"}, "cubin", "x") == path
    assert (path / "a").read_bytes() == b"1"
    assert [x.name for x in path.parent.iterdir()] == ["x"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path))
    write = Path.write_bytes

    def full_after_one(path: Path, content: bytes) -> int:
        if path.name == "b":
            raise OSError("No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_after_one)
    with pytest.raises(OSError, match="No space"):
        cache.keep({"a": b"1", "b": b"2"}, "cubin", "x")
    assert list((tmp_path / "cubin").iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", "/a/b")
    assert cache.home() == Path("/a/b")
    monkeypatch.delenv("FASTWEIGHTS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache.home() == Path("/c/fastweights")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.home() == Path("~/.cache/fastweights").expanduser()


def test_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("FASTWEIGHTS_READONLY", "1")
    with pytest.raises(PermissionError, match="FASTWEIGHTS_READONLY"):
        cache.keep({}, "x")
    with cache.lock("free"):
        assert not (tmp_path / "none").exists()
    monkeypatch.setenv("FASTWEIGHTS_READONLY", "yes")
    with pytest.raises(ValueError, match="FASTWEIGHTS_READONLY"):
        cache.read_only()
