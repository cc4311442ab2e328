"""Triton backend: the launchers. Kernels are in `triton_kernels`, configs in `triton_spaces`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...autotune.space import Config, Device, Space, choose
from .. import triton_runtime as runtime
from ..alloc import empty
from ..checks import aligned, last_contiguous
from .op import DeltaShape, DeltaTensors
from .triton_spaces import (
    BACKWARD,
    CHUNK,
    KERNELS,
    OP,
    SPACE_KEYS,
    SPACE_OUTPUT,
    SPACE_PAIRS,
    SPACE_PREPARE,
    SPACE_PULL,
    SPACE_PUSH,
    SPACE_QUERIES,
    SPACE_WALK,
    SPACE_WALK_BACK,
    bucket,
    refusal,
    side,
    slots,
    wide,
)

__all__ = ["SPACE_BWD", "SPACE_FWD", "bwd", "fwd", "spaces", "supports", "yields"]

SPACE_FWD = SPACE_WALK
SPACE_BWD = SPACE_WALK_BACK
FORWARD_SPACES = (SPACE_WALK, SPACE_PREPARE, SPACE_OUTPUT)
BACKWARD_SPACES = (
    SPACE_WALK_BACK, SPACE_PUSH, SPACE_PULL, SPACE_QUERIES, SPACE_PAIRS, SPACE_KEYS,
)  # fmt: skip
SPACES = (*FORWARD_SPACES, *BACKWARD_SPACES)
WITHOUT_PRODUCTS = ("normalise", "collect")
_STRIDES_OF_BETA = ("stride_bb", "stride_bt", "stride_bh")
_STRIDES_OF_O = ("stride_ob", "stride_ot", "stride_oh")
_UNREAD_BY_QUERIES = (
    "beta", *_STRIDES_OF_BETA, "after", "total", "d_states", "d_right", "passed", "mended", "d_k",
    "d_beta",
)  # fmt: skip
_UNREAD_BY_PAIRS = ("after", "total", "states", "d_states", "d_q", "d_k", "Q_ALIGNED")
_UNREAD_BY_KEYS = ("d_o", "d_q", "O_ALIGNED")
NORMALISE_ROWS = 32
NORMALISE_CONFIG = Config.make(4, 1, "fma")


def supports(shape: DeltaShape, arch: str) -> str | None:
    """None, or why Triton cannot run this call."""
    if not runtime.installed():
        return "Triton is not installed"
    if arch == "cpu" and shape.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    device = Device.of(shape.device)
    if arch != "cpu" and device.capability < 80:
        return f"{arch} is older than sm_80"
    reason = refusal(shape)
    if reason is None:
        # A backward runs the first two kernels of the forward again.
        needed = (*FORWARD_SPACES[:2], *BACKWARD_SPACES) if shape.backward else FORWARD_SPACES
        for space in needed:
            if not space.fitting(bucket(shape), device):
                return f"no config of {space.name} fits into the shared memory of {arch}"
    return reason


def yields(shape: DeltaShape, arch: str) -> str | None:
    """None, or why "auto" goes past these kernels though they can run the call."""
    return None if arch == "cpu" else "its kernels have not been checked on a GPU yet"


def spaces(shape: DeltaShape) -> dict[str, Space]:
    """The config spaces of a call: one for each kernel."""
    return {space.pass_: space for space in SPACES}


def fwd(shape: DeltaShape, given: DeltaTensors) -> tuple[Tensor, Tensor]:
    """o (B, T, H, Dv) in v's dtype, and the memory (N, H, Dk, Dv) after the last token."""
    call = _Call(shape, given)
    call.prepare()
    final = call.walk()
    return call.output(), final


def bwd(
    shape: DeltaShape, d_o: Tensor, d_state: Tensor, given: DeltaTensors
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay, beta and initial_state; None if there was none."""
    call = _Backward(shape, given, d_o)
    call.prepare()
    call.walk()
    d_first = call.walk_back(call.push(), d_state)
    d_v, d_right = call.pull()
    return (*call.gradients(d_right, d_v), d_first if shape.carried else None)


class _Call:
    """One call's tensors as the kernels take them, what lies between them, and the launches."""

    def __init__(self, shape: DeltaShape, given: DeltaTensors) -> None:
        self.shape, self.device = shape, shape.device
        self.slots, self.wide, self.width = slots(shape), wide(shape.values), side(shape.width)
        self.given = given
        self.cu = None if given.cu_seqlens is None else given.cu_seqlens.contiguous()
        self.q, self.k = (self._normed(x) if shape.qk_l2norm else last_contiguous(x)
                          for x in (given.q, given.k))  # fmt: skip
        self.v = last_contiguous(given.v)
        places = self.slots * shape.heads
        self.w = self._empty(places, CHUNK, self.width)
        self.y = self._empty(places, self.wide, CHUNK)
        self.change = self._empty(places, self.wide, CHUNK)
        self.states = self._empty(places, self.wide, self.width)
        gate = {"dtype": torch.float32}
        self.whole, self.rest, self.after = (
            self._empty(places, CHUNK, **gate) for _ in range(3)
        )  # fmt: skip
        self.total, self.opening = (self._empty(places, **gate) for _ in range(2))
        self.inverses: Tensor | None = None
        self.sizes: dict[str, Any] = {
            "cu": self.cu,
            "tokens": shape.tokens,
            "heads": shape.heads,
            "sequences": shape.batch,
            "chunks": -(-shape.tokens // CHUNK),
        }
        self.constants: dict[str, Any] = {
            "PACKED": shape.packed,
            "PRECISION": runtime.precision(shape.dtype, shape.device),
            "WIDTH": shape.width,
            "VALUES": shape.values,
            "WIDE": self.wide,
            "D": self.width,
        }

    def _empty(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return empty(size, dtype=dtype or self.shape.dtype, device=self.device)

    def _choose(self, space: Space) -> Config:
        return choose(space, bucket(self.shape), Device.of(self.device))

    def _launch(
        self, kernel: str, programs: int, config: Config, arguments: dict[str, Any],
        constants: dict[str, Any], module: str = KERNELS,
    ) -> None:  # fmt: skip
        runtime.launch(OP, (module, kernel), programs, self.device, config, arguments, constants)

    @staticmethod
    def _rows(name: str, x: Tensor, letter: str, axes: str = "bth") -> dict[str, Any]:
        """A tensor and its strides."""
        return {name: x, **{f"stride_{letter}{a}": x.stride(n) for n, a in enumerate(axes)}}

    def _normed(self, x: Tensor) -> Tensor:
        x, shape = last_contiguous(x), self.shape
        batch, tokens, heads, width = x.shape
        y = self._empty(*x.shape)
        blocks = -(-tokens // NORMALISE_ROWS)
        arguments = {
            **self._rows("x", x, "x"),
            "y": y, "tokens": tokens, "heads": heads, "blocks": blocks,
            "eps": float(shape.l2norm_eps),
        }  # fmt: skip
        constants = {
            "ALIGNED": aligned(x), "WIDTH": width, "D": self.width, "ROWS": NORMALISE_ROWS
        }  # fmt: skip
        programs = batch * blocks * heads
        self._launch("normalise", programs, NORMALISE_CONFIG, arguments, constants)
        return y

    def prepare(self) -> None:
        """W, Y and the sums of log-decays."""
        shape, given = self.shape, self.given
        config = self._choose(SPACE_PREPARE)
        arguments = {
            **self.sizes, **self._rows("k", self.k, "k"), **self._rows("v", self.v, "v"),
            **self._rows("log_decay", given.log_decay, "g"),
            **self._rows("beta", given.beta, "b"),
            "w": self.w, "y": self.y, "whole": self.whole, "rest": self.rest,
            "after": self.after, "total": self.total, "opening": self.opening,
            "inverses": self.inverses,
            "heads_k": shape.heads_k, "heads_v": shape.heads_v,
        }  # fmt: skip
        # The inverse of numbers up to one; its operands are rounded to 16 bits afterwards.
        narrow = shape.dtype.itemsize == 2 and self.device.type != "cpu"
        constants = {
            **self.constants,
            "V": config["V"],
            "SOLVE": "tf32" if narrow else self.constants["PRECISION"],
            "KEEP": self.inverses is not None,
            "K_ALIGNED": aligned(self.k),
            "V_ALIGNED": aligned(self.v),
        }
        self._launch("prepare", self.slots * shape.heads, config, arguments, constants)

    def walk(self) -> Tensor:
        """U and the states in front of all chunks; returns the memory behind the last one."""
        shape, first = self.shape, self.given.initial_state
        config = self._choose(SPACE_WALK)
        final = self._empty(*shape.state, dtype=torch.float32)
        first = None if first is None else last_contiguous(first)
        strides = (0, 0, 0) if first is None else first.stride()[:3]
        arguments = {
            **self.sizes, **self._rows("k", self.k, "k"),
            "w": self.w, "y": self.y, "after": self.after, "total": self.total,
            "opening": self.opening, "initial": first, "states": self.states,
            "change": self.change, "final": final, "heads_k": shape.heads_k,
            **{f"stride_s{a}": n for a, n in zip("nhr", strides, strict=True)},
        }  # fmt: skip
        constants = {
            **self.constants, "V": config["V"], "STAGES": config.num_stages,
            "CARRIED": first is not None, "K_ALIGNED": aligned(self.k),
        }  # fmt: skip
        programs = shape.batch * shape.heads * -(-shape.values // config["V"])
        self._launch("walk", programs, config, arguments, constants)
        return final

    def output(self) -> Tensor:
        """o."""
        shape = self.shape
        config = self._choose(SPACE_OUTPUT)
        o = self._empty(*self.given.v.shape[:2], shape.heads, shape.values)
        if shape.packed:
            o.zero_()  # padding
        arguments = {
            **self.sizes, **self._rows("q", self.q, "q"), **self._rows("k", self.k, "k"),
            "whole": self.whole, "rest": self.rest, "states": self.states, "change": self.change,
            "o": o, "heads_q": shape.heads_q, "heads_k": shape.heads_k,
            "scale": float(shape.scale),
        }  # fmt: skip
        constants = {
            **self.constants, "V": config["V"],
            "Q_ALIGNED": aligned(self.q), "K_ALIGNED": aligned(self.k),
        }  # fmt: skip
        programs = self.slots * shape.heads * -(-shape.values // config["V"])
        self._launch("output", programs, config, arguments, constants)
        return o


class _Backward(_Call):
    """A call's backward: what the forward leaves between its kernels is made anew."""

    def __init__(self, shape: DeltaShape, given: DeltaTensors, d_o: Tensor) -> None:
        super().__init__(shape, given)
        places = self.slots * shape.heads
        self.inverses = self._empty(places, CHUNK, CHUNK)
        self.d_o = last_contiguous(d_o)
        self.pushed, self.d_change = (self._empty(places, self.wide, CHUNK) for _ in range(2))
        self.d_states = self._empty(places, self.wide, self.width)
        self.d_beta = self._rest(1, torch.float32)

    def _rest(self, width: int, dtype: torch.dtype) -> Tensor:
        """(B, T, H, width) to be written, 0 in padding."""
        x = self._empty(*self.given.v.shape[:2], self.shape.heads, width, dtype=dtype)
        return x.zero_() if self.shape.packed else x

    def _gates(self) -> dict[str, Any]:
        return {"whole": self.whole, "rest": self.rest}

    def _operands(self) -> dict[str, Any]:
        """Queries, keys and the upstream gradient."""
        return {
            **self.sizes, **self._gates(),
            **self._rows("q", self.q, "q"), **self._rows("k", self.k, "k"),
            **self._rows("d_o", self.d_o, "o"),
            "heads_q": self.shape.heads_q, "heads_k": self.shape.heads_k,
            "scale": float(self.shape.scale),
        }  # fmt: skip

    def _aligned(self) -> dict[str, Any]:
        return {
            "Q_ALIGNED": aligned(self.q),
            "K_ALIGNED": aligned(self.k),
            "O_ALIGNED": aligned(self.d_o),
        }

    def _blocks(self, config: Config) -> int:
        return self.shape.heads * -(-self.shape.values // config["V"])

    def push(self) -> Tensor:
        """What the reads of each chunk pass on to its U."""
        config = self._choose(SPACE_PUSH)
        constants = {**self.constants, **self._aligned(), "V": config["V"]}
        arguments = self._operands() | {"pushed": self.pushed}
        programs = self.slots * self._blocks(config)
        self._launch("push", programs, config, arguments, constants, BACKWARD)
        return self.pushed

    def walk_back(self, pushed: Tensor, d_state: Tensor) -> Tensor:
        """dU and the gradients of the states behind all chunks; returns that of the first state."""
        shape = self.shape
        config = self._choose(SPACE_WALK_BACK)
        d_first = self._empty(*shape.state, dtype=torch.float32)
        d_state = last_contiguous(d_state)
        arguments = {
            **self._operands(), **self._rows("d_final", d_state, "s", "nhr"),
            "w": self.w, "pushed": pushed, "after": self.after, "total": self.total,
            "opening": self.opening,
            "d_states": self.d_states, "d_change": self.d_change, "d_initial": d_first,
        }  # fmt: skip
        constants = {
            **self.constants,
            **self._aligned(),
            "V": config["V"],
            "STAGES": config.num_stages,
        }
        programs = shape.batch * self._blocks(config)
        self._launch("walk_back", programs, config, arguments, constants, BACKWARD)
        return d_first

    def pull(self) -> tuple[Tensor, Tensor]:
        """dV of every head, and dX."""
        shape = self.shape
        config = self._choose(SPACE_PULL)
        own = shape.heads_v == shape.heads
        d_v = self._rest(shape.values, shape.dtype if own else torch.float32)
        d_right = self._empty(*self.pushed.shape)
        arguments = {
            **self.sizes, **self._rows("v", self.v, "v"),
            **self._rows("beta", self.given.beta, "b"),
            "inverse": self.inverses, "d_change": self.d_change, "d_right": d_right, "d_v": d_v,
            "d_beta": self.d_beta, "heads_v": shape.heads_v,
        }  # fmt: skip
        constants = {**self.constants, "V": config["V"], "V_ALIGNED": aligned(self.v)}
        programs = self.slots * shape.heads
        self._launch("pull", programs, config, arguments, constants, BACKWARD)
        return d_v, d_right

    def gradients(self, d_right: Tensor, d_v: Tensor) -> tuple[Tensor, ...]:
        """Those of q, k, v, log_decay and beta."""
        shape, given = self.shape, self.given
        d_q, d_k = (
            self._rest(shape.width, torch.float32 if self._shared(heads) else shape.dtype)
            for heads in (shape.heads_q, shape.heads_k)
        )
        d_log_decay = self._rest(1, torch.float32)
        places = self.slots * shape.heads
        passed, mended = (self._empty(places, CHUNK, CHUNK) for _ in range(2))
        given_all = {
            **self._operands(), **self._rows("beta", given.beta, "b"),
            "after": self.after, "total": self.total, "states": self.states,
            "change": self.change, "d_states": self.d_states, "d_right": d_right,
            "passed": passed, "mended": mended,
            "d_q": d_q, "d_k": d_k, "d_log_decay": d_log_decay, "d_beta": self.d_beta,
        }  # fmt: skip
        flags = self._aligned()
        for kernel, space, unread in (
            ("of_queries", SPACE_QUERIES, _UNREAD_BY_QUERIES),
            ("of_pairs", SPACE_PAIRS, _UNREAD_BY_PAIRS),
            ("of_keys", SPACE_KEYS, _UNREAD_BY_KEYS),
        ):
            config = self._choose(space)
            arguments = {n: x for n, x in given_all.items() if n not in unread}
            constants = {n: x for n, x in flags.items() if n not in unread}
            constants |= self.constants | {"V": config["V"]}
            self._launch(kernel, places, config, arguments, constants, BACKWARD)
        return (
            self._collected(given.q, d_q, self._shared(shape.heads_q), shape.qk_l2norm),
            self._collected(given.k, d_k, self._shared(shape.heads_k), shape.qk_l2norm),
            self._collected(given.v, d_v, shape.heads_v != shape.heads, False),
            d_log_decay[..., 0],
            self.d_beta[..., 0],
        )

    def _shared(self, heads: int) -> bool:
        """Whether the gradients of heads of q or k are not yet those of the argument."""
        return self.shape.qk_l2norm or heads != self.shape.heads

    def _collected(self, x: Tensor, grads: Tensor, needed: bool, norm: bool) -> Tensor:
        """Gradients of every head → that of the argument."""
        if not needed:
            return grads
        x, shape = last_contiguous(x), self.shape
        batch, tokens, heads, width = x.shape
        out = self._empty(*x.shape)
        blocks = -(-tokens // NORMALISE_ROWS)
        arguments = {
            **self._rows("x", x, "x"), "grads": grads, "out": out, "tokens": tokens,
            "heads": heads, "group": shape.heads // heads, "blocks": blocks,
            "eps": float(shape.l2norm_eps),
        }  # fmt: skip
        constants = {
            "NORM": norm, "ALIGNED": aligned(x), "WIDTH": width, "D": side(width),
            "ROWS": NORMALISE_ROWS,
        }  # fmt: skip
        programs = batch * blocks * heads
        self._launch("collect", programs, NORMALISE_CONFIG, arguments, constants, BACKWARD)
        return out.masked_fill_(self._padding(), 0) if shape.packed and norm else out

    def _padding(self) -> Tensor:
        """(1, T, 1, 1): tokens behind the last sequence, whose numbers may be anything."""
        assert self.cu is not None
        tokens = torch.arange(self.shape.tokens, device=self.device)
        return (tokens >= self.cu[-1])[None, :, None, None]
