"""Many processes, many lengths, small devices: what a table must not break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastweights.autotune import Device
from fastweights.autotune.compile import ARCHITECTURES, target_device
from fastweights.ops import cuda_runtime
from fastweights.ops.newton_schulz import cuda_spaces as newton_schulz_cuda
from fastweights.ops.newton_schulz import triton_large
from fastweights.ops.newton_schulz import triton_spaces as newton_schulz
from fastweights.ops.polar_attention import triton_spaces as polar

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 8

COLD = """
import pathlib, sys, torch
from fastweights.autotune import Config, Device, Space, choose, source, space, tables
from fastweights.ops import cuda_runtime as runtime

number, folder, log = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
runtime.CSRC, runtime.INCLUDE = folder, folder / "include"
compile = runtime._compile
def counted(*arguments):
    with open(log, "a") as file: file.write("compiled\\n")
    return compile(*arguments)
runtime._compile = counted

configs = Config.make(BLOCK=64), Config.make(BLOCK=128)
probe = Space("probe", "fwd", "triton", configs, lambda *_: None, tuple, lambda *_: configs[0])
device = Device("sm_90", 1 << 20, name="nvidia-test")
first = choose(probe, (0,), device)  # reads the cache, in which there is nothing yet
cubin = runtime.compiled(runtime.Kernel("probe.cuh", "fill<3>"), "sm_90a")
row = tables.Row(
    "probe", "fwd", "triton", tables.named((number,)), "bf16", "p", configs[1].name,
    configs[1].name, configs[0].name, {c.name: 1.0 for c in configs}, 0.5,
    source.fingerprint(probe), {},
)
path = tables.path_of(device.name)
tables.update(path, tables.Table(device.name, device.arch, (row,)))
space.reload()
print(first.name, choose(probe, (number,), device).name, cubin.symbol, len(cubin.code))
"""


@pytest.mark.skipif(cuda_runtime.missing() is not None, reason=str(cuda_runtime.missing()))
def test_eight_processes_start_cold_on_one_cache(tmp_path: Path) -> None:
    """They compile one kernel once, and each finds its own row in the one table they write."""
    csrc, log = tmp_path / "csrc", tmp_path / "compiled"
    (csrc / "include").mkdir(parents=True)
    text = "template <int N> __global__ void fill(float* x) { x[threadIdx.x] = N; }"
    (csrc / "probe.cuh").write_text(text)
    cache = tmp_path / "cache"
    environment = os.environ | {"FASTWEIGHTS_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COLD, str(i), str(csrc), str(log)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(PROCESSES)
    ]  # fmt: skip
    said = [process.communicate(timeout=250) for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES, said
    assert len({out for out, _ in said}) == 1, said
    assert said[0][0].startswith("block64-w4-s2 block128-w4-s2 ")
    assert log.read_text() == "compiled\n"
    rows = json.loads((cache / "tables" / "nvidia-test.json").read_text())["rows"]
    assert sorted(row["bucket"]["0"] for row in rows) == list(range(PROCESSES))
    assert not [path for path in cache.rglob("*") if path.name.startswith(".")]
    assert len(list((cache / "cubin").iterdir())) == 1


LENGTHS = """
import json, sys, torch
from dataclasses import replace
from fastweights.autotune import Device, tables
from fastweights.autotune.compile import compile_all
from fastweights.autotune.space import assume_device
from fastweights.ops import triton_runtime
from fastweights.ops.polar_attention import triton, tuning
from fastweights.ops.polar_attention.op import Lengths, NullParameters

device = Device("sm_90", 232448, multiprocessors=132, name="nvidia-test")
passes = {"fwd": triton.SPACE_FWD, "bwd": triton.SPACE_BWD}
found, chosen = {}, {}

def meta(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")

def write(distinct):
    rows = []
    for name, space in passes.items():
        for short in (True, False):
            shape = replace(tuning._compile_shape(torch.bfloat16, 64), tq=9000, tk=9000)
            if short: shape = replace(shape, tq=1000, tk=1000)
            key = space.bucket(shape)
            fitting = space.fitting(key, device)
            config = fitting[short if distinct else 0].name
            rows.append(tables.Row(
                "polar_attention", name, "triton", tables.named(key), "bf16", "p", config, config,
                config, {config: 1.0}, 0.5, "0" * 16, {}))
    table = tables.Table("nvidia-test", "sm_90", tuple(rows))
    tables.path_of("nvidia-test").parent.mkdir(parents=True, exist_ok=True)
    tables.path_of("nvidia-test").write_bytes(tables.dump(table))

write(sys.argv[1] == "two")
with assume_device(device):
    for length in range(1000, 9001, 205):
        shape = replace(tuning._compile_shape(torch.bfloat16, 64), tq=length, tk=length)
        q = meta(1, length, 2, 64, dtype=torch.bfloat16)
        k = meta(1, length, 1, 64, dtype=torch.bfloat16)
        null = NullParameters(meta(2, 64), *(meta(2) for _ in range(4)))
        rows = [meta(1, 2, length) for _ in range(3)]
        count = meta(1, length, 2, dtype=torch.bfloat16)
        with triton_runtime.record_launches() as sources:
            triton.fwd(shape, q, k, k, null, Lengths(None, None, None))
            triton.bwd(shape, q, count, q, k, k, null, Lengths(None, None, None), q, *rows)
        for source in sources:
            found.setdefault(source.name, {})[repr(source)] = source
print(json.dumps({
    "kernels": {name: len(sources) for name, sources in found.items()},
    "sweeps": [name for name in sys.modules if name.startswith("fastweights.autotune.sweep")],
}))
if sys.argv[1] == "one":
    seen = []
    import triton as compiler
    compiler.knobs.compilation.listener = lambda cache_hit, **_: seen.append(cache_hit)
    from fastweights.autotune.compile import compile_kernel
    assert all(compile_kernel(x, "sm_90").error is None for s in found.values() for x in s.values())
    print(json.dumps(seen))
"""


def lengths(tmp_path: Path, configs: str) -> list[str]:
    environment = os.environ | {
        "FASTWEIGHTS_CACHE": str(tmp_path / "cache"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", LENGTHS, configs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("configs", "most"), [("one", 1), ("two", 2)])
def test_forty_lengths_sweep_nothing_and_compile_no_more_than_the_table_has_configs(
    configs: str, most: int, tmp_path: Path
) -> None:
    said = lengths(tmp_path, configs)
    found = json.loads(said[0])
    assert found["sweeps"] == []
    assert {"attention_fwd", "attention_bwd_dkdv", "attention_bwd_dq"} <= set(found["kernels"])
    assert max(found["kernels"].values()) == most, found
    if configs == "one":
        first = json.loads(said[1])
        assert first == [False] * len(found["kernels"])
        assert json.loads(lengths(tmp_path, configs)[1]) == [True] * len(first)


# ---- a device with 99 KB ------------------------------------------------------------------------

SMALL = {
    "a Hopper with 99 KB": replace(target_device("sm_90"), shared_bytes=99 << 10),
    "sm_86": target_device("sm_86"),
    "sm_89": target_device("sm_89"),
    "sm_120": target_device("sm_120"),
}


def polar_keys() -> list[polar.Bucket]:
    return [
        polar.Bucket(size, width, polar_mode, polar_mode, windowed, deterministic, short, True)
        for size in (2, 4)
        for width in (16, 32, 64, 128, 192, 256)
        for polar_mode in (True, False)
        for windowed in (True, False)
        for deterministic in (True, False)
        for short in (True, False)
    ]


@pytest.mark.parametrize("name", SMALL)
def test_triton_spaces_stay_usable_with_little_shared_memory(name: str) -> None:
    device = SMALL[name]
    for space in (polar.SPACE_FWD, polar.SPACE_BWD):
        for key in polar_keys():
            fitting = space.fitting(key, device)
            assert fitting, (space.name, key)
            assert space.default(key, device) in fitting
    served = [(16, 16), (16, 64), (32, 32), (32, 64), (32, 256), (64, 64), (64, 128)]
    for space in (newton_schulz.SPACE_FWD, newton_schulz.SPACE_BWD):
        for rows, cols in served:
            fitting = space.fitting(newton_schulz.Bucket(2, rows, cols), device)
            assert fitting, (space.name, rows, cols)
    for rows in (16, 32, 64):
        for space in (newton_schulz.SPACE_FACTOR_FWD, newton_schulz.SPACE_FACTOR_BWD):
            assert space.fitting((rows,), device)
    assert triton_large.SPACE_SYMMETRIC.fitting((2,), device)


@pytest.mark.parametrize("name", SMALL)
def test_warp_kernels_stay_and_wgmma_kernels_say_no(name: str) -> None:
    device = SMALL[name]
    space = newton_schulz_cuda.SPACE_FWD
    for side in (16, 32):
        assert space.fitting((side, side), device)  # mma.sync, in registers
    refused = newton_schulz_cuda.refusal(space, (256, 256), device)
    assert refused is not None
    assert space.fitting((256, 256), target_device("sm_90"))


@pytest.mark.slow
def test_what_fits_99_kb_asks_for_no_more_when_compiled(tmp_path: Path) -> None:
    """`fits` estimates; the compiler says what a block takes. The report fails where it is more."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    report = tmp_path / "report.json"
    ops = ("polar_attention", "newton_schulz")
    command = [sys.executable, "-m", "fastweights.autotune.cli", "compile", "--target", "sm_89"]
    command += ["--quick", "--json", str(report), *ops]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    rows = json.loads(report.read_text())["rows"]
    assert {row["op"] for row in rows} == set(ops), done.stderr
    assert all(row["error"] is None and row["shared_bytes"] <= 99 << 10 for row in rows)


def test_every_architecture_of_compile_reports_is_a_device() -> None:
    assert all(
        target_device(name) == Device(name, x.block_shared, multiprocessors=x.multiprocessors)
        for name, x in ARCHITECTURES.items()
    )
