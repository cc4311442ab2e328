"""The Omega rule with every error at the memory that its token meets: chunks of one, in blocks.

Inside a block of b tokens each error depends on the writes of the tokens before, that is on their
errors. With M and S at the block's begin, x_{t,j} the features of the key `lag` j before token t,
and E_{t,m} what is left at token t of the gradient of token m,

    r_{t,j} = A_{t−1} x_{t,j} M + a_{t−1} x_{t,j} S − v_{t,j}
              − Σ_{m<t,l} E_{t−1,m} w_{m,l} ⟨x_{t,j}, x_{m,l}⟩ r_{m,l}

which is a unit triangular system of b · window rows. Plain torch, differentiated by autograd, in
fp32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .eager import Chunk, Run, pieces, shifted, triangle
from .op import OmegaShape, OmegaTensors

BLOCK = 16  # tokens whose errors are solved for together


def run(shape: OmegaShape, given: OmegaTensors) -> tuple[Tensor, Tensor, Tensor | None]:
    """y (B, T, H, Dv) in v's dtype, M and S (N, H, D, Dv) after the last token."""
    reads: list[Tensor] = []
    states: list[Tensor] = []
    momenta: list[Tensor] = []
    last = 0
    for piece in pieces(shape, given):
        sequence = Run(shape, piece)
        parts = [_block(sequence, chunk) for chunk in sequence.chunks]
        if parts:
            reads.append(torch.cat(parts, 2).transpose(1, 2))
        last = piece.tokens.stop
        states.append(sequence.state)
        if sequence.velocity is not None:
            momenta.append(sequence.velocity)
    rest = given.v[:, last:] if shape.packed else given.v[:, :0]
    y = torch.cat((*(x.to(given.v.dtype) for x in reads), torch.zeros_like(rest)), 1)
    state = torch.cat(states) if states else given.empty_state(shape)
    if not shape.momentum:
        return y, state, None
    return y, state, torch.cat(momenta) if momenta else given.empty_state(shape)


def _block(at: Run, chunk: Chunk) -> Tensor:
    """The reads of a block (B, H, b, Dv); M and S go on to its end."""
    shape, acc = at.shape, at.shape.acc
    tokens, window = chunk.end - chunk.begin, shape.window
    here = slice(chunk.begin, chunk.end)
    rows = (at.places(chunk)[0, 0] + chunk.begin).reshape(-1)  # of key t − j, pair after pair
    q = at.q[:, :, here].to(acc)
    x, v = at.k[:, :, rows].to(acc), at.v[:, :, rows].to(acc)  # (B, H, b·window, ·)
    weights = at.weights[:, :, here].flatten(2)  # (B, H, b·window)

    ones = torch.ones_like(at.step[:, :, here])
    alpha = ones if at.decay is None else at.decay[:, :, here]
    left = triangle(alpha)  # (B, H, b, b)
    rate = alpha.cumprod(-1)
    pushed = carry = drop = None
    if at.theta is not None:
        theta = at.theta[:, :, here]
        pushed = triangle(theta)
        drop = theta.cumprod(-1)
        carry = (left @ drop[..., None])[..., 0]
        left = left @ pushed

    def pairs(scale: Tensor) -> Tensor:
        """(B, H, b, …) of tokens for their pairs."""
        return scale.repeat_interleave(window, 2)

    def of_pairs(left: Tensor) -> Tensor:
        """(B, H, b, b): columns of tokens for their pairs, weighed."""
        return left.repeat_interleave(window, 3) * weights[:, :, None]

    state, velocity = at.state, at.velocity
    before = shifted(left, 0, 2)
    if shape.dot:
        error = -v
    else:
        error = pairs(shifted(rate, 1, 2))[..., None] * (x @ state) - v
        if velocity is not None and carry is not None:
            error = error + pairs(shifted(carry, 0, 2))[..., None] * (x @ velocity)
        system = pairs(of_pairs(before)) * (x @ x.mT)  # zero where m ≥ t
        eye = torch.eye(tokens * window, dtype=acc, device=x.device)
        error = torch.linalg.solve_triangular(eye + system, error, upper=False, unitriangular=True)
    seen = before if shape.read_before else left
    seen_rate = shifted(rate, 1, 2) if shape.read_before else rate
    read = seen_rate[..., None] * (q @ state) - (of_pairs(seen) * (q @ x.mT)) @ error
    at.state = rate[:, :, -1, None, None] * state
    at.state = at.state - x.mT @ (of_pairs(left)[:, :, -1, :, None] * error)
    if velocity is not None and carry is not None and drop is not None and pushed is not None:
        seen_carry = shifted(carry, 0, 2) if shape.read_before else carry
        read = read + seen_carry[..., None] * (q @ velocity)
        at.state = at.state + carry[:, :, -1, None, None] * velocity
        at.velocity = drop[:, :, -1, None, None] * velocity
        at.velocity = at.velocity - x.mT @ (of_pairs(pushed)[:, :, -1, :, None] * error)
    return read
