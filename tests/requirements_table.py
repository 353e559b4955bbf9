"""The tests column of docs/requirements.md: `python tests/requirements_table.py` generates it from the tests' marks."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "requirements.md"
PREFIXES = {"requirement": "", "invariant": "I"}
"""Mark → the prefix of its numbers on the page."""
MOST = 3
"""Tests named per row; more would make the table hard to read."""
ROW = re.compile(r"^\| (?P<label>I?\d+) \| (?P<text>.*) \|(?P<tests>[^|]*)\|$", re.MULTILINE)


def marked_labels(function: ast.FunctionDef) -> list[str]:
    """Labels of the rows that the decorators of a test name, such as "54" or "I11"."""
    return [
        f"{PREFIXES[mark.func.attr]}{ast.literal_eval(number)}"
        for mark in function.decorator_list
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr in PREFIXES
        for number in mark.args
    ]


def collect_tests(folder: Path = TESTS) -> dict[str, list[str]]:
    """Label → its tests as file::test, ordered by path and by line."""
    tests: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in sorted(functions, key=lambda each: each.lineno):
            for label in marked_labels(function) if function.name.startswith("test_") else []:
                tests.setdefault(label, []).append(f"{path.name}::{function.name}")
    return tests


def shorten(names: list[str]) -> str:
    """The first tests and the number of others, as a cell of a table."""
    rest = [f"+{len(names) - MOST}"] if len(names) > MOST else []
    return ", ".join([*(f"`{name}`" for name in names[:MOST]), *rest])


def page_labels(page: str) -> list[str]:
    """The labels of all rows of the page, in its order."""
    return [row["label"] for row in ROW.finditer(page)]


def fill_in(page: str, tests: dict[str, list[str]]) -> str:
    """The page with the tests column of every row replaced."""
    return ROW.sub(lambda row: f"| {row['label']} | {row['text']} | {shorten(tests.get(row['label'], []))} |", page)


if __name__ == "__main__":
    PAGE.write_text(fill_in(PAGE.read_text(), collect_tests()))
