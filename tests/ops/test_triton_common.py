"""Pieces that kernels share, by themselves."""

import pytest
import torch

from fastweights.autotune.compile import target_device
from fastweights.autotune.space import assume_device
from fastweights.ops.polar_attention.triton_arguments import heads_together

triton = pytest.importorskip("triton")
tl = triton.language
common = pytest.importorskip("fastweights.ops.common")
deal = common.deal


@triton.jit
def _dealt(ranks, heads, tiles, together):
    number = tl.program_id(0)
    rank, head = deal(number, tiles, tl.num_programs(0), together)
    tl.store(ranks + number, rank)
    tl.store(heads + number, head)


@pytest.mark.parametrize(
    ("tiles", "heads", "together"), [(1, 1, 1), (5, 7, 3), (4, 6, 6), (3, 8, 1), (7, 5, 2)]
)
def test_deal_serves_each_tile_once(tiles: int, heads: int, together: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks, of = (torch.full((tiles * heads,), -1, dtype=torch.int32, device=device) for _ in "ab")
    _dealt[(tiles * heads,)](ranks, of, tiles, together)
    pairs = list(zip(ranks.tolist(), of.tolist(), strict=True))
    assert sorted(pairs) == [(r, h) for r in range(tiles) for h in range(heads)]
    # Inside a section no tile comes before a longer one, and sections follow each other.
    keys = [(head // together, rank) for rank, head in pairs]
    assert keys == sorted(keys)


@pytest.mark.parametrize("heads", [1, 5, 64, 1000])
@pytest.mark.parametrize("tiles", [0, 1, 16, 64, 5000])
def test_a_section_fills_the_device(tiles: int, heads: int) -> None:
    device = target_device("sm_90")
    with assume_device(device):
        together = heads_together(torch.device("meta"), heads, tiles)
    assert 1 <= together <= heads
    assert tiles == 0 or together == heads or together * tiles >= 2 * device.multiprocessors
