"""What sweeps found, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from .tables import Bucket, Rejected, Row, Table, place

BEST = 10  # configs of a case that are shown


def _tabulate(rows: Sequence[dict[str, Any]]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers="keys", tablefmt="simple", floatfmt=".4g")


def words(bucket: Bucket) -> str:
    """A bucket in one line: "size=2 width=128 polar"; what is false is left out."""
    parts = []
    for name, value in bucket.items():
        if isinstance(value, bool):
            parts += [name] if value else []
        else:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def case(row: Row) -> str:
    """One case: its ten best configs, and what became of the rest."""
    title = f"{row.op} {row.pass_} {row.backend} {row.dtype}, {row.problem} ({words(row.bucket)})"
    ranked = sorted(row.times.items(), key=lambda item: (item[1], item[0]))
    body = [
        {
            "config": name,
            "ms": ms,
            "× default": row.times[row.default] / ms,
            "": " ".join(
                mark
                for mark, marked in (
                    ("chosen", row.config), ("fastest", row.winner), ("default", row.default)
                )
                if name == marked
            ),
        }
        for name, ms in ranked[:BEST]
    ]  # fmt: skip
    rest = len(ranked) - len(body)
    lines = [title, _tabulate(body)]
    if rest > 0:
        lines.append(f"and {rest} slower")
    return "\n".join(lines)


def rejections(found: Sequence[Rejected]) -> str:
    """Every rejected config with its reason."""
    body = [
        {
            "op": entry.op,
            "pass": entry.pass_,
            "backend": entry.backend,
            "bucket": words(entry.bucket),
            "config": entry.config,
            "it": entry.reason,
        }
        for entry in found
    ]
    return f"{len(body)} rejected\n{_tabulate(body)}" if body else "nothing was rejected"


def summary(rows: Sequence[Row], remark: Callable[[Row], str] = lambda row: "") -> str:
    """One line a row: the chosen config and what it gains."""
    body = [
        {
            "op": row.op,
            "pass": row.pass_,
            "backend": row.backend,
            "dtype": row.dtype,
            "problem": row.problem,
            "config": row.config,
            "ms": row.ms,
            "× default": row.gain,
            "error": f"{row.error:.0%}",
            "": remark(row),
        }
        for row in rows
    ]
    return _tabulate(body) if body else "no rows"


def difference(a: Table, b: Table) -> str:
    """The rows in which two tables differ."""
    first, second = ({place(row): row for row in table.rows} for table in (a, b))
    body = []
    for where in sorted(first.keys() | second.keys()):
        old, new = first.get(where), second.get(where)
        if old is not None and new is not None and (old.config, old.ms) == (new.config, new.ms):
            continue
        op, pass_, backend, bucket = where
        body.append(
            {
                "op": op,
                "pass": pass_,
                "backend": backend,
                "bucket": words(json.loads(bucket)),
                "A": old.config if old else "–",
                "B": new.config if new else "–",
                "A ms": old.ms if old else None,
                "B ms": new.ms if new else None,
                "A ÷ B": old.ms / new.ms if old and new else None,
            }
        )
    return _tabulate(body) if body else "no difference"
