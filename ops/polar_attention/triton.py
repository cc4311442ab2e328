"""Triton backend: the launchers, that of backward in `triton_backward`.

The forward kernels are in `triton_fwd` and `hopper_fwd`, the config spaces in `triton_spaces`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import last_contiguous
from .op import EPS, PACKAGE, AttentionShape, Lengths, NullParameters
from .triton_arguments import (
    HOPPER_ROWS,
    SIZES,
    count_tiles,
    heads_together,
    length_arguments,
    null_arguments,
    precision,
    rule_flags,
    stride_arguments,
)
from .triton_backward import Backward
from .triton_spaces import (
    OP,
    SPACE_BWD,
    SPACE_FWD,
    block_d,
    bucket,
    hopper_chunks,
    hopper_fwd_tiles,
    padded_width,
)

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "supports"]

FORWARD = f"{PACKAGE}.triton_fwd"
FORWARD_HOPPER = f"{PACKAGE}.hopper_fwd"


def supports(shape: AttentionShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if arch != "cpu" and Device.of(shape.device).capability < 80:
        return f"{arch} is older than sm_80"
    return None


def fwd(
    shape: AttentionShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    null: NullParameters | None,
    lengths: Lengths,
) -> tuple[torch.Tensor, ...]:
    """direction, count, lse, n_eff, rho, null_mass in Polar mode; out, lse in softmax mode."""
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    m, n, width = config["BLOCK_M"], config["BLOCK_N"], block_d(shape.head_dim)
    hopper = bool(config.get("HOPPER"))
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    device = shape.device
    rows = (shape.batch, shape.heads_q, shape.tq)
    out = empty(q.shape, dtype=shape.dtype, device=device)
    lse = empty(rows, dtype=torch.float32, device=device)
    count = n_eff = rho = null_mass = None
    if shape.polar:
        count = empty((shape.batch, shape.tq, shape.heads_q), dtype=shape.dtype, device=device)
        n_eff, rho, null_mass = (empty(rows, dtype=torch.float32, device=device) for _ in range(3))

    bulk = hopper or runtime.bulk_copies(device, q, k, v)
    operands = {"q": (q, HOPPER_ROWS if hopper else m), "k": (k, n), "v": (v, n)}
    chunk, chunks = hopper_chunks(padded_width(shape.head_dim)) if hopper else (width, 1)
    arguments: dict[str, Any] = {
        name: runtime.head_tiles(x, tile, chunk, gluon=hopper) if bulk else x
        for name, (x, tile) in operands.items()
    }
    arguments |= {
        **null_arguments(null),
        "out": out,
        "count": count,
        "lse": lse,
        "n_eff": n_eff,
        "rho": rho,
        "null_mass": null_mass,
        "group": shape.group,
        "scale": shape.scale,
    }
    constants: dict[str, Any] = {
        "POLAR": shape.polar,
        "NULL_VALUE": shape.null_value,
        "WIDTH": shape.head_dim,
        "BLOCK_N": n,
        "STAGES": config.num_stages,
        "EPS": EPS,
    }
    rules = rule_flags(shape)
    sizes = length_arguments(shape, lengths)
    heads, of_head = shape.batch * shape.heads_q, count_tiles(shape, shape.tq, m)
    programs = tiles = heads * of_head if q.numel() else 0
    arguments["together"] = heads_together(device, heads, of_head)
    if hopper:
        kernel = (FORWARD_HOPPER, "attention_fwd")
        programs = min(tiles, Device.of(device).multiprocessors)
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        arguments |= {name: sizes[name] for name in SIZES} | {"tiles": tiles, "counter": counter}
        constants |= {name: rules[name] for name in ("CAUSAL", "WINDOW", "PACKED")}
        buffers = hopper_fwd_tiles(config, shape.dtype.itemsize, chunk * chunks).buffers
        constants |= {"CHUNK": chunk, "CHUNKS": chunks, "BUFFERS": buffers}
    else:
        kernel = (FORWARD, "attention_fwd")
        arguments |= (
            sizes | stride_arguments("q", q) | stride_arguments("k", k) | stride_arguments("v", v)
        )
        constants |= {
            **rules,
            "BLOCK_M": m,
            "BLOCK_D": width,
            "TMA": bulk,
            "ALIGNED": shape.aligned,
            "PRECISION": precision(shape),
        }
    runtime.launch(OP, kernel, programs, device, config, arguments, constants)
    if not shape.polar:
        return out, lse
    return out, count, lse, n_eff, rho, null_mass  # type: ignore[return-value]


def bwd(
    shape: AttentionShape,
    d_out: torch.Tensor,
    d_count: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    null: NullParameters | None,
    lengths: Lengths,
    out: torch.Tensor,
    lse: torch.Tensor,
    n_eff: torch.Tensor | None,
    rho: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and, in Polar mode, the gradients of the five parameters."""
    return Backward(shape, q, k, v, null, lengths).run(d_out, d_count, out, lse, n_eff, rho)
