"""Calls of the short convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import inputs

TOKENS = ("x", "gate_in", "gate_out")


@dataclass(frozen=True)
class Case:
    """One call; `gates` are i and o, those before and behind the sum."""

    batch: int = 2
    tokens: int = 19
    channels: int = 6
    taps: int = 3
    gates: str = "io"
    activation: str | None = None
    residual: bool = False
    bias: bool = False
    carried: bool = False
    packed: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """A readable test id."""
        words = [f"B{self.batch}", f"T{self.tokens}", f"K{self.taps}", self.gates, self.activation]
        words += [name for name in ("residual", "bias", "carried") if getattr(self, name)]
        words += ["packed"] if self.packed is not None else []
        return "-".join(word for word in words if word)

    def but(self, **changes: Any) -> Case:
        """Another case, a few fields changed."""
        return replace(self, **changes)

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments; views with NaN around them, and NaN in padding."""
        source = inputs.generator(seed, device)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        batch = 1 if self.packed is not None else self.batch

        def drawn(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return inputs.embed(inputs.normal(size, source, dtype), pad=2)

        given: dict[str, Any] = {"x": drawn(batch, self.tokens, self.channels)}
        given["weight"] = drawn(self.channels, self.taps)
        for name in ("gate_in", "gate_out"):
            if name[5] in self.gates:
                given[name] = drawn(batch, self.tokens, self.channels)
        if self.bias:
            given["bias"] = inputs.normal((self.channels,), source, dtype)
        if self.packed is not None:
            given["cu_seqlens"] = torch.tensor(self.packed, dtype=torch.int32, device=device)
            for name in TOKENS:
                if name in given:
                    given[name][:, self.packed[-1] :] = float("nan")
        if self.carried:
            sequences = batch if self.packed is None else len(self.packed) - 1
            given["initial_state"] = drawn(sequences, self.taps - 1, self.channels, dtype=acc)
        return given | {"activation": self.activation, "residual": self.residual}
