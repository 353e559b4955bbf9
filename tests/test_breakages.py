"""The list of breakages is in step with the source: `benchmarks/breakages.py` shows that each is caught."""

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from bench import BENCHMARKS

ROOT = BENCHMARKS.parent
LEAST = 30


@pytest.fixture
def breakages(script_of: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return script_of("breakages")


def test_every_entry_fits_the_source(breakages: ModuleType) -> None:
    """The text to break occurs exactly once, breaking it leaves valid Python, and the test exists."""
    found = breakages.read_breakages()
    assert len(found) >= LEAST
    for each in found:
        broken = each.broken(ROOT)
        assert broken != (ROOT / each.file).read_text(encoding="utf-8"), f"{each.name} changes nothing"
        if each.file.endswith(".py"):
            ast.parse(broken)
        path, name = each.test.split("[")[0].split("::")
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{each.name}: {path} has no {name}"


def entry(**changes: str) -> str:
    """One entry of the list."""
    values = {"name": "a", "row": "1", "file": "src/a.py", "find": "1", "replace": "2", "test": "tests/a.py::b"}
    return "[[breakage]]\n" + "".join(f"{key} = {value!r}\n" for key, value in (values | changes).items())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (entry() + entry(), r"twice: \['a'\]"),
        (entry(why="it"), r"keys \['file', .*'why'\]; wanted \['file', 'find'"),
        (entry().replace("row = '1'\n", ""), "wanted .*'row'"),
    ],
)
def test_a_wrong_list_is_refused(breakages: ModuleType, tmp_path: Path, text: str, told: str) -> None:
    """Repeated names, unknown keys and missing ones."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "breakages.toml").write_text(text)
    with pytest.raises(ValueError, match=told):
        breakages.read_breakages(tmp_path)


@pytest.mark.parametrize(("source", "count"), [("x = 2", 0), ("x = 11", 2)])
def test_text_that_does_not_occur_once_is_named(breakages: ModuleType, tmp_path: Path, source: str, count: int) -> None:
    """With its entry and its file."""
    (tmp_path / "a.py").write_text(source)
    with pytest.raises(ValueError, match=rf"lost: '1' occurs {count} times in a\.py"):
        breakages.Breakage("lost", "1", "a.py", "1", "2", "tests/a.py::b").broken(tmp_path)


@pytest.mark.parametrize(
    ("code", "output", "caught"),
    [
        (1, "FAILED tests/a.py::b - assert 1 == 2\n1 failed in 0.1s", True),
        (0, "1 passed in 0.1s", False),
        (1, "1 error in 0.1s", False),
        (2, "ERROR tests/a.py\n1 error in 0.1s", False),
        (4, "ERROR: not found: tests/a.py::b", False),
        (5, "1 deselected in 0.1s", False),
        (-1, "not done within 600 s", False),
    ],
)
def test_only_a_failed_test_counts(
    breakages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, output: str, caught: bool
) -> None:
    """Not an error while collecting or in a fixture, nor a test that was not found. The source is put back."""
    seen = []

    def run_tests(root: Path, tests: list[str]) -> tuple[int, str]:
        seen.append(((root / "a.py").read_text(), tests))
        return code, output

    monkeypatch.setattr(breakages, "run_tests", run_tests)
    (tmp_path / "a.py").write_text("x = 1\n")
    outcome = breakages.try_breakage(tmp_path, breakages.Breakage("a", "1", "a.py", "1", "2", "tests/a.py::b"))
    assert outcome.caught is caught
    assert outcome.said == output.splitlines()[-1]
    assert seen == [("x = 2\n", ["tests/a.py::b"])]
    assert (tmp_path / "a.py").read_text() == "x = 1\n"


def test_a_copy_is_whole(breakages: ModuleType, tmp_path: Path) -> None:
    """Source, tests and settings; no bytecode, which could be that of another version."""
    try:
        breakages.copy_tree(tmp_path)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for name in ("src/esper/cli/entry.py", "tests/conftest.py", "pyproject.toml"):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
    assert list(tmp_path.rglob("*.pyc")) == []
