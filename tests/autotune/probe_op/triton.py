"""The backend whose configs are slow, wrong, racy, … as they say."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import torch

from fastweights.autotune import Config, Device, Space, choose
from fastweights.ops import alloc, triton_runtime

FAULTS = {
    name: number
    for number, name in enumerate(
        (
            "right", "wrong", "edge", "racy", "unwritten", "large", "raises", "hangs", "dies",
            "uncompilable",
        )
    )
}  # fmt: skip
LARGE = 512  # rows from which the fault "large" shows


class Key(NamedTuple):
    """The bucket."""

    size: int
    cols: int


def config(block: int, cost: int, fault: str = "right", *, atomic: bool = False) -> Config:
    """A config that takes `cost` ticks and makes one mistake."""
    return Config.make(
        matrix="fma", atomic=atomic, BLOCK=block, COST=cost, FAULT=FAULTS[fault], WIDE=0
    )


def fits(config, key, device):
    """None, or that the block is wider than the matrix."""
    return "is wider than the matrix" if config["BLOCK"] > key[1] else None


def make_space(pass_: str, *configs: Config, near: tuple[str, ...] = ("cols",)) -> Space:
    """A space whose first config is the default."""
    return Space(
        op="probe_op",
        pass_=pass_,
        backend="triton",
        configs=configs,
        fits=fits,
        bucket=lambda shape: Key(shape.dtype.itemsize, shape.cols - shape.cols % 16),
        default=lambda key, device: configs[0],
        sources=("probe_op.triton",),
        near=near,
    )


def _named(text: str) -> tuple[Config, ...]:
    """Configs from "100 80:racy 60", costs and faults; a process gets its own that way."""
    found = []
    for i, word in enumerate(text.split()):
        cost, _, fault = word.partition(":")
        found.append(config(16, int(cost) * 100 + i, fault or "right"))
    return tuple(found)


SPACE_FWD = make_space("fwd", *_named(os.environ.get("PROBE_CONFIGS", "10 8 9")))
SPACE_BWD = make_space("bwd", config(16, 1000), config(16, 900))
SPACES = {"fwd": SPACE_FWD, "bwd": SPACE_BWD}
runs: list[str] = []  # names of the configs that ran, in order


class Clock:
    """A clock that stands still but for what configs take; a second has 10⁵ of their ticks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()
cost_of = {}  # (config name, columns) -> ticks, for a config whose cost depends on the shape


def spaces(shape):
    """Those of the tests; a call that writes in place has no backward."""
    return {name: space for name, space in SPACES.items() if name == "fwd" or not shape.in_place}


def supports(shape, arch):
    """Everything."""
    return None


def fwd(shape, x):
    """2x, more or less."""
    return _run("fwd", shape, x)


def bwd(shape, grad):
    """2·grad, more or less."""
    return _run("bwd", shape, grad)


def count(shape, state, x):
    """Adds x into state; a second run without a fresh state would add it twice."""
    out = _run("fwd", shape, x)
    state += x
    return out


def _run(pass_, shape, x):
    space = SPACES[pass_]
    chosen = choose(space, space.bucket(shape), Device.of(shape.device))
    if triton_runtime._recorded:  # launches are recorded, not run
        if "PROBE_KERNELS" in os.environ:
            block = 3 if chosen["FAULT"] == FAULTS["uncompilable"] else 64
            kernel, sizes = ("probe_kernels", "double"), {"BLOCK": block}
            both = {"x": x, "y": x}
            triton_runtime.launch("probe_op", kernel, 1, x.device, chosen, both, sizes)
        return alloc.empty(x.shape, dtype=x.dtype, device=x.device)
    runs.append(chosen.name)
    clock.now += cost_of.get((chosen.name, shape.cols), chosen["COST"]) / 1e5
    out = alloc.empty(x.shape, dtype=x.dtype, device=x.device)
    out.copy_(2 * x)
    _spoil(list(FAULTS)[chosen["FAULT"]], shape, out)
    return out


def _spoil(fault: str, shape, out: torch.Tensor) -> None:
    if fault == "wrong":
        out *= 1.01
    elif fault == "edge":
        out[shape.rows - shape.rows % 16 :] = 0
    elif fault == "racy":
        if len(runs) % 3 == 0:
            out.view(-1)[7] *= 1 + 2.0**-8 if out.dtype == torch.bfloat16 else 1 + 2.0**-20
    elif fault == "unwritten":
        fresh = alloc.empty(out.shape, dtype=out.dtype, device=out.device)
        out[-1:] = fresh[-1:]
    elif fault == "large":
        if shape.rows >= LARGE:
            out[-1, -1] = float("nan")
    elif fault == "raises":
        raise RuntimeError("too many resources requested for launch")
    elif fault == "hangs":
        time.sleep(600)
    elif fault == "dies":
        os.abort()
