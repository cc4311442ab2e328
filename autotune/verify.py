"""Is a result right? Its error against float64 may be at most 1.5 × that of plain torch.

For inputs drawn in a dtype there are three runs: the reference in float64 (truth), the reference
in the dtype (yardstick) and what is judged. For each output and each gradient, over all seeds,

    worst ‖got − truth‖ / ‖truth‖           ≤  1.5 × the yardstick's worst
    worst max|got − truth| / max|truth|     ≤  4 × the yardstick's worst

where a yardstick's error counts as at least 1e-6 for fp32, 1e-3 for 16-bit types and 1e-12 for
float64: by luck or by an exact path it may be zero. NaN never passes. Both factors are wider for
results of few numbers, whose error norms are noise.

The one rule for tests, for the benchmark's gate and for sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, sqrt

import torch

FLOORS = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-3,
}
FROBENIUS_FACTOR = 1.5
MAXIMUM_FACTOR = 4.0
FEW = 256  # below this many numbers an error norm is itself noise; see `_widening`


@dataclass(frozen=True)
class Error:
    """Distance from the truth: Frobenius norm and largest element, both absolute."""

    frobenius: float
    maximum: float


@dataclass(frozen=True)
class Judgement:
    """One kind of error of one result, relative, the worst of the seeds.

    Attributes:
        error: of what is judged; infinite where it holds a NaN.
        plain: of plain torch.
        limit: what `error` may be at most.
    """

    error: float
    plain: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its limit."""
        return self.error <= self.limit


def error(got: torch.Tensor, truth: torch.Tensor) -> Error:
    """The error of `got`; infinite if it holds a NaN or misses an infinity of the truth.

    Raises:
        ValueError: another shape than the truth's.
    """
    if got.shape != truth.shape:
        raise ValueError(f"shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    truth = truth.double()
    got = got.to(truth)
    infinite = truth.isinf()
    if not torch.equal(got[infinite], truth[infinite]):
        return Error(inf, inf)
    difference = got.masked_fill(infinite, 0.0) - truth.masked_fill(infinite, 0.0)
    return _size(difference) if difference.isfinite().all() else Error(inf, inf)


def _size(x: torch.Tensor) -> Error:
    if x.numel() == 0:
        return Error(0.0, 0.0)
    return Error(float(x.norm()), float(x.abs().max()))


@dataclass(frozen=True)
class _Row:
    """One result of one seed: two errors, and what they are relative to."""

    got: Error
    plain: Error
    norm: Error
    numbers: int


@dataclass
class Comparison:
    """Errors of a call and of plain torch, gathered over seeds, and the verdict.

    Attributes:
        dtype: of the call's inputs; sets the floor, also for results of another dtype.
        factor: allowed multiple of the yardstick's Frobenius error.
    """

    dtype: torch.dtype
    factor: float = FROBENIUS_FACTOR
    rows: dict[str, list[_Row]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        got: torch.Tensor,
        truth: torch.Tensor,
        yardstick: torch.Tensor,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Record one result of one seed.

        A truth that vanishes up to rounding has no norm of its own. Its error is then relative
        to `scale`, for a gradient the upstream gradients, times the square root of the result's
        width: the size of the dot products that cancel.

        Raises:
            ValueError: a shape differs, or the truth or plain torch is not finite, so that the
                inputs measure nothing.
        """
        if truth.isnan().any():
            raise ValueError(f"{name}: the float64 truth holds NaN: a broken test input")
        plain = error(yardstick, truth)
        if plain.frobenius == inf:
            raise ValueError(f"{name}: plain torch is not finite here, so it measures nothing")
        norm = _size(truth.double().masked_fill(truth.isinf(), 0.0))
        if scale is not None and truth.numel():
            natural = _size(scale.double() * sqrt(truth.shape[-1]))
            if norm.frobenius < 1e-12 * natural.frobenius:
                norm = natural
        row = _Row(error(got, truth), plain, norm, truth.numel())
        self.rows.setdefault(name, []).append(row)

    def judge(self, name: str) -> dict[str, Judgement]:
        """Of one result: its "frobenius" and its "maximum" error.

        All seeds share one norm, the mean square of theirs: a sum over thousands of rows that
        happens to cancel in one seed would else count its rounding by a norm of nearly zero.
        """
        rows = self.rows[name]
        widening = _widening(sum(row.numbers for row in rows))
        found = {}
        for kind, factor in (("frobenius", self.factor), ("maximum", MAXIMUM_FACTOR)):
            norm = sqrt(sum(getattr(row.norm, kind) ** 2 for row in rows) / len(rows))
            got = _ratio(max(getattr(row.got, kind) for row in rows), norm)
            plain = _ratio(max(getattr(row.plain, kind) for row in rows), norm)
            limit = factor * widening * max(plain, FLOORS[self.dtype])
            found[kind] = Judgement(got, plain, limit)
        return found

    def report(self) -> list[str]:
        """One line for each result that fails."""
        return [
            f"{name}: {kind} error {found.error:.3e}, plain torch {found.plain:.3e}, "
            f"limit {found.limit:.3e}"
            for name in self.rows
            for kind, found in self.judge(name).items()
            if not found.ok
        ]

    def check(self, label: str = "") -> None:
        """Raise AssertionError with both numbers of each result that fails.

        Raises:
            ValueError: nothing was compared.
        """
        if not self.rows:
            raise ValueError(f"{label}: nothing was compared")
        failures = self.report()
        if failures:
            raise AssertionError("\n".join([f"{label}: wrong against float64", *failures]))


def _ratio(difference: float, norm: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / norm if norm > 0.0 else inf


def _widening(numbers: int) -> float:
    """Slack for a ratio of two norms over few numbers, 1 for many.

    The logarithm of a norm over n independent errors scatters by 1/√(2n), that of the ratio of two
    by 1/√n. Four of those let two equally good computations pass all but once in 10⁴ comparisons:
    a factor of 3.2 for a gradient of 4 numbers (a scalar a head) over three seeds.
    """
    return 1.0 if numbers >= FEW else exp(4.0 / sqrt(max(numbers, 1)))


def compare(
    got: torch.Tensor,
    truth: torch.Tensor,
    yardstick: torch.Tensor,
    *,
    name: str = "result",
    dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Check one result of one seed; `dtype` is that of the inputs, by default of `yardstick`.

    Raises:
        AssertionError: too far from the truth.
    """
    comparison = Comparison(yardstick.dtype if dtype is None else dtype)
    comparison.add(name, got, truth, yardstick, scale)
    comparison.check(name)
