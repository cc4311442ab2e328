"""What sweeps and compile reports need of Polar attention: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...autotune.compile import CompileCase, KernelSource, Source, target_device
from ...autotune.space import Config, Space, assume_device, use_config
from ...reference import polar_attention as reference_polar
from ...reference import softmax_attention as reference_softmax
from .. import triton_runtime as runtime
from . import polar_attention, softmax_attention, triton
from .op import AttentionShape, Lengths, NullParameters
from .triton_spaces import SPACE_BWD, SPACE_FWD, block_d

OP = "polar_attention"
PARAMETERS = ("null_value", "null_base", "null_slope", "length_gain", "magnitude_gain")


@dataclass(frozen=True)
class Problem:
    """One shape that a sweep times; `call` are keyword arguments of the public function.

    `dtypes`: those it is swept in unless others are asked for. 16-bit types share their buckets.
    """

    name: str
    batch: int
    tokens: int
    heads_q: int
    heads_k: int
    head_dim: int
    polar: bool = True
    window: int | None = None
    dtypes: tuple[str, ...] = ("bf16",)

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two ragged ones for float64: a tile and a half, and more tiles than multiprocessors."""
        group = self.heads_q // self.heads_k
        few = replace(self, batch=2, tokens=197, heads_q=2 * group, heads_k=2)
        heads = max(1, 16 // group)
        many = replace(self, batch=2, tokens=1061, heads_q=heads * group, heads_k=heads)
        if self.window is None:
            return few, many
        return replace(few, window=51), replace(many, window=267)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {} if self.window is None else {"window": self.window}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        if self.polar:
            return polar_attention, reference_polar
        return softmax_attention, reference_softmax

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int, tokens: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call; `tokens` replaces the problem's own length."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        length = tokens or self.tokens
        keys = (self.batch, length, self.heads_k, self.head_dim)
        made = {
            "q": normal(self.batch, length, self.heads_q, self.head_dim).to(dtype),
            "k": normal(*keys).to(dtype),
            "v": normal(*keys).to(dtype),
        }
        if self.polar:
            made["null_value"] = normal(self.heads_q, self.head_dim)
            made["null_base"] = 2 + 0.3 * normal(self.heads_q)
            for name in PARAMETERS[2:]:
                made[name] = normal(self.heads_q).abs() * 0.3
        return made


def problem(
    *,
    T: int,
    D: int,
    B: int = 1,
    Hq: int = 16,
    Hk: int | None = None,
    window: int | None = None,
    function: str = OP,
) -> Problem:
    """The problem of these sizes; `function`: "polar_attention" or "softmax_attention"."""
    polar = function == OP
    heads = Hq if Hk is None else Hk
    words = [f"B{B}", f"T{T}", f"H{Hq}", f"D{D}", "" if polar else "softmax"]
    words.append("" if window is None else f"window{window}")
    return Problem("-".join(filter(None, words)), B, T, Hq, heads, D, polar, window)


PROBLEMS = (
    Problem("T8k-D128", batch=4, tokens=8192, heads_q=16, heads_k=16, head_dim=128),
    Problem("T8k-D64", batch=4, tokens=8192, heads_q=16, heads_k=16, head_dim=64),
    Problem("T2k-D128", batch=16, tokens=2048, heads_q=16, heads_k=16, head_dim=128),
    Problem("T8k-D256", batch=2, tokens=8192, heads_q=16, heads_k=16, head_dim=256),
    Problem("T8k-D128-window", 4, 8192, 16, 16, 128, window=1024),
    Problem("T8k-D128-softmax", 4, 8192, 16, 16, 128, polar=False),
    Problem("T2k-D128-softmax", 16, 2048, 16, 16, 128, polar=False),
    Problem("T8k-D128-window-softmax", 4, 8192, 16, 16, 128, polar=False, window=1024),
    Problem("T8k-D64-softmax", 4, 8192, 16, 16, 64, polar=False),
    Problem("T2k-D64", 16, 2048, 16, 16, 64),
    Problem("T8k-D192", 2, 8192, 16, 16, 192),
    Problem("T2k-D128-fp32", 1, 2048, 8, 8, 128, dtypes=("fp32",)),
    Problem("T2k-D128-fp32-softmax", 1, 2048, 8, 8, 128, polar=False, dtypes=("fp32",)),
)
SPACES = (SPACE_FWD, SPACE_BWD)


# ---- compile reports ----------------------------------------------------------------------------

HALF_WIDTHS = (64, 128, 192, 256)
FP32_WIDTHS = (128, 64)  # of default configs, and of all others, which compile for long
# Bytes of stack that a kernel may use. Of the wgmma tiles: values around the loops, and in the
# plain backward of width 128 some in them; of width 256, where no tile leaves registers, many; of
# fp32 as well, which holds each operand in three parts. The small mma.sync tiles are what fp32 and
# devices with little shared memory use, and spill inside.
MAX_STACK = {"wgmma": 384, "mma": 4096}
MAX_STACK_WIDE = 1024
MAX_STACK_FP32 = 1792
_MEMORY_BOUND = ("attention_bwd_prepare", "attention_bwd_finish", "attention_bwd_parameters")


# Dense causal Polar attention and rules beside it: each is another kernel, with loops of its own.
# Packed sequences with a window have the loops and masks of both, so neither comes alone.
_HEAVIEST: dict[str, Any] = {"sequences": 3, "window": 100}
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    _HEAVIEST,
    {"polar": False, "null_value": False},
    {"causal": False, "null_value": False},
)
_QUICK: tuple[dict[str, Any], ...] = ({}, {"tq": 256, "tk": 256})  # each has a default of its own


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every kernel of every config that fits the target, once per element size.

    The launchers themselves run on meta tensors and their launches are recorded, so a report sees
    what a call would compile. The default config of each width is compiled for several of
    `_VARIANTS`, any other in the widest tile and for the first of them that it serves: there it
    holds most. In fp32 others are compiled in a narrow one. `quick` keeps the default config of
    each pass and width 64 and 128 in bf16.
    """
    first = [] if quick else compile_cases(target, quick=True)
    cases = {(case.config, repr(case.source)): case for case in first}
    sources: dict[str, Source] = {_without_width(case.source): case.source for case in first}
    device = target_device(target)
    served: set[tuple[str, torch.dtype, Config]] = set()
    with assume_device(device):
        for (dtype, width), space in itertools.product(_compiled(quick), (SPACE_FWD, SPACE_BWD)):
            for rules in _QUICK if quick else _VARIANTS:
                shape = replace(_compile_shape(dtype, width), **rules)
                key = space.bucket(shape)
                default = space.default(key, device)
                wide, narrow = (dtype == torch.float32 and width == of for of in FP32_WIDTHS)
                others = [] if quick or wide else space.fitting(key, device)
                configs = [
                    config
                    for config in others
                    if (narrow or config != default) and (space.pass_, dtype, config) not in served
                ]
                if quick or rules in _default_variants(dtype, width):
                    configs.append(default)
                served.update((space.pass_, dtype, config) for config in configs)
                for config in configs:
                    for case in _recorded(space, config, shape):
                        source = sources.setdefault(_without_width(case.source), case.source)
                        cases.setdefault((config, repr(source)), replace(case, source=source))
    return list(cases.values())


def _default_variants(dtype: torch.dtype, width: int) -> tuple[dict[str, Any], ...]:
    """What a default config is compiled for: less where a kernel takes the compiler longest."""
    if dtype == torch.float32:
        return (_HEAVIEST,) if width == FP32_WIDTHS[0] else ()
    return _VARIANTS if width == HALF_WIDTHS[0] else _VARIANTS[:2]


def _without_width(source: Source) -> str:
    """What tells a kernel from others: of two widths in the same tile the compiler sees the first.

    They differ by the masks of columns alone, which the narrower one, compiled first, has.
    """
    assert isinstance(source, KernelSource)
    constexprs = {name: value for name, value in source.constexprs.items() if name != "WIDTH"}
    return repr(replace(source, constexprs=constexprs))


def _compiled(quick: bool) -> list[tuple[torch.dtype, int]]:
    if quick:
        return [(torch.bfloat16, 64), (torch.bfloat16, 128)]
    widest = sorted(HALF_WIDTHS, key=lambda width: (-block_d(width), width))
    halves = [(torch.bfloat16, width) for width in widest]
    return halves + [(torch.float32, width) for width in FP32_WIDTHS]


def _compile_shape(dtype: torch.dtype, width: int) -> AttentionShape:
    return AttentionShape(
        polar=True,
        batch=1,
        tq=8192,
        tk=8192,
        heads_q=2,
        heads_k=1,
        head_dim=width,
        dtype=dtype,
        device=torch.device("meta"),
        scale=width**-0.5,
        causal=True,
        window=None,
        has_n_keys=False,
        null_value=True,
        sequences=None,
        max_seqlen=None,
        max_seqlen_k=None,
    )


def _recorded(space: Space, config: Config, shape: AttentionShape) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    q = meta(shape.batch, shape.tq, shape.heads_q, shape.head_dim, dtype=shape.dtype)
    k = meta(shape.batch, shape.tk, shape.heads_k, shape.head_dim, dtype=shape.dtype)
    null = None
    if shape.polar:
        value = meta(shape.heads_q, shape.head_dim) if shape.null_value else None
        null = NullParameters(value, *(meta(shape.heads_q) for _ in range(4)))
    offsets = None
    if shape.sequences is not None:
        offsets = meta(shape.sequences + 1, dtype=torch.int32)
    lengths = Lengths(None, offsets, None)
    with use_config(space, config), runtime.record_launches() as sources:
        if space.pass_ == "fwd":
            triton.fwd(shape, q, k, k, null, lengths)
        else:
            rows = [meta(shape.batch, shape.heads_q, shape.tq) for _ in range(3)]
            if shape.polar:
                count = meta(shape.batch, shape.tq, shape.heads_q, dtype=shape.dtype)
                triton.bwd(shape, q, count, q, k, k, null, lengths, q, *rows)
            else:
                triton.bwd(shape, q, rows[0], q, k, k, null, lengths, q, rows[1], None, None)
    return [
        CompileCase(
            OP,
            space.pass_,
            config,
            source,
            matrix="fma" if source.name in _MEMORY_BOUND else None,
            max_stack=max(
                MAX_STACK[config.matrix],
                MAX_STACK_WIDE if shape.head_dim > 128 else 0,
                MAX_STACK_FP32 if shape.dtype == torch.float32 else 0,
            ),
        )
        for source in sources
    ]
