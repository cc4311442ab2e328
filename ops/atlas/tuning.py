"""What sweeps and compile reports need of the Atlas memory: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import reference
from ...autotune.compile import CompileCase, KernelSource, target_device
from ...autotune.space import Config, Device, Space, assume_device, use_config
from .. import triton_runtime as runtime
from ..newton_schulz.coefficients import schedule
from ..omega import tuning as omega
from ..omega.op import OmegaTensors
from . import atlas_memory, triton
from .op import AtlasShape, AtlasTensors
from .triton_spaces import OP


@dataclass(frozen=True)
class Problem(omega.Problem):
    """One shape that a sweep times, as of the Omega rule with momentum, and as it is judged."""

    momentum: bool = True

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two whose last chunks are ragged ones, of heads less and more than a block of gates."""
        few = replace(self, batch=2, tokens=197, heads=3, judged=True)
        return few, replace(few, batch=1, tokens=299, heads=9)

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return atlas_memory, reference.atlas_memory

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Those of the Omega rule, and steps of the orthogonal factor. Momenta are from 0.9 on: of
        few tokens S has directions of rounding alone, which Newton–Schulz makes as large as others.
        """
        made = super().inputs(dtype, device, seed)
        generator = torch.Generator(device).manual_seed(seed + 1)
        x = torch.rand(made["step"].shape, generator=generator, device=device)
        return made | {"momentum": 0.9 + 0.2 * made["momentum"], "output_step": 0.1 + 0.4 * x}


def problem(
    *,
    T: int,
    D: int,
    B: int = 1,
    H: int = 16,
    window: int = 4,
    chunk_size: int = 64,
    function: str = OP,
) -> Problem:
    """The problem of these sizes; `function`: "atlas_memory"."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    name = f"B{B}-T{T}-H{H}-D{D}-window{window}-chunk{chunk_size}"
    return Problem(name, B, T, H, D, window, chunk_size)


PROBLEMS = (
    Problem("T2k-D64-many", batch=16, tokens=2048, heads=64, width=64),
    Problem("T2k-D64", 4, 2048, 16, 64),
    Problem("T2k-D128", 4, 2048, 16, 128),
    Problem("T1k-D64-fp32", 4, 1024, 16, 64, dtypes=("fp32",)),
)
SPACES = tuple(space for space in (triton.SPACE_FWD, triton.SPACE_BWD) if space is not None)


# ---- compile reports ----------------------------------------------------------------------------

# What is compiled: every config for the first of these widths that it serves, in both dtypes.
WIDTHS = (64, 128, 32)
# Default configs for these, too; packed sequences with all that a call may carry.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"packed": True, "batch": 3},
    {"aligned": False, "window": 1},
    {"chunk_size": 16},
)
# Bytes of stack that a kernel may use on targets with wgmma and on others, by dtype and the padded
# width: what waits while Newton–Schulz runs, whose own loop has none in bf16; all others must not
# spill.
MAX_STACK: dict[tuple[str, str, int], tuple[int, int]] = {
    ("atlas_gradients", "bfloat16", 64): (32, 136),
    ("atlas_gradients", "bfloat16", 128): (720, 496),
    ("atlas_gradients", "float16", 64): (24, 16),
    ("atlas_gradients", "float32", 32): (80, 136),
    ("atlas_gradients", "float32", 64): (768, 1824),
    ("atlas_walk", "bfloat16", 64): (472, 496),
    ("atlas_walk", "bfloat16", 128): (632, 432),
    ("atlas_walk", "float16", 64): (720, 520),
    ("atlas_walk", "float16", 128): (1560, 0),
    ("atlas_walk", "float32", 32): (232, 248),
    ("atlas_walk", "float32", 64): (1072, 1704),
    ("atlas_walk", "float32", 128): (1944, 0),
    ("atlas_walk_back", "bfloat16", 64): (744, 688),
    ("atlas_walk_back", "bfloat16", 128): (1784, 1592),
    ("atlas_walk_back", "float16", 32): (48, 24),
    ("atlas_walk_back", "float16", 64): (960, 2448),
    ("atlas_walk_back", "float32", 32): (296, 264),
    ("atlas_walk_back", "float32", 64): (1152, 2520),
}


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config that fits the target; `quick`: the default one of the first width."""
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    with assume_device(device):
        for space in SPACES:
            for config, shape in _compiled(space, device, quick):
                for case in _recorded(space, config, shape, target):
                    cases.setdefault((config, repr(case.source)), case)
    return list(cases.values())


def _compiled(space: Space, device: Device, quick: bool) -> Iterator[tuple[Config, AtlasShape]]:
    shape = _compile_shape()
    default = space.default(space.bucket(shape), device)
    if quick:
        yield default, shape
        return
    for rules in VARIANTS:
        yield default, replace(shape, **rules)
    served: set[tuple[Config, torch.dtype]] = set()
    for width in WIDTHS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            shape = _compile_shape(width, dtype=dtype)
            for config in space.fitting(space.bucket(shape), device):
                if (config, dtype) not in served:
                    yield config, shape
                served.add((config, dtype))


def _compile_shape(width: int = WIDTHS[0], **rules: Any) -> AtlasShape:
    shape = AtlasShape(
        batch=4,
        tokens=2048,
        heads=16,
        width=width,
        wide=width,
        values=width,
        window=4,
        chunk_size=64,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        dot=False,
        feature_map="identity",
        momentum=True,
        packed=False,
        read_before=False,
        ns_stride=64,
        ns_numbers=schedule(OP, "muon", 5),
        ns_eps=1e-7,
    )
    return replace(shape, **rules)


def _recorded(space: Space, config: Config, shape: AtlasShape, target: str) -> list[CompileCase]:
    """What a pass launches with a config."""

    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (1 if shape.packed else shape.batch, shape.tokens, shape.heads)
    x, gate = meta(*rows, shape.width, dtype=shape.dtype), meta(*rows)
    if not shape.aligned:
        x = meta(*rows, shape.width + 1, dtype=shape.dtype)[..., 1:]
    state = meta(shape.batch, shape.heads, shape.wide, shape.values)
    given: dict[str, Any] = dict.fromkeys(OmegaTensors._fields)
    given |= {"q": x, "k": x, "v": x, "step": gate, "decay": gate, "momentum": gate}
    given["window_gates"] = meta(*rows, shape.window)
    if shape.packed:
        tail = meta(shape.batch, shape.window - 1, shape.heads, shape.width, dtype=shape.dtype)
        lengths = meta(shape.batch, dtype=torch.int32)
        given |= {"initial_state": state, "initial_momentum": state}
        given |= {"tail_k": tail, "tail_v": tail, "tail_length": lengths}
        given["cu_seqlens"] = meta(shape.batch + 1, dtype=torch.int32)
    tensors = AtlasTensors(OmegaTensors(**given), gate)
    with use_config(space, config), runtime.record_launches() as sources:
        if space.pass_ == "fwd":
            triton.fwd(shape, tensors)
        else:
            triton.bwd(shape, x, state, state, tensors)
    return [
        CompileCase(
            OP, space.pass_, config, source,
            matrix=_matrix(source),
            max_stack=_max_stack(source, shape, target),
        )
        for source in sources
        if isinstance(source, KernelSource)
    ]  # fmt: skip


def _matrix(source: KernelSource) -> str | None:
    """Where it is not what the config states: a last chunk of few rows has no wgmma."""
    if source.name in ("atlas_gates", "atlas_gates_back", "omega_edges"):
        return "fma"
    short = source.name == "atlas_gradients" and source.constexprs["CHUNK"] == runtime.LEAST
    return "mma" if short or source.num_warps < 4 else None


def _max_stack(source: KernelSource, shape: AtlasShape, target: str) -> int:
    of = (source.name, str(shape.dtype).removeprefix("torch."), runtime.padded(shape.width))
    return MAX_STACK.get(of, (0, 0))[not target.startswith("sm_90")]
