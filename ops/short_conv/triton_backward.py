"""Backward of the short convolution along runs of tokens, each number read and written once.

A program has C channels and RUN tokens of a row, as in `triton_kernels`, and walks against time, so
that what later tokens send back is there when a token needs it, and the rows of the taps are read
ahead. What lies before a run and behind it is read again by its neighbours. Sums are in fp32; those
of weight and bias each run writes apart, and `conv_sums` adds them up.

Letters are those of `triton_kernels`; b1 … b3 are the gradients of sums of as many later tokens.
"""

import triton
import triton.language as tl

from .triton_kernels import (
    FWD,
    gated,
    line,
    next_start,
    older,
    read,
    sequence_of,
    silu_of,
    summed,
    weight_of,
)

BWD = (*FWD, "stride_d_y_b", "stride_d_y_t", "stride_d_state_n", "stride_d_state_r")


@triton.jit
def _pulled(
    x, gate_in, state, t, start, n, c, live, back: tl.constexpr, z, stride_x_t, stride_gate_in_t,
    stride_state_n, stride_state_r, GATE_IN: tl.constexpr, CARRIED: tl.constexpr,
    TAPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """z of the token `back` before t, of whose row z is, if that is of the same sequence."""
    if t - back < start:
        z = older(
            x, gate_in, state, t - back, start, n, c, live, stride_x_t, stride_gate_in_t,
            stride_state_n, stride_state_r, GATE_IN, CARRIED, TAPS, ALIGNED,
        )  # fmt: skip
    return z


@triton.jit
def _sent(
    d, d_state, d_initial, n, i: tl.constexpr, length, c, known, channels, stride_d_state_n,
    stride_d_state_r, TAPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of row i of an initial state.

    It is d, and, where a sequence is shorter than the state, what the last state's row says.
    """
    kept = d_state + (n * stride_d_state_n + (i - length) * stride_d_state_r)
    d += read(kept, c, known & (i >= length), ALIGNED)
    row = d_initial + (n.to(tl.int64) * (TAPS - 1) + i) * channels
    tl.store(line(row, c, ALIGNED), d, mask=known)


@triton.jit(do_not_specialize=BWD)
def conv_bwd(
    d_y, d_state, x, weight, bias, gate_in, gate_out, state, cu,
    d_x, d_in, d_out, d_initial, sums,
    batch: tl.int32, tokens: tl.int32, groups: tl.int32, runs: tl.int32, sequences: tl.int32,
    stride_x_b: tl.int64, stride_x_t: tl.int64,
    stride_gate_in_b: tl.int64, stride_gate_in_t: tl.int64,
    stride_gate_out_b: tl.int64, stride_gate_out_t: tl.int64,
    stride_weight_d: tl.int64, stride_weight_k: tl.int64, stride_bias: tl.int64,
    stride_state_n: tl.int64, stride_state_r: tl.int64,
    stride_d_y_b: tl.int64, stride_d_y_t: tl.int64,
    stride_d_state_n: tl.int64, stride_d_state_r: tl.int64,
    TAPS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    GATE_IN: tl.constexpr, GATE_OUT: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """All gradients, contiguous; `sums` (batch · runs, TAPS + BIAS, channels) are each run's part
    of those of weight and bias.

    Programs behind those of all runs each write the gradient of an empty sequence's initial state.
    """
    ALIGNED: tl.constexpr = VEC > 1
    OLDER: tl.constexpr = TAPS - 1
    channels = groups * VEC
    blocks = tl.cdiv(channels, C)
    place = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * C + tl.arange(0, C)
    known = c < channels
    if place < batch * runs:
        row = (place // runs).to(tl.int64)
        t0 = place % runs * RUN
        t1 = tl.minimum(t0 + RUN, tokens)
        top = tl.minimum(t1 + OLDER, tokens) - 1  # the latest token that sends something back
        whole = row * tokens * channels
        x += row * stride_x_b
        d_y += row * stride_d_y_b
        d_x += whole
        if GATE_IN:
            gate_in += row * stride_gate_in_b
            d_in += whole
        if GATE_OUT:
            gate_out += row * stride_gate_out_b
            d_out += whole
        n = place // runs
        start = t0 * 0
        end = tokens
        if PACKED:
            n = sequence_of(cu, top, sequences)
            start = tl.load(cu + n)
            end = next_start(cu, n, sequences)
        w0 = weight_of(weight, c, known, 0, stride_weight_d, stride_weight_k, TAPS)
        w1 = weight_of(weight, c, known, 1, stride_weight_d, stride_weight_k, TAPS)
        w2 = weight_of(weight, c, known, 2, stride_weight_d, stride_weight_k, TAPS)
        w3 = weight_of(weight, c, known, 3, stride_weight_d, stride_weight_k, TAPS)
        offset = tl.zeros([C], tl.float32)
        if BIAS:
            pointers = bias + c.to(tl.int64) * stride_bias
            offset += tl.load(pointers, mask=known, other=0.0).to(tl.float32)
        s0 = tl.zeros([C], tl.float32)
        s1 = tl.zeros([C], tl.float32)
        s2 = tl.zeros([C], tl.float32)
        s3 = tl.zeros([C], tl.float32)
        s_bias = tl.zeros([C], tl.float32)
        b1 = tl.zeros([C], tl.float32)
        b2 = tl.zeros([C], tl.float32)
        b3 = tl.zeros([C], tl.float32)

        # Rows of the taps of `top`, as they are in memory.
        x0 = read(x + top * stride_x_t, c, known, ALIGNED)
        x1 = x0
        x2 = x0
        x3 = x0
        g0 = x0
        if TAPS > 1:
            x1 = read(x + (top - 1) * stride_x_t, c, known & (top >= 1), ALIGNED)
        if TAPS > 2:
            x2 = read(x + (top - 2) * stride_x_t, c, known & (top >= 2), ALIGNED)
        if TAPS > 3:
            x3 = read(x + (top - 3) * stride_x_t, c, known & (top >= 3), ALIGNED)
        if GATE_IN:
            g0 = read(gate_in + top * stride_gate_in_t, c, known, ALIGNED)
        g1 = g0
        g2 = g0
        g3 = g0
        if GATE_IN:
            if TAPS > 1:
                g1 = read(gate_in + (top - 1) * stride_gate_in_t, c, known & (top >= 1), ALIGNED)
            if TAPS > 2:
                g2 = read(gate_in + (top - 2) * stride_gate_in_t, c, known & (top >= 2), ALIGNED)
            if TAPS > 3:
                g3 = read(gate_in + (top - 3) * stride_gate_in_t, c, known & (top >= 3), ALIGNED)
        next_d = read(d_y + top * stride_d_y_t, c, known, ALIGNED)
        next_out = next_d
        if GATE_OUT:
            next_out = read(gate_out + top * stride_gate_out_t, c, known, ALIGNED)
        for past in range(top + 1 - t0):
            t = top - past
            d = next_d.to(tl.float32)
            out = next_out.to(tl.float32)
            more = known & (t > t0)
            next_d = read(d_y + (t - 1) * stride_d_y_t, c, more, ALIGNED)
            if GATE_OUT:
                next_out = read(gate_out + (t - 1) * stride_gate_out_t, c, more, ALIGNED)
            before = more & (t >= TAPS)
            x4 = read(x + (t - TAPS) * stride_x_t, c, before, ALIGNED)
            g4 = x4
            if GATE_IN:
                g4 = read(gate_in + (t - TAPS) * stride_gate_in_t, c, before, ALIGNED)
            if PACKED:
                if t < start:
                    while tl.load(cu + n) > t:
                        n -= 1
                    end = start
                    start = tl.load(cu + n)
                    b1 = tl.zeros([C], tl.float32)
                    b2 = tl.zeros([C], tl.float32)
                    b3 = tl.zeros([C], tl.float32)
            live = n < sequences
            there = known & live
            z = gated(x0, g0, GATE_IN)
            a1 = z
            a2 = z
            a3 = z
            if TAPS > 1:
                a1 = _pulled(
                    x, gate_in, state, t, start, n, c, there, 1, gated(x1, g1, GATE_IN),
                    stride_x_t, stride_gate_in_t, stride_state_n, stride_state_r, GATE_IN, CARRIED,
                    TAPS, ALIGNED,
                )  # fmt: skip
            if TAPS > 2:
                a2 = _pulled(
                    x, gate_in, state, t, start, n, c, there, 2, gated(x2, g2, GATE_IN),
                    stride_x_t, stride_gate_in_t, stride_state_n, stride_state_r, GATE_IN, CARRIED,
                    TAPS, ALIGNED,
                )  # fmt: skip
            if TAPS > 3:
                a3 = _pulled(
                    x, gate_in, state, t, start, n, c, there, 3, gated(x3, g3, GATE_IN),
                    stride_x_t, stride_gate_in_t, stride_state_n, stride_state_r, GATE_IN, CARRIED,
                    TAPS, ALIGNED,
                )  # fmt: skip
            total = summed(z, a1, a2, a3, w0, w1, w2, w3, offset, TAPS)
            own = t < t1
            place_t = t.to(tl.int64) * channels
            if GATE_OUT:
                ungated = silu_of(total, SILU)
                if RESIDUAL:
                    ungated += z
                d_gate = d * ungated
                if PACKED:
                    d_gate = tl.where(live, d_gate, 0.0)
                tl.store(
                    line(d_out + place_t, c, ALIGNED), d_gate.to(d_out.dtype.element_ty),
                    mask=known & own,
                )  # fmt: skip
                d *= out
            b0 = d
            if SILU:
                rate = 1.0 / (1.0 + tl.exp(-total))
                b0 = d * (rate * (1.0 + total * (1.0 - rate)))
            if PACKED:
                d = tl.where(live, d, 0.0)
                b0 = tl.where(live, b0, 0.0)
            if own & live:
                s0 += b0 * z
                if TAPS > 1:
                    s1 += b0 * a1
                if TAPS > 2:
                    s2 += b0 * a2
                if TAPS > 3:
                    s3 += b0 * a3
                s_bias += b0
            if own:
                d_z = summed(b0, b1, b2, b3, w0, w1, w2, w3, 0.0, TAPS)
                if RESIDUAL:
                    d_z += d
                if TAPS > 1:
                    if (t >= end - OLDER) & live:
                        kept = d_state + (
                            n * stride_d_state_n + (t - end + OLDER) * stride_d_state_r
                        )
                        d_z += read(kept, c, known, ALIGNED)
                found = d_z
                if GATE_IN:
                    found = d_z * g0.to(tl.float32)
                    d_gate = d_z * x0.to(tl.float32)
                    if PACKED:
                        d_gate = tl.where(live, d_gate, 0.0)
                    tl.store(
                        line(d_in + place_t, c, ALIGNED), d_gate.to(d_in.dtype.element_ty),
                        mask=known,
                    )  # fmt: skip
                if PACKED:
                    found = tl.where(live, found, 0.0)
                tl.store(
                    line(d_x + place_t, c, ALIGNED), found.to(d_x.dtype.element_ty), mask=known
                )
                if CARRIED and TAPS > 1:
                    if (t == start) & live:
                        length = end - start
                        zero = tl.zeros([C], tl.float32)
                        d = summed(b0, b1, b2, zero, w1, w2, w3, zero, 0.0, TAPS - 1)
                        _sent(
                            d, d_state, d_initial, n, OLDER - 1, length, c, known, channels,
                            stride_d_state_n, stride_d_state_r, TAPS, ALIGNED,
                        )  # fmt: skip
                        if TAPS > 2:
                            d = summed(b0, b1, zero, zero, w2, w3, zero, zero, 0.0, TAPS - 2)
                            _sent(
                                d, d_state, d_initial, n, OLDER - 2, length, c, known, channels,
                                stride_d_state_n, stride_d_state_r, TAPS, ALIGNED,
                            )  # fmt: skip
                        if TAPS > 3:
                            _sent(
                                w3 * b0, d_state, d_initial, n, OLDER - 3, length, c, known,
                                channels, stride_d_state_n, stride_d_state_r, TAPS, ALIGNED,
                            )  # fmt: skip
            b3 = b2
            b2 = b1
            b1 = b0
            # The rows of the taps move by one token.
            if TAPS == 1:
                x0 = x4
                g0 = g4
            else:
                x0 = x1
                g0 = g1
            if TAPS == 2:
                x1 = x4
                g1 = g4
            if TAPS > 2:
                x1 = x2
                g1 = g2
            if TAPS == 3:
                x2 = x4
                g2 = g4
            if TAPS > 3:
                x2 = x3
                g2 = g3
                x3 = x4
                g3 = g4
        sums += place.to(tl.int64) * (TAPS + BIAS) * channels
        tl.store(line(sums + OLDER * channels, c, ALIGNED), s0, mask=known)
        if TAPS > 1:
            tl.store(line(sums + (OLDER - 1) * channels, c, ALIGNED), s1, mask=known)
        if TAPS > 2:
            tl.store(line(sums + (OLDER - 2) * channels, c, ALIGNED), s2, mask=known)
        if TAPS > 3:
            tl.store(line(sums, c, ALIGNED), s3, mask=known)
        if BIAS:
            tl.store(line(sums + TAPS * channels, c, ALIGNED), s_bias, mask=known)
    elif CARRIED:
        n = place - batch * runs
        length = tokens
        if PACKED:
            length = tl.load(cu + n + 1) - tl.load(cu + n)
        if length == 0:
            for i in tl.static_range(OLDER):
                _sent(
                    tl.zeros([C], tl.float32), d_state, d_initial, n, i, length, c, known,
                    channels, stride_d_state_n, stride_d_state_r, TAPS, ALIGNED,
                )  # fmt: skip


@triton.jit(do_not_specialize=("pieces", "groups"))
def conv_sums(
    sums, d_weight, d_bias, pieces: tl.int32, groups: tl.int32,
    TAPS: tl.constexpr, BIAS: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The parts of all runs, P at a time and always in this order; d_weight is (channels, TAPS).

    A program has C channels of one tap, or of the bias.
    """
    channels = groups * VEC
    blocks = tl.cdiv(channels, C)
    tap = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * C + tl.arange(0, C)
    known = c < channels
    total = tl.zeros([P, C], tl.float32)
    for first in range(0, pieces, P):
        piece = first + tl.arange(0, P)
        row = piece.to(tl.int64) * (TAPS + BIAS) + tap
        pointers = sums + (row[:, None] * channels + c[None, :])
        if VEC > 1:
            pointers = tl.multiple_of(pointers, (16, 16))
        total += tl.load(pointers, mask=(piece < pieces)[:, None] & known[None, :], other=0.0)
    found = tl.sum(total, 0)
    if tap < TAPS:
        place = c.to(tl.int64) * TAPS + tap
        tl.store(d_weight + place, found.to(d_weight.dtype.element_ty), mask=known)
    if BIAS:
        if tap == TAPS:
            tl.store(d_bias + c, found.to(d_bias.dtype.element_ty), mask=known)
