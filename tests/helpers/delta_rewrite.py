"""Calls of the delta rewrite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import inputs

WRITTEN = ("k", "v", "beta")
MEMORY = ("state", "normalizer")


@dataclass(frozen=True)
class Case:
    """One call on memories that earlier tokens have written, every fourth row's empty if `first`.

    `channels`: β of each channel. `repeated`: two tokens of a call have the same key.
    """

    batch: int = 2
    tokens: int = 7
    reads: int | None = 9
    heads: int = 2
    width: int = 6
    values: int = 10
    order: int = 3
    mode: str = "parallel"
    normalize: bool = True
    denominator: bool = True
    correction: bool = True
    gamma_grad: str = "stop"
    channels: bool = False
    first: bool = False
    repeated: bool = True

    @property
    def wide(self) -> int:
        """P."""
        return 2 * self.order * self.width

    @property
    def name(self) -> str:
        """A readable test id."""
        words = [self.mode, f"B{self.batch}", f"M{self.tokens}", f"T{self.reads}", f"H{self.heads}"]
        words.append(f"D{self.width}x{self.values}")
        words += [f"order{self.order}"] if self.order != 3 else []
        words += [name for name in ("channels", "first") if getattr(self, name)]
        words += [
            f"no_{name}"
            for name in ("normalize", "denominator", "correction")
            if not getattr(self, name)
        ]
        words += ["full"] if self.gamma_grad == "full" else []
        return "-".join(words)

    def but(self, **changes: Any) -> Case:
        """Another case, a few fields changed."""
        return replace(self, **changes)

    @property
    def rules(self) -> dict[str, Any]:
        """Keyword arguments that are no tensors."""
        names = ("order", "mode", "normalize", "denominator", "correction", "gamma_grad")
        return {name: getattr(self, name) for name in names}

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments; views with NaN around them, and NaN in the memories of empty rows."""
        source = inputs.generator(seed, device)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        rows, heads = (self.batch, self.tokens, self.heads), self.heads

        def drawn(*size: int) -> torch.Tensor:
            return inputs.normal(size, source, dtype)

        def uniform(*size: int) -> torch.Tensor:
            return torch.rand(size, generator=source, device=device, dtype=torch.float64).to(acc)

        k = drawn(*rows, self.width)
        if self.repeated and self.tokens > 3:
            k[:, 3] = k[:, 1]
        given: dict[str, Any] = {"k": inputs.embed(k), "v": inputs.embed(drawn(*rows, self.values))}
        given["beta"] = inputs.embed(uniform(*rows, *[self.values] * self.channels))
        # Few keys are in z, so that γ is neither 0 nor 1 everywhere.
        state = inputs.normal((self.batch, heads, self.wide, self.values), source, acc, 0.3)
        normalizer = uniform(self.batch, heads, self.wide)
        normalizer = normalizer * (0.5 * self.wide**-0.5 if self.normalize else 0.5)
        given["state"], given["normalizer"] = inputs.embed(state), inputs.embed(normalizer)
        if self.reads is not None:
            given["q"] = inputs.embed(drawn(self.batch, self.reads, heads, self.width))
        if self.first:
            given["first"] = torch.arange(self.batch, device=device) % 4 == 0
            for name in MEMORY:
                given[name][given["first"]] = torch.nan
        return given | self.rules
