"""The op machinery: choosing a backend, explaining, declaring operators, checks, allocation."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.ops import alloc, dispatch
from helpers import contracts, polar
from helpers.oracle import bit_equal

SMALL = polar.Case(tq=9, d=16)
CPU = torch.device("cpu")


def small(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    return SMALL.arguments(0, dtype, CPU) | changes


# ---- an op of the tests' own, whose backends record that they ran ----------------------------


@dataclass(frozen=True)
class Shape:
    """What the test op's backends see."""

    width: int
    dtype: torch.dtype
    device: torch.device


BACKEND = """
    calls = []
    def supports(shape, arch):
        return {refusal}
    def fwd(shape, x):
        calls.append("fwd")
        return (x * x).contiguous()
    def bwd(shape, g, x):
        calls.append("bwd")
        return 2 * g * x
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package like `ops/<name>`: cuda wants width 64, triton an even width, eager anything."""
    root = tmp_path_factory.mktemp("packages")
    folder = root / "squares"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    refusals = {
        "eager": "None",
        "triton": "None if shape.width % 2 == 0 else 'odd width'",
        "cuda": "None if shape.width == 64 else 'width is not 64'",
    }
    for backend, refusal in refusals.items():
        text = textwrap.dedent(BACKEND.format(refusal=refusal))
        (folder / f"{backend}.py").write_text(text)
    sys.path.insert(0, str(root))
    yield "squares"
    sys.path.remove(str(root))


@pytest.fixture(scope="module")
def square(package: str) -> Any:
    """Its public function; the operators are `fastweights::test_square_{fwd,bwd}`."""

    def shape(x: torch.Tensor) -> Shape:
        return Shape(x.shape[-1], x.dtype, x.device)

    def bwd(g: torch.Tensor, x: torch.Tensor, backend: str) -> torch.Tensor:
        return dispatch.resolve(package, shape(x), backend).bwd(shape(x), g, x)

    def fwd(x: torch.Tensor, backend: str) -> torch.Tensor:
        return dispatch.resolve(package, shape(x), backend).fwd(shape(x), x)

    backward = dispatch.declare(
        dispatch.Operator(
            "test_square_bwd",
            "(Tensor g, Tensor x, str backend) -> Tensor",
            impl=bwd,
            fake=lambda g, x, backend: x.new_empty(x.shape),
        )
    )

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.backend = inputs[1]

    forward = dispatch.declare(
        dispatch.Operator(
            "test_square_fwd",
            "(Tensor x, str backend) -> Tensor",
            impl=fwd,
            fake=lambda x, backend: x.new_empty(x.shape),
            flops=lambda x, backend, **_: 7 * x.numel(),
        ),
        setup_context=setup_context,
        backward=lambda ctx, g: (backward(g, *ctx.saved_tensors, ctx.backend), None),
    )

    @dispatch.explainable(package, lambda x, **_: shape(x))
    def squared(x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
        return forward(x, dispatch.requested("squared", backend))

    return squared


@pytest.fixture
def modules(package: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The test op's backends with empty records; triton may run on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = {name: importlib.import_module(f"{package}.{name}") for name in dispatch.ORDER}
    for module in found.values():
        module.calls.clear()
    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the machinery believe that all tensors are on an H200."""
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: Device("sm_90", 232_448)))


# ---- choosing -----------------------------------------------------------------------------------


def test_requested_is_the_argument_then_the_innermost_context() -> None:
    assert dispatch.requested("op", "auto") == "auto"
    with ops.use_backend("eager"):
        assert dispatch.requested("op", "auto") == "eager"
        assert dispatch.requested("op", "cuda") == "cuda"
        with ops.use_backend("triton"):
            assert dispatch.requested("op", "auto") == "triton"
        assert dispatch.requested("op", "auto") == "eager"
    assert dispatch.requested("op", "auto") == "auto"


def test_context_ends_on_an_exception() -> None:
    with pytest.raises(KeyError), ops.use_backend("eager"):
        raise KeyError
    assert dispatch.requested("op", "auto") == "auto"


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"use_backend: backend must be one of .*'fast'"):
        ops.use_backend("fast").__enter__()
    with pytest.raises(ValueError, match="polar_attention: backend must be one of auto, eager"):
        ops.polar_attention(**small(backend="fast"))


def test_auto_walks_cuda_triton_eager(on_gpu: None, package: str, modules: Any) -> None:
    device = torch.device("cuda", 0)
    for width, expected in ((64, "cuda"), (6, "triton"), (5, "eager")):
        module = dispatch.resolve(package, Shape(width, torch.float32, device), "auto")
        assert module is modules[expected]


def test_auto_goes_past_a_backend_that_yields(
    on_gpu: None, package: str, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may say so of calls that it can run, and runs when it is asked for."""
    shape = Shape(64, torch.float32, torch.device("cuda", 0))
    monkeypatch.setattr(modules["cuda"], "yields", lambda shape, arch: "slower", raising=False)
    assert dispatch.resolve(package, shape, "auto") is modules["triton"]
    assert dispatch.resolve(package, shape, "cuda") is modules["cuda"]


def test_auto_on_the_cpu_is_eager_even_under_the_interpreter(square: Any, modules: Any) -> None:
    square(torch.ones(64))
    assert modules["eager"].calls == ["fwd"]
    assert modules["triton"].calls == []


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_float64_runs_on_eager_only(on_gpu: None, package: str, modules: Any, backend: str) -> None:
    shape = Shape(64, torch.float64, torch.device("cuda", 0))
    assert dispatch.resolve(package, shape, "auto") is modules["eager"]
    with pytest.raises(ValueError, match=f"backend='{backend}'.*float64 runs on eager only"):
        dispatch.resolve(package, shape, backend)


def test_explicit_backend_never_falls_back(square: Any, modules: Any) -> None:
    with pytest.raises(ValueError, match="squares: backend='triton' cannot run this call: odd"):
        square(torch.ones(5), backend="triton")
    with pytest.raises(ValueError, match=r"backend='cuda' cannot run this call: .* on the CPU"):
        square(torch.ones(64), backend="cuda")
    assert [module.calls for module in modules.values()] == [[], [], []]


def test_triton_needs_the_interpreter_on_the_cpu(
    square: Any, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    square(torch.ones(4), backend="triton")
    assert modules["triton"].calls == ["fwd"]
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="the tensors are on the CPU"):
        square(torch.ones(4), backend="triton")


def test_missing_implementation_is_a_reason(on_gpu: None, tmp_path: Path, package: str) -> None:
    shape = Shape(1, torch.float32, torch.device("cuda", 0))
    assert dispatch.implementation(package, "metal") is None
    assert (
        dispatch.refusal(package, "metal", shape, "sm_90") == "this op has no such implementation"
    )


def test_nothing_supports_the_call(
    package: str, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["eager"], "supports", lambda shape, arch: "not today")
    with pytest.raises(ValueError, match=r"no backend supports this call \(eager: not today\)"):
        dispatch.resolve(package, Shape(5, torch.float32, CPU), "auto")


def test_backward_runs_where_forward_ran(square: Any, modules: Any) -> None:
    """The backend travels in the graph: backward may come outside the context, in any thread."""
    x = torch.arange(4.0, requires_grad=True)
    with ops.use_backend("triton"):
        y = square(x)
    y.sum().backward()
    assert modules["triton"].calls == ["fwd", "bwd"]
    assert modules["eager"].calls == []
    assert torch.equal(x.grad, 2 * x.detach())


def test_context_reaches_a_compiled_graph(square: Any, modules: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(square, fullgraph=True, backend="eager")
    compiled(torch.ones(4))
    with ops.use_backend("triton"):
        compiled(torch.ones(4))
    compiled(torch.ones(4))
    torch._dynamo.reset()
    assert len(modules["eager"].calls) == 2
    assert len(modules["triton"].calls) == 1


# ---- explain ------------------------------------------------------------------------------------


def test_explain_says_what_runs_and_what_does_not(on_gpu: None, square: Any, modules: Any) -> None:
    said = ops.explain(square, torch.ones(6))
    assert said.backend == "triton"
    assert said.refused == {"cuda": "width is not 64"}
    assert "first of cuda, triton, eager" in said.why
    assert str(said).splitlines()[-1].strip() == "not cuda: width is not 64"
    assert [module.calls for module in modules.values()] == [[], [], []]


def test_explain_of_an_explicit_backend(on_gpu: None, square: Any, modules: Any) -> None:
    asked = ops.explain(square, torch.ones(5), backend="eager")
    assert (asked.backend, asked.why) == ("eager", "asked for")
    refused = ops.explain(square, torch.ones(5), backend="cuda")
    assert refused.backend is None
    assert refused.refused == {"cuda": "width is not 64"}
    with ops.use_backend("triton"):
        assert ops.explain(square, torch.ones(64)).backend == "triton"


def test_explain_agrees_with_what_runs_on_the_cpu(square: Any, modules: Any) -> None:
    said = ops.explain(square, torch.ones(64))
    square(torch.ones(64))
    assert said.backend == "eager"
    assert modules["eager"].calls == ["fwd"]
    assert set(said.refused) == {"cuda", "triton"}


def test_explain_names_the_chosen_configs(
    on_gpu: None, square: Any, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = (Config.make(BLOCK_M=64, num_warps=4), Config.make(BLOCK_M=128, num_warps=8))
    space = Space(
        "squares", "fwd", "triton", configs,
        fits=lambda config, key, device: None,
        bucket=lambda shape: (shape.width,),
        default=lambda key, device: configs[0],
    )  # fmt: skip
    monkeypatch.setattr(modules["triton"], "SPACE_FWD", space, raising=False)
    assert ops.explain(square, torch.ones(6)).configs == {"fwd": configs[0]}
    with use_config(space, configs[1]):
        assert "fwd: bm128-w8-s2" in str(ops.explain(square, torch.ones(6)))


def test_explain_takes_fake_tensors_and_checks_arguments() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 100_000, 8, 64)
        head = torch.empty(8)
        call = dict.fromkeys(polar.PARAMETERS, head)
        assert ops.explain(ops.polar_attention, q, q, q, **call).backend == "eager"
        assert ops.explain(ops.softmax_attention, q, q, q).backend == "eager"
        with pytest.raises(ValueError, match="window must be at least 1, got 0"):
            ops.explain(ops.polar_attention, q, q, q, window=0, **call)


def test_explain_refuses_other_functions() -> None:
    with pytest.raises(TypeError, match="must be a public fastweights function"):
        ops.explain(torch.softmax, torch.ones(3))


# ---- declaring operators ------------------------------------------------------------------------


def test_declared_operator_passes_opcheck(square: Any, modules: Any) -> None:
    forward = torch.ops.fastweights.test_square_fwd.default
    x = torch.randn(3, 4)
    contracts.check_opcheck(
        forward,
        [(x, "auto"), (x.t(), "auto"), (x[:0], "auto"), (x.clone().requires_grad_(), "auto")],
    )
    backward = torch.ops.fastweights.test_square_bwd.default
    contracts.check_opcheck(backward, [(x, x, "auto")])


def test_declared_operator_counts_flops(square: Any, modules: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        square(torch.ones(5, 4))
    assert counter.get_total_flops() == 7 * 20


def test_double_backward_is_refused(square: Any, modules: Any) -> None:
    x = torch.arange(4.0, requires_grad=True)
    (dx,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
    message = "test_square_bwd has no double backward; differentiate fastweights.reference.test_sq"
    with pytest.raises(RuntimeError, match=message):
        dx.sum().backward()


def test_double_backward_of_polar_attention_is_refused() -> None:
    arguments = contracts.leaves(small())
    direction, count = ops.polar_attention(**arguments)
    (dq,) = torch.autograd.grad(direction.sum() + count.sum(), arguments["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="polar_attention_bwd has no double backward"):
        dq.sum().backward()


# ---- autocast -----------------------------------------------------------------------------------


def test_autocast_casts_only_what_is_passed_and_spares_float64() -> None:
    x, y = torch.ones(2), torch.ones(2, dtype=torch.float64)
    assert dispatch.autocast_operands(x, y) == (x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, spared = dispatch.autocast_operands(x, y)
        assert cast.dtype == torch.bfloat16
        assert spared is y
        with dispatch.without_autocast(CPU):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["polar_attention", "softmax_attention"])
def test_autocast_runs_mixed_operands_in_its_dtype(name: str) -> None:
    case = SMALL if name == "polar_attention" else SMALL.but(polar=False)
    arguments = contracts.leaves(case.arguments(0, torch.float32, CPU))
    arguments["v"] = arguments["v"].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = getattr(ops, name)(**arguments)
    assert first.dtype == torch.bfloat16
    assert second.dtype == (torch.bfloat16 if case.polar else torch.float32)
    (first.sum() + second.sum()).backward()
    for argument, x in arguments.items():
        assert x.grad.dtype == x.dtype, argument
    by_hand = {n: x.detach().bfloat16() if n in "qkv" else x.detach() for n, x in arguments.items()}
    expected = getattr(ops, name)(**by_hand)
    assert bit_equal(first.detach(), expected[0])
    assert bit_equal(second.detach(), expected[1])


# ---- allocation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_fills_floats_with_nan(dtype: torch.dtype) -> None:
    with alloc.poison():
        x = alloc.empty((3, 5), dtype=dtype, device="cpu")
        with alloc.poison():
            pass
        y = alloc.empty((2,), dtype=dtype, device="cpu")
    assert x.isnan().all()
    assert y.isnan().all(), "an inner block must not end the outer one"
    assert x.is_contiguous()


def test_poison_fills_integers_with_7f_bytes_and_bears_empty_tensors() -> None:
    with alloc.poison():
        x = alloc.empty((3,), dtype=torch.int32, device="cpu")
        assert alloc.empty((0, 4), dtype=torch.float32, device="cpu").shape == (0, 4)
    assert (x == 0x7F7F7F7F).all()


def test_poison_ends_with_its_block() -> None:
    with pytest.raises(KeyError), alloc.poison():
        raise KeyError
    assert alloc._poisoned == 0


# ---- checks -------------------------------------------------------------------------------------

I32 = torch.int32
BAD_CALLS = {
    "q-list": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "q-3d": ({"q": torch.ones(9, 2, 16)}, ValueError, r"q must have 4 dimensions \(B, Tq, Hq, D\)"),
    "q-int": ({"q": torch.ones(1, 9, 2, 16, dtype=I32)}, TypeError, "q has dtype int32; accepted"),
    "k-dtype": ({"k": torch.ones(1, 9, 1, 16).half()}, TypeError, "k has dtype float16, q has fl"),
    "v-dtype": ({"v": torch.ones(1, 9, 1, 16).half()}, TypeError, "v has dtype float16, q has fl"),
    "k-batch": ({"k": torch.ones(2, 9, 1, 16)}, ValueError, "k has size 2 .* expected 1"),
    "k-width": ({"k": torch.ones(1, 9, 1, 32)}, ValueError, "k has size 32 .* expected 16"),
    "v-width": ({"v": torch.ones(1, 9, 1, 32)}, ValueError, "v has size 32 .*Dv must equal D"),
    "v-tokens": ({"v": torch.ones(1, 8, 1, 16)}, ValueError, r"v has size 8 .*the tokens of k"),
    "v-heads": ({"v": torch.ones(1, 9, 2, 16)}, ValueError, r"v has size 2 .*the heads of k"),
    "k-device": ({"k": torch.ones(1, 9, 1, 16, device="meta")}, ValueError, "k is on meta, exp"),
    "window": ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    "n_keys-dtype": ({"n_keys": torch.ones(9).long()}, TypeError, "n_keys has dtype int64; acc"),
    "n_keys-size": ({"n_keys": torch.ones(8, dtype=I32)}, ValueError, "n_keys has size 8 .*exp"),
    "n_keys-batch": ({"n_keys": torch.ones(2, 9, dtype=I32)}, ValueError, "n_keys has size 2"),
    "cu-dtype": ({"cu_seqlens": torch.tensor([0, 9])}, TypeError, "cu_seqlens has dtype int64"),
    "cu-start": (
        {"cu_seqlens": torch.tensor([1, 9], dtype=I32)}, ValueError, "cu_seqlens must start at 0"),
    "cu-order": (
        {"cu_seqlens": torch.tensor([0, 7, 5], dtype=I32)}, ValueError, "cu_seqlens .*decrease"),
    "cu-end": (
        {"cu_seqlens": torch.tensor([0, 10], dtype=I32)}, ValueError, "cu_seqlens ends at 10"),
    "cu-empty": (
        {"cu_seqlens": torch.zeros(0, dtype=I32)}, ValueError, "cu_seqlens must hold at least"),
    "cu_k-alone": (
        {"cu_seqlens_k": torch.tensor([0, 9], dtype=I32)}, ValueError, "cu_seqlens_k was given"),
    "cu_k-size": (
        {"cu_seqlens": torch.tensor([0, 9], dtype=I32),
         "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=I32)},
        ValueError, "cu_seqlens_k has shape"),
}  # fmt: skip
BAD_PARAMETERS = {
    "value-heads": ({"null_value": torch.ones(3, 16)}, ValueError, "null_value has size 3"),
    "value-width": ({"null_value": torch.ones(2, 8)}, ValueError, "null_value has size 8"),
    "base-2d": ({"null_base": torch.ones(2, 1)}, ValueError, "null_base must have 1 dimensions"),
    "slope-size": ({"null_slope": torch.ones(4)}, ValueError, "null_slope has size 4"),
    "gain-int": ({"length_gain": torch.ones(2, dtype=I32)}, TypeError, "length_gain has dtype int"),
    "magnitude": ({"magnitude_gain": 0.2}, TypeError, "magnitude_gain must be a torch.Tensor"),
}


@pytest.mark.parametrize("bad", BAD_CALLS | BAD_PARAMETERS)
def test_polar_attention_names_the_bad_argument(bad: str) -> None:
    changes, kind, message = (BAD_CALLS | BAD_PARAMETERS)[bad]
    with pytest.raises(kind, match=f"polar_attention: {message}"):
        ops.polar_attention(**small(**changes))


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_softmax_attention_names_the_bad_argument(bad: str) -> None:
    changes, kind, message = BAD_CALLS[bad]
    good = SMALL.but(polar=False).arguments(0, torch.float32, CPU)
    with pytest.raises(kind, match=f"softmax_attention: {message}"):
        ops.softmax_attention(**(good | changes))


def test_heads_and_width_are_checked() -> None:
    q, kv = torch.ones(1, 3, 3, 16), torch.ones(1, 3, 2, 16)
    with pytest.raises(ValueError, match="q has 3 heads, not a multiple of the 2 heads of k"):
        ops.softmax_attention(q, kv, kv)
    wide = torch.ones(1, 3, 1, 257)
    with pytest.raises(ValueError, match="D of q is 257; supported: 1 to 256"):
        ops.softmax_attention(wide, wide, wide)


def test_packed_needs_batch_one() -> None:
    x = torch.ones(2, 4, 1, 16)
    with pytest.raises(ValueError, match="cu_seqlens needs batch size 1"):
        ops.softmax_attention(x, x, x, cu_seqlens=torch.tensor([0, 4], dtype=I32))


def test_dtensor_is_a_clear_type_error() -> None:
    from torch import distributed
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = torch.ones(1, 4, 1, 16)
        sharded = distribute_tensor(x, mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"q is a DTensor; pass the local tensor"):
            ops.softmax_attention(sharded, x, x)
        with pytest.raises(TypeError, match=r"v is a DTensor; pass the local tensor"):
            ops.softmax_attention(x, x, sharded)
    finally:
        distributed.destroy_process_group()


def test_last_dimension_is_copied_only_if_strided() -> None:
    from fastweights.ops import checks

    x = torch.randn(4, 6)
    assert checks.last_contiguous(x[:, 1:5]).data_ptr() == x[:, 1:5].data_ptr()
    copied = checks.last_contiguous(x.t())
    assert copied.is_contiguous()
    assert torch.equal(copied, x.t())


# ---- import -------------------------------------------------------------------------------------


def test_import_needs_neither_triton_nor_cupy_nor_a_gpu() -> None:
    """With both made unimportable the ops still import and run on the CPU."""
    root = str(Path(reference.__file__).resolve().parents[1])
    code = f"""
        import sys
        sys.modules["triton"] = sys.modules["cupy"] = None
        sys.path.insert(0, {root!r})
        import torch
        import fastweights, fastweights.ops, fastweights.autotune, fastweights.reference
        q = torch.ones(1, 3, 2, 16)
        out, lse = fastweights.ops.softmax_attention(q, q, q)
        assert torch.allclose(out, q), out
        print("ran")
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "ran", ran.stderr
