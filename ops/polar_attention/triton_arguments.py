"""Arguments that the launchers of the Triton backend share, as kernels take them."""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Device
from .op import AttentionShape, Lengths, NullParameters
from .triton_spaces import windowed

NO_LIMIT = 2**30  # window of a call without one: no sequence reaches it, no sum overflows
HOPPER_ROWS = 64  # of one consumer; as in hopper_common
SIZES = ("cu_q", "cu_k", "tq", "tk", "heads_q", "sequences", "window")  # of `length_arguments`
PROGRAMS_EACH = 2  # programs of a multiprocessor at once: one of Hopper's, about two others


def precision(shape: AttentionShape) -> str:
    """How fp32 operands are multiplied on tensor cores.

    Six products of bf16 parts keep fp32 accuracy; tf32x3 misses it by a factor of two.
    """
    if shape.dtype != torch.float32 or shape.device.type == "cpu":  # the interpreter is exact
        return "ieee"
    return "bf16x6" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def rule_flags(shape: AttentionShape) -> dict[str, Any]:
    """The compile-time flags that say which keys a row sees."""
    return {
        "CAUSAL": shape.causal and not shape.has_n_keys,
        "N_KEYS": shape.has_n_keys,
        "WINDOW": windowed(shape),
        "PACKED": shape.packed,
    }


def length_arguments(shape: AttentionShape, lengths: Lengths) -> dict[str, Any]:
    """Sizes and length tensors as every kernel takes them."""
    n_keys, cu_q, cu_k = lengths
    if n_keys is not None:
        n_keys = n_keys.contiguous()
    return {
        "n_keys": n_keys,
        "cu_q": cu_q,
        "cu_k": cu_q if cu_k is None else cu_k,
        "tq": shape.tq,
        "tk": shape.tk,
        "heads_q": shape.heads_q,
        "sequences": shape.sequences or 0,
        "window": min(shape.window or NO_LIMIT, NO_LIMIT),
        "stride_nb": shape.tq if n_keys is not None and n_keys.ndim == 2 else 0,
    }


def stride_arguments(name: str, x: torch.Tensor) -> dict[str, int]:
    """Strides of a (B, T, H, D) tensor but the last, which is 1."""
    stride_b, stride_t, stride_h = x.stride()[:3]
    return {
        f"stride_{name}b": stride_b,
        f"stride_{name}t": stride_t,
        f"stride_{name}h": stride_h,
    }


def count_tiles(shape: AttentionShape, total: int, rows: int) -> int:
    """Programs that cover `total` rows of one head; the kernels count the same way."""
    if shape.sequences is not None:
        return total // rows + shape.sequences + 1
    return -(-total // rows)


def heads_together(device: torch.device, heads: int, tiles: int) -> int:
    """How many heads take turns (`common.deal`): so many that their tiles fill the device twice.

    Under a causal mask the longest tile takes twice the mean time. Begun with that much left to do,
    it does not outlast the rest.
    """
    at_once = PROGRAMS_EACH * Device.of(device).multiprocessors
    wanted = max(1, min(heads, -(-2 * at_once // max(tiles, 1))))
    sections = max(1, heads // wanted)
    return max(1, -(-heads // sections))


def null_arguments(null: NullParameters | None) -> dict[str, Any]:
    """The five parameters, contiguous; None each in softmax mode."""
    if null is None:
        names = ("null_value", "null_base", "null_slope", "length_gain", "magnitude_gain")
        return dict.fromkeys(names)
    return {
        "null_value": None if null.value is None else null.value.contiguous(),
        "null_base": null.base.contiguous(),
        "null_slope": null.slope.contiguous(),
        "length_gain": null.length_gain.contiguous(),
        "magnitude_gain": null.magnitude_gain.contiguous(),
    }
