"""Launches of the forward on symmetric features up to degree 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...autotune.space import Config, Device, choose
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

REPACK_CONFIG = Config.make(4, 1, "fma")
# Of a thread of a warpgroup that looks, of the second one, and of one that advances the memory.
LOOK_REGISTERS, ADVANCE_REGISTERS = 152, 104


class SymmetricForward(Call):
    """One call's results, kernel after kernel. Gates, queries and keys are those of a call without
    a feature map: what `Call` prepares.
    """

    def __init__(self, shape: OmegaShape, given: OmegaTensors) -> None:
        config = choose(SPACE_SYMMETRIC, bucket(shape), Device.of(shape.device))
        plain = replace(shape, feature_map="identity", wide=shape.width)
        super().__init__(plain, given, SPACE_SYMMETRIC, config)
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

    def results(self) -> tuple[torch.Tensor, torch.Tensor, None]:
        """y, and M after the last token."""
        self.gates()
        packed = self._pack()
        walk = self._walk_spans if self.config.get("HOPPER") else self._walk
        looked, errors = walk(packed)
        return self._reads(looked, errors), self._repack(packed), None

    def _pack(self) -> torch.Tensor:
        shape = self.shape
        heads = shape.batch * shape.heads * self.blocks
        size = (heads, self.steps, self.rows["P"], self.rows["V"])
        initial = self.starts()["initial_state"]
        if initial is None:
            return torch.zeros(size, dtype=torch.float32, device=self.device)
        packed = self.empty(*size)
        self._launch_repack(packed, initial, pack=True)
        return packed

    def _repack(self, packed: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        state = self.empty(shape.batch, shape.heads, self.wide, shape.values)
        self._launch_repack(packed, state, pack=False)
        return state

    def _launch_repack(self, packed: torch.Tensor, state: torch.Tensor, *, pack: bool) -> None:
        arguments = {"packed": packed, "state": state}
        constants = {"PACK": pack, "WIDE": self.wide, "STEPS": self.steps, **self.rows}
        constants["HOPPER"] = bool(self.config.get("HOPPER"))
        programs = packed.shape[0] * packed.shape[1]
        kernel = (KERNELS, "repack")
        runtime.launch(OP, kernel, programs, self.device, REPACK_CONFIG, arguments, constants)

    def _walk(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """φ(q) M of every token, M at its chunk's begin, and R of every chunk's keys."""
        shape, config = self.shape, self.config
        looked = self.empty(self.slots, shape.heads, self.flags["CHUNK"], shape.values)
        keys = self.halo + self.flags["CHUNK"]
        errors = self.empty(self.slots, shape.heads, keys, shape.values, dtype=shape.dtype)
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "q_columns": self.q.permute(0, 2, 3, 1).contiguous(),
            "k_columns": self.k.permute(0, 2, 3, 1).contiguous(),
            **self.older,
            "cu": self.given.cu_seqlens,
            "writes": self.edges["writes"],
            "ends": self.edges["ends"],
            **self.weights,
            "packed": packed,
            "looked": looked,
            "errors": errors,
            **self.sizes,
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("v", self.v),
        }
        names = ("DOT", "PACKED", "TAIL", "LENGTHS", "ALIGNED", "CHUNK", "HALO", "PRECISION")
        constants = {name: self.flags[name] for name in names} | self.rows
        constants |= {**self.defaults, "STEPS": self.steps, "STAGES": config.num_stages}
        programs = shape.batch * shape.heads * self.blocks
        kernel = (KERNELS, "omega_walk_symmetric")
        runtime.launch(OP, kernel, programs, self.device, config, arguments, constants)
        return looked, errors

    def _walk_spans(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `_walk` finds, two chunks at a time."""
        shape = self.shape
        looked = self.empty(self.slots, shape.heads, self.flags["CHUNK"], shape.values)
        keys = self.halo + self.flags["CHUNK"]
        errors = self.empty(self.slots, shape.heads, keys, shape.values, dtype=shape.dtype)
        tail = self.older["tail_k"] if self.flags["TAIL"] else None
        arguments: dict[str, Any] = {
            **{name: self._halves(x, CHUNK) for name, x in (("q", self.q), ("k", self.k))},
            "v": self._halves(self.v, CHUNK),
            "k_older": self._halves(self.k, OLDER) if self.halo else None,
            "tail_k": None if tail is None else self._halves(tail, OLDER),
            "tail_length": self.older["tail_length"],
            "older_errors": None if tail is None else self._errors_of_tail(tail),
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
        kernel = (HOPPER, "omega_walk_spans")
        runtime.launch(OP, kernel, programs, self.device, self.config, arguments, constants)
        return looked, errors

    def _halves(self, x: torch.Tensor, rows: int) -> Any:
        """A descriptor of (B, T, H, ·) in tiles of `rows` tokens and COLUMNS columns."""
        x = x if self.aligned(x) else x.clone(memory_format=torch.contiguous_format)
        return runtime.head_tiles(x, rows, COLUMNS, gluon=True)

    def _errors_of_tail(self, tail_k: torch.Tensor) -> torch.Tensor:
        """R of the tail's keys before the first token (N, H, HALO, VALUES): 0 of those not there.

        They are few, and so plain torch is what finds them.
        """
        shape, older = self.shape, self.shape.window - 1
        tail_v = self.older["tail_v"]
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

    def _reads(self, looked: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
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
        names = ("PACKED", "TAIL", "LENGTHS", "ALIGNED", "CHUNK", "HALO", "PRECISION")
        constants = {name: self.flags[name] for name in names} | self.rows
        constants |= {
            **self.defaults,
            "DECAY": shape.decay,
            "BEFORE": shape.read_before,
            "WINDOW": known_window(shape),
            "GATES_PRECISION": self.gates_precision,
            "V": min(config["READ_V"], padded(shape.values)),
        }
        blocks = -(-shape.values // constants["V"])
        programs = self.slots * shape.heads * blocks
        launched = Config.make(config["READ_WARPS"], 1)
        kernel = (KERNELS, "omega_reads_symmetric")
        runtime.launch(OP, kernel, programs, self.device, launched, arguments, constants)
        return y
