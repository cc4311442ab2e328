"""Steps of the gated delta rule: sizes, FLOPs and bytes, and the share of a copy to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

PEERS = ("copy", "eager", "gathered", "compiled")
OURS = "gated_delta_step_"
TARGETS = (Target(OURS, "fwd", "copy", 0.80, 0.88, 0.95),)


@dataclass(frozen=True)
class DeltaStepCase(Case):
    """Sizes of one call, q and k of norm one, values as wide as keys.

    Attributes:
        rows, heads, width: B, H, D.
        groups: heads of v, and of memories, to one of q and k.
    """

    op: ClassVar[str] = "gated_delta_step"
    rows: int
    heads: int
    width: int
    groups: int = 1
    modes: tuple[str, ...] = field(default=("fwd",), kw_only=True)
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations."""
        return flops.gated_delta_forward(self.rows * self.heads, self.width, self.width)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes: a memory is read and written; q, k, v, gates and slots are read and o
        is written.
        """
        size, acc = self.torch_dtype.itemsize, 8 if self.dtype == "fp64" else 4
        memory = self.width * self.width * acc
        head = 2 * memory + 2 * self.width * size + 2 * acc
        shared = 2 * self.width * size
        return self.rows * (self.heads * head + self.heads // self.groups * shared + 8)

    def sizes(self) -> dict[str, int | str | None]:
        """N, H, D, dtype and groups; what is absent is None."""
        return {
            "N": self.rows,
            "H": self.heads,
            "D": self.width,
            "dtype": self.dtype,
            "groups": self.groups if self.groups > 1 else None,
        }

    def small(self) -> DeltaStepCase:
        """The same widths and groups on a few rows."""
        return replace(self, rows=min(self.rows, 5), heads=min(self.heads, 2 * self.groups))


def _gpu_cases() -> list[DeltaStepCase]:
    base = DeltaStepCase(
        "delta-step-64-h16", ("quick", "headline"), 64, 16, 128, targets=TARGETS
    )  # fmt: skip
    return [
        base,
        replace(base, name="delta-step-64-h32-groups", suites=("headline",), heads=32, groups=2),
        replace(base, name="delta-step-256-h16", suites=("headline",), rows=256),
        replace(base, name="delta-step-256-d64", suites=("headline",), rows=256, width=64,
                targets=()),
        replace(base, name="delta-step-8-h16", suites=("extra",), rows=8, targets=()),
        replace(base, name="delta-step-1-h16", suites=("extra",), rows=1, targets=()),
    ]  # fmt: skip


def _cpu_cases() -> list[DeltaStepCase]:
    base = DeltaStepCase(
        "cpu-delta-step", ("quick",), 8, 4, 32, 2, dtype="fp32", device="cpu", peers=PEERS[:3]
    )
    large = {"rows": 64, "width": 64, "groups": 1, "peers": PEERS}
    return [
        base,
        replace(base, name="cpu-delta-step-64", suites=("headline",), **large),
        replace(base, name="cpu-delta-step-bf16", suites=("extra",), dtype="bf16"),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
