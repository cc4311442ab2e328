"""What sweeps and compile reports need of the rule: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...autotune.compile import CompileCase, KernelSource, expected_matrix, target_device
from ...autotune.space import Config, Device, Space, assume_device, use_config
from .. import triton_runtime as runtime
from . import gated_delta_rule, triton
from .op import DeltaShape, DeltaTensors
from .triton_spaces import OP

EAGER = partial(gated_delta_rule, backend="eager")  # in float64 it is the rule, see the tests
SPACES = triton.SPACES


@dataclass(frozen=True)
class Problem:
    """A batch of sequences.

    `groups`: heads of values to one of queries and keys. `dtypes`: those it is swept in unless
    others are asked for.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    width: int
    values: int
    groups: int = 1
    dtypes: tuple[str, ...] = ("bf16",)

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two ragged ones."""
        few = replace(self, batch=2, tokens=197, heads=2 * self.groups)
        return few, replace(few, tokens=67, width=self.width - 3, values=self.values - 5)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {"scale": self.width**-0.5, "output_final_state": True}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return gated_delta_rule, EAGER

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call."""
        generator = torch.Generator(device).manual_seed(seed)
        acc = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(heads: int, width: int) -> torch.Tensor:
            size = (self.batch, self.tokens, heads, width)
            return torch.randn(size, generator=generator, device=device).to(dtype)

        def uniform() -> torch.Tensor:
            size = (self.batch, self.tokens, self.heads)
            return torch.rand(size, generator=generator, device=device).to(acc)

        shared = self.heads // self.groups
        return {
            "q": normal(shared, self.width),
            "k": normal(shared, self.width),
            "v": normal(self.heads, self.values),
            "log_decay": -0.2 * uniform(),
            "beta": uniform(),
        }


def problem(
    *, T: int, D: int, Dv: int = 0, B: int = 1, H: int = 16, groups: int = 1, function: str = OP
) -> Problem:
    """The problem of these sizes, Dv as D by default; `function`: "gated_delta_rule"."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    values = Dv or D
    name = f"B{B}-T{T}-H{H}-D{D}-V{values}" + (f"-groups{groups}" if groups > 1 else "")
    return Problem(name, B, T, H, D, values, groups)


PROBLEMS = (
    Problem("B1-T8192-H16-D128", 1, 8192, 16, 128, 128),
    Problem("B1-T32768-H8-D128", 1, 32768, 8, 128, 128),
    Problem("B8-T4096-H16-D128", 8, 4096, 16, 128, 128),
    Problem("B1-T8192-H64-D128-groups4", 1, 8192, 64, 128, 128, 4),
    Problem("B2-T8192-H16-D64", 2, 8192, 16, 64, 64),
    Problem("B1-T8192-H16-D256", 1, 8192, 16, 256, 256),
    Problem("B2-T2048-H16-D128-fp32", 2, 2048, 16, 128, 128, dtypes=("fp32",)),
)


# ---- compile reports ----------------------------------------------------------------------------

SIZES = ((128, 128), (64, 64), (256, 256), (128, 64))
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"qk_l2norm": False, "carried": False},
    {"packed": True},
    {"dtype": torch.float32},
    {"width": 100, "values": 130},
    {"width": 125, "values": 125},
)
# The kernels that a space's report has: those that it chooses for, and those that have no choice.
OWN = {
    "fwd": ("walk", "normalise"),
    "fwd_prepare": ("prepare",),
    "fwd_output": ("output",),
    "bwd": ("walk_back", "collect"),
    "bwd_push": ("push",),
    "bwd_pull": ("pull",),
    "bwd_queries": ("of_queries",),
    "bwd_pairs": ("of_pairs",),
    "bwd_keys": ("of_keys",),
}
# Bytes of stack that a kernel may use on targets with wgmma and on others, in 16 bits and in fp32;
# all others must not spill. As measured, for the widest of `SIZES` too.
MAX_STACK: dict[tuple[str, int], tuple[int, int]] = {
    ("prepare", 2): (40, 208),
    ("output", 2): (0, 10984),
    ("walk_back", 2): (96, 5112),
    ("collect", 2): (24, 32),
    ("pull", 2): (104, 152),
    ("of_queries", 2): (40, 224),
    ("of_pairs", 2): (88, 840),
    ("of_keys", 2): (664, 704),
    ("walk", 4): (384, 14344),
    ("prepare", 4): (376, 3344),
    ("output", 4): (296, 14672),
    ("push", 4): (0, 9184),
    ("walk_back", 4): (1264, 11768),
    ("collect", 4): (24, 32),
    ("pull", 4): (104, 160),
    ("of_queries", 4): (400, 3032),
    ("of_pairs", 4): (344, 2784),
    ("of_keys", 4): (664, 8496),
}


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config that fits the target; the default one for other rules and sizes, too.

    The launcher runs on meta tensors and its launches are recorded, so a report sees what a call
    would compile. `quick` keeps the default configs of the first size.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    wgmma = expected_matrix("wgmma", target) == "wgmma"
    with assume_device(device):
        for space in SPACES:
            for config, shape in _compiled(space, device, quick):
                for case in _recorded(space, config, shape, wgmma):
                    cases.setdefault((case.config, repr(case.source)), case)
    return list(cases.values())


def _compiled(space: Space, device: Device, quick: bool) -> Iterator[tuple[Config, DeltaShape]]:
    """Configs, and what each is compiled for."""
    backward = space.pass_.startswith("bwd")
    shape = replace(_compile_shape(*SIZES[0]), backward=backward)
    yield space.default(space.bucket(shape), device), shape
    if quick:
        return
    for size in SIZES:
        shape = replace(_compile_shape(*size), backward=backward)
        for config in space.fitting(space.bucket(shape), device):
            yield config, shape
    for rules in _VARIANTS:
        shape = replace(_compile_shape(*SIZES[0]), backward=backward, **rules)
        yield space.default(space.bucket(shape), device), shape


def _compile_shape(width: int, values: int) -> DeltaShape:
    return DeltaShape(
        batch=2,
        tokens=8192,
        heads=16,
        heads_q=8,
        heads_k=8,
        heads_v=16,
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


def _recorded(space: Space, config: Config, shape: DeltaShape, wgmma: bool) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (1 if shape.packed else shape.batch, shape.tokens)
    given = DeltaTensors(
        q=meta(*rows, shape.heads_q, shape.width, dtype=shape.dtype),
        k=meta(*rows, shape.heads_k, shape.width, dtype=shape.dtype),
        v=meta(*rows, shape.heads_v, shape.values, dtype=shape.dtype),
        log_decay=meta(*rows, shape.heads),
        beta=meta(*rows, shape.heads),
        initial_state=meta(*shape.state) if shape.carried else None,
        cu_seqlens=meta(shape.batch + 1, dtype=torch.int32) if shape.packed else None,
    )
    with use_config(space, config), runtime.record_launches() as sources:
        if shape.backward:
            d_o = meta(*rows, shape.heads, shape.values, dtype=shape.dtype)
            triton.bwd(shape, d_o, meta(*shape.state), given)
        else:
            triton.fwd(shape, given)
    return [
        CompileCase(
            OP, space.pass_, config, source,
            matrix="fma" if source.name in triton.WITHOUT_PRODUCTS else None,
            max_stack=_max_stack(source, shape, wgmma),
        )
        for source in sources
        if isinstance(source, KernelSource) and source.name in OWN[space.pass_]
    ]  # fmt: skip


def _max_stack(source: KernelSource, shape: DeltaShape, wgmma: bool) -> int:
    return MAX_STACK.get((source.name, shape.dtype.itemsize), (0, 0))[not wgmma]
