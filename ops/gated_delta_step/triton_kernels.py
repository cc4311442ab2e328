"""A token of the gated delta rule on memories in slots of a pool, which are read and written once.

A program has V columns of one head's memory, all rows of them in registers. As columns do not meet,
nothing that it writes is read by another one. With u = beta (v − k S^) what is read is

    o = scale · q (S^ + kᵀ u) = scale · (q S^ + (q · k) u)

so that both products with S^ are summed at once.
"""

import triton
import triton.language as tl

RUNTIME = (
    "heads", "heads_q", "heads_k", "heads_v", "scale", "eps", "stride_q_n", "stride_q_h",
    "stride_k_n", "stride_k_h", "stride_v_n", "stride_v_h", "stride_log_decay_n",
    "stride_log_decay_h", "stride_beta_n", "stride_beta_h", "stride_pool_n", "stride_pool_h",
    "stride_pool_r",
)  # fmt: skip


@triton.jit
def _vector(x, row, head, d, stride_n, stride_h, WIDTH: tl.constexpr):
    """Elements d of a head in fp32, 0 where there are none."""
    pointers = x + (row * stride_n + head * stride_h) + d
    return tl.load(pointers, mask=d < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=RUNTIME)
def delta_step(
    q, k, v, log_decay, beta, pool, slots, o,
    heads: tl.int32, heads_q: tl.int32, heads_k: tl.int32, heads_v: tl.int32,
    scale: tl.float32, eps: tl.float32,
    stride_q_n: tl.int64, stride_q_h: tl.int64, stride_k_n: tl.int64, stride_k_h: tl.int64,
    stride_v_n: tl.int64, stride_v_h: tl.int64,
    stride_log_decay_n: tl.int64, stride_log_decay_h: tl.int64,
    stride_beta_n: tl.int64, stride_beta_h: tl.int64,
    stride_pool_n: tl.int64, stride_pool_h: tl.int64, stride_pool_r: tl.int64,
    NORM: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """o and slots are contiguous, and so is each row of what else there is."""
    PARTS: tl.constexpr = (VALUES + V - 1) // V
    part = tl.program_id(0) % PARTS
    place = tl.program_id(0) // PARTS
    row = (place // heads).to(tl.int64)
    head = place % heads
    slot = tl.load(slots + row).to(tl.int64)
    e = part * V + tl.arange(0, V)
    known = e < VALUES
    out = o + (place.to(tl.int64) * VALUES + e)
    if slot < 0:
        tl.store(out, tl.zeros([V], o.dtype.element_ty), mask=known)
    else:
        d = tl.arange(0, D)
        memory = pool + (slot * stride_pool_n + head * stride_pool_h)
        tile = memory + (d.to(tl.int64)[:, None] * stride_pool_r + e[None, :])
        if ALIGNED:
            tile = tl.multiple_of(tile, (16, 16))
        inside = (d < WIDTH)[:, None] & known[None, :]
        state = tl.load(tile, mask=inside, other=0.0)  # [D, V], on its way while q and k come

        head_q = head * heads_q // heads
        head_k = head * heads_k // heads
        head_v = head * heads_v // heads
        query = _vector(q, row, head_q, d, stride_q_n, stride_q_h, WIDTH)  # [D]
        key = _vector(k, row, head_k, d, stride_k_n, stride_k_h, WIDTH)
        value = tl.load(v + (row * stride_v_n + head_v * stride_v_h) + e, mask=known, other=0.0)
        decay = tl.load(log_decay + row * stride_log_decay_n + head * stride_log_decay_h)
        rate = tl.load(beta + row * stride_beta_n + head * stride_beta_h)
        if NORM:
            query /= tl.maximum(tl.sqrt_rn(tl.sum(query * query)), eps)
            key /= tl.maximum(tl.sqrt_rn(tl.sum(key * key)), eps)
        state *= tl.exp(decay)
        told = tl.sum(key[:, None] * state, 0)  # [V]
        seen = tl.sum(query[:, None] * state, 0)
        change = rate * (value.to(tl.float32) - told)
        state += key[:, None] * change[None, :]
        tl.store(tile, state, mask=inside)
        read = scale * (seen + tl.sum(query * key) * change)
        tl.store(out, read.to(o.dtype.element_ty), mask=known)
