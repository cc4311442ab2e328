"""The Atlas memory in plain torch: any device and dtype, chunk after chunk, both passes explicit.

What the chunks of `omega.eager` start with, K, R, A, B and U, is here the same. S is known at every
token of a chunk before M is, so that all of a chunk's Newton–Schulz are one stack: with tokens l
that it meets,

    S_l = B_l S − Kᵀ (U_l ∘ R)       O_l = NS(S_l)
    C_{t,l} = output_step_l · the product of decays after l up to t
    Y_t = A_t φ(q_t) M + Σ_{l≤t} C_{t,l} φ(q_t) O_l
    M ← A_b M + Σ_l C_{b,l} O_l      S ← B_b S − Kᵀ (U_b ∘ R)

Nothing but sums goes from one l to the next: a stack is cut where it would be large, and backward
takes the parts as they come. C makes its gradients of decay and output_step as P does in the Omega
rule. Of long matrices NS(S) is S Q(SᵀS), or Q(S Sᵀ) S if their rows are the long side, with the
factor Q of `gram_newton_schulz_factor`: from four times as long as wide on that is less work, even
in float64, which squares of singular values take.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..newton_schulz import eager as newton_schulz
from ..newton_schulz.op import FACTOR_FWD, MATRIX_FWD, NewtonSchulzShape
from ..omega import eager as omega
from ..omega.eager import Chunk, Piece, Scans, after, shifted
from .op import AtlasShape, AtlasTensors

SPACE_FWD = SPACE_BWD = None

NUMBERS = 1 << 22  # of momenta that are orthogonalised at a time; backward keeps each step of them
LONG = 4


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


class _Part(NamedTuple):
    """Some of a chunk's tokens that meet Newton–Schulz."""

    columns: slice  # of C
    tokens: Tensor  # in the chunk
    momenta: Tensor  # S (B, H, l, D, Dv)


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

    def _writes(self, chunk: Chunk, scans: Scans) -> Tensor:
        """C (B, H, b, L)."""
        met = self._met(chunk)
        return scans.decays[..., met] * self.output[:, :, None, chunk.begin + met]

    def _parts(
        self, chunk: Chunk, scans: Scans, k: Tensor, error: Tensor, velocity: Tensor
    ) -> Iterator[_Part]:
        """All of a chunk's momenta that are orthogonalised, some at a time."""
        assert scans.drop is not None
        met = self._met(chunk)
        size = max(1, NUMBERS // max(1, velocity.numel()))
        for begin in range(0, len(met), size):
            columns = slice(begin, begin + size)
            tokens = met[columns]
            pushed = scans.push[:, :, tokens, :, None] * error[:, :, None]  # (B, H, l, n, Dv)
            momenta = scans.drop[:, :, tokens, None, None] * velocity[:, :, None]
            momenta = momenta - self._product(k.mT[:, :, None], pushed)
            yield _Part(columns, tokens, momenta)

    def forward(self, chunk: Chunk) -> Tensor:
        """The reads of a chunk (B, H, b, Dv); M and S go on to its end."""
        q, k, v = self._operands(chunk)
        scans = self._scans(chunk)
        state, velocity = self.state, self.velocity
        assert velocity is not None
        assert scans.drop is not None
        error = self._error(k, v, state)
        rate, writes, seen = self._as_seen(chunk, scans)
        read = rate[..., None] * self._product(q, state)
        total = scans.rate[:, :, -1, None, None] * state
        for part in self._parts(chunk, scans, k, error, velocity):
            written = orthogonal(self.rules, part.momenta)
            found = self._product(q[:, :, None], written)  # (B, H, l, b, Dv)
            read = read + (seen[..., part.columns].mT[..., None] * found).sum(2)
            last = writes[:, :, -1, part.columns, None, None]
            total = total + (last * written).sum(2)
        pushed = scans.push[:, :, -1, :, None] * error
        self.velocity = scans.drop[:, :, -1, None, None] * velocity - self._product(k.mT, pushed)
        self.state = total
        return read

    def _as_seen(self, chunk: Chunk, scans: Scans) -> tuple[Tensor, Tensor, Tensor]:
        """A as reads see it, C, and C as reads see it."""
        writes = self._writes(chunk, scans)
        if not self.shape.read_before:
            return scans.rate, writes, writes
        return shifted(scans.rate, 1, 2), writes, shifted(writes, 0, 2)

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
        rate, writes, seen = self._as_seen(chunk, scans)

        # A read of M, and S at the end.
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

        d_seen = torch.zeros_like(writes)
        d_last = torch.zeros_like(writes[:, :, -1])
        for part in self._parts(chunk, scans, k, error, velocity):
            columns, tokens, momenta = part
            written = orthogonal(self.rules, momenta)
            weighed = seen[..., columns].mT[..., None] * d_y[:, :, None]  # (B, H, l, b, Dv)
            d_q = d_q + product(weighed, written.mT).sum(2)
            found = product(q[:, :, None], written)
            d_seen[..., columns] = (found * d_y[:, :, None]).sum(-1).mT
            d_last[..., columns] = (written * d_state[:, :, None]).sum((-2, -1))
            d_written = product(q.mT[:, :, None], weighed)
            d_written = d_written + writes[:, :, -1, columns, None, None] * d_state[:, :, None]
            d_momenta = orthogonal_backward(self.rules, d_written, momenta)

            pushed = scans.push[:, :, tokens, :, None]  # (B, H, l, n, 1)
            pushing = product(k[:, :, None], d_momenta)
            d_error = d_error - (pushed * pushing).sum(2)
            d_k = d_k - product(pushed * error[:, :, None], d_momenta.mT).sum(2)
            d_push[:, :, tokens] -= (error[:, :, None] * pushing).sum(-1)
            d_drop[:, :, tokens] += (d_momenta * velocity[:, :, None]).sum((-2, -1))
            share = scans.drop[:, :, tokens, None, None] * d_momenta
            self.d_velocity = self.d_velocity + share.sum(2)
        if self.shape.read_before:
            d_seen, d_rate = after(d_seen, 2), after(d_rate, 2)
        d_seen[:, :, -1] += d_last
        d_rate[:, :, -1] += (d_state * state).sum((-2, -1))
        if not self.shape.dot:
            d_k = d_k + product(d_error, state.mT)
            before = before + product(k.mT, d_error)
        self.d_state = before

        rows = slice(chunk.begin, chunk.end + self.older)
        self.d_q[:, :, chunk.begin : chunk.end] = d_q
        self.d_k[:, :, rows] += d_k
        self.d_v[:, :, rows] -= d_error
        d_decay = self._writes_backward(chunk, scans, writes, d_seen, d_rate)
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


# ---- Newton–Schulz of stacks --------------------------------------------------------------------


def orthogonal(shape: AtlasShape, s: Tensor) -> Tensor:
    """NS of matrices (B, H, l, D, Dv); of a zero matrix 0. Autograd can follow it."""
    if s.numel() == 0:
        return s
    numbers, eps = shape.ns_numbers, shape.ns_eps
    if not _long(s):
        return MATRIX_FWD(s, numbers, eps, s.dtype, "eager")
    x = s.double()
    gram, tall = _gram(x)
    factor = FACTOR_FWD(gram, numbers, eps, x.dtype, "eager")
    return (x @ factor if tall else factor @ x).to(s.dtype)


def orthogonal_backward(shape: AtlasShape, d: Tensor, s: Tensor) -> Tensor:
    """The gradient of s for that of `orthogonal`; of a zero matrix 0."""
    if s.numel() == 0:
        return d
    stack, d_stack = s.flatten(0, 2), d.flatten(0, 2)
    if not _long(stack):
        of = _shape(shape, stack, factor=False)
        return newton_schulz.bwd(of, d_stack, stack).view_as(s)
    x, d_x = stack.double(), d_stack.double()
    gram, tall = _gram(x)
    of = _shape(shape, gram, factor=True)
    factor = newton_schulz.fwd(of, gram)
    d_gram = newton_schulz.bwd(of, x.mT @ d_x if tall else d_x @ x.mT, gram)
    both = d_gram + d_gram.mT
    found = d_x @ factor.mT + x @ both if tall else factor.mT @ d_x + both @ x
    return found.to(s.dtype).view_as(s)


def _long(x: Tensor) -> bool:
    """Whether the Gram matrix, 4 n² m + 34 n³, is the shorter way than 20 n² m + 10 n³."""
    n, m = sorted(x.shape[-2:])
    return m >= LONG * n


def _gram(x: Tensor) -> tuple[Tensor, bool]:
    """xᵀx or x xᵀ, whichever is smaller, and whether it is the first."""
    tall = x.shape[-2] >= x.shape[-1]
    return (x.mT @ x if tall else x @ x.mT), tall


def _shape(shape: AtlasShape, x: Tensor, factor: bool) -> NewtonSchulzShape:
    return NewtonSchulzShape(
        factor=factor,
        batch=x.shape[0],
        rows=x.shape[1],
        cols=x.shape[2],
        dtype=x.dtype,
        compute_dtype=x.dtype,
        device=x.device,
        coefficients=shape.ns_numbers,
        eps=shape.ns_eps,
    )
