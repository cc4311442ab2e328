"""A step in plain torch: any device and dtype, in fp32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import slots
from ..gated_delta import eager as rule
from ..gated_delta.op import DeltaShape
from .op import StepTensors, one_token

SPACE_FWD = SPACE_BWD = None


def supports(shape: DeltaShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: DeltaShape, given: StepTensors) -> Tensor:
    """o (B, H, Dv) in v's dtype; the pool is written."""
    o = given.v.new_zeros(shape.batch, shape.heads, shape.values)
    if shape.batch == 0 or given.state.shape[0] == 0:
        return o
    assert given.slots is not None
    state = slots.read(given.state, given.slots)
    found, after = rule.fwd(shape, one_token(given, state))
    slots.write(given.state, given.slots, state, after)
    return torch.where((given.slots >= 0)[:, None, None], found[:, 0], o)
