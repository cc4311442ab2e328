"""The list of op families, and the choice among their cases. A new family is entered here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .atlas import ATLAS
from .attention import ATTENTION
from .cases import DTYPES, MODES, Case
from .delta_rewrite import DELTA_REWRITE
from .family import Family
from .gated_delta import GATED_DELTA
from .gated_delta_step import GATED_DELTA_STEP
from .newton_schulz import NEWTON_SCHULZ
from .omega import OMEGA
from .omega_step import OMEGA_STEP
from .polar_decode import POLAR_DECODE
from .polynomial import POLYNOMIAL
from .short_conv import SHORT_CONV

FAMILIES: dict[str, Family[Any, Any]] = {
    family.op: family
    for family in (
        ATTENTION,
        NEWTON_SCHULZ,
        OMEGA,
        OMEGA_STEP,
        ATLAS,
        POLYNOMIAL,
        POLAR_DECODE,
        GATED_DELTA,
        GATED_DELTA_STEP,
        SHORT_CONV,
        DELTA_REWRITE,
    )
}


def cases() -> dict[str, Case]:
    """Every case of every family, by name."""
    return {case.name: case for family in FAMILIES.values() for case in family.cases}


def select(
    device: str,
    *,
    suite: str | None = None,
    names: Sequence[str] = (),
    ops: Sequence[str] = (),
    dtype: str | None = None,
    modes: Sequence[str] = MODES,
) -> list[Case]:
    """The cases to run, in the order of the list.

    Args:
        device: "cuda" or "cpu".
        suite: one of `SUITES`; None is "headline" on a GPU and "all" on a CPU.
        names: run these instead of a suite.
        ops: keep these op families; none given keeps all.
        dtype: run every case in this dtype instead of its own.
        modes: keep these modes; cases left with none are dropped.

    Raises:
        ValueError: an unknown name, op or dtype, or a case of another device.
    """
    every = cases()
    for op in ops:
        if op not in FAMILIES:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(sorted(FAMILIES))}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    here = [case for case in every.values() if case.device == device]
    for name in names:
        if name not in every:
            raise ValueError(
                f"unknown case {name!r}; on {device}: {', '.join(c.name for c in here)}"
            )
        if every[name].device != device:
            raise ValueError(f"case {name!r} is for {every[name].device}, this run is on {device}")
    if names:
        here = [every[name] for name in names]
    else:
        wanted = suite or ("headline" if device == "cuda" else "all")
        here = [case for case in here if wanted == "all" or wanted in case.suites]
    chosen = []
    for case in here:
        kept = tuple(mode for mode in case.modes if mode in modes)
        if kept and (not ops or case.op in ops):
            case = replace(case, modes=kept)
            chosen.append(case if dtype in (None, case.dtype) else case.in_dtype(str(dtype)))
    return chosen
