"""Calls of `omega_memory`: sizes, FLOPs and bytes, and peers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

PEERS = ("eager", "compiled", "fla")
OURS = "omega_memory"


@dataclass(frozen=True)
class OmegaCase(Case):
    """Sizes and rules of one call, values as wide as keys, with decay and window gates.

    Attributes:
        batch, tokens, heads, width: B, T, H, D.
        window, chunk_size: of the rule.
        momentum: whether there is an S.
        l2norm: keys and queries arrive as a projection leaves them, and are normalised in the call.
        symmetric: of symmetric features of degree 2 instead of keys themselves.
    """

    op: ClassVar[str] = "omega"
    batch: int
    tokens: int
    heads: int
    width: int
    window: int = 4
    chunk_size: int = 64
    momentum: bool = False
    l2norm: bool = False
    symmetric: bool = False
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        count = flops.omega_forward if mode == "fwd" else flops.omega_backward
        wide = self.width * (self.width + 3) // 2 if self.symmetric else self.width
        sizes = (self.tokens, self.chunk_size, self.window, wide, self.width)
        a_head = count(*sizes, momentum=self.momentum, pairs=self.width)
        return self.batch * self.heads * a_head

    def bytes(self, mode: str) -> int:
        """Compulsory bytes.

        Forward reads q, k, v and the gates, fp32, and writes y. Backward reads those and the
        gradient of y, and writes a gradient for each that it reads but that.
        """
        rows = self.batch * self.tokens * self.heads
        operand = rows * self.width * self.torch_dtype.itemsize
        gate = 8 if self.dtype == "fp64" else 4
        gates = rows * gate * (2 + self.window + self.momentum)
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
            "momentum": "yes" if self.momentum else None,
            "l2norm": "yes" if self.l2norm else None,
            "symmetric": "yes" if self.symmetric else None,
        }

    def small(self) -> OmegaCase:
        """The same rules on two heads of one row, the last chunk a ragged one."""
        tokens = min(self.tokens, max(2 * self.chunk_size + self.chunk_size // 3, 100))
        return replace(self, batch=1, heads=min(self.heads, 2), tokens=tokens)


@dataclass(frozen=True)
class MatmulCase(OmegaCase):
    """What is counted of a large product of square matrices, whose rate is what tensor cores do."""

    side: int = 8192

    def flops(self, mode: str) -> int:
        """Of the product."""
        return flops.matmul(self.side, self.side, self.side)

    def bytes(self, mode: str) -> int:
        """Of the three matrices."""
        return 3 * self.side**2 * self.torch_dtype.itemsize


def _gpu_cases() -> list[OmegaCase]:
    d64 = OmegaCase("omega-d64", ("quick", "headline"), 4, 8192, 16, 64)
    d128 = replace(d64, name="omega-d128", suites=("headline",), width=128)
    one_row = replace(d128, name="omega-d128-one-row", batch=1)

    def beside_fla(case: OmegaCase, *marks: float) -> OmegaCase:
        return replace(case, targets=(Target(OURS, "fwd", "fla", *marks),))

    return [
        beside_fla(d64, 1.5, 2.0, 3.0),
        beside_fla(d128, 2.0, 2.5, 3.5),
        beside_fla(one_row, 1.1, 1.5, 2.5),
        replace(d64, name="omega-d64-chunk16", suites=("headline",), chunk_size=16),
        # fla has no momentum.
        replace(
            d64, name="omega-d64-momentum", suites=("headline",), momentum=True,
            peers=("eager", "compiled"),
        ),
        replace(
            d64, name="omega-d64-symmetric", suites=("extra",), symmetric=True, modes=("fwd",),
            peers=("matmul", "eager"),
            targets=(Target(OURS, "fwd", "matmul", 0.18, 0.25, 0.31, measure="rate"),),
        ),
        replace(
            d128, name="omega-d128-l2norm", suites=("extra",), l2norm=True,
            peers=("eager", "fla"),
        ),
    ]  # fmt: skip


def _cpu_cases() -> list[OmegaCase]:
    base = OmegaCase(
        "cpu-omega-d32", ("quick",), 1, 256, 2, 32, dtype="fp32", device="cpu", peers=("eager",)
    )
    return [
        base,
        replace(base, name="cpu-omega-d64", suites=("headline",), tokens=1024, heads=4, width=64),
        replace(base, name="cpu-omega-chunk16", suites=("headline",), chunk_size=16),
        replace(base, name="cpu-omega-momentum", suites=("headline",), momentum=True),
        replace(
            base,
            name="cpu-omega-symmetric",
            suites=("headline",),
            width=8,
            symmetric=True,
            modes=("fwd",),
        ),
        replace(base, name="cpu-omega-bf16", suites=("extra",), dtype="bf16", l2norm=True),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
