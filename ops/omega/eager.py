"""The Omega rule in plain torch: any device and dtype, chunk after chunk, both passes explicit.

Of a chunk of b tokens with the n = b + window − 1 keys that they may write, K and V, and with the
memory M and its momentum S at the end of the chunk before, all writes are known at once:

    R = K M − V ("dot": −V)
    A_t = decay_t A_{t−1}      B_t = momentum_t B_{t−1}      a_t = decay_t a_{t−1} + B_t
    U_t = momentum_t U_{t−1} + W_t                           P_t = decay_t P_{t−1} + U_t
    Y = A ∘ Q M + a ∘ Q S − (P ∘ Q Kᵀ) R
    M ← A_b M + a_b S − Kᵀ (P_b ∘ R)                         S ← B_b S − Kᵀ (U_b ∘ R)

W_t holds step_t · window_gates_t at the keys of token t's window. Without momentum U = W, and there
is no S. The scans are products with a triangle of products of decays: nothing is divided, so that a
decay may be 0. Products of forward run in k's dtype, all else in fp32 (float64 for float64): the
gradient of a gate adds up products of numbers that were rounded more often than in the rule taken
literally, token after token.

Packed sequences are taken one by one: `cu_seqlens` is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..polynomial import eager as polynomial
from ..polynomial.maps import of_coefficients
from .op import DIFFERENTIABLE, OmegaShape, OmegaTensors

SPACE_FWD = SPACE_BWD = None


def supports(shape: OmegaShape, arch: str) -> str | None:
    """None: eager runs every call that passes the checks."""
    return None


def fwd(
    shape: OmegaShape, given: OmegaTensors, start: Callable[[Piece], Run] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y (B, T, H, Dv) in v's dtype, M and S (N, H, D, Dv) after the last token, S with momentum.

    `start`: how a piece starts where a rule walks through its chunks otherwise than `Run`.
    """
    y = given.v.new_zeros(given.v.shape)
    states: list[Tensor] = []
    momenta: list[Tensor] = []
    for piece in pieces(shape, given):
        run = Run(shape, piece) if start is None else start(piece)
        for chunk in run.chunks:
            read = run.forward(chunk)
            piece.here(y)[:, chunk.begin : chunk.end] = read.transpose(1, 2).to(y.dtype)
        states.append(run.state)
        if run.velocity is not None:
            momenta.append(run.velocity)
    state = torch.cat(states) if states else given.empty_state(shape)
    if not shape.momentum:
        return y, state, None
    return y, state, torch.cat(momenta) if momenta else given.empty_state(shape)


class Gradients(NamedTuple):
    """Those of all tensors of a call that have one; None where the tensor is not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    step: Tensor
    decay: Tensor | None
    window_gates: Tensor | None
    momentum: Tensor | None
    coefficients: Tensor | None
    initial_state: Tensor | None
    initial_momentum: Tensor | None
    tail_k: Tensor | None
    tail_v: Tensor | None


def bwd(
    shape: OmegaShape, d_y: Tensor, d_state: Tensor, d_momentum: Tensor | None,
    given: OmegaTensors, start: Callable[[Piece], Run] | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of everything; d_momentum where the call has momentum. `start`: as in `fwd`."""
    tensors = given[:DIFFERENTIABLE]
    grads = Gradients._make(
        None if x is None else x.new_zeros(x.shape, dtype=shape.acc) for x in tensors
    )
    for piece in pieces(shape, given):
        run = Run(shape, piece) if start is None else start(piece)
        for chunk in run.chunks:
            run.kept.append((run.state, run.velocity))
            run.forward(chunk)
        run.products = shape.acc
        run.d_state = d_state[piece.slots].to(shape.acc)
        run.d_velocity = None if d_momentum is None else d_momentum[piece.slots].to(shape.acc)
        upstream = piece.here(d_y).transpose(1, 2).to(shape.acc)
        for chunk, before in zip(reversed(run.chunks), reversed(run.kept), strict=True):
            run.backward(chunk, *before, upstream[:, :, chunk.begin : chunk.end])
        run.add_to(grads)
    return Gradients._make(
        None if x is None or g is None else g.to(x.dtype)
        for g, x in zip(grads, tensors, strict=True)
    )


# ---- sequences and chunks -----------------------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens `begin` to `end` of a sequence."""

    begin: int
    end: int


class Piece(NamedTuple):
    """Sequences that run together: all of a batch, or one that is packed."""

    given: OmegaTensors
    slots: slice  # of the sequences, in states and tails
    tokens: slice

    def here(self, x: Tensor) -> Tensor:
        """The tokens of x (B, T, …)."""
        return x[:, self.tokens]


def pieces(shape: OmegaShape, given: OmegaTensors) -> list[Piece]:
    """All sequences at once, or the packed ones one by one."""
    if given.cu_seqlens is None:
        return [Piece(given, slice(0, shape.batch), slice(0, shape.tokens))]
    ends = given.cu_seqlens.tolist()
    return [
        Piece(given, slice(n, n + 1), slice(ends[n], ends[n + 1])) for n in range(len(ends) - 1)
    ]


class Scans(NamedTuple):
    """A, a, B of each token (B, H, b), P and U (B, H, b, n), and what makes them."""

    decays: Tensor  # (B, H, b, b), products of decays
    momenta: Tensor | None
    rate: Tensor  # A
    carry: Tensor | None  # a
    drop: Tensor | None  # B
    write: Tensor  # P
    push: Tensor  # U


def triangle(x: Tensor) -> Tensor:
    """(…, b) → (…, b, b): at (t, s) the product of x after s up to t, 0 above the diagonal."""
    length = x.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)
    rows = x[..., None].expand(*x.shape, length)
    return rows.masked_fill(~later, 1).cumprod(-2).tril()


def shifted(x: Tensor, first: float, dim: int) -> Tensor:
    """Each row's predecessor along `dim`; that of the first is `first`."""
    start = torch.full_like(x.narrow(dim, 0, 1), first)
    return torch.cat((start, x.narrow(dim, 0, x.shape[dim] - 1)), dim)


def after(x: Tensor, dim: int) -> Tensor:
    """Adjoint of `shifted`: each row's successor; that of the last is 0."""
    end = torch.zeros_like(x.narrow(dim, 0, 1))
    return torch.cat((x.narrow(dim, 1, x.shape[dim] - 1), end), dim)


class Run:
    """One piece on its way through its chunks, forward and back. Tensors are (B, H, T, …)."""

    def __init__(self, shape: OmegaShape, piece: Piece) -> None:
        given, acc = piece.given, shape.acc
        self.shape, self.piece = shape, piece
        self.older = shape.window - 1
        self.products = shape.dtype
        tokens = piece.tokens.stop - piece.tokens.start
        self.chunks = [
            Chunk(begin, min(begin + shape.chunk_size, tokens))
            for begin in range(0, tokens, shape.chunk_size)
        ]

        def by_head(x: Tensor) -> Tensor:
            return piece.here(x).transpose(1, 2)

        self.raw_q = by_head(given.q)
        self.raw_k, self.v, self.there = self._with_tail(tokens)
        self.q = features(shape, self.raw_q, given.coefficients)
        self.k = features(shape, self.raw_k, given.coefficients)
        self.step = by_head(given.step).to(acc)
        self.decay = None if given.decay is None else by_head(given.decay).to(acc)
        self.theta = None if given.momentum is None else by_head(given.momentum).to(acc)
        self.gates = None if given.window_gates is None else by_head(given.window_gates).to(acc)
        gates = 1 / shape.window if self.gates is None else self.gates
        self.weights = (self.step[..., None] * gates).masked_fill(~self.there, 0)
        zero = given.empty_state(shape)[:1].new_zeros(
            self.q.shape[0], shape.heads, shape.wide, shape.values
        )
        slots = piece.slots
        self.state = zero if given.initial_state is None else given.initial_state[slots].to(acc)
        self.velocity: Tensor | None = None
        if shape.momentum:
            start = given.initial_momentum
            self.velocity = zero if start is None else start[slots].to(acc)

        self.kept: list[tuple[Tensor, Tensor | None]] = []
        self.d_state = zero
        self.d_velocity: Tensor | None = None
        self.d_q = torch.zeros_like(self.q, dtype=acc)
        self.d_k = torch.zeros_like(self.k, dtype=acc)
        self.d_v = torch.zeros_like(self.v, dtype=acc)
        self.d_weights = torch.zeros_like(self.weights)
        self.d_decay = torch.zeros_like(self.step)
        self.d_theta = torch.zeros_like(self.step)

    def _with_tail(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values behind window − 1 older rows, zeros where there are none.

        And which keys of each token's window are there, bool (B, 1, T, window).
        """
        given, older, slots = self.piece.given, self.older, self.piece.slots
        k, v = (self.piece.here(x).transpose(1, 2) for x in (given.k, given.v))
        device = k.device
        if given.tail_k is None or given.tail_v is None:
            length = torch.zeros(k.shape[0], dtype=torch.int32, device=device)
        elif given.tail_length is None:
            length = torch.full((k.shape[0],), older, dtype=torch.int32, device=device)
        else:
            length = given.tail_length[slots]
        t = torch.arange(tokens, device=device)[:, None]
        lag = torch.arange(self.shape.window, device=device)
        there = (t - lag >= -length[:, None, None])[:, None]
        full = []
        for x, tail in ((k, given.tail_k), (v, given.tail_v)):
            if tail is None:
                rows = x.new_zeros(*x.shape[:2], older, x.shape[3])
            else:
                missing = torch.arange(older, device=device) < older - length[:, None]
                rows = tail[slots].transpose(1, 2).masked_fill(missing[:, None, :, None], 0)
            full.append(torch.cat((rows, x), 2))
        return full[0], full[1], there

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        dtype = self.products
        return (left.to(dtype) @ right.to(dtype)).to(self.shape.acc)

    def places(self, chunk: Chunk) -> Tensor:
        """Where the weights of a window lie in a row of W (b, n): (1, 1, b, window)."""
        t = torch.arange(chunk.end - chunk.begin, device=self.k.device)[:, None]
        lag = torch.arange(self.shape.window, device=self.k.device)
        return (t + self.older - lag)[None, None]

    def _scans(self, chunk: Chunk) -> Scans:
        here = slice(chunk.begin, chunk.end)
        weights = self.weights[:, :, here]
        ones = torch.ones_like(self.step[:, :, here])
        rows = chunk.end - chunk.begin + self.older
        band = weights.new_zeros(*weights.shape[:3], rows)
        push = band.scatter(3, self.places(chunk).expand_as(weights), weights)
        alpha = ones if self.decay is None else self.decay[:, :, here]
        decays = triangle(alpha)
        momenta = drop = carry = None
        if self.theta is not None:
            theta = self.theta[:, :, here]
            momenta = triangle(theta)
            push = momenta @ push
            drop = theta.cumprod(-1)
            carry = (decays @ drop[..., None])[..., 0]
        return Scans(decays, momenta, alpha.cumprod(-1), carry, drop, decays @ push, push)

    def _as_read(self, scans: Scans) -> tuple[Tensor, Tensor | None, Tensor]:
        """A, a and P as the reads of each token see them."""
        if not self.shape.read_before:
            return scans.rate, scans.carry, scans.write
        carry = None if scans.carry is None else shifted(scans.carry, 0, 2)
        return shifted(scans.rate, 1, 2), carry, shifted(scans.write, 0, 2)

    def _operands(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of a chunk, keys and values that it writes."""
        rows = slice(chunk.begin, chunk.end + self.older)
        return self.q[:, :, chunk.begin : chunk.end], self.k[:, :, rows], self.v[:, :, rows]

    def _error(self, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
        """R."""
        value = v.to(self.shape.acc)
        return -value if self.shape.dot else self._product(k, state) - value

    def forward(self, chunk: Chunk) -> Tensor:
        """The reads of a chunk (B, H, b, Dv); M and S go on to its end."""
        q, k, v = self._operands(chunk)
        scans = self._scans(chunk)
        state, velocity = self.state, self.velocity
        error = self._error(k, v, state)
        rate, carry, write = self._as_read(scans)
        read = rate[..., None] * self._product(q, state)
        read = read - self._product(write * self._product(q, k.mT), error)
        last = scans.write[:, :, -1, :, None] * error
        self.state = scans.rate[:, :, -1, None, None] * state - self._product(k.mT, last)
        if velocity is not None and carry is not None:
            assert scans.carry is not None
            assert scans.drop is not None
            read = read + carry[..., None] * self._product(q, velocity)
            self.state = self.state + scans.carry[:, :, -1, None, None] * velocity
            pushed = scans.push[:, :, -1, :, None] * error
            self.velocity = scans.drop[:, :, -1, None, None] * velocity
            self.velocity = self.velocity - self._product(k.mT, pushed)
        return read

    def backward(self, chunk: Chunk, state: Tensor, velocity: Tensor | None, d_y: Tensor) -> None:
        """From gradients at a chunk's end to those at its begin; M and S as they were there."""
        q, k, v = self._operands(chunk)
        product = self._product
        scans = self._scans(chunk)
        rate, carry, write = self._as_read(scans)
        error = self._error(k, v, state)
        scores = product(q, k.mT)
        d_state, d_velocity = self.d_state, self.d_velocity
        last = scans.write[:, :, -1, :, None]

        d_mixed = -product(d_y, error.mT)
        d_scores = d_mixed * write
        along = product(k, d_state)  # (B, H, n, Dv)
        d_error = -product((write * scores).mT, d_y) - last * along
        d_q = rate[..., None] * product(d_y, state.mT) + product(d_scores, k)
        d_k = product(d_scores.mT, q) - product(last * error, d_state.mT)
        before = product(q.mT, rate[..., None] * d_y) + scans.rate[:, :, -1, None, None] * d_state
        d_write = d_mixed * scores
        d_rate = (d_y * product(q, state)).sum(-1)
        if self.shape.read_before:
            d_write, d_rate = after(d_write, 2), after(d_rate, 2)
        d_write[:, :, -1] -= (error * along).sum(-1)
        d_rate[:, :, -1] += (d_state * state).sum((-2, -1))

        d_push = torch.zeros_like(d_write)
        d_carry = d_drop = None
        if velocity is not None and d_velocity is not None:
            assert carry is not None
            assert scans.carry is not None
            assert scans.drop is not None
            pushed = scans.push[:, :, -1, :, None]
            pushing = product(k, d_velocity)
            d_error = d_error - pushed * pushing
            d_q = d_q + carry[..., None] * product(d_y, velocity.mT)
            d_k = d_k - product(pushed * error, d_velocity.mT)
            d_push[:, :, -1] = -(error * pushing).sum(-1)
            d_carry = (d_y * product(q, velocity)).sum(-1)
            if self.shape.read_before:
                d_carry = after(d_carry, 2)
            d_carry[:, :, -1] += (d_state * velocity).sum((-2, -1))
            d_drop = torch.zeros_like(d_carry)
            d_drop[:, :, -1] = (d_velocity * velocity).sum((-2, -1))
            self.d_velocity = (
                product(q.mT, carry[..., None] * d_y)
                + scans.carry[:, :, -1, None, None] * d_state
                + scans.drop[:, :, -1, None, None] * d_velocity
            )
        if not self.shape.dot:
            d_k = d_k + product(d_error, state.mT)
            before = before + product(k.mT, d_error)
        self.d_state = before

        rows = slice(chunk.begin, chunk.end + self.older)
        self.d_q[:, :, chunk.begin : chunk.end] = d_q
        self.d_k[:, :, rows] += d_k
        self.d_v[:, :, rows] -= d_error
        self._scans_backward(chunk, scans, d_write, d_push, d_rate, d_carry, d_drop)

    def _scans_backward(
        self, chunk: Chunk, scans: Scans, d_write: Tensor, d_push: Tensor, d_rate: Tensor,
        d_carry: Tensor | None, d_drop: Tensor | None,
    ) -> None:  # fmt: skip
        """The scans run backwards: gradients of weights, decay and momentum of a chunk."""
        back = scans.decays.mT
        d_write = back @ d_write
        d_rate = (back @ d_rate[..., None])[..., 0]
        d_push = d_push + d_write
        d_decay = (d_write * shifted(scans.write, 0, 2)).sum(-1) + d_rate * shifted(
            scans.rate, 1, 2
        )
        if d_carry is not None and d_drop is not None:
            assert scans.carry is not None
            d_carry = (back @ d_carry[..., None])[..., 0]
            d_decay = d_decay + d_carry * shifted(scans.carry, 0, 2)
            d_drop = d_drop + d_carry
        self._gates_backward(chunk, scans, d_decay, d_push, d_drop)

    def _gates_backward(
        self, chunk: Chunk, scans: Scans, d_decay: Tensor, d_push: Tensor, d_drop: Tensor | None
    ) -> None:
        """The gradients of a chunk's gates from those of its decays, U and B."""
        here = slice(chunk.begin, chunk.end)
        if scans.momenta is not None and d_drop is not None:
            assert scans.drop is not None
            forth = scans.momenta.mT
            d_push = forth @ d_push
            d_drop = (forth @ d_drop[..., None])[..., 0]
            d_theta = (d_push * shifted(scans.push, 0, 2)).sum(-1)
            self.d_theta[:, :, here] = d_theta + d_drop * shifted(scans.drop, 1, 2)
        self.d_decay[:, :, here] = d_decay
        at = self.places(chunk).expand_as(self.weights[:, :, here])
        self.d_weights[:, :, here] = d_push.gather(3, at)

    def add_to(self, grads: Gradients) -> None:
        """What this piece adds to the gradients of the call."""
        piece, slots, older = self.piece, self.piece.slots, self.older
        coefficients = piece.given.coefficients

        def put(target: Tensor | None, value: Tensor) -> None:
            if target is not None:
                piece.here(target).add_(value.transpose(1, 2))

        d_q, of_q = features_backward(self.shape, self.raw_q, self.d_q, coefficients)
        d_k, of_k = features_backward(self.shape, self.raw_k, self.d_k, coefficients)
        put(grads.q, d_q)
        put(grads.k, d_k[:, :, older:])
        put(grads.v, self.d_v[:, :, older:])
        missing = ~self.there
        d_weights = self.d_weights.masked_fill(missing, 0)
        if self.gates is None:
            put(grads.step, d_weights.sum(-1) / self.shape.window)
        else:
            put(grads.step, (d_weights * self.gates).sum(-1))
            put(grads.window_gates, d_weights * self.step[..., None])
        put(grads.decay, self.d_decay)
        put(grads.momentum, self.d_theta)
        if grads.coefficients is not None:
            grads.coefficients.add_(of_q + of_k)
        if grads.initial_state is not None:
            grads.initial_state[slots] += self.d_state
        if grads.initial_momentum is not None and self.d_velocity is not None:
            grads.initial_momentum[slots] += self.d_velocity
        for tail, d in ((grads.tail_k, d_k), (grads.tail_v, self.d_v)):
            if tail is not None:
                tail[slots] += d[:, :, :older].transpose(1, 2)


# ---- feature maps -------------------------------------------------------------------------------


def features(shape: OmegaShape, x: Tensor, coefficients: Tensor | None) -> Tensor:
    """φ(x) of x (B, H, T, d), in x's dtype."""
    if shape.feature_map == "identity":
        return x
    map_ = of_coefficients(shape.feature_map, coefficients)
    return polynomial.features(x.transpose(1, 2), coefficients, map_).transpose(1, 2)


def features_backward(
    shape: OmegaShape, x: Tensor, d: Tensor, coefficients: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """The gradients of x and of the coefficients; 0 where none are given."""
    if shape.feature_map == "identity":
        return d, 0.0
    map_ = of_coefficients(shape.feature_map, coefficients)
    d_x, d_coefficients = polynomial.features_backward(
        d.transpose(1, 2), x.transpose(1, 2), coefficients, map_
    )
    return d_x.transpose(1, 2), 0.0 if d_coefficients is None else d_coefficients
