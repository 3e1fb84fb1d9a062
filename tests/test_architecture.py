"""Who may import whom, and how long a file and a function may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


SOURCE = Path(__file__).parents[1] / "src" / "draftsmith"
FILES = sorted(SOURCE.rglob("*.py"))
# What each part may import of ours, besides itself. `commands` and the package's own `__init__` may import everything.
ALLOWED = {
    "ops": set(),
    "alignment": set(),
    "model_card": set(),
    "planning": set(),
    "serving": set(),
    "data": {"alignment"},
    "transformers_hooks": {"ops", "models"},  # the model classes that it registers, imported late
    "revisions": set(),
    "target_family": set(),
    "cached_target": {"target_family"},
    "served_target": {"cached_target", "serving", "target", "target_family"},
    "compiled_forwards": {"transformers_hooks"},
    "cuda_graphs": set(),
    "captured_forwards": {"cuda_graphs"},
    "tensor_parallel": {"ops", "target_family"},
    "target": {
        "captured_forwards",
        "compiled_forwards",
        "revisions",
        "target_family",
        "tensor_parallel",
        "transformers_hooks",
    },
    # `target` alone reads a target's weights, `models` asks it for rows; heads in the layouts of `serving` load
    "models": {"ops", "alignment", "hub", "revisions", "serving", "target", "target_family"},
    "speculative": {"cuda_graphs", "models", "target", "target_family", "transformers_hooks"},
    "hub": {"model_card", "serving"},
}
ALLOWED["trainer"] = set(ALLOWED)
ALLOWED["generation"] = {"data", "serving"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 50
KERNEL_FILES = {"triton.py"}  # one kernel is one function, however long


def part(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_parts(path: Path) -> Iterator[str]:
    """The parts of the package that a file imports, at any depth; "draftsmith" for the package itself."""
    package = ["draftsmith", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), name]) for name in names]
        yield from (name.split(".")[:2][-1] for name in names if name.split(".")[0] == "draftsmith")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_layers(path):
    if part(path) not in ("commands", "__init__"):
        forbidden = set(imported_parts(path)) - ALLOWED[part(path)] - {part(path)}
        assert not forbidden, f"`{part(path)}` may import {sorted(ALLOWED[part(path)])} only"


def statement_lines(function: ast.FunctionDef) -> int:
    """Lines of the body; a public signature with one argument a line and its docstring are no complexity."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path):
    if path.name in KERNEL_FILES:
        return
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert not [function.name for function in functions if statement_lines(function) > MAX_FUNCTION_LINES]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import draftsmith", {"draftsmith"}),
        ("import draftsmith.ops.precision", {"ops"}),
        ("from draftsmith import target as t", {"target"}),
        ("def f():\n    from draftsmith.ops import x", {"ops"}),
        ("from ...alignment import row_sets", {"alignment"}),
        ("from ... import alignment, target", {"alignment", "target"}),
        ("from .. import eagle3", {"models"}),
        ("from .layers import x\nimport torch", {"models"}),
    ],
)
def test_every_way_to_import_is_seen(source, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    path = tmp_path / "models" / "eagle3" / "modeling.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert set(imported_parts(path)) == parts
