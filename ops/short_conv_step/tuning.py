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
from ..short_conv.op import ConvShape
from . import short_conv_step_, triton
from .op import StepTensors
from .triton_spaces import OP, SPACE_FWD

EAGER = partial(short_conv_step_, backend="eager")  # in float64 it is the rule, see the tests


@dataclass(frozen=True)
class Problem:
    """Tokens of some sequences, in slots of a pool.

    `gates`: "io" for both, as LFM2 has them; `silu`, `residual`, `bias`: rules of the call. `few`:
    a small one that is compared with float64, whose rows are skipped here and there. `dtypes`:
    those it is swept in unless others are asked for. 16-bit types share their buckets.
    """

    name: str
    rows: int
    channels: int
    taps: int = 3
    gates: str = "io"
    silu: bool = False
    residual: bool = False
    bias: bool = False
    few: bool = False
    dtypes: tuple[str, ...] = ("bf16",)

    @property
    def checks(self) -> tuple[Problem, Problem]:
        """A ragged one that lies as this one does, and rows that start anywhere, with all rules."""
        less = self.channels - 8 if self.channels > 16 else self.channels
        few = replace(self, rows=7, channels=less, few=True)
        return few, replace(
            few, rows=5, channels=less - 1, taps=4, silu=True, residual=True, bias=True
        )

    @property
    def call(self) -> dict[str, Any]:
        """Keyword arguments beyond the tensors."""
        return {"activation": "silu" if self.silu else None, "residual": self.residual}

    @property
    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The public function and its reference."""
        return short_conv_step_, EAGER

    @property
    def written(self) -> tuple[str, ...]:
        """Arguments that the call writes."""
        return ("state_pool",)

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Fresh random arguments of the call, gates and x cut from one projection."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        names = (*(f"gate_{word}" for word in ("in", "out") if word[0] in self.gates), "x")
        whole = normal(self.rows, len(names) * self.channels).to(dtype)
        made = dict(zip(names, whole.split(self.channels, -1), strict=True))
        made["weight"] = normal(self.channels, self.taps).to(dtype)
        if self.bias:
            made["bias"] = normal(self.channels).to(dtype)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        slots = self.rows + self.few
        made["state_pool"] = normal(slots, self.taps - 1, self.channels).to(acc)
        made["slots"] = torch.randperm(slots, generator=generator, device=device)[: self.rows]
        if self.few:
            made["slots"][1] = -1
        return made


def problem(
    *, N: int, D: int, K: int = 3, gates: str = "io", silu: int = 0, residual: int = 0,
    bias: int = 0, function: str = OP,
) -> Problem:  # fmt: skip
    """The problem of these sizes; `gates` "io", "i", "o" or ""; `function`: "short_conv_step_"."""
    if function != OP:
        raise ValueError(f"function must be {OP}, got {function!r}")
    words = [f"N{N}", f"D{D}", f"K{K}", gates]
    words += [name for name, on in (("silu", silu), ("residual", residual), ("bias", bias)) if on]
    name = "-".join(filter(None, words))
    return Problem(name, N, D, K, gates, bool(silu), bool(residual), bool(bias))


PROBLEMS = (
    Problem("lfm2-N256-D2048", 256, 2048, dtypes=("bf16", "fp32")),
    Problem("lfm2-N64-D2048", 64, 2048),
    Problem("lfm2-N1-D2048", 1, 2048),
    Problem("silu-N256-D512", 256, 512, 4, "", silu=True, bias=True),
)
SPACES = (SPACE_FWD,)


# ---- compile reports ----------------------------------------------------------------------------

_VARIANTS: tuple[dict[str, Any], ...] = (
    {"taps": 4, "gate_in": False, "gate_out": False, "residual": True},
    {"taps": 4, "silu": True, "bias": True, "residual": True},
    {"taps": 1},
    {"dtype": torch.float32},
    {"channels": 130},
)


def compile_cases(target: str, quick: bool) -> list[CompileCase]:
    """Every config that fits the target, as LFM2 calls it; the default for other rules, too.

    The launcher runs on meta tensors and its launches are recorded, so a report sees what a call
    would compile. `quick` keeps the default config.
    """
    device = target_device(target)
    with assume_device(device):
        return [
            case for config, shape in _compiled(device, quick) for case in _recorded(config, shape)
        ]


def _compiled(device: Device, quick: bool) -> Iterator[tuple[Config, ConvShape]]:
    """Configs, and what each is compiled for."""
    shape = _compile_shape()
    key = SPACE_FWD.bucket(shape)
    if quick:
        yield SPACE_FWD.default(key, device), shape
        return
    for config in SPACE_FWD.fitting(key, device):
        yield config, shape
    for rules in _VARIANTS:
        shape = replace(_compile_shape(), **rules)
        yield SPACE_FWD.default(SPACE_FWD.bucket(shape), device), shape


def _compile_shape() -> ConvShape:
    return ConvShape(
        batch=256,
        tokens=1,
        channels=2048,
        taps=3,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        silu=False,
        residual=False,
        bias=False,
        gate_in=True,
        gate_out=True,
        carried=True,
        packed=False,
    )


def _recorded(config: Config, shape: ConvShape) -> list[CompileCase]:
    def meta(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (shape.batch, shape.channels)
    given = StepTensors(
        x=meta(*rows),
        weight=meta(shape.channels, shape.taps),
        state_pool=meta(shape.batch, shape.taps - 1, shape.channels, dtype=torch.float32),
        slots=meta(shape.batch, dtype=torch.int64),
        bias=meta(shape.channels) if shape.bias else None,
        gate_in=meta(*rows) if shape.gate_in else None,
        gate_out=meta(*rows) if shape.gate_out else None,
    )
    with use_config(SPACE_FWD, config), runtime.record_launches() as sources:
        triton.fwd(shape, given)
    return [
        CompileCase(OP, "fwd", config, source)
        for source in sources
        if isinstance(source, KernelSource)
    ]
