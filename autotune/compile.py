"""What the compilers make of each config, Triton's and CUDA C++'s, without a GPU.

`fastweights autotune compile --target sm_90 polar_attention` compiles every config of an
op for that target in parallel processes, reads registers, stack, shared memory and the kind of
matrix instruction, and fails if a config does not compile, does not fit into a block, spills, does
not use the matrix instruction that it states, or holds a fault that only the machine code shows
(`sass`).

An op takes part by a function `compile_cases(target, quick)` in its `tuning.py`, which returns a
list of `CompileCase`; the function that builds a launch's signature builds theirs too. Nothing
here imports Triton before a kernel is compiled, and kernels travel to the workers by name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import ptx, sass
from .space import Config, Device
from .supervise import end_with


@dataclass(frozen=True)
class Architecture:
    """Per-multiprocessor limits of a GPU architecture.

    Attributes:
        block_shared: bytes of shared memory that one block may use.
        shared: bytes of shared memory of a multiprocessor.
        threads: resident threads.
        blocks: resident blocks.
        multiprocessors: of a card that is widely used.
        registers: 32-bit registers.
    """

    block_shared: int
    shared: int
    threads: int
    blocks: int
    multiprocessors: int
    registers: int = 65536

    def resident(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """Blocks that fit on one multiprocessor at a time.

        Registers are handed out to a warp in steps of 256 within a quarter of the file; each
        block's shared memory is rounded up to 128 bytes after 1 KB kept by the system.
        """
        a_warp = -(-registers // 8) * 8 * 32
        a_block = -(-(shared_bytes + 1024) // 128) * 128
        warps = 4 * (self.registers // 4 // a_warp) if a_warp else self.threads // 32
        return min(
            warps // num_warps,
            self.shared // a_block,
            self.threads // (32 * num_warps),
            self.blocks,
        )


_KB = 1024
ARCHITECTURES = {
    "sm_80": Architecture(163 * _KB, 164 * _KB, 2048, 32, 108),  # A100
    "sm_86": Architecture(99 * _KB, 100 * _KB, 1536, 16, 84),  # A40
    "sm_89": Architecture(99 * _KB, 100 * _KB, 1536, 24, 142),  # L40S
    "sm_90": Architecture(227 * _KB, 228 * _KB, 2048, 32, 132),  # H100
    "sm_100": Architecture(227 * _KB, 228 * _KB, 2048, 32, 148),  # B200
    "sm_120": Architecture(99 * _KB, 100 * _KB, 1536, 24, 188),  # RTX PRO 6000
}


def target_name(target: str) -> str:
    """The name used here for a target: "sm_90a" is "sm_90".

    Raises:
        ValueError: an architecture whose limits are not known.
    """
    name = target.rstrip("a")
    if name not in ARCHITECTURES:
        raise ValueError(f"target must be one of {', '.join(ARCHITECTURES)}, got {target!r}")
    return name


def target_device(target: str) -> Device:
    """The `Device` that a space's `fits` sees for a compile target."""
    name = target_name(target)
    limits = ARCHITECTURES[name]
    return Device(
        name, limits.block_shared, limits.registers, multiprocessors=limits.multiprocessors
    )


@dataclass(frozen=True)
class KernelSource:
    """One specialisation of a Triton kernel, as picklable data.

    Attributes:
        module: importable module that holds the kernel.
        name: the kernel's attribute in that module.
        signature: Triton type of each run-time argument by name ("*bf16", "i32",
            "tensordesc<bf16[128, 64]>").
        constexprs: value of each compile-time argument by name.
        divisible: run-time arguments that are multiples of 16 (pointers: of 16 bytes). Without
            them loads are not vectorised, and it is another kernel.
        num_warps: warps of one program.
        num_stages: depth of the software pipeline.
        cooperative: whether its programs wait for each other.
    """

    module: str
    name: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    cooperative: bool = False

    @property
    def half_precision(self) -> bool:
        """True if an argument holds 16-bit floats."""
        return any(re.search(r"\b(bf16|fp16)\b", kind) for kind in self.signature.values())


@dataclass(frozen=True)
class CudaSource:
    """One instance of a CUDA C++ kernel as a launch uses it, as picklable data.

    Attributes:
        file: under csrc, "newton_schulz/newton_schulz_sm90.cuh".
        name: C++ expression of the instance, "fastweights::newton_schulz<1, 1>".
        threads: of a block.
        shared: bytes of dynamic shared memory of a block.
    """

    file: str
    name: str
    threads: int
    shared: int

    half_precision = True  # all of them multiply 16-bit numbers


Source = KernelSource | CudaSource


@dataclass(frozen=True)
class CompileCase:
    """One kernel of one config of an op's pass.

    Attributes:
        op: op name.
        pass_: the pass of the config's space ("fwd", "bwd").
        config: the config; states the matrix instruction that its kernels should use.
        source: the kernel to compile.
        matrix: overrides `config.matrix`, for a kernel that multiplies no matrices beside one
            that does.
        max_stack: bytes of stack that this kernel may use; None leaves it to the command line.
        serial: that its wgmma run one by one is known: slow, not wrong.
    """

    op: str
    pass_: str
    config: Config
    source: Source
    matrix: str | None = None
    max_stack: int | None = None
    serial: bool = False


@dataclass(frozen=True)
class Report:
    """What the compiler made of a kernel.

    Attributes:
        registers: 32-bit registers of a thread.
        stack_bytes: local memory of a thread; more than zero means spills or indexed arrays.
        shared_bytes: dynamic shared memory of a block.
        matrix: "wgmma", "tcgen05" (Blackwell), "mma", or "fma" where there is none of them.
        serial: True if somewhere each wgmma is waited for before the next one starts.
        unset: wgmma whose matrix descriptor a path through the kernel leaves unset.
        shared_barriers: places in shared memory that hold a barrier and, too, data.
        blocks_per_sm: blocks that fit on one multiprocessor at a time.
        seconds: time taken; short where Triton's own cache holds the result.
        error: None, or why it did not compile (the numbers are 0 then).
    """

    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    matrix: str = "fma"
    serial: bool = False
    unset: int = 0
    shared_barriers: int = 0
    blocks_per_sm: int = 0
    seconds: float = 0.0
    error: str | None = None


def compile_kernel(source: Source, target: str) -> Report:
    """Compile one kernel for a target such as "sm_90" and read its resources.

    Errors of the compiler come back in the report.

    Raises:
        RuntimeError: the kernel was loaded under Triton's interpreter, which compiles nothing.
    """
    if isinstance(source, CudaSource):
        return _compile_cuda(source, target_name(target))
    return _compile_triton(source, target_name(target))


def _compile_cuda(source: CudaSource, name: str) -> Report:
    from ..ops import cuda_runtime

    start = time.perf_counter()
    try:
        kernel = cuda_runtime.Kernel(source.file, source.name)
        arch = cuda_runtime.arch_flag(int(name.removeprefix("sm_")))
        cubin = cuda_runtime.compiled(kernel, arch).code
        registers, stack = _resources(cubin)
        code = _machine_code(cubin)
    except Exception as error:
        return _failed(error, start)
    seconds = time.perf_counter() - start
    blocks = ARCHITECTURES[name].resident(registers, source.shared, source.threads // 32)
    matrix = next((m for word, m in _SASS_MATRIX if re.search(rf"\b{word}\b", code)), "fma")
    serial, unset = sass.serial_wgmma(code), len(sass.unset_descriptors(code))
    return Report(
        registers,
        stack,
        source.shared,
        matrix,
        serial,
        unset,
        blocks_per_sm=blocks,
        seconds=seconds,
    )


_SASS_MATRIX = (("HGMMA", "wgmma"), ("HMMA", "mma"))


def _failed(error: Exception, start: float) -> Report:
    message = " ".join(str(error).split())[-300:]
    seconds = time.perf_counter() - start
    return Report(seconds=seconds, error=f"{type(error).__name__}: {message}")


def _compile_triton(source: KernelSource, name: str) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = _kernel(source)
    constexprs = dict(source.constexprs)
    types = {arg: "constexpr" if arg in constexprs else None for arg in kernel.arg_names}
    signature = {arg: kind or source.signature[arg] for arg, kind in types.items()}
    # As a launch states them, with the empty ones of other pointers and of words: it then finds in
    # Triton's cache what is compiled here.
    aligned = {
        (index,): [["tt.divisibility", 16]] if arg in source.divisible else []
        for index, arg in enumerate(kernel.arg_names)
        if arg in source.divisible
        or source.signature.get(arg, "").startswith("*")
        or isinstance(constexprs.get(arg), str)
    }
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    if source.cooperative:
        options["launch_cooperative_grid"] = True
    start = time.perf_counter()
    try:
        compiled = triton.compile(
            _source_type(kernel)(
                fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned
            ),
            target=GPUTarget("cuda", int(name.removeprefix("sm_")), 32),
            options=options,
        )
        matrix = ptx.matrix_instruction(compiled.asm["ptx"])
        registers, stack = _resources(compiled.asm["cubin"])
        # All that `sass` looks for is about wgmma, and nvdisasm takes 0.4 s to start.
        code = _machine_code(compiled.asm["cubin"]) if matrix == "wgmma" else ""
    except Exception as error:
        return _failed(error, start)
    seconds = time.perf_counter() - start
    shared = compiled.metadata.shared
    blocks = ARCHITECTURES[name].resident(registers, shared, compiled.metadata.num_warps)
    serial, unset = sass.serial_wgmma(code), len(sass.unset_descriptors(code))
    barriers = len(ptx.shared_barriers(compiled.asm["ptx"]))
    return Report(registers, stack, shared, matrix, serial, unset, barriers, blocks, seconds)


def _source_type(kernel: Any) -> Any:
    """The front end of a kernel: Triton's, or that of its lower-level dialect Gluon."""
    if kernel.is_gluon():
        return importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    return importlib.import_module("triton.compiler").ASTSource


def _kernel(source: KernelSource) -> Any:
    from triton.runtime import JITFunction

    kernel = getattr(importlib.import_module(source.module), source.name)
    # Heuristics and autotuners wrap the kernel itself.
    while not isinstance(kernel, JITFunction):
        if type(kernel).__name__ == "InterpretedFunction" or not hasattr(kernel, "fn"):
            raise RuntimeError(
                f"{source.module}.{source.name} is a {type(kernel).__name__}, not a compiled "
                "kernel; compile in a process without TRITON_INTERPRET"
            )
        kernel = kernel.fn
    return kernel


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of the one kernel in a cubin."""
    usage = _said("cuobjdump", "--dump-resource-usage", cubin)
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    if registers is None or stack is None:
        raise ValueError(f"no resource usage in the output of cuobjdump: {usage!r}")
    return int(registers[1]), int(stack[1])


def _machine_code(cubin: bytes) -> str:
    """The instructions and labels of a cubin, as `sass` reads them."""
    return _said("nvdisasm", "-c", cubin)


def _said(tool: str, option: str, cubin: bytes) -> str:
    """What a tool in Triton's package prints of a cubin."""
    import triton

    path = getattr(triton.knobs.nvidia, tool).path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = (path, option, file.name)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def expected_matrix(matrix: str, target: str) -> str:
    """What a config's `matrix` becomes on a target: wgmma exists on Hopper alone."""
    if matrix != "wgmma":
        return matrix
    return {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(target_name(target), "mma")


def problem(case: CompileCase, report: Report, target: str, max_stack: int = 0) -> str | None:
    """Why a case fails the check; None if it passes."""
    if report.error is not None:
        return report.error
    limit = ARCHITECTURES[target_name(target)].block_shared
    if report.shared_bytes > limit:
        return f"{report.shared_bytes} bytes of shared memory, a block has {limit}"
    allowed = max_stack if case.max_stack is None else case.max_stack
    if report.stack_bytes > allowed:
        return f"{report.stack_bytes} bytes of stack, allowed {allowed}"
    expected = expected_matrix(case.matrix or case.config.matrix, target)
    if case.source.half_precision:  # fp32 multiplies parts of its operands, made between products
        if report.matrix != expected:
            return f"uses {report.matrix}, the config states {expected}"
        if report.serial and not case.serial:
            return "its wgmma run one by one"
    if report.unset:
        return f"{report.unset} wgmma read a descriptor that a path leaves unset"
    if report.shared_barriers:
        return f"{report.shared_barriers} barriers in shared memory that holds data, too"
    return None


@contextlib.contextmanager
def _without_interpreter() -> Iterator[None]:
    """Start workers without TRITON_INTERPRET: Triton reads it while its modules are imported."""
    value = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if value is not None:
            os.environ["TRITON_INTERPRET"] = value


def compile_all(
    sources: Sequence[Source],
    target: str,
    *,
    workers: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Compile many kernels in parallel processes; reports come in the order of `sources`.

    A kernel on which the compiler dies costs its own report only. `progress` is called after each.
    """
    from tqdm import tqdm

    workers = min(workers or os.cpu_count() or 1, max(len(sources), 1))
    # fp32 kernels take the compiler longest: the last of them should not be waited for alone.
    order = sorted(range(len(sources)), key=lambda index: sources[index].half_precision)
    reports: dict[int, Report] = {}
    with _without_interpreter():
        with _pool(workers) as pool, tqdm(total=len(sources), unit="kernel", disable=None) as bar:
            futures = {
                pool.submit(compile_kernel, sources[index], target): index for index in order
            }
            for future in as_completed(futures):
                with contextlib.suppress(BrokenProcessPool):
                    reports[futures[future]] = future.result()
                    bar.update()
                    progress()
        # A dead worker takes the pool along; alone, each remaining kernel answers for itself.
        for index in sorted(set(range(len(sources))) - set(reports)):
            with _pool(1) as pool:
                try:
                    reports[index] = pool.submit(compile_kernel, sources[index], target).result()
                except BrokenProcessPool:
                    reports[index] = Report(error="the compiler's process died")
    return [reports[index] for index in range(len(sources))]


def _pool(workers: int) -> ProcessPoolExecutor:
    """Processes that end with this one, also if it is killed."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, spawn, initializer=end_with, initargs=(os.getpid(),))


Group = tuple[CompileCase, ...]


def grouped(cases: Sequence[CompileCase]) -> list[Group]:
    """Cases of one pass that compile the same kernel, in order: it is compiled and shown once."""
    groups: dict[tuple[str, str, str], Group] = {}
    for case in cases:
        key = (case.op, case.pass_, repr(case.source))
        groups[key] = (*groups.get(key, ()), case)
    return list(groups.values())


def _configs(group: Group) -> str:
    names = list(dict.fromkeys(case.config.name for case in group))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _problem(group: Group, report: Report, target: str, max_stack: int) -> str | None:
    reasons = (problem(case, report, target, max_stack) for case in group)
    return next(filter(None, reasons), None)


def _table(groups: Sequence[Group], reports: Sequence[Report]) -> str:
    from tabulate import tabulate

    rows = [
        {
            "op": group[0].op,
            "pass": group[0].pass_,
            "config": _configs(group),
            "kernel": group[0].source.name,
            "registers": report.registers,
            "stack": report.stack_bytes,
            "shared KB": f"{report.shared_bytes / _KB:.1f}",
            "matrix": report.matrix + (" (serial)" if report.serial else ""),
            "CTAs/SM": report.blocks_per_sm,
            "seconds": f"{report.seconds:.2f}",
        }
        for group, report in zip(groups, reports, strict=True)
    ]
    return tabulate(rows, headers="keys")


def _document(
    target: str,
    groups: Sequence[Group],
    reports: Sequence[Report],
    problems: Sequence[str | None],
) -> dict[str, Any]:
    from importlib.metadata import version

    rows = [
        {
            "op": group[0].op,
            "pass": group[0].pass_,
            "configs": list(dict.fromkeys(case.config.name for case in group)),
            "kernel": group[0].source.name,
        }
        | asdict(report)
        | {"problem": reason}
        for group, report, reason in zip(groups, reports, problems, strict=True)
    ]
    return {"schema": 1, "target": target, "triton": version("triton"), "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every config passes, 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="fastweights autotune compile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("ops", nargs="+", metavar="OP", help="op folder, e.g. polar_attention")
    parser.add_argument("--target", default="sm_90", help="sm_80, sm_86, sm_89, sm_90, …")
    parser.add_argument("--quick", action="store_true", help="the op's short list of cases")
    parser.add_argument("--max-stack", type=int, default=0, metavar="BYTES", help="allowed stack")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports there too")
    options = parser.parse_args(argv)
    try:
        target = target_name(options.target)
    except ValueError as error:
        parser.error(str(error))

    cases: list[CompileCase] = []
    for op in options.ops:
        module = f"fastweights.ops.{op}.tuning"
        try:
            tuning = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.rpartition(".")[0]):
                raise
            parser.error(f"there is no op {op!r} with a tuning.py")
        cases += tuning.compile_cases(target, options.quick)
    groups = grouped(cases)
    start = time.perf_counter()
    sources = [group[0].source for group in groups]
    reports = compile_all(sources, target, workers=options.workers)
    problems = [
        _problem(group, report, target, options.max_stack)
        for group, report in zip(groups, reports, strict=True)
    ]
    print(_table(groups, reports))
    if options.json is not None:
        document = _document(target, groups, reports, problems)
        options.json.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    for group, reason in zip(groups, problems, strict=True):
        if reason is not None:
            op, pass_, kernel = group[0].op, group[0].pass_, group[0].source.name
            print(f"FAILED {op} {pass_} {_configs(group)} {kernel}: {reason}")
    failures = sum(reason is not None for reason in problems)
    seconds = time.perf_counter() - start
    print(f"{target}: {len(groups)} kernels, {failures} failed, {seconds:.1f} s")
    return 1 if failures or not groups else 0


if __name__ == "__main__":
    sys.exit(main())
