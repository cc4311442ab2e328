"""What sweeps and compile reports need of a step: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...autotune.compile import CompileCase, KernelSource, target_device
from ...autotune.space import Config, Device, assume_device, use_config
from .. import triton_runtime as runtime
from ..gated_delta.op import DeltaShape
from . import gated_delta_step_, triton
from .op import StepTensors
from .triton_spaces import OP, SPACE_FWD

EAGER = partial(gated_delta_step_, backend="eager")  # in float64 it is the rule, see the tests


@dataclass(frozen=True)
class Problem:
    """Tokens of some sequences, in slots of a pool.

    `groups`: heads of values to one of queries and keys. `few`: a small one that is compared with
    float64, whose rows are skipped here and there. `dtypes`: those it is swept in unless others are
    asked for.
    """

    name: str
    rows: int
    heads: int
    width: int
    values: int
    groups: int = 1
    few: bool = False
    dtypes: tuple[str, ...] = ("bf16",)

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """One of the same widths, and one of others of the same tile, whose rows lie anywhere."""
        few = replace(self, rows=7, heads=2 * self.groups, few=True)
        return few, replace(few, rows=5, width=self.width - 3, values=self.values - 5)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {"scale": self.width**-0.5}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return gated_delta_step_, EAGER

    @property
    def written(self) -> tuple[str, ...]:
        """Arguments that the call writes."""
        return ("state_pool",)

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call, q, k and v views of one tensor."""
        generator = torch.Generator(device).manual_seed(seed)
        acc = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        def uniform(*size: int) -> torch.Tensor:
            return torch.rand(*size, generator=generator, device=device).to(acc)

        shared = self.heads // self.groups
        sizes = (shared * self.width, shared * self.width, self.heads * self.values)
        whole = normal(self.rows, sum(sizes)).to(dtype).split(sizes, -1)
        heads = (shared, shared, self.heads)
        made = {
            name: x.unflatten(-1, (count, -1))
            for name, x, count in zip("qkv", whole, heads, strict=True)
        }
        made["log_decay"] = -uniform(self.rows, self.heads)
        made["beta"] = uniform(self.rows, self.heads)
        slots = self.rows + self.few
        made["state_pool"] = normal(slots, self.heads, self.width, self.values).to(acc)
        made["slots"] = torch.randperm(slots, generator=generator, device=device)[: self.rows]
        if self.few:
            made["slots"][1] = -1
        return made


def problem(
    *, N: int, D: int, Dv: int = 0, H: int = 16, groups: int = 1, function: str = OP
) -> Problem:
    """The problem of these sizes, Dv as D by default; `function`: "gated_delta_step_"."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    values = Dv or D
    name = f"N{N}-H{H}-D{D}-V{values}" + (f"-groups{groups}" if groups > 1 else "")
    return Problem(name, N, H, D, values, groups)


PROBLEMS = (
    *(Problem(f"N{n}-H16-D128", n, 16, 128, 128) for n in (256, 64, 1)),
    Problem("N64-H32-D128-groups2", 64, 32, 128, 128, 2),
    Problem("N64-H32-D128-fp32", 64, 32, 128, 128, dtypes=("fp32",)),
    Problem("N256-H16-D64", 256, 16, 64, 64),
    Problem("N64-H8-D256", 64, 8, 256, 256),
)
SPACES = (SPACE_FWD,)


# ---- compile reports ----------------------------------------------------------------------------

SIZES = ((128, 128), (64, 64), (256, 256), (16, 16), (32, 128))
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"qk_l2norm": False},
    {"dtype": torch.float32},
    {"width": 100, "values": 130},
    {"width": 125, "values": 125},
)


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config that fits the target; the default one for other rules and sizes, too.

    The launcher runs on meta tensors and its launches are recorded, so a report sees what a call
    would compile. `quick` keeps the default config of the first size.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    with assume_device(device):
        for config, shape in _compiled(device, quick):
            for case in _recorded(config, shape):
                cases.setdefault((config, repr(case.source)), case)
    return list(cases.values())


def _compiled(device: Device, quick: bool) -> Iterator[tuple[Config, DeltaShape]]:
    """Configs, and what each is compiled for."""
    shape = _compile_shape(*SIZES[0])
    yield SPACE_FWD.default(SPACE_FWD.bucket(shape), device), shape
    if quick:
        return
    for size in SIZES:
        shape = _compile_shape(*size)
        for config in SPACE_FWD.fitting(SPACE_FWD.bucket(shape), device):
            yield config, shape
    for rules in _VARIANTS:
        shape = replace(_compile_shape(*SIZES[0]), **rules)
        yield SPACE_FWD.default(SPACE_FWD.bucket(shape), device), shape


def _compile_shape(width: int, values: int) -> DeltaShape:
    return DeltaShape(
        batch=64,
        tokens=1,
        heads=32,
        heads_q=16,
        heads_k=16,
        heads_v=32,
        width=width,
        values=values,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        scale=1.0,
        qk_l2norm=True,
        l2norm_eps=1e-12,
        carried=True,
        packed=False,
    )


def _recorded(config: Config, shape: DeltaShape) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    given = StepTensors(
        q=meta(shape.batch, shape.heads_q, shape.width, dtype=shape.dtype),
        k=meta(shape.batch, shape.heads_k, shape.width, dtype=shape.dtype),
        v=meta(shape.batch, shape.heads_v, shape.values, dtype=shape.dtype),
        log_decay=meta(shape.batch, shape.heads),
        beta=meta(shape.batch, shape.heads),
        state=meta(*shape.state),
        slots=meta(shape.batch, dtype=torch.int64),
    )
    with use_config(SPACE_FWD, config), runtime.record_launches() as sources:
        triton.fwd(shape, given)
    return [
        CompileCase(OP, "fwd", config, source)
        for source in sources
        if isinstance(source, KernelSource)
    ]
