"""Calls of the delta rewrite: sizes, FLOPs and bytes, peers and the ratios to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ..cases import Case, Target

ORDER = 3
FUNCTIONAL, IN_PLACE = "delta_rewrite", "delta_rewrite_"


@dataclass(frozen=True)
class RewriteCase(Case):
    """Sizes of a call of one head, φ of order 3 and normalised, in parallel mode.

    Attributes:
        rows, tokens, reads: B, M, Tq; of 0 reads there are no queries.
        width, values: dk and Dv.
        calls: how many of them are timed together, in place each on a pool of its own.

    Where the backward is timed, too, a functional call is one of training.
    """

    op: ClassVar[str] = "delta_rewrite"
    rows: int
    tokens: int
    reads: int
    width: int
    values: int
    calls: int = 1
    modes: tuple[str, ...] = field(default=("fwd",), kw_only=True)

    @property
    def wide(self) -> int:
        """P."""
        return 2 * ORDER * self.width

    @property
    def function(self) -> str:
        """The public function."""
        return self.contenders[0]

    @property
    def trained(self) -> bool:
        """Whether gradients are asked for."""
        return "bwd" in self.modes

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        sizes = (self.tokens, self.reads, self.wide, self.values)
        count = flops.delta_rewrite_backward if mode == "bwd" else flops.delta_rewrite_forward
        return self.calls * self.rows * count(*sizes, sequential=False)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes: a memory is read once and written once, whoever reads it then. Backward
        reads it and the gradient behind it, and writes one; of rows it reads what forward did and
        the gradient of y, and writes those of all others.
        """
        size, acc = self.torch_dtype.itemsize, 8 if self.dtype == "fp64" else 4
        memory = self.wide * (self.values + 1) * acc
        if mode == "bwd":
            written = 2 * self.tokens * ((self.width + self.values) * size + acc)
            read = self.reads * (2 * self.width + self.values) * size
            return self.calls * self.rows * (3 * memory + written + read)
        memory *= 2
        written = self.tokens * ((self.width + self.values) * size + acc)
        read = self.reads * (self.width + self.values) * size
        return self.calls * self.rows * (memory + written + read)

    def sizes(self) -> dict[str, int | str | None]:
        """The function, B, M, Tq, dk, Dv, how many calls, and dtype; what is absent is None."""
        return {
            "function": self.function,
            "B": self.rows,
            "M": self.tokens,
            "Tq": self.reads or None,
            "dk": self.width,
            "Dv": self.values,
            "calls": self.calls if self.calls > 1 else None,
            "dtype": self.dtype,
        }

    def small(self) -> RewriteCase:
        """The same call on a few rows, of as many tokens and the same keys."""
        return replace(
            self, rows=min(self.rows, 2), reads=min(self.reads, 150),
            values=min(self.values, 200), calls=1,
        )  # fmt: skip


def _gpu_cases() -> list[RewriteCase]:
    headline = ("headline",)
    slots = RewriteCase(
        "write-16-slots", ("quick", "headline"), 16, 128, 0, 64, 2048, 4, contenders=(IN_PLACE,),
        peers=("copy",), targets=(Target(IN_PLACE, "fwd", "copy", 0.6, 0.75, 0.9),),
    )  # fmt: skip
    both = replace(
        slots, name="rewrite-read-16-slots", suites=headline, reads=1024, peers=("matmul", "copy"),
        # 2, 1.6 and 1.3 times what it takes at the rate of a large product.
        targets=(Target(IN_PLACE, "fwd", "matmul", 0.5, 0.62, 0.77, measure="rate"),),
    )  # fmt: skip
    layer = RewriteCase(
        "rewrite-gpt2-layer", headline, 1, 10, 522, 64, 768, contenders=(FUNCTIONAL,),
        peers=("compiled",), targets=(Target(FUNCTIONAL, "fwd", "compiled", 3.0, 4.5, 6.0),),
    )  # fmt: skip
    diagonal = replace(
        slots, name="rewrite-gpt2-diagonal", suites=("extra",), rows=12, tokens=10, reads=522,
        values=768, targets=(),
    )  # fmt: skip
    trained = replace(
        layer, name="rewrite-gpt2-train", suites=("extra",), rows=16, modes=("fwd", "bwd"),
        targets=(),
    )  # fmt: skip
    trained_slots = replace(
        trained, name="rewrite-16-slots-train", tokens=128, reads=1024, values=2048
    )
    return [slots, both, layer, diagonal, trained, trained_slots]


def _cpu_cases() -> list[RewriteCase]:
    slots = RewriteCase(
        "cpu-write-slots", ("quick",), 4, 10, 0, 16, 64, 2, contenders=(IN_PLACE,), peers=("copy",),
        dtype="fp32", device="cpu",
    )  # fmt: skip
    return [
        slots,
        replace(slots, name="cpu-rewrite-read", suites=("headline",), reads=50, peers=("matmul",)),
        replace(
            slots, name="cpu-rewrite-layer", suites=("headline",), rows=1, reads=50, calls=1,
            contenders=(FUNCTIONAL,), peers=("compiled",),
        ),
        replace(
            slots, name="cpu-rewrite-train", suites=("extra",), rows=2, reads=50, calls=1,
            contenders=(FUNCTIONAL,), peers=("compiled",), modes=("fwd", "bwd"),
        ),
        replace(slots, name="cpu-write-bf16", suites=("extra",), dtype="bf16"),
    ]  # fmt: skip


CASES = (*_gpu_cases(), *_cpu_cases())
