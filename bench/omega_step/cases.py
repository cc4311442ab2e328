"""Steps of the Omega rule: sizes, FLOPs and bytes, and the share of a copy's rate to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

PEERS = ("copy",)
OURS = "omega_step_"
TARGETS = (Target(OURS, "fwd", "copy", 0.80, 0.85, 0.95),)


@dataclass(frozen=True)
class OmegaStepCase(Case):
    """Sizes and rules of one call, values as wide as keys, with decay and window gates.

    Attributes:
        rows, heads, width: N, H, D.
        window, chunk_size: of the rule.
        momentum: whether there is an S.
    """

    op: ClassVar[str] = "omega_step"
    rows: int
    heads: int
    width: int
    window: int = 4
    chunk_size: int = 64
    momentum: bool = False
    modes: tuple[str, ...] = field(default=("fwd",), kw_only=True)
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations: a token's share of a whole chunk."""
        b, d = self.chunk_size, self.width
        chunk = flops.omega_forward(b, b, self.window, d, d, momentum=self.momentum)
        return self.rows * self.heads * chunk // b

    def bytes(self, mode: str) -> int:
        """Compulsory bytes, the mean of a chunk's tokens.

        Of the memory, M is read; keys, residuals and weights of the rows so far, those of older
        tokens among them. The token's key, value and residual are written, and weights to its row.
        The first token of a chunk also reads the values of older tokens, and writes M, what moves
        up, and all weights.
        """
        b, older, size = self.chunk_size, self.window - 1, self.torch_dtype.itemsize
        acc, states = 8 if self.dtype == "fp64" else 4, 1 + self.momentum
        state = states * self.width * self.width * acc
        key, value, residual = self.width * size, self.width * size, self.width * acc
        weight, scalars = states * acc, (1 + 2 * self.momentum) * acc
        token = 3 * key + value + (2 + self.window + self.momentum) * acc + 2 * scalars
        written = key + value + residual
        each = b * (state + token + written)
        # The token at t finds t rows of its chunk, but the first one all of the chunk before.
        found = sum(older + t for t in (b, *range(1, b)))
        each += found * (key + residual + weight)
        each += sum(older + t + 1 for t in range(1, b)) * weight
        each += state + older * (key + 2 * value + residual) + (older + b) * weight
        counters = 2 * 4 + 2 * 4 + 8
        return self.rows * (self.heads * each // b + counters)

    def sizes(self) -> dict[str, int | str | None]:
        """N, H, D, dtype and the rules; what is absent is None."""
        return {
            "N": self.rows,
            "H": self.heads,
            "D": self.width,
            "dtype": self.dtype,
            "window": self.window,
            "chunk_size": self.chunk_size,
            "momentum": "yes" if self.momentum else None,
        }

    def small(self) -> OmegaStepCase:
        """The same rules on a few rows of two heads."""
        return replace(self, rows=min(self.rows, 5), heads=min(self.heads, 2))


def _gpu_cases() -> list[OmegaStepCase]:
    d64 = OmegaStepCase("step-256-d64", ("quick", "headline"), 256, 16, 64, targets=TARGETS)
    d128 = replace(d64, name="step-256-d128", suites=("headline",), width=128)
    fewer = [
        replace(case, name=f"step-{rows}-d{case.width}", rows=rows, suites=suites, targets=())
        for case in (d64, d128)
        for rows, suites in ((64, ("headline",)), (1, ("extra",)))
    ]
    return [
        d64,
        d128,
        *fewer,
        replace(
            d64, name="step-256-d64-momentum", suites=("headline",), momentum=True, targets=()
        ),
    ]  # fmt: skip


def _cpu_cases() -> list[OmegaStepCase]:
    base = OmegaStepCase("cpu-step-8-d32", ("quick",), 8, 2, 32, dtype="fp32", device="cpu")
    return [
        base,
        replace(base, name="cpu-step-64-d64", suites=("headline",), rows=64, heads=4, width=64),
        replace(base, name="cpu-step-momentum", suites=("headline",), momentum=True),
        replace(base, name="cpu-step-bf16", suites=("extra",), dtype="bf16"),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
