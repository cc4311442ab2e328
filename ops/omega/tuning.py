"""What sweeps and compile reports need of the Omega rule: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import normalize

from ... import reference
from ...autotune.compile import CompileCase, KernelSource, expected_matrix, target_device
from ...autotune.space import Config, Device, Space, assume_device, use_config
from .. import triton_runtime as runtime
from ..triton_runtime import LEAST, padded
from . import omega_memory, triton
from .op import OmegaShape, OmegaTensors
from .symmetric_back import OLDER as OLDER_KEYS
from .symmetric_spaces import SPACE_SYMMETRIC, SPACE_SYMMETRIC_BWD
from .triton_spaces import FEW_WALKS, LEAST_LENGTH, NARROW_WARPS, OP, SPACE_BWD, SPACE_FWD, TILE


@dataclass(frozen=True)
class Problem:
    """One shape that a sweep times, values as wide as keys, with decay and window gates.

    `judged`: a small one that is compared with float64. Its q, k and v are views of one tensor, and
    the state is a result, too. `dtypes`: those it is swept in unless others are asked for. 16-bit
    types share their buckets.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    width: int
    window: int = 4
    chunk_size: int = 64
    momentum: bool = False
    symmetric: bool = False
    dtypes: tuple[str, ...] = ("bf16",)
    judged: bool = False

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """Two whose last chunks are ragged ones; of heads, less and more than a block of gates; as
        long as sequences have to be for the groups that this one may be cut into.
        """
        walks = self.batch * self.heads * -(-self.width // TILE)
        cut = walks <= FEW_WALKS and self.chunk_size == TILE
        cut = cut and not (self.momentum or self.symmetric)
        longer = TILE * LEAST_LENGTH if cut else 0
        few = replace(self, batch=2, tokens=197 + longer, heads=3, judged=True)
        return few, replace(few, batch=1, tokens=299 + longer, heads=9)

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        rules: dict[str, Any] = {"window": self.window, "chunk_size": self.chunk_size}
        rules |= {"feature_map": "symmetric"} if self.symmetric else {}
        return rules | ({"return_state": True} if self.judged else {})

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return omega_memory, reference.omega_memory

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call: keys of norm one, gates that keep M bounded.

        The longer the chunk, the larger the step that all of its tokens make together.
        """
        generator = torch.Generator(device).manual_seed(seed)
        rows = (self.batch, self.tokens, self.heads)

        def normal() -> torch.Tensor:
            return torch.randn(*rows, self.width, generator=generator, device=device)

        def between(low: float, high: float, *size: int) -> torch.Tensor:
            x = torch.rand(*rows, *size, generator=generator, device=device)
            return low + (high - low) * x

        q, k, v = normalize(normal(), dim=-1), normalize(normal(), dim=-1), normal()
        q, k, v = (x.to(dtype) for x in (q, k, v))
        if self.judged:
            q, k, v = torch.cat((q, k, v), -1).split(self.width, -1)
        made = {
            "q": q,
            "k": k,
            "v": v,
            "step": between(0, self.chunk_size**-0.5),
            "decay": between(0.8, 1),
            "window_gates": between(0, 2 / self.window, self.window),
        }
        if self.momentum:
            made["momentum"] = between(0, 0.5)
        return made


def problem(
    *,
    T: int,
    D: int,
    B: int = 1,
    H: int = 16,
    window: int = 4,
    chunk_size: int = 64,
    momentum: int = 0,
    symmetric: int = 0,
    function: str = OP,
) -> Problem:
    """The problem of these sizes; `symmetric`: 1 for symmetric features; `function`:
    "omega_memory".
    """
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    words = [f"B{B}", f"T{T}", f"H{H}", f"D{D}", f"window{window}", f"chunk{chunk_size}"]
    words += ["momentum" if momentum else "", "symmetric" if symmetric else ""]
    name = "-".join(filter(None, words))
    return Problem(name, B, T, H, D, window, chunk_size, bool(momentum), bool(symmetric))


PROBLEMS = (
    Problem("T8k-D64", batch=4, tokens=8192, heads=16, width=64),
    Problem("T8k-D128", 4, 8192, 16, 128),
    Problem("T8k-D128-one-row", 1, 8192, 16, 128),
    Problem("T8k-D64-chunk16", 4, 8192, 16, 64, chunk_size=16),
    Problem("T8k-D64-momentum", 4, 8192, 16, 64, momentum=True),
    Problem("T2k-D64-fp32", 4, 2048, 16, 64, dtypes=("fp32",)),
    Problem("T8k-D64-symmetric", 4, 8192, 16, 64, symmetric=True),
)
SPACES = (SPACE_FWD, SPACE_BWD, SPACE_SYMMETRIC, SPACE_SYMMETRIC_BWD)


# ---- compile reports ----------------------------------------------------------------------------

# What default configs are compiled for, aligned and not. Packed sequences, with all that a call may
# carry, and momentum have the loads of both, so neither comes alone.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"width": 128},
    {"momentum": True, "packed": True, "batch": 3},
    {"chunk_size": 16},
    {"dtype": torch.float32},
)
# Forward alone, and aligned, has kernels for short chunks.
_SPLIT: tuple[dict[str, Any], ...] = (
    {"chunk_size": 16, "width": 128, "packed": True, "batch": 3},
    {"chunk_size": 8},
    {"chunk_size": 32},
)
# Any other is compiled for the first of these widths that it serves, or for few heads.
# Narrow ones have configs of their own.
WIDTHS = (64, 16, 32, 128)
# Seen to run their wgmma one by one: where it spills; and where half the registers, and hardly a
# value in memory, are faster than products that overlap.
SERIAL = ("omega_gradients", "omega_walk_spans")
# Bytes of stack that a kernel may use on targets with wgmma and on others: values around its loops,
# and tables of two tokens beside each other. By the padded width, or what weighs more than that;
# all others must not spill.
MAX_STACK: dict[tuple[str, int | str], tuple[int, int]] = {
    ("scan", 64): (40, 0),
    ("scan", 128): (72, 0),
    ("scan", "momentum"): (40, 0),
    ("states", 128): (8, 0),
    ("scan_back", 128): (32, 0),
    ("chunk_gradients", 128): (120, 0),
    ("scan_split", 128): (328, 0),
    ("solve", 64): (200, 0),
    ("solve", 128): (480, 0),
    ("solve", "eight chunks"): (1088, 0),
    ("walk_spans", 64): (88, 0),
    ("walk_symmetric", 64): (216, 464),
    ("reads_symmetric", 64): (416, 448),
    ("walk_back_symmetric", 64): (336, 528),
    ("pairs_back", 64): (696, 768),
    ("features_back", 64): (1208, 1912),
    ("chain", 64): (0, 64),
    ("chain", 128): (64, 1088),
    ("chain", "momentum"): (0, 64),
    ("chain", "fp32"): (0, 128),
    ("reads", 16): (0, 16),
    ("reads", 32): (160, 208),
    ("reads", 64): (0, 32),
    ("reads", 128): (32, 9472),
    ("reads", "momentum"): (256, 7488),
    ("reads", "fp32"): (576, 13440),
    ("pull", 16): (0, 112),
    ("pull", 32): (0, 48),
    ("pull", 64): (0, 480),
    ("pull", 128): (0, 1472),
    ("pull", "momentum"): (144, 6464),
    ("pull", "fp32"): (576, 3264),
    ("chain_back", 128): (64, 640),
    ("chain_back", "fp32"): (0, 64),
    ("gradients", 16): (1024, 768),
    ("gradients", 32): (1760, 1760),
    ("gradients", 64): (832, 1984),
    ("gradients", 128): (2368, 9280),
    ("gradients", "momentum"): (2496, 19904),
    ("gradients", "fp32"): (6208, 8064),
    ("gradients of older keys", 32): (32, 0),
    ("gradients of older keys", 64): (256, 192),
    ("gradients of older keys", 128): (64, 64),
    ("gradients of older keys", "momentum"): (64, 64),
    ("gradients of older keys", "fp32"): (512, 576),
}


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every kernel of every config that fits the target, in chunks of 64 and with a window of 4.

    The launchers themselves run on meta tensors and their launches are recorded, so a report sees
    what a call would compile. Default configs are compiled for `_VARIANTS`, any other for the first
    width that it serves; a kernel of forward that backward launches again, only there. `quick`
    keeps the first variant.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    before: set[str] = set()
    device = target_device(target)
    wgmma = expected_matrix("wgmma", target) == "wgmma"
    with assume_device(device):
        for space in SPACES:
            for config, shape in _compiled(space, device, quick):
                for case in _recorded(space, config, shape, wgmma):
                    if repr(case.source) not in before:
                        cases.setdefault((config, repr(case.source)), case)
            before = {repr(case.source) for case in cases.values()}
    return list(cases.values())


def _compiled(space: Space, device: Device, quick: bool) -> Iterator[tuple[Config, OmegaShape]]:
    """Configs, and what each is compiled for."""
    if space in (SPACE_SYMMETRIC, SPACE_SYMMETRIC_BWD):
        shape = _compile_shape(feature_map="symmetric", wide=WIDTHS[0] * (WIDTHS[0] + 3) // 2)
        shapes = [shape]
        if not quick or space is SPACE_SYMMETRIC:  # which repacks a state for backward, too
            shapes.append(replace(shape, packed=True, batch=3, aligned=False))
        if not quick:
            shapes.append(replace(shape, packed=True, batch=3))
        yield from ((space.default(space.bucket(x), device), x) for x in shapes)
        fitting = space.fitting(space.bucket(shape), device)
        if quick:  # one without the walk for Hopper, and with it what backward lays out, too
            fitting = [config for config in fitting if not config.get("HOPPER")][:1]
        yield from ((config, shape) for config in fitting)
        return
    served: set[Config] = set()
    variants = [
        rules | {"aligned": aligned}
        for rules in (_VARIANTS[:1] if quick else _VARIANTS)
        for aligned in (True, False)  # one in a kernel for Hopper, one in kernels for all calls
    ]
    if space.pass_ == "fwd" and not quick:
        variants += _SPLIT
    for rules in variants:
        shape = _compile_shape(**rules)
        key = space.bucket(shape)
        if space.fitting(key, device):
            default = space.default(key, device)
            served.add(default)
            yield default, shape
    if quick:
        return
    few = [_compile_shape(WIDTHS[-1], batch=1), _compile_shape(batch=1, heads=4)]
    for shape in (*map(_compile_shape, WIDTHS), *few):
        for config in space.fitting(space.bucket(shape), device):
            if config not in served:
                yield config, shape
            served.add(config)


def _compile_shape(width: int = WIDTHS[0], **rules: Any) -> OmegaShape:
    shape = OmegaShape(
        batch=4,
        tokens=8192,
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
        momentum=False,
        packed=False,
        read_before=False,
    )
    return replace(shape, **rules)


def _recorded(space: Space, config: Config, shape: OmegaShape, wgmma: bool) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (1 if shape.packed else shape.batch, shape.tokens, shape.heads)
    x, gate = meta(*rows, shape.width, dtype=shape.dtype), meta(*rows)
    state = meta(shape.batch, shape.heads, shape.wide, shape.values)
    given: dict[str, Any] = dict.fromkeys(OmegaTensors._fields)
    given |= {"q": x, "k": x, "v": x, "step": gate, "decay": gate}
    given["window_gates"] = meta(*rows, shape.window)
    if shape.momentum:
        given["momentum"] = gate
    if shape.packed:  # with all that a call may carry
        tail = meta(shape.batch, shape.window - 1, shape.heads, shape.width, dtype=shape.dtype)
        lengths = meta(shape.batch, dtype=torch.int32)
        given |= {"initial_state": state, "tail_k": tail, "tail_v": tail, "tail_length": lengths}
        given["cu_seqlens"] = meta(shape.batch + 1, dtype=torch.int32)
    tensors = OmegaTensors(**given)
    with use_config(space, config), runtime.record_launches() as sources:
        if space.pass_.startswith("fwd"):
            triton.fwd(shape, tensors)
        else:
            triton.bwd(shape, x, state, state if shape.momentum else None, tensors)
    return [
        CompileCase(
            OP, space.pass_, config, source,
            matrix=_matrix(source), max_stack=_max_stack(source, shape, wgmma),
            serial=source.name in SERIAL,
        )
        for source in sources
        if isinstance(source, KernelSource)
    ]  # fmt: skip


def _matrix(source: KernelSource) -> str | None:
    """Where it is not what the config states: two warps, and tiles of 16 rows, have no wgmma."""
    scalar = (
        "omega_gates", "omega_edges", "omega_gates_back", "repack", "omega_lay_out", "omega_inner",
        "omega_tables_symmetric",
    )  # fmt: skip
    if source.name in scalar or (
        source.name == "omega_tables" and not source.constexprs["MOMENTUM"]
    ):
        return "fma"
    older = source.constexprs.get("OLDER", False) or source.constexprs.get("KIND") == OLDER_KEYS
    narrow = source.name == "omega_reads" and source.constexprs["CHUNK"] == LEAST
    small = source.name == "omega_solve" and source.constexprs["PARTS"] != 2
    few = source.num_warps <= NARROW_WARPS
    return "mma" if older or narrow or small or few else None


def _max_stack(source: KernelSource, shape: OmegaShape, wgmma: bool) -> int:
    kernel = source.name.removeprefix("omega_")
    if source.constexprs.get("OLDER"):
        kernel += " of older keys"
    kind: int | str = padded(shape.width)
    if shape.momentum:
        kind = "momentum"
    if shape.dtype == torch.float32:
        kind = "fp32"
    if kernel == "solve" and source.constexprs["PARTS"] == 8:
        kind = "eight chunks"
    return MAX_STACK.get((kernel, kind), (0, 0))[not wgmma]
