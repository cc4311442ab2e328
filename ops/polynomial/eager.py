"""Polynomial features in plain torch: any device and dtype, any degree, both passes explicit.

Monomials of degree r in their order, the first index slowest, are those of degree r − 1 once more:

    P_r = [x_0 P_{r−1}, x_1 P_{r−1} from its first index 1 on, x_2 P_{r−1} from 2 on, …]

so that a feature costs one product, and the adjoint walks the same blocks back. Features are formed
in fp32 (float64 for float64) and rounded once. Reads and updates form those of some tokens at a
time; their forward products run in x's dtype, all of backward in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import factorial, sqrt

import torch
from torch import Tensor

from .maps import FeatureMap, defaults, multisets
from .op import Gradients, PolynomialShape

SPACE_FWD = SPACE_BWD = None

FEATURES = 1 << 24  # numbers of φ that a read or an update forms at a time


def supports(shape: PolynomialShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(
    shape: PolynomialShape, x: Tensor, other: Tensor | None, coefficients: Tensor | None
) -> Tensor:
    """φ(x) (1, T, H, D) in x's dtype; φ(x) S (B, T, H, Dv), too; φ(x)ᵀ G (B, H, D, Dv) in fp32."""
    if other is None:
        return features(x, coefficients, shape.map).contiguous()
    multiply = _read if shape.function == "read" else _update
    return multiply(shape, x, other, coefficients, x.dtype)


def bwd(
    shape: PolynomialShape,
    upstream: Tensor,
    x: Tensor,
    other: Tensor | None,
    coefficients: Tensor | None,
    wanted: tuple[bool, bool],
) -> Gradients:
    """Gradients of x and the coefficients, and of S or G; `wanted`: the first two, the last."""
    acc = shape.acc
    if other is None:
        d_x, d_a = features_backward(upstream, x, coefficients, shape.map)
        return Gradients(d_x.to(x.dtype).contiguous(), None, d_a)
    read = shape.function == "read"
    state, rows = (other, upstream) if read else (upstream, other)
    d_other = None
    if wanted[1]:
        d_other = (_update if read else _read)(shape, x, upstream, coefficients, acc)
    if not wanted[0]:
        return Gradients(None, d_other, None)
    d_x = x.new_empty(x.shape)
    d_a = None if coefficients is None else coefficients.new_zeros(coefficients.shape)
    back = state.to(acc).mT
    for piece in _pieces(shape):
        here = x[:, piece]
        d_phi = (rows[:, piece].transpose(1, 2).to(acc) @ back).transpose(1, 2)
        d_x[:, piece], more = features_backward(d_phi, here, coefficients, shape.map)
        if d_a is not None and more is not None:
            d_a += more
    return Gradients(d_x, d_other, d_a)


def _read(
    shape: PolynomialShape,
    x: Tensor,
    state: Tensor,
    coefficients: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """φ(x) S in x's dtype, its products in `dtype`."""
    out = x.new_empty(*x.shape[:3], shape.values)
    state = state.to(dtype)
    for piece in _pieces(shape):
        phi = features(x[:, piece], coefficients, shape.map).to(dtype)
        out[:, piece] = (phi.transpose(1, 2) @ state).transpose(1, 2)
    return out


def _update(
    shape: PolynomialShape, x: Tensor, g: Tensor, coefficients: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """φ(x)ᵀ G in fp32 (float64), its products in `dtype`."""
    size = (shape.batch, shape.heads, shape.wide, shape.values)
    out = x.new_zeros(size, dtype=shape.acc)
    for piece in _pieces(shape):
        phi = features(x[:, piece], coefficients, shape.map).to(dtype).transpose(1, 2)
        out += phi.mT @ g[:, piece].transpose(1, 2).to(dtype)
    return out


def _pieces(shape: PolynomialShape) -> Iterator[slice]:
    """Tokens that go together."""
    step = max(1, FEATURES // max(1, shape.batch * shape.heads * shape.wide))
    return (slice(begin, begin + step) for begin in range(0, shape.tokens, step))


# ---- feature maps -------------------------------------------------------------------------------


def features(x: Tensor, coefficients: Tensor | None, map_: FeatureMap) -> Tensor:
    """φ(x) (..., D) of x (..., d), in x's dtype; coefficients (H, p+1) go with x (..., H, d)."""
    acc = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(acc)
    a = _amounts(coefficients, map_, acc)
    if map_.kind == "elementwise":
        total = torch.zeros_like(wide)
        for r in range(map_.degree, -1, -1):
            total = total * wide + a[r] if r in map_.kept else total * wide
        return total.to(x.dtype)
    if map_.kind == "concat":
        parts = [a[r] * wide**r for r in map_.kept]
    else:
        parts = [
            _root(a[r]) * (_weights(map_, r, x.shape[-1], acc, x.device) * monomials)
            for r, monomials in zip(map_.kept, _kept_monomials(wide, map_), strict=True)
        ]
    return torch.cat(parts, -1).to(x.dtype)


def features_backward(
    d: Tensor, x: Tensor, coefficients: Tensor | None, map_: FeatureMap
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the coefficients, if there are any, for `d`, that of φ(x); fp32."""
    acc = torch.promote_types(x.dtype, torch.float32)
    wide, d = x.to(acc), d.to(acc)
    a = _amounts(coefficients, map_, acc)
    upstream: dict[int, Tensor] = {}
    slopes: dict[int, Tensor] = {}  # of φ's degree r by a_r, times d
    if map_.kind in ("elementwise", "concat"):
        parts = d.split(x.shape[-1], -1) if map_.kind == "concat" else [d] * len(map_.kept)
        d_x = torch.zeros_like(wide)
        for r, part in zip(map_.kept, parts, strict=True):
            slopes[r] = part * wide**r
            if r:
                d_x = d_x + r * a[r] * wide ** (r - 1) * part
    else:
        sizes = [map_.count(r, x.shape[-1]) for r in map_.kept]
        monomials = _kept_monomials(wide, map_)
        for r, part, values in zip(map_.kept, d.split(sizes, -1), monomials, strict=True):
            weighted = part * _weights(map_, r, x.shape[-1], acc, x.device)
            root = a[r] ** 0.5
            upstream[r] = root * weighted
            if coefficients is not None:
                slopes[r] = torch.where(root == 0, 0.0, 0.5 / root) * weighted * values
        d_x = _monomials_backward(wide, upstream, map_)
    if coefficients is None:
        return d_x, None
    d_a = coefficients.new_zeros(coefficients.shape)
    for r, slope in slopes.items():
        d_a[..., r] = slope.sum(-1).sum_to_size(coefficients.shape[:-1])
    return d_x, d_a


def _amounts(
    coefficients: Tensor | None, map_: FeatureMap, acc: torch.dtype
) -> Sequence[Tensor | float]:
    """a_0, a_1, …, to be multiplied with features (..., H, D). The default ones stay on the host,
    from which a captured graph could not copy them.
    """
    if coefficients is None:
        return defaults(map_.degree)
    parts = coefficients.to(acc).unbind(-1)
    return [part if part.ndim == 0 else part[:, None] for part in parts]


def _root(a: Tensor | float) -> Tensor | float:
    """√a; where autograd follows it, as in a chunk in plain torch, a zero has the gradient 0."""
    if isinstance(a, float):
        return a**0.5
    zero = a == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, a).sqrt())


@functools.lru_cache(maxsize=64)
def _weights(
    map_: FeatureMap, r: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """√(r!/Π m_j!) of each monomial of degree r; of tiles 1 or √2.

    Raises:
        RuntimeError: a first use while the stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "fastweights: polynomial features of this width are cold: call the op before capture"
        )
    if map_.kind == "tiled":
        if r < 2:
            return torch.ones(map_.count(r, width), dtype=dtype, device=device)
        tiles = map_.padded(width) // map_.tile
        rows = [[1.0] + [sqrt(2)] * (tiles - 1 - i) for i in range(tiles)]
        each = torch.tensor([w for row in rows for w in row], dtype=torch.float64)
        return each.repeat_interleave(map_.tile**2).to(dtype).to(device)
    # Of each monomial 1/Π m_j! and how often its first index comes.
    share = torch.ones(1, dtype=torch.float64)
    run = torch.zeros(1, dtype=torch.float64)
    for power in range(1, r + 1):
        shares, runs = [], []
        for i in range(width):
            rest = slice(_start(width, power - 1, i), None)
            again = _start(width, power - 1, i + 1) - _start(width, power - 1, i)
            of_rest = torch.ones_like(run[rest])
            of_rest[:again] += run[rest][:again]
            runs.append(of_rest)
            shares.append(share[rest] / of_rest)
        share, run = torch.cat(shares), torch.cat(runs)
    return (factorial(r) * share).sqrt().to(dtype).to(device)


def _start(width: int, r: int, i: int) -> int:
    """Where the monomials of degree r with all indices ≥ i begin; degree 0 has one for every i."""
    if r == 0:
        return 0
    return multisets(width, r) - multisets(width - i, r)


def _kept_monomials(x: Tensor, map_: FeatureMap) -> list[Tensor]:
    """Products of numbers of x without weights, for each degree that is kept."""
    powers = _monomials(x, max(map_.kept), map_)
    return [powers[r] for r in map_.kept]


def _monomials(x: Tensor, degree: int, map_: FeatureMap) -> list[Tensor]:
    """P_0 … P_degree."""
    x = _padded(x, map_)
    powers = [torch.ones_like(x[..., :1]), x]
    if map_.kind == "tiled" and degree == 2:
        tiles = x.unflatten(-1, (-1, map_.tile))
        powers.append(
            torch.cat([
                (tiles[..., i, None, :, None] * tiles[..., i:, None, :]).flatten(-3)
                for i in range(tiles.shape[-2])
            ], -1)
        )  # fmt: skip
    while len(powers) <= degree:
        r = len(powers) - 1
        powers.append(
            torch.cat([
                x[..., i, None] * powers[r][..., _start(x.shape[-1], r, i) :]
                for i in range(x.shape[-1])
            ], -1)
        )  # fmt: skip
    return powers


def _monomials_backward(x: Tensor, upstream: dict[int, Tensor], map_: FeatureMap) -> Tensor:
    """The gradient of x for those of P_r, by degree; `upstream` is used up."""
    width, degree = x.shape[-1], max(upstream)
    powers = _monomials(x, min(degree, 2) - 1 if map_.kind == "tiled" else degree - 1, map_)
    x = _padded(x, map_)
    d_x = torch.zeros_like(x)
    if map_.kind == "tiled" and degree == 2:
        _tiles_backward(x, upstream.pop(2), map_.tile, d_x)
    for r in range(max(upstream, default=0), 1, -1):
        d = upstream.pop(r)
        below = upstream.pop(r - 1, None)
        below = torch.zeros_like(powers[r - 1]) if below is None else below
        for i in range(width):
            block = d[..., _start(width, r, i) : _start(width, r, i + 1)]
            rest = slice(_start(width, r - 1, i), None)
            d_x[..., i] += (block * powers[r - 1][..., rest]).sum(-1)
            below[..., rest] += x[..., i, None] * block
        upstream[r - 1] = below
    if 1 in upstream:
        d_x = d_x + upstream[1]
    return d_x[..., :width]


def _tiles_backward(x: Tensor, d: Tensor, tile: int, d_x: Tensor) -> None:
    """Add to the gradient of x what products of tiles send back."""
    tiles, d_tiles = x.unflatten(-1, (-1, tile)), d_x.unflatten(-1, (-1, tile))
    begin = 0
    for i in range(tiles.shape[-2]):
        end = begin + (tiles.shape[-2] - i) * tile**2
        block = d[..., begin:end].unflatten(-1, (-1, tile, tile))  # (..., J, i, j)
        d_tiles[..., i, :] += (block * tiles[..., i:, None, :]).sum((-3, -1))
        d_tiles[..., i:, :] += (block * tiles[..., i, None, :, None]).sum(-2)
        begin = end


def _padded(x: Tensor, map_: FeatureMap) -> Tensor:
    """x with zeros up to whole tiles."""
    short = map_.padded(x.shape[-1]) - x.shape[-1]
    return torch.nn.functional.pad(x, (0, short)) if short else x
