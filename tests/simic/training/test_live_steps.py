"""Runs that tell every step: what they tell is what happened, and nothing depends on it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from simic.training.tiny import NAME, quick_config, tiny_task

from esper.karn import RunFollower
from esper.karn.state import RunState
from esper.leyline import LifecycleOp
from esper.nissa import LiveFile
from esper.simic.training.config import TrainConfig
from esper.simic.training.live import FOLLOWED
from esper.simic.training.rollouts import RoundRecord
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines
from esper.tolaria import TaskRegistry


class Told(NamedTuple):
    """A run of one round."""

    path: Path
    record: RoundRecord
    header: dict[str, Any]
    """First line of the live file, as it was at the end of that round"""
    steps: list[dict[str, Any]]
    """The others"""


def lines_of(path: Path, kind: str, name: str = "events.jsonl") -> list[dict[str, Any]]:
    """The lines of a kind."""
    return [line for line in read_lines(path / name) if line["kind"] == kind]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Ten hosts of the tiny task."""
    task = replace(tiny_task(), name="digits_told", batches_per_step=1, calibration_size=16, validation_size=200)
    TaskRegistry.register(task)
    path, lines = tmp_path_factory.mktemp("told") / "run", list[dict[str, Any]]()
    trainer = Trainer(TrainConfig(task=task.name, rounds=1, hosts=12, members=5, seed=3, preset="core"), path)
    update = trainer.agent.update

    def look(*arguments: Any) -> Any:  # Any: as `update`
        lines[:] = read_lines(path / "live.jsonl")
        return update(*arguments)

    with pytest.MonkeyPatch.context() as patch, trainer.recorder.session(lambda: trainer.round, progress=False):
        patch.setattr(trainer.agent, "update", look)
        (record,) = trainer.run_round()
    return Told(path, record, lines[0], lines[1:])


def test_every_step_is_told(told: Told) -> None:
    """In order, with the numbers of the record."""
    path, record, header, steps = told
    assert (header["kind"], header["round"]) == ("live", 0)
    assert [step["step"] for step in steps] == list(range(12))
    assert {(step["round"], step["task"], step["steps"], step["first_env"]) for step in steps} == {
        (0, record.task, 12, 0)
    }
    for name, values in (("accuracies", record.accuracies), ("control_accuracies", record.control_accuracies)):
        torch.testing.assert_close(torch.tensor([step[name] for step in steps]), values, atol=0.006, rtol=0)
    gains = record.accuracies - record.control_accuracies
    torch.testing.assert_close(torch.tensor([step["gains"] for step in steps]), gains, atol=0.006, rtol=0)
    assert (path / "live.jsonl").read_bytes() == b""


def test_seeds_actions_and_changes(told: Told) -> None:
    """The rows of a step are those of the record; what a slot is in follows from the changes."""
    record, steps = told.record, told.steps
    slots, stages = record.slots.slot_ids, dict[tuple[int, str], str]()
    for number, step in enumerate(steps):
        ops = record.actions[number, :, 0].tolist()
        acted = [env for env, op in enumerate(ops) if op != LifecycleOp.WAIT]
        assert [(row[0], row[1]) for row in step["actions"]] == [(env, LifecycleOp(ops[env]).name) for env in acted]
        changes = [(env, change) for at, (env, change, _) in record.changes if at == number]
        assert [(row[0], row[1], row[4]) for row in step["changes"]] == [
            (env, change.slot_id, change.target.name) for env, change in changes
        ]
        stages |= {(row[0], row[1]): row[4] for row in step["changes"]}
        live = {key: stage for key, stage in stages.items() if stage != "DORMANT"}
        assert {(row[0], row[1]): row[2] for row in step["seeds"]} == live
        alphas = {
            (env, slot): float(record.alphas[number, env, index])
            for env, slot in live
            for index, each in enumerate(slots)
            if each == slot
        }
        assert all(abs(row[4] - alphas[row[0], row[1]]) < 1e-3 for row in step["seeds"])
        assert len(step["probabilities"]) == 10 and all(0 < chance <= 1 for chance in step["probabilities"])
    assert any(step["seeds"] for step in steps)
    assert any(row[5] is not None for step in steps for row in step["seeds"])


def test_at_most_eight_hosts_are_followed(told: Told) -> None:
    """With what the policy chose among: probabilities of legal choices, the drawn one among them."""
    path, record, _, steps = told
    followed = lines_of(path, "followed")
    assert [line["env"] for line in followed] == list(range(FOLLOWED))
    open_choices = 0
    for line in followed:
        env = line["env"]
        assert line["choices"] == [step["choices"][env] for step in steps]
        assert len(line["choices"]) == len(line["measured"]) == 12
        for number, choices in enumerate(line["choices"]):
            assert all(abs(sum(chances.values()) - 1) < 0.02 for chances in choices.values())
            assert all(list(each.values()) == sorted(each.values(), reverse=True) for each in choices.values())
            if "op" in choices:
                open_choices += 1
                op = LifecycleOp(int(record.actions[number, env, 0]))
                assert op.name in choices["op"] and len(choices["op"]) > 1
    assert open_choices > 20


def test_choices_have_the_names_of_the_host(told: Told) -> None:
    """The chosen slot and blueprint are among those that were considered."""
    seen = 0
    for step in told.steps:
        for env, op, slot, blueprint in step["actions"]:
            if env < FOLLOWED and op == "GERMINATE":
                choices = step["choices"][env]
                assert slot in choices.get("slot", [slot]) and blueprint in choices.get("blueprint", [blueprint])
                seen += "blueprint" in choices
    assert seen > 3


def test_a_follower_sees_the_round_grow(told: Told, tmp_path: Path) -> None:
    """The history of a host in the making is that of its episode."""
    lines = [told.header, *told.steps]
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.json", "events.jsonl", "metrics.jsonl"):
        (folder / name).write_bytes((told.path / name).read_bytes())
    follower = RunFollower(folder)
    while follower.poll():
        pass
    state = follower.state
    assert isinstance(state, RunState) and follower.problems == []
    complete = state.histories()
    (folder / "live.jsonl").write_text("".join(json.dumps({**line, "round": 1}) + "\n" for line in lines))
    assert follower.poll()
    playing = state.playing
    assert playing is not None and follower.problems == []
    for host in complete:
        grown = playing.hosts[host.env]
        assert (grown.accuracies, grown.changes, grown.actions) == (host.accuracies, host.changes, host.actions)
        assert grown.choices == host.choices
        for slot, alphas in host.alphas.items():
            assert grown.alphas[slot] == pytest.approx(alphas, abs=0.006)
        now, then = grown.at(), host.at()
        assert {slot: seed[:2] for slot, seed in now.items()} == {slot: seed[:2] for slot, seed in then.items()}


@pytest.mark.invariant(12)
def test_results_do_not_depend_on_it(tmp_path: Path) -> None:
    """Bit for bit: with a live file, without one, and with one that cannot be written."""
    folders = {}
    for name in ("told", "silent", "broken"):
        trainer = Trainer(quick_config(1), tmp_path / name)
        if name == "silent":
            trainer.collector.live = None
        if name == "broken":
            (tmp_path / name / "live.jsonl").mkdir()
        trainer.run(progress=False)
        metrics = [
            {k: v for k, v in line.items() if k != "timing"} for line in read_lines(tmp_path / name / "metrics.jsonl")
        ]
        weights = [weight.clone() for weight in trainer.agent.network.parameters()]
        folders[name] = (tmp_path / name / "events.jsonl").read_bytes(), metrics, weights
    events, metrics, weights = folders["told"]
    for name in ("silent", "broken"):
        assert folders[name][:2] == (events, metrics)
        assert all(torch.equal(mine, other) for mine, other in zip(weights, folders[name][2], strict=True))
    assert not (tmp_path / "silent" / "live.jsonl").exists()


def test_a_resumed_run_ignores_it(tmp_path: Path) -> None:
    """A killed run leaves a live file; whatever is in it, the resumed run begins it anew and ends as another does."""
    whole = Trainer(quick_config(2), tmp_path / "whole")
    whole.run(progress=False)
    config = quick_config(2)
    first = Trainer(config, tmp_path / "cut")
    with first.folder:
        first.run_round()
    (tmp_path / "cut" / "live.jsonl").write_text('{"kind":"live","version":1,"round":1}\n{"torn')
    Trainer(config, tmp_path / "cut", resume=True).run(progress=False)
    assert (tmp_path / "cut" / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()
    assert (tmp_path / "cut" / "live.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_several_tasks_share_the_eight(tmp_path: Path) -> None:
    """Each has a few of its hosts followed; hosts are numbered over all tasks."""
    config = replace(quick_config(1), task=f"{quick_config(1).task},{tiny_task().name}", hosts=24, members=5)
    tiny_task()
    trainer = Trainer(config, tmp_path / "run")
    trainer.collector.live = live = LiveFile(tmp_path)
    with trainer.folder:
        trainer.run_round()
    followed = [(line["task"] == NAME, line["env"]) for line in lines_of(tmp_path / "run", "followed")]
    assert followed == [*((False, env) for env in range(4)), *((True, env) for env in range(10, 14))]
    firsts = {line["task"]: line["first_env"] for line in lines_of(tmp_path, "step", "live.jsonl")}
    assert sorted(firsts.values()) == [0, 10]
    live.close()
