"""The compile report reads registers, stack, shared memory and matrix instructions as they are.

Triton's interpreter replaces kernels when their module is imported, so whatever compiles runs in
a process of its own without it.
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from fastweights.autotune import Config
from fastweights.autotune import compile as report_

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).resolve().parent


def product(m=128, n=128, k=64, num_warps=4, num_stages=2):
    return report_.KernelSource(
        module="probe_kernels",
        name="product",
        signature={"a": "*bf16", "b": "*bf16", "c": "*fp32", "steps": "i32"},
        constexprs={"M": m, "N": n, "K": k},
        divisible=("a", "b", "c"),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def double(block=1024, divisible=("x", "y")):
    return report_.KernelSource(
        module="probe_kernels",
        name="double",
        signature={"x": "*bf16", "y": "*bf16"},
        constexprs={"BLOCK": block},
        divisible=divisible,
    )


def broken():
    return report_.KernelSource(
        module="probe_kernels", name="broken", signature={"x": "*fp32"}, constexprs={"BLOCK": 3}
    )


def environment(**extra):
    paths = [str(HERE), *(path for path in sys.path if path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | extra


def compile_elsewhere(jobs, tmp_path, **extra):
    """Reports of [(source, target), …], compiled in one fresh process without the interpreter."""
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs))
    script = (
        "import pickle, sys\n"
        "from fastweights.autotune.compile import compile_kernel\n"
        "jobs = pickle.load(open(sys.argv[1], 'rb'))\n"
        "reports = [compile_kernel(*job) for job in jobs]\n"
        "pickle.dump(reports, open(sys.argv[2], 'wb'))\n"
    )
    env = environment(TRITON_CACHE_DIR=str(tmp_path / "cache"), **extra)
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script, str(tmp_path / "jobs"), str(tmp_path / "reports")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return pickle.loads((tmp_path / "reports").read_bytes())


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Every compilation these tests read, made once."""
    jobs = {
        "sm_90": (product(), "sm_90"),
        "sm_90a": (product(), "sm_90a"),
        "sm_80": (product(), "sm_80"),
        "sm_100": (product(), "sm_100"),
        "small tile": (product(m=64, n=64, k=32), "sm_90"),
        "deeper": (product(num_stages=4), "sm_90"),
        "spills": (product(n=256, num_warps=4), "sm_80"),
        "too wide for wgmma": (product(n=256, num_warps=4), "sm_90"),
        "no product": (double(), "sm_90"),
        "broken": (broken(), "sm_90"),
    }
    tmp_path = tmp_path_factory.mktemp("compile")
    return dict(zip(jobs, compile_elsewhere(list(jobs.values()), tmp_path), strict=True))


def test_matrix_instruction_follows_the_target(reports):
    found = {name: reports[name].matrix for name in ("sm_90", "sm_80", "sm_100", "no product")}
    assert found == {"sm_90": "wgmma", "sm_80": "mma", "sm_100": "tcgen05", "no product": "fma"}


def test_sm_90a_names_the_same_target(reports):
    fields = ("registers", "stack_bytes", "shared_bytes", "matrix", "blocks_per_sm")
    first, second = reports["sm_90"], reports["sm_90a"]
    assert [getattr(first, f) for f in fields] == [getattr(second, f) for f in fields]


def test_resources_are_those_of_the_kernel(reports):
    whole, small, deeper = reports["sm_90"], reports["small tile"], reports["deeper"]
    # The fp32 accumulator alone takes 128·128 / 128 threads = 128 registers, 32 for 64 × 64.
    assert 128 < whole.registers <= 255
    assert 32 < small.registers < whole.registers
    # A bf16 operand pair of 128×64 and 64×128 is 32 KB a stage; two more stages are 64 KB more.
    assert whole.shared_bytes >= 32 << 10
    assert deeper.shared_bytes - whole.shared_bytes == 64 << 10
    assert whole.stack_bytes == 0
    assert reports["no product"].shared_bytes == 0


def test_spills_are_seen(reports):
    # 128·256 accumulators over 128 threads are 256 registers, one more than a thread can have.
    assert reports["spills"].registers == 255
    assert reports["spills"].stack_bytes > 0


def test_wgmma_that_run_one_by_one_are_seen(reports):
    # Without registers to keep products in flight, ptxas waits for each of them.
    serial = {name for name, report in reports.items() if report.serial}
    assert serial == {"too wide for wgmma"}


def test_only_kernels_with_wgmma_are_disassembled(tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "release 12.8" && exit\nexit 3\n')
    tool.chmod(0o755)
    jobs = [(double(), "sm_90"), (product(), "sm_80"), (product(), "sm_90")]
    reports = compile_elsewhere(jobs, tmp_path, TRITON_NVDISASM_PATH=str(tool))
    assert [report.matrix for report in reports[:2]] == ["fma", "mma"]
    assert [report.error for report in reports[:2]] == [None, None]
    assert "nvdisasm" in reports[2].error


def test_a_kernel_that_does_not_compile_reports_the_error(reports):
    report = reports["broken"]
    assert "power of 2" in report.error
    assert report.registers == 0


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "blocks"),
    [
        (168, 0, 4, 3),  # 65536 registers // (168·128) = 3
        (128, 0, 4, 4),
        (129, 0, 4, 3),  # rounded up to 136: 3 warps a quarter
        (255, 0, 8, 1),
        (32, 99 << 10, 4, 2),  # two blocks of 99 + 1 KB in 228 KB
        (32, 227 << 10, 4, 1),
        (16, 0, 1, 32),  # no more than 32 blocks
        (32, 0, 32, 2),  # no more than 2048 threads
    ],
)
def test_resident_blocks_of_sm_90(registers, shared_bytes, num_warps, blocks):
    hopper = report_.ARCHITECTURES["sm_90"]
    assert hopper.resident(registers, shared_bytes, num_warps) == blocks


def case(source=None, config=None, **fields):
    return report_.CompileCase(
        "probe", "fwd", config or Config.make(M=128), source or product(), **fields
    )


GOOD = report_.Report(registers=128, shared_bytes=64 << 10, matrix="wgmma", blocks_per_sm=3)


def changed(**fields):
    return dataclasses.replace(GOOD, **fields)


def test_problem_passes_a_good_report():
    assert report_.problem(case(), GOOD, "sm_90") is None
    assert report_.problem(case(), changed(matrix="mma"), "sm_80") is None
    assert report_.problem(case(), changed(matrix="tcgen05"), "sm_100") is None
    single = dataclasses.replace(product(), signature={"a": "*fp32", "b": "*fp32", "c": "*fp32"})
    assert report_.problem(case(single), changed(matrix="fma"), "sm_90") is None
    assert report_.problem(case(single), changed(serial=True), "sm_90") is None
    assert report_.problem(case(serial=True), changed(serial=True), "sm_90") is None


@pytest.mark.parametrize(
    ("report", "target", "words"),
    [
        (changed(error="it broke"), "sm_90", "it broke"),
        (changed(matrix="mma"), "sm_90", "uses mma, the config states wgmma"),
        (changed(stack_bytes=8), "sm_90", "8 bytes of stack, allowed 0"),
        (changed(serial=True), "sm_90", "its wgmma run one by one"),
        (changed(shared_barriers=1), "sm_90", "1 barriers in shared memory that holds data, too"),
        (changed(unset=2), "sm_90", "2 wgmma read a descriptor that a path leaves unset"),
        (changed(shared_bytes=228 << 10), "sm_90", "bytes of shared memory"),
        (changed(shared_bytes=100 << 10, matrix="mma"), "sm_89", "bytes of shared memory"),
    ],
)
def test_problem_names_what_is_wrong(report, target, words):
    assert words in report_.problem(case(), report, target)


def test_a_case_may_allow_stack_and_name_its_own_matrix_instruction():
    spilling = changed(stack_bytes=8, matrix="fma")
    assert report_.problem(case(matrix="fma", max_stack=8), spilling, "sm_90") is None
    assert report_.problem(case(matrix="fma"), spilling, "sm_90", max_stack=8) is None
    assert report_.problem(case(matrix="fma", max_stack=4), spilling, "sm_90", max_stack=8)


def test_unknown_target_is_an_error():
    with pytest.raises(ValueError, match="sm_70"):
        report_.target_device("sm_70")
    assert report_.target_device("sm_90a").capability == 90


def run_command(tmp_path, *arguments):
    """The command line on an op made of the probe kernels, under TRITON_INTERPRET=1."""
    (tmp_path / "probe.py").write_text(
        "import sys, types\n"
        "from fastweights.autotune import Config\n"
        "from fastweights.autotune.compile import CompileCase, KernelSource, main\n"
        "def source(name, **constexprs):\n"
        "    kinds = {'x': '*fp32', 'y': '*fp32'}\n"
        "    if name == 'broken': del kinds['y']\n"
        "    return KernelSource('probe_kernels', name, kinds, constexprs)\n"
        "def compile_cases(target, quick):\n"
        "    config = Config.make(BLOCK=128, matrix='fma')\n"
        "    other = Config.make(BLOCK=64, matrix='fma')  # the kernel does not depend on it\n"
        "    cases = [CompileCase('probe', 'fwd', c, source('double', BLOCK=128))\n"
        "             for c in (config, other)]\n"
        "    return cases if quick else cases + [\n"
        "        CompileCase('probe', 'bwd', config, source('broken', BLOCK=3))]\n"
        "if __name__ == '__main__':\n"
        "    sys.modules['fastweights.ops.probe'] = types.ModuleType('probe')\n"
        "    tuning = types.ModuleType('tuning')\n"
        "    tuning.compile_cases = compile_cases\n"
        "    sys.modules['fastweights.ops.probe.tuning'] = tuning\n"
        "    sys.exit(main())\n"
    )
    return subprocess.run(
        [sys.executable, str(tmp_path / "probe.py"), *arguments],
        env=environment(TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_command_fails_when_a_config_fails_and_writes_both_forms(tmp_path):
    path = tmp_path / "report.json"
    done = run_command(tmp_path, "probe", "--target", "sm_80", "--json", str(path))
    assert done.returncode == 1, done.stderr
    assert "FAILED probe bwd block128-w4-s2 broken" in done.stdout
    assert "block128-w4-s2 and 1 more" in done.stdout
    assert "sm_80: 2 kernels, 1 failed" in done.stdout
    document = json.loads(path.read_text())
    assert document["target"] == "sm_80"
    good, bad = document["rows"]
    assert (good["kernel"], good["problem"]) == ("double", None)
    assert good["configs"] == ["block128-w4-s2", "block64-w4-s2"]
    assert good["registers"] > 0
    assert bad["problem"] == bad["error"] is not None


def test_command_passes_when_every_config_passes(tmp_path):
    done = run_command(tmp_path, "probe", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sm_90: 1 kernels, 0 failed" in done.stdout


class Pool:
    """One that compiles nothing: registers of a report count the kernels begun before."""

    def __init__(self):
        self.begun = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, source, target):
        future = Future()
        future.set_result(report_.Report(registers=len(self.begun)))
        self.begun.append(source)
        return future


def test_fp32_is_begun_first_and_reports_keep_their_order(monkeypatch):
    pool = Pool()
    monkeypatch.setattr(report_, "_pool", lambda workers: pool)
    sources = [product(), broken(), double(), broken()]
    reports = report_.compile_all(sources, "sm_90")
    assert pool.begun == [sources[i] for i in (1, 3, 0, 2)]
    assert [report.registers for report in reports] == [2, 0, 3, 1]


def test_a_dead_compiler_costs_one_report(tmp_path):
    (tmp_path / "probe_dies.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "script.py").write_text(
        "from fastweights.autotune.compile import KernelSource, compile_all\n"
        "if __name__ == '__main__':\n"
        "    kinds = {'x': '*fp32', 'y': '*fp32'}\n"
        "    modules = ('probe_kernels', 'probe_dies', 'probe_kernels')\n"
        "    sources = [KernelSource(m, 'double', kinds, {'BLOCK': 64}) for m in modules]\n"
        "    print([report.error for report in compile_all(sources, 'sm_90', workers=2)])\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=environment(TRITON_CACHE_DIR=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip() == '[None, "the compiler\'s process died", None]', done.stderr


def test_command_names_an_op_that_does_not_exist():
    done = subprocess.run(
        [sys.executable, "-m", "fastweights.autotune.compile", "no_such_op"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert "there is no op 'no_such_op'" in done.stderr


LAUNCH = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from fastweights.autotune import Config
from fastweights.autotune.compile import compile_kernel
from fastweights.ops import triton_runtime

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

x = torch.zeros(64)
kernel, config = ("probe_kernels", "scaled"), Config.make(num_warps=2, num_stages=3)
arguments, constants = {"x": x, "y": x, "n": 5, "scale": 0.5}, {"HOW": "scale", "BLOCK": 64}
with triton_runtime.record_launches() as sources:
    triton_runtime.launch("probe", kernel, 1, x.device, config, arguments, constants)
assert compile_kernel(sources[0], "sm_90").error is None
seen = []
triton.knobs.compilation.listener = lambda cache_hit, **_: seen.append(cache_hit)
driver.set_active(Hopper())
function = triton_runtime._kernel(*kernel)
function.warmup(**arguments, **constants, num_warps=2, num_stages=3, grid=(1,))
function.warmup(**arguments, **constants, num_warps=4, num_stages=3, grid=(1,))
print(seen)
"""


def test_a_launch_finds_what_was_compiled_beforehand(tmp_path):
    env = environment(TRITON_CACHE_DIR=str(tmp_path / "cache"))
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", LAUNCH]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[True, False]", done.stderr  # other warps are another kernel


def test_a_name_that_is_no_kernel_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    source = report_.KernelSource("probe_kernels", "not_a_kernel", {}, {})
    with pytest.raises(RuntimeError, match="not_a_kernel is a function, not a compiled kernel"):
        report_.compile_kernel(source, "sm_90")
