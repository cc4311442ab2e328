"""Newton–Schulz on matrices too large to stay on chip: symmetric products at half the price.

Two forms, with X of n ≤ m rows and columns, A = X Xᵀ and Z = a I + b A + c A²:

    direct    X ← Z X, each step: A and A² are symmetric, Z X is not
    gram      everything in n × n: R = X Xᵀ once, then Q ← Q Z and R ← Z R Z, at the end X ← Q X.
              All symmetric. R holds squares of singular values, which fp16 keeps two steps long;
              then X is formed, and R anew (a restart).

Half of the tiles are not half of the time: where too few are left to keep the device busy, torch
forms the products whole. The form is the one that then multiplies less.

Few matrices, whose tiles the device takes at once, go through all steps in one launch (`few`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...autotune.space import Config, Device, Key, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from .coefficients import on_device
from .op import PACKAGE, NewtonSchulzShape

OP = "newton_schulz"
KERNEL = (f"{PACKAGE}.triton_symmetric", "symmetric_product")
KERNEL_FEW = (f"{PACKAGE}.triton_few", "newton_schulz_few")
SUM_SQUARES = (f"{PACKAGE}.triton_normalise", "sum_squares")
DIVIDE_BY_NORM = (f"{PACKAGE}.triton_normalise", "divide_by_norm")
NORM_CONFIG = Config.make(4, 1)
NORM_BLOCK = 2048
MOST_PARTS = 512  # that a matrix is read in
LEAST_ROWS = 129  # under it Triton keeps stacks on chip
RESTART = 2  # steps that R lives through
MOST_TILES = 1024  # of a matrix that is one of few
FOLD = 1.4  # a symmetric product that costs less is worth it for a·I, else torch adds a·X
UNITS = 8  # columns of a row that starts on a multiple of 16 bytes


def serves(shape: NewtonSchulzShape) -> bool:
    """Whether a call is for this file."""
    return min(shape.rows, shape.cols) >= LEAST_ROWS


def refusal(shape: NewtonSchulzShape, device: Device) -> str | None:
    """None, or why these kernels cannot run the call."""
    if shape.backward:
        return "large matrices have no backward of their own"
    if shape.compute_dtype != torch.float16:
        return "large matrices are multiplied in fp16"
    if 0 < device.capability < 90:
        return f"bulk copies need sm_90, this is {device.arch}"
    return None


def _bucket(shape: NewtonSchulzShape) -> Key:
    return (shape.compute_dtype.itemsize,)


def _fits(config: Config, key: Key, device: Device) -> str | None:
    block, depth = config["BLOCK"], config["BLOCK_K"]
    shared = key[0] * 2 * block * depth * config.num_stages
    if shared + 1024 > device.shared_bytes:
        return f"needs {shared} bytes of shared memory, a block has {device.shared_bytes}"
    return None


def _config(block: int, depth: int, warps: int, stages: int) -> Config:
    return Config.make(warps, stages, BLOCK=block, BLOCK_K=depth)


SPACE_SYMMETRIC: Space = Space(
    op=OP,
    pass_="symmetric",
    backend="triton",
    configs=(
        _config(128, 64, 4, 3),
        _config(128, 64, 4, 4),
        _config(128, 128, 8, 3),
        _config(64, 64, 4, 4),
    ),
    fits=_fits,
    bucket=_bucket,
    default=lambda key, device: next(
        c for c in SPACE_SYMMETRIC.configs if _fits(c, key, device) is None
    ),
    sources=(KERNEL[0], SUM_SQUARES[0]),
)


SPACE_FEW: Space = Space(
    op=OP,
    pass_="few",
    backend="triton",
    configs=(_config(64, 64, 4, 4), _config(64, 64, 8, 4), _config(64, 64, 4, 6)),
    fits=_fits,
    bucket=_bucket,
    default=lambda key, device: next(c for c in SPACE_FEW.configs if _fits(c, key, device) is None),
    sources=(KERNEL_FEW[0],),
)


class Products:
    """The symmetric products of one call, with what they share.

    Attributes:
        cost: of one, in whole products that torch forms.
    """

    def __init__(self, shape: NewtonSchulzShape, rows: int) -> None:
        self.device = shape.device
        self.batch = shape.batch
        self.rows = rows
        self.config = choose(SPACE_SYMMETRIC, _bucket(shape), Device.of(shape.device))
        self.block = self.config["BLOCK"]
        across = -(-rows // self.block)
        self.tiles = across * (across + 1) // 2
        # Fitted to single products on an H200: two blocks of a multiprocessor take 1.6 times as
        # long as one, one of 64 rows half as long as one of 128, torch 0.86 of our time a tile.
        at_once = Device.of(self.device).multiprocessors
        waves = -(-self.batch * self.tiles // at_once)
        whole = self.batch * (rows / 128) ** 2 / at_once
        self.cost = max(1.0, 0.8 * waves * self.block / 128) / (0.86 * max(1.0, whole))

    @property
    def weight(self) -> float:
        """What one costs in the cheaper way."""
        return min(1.0, self.cost)

    def __call__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        plus: torch.Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        gamma: float = 0.0,
    ) -> torch.Tensor:
        """alpha·left·rightᵀ + beta·plus + gamma·I, of which it is known that it is symmetric.

        A multiple of I is rounded with the rest. Added to what torch has rounded already, it would
        leave the error of numbers that it is to cancel, and the Gram form too far off.
        """
        out = rows_on_units(self.batch, self.rows, self.rows, left.dtype, self.device)
        # What is added costs torch a fifth more, and here nothing.
        if self.cost >= (1.0 if plus is None else 1.2) and not gamma:
            whole_product(left, right.mT, plus, out, beta=beta, alpha=alpha)
            return out
        block, depth = self.block, self.config["BLOCK_K"]
        arguments: dict[str, Any] = {
            "left": runtime.stack_tiles(left, block, depth),
            "right": runtime.stack_tiles(right, block, depth),
            "plus": None if plus is None else runtime.stack_tiles(plus, block, block),
            "out": runtime.stack_tiles(out, block, block),
            "n": self.rows,
            "k": left.shape[2],
            "tiles": self.tiles,
            "alpha": alpha,
            "beta": beta,
            "gamma": gamma,
        }
        constants = {
            "PLUS": plus is not None,
            "BLOCK": block,
            "BLOCK_K": depth,
            "STAGES": self.config.num_stages,
        }
        programs = self.batch * self.tiles
        runtime.launch(OP, KERNEL, programs, self.device, self.config, arguments, constants)
        return out


def whole_product(
    left: torch.Tensor,
    right: torch.Tensor,
    plus: torch.Tensor | None,
    out: torch.Tensor,
    *,
    beta: float,
    alpha: float,
) -> None:
    """out = alpha·left·right + beta·plus, rounded once."""
    if left.device.type == "cpu":  # torch's own fp16 product is slow there
        product = torch.bmm(left.float(), right.float()) * alpha
        out.copy_(product if plus is None else product + beta * plus.float())
        return
    torch.baddbmm(out if plus is None else plus, left, right, beta=beta, alpha=alpha, out=out)


def rows_on_units(
    batch: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(B, rows, cols) whose rows start on multiples of 16 bytes, as bulk copies want them."""
    width = -(-cols // UNITS) * UNITS
    return empty((batch, rows, width), dtype=dtype, device=device)[:, :, :cols]


def gram_is_cheaper(rows: int, cols: int, steps: int, weight: float) -> bool:
    """Whether the Gram form multiplies less by a tenth, which pays for its smaller products.

    `weight` is what a symmetric product costs, of what a whole one costs.
    """
    # In units of rows² multiply-adds.
    direct = steps * (weight * (cols + rows) + cols)
    gram, left = 0.0, steps
    while left:
        run = min(RESTART if left == steps else left, left)
        gram += weight * cols + cols + rows * weight * (run + (run - 1) + 2 * (run - 1))
        left -= run
    return gram < 0.9 * direct


def normalised(shape: NewtonSchulzShape, wide: torch.Tensor) -> torch.Tensor:
    """first_scale·x/(‖x‖ + eps) of matrices with rows ≤ cols, rows on units."""
    batch, rows, cols = wide.shape
    out = rows_on_units(batch, rows, cols, shape.compute_dtype, shape.device)
    if not wide.is_contiguous():
        norm = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True, dtype=torch.float32)
        return torch.div(wide, (norm + shape.eps) / shape.first_scale, out=out)
    size = rows * cols
    parts = min(MOST_PARTS, -(-size // NORM_BLOCK))
    each = -(-size // (parts * NORM_BLOCK)) * NORM_BLOCK
    sums = empty((batch, parts), dtype=torch.float32, device=shape.device)
    arguments: dict[str, Any] = {"x": wide, "sums": sums, "size": size}
    counts = {"parts": parts, "each": each}
    block = {"BLOCK": NORM_BLOCK}
    launch = partial(runtime.launch, OP, device=shape.device, config=NORM_CONFIG)
    programs = batch * parts
    launch(SUM_SQUARES, programs, arguments=arguments | counts, constants=block)
    arguments |= {"out": out, "cols": cols, "width": out.stride(1)} | counts
    arguments |= {"eps": shape.eps, "scale": shape.first_scale}
    constants = block | {"PARTS": MOST_PARTS}
    launch(DIVIDE_BY_NORM, programs, arguments=arguments, constants=constants)
    return out


def are_few(shape: NewtonSchulzShape) -> bool:
    """Whether the device takes all tiles of 64 × 64 at once.

    On an H200 that is 1.3 to 1.5 times as fast as a launch a product; 1.0 times with a few more
    tiles than that, and slower soon after.
    """
    tiles = shape.batch * -(-shape.rows // 64) * -(-shape.cols // 64)
    return tiles <= min(Device.of(shape.device).multiprocessors, MOST_TILES)


def spaces(shape: NewtonSchulzShape) -> dict[str, Space]:
    """The config spaces of a call."""
    return {"few": SPACE_FEW} if are_few(shape) else {"symmetric": SPACE_SYMMETRIC}


def few(shape: NewtonSchulzShape, x: torch.Tensor) -> torch.Tensor:
    """The orthogonalised matrices by one launch, contiguous."""
    device = Device.of(shape.device)
    config = choose(SPACE_FEW, _bucket(shape), device)
    block = config["BLOCK"]
    x = x.contiguous()
    out = empty(x.shape, dtype=shape.dtype, device=shape.device)
    rows, cols = sorted((shape.rows, shape.cols))
    down, across = -(-rows // block), -(-cols // block)
    place = partial(empty, dtype=shape.compute_dtype, device=shape.device)
    tiles = shape.batch * down * across
    arguments: dict[str, Any] = {
        "x": x,
        "out": out,
        "iterates": place((2 * tiles * block**2,)),
        "squares": place((2 * shape.batch * (down * block) ** 2,)),
        "sums": empty((tiles,), dtype=torch.float32, device=shape.device),
        "counter": torch.zeros(1, dtype=torch.int32, device=shape.device),
        "table": on_device(shape.coefficients, shape.device),
        "batch": shape.batch,
        "rows": rows,
        "cols": cols,
        "steps": shape.steps,
        "eps": shape.eps,
    }
    constants = {
        "TALL": shape.tall,
        "VECTOR": shape.cols % UNITS == 0,  # that is the row in memory
        "BLOCK": block,
        "BLOCK_K": config["BLOCK_K"],
        "STAGES": config.num_stages,
        "MOST": MOST_TILES,
    }
    programs = min(tiles, device.multiprocessors)
    runtime.launch(
        OP, KERNEL_FEW, programs, shape.device, config, arguments, constants, cooperative=True
    )
    return out


def fwd(shape: NewtonSchulzShape, x: torch.Tensor) -> torch.Tensor:
    """The orthogonalised matrices, contiguous."""
    if are_few(shape):
        return few(shape, x)
    wide = x.mT if shape.tall else x
    _, rows, cols = wide.shape
    iterate = normalised(shape, wide)
    products = Products(shape, rows)
    if gram_is_cheaper(rows, cols, shape.steps, products.weight):
        iterate = _gram_form(shape, products, iterate)
    else:
        fold = products.cost < FOLD
        for j, (a, b, c) in enumerate(shape.triples):
            scale = shape.first_scale if j == 0 else 1.0
            gram = products(iterate, iterate)
            alpha, beta, gamma = c / scale**4, b / scale**2, a if fold else 0.0
            z = products(gram, gram, gram, alpha=alpha, beta=beta, gamma=gamma)
            iterate = _product(z, iterate, 0.0 if fold else a / scale, 1 / scale)
    if (iterate.dtype, shape.tall) == (shape.dtype, False) and iterate.is_contiguous():
        return iterate
    out = empty(x.shape, dtype=shape.dtype, device=shape.device)
    return out.copy_(iterate.mT if shape.tall else iterate)


def _product(left: torch.Tensor, x: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    """alpha·left·x + beta·x into rows on units."""
    batch, rows, cols = x.shape
    out = rows_on_units(batch, rows, cols, x.dtype, x.device)
    whole_product(left, x, x if beta else None, out, beta=beta, alpha=alpha)
    return out


def _gram_form(shape: NewtonSchulzShape, products: Products, iterate: torch.Tensor) -> torch.Tensor:
    triples = shape.triples
    scale = shape.first_scale
    for run in (triples[:RESTART], triples[RESTART:]):
        r = q = None
        for j, (a, b, c) in enumerate(run):
            if r is None:
                r = products(iterate, iterate, alpha=1 / scale**2)
            z = products(r, r, r, alpha=c, beta=b, gamma=a)
            q = z if q is None else products(q, z)
            if j + 1 < len(run):
                r = products(products(z, r), z)
        if q is not None:
            iterate = _product(q, iterate, 0.0, 1 / scale)
            scale = 1.0
    return iterate
