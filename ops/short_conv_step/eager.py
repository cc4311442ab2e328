"""A step in plain torch: any device and dtype, in fp32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import slots
from ..short_conv import eager as conv
from ..short_conv.op import ConvShape, ConvTensors
from .op import StepTensors

SPACE_FWD = SPACE_BWD = None


def supports(shape: ConvShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: ConvShape, given: StepTensors) -> Tensor:
    """y (B, D) in x's dtype; the pool is written."""
    y = given.x.new_zeros(given.x.shape)
    if given.x.shape[0] == 0 or given.state_pool.shape[0] == 0:
        return y
    state = slots.read(given.state_pool, given.slots)
    x, gate_in, gate_out = (
        None if x is None else x[:, None] for x in (given.x, given.gate_in, given.gate_out)
    )
    assert x is not None
    token = ConvTensors(x, given.weight, given.bias, gate_in, gate_out, state, None)
    found, after = conv.fwd(shape, token)
    slots.write(given.state_pool, given.slots, state, after)
    return torch.where((given.slots >= 0)[:, None], found[:, 0], y)
