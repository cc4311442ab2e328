"""The README's tables, from recorded JSON alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .families import FAMILIES
from .family import relative
from .record import RESULTS, read, replace_file
from .table import MEASURES

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def update(readme: Path, results: Path = RESULTS) -> int:
    """Replace what stands between the two markers; returns the number of records shown.

    Raises:
        ValueError: the markers are missing or out of order, or there is no record.
    """
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{readme} must hold {BEGIN} and, after it, {END}, each once")
    paths = sorted(results.glob("*/*.json"), key=_place)
    if not paths:
        raise ValueError(f"no record under {results}; run `fastweights bench --json` first")
    sections = [section(read(path), path, readme.resolve().parent) for path in paths]
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    body = "\n\n".join(sections)
    replace_file(readme, f"{before}{BEGIN}\n\n{body}\n\n{END}{after}".encode())
    return len(paths)


def _place(path: Path) -> tuple[str, int, str]:
    """A GPU's records stand in the order of the families."""
    ops = list(FAMILIES)
    return path.parent.name, ops.index(path.stem) if path.stem in ops else len(ops), path.stem


def section(record: dict[str, Any], path: Path, root: Path) -> str:
    """Markdown of one record: what it ran on, times, memory, picture."""
    where = record["environment"]
    facts = [where["device"], f"torch {where['torch']}"]
    facts += [f"{name} {where[name]}" for name in ("triton", "driver", "commit") if where.get(name)]
    facts.append(record["date"][:10])
    parts = [f"**{', '.join(facts)}**", _caption(record), _ceilings(record)]
    parts += [_times(record["rows"]), _memory(record["rows"])]
    picture = path.with_suffix(".png")
    if picture.is_file():
        link = Path(os.path.relpath(picture.resolve(), root)).as_posix()
        parts.append(f"![Roofline and MFU on {where['device']}]({link})")
    return "\n\n".join(part for part in parts if part)


def _caption(record: dict[str, Any]) -> str:
    """What the families of the record's rows have to say."""
    ops = dict.fromkeys(row["op"] for row in record["rows"])
    return "\n\n".join(
        FAMILIES[op].caption for op in ops if op in FAMILIES and FAMILIES[op].caption
    )


def _ceilings(record: dict[str, Any]) -> str:
    ceilings = record.get("ceilings")
    if not ceilings:
        return ""
    rates = "; ".join(
        f"matmul {dtype} " + ", ".join(f"{rate:.4g} TFLOP/s at {n}³" for n, rate in sizes.items())
        for dtype, sizes in ceilings["matmul_tflops"].items()
    )
    return f"Measured in the same run: copy {ceilings['copy_gbps']:.0f} GB/s; {rates}."


def _times(rows: Sequence[dict[str, Any]]) -> str:
    timed = [row for row in rows if row["mode"] != "memory"]
    peers = list(dict.fromkeys(row["contender"] for row in timed if not row["ours"]))
    peers = [
        peer
        for peer in peers
        if any(row["status"] == "ok" for row in timed if row["contender"] == peer)
    ]
    body = []
    for row in timed:
        # A relative is there to be compared with; it has a case of its own.
        if not row["ours"] or relative(row["contender"]):
            continue
        beside = {
            other["contender"]: other
            for other in timed
            if (other["case"], other["mode"]) == (row["case"], row["mode"])
        }
        body.append(
            [
                f"{row['case']} {row['mode']}",
                row["contender"],
                f"{row['ms']:.3f}" if row["status"] == "ok" else row["status"],
                _rate(row),
                *(_beside(row, beside.get(peer)) for peer in peers),
                _remark(row),
            ]
        )
    if not body:
        return ""
    headers = [
        "case",
        "call",
        "ms",
        "TFLOP/s (MFU)",
        *(f"{p} (speed ÷ it)" for p in peers),
        "marks",
    ]
    return tabulate(body, headers, tablefmt="github", disable_numparse=True)


def _rate(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return "–"
    share = row["mfu_peak"] if row["mfu_peak"] is not None else row["mfu_matmul"]
    rate = f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.2g}"
    return rate if share is None else f"{rate} ({100 * share:.0f} %)"


def _beside(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None or other["status"] != "ok":
        return "–"
    if row["status"] != "ok":
        return _rate(other)
    return f"{_rate(other)} ({other['ms'] / row['ms']:.2f})"


def _remark(row: dict[str, Any]) -> str:
    """The marks of a row with numbers; why there are none, of another."""
    if row["status"] != "ok":
        return row["reason"].replace("|", "\\|")
    return "; ".join(_mark(target) for target in row["targets"])


def _mark(target: dict[str, Any]) -> str:
    said = MEASURES.get(target["measure"], target["measure"])
    reached = target["reached"] or f"misses the floor of {target['floor']:.2f}"
    return f"{target['ratio']:.2f} {said} of {target['against']}: {reached}"


def _memory(rows: Sequence[dict[str, Any]]) -> str:
    body = [
        [row["case"], row["contender"], f"{row['peak_bytes'] / 2**20:.0f} MiB"]
        for row in rows
        if row["mode"] == "memory" and row["status"] == "ok"
    ]
    if not body:
        return ""
    headers = ["case", "call", "peak of forward + backward beyond its inputs"]
    return tabulate(body, headers, tablefmt="github", disable_numparse=True)
