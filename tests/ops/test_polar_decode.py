"""Paged decoding in eager: against the loop, `polar_attention`, and as torch sees it."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from helpers import contracts, inputs, oracle
from helpers.paged import CASES, LAYOUTS, Case, last_row, parameters

op = importlib.import_module("fastweights.ops.polar_decode.op")
eager = importlib.import_module("fastweights.ops.polar_decode.eager")
CPU = torch.device("cpu")
WIDE = torch.float64
DECODE = ops.polar_decode


def assert_near(got: Any, wanted: Any, bound: float = 1e-12) -> None:
    for name, x in oracle.named(wanted).items():
        y = oracle.named(got)[name]
        assert (y.dtype, y.shape) == (x.dtype, x.shape), name
        gap = float((y - x).norm())
        assert gap <= bound * max(float(x.norm()), 1e-3), (name, gap)


def operands(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    return Case(**changes).arguments(0, dtype, CPU)


# ---- against the loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_is_the_reference(case: Case) -> None:
    given = case.arguments(0, WIDE, CPU)
    wanted = reference.polar_decode(**given)
    assert_near(DECODE(**given), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    for case in (CASES[0], CASES[5], CASES[11], CASES[13]):
        oracle.check_op(
            DECODE, reference.polar_decode, case.arguments, dtype, CPU, grads=False, label=case.name
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_caches(layout: str) -> None:
    given = operands(WIDE, layout=layout)
    plain = operands(WIDE, layout="contiguous")
    oracle.assert_bit_equal(oracle.named(DECODE(**given)), oracle.named(DECODE(**plain)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_sequence_is_the_last_row_of_polar_attention(case: Case) -> None:
    given = case.arguments(1, WIDE, CPU)
    direction, count = DECODE(**given)
    for b in range(len(case.lengths)):
        assert_near((direction[b], count[b]), last_row(given, b, "eager"))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("page_size", [16, 5])
def test_tokens_one_by_one_are_the_whole(page_size: int, window: int | None) -> None:
    """A cache that is written as sequences grow, one of them later than the other."""
    tokens, width = 23, 8
    source = inputs.generator(0, CPU)
    q, k, v = (inputs.normal((2, tokens, heads, width), source, WIDE) for heads in (4, 2, 2))
    head = torch.ones(4, dtype=WIDE)
    null = {
        "null_value": inputs.normal((4, width), source, WIDE),
        "null_base": head,
        "null_slope": 0.5 * head,
        "length_gain": 0.3 * head,
        "magnitude_gain": 0.2 * head,
    }
    wanted = ops.polar_attention(q, k, v, window=window, **null)
    blocks = -(-tokens // page_size)
    pages = 2 * blocks
    tables = torch.randperm(pages, generator=source).to(torch.int32).view(2, blocks)
    k_cache, v_cache = torch.full((2, pages, page_size, 2, width), torch.nan, dtype=WIDE)
    for time in range(tokens + 6):
        at = torch.tensor([time, time - 6])
        live = (at >= 0) & (at < tokens)
        now = at.clamp(0, tokens - 1)
        page = tables[torch.arange(2), now // page_size].long()
        slots = torch.where(live, page * page_size + now % page_size, -1)
        rows = torch.arange(2), now
        ops.paged_cache_write_(k[rows], v[rows], k_cache, v_cache, slots)
        lengths = (at + 1).clamp(0, tokens).int()
        direction, count = DECODE(
            q[rows], k_cache, v_cache, tables, lengths, window=window, max_context_len=tokens,
            **null,
        )  # fmt: skip
        for b in (0, 1):
            if live[b]:
                row = tuple(x[b, at[b]] for x in wanted)
                assert_near((direction[b], count[b]), row)
            elif at[b] < 0:
                assert not count[b].any()


def test_length_zero_is_the_null() -> None:
    given = operands(WIDE, lengths=(0, 7))
    given["null_value"][0] *= 1e-9
    direction, count = DECODE(**given)
    norm = given["null_value"].norm(dim=-1, keepdim=True).clamp(min=1e-6)
    assert_near(direction[0], given["null_value"] / norm)
    assert not count[0].any()
    assert count[1].all()
    direction, count = DECODE(**given | {"null_value": None})
    assert not direction[0].any()


def test_equal_keys_are_counted() -> None:
    """m equal keys and no null: n_eff = m."""
    given = operands(WIDE, lengths=(24,), base=-1e3)
    given["k_cache"].fill_(0.25)
    _, count = DECODE(**given)
    assert_near(count[0], (given["magnitude_gain"] * torch.tensor(25.0, dtype=WIDE).log()).tanh())


def test_nothing_to_do() -> None:
    """No sequences; no pages."""
    given = operands()
    none = {name: given[name][:0] for name in ("q", "block_tables", "context_lens")}
    direction, count = DECODE(**given | none)
    assert (direction.shape, count.shape) == ((0, 4, 16), (0, 4))
    empty = {name: given[name][:0] for name in ("k_cache", "v_cache")}
    empty["context_lens"] = torch.zeros(4, dtype=torch.int32)
    empty["block_tables"] = given["block_tables"][:, :0]
    assert not DECODE(**given | empty)[1].any()


def test_results_do_not_depend_on_splits_or_the_bound() -> None:
    given = operands(WIDE)
    wanted = oracle.named(DECODE(**given))
    for changes in ({"num_splits": 3}, {"max_context_len": 64}):
        oracle.assert_bit_equal(oracle.named(DECODE(**given | changes)), wanted)


# ---- as torch sees it ---------------------------------------------------------------------------


def arguments(given: dict[str, Any], backend: str = "eager") -> tuple[Any, ...]:
    tensors = [given[name] for name in op.DecodeTensors._fields]
    return (*tensors, given["window"], given["max_context_len"], None, backend)


def test_opcheck() -> None:
    samples = [
        arguments(operands()),
        arguments(operands(torch.bfloat16, null_value=False, window=9, layout="odd_stride")),
        arguments(operands(lengths=()) | {"q": torch.empty(0, 4, 16)}),
    ]
    contracts.check_opcheck(op.DECODE, samples)


def test_fullgraph() -> None:
    def call(given: dict[str, Any]) -> Any:
        first = DECODE(**given)
        return first, DECODE(**given | {"window": 7})

    given = operands()
    wanted = oracle.named(call(given))
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(given)
    torch._dynamo.reset()
    oracle.assert_bit_equal(oracle.named(got), wanted)


def test_nothing_is_read_on_the_host() -> None:
    """Fake tensors have no values to look at."""
    mode = FakeTensorMode()
    given = operands()
    names = op.DecodeTensors._fields
    tensors = op.DecodeTensors(*(mode.from_tensor(given[name]) for name in names))
    with mode:
        shape = op.decode_shape(
            "polar_decode", tensors, window=None, max_context_len=64, num_splits=None
        )
        direction, count = eager.fwd(shape, tensors)
    assert (direction.shape, direction.dtype) == ((4, 4, 16), torch.float32)
    assert (count.shape, count.dtype) == ((4, 4), torch.float32)


def test_flops_and_backends() -> None:
    given = operands()
    for window, pairs in ((None, 4 * 40), (9, 4 * 9), (100, 4 * 40)):
        with FlopCounterMode(display=False) as counter:
            DECODE(**given | {"window": window})
        assert counter.get_total_flops() == 4 * pairs * 16 * 4
    assert ops.explain(DECODE, **given).backend == "eager"
    with pytest.raises(ValueError, match="polar_decode: backend='cuda' cannot run this call"):
        DECODE(**given, backend="cuda")


def test_autocast_takes_the_type_of_the_caches() -> None:
    """Which it must not copy."""
    given = operands(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        direction, count = DECODE(**given | {"q": given["q"].float()})
    assert (direction.dtype, count.dtype) == (torch.bfloat16, torch.float32)


def test_gradients_are_refused() -> None:
    given = operands()
    for name in ("q", "v_cache", "null_base"):
        leaf = given[name].detach().clone().requires_grad_()
        with pytest.raises(ValueError, match=f"{name} requires grad; .* or use polar_attention"):
            DECODE(**given | {name: leaf})
        with torch.no_grad():
            DECODE(**given | {name: leaf})
    direct = arguments(given | {"q": given["q"].detach().requires_grad_()})
    direction, _ = op.DECODE(*direct)
    with pytest.raises(RuntimeError, match="polar_decode has no gradient; polar_attention has"):
        direction.sum().backward()


REFUSED = [
    ({"q": lambda x: x[:, None]}, ValueError, "q must have 3 dimensions"),
    ({"q": lambda x: x[:, :3]}, ValueError, "q has 3 heads, not a multiple of the 2"),
    ({"k_cache": lambda x: x.half()}, TypeError, "k_cache has dtype float16, q has float32"),
    ({"k_cache": lambda x: x[0]}, ValueError, "k_cache must have 4 dimensions"),
    ({"k_cache": lambda x: x[..., 1:]}, ValueError, "k_cache has size 15 in dimension 3"),
    ({"v_cache": lambda x: x[..., 1:]}, ValueError, "v_cache has size 15 in .*; Dv must equal D"),
    ({"v_cache": lambda x: x[:, 1:]}, ValueError, "v_cache has size 15 in dimension 1"),
    ({"v_cache": lambda x: x[:, :, :1]}, ValueError, "v_cache has size 1 in dimension 2"),
    ({"block_tables": lambda x: x.long()}, TypeError, "block_tables has dtype int64"),
    ({"block_tables": lambda x: x[:1]}, ValueError, "block_tables has size 1 in dimension 0"),
    ({"block_tables": lambda x: x + 99}, ValueError, "block_tables must name pages 0 … 8"),
    ({"block_tables": lambda x: x[:, :2]}, ValueError, "context_lens must be 0 … 32"),
    ({"context_lens": lambda x: x.long()}, TypeError, "context_lens has dtype int64"),
    ({"context_lens": lambda x: x - 1}, ValueError, "context_lens must be 0 … 40"),
    ({"max_context_len": lambda x: 39}, ValueError, "context_lens must be 0 … 39"),
    ({"max_context_len": lambda x: 0}, ValueError, "max_context_len must be at least 1, got 0"),
    ({"num_splits": lambda x: 0}, ValueError, "num_splits must be at least 1, got 0"),
    ({"window": lambda x: 0}, ValueError, "window must be at least 1, got 0"),
    ({"null_value": lambda x: x[:1]}, ValueError, "null_value has size 1 in dimension 0"),
    ({"null_slope": lambda x: x[:1]}, ValueError, "null_slope has size 1 in dimension 0"),
    ({"length_gain": lambda x: 0.3}, TypeError, "length_gain must be a torch.Tensor"),
    ({"magnitude_gain": lambda x: x.int()}, TypeError, "magnitude_gain has dtype int32"),
    ({"backend": lambda x: "fast"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = operands()
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=f"polar_decode: {words}"):
        DECODE(**given | changed)


def test_widths() -> None:
    """One error names the supported ones."""
    given = operands(width=300, lengths=(3,))
    with pytest.raises(ValueError, match="head width D of q is 300; supported: 1 to 256"):
        DECODE(**given)
    given = operands(lengths=(3,))
    caches = {name: given[name][:, :0] for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="k_cache has pages of 0 tokens"):
        DECODE(**given | caches)


def test_tables_are_not_looked_at_behind_a_window() -> None:
    """Pages that left the window may be given away."""
    given = operands(WIDE, lengths=(60,), window=20)
    wanted = oracle.named(DECODE(**given))
    given["block_tables"][0, :2] = -1
    oracle.assert_bit_equal(oracle.named(DECODE(**given)), wanted)


def test_parameters_of_lower_precision() -> None:
    """Read as fp32."""
    given = operands()
    low = {name: x.bfloat16() for name, x in parameters(given).items()}
    wide = {name: x.float() for name, x in low.items()}
    run = partial(DECODE, **{k: v for k, v in given.items() if k not in low})
    oracle.assert_bit_equal(oracle.named(run(**low)), oracle.named(run(**wide)))
