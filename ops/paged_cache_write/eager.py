"""Writing pages in plain torch: any device, dtype and strides, without a look at the host.

Which rows to leave out is not known on the host, so that a skipped token writes what a live one
writes, the same bits to the same place. Without any live token, a row gets what it holds.
"""

from __future__ import annotations

import torch

from .op import WriteShape, WriteTensors

SPACE_FWD = SPACE_BWD = None


def supports(shape: WriteShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: WriteShape, given: WriteTensors) -> None:
    """The caches are written."""
    if shape.tokens == 0 or shape.pages == 0:
        return
    live = given.slot_mapping >= 0
    token = torch.arange(shape.tokens, device=live.device)
    writer = torch.where(live, token, live.long().argmax())
    slot = given.slot_mapping.clamp(min=0).long()[writer]
    page, offset = slot // shape.page_size, slot % shape.page_size
    written = live[writer][:, None, None]
    for cache, x in ((given.k_cache, given.k), (given.v_cache, given.v)):
        cache.index_put_((page, offset), torch.where(written, x[writer], cache[page, offset]))
