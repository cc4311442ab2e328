"""Calls of the polynomial ops: maps, degrees, coefficients by head or not and with zeros."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fastweights import ops, reference
from fastweights.ops.polynomial.maps import FeatureMap

from . import inputs

FUNCTIONS = {
    "features": (ops.polynomial_features, reference.polynomial_features),
    "read": (ops.polynomial_read, reference.polynomial_read),
    "update": (ops.polynomial_update, reference.polynomial_update),
}
COEFFICIENTS = ("none", "shared", "heads", "zeros")


@dataclass(frozen=True)
class Case:
    """One call, its tensors views with NaN around them.

    `coefficients`: "none", "shared" by all heads, by "heads", or by heads with "zeros" among them.
    """

    function: str = "features"
    kind: str = "symmetric"
    degree: int = 2
    coefficients: str = "heads"
    kept: tuple[int, ...] | None = None
    batch: int = 2
    tokens: int = 7
    heads: int = 2
    width: int = 5
    values: int = 3
    tile: int = 4
    scale: float = 1.0  # of x

    @property
    def name(self) -> str:
        """A readable test id."""
        kept = "" if self.kept is None else "-" + "".join(map(str, self.kept))
        return (
            f"{self.function}-{self.kind}{self.degree}{kept}-{self.coefficients}"
            f"-t{self.tokens}-d{self.width}"
        )

    def but(self, **changes: Any) -> Case:
        """The same case with some fields replaced."""
        return replace(self, **changes)

    @property
    def op(self) -> Any:
        """The public function."""
        return FUNCTIONS[self.function][0]

    @property
    def literal(self) -> Any:
        """The loops."""
        return FUNCTIONS[self.function][1]

    @property
    def map(self) -> FeatureMap:
        """What the rules make."""
        kept = self.kept
        if kept is None:
            kept = tuple(range(0 if self.kind == "elementwise" else 1, self.degree + 1))
        return FeatureMap(self.kind, self.degree, kept, self.tile if self.kind == "tiled" else 1)

    @property
    def wide(self) -> int:
        """D."""
        return self.map.wide(self.width)

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the call."""
        source = inputs.generator(seed + 100, device)
        acc = torch.promote_types(dtype, torch.float32)

        def normal(*size: int, to: torch.dtype = dtype, scale: float = 1.0) -> torch.Tensor:
            x = torch.randn(size, generator=source, device=device, dtype=torch.float64)
            return inputs.embed((scale * x).to(to))

        rows = (self.batch, self.tokens, self.heads)
        given: dict[str, Any] = {"x": normal(*rows, self.width, scale=self.scale)}
        if self.function == "read":
            given["state"] = normal(self.batch, self.heads, self.wide, self.values, to=acc)
        if self.function == "update":
            given["g"] = normal(*rows, self.values)
        if self.coefficients != "none":
            size = (self.degree + 1,)
            if self.coefficients != "shared":
                size = (self.heads, *size)
            a = torch.rand(size, generator=source, device=device, dtype=torch.float64) + 0.2
            if self.kept is None and self.kind != "elementwise":
                a[..., 0] = 0
            if self.coefficients == "zeros":
                a[0, -1] = 0
                a[-1, self.degree // 2] = 0
            given["coefficients"] = inputs.embed(a.to(acc))
        given["degree"] = self.degree
        if self.kept is not None:
            given["kept"] = self.kept
        if self.function == "features":
            given |= {"kind": self.kind, "tile": self.tile}
        return given
