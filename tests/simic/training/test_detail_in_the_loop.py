"""A closer look at a run: after an alarm, and by a profiler. What is looked at goes on as if nobody looked."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from simic.training.tiny import quick_config, quick_trainer

from esper.cli import main
from esper.leyline import BadValueError
from esper.simic.agent import PPOUpdateMetrics, TamiyoRolloutBuffer, UpdateObserver
from esper.simic.telemetry import Detail
from esper.simic.training import recorder as recorder_module
from esper.simic.training.trainer import Trainer


def lines(path: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Of a file of the run, without what depends on the clock."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "timing"} for row in found]


def details(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Events of detail."""
    return [event for event in lines(folder / "events.jsonl") if event["kind"] == "detail"]


def run(trainer: Trainer, rounds: int) -> Trainer:
    """So many rounds of it."""
    with trainer.folder:
        for _ in range(rounds):
            trainer.run_round()
    return trainer


def assert_alike(one: Trainer, other: Trainer) -> None:
    """Weights, moments and the generator, bit for bit."""
    for mine, theirs in zip(one.agent.network.parameters(), other.agent.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        states = (agent.optimizer.state[weight] for agent, weight in ((one.agent, mine), (other.agent, theirs)))
        assert len({state["exp_avg"].sum().item() for state in states}) == 1
    assert torch.equal(one.agent.generator.get_state(), other.agent.generator.get_state())


def alarm_once(trainer: Trainer) -> None:
    """In the first round, and in no other, the policy that learns is not quite the one that acted."""
    trainer.recorder.detail = Detail(rounds=2)
    update = trainer.agent.update

    def touched(buffer: TamiyoRolloutBuffer, observer: UpdateObserver | None = None) -> PPOUpdateMetrics:
        if trainer.round == 0:
            layer = trainer.agent.network.heads["op"]
            with torch.no_grad():
                layer.bias[0] += 0.004  # type: ignore[index, operator]  # a linear layer
        return update(buffer, observer)

    trainer.agent.update = touched  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def alarmed(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Two rounds of debugging after an alarm in the first round, and one that is normal again."""
    trainer = quick_trainer(tmp_path_factory.mktemp("alarmed") / "run")
    alarm_once(trainer)
    return run(trainer, 4)


def test_an_alarm_switches_it_on_for_some_rounds(alarmed: Trainer) -> None:
    """Round 0 alarms, 1 and 2 are looked at closely, 3 is not; one event each."""
    alarms = [event for event in lines(alarmed.folder.path / "events.jsonl") if event["kind"] == "alarm"]
    assert [(event["alarm"], event["round"], event["ended"]) for event in alarms] == [
        ("behaviour_gap", 0, False),
        ("behaviour_gap", 3, True),
    ]
    assert [event["round"] for event in details(alarmed.folder.path)] == [1, 2]
    assert alarmed.recorder.detail.left == 0


@pytest.mark.requirement(6, 41)
def test_what_is_in_it(alarmed: Trainer) -> None:
    """It holds gradients before clipping, ratios, columns and hidden states; totals match the metrics."""
    event = details(alarmed.folder.path)[0]
    metrics = lines(alarmed.folder.path / "metrics.jsonl")[1]
    network = alarmed.agent.network
    modules = {name.split(".")[0] for name, _ in network.named_parameters()} - {"heads"}
    assert set(event["gradients"]["modules"]) == modules | {f"heads.{name}" for name in network.heads}
    assert event["gradients"]["total"]["norm"] == pytest.approx(metrics["ppo/pre_clip_grad_norm"], rel=1e-4)
    assert event["gradients"]["total"]["size"] == sum(weight.numel() for weight in network.parameters())
    assert event["gradients"]["total"]["nan"] == 0
    decided = {head: round(metrics[f"ppo/{head}/learnable_fraction"] * metrics["ppo/steps"]) for head in network.heads}
    examined = event["ratios"]["examined"]
    assert {head: examined[head] for head in decided} == decided
    assert examined["joint"] == round((1 - metrics["ppo/forced_fraction"]) * metrics["ppo/steps"])
    assert set(event["observations"]) == set(alarmed.agent.layout.column_names)
    assert event["observations"]["time_left"]["count"] == metrics["ppo/steps"]
    assert event["lstm"]["digits_quick"]["nan"] == 0


@pytest.mark.invariant(12)
def test_nothing_depends_on_it(tmp_path: Path) -> None:
    """Bit for bit: metrics, other events, weights."""
    plain = run(quick_trainer(tmp_path / "plain"), 2)
    closely = quick_trainer(tmp_path / "closely")
    closely.recorder.detail = Detail(5, 5)
    run(closely, 2)
    assert len(details(tmp_path / "closely")) == 2
    assert_alike(plain, closely)
    assert lines(tmp_path / "plain" / "metrics.jsonl") == lines(tmp_path / "closely" / "metrics.jsonl")
    others = [event for event in lines(tmp_path / "closely" / "events.jsonl") if event["kind"] != "detail"]
    assert others == lines(tmp_path / "plain" / "events.jsonl")


def test_at_the_normal_level_nothing_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks on at the update."""

    def refuse(*_: object) -> None:
        raise AssertionError("examined")

    monkeypatch.setattr(recorder_module, "Examination", refuse)
    run(quick_trainer(tmp_path / "run"), 1)
    closely = quick_trainer(tmp_path / "closely")
    closely.recorder.detail = Detail(1, 1)
    with pytest.raises(AssertionError, match="examined"):
        run(closely, 1)


@pytest.mark.slow
def test_a_run_that_was_stopped_in_between(alarmed: Trainer, tmp_path: Path) -> None:
    """Resumed with one round of debugging to come, it writes the same events as the run that was not stopped."""
    part = quick_trainer(tmp_path / "part")
    alarm_once(part)
    run(part, 2)
    again = run(Trainer(quick_config(), tmp_path / "part", resume=True), 2)
    assert_alike(again, alarmed)
    ours, theirs = (folder / "events.jsonl" for folder in (tmp_path / "part", alarmed.folder.path))
    assert ours.read_text() == theirs.read_text()


# -- where the time goes ----------------------------------------------------------------------------------------------


def test_spans_are_in_the_metrics(alarmed: Trainer) -> None:
    """Every part of a round by name; what is inside does not exceed what is around it."""
    path = alarmed.folder.path / "metrics.jsonl"
    for line in (json.loads(line) for line in path.read_text().splitlines()):
        timing, spans = line["timing"], line["timing"]["spans"]
        assert timing["collect_s"] == spans["collect"] > 0
        assert timing["update_s"] == spans["update"] > 0
        parts = ("begin", "observe", "act", "step", "reward", "watch")
        assert 0 < sum(spans[f"collect/{name}"] for name in parts) <= spans["collect"]
        inner = ("apply", "train", "validate", "govern", "probe")
        assert 0 < sum(spans[f"collect/step/{name}"] for name in inner) <= spans["collect/step"]
        assert spans["watch"] > 0


@pytest.mark.slow
@pytest.mark.requirement(34, 35)
def test_one_round_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag traces the second round into its file, and the run itself stays the same."""
    plain = run(Trainer(quick_config(3), tmp_path / "plain"), 3)
    part = Trainer(quick_config(3), tmp_path / "part")
    run(part, 1)
    main(["train", "--resume", str(tmp_path / "part"), "--profile", str(tmp_path / "traces" / "deep")])
    [path] = (tmp_path / "traces").rglob("*.*")
    assert path == tmp_path / "traces" / "deep" / "round-00002.json.gz"
    assert f"round 2 was traced: {path}" in capsys.readouterr().out.replace("\n", " ")
    with gzip.open(path) as file:
        seen = json.load(file)["traceEvents"]
    names = {event.get("name") for event in seen}
    assert {"collect", "act", "train", "update", "aten::mm", "aten::lstm"} <= names
    assert len([event for event in seen if event.get("name") == "collect"]) == 1, "one round of three"
    assert lines(tmp_path / "part" / "metrics.jsonl") == lines(tmp_path / "plain" / "metrics.jsonl")
    assert plain.round == 3


@pytest.mark.requirement(34, 35)
def test_a_trace_that_cannot_be_taken(tmp_path: Path) -> None:
    """The error gives the reason before anything runs, and no run folder is left."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BadValueError, match="cannot be written"):
        Trainer(quick_config(), tmp_path / "run", profile=tmp_path / "file" / "traces")
    with pytest.raises(BadValueError, match="device 'meta' is not here"):
        Trainer(quick_config(device="meta"), tmp_path / "run", profile=tmp_path / "traces")
    assert not (tmp_path / "run").exists()
    run(Trainer(quick_config(1), tmp_path / "run"), 1)
    finished = Trainer(quick_config(1), tmp_path / "run", resume=True, profile=tmp_path / "traces")
    with pytest.raises(BadValueError, match="no round left to trace"):
        finished.run(progress=False)
