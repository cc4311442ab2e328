"""What sweeps and compile reports need of a step: problems, inputs, the reference call.

Found by name (`fastweights.ops.<op>.tuning`), so that `autotune` imports no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import normalize

from ...autotune.compile import CompileCase, KernelSource, target_device
from ...autotune.space import Config, Device, assume_device, use_config
from .. import triton_runtime as runtime
from ..omega.cache import OmegaCache, omega_cache
from ..omega.op import OmegaShape
from . import omega_step_, triton
from .op import StepTensors
from .triton_spaces import OP, SPACE_FWD

EAGER = partial(omega_step_, backend="eager")  # in float64 it is the rule, which the tests hold to


@dataclass(frozen=True)
class Problem:
    """Tokens of some sequences, in slots of a pool, with decay and window gates.

    Their chunks are filled as those of a server that has run for a while: from one token to all.
    `few`: a small one that is compared with float64. Some of its slots are empty, some of its rows
    are skipped, and its q, k and v are views of one tensor. `dtypes`: those it is swept in unless
    others are asked for. 16-bit types share their buckets.
    """

    name: str
    rows: int
    heads: int
    width: int
    values: int
    window: int = 4
    chunk_size: int = 64
    momentum: bool = False
    dtypes: tuple[str, ...] = ("bf16",)
    few: bool = False

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """One of the same widths, and one of others, whose rows start alike: configs are for either
        aligned or loose rows.
        """
        few = replace(self, rows=7, heads=3, few=True)
        return few, replace(few, rows=5, width=_beside(self.width), values=_beside(self.values))

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {"window": self.window, "chunk_size": self.chunk_size}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return omega_step_, EAGER

    @property
    def written(self) -> tuple[str, ...]:
        """Arguments that the call writes."""
        return ("cache",)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> dict[str, Any]:
        """Fresh random arguments of the call, the memories in the middle of their chunks."""
        generator = torch.Generator(device).manual_seed(seed)
        how: dict[str, Any] = {"generator": generator, "device": device}
        how["dtype"] = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, **how)

        def between(low: float, high: float, *size: int) -> torch.Tensor:
            return low + (high - low) * torch.rand(*size, **how)

        rows = (self.rows, self.heads)
        q, k, v = (normal(*rows, n) for n in (self.width, self.width, self.values))
        q, k, v = (x.to(dtype) for x in (normalize(q, dim=-1), normalize(k, dim=-1), v))
        if self.few:
            q, k, v = torch.cat((q, k, v), -1).split((self.width, self.width, self.values), -1)
        made: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "step": between(0, self.chunk_size**-0.5, *rows),
            "decay": between(0.8, 1, *rows),
            "window_gates": between(0, 2 / self.window, *rows, self.window),
        }
        if self.momentum:
            made["momentum"] = between(0, 0.5, *rows)
        slots = self.rows + self.few
        made["cache"] = self._memories(slots, dtype, device, normal, between)
        made["slots"] = torch.randperm(slots, generator=generator, device=device)[: self.rows]
        if self.few:
            made["slots"][1] = -1
        return made

    def _memories(
        self,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        normal: Callable[..., torch.Tensor],
        between: Callable[..., torch.Tensor],
    ) -> OmegaCache:
        """Of which slot n holds n + 1 tokens, or, of few ones, from none to a whole chunk."""
        cache = omega_cache(
            slots, self.heads, self.width, self.values, window=self.window,
            chunk_size=self.chunk_size, momentum=self.momentum, dtype=dtype, device=device,
        )  # fmt: skip
        older = self.window - 1
        number = torch.arange(slots, device=device)
        filled = number % self.chunk_size + 1
        length = torch.full_like(filled, older)
        if self.few:
            filled = number * self.chunk_size // max(slots - 1, 1)
            length = number % (older + 1)
        begun = (filled > 0)[:, None]
        row = torch.arange(older + self.chunk_size, device=device)
        there = (row >= older - length[:, None]) & (row < older + filled[:, None])
        there = (there & begun)[:, None]
        weights, scalars = cache.write.shape, cache.decay.shape
        changes: dict[str, Any] = {
            "state": normal(*cache.state.shape),
            "keys": normalize(normal(*cache.keys.shape), dim=-1).to(dtype),
            "values": normal(*cache.values.shape).to(dtype),
            "residuals": normal(*cache.residuals.shape),
            "write": between(0, 0.1, *weights) * there,
            "decay": torch.where(begun, between(0.1, 1, *scalars), 1.0),
            "tail_length": length.to(torch.int32),
            "filled": filled.to(torch.int32),
        }
        if self.momentum:
            changes |= {
                "momentum": normal(*cache.state.shape),
                "momentum_write": between(0, 0.1, *weights) * there,
                "carry": torch.where(begun, between(0, 0.5, *scalars), 0.0),
                "momentum_decay": torch.where(begun, between(0, 0.5, *scalars), 1.0),
            }
        return cache._replace(**changes)

    def compared(self, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All results, rows of a chunk that do not exist as zeros: they may hold anything."""
        row = torch.arange(results["keys"].shape[1], device=results["keys"].device)
        older = self.window - 1
        there = row >= older - results["tail_length"][:, None]
        there = there & (row < older + results["filled"][:, None])
        # Residuals of older rows come with the first token of a chunk.
        begun = there & (results["filled"] > 0)[:, None]
        masks = {"keys": there, "values": there, "residuals": begun}
        return results | {
            name: results[name].masked_fill(~mask[..., None, None], 0)
            for name, mask in masks.items()
        }


def _beside(length: int) -> int:
    """Another length of the same tile that is a multiple of 16 bytes if this one is."""
    less = length - 8
    return less if less > 0 and runtime.padded(less) == runtime.padded(length) else length + 8


def problem(
    *,
    N: int,
    D: int,
    Dv: int = 0,
    H: int = 16,
    window: int = 4,
    chunk_size: int = 64,
    momentum: int = 0,
    function: str = OP,
) -> Problem:
    """The problem of these sizes, Dv as D by default; `function`: "omega_step_"."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    values = Dv or D
    words = [f"N{N}", f"H{H}", f"D{D}", f"V{values}", f"window{window}", f"chunk{chunk_size}"]
    words.append("momentum" if momentum else "")
    name = "-".join(filter(None, words))
    return Problem(name, N, H, D, values, window, chunk_size, bool(momentum))


PROBLEMS = (
    *(Problem(f"N{n}-D{d}", n, 16, d, d) for n in (256, 64, 1) for d in (64, 128)),
    Problem("N256-D64-momentum", 256, 16, 64, 64, momentum=True),
    Problem("N256-D64-fp32", 256, 16, 64, 64, dtypes=("fp32",)),
    Problem("N64-D61-V63", 64, 16, 61, 63),  # loose rows
)
SPACES = (SPACE_FWD,)


# ---- compile reports ----------------------------------------------------------------------------

# Every config that fits one of these widths is compiled once; the first two are compiled whole.
WIDTHS = ((64, 64), (128, 128), (32, 32), (16, 16), (128, 256), (256, 128))
# What the default config is compiled for beside that, at the first width.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"momentum": True},
    {"momentum": True, "feature_map": "elementwise"},
    {"momentum": True, "dtype": torch.float32},
    {"dot": True, "read_before": True, "decay": False},
    {"feature_map": "elementwise", "read_before": True},
    {"dtype": torch.float32},
    {"feature_map": "elementwise", "momentum": True, "aligned": False},
    {"width": 128, "wide": 128, "values": 100, "aligned": False, "momentum": True},
    {"width": 16, "wide": 16, "values": 15, "dtype": torch.float32, "momentum": True},
    {"width": 20, "wide": 20, "values": 20},
    {"width": 250, "wide": 250, "values": 6},
)


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Both kernels of every config that fits the target, in chunks of 64 and with a window of 4.

    The launcher itself runs on meta tensors and its launches are recorded, so a report sees what a
    call would compile. Default configs are compiled for some other rules, too. `quick` keeps the
    default config of the first width. The kernel that folds is the same for many configs, which
    share its report.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    with assume_device(device):
        for config, shape in _compiled(device, quick):
            for case in _recorded(config, shape):
                cases.setdefault((config, repr(case.source)), case)
    return list(cases.values())


def _compiled(device: Device, quick: bool) -> Iterator[tuple[Config, OmegaShape]]:
    """Configs, and what each is compiled for."""
    shape = _compile_shape(*WIDTHS[0])
    default = SPACE_FWD.default(SPACE_FWD.bucket(shape), device)
    yield default, shape
    if quick:
        return
    known: set[Config] = set()
    for width, values in WIDTHS:
        shape = _compile_shape(width, values)
        configs = SPACE_FWD.fitting(SPACE_FWD.bucket(shape), device)
        if (width, values) not in WIDTHS[:2]:
            configs = [config for config in configs if config not in known]
        known |= set(configs)
        for config in configs:
            yield config, shape
    for rules in _VARIANTS:
        shape = replace(_compile_shape(*WIDTHS[0]), **rules)
        yield SPACE_FWD.default(SPACE_FWD.bucket(shape), device), shape


def _compile_shape(width: int, values: int) -> OmegaShape:
    return OmegaShape(
        batch=256,
        tokens=1,
        heads=16,
        width=width,
        wide=width,
        values=values,
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


def _recorded(config: Config, shape: OmegaShape) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (shape.batch, shape.heads)
    given = StepTensors(
        q=meta(*rows, shape.width, dtype=shape.dtype),
        k=meta(*rows, shape.width, dtype=shape.dtype),
        v=meta(*rows, shape.values, dtype=shape.dtype),
        slots=meta(shape.batch, dtype=torch.int64),
        step=meta(*rows),
        decay=meta(*rows) if shape.decay else None,
        window_gates=meta(*rows, shape.window),
        momentum=meta(*rows) if shape.momentum else None,
        coefficients=None if shape.feature_map == "identity" else meta(shape.heads, 4),
    )
    cache = omega_cache(
        shape.batch, shape.heads, shape.wide, shape.values, window=shape.window,
        chunk_size=shape.chunk_size, momentum=shape.momentum, dtype=shape.dtype, device="meta",
    )  # fmt: skip
    with use_config(SPACE_FWD, config), runtime.record_launches() as sources:
        triton.fwd(shape, given, cache)
    return [
        CompileCase(
            OP, "fwd", config, source, matrix="mma" if source.name == "omega_fold" else None
        )
        for source in sources
        if isinstance(source, KernelSource)
    ]
