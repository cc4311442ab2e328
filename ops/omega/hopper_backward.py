"""Launches of the backward for Hopper.

Nothing of forward is saved: the walk is taken again, and leaves what it read along the way.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device
from .. import triton_runtime as runtime
from .groups import begins_of_groups, ends_of_groups, groups_of, maps_of_groups
from .triton_backward import Backward
from .triton_spaces import GATES_BACK, HOPPER_BWD, HOPPER_GRADIENTS, OP, TILE, tile_width

MIX_REGISTERS = 120  # of a thread of a warpgroup that mixes, in `omega_scan_back`
KEYS_REGISTERS = 240  # of one that serves keys, in `omega_chunk_gradients`
GATES_BACK_HEADS = 4  # of a program of `omega_gates_back`
GATES_BACK_CONFIG = Config.make(1, 1, "fma")

Tensors = dict[str, torch.Tensor | None]


class HopperBackward(Backward):
    """One call's gradients, kernel after kernel."""

    def gradients(self) -> tuple[Any, ...]:
        """Of the first `DIFFERENTIABLE` tensors of a call, None where there is no tensor."""
        shape = self.shape
        self.groups = groups_of(self)
        self.gates(bounded=True)
        tables = self.tables()
        maps = maps_of_groups(self) if self.groups > 1 else None
        self.width = tile_width(shape.wide)
        self.blocks = -(-shape.values // TILE)
        rows = self.slots * shape.heads * self.blocks * TILE
        kept = self._matrices(
            rows, states=self.width, lost=self.width, errors=TILE, errors_older=self.halo
        )
        self._states(maps, kept)
        d_kept = self._matrices(rows, d_states=self.width, d_errors=TILE, d_errors_older=self.halo)
        d_initial = self._scan_back(maps, tables, d_kept)
        return self._of_chunks_by_tiles(tables, kept | d_kept, d_initial)

    def _matrices(self, rows: int, **columns: int) -> Tensors:
        return {
            name: self.empty(rows, n, dtype=self.shape.dtype) if n else None
            for name, n in columns.items()
        }

    def _of_matrices(self, matrices: Tensors) -> dict[str, Any]:
        return {name: None if x is None else self.matrix(x) for name, x in matrices.items()}

    def _constants(self) -> dict[str, Any]:
        """What all three kernels are made for."""
        names = ("DOT", "PACKED", "TAIL", "LENGTHS", "HALO", "WIDTH", "VALUES")
        return {name: self.flags[name] for name in names} | {"D": self.width}

    def _states(self, maps: torch.Tensor | None, kept: Tensors) -> None:
        """M at the begin of each chunk, and R."""
        initial = self.starts()["initial_state"]
        if maps is not None:
            initial = begins_of_groups(self, maps)
        arguments: dict[str, Any] = {
            **self.tiles("k", "v", "k_older", "v_older", "tail_k", "tail_v"),
            "tail_length": self.older["tail_length"],
            "cu": self.given.cu_seqlens,
            "writes": self.edges["writes"],
            "ends": self.edges["ends"],
            "initial_state": initial,
            **self._of_matrices(kept),
            **self.scan_sizes(),
        }
        constants = self._constants() | {
            "INITIAL": initial is not None,
            "STAGES": self.config.num_stages,
            "SLOTS": self.config["SLOTS"],
        }
        self._walk((HOPPER_BWD, "omega_states"), self.groups, arguments, constants)

    def _scan_back(
        self, maps: torch.Tensor | None, tables: Tensors, d_kept: Tensors
    ) -> torch.Tensor:
        """dM at the end of each chunk, and dR; returned: the gradient of the initial state."""
        d_last = self.d_state
        if maps is not None:
            d_begins = self._walk_back(tables, d_last, d_kept, keeps=False)
            d_last = ends_of_groups(self, maps, d_last, d_begins)
        d_initial = self._walk_back(tables, d_last, d_kept)
        if maps is None:
            return d_initial
        return d_initial.unflatten(0, (self.shape.batch, self.groups))[:, 0].contiguous()

    def _walk_back(
        self, tables: Tensors, d_last: torch.Tensor, d_kept: Tensors, *, keeps: bool = True
    ) -> torch.Tensor:
        """dM at the begin of each group; of all but the first where nothing else is kept."""
        shape = self.shape
        d_initial = self.empty(shape.batch * self.groups, shape.heads, shape.wide, shape.values)
        arguments: dict[str, Any] = {
            **self.tiles("q", "k", "d_y", "k_older", "tail_k"),
            **self.shares(tables),
            "tail_length": self.older["tail_length"],
            "cu": self.given.cu_seqlens,
            "writes": self.edges["writes"],
            "ends": self.edges["ends"],
            "rates": tables["rates"],
            "scales": tables["scales"],
            "d_last": d_last,
            "d_initial": d_initial,
            **self._of_matrices(d_kept),
            **self.scan_sizes(),
        }
        constants = self._constants() | {
            "STAGES": self.config.num_stages,
            "SLOTS": self.config["SLOTS"],
            "MIX_REGISTERS": MIX_REGISTERS,
            "KEEPS": keeps,
        }
        groups = self.groups if keeps else self.groups - 1
        self._walk((HOPPER_BWD, "omega_scan_back"), groups, arguments, constants)
        return d_initial

    def _walk(
        self, kernel: tuple[str, str], groups: int, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        shape = self.shape
        constants["GROUPS"] = self.groups
        programs = shape.batch * groups * shape.heads * self.blocks
        runtime.launch(OP, kernel, programs, self.device, self.config, arguments, constants)

    def _of_chunks_by_tiles(
        self, tables: Tensors, kept: Tensors, d_initial: torch.Tensor
    ) -> tuple[Any, ...]:
        shape, given, halo = self.shape, self.given, self.halo
        each = (self.slots, shape.heads)
        out = self.outputs()
        parts = self.edge_parts()
        found: Tensors = {
            "d_shares": self.empty(*each, TILE, TILE),
            "d_shares_older": self.when(halo > 0, *each, TILE, halo),
            "d_rates": self.empty(*each, TILE),
            "in_state": self.empty(*each, TILE),
            "in_state_older": self.when(halo > 0, *each, halo),
            "of_states": self.empty(*each),
        }
        sizes = {name: self.sizes[name] for name in ("tokens", "heads", "sequences", "chunks")}
        arguments: dict[str, Any] = {
            **self.tiles("q", "k", "d_y", "k_older", "tail_k"),
            **self.shares(tables),
            **self._of_matrices(kept),
            "tail_length": self.older["tail_length"],
            "cu": given.cu_seqlens,
            "writes": self.edges["writes"],
            "rates": tables["rates"],
            "scales": tables["scales"],
            **{name: out[name] for name in ("d_q", "d_k", "d_v")},
            **parts,
            **found,
            **sizes,
            "slots": self.slots,
            "older": shape.window - 1,
        }
        constants = self._constants() | {
            "STAGES": self.config["CHUNKS"] if self.width == TILE else 1,
            "RING": self.config["RING"],
            "KEYS_REGISTERS": KEYS_REGISTERS,
        }
        chunks = self.slots * shape.heads
        programs = min(chunks, Device.of(self.device).multiprocessors)
        kernel = (HOPPER_GRADIENTS, "omega_chunk_gradients")
        runtime.launch(OP, kernel, programs, self.device, self.config, arguments, constants)
        self.gates_back(tables, found, out)
        return self.finish(out, parts, d_initial, None)

    def gates_back(self, tables: Tensors, found: Tensors, out: Tensors) -> None:
        """Gradients of steps, decays and window gates, from what chunks found."""
        shape, given = self.shape, self.given
        arguments: dict[str, Any] = {
            **{name: self.gate[name] for name in ("step", "decay", "window_gates")},
            "cu": given.cu_seqlens,
            **{name: tables[name] for name in ("shares_own", "shares_older", "rates", "scales")},
            **found,
            "d_writes": self.empty(self.slots, shape.heads, TILE, shape.window),
            **{name: out[name] for name in ("d_step", "d_decay", "d_gates")},
            **self.sizes,
        }
        constants = {
            "DECAY": shape.decay,
            "GATES": given.window_gates is not None,
            "BEFORE": shape.read_before,
            "PACKED": shape.packed,
            "CHUNK": TILE,
            "HALO": self.halo,
            "HEADS": GATES_BACK_HEADS,
        }
        kernel = (GATES_BACK, "omega_gates_back")
        programs = self.slots * -(-shape.heads // GATES_BACK_HEADS)
        runtime.launch(OP, kernel, programs, self.device, GATES_BACK_CONFIG, arguments, constants)
