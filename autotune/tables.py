"""Tables of measured configs: one JSON file a GPU, read by `choose`, written by sweeps.

Shipped tables lie beside this file in `tables/`, a user's own in the cache's `tables/`; a user's
row beats a shipped one. A call finds its config so:

    this GPU        the row of the call's bucket, else that of the nearest bucket
    same arch       likewise, in tables of other GPUs of the architecture
    else            the closed-form default

A row whose config has left the space, or does not fit the call, is passed over, and so is a config
that was rejected for the bucket with these kernels, by this compiler, on this architecture. Rows
measured on another state of the kernels still serve, and say so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from math import log2
from pathlib import Path
from typing import Any

from .settle import settled
from .source import compiler, fingerprint
from .space import DEFAULT, Choice, Config, Device, Key, Space

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent / "tables"

Bucket = dict[str, Any]


def named(key: Key) -> Bucket:
    """A key as a table stores it: values by field name, by position if it has none."""
    names = getattr(key, "_fields", None) or map(str, range(len(key)))
    return dict(zip(names, key, strict=True))


@dataclass(frozen=True)
class Row:
    """The measured config of one bucket.

    Attributes:
        op, pass_, backend: of the space.
        bucket: the key, see `named`.
        dtype: of the inputs it was measured with.
        problem: name of what was timed.
        config: name of the config to use.
        winner: name of the fastest, from which `config` differs by less than 2 % if it does.
        default: name of the closed-form default.
        times: median milliseconds by config, as far as it was timed.
        error: worst error of `winner` as a share of what is allowed.
        source: `source.fingerprint` of what was measured.
        toolchain: versions of torch and of the compiler.
        notes: what else the sweep found: registers, FLOPs, bytes.
    """

    op: str
    pass_: str
    backend: str
    bucket: Bucket
    dtype: str
    problem: str
    config: str
    winner: str
    default: str
    times: dict[str, float]
    error: float
    source: str
    toolchain: dict[str, str]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Milliseconds of the chosen config."""
        return self.times[self.config]

    @property
    def gain(self) -> float:
        """How many times faster than the closed-form default."""
        return self.times[self.default] / self.ms


@dataclass(frozen=True)
class Rejected:
    """A config that must not be used for a bucket, and why.

    It holds for these kernels (`source`), this `compiler` and this `arch` only.
    """

    op: str
    pass_: str
    backend: str
    bucket: Bucket
    config: str
    reason: str
    source: str
    compiler: str
    arch: str


def place(entry: Row | Rejected) -> tuple[str, str, str, str]:
    """What an entry is about: op, pass, backend and bucket."""
    bucket = json.dumps(entry.bucket, sort_keys=True)
    return entry.op, entry.pass_, entry.backend, bucket


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of GPU.

    Attributes:
        gpu: its slug, which is the file's name, too.
        arch: its architecture.
        rows, rejected: sorted by `place`.
    """

    gpu: str
    arch: str
    rows: tuple[Row, ...] = ()
    rejected: tuple[Rejected, ...] = ()

    def joined(self, other: Table) -> Table:
        """Both; what `other` measured replaces what this table has at the same place.

        Raises:
            ValueError: tables of two GPUs.
        """
        if (other.gpu, other.arch) != (self.gpu, self.arch):
            raise ValueError(f"tables of two GPUs: {self.gpu} and {other.gpu}")
        renewed = {*map(place, other.rows), *map(place, other.rejected)}
        rows = [*(row for row in self.rows if place(row) not in renewed), *other.rows]
        rejected = [entry for entry in self.rejected if place(entry) not in renewed]
        return Table(
            self.gpu,
            self.arch,
            tuple(settled(sorted(rows, key=place))),
            tuple(sorted([*rejected, *other.rejected], key=lambda e: (place(e), e.config))),
        )


# ---- files --------------------------------------------------------------------------------------


class Unreadable(ValueError):
    """A file that is no table: torn, foreign, or of another schema."""


class Foreign(Unreadable):
    """A file that something else wrote, or a newer version of this package."""


def dump(table: Table) -> bytes:
    """The file of a table."""

    def plain(entry: Row | Rejected) -> dict[str, Any]:
        written = asdict(entry)
        written["pass"] = written.pop("pass_")
        return written

    document = {
        "schema": SCHEMA,
        "gpu": table.gpu,
        "arch": table.arch,
        "rows": [plain(row) for row in table.rows],
        "rejected": [plain(entry) for entry in table.rejected],
    }
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def load(path: Path) -> Table:
    """Read a table.

    Raises:
        Unreadable: it is torn, foreign, or of another schema.
        OSError: there is no such file.
    """
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise Unreadable(f"{path}: not a whole JSON file ({error})") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, int):
        raise Foreign(f"{path}: not a table of configs")
    if schema != SCHEMA:
        kind = Foreign if schema > SCHEMA else Unreadable
        raise kind(f"{path}: has schema {schema}, this version reads {SCHEMA}")
    try:
        return Table(
            gpu=document["gpu"],
            arch=document["arch"],
            rows=tuple(_row(**_renamed(entry)) for entry in document["rows"]),
            rejected=tuple(Rejected(**_renamed(entry)) for entry in document["rejected"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise Foreign(f"{path}: not a table of configs ({error})") from None


def _renamed(entry: dict[str, Any]) -> dict[str, Any]:
    return {"pass_" if name == "pass" else name: value for name, value in entry.items()}


def _row(**fields: Any) -> Row:
    row = Row(**fields)
    if not {row.config, row.winner, row.default} <= row.times.keys():
        raise KeyError(f"a time of {row.config}")
    return row


def path_of(gpu: str) -> Path:
    """Where a user's own table of a GPU is."""
    from ..ops import cache

    return cache.home() / "tables" / f"{gpu}.json"


def update(path: Path, new: Table) -> Table:
    """Join a table to the one in a file, under a lock, and return what the file now holds.

    A torn file or one of an older schema is replaced.

    Raises:
        Foreign: the file is somebody else's.
        ValueError: it is another GPU's table.
        OSError: it cannot be written, or the cache is read-only.
    """
    from ..ops import cache

    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with cache.lock(f"table-{name}"):
        joined = Table(new.gpu, new.arch)
        try:
            joined = load(path)
        except FileNotFoundError:
            pass
        except Foreign:
            raise
        except Unreadable as error:
            warnings.warn(f"{error}; it is replaced", stacklevel=2)
        joined = joined.joined(new)
        cache.replace(path, dump(joined))
    return joined


# ---- looking up ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """A table and how `explain` calls it."""

    table: Table
    label: str


@functools.cache
def _origins(gpu: str, arch: str) -> tuple[tuple[Origin, ...], tuple[Origin, ...]]:
    """Tables of this GPU and of others of its architecture, a user's before shipped ones."""
    own: list[Origin] = []
    alike: list[Origin] = []
    for folder, kind in ((path_of(gpu).parent, "own "), (SHIPPED, "")):
        for table in _tables(folder):
            if table.gpu == gpu:
                own.append(Origin(table, f"{kind}table {table.gpu}"))
            elif table.arch == arch:
                alike.append(Origin(table, f"{kind}table {table.gpu} of the same architecture"))
    return tuple(own), tuple(alike)


def _tables(folder: Path) -> Iterator[Table]:
    """The tables of a folder; one that cannot be read is passed over, and said once."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.json")):
            try:
                yield load(path)
            except (Unreadable, OSError) as error:
                warnings.warn(f"{error}; it is not used", stacklevel=2)


def forget() -> None:
    """Read the files again when next asked."""
    _origins.cache_clear()
    contested.cache_clear()
    fingerprint.cache_clear()


def consult(space: Space, key: Key, device: Device) -> Choice:
    """The config of a call by the rules above, and where it comes from.

    Raises:
        RuntimeError: every config that fits was rejected.
    """
    own, alike = _origins(device.name, device.arch)
    refused = _refused(own, space, key, device)
    by_name = {
        config.name: config
        for config in space.configs
        if config.name not in refused and space.fits(config, key, device) is None
    }
    for origins in (own, alike):
        found = _nearest(origins, space, key, by_name)
        if found is not None:
            return found
    default = space.default(key, device)
    if default.name not in refused:
        return Choice(default, DEFAULT)
    for config in by_name.values():
        return Choice(config, f"the default was rejected: {refused[default.name]}")
    raise RuntimeError(
        f"{space.name}: on {device.name} every config for {named(key)} was rejected, "
        f"{default.name} because it {refused[default.name]}; use another backend"
    )


def _nearest(
    origins: Iterable[Origin], space: Space, key: Key, by_name: dict[str, Config]
) -> Choice | None:
    # The order of the origins decides between rows that are equally near.
    best: tuple[float, Row, Origin] | None = None
    for origin in origins:
        for row in of_space(origin.table.rows, space):
            away = distance(space, key, row.bucket)
            if row.config in by_name and away is not None and (best is None or away < best[0]):
                best = (away, row, origin)
    if best is None:
        return None
    away, row, origin = best
    why = [origin.label]
    if away:
        why.append(f"nearest bucket {row.problem}")
    return Choice(by_name[row.config], ", ".join(why), row.source)


def of_space(entries: Iterable[Any], space: Space) -> Iterator[Any]:
    """The rows or rejections of a space."""
    wanted = (space.op, space.pass_, space.backend)
    return (e for e in entries if (e.op, e.pass_, e.backend) == wanted)


def distance(space: Space, key: Key, bucket: Bucket) -> float | None:
    """How far a measured bucket is from a call's; None if it says nothing about the call.

    A field in which they may differ counts its factor of two for numbers, else one.
    """
    wanted = named(key)
    if wanted.keys() != bucket.keys():
        return None
    away = 0.0
    for name, value in wanted.items():
        other = bucket[name]
        if value == other:
            continue
        if name not in space.near:
            return None
        number = not isinstance(value, bool) and isinstance(value, int) and value * other > 0
        away += abs(log2(value / other)) if number else 1.0
    return away


def measured(space: Space, key: Key, device: Device) -> Row | None:
    """The row of exactly this bucket on this GPU, a user's before a shipped one."""
    for origin in _origins(device.name, device.arch)[0]:
        for row in of_space(origin.table.rows, space):
            if row.bucket == named(key):
                return row
    return None


@functools.cache
def contested(op: str, device: Device) -> bool:
    """Whether more than one backend of an op was measured on this GPU."""
    own = _origins(device.name, device.arch)[0] if device.name else ()
    found = {row.backend for origin in own for row in origin.table.rows if row.op == op}
    return len(found) > 1


def _refused(origins: Iterable[Origin], space: Space, key: Key, device: Device) -> dict[str, str]:
    """Names and reasons of the configs that were rejected for this bucket."""
    bucket = named(key)
    found = [
        entry
        for origin in origins
        for entry in of_space(origin.table.rejected, space)
        if entry.bucket == bucket and entry.arch == device.arch
    ]
    if not found:
        return {}
    bound = (fingerprint(space), compiler(space.backend))
    return {e.config: e.reason for e in found if (e.source, e.compiler) == bound}


def reason(space: Space, choice: Choice) -> str:
    """Why a config was chosen, and whether what was measured is no longer what runs.

    Kernels are parsed for this, which a launch has no need of.
    """
    older = choice.source not in (None, fingerprint(space))
    return f"{choice.why}, measured on older source" if older else choice.why


def older(row: Row, spaces: Iterable[Space]) -> bool:
    """Whether a row was measured on another state of its kernels or configs than today's."""
    return any(row.source != fingerprint(space) for space in spaces for _ in of_space([row], space))
