"""Newton–Schulz's compiled kernels, Triton and CUDA C++, against float64 and as torch sees them.

Run with `pytest -n 8 -m gpu`.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc, dispatch
from fastweights.ops.newton_schulz.coefficients import SETS
from helpers import contracts, inputs, oracle
from helpers.newton_schulz import Case, everyday, orthogonal

pytestmark = pytest.mark.gpu

op = importlib.import_module("fastweights.ops.newton_schulz.op")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
BACKENDS = {name: importlib.import_module(f"{op.PACKAGE}.{name}") for name in ("triton", "cuda")}
SPACES = [
    pytest.param(name, space, id=f"{name}-{space.pass_}")
    for name, backend in BACKENDS.items()
    for space in (backend.SPACE_FWD, backend.SPACE_BWD)
]
# Sides around the edges of tiles, long and short ones, and everyday sizes.
SIZES = (
    (1, 9), (9, 1), (8, 8), (16, 16), (17, 31), (32, 32), (33, 65), (65, 33), (48, 96), (64, 64),
    (63, 64), (64, 256), (256, 64), (100, 128), (128, 128), (129, 129), (128, 256), (250, 128),
    (200, 200), (256, 140), (256, 256), (16, 1000), (255, 1), (64, 512), (700, 50), (40, 1024),
    (128, 512), (300, 70),
)  # fmt: skip


def shape_of(x: torch.Tensor, *, backward: bool = False, **rules: Any) -> Any:
    """What a backend is told about a call."""
    rules = {"steps": 5, "coefficients": "muon", "eps": 1e-7, "compute_dtype": None} | rules
    return op.replace(op.newton_schulz_shape("newton_schulz", x, **rules), backward=backward)


def refusal(backend: str, x: torch.Tensor, *, backward: bool, **rules: Any) -> str | None:
    """Why the backend cannot run the call; None if it can."""
    shape = shape_of(x, backward=backward, **rules)
    return dispatch.refusal(op.PACKAGE, backend, shape, Device.of(x.device).arch)


def literal(case: Case, dtype: torch.dtype) -> Any:
    """The yardstick. Singular values at the rounding of fp16 ask for one that stores in fp16."""
    near_square = case.rows == case.cols or case.kind != "normal"
    return everyday(FP16) if dtype != FP32 and near_square else reference.newton_schulz


def check(backend: str, case: Case, dtype: torch.dtype, device: torch.device, **rules: Any) -> bool:
    """Against float64, gradients where the backend has them; False if it refuses the forward."""
    x = torch.empty(1, case.rows, case.cols, dtype=dtype, device=device)
    if refusal(backend, x, backward=False, **rules) is not None:
        return False
    grads = refusal(backend, x, backward=True, **rules) is None
    run = partial(ops.newton_schulz, backend=backend, **rules)
    wanted = partial(literal(case, dtype), **rules)
    oracle.check_op(run, wanted, case.arguments, dtype, device, grads=grads, label=case.name)
    return True


# ---- against float64 ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes(backend: str, dtype: str, device: torch.device) -> None:
    """Views with NaN around them, upstream gradients too, into poisoned results."""
    served = [size for size in SIZES if check(backend, Case(*size, (3,)), DTYPES[dtype], device)]
    if dtype == "fp32" and backend == "cuda":
        assert not served
        return
    assert {(8, 8), (17, 31), (63, 64)} <= set(served)


def _cases(config: Config) -> list[Case]:
    """Matrices that fill the tile of a config, that are padded to it, and tall ones."""
    rows, cols = config["ROWS"], config["COLS"]
    cases = [Case(rows, cols, (3,)), Case(rows - 3, cols - 1, (3,)), Case(cols, rows, (3,))]
    return [case for case in cases if min(case.rows, case.cols) > 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("backend", "space"), SPACES)
def test_every_config(backend: str, space: Space, dtype: str, device: torch.device) -> None:
    here = Device.of(device)
    ran = set()
    with oracle.collected() as failures:
        for config in space.configs:
            for case in _cases(config):
                x = torch.empty(1, case.rows, case.cols, dtype=DTYPES[dtype], device=device)
                if space.fits(config, space.bucket(shape_of(x)), here) is not None:
                    continue
                backward = space.pass_ == "bwd"
                if refusal(backend, x, backward=backward) is not None:
                    continue
                truth = oracle.Oracle(
                    literal(case, DTYPES[dtype]), case.arguments, DTYPES[dtype], device,
                    grads=backward,
                )  # fmt: skip
                run = partial(ops.newton_schulz, backend=backend)
                with use_config(space, config):
                    report = truth.measure(run).report()
                failures += [f"{config.name} {case.name} {line}" for line in report]
                ran.add(config)
    if dtype == "fp32" and backend == "cuda":
        assert not ran
        return
    half = [config for config in space.configs if config.get("HALF", 1) == (dtype != "fp32")]
    for config in set(half) - ran:  # what does not fit here has to fit elsewhere
        elsewhere = target_device("sm_80" if here.capability == 90 else "sm_90")
        with assume_device(elsewhere):
            keys = [
                space.bucket(shape_of(torch.empty(1, c.rows, c.cols, device="meta", dtype=BF16)))
                for c in _cases(config)
            ]
        assert any(space.fits(config, key, elsewhere) is None for key in keys), config.name


LARGE = importlib.import_module(f"{op.PACKAGE}.triton_large")


@pytest.fixture
def none_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of more than 128 rows is multiplied a launch a product."""
    monkeypatch.setattr(LARGE, "are_few", lambda shape: False)


@pytest.mark.usefixtures("none_are_few")
@pytest.mark.parametrize("config", LARGE.SPACE_SYMMETRIC.configs, ids=lambda config: config.name)
def test_large(config: Config, device: torch.device) -> None:
    """Direct and Gram form, stacks, tall ones, sides that are no multiples of anything."""
    with oracle.collected() as failures, use_config(LARGE.SPACE_SYMMETRIC, config):
        for size in ((1024, 1024), (1100, 1115), (1024, 4096), (2051, 1030), (2048, 2048)):
            case = Case(*size, (2,))
            truth = oracle.Oracle(
                literal(case, BF16), case.arguments, BF16, device, seeds=(0,), grads=False
            )
            report = truth.measure(partial(ops.newton_schulz, backend="triton")).report()
            failures += [f"{case.name} {line}" for line in report]


@pytest.mark.usefixtures("none_are_few")
@pytest.mark.parametrize("kind", ["condition", "deficient"])
def test_large_with_small_singular_values(kind: str, device: torch.device) -> None:
    for size in ((1024, 1100), (1024, 3000)):
        case = Case(*size, (1,), kind)
        oracle.check_op(
            partial(ops.newton_schulz, backend="triton"), everyday(BF16), case.arguments, BF16,
            device, grads=False, seeds=(0,),
        )  # fmt: skip


def test_large_is_repeatable(device: torch.device) -> None:
    x = torch.randn(1, 1024, 4096, device=device).to(BF16)
    contracts.check_repeatable(lambda: (ops.newton_schulz(x, backend="triton"),), 20)


FEW = (
    (1, 256, 256), (3, 200, 300), (1, 515, 131), (2, 512, 512), (1, 700, 725), (2, 150, 1300),
)  # fmt: skip


@pytest.mark.parametrize("config", LARGE.SPACE_FEW.configs, ids=lambda config: config.name)
def test_few(config: Config, device: torch.device) -> None:
    """All steps in one launch; tall ones too, and sides that are no multiples of anything."""
    with oracle.collected() as failures, use_config(LARGE.SPACE_FEW, config):
        for batch, *size in FEW:
            for dtype in (BF16, FP16):
                case = Case(*size, (batch,))
                assert LARGE.are_few(
                    shape_of(torch.empty(batch, *size, dtype=dtype, device=device))
                )
                truth = oracle.Oracle(
                    literal(case, dtype), case.arguments, dtype, device, seeds=(0,), grads=False
                )
                for _ in range(3):  # programs meet in another order each time
                    report = truth.measure(partial(ops.newton_schulz, backend="triton")).report()
                    failures += [f"{case.name} {line}" for line in report]


@pytest.mark.parametrize("kind", ["condition", "deficient"])
def test_few_with_small_singular_values(kind: str, device: torch.device) -> None:
    case = Case(256, 300, (2,), kind)
    oracle.check_op(
        partial(ops.newton_schulz, backend="triton"), everyday(FP16), case.arguments, FP16,
        device, grads=False, seeds=(0,),
    )  # fmt: skip


@pytest.mark.parametrize("size", FEW, ids=str)
def test_few_are_repeatable(size: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(size, device=device).to(BF16)
    contracts.check_repeatable(lambda: (ops.newton_schulz(x, backend="triton"),), 50)


def test_few_in_a_graph(device: torch.device) -> None:
    x = torch.randn(1, 300, 260, device=device).to(BF16)
    run = partial(ops.newton_schulz, x, backend="triton")
    graph, (out,) = contracts.captured(lambda: (run(),), device)
    for _ in range(5):
        x.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())


def test_few_on_two_streams(device: torch.device) -> None:
    """Launches whose programs wait for each other do not wait for those of another launch."""
    stacks = [torch.randn(2, 512, 512, device=device).to(BF16) for _ in range(2)]
    wanted = [ops.newton_schulz(x, backend="triton") for x in stacks]
    streams = [torch.cuda.Stream(device) for _ in stacks]
    torch.cuda.synchronize(device)
    got = []
    for _ in range(50):
        for x, stream in zip(stacks, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(ops.newton_schulz(x, backend="triton"))
    torch.cuda.synchronize(device)
    for i, out in enumerate(got):
        assert torch.equal(out, wanted[i % 2]), i


@pytest.mark.parametrize("kind", ["condition", "deficient"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_singular_values(backend: str, kind: str, device: torch.device) -> None:
    for size in ((24, 31), (48, 64), (63, 33), (128, 128), (100, 250), (256, 256)):
        for dtype in (BF16, FP16):
            check(backend, Case(*size, kind=kind), dtype, device)


@pytest.mark.parametrize(("name", "steps"), [(name, 5) for name in SETS] + [("polar_express", 7)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_coefficients(backend: str, name: str, steps: int, device: torch.device) -> None:
    for size in ((9, 20), (60, 100), (128, 192)):
        assert check(backend, Case(*size), BF16, device, coefficients=name, steps=steps)


@pytest.mark.parametrize(
    ("name", "steps"), [("muon", 1), ("muon", 2), ("muon", 9), ("polar_express", 16)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps(backend: str, name: str, steps: int, device: torch.device) -> None:
    """Sixteen of a set that converges: Muon's does not, and rounding grows from step to step."""
    for size in ((20, 9), (64, 128), (128, 90)):
        assert check(backend, Case(*size), FP16, device, coefficients=name, steps=steps)


@pytest.mark.parametrize("eps", [0.3, 30.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_eps_is_added_to_the_norm(backend: str, eps: float, device: torch.device) -> None:
    for size in ((6, 9), (40, 64), (200, 140)):
        check(backend, Case(*size), FP16, device, eps=eps)


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (64, 256), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_error_beside_that_of_bf16(
    backend: str, size: tuple[int, int], device: torch.device
) -> None:
    """What Muon's users run keeps iterates in bf16: ours may err 1.2 times as much."""
    x = torch.randn(8, *size, device=device, generator=inputs.generator(0, device)).to(BF16)
    # Matrices of 256 rows need sm_90; there both backends run every size of this test.
    if refusal(backend, x, backward=False) is not None:
        pytest.skip(f"{backend} refuses: {refusal(backend, x, backward=False)}")
    exact = reference.newton_schulz(x.double())
    plain = everyday(BF16)(x).double()
    got = ops.newton_schulz(x, backend=backend).double()
    assert (got - exact).norm() <= 1.2 * (plain - exact).norm()

    def defect(u: torch.Tensor) -> torch.Tensor:
        return (u @ u.mT - torch.eye(size[0], device=device, dtype=u.dtype)).norm()

    assert defect(got) <= 1.2 * defect(plain)


# ---- the factor of a Gram matrix ----------------------------------------------------------------

FACTOR_SPACES = BACKENDS["triton"].spaces(
    op.replace(shape_of(torch.ones(2, 2, device="cpu")), factor=True)
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_every_config_of_the_factor(pass_: str, dtype: str, device: torch.device) -> None:
    space = FACTOR_SPACES[pass_]
    with oracle.collected() as failures:
        for config in space.configs:
            rows = config["ROWS"]
            for n in (rows, rows - 3):
                case = Case(n, 3 * n, (700,))
                truth = oracle.Oracle(
                    reference.gram_newton_schulz_factor, case.gram_arguments, DTYPES[dtype],
                    device, seeds=(0,), grads=pass_ == "bwd",
                )  # fmt: skip
                with use_config(space, config):
                    run = partial(ops.gram_newton_schulz_factor, backend="triton")
                    report = truth.measure(run).report()
                failures += [f"{config.name} n={n} {line}" for line in report]


# ---- stacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (17, 30), (64, 64), (64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_matrix_does_not_depend_on_its_stack(
    backend: str, size: tuple[int, int], device: torch.device
) -> None:
    """More matrices than blocks at once, more than 65,535 of the small ones; bit for bit."""
    batch = 70_000 if max(size) <= 32 else 2_500
    x = torch.randn(batch, *size, device=device, generator=inputs.generator(0, device)).to(BF16)
    upstream = torch.randn_like(x)
    run = partial(ops.newton_schulz, backend=backend)

    def both(some: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        leaf = some.clone().requires_grad_()
        with alloc.poison():
            out = run(leaf)
            if refusal(backend, some, backward=True) is not None:
                return [out.detach()]
            return [out.detach(), *torch.autograd.grad(out, leaf, grad)]

    whole = both(x, upstream)
    order = torch.randperm(batch, device=device, generator=inputs.generator(1, device))
    shuffled = both(x[order], upstream[order])
    for a, b in zip(whole, shuffled, strict=True):
        assert torch.equal(a[order], b)
    for i in (0, batch // 2, batch - 1):
        alone = both(x[i : i + 1], upstream[i : i + 1])
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[i : i + 1], b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_orthogonal_factors_pass_through(backend: str, device: torch.device) -> None:
    """NS(U X V) = U NS(X) V, as far as 16 bits go."""
    for n, m in ((24, 30), (64, 100), (128, 128)):
        x = torch.randn(n, m, device=device, dtype=torch.float64)
        u, v = orthogonal(n).to(device), orthogonal(m, 1).to(device)
        one = ops.newton_schulz((u @ x @ v).half(), backend=backend).double()
        two = u @ ops.newton_schulz(x.half(), backend=backend).double() @ v
        assert (one - two).norm() <= 2e-2 * two.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_transposition(backend: str, device: torch.device) -> None:
    for size in ((9, 20), (64, 70), (100, 128), (200, 256)):
        x = torch.randn(2, *size, device=device).to(BF16)
        if refusal(backend, x, backward=False) is not None:
            continue
        one = ops.newton_schulz(x, backend=backend)
        two = ops.newton_schulz(x.mT.contiguous(), backend=backend).mT
        assert (one.double() - two.double()).norm() <= 1e-2 * one.double().norm()


# ---- scales, zero, strides ----------------------------------------------------------------------


@pytest.mark.parametrize("power", [-100, -40, 40, 100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_gradient_of_any_size(backend: str, power: int, device: torch.device) -> None:
    for size in ((9, 20), (64, 64), (64, 256), (128, 128)):
        x = Case(*size).matrices(0, device).to(BF16).requires_grad_()
        if refusal(backend, x, backward=True) is not None:
            continue
        out = ops.newton_schulz(x, backend=backend)
        upstream = torch.randn_like(out)
        (plain,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
        (scaled,) = torch.autograd.grad(out, x, upstream * 2.0**power)
        torch.testing.assert_close(
            scaled.float() * 2.0**-power, plain.float(), rtol=2e-2, atol=1e-3 * float(plain.std())
        )
        assert plain.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_gives_zero_with_zero_gradient(backend: str, device: torch.device) -> None:
    for size in ((6, 9), (31, 32), (64, 64), (256, 60), (128, 256), (256, 256)):
        x = torch.randn(3, *size, device=device).to(BF16)
        if refusal(backend, x, backward=False) is not None:
            continue
        x[1] = 0
        leaf = x.requires_grad_()
        with alloc.poison():
            out = ops.newton_schulz(leaf, backend=backend)
            assert not out.detach()[1].any()
            assert out.isfinite().all()
            assert out.detach()[0].any()
            if refusal(backend, x, backward=True) is not None:
                continue
            (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out), retain_graph=True)
            (none,) = torch.autograd.grad(out, leaf, torch.zeros_like(out))
        assert not grad[1].any()
        assert grad.isfinite().all()
        assert grad[0].any()
        assert not none.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_matrix(backend: str, device: torch.device) -> None:
    for size in ((12, 20), (64, 64), (128, 100)):
        x = torch.randn(5, *size, device=device).to(BF16)
        x[2, 3, 1] = torch.nan
        out = ops.newton_schulz(x, backend=backend)
        assert out[2].isnan().all()
        assert out[[0, 1, 3, 4]].isfinite().all()


VIEWS = {
    "contiguous": lambda x: x.contiguous(),
    "embedded": inputs.embed,
    "misaligned": lambda x: inputs.embed(x, pad=1, offset=1),
    "transposed": lambda x: x.mT.contiguous().mT,
    "last axis strided": inputs.spaced,
    "stack last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "shifted": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("size", [(16, 32), (9, 20), (64, 64), (128, 72), (100, 99)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_views_give_equal_bits(backend: str, size: tuple[int, int], device: torch.device) -> None:
    (x,) = Case(*size, (3,), strided=False).arguments(0, BF16, device).values()
    # Triton holds no matrices of more than 64 rows in backward, CUDA C++ those of every size here.
    if refusal(backend, x, backward=True) is not None:
        pytest.skip(f"{backend} refuses: {refusal(backend, x, backward=True)}")
    for turn in VIEWS.values():
        view = turn(x)
        assert torch.equal(view, x)
        contracts.check_views(partial(ops.newton_schulz, backend=backend), {"x": x}, {"x": view})


# ---- as torch sees it ---------------------------------------------------------------------------

CONTRACTS = [Case(20, 31, (3,)), Case(64, 64, (300,)), Case(128, 60, (2, 2))]


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_contracts(backend: str, case: Case, device: torch.device) -> None:
    run = partial(ops.newton_schulz, backend=backend)
    arguments = case.arguments(0, BF16, device)
    contracts.check_backward_twice(run, arguments)
    contracts.check_grad_out_untouched(run, arguments)
    contracts.check_expanded_grad_out(run, arguments)
    contracts.check_repeatable(
        lambda: tuple(contracts.forward_backward(run, arguments).values()), 50
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_fullgraph(backend: str, device: torch.device) -> None:
    """Between other operations, as in a model, compiled by inductor."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return ops.newton_schulz(x * 2.0, backend=backend) + 1.0

    contracts.check_fullgraph(block, CONTRACTS[0].arguments(0, BF16, device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str, device: torch.device) -> None:
    samples = [case.arguments(0, BF16, device) for case in CONTRACTS[:2]]
    samples.append({"x": torch.randn(0, 4, 5, device=device).to(BF16)})
    samples.append(contracts.leaves(samples[0]))
    rules = ([2.0, -1.5, 0.5] * 3, 1e-7, FP16, backend)
    operator = torch.ops.fastweights.newton_schulz_fwd.default
    contracts.check_opcheck(operator, [(sample["x"], *rules) for sample in samples])


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_graph_replays(backend: str, case: Case, device: torch.device) -> None:
    run = partial(ops.newton_schulz, backend=backend)
    x = case.arguments(0, BF16, device)["x"].detach().requires_grad_()
    upstream = torch.randn(x.shape, device=device).to(BF16)

    def step() -> tuple[torch.Tensor, ...]:
        out = run(x)
        return out, *torch.autograd.grad(out, x, upstream)

    graph, captured = contracts.captured(step, device)
    for seed in range(5):
        with torch.no_grad():
            x.copy_(case.arguments(seed, BF16, device)["x"])
        graph.replay()
        got = {str(i): y.detach().clone() for i, y in enumerate(captured)}
        expected = {str(i): y.detach() for i, y in enumerate(step())}
        oracle.assert_bit_equal(got, expected, f"replay {seed}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_call_inside_capture_says_warm_up(backend: str, device: torch.device) -> None:
    """And leaves the stream usable."""
    x = torch.randn(2, 128, 190, device=device).half()  # compiled by no other test
    rules = {"coefficients": "muon", "backend": backend}
    ops.newton_schulz(x[:, :64, :64], **rules)  # Triton's table of coefficients is there by now
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold: call it once before capture"),
        torch.cuda.graph(graph),
    ):
        ops.newton_schulz(x, **rules)
    assert ops.newton_schulz(x, **rules).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_on_the_current_stream(backend: str, device: torch.device) -> None:
    """Behind work that is still under way there."""
    x = torch.zeros(64, 64, 64, device=device, dtype=BF16)
    fresh = torch.randn_like(x)
    expected = ops.newton_schulz(fresh, backend=backend)
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.copy_(fresh)
        got = ops.newton_schulz(x, backend=backend)
    side.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_launches_on_the_tensors_device(backend: str) -> None:
    # A launch on the wrong device shows only where there is another one.
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, {torch.cuda.device_count()} is here")
    with torch.cuda.device(0):
        check(backend, CONTRACTS[0], BF16, torch.device("cuda", 1))
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_host_sync(backend: str, device: torch.device) -> None:
    x = torch.randn(9, 64, 64, device=device, dtype=BF16, requires_grad=True)
    upstream = torch.randn_like(x)

    def step() -> torch.Tensor:
        out = ops.newton_schulz(x, backend=backend)
        return torch.autograd.grad(out, x, upstream)[0]

    step()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.isfinite().all()


def test_auto_says_what_it_takes(device: torch.device) -> None:
    said = ops.explain(ops.newton_schulz, torch.randn(9, 64, 64, device=device).to(BF16))
    assert said.backend in ("cuda", "triton")
    assert set(said.configs) == {"fwd", "bwd"}
