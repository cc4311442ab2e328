"""What sweeps and compile reports need of the delta rewrite: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import reference
from ...autotune.compile import CompileCase, KernelSource, expected_matrix, target_device
from ...autotune.space import Config, Device, Space, assume_device, use_config
from .. import triton_runtime as runtime
from . import delta_rewrite, triton, triton_sequential
from .op import RewriteShape, RewriteTensors
from .triton_back_spaces import SPACE_BACK, SPACE_BACK_READS
from .triton_spaces import OP, SPACE_READ, SPACE_WHOLE, SPACE_WRITE, WGMMA

FORWARD = (SPACE_WRITE, SPACE_READ, SPACE_WHOLE)
SPACES = (*FORWARD, SPACE_BACK, SPACE_BACK_READS)


@dataclass(frozen=True)
class Problem:
    """M tokens of each row write a memory that tokens before them have written, Tq queries read it.

    `few`: a small one that is compared with float64; one of its rows is first. `dtypes`: those it
    is swept in unless others are asked for. 16-bit types share their buckets.
    """

    name: str
    batch: int
    tokens: int
    reads: int
    width: int
    values: int
    heads: int = 1
    dtypes: tuple[str, ...] = ("bf16",)
    few: bool = False

    @property
    def wide(self) -> int:
        """P, of order 3."""
        return 6 * self.width

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two ragged ones of the same tiles."""
        few = replace(
            self, batch=3, heads=2, few=True, tokens=max(self.tokens - 1, 0),
            reads=min(self.reads, 150), values=self.values - 3,
        )  # fmt: skip
        return few, replace(few, batch=1, width=self.width - 1, values=self.values)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return delta_rewrite, reference.delta_rewrite

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> dict[str, Any]:
        """Fresh random arguments of the call."""
        generator = torch.Generator(device).manual_seed(seed)
        acc = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        rows = (self.batch, self.tokens, self.heads)
        memory = (self.batch, self.heads, self.wide)
        made: dict[str, Any] = {
            "k": normal(*rows, self.width).to(dtype),
            "v": normal(*rows, self.values).to(dtype),
            "beta": normal(*rows).sigmoid().to(acc),
            "state": (0.3 * normal(*memory, self.values)).to(acc),
            "normalizer": (0.5 * self.wide**-0.5 * normal(*memory).abs()).to(acc),
        }
        if self.reads:
            made["q"] = normal(self.batch, self.reads, self.heads, self.width).to(dtype)
        if self.few:
            made["first"] = torch.arange(self.batch, device=device) == 1
        return made


def problem(
    *, M: int, dk: int, Dv: int, B: int = 1, H: int = 1, Tq: int = 0, function: str = OP
) -> Problem:
    """The problem of these sizes; `function`: "delta_rewrite"."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    return Problem(f"B{B}-M{M}-Tq{Tq}-H{H}-D{dk}-V{Dv}", B, M, Tq, dk, Dv, H)


PROBLEMS = (
    Problem("write-16-slots-M128", 16, 128, 0, 64, 2048),
    Problem("write-read-16-slots-M128", 16, 128, 1024, 64, 2048),
    Problem("gpt2-layer", 1, 10, 522, 64, 768, dtypes=("bf16", "fp32")),
    Problem("gpt2-diagonal", 12, 10, 522, 64, 768),
    Problem("read-M0", 16, 0, 1024, 64, 2048),
    Problem("small", 128, 4, 9, 32, 128),
)


# ---- compile reports ----------------------------------------------------------------------------

SEQUENTIAL = "sequential"  # in the place of a pass: its kernels have no space

# Every config that fits one of these (M, Tq, dk, Dv) is compiled once; the first two are compiled
# whole.
SIZES = ((128, 1024, 64, 2048), (10, 522, 64, 768), (4, 9, 32, 128), (16, 100, 128, 256),
         (16, 100, 8, 16))  # fmt: skip
# Bytes that a kernel may spill, with wgmma and without: `rewrite` in fp32 and before Hopper.
MAX_STACK = {
    ("rewrite", "wgmma"): 16, ("rewrite", "mma"): 16, ("whole", "wgmma"): 8, ("whole", "mma"): 8,
    ("rows_back", "wgmma"): 16, ("rows_back", "mma"): 16, ("contract", "wgmma"): 8,
    ("answer", "wgmma"): 8, ("answer", "mma"): 352, ("outer", "mma"): 240,
    ("contract", "mma"): 264, ("look", "mma"): 8,
}  # fmt: skip
# Which kernels have the configs of a space; the rest, of rows, are seen with each.
_KERNELS = {
    SPACE_WRITE: ("prepare", "rewrite"),
    SPACE_READ: ("prepare", "read"),
    SPACE_WHOLE: ("whole",),
    SPACE_BACK: ("describe", "add_rows", "look", "outer", "contract", "rows_back"),
    SPACE_BACK_READS: ("answer", "outer"),
}
_IN_TURN = ("numbers", "chain", "numbers_back", "chain_back", "chain_again")
_OF_ROWS = ("prepare", "describe", "add_rows", "rows_back")
# What the default config is compiled for beside that, at the second size.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.float32},
    {"channels": True, "first": True, "pool": 32},
    {"channels": True, "first": True, "full": True},
    {"normalize": False, "eps_norm": 1e-5, "correction": False},
    {"denominator": False, "order": 2},
    {"echo": True, "aligned": False},
    {"tokens": 20, "channels": True, "first": True, "pool": 32, "aligned": False},
    {"tokens": 20, "denominator": False, "order": 2},
    {"tokens": 0, "first": True, "aligned": False},
)


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config of both kernels that fits the target.

    The launcher itself runs on meta tensors and its launches are recorded, so a report sees what a
    call would compile. `quick` keeps the default configs of the first size.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    with assume_device(device):
        for space, config, shape in _compiled(device, quick):
            for case in _recorded(space, config, shape, target):
                cases.setdefault((config, repr(case.source)), case)
        for case in [] if quick else _one_by_one():
            cases.setdefault((case.config, repr(case.source)), case)
    return list(cases.values())


def _one_by_one() -> Iterator[CompileCase]:
    """What writes tokens one after another, in the configs that the rule gives."""
    for width, rules in (
        (64, {}),
        (8, {"first": True, "channels": True}),
        (128, {}),
        (128, {"pool": 32}),
    ):
        shape = replace(_compile_shape(10, 0, width, 768), sequential=True, **rules)
        given = _meta(shape)
        with runtime.record_launches() as sources:
            triton.fwd(shape, given)
            if not shape.pool:
                _record_backward(replace(shape, backward=True, full=True), given)
        for source in sources:
            if isinstance(source, KernelSource) and source.name in _IN_TURN:
                config = triton_sequential.chain_config(shape)
                if source.name.startswith("numbers"):
                    config = triton_sequential.NUMBERS
                yield CompileCase(OP, SEQUENTIAL, config, source, matrix="fma")


def _compiled(device: Device, quick: bool) -> Iterator[tuple[Space, Config, RewriteShape]]:
    """Configs of each space, and what each is compiled for."""
    known: set[tuple[Space, Config]] = set()
    for size in SIZES[:1] if quick else SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            shape = replace(_compile_shape(*size), dtype=dtype)
            if quick and dtype == torch.float32:
                return
            for space in triton.spaces(shape).values():
                key = space.bucket(shape)
                configs = space.fitting(key, device)
                if quick:
                    configs = [space.default(key, device)]
                elif size not in SIZES[:2] or dtype == torch.float32:
                    configs = [config for config in configs if (space, config) not in known]
                known |= {(space, config) for config in configs}
                for config in configs:
                    yield space, config, shape
    if not quick:
        for rules in _VARIANTS:
            shape = replace(_compile_shape(*SIZES[1]), **rules)
            for space in triton.spaces(shape).values():
                yield space, space.default(space.bucket(shape), device), shape


def _compile_shape(tokens: int, reads: int, width: int, values: int) -> RewriteShape:
    return RewriteShape(
        batch=12,
        tokens=tokens,
        reads=reads,
        heads=1,
        width=width,
        values=values,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        channels=False,
        first=False,
        order=3,
        sequential=False,
        normalize=True,
        denominator=True,
        correction=True,
        full=False,
        eps=1e-5,
        eps_norm=0.0,
    )


def _in_parts(source: KernelSource, shape: RewriteShape) -> bool:
    """Whether each product waits for what it is made of: parts of fp32, features one by one."""
    if source.name == "whole":
        return True
    return source.name == "rewrite" and (shape.echo or shape.dtype == torch.float32)


def _matrix(source: KernelSource, target: str) -> str | None:
    """Where it is not what the config states: F A has as many rows as there are tokens."""
    if source.name in _OF_ROWS:
        return "fma"
    if source.name == "whole":  # Fᵀ E has a row for each of dk features, y one for each query
        tallest = max(int(str(source.constexprs[name])) for name in ("W", "T"))
        return expected_matrix("wgmma" if tallest >= WGMMA else "mma", target)
    rows = {"rewrite": "M", "look": "M", "contract": "M", "outer": "K"}.get(source.name)
    if rows is None:
        return None
    tall = int(str(source.constexprs[rows])) >= WGMMA
    if source.name != "rewrite" and not tall:
        return "mma"
    if source.name == "outer" and not source.constexprs["GATED"]:
        return None
    return expected_matrix("wgmma", target) if tall else None


def _meta(shape: RewriteShape) -> RewriteTensors:
    """A call's tensors, without numbers."""

    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows, pad = (shape.batch, shape.tokens, shape.heads), 0 if shape.aligned else 1
    memory = (shape.pool or shape.batch, shape.heads, shape.wide)
    return RewriteTensors(
        k=meta(*rows, shape.width, dtype=shape.dtype),
        v=meta(*rows, shape.values, dtype=shape.dtype),
        beta=meta(*rows, *[shape.values] * shape.channels),
        state=meta(*memory, shape.values + pad)[..., : shape.values],
        normalizer=meta(*memory),
        q=meta(shape.batch, shape.reads, shape.heads, shape.width, dtype=shape.dtype),
        first=meta(shape.batch, dtype=torch.bool) if shape.first else None,
        slots=meta(shape.batch, dtype=torch.int64) if shape.pool else None,
    )


def _recorded(space: Space, config: Config, shape: RewriteShape, target: str) -> list[CompileCase]:
    given = _meta(shape)
    with use_config(space, config), runtime.record_launches() as sources:
        if space in FORWARD:
            triton.fwd(shape, given)
        else:
            _record_backward(replace(shape, backward=True), given)
    matrix = expected_matrix("wgmma", target)
    return [
        CompileCase(
            space.op, space.pass_, config, source,
            matrix=_matrix(source, target),
            max_stack=_max_stack(source, shape, matrix),
            serial=_in_parts(source, shape),
        )
        for source in sources
        if isinstance(source, KernelSource) and _of_space(space, source)
    ]  # fmt: skip


def _max_stack(source: KernelSource, shape: RewriteShape, matrix: str) -> int:
    """Forwards spill where operands of products are in registers alone."""
    if source.name in ("rewrite", "whole") and matrix == "wgmma" and not _in_parts(source, shape):
        return 0
    return MAX_STACK.get((source.name, matrix), 0)


def _of_space(space: Space, source: KernelSource) -> bool:
    """`outer` has a config of each space of the backward: of tokens it has a gate."""
    if source.name == "outer" and source.constexprs["GATED"] != (space is SPACE_BACK):
        return False
    return source.name in _KERNELS[space]


def _record_backward(shape: RewriteShape, given: RewriteTensors) -> None:
    """With an echo the state is formed again, too."""
    like_y = (shape.batch, shape.reads, shape.heads, shape.values)
    d_y = torch.empty(like_y, dtype=shape.dtype, device="meta")
    change = None
    if shape.echo:
        rows = (shape.batch, shape.heads, shape.tokens, shape.values)
        change = torch.empty(rows, device="meta")
        triton.rebuild(shape, given, change)
    triton.bwd(shape, d_y, given.state, given.normalizer, given, change)
