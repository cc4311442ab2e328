"""What a step is compared with: the references of `fastweights.reference`, in float64 and as is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..family import Results
from .ours import Inputs

OUTPUTS = ("out", "count")
SAMPLE = 4  # sequences of the full-size check
_BY_SEQUENCE = ("q", "block_tables", "context_lens")


def everything(function: str, inputs: Inputs, got: dict[str, Tensor]) -> Results:
    """Every sequence."""
    truth = _reference(function, inputs, torch.float64)
    return Results(got, truth, _reference(function, inputs, inputs.given["q"].dtype))


def sample(function: str, inputs: Inputs, got: dict[str, Tensor]) -> Results:
    """A few sequences, first and last among them.

    Raises:
        ValueError: some other number is not finite: poisoned memory that was never written.
    """
    for name, value in got.items():
        bad = int((~value.isfinite()).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {value.numel()} numbers are not finite")
    batch = inputs.given["q"].shape[0]
    index = torch.linspace(0, batch - 1, min(batch, SAMPLE), device=inputs.given["q"].device).long()
    few = Inputs(inputs.given | {name: inputs.given[name][index] for name in _BY_SEQUENCE})
    return everything(function, _own_pages(few), {name: x[index] for name, x in got.items()})


def _own_pages(inputs: Inputs) -> Inputs:
    """The same sequences in caches of their own: a copy of those is widened, not of all."""
    given = inputs.given
    pages = given["block_tables"].long()
    tables = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device).view(pages.shape)
    caches = {name: given[name][pages.flatten()] for name in ("k_cache", "v_cache")}
    return Inputs(given | caches | {"block_tables": tables})


def _reference(function: str, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    given = {
        name: x.to(dtype) if name in ("q", "k_cache", "v_cache") else x
        for name, x in inputs.given.items()
    }
    outputs: tuple[Tensor, ...]
    if function == "softmax":
        out, _ = reference.softmax_attention(given["q"][:, None], *Inputs(given).dense())
        outputs = (out[:, 0],)
    else:
        outputs = reference.polar_decode(**_widened(given, dtype))
    return dict(zip(OUTPUTS, outputs, strict=False))


def _widened(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Parameters in float64 for float64; below they stay as they are."""
    if dtype != torch.float64:
        return given
    return {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
