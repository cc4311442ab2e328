"""fastweights autotune: compile, sweep, show, diff, merge; and fastweights explain.

sweep OP…            prove and time every config of the ops, and write a table (needs a GPU)
compile OP…          compile every config and report its resources (needs none)
show [FILE]          print tables
diff A B             where two tables differ
merge OUT FILE…      join tables, those of a sweep's shards for instance
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .space import Space
    from .tables import Row, Table

DONE, USAGE, LEFT, WRONG = 0, 2, 3, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; the exit status.

    0: done. 1: something broke. 2: bad arguments. 3: the budget ended a sweep, which goes on when
    run again. 4: a case of a sweep has no config that is right.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["compile"]:
        compiling: Any = importlib.import_module("fastweights.autotune.compile")
        return int(compiling.main(arguments[1:]))
    parser = argparse.ArgumentParser(
        prog="fastweights autotune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("compile", help="compile every config and report", add_help=False)
    _sweep_options(commands.add_parser("sweep", help="prove and time every config"))
    show = commands.add_parser("show", help="print tables")
    show.add_argument("files", nargs="*", type=Path, metavar="FILE",
        help="default: your own tables and the shipped ones")  # fmt: skip
    show.add_argument("--best", action="store_true", help="the ten best configs of each row, too")
    diff = commands.add_parser("diff", help="where two tables differ")
    diff.add_argument("tables", nargs=2, type=Path, metavar="FILE")
    merge = commands.add_parser("merge", help="join tables")
    merge.add_argument("out", type=Path, help="the table to write; what is in it counts first")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help"):
        parser.print_usage(sys.stderr)
        return USAGE
    options = parser.parse_args(arguments)
    try:
        return int(COMMANDS[options.command](options, arguments[1:]))
    except (ValueError, OSError) as error:
        print(f"fastweights autotune {options.command}: {error}", file=sys.stderr)
        return USAGE


# ---- sweep --------------------------------------------------------------------------------------


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ops", nargs="+", metavar="OP", help="op folder, e.g. polar_attention")
    add("--shapes", type=Path, metavar="FILE",
        help="JSON list of objects of sizes, named as for `explain --shape`")  # fmt: skip
    add("--dtype", type=lambda text: text.split(","), metavar="NAMES",
        help="comma-separated: bf16, fp16, fp32 (default: what each problem names)")  # fmt: skip
    add("--effort", choices=("quick", "full"), default="full",
        help="quick: eight configs a case, a quarter of the time")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="the table (default: your own, in the cache)")
    add("--budget", type=float, metavar="SECONDS", help="begin nothing new after so long")
    add("--shard", type=_part, default=(0, 1), metavar="I/N", help="part I of N, counted from 0")
    add("--seed", type=int, help="of all inputs (default: a fresh one)")
    add("--workers", type=int, metavar="N", help="processes that compile (default: all cores)")
    add("--patience", type=float, default=180.0, metavar="SECONDS",
        help="a config that does not return for so long is rejected (default: 180)")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="draw times and the roofline (matplotlib)")
    add("--under", type=int, help=argparse.SUPPRESS)  # the process that watches this one


def _part(text: str) -> tuple[int, int]:
    index, slash, number = text.partition("/")
    if not slash or not index.isdigit() or not number.isdigit() or int(index) >= int(number):
        raise argparse.ArgumentTypeError(f"I/N with 0 ≤ I < N, not {text!r}")
    return int(index), int(number)


def _sweep(options: argparse.Namespace, arguments: list[str]) -> int:
    from ..ops import cache
    from .sweep import log_path, writable

    if cache.read_only():
        raise ValueError("FASTWEIGHTS_READONLY=1: a read-only cache never sweeps")
    if options.under is not None:
        return _sweep_here(options)
    if options.out is not None:
        reason = writable(options.out.absolute())
        if reason is not None:
            raise ValueError(reason)
    from .supervise import watch

    if options.seed is None:
        arguments = [*arguments, "--seed", str(int.from_bytes(os.urandom(3), "big"))]
    logs = [log_path(op, options.shard) for op in options.ops]
    return watch(arguments, logs, budget=options.budget, patience=options.patience)


def _sweep_here(options: argparse.Namespace) -> int:
    import torch

    from . import report, tables
    from .cases import DTYPES, collect, problems_of, tuning_of
    from .space import Device
    from .supervise import BROKEN, end_with
    from .sweep import BrokenDevice, Options, Outcome, log_path, shard, sweep

    end_with(options.under)
    deadline = None if options.budget is None else time.monotonic() + options.budget
    for name in options.dtype or ():
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    tunings = [tuning_of(op) for op in options.ops]
    shapes = None if options.shapes is None else json.loads(options.shapes.read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = Device.of(device)
    if not here.name:
        raise ValueError("torch sees no GPU, and configs are measured on one")
    whole = Outcome()
    out = options.out or tables.path_of(here.name)
    for op, tuning in zip(options.ops, tunings, strict=True):
        cases = shard(collect(problems_of(tuning, shapes), device, options.dtype), options.shard)
        print(f"{op} on {here.name}: {len(cases)} cases, seed {options.seed}", flush=True)
        how = Options(
            device, out, log_path(op, options.shard), options.effort, deadline, options.seed or 0,
            options.workers,
        )  # fmt: skip
        try:
            found = sweep(cases, how)
        except BrokenDevice as error:
            print(f"config {error} broke the device; starting again behind it", flush=True)
            os._exit(BROKEN)  # what ends with Python would talk to the device
        for name, part in vars(found).items():
            getattr(whole, name).extend(part)
    print("\n\n".join([*map(report.case, whole.rows), report.rejections(whole.rejected)]))
    print(f"\n{report.summary(_as_written(out, whole.rows))}\n")
    for label in whole.failed:
        print(f"FAILED {label}")
    for label in whole.hopeless:
        print(f"NO CONFIG IS RIGHT {label}")
    for label in whole.left:
        print(f"left {label}")
    print(f"{out}: {len(whole.rows)} cases measured, {len(whole.left)} left")
    if options.plot is not None and whole.rows:
        _plot(tables.Table(here.name, here.arch, tuple(whole.rows)), options.plot)
    if whole.failed or whole.hopeless:
        return WRONG
    return LEFT if whole.left else DONE


def _as_written(out: Path, rows: Sequence[Row]) -> list[Row]:
    """The rows as the table has them: neighbours may have come to share a config."""
    from . import tables

    wanted = {tables.place(row) for row in rows}
    return [row for row in tables.load(out).rows if tables.place(row) in wanted] if rows else []


def _plot(table: Table, path: Path) -> None:
    # Peaks are the benchmark's; only this command draws.
    importlib.import_module("fastweights.bench.plot_sweep").draw(table, path)
    print(f"picture: {path}")


# ---- tables -------------------------------------------------------------------------------------


def _show(options: argparse.Namespace, _: list[str]) -> int:
    from . import report, tables

    files = options.files
    if not files:
        folders = (tables.path_of("any").parent, tables.SHIPPED)
        files = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    if not files:
        print(f"no tables, neither in {folders[0]} nor shipped; `sweep` writes them")
    spaces: dict[str, list[Space]] = {}

    def remark(row: Row) -> str:
        if row.op not in spaces:
            spaces[row.op] = spaces_of(row.op)
        return "measured on older source" if tables.older(row, spaces[row.op]) else ""

    for path in files:
        table = tables.load(path)
        print(f"{path}: {table.gpu}, {table.arch}\n{report.summary(table.rows, remark)}")
        if options.best:
            print("\n" + "\n\n".join(map(report.case, table.rows)))
        print(f"\n{report.rejections(table.rejected)}\n")
    return DONE


def spaces_of(op: str) -> list[Space]:
    """All config spaces of the folder that a public op is in; none of an unknown op's."""
    from .. import ops

    function = getattr(ops, op, None)
    if function is None:
        return []
    return list(importlib.import_module(f"{function.__module__}.tuning").SPACES)


def _diff(options: argparse.Namespace, _: list[str]) -> int:
    from . import report, tables

    a, b = map(tables.load, options.tables)
    print(report.difference(a, b))
    return DONE


def _merge(options: argparse.Namespace, _: list[str]) -> int:
    from . import tables

    found = [tables.load(path) for path in options.files]
    joined = found[0]
    for table in found[1:]:
        joined = joined.joined(table)
    written = tables.update(options.out, joined)
    print(f"{options.out}: {len(written.rows)} rows, {len(written.rejected)} rejected")
    return DONE


COMMANDS = {"sweep": _sweep, "show": _show, "diff": _diff, "merge": _merge}


# ---- explain ------------------------------------------------------------------------------------


def explain(argv: Sequence[str]) -> int:
    """`fastweights explain OP --shape …`: which backend and configs a call would get, and why."""
    import torch

    from .. import ops
    from ..ops import dispatch
    from .cases import DTYPES

    parser = argparse.ArgumentParser(prog="fastweights explain", description=explain.__doc__)
    add = parser.add_argument
    add("op", metavar="OP", help="public function, e.g. polar_attention")
    add("--shape", required=True, nargs="+", metavar="NAME=SIZE",
        help="by the letters of the op's docstring: B=4 T=8192 Hq=16 Hk=16 D=128")  # fmt: skip
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--backend", default="auto", choices=("auto", "eager", "triton", "cuda"))
    options = parser.parse_args(argv)
    function = getattr(ops, options.op, None)
    if function not in dispatch.public():
        print(f"fastweights explain: there is no op {options.op!r}", file=sys.stderr)
        return USAGE
    found = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tuning = importlib.import_module(f"{function.__module__}.tuning")
        problem = tuning.problem(function=options.op, **_sizes(options.shape))
        device = torch.device(options.device or found)
        call = problem.inputs(DTYPES[options.dtype], device, 0) | problem.call
        print(ops.explain(function, **call, backend=options.backend))
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"fastweights explain: {error}", file=sys.stderr)
        return USAGE
    return DONE


def _sizes(words: Sequence[str]) -> dict[str, int]:
    sizes = {}
    for word in ",".join(words).split(","):
        name, equals, value = word.partition("=")
        if not equals or not value.lstrip("-").isdigit():
            raise ValueError(f"--shape takes NAME=SIZE, not {word!r}")
        sizes[name] = int(value)
    return sizes


if __name__ == "__main__":
    sys.exit(main())
