"""What sweeps and compile reports need of the polynomial ops: problems, inputs, reference calls.

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
from . import polynomial_features, polynomial_read, polynomial_update, triton
from .maps import FeatureMap
from .op import PolynomialShape
from .triton_spaces import SPACE_CONTRACT, SPACE_EXPAND, SPACE_PULL, SPACE_READ, SPACE_UPDATE

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "polynomial_features": (polynomial_features, reference.polynomial_features),
    "polynomial_read": (polynomial_read, reference.polynomial_read),
    "polynomial_update": (polynomial_update, reference.polynomial_update),
}
FEATURES, READ, UPDATE = FUNCTIONS
SPACES = (SPACE_EXPAND, SPACE_CONTRACT, SPACE_READ, SPACE_PULL, SPACE_UPDATE)


@dataclass(frozen=True)
class Problem:
    """One call that a sweep times, of symmetric features of degree 2.

    `dtypes`: those it is swept in unless others are asked for. 16-bit types share their buckets.
    """

    name: str
    function: str
    batch: int
    tokens: int
    heads: int
    width: int
    values: int = 0
    dtypes: tuple[str, ...] = ("bf16",)

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two ragged ones."""
        few = replace(self, batch=2, heads=3, tokens=197, width=self.width - 3)
        if self.values:
            few = replace(few, values=self.values - 5)
        return few, replace(few, batch=1, tokens=299, heads=2, width=self.width)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return FUNCTIONS[self.function]

    @property
    def wide(self) -> int:
        """D."""
        return FeatureMap("symmetric", 2, (1, 2)).wide(self.width)

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call; coefficients are by head."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        rows = (self.batch, self.tokens, self.heads)
        made = {"x": (normal(*rows, self.width) / self.width**0.25).to(dtype)}
        if self.function == READ:
            made["state"] = normal(self.batch, self.heads, self.wide, self.values)
        if self.function == UPDATE:
            made["g"] = normal(*rows, self.values).to(dtype)
        a = torch.rand(self.heads, 3, generator=generator, device=device) + 0.2
        a[:, 0] = 0
        return made | {"coefficients": a}


def problem(
    *, T: int, D: int, V: int | None = None, B: int = 1, H: int = 16, function: str = READ
) -> Problem:
    """The problem of these sizes; `function`: "polynomial_features", "…_read" or "…_update"."""
    if function not in FUNCTIONS:
        raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}, got {function!r}")
    values = 0 if function == FEATURES else D if V is None else V
    name = f"{function}-B{B}-T{T}-H{H}-D{D}" + (f"-V{values}" if values else "")
    return Problem(name, function, B, T, H, D, values)


PROBLEMS = (
    Problem("features-D64", FEATURES, 4, 4096, 16, 64, dtypes=("bf16", "fp32")),
    Problem("features-D128", FEATURES, 4, 2048, 16, 128),
    Problem("features-D32", FEATURES, 4, 4096, 16, 32),
    *(
        problem
        for function in (READ, UPDATE)
        for problem in (
            Problem(f"{function}-D64", function, 4, 4096, 16, 64, 64, ("bf16", "fp32")),
            Problem(f"{function}-D128", function, 4, 4096, 16, 128, 128),
            Problem(f"{function}-D64-V128", function, 4, 4096, 16, 64, 128),
            Problem(f"{function}-D64-short", function, 4, 256, 16, 64, 64),
            Problem(f"{function}-D32", function, 4, 4096, 16, 32, 32),
        )
    ),
)


# ---- compile reports ----------------------------------------------------------------------------

# Every config that fits one of these (width, values) is compiled.
SIZES = ((64, 64), (128, 128), (64, 128), (32, 64), (32, 32), (16, 16), (64, 16))
# Bytes of stack that a kernel may use on targets with wgmma and on others, by the padded width, or
# fp32; all others must not spill.
MAX_STACK: dict[tuple[str, int | str], tuple[int, int]] = {
    ("expand", 32): (0, 144),
    ("expand", 64): (0, 208),
    ("expand", "fp32"): (32, 32),
    ("read", 64): (0, 16),
    ("read", 128): (0, 40),
    ("read", "fp32"): (328, 1832),
    ("pull", 128): (104, 336),
    ("pull", "fp32"): (168, 784),
    ("update", 64): (40, 200),
    ("update", 128): (80, 200),
    ("update", "fp32"): (24, 0),
}


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config that fits the target, with coefficients by head.

    The launchers themselves run on meta tensors and their launches are recorded, so a report sees
    what a call would compile. Default configs are compiled for every size, for all degrees without
    coefficients, and for tiles, too, any other for the first size that it serves. `quick` keeps
    those of the first size.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    wgmma = expected_matrix("wgmma", target) == "wgmma"
    with assume_device(device):
        for space in SPACES:
            for config, shape in _compiled(space, device, quick):
                for case in _recorded(space, config, shape, wgmma):
                    cases.setdefault((case.config, repr(case.source)), case)
        if not quick:
            for kind in ("elementwise", "concat"):
                shape = replace(
                    _compile_shape(SPACE_EXPAND, 64, 0), map=FeatureMap(kind, 2, (0, 1, 2))
                )
                for space in (SPACE_EXPAND, SPACE_CONTRACT):
                    for case in _recorded(space, None, shape, wgmma):
                        cases.setdefault((case.config, repr(case.source)), case)
    return list(cases.values())


def _compiled(
    space: Space, device: Device, quick: bool
) -> Iterator[tuple[Config, PolynomialShape]]:
    """Configs, and what each is compiled for."""
    served: set[tuple[Config, torch.dtype]] = set()
    for width, values in SIZES[:1] if quick else SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            shape = replace(_compile_shape(space, width, values), dtype=dtype)
            key = space.bucket(shape)
            default = space.default(key, device)
            for config in [default] if quick else space.fitting(key, device):
                if config == default or (config, dtype) not in served:
                    yield config, shape
                served.add((config, dtype))
    if not quick:
        shape = _compile_shape(space, *SIZES[0])
        config = space.default(space.bucket(shape), device)
        yield config, replace(shape, map=FeatureMap("symmetric", 2, (0, 1, 2)), by_head=False)
        if shape.function == "features":
            yield config, replace(shape, map=FeatureMap("tiled", 2, (1, 2), 8))


def _compile_shape(space: Space, width: int, values: int) -> PolynomialShape:
    """A call whose pass launches the kernels of a space."""
    function = space.op.removeprefix("polynomial_")
    features = function == "features"
    return PolynomialShape(
        function=function,
        batch=1 if features else 4,
        tokens=4096,
        heads=16,
        width=width,
        values=0 if features else values,
        map=FeatureMap("symmetric", 2, (1, 2)),
        by_head=True,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        backward=space.pass_ == "bwd",
    )


def _recorded(
    space: Space, config: Config | None, shape: PolynomialShape, wgmma: bool
) -> list[CompileCase]:
    """What a pass launches with a config, or without one; of a backward what is its own."""

    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (shape.batch, shape.tokens, shape.heads)
    x = meta(*rows, shape.width, dtype=shape.dtype)
    state = meta(shape.batch, shape.heads, shape.wide, shape.values)
    row = meta(*rows, shape.values, dtype=shape.dtype)
    other = {"features": None, "read": state, "update": row}[shape.function]
    upstream = {
        "features": meta(*rows, shape.wide, dtype=shape.dtype), "read": row, "update": state
    }[shape.function]  # fmt: skip
    a = meta(shape.heads, shape.map.degree + 1) if shape.by_head else None
    with runtime.record_launches() as sources:
        if config is None:
            _run(space, upstream, shape, x, other, a)
        else:
            with use_config(space, config):
                _run(space, upstream, shape, x, other, a)
    return [
        CompileCase(
            space.op, space.pass_, config or triton.POWERS_CONFIG, source,
            matrix=_matrix(source), max_stack=_max_stack(source, shape, wgmma),
        )
        for source in sources
        if isinstance(source, KernelSource)
    ]  # fmt: skip


def _run(
    space: Space, upstream: torch.Tensor, shape: PolynomialShape, x: torch.Tensor,
    other: torch.Tensor | None, a: torch.Tensor | None,
) -> None:  # fmt: skip
    if space.pass_ == "bwd":
        triton.bwd(shape, upstream, x, other, a, (True, False))
    else:
        triton.fwd(shape, x, other, a)


def _matrix(source: KernelSource) -> str | None:
    """Where it is not what the config states."""
    return "fma" if source.name in ("pack_steps", "pack_square", "powers", "powers_back") else None


def _max_stack(source: KernelSource, shape: PolynomialShape, wgmma: bool) -> int:
    kind: int | str = "fp32" if shape.dtype == torch.float32 else runtime.padded(shape.width)
    return MAX_STACK.get((source.name, kind), (0, 0))[not wgmma]
