"""One call's gradients: the backward launches. Keys that two chunks see, tails and feature maps are
those of the Omega rule.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import last_contiguous
from ..omega.triton_backward import Backward as OmegaBackward
from ..omega.triton_forward import GATE_HEADS, GATES_CONFIG, strides
from ..triton_runtime import padded
from .op import AtlasShape, AtlasTensors
from .triton_forward import Forward
from .triton_spaces import KERNELS_BWD, OP, SPACE_BWD, compute_dtype

SIDE = (
    64  # of a state that four warps share in `atlas_gradients`; two a narrower one, eight a wider
)
GRADIENTS_CONFIGS = {warps: Config.make(warps, 1) for warps in (2, 4, 8)}


class Backward(Forward, OmegaBackward):
    """One call's gradients, kernel after kernel."""

    def __init__(
        self, shape: AtlasShape, given: AtlasTensors, d_y: torch.Tensor, d_state: torch.Tensor,
        d_momentum: torch.Tensor,
    ) -> None:  # fmt: skip
        Forward.__init__(self, shape, given, SPACE_BWD)
        self.d_y = last_contiguous(d_y)
        self.d_state, self.d_momentum = d_state.contiguous(), d_momentum.contiguous()
        self.mapped = shape.feature_map != "identity"
        # Upstream gradients are whatever torch hands over.
        self.flags["ALIGNED"] = self.flags["ALIGNED"] and self.aligned(self.d_y)

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Of the first `DIFFERENTIABLE` tensors of a call, None where there is no tensor; and of
        output_step.
        """
        shape, heads, rows = self.shape, self.shape.heads, self.flags["CHUNK"]
        each = (self.slots, heads, shape.wide, shape.values)
        self.gates()
        kept = {"states": self.empty(*each), "momenta": self.empty(*each)}
        last, _ = self.walk(**kept)
        out = self.outputs()
        d_states = empty(each, dtype=shape.dtype, device=self.device)
        found: dict[str, Any] = {
            "d_states": d_states,
            "peaks": self.empty(self.slots, heads),
            "d_ends": self.empty(self.slots, heads, 3),
        }
        d_initial, d_initial_momentum = self._walk_back(kept, last, found, out["d_q"])
        del kept["momenta"]
        made = {
            "d_rates": self.empty(self.slots, heads, rows),
            "d_pushes": self.empty(self.slots, heads, self.halo + rows),
        }
        parts = self._of_chunks_alone(kept["states"], found, made, out)
        d_output = self._of_gates(found["d_ends"], made, out)
        grads = self.finish(out, parts, d_initial, d_initial_momentum)
        return (*grads, d_output)

    def _walk_back(
        self, kept: dict[str, torch.Tensor], last: torch.Tensor, found: dict[str, Any],
        d_q: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        shape, rules = self.shape, self.rules
        first = (shape.batch, shape.heads, shape.wide, shape.values)
        d_initial, d_initial_momentum = self.empty(*first), self.empty(*first)
        programs, steps = shape.batch * shape.heads, len(rules.ns_numbers) // 3
        size = (programs, steps, self.flags["V"], self.flags["D"])
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "d_y": self.d_y,
            "tail_k": self.older["tail_k"],
            "tail_length": self.older["tail_length"],
            "cu": self.given.cu_seqlens,
            "rates": self.rates,
            **self.edges,
            "table": self.table(),
            "initial_momentum": self.starts()["initial_momentum"],
            **kept,
            "last": last,
            "d_last": self.d_state,
            "d_last_momentum": self.d_momentum,
            "scratch": empty(size, dtype=compute_dtype(rules), device=self.device),
            **found,
            "d_initial": d_initial,
            "d_initial_momentum": d_initial_momentum,
            "d_q": d_q,
            **self.sizes,
            "steps": steps,
            "eps": rules.ns_eps,
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("y", self.d_y),
        }
        constants = {
            **self._flags(),
            "INITIAL_MOMENTUM": arguments["initial_momentum"] is not None,
            **self.orthogonal(),
        }
        self._launch_back("atlas_walk_back", programs, self.config, arguments, constants)
        return d_initial, d_initial_momentum

    def _of_chunks_alone(
        self, states: torch.Tensor, found: dict[str, Any], made: dict[str, torch.Tensor],
        out: dict[str, torch.Tensor | None],
    ) -> dict[str, torch.Tensor | None]:  # fmt: skip
        """q, k and v, and what the gates amount to; returns the keys that wait at edges."""
        parts = self.edge_parts()
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "d_y": self.d_y,
            **self.older,
            "cu": self.given.cu_seqlens,
            "rates": self.rates,
            "pushes": self.edges["pushes"],
            "states": states,
            "d_states": found["d_states"],
            "peaks": found["peaks"],
            **{name: out[name] for name in ("d_q", "d_k", "d_v")},
            **parts,
            **made,
            **self.sizes,
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("v", self.v),
            **strides("y", self.d_y),
        }
        sides = self.flags["V"], self.flags["D"]
        warps = 2 if min(sides) < SIDE else 4 if max(sides) == SIDE else 8
        programs, config = self.slots * self.shape.heads, GRADIENTS_CONFIGS[warps]
        self._launch_back("atlas_gradients", programs, config, arguments, self._flags())
        return parts

    def _of_gates(
        self, d_ends: torch.Tensor, made: dict[str, torch.Tensor],
        out: dict[str, torch.Tensor | None],
    ) -> torch.Tensor:  # fmt: skip
        """All gates' but output_step's, which is returned."""
        shape, gate, heads = self.shape, self.gate, self.shape.heads
        rows, _, tokens = self.row
        new = self._zeros if shape.packed else self.empty
        d_output = new(rows, tokens, heads)
        arguments: dict[str, Any] = {
            **gate,
            "cu": self.given.cu_seqlens,
            "rates": self.rates,
            **made,
            "d_ends": d_ends,
            **{name: out[name] for name in ("d_step", "d_decay", "d_theta", "d_gates")},
            "d_output": d_output,
            **self.sizes,
        }
        constants = {
            "DECAY": shape.decay,
            "GATES": gate["window_gates"] is not None,
            **{name: self.flags[name] for name in ("PACKED", "CHUNK", "HALO")},
            "HEADS": GATE_HEADS,
        }
        programs = self.slots * -(-heads // GATE_HEADS)
        self._launch_back("atlas_gates_back", programs, GATES_CONFIG, arguments, constants)
        return d_output

    def _flags(self) -> dict[str, Any]:
        names = ("MOMENTUM",)
        flags = {name: x for name, x in self.flags.items() if name not in names}
        return flags | {"BEFORE": self.shape.read_before, "V": padded(self.shape.values)}

    def _launch_back(
        self, kernel: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        runtime.launch(
            OP, (KERNELS_BWD, kernel), programs, self.device, config, arguments, constants
        )
