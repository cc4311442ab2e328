"""Few heads: the chunks of a sequence in groups that walk side by side.

From its begin to its end a group changes the memory by an affine map, M → T M + O, whatever M is:

    1. `maps_of_groups`: T and O of all groups, side by side
    2. `begins_of_groups`: M at each group's begin, by one small product after the other
    3. all groups from there, side by side, as if each were a sequence

so that the way along a sequence is 2 / groups as long, and without reads for the first half of it.
The way back is the same: Tᵀ dM at a group's end is its part of dM at the begin, the other part what
the group's reads pull at; `ends_of_groups` has dM at each group's end.
"""

from __future__ import annotations

from typing import Any

import torch

from ...autotune.space import Config, Device
from .. import triton_runtime as runtime
from .triton_forward import Call
from .triton_spaces import BETWEEN_GROUPS, HOPPER_GROUPS, OP, TILE, tile_width

STAGES = 3  # chunks whose keys and values `omega_maps` has at a time
# Two of its programs share a multiprocessor.
MAPS_CONFIG = Config.make(4, STAGES, "wgmma", REGISTERS=128)
# Columns of a memory, and maps on their way, that a program which goes from group to group has.
SCAN_COLUMNS, SCAN_STAGES = 16, 3


def groups_of(call: Call) -> int:
    """Groups that each sequence of a call is cut into; packed ones are many as it is."""
    return 1 if call.shape.packed else max(1, call.config.get("GROUPS"))


def maps_of_groups(call: Call) -> torch.Tensor:
    """Tᵀ over Oᵀ of all groups but the last of each sequence, (N · groups, H, rows, D), fp32."""
    shape, groups = call.shape, groups_of(call)
    assert not shape.momentum
    width, blocks = tile_width(shape.wide), -(-shape.values // TILE)
    rows = width + blocks * TILE
    maps = call.empty(shape.batch * groups, shape.heads, rows, width)
    initial = call.starts()["initial_state"]
    arguments: dict[str, Any] = {
        **call.tiles("k", "v", "k_older", "v_older", "tail_k", "tail_v"),
        "tail_length": call.older["tail_length"],
        "writes": call.edges["writes"],
        "ends": call.edges["ends"],
        "initial_state": initial,
        "maps": maps,
        **call.scan_sizes(),
    }
    names = ("DOT", "TAIL", "LENGTHS", "HALO", "WIDTH", "VALUES")
    constants = {name: call.flags[name] for name in names} | {
        "INITIAL": initial is not None,
        "D": width,
        "STAGES": STAGES,
        "GROUPS": groups,
    }
    programs = shape.batch * (groups - 1) * shape.heads * (rows // TILE)
    kernel = (HOPPER_GROUPS, "omega_maps")
    runtime.launch(OP, kernel, programs, call.device, MAPS_CONFIG, arguments, constants)
    return maps


def begins_of_groups(call: Call, maps: torch.Tensor) -> torch.Tensor:
    """M at the begin of each group, (N · groups, H, D, Dv), fp32."""
    initial = call.starts()["initial_state"]
    begins = _of_groups(call)
    arguments = {"maps": maps, "initial_state": initial, "begins": begins}
    _launch(call, "omega_begins", maps, arguments, {"INITIAL": initial is not None})
    return begins


def ends_of_groups(
    call: Call, maps: torch.Tensor, d_last: torch.Tensor, d_begins: torch.Tensor
) -> torch.Tensor:
    """dM at the end of each group, as large as `d_begins`: dM at its begin, but for Tᵀ dM."""
    ends = _of_groups(call)
    arguments = {"maps": maps, "d_last": d_last, "d_begins": d_begins, "d_ends": ends}
    _launch(call, "omega_ends", maps, arguments, {})
    return ends


def _of_groups(call: Call) -> torch.Tensor:
    shape = call.shape
    return call.empty(shape.batch * groups_of(call), shape.heads, shape.wide, shape.values)


def _launch(
    call: Call, kernel: str, maps: torch.Tensor, arguments: dict[str, Any],
    constants: dict[str, Any],
) -> None:  # fmt: skip
    shape, (rows, width) = call.shape, maps.shape[2:]
    constants |= {
        "GROUPS": groups_of(call),
        "WIDTH": shape.wide,
        "VALUES": shape.values,
        "D": width,
        "ROWS": rows,
        "V": SCAN_COLUMNS,
        # Errors of the next group's keys are small: rounding M would be much of them.
        "PRECISION": "tf32x3" if Device.of(call.device).capability else "ieee",
    }
    programs = shape.batch * shape.heads * -(-shape.values // SCAN_COLUMNS)
    config = Config.make(width // 16, SCAN_STAGES, "mma")
    arguments["heads"] = shape.heads
    of_kernel = (BETWEEN_GROUPS, kernel)
    runtime.launch(OP, of_kernel, programs, call.device, config, arguments, constants)
