"""A sweep as a picture: time of every config, and the chosen ones under the roofline."""

from __future__ import annotations

import io
from math import ceil
from pathlib import Path
from typing import Any

from ..autotune.tables import Row, Table
from .peaks import Peak, peak
from .record import replace_file

COLUMNS = 3
CHOSEN, DEFAULT, OTHER = "#1f5fbf", "#c9893b", "#bbbbbb"


def draw(table: Table, path: Path) -> None:
    """Write the PNG.

    Raises:
        ModuleNotFoundError: matplotlib is missing; names the extra that brings it.
        ValueError: the table has no row.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing needs matplotlib: pip install 'fastweights[plot]'"
        ) from error
    if not table.rows:
        raise ValueError("nothing to draw: the table has no row")
    lines = ceil(len(table.rows) / COLUMNS)
    figure = Figure(figsize=(6 * COLUMNS, 6 + 3 * lines), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[6, 3 * lines])
    _roofline(top.subplots(), table.rows, peak(table.gpu))
    axes = list(bottom.subplots(lines, COLUMNS, squeeze=False).flat)
    for axis, row in zip(axes, table.rows, strict=False):
        _bars(axis, row)
    for axis in axes[len(table.rows) :]:
        axis.set_axis_off()
    figure.suptitle(f"{table.gpu}, configs as swept")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=80)
    replace_file(path, data.getvalue())


def _roofline(axis: Any, rows: tuple[Row, ...], sheet: Peak | None) -> None:
    """TFLOP/s of the chosen config (filled) and of the default (hollow) over FLOPs a byte."""
    counted = [row for row in rows if row.notes.get("flops") and row.notes.get("bytes")]
    for row in counted:
        intensity = row.notes["flops"] / row.notes["bytes"]
        chosen = row.notes["flops"] / row.ms / 1e9
        default = row.notes["flops"] / row.times[row.default] / 1e9
        axis.plot(intensity, default, "o", color=DEFAULT, fillstyle="none")
        axis.plot(intensity, chosen, "o", color=CHOSEN)
        axis.annotate(f"{row.problem} {row.pass_} {row.backend}", (intensity, chosen), fontsize=6)
    if counted and sheet is not None:
        places = sorted(row.notes["flops"] / row.notes["bytes"] for row in counted)
        places = [places[0] / 2, *places, places[-1] * 2]
        for dtype in sorted({row.dtype for row in counted}):
            top = sheet.tflops(dtype)
            if top is not None:
                heights = [min(top, sheet.bandwidth * place) for place in places]
                axis.plot(places, heights, color="#444444", linewidth=1, label=f"peak {dtype}")
        axis.legend()
    if counted:
        axis.set_xscale("log")
        axis.set_yscale("log")
    axis.set_xlabel("FLOP a byte")
    axis.set_ylabel("TFLOP/s")


def _bars(axis: Any, row: Row) -> None:
    ranked = sorted(row.times.items(), key=lambda item: (item[1], item[0]))
    marks = {row.default: DEFAULT} | {row.config: CHOSEN}
    names, times = [name for name, _ in ranked], [ms for _, ms in ranked]
    axis.barh(names, times, color=[marks.get(name, OTHER) for name in names])
    axis.invert_yaxis()
    axis.tick_params(labelsize=6)
    axis.set_xlabel("ms", fontsize=7)
    axis.set_title(f"{row.op} {row.pass_} {row.backend}\n{row.problem} {row.dtype}", fontsize=8)
