"""Prompts about code: functions of published pure-Python wheels, to complete, explain, document or test."""

import ast
import typing
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recipe_text import Prompt, pick, shuffled


MAX_DOCSTRING_LINES, MAX_BODY_LINES = 20, 25
TESTS = ("test", "tests", "conftest.py")
COMPLETE = (
    "Complete this Python function:\n\n{fenced}",
    "Implement the following function. Return the code only.\n\n{fenced}",
    "Write the body of this function as its docstring describes it.\n\n{fenced}",
    "Here is a signature with its documentation. Please finish the function:\n\n{fenced}",
    "{fenced}\n\nFill in the implementation and explain it in a sentence or two.",
    "I need an implementation for this Python function:\n\n{fenced}",
)
READ = (
    "Explain what this Python function does:\n\n{fenced}",
    "{fenced}\n\nWhat does this code do, step by step?",
    "Write a docstring for this function:\n\n{bare}",
    "Add type hints and comments to this Python function:\n\n{bare}",
    "Write unit tests with pytest for this function:\n\n{fenced}",
    "Review this code and suggest improvements:\n\n{fenced}",
    "Rewrite this Python function in JavaScript:\n\n{fenced}",
)


class Function(NamedTuple):
    """A top-level function of a module."""

    name: str
    stub: str  # imports of `typing` that it needs, signature and docstring
    code: str
    undocumented: str  # without its docstring


def functions(wheel: Path) -> list[Function]:
    """The public top-level functions of a wheel that have a docstring of at most `MAX_DOCSTRING_LINES`."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and not any(part.startswith(TESTS) for part in name.split("/")):
                found += _functions(archive.read(name).decode("utf-8", "replace"))
    return found


def _functions(source: str) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            module = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and Python 2
        return
    lines = source.split("\n")
    for node in module.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        documentation, body = ast.get_docstring(node), node.body
        if not documentation or len(documentation.splitlines()) > MAX_DOCSTRING_LINES or len(body) < 2:
            continue
        begin, signed, described = node.lineno - 1, body[0].lineno - 1, body[0].end_lineno
        assert described is not None
        if signed == begin or body[1].lineno <= described:  # all on one line
            continue
        code = "\n".join(lines[begin : node.end_lineno])
        undocumented = "\n".join([*lines[begin:signed], *lines[described : node.end_lineno]])
        stub = _typing_imports(node) + "\n".join(lines[begin:described]) + "\n"
        yield Function(node.name, stub, code, undocumented)


def _typing_imports(node: ast.FunctionDef) -> str:
    """What the annotations name of `typing`."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments] + [node.returns]
    inner = [part for annotation in annotations if annotation is not None for part in ast.walk(annotation)]
    names = {part.id for part in inner if isinstance(part, ast.Name)} & set(typing.__all__)
    return f"from typing import {', '.join(sorted(names))}\n\n\n" if names else ""


def completions(found: list[Function]) -> Iterator[Prompt]:
    """Half as bare code, which is how HumanEval asks, half with a sentence."""
    for function in shuffled(found, str):
        fenced = f"```python\n{function.stub}```"
        template = pick(("bare", "sentence"), function.stub)
        asked = function.stub if template == "bare" else pick(COMPLETE, function.stub + "?").format(fenced=fenced)
        yield Prompt("function", [asked])


def readings(found: list[Function]) -> Iterator[Prompt]:
    """Short functions to explain, document, test or translate."""
    for function in shuffled(found, lambda function: f"{function} read"):
        if function.code.count("\n") < MAX_BODY_LINES:
            fenced, bare = (f"```python\n{text}\n```" for text in (function.code, function.undocumented))
            yield Prompt("code reading", [pick(READ, function.code).format(fenced=fenced, bare=bare)])
