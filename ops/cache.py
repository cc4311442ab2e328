"""Where compiled kernels and users' tables lie, and writing there so that nothing is half there.

Two variables rule it: FASTWEIGHTS_CACHE (the folder; else $XDG_CACHE_HOME/fastweights, else
~/.cache/fastweights) and FASTWEIGHTS_READONLY (1: read, never write).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


def home() -> Path:
    """The cache folder; it need not exist."""
    named = os.environ.get("FASTWEIGHTS_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fastweights"


def read_only() -> bool:
    """Whether nothing may be written.

    Raises:
        ValueError: FASTWEIGHTS_READONLY is neither 0 nor 1.
    """
    value = os.environ.get("FASTWEIGHTS_READONLY", "0") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"FASTWEIGHTS_READONLY is 0 or 1, not {value!r}")
    return value == "1"


def find(*names: str) -> Path | None:
    """An entry of the cache by its names, None if there is none."""
    path = home().joinpath(*names)
    return path if path.exists() else None


def keep(files: Mapping[str, bytes], *names: str) -> Path:
    """Write an entry, a folder of `files`, and return its path.

    It appears whole or not at all. Where another process was first, that one's stays.

    Raises:
        PermissionError: the cache is read-only.
        OSError: it cannot be written.
    """
    if read_only():
        raise PermissionError(f"FASTWEIGHTS_READONLY=1: {home()} is not written")
    path = home().joinpath(*names)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=path.parent))
    try:
        for name, content in files.items():
            (draft / name).write_bytes(content)
        draft.chmod(0o755)
        try:
            draft.rename(path)
        except OSError:  # onto a folder that is not empty: the first one stays
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, over what was there; the caller holds a lock for it.

    A draft that a killed process left behind goes, too.

    Raises:
        PermissionError: the file belongs to a cache that is read-only.
        OSError: it cannot be written.
    """
    if read_only() and home() in path.parents:
        raise PermissionError(f"FASTWEIGHTS_READONLY=1: {home()} is not written")
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".draft-{path.name}-"
    for stale in path.parent.glob(f"{prefix}*"):
        stale.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o644)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold `name` against other processes; a holder that dies lets go. Free if read-only."""
    if read_only():
        yield
        return
    folder = home() / "lock"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
