"""The rule of right and wrong itself: a wrong result must fail, whatever kind of wrong it is."""

from __future__ import annotations

import pytest
import torch

from fastweights.autotune.verify import Comparison, compare


def triple(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A truth, a yardstick with a known relative error of 1e-2, and a right result."""
    truth = torch.linspace(1.0, 2.0, 1000, dtype=torch.float64)
    return truth, (truth * 1.01).to(dtype), (truth * 1.012).to(dtype)


def test_compare_allows_one_and_a_half_times_plain_torch() -> None:
    truth, plain, right = triple()
    compare(right, truth, plain)
    with pytest.raises(AssertionError, match=r"frobenius error 1\.600e-02, plain torch 1\.000e-02"):
        compare((truth * 1.016).float(), truth, plain)


def test_compare_bounds_the_largest_error() -> None:
    truth, plain, right = triple()
    right[7] += 0.1  # a single element, invisible in the norm
    with pytest.raises(AssertionError, match="maximum error"):
        compare(right, truth, plain)


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-3)],
)
def test_floor_holds_where_plain_torch_is_exact(dtype: torch.dtype, floor: float) -> None:
    truth = torch.ones(1000, dtype=torch.float64)
    compare(truth * (1 + 1.4 * floor), truth, truth, dtype=dtype)
    with pytest.raises(AssertionError, match="frobenius"):
        compare(truth * (1 + 1.6 * floor), truth, truth, dtype=dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_never_passes(bad: float) -> None:
    truth, plain, right = triple()
    right[3] = bad
    with pytest.raises(AssertionError, match="error inf"):
        compare(right, truth, plain)
    with pytest.raises(ValueError, match="plain torch is not finite"):
        compare(plain, truth, right)
    with pytest.raises(ValueError, match="truth holds NaN"):
        compare(right, torch.full_like(truth, float("nan")), plain)


def test_infinities_of_the_truth_must_be_met() -> None:
    truth, plain, right = triple()
    truth[3] = plain[3] = right[3] = -float("inf")
    compare(right, truth, plain)
    right[3] = 1.0
    with pytest.raises(AssertionError, match="error inf"):
        compare(right, truth, plain)


def test_vanishing_truth_is_measured_by_the_upstream() -> None:
    truth = torch.full((50, 4), 1e-17, dtype=torch.float64)
    upstream = torch.ones(50, 4)
    plain = torch.zeros(50, 4)
    compare(torch.full((50, 4), 1e-6), truth, plain, scale=upstream)
    with pytest.raises(AssertionError, match="frobenius"):
        compare(torch.full((50, 4), 1e-4), truth, plain, scale=upstream)
    with pytest.raises(AssertionError, match="frobenius"):
        compare(torch.full((50, 4), 1e-6), truth, plain)


def test_empty_results_pass_and_shapes_count() -> None:
    empty = torch.empty(0, 3, dtype=torch.float64)
    compare(empty.float(), empty, empty.float())
    with pytest.raises(ValueError, match=r"shape \(3, 0\), expected \(0, 3\)"):
        compare(empty.t(), empty, empty)
    with pytest.raises(ValueError, match="nothing was compared"):
        Comparison(torch.float32).check()


def test_few_numbers_get_slack_and_a_factor_can_be_asked_for() -> None:
    truth = torch.ones(6, dtype=torch.float64)
    plain, got = truth * 1.01, truth * 1.025
    compare(truth * 1.075, truth, plain, dtype=torch.float32)  # 1.5 · e^(4/√6) = 7.7 times
    with pytest.raises(AssertionError, match="frobenius"):
        compare(truth * 1.08, truth, plain, dtype=torch.float32)
    for factor, ok in ((2.4, False), (2.6, True)):
        comparison = Comparison(torch.float32, factor)
        comparison.add("x", got.expand(300, 6), truth.expand(300, 6), plain.expand(300, 6))
        assert comparison.judge("x")["frobenius"].ok == ok


def test_seeds_share_one_norm_and_the_worst_counts() -> None:
    """A seed in which the truth nearly cancels does not turn its rounding into a failure."""
    comparison = Comparison(torch.float32)
    for size, off in ((1.0, 1e-3), (1e-4, 1.2e-3)):
        truth = torch.full((300,), size, dtype=torch.float64)
        comparison.add("x", truth + off, truth, truth + 1e-3)
    found = comparison.judge("x")["frobenius"]
    assert found.ok
    assert found.error == pytest.approx(1.2 * found.plain)
    truth = torch.ones(300, dtype=torch.float64)
    comparison.add("x", truth + 2e-3, truth, truth + 1e-3)
    assert not comparison.judge("x")["frobenius"].ok
