"""Triton backend: the launchers. Kernels are in `triton_features` and `triton_state`."""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from .maps import defaults
from .op import Gradients, PolynomialShape
from .triton_spaces import (
    FEATURES,
    SPACE_CONTRACT,
    SPACE_EXPAND,
    SPACE_PULL,
    SPACE_READ,
    SPACE_UPDATE,
    STATE,
    bucket,
    by_itself,
    refusal,
)

OP = "polynomial"
TILE = 4096  # numbers of a tile of powers
POWERS_CONFIG = PACK_CONFIG = Config.make(4, 1, "fma")


def supports(shape: PolynomialShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    device = Device.of(shape.device)
    if arch != "cpu" and device.capability < 80:
        return f"{arch} is older than sm_80"
    reason = refusal(shape)
    if reason is None:
        for space in _launched(shape):
            if not space.fitting(bucket(shape), device):
                return f"no config of {space.name} fits into the shared memory of {arch}"
    return reason


def spaces(shape: PolynomialShape) -> dict[str, Space]:
    """The config spaces of a call's passes; powers of single numbers have none."""
    if by_itself(shape):
        return {}
    fwd, bwd = {
        "features": (SPACE_EXPAND, SPACE_CONTRACT),
        "read": (SPACE_READ, SPACE_PULL),
        "update": (SPACE_UPDATE, SPACE_PULL),
    }[shape.function]
    return {"fwd": fwd, "bwd": bwd}


def _launched(shape: PolynomialShape) -> list[Space]:
    """All that a pass of a call chooses from: a backward also reads, or updates."""
    if by_itself(shape):
        return []
    if shape.function == "features":
        return [SPACE_CONTRACT if shape.backward else SPACE_EXPAND]
    if not shape.backward:
        return [SPACE_READ if shape.function == "read" else SPACE_UPDATE]
    return [SPACE_PULL, SPACE_UPDATE if shape.function == "read" else SPACE_READ]


def fwd(
    shape: PolynomialShape,
    x: torch.Tensor,
    other: torch.Tensor | None,
    coefficients: torch.Tensor | None,
) -> torch.Tensor:
    """φ(x) (1, T, H, D) in x's dtype; φ(x) S (B, T, H, Dv), too; φ(x)ᵀ G (B, H, D, Dv) in fp32."""
    call = _Call(shape, x, coefficients)
    if other is None:
        return call.powers() if by_itself(shape) else call.expand()
    return call.read(other) if shape.function == "read" else call.update(other)


def bwd(
    shape: PolynomialShape,
    upstream: torch.Tensor,
    x: torch.Tensor,
    other: torch.Tensor | None,
    coefficients: torch.Tensor | None,
    wanted: tuple[bool, bool],
) -> Gradients:
    """Gradients of x and the coefficients, and of S or G; `wanted`: the first two, the last."""
    call = _Call(shape, x, coefficients)
    if other is None:
        back = call.powers_back if by_itself(shape) else call.contract
        d_x, d_a = back(upstream)
        return Gradients(d_x, None, d_a)
    read = shape.function == "read"
    d_other = None
    if wanted[1]:
        d_other = call.update(upstream) if read else call.read(upstream)
    if not wanted[0]:
        return Gradients(None, d_other, None)
    rows, state = (upstream, other) if read else (other, upstream)
    d_x, d_a = call.pull(rows, state)
    return Gradients(d_x, d_other, d_a)


class _Call:
    """One call's tensors as the kernels take them, and its launches."""

    def __init__(
        self, shape: PolynomialShape, x: torch.Tensor, coefficients: torch.Tensor | None
    ) -> None:
        self.shape, self.device = shape, shape.device
        self.x = last_contiguous(x)
        self.a = coefficients
        self.width = runtime.padded(shape.width)
        kept = shape.map.kept
        self.arguments: dict[str, Any] = {
            "a": coefficients,
            "heads": shape.heads,
            "stride_ah": coefficients.stride(0)
            if shape.by_head and coefficients is not None
            else 0,
            "stride_ar": 0 if coefficients is None else coefficients.stride(-1),
        }
        self.constants: dict[str, Any] = {
            "DEFAULTS": defaults(shape.map.degree) if coefficients is None else None,
            "WIDTH": shape.width,
            "P": self.width,
        }
        self.kept = {"CONSTANT": 0 in kept, "LINEAR": 1 in kept, "PAIRS": 2 in kept}
        self.multiplied = {"PRECISION": runtime.precision(shape.dtype, shape.device)}

    def _empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return empty(size, dtype=dtype or self.shape.dtype, device=self.device)

    def _choose(self, space: Space) -> Config:
        return choose(space, bucket(self.shape), Device.of(self.device))

    def _launch(
        self, module: str, kernel: str, programs: int, config: Config,
        arguments: dict[str, Any], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        runtime.launch(
            OP, (module, kernel), programs, self.device, config,
            self.arguments | arguments, self.constants | constants,
        )  # fmt: skip

    # ---- features -------------------------------------------------------------------------------

    def _rows(self) -> dict[str, Any]:
        """x as rows (rows, heads, width)."""
        return {
            "x": self.x,
            "rows": self.shape.tokens,
            "stride_xt": self.x.stride(1),
            "stride_xh": self.x.stride(2),
        }

    def _tiles(self) -> dict[str, int]:
        map_, width = self.shape.map, self.shape.width
        return {"TILE": map_.tile, "TILES": map_.padded(width) // map_.tile}

    def expand(self) -> torch.Tensor:
        """φ(x)."""
        shape = self.shape
        config = self._choose(SPACE_EXPAND)
        out = self._empty(1, shape.tokens, shape.heads, shape.wide)
        chunks, tiles = -(-shape.wide // config["C"]), -(-shape.tokens // config["R"])
        # A program takes up to 32 tiles, which pay for its picking matrices, but no more than leave
        # 32 programs to a multiprocessor: the last ones to end are to be few among many.
        least = -(-32 * Device.of(self.device).multiprocessors // max(1, chunks * shape.heads))
        parts = min(tiles, max(-(-tiles // 32), least))
        constants = {
            **self.kept, **self._tiles(), **self.multiplied,
            "WIDE": shape.wide, "ALIGNED": aligned(self.x),
            "R": config["R"], "C": config["C"], "STAGES": config.num_stages,
        }  # fmt: skip
        arguments = self._rows() | {"out": out, "parts": max(parts, 1)}
        programs = chunks * parts * shape.heads
        self._launch(FEATURES, "expand", programs, config, arguments, constants)
        return out

    def contract(self, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of x and the coefficients."""
        config = self._choose(SPACE_CONTRACT)
        constants = {**self.kept, **self._tiles(), "R": config["R"]}
        d_x, sums = self._back("contract", upstream, config, constants, config["R"], 3)
        return d_x, self._slopes(sums)

    def powers(self) -> torch.Tensor:
        """φ(x) of single numbers."""
        shape = self.shape
        out = self._empty(1, shape.tokens, shape.heads, shape.wide)
        constants = self._of_powers() | {"WIDE": shape.wide}
        tiles = -(-shape.tokens // constants["R"])
        arguments = self._rows() | {"out": out, "tiles": tiles}
        programs = tiles * shape.heads
        self._launch(FEATURES, "powers", programs, POWERS_CONFIG, arguments, constants)
        return out

    def powers_back(self, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of x and the coefficients."""
        constants = self._of_powers()
        count = self.shape.map.degree + 1
        d_x, sums = self._back(
            "powers_back", upstream, POWERS_CONFIG, constants, constants["R"], count
        )
        return d_x, None if self.a is None else sums if self.shape.by_head else sums.sum(0)

    def _of_powers(self) -> dict[str, Any]:
        map_ = self.shape.map
        kept = map_.kept
        places = tuple(kept.index(r) if r in kept else -1 for r in range(map_.degree + 1))
        rows = max(1, TILE // self.width)
        return {"PLACES": places, "CONCAT": map_.kind == "concat", "R": rows}

    def _back(
        self, kernel: str, upstream: torch.Tensor, config: Config, constants: dict[str, Any],
        rows: int, count: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The gradient of x, and `count` sums of each head."""
        shape = self.shape
        upstream = last_contiguous(upstream)
        d_x = self._empty(1, shape.tokens, shape.heads, shape.width)
        tiles = -(-shape.tokens // rows)
        sums = self._empty(shape.heads, tiles, count, dtype=torch.float32)
        arguments = self._rows() | {
            "upstream": upstream,
            "d_x": d_x,
            "sums": sums,
            "tiles": tiles,
            "stride_ut": upstream.stride(1),
            "stride_uh": upstream.stride(2),
        }
        self._launch(FEATURES, kernel, tiles * shape.heads, config, arguments, constants)
        return d_x, sums.sum(1)

    def _slopes(self, sums: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the coefficients from ⟨dφ_r, φ_r⟩ of heads and degrees (H, 3)."""
        if self.a is None:
            return None
        total = sums if self.shape.by_head else sums.sum(0)
        count = min(self.a.shape[-1], 3)
        d_a = torch.zeros_like(self.a, memory_format=torch.contiguous_format)
        a = self.a[..., :count]
        d_a[..., :count] = torch.where(a == 0, 0.0, 0.5 * total[..., :count] / a)
        return d_a

    # ---- products with a state ------------------------------------------------------------------

    def _tokens(self, x: torch.Tensor, name: str) -> dict[str, Any]:
        """A (B, T, H, ·) tensor and its strides."""
        strides = {f"stride_{name}{axis}": n for axis, n in zip("bth", x.stride(), strict=False)}
        return {name: x, **strides}

    def _pack(
        self, kernel: str, state: torch.Tensor, steps: int, values: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """A state in steps as `read` and `pull` multiply with it; its own arguments."""
        shape = self.shape
        blocks = -(-shape.values // values)
        programs = shape.batch * shape.heads * blocks * steps
        packed = self._empty(programs, self.width * values)
        strides = zip("bhr", state.stride(), strict=False)
        given = {"state": state, **{f"stride_s{axis}": stride for axis, stride in strides}}
        constants = {**self.kept, "VALUES": shape.values, "STEPS": steps, "V": values}
        arguments = given | {"packed": packed}
        self._launch(STATE, kernel, programs, PACK_CONFIG, arguments, constants)
        return packed, given

    def _anchor(self) -> bool:
        return self.shape.dtype.itemsize == 2

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """φ(x) S."""
        shape = self.shape
        config = self._choose(SPACE_READ)
        steps = self.kept["LINEAR"] + self.kept["PAIRS"] * (self.width // 2 + 1)
        packed, given = self._pack("pack_steps", last_contiguous(state), steps, config["V"])
        out = self._empty(shape.batch, shape.tokens, shape.heads, shape.values)
        tiles = -(-shape.tokens // config["T"])
        arguments = {
            **self._tokens(self.x, "x"), **given,
            "packed": packed, "out": out, "tokens": shape.tokens, "tiles": tiles,
        }  # fmt: skip
        constants = {
            **self.kept, **self.multiplied, "VALUES": shape.values, "STEPS": steps,
            "ALIGNED": aligned(self.x), "ANCHOR": self._anchor(),
            "V": config["V"], "T": config["T"], "STAGES": config.num_stages,
        }  # fmt: skip
        programs = tiles * -(-shape.values // config["V"]) * shape.batch * shape.heads
        self._launch(STATE, "read", programs, config, arguments, constants)
        return out

    def update(self, rows: torch.Tensor) -> torch.Tensor:
        """φ(x)ᵀ G."""
        shape = self.shape
        config = self._choose(SPACE_UPDATE)
        rows = last_contiguous(rows)
        size = (shape.batch, shape.heads, shape.wide, shape.values)
        out = self._empty(*size, dtype=torch.float32)
        arguments = {
            **self._tokens(self.x, "x"), **self._tokens(rows, "y"),
            "out": out, "tokens": shape.tokens,
        }  # fmt: skip
        constants = {
            **self.kept, **self.multiplied, "VALUES": shape.values, "WIDE": shape.wide,
            "X_ALIGNED": aligned(self.x), "Y_ALIGNED": aligned(rows), "ANCHOR": self._anchor(),
            "V": config["V"], "T": config["T"], "G": config["G"], "STAGES": config.num_stages,
        }  # fmt: skip
        groups = self.width // 2 // config["G"] + 1 if self.kept["PAIRS"] else 1
        programs = groups * -(-shape.values // config["V"]) * shape.batch * shape.heads
        self._launch(STATE, "update", programs, config, arguments, constants)
        return out

    def pull(
        self, rows: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of x and the coefficients in Σ φ(x) S yᵀ."""
        shape = self.shape
        config = self._choose(SPACE_PULL)
        steps = self.kept["LINEAR"] + self.kept["PAIRS"] * shape.width
        packed, given = self._pack("pack_square", last_contiguous(state), steps, config["V"])
        rows = last_contiguous(rows)
        d_x = self._empty(shape.batch, shape.tokens, shape.heads, shape.width)
        tiles, heads = -(-shape.tokens // config["T"]), shape.batch * shape.heads
        sums = None
        if self.a is not None:
            sums = self._empty(shape.batch, shape.heads, tiles, 3, dtype=torch.float32)
        arguments = {
            **self._tokens(self.x, "x"), **self._tokens(rows, "y"), **given,
            "packed": packed, "d_x": d_x, "sums": sums, "tokens": shape.tokens, "tiles": tiles,
        }  # fmt: skip
        constants = {
            **self.kept, **self.multiplied, "SUMS": sums is not None, "VALUES": shape.values,
            "STEPS": steps, "Y_ALIGNED": aligned(rows), "ANCHOR": self._anchor(),
            "SCALED": shape.dtype == torch.float16,
            "V": config["V"], "T": config["T"], "STAGES": config.num_stages,
        }  # fmt: skip
        self._launch(STATE, "pull", tiles * heads, config, arguments, constants)
        return d_x, None if sums is None else self._slopes(sums.sum((0, 2)))
