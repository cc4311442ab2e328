"""The delta rewrite's Triton kernels under the interpreter, against float64.

Compiled kernels are tested in `test_delta_rewrite_gpu.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.autotune import Device, use_config
from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops import alloc
from fastweights.ops.delta_rewrite import triton as backend
from fastweights.ops.delta_rewrite import triton_spaces, tuning
from helpers import contracts, inputs, oracle
from helpers.delta_rewrite import MEMORY, WRITTEN, Case

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_delta_rewrite_gpu"
    ),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # rows that do not exist
]

op = importlib.import_module("fastweights.ops.delta_rewrite.op")
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
OP = partial(ops.delta_rewrite, backend="triton")
IN_PLACE = partial(ops.delta_rewrite_, backend="triton")
BASE = Case(batch=3, first=True, values=20)


def shape_of(case: Case, dtype: torch.dtype) -> Any:
    given = case.arguments(0, dtype, CPU)
    rules = op.Rules(
        case.order, False, case.normalize, case.denominator, case.correction, False, 1e-5, 0.0
    )
    names = (*op.RewriteTensors._fields[: op.TENSORS],)
    return op.unchecked_shape(op.RewriteTensors(*(given.get(name) for name in names)), rules)


@contextlib.contextmanager
def smallest(case: Case, dtype: torch.dtype) -> Iterator[None]:
    """The smallest tiles that fit: several of each."""
    shape = shape_of(case, dtype)
    with contextlib.ExitStack() as stack:
        for space in backend.spaces(shape).values():
            fitting = space.fitting(space.bucket(shape), Device.of(CPU))
            least = min(fitting, key=lambda c: c.get("K", 1) * c["C"] * c.get("T", 1))
            stack.enter_context(use_config(space, least))
        yield


def check(case: Case, dtype: str, **options: Any) -> None:
    """Against float64, into poisoned memory, of views with NaN around them."""
    oracle.check_op(
        OP, reference.delta_rewrite, case.arguments, DTYPES[dtype], CPU, grads=False,
        label=case.name, **{"seeds": (0,)} | options,
    )  # fmt: skip


# ---- against float64 ----------------------------------------------------------------------------

CASES = [
    BASE,
    BASE.but(channels=True, heads=3),
    BASE.but(normalize=False),
    BASE.but(denominator=False, order=2),
    BASE.but(correction=False, order=4, width=3),
    BASE.but(tokens=1, mode="sequential"),
    BASE.but(tokens=17, reads=None),
    BASE.but(tokens=0),
    BASE.but(reads=0),
    BASE.but(reads=33, width=1, values=1, order=1),
    BASE.but(width=17, values=33, tokens=20),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rules_and_sizes(case: Case, dtype: str) -> None:
    with smallest(case, DTYPES[dtype]):
        check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_configs(dtype: str) -> None:
    check(BASE.but(batch=1, first=False, width=16, values=70, tokens=40, reads=70), dtype)


@pytest.mark.parametrize("tokens", [5, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_config(dtype: str, tokens: int) -> None:
    """Of each kernel, with rows and columns that no tile divides."""
    case = BASE.but(batch=1, heads=1, first=False, width=11, values=130, tokens=tokens, reads=18)
    truth = oracle.Oracle(
        reference.delta_rewrite, case.arguments, DTYPES[dtype], CPU, seeds=(0,), grads=False
    )
    shape = shape_of(case, DTYPES[dtype])
    tried = 0
    for space in backend.spaces(shape).values():
        for config in contracts.every_config(space, shape) if space in tuning.FORWARD else ():
            truth.check(OP, config.name)
            tried += 1
    assert tried >= (5 if triton_spaces.is_whole(shape) else 9)


@pytest.mark.parametrize("splits", [2, 3])
def test_queries_of_few_tokens_are_split(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that form the same columns; of shares of the queries one is empty."""
    monkeypatch.setattr(backend._Call, "_splits", lambda *args: splits)
    case = BASE.but(reads=20, width=5, values=40)
    assert triton_spaces.is_whole(shape_of(case, torch.float16))
    with smallest(case, torch.float16):
        check(case, "fp16")


@pytest.mark.parametrize("normalize", [True, False])
def test_keys_without_a_feature(normalize: bool) -> None:
    """Zeros, and a number without a neighbour; no division by zero gets out."""
    given = BASE.but(normalize=normalize, first=False).arguments(0, torch.float32, CPU)
    for name in ("k", "q"):
        given[name][:, 2] = 0
        given[name][:, 4] = 0
        given[name][:, 4, :, 0] = 2.0
    with alloc.poison():
        got = oracle.named(OP(**given))
    wanted = oracle.named(ops.delta_rewrite(**given, backend="eager"))
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("scale", [1e-4, 1e-30, 1e15])
def test_keys_of_any_length(scale: float) -> None:
    given = BASE.but(first=False).arguments(0, torch.float32, CPU)
    scaled = given | {name: given[name] * scale for name in ("k", "q")}
    for got, wanted in zip(OP(**scaled), OP(**given), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_an_echo_keeps_what_was_written() -> None:
    """E comes out of the kernel; the backward takes it off again."""
    given = Case(batch=2, values=20).arguments(0, torch.float32, CPU)
    found = []
    for call in (ops.delta_rewrite, _by_auto):
        leaves = contracts.leaves(given)
        zero = torch.zeros((), requires_grad=True)
        y, state, z, echo = call(**leaves, echo=zero.expand(given["state"].shape))
        loss = y.square().sum() + state.sin().sum() + z.sum() + (echo * state.detach()).sum()
        loss.backward()
        found.append({n: x.grad for n, x in leaves.items() if oracle.is_floating(x)})
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_echo_recovers_the_state(dtype: str) -> None:
    """Of 16-bit keys, too: what is taken off is what was added, to the last digits of fp32."""
    given = Case(batch=2, values=20).arguments(0, DTYPES[dtype], CPU)
    echo = torch.zeros(given["state"].shape, requires_grad=True)
    _, state, _, after = _by_auto(**contracts.leaves(given), echo=echo)
    (after * state.detach()).sum().backward()
    assert (echo.grad - given["state"]).abs().max() <= 1e-6 * state.abs().max()


def _by_auto(**given: Any) -> Any:
    """What "auto" does on a GPU."""
    order = importlib.import_module("fastweights.ops.dispatch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_auto_order", lambda arch: order.ORDER)
        out = ops.delta_rewrite(**given)
        assert ops.explain(ops.delta_rewrite, **given).backend == "triton"
    return out


# ---- slots --------------------------------------------------------------------------------------


def pooled(case: Case, dtype: torch.dtype, slots: list[int], view: Any = None) -> dict[str, Any]:
    given = case.but(batch=len(slots), first=False).arguments(0, dtype, CPU)
    del given["gamma_grad"]
    for name in MEMORY:
        x = given.pop(name)
        pool = torch.rand(6, *x.shape[1:], generator=inputs.generator(1, CPU))
        given[f"{name}_pool"] = (view or inputs.embed)(pool)
    return given | {"slots": torch.tensor(slots)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[-1, -1, -1], [4, -1, 0], [2, 5, 1]], ids=str)
def test_in_place_is_the_functional_call(slots: list[int], dtype: str) -> None:
    """Bits of rows and slots, those that nobody names, NaN in skipped rows; z is shared by blocks
    of columns.
    """
    given = pooled(BASE, DTYPES[dtype], slots)
    first = torch.tensor([False, True, True])
    live = given["slots"] >= 0
    for name in (*WRITTEN, "q"):
        given[name][~live] = torch.nan
    pools = {name: given[f"{name}_pool"].clone() for name in MEMORY}
    with smallest(BASE.but(batch=3, first=False), DTYPES[dtype]), alloc.poison():
        y = IN_PLACE(**given, first=first)
        kept = {
            n: x for n, x in given.items() if n not in ("slots", "state_pool", "normalizer_pool")
        }
        plain = {n: x[live] if isinstance(x, torch.Tensor) else x for n, x in kept.items()}
        rows = given["slots"][live]
        wanted = OP(**plain, **{n: x[rows] for n, x in pools.items()}, first=first[live])
    assert not y[~live].any()
    assert torch.equal(y[live], wanted[0])
    for name, after in zip(MEMORY, wanted[1:], strict=True):
        pools[name][rows] = after
        assert torch.equal(given[f"{name}_pool"], pools[name])


def test_reading_a_pool_alone() -> None:
    given = pooled(BASE.but(tokens=0), torch.float32, [3, -1])
    before = given["state_pool"].clone()
    first = torch.tensor([False, False])
    y = IN_PLACE(**given, first=first)
    assert y[0].any()
    assert not y[1].any()
    assert torch.equal(given["state_pool"], before)
    assert not IN_PLACE(**given, first=~first).any()


@pytest.mark.parametrize("view", ["spaced", "misaligned", "contiguous"])
def test_views_of_pools_and_tokens(view: str) -> None:
    """All may be views, and pools are written."""
    change = {
        "spaced": inputs.spaced,
        "misaligned": partial(inputs.embed, pad=1, offset=1),
        "contiguous": torch.Tensor.contiguous,
    }[view]
    found = []
    for lay in (change, None):
        given = pooled(BASE, torch.float32, [4, 0], lay)
        if lay is not None:
            given |= {name: lay(given[name]) for name in (*WRITTEN, "q")}
        y = IN_PLACE(**given)
        found.append({"y": y} | {name: given[f"{name}_pool"] for name in MEMORY})
    for name, x in found[1].items():
        torch.testing.assert_close(found[0][name], x, rtol=1e-5, atol=1e-6, msg=name)


def test_views_of_a_functional_call() -> None:
    given = BASE.but(channels=True, first=False).arguments(0, torch.float32, CPU)
    for name in (*WRITTEN, *MEMORY, "q"):
        wanted, got = OP(**given), OP(**given | {name: inputs.spaced(given[name])})
        oracle.assert_bit_equal(oracle.named(got), oracle.named(wanted), name)
    shared = given["state"][:1].expand(3, -1, -1, -1)
    got = OP(**given | {"state": shared})
    wanted = OP(**given | {"state": shared.contiguous()})
    oracle.assert_bit_equal(oracle.named(got), oracle.named(wanted), "expanded")


def test_nothing_to_do() -> None:
    """No rows, no heads, or no slots."""
    for case in (BASE.but(batch=0, first=False), BASE.but(heads=0)):
        got = OP(**case.arguments(0, torch.float32, CPU))
        wanted = ops.delta_rewrite(**case.arguments(0, torch.float32, CPU))
        assert [x.shape for x in got] == [x.shape for x in wanted]
    given = pooled(BASE, torch.float32, [-1, -1])
    given |= {f"{name}_pool": given[f"{name}_pool"][:0] for name in MEMORY}
    with alloc.poison():
        assert not IN_PLACE(**given).any()


# ---- as torch sees it, what it takes and what not -----------------------------------------------


def test_opcheck_in_place() -> None:
    given = pooled(BASE, torch.float32, [2, -1])
    names = (*WRITTEN, "state_pool", "normalizer_pool", "slots", "q")
    rules = (3, False, True, True, True, False, 1e-5, 0.0, "triton")
    contracts.check_opcheck(op.REWRITE_IN_PLACE, [(*(given[name] for name in names), None, *rules)])


def reason(arch: str = "sm_90", **changes: Any) -> str | None:
    shape = replace(tuning._compile_shape(10, 522, 64, 768), **changes)
    with assume_device(target_device(arch)):
        return backend.supports(shape, arch)


def test_supports() -> None:
    for changes in (
        {}, {"tokens": 128, "values": 2048}, {"tokens": 0}, {"reads": 0}, {"width": 128},
        {"width": 1, "values": 1}, {"order": 4, "width": 128, "tokens": 100},
        {"sequential": True, "tokens": 1}, {"channels": True, "pool": 9}, {"echo": True},
        {"full": True}, {"batch": 0}, {"backward": True}, {"backward": True, "width": 128},
        {"backward": True, "tokens": 128, "values": 2048}, {"backward": True, "tokens": 0},
        {"backward": True, "sequential": True}, {"backward": True, "reads": 0},
        {"sequential": True}, {"sequential": True, "echo": True, "backward": True},
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            for arch in ("sm_80", "sm_86", "sm_90"):
                assert reason(arch, dtype=dtype, **changes) is None, (arch, dtype, changes)
    assert "takes dk up to 128, this is 129" in str(reason(width=129))
    assert "takes order up to 4, this is 5" in str(reason(order=5))
    assert "takes M up to 128, this is 129" in str(reason(tokens=129))


def test_refusals_reach_the_caller() -> None:
    given = BASE.but(order=5).arguments(0, torch.float32, CPU)
    with pytest.raises(ValueError, match="'triton' cannot run this call: takes order up to 4"):
        OP(**given)
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        OP(**BASE.arguments(0, torch.bfloat16, CPU))


def test_explain_names_the_configs() -> None:
    for case, dtype, kernels in (
        (BASE, torch.float32, {"fwd", "fwd_read"}),
        (BASE, torch.float16, {"fwd_whole"}),
        (BASE.but(tokens=17), torch.float16, {"fwd", "fwd_read"}),
    ):
        given = case.arguments(0, dtype, CPU)
        found = set(ops.explain(OP.func, **given, backend="triton").configs)
        assert found == kernels | {"bwd", "bwd_read"}


def test_the_backward_waits_for_a_gpu() -> None:
    shape = tuning._compile_shape(10, 522, 64, 768)
    assert backend.yields(shape, "sm_90") is None
    back = dataclasses.replace(shape, backward=True)
    assert "not passed all checks" in str(backend.yields(back, "sm_90"))
    assert backend.yields(back, "cpu") is None


SIGNATURES = """
    import json
    import torch
    from fastweights.ops import triton_runtime
    from fastweights.ops.delta_rewrite import op, triton as backend
    from helpers import inputs

    VIEWS = {
        "aligned": lambda x: inputs.embed(x),
        "misaligned": lambda x: inputs.embed(x, pad=1, offset=1),
    }
    RULES = op.Rules(3, False, True, True, True, False, 1e-5, 0.0)
    for name, least in ((name, least) for name in VIEWS for least in (1, 17)):
        keys, view = {}, VIEWS[name]
        for i in range(40):
            batch, heads, reads = 1 + i % 3, 1 + i % 5, 3 + i
            k, q = (torch.zeros(batch, n, heads, 8).half() for n in (least + i % 16, reads))
            v = torch.zeros(batch, k.shape[1], heads, 64).half()
            beta = torch.zeros(k.shape[:3])
            state, z = torch.zeros(5, heads, 48, 64), torch.zeros(5, heads, 48)
            slots = torch.arange(batch)
            tensors = [view(x) for x in (k, v, beta, state, z, q)]
            given = op.RewriteTensors(*tensors, None, slots)
            shape = op.rewrite_shape("test", given, RULES, concrete=True)
            with triton_runtime.record_launches() as found:
                backend.fwd(shape, given)
            for source in found:
                keys.setdefault(source.name, set()).add(repr(source))
        print(name, json.dumps({key: len(found) for key, found in keys.items()}))
"""


def test_forty_sizes_and_views_compile_once() -> None:
    """One signature of each kernel whatever the tokens, heads and strides; two of `prepare`, for
    tokens and queries. Of up to 16 tokens one kernel does all.
    """
    lines = contracts.run_uninterpreted(SIGNATURES)
    assert len(lines) == 4
    for number, line in enumerate(lines):
        name, _, counts = line.partition(" ")
        wanted = {"prepare": 2, "rewrite": 1, "read": 1} if number % 2 else {"whole": 1}
        assert json.loads(counts) == wanted, name


COMPILED = """
    import json
    from fastweights.ops.delta_rewrite import tuning
    for target in ("sm_80", "sm_90"):
        for quick in (True, False):
            cases = tuning.compile_cases(target, quick)
            print(json.dumps(sorted({(case.pass_, case.config.name) for case in cases})))
"""


def test_compile_reports_leave_no_config_out() -> None:
    """Quick ones have one of each kernel."""
    every = {(s.pass_, config.name) for s in tuning.SPACES for config in s.configs}
    quick80, whole80, quick90, whole90 = (
        {tuple(pair) for pair in json.loads(line)} for line in contracts.run_uninterpreted(COMPILED)
    )
    whole80, whole90 = (
        {pair for pair in found if pair[0] != tuning.SEQUENTIAL} for found in (whole80, whole90)
    )
    assert whole90 == every
    assert whole80 <= every
    for quick in (quick80, quick90):
        assert {pass_ for pass_, _ in quick} == {"fwd", "fwd_read", "bwd", "bwd_read"}
        assert len(quick) == 4
