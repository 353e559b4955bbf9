"""Every `esper` command of README and docs runs, at reduced size: fewer rounds and hosts, shorter episodes."""

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_docs import PAGES, commands_of, name_of
from torch import nn

import esper
from esper.cli import main
from esper.karn.browser import server

SMALLER = {
    "train": {"--rounds": "2", "--hosts": "8"},
    "evaluate": {"--hosts": "4"},
    "tune": {"--episodes": "40"},
    "offline record": {"--episodes": "4", "--workers": "1"},
    "offline imitate": {"--epochs": "2"},
    "offline iql": {"--epochs": "2", "--policy-epochs": "2"},
}
"""Subcommand → flags that are set to this, whether the page names them or not."""
TEACH = "52"
"""Episodes of a search that is imitated, where the page names one."""
EXTRAS = {"--tensorboard": "tensorboard", "--wandb": "wandb"}
"""Flag → the package that it needs and that a plain installation lacks."""
FIRST = ["esper", "train", "--out", "runs/first"]
"""The run that pages speak of."""


def reduced(words: list[str]) -> list[str]:
    """The arguments of a command, smaller."""
    arguments = words[1:]
    if "--resume" in arguments:
        return arguments
    name = " ".join(arguments[:2]) if arguments[0] == "offline" else arguments[0]
    for flag, value in SMALLER.get(name, {}).items():
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [flag, value]
    for flag, value in {"--teach": TEACH, "--workers": "1"}.items():
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
    return arguments


def test_reduced() -> None:
    """What is named is replaced, what is not is added, what goes on is left alone."""
    assert reduced(["esper", "train", "--hosts", "32"]) == ["train", "--hosts", "8", "--rounds", "2"]
    assert reduced(["esper", "train", "--resume", "runs/a"]) == ["train", "--resume", "runs/a"]
    assert reduced(["esper", "tasks"]) == ["tasks"]
    taught = ["esper", "train", "--teach", "300", "--workers", "2"]
    assert reduced(taught)[:5] == ["train", "--teach", TEACH, "--workers", "1"]
    assert reduced(["esper", "offline", "imitate", "a"]) == ["offline", "imitate", "a", "--epochs", "2"]


def grow(folder: str) -> None:
    """A run folder of a Grower, with two seeds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 8), torch.arange(32) % 2
    grower = esper.Grower(model, optimizer, budget=2_000, steps=8, folder=folder)
    for _ in range(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        grower.step([batch])
    grower.finish()


def provide(words: list[str]) -> None:
    """What a page takes for granted: a run to look at, another evaluation, a default folder that is free."""
    if not Path("runs/mine").exists() and "runs/mine" in words:
        grow("runs/mine")
    is_looked_at = "runs" in words or "runs/first" in " ".join(words)
    if not Path("runs/first").exists() and is_looked_at and "--out" not in words:
        main(reduced(FIRST))
    for name in words[words.index("--evaluation") + 1 :] if "--evaluation" in words else []:
        if name.endswith(".json"):
            shutil.copy("runs/first/evaluation.json", name)
    if words[1] == "train" and "--out" not in words and "--resume" not in words:
        shutil.rmtree("runs/train", ignore_errors=True)


class Glance:
    """In place of the app that watches: it is begun without a terminal, and left."""

    def show(self, runs: Sequence[Path], **options: Any) -> None:
        """As that of the app."""
        from textual.pilot import Pilot

        from esper.karn.terminal.app import WatchApp
        from esper.karn.terminal.moment import Watched

        async def look(pilot: Pilot[object]) -> None:
            for key in "12345q":
                await pilot.press(key)

        WatchApp([Watched.of(path) for path in runs], **options).run(headless=True, auto_pilot=look)


@pytest.mark.usefixtures("short_episodes")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name == "README.md" else pytest.mark.slow)
        for page in PAGES
        if any(words[0] == "esper" for words in commands_of(page))
    ],
    ids=name_of,
)
def test_commands_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From top to bottom in one empty folder. Where an extra is missing, its flag says how to install it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esper.karn.terminal.opening.import_module", lambda name: Glance())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("esper.cli.serve.listen", lambda *_: None)  # or it would serve until Ctrl-C
    monkeypatch.setattr(server.Server, "app", lambda *_: None)
    for words in commands_of(page):
        if words[0] != "esper":
            continue
        provide(words)
        missing = [flag for flag, package in EXTRAS.items() if flag in words and not importlib.util.find_spec(package)]
        if missing:
            with pytest.raises(SystemExit):
                main(reduced(words))
            assert f"esper-morph[{EXTRAS[missing[0]]}]" in "".join(capsys.readouterr())
            main(reduced([word for word in words if word not in EXTRAS]))
        else:
            main(reduced(words))
