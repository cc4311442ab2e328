"""A sweep survives its own kernels: they run in a process that may die, watched by another.

A wrong config can hang, or leave the GPU unusable for the process that ran it. The watcher sees
either, writes into the log that this config did it, and starts the process again, which goes on
behind it. When the watcher itself is killed, the process ends by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .log import append, unfinished

BROKEN = 70  # exit status of a process whose device broke; the log says by which config
START = 60.0  # seconds that imports may take before the first line
FINAL = (0, 1, 2, 3, 4)  # exit statuses that starting again would not change


def watch(
    arguments: Sequence[str], logs: Sequence[Path], *, budget: float | None, patience: float
) -> int:
    """Run `fastweights autotune sweep` with these arguments until it is done; its exit status.

    Args:
        arguments: of the sweep, without its budget.
        logs: the files that it writes; one of them changes while it is alive.
        budget: seconds in all.
        patience: seconds without a line in a log after which the process counts as hanging.
    """
    deadline = None if budget is None else time.monotonic() + budget
    while True:
        command = [sys.executable, "-m", "fastweights.autotune.cli", "sweep", *arguments]
        command += ["--under", str(os.getpid())]
        if deadline is not None:
            command += ["--budget", str(max(deadline - time.monotonic(), 0.0))]
        process = subprocess.Popen(command)
        try:
            stuck = _wait(process, logs, patience)
        except BaseException:
            process.kill()
            process.wait()
            raise
        code = process.returncode
        if not stuck and code in FINAL:
            return code
        blamed = _blame(process, logs, patience if stuck else None)
        if code != BROKEN and not blamed:
            print(f"the sweep's process ended with status {code} outside of any config")
            return 1


def _wait(process: subprocess.Popen[bytes], logs: Sequence[Path], patience: float) -> bool:
    """Whether the process hung and was killed."""
    begun = time.time()
    while True:
        try:
            process.wait(timeout=min(1.0, patience / 4))
            return False
        except subprocess.TimeoutExpired:
            pass
        touched = [path.stat().st_mtime for path in logs if path.exists()]
        last = max((when for when in touched if when > begun), default=begun + START)
        if time.time() - last > patience:
            process.kill()
            process.wait()
            return True


def _blame(process: subprocess.Popen[bytes], logs: Sequence[Path], waited: float | None) -> bool:
    """Reject the config that a dead process had begun; whether there is one."""
    code = process.returncode
    if waited is not None:
        reason = f"did not return within {waited:.0f} s"
    elif code < 0:
        reason = f"killed its process ({signal.Signals(-code).name})"
    else:
        reason = f"ended its process with status {code}"
    found = False
    for path in logs:
        for entry in unfinished(path, process.pid):
            append(path, entry | {"event": "rejected", "reason": reason})
            found = True
    return found


def end_with(parent: int) -> None:
    """End this process when its parent has ended."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
