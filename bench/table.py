"""Rows as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

HEADERS = (
    "case", "mode", "contender", "ms", "p10–p90", "TFLOP/s", "% peak", "% matmul", "GB/s",
    "÷ peer", "launch µs", "gate", "targets",
)  # fmt: skip
MEASURES = {"time/flop": "time per FLOP"}  # others are called what they are


def target_text(target: dict[str, Any]) -> str:
    """`0.91× sdpa-cudnn (floor 0.80 good 0.88 aim 1.00 → good)`."""
    marks = " ".join(
        f"{mark} {target[mark]:.2f}"
        for mark in ("floor", "good", "aim")
        if target[mark] is not None
    )
    reached = target["reached"] or "below floor"
    measure = MEASURES.get(target["measure"], target["measure"])
    return f"{target['ratio']:.3f}× {measure} of {target['against']} ({marks} → {reached})"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _gate(row: dict[str, Any]) -> str:
    verdict = row.get("gate")
    if verdict is None:
        return "–"
    if not verdict["ok"]:
        return "FAILED"
    return f"{verdict['error']:.1e} of {verdict['limit']:.1e}"


def cells(row: dict[str, Any]) -> list[str]:
    """One row's cells under `HEADERS`; a row without numbers gives its reason instead."""
    name = row["contender"] + (f" ({row['backend']})" if row.get("backend") else "")
    head = [row["case"], row["mode"], name]
    if row["status"] != "ok":
        return [*head, *["–"] * 8, _gate(row), f"{row['status']}: {row['reason']}"]
    ratio = row.get("ratio")
    against = "–" if ratio is None else f"{ratio['value']:.2f} {ratio['peer']}"
    targets = "; ".join(target_text(target) for target in row.get("targets", ()))
    if row["mode"] == "memory":
        size = f"{row['peak_bytes'] / 2**20:.0f} MiB"
        return [*head, *["–"] * 6, against, "–", _gate(row), f"peak {size} beyond the inputs"]
    launch = row["launch_us"]
    return [
        *head,
        f"{row['ms']:.3f}",
        f"{row['ms_p10']:.3f}–{row['ms_p90']:.3f}",
        f"{row['tflops']:.1f}" if row["tflops"] >= 1 else f"{row['tflops']:.4f}",
        _share(row["mfu_peak"]),
        _share(row["mfu_matmul"]),
        f"{row['gbps']:.4g}" if row["gbps"] >= 1000 else f"{row['gbps']:.3g}",
        against,
        "–" if launch is None else f"{launch:.0f}",
        _gate(row),
        targets,
    ]


def line(row: dict[str, Any]) -> str:
    """One row while the run goes on."""
    case, mode, name, ms, _, tflops, peak, _, _, against, _, _, rest = cells(row)
    numbers = f"{ms:>9} ms {tflops:>7} TFLOP/s {peak:>5} % peak  ÷ {against:<16}"
    numbers = numbers if row["status"] == "ok" and row["mode"] != "memory" else ""
    return f"{case:<24} {mode:<6} {name:<32} {numbers} {rest}".rstrip()


def render(rows: Sequence[dict[str, Any]], style: str = "simple") -> str:
    """The table. `style` is a tabulate format; "github" gives Markdown."""
    return tabulate([cells(row) for row in rows], HEADERS, tablefmt=style, disable_numparse=True)


def header(record: dict[str, Any]) -> str:
    """What was measured on: one line a fact, before any number."""
    where = record["environment"]
    lines = [f"{name:<9} {value}" for name, value in where.items() if value is not None]
    ceilings = record.get("ceilings")
    if ceilings:
        lines.append(f"copy      {ceilings['copy_gbps']:.0f} GB/s, read + write")
        for dtype, rates in ceilings["matmul_tflops"].items():
            text = ", ".join(f"{n}³ {rate:.4g}" for n, rate in rates.items())
            lines.append(f"matmul    {dtype} {text} TFLOP/s")
    return "\n".join(lines)


def comparison(pairs: Sequence[dict[str, Any]]) -> str:
    """Table of what `record.compare` returned."""
    body = [
        [
            pair["case"],
            pair["mode"],
            pair["contender"],
            "–" if pair["a"] is None else f"{pair['a']:.4g}",
            "–" if pair["b"] is None else f"{pair['b']:.4g}",
            "–" if pair["ratio"] is None else f"{pair['ratio']:.3f}",
            pair["verdict"],
        ]
        for pair in pairs
    ]
    headers = ("case", "mode", "contender", "A", "B", "A ÷ B", "")
    return tabulate(body, headers, tablefmt="simple", disable_numparse=True)
