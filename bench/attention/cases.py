"""Attention calls: sizes, FLOPs and bytes, peers and the ratios a case has to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

GPU_PEERS = ("sdpa-cudnn", "sdpa-flash", "flex", "fa4")
SDPA_PEERS = ("sdpa-cudnn", "sdpa-flash")


@dataclass(frozen=True)
class AttentionCase(Case):
    """Sizes of one attention call.

    Attributes:
        batch, tokens, heads_q, heads_k, head_dim: B, T, Hq, Hk, D.
        window: sliding window, or None.
        sequences: number of equal packed sequences along T (then batch is 1), or None.
        relatives: our Polar call on other sizes, timed in the same turn: (label, case).
    """

    op: ClassVar[str] = "polar_attention"
    batch: int
    tokens: int
    heads_q: int
    heads_k: int
    head_dim: int
    window: int | None = None
    sequences: int | None = None
    relatives: tuple[tuple[str, AttentionCase], ...] = ()
    contenders: tuple[str, ...] = field(default=("polar", "softmax"), kw_only=True)
    peers: tuple[str, ...] = field(default=SDPA_PEERS, kw_only=True)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_k

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return self.tokens // (self.sequences or 1)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        pairs = flops.visible_pairs(self.length, self.length, causal=True, window=self.window)
        pairs *= self.batch * (self.sequences or 1)
        count = flops.attention_forward if mode == "fwd" else flops.attention_backward
        return count(pairs, self.head_dim, self.heads_q)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes.

        Forward reads q, k, v and writes out; backward reads q, k, v, out and its gradient and
        writes three gradients. The per-row statistics, 1/D of an operand each, are left out.
        """
        q = self.batch * self.tokens * self.heads_q * self.head_dim * self.torch_dtype.itemsize
        kv = 2 * q // self.group
        return 2 * q + kv if mode == "fwd" else 4 * q + 2 * kv

    def sizes(self) -> dict[str, int | str | None]:
        """B, T, Hq, Hk, D, dtype, window and sequences."""
        return {
            "B": self.batch,
            "T": self.tokens,
            "Hq": self.heads_q,
            "Hk": self.heads_k,
            "D": self.head_dim,
            "dtype": self.dtype,
            "window": self.window,
            "sequences": self.sequences,
        }

    def small(self) -> AttentionCase:
        """The same rules at a size whose float64 reference is cheap, with ragged lengths."""
        limit = 1000 if self.device == "cuda" else 200
        heads_k = min(self.heads_k, 4)
        sequences = None if self.sequences is None else min(self.sequences, 3)
        length = min(self.length, limit // (sequences or 1))
        window = None if self.window is None else min(self.window, max(length // 3, 1))
        return replace(
            self,
            batch=1,
            tokens=length * (sequences or 1),
            heads_k=heads_k,
            heads_q=heads_k * self.group,
            window=window,
            sequences=sequences,
        )

    def in_dtype(self, dtype: str) -> AttentionCase:
        """The case and its relatives in another dtype, without targets."""
        relatives = tuple((label, replace(other, dtype=dtype)) for label, other in self.relatives)
        return replace(super().in_dtype(dtype), relatives=relatives)


Marks = tuple[float, float, float]


def _against_cudnn(fwd: Marks, bwd: Marks) -> tuple[Target, ...]:
    return tuple(
        Target("polar", mode, "sdpa-cudnn", floor, good, aim)
        for mode, (floor, good, aim) in (("fwd", fwd), ("bwd", bwd))
    )


def _against(other: str, floor: float, measure: str = "speed") -> tuple[Target, ...]:
    return tuple(Target("polar", mode, other, floor, measure=measure) for mode in ("fwd", "bwd"))


# What the count and the null may cost over the same kernel without them.
_COUNT = (
    Target("polar", "fwd", "softmax", 1.04, 1.02, 1.01, measure="time"),
    Target("polar", "bwd", "softmax", 1.08, 1.05, 1.03, measure="time"),
)


def _gpu_cases() -> list[AttentionCase]:
    d128 = AttentionCase(
        "d128-t8k", ("quick", "headline"), 4, 8192, 16, 16, 128, peers=GPU_PEERS,
        targets=_against_cudnn((0.80, 0.88, 1.00), (0.65, 0.75, 0.90)) + _COUNT,
    )  # fmt: skip
    d64 = replace(
        d128, name="d64-t8k", suites=("headline",), head_dim=64,
        targets=_against_cudnn((0.88, 0.95, 1.05), (0.75, 0.85, 0.95)) + _COUNT,
    )  # fmt: skip
    short = replace(
        d128, name="d128-t2k", suites=("quick", "headline"), batch=16, tokens=2048,
        targets=_against_cudnn((0.70, 0.80, 0.95), (0.50, 0.65, 0.85)) + _COUNT,
    )  # fmt: skip
    long = replace(
        d128, name="d128-t16k", suites=("headline",), batch=2, tokens=16384,
        peers=("sdpa-cudnn", "sdpa-flash", "fa4"), targets=_COUNT,
    )  # fmt: skip
    gqa = replace(
        d128, name="gqa-d128-t8k", suites=("headline",), heads_k=4,
        relatives=(("16 heads", d128),),
        targets=_against("polar, 16 heads", 1.0) + _COUNT,
    )  # fmt: skip
    window = replace(
        d128, name="window-d128-t8k", suites=("extra",), window=1024, peers=("flex", "fa4"),
        relatives=(("no window", d128),),
        targets=_against("polar, no window", 3.0),
    )  # fmt: skip
    rows = replace(d128, name="dense-d128-8x1k", batch=8, tokens=1024)
    packed = replace(
        d128, name="packed-d128-8x1k", suites=("extra",), batch=1, tokens=8192, sequences=8,
        peers=("flex",), relatives=(("dense", rows),),
        targets=_against("polar, dense", 0.85),
    )  # fmt: skip
    odd = [
        replace(
            d128, name=f"d{width}-t8k", suites=("extra",), head_dim=width,
            contenders=("polar",), peers=SDPA_PEERS, relatives=(("D=128", d128),),
            targets=_against("polar, D=128", 1.45, measure="time/flop"),
        )
        for width in (96, 192)
    ]  # fmt: skip
    single = replace(
        d128, name="fp32-d128-t2k", suites=("extra",), batch=1, tokens=2048, heads_q=8, heads_k=8,
        dtype="fp32", peers=("torch", "torch-polar"),
        targets=(Target("polar", "fwd", "torch-polar", 3.0),),
    )  # fmt: skip
    deterministic = replace(
        d128, name="deterministic-d128-t8k", suites=("extra",), modes=("bwd",),
        contenders=("polar", "polar-deterministic"), peers=SDPA_PEERS,
        targets=(
            Target("polar-deterministic", "bwd", "polar", 1.35, 1.25, 1.15, measure="time"),
        ),
    )  # fmt: skip
    half = replace(
        d128, name="fp16-d128-t8k", suites=("extra",), dtype="fp16", contenders=("polar",),
        peers=SDPA_PEERS, targets=(),
    )  # fmt: skip
    memory = replace(
        d128, name="memory-d128-t32k", suites=("extra",), batch=1, tokens=32768,
        modes=("memory",), peers=SDPA_PEERS, targets=(),
    )  # fmt: skip
    return [
        d128, d64, short, long, gqa, window, packed, *odd, single, deterministic, half, memory,
    ]  # fmt: skip


def _cpu_cases() -> list[AttentionCase]:
    base = AttentionCase(
        "cpu-d64-t256", ("quick",), 1, 256, 2, 2, 64, dtype="fp32", peers=("sdpa",), device="cpu"
    )
    d64 = replace(base, name="cpu-d64-t1k", suites=("headline",), tokens=1024, heads_q=4, heads_k=4)
    return [
        base,
        d64,
        replace(d64, name="cpu-d128-t1k", head_dim=128),
        replace(d64, name="cpu-gqa-d64-t1k", heads_k=1),
        replace(
            d64, name="cpu-window-d64-t1k", suites=("extra",), window=128, peers=(),
            relatives=(("no window", d64),),
        ),
        replace(
            d64, name="cpu-packed-d64-4x256", suites=("extra",), sequences=4, peers=(),
            relatives=(("dense", replace(d64, batch=4, tokens=256)),),
        ),
    ]  # fmt: skip


CASES = (*_gpu_cases(), *_cpu_cases())
