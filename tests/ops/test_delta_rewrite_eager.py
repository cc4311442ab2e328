"""The delta rewrite in plain torch against the literal loops, its echo, and its slots."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from fastweights import ops, reference
from helpers import contracts, inputs, oracle
from helpers.delta_rewrite import MEMORY, WRITTEN, Case

CPU = torch.device("cpu")
WIDE = torch.float64
OP, IN_PLACE = ops.delta_rewrite, ops.delta_rewrite_
LITERAL = reference.delta_rewrite
MODES = ("parallel", "sequential")


def gaps(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Greatest differences, relative to the greatest number of each tensor."""
    assert list(got) == list(wanted)
    found = {}
    for name, x in wanted.items():
        assert got[name].shape == x.shape, name
        assert got[name].dtype == x.dtype, name
        if x.numel():
            size = x.abs().max().clamp(min=1e-300)
            found[name] = float((got[name] - x).abs().max() / size)
    return found


def assert_near(got: Any, wanted: Any, most: float = 1e-13) -> None:
    found = gaps(got, wanted)
    assert all(gap <= most for gap in found.values()), found


def both(given: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results and gradients, ours and the literal ones."""
    return contracts.forward_backward(OP, given), contracts.forward_backward(LITERAL, given)


# ---- against the loops --------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channels"])
@pytest.mark.parametrize("mode", MODES)
def test_every_combination_of_rules(mode: str, channels: bool) -> None:
    """Results and all gradients, in rows that are first and others; two equal keys among them."""
    flags = itertools.product((False, True), repeat=4)
    for first, correction, normalize, denominator in flags:
        for gamma_grad in ("stop", "full"):
            case = Case(
                batch=3, mode=mode, channels=channels, first=first, correction=correction,
                normalize=normalize, denominator=denominator, gamma_grad=gamma_grad,
                # Right after a key itself, 1 − c is 0 up to rounding: on the clip's own bound.
                repeated=mode == "parallel" or gamma_grad == "stop",
            )  # fmt: skip
            assert_near(*both(case.arguments(0, WIDE, CPU)), most=3e-14)


CASES = [
    Case(batch=0, first=True),
    Case(tokens=1),
    Case(tokens=1, reads=None, mode="sequential"),
    Case(reads=0, heads=3),
    Case(reads=None, channels=True, mode="sequential"),
    Case(order=1, heads=1, width=1, values=1),
    Case(order=5, width=2, mode="sequential", values=3),
    Case(order=4, tokens=13, first=True, batch=5, normalize=False),
    Case(tokens=40, mode="sequential", first=True, batch=5),
    Case(heads=0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_literal(case: Case) -> None:
    assert_near(*both(case.arguments(1, WIDE, CPU)))


def test_gradcheck() -> None:
    case = Case(1, 4, 3, 2, 3, 2, order=2, mode="sequential", gamma_grad="full", repeated=False)
    given = case.arguments(0, WIDE, CPU)
    names = [name for name, x in given.items() if oracle.is_floating(x)]
    leaves = [given[name].contiguous().requires_grad_() for name in names]

    def call(*tensors: torch.Tensor) -> Any:
        return OP(**given | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_written(mode: str) -> None:
    """M = 0 reads the memory as it is, zeros where a row is first."""
    given = Case(batch=5, tokens=0, first=True, mode=mode).arguments(0, WIDE, CPU)
    assert_near(*both(given))
    plain = given | {"first": None}
    for name in MEMORY:
        plain[name] = given[name].nan_to_num()
    y, state, normalizer = OP(**plain)
    assert state is plain["state"]
    assert normalizer is plain["normalizer"]
    assert y is not None
    assert y.any()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_extreme_gates(value: float) -> None:
    for mode in MODES:
        given = Case(mode=mode, first=True).arguments(0, WIDE, CPU)
        given["beta"] = torch.full_like(given["beta"], value)
        got, wanted = both(given)
        assert_near(got, wanted)
        assert all(x[1:].isfinite().all() for x in got.values())


@pytest.mark.parametrize("scale", [1e-4, 1e-30, 1e15])
def test_keys_of_any_length_in_fp32(scale: float) -> None:
    """φ does not see it if it is normalised: nothing is lost at 1e-4, as it would be at an eps."""
    given = Case(mode="sequential").arguments(0, torch.float32, CPU)
    scaled = given | {name: given[name] * scale for name in ("k", "q")}
    names = ("out0", "out1", "out2", "d v", "d beta", "d state", "d normalizer")
    got, wanted = (contracts.forward_backward(OP, x) for x in (scaled, given))
    assert max(gaps({n: got[n] for n in names}, {n: wanted[n] for n in names}).values()) < 1e-5
    assert got["d k"].isfinite().all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_keys_without_a_feature(mode: str, normalize: bool) -> None:
    """Zeros, and a single number that has no neighbour: nothing is written, no gradient is lost."""
    given = Case(mode=mode, normalize=normalize).arguments(0, WIDE, CPU)
    for name in ("k", "q"):
        given[name][:, 2] = 0
        given[name][:, 4] = 0
        given[name][:, 4, :, 0] = 2.0
    got, wanted = both(given)
    assert_near(got, wanted)
    assert all(x.isfinite().all() for x in got.values())
    assert not got["d k"][:, 2].any()
    assert not got["out0"][:, 4].any()


# ---- what the method promises -------------------------------------------------------------------


def test_base_model_at_the_start() -> None:
    """v = 0 and an empty memory: y is 0, the memory stays so, and only v learns."""
    given = Case(batch=1, first=True).arguments(0, WIDE, CPU)
    given["v"] = torch.zeros_like(given["v"])
    got = contracts.forward_backward(OP, given)
    assert not got["out0"].any()
    assert not got["out1"].any()
    learning = [name for name, x in got.items() if name.startswith("d ") and x.any()]
    # The gradient that comes back through z' reaches k even so.
    assert learning == ["d v"] or learning == ["d k", "d v"]
    y, _, _ = OP(**given)
    assert y is not None
    assert not y.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalize", [True, False])
def test_bounded_over_many_segments(mode: str, normalize: bool) -> None:
    """300 segments: the clip keeps z from below 0 and v̄ from growing."""
    source = torch.Generator().manual_seed(0)
    state, z = torch.zeros(1, 1, 192, 8), torch.zeros(1, 1, 192)
    for _ in range(300):
        k = torch.randn(1, 10, 1, 32, generator=source)
        v = torch.randn(1, 10, 1, 8, generator=source)
        gate = torch.full((1, 10, 1), 0.5)
        y, state, after = OP(k, v, gate, state, z, q=k, mode=mode, normalize=normalize)
        assert (after >= z).all()
        z = after
        assert y is not None
        assert y.abs().max() < 10
    assert state.abs().max() < 30


def test_warns_once_of_divergence() -> None:
    package = ops.delta_rewrite.__globals__
    package["_warn_of_divergence"].cache_clear()
    stable = (
        Case(tokens=16, denominator=False),
        Case(tokens=17),
        Case(tokens=17, denominator=False, mode="sequential"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in stable:
            OP(**case.arguments(0, WIDE, CPU))
    unstable = Case(tokens=17, denominator=False).arguments(0, WIDE, CPU)
    with pytest.warns(UserWarning, match="without denominators, more than 16 tokens"):
        OP(**unstable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OP(**unstable)


def test_that_setting_diverges() -> None:
    """Which is why it warns; in sequence it does not."""
    sizes = {}
    for mode in MODES:
        source = torch.Generator().manual_seed(0)
        state, z = torch.zeros(1, 1, 384, 4), torch.zeros(1, 1, 384)
        for _ in range(8):
            k = torch.randn(1, 128, 1, 64, generator=source)
            v = torch.randn(1, 128, 1, 4, generator=source)
            gate = torch.full((1, 128, 1), 0.5)
            _, state, _ = OP(k, v, gate, state, z, mode=mode, denominator=False)
        sizes[mode] = float(state.abs().max())
    assert sizes["parallel"] > 1e4
    assert sizes["sequential"] < 100


# ---- rows, pieces, steps ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_separate(mode: str) -> None:
    """Sequences of a batch, with their gradients, are those that each has alone."""
    given = Case(batch=5, mode=mode, first=True).arguments(0, WIDE, CPU)
    together = contracts.forward_backward(OP, given)
    results, _ = oracle.run(OP, given, contracts.random_upstream)
    upstream = contracts.random_upstream({n: x.requires_grad_() for n, x in results.items()})
    for row in range(5):
        alone = {
            name: x[row : row + 1] if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }

        def mine(results: Any, row: int = row) -> Any:
            return {name: upstream[name][row : row + 1] for name in results}

        results, grads = oracle.run(OP, alone, mine)
        found = {name: x[row : row + 1] for name, x in together.items()}
        assert_near(results | grads, found)


@pytest.mark.parametrize("cuts", [(1,), (3, 6), (2, 3, 9)], ids=str)
def test_pieces_in_sequence_are_the_whole(cuts: tuple[int, ...]) -> None:
    """Tokens, `first` with the first piece alone; and queries in pieces."""
    case = Case(batch=5, tokens=11, mode="sequential", first=True)
    given = case.arguments(0, WIDE, CPU)

    def pieces(**given: Any) -> Any:
        rest = {name: given[name] for name in (*case.rules, "first")}
        memory = [given[name] for name in MEMORY]
        for begin, end in itertools.pairwise((0, *cuts, 11)):
            piece = (given[name][:, begin:end] for name in WRITTEN)
            _, *memory = OP(*piece, *memory, **rest)
            rest["first"] = None
        reads = []
        for part in given["q"].split(4, 1):
            nothing = (given[name][:, :0] for name in WRITTEN)
            y, *memory = OP(*nothing, *memory, q=part, **rest)
            reads.append(y)
        return torch.cat(reads, 1), *memory

    got, wanted = (contracts.forward_backward(call, given) for call in (pieces, OP))
    assert_near(got, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_segments_in_slots_are_the_chain(mode: str) -> None:
    """Decoding is training: calls in place on a pool, each layer at another segment."""
    case, segments, layers = Case(batch=1, mode=mode, heads=3), 5, 3
    drawn = [
        [case.arguments(10 * n + s, WIDE, CPU) for s in range(segments)] for n in range(layers)
    ]
    wanted = []
    for calls in drawn:
        memory, reads = None, []
        for s, given in enumerate(calls):
            if memory is not None:
                given = given | dict(zip(MEMORY, memory, strict=True))
            y, *memory = OP(**given, first=torch.tensor([s == 0]))
            reads.append(y)
        wanted.append((reads, memory))
    slots = torch.tensor([4, 0, 6])
    pools = [torch.full((8, *x.shape[1:]), torch.nan, dtype=WIDE) for x in wanted[0][1]]
    for step in range(layers + segments - 1):
        at = [step - n for n in range(layers)]
        live = torch.tensor([0 <= s < segments for s in at])
        rows = [drawn[n][min(max(s, 0), segments - 1)] for n, s in enumerate(at)]
        given = {name: torch.cat([row[name] for row in rows]) for name in (*WRITTEN, "q")}
        for x in given.values():
            x[~live] = torch.nan
        y = IN_PLACE(
            **given, state_pool=pools[0], normalizer_pool=pools[1], mode=mode,
            slots=torch.where(live, slots, -1), first=torch.tensor(at) == 0,
        )  # fmt: skip
        assert y is not None
        assert not y[~live].any()
        for n, s in enumerate(at):
            if live[n]:
                assert_near({"y": y[n : n + 1]}, {"y": wanted[n][0][s]})
    for pool, place in zip(pools, range(2), strict=True):
        for n, slot in enumerate(slots.tolist()):
            assert_near({"x": pool[slot : slot + 1]}, {"x": wanted[n][1][place]})
        others = [slot for slot in range(8) if slot not in slots.tolist()]
        assert pool[others].isnan().all()


def test_steps_of_one_token_do_not_drift_in_fp32() -> None:
    """Tokens in bf16, memory in fp32: 192 at once, and 128 followed by 64 single ones in place.

    Each token mends what the ones before it left, so that rounding does not add up.
    """
    case = Case(batch=1, tokens=192, reads=8, width=32, values=16, mode="sequential", first=True)
    given = case.arguments(0, torch.bfloat16, CPU)
    wanted = OP(**given)
    part = {name: given[name][:, :128] for name in WRITTEN}
    _, state, normalizer = OP(**given | part)
    slot, y = torch.tensor([0]), None
    for i in range(128, 192):
        token = (given[name][:, i : i + 1] for name in WRITTEN)
        y = IN_PLACE(*token, state, normalizer, slot, q=given["q"], mode="sequential")
    assert state.dtype == normalizer.dtype == torch.float32
    for got, x in zip((y, state, normalizer), wanted, strict=True):
        assert got is not None
        assert x is not None
        rms = (got.double() - x.double()).norm() / x.double().norm()
        assert rms <= (1e-3 if got.dtype == torch.bfloat16 else 1e-5), float(rms)


# ---- echo ---------------------------------------------------------------------------------------


def chain(case: Case, segments: int, echoing: bool) -> Any:
    """A function of leaves: a loss of all reads and the last memory of that many segments."""

    def run(**given: Any) -> torch.Tensor:
        memory = [given[name] for name in MEMORY]
        extra: dict[str, Any] = {}
        if echoing:
            zero = torch.zeros((), dtype=memory[0].dtype, requires_grad=True)
            extra["echo"] = zero.expand(memory[0].shape)
        loss = memory[0].new_zeros(())
        first = given.get("first")
        for s in range(segments):
            tokens = {name: given[name].roll(s, -1) for name in (*WRITTEN, "q")}
            if not case.channels:
                tokens["beta"] = given["beta"].roll(s, 1)
            out = OP(**tokens, state=memory[0], normalizer=memory[1], first=first, **case.rules,
                     **extra)  # fmt: skip
            memory = list(out[1:3])
            first = None
            loss = loss + (out[0].square() if out[0] is not None else memory[0]).sum()
            if echoing:
                extra["echo"] = out[3]
        loss = loss + memory[0].sin().sum() + memory[1].sin().sum()
        if echoing:
            seed = (extra["echo"] * memory[0].detach()).sum()
            assert float(seed.detach()) == 0.0
            loss = loss + seed
        return loss

    return run


@pytest.mark.parametrize("first", [False, True], ids=["warm", "first"])
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channels"])
@pytest.mark.parametrize("mode", MODES)
def test_an_echo_gives_the_same_gradients(mode: str, channels: bool, first: bool) -> None:
    """20 segments in float64, and that `full` goes along."""
    case = Case(batch=3, mode=mode, channels=channels, first=first, gamma_grad="full")
    given = case.arguments(0, WIDE, CPU)
    rules = set(case.rules)
    tensors = {name: x for name, x in given.items() if name not in rules}
    one: Any = {"out": torch.ones((), dtype=WIDE)}  # the seed is not to be scaled
    got, wanted = (
        oracle.run(chain(case, 20, echoing), tensors, lambda results: one)
        for echoing in (True, False)
    )
    assert_near(got[0], wanted[0])
    assert_near(got[1], wanted[1], 1e-11)


def test_a_rebuilt_state_in_fp32() -> None:
    """32 segments back: as near as the spec measured, 4e-7 of the state."""
    case = Case(batch=1, reads=None, heads=1, width=64, values=32, tokens=10, first=True)
    given = case.arguments(0, torch.float32, CPU)
    state, z = (torch.zeros_like(given[name]) for name in MEMORY)
    zero = torch.zeros((), requires_grad=True)
    echo, source = zero.expand(state.shape), inputs.generator(3, CPU)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for s in range(32):
        k, v = (torch.randn(1, 10, 1, n, generator=source, requires_grad=True) for n in (64, 32))
        held = echo * 1.0
        held.register_hook(partial(lambda before, x: found.append((x, before)), state.detach()))
        first = torch.tensor([s == 0])
        _, state, z, echo = OP(k, v, given["beta"], state, z, first=first, echo=held)
    ((echo * state.detach()).sum() + state.sum()).backward()
    assert len(found) == 32
    for wanted, got in found:
        assert (got - wanted).abs().max() <= 1e-6 * state.abs().max()


def saved_bytes(echoing: bool, segments: int = 32) -> int:
    """Bytes that autograd keeps for a backward through that many GPT-2 segments of one layer.

    A tensor that is also an argument of the whole (tokens, gates) counts for both alike.
    """
    state, z = torch.zeros(1, 1, 384, 768), torch.zeros(1, 1, 384)
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage
        return x

    extra: dict[str, Any] = {}
    if echoing:
        extra["echo"] = torch.zeros((), requires_grad=True).expand(state.shape)
    total = torch.zeros(())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for s in range(segments):
            k, v, gate, q = (
                torch.randn(1, n, 1, *d, requires_grad=True)
                for n, *d in ((10, 64), (10, 768), (10,), (522, 64))
            )
            first = torch.tensor([s == 0])
            y, state, z, *echo = OP(k, v, gate.sigmoid(), state, z, q=q, first=first, **extra)
            if echoing:
                extra["echo"] = echo[0]
            total = total + y.sum()
        if echoing:
            total = total + (extra["echo"] * state.detach()).sum()
    kept = sum(storage.nbytes() for storage in seen.values())
    total.backward()
    return kept


def test_memory_of_32_segments() -> None:
    """A GPT-2 layer in fp32: 43.1 MB with a state a segment, 7.6 MB with an echo.

    Of the latter q is 4.3 MB, k and v 1.1, E 1.0, and the last state, which the seed of the echo
    keeps, 1.2 MB.
    """
    without, with_echo = saved_bytes(False), saved_bytes(True)
    state, z = 4 * 384 * 768, 4 * 384
    tokens = 4 * (10 * (64 + 768) + 522 * 64)
    assert 32 * (tokens + state) <= without <= 32 * (tokens + state + z + 200)
    change = 4 * 10 * 768
    assert 32 * (tokens + change) <= with_echo <= 32 * (tokens + change + z + 200) + state
    assert without / with_echo > 5


def test_an_echo_takes_no_memory() -> None:
    given = Case().arguments(0, torch.float32, CPU)
    echo = torch.zeros(()).expand(given["state"].shape)
    *_, after = OP(**given, echo=echo)
    assert after.shape == echo.shape
    assert after.untyped_storage().nbytes() == 4
    assert not after.any()


# ---- narrow types -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(width=16),
        Case(mode="sequential", tokens=20, channels=True),
        Case(normalize=False, first=True, batch=5),
        Case(denominator=False, mode="sequential", values=33),
    ],
    ids=lambda case: case.name,
)
def test_narrow_types(case: Case, dtype: torch.dtype) -> None:
    oracle.check_op(OP, LITERAL, case.arguments, dtype, CPU, label=case.name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tolerances_after_20_segments(dtype: torch.dtype, mode: str) -> None:
    """Of the spec: fp32 2e-6 and gradients 1e-5, bf16 inputs 6e-3 and 1.5e-2, by Frobenius norm."""
    case = Case(batch=1, heads=1, width=64, values=48, tokens=10, reads=20, mode=mode)
    memory = [torch.zeros(1, 1, 384, 48, dtype=WIDE), torch.zeros(1, 1, 384, dtype=WIDE)]
    for s in range(20):
        warm = case.arguments(s + 1, WIDE, CPU)
        _, *memory = OP(**warm | dict(zip(MEMORY, memory, strict=True)))
    exact = case.arguments(0, WIDE, CPU) | dict(zip(MEMORY, memory, strict=True))
    acc = torch.float32
    narrow = {
        name: x.to(acc if name in (*MEMORY, "beta") else dtype) if oracle.is_floating(x) else x
        for name, x in exact.items()
    }
    got, wanted = contracts.forward_backward(OP, narrow), contracts.forward_backward(LITERAL, exact)
    half = dtype == torch.bfloat16
    for name, x in wanted.items():
        most = (1.5e-2 if half else 1e-5) if name.startswith("d ") else (6e-3 if half else 2e-6)
        gap = (got[name].double() - x).norm() / x.norm()
        assert gap <= most, (name, float(gap))


def test_memories_stay_in_fp32() -> None:
    given = Case().arguments(0, torch.bfloat16, CPU)
    y, state, normalizer = OP(**given)
    assert (y.dtype, state.dtype, normalizer.dtype) == (torch.bfloat16, *[torch.float32] * 2)
