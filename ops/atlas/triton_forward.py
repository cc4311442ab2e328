"""One call of the Triton backend: tensors as the kernels take them, and the forward launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...autotune.space import Config, Device, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..newton_schulz.coefficients import on_device
from ..omega.triton_forward import GATE_HEADS, GATES_CONFIG, Call, strides
from ..triton_runtime import padded
from .op import AtlasShape, AtlasTensors
from .triton_spaces import KERNELS, OP, SPACE_FWD, bucket, compute_dtype


class Forward(Call):
    """One call's tensors as the kernels take them, and its launches."""

    def __init__(self, shape: AtlasShape, given: AtlasTensors, space: Space = SPACE_FWD) -> None:
        config = choose(space, bucket(shape), Device.of(shape.device))
        # Its chunks are those of the rule, "dot" or not: each ends in a Newton–Schulz.
        Call.__init__(self, replace(shape, dot=False), given.memory, config=config)
        self.rules = shape
        self.flags |= {"DOT": shape.dot, "V": padded(shape.values)}
        self.output_step = given.output_step.contiguous()

    def results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """y, M and S after the last token."""
        self.gates()
        y = empty(self.given.v.shape, dtype=self.shape.dtype, device=self.device)
        if self.shape.packed:
            y.zero_()
        state, velocity = self.walk(y=y)
        return y, state, velocity

    def gates(self, bounded: bool = False) -> None:
        """Everything that depends on gates alone."""
        shape, gate = self.shape, self.gate
        heads, rows = shape.heads, self.flags["CHUNK"]
        self.rates = self.empty(self.slots, heads, rows)
        self.sums_left = self.empty(*self.row)
        self.edges = {
            "pushes": self.empty(self.slots, heads, self.halo + rows),
            "ends": self.empty(self.slots, heads, 3),
        }
        arguments: dict[str, Any] = {
            **gate,
            "output_step": self.output_step,
            "cu": self.given.cu_seqlens,
            "sums": self.sums_left,
            "rates": self.rates,
            **self.edges,
            **self.sizes,
        }
        constants = {
            "DECAY": shape.decay,
            "GATES": gate["window_gates"] is not None,
            **{name: self.flags[name] for name in ("PACKED", "CHUNK", "HALO")},
            "HEADS": GATE_HEADS,
        }
        programs = self.slots * -(-heads // GATE_HEADS)
        self._run("atlas_gates", programs, GATES_CONFIG, arguments, constants)

    def walk(
        self, y: torch.Tensor | None = None, states: torch.Tensor | None = None,
        momenta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """M and S after the last token; y, or else M and S of every chunk, are written."""
        shape, given, rules = self.shape, self.given, self.rules
        last = (shape.batch, shape.heads, shape.wide, shape.values)
        state, velocity = self.empty(*last), self.empty(*last)
        starts = self.starts()
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            **self.older,
            "cu": given.cu_seqlens,
            "rates": self.rates,
            **self.edges,
            "table": self.table(),
            **starts,
            "states": states,
            "momenta": momenta,
            "y": y,
            "state": state,
            "velocity": velocity,
            **self.sizes,
            "steps": len(rules.ns_numbers) // 3,
            "eps": rules.ns_eps,
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("v", self.v),
        }
        constants = {
            **{name: x for name, x in self.flags.items() if name != "MOMENTUM"},
            "BEFORE": shape.read_before,
            "INITIAL": starts["initial_state"] is not None,
            "INITIAL_MOMENTUM": starts["initial_momentum"] is not None,
            "KEEP": y is None,
            **self.orthogonal(),
        }
        self._run("atlas_walk", shape.batch * shape.heads, self.config, arguments, constants)
        return state, velocity

    def table(self) -> torch.Tensor:
        """Coefficients of Newton–Schulz."""
        return on_device(self.rules.ns_numbers, self.device)

    def orthogonal(self) -> dict[str, Any]:
        """Constants of Newton–Schulz."""
        import triton.language as tl

        compute = compute_dtype(self.rules)
        return {
            "COMPUTE": tl.float16 if compute == torch.float16 else tl.float32,
            "NS_PRECISION": "ieee" if compute == torch.float16 else self.ns_precision(),
            "MIRROR": self.config["MIRROR"],
        }

    def ns_precision(self) -> str:
        """How fp32 iterates are multiplied."""
        return runtime.precision(torch.float32, self.device)

    def _run(
        self, kernel: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        runtime.launch(OP, (KERNELS, kernel), programs, self.device, config, arguments, constants)
