"""A copy of as many bytes, our eager backend, and softmax attention of torch without pages.

SDPA's operands are (B, H, T, D). The default hands it transposed views of keys that lie (B, T, H,
D), as a cache without pages has them; layout "natural" hands it contiguous copies.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..family import Contender, Work, copy
from .cases import DecodeCase
from .ours import Inputs, call

NAMES = {
    "copy": "a copy of half as many bytes, each read and written",
    "sdpa-cudnn": "torch SDPA over keys without pages, cuDNN backend",
    "sdpa-flash": "torch SDPA over keys without pages, FlashAttention-2 backend",
    "sdpa": "torch SDPA over keys without pages, whatever it picks",
    "eager": "the op's eager backend: some pages after the others in torch",
}
_BACKENDS = {
    "sdpa-cudnn": [SDPBackend.CUDNN_ATTENTION],
    "sdpa-flash": [SDPBackend.FLASH_ATTENTION],
    "sdpa": None,
}


def contenders(case: DecodeCase, names: tuple[str, ...], layout: str) -> list[Contender]:
    """The peers of a case among `names`."""
    found = []
    for name in case.peers:
        if name not in names:
            continue
        if name == "copy":
            found.append(Contender(name, case, name, _copy, modes=("fwd",), checked=False))
        elif name == "eager":
            found.append(Contender(name, case, case.op, _eager, modes=("fwd",)))
        else:
            build = _sdpa(_BACKENDS[name], layout)
            reason = available(name, case)
            found.append(Contender(name, case, "softmax", build, reason=reason, modes=("fwd",)))
    return found


def available(name: str, case: DecodeCase) -> str | None:
    """Why SDPA cannot run the case; None if it is worth trying."""
    if case.window is not None:
        return "SDPA has no sliding window"
    if name != "sdpa" and case.device != "cuda":
        return "needs a GPU"
    if name != "sdpa" and case.dtype not in ("bf16", "fp16"):
        return "16-bit dtypes only"
    return None


def _copy(case: DecodeCase, inputs: Inputs) -> Work:
    return copy(case, inputs.given["q"])


def _eager(case: DecodeCase, inputs: Inputs) -> Work:
    return call(inputs, "eager")


def _sdpa(backends: list[SDPBackend] | None, layout: str) -> Callable[[DecodeCase, Inputs], Work]:
    def build(case: DecodeCase, inputs: Inputs) -> Work:
        q = inputs.given["q"][:, :, None]
        k, v = (x.transpose(1, 2) for x in inputs.dense())
        if layout == "natural":
            k, v = k.contiguous(), v.contiguous()

        def forward() -> tuple[Tensor, ...]:
            grouped = case.heads_q != case.heads_k
            return (scaled_dot_product_attention(q, k, v, enable_gqa=grouped)[:, :, 0],)

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
        return Work(forward, {}, (inputs.given["q"],), context)

    return build
