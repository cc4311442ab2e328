"""A record as a picture: the roofline with measured ceilings, and MFU beside the peers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .family import relative
from .peaks import peak
from .record import replace_file

_COLOURS = ("#1f5fbf", "#6aa6e8", "#444444", "#999999", "#c9893b", "#8a5fb0", "#4a9a6a", "#b05f5f")


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the PNG.

    Raises:
        ModuleNotFoundError: matplotlib is missing; names the extra that brings it.
        ValueError: the record has no timed row.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing needs matplotlib: pip install 'fastweights[plot]'"
        ) from error
    rows = [row for row in record["rows"] if row["status"] == "ok" and row["mode"] != "memory"]
    if not rows:
        raise ValueError("nothing to draw: the record has no timed row")
    names = list(dict.fromkeys(row["contender"] for row in rows))
    # Relatives belong to other cases and would crowd the bars.
    names = [name for name in names if not relative(name)]
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    rows = [row for row in rows if row["contender"] in colours]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure = Figure(figsize=(13, 4.2 + 3.4 * len(modes)), layout="constrained")
    axes = figure.subplots(1 + len(modes), 1, height_ratios=[1.3, *[1] * len(modes)])
    _roofline(axes[0], record, rows, colours)
    for axis, mode in zip(axes[1:], modes, strict=True):
        _bars(axis, [row for row in rows if row["mode"] == mode], colours, mode)
    figure.suptitle(f"{record['environment']['device']}, {record['date'][:10]}")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    replace_file(path, data.getvalue())


def _roofline(
    axis: Any, record: dict[str, Any], rows: list[dict[str, Any]], colours: dict[str, str]
) -> None:
    intensity = [row["flops"] / row["bytes"] for row in rows]
    low, high = min(intensity) / 4, max(intensity) * 2
    ceilings = record.get("ceilings")
    if ceilings:
        slope = ceilings["copy_gbps"] / 1e3  # TFLOP/s at one FLOP a byte
        tops = {dtype: max(rates.values()) for dtype, rates in ceilings["matmul_tflops"].items()}
        low = min(low, min(tops.values()) / slope / 2)
        for dtype, top in tops.items():
            corner = top / slope
            label = f"measured copy and {dtype} matmul ({top:.3g} TFLOP/s)"
            xs, ys = (low, corner, max(high, corner)), (slope * low, top, top)
            axis.plot(xs, ys, color="black", linewidth=1, label=label)
    sheet = peak(record["environment"]["device"])
    for dtype in sorted({row["sizes"]["dtype"] for row in rows}) if sheet else ():
        value = sheet.tflops(dtype) if sheet else None
        if value is not None:
            label = f"{dtype} data sheet, dense ({value:.0f} TFLOP/s)"
            axis.axhline(value, color="black", linewidth=0.8, linestyle="--", label=label)
    for name, colour in colours.items():
        for mode, marker in (("fwd", "o"), ("bwd", "s")):
            mine = [r for r in rows if r["contender"] == name and r["mode"] == mode]
            if mine:
                axis.scatter(
                    [r["flops"] / r["bytes"] for r in mine], [r["tflops"] for r in mine],
                    color=colour, marker=marker, s=26, label=f"{name} {mode}", zorder=3,
                )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="useful FLOP per compulsory byte", ylabel="TFLOP/s")
    axis.grid(which="major", linewidth=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _bars(axis: Any, rows: list[dict[str, Any]], colours: dict[str, str], mode: str) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = [name for name in colours if any(row["contender"] == name for row in rows)]
    share = "mfu_peak" if all(row["mfu_peak"] is not None for row in rows) else "mfu_matmul"
    width = 0.82 / len(names)
    for index, name in enumerate(names):
        mine = {row["case"]: row for row in rows if row["contender"] == name}
        for place, case in enumerate(cases):
            if case not in mine or mine[case][share] is None:
                continue
            height = 100 * mine[case][share]
            x = place + (index - (len(names) - 1) / 2) * width
            axis.bar(x, height, width * 0.92, color=colours[name])
            axis.text(x, height, f"{height:.0f}", ha="center", va="bottom", fontsize=6)
        axis.bar(0, 0, color=colours[name], label=name)
    against = "data sheet, dense" if share == "mfu_peak" else "matmul measured in the same run"
    axis.set_title(f"{mode}: share of {against}", fontsize=9)
    axis.set_ylabel("%")
    slant = 15 if len(cases) <= 16 else 35  # more names than that run into each other
    axis.set_xticks(range(len(cases)), cases, rotation=slant, fontsize=7)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
