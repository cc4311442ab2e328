"""What a measurement was made of: a hash of the kernels of a space, and the compiler's version.

A comment, a docstring or a blank line in a Triton kernel changes nothing; code does, that of the
modules which it imports by a relative name too. Of CUDA C++ the texts count as they stand. The
configs of the space are part of the hash: a new one has not been measured.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from .space import Space


@functools.cache
def fingerprint(space: Space) -> str:
    """Sixteen hexadecimal digits for the kernels and configs of a space.

    Raises:
        FileNotFoundError: a source of the space does not exist.
    """
    digest = hashlib.sha256()
    parts = [repr(config) for config in space.configs]
    parts += _cuda_texts(space.sources) if space.backend == "cuda" else _programs(space.sources)
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:16]


def compiler(backend: str) -> str:
    """What compiles a backend's kernels: "triton 3.6.0", "nvrtc 13.0"."""
    if backend == "cuda":
        from ..ops import cuda_runtime

        return f"nvrtc {'.'.join(map(str, cuda_runtime.compiler_version()))}"
    try:
        return f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return "no compiler"


def _cuda_texts(sources: tuple[str, ...]) -> list[str]:
    from ..ops import cuda_runtime

    return [text for source in sources for text in cuda_runtime.texts(cuda_runtime.CSRC / source)]


def _programs(modules: tuple[str, ...]) -> list[str]:
    """The code of the modules and of what they import relatively, each once, in order."""
    found: dict[Path, str] = {}
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"there is no module {module}")
        _visit(Path(spec.origin).resolve(), found)
    return list(found.values())


def _visit(path: Path, found: dict[Path, str]) -> None:
    if path in found:
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        _drop_docstring(node)
    found[path] = written(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                imported = folder.joinpath(*name.split(".")).with_suffix(".py")
                if imported.is_file():
                    _visit(imported, found)


def written(node: Any) -> str:
    """A syntax tree in one form for all versions of Python.

    What `ast.dump` and `ast.unparse` print differs from 3.10 to 3.11, 3.12 and 3.13.
    """
    if isinstance(node, list):
        return f"[{','.join(map(written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [
        f"{name}={written(value)}"
        for name, value in ast.iter_fields(node)
        if name not in _IGNORED and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(parts)})"


# What is implied, is no code, or is not in every version.
_IGNORED = ("ctx", "kind", "type_comment", "type_ignores", "type_params")


def _drop_docstring(node: ast.AST) -> None:
    if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
        return
    first = node.body[0] if node.body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        node.body[0] = ast.Pass()
