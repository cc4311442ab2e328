"""Calls on polynomial features: sizes, FLOPs and bytes, peers and the ratios to reach."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...ops import flops
from ...ops.polynomial.maps import FeatureMap
from ..cases import Case, Target

FEATURES, READ, UPDATE = "polynomial_features", "polynomial_read", "polynomial_update"
PEERS = {FEATURES: ("copy",), READ: ("expanded",), UPDATE: ("expanded",)}


@dataclass(frozen=True)
class PolynomialCase(Case):
    """Sizes of one call on symmetric features of degree 2, with the default coefficients.

    Attributes:
        function: the public function.
        batch, tokens, heads, width: B, T, H, d.
        values: Dv, columns of the memory; 0 for features alone.
    """

    op: ClassVar[str] = "polynomial"
    function: str
    batch: int
    tokens: int
    heads: int
    width: int
    values: int = 0

    @property
    def rows(self) -> int:
        """Vectors of a call."""
        return self.batch * self.tokens * self.heads

    @property
    def wide(self) -> int:
        """D, features of a vector."""
        return FeatureMap("symmetric", 2, (1, 2)).wide(self.width)

    def flops(self, mode: str) -> int:
        """Useful floating-point operations of "fwd" or "bwd"."""
        if self.function == FEATURES:
            count = flops.polynomial_features_forward
            if mode == "bwd":
                count = flops.polynomial_features_backward
            return count(self.rows, self.wide)
        # Backward: a gradient of the vectors, and one of what they are multiplied with.
        products = 1 if mode == "fwd" else 2
        return products * flops.polynomial_product(self.rows, self.wide, self.values)

    def bytes(self, mode: str) -> int:
        """Compulsory bytes. Backward reads what forward did and the gradient of its result, and
        writes as much as forward read.
        """
        size, acc = self.torch_dtype.itemsize, 8 if self.dtype == "fp64" else 4
        x = self.rows * self.width * size
        if self.function == FEATURES:
            given, result = x, self.rows * self.wide * size
        else:
            tokens = self.rows * self.values * size
            state = self.batch * self.heads * self.wide * self.values * acc
            read = self.function == READ
            given, result = x + (state if read else tokens), tokens if read else state
        return given + result if mode == "fwd" else 2 * given + result

    def sizes(self) -> dict[str, int | str | None]:
        """The function, B, T, H, d, Dv and dtype; what is absent is None."""
        return {
            "function": self.function,
            "B": self.batch,
            "T": self.tokens,
            "H": self.heads,
            "d": self.width,
            "Dv": self.values or None,
            "dtype": self.dtype,
        }

    def small(self) -> PolynomialCase:
        """The same function on a few tokens of two heads, a ragged number of them."""
        return replace(self, batch=1, heads=min(self.heads, 2), tokens=min(self.tokens, 150))


def _case(name: str, function: str, suites: tuple[str, ...], *sizes: int, **other: object) -> Case:
    case = PolynomialCase(
        name, suites, function, *sizes, contenders=(function,), peers=PEERS[function]
    )
    return replace(case, **other)


def _gpu_cases() -> list[Case]:
    call = (4, 8192, 16, 64)

    def against(function: str, peer: str, *marks: float) -> tuple[Target, ...]:
        return (Target(function, "fwd", peer, *marks),)

    headline = ("headline",)
    return [
        _case(
            "expand-d64", FEATURES, ("quick", "headline"), *call,
            targets=against(FEATURES, "copy", 0.7, 0.85, 0.95),
        ),
        _case(
            "read-d64", READ, headline, *call, 64,
            targets=against(READ, "expanded", 1.5, 3.0, 5.0),
        ),
        _case(
            "update-d64", UPDATE, headline, *call, 64,
            targets=against(UPDATE, "expanded", 1.5, 3.0, 5.0),
        ),
        _case("expand-d16", FEATURES, ("extra",), 4, 8192, 16, 16),
        _case("read-d16", READ, ("extra",), 4, 8192, 16, 16, 64),
    ]  # fmt: skip


def _cpu_cases() -> list[Case]:
    rules = {"dtype": "fp32", "device": "cpu"}
    return [
        _case("cpu-expand-d16", FEATURES, ("quick",), 1, 256, 2, 16, **rules),
        _case("cpu-read-d16", READ, ("headline",), 1, 256, 2, 16, 32, **rules),
        _case("cpu-update-d16", UPDATE, ("headline",), 1, 256, 2, 16, 32, **rules),
        _case("cpu-read-bf16", READ, ("extra",), 1, 256, 2, 16, 32, device="cpu"),
    ]


CASES = (*_gpu_cases(), *_cpu_cases())
