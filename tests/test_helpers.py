"""The test helpers themselves: a wrong result must fail, whatever kind of wrong it is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fastweights.autotune import Config, Space
from helpers import contracts, inputs, oracle

CPU = torch.device("cpu")


def square_and_sum(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * x * w, (x * w).sum(-1)


def draw(seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    source = inputs.generator(seed, device)
    x = inputs.embed(inputs.normal((5, 6), source, dtype))
    return {"x": x, "w": inputs.embed(inputs.normal((6,), source, dtype))}


class WrongGradient(torch.autograd.Function):
    """Right forward; the gradient of `w` is off by a percent."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 1.01 * g


def test_check_op_sees_values_gradients_names_and_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        oracle.check_op(square_and_sum, square_and_sum, draw, dtype, CPU)
    check = oracle.Oracle(square_and_sum, draw, torch.float32, CPU).check

    def wrong_value(x: torch.Tensor, w: torch.Tensor) -> Any:
        return square_and_sum(x, w * 1.001)

    def wrong_gradient(x: torch.Tensor, w: torch.Tensor) -> Any:
        return square_and_sum(x, WrongGradient.apply(w))

    def wrong_dtype(x: torch.Tensor, w: torch.Tensor) -> Any:
        a, b = square_and_sum(x, w)
        return a.double(), b

    def missing(x: torch.Tensor, w: torch.Tensor) -> Any:
        return square_and_sum(x, w)[:1]

    with pytest.raises(AssertionError, match="out0: frobenius"):
        check(wrong_value)
    with pytest.raises(AssertionError, match=r"(?s)^((?!out).)*d w: frobenius"):
        check(wrong_gradient, "case")
    with pytest.raises(AssertionError, match=r"out0: dtype torch\.float64"):
        check(wrong_dtype)
    with pytest.raises(AssertionError, match=r"no differentiable result out1 among \['out0'\]"):
        check(missing)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layouts_hold_the_same_numbers_amid_nan(layout: str, dtype: torch.dtype) -> None:
    source = inputs.generator(0, CPU)
    plain = tuple(inputs.normal((2, 5, heads, 24), source, dtype) for heads in (4, 2, 2))
    views = inputs.lay_out(*plain, layout)
    for x, view in zip(plain, views, strict=True):
        assert torch.equal(view, x)
        assert view.stride(-1) == 1
        if layout == "contiguous":
            continue
        assert not view.is_contiguous()
        whole = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
        assert whole.isnan().any()
        aligned = view.data_ptr() % 16 == 0 and all(
            n * view.element_size() % 16 == 0 for n in view.stride()[:-1]
        )
        assert aligned == (layout in ("fused", "transposed"))


def test_spaced_view_has_no_contiguous_dimension() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(inputs.spaced(x), x)
    assert inputs.spaced(x).stride() == (8, 2)


def test_bit_equality_knows_nan_and_the_sign_of_zero() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert oracle.bit_equal(nan, nan.clone())
    assert not oracle.bit_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not oracle.bit_equal(torch.ones(2), torch.ones(2).half())
    with pytest.raises(AssertionError, match=r"x differs in 1 of 2 elements, first at \(1,\)"):
        oracle.assert_bit_equal({"x": torch.ones(2)}, {"x": torch.tensor([1.0, 1.5])})


class Overwrites(torch.autograd.Function):
    """Breaks two contracts: scales its saved input and its upstream gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x.detach().clone()
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        ctx.kept *= 2
        return g.mul_(2.0) * ctx.kept


def test_contract_checks_catch_what_they_are_for() -> None:
    def overwrites(x: torch.Tensor) -> torch.Tensor:
        return Overwrites.apply(x)

    def assumes_contiguous(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided(x.shape, torch.empty(x.shape).stride())

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    x = torch.randn(4, 6)
    with pytest.raises(AssertionError, match="second backward"):
        contracts.check_backward_twice(overwrites, {"x": x})
    with pytest.raises(AssertionError, match="upstream gradient after backward"):
        contracts.check_grad_out_untouched(overwrites, {"x": x})
    with pytest.raises(AssertionError, match="views of x"):
        contracts.check_views(assumes_contiguous, {"x": x}, {"x": inputs.embed(x)})
    with pytest.raises(Exception, match=r"[Gg]raph break"):
        contracts.check_fullgraph(breaks, {"x": x})
    with pytest.raises(AssertionError, match="run 1 against run 0"):
        contracts.check_repeatable(lambda: torch.rand(3), 2)
    for check in (contracts.check_backward_twice, contracts.check_grad_out_untouched):
        check(torch.sin, {"input": x})
    contracts.check_expanded_grad_out(torch.sin, {"input": x})
    contracts.check_fullgraph(square_and_sum, draw(0, torch.float32, CPU))
    contracts.check_repeatable(lambda: x + 1, 3)


def test_packed_check_compares_each_sequence_and_sums_shared_gradients() -> None:
    def running(x: torch.Tensor, w: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> Any:
        ends = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        pieces = [(x[:, a:b] * w).cumsum(1) for a, b in itertools.pairwise(ends)]
        return torch.cat([*pieces, 0 * x[:, ends[-1] :]], 1)

    def forgetful(x: torch.Tensor, w: torch.Tensor, cu_seqlens: Any = None) -> Any:
        return (x * w).cumsum(1)

    def close(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got, expected, msg=name)

    call = ({"x": torch.randn(1, 12, 3), "w": torch.randn(3)}, ["x"], [4, 0, 6], close)
    contracts.check_packed(running, *call)
    with pytest.raises(AssertionError, match="sequence 0: d x"):
        contracts.check_packed(forgetful, *call)


def test_every_config_forces_each_and_refuses_an_empty_list() -> None:
    from fastweights.autotune import Device, choose

    configs = (Config.make(BLOCK_M=64), Config.make(BLOCK_M=128))
    space = Space(
        "test", "fwd", "triton", configs,
        fits=lambda config, key, device: None if config["BLOCK_M"] <= key[0] else "too large",
        bucket=lambda shape: (shape.shape[0],),
        default=lambda key, device: configs[0],
    )  # fmt: skip
    call = torch.empty(128)
    for config in contracts.every_config(space, call):
        assert choose(space, (128,), Device.of(CPU)) is config
    assert list(contracts.every_config(space, call)) == list(configs)
    assert list(contracts.every_config(space, torch.empty(64))) == [configs[0]]
    with pytest.raises(AssertionError, match=r"no config of test/fwd fits \(32,\)"):
        list(contracts.every_config(space, torch.empty(32)))


def test_cuda_is_all_or_nothing() -> None:
    """The interpreter is on exactly where there is no CUDA device."""
    import os

    assert (os.environ.get("TRITON_INTERPRET") == "1") == (not torch.cuda.is_available())
