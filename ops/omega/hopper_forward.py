"""Launches of the forward for Hopper: tables of the gates, then a walk with its reads beside."""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config
from .. import triton_runtime as runtime
from ..alloc import empty
from ..triton_runtime import padded
from .groups import begins_of_groups, groups_of, maps_of_groups
from .triton_forward import Call, strides
from .triton_spaces import HOPPER, HOPPER_SPLIT, OP, SOLVE, TILE, tile_width

READ_REGISTERS = 120  # of a thread of a warpgroup that reads
# Warps of a program of `omega_solve`, by the chunks of a tile: its blocks have 32, 16 or 8 tokens.
SOLVE_WARPS = {2: 4, 4: 2, 8: 1}
# Registers of a thread of it in 4 chunks: what spills, 24 bytes, costs less than one program more
# on a multiprocessor gains. Wider rows spill far more.
SOLVE_REGISTERS = 168

Tensors = dict[str, torch.Tensor | None]


class HopperForward(Call):
    """One call's results, kernel after kernel."""

    def results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """y, and M and S after the last token."""
        shape = self.shape
        self.groups = groups_of(self)
        self.gates(bounded=True)
        tables = self.tables()
        last = (shape.batch, shape.heads, shape.wide, shape.values)
        y = empty(self.given.v.shape, dtype=shape.dtype, device=self.device)
        if shape.packed:
            y.zero_()
        state, velocity = self.empty(*last), self.when(shape.momentum, *last)
        of_walk: Tensors = {"y": y, "state": state}
        of_walk |= {name: tables[name] for name in ("rates", "scales")}
        if self.parts > 1:
            self._walk_by_tiles(tables, of_walk)
        elif self.groups > 1:
            of_groups = self.empty(shape.batch * self.groups, *last[1:])
            self._walk(tables, of_walk | {"velocity": None, "state": of_groups})
            state = of_groups.view(shape.batch, self.groups, *last[1:])[:, -1].contiguous()
        else:
            self._walk(tables, of_walk | {"velocity": velocity})
        return y, state, velocity

    def _walk(self, tables: Tensors, arguments: dict[str, Any]) -> None:
        initial = self.starts()["initial_momentum"]
        if self.groups > 1:
            arguments["initial_state"] = begins_of_groups(self, maps_of_groups(self))
        arguments |= self._of_older() | {
            "pushes": self.edges["pushes"],
            "carries": tables["carries"],
            "initial_momentum": initial,
        }
        constants = {name: self.flags[name] for name in ("DOT", "MOMENTUM", "TAIL", "LENGTHS")} | {
            "INITIAL_MOMENTUM": initial is not None,
            "READ_REGISTERS": READ_REGISTERS,
            "GROUPS": self.groups,
        }
        self._launch((HOPPER, "omega_scan"), tables, arguments, constants)

    def _walk_by_tiles(self, tables: Tensors, arguments: dict[str, Any]) -> None:
        solved = self.solve(tables)
        halo = self.halo
        blocks = solved["solved"].view(-1, TILE + halo)
        for name, rows, columns in (
            ("own", TILE, TILE), ("own_older", TILE, halo), ("older_own", halo, TILE),
            ("older", halo, halo),
        ):  # fmt: skip
            there = rows > 0 and columns > 0
            arguments[name] = (
                runtime.matrix_tiles(blocks, rows, columns, gluon=True) if there else None
            )
        for name, columns in (("k_older", tile_width(self.shape.wide)), ("v_older", TILE)):
            arguments[name] = (
                runtime.head_tiles(solved[name], halo, columns, gluon=True) if halo else None
            )
        arguments |= {"begins": solved["begins"], "carries": tables["carries"]}
        constants = {"READ_REGISTERS": READ_REGISTERS}
        self._launch((HOPPER_SPLIT, "omega_scan_split"), tables, arguments, constants)

    def solve(self, tables: Tensors) -> dict[str, torch.Tensor]:
        """What the errors of short chunks owe each other, and older rows of each."""
        shape, given = self.shape, self.given
        rows = TILE + self.halo
        half = {"dtype": shape.dtype}
        solved = {
            "solved": self.empty(self.slots, shape.heads, rows, rows, **half),
            "begins": self.empty(self.slots, shape.heads, rows),
            "k_older": self.empty(self.slots, self.halo, shape.heads, shape.wide, **half),
            "v_older": self.empty(self.slots, self.halo, shape.heads, shape.values, **half),
        }
        arguments: dict[str, Any] = {
            "k": self.k,
            "v": self.v,
            **self.older,
            "cu": given.cu_seqlens,
            **{name: tables[name] for name in ("shares_own", "shares_older", "rates", "scales")},
            **solved,
            **self.sizes,
            **strides("k", self.k),
            **strides("v", self.v),
        }
        names = (
            "PACKED", "TAIL", "LENGTHS", "ALIGNED", "CHUNK", "HALO", "WIDTH", "VALUES", "D",
        )  # fmt: skip
        constants = {name: self.flags[name] for name in names} | {
            "BEFORE": shape.read_before,
            "PARTS": self.parts,
            "V": padded(shape.values),
            "PRECISION": self.gates_precision,
        }
        config = Config.make(SOLVE_WARPS[self.parts], 1, "mma")
        if self.parts == 4 and self.flags["D"] <= TILE:
            config = Config.make(SOLVE_WARPS[self.parts], 1, "mma", REGISTERS=SOLVE_REGISTERS)
        programs = self.slots * shape.heads
        runtime.launch(
            OP, (SOLVE, "omega_solve"), programs, self.device, config, arguments, constants
        )
        return solved

    def _of_older(self) -> dict[str, Any]:
        """Keys and values in front of a chunk, where a walk itself takes them from there."""
        older = self.tiles("k_older", "v_older", "tail_k", "tail_v")
        return older | {
            "tail_length": self.older["tail_length"], "older": self.shape.window - 1
        }  # fmt: skip

    def _launch(
        self, kernel: tuple[str, str], tables: Tensors, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        """A walk, with what all walks take."""
        initial = arguments.setdefault("initial_state", self.starts()["initial_state"])
        arguments |= self.tiles("q", "k", "v") | self.shares(tables)
        arguments |= {
            "cu": self.given.cu_seqlens,
            "writes": self.edges["writes"],
            "ends": self.edges["ends"],
            **{name: self.sizes[name] for name in ("tokens", "heads", "chunks")},
        }
        constants |= {name: self.flags[name] for name in ("PACKED", "HALO", "WIDTH", "VALUES")}
        constants |= {
            "INITIAL": initial is not None,
            "D": tile_width(self.shape.wide),
            "STAGES": self.config.num_stages,
            "SLOTS": self.config["SLOTS"],
        }
        shape = self.shape
        programs = self.groups * shape.batch * shape.heads * -(-shape.values // TILE)
        runtime.launch(OP, kernel, programs, self.device, self.config, arguments, constants)
