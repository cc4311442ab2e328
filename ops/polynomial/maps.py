"""Which features there are, and in which order: what all backends of a feature map agree on."""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial

import torch

KINDS = ("symmetric", "tiled", "elementwise", "concat")


@dataclass(frozen=True)
class FeatureMap:
    """A polynomial map by its rules.

    `kept`: the degrees that have features, increasing, none above `degree`. `tile`: of the kind
    "tiled"; a symmetric map of degree 2 is one whose tiles are single numbers.
    """

    kind: str
    degree: int
    kept: tuple[int, ...]
    tile: int = 1

    def padded(self, width: int) -> int:
        """The width of x in whole tiles."""
        return -(-width // self.tile) * self.tile

    def count(self, r: int, width: int) -> int:
        """Features of degree r."""
        if self.kind in ("elementwise", "concat"):
            return width
        width = self.padded(width)
        if self.kind == "tiled" and r == 2:
            return width * (width + self.tile) // 2
        return multisets(width, r)

    def wide(self, width: int) -> int:
        """All features, D."""
        if self.kind == "elementwise":
            return width
        return sum(self.count(r, width) for r in self.kept)


def multisets(width: int, r: int) -> int:
    """How many i₁ ≤ … ≤ i_r < width there are, C(width+r−1, r); a traced width is a symbol."""
    count = 1
    for k in range(r):
        count = count * (width + k) // (k + 1)
    return count


def defaults(degree: int) -> tuple[float, ...]:
    """(0, 1, 1/2!, …, 1/degree!), brought to sum 1."""
    numbers = [0.0] + [1 / factorial(r) for r in range(1, degree + 1)]
    return tuple(number / sum(numbers) for number in numbers)


def kept_of(kind: str, degree: int) -> tuple[int, ...]:
    """Degrees that have features unless others are asked for: not 0, but where it costs nothing."""
    return tuple(range(0 if kind == "elementwise" else 1, degree + 1))


def of_coefficients(kind: str, coefficients: torch.Tensor | None) -> FeatureMap:
    """The map of a kind that coefficients a_0, a_1, … make; None: the default of degree 2."""
    degree = 2 if coefficients is None else coefficients.shape[-1] - 1
    return FeatureMap(kind, degree, kept_of(kind, degree))
