"""Polar attention's Triton kernels under the interpreter, on the CPU, in fp32 and fp16.

Compiled kernels are tested in `test_polar_gpu.py`. Tiles here are small, so that a hundred tokens
already make several: whole ones, ragged ones, masked ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastweights import ops
from fastweights.autotune import Config, Device, Space, use_config
from fastweights.ops import checks
from fastweights.ops.polar_attention import triton as backend
from helpers import contracts, inputs, oracle, polar
from helpers.polar import RULES, SOFTMAX_RULES, Case

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="compiled kernels run instead, see test_polar_gpu.py"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SEEDS = (0, 1, 2)


def fitting(space: Space, case: Case, dtype: torch.dtype) -> list[Config]:
    """Configs for this call, one for each set of tiles: warps and stages mean nothing here."""
    shape = case.shape(dtype, CPU)
    found = {c.tiles: c for c in reversed(space.fitting(space.bucket(shape), Device.of(CPU)))}
    return list(found.values())


def handy(space: Space, case: Case, dtype: torch.dtype, **flags: int) -> Config:
    """The config with these flags whose tiles are nearest to 32 × 32; smaller ones take longer."""
    configs = [
        config
        for config in fitting(space, case, dtype)
        if all(config[name] == value for name, value in flags.items())
    ]
    return min(configs, key=lambda c: (abs(c["BLOCK_M"] * c["BLOCK_N"] - 32**2), c.name))


def forms(dtype: torch.dtype) -> list[int]:
    """The values of SINGLE that exist for a dtype."""
    space = fitting(backend.SPACE_BWD, Case(null_value=False), dtype)
    return sorted({config["SINGLE"] for config in space})


@contextlib.contextmanager
def small_tiles(case: Case, dtype: torch.dtype, single: int) -> Iterator[None]:
    """Forward and one form of backward with tiles of about 32 × 32."""
    forward = handy(backend.SPACE_FWD, case, dtype)
    backward = handy(backend.SPACE_BWD, case, dtype, SINGLE=single)
    with use_config(backend.SPACE_FWD, forward), use_config(backend.SPACE_BWD, backward):
        yield


def check(case: Case, dtype: torch.dtype, single: int) -> None:
    case = case.for_form(single)
    with small_tiles(case, dtype, single):
        oracle.check_op(
            case.on_triton, case.reference, case.arguments, dtype, CPU,
            seeds=SEEDS, label=case.name,
        )  # fmt: skip


# ---- against float64 ----------------------------------------------------------------------------

ALL_RULES = (*RULES, *SOFTMAX_RULES)


def _rules() -> list[Any]:
    """Each rule in each dtype that can measure it, the form of backward in turn.

    So each rule meets both forms, and with them calls with and without a null value.
    """
    found = []
    for index, case in enumerate(ALL_RULES):
        for turn, (name, dtype) in enumerate(DTYPES.items()):
            if case.measurable(dtype):
                able = forms(dtype)
                single = able[(index + turn) % len(able)]
                found.append(pytest.param(case, name, single, id=f"{case.name}-{name}"))
    return found


def test_both_forms_are_here() -> None:
    assert all(0 in forms(dtype) for dtype in DTYPES.values())
    assert 1 in forms(torch.float16)


@pytest.mark.parametrize(("case", "dtype", "single"), _rules())
def test_rules(case: Case, dtype: str, single: int) -> None:
    check(case, DTYPES[dtype], single)


@pytest.mark.parametrize(
    ("null_base", "dtype"), [(6.0, "fp32"), (6.0, "fp16"), (10.0, "fp32"), (-20.0, "fp16")]
)
def test_null_value_that_wins_or_loses(null_base: float, dtype: str) -> None:
    """Parameter gradients too, though all of them are as small as the loser's mass."""
    check(Case(tq=65, hq=4, hk=2, null_base=null_base), DTYPES[dtype], single=0)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(layout: str, dtype: str) -> None:
    """ "fused" and "transposed" go through descriptors, "misaligned" and "odd_stride" do not."""
    for single in forms(DTYPES[dtype]):
        check(Case(tq=65, d=40, layout=layout), DTYPES[dtype], single)


@pytest.mark.parametrize("layout", ["fused", "misaligned"])
@pytest.mark.parametrize("d", [16, 20, 32, 40, 64, 96])
def test_head_widths(d: int, layout: str) -> None:
    dtype = torch.float32 if d % 32 else torch.float16
    able = forms(dtype)
    check(Case(tq=65, d=d, layout=layout), dtype, able[0] if layout == "fused" else able[-1])


@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 127])
@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_lengths(tokens: int, polar_mode: bool) -> None:
    dtype = torch.float16 if polar_mode == (tokens % 2 == 0) else torch.float32
    for single in forms(dtype):
        check(Case(tq=tokens, hq=1, polar=polar_mode), dtype, single)


TILES = Case(tq=127, tk=129, hq=2, window=70)


def _tile_sets() -> list[Any]:
    """Every set of tiles of both spaces; `single` ones on the call without a null value."""
    return [
        pytest.param(
            case, space, config, dtype,
            id=f"{space.pass_}-{dtype}-{config.name}",
        )
        for dtype in DTYPES
        for single, case in enumerate((TILES, TILES.for_form(single=1)))
        for space in (backend.SPACE_FWD, backend.SPACE_BWD)
        for config in fitting(space, case, DTYPES[dtype])
        if config.get("SINGLE") == single
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "space", "config", "dtype"), _tile_sets())
def test_every_set_of_tiles(case: Case, space: Space, config: Config, dtype: str) -> None:
    other = backend.SPACE_BWD if space is backend.SPACE_FWD else backend.SPACE_FWD
    with (
        use_config(other, handy(other, case, DTYPES[dtype])),
        use_config(space, config),
    ):
        oracle.check_op(
            case.on_triton, case.reference, case.arguments, DTYPES[dtype], CPU,
            seeds=SEEDS, grads=space is backend.SPACE_BWD, label=config.name,
        )  # fmt: skip


def test_single_form_refuses_a_null_value() -> None:
    """It would lose the null's gradient where the null wins; it is never replaced in silence."""
    case = Case(tq=20)
    config = handy(backend.SPACE_BWD, case.for_form(single=1), torch.float16, SINGLE=1)
    arguments = case.arguments(0, torch.float16, CPU)
    with (
        use_config(backend.SPACE_BWD, config),
        pytest.raises(ValueError, match=r"polar_attention/bwd cannot run here: .*row sums"),
    ):
        contracts.forward_backward(case.on_triton, arguments)


def test_bucket_tells_rules_apart_but_not_lengths() -> None:
    """A new length is no new key; what changes the choice of a config is one."""
    base = Case(tq=100, d=64)

    def key(case: Case, dtype: torch.dtype = torch.float32) -> Any:
        return backend.bucket(case.shape(dtype, CPU))

    same = (base.but(tq=99), base.but(batch=3, hq=8, hk=4), base.but(d=36), base.but(window=100))
    assert {key(case) for case in same} == {key(base)}
    assert key(base.but(window=99, tq=101)) == key(base.but(window=7))
    rules = (base.but(d=68), base.but(window=99), base.for_form(single=1), base.but(polar=False))
    other = [key(case) for case in rules] + [key(base, torch.float16)]
    with contracts.deterministic():
        other.append(key(base))
    assert len({key(base), *other}) == 1 + len(other)
    # Long buffers of short sequences go with what they are said to hold.
    packed = base.but(tq=6000, packed=(1000, 5000)).shape(torch.float32, CPU)
    assert not backend.bucket(packed).short
    assert backend.bucket(dataclasses.replace(packed, max_seqlen=1000)).short
    longer_k = dataclasses.replace(packed, max_seqlen=1000, max_seqlen_k=5000)
    assert not backend.bucket(longer_k).short


def test_rows_of_one_key_among_rows_of_none() -> None:
    """Both stand in one tile: the last row, of one key, has the gradients it has alone."""
    case = Case(
        tq=9, tk=1, hq=4, hk=2, null_base=-2.0
    )  # else the null wins, and it is another rule
    arguments = contracts.leaves(case.arguments(0, torch.float16, torch.device("cpu")))
    upstream = (torch.randn(1, 9, 4, 32).half(), torch.randn(1, 9, 4).half())
    wanted = [arguments[name] for name in "qkv"]
    results = case.on_triton(**arguments)[:2]
    whole = torch.autograd.grad(results, wanted, upstream, retain_graph=True)
    last = case.on_triton(**arguments | {"q": arguments["q"][:, -1:]})[:2]
    alone = torch.autograd.grad(last, wanted, [x[:, -1:] for x in upstream])
    for name, a, b in zip(("dq", "dk"), whole, alone, strict=False):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("null_base", [-2.0, 2.0, 6.0])
def test_row_of_one_key_keeps_a_small_gradient(null_base: float) -> None:
    """Where Gs·v cancels to a fiftieth, the roundings of c and Gs do not show in dq."""
    case = Case(tq=1, hq=1, hk=1, null_base=null_base, layout="contiguous")
    arguments = contracts.leaves(case.arguments(0, torch.float16, CPU))
    exact = {name: x.detach().double().requires_grad_() for name, x in arguments.items()}
    upstream = 64 * inputs.normal((1, 1, 1, 32), inputs.generator(1, CPU), torch.float64)
    upstream.requires_grad_()
    direction = case.reference(**exact)[0]
    (dq,) = torch.autograd.grad(direction, exact["q"], upstream, create_graph=True)
    score = (dq * exact["k"]).sum()  # up to a factor the score's gradient, linear in upstream
    (weights,) = torch.autograd.grad(score, upstream)
    upstream = upstream.detach()
    upstream -= 0.98 * weights * (upstream * weights).sum() / weights.square().sum()
    upstream = upstream.half()
    direction = case.reference(**exact)[0]
    (truth,) = torch.autograd.grad(direction, exact["q"], upstream.double())
    (got,) = torch.autograd.grad(case.on_triton(**arguments)[0], arguments["q"], upstream)
    error = float((got.double() - truth).norm() / truth.norm())
    assert error < 1e-3, f"{error:.1e}"


def test_rows_with_t_zero() -> None:
    """Each key then weighs the same."""
    tokens = torch.arange(2.0, 99.0)
    gain = -1 / tokens.log()
    n = int(tokens[1 + gain * tokens.log() == 0][0])
    case = Case(tq=1, tk=n)
    arguments = case.arguments(0, torch.float32, CPU)
    arguments["length_gain"] = torch.full((2,), float(gain[n - 2]))
    with small_tiles(case, torch.float32, single=0):
        got = contracts.forward_backward(case.on_triton, arguments)
    expected = contracts.forward_backward(case.reference, arguments)
    assert not got["d q"].any()
    for name in ("out0", "out1", "d k", "d v", "d null_value", "d null_base", "d null_slope"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_strided_last_dimension_is_not_aligned() -> None:
    """It is copied, and a copy 100 wide strides by 200 bytes: no wide loads, no descriptors."""
    every_other = torch.zeros(1, 16, 2, 200, dtype=torch.float16)[..., ::2]
    assert not checks.aligned(every_other)
    assert not checks.aligned(every_other.contiguous())
    assert checks.aligned(torch.zeros(1, 16, 2, 104, dtype=torch.float16))


def test_empty_calls_stay_with_kernels_that_need_no_descriptors() -> None:
    hopper = Device("sm_90", shared_bytes=232448)
    for case, expected in ((Case(tq=64, d=128), 1), (Case(tq=0, tk=64, d=128), 0)):
        key = backend.SPACE_FWD.bucket(case.shape(torch.float16, torch.device("cpu")))
        assert backend.SPACE_FWD.default(key, hopper).get("HOPPER") == expected


def test_bf16_is_refused_with_a_reason() -> None:
    """The interpreter computes bf16 on bit patterns: a result would be silently wrong."""
    arguments = Case(tq=9).arguments(0, torch.bfloat16, CPU)
    with pytest.raises(
        ValueError, match=r"backend='triton' cannot run this call: .*(bf16|bfloat16)"
    ):
        ops.polar_attention(**arguments, backend="triton")
    said = ops.explain(ops.polar_attention, **arguments, backend="triton")
    assert said.backend is None


# ---- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [0, 1], ids=["split", "single"])
@pytest.mark.parametrize(
    "case",
    [
        Case(tq=33, hq=4, hk=2),
        Case(tq=40, tk=70, window=33),
        Case(tq=80, packed=(17, 0, 40), n_keys="row"),
        Case(tq=65, null_base=6.0),
    ],
    ids=lambda case: case.name,
)
def test_row_identity(case: Case, single: int) -> None:
    case = case.for_form(single)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        if single not in forms(dtype):
            continue
        with small_tiles(case, dtype, single):
            polar.check_row_identity(case, dtype, CPU, tolerance, backend="triton")


@pytest.mark.parametrize("single", [0, 1], ids=["split", "single"])
@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_packed_equals_separate(polar_mode: bool, single: int) -> None:
    """Bit for bit, but for sums over tiles of several sequences or by atomics."""
    case = Case(tq=80, polar=polar_mode).for_form(single)
    lengths = (1, 0, 37, 32)
    dtype = torch.float16 if single else torch.float32
    arguments = case.arguments(0, dtype, CPU)
    for name in ("q", "k", "v"):
        arguments[name].data[:, sum(lengths) :] = float("nan")

    def compare(name: str, packed: torch.Tensor, alone: torch.Tensor) -> None:
        if name.startswith("sequence"):
            oracle.assert_bit_equal({name: packed}, {name: alone})
        else:
            torch.testing.assert_close(packed, alone, rtol=2e-5, atol=2e-5, msg=name)

    with small_tiles(case, dtype, single):
        contracts.check_packed(case.on_triton, arguments, ["q", "k", "v"], lengths, compare)


def test_window_past_the_sequence_is_no_window() -> None:
    case = Case(tq=65, hq=2)
    arguments = case.arguments(0, torch.float32, CPU)
    with small_tiles(case, torch.float32, single=0):
        expected = contracts.forward_backward(case.on_triton, arguments)
        for window in (65, 66, 2**30):
            got = contracts.forward_backward(case.on_triton, arguments | {"window": window})
            oracle.assert_bit_equal(got, expected, f"window {window}")


def test_n_keys_spells_out_causal_and_full() -> None:
    case = Case(tq=40, tk=70)
    arguments = case.arguments(0, torch.float32, CPU)
    causal = torch.arange(31, 71, dtype=torch.int32)
    with small_tiles(case, torch.float32, single=0):
        for rule, n_keys in ((True, causal), (False, torch.full_like(causal, 99))):
            expected = contracts.forward_backward(case.on_triton, arguments | {"causal": rule})
            got = contracts.forward_backward(case.on_triton, arguments | {"n_keys": n_keys})
            for name, x in got.items():
                torch.testing.assert_close(x, expected[name], rtol=2e-5, atol=2e-6, msg=name)


def test_equal_keys_are_counted() -> None:
    """m keys with equal logits give n_eff = m."""
    case = Case(tq=100, hq=2)
    arguments = case.arguments(0, torch.float32, CPU)
    arguments["q"] = torch.zeros_like(arguments["q"])
    *_, stats = ops.polar_attention(**arguments, return_stats=True, backend="triton")
    expected = torch.arange(1.0, 101.0)[None, :, None].expand(1, 100, 2)
    torch.testing.assert_close(stats.n_eff, expected, rtol=1e-6, atol=0)


def test_row_with_no_key() -> None:
    case = Case(tq=4, tk=40, hq=2)
    arguments = contracts.leaves(case.arguments(0, torch.float32, CPU))
    arguments["n_keys"] = torch.tensor([0, 40, -5, 1], dtype=torch.int32)
    results = ops.polar_attention(**arguments, return_stats=True, backend="triton")
    direction, count, stats = results
    value = arguments["null_value"].detach()
    for row in (0, 2):
        expected = torch.nn.functional.normalize(value, dim=-1)
        torch.testing.assert_close(direction[0, row], expected, rtol=1e-6, atol=1e-6)
        assert not count[0, row].any()
        assert torch.equal(stats.lse[0, row], torch.full((2,), -float("inf")))
        assert torch.equal(stats.n_eff[0, row], torch.ones(2))
        assert torch.equal(stats.null_mass[0, row], torch.ones(2))
    (dq,) = torch.autograd.grad(direction.sum() + count.sum(), arguments["q"])
    assert not dq[0, [0, 2]].any()
    assert dq[0, [1, 3]].any()


def test_nothing_to_attend() -> None:
    """T = 0, B = 0 and no sequence at all: empty results, zero gradients."""
    for case in (Case(tq=0, tk=5), Case(tq=0), Case(batch=0, tq=5), Case(tq=0, packed=(0, 0))):
        check(case, torch.float32, single=0)
        check(case, torch.float16, single=1)


# ---- contracts ----------------------------------------------------------------------------------

CONTRACTS = [
    Case(tq=33),
    Case(tq=40, packed=(13, 0, 20), null_value=False),
    Case(tq=33, polar=False),
]


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)
def test_contracts(case: Case) -> None:
    for single, dtype in ((0, torch.float32), (1, torch.float16)):
        case = case.for_form(single)
        arguments = case.arguments(0, dtype, CPU)
        with small_tiles(case, dtype, single):
            contracts.check_backward_twice(case.on_triton, arguments)
            contracts.check_grad_out_untouched(case.on_triton, arguments)
            contracts.check_expanded_grad_out(case.on_triton, arguments)


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: case.name)
def test_fullgraph(case: Case) -> None:
    with small_tiles(case, torch.float32, single=0):  # deterministic mode refuses atomics
        contracts.check_fullgraph(case.on_triton, case.arguments(0, torch.float32, CPU))


@pytest.mark.parametrize("single", [0, 1], ids=["split", "single"])
def test_views_give_equal_bits(single: int) -> None:
    case = Case(tq=33, layout="contiguous").for_form(single)
    dtype = torch.float16 if single else torch.float32
    arguments = case.arguments(0, dtype, CPU)
    views = [
        dict(zip("qkv", inputs.lay_out(*(arguments[n] for n in "qkv"), layout), strict=True))
        for layout in inputs.LAYOUTS
    ]
    views.append({name: inputs.spaced(arguments[name]) for name in (*"qkv", *polar.PARAMETERS)})
    with small_tiles(case, dtype, single):
        for view in views:
            contracts.check_views(case.on_triton, arguments, view)


@pytest.mark.parametrize("polar_mode", [True, False], ids=["polar", "softmax"])
def test_opcheck(polar_mode: bool) -> None:
    case = Case(tq=10, hq=2, polar=polar_mode)
    name = "polar_attention_fwd" if polar_mode else "softmax_attention_fwd"
    samples = []
    empty = case.but(tq=0, layout="contiguous")
    for sample in (case, case.but(layout="transposed"), empty):
        samples.append(sample.arguments(0, torch.float32, CPU))
    samples.append(contracts.leaves(samples[0]))
    operator = getattr(torch.ops.fastweights, name).default
    with small_tiles(case, torch.float32, single=0):
        contracts.check_opcheck(
            operator, [polar.operator_arguments(sample, "triton") for sample in samples]
        )


def test_any_backend_takes_backward_of_any_forward() -> None:
    """Saved statistics mean the same in eager and in Triton."""
    case = Case(tq=65, hq=4, hk=2, null_base=4.0)
    arguments = case.arguments(0, torch.float32, CPU)
    call = polar.operator_arguments(arguments)
    names = ("direction", "count", "lse", "n_eff", "rho", "null_mass")
    upstream = inputs.normal((1, 65, 4, case.d), inputs.generator(1, CPU), torch.float32)
    gradients = {}
    for forward in ("eager", "triton"):
        saved = torch.ops.fastweights.polar_attention_fwd(*call[:-1], forward)
        results = dict(zip(names, saved, strict=True))
        kept = [results[name] for name in ("direction", "lse", "n_eff", "rho")]
        for backward in ("eager", "triton"):
            gradients[forward, backward] = torch.ops.fastweights.polar_attention_bwd(
                upstream, upstream[..., 0].contiguous(), *kept, *call[:-1], backward
            )
    expected = gradients.pop(("eager", "eager"))
    for pair, got in gradients.items():
        for i, x in enumerate(got):
            torch.testing.assert_close(
                x, expected[i], rtol=2e-4, atol=2e-5, msg=f"gradient {i} of {pair}"
            )


# ---- compile keys -------------------------------------------------------------------------------

SIGNATURES = """
    import json
    import torch
    from fastweights.ops import triton_runtime
    from fastweights.ops.polar_attention import triton as backend
    from helpers import inputs, polar

    def launches(case):
        arguments = case.arguments(0, torch.bfloat16, torch.device("cpu"))
        shape = polar.shape_of(arguments)
        q, k, v = (arguments[name] for name in "qkv")
        scalars = (arguments[name] for name in polar.PARAMETERS)
        null = polar.NullParameters(arguments["null_value"], *scalars)
        lengths = polar.Lengths(None, None, None)
        with triton_runtime.record_launches() as found:
            out, count, lse, n_eff, rho, _ = backend.fwd(shape, q, k, v, null, lengths)
            backend.bwd(shape, out, count, q, k, v, null, lengths, out, lse, n_eff, rho)
        return found

    for layouts in (("fused", "transposed", "contiguous"), ("misaligned", "odd_stride")):
        keys = {}
        for i in range(40):
            layout = layouts[i % len(layouts)]
            case = polar.Case(
                tq=2 + 23 * i, batch=1 + i % 2, hq=2 + 2 * (i % 3), hk=2, layout=layout,
                window=1 + i,
            )
            for source in launches(case):
                keys.setdefault(source.name, set()).add(repr(source))
        print(layouts[0], json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_forty_lengths_and_views_compile_once() -> None:
    """One signature a kernel whatever T, B, H, window and strides; one more without alignment."""
    lines = contracts.run_uninterpreted(SIGNATURES)
    assert [line.split()[0] for line in lines] == ["fused", "misaligned"]
    for line in lines:
        counts = json.loads(line.partition(" ")[2])
        assert {"attention_fwd", "attention_bwd_dkdv", "attention_bwd_prepare"} <= set(counts)
        assert set(counts.values()) == {1}, line
