"""Sweeps, on an op whose configs take the time and make the mistakes that they name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fastweights.autotune import (
    Config,
    Space,
    cases,
    check,
    choose,
    report,
    source,
    space,
    sweep,
    tables,
    timing,
)
from fastweights.autotune.log import Log, append, lines, unfinished
from fastweights.autotune.space import assume_device

HERE = Path(__file__).resolve().parent
CPU = torch.device("cpu")


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The op's backend, its clock running, an empty cache and a GPU to pretend on."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTWEIGHTS_READONLY", raising=False)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    from probe_op import triton, tuning

    monkeypatch.setattr(timing, "clock", triton.clock)
    monkeypatch.setattr(triton, "SPACES", dict(triton.SPACES))
    monkeypatch.setattr(triton, "cost_of", {})
    triton.runs.clear()
    space.reload()
    with assume_device(tuning.GPU):
        yield triton
    space.reload()


def options(tmp_path: Path, **changes: Any) -> sweep.Options:
    fields = {"device": CPU, "out": tables.path_of("nvidia-test"), "log": tmp_path / "log.jsonl"}
    return sweep.Options(**(fields | changes))


def forward(probe: Any, *configs: Config, **changes: Any) -> Space:
    """Let the op's only pass be a forward of these configs, the first one the default."""
    made = probe.make_space("fwd", *configs, **changes)
    probe.SPACES = {"fwd": made}
    return made


def found(shapes: list[dict[str, Any]] | None = None, **how: Any) -> list[cases.Case]:
    from probe_op import tuning

    return cases.collect(cases.problems_of(tuning, shapes or [{"m": 512, "n": 32}]), CPU, **how)


def reasons(outcome: sweep.Outcome) -> dict[str, str]:
    return {entry.config: entry.reason for entry in outcome.rejected}


# ---- cases --------------------------------------------------------------------------------------


def test_a_bucket_is_one_case_whatever_problems_meet_it(probe: Any) -> None:
    shapes = [{"m": 512, "n": n} for n in (32, 32, 35, 48)]
    names = [case.name for case in found(shapes)]
    assert names == [
        'probe_op/fwd/triton {"cols": 32, "size": 4}',
        'probe_op/bwd/triton {"cols": 32, "size": 4}',
        'probe_op/fwd/triton {"cols": 48, "size": 4}',
        'probe_op/bwd/triton {"cols": 48, "size": 4}',
    ]
    assert len(found(shapes, dtypes=("bf16", "fp16", "fp32"))) == 8  # 16-bit types share theirs


def test_the_default_is_always_a_candidate(probe: Any) -> None:
    configs = [probe.config(16, 1000 + i) for i in range(12)]
    made = forward(probe, *configs)
    late = replace(made, default=lambda key, device: configs[-1])
    probe.SPACES = {"fwd": late}
    (case,) = found()
    gpu = space.Device.of(CPU)
    assert case.configs(gpu, "full") == [configs[-1], *configs[:-1]]
    assert case.configs(gpu, "quick") == [configs[-1], *configs[:7]]


def test_shards_are_a_partition(probe: Any) -> None:
    all_ = found([{"m": 512, "n": n} for n in (16, 32, 48, 64, 80)])
    for number in (1, 2, 3, 7):
        parts = [sweep.shard(all_, (i, number)) for i in range(number)]
        assert sorted(case.name for part in parts for case in part) == sorted(
            case.name for case in all_
        )
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ---- right before fast --------------------------------------------------------------------------


def test_the_fastest_right_config_wins_and_every_fault_is_rejected(
    probe: Any, tmp_path: Path
) -> None:
    """Each fault is seeded in a config that would win by its time."""
    faults = ("wrong", "edge", "racy", "unwritten", "large", "raises")
    slow, fast = probe.config(16, 1000), probe.config(16, 900)
    seeded = {name: probe.config(16, 100 + i, name) for i, name in enumerate(faults)}
    made = forward(probe, slow, *seeded.values(), fast)
    outcome = sweep.sweep(found(), options(tmp_path))
    (row,) = outcome.rows
    assert (row.winner, row.config, row.default) == (fast.name, fast.name, slow.name)
    assert row.times == {slow.name: pytest.approx(10.0), fast.name: pytest.approx(9.0)}
    why = reasons(outcome)
    assert why.keys() == {config.name for config in seeded.values()}
    for name, words in {
        "wrong": "is wrong against float64: out: frobenius error 1.",
        "edge": "is wrong against float64: out",
        "racy": "is unrepeatable: run",
        "unwritten": "is wrong against float64: out: frobenius error inf",
        "large": "leaves NaN in out of 512x32",
        "raises": "raises RuntimeError: too many resources requested for launch",
    }.items():
        assert why[seeded[name].name].startswith(words), name
    assert choose(made, made.bucket(_shape()), space.Device.of(CPU)) == fast
    entry = outcome.rejected[0]
    assert entry.source == source.fingerprint(made)
    assert (entry.compiler, entry.arch) == (source.compiler("triton"), "sm_90")


def _shape() -> Any:
    from probe_op import Shape

    return Shape(512, 32, torch.float32, CPU)


def test_a_wrong_default_is_rejected_like_any_other(probe: Any, tmp_path: Path) -> None:
    wrong, right = probe.config(16, 100, "wrong"), probe.config(16, 900)
    made = forward(probe, wrong, right)
    outcome = sweep.sweep(found(), options(tmp_path))
    assert [row.config for row in outcome.rows] == [right.name]
    assert choose(made, made.bucket(_shape()), space.Device.of(CPU)) == right


def test_a_case_without_a_right_config_has_no_row(probe: Any, tmp_path: Path) -> None:
    forward(probe, probe.config(16, 100, "wrong"))
    outcome = sweep.sweep(found(), options(tmp_path))
    assert outcome.rows == []
    assert outcome.hopeless == ["probe_op/fwd/triton 512x32 fp32"]
    assert len(tables.load(tables.path_of("nvidia-test")).rejected) == 1


def test_atomic_configs_may_differ_in_bits_but_not_be_wrong(probe: Any, tmp_path: Path) -> None:
    default = probe.config(16, 1000)
    wobbles = probe.config(16, 100, "racy", atomic=True)
    wrong = probe.config(16, 50, "wrong", atomic=True)
    forward(probe, default, wobbles, wrong)
    outcome = sweep.sweep(found(), options(tmp_path))
    assert [row.config for row in outcome.rows] == [wobbles.name]
    assert reasons(outcome).keys() == {wrong.name}


def test_backward_is_checked_by_its_gradients(probe: Any, tmp_path: Path) -> None:
    right, wrong = probe.config(16, 1000), probe.config(16, 100, "wrong")
    probe.SPACES = {"fwd": probe.SPACE_FWD, "bwd": probe.make_space("bwd", right, wrong)}
    backward = [case for case in found() if case.backward]
    outcome = sweep.sweep(backward, options(tmp_path))
    assert [row.config for row in outcome.rows] == [right.name]
    assert reasons(outcome)[wrong.name].startswith("is wrong against float64: d x")
    assert outcome.rows[0].times == {right.name: pytest.approx(10.0)}  # without the forward


def test_every_config_is_checked_on_two_fresh_inputs_of_two_shapes(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from probe_op import tuning

    drawn = []
    inputs = tuning.Problem.inputs

    def record(self: Any, dtype: Any, device: Any, seed: int) -> Any:
        drawn.append((self.rows, seed))
        return inputs(self, dtype, device, seed)

    monkeypatch.setattr(tuning.Problem, "inputs", record)
    forward(probe, probe.config(16, 1000))
    every = found()
    drawn.clear()
    sweep.sweep(every, options(tmp_path, seed=41))
    assert {(37, 41), (37, 42), (65, 41), (65, 42)} <= set(drawn)


def test_what_an_op_writes_is_restored_before_each_run(probe: Any, tmp_path: Path) -> None:
    slow, fast = probe.config(16, 1000), probe.config(16, 900)
    forward(probe, slow, fast)
    in_place = [{"m": 512, "n": 32, "function": "count_"}]
    (case,) = found(in_place)
    how = options(tmp_path)
    outcome = sweep.sweep([case], how)
    assert outcome.rejected == []
    assert [row.config for row in outcome.rows] == [fast.name]
    timed = sweep._Timed(case, how)
    before = timed.written["state"].clone()
    timed.run()
    assert not torch.equal(timed.arguments["state"], before)
    assert torch.equal(timed.written["state"], before)
    timed.restore()
    assert torch.equal(timed.arguments["state"], before)


class Memory(NamedTuple):
    """An argument of several tensors, one of them absent."""

    state: torch.Tensor
    momentum: torch.Tensor | None
    filled: torch.Tensor


def count_in(memory: Memory) -> torch.Tensor:
    memory.filled.add_(1)
    return memory.state.add_(0.5) * 2


def a_memory() -> Memory:
    return Memory(torch.zeros(3), None, torch.zeros(1, dtype=torch.int32))


def test_what_an_op_writes_may_be_a_tuple_of_tensors() -> None:
    """Each check finds it as it was, floating tensors in the dtype that is asked for."""
    memory = a_memory()
    call = check.Call({"memory": memory}, written=("memory",))
    for dtype in (None, torch.float64):
        for _ in range(2):
            results = call.run(count_in, dtype=dtype)
            assert list(results) == ["out", "state", "filled"]
            assert results["filled"].tolist() == [1]
            assert results["state"].tolist() == [0.5] * 3
            assert results["out"].dtype == (dtype or torch.float32)
    assert not memory.state.any()
    some = replace(call, compared=lambda results: {"out": results["out"]})
    assert list(some.run(count_in)) == ["out"]


def test_tuples_are_restored_before_each_run(tmp_path: Path) -> None:
    memory = a_memory()
    case: Any = SimpleNamespace(
        problem=None, backward=False, function=count_in,
        call=lambda *_: check.Call({"memory": memory}, written=("memory",)),
    )  # fmt: skip
    timed = sweep._Timed(case, sweep.Options(CPU, tmp_path / "out", tmp_path / "log"))
    for turn in (1, 2):
        assert timed.run()["state"].tolist() == [0.5 * turn] * 3
    timed.restore()
    assert not timed.arguments["memory"].state.any()
    _, moved = timed.work()
    assert moved == 3 * 4 + 2 * (3 * 4 + 4)  # the result, and what comes and goes
    assert not memory.state.any()


# ---- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost", "kept"), [(985, True), (975, False)])
def test_a_win_below_two_percent_keeps_the_default(
    cost: int, kept: bool, probe: Any, tmp_path: Path
) -> None:
    default, other = probe.config(16, 1000), probe.config(16, cost)
    forward(probe, default, other)
    (row,) = sweep.sweep(found(), options(tmp_path)).rows
    assert row.config == (default if kept else other).name


def test_slow_configs_stop_early_and_the_default_never(probe: Any) -> None:
    costs = {"default": 5000, "best": 1000, "near": 1050, "behind": 1250, "far": 3000}
    calls = {name: _tick(probe, cost) for name, cost in costs.items()}
    runs = timing.race(calls, device=CPU, seconds=2.0, keep=("default",))
    counts = {name: len(times) for name, times in runs.items()}
    assert counts["far"] == timing.HEATS[0][0]
    assert counts["behind"] == timing.HEATS[1][0] + (timing.HEATS[2][0] - timing.HEATS[1][0])
    assert counts["best"] == counts["near"] == counts["default"] > timing.HEATS[-1][0]
    assert {name: times[0] for name, times in runs.items()} == {
        name: pytest.approx(cost / 100) for name, cost in costs.items()
    }


def _tick(probe: Any, cost: int) -> Any:
    def call() -> None:
        probe.clock.now += cost / 1e5

    return call


def test_restoring_is_not_timed(probe: Any) -> None:
    runs = timing.race({"a": _tick(probe, 100)}, device=CPU, seconds=0.1, before=_tick(probe, 5000))
    assert runs["a"] == pytest.approx([1.0] * len(runs["a"]))


def test_winner_and_default_are_timed_again_in_turn(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that was fast in the race only, by luck, does not win."""
    default, lucky = probe.config(16, 1000), probe.config(16, 1001)
    forward(probe, default, lucky)
    race = timing.race

    def flattering(calls: Any, **how: Any) -> Any:
        runs = race(calls, **how)
        return {n: [t * (0.5 if n == lucky.name else 1) for t in x] for n, x in runs.items()}

    monkeypatch.setattr(timing, "race", flattering)
    (row,) = sweep.sweep(found(), options(tmp_path)).rows
    assert row.config == default.name
    assert row.times[lucky.name] == pytest.approx(10.01)


def test_neighbouring_buckets_share_a_config(probe: Any, tmp_path: Path) -> None:
    default, a, b = (probe.config(16, cost) for cost in (2000, 1000, 1005))
    made = forward(probe, default, a, b)
    for cols, cost in ((32, 1000), (64, 1500)):
        probe.cost_of[a.name, cols] = cost
    shapes = [{"m": 512, "n": n} for n in (32, 64)]
    outcome = sweep.sweep(found(shapes), options(tmp_path))
    assert [row.winner for row in outcome.rows] == [a.name, b.name]
    written = tables.load(tables.path_of("nvidia-test")).rows
    assert [row.config for row in written] == [b.name, b.name]  # 0.5 % from a's own bucket's best
    assert choose(made, made.bucket(_shape()), space.Device.of(CPU)) == b


# ---- going on -----------------------------------------------------------------------------------


def test_a_done_case_is_not_run_again_and_an_edit_runs_it(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward(probe, probe.config(16, 1000), probe.config(16, 900, "wrong"))
    how = options(tmp_path)
    first = sweep.sweep(found(), how)
    probe.runs.clear()
    tables.path_of("nvidia-test").unlink()
    again = sweep.sweep(found(), how)
    assert (again.rows, again.rejected) == (first.rows, first.rejected)
    assert probe.runs == []
    assert tables.load(how.out).rows == tuple(first.rows)  # the table is there all the same
    monkeypatch.setattr(source, "fingerprint", lambda space: "another")
    sweep.sweep(found(), how)
    assert probe.runs


def test_a_check_that_was_done_is_not_repeated(probe: Any, tmp_path: Path) -> None:
    default, other = probe.config(16, 1000), probe.config(16, 900)
    made = forward(probe, default, other)
    (case,) = found()
    how = options(tmp_path)
    bound = sweep._Work(case, how, Log(how.log)).bound
    Log(how.log).write("rejected", case.name, bound, config=other.name, reason="was seen to fail")
    Log(how.log).write("checked", case.name, bound, config=default.name, error=0.25)
    outcome = sweep.sweep([case], how)
    assert reasons(outcome) == {other.name: "was seen to fail"}
    assert [row.error for row in outcome.rows] == [0.25]
    assert other.name not in probe.runs
    assert made.configs == (default, other)


def test_a_spent_budget_begins_nothing_and_says_what_is_left(probe: Any, tmp_path: Path) -> None:
    forward(probe, probe.config(16, 1000))
    outcome = sweep.sweep(found(), options(tmp_path, deadline=0.0))
    assert (outcome.rows, outcome.left) == ([], ["probe_op/fwd/triton 512x32 fp32"])
    assert probe.runs == []
    assert not tables.path_of("nvidia-test").exists()


def test_a_case_half_done_leaves_the_tables_row_alone(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward(probe, probe.config(16, 1000), probe.config(16, 900, "wrong"))
    how = options(tmp_path)
    first = sweep.sweep(found(), how)
    monkeypatch.setattr(source, "fingerprint", lambda space: "another")
    (case,) = found()
    bound = sweep._Work(case, how, Log(how.log)).bound
    Log(how.log).write("rejected", case.name, bound, config=first.rows[0].config, reason="is late")
    again = sweep.sweep(found(), replace(how, deadline=0.0))
    assert again.left
    assert [entry.reason for entry in again.rejected] == ["is late"]
    assert tables.load(how.out).rows == tuple(first.rows)


def test_shards_joined_are_the_whole(probe: Any, tmp_path: Path) -> None:
    default, a, b = (probe.config(16, cost) for cost in (2000, 1000, 1005))
    forward(probe, default, a, b, probe.config(16, 500, "racy"))
    probe.cost_of[a.name, 64] = 1500
    shapes = [{"m": 512, "n": n} for n in (32, 48, 64)]
    sweep.sweep(found(shapes), options(tmp_path, out=tmp_path / "whole.json"))
    parts = []
    for i in range(2):
        part = tmp_path / f"part{i}.json"
        how = options(tmp_path, out=part, log=tmp_path / f"log{i}")
        sweep.sweep(sweep.shard(found(shapes), (i, 2)), how)
        parts.append(tables.load(part))
    joined = parts[1].joined(parts[0])
    whole = tables.load(tmp_path / "whole.json")
    assert [row.config for row in joined.rows] == [row.config for row in whole.rows]
    assert joined.rows == whole.rows
    assert [(x.bucket, x.config) for x in joined.rejected] == [
        (x.bucket, x.config) for x in whole.rejected
    ]
    assert len(whole.rejected) == 3


def test_a_case_that_cannot_be_measured_does_not_stop_the_others(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from probe_op import tuning

    forward(probe, probe.config(16, 1000))
    every = found([{"m": 512, "n": n} for n in (32, 64)])

    def checks(self: Any) -> Any:
        if self.cols == 32:
            raise ValueError("no reference here")
        return replace(self, rows=37), replace(self, rows=65)

    monkeypatch.setattr(tuning.Problem, "checks", property(checks))
    outcome = sweep.sweep(every, options(tmp_path))
    assert [row.problem for row in outcome.rows] == ["512x64"]
    assert outcome.failed == ["probe_op/fwd/triton 512x32 fp32: ValueError: no reference here"]


# ---- the log ------------------------------------------------------------------------------------


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log.write("checked", "a", "b", config="x", error=0.5)
    with path.open("a") as file:
        file.write('{"event": "checked", "case": "a", "bo')
    append(path, {"event": "rejected", "case": "a", "bound": "b", "config": "y", "reason": "no"})
    again = Log(path).of("a", "b")
    assert (again.errors, again.rejected, again.done) == ({"x": 0.5}, {"y": "no"}, False)
    assert Log(path).of("a", "other").errors == {}
    assert len(lines(path)) == 2


def test_what_a_process_began_and_did_not_finish_is_known(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for event, config, pid in (
        ("begin", "x", 7), ("checked", "x", 7), ("begin", "y", 7), ("begin", "z", 8),
    ):  # fmt: skip
        append(path, {"event": event, "case": "a", "bound": "b", "config": config, "pid": pid})
    assert [entry["config"] for entry in unfinished(path, 7)] == ["y"]
    assert [entry["config"] for entry in unfinished(path, 8)] == ["z"]


# ---- what is printed ----------------------------------------------------------------------------


def test_what_cannot_be_launched_is_rejected_before_anything_runs(
    probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, other = probe.config(16, 1000), probe.config(16, 900)
    forward(probe, default, other)
    sources = cases.Case.sources

    def refusing(self: Any, config: Config, calls: Any) -> Any:
        if config == other:
            raise ValueError("a box of 512 columns")
        return sources(self, config, calls)

    monkeypatch.setattr(cases.Case, "sources", refusing)
    outcome = sweep.sweep(found(), options(tmp_path))
    assert reasons(outcome) == {other.name: "cannot be launched: ValueError: a box of 512 columns"}
    assert other.name not in probe.runs


def test_reports_name_the_ten_best_and_every_rejected(probe: Any, tmp_path: Path) -> None:
    right = [probe.config(16, 1000 + i) for i in range(13)]
    wrong = [probe.config(16, 500 + i, "wrong") for i in range(3)]
    forward(probe, *right, *wrong)
    outcome = sweep.sweep(found(), options(tmp_path))
    text = report.case(outcome.rows[0])
    assert text.startswith("probe_op fwd triton fp32, 512x32 (size=4 cols=32)")
    assert sum(config.name in text for config in right) == 10
    assert "and 3 slower" in text
    assert "chosen fastest default" in text
    text = report.rejections(outcome.rejected)
    assert text.startswith("3 rejected")
    assert all(config.name in text for config in wrong)
    assert text.count("is wrong against float64") == 3
    assert "512x32" in report.summary(outcome.rows)


def test_difference_of_two_tables(probe: Any, tmp_path: Path) -> None:
    default, fast = probe.config(16, 1000), probe.config(16, 500)
    forward(probe, default, fast)
    shapes = [{"m": 512, "n": n} for n in (32, 64)]
    sweep.sweep(found(shapes), options(tmp_path, out=tmp_path / "a.json"))
    a = tables.load(tmp_path / "a.json")
    assert report.difference(a, a) == "no difference"
    slower = replace(a.rows[0], config=default.name)
    text = report.difference(a, replace(a, rows=(slower,)))
    assert default.name in text
    assert text.count("cols=") == 2  # one changed, one gone


def test_a_row_survives_its_file(probe: Any, tmp_path: Path) -> None:
    forward(probe, probe.config(16, 1000))
    how = options(tmp_path)
    outcome = sweep.sweep(found(), how)
    assert tables.load(how.out).rows == tuple(outcome.rows)
    (done,) = [entry for entry in lines(how.log) if entry["event"] == "done"]
    assert tables.Row(**json.loads(json.dumps(done["row"]))) == outcome.rows[0]


def test_a_picture_is_drawn(probe: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from fastweights.bench import plot_sweep

    forward(probe, probe.config(16, 1000), probe.config(16, 900))
    outcome = sweep.sweep(found(), options(tmp_path))
    rows = [replace(row, notes={"flops": 10**9, "bytes": 10**6}) for row in outcome.rows]
    path = tmp_path / "sweep.png"
    plot_sweep.draw(tables.Table("nvidia-h200", "sm_90", tuple(rows)), path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_sweep.draw(tables.Table("nvidia-h200", "sm_90"), path)
