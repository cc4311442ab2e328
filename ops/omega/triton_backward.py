"""Launches of the Triton backend's backward.

The memory at the begin of each chunk is not saved: the forward walk is taken again.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import last_contiguous
from ..triton_runtime import padded
from .eager import features_backward
from .op import OmegaShape, OmegaTensors
from .triton_forward import Begins, Call, known_window, strides
from .triton_spaces import KERNELS_BWD, OP, SPACE_BWD

EDGES_CONFIG = Config.make(4, 1, "fma")


class Backward(Call):
    """One call's gradients, kernel after kernel."""

    def __init__(
        self,
        shape: OmegaShape,
        given: OmegaTensors,
        d_y: torch.Tensor,
        d_state: torch.Tensor,
        d_momentum: torch.Tensor | None,
    ) -> None:
        super().__init__(shape, given, SPACE_BWD)
        self.d_y = last_contiguous(d_y)
        self.d_state = d_state.contiguous()
        self.d_momentum = None if d_momentum is None else d_momentum.contiguous()
        self.mapped = shape.feature_map != "identity"
        self.reading = {
            **self.flags,
            "DECAY": shape.decay,
            "BEFORE": shape.read_before,
            "WINDOW": known_window(shape),
            "GATES_PRECISION": self.gates_precision,
            # Upstream gradients are whatever torch hands over.
            "ALIGNED": self.flags["ALIGNED"] and self.aligned(self.d_y),
        }

    def gradients(self) -> tuple[Any, ...]:
        """Of the first `DIFFERENTIABLE` tensors of a call, None where there is no tensor."""
        self.gates()
        begins, *_ = self.chain(low=True)
        pull, pull_momentum = self._pull()
        d_states, d_momenta, d_initial, d_initial_momentum = self._chain_back(pull, pull_momentum)
        del pull, pull_momentum
        return self._of_chunks(begins, d_states, d_momenta, d_initial, d_initial_momentum)

    def _pull(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, config = self.shape, self.config
        each = (self.slots, shape.heads, shape.wide, shape.values)
        pull = self.empty(*each)
        pull_momentum = self.when(shape.momentum, *each)
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "d_y": self.d_y,
            "tail_k": self.older["tail_k"],
            "tail_length": self.older["tail_length"],
            "cu": self.given.cu_seqlens,
            **self.sums,
            "carry": self.carry,
            "pull": pull,
            "pull_momentum": pull_momentum,
            **self.sizes,
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("y", self.d_y),
        }
        constants = {**self.reading, "V": config["PULL_V"]}
        programs = self.slots * shape.heads * -(-shape.values // config["PULL_V"])
        self._launch(
            "omega_pull", programs, Config.make(config["PULL_WARPS"], 1), arguments, constants
        )
        return pull, pull_momentum

    def _chain_back(
        self, pull: torch.Tensor, pull_momentum: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        shape, config = self.shape, self.config
        each = (self.slots, shape.heads, shape.wide, shape.values)
        first = (shape.batch, shape.heads, shape.wide, shape.values)
        d_states = self.empty(*each, dtype=shape.dtype)
        d_momenta = self.empty(*each, dtype=shape.dtype) if shape.momentum else None
        d_initial, d_initial_momentum = self.empty(*first), self.when(shape.momentum, *first)
        arguments: dict[str, Any] = {
            "k": self.k,
            "tail_k": self.older["tail_k"],
            "tail_length": self.older["tail_length"],
            "cu": self.given.cu_seqlens,
            **self.edges,
            "pull": pull,
            "pull_momentum": pull_momentum,
            "d_last": self.d_state,
            "d_last_momentum": self.d_momentum,
            "d_states": d_states,
            "d_momenta": d_momenta,
            "d_initial": d_initial,
            "d_initial_momentum": d_initial_momentum,
            **self.sizes,
            **strides("k", self.k),
        }
        constants = {**self.flags, "V": config["CHAIN_V"], "STAGES": config.num_stages}
        programs = shape.batch * shape.heads * -(-shape.values // config["CHAIN_V"])
        self._launch("omega_chain_back", programs, config, arguments, constants)
        return d_states, d_momenta, d_initial, d_initial_momentum

    def _of_chunks(
        self,
        begins: Begins,
        d_states: torch.Tensor,
        d_momenta: torch.Tensor | None,
        d_initial: torch.Tensor,
        d_initial_momentum: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        shape, given, gate = self.shape, self.given, self.gate
        rows, heads, tokens = self.row
        halo = self.halo
        out, parts = self.outputs(), self.edge_parts()
        edge = (self.slots, heads, halo)
        older = {
            "older_scores": (
                self.empty(*edge, self.flags["CHUNK"], dtype=shape.dtype) if halo else None
            ),
            "older_weights": self.when(halo > 0, rows, heads, shape.window, tokens),
            "older_alpha": self.when(halo > 0 and shape.decay, *self.row),
            "older_theta": self.when(halo > 0 and shape.momentum, *self.row),
        }
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "d_y": self.d_y,
            **self.older,
            "step": gate["step"],
            "window_gates": gate["window_gates"],
            "cu": given.cu_seqlens,
            **self.sums,
            "carry": self.carry,
            "writes": self.edges["writes"],
            "pushes": self.edges["pushes"],
            **begins,
            "d_states": d_states,
            "d_momenta": d_momenta,
            **older,
            **out,
            **self.sizes,
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("v", self.v),
            **strides("y", self.d_y),
        }
        constants = {
            **self.reading,
            "GATES": given.window_gates is not None,
            "LOW": begins["states_low"] is not None,
            "V": self.config["VALUES_V"],
        }
        config = Config.make(self.config["WARPS"], 1)
        for of_older in (True, False) if halo else (False,):  # the second adds the first's
            side = "older" if of_older else "edge"
            places = {"edge_k": parts[f"{side}_k"], "edge_v": parts[f"{side}_v"]}
            self._launch(
                "omega_gradients", self.slots * heads, config, arguments | places,
                constants | {"OLDER": of_older},
            )  # fmt: skip
        return self.finish(out, parts, d_initial, d_initial_momentum)

    def outputs(self) -> dict[str, torch.Tensor | None]:
        """Room for the gradients of what comes a token at a time."""
        shape, given = self.shape, self.given
        rows, heads, tokens = self.row
        of_features = shape.acc if self.mapped else shape.dtype
        new = self._zeros if shape.packed else self.empty  # of the padding behind the last sequence
        gates = (rows, tokens, heads)
        return {
            "d_q": new(*gates, shape.wide, dtype=of_features),
            "d_k": new(*gates, shape.wide, dtype=of_features),
            "d_v": new(*gates, shape.values, dtype=shape.dtype),
            "d_step": new(*gates),
            "d_decay": new(*gates) if shape.decay else None,
            "d_theta": new(*gates) if shape.momentum else None,
            "d_gates": None if given.window_gates is None else new(*gates, shape.window),
        }

    def edge_parts(self) -> dict[str, torch.Tensor | None]:
        """Room for the gradients of keys and values that two chunks add to."""
        shape, edge = self.shape, (self.slots, self.shape.heads, self.halo)
        widths = {
            "edge_k": shape.wide, "edge_v": shape.values,
            "older_k": shape.wide, "older_v": shape.values,
        }  # fmt: skip
        return {name: self.when(self.halo > 0, *edge, width) for name, width in widths.items()}

    def finish(
        self,
        out: dict[str, Any],
        parts: dict[str, torch.Tensor | None],
        d_initial: torch.Tensor,
        d_initial_momentum: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        """All gradients, from those of chunks."""
        shape, given = self.shape, self.given
        d_q, d_k = out["d_q"], out["d_k"]
        d_tail_k = self._edges(parts["edge_k"], parts["older_k"], d_k, given.tail_k, shape.wide)
        d_tail_v = self._edges(
            parts["edge_v"], parts["older_v"], out["d_v"], given.tail_v, shape.values
        )
        d_coefficients: torch.Tensor | float = 0.0
        if self.mapped:
            tokens_there, tail_there = self._there()
            d_q, of_q = self._through_map(given.q, d_q, tokens_there)
            d_k, d_coefficients = self._through_map(given.k, d_k, tokens_there)
            d_coefficients = d_coefficients + of_q
            if d_tail_k is not None and given.tail_k is not None:
                d_tail_k, of_tail = self._through_map(given.tail_k, d_tail_k, tail_there)
                d_coefficients = d_coefficients + of_tail
        return (
            d_q, d_k, out["d_v"], out["d_step"], out["d_decay"], out["d_gates"], out["d_theta"],
            d_coefficients if given.coefficients is not None else None,
            None if given.initial_state is None else d_initial,
            None if given.initial_momentum is None else d_initial_momentum,
            d_tail_k, d_tail_v,
        )  # fmt: skip

    def _edges(
        self, edge: torch.Tensor | None, older: torch.Tensor | None, d_x: torch.Tensor,
        tail: torch.Tensor | None, width: int,
    ) -> torch.Tensor | None:  # fmt: skip
        """Complete d_x by what chunks give to the one before them; the gradient of a tail."""
        d_tail = None if tail is None else self._zeros(*tail.shape, dtype=d_x.dtype)
        if self.halo == 0:
            return d_tail
        arguments: dict[str, Any] = {
            "edge": edge,
            "older": older,
            "d_x": d_x,
            "d_tail": d_tail,
            "tail_length": self.older["tail_length"],
            "cu": self.given.cu_seqlens,
            **self.sizes,
        }
        constants = {
            **{name: self.flags[name] for name in ("PACKED", "TAIL", "LENGTHS", "HALO")},
            "WIDTH": width,
            "COLS": padded(width),
        }
        programs = self.slots * self.shape.heads
        self._launch("omega_edges", programs, EDGES_CONFIG, arguments, constants)
        return d_tail

    def _there(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which tokens, and rows of tails, exist; None: all. Those that do not may hold NaN."""
        cu, length, older = self.given.cu_seqlens, self.given.tail_length, self.shape.window - 1
        tokens = tail = None
        if cu is not None:
            tokens = torch.arange(self.shape.tokens, device=self.device) < cu[-1]
            tokens = tokens[None, :, None, None]
        if length is not None:
            tail = torch.arange(older, device=self.device) >= older - length[:, None]
            tail = tail[:, :, None, None]
        return tokens, tail

    def _through_map(
        self, x: torch.Tensor, d_features: torch.Tensor, there: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Gradients of x (B, T, H, d), in its dtype, and of the coefficients."""
        if there is not None:
            x = torch.where(there, x, 0)
        d_x, of_coefficients = features_backward(
            self.shape, x.transpose(1, 2), d_features.transpose(1, 2), self.given.coefficients
        )
        return d_x.transpose(1, 2).to(x.dtype).contiguous(), of_coefficients

    def _zeros(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return empty(size, dtype=dtype, device=self.device).zero_()

    def _launch(
        self, kernel: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        runtime.launch(
            OP, (KERNELS_BWD, kernel), programs, self.device, config, arguments, constants
        )
