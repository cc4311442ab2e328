"""Writing a paged cache in eager and by Triton's interpreter: against the loop, and contracts."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastweights import ops, reference
from helpers import contracts, inputs, oracle
from helpers.paged import LAYOUTS, lay_out

op = importlib.import_module("fastweights.ops.paged_cache_write.op")
eager = importlib.import_module("fastweights.ops.paged_cache_write.eager")
CPU = torch.device("cpu")
WRITE_ = ops.paged_cache_write_
INTERPRETED = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
BACKENDS = ["eager", *["triton"] * INTERPRETED]


def operands(
    tokens: int = 7, heads: int = 3, width: int = 8, page_size: int = 16, pages: int = 4,
    layout: str = "contiguous", dtype: torch.dtype = torch.float32,
    device: torch.device = CPU, index: torch.dtype = torch.int64,
) -> dict[str, Any]:  # fmt: skip
    """Tokens to shuffled slots, every third skipped; the caches hold numbers."""
    source = inputs.generator(0, device)
    k, v = (inputs.embed(inputs.normal((tokens, heads, width), source, dtype)) for _ in range(2))
    k_cache, v_cache = (
        lay_out(inputs.normal((pages, page_size, heads, width), source, dtype), layout)
        for _ in range(2)
    )
    slots = torch.randperm(pages * page_size, generator=source, device=device)[:tokens]
    slots[1::3] = -1
    k[1::3] = torch.nan
    return {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": slots.to(index),
    }


def check(given: dict[str, Any], backend: str) -> None:
    """The same bits as the loop leaves, also between the rows of a view."""
    wanted = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    reference.paged_cache_write_(**given | wanted)
    assert WRITE_(**given, backend=backend) is None
    got = {name: given[name] for name in wanted}
    oracle.assert_bit_equal(got, wanted)


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_reach_their_slots(backend: str, page_size: int, index: torch.dtype) -> None:
    check(operands(page_size=page_size, index=index), backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_of_the_caches(backend: str, layout: str) -> None:
    for width in (8, 5):
        check(operands(layout=layout, width=width), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_tokens(backend: str) -> None:
    given = operands()
    for view in (inputs.spaced, lambda x: inputs.embed(x, pad=1, offset=1)):
        check(given | {name: view(given[name]) for name in ("k", "v")}, backend)
    one = {name: given[name][:1].expand(7, -1, -1) for name in ("k", "v")}
    check(given | one, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_skipped_tokens(backend: str) -> None:
    """All, none, the first; nothing else changes."""
    for slots in ([-1] * 7, [0, 1, 2, 3, 4, 5, 6], [-1, 63, 0, -1, 17, 16, 15]):
        given = operands()
        given["k"].nan_to_num_(0.5)
        before = given["k_cache"].clone()
        check(given | {"slot_mapping": torch.tensor(slots)}, backend)
        changed = (given["k_cache"] != before).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
        assert changed.tolist() == sorted(slot for slot in slots if slot >= 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: str) -> None:
    """No tokens; no pages."""
    given = operands()
    check(given | {name: given[name][:0] for name in ("k", "v", "slot_mapping")}, backend)
    empty = {name: given[name][:0] for name in ("k_cache", "v_cache")}
    check(given | empty | {"slot_mapping": torch.full((7,), -1)}, backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    check(operands(dtype=dtype), "eager")


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels in Triton's interpreter")
def test_every_config() -> None:
    backend = importlib.import_module("fastweights.ops.paged_cache_write.triton")
    left = set(backend.SPACE_FWD.configs)
    for width, layout in (
        (16, "contiguous"),
        (128, "contiguous"),
        (256, "contiguous"),
        (5, "pair"),
        (5, "odd_stride"),
        (1000, "spaced"),
    ):
        given = operands(width=width, layout=layout)
        shape = op.unchecked_shape(op.WriteTensors(**given), concrete=True)
        for config in contracts.every_config(backend.SPACE_FWD, shape):
            check(operands(width=width, layout=layout), "triton")
            left.discard(config)
    assert not left, {config.name for config in left}


# ---- as torch sees it ---------------------------------------------------------------------------


def test_opcheck() -> None:
    samples = [
        (*operands().values(), "eager"),
        (*operands(layout="heads_first", index=torch.int32).values(), "eager"),
    ]
    contracts.check_opcheck(op.WRITE, samples)


def test_writes_in_one_graph() -> None:
    """Two writes, and a look at the cache between them."""

    def call(given: dict[str, Any]) -> torch.Tensor:
        WRITE_(**given)
        seen = given["k_cache"] * 2
        WRITE_(**given | {"slot_mapping": given["slot_mapping"].flip(0)})
        return seen

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = operands()
        given["k"].nan_to_num_(0.5)
        seen = function(given)
        found.append(oracle.named((seen, given["k_cache"], given["v_cache"])))
    torch._dynamo.reset()
    oracle.assert_bit_equal(found[1], found[0])


def test_nothing_is_read_on_the_host() -> None:
    """Fake tensors have no values to look at."""
    mode = FakeTensorMode()
    given = operands()
    tensors = op.WriteTensors(*(mode.from_tensor(x) for x in given.values()))
    with mode:
        shape = op.write_shape("paged_cache_write_", tensors)
        eager.fwd(shape, tensors)
    assert shape.tokens == 7


def test_autograd_sees_that_a_cache_was_written() -> None:
    given = operands()
    weight = torch.ones((), requires_grad=True)
    seen = (weight * given["v_cache"]).sum()
    WRITE_(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.backward()


def test_autocast_takes_the_type_of_the_caches() -> None:
    given = operands(dtype=torch.bfloat16)
    wide = {name: given[name].float() for name in ("k", "v")}
    with torch.autocast("cpu", torch.bfloat16):
        WRITE_(**given | wide)
    slot = int(given["slot_mapping"][0])
    assert torch.equal(given["v_cache"].flatten(0, 1)[slot], given["v"][0])


REFUSED = [
    ({"k": lambda x: x[0]}, ValueError, "k must have 3 dimensions"),
    ({"v": lambda x: x[:3]}, ValueError, "v has size 3 in dimension 0"),
    ({"v": lambda x: x.half()}, TypeError, "v has dtype float16, k has float32"),
    ({"k_cache": lambda x: x.half()}, TypeError, "k_cache has dtype float16, k has float32"),
    ({"k_cache": lambda x: x[:, :, 1:]}, ValueError, "v_cache has size 3 in dimension 2"),
    ({"v_cache": lambda x: x[..., 1:]}, ValueError, "v_cache has size 7 in dimension 3"),
    ({"k_cache": lambda x: x[:1].expand_as(x)}, ValueError, "k_cache is expanded"),
    (
        {"v_cache": lambda x: x.requires_grad_()},
        ValueError,
        "v_cache requires grad; .*torch.index_put",
    ),
    ({"k": lambda x: x.requires_grad_()}, ValueError, "k requires grad"),
    ({"slot_mapping": lambda x: x.short()}, TypeError, "slot_mapping has dtype int16"),
    ({"slot_mapping": lambda x: x[:2]}, ValueError, "slot_mapping has size 2 in dimension 0"),
    ({"slot_mapping": lambda x: x + 99}, ValueError, "slot_mapping must be -1 … 63"),
    ({"slot_mapping": lambda x: x * 0}, ValueError, "slot_mapping must be distinct"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = operands()
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=f"paged_cache_write_: {words}"):
        WRITE_(**given | changed)


def test_heads_of_both_caches() -> None:
    given = operands()
    fewer = {name: given[name][:, :, 1:] for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="k_cache has size 2 in dimension 2, expected 3"):
        WRITE_(**given | fewer)


def test_the_operator_has_no_gradient() -> None:
    given = operands()
    assert ops.explain(WRITE_, **given).backend == "eager"
    with pytest.raises(ValueError, match="backend='cuda' cannot run this call"):
        WRITE_(**given, backend="cuda")
