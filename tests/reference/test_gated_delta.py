"""The literal gated delta rule: written out by one head's matrix, and what it reduces to."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.reference import gated_delta_rule, omega_memory

WIDE = torch.float64
B, T, H, D, DV = 2, 9, 4, 5, 3


def arguments() -> tuple[Tensor, ...]:
    """q, k, v, log_decay, beta; k has two heads, v one."""
    source = torch.Generator().manual_seed(0)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(B, T, heads, width, generator=source, dtype=WIDE)

    gates = torch.rand(2, B, T, H, generator=source, dtype=WIDE)
    return normal(H, D), normal(2, D), normal(1, DV), -gates[0], gates[1]


def test_written_out() -> None:
    """M_t = γ_t M_{t−1} (I − β_t k kᵀ) + β_t v kᵀ, the transpose of the memory."""
    q, k, v, log_decay, beta = arguments()
    o, state = gated_delta_rule(q, k, v, log_decay, beta, scale=0.5, output_final_state=True)
    m = torch.zeros(DV, D, dtype=WIDE)
    for t in range(T):
        key, query = (x / x.norm() for x in (k[1, t, 1], q[1, t, 2]))
        rate, gain = log_decay[1, t, 2].exp(), beta[1, t, 2]
        m = rate * m @ (torch.eye(D, dtype=WIDE) - gain * torch.outer(key, key))
        m = m + gain * torch.outer(v[1, t, 0], key)
        torch.testing.assert_close(o[1, t, 2], 0.5 * m @ query, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state[1, 2], m.T, rtol=1e-13, atol=1e-13)


def test_is_an_omega_rule_of_chunks_of_one_token() -> None:
    """Which takes its error of the undecayed memory: its step is αβ, its value v/α."""
    q, k, v, log_decay, beta = arguments()
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(4, 2)
    k = k / k.norm(dim=-1, keepdim=True)
    rate = log_decay.exp()
    o, state = gated_delta_rule(q, k, v, log_decay, beta, qk_l2norm=False, output_final_state=True)
    y, left = omega_memory(
        q, k, v / rate[..., None], step=rate * beta, decay=rate, chunk_size=1, return_state=True
    )
    torch.testing.assert_close(o, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, left.state, rtol=1e-12, atol=1e-12)


def test_a_gain_of_one_sets_the_row() -> None:
    """Read with its own key, a token's value comes back."""
    _, k, v, log_decay, beta = arguments()
    o, _ = gated_delta_rule(k, k, v, log_decay[:, :, :2], torch.ones_like(beta[:, :, :2]))
    torch.testing.assert_close(o, v.expand(B, T, 2, DV), rtol=1e-13, atol=1e-13)
