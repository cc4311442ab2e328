"""One call of the Triton backend: its tensors as the kernels take them, and the forward launches.

Elementwise features are formed by torch before the kernels, which know no feature map, and in k's
dtype, as products take them.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from ..triton_runtime import padded
from .eager import features
from .op import OmegaShape, OmegaTensors
from .triton_spaces import (
    KERNELS,
    OP,
    SPACE_FWD,
    TABLES,
    TILE,
    bucket,
    halo_of,
    parts_of,
    rows_of,
    tile_width,
    walked,
)

GATE_HEADS = 8  # heads of a program of `omega_gates`
MOST_UNROLLED = 8  # tokens of a window that has kernels of its own
GATES_CONFIG = Config.make(4, 1, "fma")
# Warps of a program of `omega_tables`, without and with momentum.
TABLES_WARPS = {False: 2, True: 4}

Begins = dict[str, torch.Tensor | None]  # states, momenta, and with `_low` what rounding took


class Call:
    """One call's tensors as the kernels take them, and its launches by a config of `space`."""

    def __init__(
        self,
        shape: OmegaShape,
        given: OmegaTensors,
        space: Space = SPACE_FWD,
        config: Config | None = None,
    ) -> None:
        self.shape = shape = walked(shape)
        self.device = shape.device
        self.config = config or choose(space, bucket(shape), Device.of(shape.device))
        self.q, self.k = (
            last_contiguous(_features(shape, x, given.coefficients)) for x in (given.q, given.k)
        )
        self.v = last_contiguous(given.v)
        tail_k = given.tail_k
        if tail_k is not None:
            tail_k = _features(shape, tail_k, given.coefficients).contiguous()
        self.given = given
        self.gate = {
            name: None if x is None else x.contiguous()
            for name, x in (
                ("step", given.step), ("decay", given.decay), ("momentum", given.momentum),
                ("window_gates", given.window_gates),
            )
        }  # fmt: skip
        # Chunks that are taken at once; from here on they are one.
        self.parts = parts_of(shape) if self.config.get("HOPPER") else 1
        chunk = shape.chunk_size * self.parts
        self.chunks = -(-shape.tokens // chunk)
        self.slots = shape.batch * self.chunks
        if shape.packed and shape.batch > 0:
            self.slots = shape.tokens // chunk + shape.batch
        self.halo = halo_of(shape, self.parts)
        rows = 1 if shape.packed else shape.batch
        self.row = (rows, shape.heads, shape.tokens)
        self.sizes = {
            "tokens": shape.tokens,
            "heads": shape.heads,
            "sequences": shape.batch,
            "chunk": chunk,
            "chunks": self.chunks,
            "window": shape.window,
        }
        self.flags: dict[str, Any] = {
            "DOT": shape.dot,
            "MOMENTUM": shape.momentum,
            "PACKED": shape.packed,
            "TAIL": given.tail_k is not None and shape.window > 1,
            "LENGTHS": given.tail_length is not None and shape.window > 1,
            "ALIGNED": all(map(self.aligned, (self.q, self.k, self.v))),
            "CHUNK": rows_of(chunk),
            "HALO": self.halo,
            "WIDTH": shape.wide,
            "VALUES": shape.values,
            "D": padded(shape.wide),
            "PRECISION": self._precision(),
        }
        self.older = {
            "tail_k": tail_k,
            "tail_v": None if given.tail_v is None else given.tail_v.contiguous(),
            "tail_length": given.tail_length,
        }

    @property
    def gates_precision(self) -> str:
        """How tables of decays are multiplied."""
        return "tf32" if self.shape.dtype.itemsize == 2 else self._precision()

    @staticmethod
    def aligned(x: torch.Tensor) -> bool:
        """Whether rows start on multiples of 16 bytes; True for one that records what compiles."""
        return x.device.type == "meta" or aligned(x)

    def _precision(self) -> str:
        return runtime.precision(self.shape.dtype, self.device)

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new tensor, fp32 by default."""
        return empty(size, dtype=dtype, device=self.device)

    def when(self, needed: bool, *size: int) -> torch.Tensor | None:
        """A new fp32 tensor where one is needed."""
        return self.empty(*size) if needed else None

    def gates(self, bounded: bool = False) -> None:
        """Everything that depends on gates alone; `bounded`: also how large P is."""
        shape, gate = self.shape, self.gate
        decay, momentum = shape.decay, shape.momentum
        batch, heads, tokens = self.row
        words = [
            empty(self.row, dtype=torch.int32, device=self.device) if there else None
            for there in (decay, momentum)
        ]
        edge = (self.slots, heads, self.halo + self.flags["CHUNK"])
        self.sums = {
            "whole": words[0],
            "rest": self.when(decay, *self.row),
            "m_whole": words[1],
            "m_rest": self.when(momentum, *self.row),
        }
        self.carry = self.when(momentum, *self.row)
        self.bound = self.when(bounded, *self.row)
        band = (batch, heads, shape.window, tokens)
        self.sums |= {"band": self.empty(*band), "m_band": self.when(momentum, *band)}
        self.edges = {
            "writes": self.empty(*edge),
            "pushes": self.when(momentum, *edge),
            "ends": self.empty(self.slots, heads, 3),
        }
        arguments: dict[str, Any] = {
            **gate,
            "cu": self.given.cu_seqlens,
            **self.sums,
            "carry": self.carry,
            "left": self.empty(*self.row),
            "push": self.when(momentum, *self.row),
            "by_push": self.when(momentum, *self.row),
            "bound": self.bound,
            **self.edges,
            **self.sizes,
        }
        constants = {
            "DECAY": decay,
            "GATES": gate["window_gates"] is not None,
            **{name: self.flags[name] for name in ("MOMENTUM", "PACKED", "CHUNK", "HALO")},
            "HEADS": GATE_HEADS,
            "BOUND": bounded,
            "PARTS": self.parts,
        }
        programs = self.slots * -(-heads // GATE_HEADS)
        kernel = (KERNELS, "omega_gates")
        runtime.launch(OP, kernel, programs, self.device, GATES_CONFIG, arguments, constants)

    def chain(self, low: bool = False) -> tuple[Begins, torch.Tensor, torch.Tensor | None]:
        """M and S at the begin of each chunk, in k's dtype, and each after the last token.

        `low`: also what rounding took from the former, where it takes anything.
        """
        shape, given = self.shape, self.given
        each = (self.slots, shape.heads, shape.wide, shape.values)
        last = (shape.batch, shape.heads, shape.wide, shape.values)
        low = low and shape.dtype != torch.float32

        def rounded(needed: bool) -> torch.Tensor | None:
            return empty(each, dtype=shape.dtype, device=self.device) if needed else None

        begins = {
            "states": rounded(True),
            "momenta": rounded(shape.momentum),
            "states_low": rounded(low),
            "momenta_low": rounded(low and shape.momentum),
        }
        state, velocity = self.empty(*last), self.when(shape.momentum, *last)
        config = self.config
        starts = self.starts()
        arguments: dict[str, Any] = {
            "k": self.k,
            "v": self.v,
            **self.older,
            "cu": given.cu_seqlens,
            **self.edges,
            **starts,
            **begins,
            "state": state,
            "velocity": velocity,
            **self.sizes,
            **strides("k", self.k),
            **strides("v", self.v),
        }
        constants = {
            **self.flags,
            "INITIAL": starts["initial_state"] is not None,
            "INITIAL_MOMENTUM": starts["initial_momentum"] is not None,
            "V": config["CHAIN_V"],
            "STAGES": config.num_stages,
            "LOW": low,
        }
        programs = shape.batch * shape.heads * -(-shape.values // config["CHAIN_V"])
        runtime.launch(
            OP, (KERNELS, "omega_chain"), programs, self.device, config, arguments, constants
        )
        return begins, state, velocity

    def reads(self, begins: Begins) -> torch.Tensor:
        """y, from what `chain` returned first; the padding behind packed sequences is 0."""
        shape, config = self.shape, self.config
        y = empty(self.given.v.shape, dtype=shape.dtype, device=self.device)
        if shape.packed:
            y.zero_()
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            **self.older,
            "cu": self.given.cu_seqlens,
            **self.sums,
            "carry": self.carry,
            "states": begins["states"],
            "momenta": begins["momenta"],
            "y": y,
            **self.sizes,
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("v", self.v),
        }
        constants = {
            **self.flags,
            "DECAY": shape.decay,
            "BEFORE": shape.read_before,
            "WINDOW": known_window(shape),
            "V": config["READ_V"],
            "GATES_PRECISION": self.gates_precision,
        }
        programs = self.slots * shape.heads * -(-shape.values // config["READ_V"])
        kernel, launched = (KERNELS, "omega_reads"), Config.make(config["READ_WARPS"], 1)
        runtime.launch(OP, kernel, programs, self.device, launched, arguments, constants)
        return y

    def tiles(self, *names: str) -> dict[str, Any]:
        """Descriptors of tensors of the call, for the kernels that take tiles of TILE tokens; None
        of those that it has not. `_older`: in tiles of as many older tokens as a chunk sees.
        """
        width = tile_width(self.shape.wide)
        found: dict[str, Any] = {}
        for name in names:
            older, tail = name.endswith("_older"), name.startswith("tail_")
            of_tail = self.older[name] if tail and self.flags["TAIL"] else None
            x = of_tail if tail else getattr(self, name.removesuffix("_older"))
            if x is None or (older and self.halo == 0):
                found[name] = None
                continue
            x = x if self.aligned(x) else x.clone(memory_format=torch.contiguous_format)
            rows = self.halo if older or tail else TILE
            columns = width if "q" in name or "k" in name else TILE
            found[name] = runtime.head_tiles(x, rows, columns, gluon=True)
        return found

    @staticmethod
    def matrix(x: torch.Tensor) -> Any:
        """A descriptor of a matrix, in tiles of TILE whole rows."""
        return runtime.matrix_tiles(x, TILE, x.shape[1], gluon=True)

    def shares(self, tables: dict[str, torch.Tensor | None]) -> dict[str, Any]:
        """Descriptors of P, as `tables` has it."""
        return {
            name: None if x is None else self.matrix(x.view(-1, x.shape[-1]))
            for name, x in (
                ("shares", tables["shares_own"]), ("shares_older", tables["shares_older"]),
            )
        }  # fmt: skip

    def scan_sizes(self) -> dict[str, int]:
        """The numbers that walks along a sequence take."""
        sizes = {name: self.sizes[name] for name in ("tokens", "heads", "chunks")}
        return sizes | {"older": self.shape.window - 1}

    def tables(self) -> dict[str, torch.Tensor | None]:
        """What depends on gates alone, of every query of every chunk."""
        shape = self.shape
        each = (self.slots, shape.heads, TILE)
        half = {"dtype": torch.float16}
        tables = {
            "shares_own": self.empty(*each, TILE, **half),
            "shares_older": self.empty(*each, self.halo, **half) if self.halo else None,
            "rates": self.empty(*each),
            "carries": self.when(shape.momentum, *each),
            "scales": self.empty(*each),
        }
        arguments: dict[str, Any] = {
            "cu": self.given.cu_seqlens,
            **self.sums,
            "carry": self.carry,
            "bound": self.bound,
            **tables,
            **self.sizes,
        }
        constants = {
            "DECAY": shape.decay,
            "BEFORE": shape.read_before,
            "WINDOW": known_window(shape),
            "PRECISION": self.gates_precision,
            **{name: self.flags[name] for name in ("MOMENTUM", "PACKED", "CHUNK", "HALO")},
            "LAGS": 1 << (shape.window - 2).bit_length() if shape.window > 1 else 0,
            "PARTS": self.parts,
        }
        programs = self.slots * shape.heads
        kernel = (TABLES, "omega_tables")
        launched = Config.make(TABLES_WARPS[shape.momentum], 1, "fma")
        runtime.launch(OP, kernel, programs, self.device, launched, arguments, constants)
        return tables

    def starts(self) -> dict[str, torch.Tensor | None]:
        """Initial state and momentum."""
        given = self.given
        starts = {
            "initial_state": given.initial_state, "initial_momentum": given.initial_momentum
        }  # fmt: skip
        return {name: None if x is None else x.contiguous() for name, x in starts.items()}


def _features(
    shape: OmegaShape, x: torch.Tensor, coefficients: torch.Tensor | None
) -> torch.Tensor:
    """φ(x) of (B, T, H, d), in x's dtype."""
    return features(shape, x.transpose(1, 2), coefficients).transpose(1, 2).to(x.dtype)


def known_window(shape: OmegaShape) -> int:
    """The window where kernels are made for it, else 0."""
    return shape.window if shape.window <= MOST_UNROLLED else 0


def strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """Strides of a (B, T, H, ·) tensor but the last, which is 1."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip("bth", x.stride(), strict=False)}
