"""The polynomial ops' Triton kernels under the interpreter, on the CPU, in fp32 and fp16."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops
from fastweights.autotune import Config, Device, Space, choose, use_config
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc, dispatch
from fastweights.ops.polynomial import triton as backend
from fastweights.ops.polynomial import triton_spaces as spaces
from fastweights.ops.triton_runtime import padded
from helpers import contracts, inputs, oracle
from helpers.polynomial import Case

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels would run instead"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

op = importlib.import_module("fastweights.ops.polynomial.op")
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
ALL = (
    spaces.SPACE_EXPAND, spaces.SPACE_CONTRACT, spaces.SPACE_READ, spaces.SPACE_PULL,
    spaces.SPACE_UPDATE,
)  # fmt: skip


def shape_of(case: Case, dtype: torch.dtype = torch.float32, *, backward: bool = False) -> Any:
    """What the backend is told about a call."""
    given = case.arguments(0, dtype, CPU)
    other = given.get("state", given.get("g"))
    call = op.Arguments(given["x"], other, given.get("coefficients"), case.map)
    shape = op.shape_of(case.function, call, concrete=True)
    return op.replace(shape, backward=backward)


@contextlib.contextmanager
def smallest(case: Case, dtype: torch.dtype) -> Iterator[None]:
    """The smallest tiles that serve a call, which an interpreter runs fastest."""
    key = spaces.bucket(shape_of(case, dtype))
    with contextlib.ExitStack() as stack:
        for space in ALL:
            fitting = space.fitting(key, Device.of(CPU))
            if fitting:
                least = min(fitting, key=lambda config: sum(n for _, n in config.tiles))
                stack.enter_context(use_config(space, least))
        yield


def check(case: Case, dtype: str, **options: Any) -> None:
    """Results and all gradients against float64, into poisoned memory, of views with NaN around."""
    options = {"seeds": (0,)} | options
    with smallest(case, DTYPES[dtype]):
        run = partial(case.op, backend="triton")
        oracle.check_op(
            run, case.literal, case.arguments, DTYPES[dtype], CPU, label=case.name, **options
        )


# ---- against float64 ----------------------------------------------------------------------------

KEPT = (None, (0, 1, 2), (2,), (1,), (0,), (0, 2))
MAPS = [
    Case("features", kind, 2, "heads", kept, tokens=19, width=9, tile=4)
    for kind in ("symmetric", "tiled", "elementwise", "concat")
    for kept in KEPT
] + [
    Case("features", "elementwise", 5, "zeros", tokens=9, width=33),
    Case("features", "concat", 4, "none", (0, 3), tokens=9),
    Case("features", "tiled", tokens=9, width=16, tile=8, heads=3),
    Case("features", "tiled", 1, tokens=9, width=5, tile=4),
    Case("features", "symmetric", 3, "none", (1, 2), tokens=9),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.name)
def test_features(case: Case, dtype: str) -> None:
    check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coefficients", ["none", "shared", "zeros"])
@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_coefficients(function: str, coefficients: str, dtype: str) -> None:
    check(Case(function, coefficients=coefficients, tokens=19, heads=3, values=5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("function", ["read", "update"])
def test_degrees(function: str, kept: tuple[int, ...] | None, dtype: str) -> None:
    check(Case(function, kept=kept, tokens=19, width=9, values=5), dtype)


SIZES: list[dict[str, int]] = [
    {"width": 1, "values": 1, "tokens": 1},
    {"width": 16, "values": 16, "tokens": 32, "batch": 1},
    {"width": 17, "values": 20, "tokens": 33, "batch": 1, "heads": 1},
    {"width": 40, "values": 3, "tokens": 5, "batch": 1, "heads": 1},
    {"width": 3, "values": 150, "tokens": 40, "batch": 1},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: dict[str, int], dtype: str) -> None:
    """Widths that are tiles and that are not, columns of several blocks."""
    functions = ("read", "update") if size["values"] > 128 else ("features", "read", "update")
    for function in functions:
        check(Case(function, coefficients="shared").but(**size), dtype)


def test_three_seeds() -> None:
    for function in ("features", "read", "update"):
        check(Case(function, tokens=9), "fp16", seeds=(0, 1, 2))


@pytest.mark.parametrize("function", ["features", "read", "update"])
@pytest.mark.parametrize("size", [{"tokens": 0}, {"batch": 0}], ids=str)
def test_nothing_to_do(size: dict[str, int], function: str) -> None:
    case = Case(function).but(**size)
    given = case.arguments(0, torch.float32, CPU)
    with alloc.poison():
        found = contracts.forward_backward(partial(case.op, backend="triton"), given)
    wanted = contracts.forward_backward(case.op, given)
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        assert found[name].shape == x.shape, name
        assert not found[name].any(), name


# ---- configs ------------------------------------------------------------------------------------


def different(space: Space) -> list[Config]:
    """The configs of a space, one for each set of tiles: warps mean nothing here."""
    return list({config.tiles: config for config in space.configs}.values())


def served(space: Space, config: Config) -> Case:
    """A call that a config serves, no larger than has to be."""
    function = space.op.removeprefix("polynomial_")
    columns = config.get("V")
    width = 40 if space is spaces.SPACE_PULL and not config.get("NARROW") else 17
    most = min(columns, 64) if columns < 128 else columns
    return Case(
        function, coefficients="shared", batch=1, heads=1, width=width, values=max(most - 3, 1),
        tokens=config.get("T", config.get("R")) // 2 + 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("space", "config"),
    [(space, config) for space in ALL for config in different(space)],
    ids=lambda x: x.name,
)
def test_every_config(space: Space, config: Config) -> None:
    case = served(space, config)
    dtype = torch.float16 if config.get("HALF", 1) else torch.float32
    grads = space.pass_ == "bwd"
    with smallest(case, dtype), use_config(space, config):
        run = partial(case.op, backend="triton")
        oracle.check_op(run, case.literal, case.arguments, dtype, CPU, grads=grads, seeds=(0,))


def test_defaults_are_of_the_space_on_every_device() -> None:
    for target in ("sm_80", "sm_86", "sm_90", "sm_120"):
        device = target_device(target)
        for space, size, width, values, tokens in itertools.product(
            ALL, (2, 4), (1, 20, 64, 100), (1, 20, 64, 300), (7, 5000)
        ):
            dtype = torch.float16 if size == 2 else torch.float32
            function = space.op.removeprefix("polynomial_")
            shape = op.PolynomialShape(
                function, 4, tokens, 16, width, 0 if function == "features" else values,
                Case().map, True, dtype, torch.device("meta"),
            )  # fmt: skip
            key = space.bucket(shape)
            assert choose(space, key, device) in space.fitting(key, device)


def test_defaults_of_the_everyday_call() -> None:
    """At d = Dv = 64 in bf16 on an H200: as many tokens, columns and steps as registers hold."""
    device = Device("sm_90", 232448, multiprocessors=132)
    key = spaces.Bucket(2, 64, 64, 64, True)
    assert choose(spaces.SPACE_READ, key, device)["T"] == 128
    assert choose(spaces.SPACE_UPDATE, key, device)["G"] == 4
    few = key._replace(heads=4)
    assert choose(spaces.SPACE_UPDATE, few, device)["G"] == 2
    short = key._replace(long=False)
    assert choose(spaces.SPACE_READ, short, device)["T"] == 64


# ---- where rows lie -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 9, 16, 20])
def test_steps_have_every_row_once(width: int) -> None:
    """Of a state whose rows hold their numbers and a quarter; weights are 1 and √2."""
    case = Case("read", coefficients="shared", width=width, heads=3, batch=1, tokens=1, values=2)
    shape = shape_of(case)
    numbers = torch.arange(shape.wide) + 0.25
    state = numbers[None, None, :, None].expand(1, 3, -1, 2).contiguous()
    call = backend._Call(shape, torch.ones(1, 1, 3, width), torch.ones(3))
    steps = call.width // 2 + 2
    with alloc.poison():
        packed, _ = call._pack("pack_steps", state, steps, 16)
    tiles = packed.view(3, steps, call.width, 16)
    assert not tiles[..., 2:].any()
    for head in tiles:
        assert torch.equal(head[..., 0], head[..., 1])
        held = head[..., 0][head[..., 0] != 0]
        is_plain = (held % 1 - 0.25).abs() < 1e-4
        rows = torch.where(is_plain, held, held / 2**0.5)
        torch.testing.assert_close(rows.sort().values, numbers, rtol=0, atol=1e-4)
        assert is_plain.sum() == 2 * width  # the numbers, and their squares


# ---- values that are not ordinary ---------------------------------------------------------------


def test_upstream_gradients_of_any_size() -> None:
    """Of small numbers x_i y leaves fp16, where the gradient does not; rows of y are scaled."""
    case = Case("read", kept=(2,), tokens=9, heads=1, batch=1, scale=2.0**-6)
    given = case.arguments(0, torch.float16, CPU)
    given["state"] = given["state"] * 512
    upstream = (torch.randn(1, 9, 1, 3) * 2.0**-12).half()
    found = []
    for run, dtype in (
        (partial(case.op, backend="triton"), torch.float16),
        (case.op, torch.float64),
    ):
        wide = {n: x.double() if dtype == torch.float64 and oracle.is_floating(x) else x
                for n, x in given.items()}  # fmt: skip
        leaves = contracts.leaves(wide)
        with smallest(case, torch.float16):
            out = run(**leaves)
            wanted = [leaves["x"], leaves["coefficients"]]
            found.append(torch.autograd.grad(out, wanted, upstream.to(out.dtype)))
    for got, exact in zip(*found, strict=True):
        assert (got.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("function", ["features", "read"])
def test_a_nan_stays_in_its_token(function: str) -> None:
    case = Case(function, tokens=20)
    given = case.arguments(0, torch.float16, CPU)
    given["x"][1, 7, 0, 2] = torch.nan
    with smallest(case, torch.float16):
        out = case.op(**given, backend="triton")
    bad = out.isnan().any(-1)
    assert bad[1, 7, 0]
    assert bad.sum() == 1


def test_a_negative_coefficient_is_nan() -> None:
    x, a = torch.randn(3, 2, 4), torch.tensor([0.0, 1.0, -1.0])
    phi = ops.polynomial_features(x, a, backend="triton")
    assert phi[..., :4].isfinite().all()
    assert phi[..., 4:].isnan().all()


def test_a_zero_coefficient_has_the_gradient_zero() -> None:
    for function in ("features", "read", "update"):
        case = Case(function, coefficients="zeros", tokens=9)
        given = case.arguments(0, torch.float32, CPU)
        with smallest(case, torch.float32):
            found = contracts.forward_backward(partial(case.op, backend="triton"), given)
        zero = given["coefficients"] == 0
        assert not found["d coefficients"][zero].any()
        assert found["d coefficients"][~zero].all()


# ---- contracts ----------------------------------------------------------------------------------

VIEWS = {
    "misaligned": partial(inputs.embed, pad=1, offset=1),
    "spaced": inputs.spaced,
    "transposed": lambda x: inputs.embed(x.transpose(0, 1)).transpose(0, 1),
    "contiguous": torch.Tensor.contiguous,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_views_give_equal_bits(function: str, dtype: str) -> None:
    case = Case(function, tokens=9)
    given = case.arguments(0, DTYPES[dtype], CPU)
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    with smallest(case, DTYPES[dtype]):
        for turn in VIEWS.values():
            turned = {name: turn(x) for name, x in tensors.items()}
            contracts.check_views(partial(case.op, backend="triton"), given, turned)


def test_one_state_for_the_whole_batch() -> None:
    """A state of stride 0, as expand() makes it, is read as its copies are."""
    case = Case("read", batch=3)
    given = case.arguments(0, torch.float32, CPU)
    one = given["state"][:1].expand_as(given["state"])
    with smallest(case, torch.float32):
        got, wanted = (
            case.op(**given | {"state": state}, backend="triton")
            for state in (one, one.contiguous())
        )
    assert oracle.bit_equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [Case(f, tokens=9) for f in ("features", "read", "update")],
                         ids=lambda case: case.name)  # fmt: skip
def test_contracts(case: Case, dtype: str) -> None:
    given = case.arguments(0, DTYPES[dtype], CPU)
    run = partial(case.op, backend="triton")
    with smallest(case, DTYPES[dtype]):
        contracts.check_backward_twice(run, given)
        contracts.check_grad_out_untouched(run, given)
        contracts.check_expanded_grad_out(run, given)
        contracts.check_fullgraph(run, given)
        contracts.check_repeatable(
            lambda: tuple(contracts.forward_backward(run, given).values()), 2
        )


@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_opcheck(function: str) -> None:
    case = Case(function, tokens=5)
    given = case.arguments(0, torch.float32, CPU)
    names = {"features": ["x"], "read": ["x", "state"], "update": ["x", "g"]}[function]
    tensors = [given[name].detach().requires_grad_() for name in (*names, "coefficients")]
    rules = ("symmetric", 2, (1, 2), 1, "triton")
    forward = getattr(torch.ops.fastweights, f"polynomial_{function}_fwd").default
    with smallest(case, torch.float32):
        contracts.check_opcheck(forward, [(*tensors, *rules)])


@pytest.mark.parametrize("function", ["features", "read", "update"])
def test_backwards_take_the_forward_of_either_backend(function: str) -> None:
    """Saved tensors mean the same in eager and in Triton."""
    case = Case(function, tokens=9)
    given = case.arguments(0, torch.float32, CPU)
    with smallest(case, torch.float32):
        triton, eager = (
            contracts.forward_backward(partial(case.op, backend=name), given)
            for name in ("triton", "eager")
        )
    for name, x in eager.items():
        torch.testing.assert_close(triton[name], x, rtol=1e-4, atol=1e-4)


# ---- what it takes, and what not ----------------------------------------------------------------


def test_supports() -> None:
    def reason(case: Case, dtype: torch.dtype = torch.bfloat16, backward: bool = False) -> Any:
        return backend.supports(shape_of(case, dtype, backward=backward), "sm_90")

    with assume_device(target_device("sm_90")):
        for backward in (False, True):
            for function in ("features", "read", "update"):
                for width, values in ((1, 1), (64, 64), (128, 128), (100, 300), (20, 20)):
                    case = Case(function, "symmetric", 2, "none", width=width, values=values)
                    for dtype in (torch.bfloat16, torch.float32):
                        assert reason(case.but(tokens=1), dtype, backward) is None
                assert "up to 128 wide, this is 129" in reason(Case(function, width=129))
                assert "up to degree 2, not 3" in reason(Case(function, degree=3))
        assert reason(Case("features", "elementwise", 7, width=500)) is None
        assert "up to 512 wide" in reason(Case("features", "concat", 7, width=513))
    assert "bfloat16 wrongly" in backend.supports(shape_of(Case(), torch.bfloat16), "cpu")
    with assume_device(Device("sm_75", 65536)):
        assert "older than sm_80" in backend.supports(shape_of(Case()), "sm_75")


def test_explain_names_the_configs() -> None:
    for function in ("features", "read", "update"):
        case = Case(function)
        given = case.arguments(0, torch.float32, CPU)
        said = ops.explain(case.op, **given, backend="triton")
        assert said.backend == "triton"
        assert set(said.configs) == {"fwd", "bwd"}
        assert ops.explain(case.op, **given).backend == "eager"
    given = Case(kind="elementwise").arguments(0, torch.float32, CPU)
    assert ops.explain(ops.polynomial_features, **given, backend="triton").configs == {}
    with pytest.raises(ValueError, match="polynomial: backend='triton' cannot run this call"):
        ops.polynomial_features(torch.ones(2, 4), degree=3, backend="triton")


def test_a_degree_that_triton_does_not_form_goes_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_auto_order", lambda arch: dispatch.ORDER)
    x = torch.randn(3, 4)
    with alloc.poison():
        got = ops.polynomial_features(x, degree=3)
    assert oracle.bit_equal(got, ops.polynomial_features(x, degree=3, backend="eager"))


# ---- compile keys -------------------------------------------------------------------------------

SIGNATURES = """
    import json
    import torch
    from fastweights.autotune.compile import target_device
    from fastweights.autotune.space import assume_device
    from fastweights.ops import triton_runtime
    from fastweights.ops.polynomial import triton as backend
    from fastweights.ops.polynomial import op
    from fastweights.ops.polynomial.maps import FeatureMap
    from helpers import inputs

    MAP = FeatureMap("symmetric", 2, (1, 2))
    VIEWS = {
        "aligned": lambda x: inputs.embed(x),
        "misaligned": lambda x: inputs.embed(x, pad=1, offset=1),
    }
    for name, view in VIEWS.items():
        keys = {}
        with assume_device(target_device("sm_90")):
            for i in range(40):
                batch, tokens, heads = 1 + i % 3, 1 + 7 * i, 1 + i % 5
                x = view(torch.ones(batch, tokens, heads, 8).half())
                g = view(torch.ones(batch, tokens, heads, 64).half())
                state = torch.ones(batch, heads, MAP.wide(8), 64)
                a = torch.ones(heads, 3)[:, :] if i % 2 else torch.ones(3)
                others = {"features": None, "read": state, "update": g}
                for function, other in others.items():
                    shape = op.shape_of(function, op.Arguments(x, other, a, MAP), concrete=True)
                    given = x if other is not None else x.reshape(
                        1, shape.tokens, shape.heads, 8)
                    if function == "features":
                        given = view(given)
                        upstream = torch.ones(1, shape.tokens, shape.heads, MAP.wide(8)).half()
                    else:
                        upstream = g if function == "read" else state
                    with triton_runtime.record_launches() as found:
                        backend.fwd(shape, given, other, a)
                        backend.bwd(shape, upstream, given, other, a, (True, True))
                    for source in found:
                        tiles = tuple(source.constexprs.get(n) for n in "TRGC")
                        keys.setdefault((source.name, tiles), set()).add(repr(source))
        counts = {f"{kernel} {tiles}": len(found) for (kernel, tiles), found in keys.items()}
        print(name, json.dumps(counts))
"""


def test_forty_sizes_compile_once() -> None:
    """One signature a kernel and config whatever B, T, H, strides and whose coefficients."""
    lines = contracts.run_uninterpreted(SIGNATURES)
    assert len(lines) == 2
    for line in lines:
        name, _, counts = line.partition(" ")
        found = json.loads(counts)
        assert {key.split()[0] for key in found} == {
            "expand", "contract", "pack_steps", "read", "update", "pack_square", "pull",
        }  # fmt: skip
        assert set(found.values()) == {1}, (name, found)


def test_tiles_are_at_least_sixteen_wide() -> None:
    for length in (0, 1, 16):
        assert padded(length) == 16
    assert padded(17) == 32
