"""The CUDA C++ kernels on the host: their text, with the verbs of `csrc/include` emulated.

`host/` runs one block, a host thread for each of its threads, and has the products and moves of
matrices do what the PTX manual says. That proves indices, layouts of tiles and barriers, and every
formula, on any machine; whether the hardware reads a descriptor as we do, a GPU has to show.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fastweights.autotune import sass
from fastweights.autotune.compile import _machine_code, _resources
from fastweights.ops import cuda_runtime
from fastweights.ops.cuda_runtime import Kernel

HOST = Path(__file__).parent / "host"
COMPILER = shutil.which("g++")


@pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64",
    reason="needs g++ on x86-64: the emulation rounds by its F16C instructions",
)
def test_newton_schulz_on_the_host(tmp_path: Path) -> None:
    program = tmp_path / "newton_schulz"
    csrc = cuda_runtime.CSRC
    command = [
        str(COMPILER), "-std=c++20", "-O2", "-mf16c", "-pthread", "-Wno-unknown-pragmas", "-Werror",
        f"-I{HOST}", f"-I{csrc / 'include'}", f"-I{csrc}",
        str(HOST / "newton_schulz.cpp"), "-o", str(program),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=120)
    ran = subprocess.run([str(program)], timeout=400, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kernels = {line.split("-")[0] for line in ran.stdout.splitlines()}
    assert kernels == {
        "formula", "small", "tiles", "256", "wide", "stack",
        "small_backward", "tiles_backward", "256_backward", "stack_backward",
    }  # fmt: skip


# Source, instance, architecture, and bytes of stack that it may use.
INSTANCES = (
    ("sm80", "newton_schulz_small<2, fastweights::bfloat16>", "sm_80", 0),
    ("sm90", "newton_schulz<1, 1, false, fastweights::bfloat16>", "sm_90a", 0),
    ("sm90", "newton_schulz<2, 2, true, fastweights::half>", "sm_90a", 24),
    ("sm90", "newton_schulz_backward<1, 1, false, fastweights::half>", "sm_90a", 24),
    ("sm90", "newton_schulz_backward<1, 4, false, fastweights::bfloat16>", "sm_90a", 0),
    ("sm90", "newton_schulz_backward<2, 2, false, fastweights::half>", "sm_90a", 0),
    ("sm80", "newton_schulz_small_backward<2, fastweights::bfloat16>", "sm_80", 0),
    ("stack_sm80", "newton_schulz_stack<1, 1, false, fastweights::half>", "sm_80", 0),
    ("stack_sm80", "newton_schulz_stack<2, 4, true, fastweights::bfloat16>", "sm_80", 8),
    ("stack_sm80", "newton_schulz_stack_backward<1, 1, true, fastweights::bfloat16>", "sm_80", 8),
    ("stack_sm80", "newton_schulz_stack_backward<1, 2, false, fastweights::half>", "sm_80", 8),
    ("stack_sm80", "newton_schulz_stack_backward<2, 2, true, fastweights::half>", "sm_80", 0),
    ("stack_sm80", "newton_schulz_stack_backward<2, 4, true, fastweights::half>", "sm_80", 0),
    ("sm90", "newton_schulz_backward<2, 3, true, fastweights::half>", "sm_90a", 0),
    ("sm90", "newton_schulz_backward<2, 4, false, fastweights::half>", "sm_90a", 0),
    ("wide_sm90", "newton_schulz_wide<1, 16, true, fastweights::half>", "sm_90a", 0),
    ("wide_sm90", "newton_schulz_wide<2, 8, false, fastweights::bfloat16>", "sm_90a", 0),
    ("256_sm90", "newton_schulz_256<false, fastweights::bfloat16>", "sm_90a", 120),
    # Addresses that a loop needs wait there; no accumulator does.
    ("256_backward_sm90", "newton_schulz_256_backward<false, fastweights::half>", "sm_90a", 64),
    ("256_backward_sm90", "newton_schulz_256_backward<true, fastweights::bfloat16>", "sm_90a", 64),
)


def ptx(kernel: Kernel) -> str:
    """What NVRTC hands to ptxas."""
    nvrtc = cuda_runtime._nvrtc()
    path = cuda_runtime.CSRC / kernel.source
    program = nvrtc.createProgram(path.read_text(), str(path), [], [])
    nvrtc.addNameExpression(program, kernel.name)
    include = [f"-I{cuda_runtime.INCLUDE}", f"-I{path.parent}"]
    nvrtc.compileProgram(program, ["-arch=compute_90a", *include, *cuda_runtime.FLAGS])
    text = nvrtc.getPTX(program)
    return text.decode() if isinstance(text, bytes) else text


@pytest.mark.skipif(cuda_runtime.missing() is not None, reason=str(cuda_runtime.missing()))
@pytest.mark.parametrize(("source", "name", "arch", "stack"), INSTANCES, ids=lambda x: str(x))
def test_compiles_as_meant(
    source: str, name: str, arch: str, stack: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    kernel = Kernel(f"newton_schulz/newton_schulz_{source}.cuh", f"fastweights::{name}")
    cubin = cuda_runtime.compiled(kernel, arch).code
    registers, used = _resources(cubin)
    code = _machine_code(cubin)
    assert used <= stack, f"{registers} registers, {used} bytes of stack"
    # ptxas 13.0 was seen to take two products for one.
    products = len(re.findall(r"\bHGMMA\.64x64", code))
    assert products == ptx(kernel).count("wgmma.mma_async")
    assert bool(products) == (arch == "sm_90a")
    assert not sass.serial_wgmma(code)
    assert sass.unset_descriptors(code) == []
