"""Rules of the house that a reader would notice."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LONGEST = 500
LINT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
"""What a reader has to follow one way or the other."""
MAY_UNPICKLE = ROOT / "src" / "esper" / "tolaria" / "data" / "cifar.py"
"""CIFAR-10 is published as pickles; it is checked by its digest and read with a restricted unpickler."""


def relative(path: Path) -> str:
    """As a test's id."""
    return str(path.relative_to(ROOT))


def repository_files() -> list[Path]:
    """All files that are in the repository or about to be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if (ROOT / name).is_file()]


def test_there_is_something_to_check() -> None:
    """These tests would pass on an empty folder."""
    assert len(SOURCES) > 40
    assert MAY_UNPICKLE in SOURCES


@pytest.mark.requirement(81)
def test_no_file_is_too_long() -> None:
    """A file that exceeds this length holds a second noun."""
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def complexities(source: str) -> dict[str, int]:
    """By function, its branches + 1 (McCabe); what is defined inside a function counts towards it too."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {each.name: 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(each)) for each in functions}


def test_complexity_is_counted() -> None:
    """By hand: a loop, two ifs of which one is an elif, a handler, and the if of a function inside: 1 + 5."""
    source = """
def outer(values):
    for value in values:
        if value:
            pass
        elif not value:
            pass
    try:
        pass
    except ValueError:
        pass
    def inner(value):
        if value:
            pass
    return [value for value in values if value]
"""
    assert complexities(source) == {"outer": 6, "inner": 2}


@pytest.mark.requirement(81)
def test_no_function_is_too_complex() -> None:
    """No function branches more than the linter allows, and none is exempt from it."""
    bound = LINT["mccabe"]["max-complexity"]
    assert bound <= 12
    found = {
        f"{relative(path)}: {name}": branches
        for path in SOURCES
        for name, branches in complexities(path.read_text()).items()
        if branches > bound
    }
    assert found == {}
    assert "C90" in LINT["select"]
    assert [relative(path) for path in SOURCES if re.search(r"noqa.*C901", path.read_text())] == []


def test_nothing_is_left_to_do() -> None:
    """Plans belong to the tracker."""
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [relative(path) for path in SOURCES if marks.search(path.read_text())] == []


def test_no_paths_of_one_machine() -> None:
    """Neither source nor results nor docs name a folder that only one machine has."""
    machine = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")
    found = []
    for path in repository_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{relative(path)}: {match[0]}" for match in machine.finditer(text)]
    assert found == []


@pytest.mark.requirement(82)
def test_pickle_in_one_place() -> None:
    """Pickles run code when read; only the reader of CIFAR-10 uses them."""
    imports = re.compile(r"^\s*(?:import|from)\s+(?:c?[pP]ickle|dill|joblib|shelve|marshal)\b", re.MULTILINE)
    assert [path for path in SOURCES if imports.search(path.read_text())] == [MAY_UNPICKLE]


@pytest.mark.requirement(82)
def test_no_torch_load() -> None:
    """Weights are stored as safetensors. Lightning's own checkpoints are read by torch, and only their weights."""
    loads = re.compile(r"(?<![\w.])torch\.(?:load|save)\(.*|\bfrom torch import .*\b(?:load|save)\b")
    found = {relative(path): loads.findall(path.read_text()) for path in SOURCES}
    (call,) = found.pop("src/esper/integrations/lightning.py")
    assert call.startswith("torch.load(") and call.endswith("weights_only=True)")
    assert {path: calls for path, calls in found.items() if calls} == {}
