"""The Atlas memory in plain torch against the literal loops, and as torch sees it."""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastweights import ops, reference
from fastweights.ops import flops
from helpers import contracts, inputs, oracle
from helpers.atlas import CARRIED, TOKENS, Case

op = importlib.import_module("fastweights.ops.atlas.op")
gram = importlib.import_module("fastweights.ops.atlas.gram")
stack = importlib.import_module("fastweights.ops.atlas.stack")
CPU = torch.device("cpu")
WIDE = torch.float64
OP = ops.atlas_memory
LITERAL = reference.atlas_memory


def assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], most: float) -> None:
    """Relative to the size of each tensor."""
    assert list(got) == list(wanted)
    for name, x in wanted.items():
        assert got[name].shape == x.shape, name
        assert got[name].dtype == x.dtype, name
        gap = (got[name].double() - x.double()).norm()
        assert gap <= most * max(1.0, float(x.double().norm())), (name, gap)


def read(function: Any, **given: Any) -> torch.Tensor:
    """y alone."""
    return function(**given)[0]


# ---- against the loops --------------------------------------------------------------------------

# Square and up to four times as long as wide, and longer, either way.
LINEAR = {"width": 6, "values": 5}
WIDE_ROWS = {"width": 3, "values": 13}
TALL = {"width": 9, "values": 2}
SQUARED = {"width": 4, "symmetric": True, "degree": 2}  # 14 features
CUBED = {"width": 3, "symmetric": True, "degree": 3, "values": 4}  # 19
POWERS = {"degree": 3}
CASES = [
    Case(**LINEAR, window=1, stride=1),
    Case(**LINEAR, window=1, stride=None, carried=True),
    Case(**LINEAR, window=3, stride=2, carried=True, read_before=True),
    Case(**LINEAR, window=12, stride=4, carried=True),
    Case(**LINEAR, window=12, chunk_size=4, stride=1, inner_loss="dot", decay=False),
    Case(**LINEAR, window=3, chunk_size=1, stride=1, gates=False),
    Case(**LINEAR, chunk_size=19, stride=19),
    Case(**LINEAR, chunk_size=64, stride=16, gates=False, carried=True),
    Case(**LINEAR, chunk_size=64, stride=64),
    Case(**WIDE_ROWS, window=3, stride=1, carried=True),
    Case(**WIDE_ROWS, window=1, stride=None, read_before=True, inner_loss="dot"),
    Case(**TALL, window=4, stride=2, carried=True),
    Case(**TALL, window=1, stride=8, decay=False),
    Case(**SQUARED, values=5, window=3, stride=2, carried=True),
    Case(**SQUARED, values=3, window=1, stride=1),
    Case(**SQUARED, values=3, window=3, stride=None, inner_loss="dot", carried=True),
    Case(**SQUARED, values=17, window=12, stride=4, read_before=True),
    Case(**CUBED, window=3, stride=4, carried=True),
    Case(**CUBED, window=1, chunk_size=6, stride=3),
    Case(**POWERS, window=3, stride=2, carried=True),
    Case(**POWERS, window=1, stride=None, inner_loss="dot"),
    Case(packed=(0, 7, 7, 16), stride=2, carried=True),
    Case(**SQUARED, packed=(0, 4, 19), values=3, stride=4, window=5),
    Case(packed=(0, 19), stride=None),
    Case(stride=2, ns_steps=6, ns_coefficients="polar_express"),
    Case(stride=2, ns_steps=3, ns_coefficients=[(3.0, -3.2, 1.2), (1.5, -0.5, 0.0)]),
    Case(**SQUARED, values=3, stride=2, ns_coefficients="modded_nanogpt"),
    Case(tokens=0, carried=True),
    Case(tokens=3, stride=None, carried=True),
    Case(tokens=1, stride=1),
    Case(batch=0),
    Case(width=1, values=1, stride=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_literal(case: Case) -> None:
    """y, the state, and the gradient of every tensor from all of them."""
    given = case.arguments(0, WIDE, CPU) | {"return_state": True}
    got = contracts.forward_backward(OP, given)
    assert_near(got, contracts.forward_backward(LITERAL, given), 1e-11)


@pytest.mark.parametrize("value", [0.0, 1 - 1e-7, 1.0])
@pytest.mark.parametrize("gate", ["decay", "momentum", "output_step", "window_gates"])
def test_extreme_gates(gate: str, value: float) -> None:
    """Nothing is divided by a gate, and a gate of 0 has a gradient."""
    given = Case(tokens=21, carried=True).arguments(1, WIDE, CPU)
    given[gate] = torch.full_like(given[gate], value)
    given[gate][:, ::3] *= 0.5
    got = contracts.forward_backward(partial(read, OP), given)
    assert_near(got, contracts.forward_backward(partial(read, LITERAL), given), 1e-11)
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 5, 1, 3, 2, 2, 2, stride=1, carried=True),
        Case(1, 4, 1, 1, 4, 2, 2, stride=2, carried=True),
        Case(1, 4, 1, 2, 1, 2, 4, stride=2, degree=2, symmetric=True, carried=True),
    ],
    ids=lambda case: case.name,
)
def test_gradcheck(case: Case) -> None:
    given = case.arguments(0, WIDE, CPU)
    names = [name for name, x in given.items() if oracle.is_floating(x)]
    leaves = [given[name].contiguous().requires_grad_() for name in names]
    if case.symmetric:  # the first coefficient must stay 0
        at = names.index("coefficients")
        leaves[at] = given["coefficients"][:, 1:].contiguous().requires_grad_()

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = dict(zip(names, tensors, strict=True))
        if case.symmetric:
            changed["coefficients"] = torch.nn.functional.pad(changed["coefficients"], (1, 0))
        results = oracle.named(OP(**given | changed, return_state=True))
        return tuple(x for x in results.values() if oracle.is_floating(x))

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("numbers", [1, 200])
def test_stacks_in_parts(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix at a time, and three of each chunk's eight."""
    case = Case(**SQUARED, values=4, stride=1, carried=True)
    given = case.arguments(0, WIDE, CPU) | {"return_state": True}
    whole = contracts.forward_backward(OP, given)
    monkeypatch.setattr(stack, "NUMBERS", numbers * 2 * 2 * 14 * 4 // 64)
    assert_near(contracts.forward_backward(OP, given), whole, 1e-12)


def a_chunk(
    rows: int, columns: int, velocity: float
) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """The shape of a call, a chunk of nine tokens of which three meet Newton–Schulz, gradients."""
    case = Case(tokens=9, width=rows, values=columns, stride=3, chunk_size=9)
    given = case.arguments(0, WIDE, CPU)
    tensors = [given.get(name) for name in op.OmegaTensors._fields]
    rules = {name: given[name] for name in ("window", "chunk_size", "inner_loss", "read_before")}
    shape = op.atlas_shape(
        "test", op.AtlasTensors(op.OmegaTensors(*tensors), given["output_step"]),
        feature_map="identity", ns_stride=3, ns_steps=5, ns_coefficients="muon", ns_eps=1e-7,
        **rules,
    )  # fmt: skip
    source = inputs.generator(1, CPU)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(2, 2, *size, generator=source, dtype=WIDE)

    met = stack.Met(
        q=normal(9, rows), k=normal(11, rows), error=normal(11, columns),
        velocity=velocity * normal(rows, columns), push=normal(3, 11), drop=normal(3),
        seen=normal(9, 3), last=normal(3),
    )  # fmt: skip
    return shape, met, normal(9, columns), normal(rows, columns)


@pytest.mark.parametrize("velocity", [0.0, 1.0, 100.0])
def test_momenta_by_their_products(velocity: float) -> None:
    """Formed in one way and not in the other, by which narrower types go."""
    shape, met, d_read, d_state = a_chunk(30, 4, velocity)
    formed = (
        stack.fwd(shape, met, torch.matmul),
        stack.bwd(shape, met, d_read, d_state, torch.matmul),
    )
    not_formed = gram.fwd(shape, met), gram.bwd(shape, met, d_read, d_state)
    assert_near(oracle.named(not_formed), oracle.named(formed), 1e-11)


@pytest.mark.parametrize("size", [(24, 5), (5, 24)], ids=str)
def test_long_stacks_by_their_gram_matrix(size: tuple[int, int]) -> None:
    """In fp32, where a long side is what makes the way; nearer to float64 than its rounding."""
    shape = a_chunk(*size, 1.0)[0]
    s = torch.randn(1, 2, 3, *size)
    s[0, 0, 0] = 0
    d = torch.randn(s.shape)
    found = stack.orthogonal(shape, s), stack.orthogonal_backward(shape, d, s)
    exact = (
        stack.orthogonal(shape, s.double()),
        stack.orthogonal_backward(shape, d.double(), s.double()),
    )
    for x, wanted in zip(found, exact, strict=True):
        assert x.dtype == torch.float32
        assert (x - wanted).norm() < 1e-7 * wanted.norm()
        assert not x[0, 0, 0].any()


# ---- what the rule says -------------------------------------------------------------------------


def test_a_stride_is_a_step_of_zero_elsewhere() -> None:
    given = Case(stride=4, carried=True).arguments(0, WIDE, CPU) | {"return_state": True}
    masked = given["output_step"].clone()
    masked[:, torch.arange(19) % 4 != 3] = 0
    every = oracle.named(OP(**given | {"ns_stride": 1, "output_step": masked}))
    assert_near(oracle.named(OP(**given)), every, 1e-12)


def test_the_stride_is_a_chunk_unless_said() -> None:
    given = Case(stride=None).arguments(0, WIDE, CPU)
    assert torch.equal(OP(**given)[0], OP(**given | {"ns_stride": 8})[0])
    assert not torch.equal(OP(**given)[0], OP(**given | {"ns_stride": 4})[0])


def test_tokens_behind_the_last_stride_leave_the_momentum_alone() -> None:
    """They decay the memory, and S has them; one token more and it is written."""
    case = Case(tokens=11, stride=4, window=1, carried=True)
    given = case.arguments(0, WIDE, CPU) | {"return_state": True}
    short = {name: x[:, :8] for name, x in given.items() if name in TOKENS}
    _, before = OP(**given | short)
    _, left = OP(**given)
    decayed = given["decay"][:, 8:].prod(1)[..., None, None] * before.state
    torch.testing.assert_close(left.state, decayed, rtol=1e-13, atol=1e-13)
    assert (left.momentum - before.momentum).norm() > 0.1 * before.momentum.norm()
    # An output_step that no token reads: anything may stand there.
    given["output_step"] = given["output_step"].clone()
    given["output_step"][:, torch.arange(11) % 4 != 3] = float("nan")
    _, again = OP(**given)
    assert torch.equal(left.state, again.state)


@pytest.mark.parametrize("stride", [1, 2, None])
def test_no_token_sees_a_later_one(stride: int | None) -> None:
    given = Case(stride=stride).arguments(0, WIDE, CPU)
    whole = OP(**given)[0]
    for end in (1, 7, 8, 12, 18):
        cut = {name: given[name][:, :end] for name in TOKENS if name in given}
        torch.testing.assert_close(OP(**given | cut)[0], whole[:, :end], rtol=1e-12, atol=1e-12)


def test_the_size_of_the_step_does_not_matter() -> None:
    """Weights of tokens against each other do; S of the next chunk begins with them."""
    given = Case(stride=2).arguments(0, WIDE, CPU)
    longer = given | {"step": 1000 * given["step"]}
    torch.testing.assert_close(OP(**longer)[0], OP(**given)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [LINEAR, WIDE_ROWS, SQUARED | {"values": 3}], ids=str)
def test_a_momentum_of_zeros(sizes: dict[str, Any]) -> None:
    """Writes zeros, and has the gradient 0 instead of 1/eps."""
    given = Case(**sizes, stride=2).arguments(0, WIDE, CPU)

    def call(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, left = OP(**given, return_state=True)
        return y, left.state

    given["step"] = given["step"].clone()
    given["step"][:, :9] = 0  # the first chunk and a token of the next
    assert_near(
        *(contracts.forward_backward(partial(read, f), given) for f in (OP, LITERAL)), 1e-11
    )
    got = contracts.forward_backward(call, given)
    assert not got["out0"][:, :9].any()
    assert got["out0"][:, 9:].all()
    assert all(x.isfinite().all() for x in got.values())
    given["step"] = torch.zeros_like(given["step"])
    assert not any(x.any() for x in contracts.forward_backward(call, given).values())


def test_singular_values_of_a_write_are_near_one() -> None:
    """S is of full rank, and M nothing else."""
    case = Case(tokens=8, width=6, values=6, window=1, stride=None, inner_loss="dot")
    given = case.arguments(0, WIDE, CPU) | {"ns_coefficients": "modded_nanogpt"}
    given |= {name: torch.ones_like(given[name]) for name in ("momentum", "output_step")}
    for name in "kv":  # eight tokens of eight directions, of which six are seen
        given[name] = torch.linalg.qr(torch.randn(2, 2, 8, 8, dtype=WIDE))[0][..., :6].transpose(
            1, 2
        )
    given["v"] = given["k"]
    _, left = OP(**given, return_state=True)
    values = torch.linalg.svdvals(left.state)
    assert values.min() > 0.9
    assert values.max() < 1.1


# ---- sequences and pieces -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [Case(stride=2, window=5), Case(**SQUARED, values=3, stride=None), Case(**POWERS, stride=1)],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("size", [8, 16, 24])
def test_pieces_are_the_whole(size: int, case: Case) -> None:
    """Pieces of whole chunks; a call hands state, momentum and tail to the next."""
    case = case.but(tokens=45, carried=True)
    given = case.arguments(0, WIDE, CPU) | {"return_state": True}
    whole = oracle.named(OP(**given))
    carried: dict[str, Any] = {}
    reads = []
    for begin in range(0, 45, size):
        piece = {name: given[name][:, begin : begin + size] for name in TOKENS if name in given}
        y, left = OP(**given | piece | carried)
        reads.append(y)
        found = (left.state, left.momentum, left.tail_k, left.tail_v, left.tail_length)
        carried = dict(zip(CARRIED, found, strict=True))
    assert_near(oracle.named((torch.cat(reads, 1), left)), whole, 1e-12)


def test_packed_sequences_are_separate_ones() -> None:
    """Chunks and strides begin anew in each; gradients, too."""
    case = Case(stride=2)
    given = case.arguments(0, WIDE, CPU)
    given = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in given.items()}

    def near(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=name)

    tokens = [name for name in TOKENS if name in given]
    contracts.check_packed(partial(read, OP), given, tokens, (7, 0, 9), near)


def test_the_state_of_packed_sequences() -> None:
    case = Case(packed=(0, 7, 7, 16), stride=2, carried=True)
    given = case.arguments(0, WIDE, CPU)
    _, left = OP(**given, return_state=True)
    for n, (begin, end) in enumerate(((0, 7), (7, 7), (7, 16))):
        alone = {name: given[name][:, begin:end] for name in TOKENS}
        alone |= {name: given[name][n : n + 1] for name in CARRIED}
        rules = {name: x for name, x in given.items() if name not in (*TOKENS, *CARRIED)}
        del rules["cu_seqlens"]
        _, wanted = OP(**alone, **rules, return_state=True)
        got = {name: x[n : n + 1] for name, x in oracle.named(left).items()}
        assert_near(got, oracle.named(wanted), 1e-13)


# ---- narrow types -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        Case(carried=True), Case(stride=1, window=1), Case(**WIDE_ROWS, carried=True),
        Case(**SQUARED, values=3, carried=True), Case(**TALL, stride=None),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_narrow_types(case: Case, dtype: torch.dtype) -> None:
    """Not farther from float64 than plain torch in the same dtype, by the mean of many seeds.

    Of a momentum of few tokens Newton–Schulz blows up what is rounding; errors have long tails.
    """
    gaps: dict[str, list[float]] = {}
    for seed in range(8):
        given = case.arguments(seed, dtype, CPU)
        exact = {name: x.double() if oracle.is_floating(x) else x for name, x in given.items()}
        truth = contracts.forward_backward(partial(read, LITERAL), exact, seed)
        plain = contracts.forward_backward(partial(read, LITERAL), given, seed)
        got = contracts.forward_backward(partial(read, OP), given, seed)
        for name, x in truth.items():
            assert got[name].dtype == plain[name].dtype, name
            ours, theirs = ((found[name].double() - x).norm() for found in (got, plain))
            gaps.setdefault(name, []).append(float((ours / theirs).log()))
    ratios = {name: math.exp(sum(logs) / len(logs)) for name, logs in gaps.items()}
    print(ratios)
    assert max(ratios.values()) < 1.5, ratios


# ---- as torch sees it ---------------------------------------------------------------------------

CALLS = [
    Case(carried=True),
    Case(gates=False, decay=False, packed=(0, 9, 19), stride=None),
    Case(**SQUARED, values=3, stride=2),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_contracts(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    call = partial(read, OP)
    contracts.check_backward_twice(call, given)
    contracts.check_grad_out_untouched(call, given)
    contracts.check_expanded_grad_out(call, given)
    contracts.check_repeatable(lambda: tuple(contracts.forward_backward(call, given).values()), 2)


@pytest.mark.parametrize("case", [CALLS[0], CALLS[2]], ids=lambda case: case.name)
def test_fullgraph(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU) | {"return_state": True}

    def call(**given: Any) -> tuple[torch.Tensor, ...]:
        y, left = OP(**given)
        return y, left.state, left.momentum, left.tail_k, left.tail_v

    contracts.check_fullgraph(call, given)


@pytest.mark.parametrize("sizes", [LINEAR, SQUARED | {"values": 5}], ids=str)
def test_export_for_any_number_of_tokens(sizes: dict[str, Any]) -> None:
    """Rows of v are 20 bytes long: whether they are aligned must not hang on the length."""
    case = Case(**sizes, stride=4)

    class Memory(torch.nn.Module):
        def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
            map_ = "symmetric" if case.symmetric else "identity"
            return OP(**given, window=3, feature_map=map_, chunk_size=8, ns_stride=4)[0]

    def tensors(tokens: int) -> dict[str, torch.Tensor]:
        given = case.but(tokens=tokens).arguments(0, torch.float32, CPU)
        return {name: given[name].contiguous() for name in TOKENS}

    length = {1: torch.export.Dim("tokens")}
    program = torch.export.export(
        Memory(), (tensors(40),), dynamic_shapes=(dict.fromkeys(TOKENS, length),)
    )
    for tokens in (40, 19, 64):
        given = tensors(tokens)
        assert torch.equal(program.module()(given), Memory()(given))


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    given = case.arguments(0, torch.float32, CPU)
    given["v"] = given["v"].transpose(1, 2).contiguous().transpose(1, 2)  # dense, other strides
    names = (*op.OmegaTensors._fields, "output_step")
    tensors = [given.get(name) for name in names]
    numbers = [3.4445, -4.7750, 2.0315] * 2
    rules = (case.window, case.chunk_size, case.inner_loss, given.get("feature_map", "identity"),
             case.read_before, case.stride or case.chunk_size, numbers, 1e-7, "eager")  # fmt: skip
    leaves = [
        x.detach().requires_grad_() if x is not None and oracle.is_floating(x) else x
        for x in tensors
    ]
    contracts.check_opcheck(op.MEMORY_FWD, [(*leaves, *rules)])
    y, state, momentum = op.MEMORY_FWD(*tensors, *rules)
    contracts.check_opcheck(op.MEMORY_BWD, [(y, state, momentum, *tensors, *rules)])


def test_only_the_arguments_are_saved() -> None:
    """And the backward needs no recording of what the forward did."""
    given = Case(stride=1).arguments(0, torch.float32, CPU)
    leaves = contracts.leaves(given)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = OP(**leaves)[0]
    own = {x.data_ptr() for x in leaves.values() if isinstance(x, torch.Tensor)}
    assert len(saved) == len(own)
    assert {x.data_ptr() for x in saved} == own
    (d,) = torch.autograd.grad(y.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="atlas_memory_bwd has no double backward"):
        d.sum().backward()


def test_flops() -> None:
    """Two chunks of 8 and one of 3; strides of 4: two of each of the first, none of the last."""
    given = Case().arguments(0, torch.float32, CPU)
    with FakeTensorMode():
        fake = {
            name: torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }
        leaves = contracts.leaves(fake)
        with FlopCounterMode(display=False) as counter:
            OP(**leaves)[0].sum().backward()
    products = 0
    for b, written, count in ((8, 8 + 2 * 2, 2), (3, 3 + 2, 1)):
        products += count * 2 * (b + (b + 2) + written) * 6 * 5
    direct = flops.newton_schulz_forward(5, 6, 5)
    assert flops.atlas_forward(19, 8, 3, 6, 5, stride=4, steps=5) == products + 4 * direct
    back = flops.newton_schulz_backward(5, 6, 5)
    assert flops.atlas_backward(19, 8, 3, 6, 5, stride=4, steps=5) == 3 * products + 4 * back
    assert counter.get_total_flops() == 4 * (4 * products + 4 * (direct + back))
    long = flops.atlas_forward(8, 8, 1, 2144, 64, stride=8, steps=5) - 2 * 24 * 2144 * 64
    assert long == 4 * 64 * 64 * 2144 + flops.gram_factor_forward(64, 5)


def test_autocast_casts_queries_keys_and_values_alone() -> None:
    given = Case(window=1).arguments(0, torch.float32, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        y, left = OP(**given, return_state=True)
    assert y.dtype == torch.bfloat16
    assert left.state.dtype == left.momentum.dtype == torch.float32


def test_views_give_equal_bits() -> None:
    given = Case().arguments(0, torch.float32, CPU)
    want = OP(**given)[0]
    for name in ("q", "k", "v", "step", "output_step", "window_gates"):
        for view in (inputs.spaced, partial(inputs.embed, pad=1, offset=1)):
            got = OP(**given | {name: view(given[name].contiguous())})[0]
            assert torch.equal(got, want), name


REFUSED = [
    ({"momentum": lambda x: None}, TypeError, "momentum must be a torch.Tensor, got NoneType"),
    ({"momentum": lambda x: x.half()}, TypeError, "momentum has dtype float16"),
    ({"output_step": lambda x: None}, TypeError, "output_step must be a torch.Tensor"),
    ({"output_step": lambda x: x.bfloat16()}, TypeError, "output_step has dtype bfloat16"),
    ({"output_step": lambda x: x[:, :-1]}, ValueError, "output_step has size 18 in dimension 1"),
    ({"ns_stride": lambda x: 3}, ValueError, "ns_stride must divide chunk_size, which is 8, got 3"),
    ({"ns_stride": lambda x: 16}, ValueError, "ns_stride must divide chunk_size, which is 8"),
    ({"ns_stride": lambda x: 0}, ValueError, "ns_stride must be at least 1, got 0"),
    ({"ns_stride": lambda x: 2.0}, TypeError, "ns_stride must be an int, got float"),
    ({"ns_steps": lambda x: 0}, ValueError, "ns_steps must be at least 1, got 0"),
    ({"ns_steps": lambda x: "5"}, TypeError, "ns_steps must be an int, got str"),
    ({"ns_eps": lambda x: 0.0}, ValueError, "ns_eps must be a finite number above 0, got 0.0"),
    ({"ns_coefficients": lambda x: "adam"}, ValueError, "ns_coefficients must be one of muon"),
    (
        {"ns_coefficients": lambda x: [(1.0, 0.0, 0.0)] * 6},
        ValueError, "ns_coefficients holds 6 triples, ns_steps is 5",
    ),
    ({"ns_coefficients": lambda x: [(1.0, 0.0)]}, ValueError, "ns_coefficients must be a name or"),
    ({"step": lambda x: x.bfloat16()}, TypeError, "atlas_memory: step has dtype bfloat16"),
    ({"initial_momentum": lambda x: x[:1]}, ValueError, "initial_momentum has size 1"),
    ({"feature_map": lambda x: "cubic"}, ValueError, "feature_map must be one of identity"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_errors_name_the_argument(changes: Any, error: type[Exception], words: str) -> None:
    given = Case(carried=True).arguments(0, torch.float32, CPU)
    changed = {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises(error, match=words):
        OP(**given | changed)


def test_explain_and_backends() -> None:
    given = Case(carried=True).arguments(0, torch.float32, CPU)
    said = ops.explain(OP, **given)
    assert said.backend == "eager"
    assert set(said.refused) == {"cuda", "triton"}
    with pytest.raises(ValueError, match="ns_stride must divide"):
        ops.explain(OP, **given | {"ns_stride": 5})
    for backend in ("triton", "cuda"):
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot run this call"):
            OP(**given, backend=backend)
