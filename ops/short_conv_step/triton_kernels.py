"""A token of the short convolution on states in slots of a pool, which are read and written once.

A program has C channels and ROWS rows of a call, one after another, and reads their weights once.
What it writes, no other one reads.
"""

import triton
import triton.language as tl

from ..short_conv.triton_kernels import gated, line, read, silu_of, summed, weight_of

RUNTIME = (
    "rows", "groups", "stride_x", "stride_gate_in", "stride_gate_out", "stride_weight_d",
    "stride_weight_k", "stride_bias", "stride_pool_n", "stride_pool_r",
)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def conv_step(
    x, weight, bias, gate_in, gate_out, pool, slots, y,
    rows: tl.int32, groups: tl.int32,
    stride_x: tl.int64, stride_gate_in: tl.int64, stride_gate_out: tl.int64,
    stride_weight_d: tl.int64, stride_weight_k: tl.int64, stride_bias: tl.int64,
    stride_pool_n: tl.int64, stride_pool_r: tl.int64,
    TAPS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    GATE_IN: tl.constexpr, GATE_OUT: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """y and slots are contiguous. There are VEC · groups channels."""
    ALIGNED: tl.constexpr = VEC > 1
    channels = groups * VEC
    blocks = tl.cdiv(channels, C)
    first = tl.program_id(0) // blocks * ROWS
    c = tl.program_id(0) % blocks * C + tl.arange(0, C)
    known = c < channels
    w0 = weight_of(weight, c, known, 0, stride_weight_d, stride_weight_k, TAPS)
    w1 = weight_of(weight, c, known, 1, stride_weight_d, stride_weight_k, TAPS)
    w2 = weight_of(weight, c, known, 2, stride_weight_d, stride_weight_k, TAPS)
    w3 = weight_of(weight, c, known, 3, stride_weight_d, stride_weight_k, TAPS)
    offset = tl.zeros([C], tl.float32)
    if BIAS:
        pointers = bias + c.to(tl.int64) * stride_bias
        offset += tl.load(pointers, mask=known, other=0.0).to(tl.float32)
    for i in range(tl.minimum(ROWS, rows - first)):
        row = (first + i).to(tl.int64)
        slot = tl.load(slots + row)
        out = line(y + row * channels, c, ALIGNED)
        if slot < 0:
            tl.store(out, tl.zeros([C], y.dtype.element_ty), mask=known)
        else:
            raw = read(x + row * stride_x, c, known, ALIGNED)
            gate = raw
            if GATE_IN:
                gate = read(gate_in + row * stride_gate_in, c, known, ALIGNED)
            z = gated(raw, gate, GATE_IN)
            # Of the state's rows the oldest is the first.
            state = pool + slot * stride_pool_n
            a1 = z
            a2 = z
            a3 = z
            if TAPS > 1:
                a1 = read(state + (TAPS - 2) * stride_pool_r, c, known, ALIGNED)
            if TAPS > 2:
                a2 = read(state + (TAPS - 3) * stride_pool_r, c, known, ALIGNED)
            if TAPS > 3:
                a3 = read(state, c, known, ALIGNED)
            found = silu_of(summed(z, a1, a2, a3, w0, w1, w2, w3, offset, TAPS), SILU)
            if RESIDUAL:
                found += z
            if GATE_OUT:
                behind = read(gate_out + row * stride_gate_out, c, known, ALIGNED)
                found *= behind.to(tl.float32)
            tl.store(out, found.to(y.dtype.element_ty), mask=known)
            if TAPS > 1:
                place = line(state + (TAPS - 2) * stride_pool_r, c, ALIGNED)
                tl.store(place, z, mask=known)
            if TAPS > 2:
                place = line(state + (TAPS - 3) * stride_pool_r, c, ALIGNED)
                tl.store(place, a1, mask=known)
            if TAPS > 3:
                tl.store(line(state, c, ALIGNED), a2, mask=known)
