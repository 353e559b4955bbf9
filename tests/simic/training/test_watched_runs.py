"""Runs that somebody watches: the same numbers, every one of them in the catalogue, and nothing told twice."""

import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from nissa.watchers import Broken, Recorder
from simic.training.tiny import NAME, quick_config, tiny_task

from esper.cli import main
from esper.nissa import AlarmRaised, CompileFailed, Hub, RoundMeasured, SinkSettings, find_metric
from esper.nissa.catalogue import METRICS
from esper.nissa.sinks import ConsoleSink
from esper.simic.agent import PPOUpdateMetrics, TamiyoRolloutBuffer, UpdateObserver
from esper.simic.training.config import TrainConfig
from esper.simic.training.run_folder import SESSIONS
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines

ROUNDS = 2


def start(folder: Path, sinks: SinkSettings | None = None, *, resume: bool = False) -> Trainer:
    """A run of tiny hosts."""
    tiny_task()
    config = TrainConfig(task=NAME, rounds=ROUNDS, hosts=4, members=1, seed=2)
    return Trainer(config, folder, sinks=sinks, resume=resume)


class Runs(NamedTuple):
    """One run twice."""

    plain: Trainer
    watched: Trainer
    recorder: Recorder
    printed: str
    """By the watched one"""

    def lines(self, which: str, name: str = "metrics.jsonl") -> list[dict[str, object]]:
        """Of a log."""
        return list(read_lines(getattr(self, which).folder.path / name))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Alone; and with a console, a sink that remembers and one that breaks."""
    folder = tmp_path_factory.mktemp("runs")
    plain, watched, recorder = (
        start(folder / "plain"),
        start(folder / "watched", SinkSettings(console=True)),
        Recorder(),
    )
    plain.run(progress=False)
    watched.recorder.hub.close()
    watched.recorder.hub = Hub([ConsoleSink(), recorder, Broken("write")])
    with redirect_stdout(io.StringIO()) as printed, pytest.warns(RuntimeWarning, match="without a sink: broken"):
        watched.run(progress=False)
    return Runs(plain, watched, recorder, printed.getvalue())


@pytest.mark.invariant(12)
def test_sinks_change_nothing(runs: Runs) -> None:
    """Bit for bit: metrics, events, weights; only what depends on the clock differs, and what sinks lost is part of
    that."""
    plain, watched = (
        [{name: value for name, value in line.items() if name != "timing"} for line in runs.lines(which)]
        for which in ("plain", "watched")
    )
    assert plain == watched
    assert len(plain) == ROUNDS
    texts = [(run.folder.path / "events.jsonl").read_text() for run in (runs.plain, runs.watched)]
    assert texts[0] == texts[1] != ""
    pairs = zip(runs.plain.agent.network.parameters(), runs.watched.agent.network.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_sinks_are_shown_what_is_written(runs: Runs) -> None:
    """Begin, rounds and end, with the very numbers of the log."""
    kinds = [event.kind for event in runs.recorder.events if event.kind != "alarm"]
    assert kinds == ["begun", *["round"] * ROUNDS, "ended"]
    shown = [event for event in runs.recorder.events if isinstance(event, RoundMeasured)]
    assert [{"round": event.round, **event.values} for event in shown] == runs.lines("watched")


def test_what_sinks_lose_is_told(runs: Runs) -> None:
    """In the metrics of a run that has sinks, and at its end."""
    timings = {which: [line["timing"] for line in runs.lines(which)] for which in ("plain", "watched")}
    assert all("hub" not in timing for timing in timings["plain"])  # type: ignore[operator]  # JSON
    assert all(set(timing["hub"]) == {"dropped", "failed"} for timing in timings["watched"])  # type: ignore[index]
    assert runs.watched.recorder.hub.metrics() == {"dropped": 0, "failed": 1}
    last = runs.printed.splitlines()[-1]
    assert last.startswith("switched off: broken (OSError: no space to write); the log in ")
    assert sum(line.startswith("round ") for line in runs.printed.splitlines()) == ROUNDS


@pytest.mark.requirement(31)
@pytest.mark.parametrize("which", ["plain", "watched"])
def test_emitted_metrics_are_declared(runs: Runs, which: str) -> None:
    """Every number of a round is in the catalogue, and every required one is emitted."""
    heads = runs.plain.agent.table.names
    always = [metric.name for metric in METRICS if metric.always]
    declared = {name.replace("<head>", head) for name in always for head in heads}
    for line in runs.lines(which):
        emitted = set(RoundMeasured(0, line).numbers())
        assert [name for name in emitted if find_metric(name) is None] == []
        assert declared - emitted == set()
        assert ("timing/hub/dropped" in emitted) == (which == "watched")


@pytest.mark.requirement(9)
@pytest.mark.parametrize("console", [True, False])
@pytest.mark.default_cases("True")
def test_alarms_reach_the_hub_and_are_printed_once(console: bool, tmp_path: Path) -> None:
    """An extreme KL in the real loop reaches the hub, with or without a console."""
    trainer, recorder = start(tmp_path / "run", SinkSettings(console=console)), Recorder()
    trainer.recorder.hub.close()
    trainer.recorder.hub = Hub([recorder, *([ConsoleSink()] if console else [])])
    update = trainer.agent.update

    def extreme(buffer: TamiyoRolloutBuffer, observer: UpdateObserver | None = None) -> PPOUpdateMetrics:
        return replace(update(buffer, observer), approx_kl=0.6, max_kl=0.6)

    trainer.agent.update = extreme  # type: ignore[method-assign]
    with redirect_stdout(io.StringIO()) as printed:
        trainer.run(progress=False)
    raised = [event for event in recorder.events if isinstance(event, AlarmRaised) and event.alarm == "kl_extreme"]
    assert [(event.round, event.severity, event.ended, event.value) for event in raised] == [
        (0, "critical", False, 0.6)
    ]
    assert [line for line in printed.getvalue().splitlines() if "kl_extreme" in line] == [str(raised[0])]


# -- sessions ---------------------------------------------------------------------------------------------------------


def told(folder: Path) -> list[tuple[object, ...]]:
    """The sessions without their times and machines."""
    apart = ("time", "machine", "git")
    return [tuple(value for key, value in line.items() if key not in apart) for line in read_lines(folder / SESSIONS)]


def test_sessions_of_a_run(tmp_path: Path) -> None:
    """Ctrl-C, an error and the end are noted; a line that a kill has torn is put aside."""
    run, recorder = tmp_path / "run", Recorder()

    def session(error: BaseException | None) -> None:
        trainer = start(run, resume=True)
        trainer.recorder.hub = Hub([recorder])
        if error is not None:

            def failing(round_index: int) -> None:
                raise error

            trainer.collector.collect = failing  # type: ignore[assignment, method-assign]
        trainer.run(progress=False)

    first = start(run)
    with first.folder:
        first.run_round()
    session(KeyboardInterrupt())
    with pytest.raises(ValueError, match="why"):
        session(ValueError("why"))
    with (run / SESSIONS).open("a") as log:
        log.write('{"kind":"resu')
    session(None)
    assert told(run) == [
        ("resumed", 1, ROUNDS, []),
        ("ended", 1, "stopped", 0),
        ("resumed", 1, ROUNDS, []),
        ("ended", 1, "ValueError: why", 0),
        ("resumed", 1, ROUNDS, []),
        ("ended", ROUNDS, "complete", 0),
    ]
    kinds = [event.kind for event in recorder.events if event.kind not in ("round", "alarm")]
    assert kinds == ["resumed", "ended"] * 3


@pytest.mark.requirement(39)
def test_a_failed_compile_is_an_event_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged once, with the round and the compiler's error, and sent to the sinks. The run is as in eager
    mode."""

    def broken(*args: object) -> None:
        raise OSError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    config, recorder = quick_config(rounds=2), Recorder()
    compiled = Trainer(replace(config, ppo=replace(config.ppo, compile="default")), tmp_path / "compiled")
    compiled.recorder.hub.close()
    compiled.recorder.hub = Hub([recorder])
    with pytest.warns(RuntimeWarning, match="torch.compile failed, continuing without it"):
        compiled.run(progress=False)
    begun, failed, ended = read_lines(tmp_path / "compiled" / SESSIONS)
    assert (begun["kind"], failed["kind"], ended["kind"]) == ("begun", "compile_failed", "ended")
    assert failed["round"] == 0
    assert "no compiler here" in failed["why"]
    assert [event.round for event in recorder.events if isinstance(event, CompileFailed)] == [0]
    eager = Trainer(config, tmp_path / "eager")
    eager.run(progress=False)
    logs = [(tmp_path / name / "events.jsonl").read_text() for name in ("compiled", "eager")]
    assert logs[0] == logs[1]


def test_a_run_tells_its_sessions(runs: Runs) -> None:
    assert told(runs.plain.folder.path) == [("begun", 0, ROUNDS), ("ended", ROUNDS, "complete", 0)]


def test_ctrl_c_closes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The session ends as stopped, the sinks have seen it, and the way to go on is printed."""
    trainer, recorder = start(tmp_path / "run"), Recorder()
    trainer.recorder.hub = Hub([recorder])

    def interrupted() -> None:
        raise KeyboardInterrupt

    trainer.run_round = interrupted  # type: ignore[method-assign, assignment]
    trainer.run(progress=False)
    assert told(tmp_path / "run") == [("begun", 0, ROUNDS), ("ended", 0, "stopped", 0)]
    assert [event.kind for event in recorder.events] == ["begun", "ended"]
    assert recorder.calls == ["open", "close"]
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().out


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_a_missing_package_stops_before_anything_runs(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the extra to install, exit code 2, and no folder."""
    tiny_task()
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--task", NAME, f"--{extra}", "--out", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert f"pip install 'esper-morph[{extra}]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_flags_choose_sinks_and_stay_out_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--console` prints a line per round; the run's configuration does not know of it."""
    tiny_task()
    out = tmp_path / "run"
    main(["train", "--task", NAME, "--rounds", "1", "--hosts", "2", "--members", "1", "--console", "--out", str(out)])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0].split()[:3] for line in printed if line.startswith("round 0:")] == [
        ["round", "0:", "objective"]
    ]
    assert not {"watch", "console"} & set(json.loads((out / "config.json").read_text())["config"])
