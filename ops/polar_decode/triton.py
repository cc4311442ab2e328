"""Triton backend: the launcher. Kernels are in `triton_kernels`, configs in `triton_spaces`.

The grid depends on sizes and `max_context_len` alone: a captured step serves all lengths.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import last_contiguous
from .op import EPS, DecodeShape, DecodeTensors
from .triton_spaces import (
    KERNELS,
    MOST_SPLITS,
    OP,
    SPACE_FWD,
    bucket,
    merge_config,
    merge_parts,
    row_tiles,
    rows_of,
    splits_of,
)

__all__ = ["SPACE_BWD", "SPACE_FWD", "fwd", "supports", "yields"]

SPACE_BWD = None
CHECKED_GROUP = 16  # query heads of a key head
NO_LIMIT = 2**30  # window of a call without one
MOST_KEYS = 2**30  # of a block table: their numbers are 32 bits wide


def supports(shape: DecodeShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    device = Device.of(shape.device)
    if arch != "cpu" and device.capability < 80:
        return f"{arch} is older than sm_80"
    if shape.num_splits is not None and shape.num_splits > MOST_SPLITS:
        return f"takes num_splits up to {MOST_SPLITS}, this is {shape.num_splits}"
    if shape.capacity > MOST_KEYS:
        return f"takes block tables for up to {MOST_KEYS} keys, this is for {shape.capacity}"
    if not SPACE_FWD.fitting(bucket(shape), device):
        return f"no config fits into the shared memory of {arch}"
    return None


def yields(shape: DecodeShape, arch: str) -> str | None:
    """None, or why "auto" goes past these kernels though they can run the call."""
    if arch != "cpu" and shape.heads_q > CHECKED_GROUP * shape.heads_k:
        return f"more than {CHECKED_GROUP} query heads a key head are not yet checked on a GPU"
    return None


def fwd(shape: DecodeShape, given: DecodeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """direction (B, Hq, D) in q's dtype, count (B, Hq) in fp32."""
    device = Device.of(shape.device)
    config = choose(SPACE_FWD, bucket(shape), device)
    splits = splits_of(shape, config, device)
    rows = shape.batch * shape.heads_q
    direction = _empty(shape, shape.batch, shape.heads_q, shape.head_dim, dtype=shape.dtype)
    count = _empty(shape, shape.batch, shape.heads_q)
    partial = stats = None
    if splits > 1:
        partial = _empty(shape, rows, splits, shape.head_dim)
        stats = _empty(shape, 3, rows, splits)
    shared: dict[str, Any] = {
        "lengths": given.context_lens.contiguous(),
        **{
            name: None if (x := getattr(given, name)) is None else x.contiguous()
            for name in DecodeTensors._fields[5:]
        },
        "direction": direction,
        "count": count,
        "partial": partial,
        "stats": stats,
        "heads_q": shape.heads_q,
        "splits": splits,
        "capacity": shape.capacity,
        "window": min(shape.window or NO_LIMIT, NO_LIMIT),
        "plane": rows * splits,
    }
    constants = {
        "NULL_VALUE": shape.null_value,
        "WINDOW": shape.window is not None,
        "WIDTH": shape.head_dim,
        "BLOCK_D": runtime.padded(shape.head_dim),
        "BLOCK_N": config["BLOCK_N"],
        "EPS": EPS,
    }
    _decode(shape, given, config, splits, shared, constants)
    if splits > 1:
        _merge(shape, shared, constants)
    return direction, count


def _empty(shape: DecodeShape, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return empty(size, dtype=dtype, device=shape.device)


def _decode(
    shape: DecodeShape, given: DecodeTensors, config: Config, splits: int,
    shared: dict[str, Any], constants: dict[str, Any],
) -> None:  # fmt: skip
    q, tables = last_contiguous(given.q), given.block_tables
    tiles = row_tiles(shape)
    strides = {
        **_strides("q", "bh", q),
        **_strides("tables", "bp", tables),
        **_strides("k", "pthd", given.k_cache),
        **_strides("v", "pthd", given.v_cache),
    }
    arguments = {
        **shared,
        "q": q,
        "k": given.k_cache,
        "v": given.v_cache,
        "block_tables": tables,
        "heads_k": shape.heads_k,
        "group": shape.group,
        "row_tiles": tiles,
        "scale": shape.head_dim**-0.5,
        **strides,
    }
    own = {
        **constants,
        "DIRECT": splits == 1,
        "ALIGNED": shape.aligned,
        "SAME": given.k_cache.stride() == given.v_cache.stride(),
        "PAGE": shape.page_size,
        "ROWS": rows_of(shape),
        "STAGES": config.num_stages,
        "PRECISION": runtime.precision(shape.dtype, shape.device),
    }
    programs = shape.batch * splits * shape.heads_k * tiles
    runtime.launch(OP, (KERNELS, "polar_decode"), programs, shape.device, config, arguments, own)


def _merge(shape: DecodeShape, shared: dict[str, Any], constants: dict[str, Any]) -> None:
    config = merge_config(shared["splits"])
    own = {
        **constants,
        "PARTS": merge_parts(config, shape.head_dim),
        "STAGES": config.num_stages,
    }
    programs = shape.batch * shape.heads_q
    runtime.launch(OP, (KERNELS, "polar_merge"), programs, shape.device, config, shared, own)


def _strides(name: str, axes: str, x: torch.Tensor) -> dict[str, int]:
    strides = zip(axes, x.stride(), strict=False)
    return {f"stride_{name}_{axis}": stride for axis, stride in strides}
