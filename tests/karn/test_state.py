"""Run folders as they are read: complete rounds only, and every fault is named with its place."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from karn.run_folders import STEPS, default_events, episode, life, metrics, stage, write_lines, write_run

from esper.karn import read_run
from esper.karn.lines import Commit
from esper.karn.queries import ask
from esper.leyline import BadValueError, EsperError, SeedStage


def test_rounds(tmp_path: Path) -> None:
    """Numbers come as they were written; nested ones by a path."""
    run = read_run(write_run(tmp_path))
    assert [entry.number for entry in run.rounds] == [0, 1]
    assert run.series("objective") == [1.25, 2.25]
    assert run.series("reward/rent") == [-0.5, -1.5]
    assert run.series("ppo/op/entropy") == [0.9, 0.8]
    assert run.series("no such column") == [None, None]
    assert "ops/WAIT" not in run.column_names
    assert run.rounds[0].ops == {"WAIT": 30, "GERMINATE": 2}
    assert (run.git, run.torch, run.setting("ppo", "target_kl")) == ("0123abcd", "2.13", 0.03)
    assert run.setting("ppo", "target_kl", "deeper") is None


def test_details_are_of_one_round(tmp_path: Path) -> None:
    """The last by default; curves and stage changes of others are not kept, their figures are."""
    write_run(tmp_path)
    for asked, shown in ((None, 1), (0, 0)):
        run = read_run(tmp_path, asked)
        assert run.shown == shown
        assert len(run.changes) == 14
        assert all(entry.accuracies for entry in run.episodes[shown])
        assert all(not entry.accuracies for entry in run.episodes[1 - shown])
        assert [entry.objective for entry in run.episodes[1 - shown]] == [3.0, 1.0, 4.0, 2.0]
        assert run.steps == STEPS


def test_commits(tmp_path: Path) -> None:
    """With the steps of birth and commit; a panic takes a commit back."""
    taken_back = [*life(1, 3, "r1c1", 0), stage(1, 5, 3, "r1c1", "FOSSILIZED", "HOLDING", "panic")]
    panic = {"kind": "panic", "round": 1, "step": 5, "env": 3, "symptoms": ["LOSS"]}
    events = [*default_events()[:-1], panic, episode(1, 3, 2.0, taken_back)]
    run = read_run(write_run(tmp_path, events=events))
    assert run.commits[0] == run.commits[1] == [Commit("r1c0", "depthwise", 1, 6), Commit("r1c0", "depthwise", 2, 7)]
    assert [(panic.step, panic.env, panic.symptoms) for panic in run.panics] == [(5, 3, ["LOSS"])]


def test_ops_act_before_their_step_and_ticks_after_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    moves = [(change.at, change.target) for change in run.changes if change.env == 1]
    names = SeedStage
    assert moves == [(0, names.GERMINATED), (1, names.TRAINING), (4, names.PRUNED), (5, names.EMBARGOED)]


def test_slots_in_the_order_of_the_host(tmp_path: Path) -> None:
    germinated = {"r1c10/norm": 1, "layer2/norm": 1, "r1c2/norm": 1, "r0c2/norm": 1}
    run = read_run(write_run(tmp_path, [metrics(0, germinated=germinated), metrics(1)]))
    assert run.slots == ["r1c0", "r1c1", "r0c2", "r1c2", "r1c10", "layer2"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_torn_last_line_is_survived(name: str, tmp_path: Path) -> None:
    """A run that was killed while it wrote."""
    whole = read_run(write_run(tmp_path))
    with (tmp_path / name).open("a") as file:
        file.write('{"round": 2, "kind": "epis')
    torn = read_run(tmp_path)
    assert torn.rounds == whole.rounds
    assert torn.episodes == whole.episodes


def test_events_of_an_unfinished_round_do_not_count(tmp_path: Path) -> None:
    """And kinds of events that the report does not know are left alone."""
    unfinished = [episode(2, 0, 99.0, life(2, 0, "r1c2", 0)), {"kind": "rumour", "what": "KL"}]
    run = read_run(write_run(tmp_path, events=[*default_events(), *unfinished]))
    assert run.shown == 1
    assert sorted(run.episodes) == [0, 1]
    assert sorted(run.commits) == [0, 1]
    assert run.slots == ["r1c0", "r1c1"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    """File and line, in the middle of either file."""
    for name in ("metrics.jsonl", "events.jsonl"):
        path = write_run(tmp_path) / name
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([lines[0], '{"kind": \n', *lines[1:]]))
        with pytest.raises(BadValueError, match=rf"{name}, line 2 is not JSON"):
            read_run(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"round": -1}, "'round' is -1, not an integer of 0 or more"),
        ({"env": True}, "'env' is True, not an integer of 0 or more"),
        ({"gain": "good"}, "'gain' is 'good', not a finite number"),
        ({"kind": None}, "'kind' is None, not a string"),
    ],
)
def test_a_wrong_value_is_named(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    write_run(tmp_path, events=[episode(0, 0, 1.0) | changed, *default_events()])
    with pytest.raises(EsperError, match=message) as found:
        read_run(tmp_path)
    assert "events.jsonl, line 1" in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"round": 2}, "line 3 has no 'objective'; it should be a finite number"),
        (metrics(1), "line 3: round 1 comes after round 1"),
        (metrics(2, ops={"WAIT": "many"}), "line 3: 'ops' is .* not an object of counts"),
        ([1, 2], r"line 3 is no JSON object, but \[1, 2\]"),
    ],
)
def test_wrong_metrics_are_named(row: object, message: str, tmp_path: Path) -> None:
    write_run(tmp_path, [metrics(0), metrics(1), row])
    with pytest.raises(BadValueError, match=f"metrics.jsonl, {message}"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "events.jsonl"])
def test_no_run_folder(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    with pytest.raises(BadValueError, match=f"is no run folder: it has no {name}"):
        read_run(tmp_path / "run")
    with pytest.raises(BadValueError, match="nowhere is no run folder: there is no such folder"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no configuration of a run: "),
        ("[]", r"is no JSON object, but \[\]"),
        ("{}", "config is no JSON object, but None"),
        ('{"config": {}}', "has no 'task'; it should be a string"),
    ],
)
def test_foreign_configuration(content: str, message: str, tmp_path: Path) -> None:
    (write_run(tmp_path) / "config.json").write_text(content)
    with pytest.raises(BadValueError, match=message):
        read_run(tmp_path)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (write_run(tmp_path) / "events.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadValueError, match=r"events.jsonl cannot be read behind line 0"):
        read_run(tmp_path)


def test_before_the_first_round(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="has no complete round yet"):
        read_run(write_run(tmp_path, [], []))


def test_a_round_that_is_not_there(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(BadValueError, match=r"round 7 is not in .*; it has rounds 0 to 1"):
        read_run(tmp_path, 7)
    write_lines(tmp_path / "events.jsonl", default_events(rounds=1))
    with pytest.raises(BadValueError, match="has no episode of round 1"):
        read_run(tmp_path)


def test_curves_of_unequal_length(tmp_path: Path) -> None:
    odd = episode(0, 0, 1.0) | {"control_accuracies": [1.0]}
    with pytest.raises(BadValueError, match="line 1: 8 accuracies, but 1 of the control"):
        read_run(write_run(tmp_path, [metrics(0)], [odd]))


@pytest.mark.parametrize("damage", ["[" * 100_000, '{"objective": NaN}', '{"objective": -Infinity}'])
@pytest.mark.parametrize("read", [read_run, lambda run: ask(run, "select * from rounds").__enter__()])
def test_what_is_no_json_is_named(damage: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    """Nesting without end and numbers that JSON lacks are damage like any other, for reports and for queries."""
    with (write_run(tmp_path) / "metrics.jsonl").open("a") as file:
        file.write(f"{damage}\n")
    with pytest.raises(BadValueError, match=r"metrics.jsonl, line 3 is not JSON"):
        read(tmp_path)


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    """A report would show settings that the run never had; formatting and the data folder may change."""
    path = write_run(tmp_path) / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"config": content["config"] | {"data_dir": "elsewhere"}}, indent=3))
    assert read_run(tmp_path).setting("seed") == 5
    path.write_text(json.dumps(content | {"config": content["config"] | {"seed": 6}}))
    for read in (read_run, lambda run: ask(run, "select 1").__enter__()):
        with pytest.raises(BadValueError, match=r"config.json was changed after the run began"):
            read(tmp_path)
