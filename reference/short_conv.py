"""The causal depthwise convolution of a few taps, literally: token after token.

Formula, arguments and results are those of `fastweights.ops.short_conv`. Of each channel, with
z = 0 in front of a sequence without an initial state,

    z_t = gate_in_t · x_t
    p_t = Σ_j weight_j z_{t−K+1+j} + bias
    y_t = gate_out_t · (act(p_t) + z_t)    z_t with `residual` alone; act is p or silu(p)

All in fp32 (float64 for float64), y rounded once: the "plain torch" that kernels are measured by.
Source: LFM2's gated short convolution, and the Canon layer with a residual.
"""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, gate_in: Tensor | None = None,
    gate_out: Tensor | None = None, activation: str | None = None, residual: bool = False,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `fastweights.ops.short_conv`."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    batch, tokens, channels = x.shape
    taps = weight.shape[1]
    if cu_seqlens is None:
        spans = [(n, 0, tokens) for n in range(batch)]
    else:
        ends = cu_seqlens.tolist()
        spans = [(0, ends[n], ends[n + 1]) for n in range(len(ends) - 1)]
    rows: list[list[Tensor]] = [[] for _ in range(batch)]
    states: list[Tensor] = []
    for n, (row, begin, end) in enumerate(spans):
        if initial_state is None:
            seen = [x.new_zeros(channels, dtype=acc)] * (taps - 1)
        else:
            seen = list(initial_state[n].to(acc))
        for t in range(begin, end):
            z = x[row, t].to(acc)
            if gate_in is not None:
                z = gate_in[row, t].to(acc) * z
            seen = [*seen, z]
            y = torch.zeros_like(z) if bias is None else bias.to(acc)
            for j in range(taps):
                y = y + weight[:, j].to(acc) * seen[len(seen) - taps + j]
            if activation == "silu":
                y = y * torch.sigmoid(y)
            if residual:
                y = y + z
            if gate_out is not None:
                y = gate_out[row, t].to(acc) * y
            rows[row].append(y.to(x.dtype))
        last = seen[len(seen) - taps + 1 :]
        states.append(torch.stack(last) if last else x.new_zeros(0, channels, dtype=acc))
    padding = x.new_zeros(channels)
    y = torch.stack(
        [torch.stack(row + [padding] * (tokens - len(row))) for row in rows]
    ) if batch and tokens else x.new_zeros(x.shape)  # fmt: skip
    if not output_final_state:
        return y, None
    return y, torch.stack(states) if states else x.new_zeros(0, taps - 1, channels, dtype=acc)
