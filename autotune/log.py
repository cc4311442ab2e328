"""What a sweep has done so far: lines of JSON that outlive it, so that the next run goes on there.

Every line names its case and what it holds for (`bound`: kernels, compiler, GPU, effort); after a
change of any of these it is not found again. A config is logged before it first runs: the
supervisor of a process that died then knows which one it was.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Progress:
    """What is known of one case.

    Attributes:
        errors: of the configs that passed their check, by name.
        rejected: reasons by name.
        row: the table's row as a dict, None as long as the case is not done.
        done: whether it is; without a row, no config was right.
    """

    errors: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    row: dict[str, Any] | None = None
    done: bool = False


class Log:
    """A file of lines, read once and appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[tuple[str, str], Progress] = {}
        for entry in lines(path):
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if not {"event", "case", "bound"} <= entry.keys():
            return
        case = self.of(entry["case"], entry["bound"])
        if entry["event"] == "checked":
            case.errors[entry["config"]] = entry["error"]
        elif entry["event"] == "rejected":
            case.rejected[entry["config"]] = entry["reason"]
        elif entry["event"] == "done":
            case.row, case.done = entry["row"], True

    def of(self, case: str, bound: str) -> Progress:
        """What is known of a case."""
        return self.cases.setdefault((case, bound), Progress())

    def write(self, event: str, case: str, bound: str, **fields: Any) -> None:
        """Append a line and remember it."""
        entry = {"event": event, "case": case, "bound": bound, **fields}
        append(self.path, entry | {"pid": os.getpid()})
        self._take(entry)

    def touch(self) -> None:
        """Show that the process is alive."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()


def append(path: Path, entry: dict[str, Any]) -> None:
    """One line at the end of a log, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        torn = file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write(b"\n" * bool(torn) + json.dumps(entry, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; the last may be torn by the death of its writer."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def unfinished(path: Path, pid: int) -> list[dict[str, Any]]:
    """The lines of configs that a process began and did not finish."""
    begun: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in lines(path):
        if entry.get("pid") != pid:
            continue
        key = (entry.get("case", ""), entry.get("bound", ""), entry.get("config", ""))
        if entry["event"] == "begin":
            begun[key] = entry
        else:
            begun.pop(key, None)
    return list(begun.values())
