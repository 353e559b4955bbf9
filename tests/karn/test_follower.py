"""A run folder that somebody else writes: whole lines only, from the beginning when it is cut, and nothing raises."""

import json
import os
import shutil
from pathlib import Path

import pytest
from karn.live_files import header, live_step, write_live
from karn.run_folders import (
    Json,
    default_events,
    episode,
    growth_events,
    growth_metrics,
    life,
    metrics,
    stage,
    write_growth,
    write_lines,
    write_run,
)

from esper.karn import RunFollower, read_run
from esper.karn.follower import TAIL
from esper.karn.growth import GrowthRun, read_growth
from esper.karn.state import RunState
from esper.leyline import BadValueError, SeedStage


def followed(path: Path, tail: int = TAIL) -> tuple[RunFollower, RunState]:
    """A follower that has read what there is, and its state."""
    follower = RunFollower(path, tail=tail)
    while follower.poll():
        pass
    assert isinstance(follower.state, RunState)
    return follower, follower.state


def plays(state: RunState) -> bool:
    """Whether a round is being played."""
    return state.playing is not None


def append(path: Path, *lines: Json) -> None:
    """As a run does."""
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_it_knows_what_a_report_knows(tmp_path: Path) -> None:
    """The same fold: every figure, and the details of the last round."""
    run = read_run(write_run(tmp_path))
    _, state = followed(tmp_path)
    assert state.rounds == run.rounds
    assert state.shown == run.shown == 1
    assert state.episodes == run.episodes
    assert (state.changes, state.panics, state.commits) == (run.changes, run.panics, run.commits)
    assert state.column_names == run.column_names
    assert state.histories() == run.histories()


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    """A line counts when it is complete, and events when their round is."""
    follower, state = followed(write_run(tmp_path, [metrics(0)], default_events(1)))
    assert not follower.poll()
    append(tmp_path / "events.jsonl", episode(1, 0, 7.0, life(1, 0, "r1c2", 1)))
    assert not follower.poll()
    assert (state.complete, len(state.changes)) == (0, 14)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(1))[:50])
        file.flush()
        assert not follower.poll()
        file.write(json.dumps(metrics(1))[50:] + "\n")
    assert follower.poll()
    assert (state.complete, state.shown, len(state.changes)) == (1, 1, 5)
    assert [each.objective for each in state.episodes[1]] == [7.0]
    assert not state.episodes[0][0].accuracies
    assert follower.problems == []


def test_a_cut_log_is_read_again(tmp_path: Path) -> None:
    """A resumed run cuts its logs and writes on; the new file may be as long as the old one was."""
    follower, _ = followed(write_run(tmp_path))
    write_lines(tmp_path / "metrics.jsonl", [metrics(0), metrics(1, accuracy=52.5)])
    while follower.poll():
        pass
    assert isinstance(follower.state, RunState)
    assert follower.state.series("accuracy") == [51.5, 52.5]
    assert len(follower.state.episodes[1]) == 4


def test_a_line_damaged_in_the_middle_is_named_and_skipped(tmp_path: Path) -> None:
    """With file and line; the others count."""
    events: list[Json] = default_events()
    events[3]["stages"] = {**events[2]["stages"], "target": "GTBHZ"}
    write_run(tmp_path, [metrics(0), metrics(1)], events)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines[6:6] = [b'{"kind": \n', b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"kind":"episode","round":1}\n']
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    append(tmp_path / "metrics.jsonl", [1], {"round": "two"})
    follower, state = followed(tmp_path)
    told = "\n".join(follower.problems)
    for place in (
        "metrics.jsonl, line 3",
        "metrics.jsonl, line 4",
        *(f"events.jsonl, line {n}" for n in (4, 7, 8, 9, 10)),
    ):
        assert place in told
    assert len(follower.problems) == 7
    assert "line 4, stages, target) 'Z'" in told
    assert [len(state.episodes[number]) for number in (0, 1)] == [3, 4]
    with pytest.raises(BadValueError):
        read_run(tmp_path)


def test_a_run_that_is_deleted(tmp_path: Path) -> None:
    """The last state stays; another run in its place is read from its beginning."""
    path = write_run(tmp_path / "run")
    follower, state = followed(path)
    shutil.rmtree(path)
    assert follower.poll()
    assert (follower.gone, follower.state) == (True, state)
    assert not follower.poll()
    write_run(path, [metrics(0)], default_events(1), seed=6)
    while follower.poll():
        pass
    assert isinstance(follower.state, RunState)
    assert (follower.gone, follower.state.complete, follower.state.setting("seed")) == (False, 0, 6)


def test_a_folder_that_becomes_something_else(tmp_path: Path) -> None:
    """It is named, and the state stays."""
    follower, state = followed(write_run(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert follower.poll()
    assert follower.state is state
    assert "config is no JSON object" in follower.problems[0]


def test_no_run(tmp_path: Path) -> None:
    """Nothing is read of a folder that holds none; one whose logs are missing is a run that begins."""
    with pytest.raises(BadValueError, match=r"it has no config.json"):
        RunFollower(tmp_path)
    with pytest.raises(BadValueError, match="there is no such folder"):
        RunFollower(tmp_path / "nowhere")
    write_run(tmp_path)
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).unlink()
    _, state = followed(tmp_path)
    assert (state.complete, state.histories()) == (-1, [])


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    """First the last rounds, then what lies before; in the end all of it, as from the beginning."""
    alarm = {"kind": "alarm", "round": 3, "alarm": "kl_spike", "severity": "warning", "ended": False}
    rounds = [metrics(number) for number in range(40)]
    events = [each for each in default_events(40) if each["round"] < 4]
    write_run(tmp_path, rounds, [*events, alarm, *default_events(40)[len(events) :]])
    size = (tmp_path / "events.jsonl").stat().st_size
    follower = RunFollower(tmp_path, tail=size // 5)
    follower.poll(front=False)
    state = follower.state
    assert isinstance(state, RunState)
    assert 0 < len(state.episodes) < 10 and max(state.episodes) == state.shown == 39
    assert follower.behind[0] < follower.behind[1]
    assert not follower.show(0)
    while follower.poll():
        pass
    whole = read_run(tmp_path)
    assert state.episodes == whole.episodes
    assert state.commits == whole.commits
    assert (state.changes, follower.problems) == (whole.changes, [])
    assert [each.alarm for each in state.alarms] == [each.alarm for each in whole.alarms] == ["kl_spike"]
    assert follower.behind == (size, size)


@pytest.mark.parametrize("tail", [8 << 20, 4000])
def test_details_of_another_round(tail: int, tmp_path: Path) -> None:
    """They are read again where they lie; the newest ones come back."""
    odd = [stage(0, 2, 3, "r1c1", "DORMANT", "GERMINATED", "germinate")]
    events = [*default_events(1)[:3], episode(0, 3, 2.0, odd), *default_events(4)[4:]]
    follower, state = followed(write_run(tmp_path, [metrics(n) for n in range(4)], events), tail=tail)
    before = state.histories()
    assert follower.show(0)
    assert state.shown == 0
    assert [len(host.changes) for host in state.histories()] == [5, 4, 5, 1]
    assert state.commits == read_run(tmp_path).commits
    append(tmp_path / "events.jsonl", *[{**each, "round": 4} for each in default_events(1)])
    append(tmp_path / "metrics.jsonl", metrics(4))
    assert follower.poll()
    assert state.shown == 0
    assert not follower.show(17)
    assert follower.show(None)
    assert state.shown == 4
    assert [host.changes for host in state.histories()] == [host.changes for host in before]


# -- the round that is being played -----------------------------------------------------------------------------------


def test_the_steps_of_a_round(tmp_path: Path) -> None:
    """Hosts grow step by step; the next round begins with an empty file."""
    write_run(tmp_path, [metrics(0)], default_events(1))
    follower, state = followed(tmp_path)
    assert not plays(state)
    live = write_live(tmp_path, header(1))
    assert follower.poll() and not plays(state)
    for step in range(3):
        append(live, live_step(1, step))
        assert follower.poll()
    playing = state.playing
    assert playing is not None
    assert (playing.number, playing.trained, playing.steps, sorted(playing.hosts)) == (1, 3, 8, [0, 1])
    host = playing.hosts[0]
    assert host.accuracies == [40.0, 41.0, 42.0]
    assert host.gains == [0.0, 0.5, 1.0]
    seed = host.at()["r1c0"]
    assert (seed.stage, seed.blueprint, seed.alpha, seed.born) == (SeedStage.TRAINING, "norm", 0.0, 0)
    assert seed.audition is not None and seed.audition.value == 2.0
    assert host.actions[0].op == "GERMINATE"
    assert host.choices[0] == {"op": {"GERMINATE": 0.75, "WAIT": 0.25}}
    assert host.chances[2] == 0.5
    write_live(tmp_path, header(2), live_step(2, 0))
    assert follower.poll()
    assert state.playing is not None
    assert (state.playing.number, state.playing.trained) == (2, 1)


def test_a_round_that_is_complete_is_not_played(tmp_path: Path) -> None:
    """Its log is the truth, whatever the live file still says."""
    write_run(tmp_path, [metrics(0)], default_events(1))
    write_live(tmp_path, header(0), live_step(0, 0))
    _, state = followed(tmp_path)
    assert state.playing is None and state.live is not None


def test_a_live_file_that_was_filled_again(tmp_path: Path) -> None:
    """Of the same length and in the same place, as a run that was resumed leaves it while nobody looks."""
    write_run(tmp_path)
    write_live(tmp_path, header(2), live_step(2, 0), live_step(2, 1))
    follower, state = followed(tmp_path)
    write_live(tmp_path, header(2, began=2), live_step(2, 0), live_step(2, 1, accuracies=[70.0, 71.0]))
    assert follower.poll()
    assert state.playing is not None
    assert state.playing.hosts[1].accuracies == [40.0, 71.0]
    os.truncate(tmp_path / "live.jsonl", 0)
    assert not follower.poll()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{**header(2), "version": 2}, live_step(2, 0)], "version is 2, this Esper reads version 1"),
        ([header(2), live_step(2, 0, gains=[1.0])], "its curves are of different numbers of hosts"),
        ([header(2), live_step(2, 0, seeds=[[7, "r1c0"]])], "rows of 9 values are expected"),
        (
            [header(2), live_step(2, 0, seeds=[[7, "r1c0", "TRAINING", None, 0.5, None, None, None, None]])],
            "of no host",
        ),
        ([header(2), live_step(2, 0, changes=[[0, "r1c0", None, "DORMANT", "ASLEEP", "x"]])], "'ASLEEP'; allowed"),
        ([header(2), live_step(2, 0, actions=[["0", "PRUNE", "r1c0", None]])], "env '0' is none of its hosts"),
        ([header(2), {"kind": "step"}], "line 2 has no 'step'"),
        ([{"kind": "live", "version": 1, "round": -1}], "'round' is -1"),
    ],
)
def test_wrong_live_lines_are_named(lines: list[Json], message: str, tmp_path: Path) -> None:
    """And nothing else: the run is shown without them."""
    write_run(tmp_path)
    write_live(tmp_path, *lines)
    follower, state = followed(tmp_path)
    assert [message in problem and "live.jsonl, line" in problem for problem in follower.problems] == [True]
    assert state.complete == 1


# -- the run of a Grower ----------------------------------------------------------------------------------------------


def test_a_grower(tmp_path: Path) -> None:
    """The same model, as one host whose steps count from 1."""
    follower = RunFollower(write_growth(tmp_path, [growth_metrics(1)]))
    follower.poll()
    state = follower.state
    assert isinstance(state, GrowthRun)
    assert [change.at for change in state.changes] == [1, 1, 1]
    append(tmp_path / "metrics.jsonl", *(growth_metrics(step) for step in range(2, 6)))
    assert follower.poll()
    whole = read_growth(tmp_path)
    assert (state.steps, state.changes, state.panics) == (whole.steps, whole.changes, whole.panics)
    finished = {**growth_events()[-1], "kind": "finished", "step": 5, "kept": ["layer1.0"], "dropped": []}
    append(tmp_path / "events.jsonl", finished)
    assert follower.poll()
    assert state.finish is not None and state.finish.kept == ["layer1.0"]
    (host,) = state.histories()
    assert (host.trained, host.steps, host.accuracies[-1]) == (5, 8, 45.0)
    assert host.at(3)["layer1.0"].contribution is not None
    assert {slot: seed.stage.name for slot, seed in host.at(4).items()} == {
        "layer1.0": "FOSSILIZED",
        "layer2": "PRUNED",
    }
    assert host.alphas["layer1.0"] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert host.actions[4].op == "FOSSILIZE"
    assert not follower.show(3)


def test_the_live_steps_of_a_grower(tmp_path: Path) -> None:
    """Counted as they were printed."""
    write_growth(tmp_path)
    row = [0, "layer1.0", "norm", "BLENDING", "HOLDING", "tick"]
    one = {
        "accuracies": [41.0],
        "control_accuracies": [None],
        "gains": [None],
        "losses": [1.0],
        "seeds": [],
        "choices": [],
    }
    write_live(tmp_path, header(0), live_step(0, 1, **one, actions=[], changes=[row], probabilities=[]))
    follower = RunFollower(tmp_path)
    follower.poll()
    assert follower.problems == []
    assert follower.state.live is not None
    host = follower.state.live.hosts[0]
    assert (host.trained, [change.at for change in host.changes]) == (1, [1])
