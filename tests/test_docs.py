"""README and docs: what they show runs, and what they name exists."""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.distributed.run import get_args_parser

from esper.cli import main
from esper.kasmina import BlueprintRegistry

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.exists()]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!\w+:)([^)#\s]+)[^)]*\)")


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    line: int
    """Of its first line, counted from 1."""
    lines: list[str]


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, without the indentation of their fences."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        found.append(Block(match[2], text.count("\n", 0, match.start(3)) + 1, lines))
    return found


def commands_of(page: Path) -> list[list[str]]:
    """The commands in its shell blocks, comments and prompts taken off, continued lines joined. What torchrun starts
    counts as a command of its own."""
    found = []
    for block in blocks_of(page):
        if block.language in ("bash", "console", "sh", "shell"):
            text = "\n".join(block.lines).replace("\\\n", " ")
            for line in text.splitlines():
                words = shlex.split(line.strip().removeprefix("$ "), comments=True)
                if words and words[0] == "torchrun":
                    words = launched(words)
                if words and words[0] in ("esper", "python", "make"):
                    found.append(words)
    return found


def launched(words: list[str]) -> list[str]:
    """The command that each rank runs. torchrun's own parser reads its options, and refuses those it does not know."""
    options = get_args_parser().parse_args(words[1:])
    return [*(["esper"] if options.module else ["python", options.training_script]), *options.training_script_args]


def name_of(page: Path) -> str:
    """As a test's id."""
    return str(page.relative_to(ROOT))


COMMANDS = sorted({tuple(words) for page in PAGES for words in commands_of(page)})
LEAF_SPEC = "ignore:.*LeafSpec.*:FutureWarning"  # of torch 2.13, about itself
WARNINGS = {
    "export.md": ("ignore:`torch.jit.*` is deprecated:DeprecationWarning", LEAF_SPEC),
    "integrations.md": ("ignore:.*does not have many workers.*", LEAF_SPEC),
}
"""Slow pages, with the warnings of other libraries that they meet"""
WITH_PYTHON = [
    pytest.param(page, marks=[pytest.mark.slow, *map(pytest.mark.filterwarnings, WARNINGS[page.name])])
    if page.name in WARNINGS
    else page
    for page in PAGES
    if any(block.language == "python" for block in blocks_of(page))
]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page runs. What it registers, and the modules that it writes and imports, are forgotten after it."""
    monkeypatch.setattr(BlueprintRegistry, "_specs", dict(BlueprintRegistry._specs))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_readme() -> None:
    """There is one, and it shows commands and code."""
    readme = ROOT / "README.md"
    assert readme.exists()
    assert {"bash", "python"} <= {block.language for block in blocks_of(readme)}


def test_blocks_are_found(tmp_path: Path) -> None:
    """The reader of these tests, on a page by hand."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n```python\na = 1\n```\n"
        "- item\n  ```bash\n  $ make x \\\n    Y=1  # why\n  # esper no\n  ls\n"
        "  torchrun --nnodes 1:4 -m esper tasks --json x\n  torchrun a.py --ranks 2\n  ```\n"
        "```\n?\n```\n"
    )
    assert [(block.language, block.line) for block in blocks_of(page)] == [("python", 3), ("bash", 7), ("", 15)]
    assert blocks_of(page)[0].lines == ["a = 1"]
    assert commands_of(page) == [
        ["make", "x", "Y=1"],
        ["esper", "tasks", "--json", "x"],
        ["python", "a.py", "--ranks", "2"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fences_are_closed(page: Path) -> None:
    """An open fence would hide what follows from the tests below."""
    assert page.read_text().count("```") == 2 * len(blocks_of(page))


def run_python(page: Path, empty_folder: Path) -> ModuleType:
    """The module that the blocks of a page are, from top to bottom."""
    # Each block keeps its place, so an error names the line of the page.
    lines = [""] * (len(page.read_text().splitlines()) + 1)
    for block in blocks_of(page):
        if block.language == "python":
            lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
    script = empty_folder / f"{page.stem.replace('-', '_').lower()}_page.py"
    script.write_text("\n".join(lines))
    # A module in a file, so that classes of the page have a source that can be read.
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python(page: Path, empty_folder: Path) -> None:
    """The blocks of a page run, in one namespace and in an empty folder. Models grow to what the page says."""
    module = run_python(page, empty_folder)
    if page.name == "README.md":
        model, test = module.model.eval(), module.test
        images, labels = (torch.stack([sample[part] for sample in test]) for part in (0, 1))
        accuracy = 100 * float((model(images).argmax(-1) == labels).float().mean())
        assert 92 < accuracy < 96  # 93 to 95 % over seeds
        assert sum(parameter.numel() for parameter in model.parameters()) == 986


def make_targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_exist(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """`make X` has a target, `esper X` a subcommand with these flags, `python PATH` a file."""
    tool, *arguments = words
    if tool == "make":
        targets = {word for word in arguments if not word.startswith("-") and "=" not in word}
        assert targets <= make_targets()
    elif tool == "python":
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]) is not None
        else:
            assert (ROOT / arguments[0]).is_file()
    else:
        with pytest.raises(SystemExit) as ended:
            main([*arguments[: 2 if arguments[0] == "offline" else 1], "--help"])
        printed = capsys.readouterr().out
        assert ended.value.code in (0, None)
        assert all(word.split("=")[0] in printed for word in arguments if word.startswith("--"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures are files of the repository."""
    targets = LINK.findall(FENCE.sub("", page.read_text()))
    assert [target for target in targets if not (page.parent / target).exists()] == []
