"""Calls of the Omega rule: keys of norm one, gates that keep the memory bounded."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from . import inputs


@dataclass(frozen=True)
class Case:
    """One call, its tensors views with NaN around them.

    `packed`: offsets of sequences in the one row of the batch, NaN behind the last. `carried`: with
    an initial state and, if the window is longer than one token, a tail. `degree`: of elementwise
    features, with coefficients of each head; None: the identity. `symmetric`: of symmetric ones.
    """

    batch: int = 2
    tokens: int = 19
    heads: int = 2
    width: int = 6
    values: int = 5
    window: int = 3
    chunk_size: int = 8
    momentum: bool = True
    decay: bool = True
    gates: bool = True
    carried: bool = False
    degree: int | None = None
    symmetric: bool = False
    inner_loss: str = "squared"
    read_before: bool = False
    packed: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """A readable test id."""
        flags = "".join(
            letter
            for letter, given in (
                ("m", self.momentum), ("d", self.decay), ("g", self.gates), ("s", self.carried),
                ("b", self.read_before), ("p", self.packed), ("e", self.degree),
                ("y", self.symmetric),
            )
            if given
        )  # fmt: skip
        return f"t{self.tokens}-b{self.chunk_size}-c{self.window}-{self.inner_loss}-{flags}"

    def but(self, **changes: Any) -> Case:
        """The same case with some fields replaced."""
        return replace(self, **changes)

    @property
    def sequences(self) -> int:
        """How many states there are."""
        return self.batch if self.packed is None else len(self.packed) - 1

    @property
    def wide(self) -> int:
        """Rows of a state."""
        if not self.symmetric or self.degree is None:
            return self.width
        return math.comb(self.width + self.degree, self.degree) - 1

    def arguments(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `omega_memory`."""
        source = inputs.generator(seed, device)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        batch = 1 if self.packed else self.batch
        gate = (batch, self.tokens, self.heads)

        def normal(*size: int, to: torch.dtype = dtype) -> torch.Tensor:
            x = torch.randn(size, generator=source, device=device, dtype=torch.float64)
            return inputs.embed(x.to(to))

        def between(low: float, high: float, *size: int) -> torch.Tensor:
            x = torch.rand(size, generator=source, device=device, dtype=torch.float64)
            return inputs.embed((low + (high - low) * x).to(acc))

        def unit(*size: int) -> torch.Tensor:
            x = torch.randn(size, generator=source, device=device, dtype=torch.float64)
            return inputs.embed((x / x.norm(dim=-1, keepdim=True)).to(dtype))

        # The longer the chunk, the larger the step that all of its tokens make together.
        most = 1 / self.chunk_size**0.5
        given: dict[str, Any] = {
            "q": unit(*gate, self.width),
            "k": unit(*gate, self.width),
            "v": normal(*gate, self.values),
            "step": between(0, most, *gate),
            "decay": between(0.8, 1, *gate) if self.decay else None,
            "momentum": between(0, 0.5, *gate) if self.momentum else None,
            "window_gates": between(0, 2 / self.window, *gate, self.window) if self.gates else None,
        }
        given = {name: x for name, x in given.items() if x is not None}
        if self.packed is not None:
            for x in given.values():
                x[:, self.packed[-1] :] = float("nan")
        if self.degree is not None:
            given["coefficients"] = between(0.1, 0.5, self.heads, self.degree + 1)
            given["feature_map"] = "symmetric" if self.symmetric else "elementwise"
            if self.symmetric:
                given["coefficients"][:, 0] = 0
        if self.carried:
            state = (self.sequences, self.heads, self.wide, self.values)
            given["initial_state"] = normal(*state, to=acc)
            if self.momentum:
                given["initial_momentum"] = normal(*state, to=acc)
            older = self.window - 1
            if older:
                rows = (self.sequences, older, self.heads)
                given["tail_k"], given["tail_v"] = (
                    unit(*rows, self.width),
                    normal(*rows, self.values),
                )
                lengths = [n % self.window for n in range(1, self.sequences + 1)]
                given["tail_length"] = torch.tensor(lengths, dtype=torch.int32, device=device)
        if self.packed is not None:
            given["cu_seqlens"] = torch.tensor(self.packed, dtype=torch.int32, device=device)
        rules = ("window", "chunk_size", "inner_loss", "read_before")
        return given | {name: getattr(self, name) for name in rules}


def tensors_of(arguments: dict[str, Any]) -> Any:
    """The tensors of a call, as backends take them, from its keyword arguments."""
    op = importlib.import_module("fastweights.ops.omega.op")
    return op.OmegaTensors(**{name: arguments.get(name) for name in op.OmegaTensors._fields})


def shape_of(arguments: dict[str, Any]) -> Any:
    """What backends and config spaces see of a call, from its keyword arguments."""
    op = importlib.import_module("fastweights.ops.omega.op")
    rules = {"inner_loss": "squared", "feature_map": "identity"} | arguments
    names = ("window", "chunk_size", "inner_loss", "feature_map", "read_before")
    chosen = {name: rules[name] for name in names}
    return op.omega_shape("test", tensors_of(arguments), **chosen, concrete=True)


def streams(tokens: int, width: int = 16) -> dict[str, tuple[Tensor, Tensor]]:
    """Keys and values (1, tokens, 2, width), fp32, on which the plain rule diverges.

    A token is one key and one value.
    """
    source = inputs.generator(3, torch.device("cpu"))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, 2, width, generator=source)

    word, words = normal(1, 1), normal(32)
    shares = 1 / torch.arange(1.0, 33.0)
    text = torch.multinomial(shares, tokens, replacement=True, generator=source)
    common = normalize(normal(1, 1), dim=-1)
    apart = normal(1, tokens)
    apart = normalize(apart - (apart * common).sum(-1, keepdim=True) * common, dim=-1)
    return {
        "one repeated token": (
            normalize(word, dim=-1).expand(1, tokens, 2, width),
            normal(1, 1).expand(1, tokens, 2, width),
        ),
        "Zipf-32": (normalize(words, dim=-1)[text][None], normal(32)[text][None]),
        "mean cosine 0.3": (
            math.sqrt(0.3) * common + math.sqrt(0.7) * apart, normal(1, tokens),
        ),
    }  # fmt: skip
