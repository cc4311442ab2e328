"""A step in plain torch: any device and dtype, in fp32 (float64 for float64).

The memories of a call are copied out of their slots, take the token as `atlas_extend` would, and
are copied back.
"""

from __future__ import annotations

from torch import Tensor

from ..atlas.cache import AtlasCache
from ..atlas.extend import advance
from ..atlas.op import AtlasShape, AtlasTensors
from ..omega_step.eager import in_slots, one_token
from .op import StepTensors

SPACE_FWD = SPACE_BWD = None


def supports(shape: AtlasShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: AtlasShape, given: StepTensors, cache: AtlasCache) -> Tensor:
    """y (N, H, Dv) in v's dtype; the cache is written."""
    token = AtlasTensors(one_token(given.memory), given.output_step[:, None])

    def join(before: AtlasCache, count: Tensor) -> tuple[Tensor, AtlasCache]:
        return advance(shape, token, before, count)

    return in_slots(given.memory, cache, join)
