"""What sweeps and compile reports need of the short convolution: problems, inputs, the reference.

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
from . import short_conv, triton
from .op import ConvShape, ConvTensors
from .triton_spaces import OP, SPACE_BWD, SPACE_FWD


@dataclass(frozen=True)
class Problem:
    """One call that a sweep times.

    `gates`: "io" for both, as LFM2 has them; `silu`, `residual`, `bias`: rules of the call.
    `lengths`: of packed sequences, with an initial state. `dtypes`: those it is swept in unless
    others are asked for. 16-bit types share their buckets.
    """

    name: str
    batch: int
    tokens: int
    channels: int
    taps: int = 3
    gates: str = "io"
    silu: bool = False
    residual: bool = False
    bias: bool = False
    lengths: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("bf16",)

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """A ragged one that lies as this one does, and packed sequences of rows that start anywhere
        and that all rules hold for.
        """
        less = self.channels - 8 if self.channels > 16 else self.channels
        few = replace(self, batch=2, tokens=197, channels=less)
        return few, replace(
            few, batch=1, tokens=151, channels=less - 1, taps=4, silu=True, residual=True,
            bias=True, lengths=(67, 0, 2, 78),
        )  # fmt: skip

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        rules: dict[str, Any] = {"activation": "silu" if self.silu else None}
        return rules | {"residual": self.residual, "output_final_state": True}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return short_conv, reference.short_conv

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call, gates and x cut from one projection."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(dtype)

        names = (*(f"gate_{word}" for word in ("in", "out") if word[0] in self.gates), "x")
        whole = normal(self.batch, self.tokens, len(names) * self.channels)
        made = dict(zip(names, whole.split(self.channels, -1), strict=True))
        made = {"x": made.pop("x"), "weight": normal(self.channels, self.taps)} | made
        if self.bias:
            made["bias"] = normal(self.channels)
        if self.lengths:
            ends = torch.tensor((0, *self.lengths)).cumsum(0)
            made["cu_seqlens"] = ends.to(device, torch.int32)
            state = (len(self.lengths), self.taps - 1, self.channels)
            made["initial_state"] = normal(*state).to(
                torch.float64 if dtype == torch.float64 else torch.float32
            )
        return made


def problem(
    *, T: int, D: int, B: int = 1, K: int = 3, gates: str = "io", silu: int = 0,
    residual: int = 0, bias: int = 0, function: str = OP,
) -> Problem:  # fmt: skip
    """The problem of these sizes; `gates` "io", "i", "o" or ""; `function`: "short_conv"."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    words = [f"B{B}", f"T{T}", f"D{D}", f"K{K}", gates]
    words += [name for name, on in (("silu", silu), ("residual", residual), ("bias", bias)) if on]
    name = "-".join(filter(None, words))
    return Problem(name, B, T, D, K, gates, bool(silu), bool(residual), bool(bias))


PROBLEMS = (
    Problem("lfm2-D2048", 8, 4096, 2048, dtypes=("bf16", "fp32")),
    Problem("lfm2-D1024", 8, 4096, 1024),
    Problem("lfm2-D2048-short", 1, 2048, 2048),
    Problem("canon-D2048", 8, 4096, 2048, 4, "", residual=True),
    Problem("canon-D1024", 8, 4096, 1024, 4, "", residual=True),
    Problem("silu-D512", 8, 4096, 512, 4, "", silu=True, bias=True),
)
SPACES: tuple[Space, ...] = (SPACE_FWD, SPACE_BWD)


# ---- compile reports ----------------------------------------------------------------------------

CHANNELS = (2048, 1024, 256)
# What the default config of each pass is compiled for beside LFM2's call.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"taps": 4, "gate_in": False, "gate_out": False, "residual": True},
    {"taps": 4, "gate_in": False, "gate_out": False, "silu": True, "bias": True},
    {"taps": 4, "silu": True, "residual": True, "bias": True, "carried": True},
    {"taps": 4, "silu": True, "residual": True, "bias": True, "carried": True, "packed": True},
    {"taps": 1, "packed": True},
    {"taps": 2, "carried": True},
    {"dtype": torch.float32},
    {"dtype": torch.float32, "taps": 4, "silu": True, "residual": True, "carried": True},
    {"channels": 130},
)


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config that fits the target, as LFM2 calls it; default configs for other rules, too.

    The launchers run on meta tensors and their launches are recorded, so a report sees what a call
    would compile. `quick` keeps the default configs.
    """
    cases: dict[tuple[Config, str], CompileCase] = {}
    device = target_device(target)
    with assume_device(device):
        for space in SPACES:
            for config, shape in _compiled(space, device, quick):
                for case in _recorded(space, config, shape):
                    cases.setdefault((config, repr(case.source)), case)
    return list(cases.values())


def _compiled(space: Space, device: Device, quick: bool) -> Iterator[tuple[Config, ConvShape]]:
    """Configs, and what each is compiled for."""
    shape = _compile_shape()
    yield space.default(space.bucket(shape), device), shape
    if quick:
        return
    known: set[Config] = set()
    for channels in CHANNELS:
        shape = replace(_compile_shape(), channels=channels)
        for config in space.fitting(space.bucket(shape), device):
            if config not in known:
                yield config, shape
            known.add(config)
    for rules in _VARIANTS:
        shape = replace(_compile_shape(), **rules)
        yield space.default(space.bucket(shape), device), shape


def _compile_shape() -> ConvShape:
    return ConvShape(
        batch=8,
        tokens=4096,
        channels=2048,
        taps=3,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        silu=False,
        residual=False,
        bias=False,
        gate_in=True,
        gate_out=True,
        carried=False,
        packed=False,
    )


def _recorded(space: Space, config: Config, shape: ConvShape) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (1 if shape.packed else shape.batch, shape.tokens, shape.channels)
    state = meta(shape.batch, shape.taps - 1, shape.channels, dtype=torch.float32)
    given = ConvTensors(
        x=meta(*rows),
        weight=meta(shape.channels, shape.taps),
        bias=meta(shape.channels) if shape.bias else None,
        gate_in=meta(*rows) if shape.gate_in else None,
        gate_out=meta(*rows) if shape.gate_out else None,
        initial_state=state if shape.carried else None,
        cu_seqlens=meta(shape.batch + 1, dtype=torch.int32) if shape.packed else None,
    )
    with use_config(space, config), runtime.record_launches() as sources:
        if space.pass_ == "fwd":
            triton.fwd(shape, given)
        else:
            triton.bwd(replace(shape, backward=True), meta(*rows), state, given)
    return [
        CompileCase(OP, space.pass_, config, source)
        for source in sources
        if isinstance(source, KernelSource)
    ]
