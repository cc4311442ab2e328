"""Cases to rows: build, gate, time, compare.

A row is a plain dict, the same in memory, in the record and in the table. `status` is "ok",
"unavailable" (the contender says why it cannot run), "wrong" (its gate failed), "error" or
"skipped" (no time left); only "ok" rows carry numbers, the others carry `reason`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..autotune.timing import first_line, free_memory, l2_bytes, own_stream
from .cases import Case, Target
from .families import FAMILIES
from .family import Contender, Unavailable, Work
from .gate import check
from .memory import peak_bytes
from .peaks import Peak, peak
from .timing import Timing, time_works

Row = dict[str, Any]


@dataclass
class Options:
    """How to run.

    Attributes:
        device: where.
        seed: of all inputs; drawn afresh by the command unless given.
        seconds: timed rounds of one case and mode.
        budget: seconds after which no further case is begun. Each op has an equal share from its
            first case on, and what those before it left. None is no limit.
        peers: names of the peers that may run; None is all.
        layout: of the peers' operands, "model" or "natural".
        backends: of our ops; None leaves it to each family.
        ceilings: what `ceilings.measure` returned.
    """

    device: torch.device
    seed: int
    seconds: float = 0.6
    budget: float | None = None
    peers: tuple[str, ...] | None = None
    layout: str = "model"
    backends: tuple[str, ...] | None = None
    ceilings: dict[str, Any] | None = None


def run(
    cases: Sequence[Case], options: Options, progress: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Run the cases in order; `progress` sees each row as soon as its case and mode are done."""
    rows: list[Row] = []
    groups = [list(group) for _, group in itertools.groupby(cases, lambda case: case.op)]
    allowed = 0.0
    for group in groups:
        begun = time.monotonic()
        allowed += math.inf if options.budget is None else options.budget / len(groups)
        for case in group:
            found = FAMILIES[case.op].contenders(
                case, backends=options.backends, peers=options.peers, layout=options.layout
            )
            spent = time.monotonic() - begun
            if spent > allowed:
                reason = f"{spent:.0f} s of the op's {allowed:.0f} s budget were spent"
                rows += _without_numbers(case, found, "skipped", reason, progress)
                continue
            try:
                rows += run_case(case, found, options, progress)
            except Exception as error:
                # A device fault surfaces wherever the host waits next; what was recorded stays.
                rows += _without_numbers(case, found, "error", first_line(error), progress)
        allowed = max(allowed - (time.monotonic() - begun), 0.0)
    return rows


def _without_numbers(
    case: Case,
    contenders: Sequence[Contender],
    status: str,
    reason: str,
    progress: Callable[[Row], None],
) -> list[Row]:
    rows = [
        _row(contender, case, mode, status, reason)
        for mode in case.modes
        for contender in contenders
        if mode in contender.modes
    ]
    for row in rows:
        progress(row)
    return rows


def run_case(
    case: Case,
    contenders: Sequence[Contender],
    options: Options,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """All rows of one case. No contender's failure keeps another from its row."""
    rows: list[Row] = []
    with own_stream(options.device):
        built, failed, verdicts = _build(case, contenders, options)
        for mode in case.modes:
            new = _mode(case, mode, contenders, built, failed, verdicts, options)
            _compare(case, mode, new)
            for row in new:
                progress(row)
            rows += new
        del built
    free_memory(options.device)
    return rows


def _build(
    case: Case, contenders: Sequence[Contender], options: Options
) -> tuple[dict[str, Work], dict[str, tuple[str, str]], dict[str, dict[str, Any]]]:
    """Works that passed their gate, (status, reason) of those that did not, and all verdicts."""
    built: dict[str, Work] = {}
    failed: dict[str, tuple[str, str]] = {}
    verdicts: dict[str, dict[str, Any]] = {}
    inputs_of = {}
    family = FAMILIES[case.op]
    for contender in contenders:
        if contender.reason is not None:
            failed[contender.name] = ("unavailable", contender.reason)
            continue
        try:
            if contender.case not in inputs_of:
                generator = torch.Generator(options.device).manual_seed(options.seed)
                inputs_of[contender.case] = family.inputs(contender.case, generator)
            inputs = inputs_of[contender.case]
            work = contender.build(contender.case, inputs)
            verdict = check(family, contender, inputs, work, options.seed + 1)
            if verdict is not None:
                verdicts[contender.name] = verdict.to_dict()
            if verdict is None or verdict.ok:
                built[contender.name] = work
            else:
                failed[contender.name] = ("wrong", "; ".join(verdict.failures))
        except Unavailable as reason:
            failed[contender.name] = ("unavailable", str(reason))
        except Exception as error:
            failed[contender.name] = ("error", first_line(error))
        free_memory(options.device)
    return built, failed, verdicts


def _mode(
    case: Case,
    mode: str,
    contenders: Sequence[Contender],
    built: dict[str, Work],
    failed: dict[str, tuple[str, str]],
    verdicts: dict[str, dict[str, Any]],
    options: Options,
) -> list[Row]:
    rows = []
    contenders = [contender for contender in contenders if mode in contender.modes]
    here = {c.name: built[c.name] for c in contenders if c.name in built}
    timings: dict[str, Timing | str] = {}
    if mode != "memory":
        moved = min((c.case.bytes(mode) for c in contenders), default=0)
        timings = time_works(
            here,
            mode,
            device=options.device,
            seconds=options.seconds,
            cold=moved < 2 * l2_bytes(options.device),
        )
    for contender in contenders:
        name = contender.name
        if name in failed:
            row = _row(contender, case, mode, *failed[name])
        elif mode == "memory":
            row = _memory_row(contender, case, built[name], options.device)
        else:
            row = _timing_row(contender, case, mode, timings[name], options)
        row["gate"] = verdicts.get(name)
        row.update(built[name].notes if name in built else {})
        rows.append(row)
    return rows


def _row(contender: Contender, case: Case, mode: str, status: str, reason: str | None) -> Row:
    return {
        "op": case.op,
        "case": case.name,
        "mode": mode,
        "contender": contender.name,
        "ours": contender.ours,
        "sizes": contender.case.sizes(),
        "status": status,
        "reason": reason,
    }


def _memory_row(contender: Contender, case: Case, work: Work, device: torch.device) -> Row:
    try:
        peak_memory = peak_bytes(work, device)
    except Exception as error:
        return _row(contender, case, "memory", "error", first_line(error))
    return _row(contender, case, "memory", "ok", None) | {"peak_bytes": peak_memory}


def _timing_row(
    contender: Contender, case: Case, mode: str, timing: Timing | str, options: Options
) -> Row:
    if isinstance(timing, str):
        return _row(contender, case, mode, "error", timing)
    sizes = contender.case
    work, moved = sizes.flops(mode), sizes.bytes(mode)
    tflops = work / timing.median / 1e9
    sheet = _sheet(options.device)
    dense = sheet.tflops(sizes.dtype) if sheet is not None else None
    rates = (options.ceilings or {}).get("matmul_tflops", {}).get(sizes.dtype)
    return _row(contender, case, mode, "ok", None) | {
        "ms": timing.median,
        "ms_p10": timing.percentile(10),
        "ms_p90": timing.percentile(90),
        "runs": len(timing.runs),
        "launch_us": timing.launch_us,
        "flops": work,
        "bytes": moved,
        "tflops": tflops,
        "mfu_peak": tflops / dense if dense else None,
        "mfu_matmul": tflops / max(rates.values()) if rates else None,
        "gbps": moved / timing.median / 1e6,
    }


def _sheet(device: torch.device) -> Peak | None:
    return peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


# ---- ratios -------------------------------------------------------------------------------------


def _compare(case: Case, mode: str, rows: list[Row]) -> None:
    """Add each row's ratio to the case's peer, and the targets of the rows that have some."""
    fine = {row["contender"]: row for row in rows if row["status"] == "ok"}
    peer = next((name for name in case.peers if name in fine), None)
    key = "peak_bytes" if mode == "memory" else "ms"
    for row in fine.values():
        if peer is not None:
            row["ratio"] = {"peer": peer, "value": fine[peer][key] / row[key]}
        row["targets"] = [
            judged(target, row, fine[target.against])
            for target in case.targets
            if target.mode == mode
            and target.contender == row["contender"]
            and target.against in fine
            and (target.measure in _MEASURES or target.measure in _recorded(row))
        ]


_MEASURES: dict[str, Callable[[Row, Row], float]] = {
    "speed": lambda row, other: other["ms"] / row["ms"],
    "rate": lambda row, other: row["tflops"] / other["tflops"],
    "time": lambda row, other: row["ms"] / other["ms"],
    "time/flop": lambda row, other: other["tflops"] / row["tflops"],
}


def _recorded(row: Row) -> dict[str, float]:
    """The ratios that the row's gate took."""
    return (row.get("gate") or {}).get("ratios", {})


def judged(target: Target, row: Row, other: Row) -> dict[str, Any]:
    """A target with its measured ratio and the best mark that it reaches ("" if none)."""
    measure = _MEASURES.get(target.measure)
    ratio = _recorded(row)[target.measure] if measure is None else measure(row, other)
    reached = ""
    for mark in ("floor", "good", "aim"):
        value = getattr(target, mark)
        if value is None:
            continue
        if ratio <= value if target.lower_is_better else ratio >= value:
            reached = mark
    return {
        "against": target.against,
        "measure": target.measure,
        "ratio": ratio,
        "floor": target.floor,
        "good": target.good,
        "aim": target.aim,
        "reached": reached,
    }
