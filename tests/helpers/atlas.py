"""Calls of the Atlas memory: those of the Omega rule, and what Newton–Schulz is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import inputs, omega


@dataclass(frozen=True)
class Case(omega.Case):
    """One call, as of the Omega rule, with momentum; `stride` None is a chunk."""

    stride: int | None = 4
    ns_steps: int = 5
    ns_coefficients: Any = "muon"

    @property
    def name(self) -> str:
        """A readable test id."""
        return f"{super().name}-n{self.stride or 'b'}-w{self.wide}x{self.values}"

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `atlas_memory`."""
        given = super().arguments(seed, dtype, device)
        source = inputs.generator(seed + 1, device)
        size, acc = given["step"].shape, given["step"].dtype
        x = torch.rand(size, generator=source, device=device, dtype=torch.float64)
        given["output_step"] = inputs.embed((0.1 + 0.4 * x).to(acc))
        if self.packed is not None:
            given["output_step"][:, self.packed[-1] :] = float("nan")
        rules = {"ns_stride": self.stride, "ns_steps": self.ns_steps}
        return given | rules | {"ns_coefficients": self.ns_coefficients}
