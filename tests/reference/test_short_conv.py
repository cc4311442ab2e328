"""The literal short convolution: what torch's own convolution gives, and what it reduces to."""

from __future__ import annotations

import torch

from fastweights.reference import short_conv

WIDE = torch.float64


def test_is_the_convolution_of_torch() -> None:
    source = torch.Generator().manual_seed(0)
    x, gate_in, gate_out = torch.randn(3, 2, 9, 5, generator=source, dtype=WIDE)
    weight, bias = torch.randn(5, 4, generator=source, dtype=WIDE), torch.arange(5.0, dtype=WIDE)
    z = torch.nn.functional.pad((gate_in * x).mT, (3, 0))
    p = torch.nn.functional.conv1d(z, weight[:, None], bias, groups=5).mT
    given = {"bias": bias, "gate_in": gate_in, "gate_out": gate_out}
    plain, state = short_conv(x, weight, **given, output_final_state=True)
    torch.testing.assert_close(plain, gate_out * p, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state, (gate_in * x)[:, -3:], rtol=0, atol=0)
    y, _ = short_conv(x, weight, **given, activation="silu", residual=True)
    wanted = gate_out * (torch.nn.functional.silu(p) + gate_in * x)
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)


def test_one_tap_is_a_product() -> None:
    x, weight = torch.randn(1, 4, 3, dtype=WIDE), torch.randn(3, 1, dtype=WIDE)
    y, state = short_conv(x, weight, output_final_state=True)
    assert torch.equal(y, x * weight[:, 0])
    assert state.shape == (1, 0, 3)


def test_a_short_prompt_leaves_zeros_in_front() -> None:
    x, weight = torch.ones(1, 1, 2, dtype=WIDE), torch.ones(2, 4, dtype=WIDE)
    _, state = short_conv(x, weight, output_final_state=True)
    assert state[0, :, 0].tolist() == [0, 0, 1]
