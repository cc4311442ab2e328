"""What every case of every op family has: name, suites, dtype, contenders, peers, targets.

A family's own case adds its sizes and says what they cost. `forward` is the training forward
(inputs require grad, what backward needs is saved); `backward` is the gradient of all inputs,
parameters included, without the forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, TypeVar

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
MODES = ("fwd", "bwd", "memory")
SUITES = ("quick", "headline", "extra", "crossover", "all")

C = TypeVar("C", bound="Case")


@dataclass(frozen=True)
class Target:
    """A ratio that a contender has to reach against another contender of the same case.

    Attributes:
        contender: the one that is judged.
        mode: "fwd" or "bwd".
        against: name of the other contender.
        floor, good, aim: the three marks; None where there is none.
        measure: "speed" (ms of the other ÷ ms) and "rate" (TFLOP/s ÷ TFLOP/s of the other) have
            to be at least the mark; "time" (ms ÷ ms of the other) and "time/flop" at most, and
            so does any of the ratios that the family's gate records.
    """

    contender: str
    mode: str
    against: str
    floor: float
    good: float | None = None
    aim: float | None = None
    measure: str = "speed"

    @property
    def lower_is_better(self) -> bool:
        """Whether the ratio has to stay under the marks."""
        return self.measure not in ("speed", "rate")


@dataclass(frozen=True)
class Case(ABC):
    """Rules of one call, and what it is timed beside; a family's case adds the sizes.

    Attributes:
        op: the op family (of the class).
        name: unique among all families, readable.
        suites: of `SUITES`; a case may be in several.
        dtype: key of `DTYPES`.
        modes: of "fwd", "bwd", "memory".
        contenders: our own calls, by the names that the family gives them.
        peers: other implementations; the first that runs is the one that every row's ratio is
            taken to.
        targets: ratios to reach.
        device: "cuda" or "cpu".
    """

    op: ClassVar[str]
    name: str
    suites: tuple[str, ...]
    _: KW_ONLY
    dtype: str = "bf16"
    modes: tuple[str, ...] = ("fwd", "bwd")
    contenders: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the operands."""
        return DTYPES[self.dtype]

    @abstractmethod
    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""

    @abstractmethod
    def bytes(self, mode: str) -> int:
        """Compulsory bytes: each operand read once, each result written once."""

    @abstractmethod
    def sizes(self) -> dict[str, int | str | None]:
        """What a record keeps of the case; "dtype" among it."""

    @abstractmethod
    def small(self) -> Case:
        """The same rules at a size whose float64 reference is cheap."""

    def in_dtype(self: C, dtype: str) -> C:
        """The case in another dtype, without targets: those were set for its own."""
        return replace(self, name=f"{self.name}-{dtype}", dtype=dtype, targets=())
