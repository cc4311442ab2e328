"""The sweep: every config is compiled, proved right, and only then timed.

For each case (a bucket of a config space, `cases`):

    compile     all kernels in parallel processes; what does not compile or fit is rejected
    check       small ragged problems against float64 (`check`); then the case's own problem, in
                poisoned memory: no NaN may be left in it, and its bits must repeat
    time        CUDA graphs in turn, the slow ones stopping early (`timing.race`)
    decide      winner and closed-form default timed again, against each other: a win below 2 %
                keeps the default
    write down  the row and every rejected config, into the table and the log

A sweep that ends early, by its budget or by force, goes on where it was when run again.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import source, tables, timing
from .cases import DTYPES, Case
from .check import Check, Tensors, first_difference, is_floating, mapped, named
from .compile import ARCHITECTURES, Report, compile_all
from .log import Log
from .space import Config, Device, reload, use_config
from .timing import first_line

WIN = 1.02  # how much faster than the default a config has to be
WARM_UP = 2
TOGETHER = 16  # cases that are compiled at once, before the first of them is measured


class BrokenDevice(RuntimeError):
    """A kernel left the GPU unusable for this process."""


@dataclass
class Options:
    """How to sweep.

    Attributes:
        device: where.
        out: the table to write.
        log: the file of what is done.
        effort: "quick" (few configs, short timing) or "full".
        deadline: `time.monotonic()` after which nothing new is begun; None is no limit.
        seed: of all inputs.
        workers: processes that compile; None: as many as there are cores.
    """

    device: torch.device
    out: Path
    log: Path
    effort: str = "full"
    deadline: float | None = None
    seed: int = 0
    workers: int | None = None

    @property
    def seconds(self) -> float:
        """Of the timed rounds of a case; half as long again for the last two."""
        return {"quick": 0.3, "full": 1.0}[self.effort]

    @property
    def late(self) -> bool:
        """Whether the budget is spent."""
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass
class Outcome:
    """What a sweep leaves.

    Attributes:
        rows: of the cases that are done, old ones from the log included.
        rejected: all configs that were rejected in these cases.
        hopeless: labels of cases in which no config was right.
        failed: labels of cases that could not be measured, with the error.
        left: labels of cases that the budget did not reach.
    """

    rows: list[tables.Row] = field(default_factory=list)
    rejected: list[tables.Rejected] = field(default_factory=list)
    hopeless: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def shard(cases: Sequence[Case], part: tuple[int, int]) -> list[Case]:
    """Part i of n: every n-th case, the same ones on every machine."""
    index, number = part
    return list(cases[index::number])


def sweep(cases: Sequence[Case], options: Options) -> Outcome:
    """Measure all cases and write the table after each."""
    from tqdm import tqdm

    outcome = Outcome()
    log = Log(options.log)
    with timing.own_stream(options.device):
        works = [_Work(case, options, log) for case in cases]
        pending = [work for work in works if not work.progress.done]
        total = sum(len(work.configs) for work in pending)
        with tqdm(total=total, unit="config", disable=None) as bar:
            for start in range(0, len(pending), TOGETHER):
                group = pending[start : start + TOGETHER]
                _compile(group, options, log)
                for work in group:
                    bar.set_description(work.case.label)
                    work.try_measuring(bar.update)
                    timing.free_memory(options.device)
        for work in works:
            work.report(outcome)
    done = [work for work in works if work.progress.done]
    if done:  # what an earlier run measured may not be in this run's table
        here = Device.of(options.device)
        rejected = [entry for work in done for entry in work.rejected()]
        found = tables.Table(here.name, here.arch, tuple(outcome.rows), tuple(rejected))
        tables.update(options.out, found)
    reload()
    return outcome


def _compile(works: Sequence[_Work], options: Options, log: Log) -> None:
    """Compile what the works will launch; each then knows its kernels' reports."""
    arch = Device.of(options.device).arch
    if arch not in ARCHITECTURES:  # it compiles for itself when it first launches
        return
    wanted: dict[str, Any] = {}
    for work in works:
        if options.late:
            return
        try:
            calls = work.case.calls(options.device)
        except Exception:
            continue  # measuring it will say the same
        for config in work.candidates():
            try:
                found = work.case.sources(config, calls)
            except Exception as error:
                work.reject(config, f"cannot be launched: {first_line(error)}")
                continue
            work.kernels[config.name] = [repr(kernel) for kernel in found]
            wanted |= {repr(kernel): kernel for kernel in found}
        log.touch()
    if wanted:
        compiled = compile_all(
            list(wanted.values()), arch, workers=options.workers, progress=log.touch
        )
        reports = dict(zip(wanted, compiled, strict=True))
        for work in works:
            work.read(reports, {key: kernel.name for key, kernel in wanted.items()})


class _Work:
    """One case on its way through the sweep."""

    def __init__(self, case: Case, options: Options, log: Log) -> None:
        self.case = case
        self.options = options
        self.log = log
        self.here = Device.of(options.device)
        self.source = source.fingerprint(case.space)
        self.compiler = source.compiler(case.space.backend)
        self.bound = f"{self.source} {self.compiler} {self.here.name} {options.effort}"
        self.progress = log.of(case.name, self.bound)
        self.configs = case.configs(self.here, options.effort)
        self.kernels: dict[str, list[str]] = {}
        self.resources: dict[str, list[dict[str, Any]]] = {}
        self.failure: str | None = None

    def open(self) -> list[Config]:
        """Configs of which nothing is known yet."""
        known = self.progress.errors.keys() | self.progress.rejected.keys()
        return [config for config in self.configs if config.name not in known]

    def candidates(self) -> list[Config]:
        """Configs that were not rejected."""
        return [config for config in self.configs if config.name not in self.progress.rejected]

    def right(self) -> list[Config]:
        """Configs that passed their check and were not rejected since."""
        return [config for config in self.candidates() if config.name in self.progress.errors]

    def reject(self, config: Config, reason: str) -> None:
        self.log.write("rejected", self.case.name, self.bound, config=config.name, reason=reason)

    def read(self, reports: dict[str, Report], names: dict[str, str]) -> None:
        """Take the compiler's reports of this case's kernels, and reject by them."""
        limit = min(self.here.shared_bytes, ARCHITECTURES[self.here.arch].block_shared)
        for config in self.candidates():
            kernels = self.kernels.get(config.name, [])
            for key in kernels:
                reason = _unusable(reports[key], limit)
                if reason is not None:
                    self.reject(config, f"{names[key]} {reason}")
                    break
            self.resources[config.name] = [
                {
                    "kernel": names[key],
                    "registers": reports[key].registers,
                    "stack": reports[key].stack_bytes,
                    "shared": reports[key].shared_bytes,
                    "matrix": reports[key].matrix,
                }
                for key in kernels
            ]

    def try_measuring(self, progress: Any) -> None:
        """As `measure`; an error that is not the device's or the files' ends this case alone."""
        try:
            self.measure(progress)
        except (BrokenDevice, OSError, tables.Unreadable):
            raise
        except Exception as error:
            self.failure = first_line(error)

    def measure(self, progress: Any) -> None:
        """Check and time what is not done yet, as far as the budget goes."""
        if self.progress.done or self.options.late:
            return
        call = _Timed(self.case, self.options)
        self._check(call, progress)
        if self.open() or self.options.late:
            return
        row = self._time(call)
        written = None if row is None else asdict(row)
        self.log.write("done", self.case.name, self.bound, row=written)
        new = tables.Table(
            self.here.name, self.here.arch, () if row is None else (row,), self.rejected()
        )
        tables.update(self.options.out, new)

    def report(self, outcome: Outcome) -> None:
        """Add what is known to a sweep's outcome."""
        outcome.rejected += self.rejected()
        if self.failure is not None:
            outcome.failed.append(f"{self.case.label}: {self.failure}")
        elif not self.progress.done:
            outcome.left.append(self.case.label)
        elif self.progress.row is None:
            outcome.hopeless.append(self.case.label)
        else:
            outcome.rows.append(tables.Row(**self.progress.row))

    def rejected(self) -> tuple[tables.Rejected, ...]:
        """The table's entries of the rejected configs."""
        space = self.case.space
        return tuple(
            tables.Rejected(
                space.op, space.pass_, space.backend, tables.named(self.case.key), name, reason,
                self.source, self.compiler, self.here.arch,
            )
            for name, reason in sorted(self.progress.rejected.items())
        )  # fmt: skip

    # ---- check ----------------------------------------------------------------------------------

    def _check(self, call: _Timed, progress: Any) -> None:
        check = None
        for config in self.open():
            if self.options.late:
                return
            if check is None:
                check = self._prepared()
            self.log.write("begin", self.case.name, self.bound, config=config.name)
            reason, error = None, 0.0
            with self._failing(config):
                with use_config(self.case.space, config):
                    verdict = check.ask(self.case.function, config)
                    reason, error = verdict.reason, verdict.error
                    if reason is None:
                        reason = call.fault(config)
                if reason is None:
                    self.log.write(
                        "checked", self.case.name, self.bound, config=config.name, error=error
                    )
                else:
                    self.reject(config, reason)
            progress()

    def _prepared(self) -> Check:
        seeds = (self.options.seed, self.options.seed + 1)
        return Check(
            self.case.problem.checks,
            backward=self.case.backward,
            dtype=DTYPES[self.case.dtype],
            device=self.options.device,
            seeds=seeds,
        )

    @contextlib.contextmanager
    def _failing(self, config: Config) -> Iterator[None]:
        """Turn an exception into a rejection.

        Raises:
            BrokenDevice: the device does not answer any more; the config is rejected before.
        """
        try:
            yield
        except Exception as error:
            # Ending a broken capture raises too; what broke it is that error's context.
            self.reject(config, f"raises {first_line(error.__context__ or error)}")
        if self.options.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.options.device)
            except Exception as error:
                self.reject(config, f"breaks the device: {first_line(error)}")
                raise BrokenDevice(config.name) from error

    # ---- time -----------------------------------------------------------------------------------

    def _time(self, call: _Timed) -> tables.Row | None:
        """The case's row; None if no config is right."""
        replays = {}
        for config in self.right():
            with self._failing(config):
                replays[config.name] = call.replay(config)
        fine = {config.name for config in self.right()}
        replays = {name: run for name, run in replays.items() if name in fine}
        if not replays:
            return None
        default = self.case.space.default(self.case.key, self.here).name
        if default not in replays:
            default = next(iter(replays))  # rejected: there is nothing else to be compared with
        with use_config(self.case.space, self.right()[0]):
            flops, moved = call.work()
        how: dict[str, Any] = {
            "device": self.options.device,
            "cold": moved < 2 * timing.l2_bytes(self.options.device),
            "before": call.restore if call.written else None,
        }
        runs = timing.race(replays, seconds=self.options.seconds, keep=(default,), **how)
        times = {name: statistics.median(found) for name, found in runs.items()}
        winner = min(times, key=lambda name: (times[name], name))
        if winner != default:
            pair = {name: replays[name] for name in (default, winner)}
            again = timing.time_calls(pair, seconds=self.options.seconds / 2, **how)
            times |= {name: statistics.median(found) for name, found in again.items()}
            if times[default] < WIN * times[winner]:
                winner = default
        notes = {
            "bytes": moved,
            "flops": flops,
            "kernels": self.resources.get(winner, []),
            "seed": self.options.seed,
        }
        return self._row(times, winner, default, notes)

    def _row(
        self, times: dict[str, float], winner: str, default: str, notes: dict[str, Any]
    ) -> tables.Row:
        space = self.case.space
        return tables.Row(
            op=space.op,
            pass_=space.pass_,
            backend=space.backend,
            bucket=tables.named(self.case.key),
            dtype=self.case.dtype,
            problem=self.case.problem.name,
            config=winner,
            winner=winner,
            default=default,
            times={name: round(ms, 6) for name, ms in sorted(times.items())},
            error=round(self.progress.errors[winner], 4),
            source=self.source,
            toolchain={"compiler": self.compiler, "torch": torch.__version__},
            notes=notes,
        )


def _unusable(report: Report, limit: int) -> str | None:
    if report.error is not None:
        return f"does not compile: {report.error}"
    if report.shared_bytes > limit:
        return f"needs {report.shared_bytes} bytes of shared memory, a block has {limit}"
    if report.unset:
        return f"has {report.unset} wgmma whose descriptor a path leaves unset"
    if report.shared_barriers:
        return f"has {report.shared_barriers} barriers in shared memory that holds data, too"
    return None


class _Timed:
    """The case's own problem on the device, ready to be run with any config.

    A backward is run alone: its forward is made once, by whatever config that one takes.
    """

    def __init__(self, case: Case, options: Options) -> None:
        self.case = case
        self.device = options.device
        call = case.call(case.problem, options.device, options.seed)
        self.written = {name: call.arguments[name] for name in call.written}
        # Work on copies of what the op writes, so that each run can find it as it was.
        self.arguments = call.arguments | {
            name: mapped(torch.clone, x) for name, x in self.written.items()
        }
        self.pool: Any = None
        self.leaves: Tensors = {}
        self.results: Tensors = {}
        self.upstream: Tensors = {}
        if case.backward:
            self._forward(options.seed)

    def _forward(self, seed: int) -> None:
        self.leaves = {
            name: x.detach().requires_grad_()
            for name, x in self.arguments.items()
            if is_floating(x)
        }
        self.arguments |= self.leaves
        results = named(self.case.function(**self.arguments))
        self.results = {name: x for name, x in results.items() if x.requires_grad}
        for i, (name, x) in enumerate(self.results.items()):
            generator = torch.Generator(x.device).manual_seed(1000 * seed + i + 17)
            noise = torch.randn(x.shape, generator=generator, device=x.device)
            self.upstream[name] = noise.to(x.dtype)

    def restore(self) -> None:
        """Put back what a run has written in place."""
        for name, x in self.written.items():
            copies = named(self.arguments[name])
            for part, was in named(x).items():
                copies[part].copy_(was)

    def run(self) -> Tensors:
        """All results of the pass, with the config in force."""
        if self.case.backward:
            return named(
                torch.autograd.grad(
                    list(self.results.values()), list(self.leaves.values()),
                    list(self.upstream.values()), retain_graph=True, allow_unused=True,
                )
            )  # fmt: skip
        with torch.no_grad():
            results = named(self.case.function(**self.arguments))
        for name in self.written:
            results |= named(self.arguments[name], name)
        return results

    def fault(self, config: Config) -> str | None:
        """None, or what is wrong with the results at full size: NaN, or bits that do not repeat."""
        from ..ops import alloc

        runs = []
        with alloc.poison():
            for _ in range(1 if config.atomic else 3):
                self.restore()
                runs.append({name: x.clone() for name, x in self.run().items()})
        for name, x in runs[0].items():
            if x.is_floating_point() and bool(x.isnan().any()):
                return f"leaves NaN in {name} of {self.case.problem.name}"
        for again in runs[1:]:
            different = first_difference(again, runs[0])
            if different is not None:
                return f"is unrepeatable on {self.case.problem.name}: {different}"
        return None

    def replay(self, config: Config) -> timing.Call:
        """A call that runs the pass with a config; on a GPU the replay of a graph."""
        if self.device.type != "cuda":
            return partial(self._forced, config)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        for _ in range(WARM_UP):
            self.restore()
            self._forced(config)
        # Graphs run one after the other, and nobody reads what they write: they share memory.
        replay, _ = timing.captured(partial(self._forced, config), self.pool)
        return replay

    def _forced(self, config: Config) -> Tensors:
        with use_config(self.case.space, config):
            return self.run()

    def work(self) -> tuple[int, int]:
        """Of one run: useful operations, by the formulas that the op registered, and bytes.

        Bytes are those of all tensors that come in and go out.
        """
        from torch.utils.flop_counter import FlopCounterMode

        self.restore()
        with FlopCounterMode(display=False) as counter:
            results = self.run()
        tensors = [x for given in self.arguments.values() for x in _tensors(given)]
        tensors += [*self.upstream.values(), *results.values()]
        return int(counter.get_total_flops()), sum(x.nbytes for x in tensors)


def _tensors(x: Any) -> list[torch.Tensor]:
    """Those of an argument."""
    return list(named(x).values()) if isinstance(x, (torch.Tensor, tuple)) else []


def log_path(op: str, part: tuple[int, int]) -> Path:
    """Where the log of an op's sweep is."""
    from ..ops import cache

    suffix = "" if part == (0, 1) else f"-{part[0]}of{part[1]}"
    return cache.home() / "log" / f"sweep-{op.replace('.', '-')}{suffix}.jsonl"


def writable(path: Path) -> str | None:
    """None, or why a table cannot be written there."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    target = path if path.exists() else folder
    return None if os.access(target, os.W_OK) else f"{path} cannot be written"
