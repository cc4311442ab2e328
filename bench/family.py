"""What the driver asks of an op family, and what the family answers with.

A family is one object, listed in `families.py`. Names of contenders hold no ", ", which marks a
relative: our call on other sizes, timed for comparison in the same turn ("call, label").
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..autotune.verify import FROBENIUS_FACTOR
from ..ops import explain
from .cases import MODES, Case

C = TypeVar("C", bound=Case)
I = TypeVar("I")

PEERS = 3.0  # peers are checked for computing the right function, not for rounding


class Unavailable(Exception):
    """Raised by a contender's `build`: it cannot run these inputs here, and says why."""


@dataclass
class Work:
    """A call ready to be run, captured and differentiated.

    Attributes:
        forward: runs the call and returns the outputs that receive gradients.
        leaves: gradients are taken with respect to these, by name.
        grad_outputs: upstream gradients, one an output.
        context: entered around every forward, backward and capture.
        notes: what the record should keep (backend, configs).
    """

    forward: Callable[[], tuple[Tensor, ...]]
    leaves: dict[str, Tensor]
    grad_outputs: tuple[Tensor, ...]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    notes: dict[str, Any] = field(default_factory=dict)

    def backward(self, outputs: tuple[Tensor, ...], *, retain: bool = True) -> tuple[Tensor, ...]:
        """Gradients of all leaves; with `retain`, `outputs` can be differentiated again."""
        return torch.autograd.grad(
            outputs, tuple(self.leaves.values()), self.grad_outputs, retain_graph=retain
        )


def copy(case: Case, result: Tensor) -> Work:
    """A floor: as many bytes as the forward moves, half of them read and half of them written.

    `result` stands where a call has its result, on the device of all.
    """
    return copy_of(case.bytes("fwd") // 2, result)


def copy_of(size: int, result: Tensor) -> Work:
    """So many bytes read and as many written, by a kernel.

    `y.copy_(x)` is a copy by the driver, which takes half as long again at some sizes.
    """
    x = torch.randn(size // 4, device=result.device)
    y = torch.empty_like(x)
    return Work(lambda: (torch.mul(x, 1.0, out=y),), {}, (result,))


@dataclass(frozen=True)
class Contender:
    """One row of a table: a name, the sizes it is counted at, and how to build it.

    It can be built on any inputs of the same kind: the gate builds it on a small case first.

    Attributes:
        name: shown and recorded.
        case: its FLOPs and bytes are this case's (a relative's own).
        function: what it computes, by the family's word: the reference that the gate takes.
        build: from a case and its inputs to a `Work`; may raise `Unavailable`.
        ours: our own op; the gate is stricter and also runs it on poisoned memory.
        reason: why it cannot run here, as far as the case alone tells, or None.
        modes: those that it has rows in.
        checked: False for a floor, which runs only part of the work: no result passes the gate.
    """

    name: str
    case: Case
    function: str
    build: Callable[[Any, Any], Work]
    ours: bool = False
    reason: str | None = None
    modes: tuple[str, ...] = MODES
    checked: bool = True


def relative(contender: str) -> bool:
    """Whether a row of this name shows our call on the sizes of another case."""
    return ", " in contender


class Results(NamedTuple):
    """Results and gradients by name: what came, the float64 truth, and what plain torch gives."""

    got: dict[str, Tensor]
    truth: dict[str, Tensor]
    plain: dict[str, Tensor]


class Family(ABC, Generic[C, I]):
    """An op family: its cases and everything about them that the driver does not know.

    Attributes:
        op: on the command line, in rows and as the name of its record.
        cases: all of them, GPU and CPU, in the order of the tables.
        peers: other implementations, name to what it is.
        backends: those that our contenders run on unless asked otherwise; the first one's rows
            carry plain names.
        outputs: names of what a forward returns, in order.
        ratios: of these results the ratio of the error to plain torch's is recorded with each row,
            result to name; targets may be set on them.
        caption: what has to be known to read the family's table in the README.
    """

    op: str
    cases: tuple[C, ...]
    peers: Mapping[str, str]
    backends: tuple[str, ...] = ("auto",)
    outputs: tuple[str, ...] = ("out",)
    ratios: Mapping[str, str] = MappingProxyType({})
    caption: str = ""

    @abstractmethod
    def inputs(self, case: C, generator: torch.Generator) -> I:
        """Random inputs on the generator's device, upstream gradients among them."""

    @abstractmethod
    def ours(self, case: C, backends: tuple[str, ...]) -> list[Contender]:
        """Our own contenders: the case's calls on each backend."""

    @abstractmethod
    def others(self, case: C, names: tuple[str, ...], layout: str) -> list[Contender]:
        """The case's peers among `names`.

        `layout` is "model", operands as a model has them, or "natural", as the peer likes them.
        """

    @abstractmethod
    def whole(
        self, contender: Contender, case: C, inputs: I, work: Work, got: dict[str, Tensor]
    ) -> Results:
        """Every result and gradient, on small inputs."""

    @abstractmethod
    def part(
        self, contender: Contender, case: C, inputs: I, work: Work, got: dict[str, Tensor]
    ) -> Results:
        """What a reference can say of the results on the tensors that are timed.

        A peer whose backward is not timed comes without gradients.
        """

    def factor(self, contender: Contender) -> float:
        """Allowed multiple of plain torch's error."""
        return FROBENIUS_FACTOR if contender.ours else PEERS

    def contenders(
        self,
        case: C,
        *,
        backends: tuple[str, ...] | None = None,
        peers: tuple[str, ...] | None = None,
        layout: str = "model",
    ) -> list[Contender]:
        """All rows of a case, ours first; None is the family's own backends, and every peer."""
        found = self.ours(case, self.backends if backends is None else backends)
        return found + self.others(case, case.peers if peers is None else peers, layout)


def explained(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> dict[str, Any]:
    """Notes of a call of ours: the backend that runs it, and the config of each pass.

    Raises:
        Unavailable: nothing that was asked for supports the call.
    """
    said = explain(function, *tensors, **options)
    if said.backend is None:
        raise Unavailable("; ".join(said.refused.values()))
    return {
        "backend": said.backend,
        "configs": {pass_: config.name for pass_, config in said.configs.items()},
    }
