"""The rules of the house: what imports pull in, which folders there are, how long files grow."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PACKAGES = ("autotune", "bench", "csrc", "graphs", "ops", "reference")
FOLDERS = {*PACKAGES, "fastweights", "tests"}
ROOMS = {"__init__.py", "op.py", "eager.py"}
KERNELS = {"triton.py", "cuda.py"}
LONGEST = 600


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def op_folders():
    return sorted(path.parent for path in (ROOT / "ops").glob("*/op.py"))


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_of_the_package_is_bare():
    done = run_python(
        "import sys, fastweights\n"
        "print([name for name in ('torch', 'triton', 'cupy') if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_ops_import_and_run_without_triton_and_cupy():
    done = run_python(
        "import sys\n"
        "sys.modules['triton'] = sys.modules['cupy'] = None  # importing either now raises\n"
        "import torch\n"
        "from fastweights.ops import softmax_attention\n"
        "out, lse = softmax_attention(*torch.ones(3, 1, 4, 2, 16).unbind(0))\n"
        "print(out.shape, bool((out == 1).all()))"
    )
    assert done.stdout.strip() == "torch.Size([1, 4, 2, 16]) True", done.stderr


def test_import_of_ops_loads_no_backend():
    # torch itself imports Triton for its FLOP counter, so sys.modules tells only about our files.
    done = run_python(
        "import sys, fastweights.ops\n"
        "ours = [name for name in sys.modules if name.startswith('fastweights.')]\n"
        "print('fastweights.ops.polar_attention.op' in ours)\n"
        "print([name for name in ours if name.split('.')[-1] in ('eager', 'triton', 'cuda')])\n"
        "print('cupy' in sys.modules)"
    )
    assert done.stdout.split("\n")[:3] == ["True", "[]", "False"], done.stdout + done.stderr


def top_level_imports(path):
    """Names of the modules that importing a file imports at once."""
    pending, names = [ast.parse(path.read_text())], set()
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
            pending.append(node)
    return names


def test_only_kernel_files_import_triton_or_cupy_at_their_top():
    files = python_files(*PACKAGES)
    assert ROOT / "ops" / "dispatch.py" in files
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if top_level_imports(path) & {"triton", "cupy"} and not is_kernel_file(path)
    }
    assert not found, "these are imported on machines without Triton or CuPy"


def is_kernel_file(path):
    """Kernels live in `ops/common.py` and in `triton_*.py`, `hopper_*.py` beside `triton.py`."""
    return path == ROOT / "ops" / "common.py" or path.stem.startswith(("triton_", "hopper_"))


def test_reference_imports_torch_alone():
    allowed = {"__future__", "collections", "math", "torch", "typing"}
    files = python_files("reference")
    assert len(files) > 1
    for path in files:
        assert top_level_imports(path) <= allowed, path


def test_launchers_allocate_through_alloc():
    """Poisoned allocation proves a kernel's stores only if nothing bypasses `ops/alloc.py`."""
    files = [
        path for path in python_files("ops") if re.match(r"(triton|hopper|cuda)(_|$)", path.stem)
    ]
    launchers = {path for folder in op_folders() for path in map(folder.joinpath, KERNELS)}
    assert ROOT / "ops" / "polar_attention" / "triton.py" in launchers & set(files)
    assert {path for path in launchers if path.exists()} <= set(files)
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"torch\.empty|\.new_empty\(", line)
    ]
    assert not found


def test_files_stay_readable():
    files = [*python_files(*FOLDERS), *(ROOT / "csrc").rglob("*.cu*")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert "ops/dispatch.py" in lengths
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_top_level_folders_are_the_fixed_list():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"needs git and a checkout: {done.stderr.strip()}")
    folders = {line.split("/")[0] for line in done.stdout.splitlines() if "/" in line}
    assert {name for name in folders if not name.startswith(".")} == FOLDERS


def test_the_wheel_maps_every_package_folder():
    text = (ROOT / "pyproject.toml").read_text()
    table = text.split("[tool.scikit-build.wheel.packages]")[1].split("\n\n")[0]
    mapped = dict(re.findall(r'"fastweights/(\w+)" = "(\w+)"', table))
    assert mapped == {name: name for name in PACKAGES}


def test_every_op_folder_has_the_same_rooms():
    folders = op_folders()
    assert folders
    for folder in folders:
        names = {path.name for path in folder.glob("*.py")}
        rooms = ROOMS | {"tuning.py"} if names & KERNELS else ROOMS
        assert rooms <= names, f"{folder.name} lacks {rooms - names}"


def test_readme_says_which_op_has_which_backend():
    rows = re.findall(r"^\| `(\w+)`.*\| (.+) \| (.+) \| (.+) \|$", README.read_text(), re.MULTILINE)
    assert len(rows) >= len(op_folders())
    for op, *said in rows:
        module = getattr(importlib.import_module("fastweights.ops"), op).__module__
        folder = ROOT / "ops" / module.rpartition(".")[2]
        exists = [(folder / f"{name}.py").is_file() for name in ("eager", "triton", "cuda")]
        for words, there in zip(said, exists, strict=True):
            # A backend that has not run on its device yet is there, but not done.
            assert words == "not yet" or (words == "done" and there), op


def test_version_is_written_once_in_each_language():
    versions = {
        name: re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1]
        for name, pattern in {
            "pyproject.toml": r'^version = "(.+)"',
            "fastweights/__init__.py": r'^__version__ = "(.+)"',
            "CMakeLists.txt": r"VERSION (\d+\.\d+\.\d+) LANG",
        }.items()
    }
    assert len(set(versions.values())) == 1, versions
