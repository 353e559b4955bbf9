"""Alarms through the real loop: what goes wrong in a round is in its log, once, and a resumed run knows of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simic.training.tiny import NAME, tiny_task

from esper.simic.agent import PPOUpdateMetrics, TamiyoRolloutBuffer
from esper.simic.training.config import TrainConfig
from esper.simic.training.runs import read_config
from esper.simic.training.trainer import Trainer

Change = Callable[[PPOUpdateMetrics], PPOUpdateMetrics]


def start(folder: Path, rounds: int = 6) -> Trainer:
    """A run of tiny hosts."""
    tiny_task()
    return Trainer(TrainConfig(task=NAME, rounds=rounds, hosts=4, members=1, seed=2), folder)


def falsify(trainer: Trainer, change: Change) -> None:
    """Let updates report something else than what they did."""
    update = trainer.agent.update

    def changed(buffer: TamiyoRolloutBuffer) -> PPOUpdateMetrics:
        return change(update(buffer))

    trainer.agent.update = changed  # type: ignore[method-assign]


def alarms(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Those of the log, with what begins and what ends."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "alarm"]


@pytest.mark.parametrize(("kl", "kind"), [(0.2, "kl_spike"), (0.6, "kl_extreme")])
def test_kl_is_looked_at_in_every_round(tmp_path: Path, kl: float, kind: str) -> None:
    """Requirement 9: the joint KL; a spike and an extreme are events of the round in which they happened."""
    trainer = start(tmp_path / "run")
    with trainer.folder:
        trainer.run_round()
        falsify(trainer, lambda metrics: replace(metrics, approx_kl=kl, max_kl=kl))
        trainer.run_round()
        trainer.run_round()
    found = [(event["alarm"], event["round"]) for event in alarms(tmp_path / "run") if not event["ended"]]
    assert (kind, 1) in found
    assert (kind, 0) not in found
    assert [entry for entry in found if entry[0] == kind] == [(kind, 1)], "it is told once"


def test_a_collapsing_head_is_named(tmp_path: Path) -> None:
    """Requirement 8: after as many rounds as the limits say, not before; the others are not named."""
    trainer = start(tmp_path / "run")

    def collapsed(metrics: PPOUpdateMetrics) -> PPOUpdateMetrics:
        heads = {name: replace(head, entropy=0.5) for name, head in metrics.heads.items()}
        heads["op"] = replace(heads["op"], entropy=0.001)
        return replace(metrics, heads=heads)

    falsify(trainer, collapsed)
    patience = trainer.detector.limits.entropy_patience
    with trainer.folder:
        for _ in range(patience):
            assert not [alarm for alarm in trainer.alarms if alarm.kind.startswith("entropy")]
            trainer.run_round()
    found = [alarm for alarm in trainer.alarms if alarm.kind.startswith("entropy")]
    assert [(alarm.subject, alarm.round) for alarm in found] == [("op", patience - 1)]


def test_gradients_that_drift_are_seen(tmp_path: Path) -> None:
    """Requirement 42: three times the usual norm, for as long as the limits ask."""
    trainer = start(tmp_path / "run", rounds=12)
    falsify(trainer, lambda metrics: replace(metrics, pre_clip_grad_norm=1.0))
    with trainer.folder:
        for _ in range(6):
            trainer.run_round()
        falsify(trainer, lambda metrics: replace(metrics, pre_clip_grad_norm=3.0))
        for _ in range(trainer.detector.limits.drift_patience):
            trainer.run_round()
    assert [event["alarm"] for event in alarms(tmp_path / "run") if "drift" in event["alarm"]] == ["gradient_drift"]


def test_an_update_that_failed_is_written_down(tmp_path: Path) -> None:
    """Rewards that are huge make no gradient finite: the round is in the metrics, with an alarm beside it."""
    trainer = start(tmp_path / "run")
    network = trainer.agent.network
    hook = network.critic_out.weight.register_hook(lambda gradient: gradient * float("nan"))
    before = [weight.clone() for weight in network.parameters()]
    with trainer.folder:
        trainer.run_round()
    hook.remove()
    assert all(torch.equal(mine, old) for mine, old in zip(network.parameters(), before, strict=True))
    [line] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["ppo/minibatches_taken"] == 0
    assert any(event["severity"] == "critical" for event in alarms(tmp_path / "run"))


def test_a_resumed_run_remembers_its_alarms(tmp_path: Path) -> None:
    """One that has begun is not told again, and details stay up for as long as they would have."""
    trainer = start(tmp_path / "run")
    falsify(trainer, lambda metrics: replace(metrics, approx_kl=0.6, max_kl=0.6))
    with trainer.folder:
        trainer.run_round()
    state, detail = trainer.detector.state, trainer.detail
    assert detail.left == detail.rounds
    again = Trainer(read_config(tmp_path / "run"), tmp_path / "run", resume=True)
    assert again.detector.state == state
    assert again.detail == detail
    falsify(again, lambda metrics: replace(metrics, approx_kl=0.6, max_kl=0.6))
    with again.folder:
        again.run_round()
    assert not [alarm for alarm in again.alarms if alarm.kind == "kl_extreme"]


def test_suspicious_seeds_are_counted(tmp_path: Path) -> None:
    """Every measured seed that acts is judged in every step; honest growth raises nothing."""
    trainer = start(tmp_path / "run")
    with trainer.folder:
        [record] = trainer.run_round()
    acting, hacking, ransomware = record.watched.tolist()
    assert acting >= hacking + ransomware
    assert record.lstm is not None
    assert record.lstm.finite
