"""Newton–Schulz calls: sizes, FLOPs and bytes, peers and the ratios a case has to reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ops import flops
from ...ops.newton_schulz.coefficients import SETS, Triple, schedule
from ..cases import Case, Target

PEERS = ("eager", "compiled", "matmul-floor")
OURS = "newton_schulz"
EPS = 1e-7  # added to the norm, the op's default


@dataclass(frozen=True)
class NewtonSchulzCase(Case):
    """Sizes of one Newton–Schulz call.

    Attributes:
        batch, rows, cols: a stack (B, m, n).
        steps: of the iteration.
        coefficients: name of a set, or the triples of the steps.
    """

    op: ClassVar[str] = "newton_schulz"
    batch: int
    rows: int
    cols: int
    steps: int = 5
    coefficients: str | tuple[Triple, ...] = "muon"
    contenders: tuple[str, ...] = field(default=(OURS,), kw_only=True)
    peers: tuple[str, ...] = field(default=PEERS, kw_only=True)

    @property
    def triples(self) -> list[Triple]:
        """(a, b, c) of each step."""
        numbers = iter(schedule(self.op, self.coefficients, self.steps))
        return list(zip(numbers, numbers, numbers, strict=True))

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        n, m = sorted((self.rows, self.cols))
        count = flops.newton_schulz_forward if mode == "fwd" else flops.newton_schulz_backward
        return self.batch * count(n, m, self.steps)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes: forward reads x and writes out; backward reads x, d_out, writes dx."""
        operand = self.batch * self.rows * self.cols * self.torch_dtype.itemsize
        return 2 * operand if mode == "fwd" else 3 * operand

    def sizes(self) -> dict[str, int | str | None]:
        """B, m, n, dtype, steps, and the coefficients' name if they have one."""
        return {
            "B": self.batch,
            "m": self.rows,
            "n": self.cols,
            "dtype": self.dtype,
            "steps": self.steps,
            "coefficients": self.coefficients if isinstance(self.coefficients, str) else "own",
        }

    def small(self) -> NewtonSchulzCase:
        """A few matrices of the same size; large ones shrunk, at the same aspect.

        Sizes to 256 choose a kernel, so those stay; above, 320 is as large as 4096.
        """
        shrink = max(min(self.rows, self.cols) / 320, 1)
        return replace(
            self,
            batch=min(self.batch, 5),
            rows=int(self.rows / shrink),
            cols=int(self.cols / shrink),
        )


Marks = tuple[float, float, float]

# Bars on errors relative to eager's: of the result, and of the gradient.
_ERRORS = (
    Target(OURS, "fwd", "eager", 1.2, 1.0, 0.7, measure="error"),
    Target(OURS, "bwd", "eager", 1.2, measure="gradient error"),
)


def _against(peer: str, fwd: Marks, bwd: Marks | None = None) -> tuple[Target, ...]:
    targets = (Target(OURS, "fwd", peer, *fwd),)
    return targets if bwd is None else (*targets, Target(OURS, "bwd", peer, *bwd))


def _named(batch: int, rows: int, cols: int) -> str:
    return f"ns-{rows}x{cols}" if batch == 1 else f"ns-{batch}x{rows}x{cols}"


def _gpu_cases() -> list[NewtonSchulzCase]:
    # Marks of the backward: the smaller the matrix, the more of eager's time is memory's.
    light, middle, heavy = (5.0, 8.0, 12.0), (3.0, 4.0, 6.0), (1.5, 2.0, 3.0)
    sizes: list[tuple[tuple[int, int, int], Marks, Marks | None]] = [
        ((8192, 64, 64), (9.0, 10.5, 12.0), light),
        ((2048, 128, 128), (4.5, 5.5, 6.5), middle),
        ((1024, 256, 256), (2.0, 2.5, 3.0), heavy),
        ((16384, 32, 32), (9.5, 12.0, 16.0), light),
        ((2048, 64, 256), (6.5, 7.5, 9.0), middle),
        ((1024, 128, 256), (3.0, 4.0, 5.0), heavy),
        ((1, 4096, 4096), (1.15, 1.25, 1.45), None),
        ((1, 2048, 8192), (1.2, 1.6, 2.2), None),
    ]
    headline = [
        NewtonSchulzCase(
            _named(*size), ("headline",), *size, targets=_against("eager", fwd, bwd) + _ERRORS
        )
        for size, fwd, bwd in sizes
    ]
    headline[:2] = [replace(case, suites=("quick", "headline")) for case in headline[:2]]
    # ‖UUᵀ − I‖ of five steps of a named set is the polynomial's: 0.36·√n for Muon's, in bf16 as in
    # float64. Three classic steps after them leave nothing but rounding.
    converged = NewtonSchulzCase(
        "ns-converged-2048x64x256", ("extra",), 2048, 64, 256, steps=8,
        coefficients=(*SETS["muon"] * 5, *[(15 / 8, -10 / 8, 3 / 8)] * 3),
        targets=(
            *_ERRORS, Target(OURS, "fwd", "eager", 1.2, 1.0, 0.7, measure="orthogonality"),
        ),
    )  # fmt: skip
    crossover = [
        NewtonSchulzCase(
            _named(batch, n, n), ("crossover",), batch, n, n, modes=("fwd",),
            peers=("eager", "compiled"),
            targets=tuple(
                Target(OURS, "fwd", peer, 0.95, 1.0, 1.3) for peer in ("eager", "compiled")
            ),
        )
        for n in (64, 128, 256, 512)
        for batch in (1, 8, 64)
    ]  # fmt: skip
    # Too wide for a second matrix of their size beside them.
    wide = [
        NewtonSchulzCase(_named(*size), ("extra",), *size, modes=("fwd",), targets=_ERRORS[:1])
        for size in ((1024, 64, 1024), (1024, 128, 512))
    ]
    return [*headline, converged, *wide, *crossover]


def _cpu_cases() -> list[NewtonSchulzCase]:
    base = NewtonSchulzCase(
        "cpu-ns-16x32x32", ("quick",), 16, 32, 32, dtype="fp32", device="cpu",
        peers=("eager", "matmul-floor"),
    )  # fmt: skip
    return [
        base,
        replace(base, name="cpu-ns-32x64x64", suites=("headline",), batch=32, rows=64, cols=64),
        replace(base, name="cpu-ns-8x128x64", suites=("headline",), batch=8, rows=128, cols=64),
        replace(base, name="cpu-ns-256x256", suites=("extra",), batch=1, rows=256, cols=256),
        replace(base, name="cpu-ns-bf16-16x32x48", suites=("extra",), cols=48, dtype="bf16"),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
