"""Other implementations of attention, on the same data as ours.

torch's calls take (B, H, T, D). The default hands them transposed views of our (B, T, H, D) data,
which is what a model has after its projections; layout "natural" hands them contiguous copies.
Gradients are asked for q, k and v in the layout that the call was given.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...reference import polar_attention as materialised_polar
from ..family import Contender, Work
from .cases import AttentionCase
from .ours import Inputs

NAMES = {
    "sdpa-cudnn": "torch SDPA, cuDNN backend",
    "sdpa-flash": "torch SDPA, FlashAttention-2 backend",
    "flex": "torch FlexAttention, compiled, block mask",
    "fa4": "flash_attn.cute (FlashAttention 4 package)",
    "sdpa": "torch SDPA, whatever it picks",
    "torch": "softmax attention with the score matrix in memory",
    "torch-polar": "Polar attention with the score matrix in memory",
}

_BACKENDS = {
    "sdpa-cudnn": [SDPBackend.CUDNN_ATTENTION],
    "sdpa-flash": [SDPBackend.FLASH_ATTENTION],
    "sdpa": None,
}


def available(name: str, case: AttentionCase) -> str | None:
    """Why the peer cannot run the case; None if it is worth trying.

    Raises:
        ValueError: no peer of that name.
    """
    if name not in NAMES:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(NAMES)}")
    if name in _BACKENDS:
        if case.window is not None:
            return "SDPA has no sliding window"
        if case.sequences is not None:
            return "SDPA has no packed sequences"
    if name in ("sdpa-cudnn", "sdpa-flash"):
        if case.device != "cuda":
            return "needs a GPU"
        if case.dtype not in ("bf16", "fp16"):
            return "16-bit dtypes only"
    if name == "flex" and case.device != "cuda":
        return "its backward needs a GPU"
    if name == "fa4":
        if importlib.util.find_spec("flash_attn") is None or not _has_cute():
            return "flash_attn.cute is not installed"
        if case.dtype not in ("bf16", "fp16"):
            return "16-bit dtypes only"
        if case.sequences is not None:
            return "packed calls are not timed with this peer"
    if name in ("torch", "torch-polar") and case.sequences is not None:
        return "packed calls are not timed with this peer"
    return None


def _has_cute() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def contenders(case: AttentionCase, names: tuple[str, ...], layout: str) -> list[Contender]:
    """The peers of a case among `names`."""
    return [
        Contender(
            name=name,
            case=case,
            function="polar" if name == "torch-polar" else "softmax",
            build=_builder(name, layout),
            reason=available(name, case),
        )
        for name in case.peers
        if name in names
    ]


def _builder(name: str, layout: str) -> Callable[[AttentionCase, Inputs], Work]:
    makers = {"flex": _flex, "fa4": _fa4, "torch": _torch, "torch-polar": _torch_polar}

    def build(case: AttentionCase, inputs: Inputs) -> Work:
        if name in _BACKENDS:
            return _sdpa(case, inputs, _BACKENDS[name], layout)
        return makers[name](case, inputs, layout)

    return build


def _heads_first(
    inputs: Inputs, layout: str
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor], Tensor]:
    """Operands (B, H, T, D), the leaves they come from, and the upstream gradient."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    d_out = inputs.d_out.transpose(1, 2)
    if layout == "natural":
        leaves = {
            name: x.detach().transpose(1, 2).contiguous().requires_grad_()
            for name, x in leaves.items()
        }
        return (leaves["q"], leaves["k"], leaves["v"]), leaves, d_out.contiguous()
    q, k, v = (x.transpose(1, 2) for x in leaves.values())
    return (q, k, v), leaves, d_out


def _sdpa(
    case: AttentionCase, inputs: Inputs, backends: list[SDPBackend] | None, layout: str
) -> Work:
    (q, k, v), leaves, d_out = _heads_first(inputs, layout)

    def forward() -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=case.group > 1)
        return (out,)

    def context() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if backends is None else sdpa_kernel(backends)

    # torch says why a backend refuses in warnings beside a bare "No available kernel".
    with context(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            forward()
        except RuntimeError as error:
            reasons = [str(w.message).split(" (Triggered")[0].strip() for w in said]
            raise RuntimeError("; ".join([str(error).strip(), *reasons[-2:]])) from error
    return Work(forward, leaves, (d_out,), context)


def _flex(case: AttentionCase, inputs: Inputs, layout: str) -> Work:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, length = case.window, case.length
    document = torch.arange(case.tokens, device=inputs.q.device) // length

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j
        if window is not None:
            seen = seen & (i - j < window)
        if case.sequences is not None:
            seen = seen & (document[i] == document[j])
        return seen

    (q, k, v), leaves, d_out = _heads_first(inputs, layout)
    blocks = create_block_mask(mask, None, None, case.tokens, case.tokens, device=inputs.q.device)
    # Each case is a new static shape; without a reset dynamo would give up and run it uncompiled.
    torch._dynamo.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def forward() -> tuple[Tensor, ...]:
        return (compiled(q, k, v, block_mask=blocks, enable_gqa=case.group > 1),)

    # Compiled here: a backward that donates its saved tensors cannot be differentiated twice.
    with config.patch(donated_buffer=False):
        work = Work(forward, leaves, (d_out,))
        work.backward(forward())
    return work


def _fa4(case: AttentionCase, inputs: Inputs, layout: str) -> Work:
    flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func
    window = (None, None) if case.window is None else (case.window - 1, 0)

    def forward() -> tuple[Tensor, ...]:
        result = flash_attn_func(inputs.q, inputs.k, inputs.v, causal=True, window_size=window)
        return (result[0] if isinstance(result, tuple) else result,)

    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    return Work(forward, leaves, (inputs.d_out,))


def _torch(case: AttentionCase, inputs: Inputs, layout: str) -> Work:
    (q, k, v), leaves, d_out = _heads_first(inputs, layout)
    i = torch.arange(case.tokens, device=q.device)
    hidden = i[:, None] < i
    if case.window is not None:
        hidden |= i[:, None] - i >= case.window

    def forward() -> tuple[Tensor, ...]:
        keys, values = (x.repeat_interleave(case.group, 1) for x in (k, v))
        scores = (q @ keys.mT) / math.sqrt(case.head_dim)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values,)

    return Work(forward, leaves, (d_out,))


def _torch_polar(case: AttentionCase, inputs: Inputs, layout: str) -> Work:
    rules: dict[str, Any] = {**inputs.parameters, "window": case.window}

    def forward() -> tuple[Tensor, ...]:
        result = materialised_polar(inputs.q, inputs.k, inputs.v, **rules)
        return result[0], result[1]

    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.parameters}
    return Work(forward, leaves, (inputs.d_out, inputs.d_count))
