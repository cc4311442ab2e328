"""Models as wiring over the public ops: blocks, one file a model, a cost model, generation.

No kernel and no formula that an op could own lives here. This version ships the optimiser `Muon`
and no model yet.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .muon import Muon

__all__ = ["Muon"]

_HOMES = {"Muon": "muon"}


def __getattr__(name: str) -> Any:
    """Import the file of a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
