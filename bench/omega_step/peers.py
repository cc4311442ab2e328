"""A copy of as many bytes as a step moves: the rate that memory gives."""

from __future__ import annotations

from ..family import Contender, Work, copy
from .cases import OmegaStepCase
from .ours import Inputs

NAMES = {"copy": "a copy of half as many bytes, each read and written"}


def contenders(case: OmegaStepCase, names: tuple[str, ...]) -> list[Contender]:
    """The copy, if it is among `names`."""
    copy = Contender("copy", case, "copy", _copy, modes=("fwd",), checked=False)
    return [copy for name in case.peers if name in names]


def _copy(case: OmegaStepCase, inputs: Inputs) -> Work:
    return copy(case, inputs.given["q"])
