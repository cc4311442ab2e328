"""The `fastweights` command.

fastweights bench …             time ops beside their peers (this folder)
fastweights autotune …          prove, time and choose configs: sweep, compile, show, diff, merge
fastweights explain OP …        say which backend and configs a call would get, and why
fastweights env                 print what a measurement here would run on
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__

if TYPE_CHECKING:
    from .cases import Case


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    0: done. 1: a gate failed, or one of our own rows is an error. 2: bad arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="fastweights", description="fastweights: benchmark, autotune, environment"
    )
    parser.add_argument("--version", action="version", version=f"fastweights {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="time ops beside their peers")
    _bench_options(bench)
    commands.add_parser("autotune", help="prove, time and choose configs", add_help=False)
    commands.add_parser("explain", help="say what a call would run", add_help=False)
    commands.add_parser("env", help="print device, driver, versions and commit")

    # argparse would take options meant for the inner command for its own.
    if arguments[:1] in (["autotune"], ["explain"]):
        inner: Any = importlib.import_module("fastweights.autotune.cli")
        command = inner.main if arguments[0] == "autotune" else inner.explain
        return int(command(arguments[1:]))
    options = parser.parse_args(arguments)
    if options.command == "env":
        return _environment()
    try:
        return _bench(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"fastweights bench: {error}", file=sys.stderr)
        return 2


def _environment() -> int:
    from .environment import describe

    for name, value in describe().items():
        print(f"{name:<12} {'–' if value is None else value}")
    return 0


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times our ops beside their peers, interleaved in one process, after each contender has "
        "passed a correctness gate. Ratios and shares are printed as rows complete, the table last."
    )
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="op families to run (default: all)")
    add("--suite", choices=("quick", "headline", "extra", "crossover", "all"),
        help="which cases (default: headline on a GPU, all on a CPU)")  # fmt: skip
    add("--cases", nargs="+", default=[], metavar="NAME", help="these cases instead of a suite")
    add("--dtype", metavar="DTYPE", help="run every case in bf16, fp16 or fp32")
    add("--mode", type=_words, default=["fwd", "bwd", "memory"], metavar="MODES",
        help="comma-separated: fwd, bwd, memory (default: what each case has)")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--backend", type=_words, metavar="NAMES",
        help="comma-separated backends of our ops, auto, eager, triton, cuda; targets refer to "
        "the first (default: what each op is shown on)")  # fmt: skip
    add("--peers", nargs="*", metavar="NAME", help="only these peers; none given: no peers")
    add("--layout", choices=("model", "natural"), default="model",
        help="peers' operands: views as a model has them, or as the peer likes them")  # fmt: skip
    add("--seconds", type=float, metavar="S", help="timed rounds of one case and mode")
    add("--budget", type=float, metavar="SECONDS",
        help="begin no case after this long (default: none on a GPU, 30 on a CPU)")  # fmt: skip
    add("--seed", type=int, help="of all inputs (default: fresh, kept in the record)")
    add("--json", nargs="?", const="", metavar="FILE",
        help="record the run (default: one file an op, bench/results/<device>/)")  # fmt: skip
    add("--png", nargs="?", const="", metavar="FILE", help="draw it (default: beside the record)")
    add("--compare", nargs=2, metavar=("A", "B"), help="two records side by side; times nothing")
    add("--readme", nargs="?", const="", metavar="FILE",
        help="replace the tables of FILE (README.md) from the records; times nothing")  # fmt: skip
    add("--list", action="store_true", help="print cases and peers; times nothing")


def _bench(options: argparse.Namespace) -> int:
    if options.compare:
        from . import record, table

        a, b = (record.read(Path(path)) for path in options.compare)
        print(table.comparison(record.compare(a, b)))
        return 0
    if options.readme is not None:
        from . import readme

        path = Path(options.readme or Path(__file__).resolve().parent.parent / "README.md")
        print(f"{path}: {readme.update(path)} record(s)")
        return 0
    return _list(options) if options.list else _measure(options)


def _device(options: argparse.Namespace) -> Any:
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and found == "cpu":
        raise ValueError("--device cuda: torch sees no GPU")
    return torch.device(options.device or found)


def _selected(options: argparse.Namespace, device: str) -> list[Case]:
    from .cases import MODES
    from .families import select

    for mode in options.mode:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    chosen = select(
        device,
        suite=options.suite,
        names=options.cases,
        ops=options.ops,
        dtype=options.dtype,
        modes=options.mode,
    )
    if not chosen:
        raise ValueError("no case fits these options; see `fastweights bench --list`")
    return chosen


def _list(options: argparse.Namespace) -> int:
    from tabulate import tabulate

    from . import families

    body = [
        [
            case.name,
            case.device,
            " ".join(case.suites),
            " ".join(case.modes),
            " ".join(f"{k}={v}" for k, v in case.sizes().items() if v is not None),
            " ".join(case.peers),
        ]
        for case in families.cases().values()
        if not options.ops or case.op in options.ops
    ]
    print(
        tabulate(body, ("case", "device", "suites", "modes", "sizes", "peers"), tablefmt="simple")
    )
    print()
    body = [
        [name, family.op, said]
        for family in families.FAMILIES.values()
        for name, said in family.peers.items()
        if not options.ops or family.op in options.ops
    ]
    print(tabulate(body, ("peer", "op", ""), tablefmt="simple"))
    return 0


def _measure(options: argparse.Namespace) -> int:
    device = _device(options)
    chosen = _selected(options, device.type)

    from ..ops.dispatch import BACKENDS
    from . import ceilings, families, record, table
    from .environment import describe
    from .runner import Options, run

    known = [name for family in families.FAMILIES.values() for name in family.peers]
    for name in options.peers or ():
        if name not in known:
            raise ValueError(f"unknown peer {name!r}; known: {', '.join(known)}")
    for name in options.backend or ():
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "big")
    # A CPU shared with other work can be a hundred times slower; the command still ends in time.
    seconds, budget = (0.6, None) if device.type == "cuda" else (0.3, 30.0)
    measured = ceilings.measure(device, {case.dtype for case in chosen})
    # After the ceilings: clocks of a device that has just worked, not of an idle one.
    environment = describe(device)
    run_options = Options(
        device=device,
        seed=seed,
        seconds=options.seconds if options.seconds is not None else seconds,
        budget=options.budget if options.budget is not None else budget,
        peers=None if options.peers is None else tuple(options.peers),
        layout=options.layout,
        backends=tuple(options.backend) if options.backend else None,
        ceilings=measured,
    )
    made = record.make(
        [], environment=environment, ceilings=measured, seed=seed, layout=options.layout
    )
    print(table.header(made), flush=True)
    print(f"seed      {seed}\n", flush=True)
    made["rows"] = run(chosen, run_options, lambda row: print(table.line(row), flush=True))
    print(f"\n{table.render(made['rows'])}")
    _save(options, made)
    bad = [row for row in made["rows"] if row["ours"] and row["status"] in ("wrong", "error")]
    wrong = [row for row in made["rows"] if row["status"] == "wrong"]
    return 1 if bad or wrong else 0


def _save(options: argparse.Namespace, made: dict[str, Any]) -> None:
    from . import plot, record

    def parts(file: str, suffix: str) -> list[tuple[Path, dict[str, Any]]]:
        if file:
            return [(Path(file), made)]
        return [(record.default_path(part, suffix), part) for part in record.by_op(made)]

    if options.json is not None:
        for path, part in parts(options.json, ".json"):
            record.write(path, part)
            print(f"\nrecord: {path}")
    if options.png is not None:
        for path, part in parts(options.png, ".png"):
            plot.draw(part, path)
            print(f"picture: {path}")


if __name__ == "__main__":
    sys.exit(main())
