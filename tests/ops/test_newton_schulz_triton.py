"""Newton–Schulz's Triton kernels under the interpreter, on the CPU, in fp32 and fp16."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Space, choose, use_config
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc, dispatch
from fastweights.ops.newton_schulz import triton as backend
from fastweights.ops.newton_schulz.coefficients import SETS
from helpers import contracts, inputs, oracle
from helpers.newton_schulz import Case, everyday

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels would run instead"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

op = importlib.import_module("fastweights.ops.newton_schulz.op")
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
OP = partial(ops.newton_schulz, backend="triton")
SIZES = ((1, 9), (9, 1), (8, 8), (33, 65), (65, 33), (48, 96), (64, 64))


def shape_of(x: torch.Tensor, *, backward: bool = False, **rules: Any) -> Any:
    """What the backend is told about a call."""
    rules = {"steps": 5, "coefficients": "muon", "eps": 1e-7, "compute_dtype": None} | rules
    shape = op.newton_schulz_shape("newton_schulz", x, **rules)
    return op.replace(shape, backward=backward)


def different(space: Space) -> list[Config]:
    """The configs of a space, one for each set of tiles: warps mean nothing here."""
    return list({config.tiles: config for config in space.configs}.values())


def config_id(config: Config) -> str:
    return config.name


# ---- against float64 ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[int, int], dtype: str) -> None:
    """Views with NaN around them, upstream gradients too, into poisoned results.

    Square random matrices have singular values at the rounding of fp16, see `everyday`.
    """
    case = Case(*size, leading=(3,))
    if dtype == "fp32" and max(size) > 64:
        case = case.but(rows=min(size[0], 63), cols=min(size[1], 63))  # as far as fp32 goes
    literal = reference.newton_schulz
    if dtype == "fp16" and size[0] == size[1]:
        literal = everyday(torch.float16)
    oracle.check_op(OP, literal, case.arguments, DTYPES[dtype], CPU)


def smallest(config: Config, dtype: torch.dtype, leading: int) -> Case:
    """Matrices padded to the tile of a config, few enough columns to be quick."""
    rows = config["ROWS"] - 3
    cols = min(config["COLS"], 4 * config["ROWS"]) - 1
    return Case(rows, max(rows, cols), (leading,))


@pytest.mark.parametrize("config", different(backend.SPACE_FWD), ids=config_id)
def test_every_forward_config(config: Config) -> None:
    dtype = torch.float16 if config["HALF"] else torch.float32
    case = smallest(config, dtype, leading=2)
    with use_config(backend.SPACE_FWD, config):
        oracle.check_op(
            OP, reference.newton_schulz, case.arguments, dtype, CPU, grads=False, seeds=(0,)
        )


@pytest.mark.parametrize("config", different(backend.SPACE_BWD), ids=config_id)
def test_every_backward_config(config: Config) -> None:
    """With more matrices than programs, so that a scratch serves several."""
    dtype = torch.float16 if config["HALF"] else torch.float32
    case = smallest(config, dtype, leading=2 * config["EACH"] + 1)
    with use_config(backend.SPACE_BWD, config):
        oracle.check_op(OP, reference.newton_schulz, case.arguments, dtype, CPU, seeds=(0,))


@pytest.mark.parametrize("kind", ["condition", "deficient"])
@pytest.mark.parametrize("size", [(48, 64), (63, 33)], ids=str)
def test_small_singular_values(size: tuple[int, int], kind: str) -> None:
    case = Case(*size, kind=kind)
    for dtype, literal in (
        (torch.float32, reference.newton_schulz),
        (torch.float16, everyday(torch.float16)),
    ):
        oracle.check_op(OP, literal, case.arguments, dtype, CPU, seeds=(0,))


@pytest.mark.parametrize(("name", "steps"), [(name, 5) for name in SETS] + [("polar_express", 7)])
def test_coefficients(name: str, steps: int) -> None:
    for dtype in DTYPES.values():
        literal = partial(reference.newton_schulz, coefficients=name, steps=steps)
        run = partial(OP, coefficients=name, steps=steps)
        oracle.check_op(run, literal, Case(9, 20).arguments, dtype, CPU, seeds=(0, 1))


@pytest.mark.parametrize("steps", [1, 2])
def test_few_steps(steps: int) -> None:
    literal, run = (partial(f, steps=steps) for f in (reference.newton_schulz, OP))
    for dtype in DTYPES.values():
        oracle.check_op(run, literal, Case(20, 9).arguments, dtype, CPU)


def test_compute_dtypes() -> None:
    case = Case(33, 63)
    for dtype, compute, literal in (
        (torch.float32, torch.float16, everyday(torch.float16)),
        (torch.float16, torch.float32, reference.newton_schulz),
    ):
        oracle.check_op(OP, literal, case.arguments, dtype, CPU, seeds=(0,), compute_dtype=compute)


@pytest.mark.parametrize("eps", [0.3, 30.0])
def test_eps_is_added_to_the_norm(eps: float) -> None:
    literal, run = (partial(f, eps=eps) for f in (reference.newton_schulz, OP))
    oracle.check_op(run, literal, Case(6, 9).arguments, torch.float32, CPU)


# ---- large matrices ------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`triton_large` for matrices that an interpreter can multiply."""
    module = importlib.import_module(f"{op.PACKAGE}.triton_large")
    monkeypatch.setattr(module, "LEAST_ROWS", 65)
    monkeypatch.setattr(module, "are_few", lambda shape: False)
    with use_config(module.SPACE_SYMMETRIC, module.SPACE_SYMMETRIC.configs[-1]):
        yield module


def fixed_cost(cost: float) -> Any:
    """`triton_large.Products.cost`, whatever the device."""
    return property(lambda self: cost, lambda self, computed: None)


@pytest.mark.parametrize("cost", [0.5, 2.0], ids=["halves", "whole"])
@pytest.mark.parametrize("size", [(100, 110), (70, 301), (150, 66)], ids=str)
def test_large(size: tuple[int, int], cost: float, large: Any, monkeypatch: Any) -> None:
    """Both forms, by symmetric and by whole products; sides that are no multiples of anything."""
    assert large.gram_is_cheaper(*sorted(size), 5, min(cost, 1.0)) == (max(size) > 1.3 * min(size))
    monkeypatch.setattr(large.Products, "cost", fixed_cost(cost), raising=False)
    literal = reference.newton_schulz
    oracle.check_op(
        OP, literal, Case(*size, (2,)).arguments, torch.float16, CPU, grads=False, seeds=(0,)
    )


@pytest.mark.parametrize("cost", [0.5, 2.0], ids=["halves", "whole"])
@pytest.mark.parametrize("kind", ["condition", "deficient"])
def test_large_with_small_singular_values(
    kind: str, cost: float, large: Any, monkeypatch: Any
) -> None:
    """The Gram form keeps them as bf16 iterates do, and better."""
    monkeypatch.setattr(large.Products, "cost", fixed_cost(cost), raising=False)
    case = Case(70, 200, (1,), kind)
    literal = everyday(torch.bfloat16)
    oracle.check_op(OP, literal, case.arguments, torch.float16, CPU, grads=False, seeds=(0,))


def test_products_are_whole_where_half_of_them_leave_the_device_idle(large: Any) -> None:
    def cost(batch: int, rows: int) -> float:
        x = torch.empty(batch, rows, rows, dtype=torch.float16, device="meta")
        return large.Products(shape_of(x), rows).cost

    default = large.SPACE_SYMMETRIC.configs[0]  # tiles of 128
    device = dataclasses.replace(target_device("sm_90"), multiprocessors=132)
    with assume_device(device), use_config(large.SPACE_SYMMETRIC, default):
        assert cost(1, 4096) == pytest.approx(0.8 * 4 / (0.86 * 1024 / 132))
        for batch, rows in ((64, 512), (16, 1024), (1, 3072)):
            assert cost(batch, rows) < 0.8
        for batch, rows in ((1, 300), (1, 1024), (8, 512)):
            assert cost(batch, rows) > 1.0


# ---- few matrices of more than 128 rows ----------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`triton_large` for matrices of 65 rows and more, all of them few: tiles of 64."""
    module = importlib.import_module(f"{op.PACKAGE}.triton_large")
    monkeypatch.setattr(module, "LEAST_ROWS", 65)
    monkeypatch.setattr(module, "are_few", lambda shape: True)
    with use_config(module.SPACE_FEW, module.SPACE_FEW.configs[0]):
        yield module


@pytest.mark.parametrize("size", [(100, 110), (70, 200), (150, 66), (128, 192)], ids=str)
def test_few(size: tuple[int, int], few: Any) -> None:
    """Tall and wide, sides that are multiples of tiles and sides that are not."""
    literal = reference.newton_schulz
    for dtype in (torch.float16, torch.float32):
        oracle.check_op(
            partial(OP, compute_dtype=torch.float16), everyday(torch.float16),
            Case(*size, (2,)).arguments, dtype, CPU, grads=False, seeds=(0,),
        )  # fmt: skip
    oracle.check_op(
        partial(OP, coefficients="polar_express", steps=6),
        partial(literal, coefficients="polar_express", steps=6),
        Case(*size, (1,)).arguments, torch.float16, CPU, grads=False, seeds=(0,),
    )  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2])
def test_few_take_few_steps(steps: int, few: Any) -> None:
    literal, run = (partial(f, steps=steps) for f in (reference.newton_schulz, OP))
    case = Case(90, 70)
    oracle.check_op(run, literal, case.arguments, torch.float16, CPU, grads=False, seeds=(0,))


@pytest.mark.parametrize("kind", ["condition", "deficient"])
def test_few_with_small_singular_values(kind: str, few: Any) -> None:
    case, literal = Case(70, 130, (2,), kind), everyday(torch.float16)
    oracle.check_op(OP, literal, case.arguments, torch.float16, CPU, grads=False, seeds=(0,))


def test_few_with_a_zero_matrix_and_a_nan(few: Any) -> None:
    x = torch.randn(3, 80, 70).half()
    x[0], x[1, 3, 5] = 0, float("nan")
    with alloc.poison():
        out = OP(x)
    assert not out[0].any()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()


def test_which_matrices_are_few() -> None:
    large = importlib.import_module(f"{op.PACKAGE}.triton_large")
    device = dataclasses.replace(target_device("sm_90"), multiprocessors=132)

    def few(*size: int) -> bool:
        return large.are_few(shape_of(torch.empty(size, dtype=torch.bfloat16, device="meta")))

    with assume_device(device):
        assert all(few(*size) for size in ((8, 256, 256), (2, 512, 512), (1, 700, 725)))
        assert not any(few(*size) for size in ((9, 256, 256), (1, 1024, 1024), (1, 129, 9000)))


# ---- scales, zero, strides ----------------------------------------------------------------------


@pytest.mark.parametrize("power", [-100, -40, 40, 100])
def test_upstream_gradient_of_any_size(power: int) -> None:
    x = Case(9, 20).matrices(0, CPU).float().requires_grad_()
    out = OP(x, compute_dtype=torch.float16)
    upstream = torch.randn_like(out)
    (plain,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
    (scaled,) = torch.autograd.grad(out, x, upstream * 2.0**power)
    torch.testing.assert_close(scaled * 2.0**-power, plain, rtol=1e-6, atol=0)
    assert plain.any()


@pytest.mark.parametrize("size", [(6, 9), (9, 6), (1, 1)], ids=str)
def test_zero_gives_zero_with_zero_gradient(size: tuple[int, int]) -> None:
    for dtype in DTYPES.values():
        x = torch.randn(3, *size).to(dtype)
        x[1] = 0
        leaf = x.requires_grad_()
        with alloc.poison():
            out = OP(leaf)
            (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out), retain_graph=True)
            (none,) = torch.autograd.grad(out, leaf, torch.zeros_like(out))
        for got in (out.detach(), grad):
            assert not got[1].any()
            assert got.isfinite().all()
            assert got[0].any() or size == (1, 1)
        assert not none.any()


def test_nan_stays_in_its_matrix() -> None:
    x = torch.stack([torch.full((3, 4), torch.nan), torch.ones(3, 4)])
    out = OP(x)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("size", [(0, 3, 4), (2, 0, 5), (2, 5, 0)], ids=str)
def test_nothing_to_do(size: tuple[int, ...]) -> None:
    x = torch.empty(size, requires_grad=True)
    out = OP(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape


VIEWS = {
    "contiguous": lambda x: x.contiguous(),
    "embedded": inputs.embed,
    "misaligned": lambda x: inputs.embed(x, pad=1, offset=1),
    "transposed": lambda x: x.mT.contiguous().mT,
    "transposed and embedded": lambda x: inputs.embed(x.mT).mT,
    "last axis strided": inputs.spaced,
    "stack last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


@pytest.mark.parametrize("size", [(16, 32), (9, 20), (32, 16), (17, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_give_equal_bits(size: tuple[int, int], dtype: str) -> None:
    (x,) = Case(*size, (3,), strided=False).arguments(0, DTYPES[dtype], CPU).values()
    for turn in VIEWS.values():
        view = turn(x)
        assert torch.equal(view, x)
        contracts.check_views(OP, {"x": x}, {"x": view})


def test_one_matrix_for_the_whole_stack() -> None:
    """A stack of stride 0, as expand() makes it."""
    x = torch.randn(9, 20)
    many = OP(x.expand(4, 9, 20))
    for each in many:
        assert torch.equal(each, OP(x))


def test_transposition() -> None:
    """The same products of the same numbers: bit for bit, in the gradient too."""
    for dtype in DTYPES.values():
        x = torch.randn(2, 9, 20).to(dtype)
        runs = []
        for turn in (lambda x: x, lambda x: x.mT):
            leaf = turn(x).contiguous().requires_grad_()
            out = OP(leaf)
            (grad,) = torch.autograd.grad(out, leaf, out.detach() + 1)
            runs.append({"out": turn(out.detach()), "d x": turn(grad)})
        oracle.assert_bit_equal(runs[1], runs[0])


# ---- contracts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [Case(9, 14), Case(14, 9, (2, 2))], ids=lambda case: case.name)
def test_contracts(case: Case, dtype: str) -> None:
    arguments = case.arguments(0, DTYPES[dtype], CPU)
    contracts.check_backward_twice(OP, arguments)
    contracts.check_grad_out_untouched(OP, arguments)
    contracts.check_expanded_grad_out(OP, arguments)
    contracts.check_fullgraph(OP, arguments)


def test_opcheck() -> None:
    samples = [Case(9, 14).arguments(0, torch.float32, CPU), {"x": torch.randn(0, 4, 5)}]
    samples.append(contracts.leaves(samples[0]))
    rules = ([2.0, -1.5, 0.5] * 3, 1e-7, torch.float32, "triton")
    operator = torch.ops.fastweights.newton_schulz_fwd.default
    contracts.check_opcheck(operator, [(sample["x"], *rules) for sample in samples])


# ---- what it takes, and what not ----------------------------------------------------------------


def reason(*size: int, backward: bool = False, dtype: torch.dtype = torch.float16) -> str | None:
    x = torch.empty(size, dtype=dtype, device="meta")
    return backend.supports(shape_of(x, backward=backward), "sm_90")


def test_supports() -> None:
    with assume_device(target_device("sm_90")):
        for size in ((2, 128, 128), (1 << 20, 1, 1), (3, 256, 128), (3, 16, 1000), (3, 64, 256)):
            assert reason(*size) is None
        for size in ((2, 129, 200), (1, 256, 256), (3, 4096, 5000)):
            assert reason(*size) is None
            assert "no backward" in str(reason(*size, backward=True))
        assert "in fp16" in str(reason(2, 129, 200, dtype=torch.float32))
        assert "cannot hold 128 × 512 (padded) 16-bit" in str(reason(2, 100, 300))
        assert "fp32" in str(reason(2, 64, 65, dtype=torch.float32))
        for size in ((2, 64, 64), (2, 256, 64), (2, 17, 100)):
            assert reason(*size, backward=True) is None
        assert "128 × 128 (padded) 16-bit matrices whole in backward" in str(
            reason(2, 100, 100, backward=True)
        )
    with assume_device(target_device("sm_86")):
        assert reason(2, 128, 256) is not None


def test_defaults_are_of_the_space_on_every_device() -> None:
    for target in ("sm_80", "sm_86", "sm_90", "sm_120"):
        with assume_device(target_device(target)):
            for space in (backend.SPACE_FWD, backend.SPACE_BWD):
                backward = space.pass_ == "bwd"
                for size in ((16, 16), (8, 300), (32, 32), (64, 64)):
                    for dtype in DTYPES.values():
                        if reason(2, *size, backward=backward, dtype=dtype) is not None:
                            continue
                        x = torch.empty(2, *size, dtype=dtype, device="meta")
                        key = space.bucket(shape_of(x))
                        device = target_device(target)
                        assert choose(space, key, device) in space.fitting(key, device)


def test_backward_that_triton_cannot_run_goes_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "auto" alone; asked for Triton, the reason comes."""
    monkeypatch.setattr(dispatch, "_auto_order", lambda arch: dispatch.ORDER)
    ran = []
    for module in (backend, importlib.import_module(f"{op.PACKAGE}.eager")):
        for name in ("fwd", "bwd"):
            function = getattr(module, name)

            def recorded(*args: Any, f: Any = function) -> Any:
                ran.append(f"{f.__module__.rpartition('.')[2]}.{f.__name__}")
                return f(*args)

            monkeypatch.setattr(module, name, recorded)
    x = torch.randn(1, 65, 66, dtype=torch.float16, requires_grad=True)
    ops.newton_schulz(x).sum().backward()
    assert ran == ["triton.fwd", "eager.bwd"]
    with pytest.raises(ValueError, match="'triton' cannot run this call: cannot hold 128 × 128"):
        OP(x).sum().backward()
    assert set(ops.explain(ops.newton_schulz, x, backend="triton").configs) == {"fwd"}


def test_explain_names_the_configs() -> None:
    said = ops.explain(ops.newton_schulz, torch.randn(2, 64, 64), backend="triton")
    assert said.backend == "triton"
    assert set(said.configs) == {"fwd", "bwd"}


# ---- the factor of a Gram matrix ----------------------------------------------------------------

FACTOR = partial(ops.gram_newton_schulz_factor, backend="triton")
FACTOR_SPACES = backend.spaces(dataclasses.replace(shape_of(torch.ones(2, 2)), factor=True))


@pytest.mark.parametrize("size", [(1, 9), (9, 14), (16, 16), (33, 60), (70, 64)], ids=str)
def test_factor(size: tuple[int, int]) -> None:
    for dtype in DTYPES.values():
        oracle.check_op(
            FACTOR, reference.gram_newton_schulz_factor, Case(*size, (3,)).gram_arguments, dtype,
            CPU, seeds=(0,),
        )  # fmt: skip


@pytest.mark.parametrize("config", different(FACTOR_SPACES["bwd"]), ids=config_id)
def test_every_config_of_the_factor(config: Config) -> None:
    """With more matrices than programs, so that a scratch serves several.

    Of long matrices: the Gram matrix of a nearly square one is so ill-conditioned that its error is
    a matter of luck.
    """
    rows = config["ROWS"] - 3
    case = Case(rows, 3 * rows, (config["EACH"] + 1,))
    with use_config(FACTOR_SPACES["bwd"], config):
        oracle.check_op(
            FACTOR, reference.gram_newton_schulz_factor, case.gram_arguments, torch.float32, CPU
        )


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_steps_of_the_factor(steps: int) -> None:
    rules = {"steps": steps, "coefficients": [(2.0, -1.5, 0.5)]}
    oracle.check_op(
        partial(FACTOR, **rules), partial(reference.gram_newton_schulz_factor, **rules),
        Case(9, 20).gram_arguments, torch.float32, CPU, seeds=(0,),
    )  # fmt: skip


def test_factor_of_zero_is_zero() -> None:
    gram = torch.stack([torch.zeros(5, 5), torch.eye(5)]).requires_grad_()
    factor = FACTOR(gram)
    (grad,) = torch.autograd.grad(factor, gram, torch.ones_like(factor))
    for x in (factor.detach(), grad):
        assert not x[0].any()
        assert x.isfinite().all()
        assert x[1].any()


def test_explain_names_the_configs_of_a_factor() -> None:
    said = ops.explain(ops.gram_newton_schulz_factor, torch.eye(40), backend="triton")
    assert {pass_: config["ROWS"] for pass_, config in said.configs.items()} == {
        "fwd": 64, "bwd": 64,
    }  # fmt: skip
    with pytest.raises(ValueError, match="up to 64 rows"):
        FACTOR(torch.eye(65))


# ---- compile keys -------------------------------------------------------------------------------

SIGNATURES = """
    import importlib
    import json
    import torch
    from fastweights.ops import triton_runtime
    from fastweights.ops.newton_schulz import triton as backend
    from fastweights.ops.newton_schulz.op import newton_schulz_shape
    from helpers import inputs

    VIEWS = {
        "aligned": lambda x: x,
        "embedded": lambda x: inputs.embed(x),
        "misaligned": lambda x: inputs.embed(x, pad=1, offset=1),
        "strided": lambda x: inputs.spaced(x),
    }
    for name, view in VIEWS.items():
        keys = {}
        for i in range(40):
            cols = 40 + 8 * (i % 3) if name == "aligned" else 33 + 2 * (i % 15)
            x = view(torch.ones(1 + i, 18 + i % 14, cols, dtype=torch.float16))
            steps = 1 + i % 7
            triples = [(2.0 + i, -1.5, 0.5)]
            shape = newton_schulz_shape("newton_schulz", x, steps, triples, 1e-7, torch.float16)
            with triton_runtime.record_launches() as found:
                backend.fwd(shape, x)
                backend.bwd(shape, x.contiguous(), x)
            for source in found:
                keys.setdefault(source.name, set()).add(repr(source))
        print(name, json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_forty_sizes_and_schedules_compile_once() -> None:
    """One signature a kernel and layout whatever the sizes, steps, coefficients and strides."""
    lines = contracts.run_uninterpreted(SIGNATURES)
    assert len(lines) == 4
    for line in lines:
        name, _, counts = line.partition(" ")
        assert json.loads(counts) == {"newton_schulz_fwd": 1, "newton_schulz_bwd": 1}, name
