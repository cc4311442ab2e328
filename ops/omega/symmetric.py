"""Launches of the forward on symmetric features up to degree 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...autotune.space import Config, Device, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..polynomial.maps import defaults
from ..triton_runtime import padded
from .eager import features
from .op import OmegaShape, OmegaTensors
from .symmetric_spaces import (
    CHUNK,
    COLUMNS,
    HOPPER,
    KERNELS,
    OLDER,
    SPACE_SYMMETRIC,
    bucket,
)
from .triton_forward import Call, known_window, strides
from .triton_spaces import OP

# Of a thread of a warpgroup that looks, and of one that advances the memory.
LOOK_REGISTERS, ADVANCE_REGISTERS = 152, 104
MOVE_CONFIG = Config.make(4, 1, "fma")  # of kernels that only move numbers
STATE, MARKS, SPAN = 0, 1, 2  # what a walk keeps
Left = tuple[torch.Tensor | None, torch.Tensor | None]  # what queries find, and errors
# Constants that kernels on laid-out tokens share.
LAID_OUT = ("PACKED", "CHUNK", "HALO", "PRECISION")


class SymmetricCall(Call):
    """One call's tensors as the kernels on symmetric features take them. Gates, queries and keys
    are those of a call without a feature map: what `Call` prepares.
    """

    def __init__(self, shape: OmegaShape, given: OmegaTensors, space: Space) -> None:
        config = choose(space, bucket(shape), Device.of(shape.device))
        plain = replace(shape, feature_map="identity", wide=shape.width)
        # A backward has a parent of its own, which begins otherwise.
        Call.__init__(self, plain, given, space, config)
        self.wide, self.of_pairs = shape.wide, shape
        a = given.coefficients
        pairs = shape.wide > shape.width
        self.weights = {
            "a": a,
            "stride_ah": a.stride(0) if a is not None and a.ndim == 2 else 0,
            "stride_ar": 0 if a is None else a.stride(-1),
        }
        self.rows = {
            "PAIRS": pairs,
            "WIDTH": shape.width,
            "VALUES": shape.values,
            "P": padded(shape.width),
            "V": config["V"],
        }
        self.steps = 1 + (padded(shape.width) // 2 + 1) * pairs
        self.blocks = -(-shape.values // config["V"])
        self.defaults = {"DEFAULTS": defaults(2) if a is None else None}
        self.keys = self.halo + self.flags["CHUNK"]
        self.constants = {name: self.flags[name] for name in LAID_OUT} | self.rows | self.defaults

    def memories(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Room for as many memories of all heads, in tiles."""
        size = (self.shape.heads * self.blocks, self.steps, self.rows["P"], self.rows["V"])
        return self.empty(count, *size, dtype=dtype)

    def pack(self, state: torch.Tensor | None) -> torch.Tensor:
        """A state (N, H, D, Dv) in tiles; None: zeros."""
        packed = self.memories(self.shape.batch)
        if state is None:
            return packed.zero_()
        self._launch_repack(packed, state.contiguous(), pack=True)
        return packed

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Its reverse."""
        shape = self.shape
        state = self.empty(shape.batch, shape.heads, self.wide, shape.values)
        self._launch_repack(packed, state, pack=False)
        return state

    def _launch_repack(self, packed: torch.Tensor, state: torch.Tensor, *, pack: bool) -> None:
        arguments = {"packed": packed, "state": state}
        constants = {"PACK": pack, "WIDE": self.wide, "STEPS": self.steps, **self.rows}
        constants["HOPPER"] = bool(self.config.get("HOPPER"))
        programs = packed.shape[0] * packed.shape[1] * packed.shape[2]
        self.launch("repack", programs, MOVE_CONFIG, arguments, constants)

    def lay_out(
        self, x: torch.Tensor, *, older: bool = False, columns: bool = False,
        tail: torch.Tensor | None = None, numbers: dict[str, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Tokens of x (B, T, H, ·) chunk after chunk, as rows and with `columns` as columns.

        `older`: behind those in front of each chunk, for which `tail` may hold more. `numbers`: the
        span whose chunks they are, and how many it has; None: all.
        """
        halo = self.halo if older else 0
        width = padded(x.shape[3])
        places = self.shape.batch * numbers["every"] if numbers else self.slots
        size, rows = (places, self.shape.heads), halo + self.flags["CHUNK"]
        by_row = self.empty(*size, rows, width, dtype=x.dtype)
        by_column = self.empty(*size, width, rows, dtype=x.dtype) if columns else None
        with_tail = tail is not None and halo > 0
        arguments: dict[str, Any] = {
            "x": x,
            "tail": tail,
            "tail_length": self.older["tail_length"] if with_tail else None,
            "cu": self.given.cu_seqlens,
            "rows": by_row,
            "columns": by_column,
            **self.sizes,
            **dict(zip(("stride_b", "stride_t", "stride_h"), x.stride(), strict=False)),
            **(numbers or {"every": 1, "span": 0}),
        }
        constants = {
            "SPANS": numbers is not None,
            "COLUMNS": columns,
            "PACKED": self.flags["PACKED"],
            "TAIL": with_tail,
            "LENGTHS": with_tail and self.flags["LENGTHS"],
            "ALIGNED": self.aligned(x),
            "CHUNK": self.flags["CHUNK"],
            "HALO": halo,
            "WIDTH": x.shape[3],
            "P": width,
        }
        programs = places * self.shape.heads
        self.launch("omega_lay_out", programs, MOVE_CONFIG, arguments, constants)
        return by_row, by_column

    def lay_out_tokens(
        self, numbers: dict[str, int] | None = None, *, queries: bool = True
    ) -> dict[str, Any]:
        """Queries, keys and values as the walk takes them."""
        older, q_rows, q_columns = self.older, None, None
        if queries:
            q_rows, q_columns = self.lay_out(self.q, columns=True, numbers=numbers)
        k_rows, k_columns = self.lay_out(
            self.k, older=True, columns=True, tail=older["tail_k"], numbers=numbers
        )
        v_rows, _ = self.lay_out(self.v, older=True, tail=older["tail_v"], numbers=numbers)
        return {
            "q_rows": q_rows, "q_columns": q_columns, "k_rows": k_rows, "k_columns": k_columns,
            "v_rows": v_rows,
        }  # fmt: skip

    def walk(
        self, laid: dict[str, Any], keep: int, packed: torch.Tensor, *,
        marks: torch.Tensor | None = None, kept: torch.Tensor | None = None, every: int = 1,
        span: int = 0, low: bool = False,
    ) -> Left:  # fmt: skip
        """φ(q) M of every token, M at its chunk's begin, and R of every chunk's keys; None of
        MARKS.
        """
        shape, config = self.shape, self.config
        looked = errors = None
        if keep != MARKS:
            slots = self.slots if keep == STATE else shape.batch * every
            looked = self.empty(slots, shape.heads, self.flags["CHUNK"], shape.values)
            # Backward has sums over them that nearly cancel.
            kind = torch.float32 if keep == SPAN else shape.dtype
            errors = self.empty(slots, shape.heads, self.keys, shape.values, dtype=kind)
        arguments: dict[str, Any] = {
            **laid,
            "cu": self.given.cu_seqlens,
            "writes": self.edges["writes"],
            "ends": self.edges["ends"],
            **self.weights,
            "packed": packed,
            "marks": marks,
            "kept": kept,
            "looked": looked,
            "errors": errors,
            **self.sizes,
            "every": every,
            "span": span,
        }
        constants = {
            **self.constants,
            "KEEP": keep,
            "DOT": shape.dot,
            "LOW": low and shape.dtype != torch.float32,
            "VALUES_P": padded(shape.values),
            "STEPS": self.steps,
        }
        programs = shape.batch * shape.heads * self.blocks
        self.launch("omega_walk_symmetric", programs, config, arguments, constants)
        return looked, errors

    def launch(
        self, name: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any], kernels: str = KERNELS,
    ) -> None:  # fmt: skip
        """Launch a kernel by its name."""
        runtime.launch(
            OP, (kernels, name), programs, self.device, config, arguments, constants
        )  # fmt: skip


class SymmetricForward(SymmetricCall):
    """One call's results, kernel after kernel."""

    def __init__(self, shape: OmegaShape, given: OmegaTensors) -> None:
        super().__init__(shape, given, SPACE_SYMMETRIC)

    def results(self) -> tuple[torch.Tensor, torch.Tensor, None]:
        """y, and M after the last token."""
        self.gates()
        packed = self.pack(self.starts()["initial_state"])
        if self.config.get("HOPPER"):
            left = self._walk_spans(packed)
        else:
            left = self.walk(self.lay_out_tokens(), STATE, packed)
        return self._reads(*left), self.unpack(packed), None

    def _walk_spans(self, packed: torch.Tensor) -> Left:
        """What `walk` finds, two chunks at a time."""
        shape = self.shape
        looked = self.empty(self.slots, shape.heads, self.flags["CHUNK"], shape.values)
        errors = self.empty(self.slots, shape.heads, self.keys, shape.values, dtype=shape.dtype)
        tail, tail_v = self.older["tail_k"], self.older["tail_v"]
        if not self.flags["TAIL"]:
            tail = tail_v = None
        arguments: dict[str, Any] = {
            **{name: self._halves(x, CHUNK) for name, x in (("q", self.q), ("k", self.k))},
            "v": self._halves(self.v, CHUNK),
            "k_older": self._halves(self.k, OLDER) if self.halo else None,
            "tail_k": None if tail is None else self._halves(tail, OLDER),
            "tail_length": self.older["tail_length"],
            "older_errors": self._errors_of_tail(tail, tail_v),
            "cu": self.given.cu_seqlens,
            "writes": self.edges["writes"],
            "ends": self.edges["ends"],
            **self.weights,
            "packed": packed,
            "looked": looked,
            "errors": errors,
            **self.scan_sizes(),
        }
        names = ("DOT", "PACKED", "TAIL", "LENGTHS", "VALUES", "HALO")
        constants: dict[str, Any] = {name: self.flags[name] for name in names}
        constants |= {
            **self.defaults,
            "NUMBERS": shape.width,
            "SLOTS": self.config["SLOTS"],
            "LOOK_REGISTERS": LOOK_REGISTERS,
            "ADVANCE_REGISTERS": ADVANCE_REGISTERS,
        }
        programs = shape.batch * shape.heads * self.blocks
        self.launch("omega_walk_spans", programs, self.config, arguments, constants, HOPPER)
        return looked, errors

    def _halves(self, x: torch.Tensor, rows: int) -> Any:
        """A descriptor of (B, T, H, ·) in tiles of `rows` tokens and COLUMNS columns."""
        x = x if self.aligned(x) else x.clone(memory_format=torch.contiguous_format)
        return runtime.head_tiles(x, rows, COLUMNS, gluon=True)

    def _errors_of_tail(
        self, tail_k: torch.Tensor | None, tail_v: torch.Tensor | None
    ) -> torch.Tensor | None:
        """R of the tail's keys before the first token (N, H, HALO, VALUES): 0 of those not there.

        They are few, and so plain torch is what finds them.
        """
        shape, older = self.shape, self.shape.window - 1
        if tail_k is None or tail_v is None:
            return None
        errors = -tail_v.transpose(1, 2).float()  # (N, H, older, VALUES)
        initial = self.starts()["initial_state"]
        if initial is not None and not shape.dot:
            keys = features(self.of_pairs, tail_k.transpose(1, 2), self.given.coefficients)
            errors += keys.float() @ initial
        if self.older["tail_length"] is not None:
            place = torch.arange(older, device=self.device)
            there = place >= older - self.older["tail_length"].clamp(max=older)[:, None]
            errors = torch.where(there[:, None, :, None], errors, 0.0)
        return torch.nn.functional.pad(errors, (0, 0, self.halo - older, 0)).contiguous()

    def _reads(self, looked: torch.Tensor | None, errors: torch.Tensor | None) -> torch.Tensor:
        """y; the padding behind packed sequences is 0."""
        shape, config = self.shape, self.config
        y = empty(self.given.v.shape, dtype=shape.dtype, device=self.device)
        if shape.packed:
            y.zero_()
        sums = {name: self.sums[name] for name in ("whole", "rest", "band")}
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "tail_k": self.older["tail_k"],
            "tail_length": self.older["tail_length"],
            "cu": self.given.cu_seqlens,
            **self.weights,
            **sums,
            "looked": looked,
            "errors": errors,
            "y": y,
            **self.sizes,
            **strides("q", self.q),
            **strides("k", self.k),
        }
        constants = {
            **self.constants,
            **{name: self.flags[name] for name in ("TAIL", "LENGTHS", "ALIGNED")},
            "DECAY": shape.decay,
            "BEFORE": shape.read_before,
            "WINDOW": known_window(shape),
            "GATES_PRECISION": self.gates_precision,
            "V": min(config["READ_V"], padded(shape.values)),
        }
        programs = self.slots * shape.heads * -(-shape.values // constants["V"])
        launched = Config.make(config["READ_WARPS"], 1)
        self.launch("omega_reads_symmetric", programs, launched, arguments, constants)
        return y
