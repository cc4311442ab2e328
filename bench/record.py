"""Records: a run as JSON, written whole or not at all, and two runs beside each other.

    {"schema": 1, "date": …, "seed": …, "layout": …, "environment": {…}, "ceilings": {…},
     "rows": […]}

Rows are those of `runner.py`; a run that is kept under `bench/results` is cut into one record an
op. Times of two records come from two processes: a comparison says how
one contender moved, and calls it noise where the p10–p90 ranges overlap.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .environment import slug

SCHEMA = 1
RESULTS = Path(__file__).resolve().parent / "results"


def make(
    rows: list[dict[str, Any]],
    *,
    environment: dict[str, str | None],
    ceilings: dict[str, Any] | None,
    seed: int,
    layout: str = "model",
) -> dict[str, Any]:
    """A record of rows, dated now."""
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return {
        "schema": SCHEMA,
        "date": now.isoformat(),
        "seed": seed,
        "layout": layout,
        "environment": environment,
        "ceilings": ceilings,
        "rows": rows,
    }


def default_path(record: dict[str, Any], suffix: str = ".json") -> Path:
    """`bench/results/<gpu>/<op>.json` of a record of one op."""
    (op,) = {row["op"] for row in record["rows"]}
    return RESULTS / slug(record["environment"]) / f"{op}{suffix}"


def by_op(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record for each op of a run, with the ceilings of its dtypes."""
    parts = []
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["op"] == op]
        part = record | {"rows": rows}
        if record["ceilings"]:
            dtypes = {row["sizes"]["dtype"] for row in rows}
            rates = record["ceilings"]["matmul_tflops"]
            kept = {dtype: rates[dtype] for dtype in rates if dtype in dtypes}
            part["ceilings"] = record["ceilings"] | {"matmul_tflops": kept}
        parts.append(part)
    return parts


def replace_file(path: Path, data: bytes) -> None:
    """Write beside the target and rename: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp gives 0600; a record is an ordinary file.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record; a NaN in it is an error, not a number."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    replace_file(path, (text + "\n").encode())


def read(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ValueError: not a record, or of another schema.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    found = record.get("schema") if isinstance(record, dict) else None
    if found != SCHEMA:
        raise ValueError(f"{path} has schema {found}, this version reads {SCHEMA}")
    return record


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of two records side by side, in the order of `a`, then those only `b` has.

    Returns:
        dicts of case, mode, contender, a and b (ms, or bytes in mode "memory"; None without a
        number), ratio a ÷ b (above 1: b is better) and verdict: "faster", "slower", "noise",
        "smaller", "larger", "same", or which side lacks it.
    """
    left = {_key(row): row for row in a["rows"]}
    right = {_key(row): row for row in b["rows"]}
    pairs = []
    for key in [*left, *(key for key in right if key not in left)]:
        one, two = left.get(key), right.get(key)
        x, y = _number(one), _number(two)
        pair: dict[str, Any] = dict(zip(("case", "mode", "contender"), key, strict=True))
        pair |= {"a": x, "b": y, "ratio": x / y if x and y else None}
        pair["verdict"] = _verdict(one, two, x, y)
        pairs.append(pair)
    return pairs


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["case"], row["mode"], row["contender"]


def _number(row: dict[str, Any] | None) -> float | None:
    if row is None or row["status"] != "ok":
        return None
    return row["peak_bytes"] if row["mode"] == "memory" else row["ms"]


def _verdict(
    one: dict[str, Any] | None, two: dict[str, Any] | None, x: float | None, y: float | None
) -> str:
    if one is None or two is None:
        return "not in A" if one is None else "not in B"
    if x is None or y is None:
        return f"{one['status']} in A" if x is None else f"{two['status']} in B"
    if one["mode"] == "memory":
        return "same" if x == y else "smaller" if y < x else "larger"
    if one["ms_p10"] <= two["ms_p90"] and two["ms_p10"] <= one["ms_p90"]:
        return "noise"
    return "faster" if y < x else "slower"
