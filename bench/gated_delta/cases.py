"""Calls of `gated_delta_rule`: sizes, FLOPs and bytes, peers, and ratios to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

PEERS = ("fla", "compiled", "eager")
OURS = "gated_delta_rule"


@dataclass(frozen=True)
class DeltaCase(Case):
    """Sizes of one call, values as wide as keys.

    Attributes:
        batch, tokens, heads, width: B, T, H, D.
        groups: heads of v, and memories, to one of q and k.
        l2norm: keys and queries arrive as a projection leaves them, and are normalised in the call.
    """

    op: ClassVar[str] = "gated_delta"
    batch: int
    tokens: int
    heads: int
    width: int
    groups: int = 1
    l2norm: bool = False
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        count = flops.gated_delta_forward if mode == "fwd" else flops.gated_delta_backward
        return count(self.batch * self.tokens * self.heads, self.width, self.width)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes.

        Forward reads q, k, v and the gates and writes o. Backward reads those and the gradient of
        o, and writes a gradient for each that it reads but that.
        """
        size, acc = self.torch_dtype.itemsize, 8 if self.dtype == "fp64" else 4
        rows = self.batch * self.tokens * self.heads
        values, shared = rows * self.width * size, rows // self.groups * self.width * size
        once = 2 * shared + values + 2 * rows * acc
        return once + values if mode == "fwd" else 2 * once + values

    def sizes(self) -> dict[str, int | str | None]:
        """B, T, H, D, dtype and the rules; what is absent is None."""
        return {
            "B": self.batch,
            "T": self.tokens,
            "H": self.heads,
            "D": self.width,
            "dtype": self.dtype,
            "groups": self.groups if self.groups > 1 else None,
            "l2norm": "yes" if self.l2norm else None,
        }

    def small(self) -> DeltaCase:
        """The same rules on a few heads of one row, the last chunk a ragged one."""
        heads = min(self.heads, 2 * self.groups)
        return replace(self, batch=1, heads=heads, tokens=min(self.tokens, 150))


def _gpu_cases() -> list[DeltaCase]:
    base = DeltaCase("delta-8k-h16", ("quick", "headline"), 1, 8192, 16, 128)
    few, many = PEERS[::2], (OURS, "fwd", "fla")  # 512 chunks take minutes to compile
    return [
        replace(base, targets=(Target(*many, 1.0, 1.4, 2.3),)),
        replace(base, name="delta-32k-h8", suites=("headline",), tokens=32768, heads=8, peers=few,
                targets=(Target(*many, 1.2, 2.0, 4.0),)),
        replace(base, name="delta-8x4k-h16", suites=("headline",), batch=8, tokens=4096, peers=few,
                targets=(Target(*many, 1.2, 1.8, 3.0),)),
        replace(base, name="delta-8k-h16-l2norm", suites=("extra",), l2norm=True),
        # fla takes heads of queries in groups, too.
        replace(base, name="delta-8k-h64-groups", suites=("extra",), heads=64, groups=4),
        replace(base, name="delta-2x8k-h16-d64", suites=("extra",), batch=2, width=64),
    ]  # fmt: skip


def _cpu_cases() -> list[DeltaCase]:
    base = DeltaCase(
        "cpu-delta", ("quick",), 1, 256, 4, 32, 2, dtype="fp32", device="cpu", peers=("eager",)
    )
    return [
        base,
        replace(base, name="cpu-delta-l2norm", suites=("headline",), l2norm=True, tokens=1024),
        replace(base, name="cpu-delta-bf16", suites=("extra",), dtype="bf16"),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
