"""Launches of the backward on symmetric features up to degree 2.

Nothing of forward is saved: the walk is taken again, once along all chunks, which leaves the memory
at the begin of each span of them, and then span after span from the last one on.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config
from ..checks import last_contiguous
from ..triton_runtime import padded
from .op import OmegaShape, OmegaTensors
from .symmetric import MARKS, MOVE_CONFIG, SPAN, SymmetricCall
from .symmetric_spaces import KERNELS_BACK, KERNELS_GRADIENTS, SPACE_SYMMETRIC_BWD
from .triton_backward import Backward
from .triton_forward import known_window
from .triton_spaces import GATES_BACK, NARROW_WARPS

SPAN_CHUNKS = 8  # most chunks of a span: memories are kept of as many, and one of each span
QUERIES, OWN, OLDER = 0, 1, 2  # whose features
GATES_BACK_HEADS = 4  # of a program of `omega_gates_back`
GATES_BACK_CONFIG = Config.make(1, 1, "fma")
# With four warps ptxas (of Triton 3.6) leaves descriptors of its wgmma unset in some calls.
PAIRS_CONFIG = Config.make(NARROW_WARPS, 1)
INNER_TILE = 2048  # cells of a memory at a time
WALKING = ("omega_tables_symmetric", "omega_pull_symmetric", "omega_walk_back_symmetric")

Tensors = dict[str, torch.Tensor | None]


class SymmetricBackward(SymmetricCall, Backward):
    """One call's gradients, kernel after kernel."""

    def __init__(
        self, shape: OmegaShape, given: OmegaTensors, d_y: torch.Tensor, d_state: torch.Tensor
    ) -> None:
        SymmetricCall.__init__(self, shape, given, SPACE_SYMMETRIC_BWD)
        self.d_y = last_contiguous(d_y)
        self.d_state = d_state.contiguous()
        self.mapped = False  # what comes out is of queries and keys themselves
        # As many of packed sequences, which may be many, as they have on average.
        self.every = SPAN_CHUNKS
        if shape.packed:
            self.every = max(1, min(SPAN_CHUNKS, self.slots // max(shape.batch, 1)))
        self.every = max(1, min(self.every, self.chunks))
        self.spans = -(-self.chunks // self.every)  # of the longest sequence there can be
        self.places = shape.batch * self.every  # chunks of a span
        self.columns = min(64, padded(shape.values))  # of values, at a time
        self.of_chunks = Config.make(self.config["WARPS"], 1)

    def gradients(self) -> tuple[Any, ...]:
        """Of the first `DIFFERENTIABLE` tensors of a call, None where there is no tensor."""
        shape = self.shape
        self.gates(bounded=True)
        marks = self._marks()
        tables = self._tables()
        kept = self.memories(self.places)
        d_kept = self.memories(self.places, shape.dtype)
        d_packed = self.pack(self.d_state)
        out, parts = self.outputs(), self.edge_parts()
        found = self._room_of_gates()
        for span in reversed(range(self.spans)):
            numbers = {"every": self.every, "span": span}
            laid = self.lay_out_tokens(numbers)
            y_rows, _ = self.lay_out(self.d_y, numbers=numbers)
            looked, errors = self.walk(
                laid, SPAN, marks, marks=marks, kept=kept, low=True, **numbers
            )
            back = self._walk_back(laid, y_rows, tables, d_packed, d_kept, numbers)
            between = {"looked": looked, "errors": errors, **back}
            lefts = self._pairs(laid, y_rows, tables, between, out, parts, found, numbers)
            self._features(laid, lefts, kept, d_kept, out, parts, found, numbers)
        self._gates_back(tables, found, out)
        grads = list(self.finish(out, parts, self.unpack(d_packed), None))
        if self.given.coefficients is not None:
            grads[7] = self._of_coefficients(found)
        return tuple(grads)

    def _marks(self) -> torch.Tensor:
        """The memory at the begin of each span."""
        shape = self.shape
        count = shape.batch * self.spans
        if shape.packed:
            count = shape.tokens // (self.sizes["chunk"] * self.every) + shape.batch
        marks = self.memories(count)
        packed = self.pack(self.starts()["initial_state"])
        laid = self.lay_out_tokens(queries=False)
        self.walk(laid, MARKS, packed, marks=marks, every=self.every)
        return marks

    def _tables(self) -> dict[str, torch.Tensor | None]:
        """P and A of every query, over its scale."""
        shape, chunk = self.shape, self.flags["CHUNK"]
        each = (self.slots, shape.heads, chunk)
        half = torch.float32 if shape.dtype == torch.float32 else torch.float16
        tables = {
            "shares_own": self.empty(*each, chunk, dtype=half),
            "shares_older": self.empty(*each, self.halo, dtype=half) if self.halo else None,
            "rates": self.empty(*each),
            "scales": self.empty(*each),
        }
        arguments: dict[str, Any] = {
            "cu": self.given.cu_seqlens,
            **{name: self.sums[name] for name in ("whole", "rest", "band")},
            "bound": self.bound,
            **tables,
            **self.sizes,
        }
        constants = {
            "DECAY": shape.decay,
            "BEFORE": shape.read_before,
            "WINDOW": known_window(shape),
            "PRECISION": self.gates_precision,
            **{name: self.flags[name] for name in ("PACKED", "CHUNK", "HALO")},
        }
        programs = self.slots * shape.heads
        self._back("omega_tables_symmetric", programs, MOVE_CONFIG, arguments, constants)
        return tables

    def _room_of_gates(self) -> Tensors:
        """What chunks find for the gradients of gates and coefficients."""
        halo, chunk, each = self.halo, self.flags["CHUNK"], (self.slots, self.shape.heads)
        # Slots between packed sequences have no chunk; sums go over all.
        zeros = self._zeros if self.shape.packed else self.empty
        return {
            "d_shares": self.empty(*each, chunk, chunk),
            "d_shares_older": self.when(halo > 0, *each, chunk, halo),
            "d_rates": self.empty(*each, chunk),
            "in_state": self.empty(*each, chunk),
            "in_state_older": self.when(halo > 0, *each, halo),
            "of_states": self.empty(*each),
            "of_weights": zeros(*each, 2),
            "of_queries": zeros(*each, 2),
            "of_keys": zeros(*each, 2),
            "of_older": zeros(*each, 2) if halo else None,
        }

    def _of_span(self, numbers: dict[str, int]) -> dict[str, Any]:
        """Arguments of all kernels of a span."""
        return {"cu": self.given.cu_seqlens, **self.weights, **self.sizes, **numbers}

    def _walk_back(
        self, laid: dict[str, Any], y_rows: torch.Tensor, tables: Tensors, d_packed: torch.Tensor,
        d_kept: torch.Tensor, numbers: dict[str, int],
    ) -> Tensors:  # fmt: skip
        """dM at the end of each chunk of a span, what keys find in it, and dR."""
        shape, config = self.shape, self.config
        each = (self.places, shape.heads, self.keys, shape.values)
        mixed, along, d_errors = (self.empty(*each) for _ in range(3))
        arguments: dict[str, Any] = {
            **{name: laid[name] for name in ("q_columns", "k_rows")},
            "y_rows": y_rows,
            **{name: tables[name] for name in ("shares_own", "shares_older", "scales")},
            "mixed": mixed,
            **self._of_span(numbers),
        }
        values = {"VALUES_P": padded(shape.values)}
        constants = self.constants | values | {"V": config["READ_V"]}
        del constants["WIDTH"]
        programs = self.places * shape.heads * -(-shape.values // config["READ_V"])
        launched = Config.make(config["READ_WARPS"], 1)
        self._back("omega_pull_symmetric", programs, launched, arguments, constants)
        for name in ("shares_own", "shares_older"):
            del arguments[name]
        arguments |= {
            "k_columns": laid["k_columns"],
            "writes": self.edges["writes"],
            "ends": self.edges["ends"],
            "rates": tables["rates"],
            "d_packed": d_packed,
            "d_kept": d_kept,
            "along": along,
            "d_errors": d_errors,
        }
        constants = self.constants | values | {"DOT": shape.dot, "STEPS": self.steps}
        constants["LOW"] = shape.dtype != torch.float32
        programs = shape.batch * shape.heads * self.blocks
        self._back("omega_walk_back_symmetric", programs, config, arguments, constants)
        return {"along": along, "d_errors": d_errors}

    def _pairs(
        self, laid: dict[str, Any], y_rows: torch.Tensor, tables: Tensors, between: Tensors,
        out: Tensors, parts: Tensors, found: Tensors, numbers: dict[str, int],
    ) -> Tensors:  # fmt: skip
        """What tokens give each other; and what of theirs meets M and dM."""
        shape, chunk = self.shape, self.flags["CHUNK"]
        each, width = (self.places, shape.heads), padded(shape.width)
        lefts: Tensors = {
            "left_q": self.empty(*each, chunk, shape.values, dtype=shape.dtype),
            "left_m": self.empty(*each, self.keys, shape.values, dtype=shape.dtype),
            "left_d": self.empty(*each, self.keys, shape.values, dtype=shape.dtype),
            "d_q_rows": self.empty(*each, chunk, width),
            "d_k_rows": self.empty(*each, self.keys, width),
        }
        names = (
            "d_shares", "d_shares_older", "d_rates", "in_state", "in_state_older", "of_weights",
        )  # fmt: skip
        arguments: dict[str, Any] = {
            **{name: x for name, x in laid.items() if name != "v_rows"},
            "y_rows": y_rows,
            "writes": self.edges["writes"],
            **tables,
            **between,
            **lefts,
            **{name: found[name] for name in names},
            "d_v": out["d_v"],
            "edge_v": parts["edge_v"],
            "older_v": parts["older_v"],
            **self._of_span(numbers),
        }
        constants = self.constants | {"VALUES_P": padded(shape.values), "V": self.columns}
        del constants["WIDTH"]
        programs = self.places * shape.heads
        self._back("omega_pairs_back", programs, PAIRS_CONFIG, arguments, constants)
        return lefts

    def _features(
        self, laid: dict[str, Any], lefts: Tensors, kept: torch.Tensor, d_kept: torch.Tensor,
        out: Tensors, parts: Tensors, found: Tensors, numbers: dict[str, int],
    ) -> None:  # fmt: skip
        """Gradients of tokens, and ⟨M, dM⟩."""
        shape = self.shape
        common: dict[str, Any] = {"kept": kept, "d_kept": d_kept, **self._of_span(numbers)}
        constants = {
            **self.constants, "DOT": shape.dot, "COLS": self.columns, "STEPS": self.steps,
        }  # fmt: skip
        programs = self.places * shape.heads
        served = ((QUERIES, "q", "queries"), (OWN, "k", "keys"), (OLDER, "k", "older"))
        for kind, name, whose in served if self.halo else served[:2]:
            of_queries = kind == QUERIES
            d_rows = lefts[f"d_{name}_rows"]
            assert d_rows is not None
            arguments = common | {
                "x_rows": laid[f"{name}_rows"],
                "x_columns": laid[f"{name}_columns"],
                "left": lefts["left_q" if of_queries else "left_m"],
                "left_d": None if of_queries else lefts["left_d"],
                "d_rows": d_rows,
                "room": self.empty(*d_rows.shape),
                "of_degrees": found[f"of_{whose}"],
                "d_x": out[f"d_{name}"],
                "edge": None if of_queries else parts["older_k" if kind == OLDER else "edge_k"],
            }
            kinds = constants | {"KIND": kind}
            self._back("omega_features_back", programs, self.of_chunks, arguments, kinds)
        arguments = {
            "kept": kept, "d_kept": d_kept, "cu": self.given.cu_seqlens,
            "of_states": found["of_states"], **self.sizes, **numbers,
        }  # fmt: skip
        size = self.blocks * self.steps * self.rows["P"] * self.rows["V"]
        constants = {"PACKED": shape.packed, "SIZE": size, "TILE": INNER_TILE}
        self._back("omega_inner", programs, MOVE_CONFIG, arguments, constants)

    def _gates_back(self, tables: Tensors, found: Tensors, out: Tensors) -> None:
        """Gradients of steps, decays and window gates, from what chunks found."""
        shape, given, chunk = self.shape, self.given, self.flags["CHUNK"]
        arguments: dict[str, Any] = {
            **{name: self.gate[name] for name in ("step", "decay", "window_gates")},
            "cu": given.cu_seqlens,
            **tables,
            **{name: x for name, x in found.items() if name[:3] != "of_" or name == "of_states"},
            "d_writes": self.empty(self.slots, shape.heads, chunk, shape.window),
            **{name: out[name] for name in ("d_step", "d_decay", "d_gates")},
            **self.sizes,
        }
        constants = {
            "DECAY": shape.decay,
            "GATES": given.window_gates is not None,
            "BEFORE": shape.read_before,
            "PACKED": shape.packed,
            "CHUNK": chunk,
            "HALO": self.halo,
            "HEADS": GATES_BACK_HEADS,
        }
        programs = self.slots * -(-shape.heads // GATES_BACK_HEADS)
        self.launch(
            "omega_gates_back", programs, GATES_BACK_CONFIG, arguments, constants, GATES_BACK
        )

    def _of_coefficients(self, found: Tensors) -> torch.Tensor:
        """⟨φ, dφ⟩ of degree r is 2 a_r times the gradient of a_r; 0 where a_r is 0."""
        a = self.given.coefficients
        assert a is not None
        parts = [found[name] for name in ("of_queries", "of_keys", "of_older")]
        through_memory = torch.stack([x for x in parts if x is not None]).sum((0, 1))  # (H, 2)
        between = found["of_weights"]
        assert between is not None
        given = a[..., 1:].expand(self.shape.heads, -1)
        degrees = given.shape[-1]
        total = through_memory[:, :degrees] / (2 * given) + between.sum(0)[:, :degrees]
        total = torch.where(given == 0, 0.0, total)
        grad = a.new_zeros(a.shape)
        grad[..., 1:] = total.sum_to_size(a[..., 1:].shape)
        return grad

    def _back(
        self, name: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        kernels = KERNELS_BACK if name in WALKING else KERNELS_GRADIENTS
        self.launch(name, programs, config, arguments, constants, kernels)
