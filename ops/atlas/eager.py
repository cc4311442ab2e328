"""The Atlas memory in plain torch: any device and dtype, chunk after chunk, both passes explicit.

What the chunks of `omega.eager` start with, K, R, A, B and U, is here the same. S is known at every
token of a chunk before M is, so that all of a chunk's Newton–Schulz are one stack: with tokens l
that it meets,

    S_l = B_l S − Kᵀ (U_l ∘ R)       O_l = NS(S_l)
    C_{t,l} = output_step_l · the product of decays after l up to t
    Y_t = A_t φ(q_t) M + Σ_{l≤t} C_{t,l} φ(q_t) O_l
    M ← A_b M + Σ_l C_{b,l} O_l      S ← B_b S − Kᵀ (U_b ∘ R)

`stack` forms the S_l. Where they have many more rows than columns, as over symmetric features,
`gram` has the sums without them, but for float64. C makes its gradients of decay and output_step as
P does in the Omega rule.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..omega import eager as omega
from ..omega.eager import Chunk, Piece, Scans, after, shifted
from . import gram, stack
from .op import AtlasShape, AtlasTensors
from .stack import LONG, Met

SPACE_FWD = SPACE_BWD = None


def supports(shape: AtlasShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(shape: AtlasShape, given: AtlasTensors) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, T, H, Dv) in v's dtype, M and S (N, H, D, Dv) after the last token."""
    start = partial(Run, shape, given.output_step)
    y, state, momentum = omega.fwd(shape, given.memory, start)
    assert momentum is not None
    return y, state, momentum


def bwd(
    shape: AtlasShape, d_y: Tensor, d_state: Tensor, d_momentum: Tensor, given: AtlasTensors
) -> tuple[Tensor | None, ...]:
    """Gradients of the first tensors of `omega_memory`, and of output_step."""
    d_output = given.output_step.new_zeros(given.output_step.shape)
    start = partial(Run, shape, given.output_step, d_output=d_output)
    return (*omega.bwd(shape, d_y, d_state, d_momentum, given.memory, start), d_output)


class Run(omega.Run):
    """One piece on its way through its chunks, forward and back. Tensors are (B, H, T, …)."""

    def __init__(
        self, shape: AtlasShape, output_step: Tensor, piece: Piece, d_output: Tensor | None = None
    ) -> None:
        super().__init__(shape, piece)
        self.rules = shape
        self.output = piece.here(output_step).transpose(1, 2)
        self.d_output = None if d_output is None else piece.here(d_output).transpose(1, 2)

    def _met(self, chunk: Chunk) -> Tensor:
        """Tokens of a chunk that meet Newton–Schulz, in the chunk."""
        stride = self.rules.ns_stride
        count = (chunk.end - chunk.begin) // stride
        return torch.arange(count, device=self.k.device) * stride + stride - 1

    def _seen(self, chunk: Chunk, scans: Scans) -> tuple[Tensor, Tensor, Tensor]:
        """A as reads see it, C (B, H, b, L), and C as reads see it."""
        met = self._met(chunk)
        writes = scans.decays[..., met] * self.output[:, :, None, chunk.begin + met]
        if not self.shape.read_before:
            return scans.rate, writes, writes
        return shifted(scans.rate, 1, 2), writes, shifted(writes, 0, 2)

    def _operands_met(
        self, chunk: Chunk, scans: Scans, error: Tensor, velocity: Tensor, writes: Tensor,
        seen: Tensor,
    ) -> Met:  # fmt: skip
        q, k, _ = self._operands(chunk)
        met = self._met(chunk)
        assert scans.drop is not None
        return Met(
            q, k, error, velocity, scans.push[:, :, met], scans.drop[..., met], seen,
            writes[:, :, -1],
        )  # fmt: skip

    @property
    def _by_gram(self) -> bool:
        shape = self.shape
        return shape.acc != torch.float64 and shape.wide >= LONG * shape.values > 0

    def forward(self, chunk: Chunk) -> Tensor:
        """The reads of a chunk (B, H, b, Dv); M and S go on to its end."""
        q, k, v = self._operands(chunk)
        scans = self._scans(chunk)
        state, velocity = self.state, self.velocity
        assert velocity is not None
        assert scans.drop is not None
        error = self._error(k, v, state)
        rate, writes, seen = self._seen(chunk, scans)
        read = rate[..., None] * self._product(q, state)
        self.state = scans.rate[:, :, -1, None, None] * state
        pushed = scans.push[:, :, -1, :, None] * error
        self.velocity = scans.drop[:, :, -1, None, None] * velocity - self._product(k.mT, pushed)
        if writes.shape[3] == 0:
            return read
        met = self._operands_met(chunk, scans, error, velocity, writes, seen)
        if self._by_gram:
            found, written = gram.fwd(self.rules, met)
        else:
            found, written = stack.fwd(self.rules, met, self._product)
        self.state = self.state + written
        return read + found

    def backward(self, chunk: Chunk, state: Tensor, velocity: Tensor | None, d_y: Tensor) -> None:
        """From gradients at a chunk's end to those at its begin; M and S as they were there."""
        q, k, v = self._operands(chunk)
        product = self._product
        scans = self._scans(chunk)
        d_state, d_velocity = self.d_state, self.d_velocity
        assert velocity is not None
        assert d_velocity is not None
        assert scans.drop is not None
        error = self._error(k, v, state)
        rate, writes, seen = self._seen(chunk, scans)

        # Of reads of M, and of S at the end.
        d_q = rate[..., None] * product(d_y, state.mT)
        before = product(q.mT, rate[..., None] * d_y) + scans.rate[:, :, -1, None, None] * d_state
        d_rate = (d_y * product(q, state)).sum(-1)
        pushed, pushing = scans.push[:, :, -1, :, None], product(k, d_velocity)
        d_error = -pushed * pushing
        d_k = -product(pushed * error, d_velocity.mT)
        d_push = torch.zeros_like(scans.push)
        d_push[:, :, -1] = -(error * pushing).sum(-1)
        d_drop = torch.zeros_like(scans.drop)
        d_drop[:, :, -1] = (d_velocity * velocity).sum((-2, -1))
        self.d_velocity = scans.drop[:, :, -1, None, None] * d_velocity

        d_writes, d_last = torch.zeros_like(writes), torch.zeros_like(writes[:, :, -1])
        if writes.shape[3]:
            met = self._operands_met(chunk, scans, error, velocity, writes, seen)
            if self._by_gram:
                d = gram.bwd(self.rules, met, d_y, d_state)
            else:
                d = stack.bwd(self.rules, met, d_y, d_state, product)
            tokens = self._met(chunk)
            d_q, d_k, d_error = d_q + d.q, d_k + d.k, d_error + d.error
            d_push[:, :, tokens] += d.push
            d_drop[..., tokens] += d.drop
            self.d_velocity = self.d_velocity + d.velocity
            d_writes, d_last = d.seen, d.last
        if self.shape.read_before:
            d_writes, d_rate = after(d_writes, 2), after(d_rate, 2)
        d_writes[:, :, -1] += d_last
        d_rate[:, :, -1] += (d_state * state).sum((-2, -1))
        if not self.shape.dot:
            d_k = d_k + product(d_error, state.mT)
            before = before + product(k.mT, d_error)
        self.d_state = before

        rows = slice(chunk.begin, chunk.end + self.older)
        self.d_q[:, :, chunk.begin : chunk.end] = d_q
        self.d_k[:, :, rows] += d_k
        self.d_v[:, :, rows] -= d_error
        d_decay = self._writes_backward(chunk, scans, writes, d_writes, d_rate)
        self._gates_backward(chunk, scans, d_decay, d_push, d_drop)

    def _writes_backward(
        self, chunk: Chunk, scans: Scans, writes: Tensor, d_writes: Tensor, d_rate: Tensor
    ) -> Tensor:
        """C and A run backwards: the gradient of output_step is put, that of decay returned."""
        back = scans.decays.mT
        d_writes = back @ d_writes
        d_rate = (back @ d_rate[..., None])[..., 0]
        if self.d_output is not None:
            met = self._met(chunk)
            column = torch.arange(len(met), device=met.device)
            self.d_output[:, :, chunk.begin + met] = d_writes[:, :, met, column]
        d_decay = (d_writes * shifted(writes, 0, 2)).sum(-1)
        return d_decay + d_rate * shifted(scans.rate, 1, 2)
