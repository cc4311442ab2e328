"""The short convolution in plain torch: any device and dtype, both passes explicit.

A sequence is laid behind the K − 1 rows of its initial state, so that a token's taps are always
there, and the final state is the last K − 1 rows. Packed sequences lie one behind the other, each
with such rows in front, and padding as one more: no length is read on the host.

Backward, with d_p the gradient of the sums: the row of a token has Σ_j weight_j d_p of the token
K − 1 − j later, and weight_j has Σ_t z_{t−K+1+j} d_p_t. All in fp32 (float64 for float64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .op import ConvShape, ConvTensors

SPACE_FWD = SPACE_BWD = None


def supports(shape: ConvShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


class _Rows(NamedTuple):
    """Where tokens and states of packed sequences lie among the rows of all of them."""

    tokens: Tensor  # (T,)
    states: Tensor  # (N, K − 1)
    ends: Tensor  # (N, K − 1), the last rows of each
    live: Tensor  # (T, 1), no padding


def _packed_rows(shape: ConvShape, cu_seqlens: Tensor) -> _Rows:
    """N blocks, each of K − 1 rows and a sequence, and a block of padding."""
    older, device = shape.taps - 1, shape.device
    cu = cu_seqlens.long()
    token = torch.arange(shape.tokens, device=device)
    block = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    state = torch.arange(older, device=device)
    front = older * torch.arange(shape.batch, device=device)
    return _Rows(
        tokens=token + (block + 1) * older,
        states=(cu[:-1] + front)[:, None] + state,
        ends=(cu[1:] + front)[:, None] + state,
        live=(block < shape.batch)[:, None],
    )


class _Run:
    """What both passes need: z in rows, the sums, and what stands in front of gate_out."""

    def __init__(self, shape: ConvShape, given: ConvTensors) -> None:
        self.shape, self.acc = shape, shape.acc
        cu = given.cu_seqlens
        self.at = None if cu is None else _packed_rows(shape, cu)
        self.x = self.wide(given.x)
        self.gate_in = None if given.gate_in is None else self.wide(given.gate_in)
        self.gate_out = None if given.gate_out is None else self.wide(given.gate_out)
        self.weight = given.weight.to(self.acc)
        self.z = self.x if self.gate_in is None else self.gate_in * self.x
        self.rows = self._laid_out(given.initial_state)
        self.sums = self._sums(given.bias)

    def wide(self, x: Tensor) -> Tensor:
        """In the dtype of sums, with zeros in the place of padding."""
        x = x.to(self.acc)
        return x if self.at is None else torch.where(self.at.live, x, 0)

    def _laid_out(self, state: Tensor | None) -> Tensor:
        older = self.shape.taps - 1
        if self.at is None:
            if state is None:
                return torch.nn.functional.pad(self.z, (0, 0, older, 0))
            return torch.cat([state, self.z], 1)
        length = self.shape.tokens + (self.shape.batch + 1) * older
        rows = self.z.new_zeros(1, length, self.shape.channels)
        rows[0, self.at.tokens] = self.z[0]
        if state is not None:
            rows[0, self.at.states] = state
        return rows

    def _sums(self, bias: Tensor | None) -> Tensor:
        """Σ_j weight_j z + bias, (B, T, D)."""
        sums = torch.zeros_like(self.z) if bias is None else bias.to(self.acc).expand_as(self.z)
        for j in range(self.shape.taps):
            sums = sums + self.weight[:, j] * self.tap(j)
        return sums

    def tap(self, j: int) -> Tensor:
        """What weight_j is multiplied with, (B, T, D)."""
        if self.at is None:
            return self.rows[:, j : j + self.shape.tokens]
        return self.rows[:, self.at.tokens - (self.shape.taps - 1) + j]

    def ungated(self) -> Tensor:
        """What gate_out multiplies."""
        y = self.sums * torch.sigmoid(self.sums) if self.shape.silu else self.sums
        return y + self.z if self.shape.residual else y


def fwd(shape: ConvShape, given: ConvTensors) -> tuple[Tensor, Tensor]:
    """y (B, T, D) in x's dtype, and the state (N, K − 1, D) after the last token."""
    run = _Run(shape, given)
    y = run.ungated()
    if run.gate_out is not None:
        y = run.gate_out * y
    if run.at is None:
        return y.to(shape.dtype).contiguous(), run.rows[:, shape.tokens :].clone()
    y = torch.where(run.at.live, y, 0)
    return y.to(shape.dtype).contiguous(), run.rows[0, run.at.ends]


def bwd(
    shape: ConvShape, d_y: Tensor, d_state: Tensor, given: ConvTensors
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, gate_in, gate_out, initial_state; None for absent ones."""
    run = _Run(shape, given)
    d_y = run.wide(d_y)
    d_gate_out = None
    if run.gate_out is not None:
        d_gate_out = (d_y * run.ungated()).to(shape.dtype)
        d_y = d_y * run.gate_out
    d_sums = d_y
    if shape.silu:
        s = torch.sigmoid(run.sums)
        d_sums = d_y * s * (1 + run.sums * (1 - s))

    older = shape.taps - 1
    d_rows = torch.zeros_like(run.rows)
    for j in range(shape.taps):
        if run.at is None:
            d_rows[:, j : j + shape.tokens] += run.weight[:, j] * d_sums
        else:
            d_rows[:, run.at.tokens - older + j] += run.weight[:, j] * d_sums
    if run.at is None:
        d_rows[:, shape.tokens :] += d_state
        d_z, d_initial = d_rows[:, older:], d_rows[:, :older]
    else:
        d_rows[0, run.at.ends] += d_state
        d_z, d_initial = d_rows[:, run.at.tokens], d_rows[0, run.at.states]
    if shape.residual:
        d_z = d_z + d_y
    if run.at is not None:
        d_z = torch.where(run.at.live, d_z, 0)

    d_weight = torch.stack([(d_sums * run.tap(j)).sum((0, 1)) for j in range(shape.taps)], -1)
    d_x = d_z if run.gate_in is None else d_z * run.gate_in
    return (
        d_x.to(shape.dtype).contiguous(),
        d_weight.to(given.weight.dtype).contiguous(),
        None if given.bias is None else d_sums.sum((0, 1)).to(given.bias.dtype),
        None if run.gate_in is None else (d_z * run.x).to(shape.dtype),
        d_gate_out,
        d_initial.clone() if shape.carried else None,
    )
