"""One config for neighbouring buckets where it costs none of them anything to speak of.

Every distinct config is a compilation. Two buckets of a space that differ in one field share a
config if, in each of them, it is within 2 % of the bucket's own winner and no more than 1 % slower
than the closed-form default. The rule is a function of what was timed, so it can be applied again
to any union of rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tables import Row

SLACK = 1.02  # of the winner's time
GUARD = 1.01  # of the default's time


def settled(rows: Sequence[Row]) -> list[Row]:
    """The rows, in order, with their final configs."""
    chosen = [replace(row, config=row.winner) for row in rows]
    spaces: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        spaces[row.op, row.pass_, row.backend, row.source].append(index)
    for members in spaces.values():
        _share(chosen, members)
    return chosen


def _share(chosen: list[Row], members: list[int]) -> None:
    for position, i in enumerate(members):
        for j in members[position + 1 :]:
            if chosen[i].config == chosen[j].config or not _neighbours(chosen[i], chosen[j]):
                continue
            used = Counter(chosen[k].config for k in members)
            pair = (chosen[i].config, chosen[j].config)
            for config in sorted(pair, key=lambda name: (-used[name], name)):
                if all(_serves(config, chosen[k]) for k in (i, j)):
                    chosen[i] = replace(chosen[i], config=config)
                    chosen[j] = replace(chosen[j], config=config)
                    break


def _neighbours(a: Row, b: Row) -> bool:
    if a.bucket.keys() != b.bucket.keys():
        return False
    return sum(a.bucket[name] != b.bucket[name] for name in a.bucket) == 1


def _serves(config: str, row: Row) -> bool:
    time = row.times.get(config)
    if time is None:
        return False
    return time < SLACK * row.times[row.winner] and time <= GUARD * row.times[row.default]
