"""Calls of `atlas_memory`: sizes, FLOPs and bytes, and peers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...ops import flops
from ..cases import Case, Target

PEERS = ("omega-momentum", "eager", "compiled")
OURS = "atlas_memory"
NS_STEPS = 5


@dataclass(frozen=True)
class AtlasCase(Case):
    """Sizes and rules of one call, values as wide as keys, with decay and window gates.

    Attributes:
        batch, tokens, heads, width: B, T, H, D.
        window, chunk_size: of the rule.
        ns_stride: tokens from one Newton–Schulz to the next.
        symmetric: of symmetric features of degree 2 instead of keys themselves.
    """

    op: ClassVar[str] = "atlas"
    batch: int
    tokens: int
    heads: int
    width: int
    window: int = 4
    chunk_size: int = 64
    ns_stride: int = 64
    symmetric: bool = False
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    @property
    def wide(self) -> int:
        """Rows of a state."""
        return self.width * (self.width + 3) // 2 if self.symmetric else self.width

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        count = flops.atlas_forward if mode == "fwd" else flops.atlas_backward
        a_head = count(
            self.tokens, self.chunk_size, self.window, self.wide, self.width,
            stride=self.ns_stride, steps=NS_STEPS,
        )  # fmt: skip
        return self.batch * self.heads * a_head

    def bytes(self, mode: str) -> int:
        """Compulsory bytes, as of the Omega rule with one more gate."""
        rows = self.batch * self.tokens * self.heads
        operand = rows * self.width * self.torch_dtype.itemsize
        gate = 8 if self.dtype == "fp64" else 4
        gates = rows * gate * (4 + self.window)
        return 4 * operand + gates if mode == "fwd" else 7 * operand + 2 * gates

    def sizes(self) -> dict[str, int | str | None]:
        """B, T, H, D, dtype and the rules; what is absent is None."""
        return {
            "B": self.batch,
            "T": self.tokens,
            "H": self.heads,
            "D": self.width,
            "dtype": self.dtype,
            "window": self.window,
            "chunk_size": self.chunk_size,
            "ns_stride": self.ns_stride,
            "symmetric": "yes" if self.symmetric else None,
        }

    def small(self) -> AtlasCase:
        """The same rules on two heads of one row, the last chunk a ragged one."""
        tokens = 2 * self.chunk_size + self.chunk_size // 3
        return replace(self, batch=1, heads=min(self.heads, 2), tokens=tokens)


@dataclass(frozen=True)
class OmegaCounts(AtlasCase):
    """What is counted of `omega_memory` on the tensors of a case."""

    def flops(self, mode: str) -> int:
        """Of the Omega rule with momentum."""
        count = flops.omega_forward if mode == "fwd" else flops.omega_backward
        sizes = (self.tokens, self.chunk_size, self.window, self.wide, self.width)
        return self.batch * self.heads * count(*sizes, momentum=True, pairs=self.width)

    def bytes(self, mode: str) -> int:
        """Without the steps of what Newton–Schulz returns."""
        gate = 8 if self.dtype == "fp64" else 4
        less = self.batch * self.tokens * self.heads * gate
        return super().bytes(mode) - (less if mode == "fwd" else 2 * less)


def _gpu_cases() -> list[AtlasCase]:
    many = AtlasCase("atlas-d64", ("quick", "headline"), 16, 2048, 64, 64)
    few = replace(many, name="atlas-d64-few", suites=("headline",), batch=4, heads=16)
    alone: dict[str, Any] = {"modes": ("fwd",), "peers": ("omega-momentum", "eager")}
    return [
        # Time ÷ time of the Omega rule of at most 2.5, 2.0 and 1.6.
        replace(many, targets=(Target(OURS, "fwd", "omega-momentum", 0.4, 0.5, 0.625),)),
        few,
        replace(few, name="atlas-d128-few", suites=("extra",), width=128),
        replace(few, name="atlas-d64-few-every-token", ns_stride=1, tokens=512, **alone),
        replace(
            few, name="atlas-d64-symmetric", suites=("extra",), symmetric=True,
            targets=(Target(OURS, "fwd", "omega-momentum", 0.5),), **alone,
        ),
    ]  # fmt: skip


def _cpu_cases() -> list[AtlasCase]:
    base = AtlasCase(
        "cpu-atlas-d32", ("quick",), 1, 256, 2, 32, dtype="fp32", device="cpu",
        peers=("omega-momentum", "eager"),
    )  # fmt: skip
    return [
        base,
        replace(base, name="cpu-atlas-d64", suites=("headline",), tokens=512, heads=4, width=64),
        replace(base, name="cpu-atlas-stride8", suites=("headline",), ns_stride=8),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
