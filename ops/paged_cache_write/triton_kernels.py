"""Rows of new keys and values to their slots: a program copies ROWS rows of both."""

import triton
import triton.language as tl

RUNTIME = (
    "rows", "heads",
    "stride_k_n", "stride_k_h", "stride_k_d", "stride_v_n", "stride_v_h", "stride_v_d",
    "stride_kc_p", "stride_kc_t", "stride_kc_h", "stride_kc_d",
    "stride_vc_p", "stride_vc_t", "stride_vc_h", "stride_vc_d",
)  # fmt: skip

VIEWS = ("k", "v", "k_cache", "v_cache", "slots")  # may start at any byte


@triton.jit
def _at(x, start, cols, stride, ALIGNED: tl.constexpr):
    """Pointers to `cols` of the rows that start at `start`."""
    if ALIGNED:
        return tl.multiple_of(x + (start[:, None] + cols[None, :]), (16, 16))
    return x + (start[:, None] + (cols * stride)[None, :])


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=VIEWS)
def cache_write(
    k, v, k_cache, v_cache, slots, rows: tl.int64, heads: tl.int32,
    stride_k_n: tl.int64, stride_k_h: tl.int64, stride_k_d: tl.int64,
    stride_v_n: tl.int64, stride_v_h: tl.int64, stride_v_d: tl.int64,
    stride_kc_p: tl.int64, stride_kc_t: tl.int64, stride_kc_h: tl.int64, stride_kc_d: tl.int64,
    stride_vc_p: tl.int64, stride_vc_t: tl.int64, stride_vc_h: tl.int64, stride_vc_d: tl.int64,
    PAGE: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token; heads of a token are neighbours."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [R]
    token = row // heads
    head = row % heads
    cols = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + token, mask=row < rows, other=-1).to(tl.int64)
    page = slot // PAGE
    offset = slot % PAGE
    mask = (slot >= 0)[:, None] & (cols < WIDTH)[None, :]
    key = tl.load(
        _at(k, token * stride_k_n + head * stride_k_h, cols, stride_k_d, ALIGNED), mask=mask
    )
    value = tl.load(
        _at(v, token * stride_v_n + head * stride_v_h, cols, stride_v_d, ALIGNED), mask=mask
    )
    to_k = page * stride_kc_p + offset * stride_kc_t + head * stride_kc_h
    tl.store(_at(k_cache, to_k, cols, stride_kc_d, ALIGNED), key, mask=mask)
    to_v = page * stride_vc_p + offset * stride_vc_t + head * stride_vc_h
    tl.store(_at(v_cache, to_v, cols, stride_vc_d, ALIGNED), value, mask=mask)
