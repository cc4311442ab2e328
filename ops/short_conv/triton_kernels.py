"""The short convolution along runs of tokens: each number is read once and written once.

A program has C channels and RUN tokens of a row. It walks with time and keeps the K − 1 last z; a
run's first ones are read again. All sums are in fp32. Backward is in `triton_backward`.

w0 … w3 are the weights of the present token and of those 1 to 3 before it, a1 … a3 the z of these.
"""

import triton
import triton.language as tl

STRIDES = (
    "stride_x_b", "stride_x_t", "stride_gate_in_b", "stride_gate_in_t", "stride_gate_out_b",
    "stride_gate_out_t", "stride_weight_d", "stride_weight_k", "stride_bias", "stride_state_n",
    "stride_state_r",
)  # fmt: skip
FWD = ("batch", "tokens", "groups", "runs", "sequences", *STRIDES)


@triton.jit
def line(x, c, ALIGNED: tl.constexpr):
    """Pointers to channels `c` of a row that starts at x."""
    if ALIGNED:
        return tl.multiple_of(x + c, 16)
    return x + c


@triton.jit
def read(x, c, there, ALIGNED: tl.constexpr):
    """Channels `c` of a row that starts at x, 0 where there are none."""
    return tl.load(line(x, c, ALIGNED), mask=there, other=0.0)


@triton.jit
def weight_of(weight, c, known, back: tl.constexpr, stride_d, stride_k, TAPS: tl.constexpr):
    """What the token `back` before the present one is multiplied with, 0 if there is no tap."""
    if back < TAPS:
        pointers = weight + (c.to(tl.int64) * stride_d + (TAPS - 1 - back) * stride_k)
        return tl.load(pointers, mask=known, other=0.0).to(tl.float32)
    return tl.zeros(c.shape, tl.float32)


@triton.jit
def silu_of(x, SILU: tl.constexpr):
    """The activation."""
    if SILU:
        return x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def gated(x, gate, GATED: tl.constexpr):
    """z in fp32."""
    z = x.to(tl.float32)
    if GATED:
        z *= gate.to(tl.float32)
    return z


@triton.jit
def summed(z, a1, a2, a3, w0, w1, w2, w3, offset, TAPS: tl.constexpr):
    """The taps, and a bias."""
    total = w0 * z + offset
    if TAPS > 1:
        total += w1 * a1
    if TAPS > 2:
        total += w2 * a2
    if TAPS > 3:
        total += w3 * a3
    return total


@triton.jit
def older(
    x, gate_in, state, p, start, n, c, there, stride_x_t, stride_gate_in_t, stride_state_n,
    stride_state_r, GATE_IN: tl.constexpr, CARRIED: tl.constexpr, TAPS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """z of token p, of sequence n from token `start` on, or of a token before it, in fp32."""
    inside = there & (p >= start)
    z = read(x + p * stride_x_t, c, inside, ALIGNED).to(tl.float32)
    if GATE_IN:
        z *= read(gate_in + p * stride_gate_in_t, c, inside, ALIGNED).to(tl.float32)
    if CARRIED:
        row = state + (n * stride_state_n + (p - start + TAPS - 1) * stride_state_r)
        z += read(row, c, there & (p < start), ALIGNED)
    return z


@triton.jit
def _row(
    x, gate_in, gate_out, t, c, there, stride_x_t, stride_gate_in_t, stride_gate_out_t,
    GATE_IN: tl.constexpr, GATE_OUT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Token t as it is in memory; x in the place of a gate that there is not."""
    raw = read(x + t * stride_x_t, c, there, ALIGNED)
    before = raw
    behind = raw
    if GATE_IN:
        before = read(gate_in + t * stride_gate_in_t, c, there, ALIGNED)
    if GATE_OUT:
        behind = read(gate_out + t * stride_gate_out_t, c, there, ALIGNED)
    return raw, before, behind


@triton.jit
def sequence_of(cu, t, sequences):
    """The sequence that token t is of; `sequences` in padding."""
    low = t * 0
    high = sequences
    while low < high:
        middle = (low + high + 1) // 2
        begun = tl.load(cu + middle) <= t
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    return low


@triton.jit
def next_start(cu, n, sequences):
    """Where the sequence behind n begins."""
    return tl.load(cu + tl.minimum(n + 1, sequences))


@triton.jit(do_not_specialize=FWD)
def conv_fwd(
    x, weight, bias, gate_in, gate_out, state, cu, y, last,
    batch: tl.int32, tokens: tl.int32, groups: tl.int32, runs: tl.int32, sequences: tl.int32,
    stride_x_b: tl.int64, stride_x_t: tl.int64,
    stride_gate_in_b: tl.int64, stride_gate_in_t: tl.int64,
    stride_gate_out_b: tl.int64, stride_gate_out_t: tl.int64,
    stride_weight_d: tl.int64, stride_weight_k: tl.int64, stride_bias: tl.int64,
    stride_state_n: tl.int64, stride_state_r: tl.int64,
    TAPS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    GATE_IN: tl.constexpr, GATE_OUT: tl.constexpr, CARRIED: tl.constexpr, PACKED: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y and the last state, which are contiguous. There are VEC · groups channels.

    AHEAD rows, 1 or 2, are on their way while one is computed.
    Programs behind those of all runs each write the last state of a sequence.
    """
    ALIGNED: tl.constexpr = VEC > 1
    channels = groups * VEC
    blocks = tl.cdiv(channels, C)
    place = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * C + tl.arange(0, C)
    known = c < channels
    if place < batch * runs:
        row = (place // runs).to(tl.int64)
        t0 = place % runs * RUN
        t1 = tl.minimum(t0 + RUN, tokens)
        x += row * stride_x_b
        y += row * tokens * channels
        if GATE_IN:
            gate_in += row * stride_gate_in_b
        if GATE_OUT:
            gate_out += row * stride_gate_out_b
        n = place // runs
        start = t0 * 0
        end = tokens
        if PACKED:
            n = sequence_of(cu, t0, sequences)
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

        live = known & (n < sequences)
        a1 = tl.zeros([C], tl.float32)
        a2 = tl.zeros([C], tl.float32)
        a3 = tl.zeros([C], tl.float32)
        if TAPS > 1:
            a1 = older(
                x, gate_in, state, t0 - 1, start, n, c, live, stride_x_t, stride_gate_in_t,
                stride_state_n, stride_state_r, GATE_IN, CARRIED, TAPS, ALIGNED,
            )  # fmt: skip
        if TAPS > 2:
            a2 = older(
                x, gate_in, state, t0 - 2, start, n, c, live, stride_x_t, stride_gate_in_t,
                stride_state_n, stride_state_r, GATE_IN, CARRIED, TAPS, ALIGNED,
            )  # fmt: skip
        if TAPS > 3:
            a3 = older(
                x, gate_in, state, t0 - 3, start, n, c, live, stride_x_t, stride_gate_in_t,
                stride_state_n, stride_state_r, GATE_IN, CARRIED, TAPS, ALIGNED,
            )  # fmt: skip
        next_x, next_in, next_out = _row(
            x, gate_in, gate_out, t0, c, known, stride_x_t, stride_gate_in_t, stride_gate_out_t,
            GATE_IN, GATE_OUT, ALIGNED,
        )  # fmt: skip
        after_x = next_x
        after_in = next_in
        after_out = next_out
        if AHEAD > 1:
            after_x, after_in, after_out = _row(
                x, gate_in, gate_out, t0 + 1, c, known & (t0 + 1 < t1), stride_x_t,
                stride_gate_in_t, stride_gate_out_t, GATE_IN, GATE_OUT, ALIGNED,
            )  # fmt: skip
        for past in range(t1 - t0):
            t = t0 + past
            z = gated(next_x, next_in, GATE_IN)
            out = next_out.to(tl.float32)
            next_x = after_x
            next_in = after_in
            next_out = after_out
            after_x, after_in, after_out = _row(
                x, gate_in, gate_out, t + AHEAD, c, known & (t + AHEAD < t1), stride_x_t,
                stride_gate_in_t, stride_gate_out_t, GATE_IN, GATE_OUT, ALIGNED,
            )  # fmt: skip
            if AHEAD == 1:
                next_x = after_x
                next_in = after_in
                next_out = after_out
            if PACKED:
                if (t == end) & (n < sequences):
                    while (n < sequences) & (next_start(cu, n, sequences) <= t):
                        n += 1
                    start = t
                    end = next_start(cu, n, sequences)
                    live = known & (n < sequences)
                    if TAPS > 1:
                        a1 = older(
                            x, gate_in, state, t - 1, start, n, c, live, stride_x_t,
                            stride_gate_in_t, stride_state_n, stride_state_r, GATE_IN, CARRIED,
                            TAPS, ALIGNED,
                        )  # fmt: skip
                    if TAPS > 2:
                        a2 = older(
                            x, gate_in, state, t - 2, start, n, c, live, stride_x_t,
                            stride_gate_in_t, stride_state_n, stride_state_r, GATE_IN, CARRIED,
                            TAPS, ALIGNED,
                        )  # fmt: skip
                    if TAPS > 3:
                        a3 = older(
                            x, gate_in, state, t - 3, start, n, c, live, stride_x_t,
                            stride_gate_in_t, stride_state_n, stride_state_r, GATE_IN, CARRIED,
                            TAPS, ALIGNED,
                        )  # fmt: skip
            found = silu_of(summed(z, a1, a2, a3, w0, w1, w2, w3, offset, TAPS), SILU)
            if RESIDUAL:
                found += z
            if GATE_OUT:
                found *= out
            if PACKED:
                found = tl.where(live, found, 0.0)
            pointers = line(y + t.to(tl.int64) * channels, c, ALIGNED)
            tl.store(pointers, found.to(y.dtype.element_ty), mask=known)
            a3 = a2
            a2 = a1
            a1 = z
    else:
        n = place - batch * runs
        start = n * 0
        end = tokens
        if PACKED:
            start = tl.load(cu + n)
            end = tl.load(cu + n + 1)
        else:
            x += n.to(tl.int64) * stride_x_b
            if GATE_IN:
                gate_in += n.to(tl.int64) * stride_gate_in_b
        last += n.to(tl.int64) * (TAPS - 1) * channels
        for i in tl.static_range(TAPS - 1):
            z = older(
                x, gate_in, state, end - (TAPS - 1 - i), start, n, c, known, stride_x_t,
                stride_gate_in_t, stride_state_n, stride_state_r, GATE_IN, CARRIED, TAPS, ALIGNED,
            )  # fmt: skip
            tl.store(line(last + i * channels, c, ALIGNED), z, mask=known)
