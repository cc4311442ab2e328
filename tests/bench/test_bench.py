"""The benchmark on a CPU: sizes and FLOPs, gate, rows, table, records, README, command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastweights
from fastweights.autotune.timing import time_calls
from fastweights.bench import cli, families, gate, readme, record, runner, table
from fastweights.bench.attention import ATTENTION
from fastweights.bench.cases import Case, Target
from fastweights.bench.families import select
from fastweights.bench.family import Contender
from fastweights.bench.timing import Timing
from fastweights.ops import alloc

CPU = torch.device("cpu")
CASES = families.cases()
TINY = replace(CASES["cpu-d64-t256"], name="tiny", tokens=48, heads_q=4, heads_k=2, head_dim=16)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _options(**changes) -> runner.Options:
    return runner.Options(device=CPU, seed=3, seconds=0.01, **changes)


def _row(name="polar", ms=2.0, *, case="c", mode="fwd", **changes) -> dict:
    row = {
        "op": "polar_attention", "case": case, "mode": mode, "contender": name,
        "ours": name.startswith("polar"), "sizes": TINY.sizes(), "status": "ok", "reason": None,
        "ms": ms, "ms_p10": ms * 0.9, "ms_p90": ms * 1.1, "runs": 5, "launch_us": 30.0,
        "flops": 4 * 10**12, "bytes": 10**9, "tflops": 4e3 / ms, "mfu_peak": 0.5,
        "mfu_matmul": 0.7, "gbps": 1e3 / ms, "targets": [], "gate": None,
    }  # fmt: skip
    return row | changes


def _record(rows: list[dict]) -> dict:
    where = {
        "device": "NVIDIA H200",
        "torch": "2.11",
        "triton": "3.6",
        "driver": "1",
        "commit": "c",
    }
    ceilings = {"copy_gbps": 4250.0, "matmul_tflops": {"fp32": {"4096": 50.0}}}
    return record.make(rows, environment=where, ceilings=ceilings, seed=1)


# ---- cases --------------------------------------------------------------------------------------


def _pairs_by_counting(case: Case) -> int:
    """Visible pairs of one head over the batch, from the masks themselves."""
    i = torch.arange(case.tokens)
    seen = i[:, None] >= i
    if case.window is not None:
        seen &= i[:, None] - i < case.window
    if case.sequences is not None:
        seen &= i[:, None] // case.length == i // case.length
    return case.batch * int(seen.sum())


@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 7}, {"sequences": 3}, {"sequences": 4, "window": 5}, {"batch": 3}],
    ids=str,
)
def test_case_counts_the_flops_of_its_mask(changes):
    case = replace(TINY, **changes)
    forward = 4 * _pairs_by_counting(case) * case.head_dim * case.heads_q
    assert case.flops("fwd") == forward
    assert case.flops("bwd") == 2.5 * forward


def test_case_bytes_read_and_write_each_operand_once():
    q, k = 48 * 4 * 16 * 4, 48 * 2 * 16 * 4
    assert TINY.bytes("fwd") == 2 * q + 2 * k
    assert TINY.bytes("bwd") == (q + 2 * k + q + q) + (q + 2 * k)


@pytest.mark.parametrize("case", ATTENTION.cases, ids=lambda case: case.name)
def test_small_attention_case_keeps_the_rules(case):
    small = case.small()
    assert small.length <= case.length
    assert small.group == case.group
    assert small.head_dim == case.head_dim
    assert (small.window is None) == (case.window is None)
    assert small.window is None or small.window < small.length


def test_select_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown case 'nothing'"):
        select("cpu", names=["nothing"])
    with pytest.raises(ValueError, match="is for cuda"):
        select("cpu", names=["d128-t8k"])
    with pytest.raises(ValueError, match="unknown op 'gemm'"):
        select("cpu", ops=["gemm"])
    assert all(case.device == "cuda" for case in select("cuda", suite="all"))
    assert {case.name for case in select("cuda", modes=["memory"], suite="all")} == {
        "memory-d128-t32k"
    }
    (case,) = select("cpu", names=["cpu-d64-t256"], dtype="fp64")
    assert case.torch_dtype == torch.float64


# ---- timing -------------------------------------------------------------------------------------


def test_calls_run_in_turn():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    runs = time_calls(calls, device=CPU, seconds=0.0)
    assert {len(values) for values in runs.values()} == {3}
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["abc", "abc", "abc", "cba", "abc"]


def test_timing_percentiles():
    timing = Timing(tuple(float(x) for x in range(1, 12)))
    assert timing.median == 6.0
    assert timing.percentile(10) == 2.0
    assert timing.percentile(90) == 10.0


# ---- gate and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"window": 9}, {"sequences": 3}, {"dtype": "bf16"}], ids=str
)
def test_right_contenders_pass_and_are_timed(changes):
    case = replace(TINY, **changes)
    found = ATTENTION.contenders(case)
    rows = runner.run_case(case, found, _options())
    assert [(row["contender"], row["mode"]) for row in rows] == [
        (name, mode) for mode in ("fwd", "bwd") for name in ("polar", "softmax", "sdpa")
    ]
    for row in rows:
        if row["contender"] == "sdpa" and ("window" in changes or "sequences" in changes):
            assert row["status"] == "unavailable"
            continue
        assert row["status"] == "ok", row["reason"]
        assert row["gate"]["ok"]
        assert row["ms_p10"] <= row["ms"] <= row["ms_p90"]
        assert row["tflops"] == pytest.approx(case.flops(row["mode"]) / row["ms"] / 1e9)


def _spoiled(contender: Contender, spoil) -> Contender:
    def build(case, inputs):
        work = contender.build(case, inputs)
        right = work.forward
        return replace(work, forward=lambda: spoil(*right()))

    return replace(contender, build=build)


def _last_row_off(direction, count):
    bump = torch.zeros_like(direction)
    bump[:, -1, -1] = 1e-2
    return direction + bump, count


@pytest.mark.parametrize(
    "spoil",
    [
        lambda direction, count: (direction, count * 1.0001),
        lambda direction, count: (direction * float("nan"), count),
        lambda direction, count: (
            direction.detach() + 2 * direction - 2 * direction.detach(),
            count,
        ),
        _last_row_off,
    ],
    ids=["count-off", "nan", "gradients-doubled", "one-row-off"],
)
def test_wrong_implementation_fails_its_gate_and_gets_no_time(spoil):
    contender = _spoiled(ATTENTION.ours(TINY, ("auto",))[0], spoil)
    rows = runner.run_case(TINY, [contender], _options())
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    for row in rows:
        assert not {"ms", "tflops", "launch_us"} & row.keys()
        assert table.cells(row)[3:11] == ["–"] * 8
        assert table.cells(row)[11] == "FAILED"
        assert table.cells(row)[12].startswith("wrong: ")


def test_unwritten_memory_fails_the_gate():
    contender = ATTENTION.ours(TINY, ("auto",))[0]

    def forgetful(direction, count):
        # Fresh memory that happens to hold the right answer: only poison can tell.
        fresh = alloc.empty(count.shape, dtype=count.dtype, device=CPU)
        lucky = fresh if alloc._poisoned else count
        return direction, torch.where(torch.arange(count.shape[1])[:, None] == 5, lucky, count)

    spoiled = _spoiled(contender, forgetful)
    inputs = ATTENTION.inputs(TINY, torch.Generator().manual_seed(0))
    verdict = gate.check(ATTENTION, spoiled, inputs, spoiled.build(TINY, inputs), seed=1)
    assert not verdict.ok
    assert verdict.failures[0].startswith("small count: error inf")
    assert any(line.startswith("full size count: error inf") for line in verdict.failures)


def test_one_failure_leaves_the_other_rows():
    def explode(case, inputs):
        raise RuntimeError("no such kernel\nsecond line")

    broken = replace(ATTENTION.ours(TINY, ("auto",))[0], name="broken", build=explode)
    rows = runner.run_case(TINY, [broken, *ATTENTION.ours(TINY, ("auto",))], _options())
    forward = {row["contender"]: row for row in rows if row["mode"] == "fwd"}
    assert forward["broken"]["reason"] == "RuntimeError: no such kernel"
    assert forward["polar"]["status"] == forward["softmax"]["status"] == "ok"


def test_spent_budget_is_said_in_rows():
    rows = runner.run([TINY], _options(budget=-1.0))
    assert {row["status"] for row in rows} == {"skipped"}
    assert all("budget" in row["reason"] for row in rows)
    assert len(rows) == 6


def test_device_fault_keeps_the_record(monkeypatch):
    def fault(*_, **__):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(runner, "time_works", fault)
    rows = runner.run([TINY, replace(TINY, name="next")], _options())
    assert len(rows) == 12
    assert {row["reason"] for row in rows} == {"RuntimeError: illegal memory access"}


def test_memory_says_why_it_cannot_on_a_cpu():
    case = replace(TINY, modes=("memory",))
    rows = runner.run_case(case, ATTENTION.ours(case, ("auto",)), _options())
    assert all(row["status"] == "error" and "GPU" in row["reason"] for row in rows)


@pytest.mark.parametrize(
    ("measure", "marks", "ratio", "reached"),
    [
        ("speed", (0.80, 0.88, 1.00), 1.5, "aim"),
        ("speed", (1.50, 1.60, None), 1.5, "floor"),
        ("speed", (1.60, 1.70, 1.80), 1.5, ""),
        ("rate", (1.40, None, None), 1.5, "floor"),
        ("time", (0.70, 0.67, 0.60), 1 / 1.5, "good"),
        ("time/flop", (0.60, None, None), 1 / 1.5, ""),
    ],
)
def test_targets_are_judged(measure, marks, ratio, reached):
    target = Target("polar", "fwd", "peer", *marks, measure=measure)
    found = runner.judged(target, _row(ms=2.0), _row("peer", ms=3.0))
    assert found["ratio"] == pytest.approx(ratio)
    assert found["reached"] == reached


# ---- table --------------------------------------------------------------------------------------


def test_table_formats_numbers():
    target = {
        "against": "sdpa-cudnn", "measure": "speed", "ratio": 0.911, "floor": 0.8, "good": 0.88,
        "aim": None, "reached": "good",
    }  # fmt: skip
    row = _row(ms=2.0, ratio={"peer": "sdpa-cudnn", "value": 0.911}, targets=[target])
    row["gate"] = {"ok": True, "error": 2e-3, "limit": 3e-3}
    assert table.cells(row | {"backend": "triton"}) == [
        "c", "fwd", "polar (triton)", "2.000", "1.800–2.200", "2000.0", "50.0", "70.0", "500",
        "0.91 sdpa-cudnn", "30", "2.0e-03 of 3.0e-03",
        "0.911× speed of sdpa-cudnn (floor 0.80 good 0.88 → good)",
    ]  # fmt: skip
    lines = table.render([row]).splitlines()
    assert len(lines) == 3
    assert all(word in lines[0] for word in table.HEADERS)
    assert "2.000 ms" in table.line(row)


def test_table_names_the_missing_mark():
    target = {
        "against": "p", "measure": "time", "ratio": 1.2, "floor": 1.04, "good": None, "aim": None,
        "reached": "",
    }  # fmt: skip
    assert table.target_text(target) == "1.200× time of p (floor 1.04 → below floor)"


# ---- records ------------------------------------------------------------------------------------


def test_record_survives_a_round_trip(tmp_path):
    made = _record([_row()])
    path = tmp_path / "deep" / "a.json"
    record.write(path, made)
    assert record.read(path) == made
    assert os.listdir(path.parent) == ["a.json"]
    assert record.default_path(made).parts[-2:] == ("nvidia-h200", "polar_attention.json")


def test_failed_write_leaves_the_old_record_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    record.write(path, _record([_row()]))
    old = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        record.write(path, _record([_row(ms=float("nan"))]))

    def refuse(*_):
        raise OSError("disk")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk"):
        record.write(path, _record([_row(ms=9.0)]))
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.json"]


def test_read_refuses_another_schema(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="schema 99"):
        record.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        record.read(path)


def test_compare_tells_moves_from_noise():
    a = _record([_row("x", 2.0), _row("y", 2.0), _row("z", 2.0), _row("w"), _row("v")])
    failed = {"status": "error", "reason": "r"}
    b = _record([_row("x", 1.0), _row("y", 2.1), _row("z", 3.0), _row("w") | failed, _row("new")])
    found = {pair["contender"]: pair for pair in record.compare(a, b)}
    assert {name: pair["verdict"] for name, pair in found.items()} == {
        "x": "faster", "y": "noise", "z": "slower", "w": "error in B", "v": "not in B",
        "new": "not in A",
    }  # fmt: skip
    assert found["x"]["ratio"] == 2.0
    assert "faster" in table.comparison(list(found.values()))


# ---- README -------------------------------------------------------------------------------------


def test_readme_is_rewritten_between_its_markers(tmp_path):
    rows = [
        _row(ratio={"peer": "sdpa-cudnn", "value": 0.5}),
        _row("sdpa-cudnn", 1.0),
        _row("flex", status="error", reason="r"),
        _row(mode="memory", peak_bytes=3 << 20),
    ]
    folder = tmp_path / "bench" / "results" / "nvidia-h200"
    record.write(folder / "polar_attention.json", _record(rows))
    (folder / "polar_attention.png").write_bytes(b"png")
    path = tmp_path / "README.md"
    path.write_text(f"before\n{readme.BEGIN}\nstale\n{readme.END}\nafter\n")
    assert readme.update(path, tmp_path / "bench" / "results") == 1
    text = path.read_text()
    assert text.startswith(f"before\n{readme.BEGIN}\n")
    assert text.endswith(f"{readme.END}\nafter\n")
    assert "stale" not in text
    assert "(bench/results/nvidia-h200/polar_attention.png)" in text
    assert "| c fwd  | polar  | 2.000 | 2000 (50 %)     | 4000 (50 %) (0.50)" in text
    assert "flex" not in text
    assert "3 MiB" in text
    again = readme.update(path, tmp_path / "bench" / "results")
    assert (again, path.read_text()) == (1, text)


def test_readme_without_markers_is_left_alone(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("nothing here")
    with pytest.raises(ValueError, match="must hold"):
        readme.update(path, tmp_path)
    assert path.read_text() == "nothing here"


# ---- picture ------------------------------------------------------------------------------------


def test_picture_or_the_name_of_the_extra(tmp_path, monkeypatch):
    from fastweights.bench import plot

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ModuleNotFoundError, match=r"fastweights\[plot\]"):
            plot.draw(_record([_row()]), tmp_path / "a.png")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot.draw(_record([_row(), _row("sdpa-cudnn", mode="bwd")]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---- command ------------------------------------------------------------------------------------


def _command(*arguments: str) -> subprocess.CompletedProcess:
    root = Path(fastweights.__file__).resolve().parent.parent
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "fastweights.bench", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_command_end_to_end(tmp_path):
    path = tmp_path / "run.json"
    done = _command(
        "--device", "cpu", "--suite", "quick", "--cases", "cpu-d64-t256", "--seconds", "0.05",
        "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu-d64-t256" in done.stdout
    assert "% matmul" in done.stdout
    made = record.read(path)
    assert {row["status"] for row in made["rows"]} == {"ok"}
    assert {row["contender"] for row in made["rows"]} == {"polar", "softmax", "sdpa"}
    assert all(row["mfu_matmul"] > 0 for row in made["rows"])
    assert made["environment"]["torch"] == torch.__version__


def test_command_refuses_in_one_line(capsys):
    assert cli.main(["bench", "--cases", "nothing", "--device", "cpu"]) == 2
    assert "unknown case 'nothing'" in capsys.readouterr().err
    assert cli.main(["bench", "--peers", "nobody", "--device", "cpu"]) == 2
    assert "unknown peer 'nobody'" in capsys.readouterr().err
    assert cli.main(["autotune", "nothing"]) == 2


def test_command_lists_and_describes(capsys):
    assert cli.main(["bench", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in [*CASES, *ATTENTION.peers])
    assert cli.main(["env"]) == 0
    assert torch.__version__ in capsys.readouterr().out


def test_command_compares(tmp_path, capsys):
    for name, ms in (("a", 2.0), ("b", 1.0)):
        record.write(tmp_path / f"{name}.json", _record([_row(ms=ms)]))
    arguments = ["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert cli.main(arguments) == 0
    assert "faster" in capsys.readouterr().out


def test_command_delegates_to_autotune(monkeypatch):
    seen = []

    class Inner:
        @staticmethod
        def main(arguments):
            seen.append(arguments)
            return 3

    monkeypatch.setitem(sys.modules, "fastweights.autotune.compile", Inner)
    assert cli.main(["autotune", "compile", "--target", "sm_90a"]) == 3
    assert seen == [["--target", "sm_90a"]]
