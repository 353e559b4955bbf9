"""Every requirement has a test that names it: `python tests/test_requirements.py` lists them."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROWS = range(1, 96)
NAMED = re.compile(r"[Rr]equirement (\d+)\b")


def collect_rows() -> dict[int, list[str]]:
    """Row → the tests whose docstring names it, as pytest would be told."""
    found: dict[int, list[str]] = {row: [] for row in ROWS}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for row in sorted({int(number) for number in NAMED.findall(ast.get_docstring(node) or "")}):
                    found.setdefault(row, []).append(f"{path.relative_to(TESTS.parent)}::{node.name}")
    return found


FOUND = collect_rows()


@pytest.mark.parametrize("row", ROWS)
def test_a_test_names_it(row: int) -> None:
    """A row that nobody shows may be broken without anybody noticing."""
    assert FOUND[row], f"no test's docstring says 'Requirement {row}'"


def test_no_other_row_is_named() -> None:
    """A number that is no row is a slip."""
    assert sorted(FOUND) == list(ROWS)


if __name__ == "__main__":
    for number, names in FOUND.items():
        print(f"{number:3} {', '.join(names) or '-'}")
