"""Sinks: what they show, what they ask of their packages, and what they say where one is missing."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from esper.leyline import MissingPackageError
from esper.leyline.progress import progress_bar
from esper.nissa import AlarmRaised, CompileFailed, Hub, RoundMeasured, Sink, SinkSettings
from esper.nissa.sinks import ConsoleSink, TensorBoardSink, WandbSink

VALUES = {"objective": 1.234, "committed": 0.5, "reward": {"gain": 2.0}, "ppo/max_kl": 0.2, "timing": {"update_s": 3}}
ROUND = RoundMeasured(3, VALUES)
NUMBERS = {"objective": 1.234, "committed": 0.5, "reward/gain": 2.0, "ppo/max_kl": 0.2, "timing/update_s": 3.0}
BEGINS = AlarmRaised("kl_spike", "warning", 3, "", False, 0.2, 0.15, "joint KL is 0.2", "lower the rate")
ENDS = AlarmRaised("entropy_collapse", "info", 3, "slot", True, 0.2, 0.02, "over", "")
HIDDEN = CompileFailed("2026-01-01T00:00:00", 3, "no compiler")  # only the log has it
EVENTS = (ROUND, BEGINS, HIDDEN, ENDS)
CONFIG = {"task": "digits", "ppo": {"gamma": 1.0}}


def show(sink: Sink) -> None:
    """All that a hub would do with it."""
    sink.open()
    for event in EVENTS:
        sink.write(event)
    sink.close()


# -- the console ------------------------------------------------------------------------------------------------------


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    """A line per round with what was measured, and the alarms that matter."""
    show(ConsoleSink())
    assert capsys.readouterr().out.splitlines() == [
        "round 3: objective +1.23, committed 50%, KL 0.200, update 3.0 s",
        "warning: round 3: kl_spike: joint KL is 0.2; lower the rate",
    ]


class Terminal(io.StringIO):
    """Something that rich takes for a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Where stdout and stderr both go, as in a shell."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with redirect_stdout(Terminal()) as shown, redirect_stderr(shown):
        yield shown


def test_what_is_out_of_range_is_yellow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL of this round is, its committed hosts are not."""
    with terminal(monkeypatch) as screen:
        show(ConsoleSink())
    assert "\x1b[33m0.200\x1b[0m" in screen.getvalue()
    assert "\x1b[33m50%" not in screen.getvalue()


def test_lines_stand_above_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's thread, while the bar is drawn: each once, and never behind the bar on its line."""
    with terminal(monkeypatch) as screen, progress_bar("rounds", 3) as advance, Hub([ConsoleSink()]) as hub:
        for event in EVENTS:
            hub.publish(event)
        advance(1, "words")
    shown = screen.getvalue()
    assert "━" in shown, "a bar was drawn"
    [line] = [row for row in shown.replace("\r", "\n").split("\n") if "objective" in row]
    assert "━" not in line
    assert "rounds" not in line
    assert shown.count("kl_spike") == 1


# -- TensorBoard ------------------------------------------------------------------------------------------------------


class FakeWriter:
    """Notes what it is called with."""

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        made.append(self)
        self.folder, self.purge_step = folder, purge_step
        self.calls: list[tuple[Any, ...]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append(("scalar", name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.calls.append(("text", name, step, text))

    def flush(self) -> None:
        self.calls.append(("flush",))

    def close(self) -> None:
        self.calls.append(("close",))


made: list[FakeWriter] = []


def test_tensorboard_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every number of a round under its path; alarms as 1 and 0; a run that goes on hides what came after."""
    made.clear()
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = FakeWriter  # type: ignore[attr-defined]  # a module by hand
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    show(TensorBoardSink(tmp_path, CONFIG, 3))
    show(TensorBoardSink(tmp_path, CONFIG, 0))
    [resumed, first] = made
    assert (resumed.folder, resumed.purge_step, first.purge_step) == (str(tmp_path / "tensorboard"), 3, None)
    config, *calls = resumed.calls
    assert config[:3] == ("text", "config", 3)
    assert '"gamma": 1.0' in config[3]
    assert calls == [
        *(("scalar", name, value, 3) for name, value in NUMBERS.items()),
        ("flush",),
        ("scalar", "alarms/kl_spike", 1.0, 3),
        ("text", "alarms/kl_spike/cause", 3, str(BEGINS)),
        ("scalar", "alarms/entropy_collapse/slot", 0.0, 3),
        ("text", "alarms/entropy_collapse/slot/cause", 3, str(ENDS)),
        ("close",),
    ]


def test_tensorboard_itself(tmp_path: Path) -> None:
    """What was written is read back by TensorBoard's own reader."""
    pytest.importorskip("tensorboard", reason="TensorBoard is an extra: esper-morph[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    SinkSettings(tensorboard=True).check()
    show(TensorBoardSink(tmp_path, CONFIG, 0))
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {*NUMBERS, "alarms/kl_spike", "alarms/entropy_collapse/slot"}
    [point] = reader.Scalars("reward/gain")
    assert (point.step, point.value) == (3, 2.0)


# -- Weights & Biases -------------------------------------------------------------------------------------------------


def test_wandb_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, in the run's folder, and with the terminal left alone."""
    begun: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, float], int]] = []
    finished: list[bool] = []
    run = SimpleNamespace(
        log=lambda numbers, step: logged.append((numbers, step)),
        summary={},
        finish=lambda: finished.append(True),
    )

    def init(**settings: Any) -> SimpleNamespace:
        begun.append(settings)
        return run

    fake = ModuleType("wandb")
    fake.init, fake.Settings = init, dict  # type: ignore[attr-defined]  # a module by hand
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "run"
    show(WandbSink(folder, CONFIG, 0))
    show(WandbSink(folder, CONFIG, 3))
    assert begun[0] == {
        "project": "esper",
        "name": "run",
        "group": "run",
        "dir": str(folder),
        "mode": "offline",
        "config": CONFIG,
        "settings": {"console": "off", "silent": True},
    }
    assert begun[1]["name"] == "run from round 3"
    assert logged[:3] == [(NUMBERS, 3), ({"alarms/kl_spike": 1.0}, 3), ({"alarms/entropy_collapse/slot": 0.0}, 3)]
    assert run.summary["alarms/kl_spike/cause"] == str(BEGINS)
    assert finished == [True, True]


def test_wandb_itself(tmp_path: Path) -> None:
    """A file of an offline run, with our names in it."""
    pytest.importorskip("wandb", reason="W&B is an extra: esper-morph[wandb]")
    SinkSettings(wandb=True).check()
    with Hub([WandbSink(tmp_path, CONFIG, 0)]) as hub:
        for event in EVENTS:
            hub.publish(event)
    assert hub.losses() == ""
    [written] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert all(name.encode() in content for name in (*NUMBERS, "alarms/kl_spike"))


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sinks", "package", "message"),
    [
        (SinkSettings(console=True), "rich", r"--console needs the package rich.*pip install 'rich'"),
        (SinkSettings(tensorboard=True), "tensorboard", r"tensorboard.*pip install 'esper-morph\[tensorboard\]'"),
        (SinkSettings(wandb=True), "wandb", r"--wandb needs the package wandb.*pip install 'esper-morph\[wandb\]'"),
    ],
)
def test_a_missing_package_is_named(
    sinks: SinkSettings, package: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=message):
        sinks.check()
    SinkSettings().check()


def test_a_folder_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where W&B ever ran there is a folder `wandb`, which Python would import as an empty package."""
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(MissingPackageError, match="wandb"):
        SinkSettings(wandb=True).check()


def test_sinks_follow_from_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting makes its sink; a path in the configuration is text by then."""
    opened: list[object] = []
    monkeypatch.setattr("esper.nissa.sinks.Hub", lambda sinks: opened.extend(sinks))
    SinkSettings(console=True, tensorboard=True, wandb=True).open(tmp_path, {"data_dir": tmp_path}, 2)
    assert [type(sink) for sink in opened] == [ConsoleSink, TensorBoardSink, WandbSink]
    assert (
        vars(opened[1])
        == vars(opened[2])
        == {
            "_run": tmp_path,
            "_config": {"data_dir": str(tmp_path)},
            "_first_round": 2,
        }
    )
    opened.clear()
    SinkSettings().open(tmp_path, {})
    assert opened == []
