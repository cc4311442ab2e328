"""What a measurement ran on."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from .. import __version__
from ..autotune import space

_QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def _output(*command: str, folder: Path | None = None) -> str | None:
    """First line of a command's output; None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=folder)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return text.splitlines()[0].strip() if done.returncode == 0 and text else None


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = (_output("git", "rev-parse", "HEAD", folder=root) or "")[:12]
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", folder=root)
    return f"{commit} with local changes" if commit and changed else commit or None


def describe(device: torch.device | None = None) -> dict[str, str | None]:
    """GPU or CPU, clocks, driver, versions and commit; None for what is not there."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts: dict[str, str | None] = {}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        index = device.index if device.index is not None else torch.cuda.current_device()
        said = _output(
            "nvidia-smi", f"--id={_physical(index)}", f"--query-gpu={','.join(_QUERY)}",
            "--format=csv,noheader",
        )  # fmt: skip
        if said is not None:
            driver, clock, most, memory, power = (x.strip() for x in said.split(","))
            facts["driver"] = driver
            facts["clocks"] = f"SM {clock} of {most}, memory {memory}, power limit {power}"
        facts["cuda"] = torch.version.cuda
    else:
        facts["device"] = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    facts["python"] = platform.python_version()
    facts["torch"] = torch.__version__
    facts["triton"] = _installed("triton")
    facts["cupy"] = _installed("cupy-cuda13x", "cupy-cuda12x", "cupy")
    facts["fastweights"] = __version__
    facts["commit"] = _commit()
    return facts


def _physical(index: int) -> str:
    """What nvidia-smi calls a torch device: CUDA_VISIBLE_DEVICES renumbers, the UUID does not."""
    identity = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(index) if identity is None else f"GPU-{identity}"


def slug(environment: dict[str, str | None]) -> str:
    """Folder name of a device: "nvidia-h200", "cpu"."""
    name = environment["device"] or "unknown"
    if name.startswith("CPU"):
        return "cpu"
    return space.slug(name)
