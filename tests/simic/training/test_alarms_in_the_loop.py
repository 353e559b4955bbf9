"""What goes wrong in a run is in its log, and a resumed run knows of it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simic.training.test_every_alarm_in_the_loop import claim, open_all_gates
from simic.training.tiny import quick_config, quick_trainer
from torch import Tensor

from esper.simic.agent import NotFiniteError
from esper.simic.telemetry import AlarmLimits, AnomalyDetector
from esper.simic.training.recorder import round_facts
from esper.simic.training.run_folder import SESSIONS, read_config
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines


def events(folder: Path, kind: str) -> list[dict[str, Any]]:  # Any: JSON
    """Those of a kind in the log."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def jump(trainer: Trainer) -> None:
    """From now on updates move the policy much too far."""
    trainer.agent.config = replace(trainer.agent.config, rate=1.0, target_kl=None)


def test_an_update_that_failed_is_written_down(tmp_path: Path) -> None:
    """No gradient was finite: the weights are what they were, the round is in the metrics, with an alarm beside it."""
    trainer = quick_trainer(tmp_path / "run")
    network = trainer.agent.network
    network.critic_out.weight.register_hook(lambda gradient: gradient * math.nan)
    before = [weight.clone() for weight in network.parameters()]
    with trainer.folder:
        trainer.run_round()
    assert all(torch.equal(mine, old) for mine, old in zip(network.parameters(), before, strict=True))
    [line] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["ppo/minibatches_taken"] == 0
    assert line["ppo/pre_clip_grad_norm"] == "nan"
    assert any(event["severity"] == "critical" for event in events(tmp_path / "run", "alarm"))


def test_what_ends_a_run_is_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observation that is not finite ends it: the log of sessions says in which round, and why."""
    trainer = quick_trainer(tmp_path / "run")
    normalise = trainer.agent.normalise

    def blinded(raw: Tensor) -> Tensor:
        return normalise(raw) if trainer.round == 0 else torch.full_like(raw, math.nan)

    monkeypatch.setattr(trainer.agent, "normalise", blinded)
    with pytest.raises(NotFiniteError, match="time_left"):
        trainer.run(progress=False)
    *_, ended = read_lines(tmp_path / "run" / SESSIONS)
    assert (ended["kind"], ended["round"]) == ("ended", 1)
    assert "NotFiniteError: column 0 (time_left) of the observation of env 0 is nan" in ended["why"]


def test_a_resumed_run_remembers_its_alarms(tmp_path: Path) -> None:
    """One that has begun is not told again, and details stay up for as long as they would have."""
    trainer = quick_trainer(tmp_path / "run")
    jump(trainer)
    with trainer.folder:
        trainer.run_round()
    assert "kl_extreme" in [alarm.kind for alarm in trainer.recorder.alarms]
    state, detail = trainer.recorder.detector.state, trainer.recorder.detail
    assert detail.left == detail.rounds
    again = Trainer(read_config(tmp_path / "run"), tmp_path / "run", resume=True)
    assert again.recorder.detector.state == state
    assert again.recorder.detail == detail
    jump(again)
    with again.folder:
        again.run_round()
    assert not [alarm for alarm in again.recorder.alarms if alarm.kind == "kl_extreme"]


@pytest.mark.requirement(20)
def test_the_detector_reads_the_settings_of_the_agent(tmp_path: Path) -> None:
    """Both share one object, also after a resume; another clip norm changes the limits."""
    trainer = quick_trainer(tmp_path / "run", ppo=replace(quick_config().ppo, clip_norm=1e-3))
    trainer.recorder.detector = AnomalyDetector(ppo=trainer.agent.config)
    with trainer.folder:
        trainer.run_round()
    [alarm] = [alarm for alarm in trainer.recorder.alarms if alarm.kind == "gradient_exploding"]
    assert alarm.limit == pytest.approx(0.2)
    again = Trainer(read_config(tmp_path / "run"), tmp_path / "run", resume=True)
    assert again.recorder.detector.ppo is again.agent.config
    with again.folder:
        pass


@pytest.mark.requirement(15)
def test_suspicious_seeds_are_counted(tmp_path: Path) -> None:
    """Every measured, acting seed is judged in every step, and honest growth raises nothing."""
    trainer = quick_trainer(tmp_path / "run")
    with trainer.folder:
        [record] = trainer.run_round()
    acting, hacking, ransomware = record.suspect_counts.tolist()
    assert acting == int((record.alphas > 0).sum()), "whatever acts has been measured by the end of its step"
    assert acting >= hacking + ransomware
    assert trainer.recorder.alarms == ()
    assert record.lstm is not None
    assert record.lstm.faults == 0


def test_memories_of_all_tasks_are_watched(tmp_path: Path) -> None:
    """Of two tasks the second one's memory has grown without bound."""
    trainer = quick_trainer(tmp_path / "run")
    with trainer.folder:
        [record] = trainer.run_round()
    assert record.lstm is not None
    facts = round_facts([record, record._replace(lstm=replace(record.lstm, cell_rms=50.0))])
    assert facts.lstm == replace(record.lstm, cell_rms=50.0, nan=0)
    assert facts.episodes == 4


@pytest.mark.requirement(15)
@pytest.mark.parametrize(
    ("contribution", "gain", "kind", "suspicion", "severity"),
    [
        (6.0, 1.0, "reward_hacking", "hacking", "warning"),
        (2.0, -0.5, "ransomware", "ransomware", "critical"),
    ],
)
def test_suspicious_seeds_are_named(
    contribution: float,
    gain: float,
    kind: str,
    suspicion: str,
    severity: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the real loop, each seed's first suspicious step gives an event, and the alarm names the worst."""
    trainer = quick_trainer(tmp_path / "run")
    claim(contribution, gain)(trainer, monkeypatch)
    with trainer.folder:
        [record] = trainer.run_round()
    acting = (record.alphas > 0).nonzero().tolist()
    first: dict[tuple[int, int], int] = {}
    for step, env, slot in acting:
        first.setdefault((env, slot), step)
    named = events(tmp_path / "run", "suspect")
    slot_ids = trainer.runners[0].slots.slot_ids
    assert {(event["env"], event["slot"]): event["step"] for event in named} == {
        (env, slot_ids[slot]): step for (env, slot), step in first.items()
    }
    assert len(named) == len(first) > 0
    for event in named:
        assert (event["round"], event["suspicion"], event["severity"]) == (0, suspicion, severity)
        assert (event["contribution"], event["gain"]) == (contribution, pytest.approx(gain, abs=0.3))
    [alarm] = trainer.recorder.alarms
    assert alarm.kind == kind
    assert f"the worst is env {named[0]['env']}, slot {named[0]['slot']}, step" in alarm.cause


@pytest.mark.requirement(8)
def test_limits_of_alarms_are_settings_of_a_run(tmp_path: Path) -> None:
    """Another limit changes the alarms, and a resumed run keeps its limits."""
    limits = AlarmLimits(value_loss=1e-9, entropy=float("-inf"))
    trainer = quick_trainer(tmp_path / "run", alarms=limits)
    with trainer.folder:
        trainer.run_round()
    assert "value_collapse" in [alarm.kind for alarm in trainer.recorder.alarms]
    again = Trainer(read_config(tmp_path / "run"), tmp_path / "run", resume=True)
    assert again.recorder.detector.limits == limits
    with again.folder:
        pass


def test_cells_that_grow_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that let everything in and nothing out add one a step: five in mid-episode, above a limit of three."""
    trainer = quick_trainer(tmp_path / "run", alarms=AlarmLimits(lstm_rms=3.0))
    open_all_gates(trainer, monkeypatch)
    with trainer.folder:
        trainer.run_round()
    [alarm] = [alarm for alarm in trainer.recorder.alarms if alarm.subject == "cell"]
    assert alarm.kind == "lstm_extreme"
    assert alarm.value > 3.0
    assert "root mean square of the LSTM's cells is" in alarm.cause
