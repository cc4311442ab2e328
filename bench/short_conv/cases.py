"""Short convolutions: sizes, FLOPs and bytes, and the share of a copy's rate to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

PEERS = ("copy", "eager", "compiled")
OURS = "short_conv"
TARGETS = (Target(OURS, "fwd", "copy", 0.85, 0.92, 0.97),)


@dataclass(frozen=True)
class ConvCase(Case):
    """Sizes and rules of one call.

    Attributes:
        batch, tokens, channels, taps: B, T, D, K.
        gates: whether there are both, as in LFM2.
        silu, residual: of the rule.
    """

    op: ClassVar[str] = "short_conv"
    batch: int
    tokens: int
    channels: int
    taps: int = 3
    gates: bool = True
    silu: bool = False
    residual: bool = False
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        sizes = (self.batch * self.tokens, self.channels, self.taps)
        if mode == "fwd":
            return flops.short_conv_forward(*sizes)
        return flops.short_conv_backward(*sizes, again=self.silu or self.gates)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes: x and the gates are read, y is written, and backward reads these and
        the gradient of y and writes those of all that was read. The last state is written, too.
        """
        size, acc = self.torch_dtype.itemsize, 8 if self.dtype == "fp64" else 4
        row = self.batch * self.tokens * self.channels * size
        read = (1 + 2 * self.gates) * row
        weight = self.channels * self.taps * size
        state = self.batch * (self.taps - 1) * self.channels * acc
        if mode == "fwd":
            return read + row + weight + state
        return 2 * read + row + 2 * weight + state

    def sizes(self) -> dict[str, int | str | None]:
        """B, T, D, K, dtype and the rules; what is absent is None."""
        return {
            "B": self.batch,
            "T": self.tokens,
            "D": self.channels,
            "K": self.taps,
            "dtype": self.dtype,
            "gates": "yes" if self.gates else None,
            "silu": "yes" if self.silu else None,
            "residual": "yes" if self.residual else None,
        }

    def small(self) -> ConvCase:
        """The same rules on a ragged number of tokens."""
        batch, tokens = min(self.batch, 2), min(self.tokens, 75)
        return replace(self, batch=batch, tokens=tokens, channels=min(self.channels, 200))


def _gpu_cases() -> list[ConvCase]:
    lfm2 = ConvCase("conv-lfm2-d2048", ("quick", "headline"), 8, 4096, 2048, targets=TARGETS)
    canon = replace(
        lfm2, name="conv-canon-d2048", suites=("headline",), taps=4, gates=False, residual=True
    )
    return [
        lfm2,
        replace(lfm2, name="conv-lfm2-d1024", suites=("headline",), channels=1024),
        canon,
        replace(
            canon, name="conv-silu-d512", suites=("extra",), channels=512, residual=False,
            silu=True, targets=(),
        ),
        replace(
            lfm2, name="conv-lfm2-one-row", suites=("extra",), batch=1, tokens=2048, targets=()
        ),
        replace(lfm2, name="conv-lfm2-fp32", suites=("extra",), dtype="fp32", targets=()),
    ]  # fmt: skip


def _cpu_cases() -> list[ConvCase]:
    base = ConvCase(
        "cpu-conv-lfm2", ("quick",), 1, 512, 256, dtype="fp32", device="cpu", peers=PEERS[:2]
    )
    return [
        base,
        replace(
            base, name="cpu-conv-canon", suites=("headline",), taps=4, gates=False, residual=True,
            peers=PEERS,
        ),
        replace(base, name="cpu-conv-bf16", suites=("extra",), dtype="bf16", silu=True),
    ]  # fmt: skip


CASES = (*_gpu_cases(), *_cpu_cases())
