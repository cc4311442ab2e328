"""DPFP, the feature map of keys and queries, in plain torch with its gradient by hand."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Features(NamedTuple):
    """φ of a tensor of rows, and what its gradient needs."""

    f: Tensor  # (…, 2·order·D)
    rectified: Tensor  # r (…, 2 D), divided by `size`
    size: Tensor  # (…, 1), max |x|; 1 where that is 0, or if φ is not normalised
    length: Tensor | None  # (…, 1), ‖h‖ that φ was divided by; 0 where all of h is 0


def features(x: Tensor, order: int, normalize: bool) -> Features:
    """φ(x). Rows are brought to a largest product of 1 first, so that no norm underflows."""
    r = torch.cat((x.relu(), (-x).relu()), -1)
    size = torch.ones_like(r[..., :1])
    if normalize:
        size = _or_one(r.amax(-1, keepdim=True))
        r = r / size
    h = torch.cat([r * r.roll(j, -1) for j in range(1, order + 1)], -1)
    if not normalize:
        return Features(h, r, size, None)
    most = h.amax(-1, keepdim=True)
    h = h / _or_one(most)
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    return Features(h / _or_one(length), r, size, most * length)


def features_back(x: Tensor, found: Features, d_f: Tensor, order: int) -> Tensor:
    """The gradient of x. Where φ is normalised the length of x has none, so `size` is a number."""
    r = found.rectified
    d_h = d_f
    if found.length is not None:
        across = d_f - found.f * (found.f * d_f).sum(-1, keepdim=True)
        d_h = torch.where(found.length > 0, across / _or_one(found.length), 0.0)
    d_r = torch.zeros_like(r)
    for j, d in enumerate(d_h.chunk(order, -1), start=1):
        d_r = d_r + d * r.roll(j, -1) + (d * r).roll(-j, -1)
    up, down = d_r.chunk(2, -1)
    return torch.where(x > 0, up, torch.where(x < 0, -down, 0.0)) / found.size


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)
