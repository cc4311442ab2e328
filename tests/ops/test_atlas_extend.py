"""The Atlas memory in pieces, single tokens among them, against the loops over all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from fastweights.ops import AtlasCache, checks
from helpers import contracts, oracle
from helpers.atlas import CARRIED, Case, cut, features_of, in_pieces, rules_of, start

CPU = torch.device("cpu")
WIDE = torch.float64


def assert_near(
    got: tuple[torch.Tensor, Any], wanted: tuple[torch.Tensor, Any], most: float = 1e-11
) -> None:
    """y and the state, relative to the size of each tensor."""
    found = oracle.named(got)
    for name, x in oracle.named(wanted).items():
        assert found[name].shape == x.shape, name
        assert found[name].dtype == x.dtype, name
        gap = (found[name].double() - x.double()).norm()
        assert gap <= most * max(1.0, float(x.double().norm())), (name, gap)


SQUARED = {"width": 4, "values": 3, "symmetric": True, "degree": 2}
CASES = [
    Case(stride=1, window=1),
    Case(stride=None, window=5, carried=True),
    Case(stride=2, window=12, chunk_size=4, carried=True),
    Case(stride=4, inner_loss="dot", decay=False),
    Case(stride=2, read_before=True, carried=True, gates=False),
    Case(stride=1, chunk_size=1, window=3),
    Case(stride=3, chunk_size=6, window=1, degree=2),
    Case(**SQUARED, stride=2, carried=True),
    Case(width=2, values=9, stride=4, window=4),
    Case(batch=5, stride=8, chunk_size=16, ns_steps=5, ns_coefficients="polar_express"),
]


# ---- against the loops --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pieces_are_the_whole(case: Case) -> None:
    """Pieces that are empty, short and longer than chunks; single tokens."""
    given = case.arguments(1, WIDE, CPU)
    wanted = reference.atlas_memory(**given, return_state=True)
    for cuts in ((1, 1, 3, 14, 15), (18,), range(1, 19)):
        assert_near(in_pieces(case, given, cuts), wanted)


@pytest.mark.parametrize("tokens", [1, 4, 9, 23])
@pytest.mark.parametrize("stride", [1, 3, 6])
def test_pieces_of_sequences_at_different_places(stride: int, tokens: int) -> None:
    """One call for five sequences, of which each has had another number of tokens."""
    case = Case(5, 30, window=4, chunk_size=6, stride=stride)
    given = case.arguments(2, WIDE, CPU)
    rules = rules_of(given)
    cache = start(case, given)
    heads, wanted = [], []
    for n in range(5):
        had = {name: x[n : n + 1] for name, x in cut(given, 0, n).items()}
        mine = AtlasCache._make(x[n : n + 1] for x in cache)
        heads.append(ops.atlas_extend(**had, cache=mine, **rules)[1])
        whole = {name: x[n : n + 1] for name, x in cut(given, 0, n + tokens).items()}
        y, left = reference.atlas_memory(**whole, **rules, return_state=True)
        wanted.append((y[:, n:], left))
    joined = AtlasCache._make(torch.cat(column) for column in zip(*heads, strict=True))
    assert joined.filled.tolist() == [0, 1, 2, 3, 4]
    pieces = {
        name: torch.cat([given[name][n : n + 1, n : n + tokens] for n in range(5)])
        for name in cut(given, 0, 1)
    }
    y, after = ops.atlas_extend(**pieces, cache=joined, **rules)
    for n in range(5):
        mine = AtlasCache._make(x[n : n + 1] for x in after)
        assert_near((y[n : n + 1], mine.to_state(window=4)), wanted[n])


def test_a_call_and_then_tokens() -> None:
    """`atlas_memory` over whole chunks, then single tokens; and with a ragged end, a new chunk."""
    case = Case(tokens=21, stride=2)
    given = case.arguments(3, WIDE, CPU)
    rules = rules_of(given)
    for prompt in (16, 13):
        _, left = ops.atlas_memory(**cut(given, 0, prompt), **rules, return_state=True)
        cache = AtlasCache.from_state(left, chunk_size=8)
        reads = []
        for t in range(prompt, 21):
            y, cache = ops.atlas_extend(**cut(given, t, t + 1), cache=cache, **rules)
            reads.append(y)
        carried = dict(zip(CARRIED, left, strict=True))
        wanted = reference.atlas_memory(
            **cut(given, prompt, 21), **rules, **carried, return_state=True
        )
        got = (torch.cat(reads, 1), cache.to_state(window=3))
        assert_near(got, wanted)
        if prompt == 16:  # then it is the same sequence
            whole, last = reference.atlas_memory(**given, return_state=True)
            assert_near((got[0], got[1]), (whole[:, 16:], last))


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[7]], ids=lambda case: case.name)
def test_gradients_of_pieces(case: Case) -> None:
    """Through the caches between the calls, from y and from the state."""
    given = case.arguments(0, WIDE, CPU)

    def cut_up(**given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(oracle.named(in_pieces(case, given, (3, 3, 4, 17))).values())

    def literal(**given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(oracle.named(reference.atlas_memory(**given, return_state=True)).values())

    got = contracts.forward_backward(cut_up, given)
    for name, x in contracts.forward_backward(literal, given).items():
        gap = (got[name].double() - x.double()).norm()
        assert gap <= 1e-11 * max(1.0, float(x.double().norm())), (name, gap)


def test_where_values_cannot_be_read_nothing_else_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: Newton–Schulz runs for every token, and counts where there is one."""
    case = Case(stride=4, carried=True)
    given = case.arguments(0, WIDE, CPU)
    wanted = in_pieces(case, given, range(1, 19))
    monkeypatch.setattr(checks, "readable", lambda x: False)
    assert_near(in_pieces(case, given, range(1, 19)), wanted, 1e-13)


# ---- what a call leaves alone -------------------------------------------------------------------


@pytest.mark.parametrize("had", [0, 3, 7, 8])
def test_rows_that_do_not_exist_are_not_read(had: int) -> None:
    """NaN there changes no bit of what comes after."""
    case = Case(1, 20, window=6, chunk_size=4, stride=2, degree=2)
    given = case.arguments(0, torch.float32, CPU)
    rules = rules_of(given)
    _, cache = ops.atlas_extend(**cut(given, 0, had), cache=start(case, given), **rules)
    row = torch.arange(cache.keys.shape[1])
    there = (row >= 5 - cache.tail_length) & (row < 5 + cache.filled)
    nothing = ~there[None, :, None, None]
    dirty = cache._replace(
        keys=cache.keys.masked_fill(nothing, torch.nan),
        values=cache.values.masked_fill(nothing, torch.nan),
        residuals=cache.residuals.masked_fill(nothing | (cache.filled == 0), torch.nan),
    )
    assert not cache.momentum_write.masked_fill(there, 0).any()
    found = []
    for begin in (cache, dirty):
        y, after = ops.atlas_extend(**cut(given, had, 20), cache=begin, **rules)
        left = after.to_state(window=6, **features_of(given))
        found.append({"y": y} | oracle.named(left))
    oracle.assert_bit_equal(found[1], found[0])
    assert all(x.isfinite().all() for x in found[1].values())


def test_the_cache_is_not_changed_and_shares_nothing() -> None:
    """Also not with an initial state that was learned, and expanded over the batch."""
    case = Case(2, 6, window=3, chunk_size=2, stride=1)
    given = case.arguments(0, torch.float32, CPU)
    learned = torch.randn(1, 2, 6, 5).expand(2, 2, 6, 5)
    left = start(case, given).to_state(window=3)._replace(state=learned)
    cache = AtlasCache.from_state(left, chunk_size=2)
    assert len({x.untyped_storage().data_ptr() for x in (*cache, learned)}) == len(cache) + 1
    before = AtlasCache._make(x.clone() for x in cache)
    nothing, copied = ops.atlas_extend(**cut(given, 0, 0), cache=cache, **rules_of(given))
    assert nothing.shape == (2, 0, 2, 5)
    ops.atlas_extend(**cut(given, 0, 6), cache=cache, **rules_of(given))
    oracle.assert_bit_equal(oracle.named(cache), oracle.named(before))
    oracle.assert_bit_equal(oracle.named(copied), oracle.named(before))


# ---- as torch sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 8])
def test_fullgraph(tokens: int) -> None:
    """A step of decoding, and a piece with whole chunks, inside of a compiled function."""
    case = Case(2, tokens, window=3, chunk_size=4, stride=2)
    given = case.arguments(0, torch.float32, CPU)
    cache = start(case, given)

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        y, after = ops.atlas_extend(**cut(given, 0, tokens), cache=cache, **rules_of(given))
        return y, after.memory, after.momentum_write

    contracts.check_fullgraph(call, given)


def test_autocast_casts_queries_keys_and_values_alone() -> None:
    case = Case(stride=4, window=3)
    given = case.arguments(0, torch.float32, CPU)
    exact = in_pieces(case, given, (7,))[0]
    narrow = start(case, given)
    narrow = narrow._replace(keys=narrow.keys.bfloat16(), values=narrow.values.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        y, after = ops.atlas_extend(**cut(given, 0, 19), cache=narrow, **rules_of(given))
    assert y.dtype == torch.bfloat16
    assert after.memory.dtype == torch.float32
    assert (y - exact).norm() < 0.2 * exact.norm()


REFUSED = [
    ({"cache": lambda x: tuple(x)}, TypeError, "cache must be an AtlasCache, got tuple"),
    (
        {"cache": lambda x: x._replace(memory=x.memory[:, :1])},
        ValueError,
        "cache.memory has size 1",
    ),
    ({"cache": lambda x: x._replace(filled=x.filled.long())}, TypeError, "cache.filled has dtype"),
    ({"chunk_size": lambda x: 4}, ValueError, r"cache.keys has size 10 in dimension 1, expected 6"),
    ({"momentum": lambda x: None}, TypeError, "atlas_extend: momentum must be a torch.Tensor"),
    ({"ns_stride": lambda x: 5}, ValueError, "atlas_extend: ns_stride must divide chunk_size"),
    ({"q": lambda x: x[:1]}, ValueError, "k has size 2 in dimension 0"),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    case = Case()
    given = case.arguments(0, torch.float32, CPU)
    given["cache"] = start(case, given)
    with pytest.raises(error, match=words):
        ops.atlas_extend(**given | {name: change(given[name]) for name, change in changes.items()})


def test_errors_of_caches() -> None:
    case = Case()
    given = case.arguments(0, torch.float32, CPU)
    cache = start(case, given)
    with pytest.raises(ValueError, match=r"AtlasCache.from_state: left has no momentum"):
        AtlasCache.from_state(cache.to_state(window=3)._replace(momentum=None))
    with pytest.raises(TypeError, match=r"AtlasCache.from_state: left must be an OmegaState"):
        AtlasCache.from_state(cache)
    with pytest.raises(ValueError, match=r"AtlasCache.to_state: window is 11, cache.keys has 10"):
        cache.to_state(window=11)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        ops.atlas_cache(-1, 2, 6, 5)
    small = partial(ops.atlas_cache, 1, 2, 4, 3, feature_map="symmetric")
    assert small(coefficients=torch.tensor([0.0, 1.0, 1.0, 1.0])).memory.shape == (1, 2, 34, 3)
    with pytest.raises(ValueError, match="coefficients must hold at least 2 numbers"):
        small(coefficients=torch.zeros(1))
