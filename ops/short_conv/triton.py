"""Triton backend: the launchers. Kernels are in `triton_kernels` and `triton_backward`."""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from .op import ConvShape, ConvTensors
from .triton_spaces import (
    BACKWARD,
    KERNELS,
    OP,
    SPACE_BWD,
    SPACE_FWD,
    THREAD_BYTES,
    bucket,
    refusal,
)

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "supports"]

# A line of memory, and so many of them that adding up takes few turns.
SUMMED_CHANNELS, SUMMED_PIECES = 32, 128
SUMS_CONFIG = Config.make(4, 1, "fma")


def supports(shape: ConvShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    return unsupported(shape, arch) or refusal(shape)


def unsupported(shape: Any, arch: str) -> str | None:
    """None, or why no kernel that sums in fp32 runs here."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if arch != "cpu" and Device.of(shape.device).capability < 80:
        return f"{arch} is older than sm_80"
    return None


def fwd(shape: ConvShape, given: ConvTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """y (B, T, D) in x's dtype, and the state (N, K − 1, D) after the last token."""
    config = choose(SPACE_FWD, bucket(shape), Device.of(shape.device))
    call = _Call(shape, given, config)
    y = empty(given.x.shape, dtype=shape.dtype, device=shape.device)
    last = call.of_state()
    arguments = call.arguments | {"y": y, "last": last}
    call.launch((KERNELS, "conv_fwd"), arguments, shape.batch if shape.taps > 1 else 0)
    return y, last


def bwd(
    shape: ConvShape, d_y: torch.Tensor, d_state: torch.Tensor, given: ConvTensors
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight, bias, gate_in, gate_out, initial_state; None for absent ones."""
    config = choose(SPACE_BWD, bucket(shape), Device.of(shape.device))
    d_y, d_state = last_contiguous(d_y), last_contiguous(d_state)
    call = _Call(shape, given, config, d_y, d_state)

    def like_x(there: bool) -> torch.Tensor | None:
        return empty(given.x.shape, dtype=shape.dtype, device=shape.device) if there else None

    d_x, d_in, d_out = like_x(True), like_x(shape.gate_in), like_x(shape.gate_out)
    d_initial = call.of_state() if shape.carried else None
    # Each run's part of the gradients of weight and bias, added up in one order, without atomics.
    parts = (call.pieces, shape.taps + shape.bias, shape.channels)
    sums = empty(parts, dtype=torch.float32, device=shape.device)
    arguments = call.arguments | {
        "d_y": d_y,
        "d_state": d_state,
        "d_x": d_x,
        "d_in": d_in,
        "d_out": d_out,
        "d_initial": d_initial,
        "sums": sums,
        "stride_d_y_b": d_y.stride(0),
        "stride_d_y_t": d_y.stride(1),
        "stride_d_state_n": d_state.stride(0),
        "stride_d_state_r": d_state.stride(1),
    }
    call.launch(
        (BACKWARD, "conv_bwd"), arguments, shape.batch if shape.carried and shape.taps > 1 else 0
    )
    d_weight = empty(given.weight.shape, dtype=given.weight.dtype, device=shape.device)
    d_bias = None
    if given.bias is not None:
        d_bias = empty(given.bias.shape, dtype=given.bias.dtype, device=shape.device)
    call.add_up(sums, d_weight, d_bias)
    return d_x, d_weight, d_bias, d_in, d_out, d_initial


class _Call:
    """One call's tensors as the kernels take them, in blocks of a config."""

    def __init__(
        self, shape: ConvShape, given: ConvTensors, config: Config, *upstream: torch.Tensor
    ) -> None:
        self.shape, self.config = shape, config
        x = last_contiguous(given.x)
        rows = {
            "gate_in": given.gate_in, "gate_out": given.gate_out, "state": given.initial_state
        }  # fmt: skip
        rows = {name: None if y is None else last_contiguous(y) for name, y in rows.items()}
        tokens = given.x.shape[1]
        self.runs = -(-tokens // config["RUN"])
        self.pieces = given.x.shape[0] * self.runs
        read = [y for y in (x, *rows.values(), *upstream) if y is not None and y.numel()]
        self.vector = vector(shape, read)
        bias, cu = given.bias, given.cu_seqlens
        self.arguments: dict[str, Any] = {
            "x": x,
            **rows,
            "weight": given.weight,
            "bias": bias,
            "cu": None if cu is None else cu.contiguous(),
            "batch": x.shape[0],
            "tokens": tokens,
            "groups": shape.channels // self.vector,
            "runs": self.runs,
            "sequences": shape.batch,
            "stride_x_b": x.stride(0),
            "stride_x_t": x.stride(1),
            "stride_weight_d": given.weight.stride(0),
            "stride_weight_k": given.weight.stride(1),
            "stride_bias": 0 if bias is None else bias.stride(0),
        }
        for name, axes in (("gate_in", "bt"), ("gate_out", "bt"), ("state", "nr")):
            row = rows[name]
            for dim, axis in enumerate(axes):
                self.arguments[f"stride_{name}_{axis}"] = 0 if row is None else row.stride(dim)

    def of_state(self) -> torch.Tensor:
        """Room for a state of each sequence."""
        shape = self.shape
        size = (shape.batch, shape.taps - 1, shape.channels)
        return empty(size, dtype=torch.float32, device=shape.device)

    def launch(self, kernel: tuple[str, str], arguments: dict[str, Any], sequences: int) -> None:
        """Programs for every run, and for each of so many sequences."""
        shape, config = self.shape, self.config
        blocks = -(-shape.channels // config["C"])
        constants = {
            "TAPS": shape.taps,
            "SILU": shape.silu,
            "RESIDUAL": shape.residual,
            "BIAS": shape.bias,
            "GATE_IN": shape.gate_in,
            "GATE_OUT": shape.gate_out,
            "CARRIED": shape.carried,
            "PACKED": shape.packed,
            "VEC": self.vector,
            "C": config["C"],
            "RUN": config["RUN"],
        }
        if config.get("AHEAD"):
            constants["AHEAD"] = config["AHEAD"]
        programs = (self.pieces + sequences) * blocks
        runtime.launch(OP, kernel, programs, shape.device, config, arguments, constants)

    def add_up(
        self, sums: torch.Tensor, d_weight: torch.Tensor, d_bias: torch.Tensor | None
    ) -> None:
        """The gradients of weight and bias from each run's part of them."""
        shape = self.shape
        arguments: dict[str, Any] = {
            "sums": sums,
            "d_weight": d_weight,
            "d_bias": d_bias,
            "pieces": self.pieces,
            "groups": shape.channels // self.vector,
        }
        constants: dict[str, Any] = {"TAPS": shape.taps, "BIAS": shape.bias, "VEC": self.vector}
        constants |= {"C": SUMMED_CHANNELS, "P": SUMMED_PIECES}
        programs = -(-shape.channels // SUMMED_CHANNELS) * (shape.taps + shape.bias)
        runtime.launch(
            OP, (BACKWARD, "conv_sums"), programs, shape.device, SUMS_CONFIG, arguments, constants
        )


def vector(shape: ConvShape, rows: list[torch.Tensor]) -> int:
    """How many channels a thread may read at once: 16 bytes where all rows are multiples of it."""
    numbers = THREAD_BYTES // shape.dtype.itemsize
    return numbers if shape.channels % numbers == 0 and all(map(aligned, rows)) else 1
