r"""Keys and values of new tokens to their places in a paged cache, in place.

    k_cache[slot // page_size, slot % page_size] = k[token],  slot = slot_mapping[token]

and v likewise; a token whose slot is −1 is skipped. `polar_decode` reads what is written.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from ..dispatch import explainable, requested, without_autocast
from .op import PACKAGE, WRITE, WriteShape, WriteTensors, write_shape

__all__ = ["paged_cache_write_"]


def _plan(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    concrete: bool = False,
    **_: Any,
) -> WriteShape:
    given = WriteTensors(k, v, k_cache, v_cache, slot_mapping)
    return write_shape("paged_cache_write_", given, concrete=concrete)


@explainable(PACKAGE, _plan)
def paged_cache_write_(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write keys and values of tokens, of any sequences, to their slots of a paged cache.

    Nothing is read on the host, so that a step can be captured in a CUDA graph.

    Args:
        k, v: (tokens, Hk, D), bf16, fp16, fp32 or float64, any strides.
        k_cache, v_cache: (pages, page_size, Hk, D) of k's dtype, any strides; written.
        slot_mapping: int64 or int32 (tokens,), page·page_size + offset of each token, all distinct;
            −1: the token is skipped. Values are checked on the CPU alone.
        backend: "auto", "eager", "triton" or "cuda".

    Not differentiable. Under autocast k and v are cast to the dtype of the caches.

    Raises:
        TypeError: wrong dtype, or not a plain tensor.
        ValueError: wrong shape, an expanded cache, a tensor that requires grad while gradients are
            recorded; slots that repeat or that the cache has not; a backend that does not support
            the call.

    Example:
        >>> import torch
        >>> from fastweights.ops import paged_cache_write_
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 8).unbind(0)  # 4 pages of 16 tokens
        >>> k, v = torch.randn(2, 3, 2, 8).unbind(0)
        >>> paged_cache_write_(k, v, k_cache, v_cache, torch.tensor([16, -1, 63]))
        >>> torch.equal(k_cache[1, 0], k[0]), torch.equal(v_cache[3, 15], v[2])
        (True, True)
    """
    op = "paged_cache_write_"
    backend = requested(op, backend)
    checks.tensor(op, "k", k, "tokens Hk D", checks.FLOATING)
    if torch.is_autocast_enabled(k.device.type) and k.dtype != torch.float64:
        checks.tensor(op, "v", v, "tokens Hk D", checks.FLOATING)
        checks.tensor(op, "k_cache", k_cache, "pages page_size Hk D", checks.FLOATING)
        k, v = (x.to(k_cache.dtype) for x in (k, v))
    given = WriteTensors(k, v, k_cache, v_cache, slot_mapping)
    write_shape(op, given)
    with without_autocast(k.device):
        WRITE(*given, backend)
