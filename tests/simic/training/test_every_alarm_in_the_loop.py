"""Every kind of alarm through real training: something is broken, and the log names it, once, in its round."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from simic.training.tiny import quick_config, quick_trainer
from torch import Tensor, nn

from esper.kasmina import Comparison
from esper.leyline import LifecycleOp, Measurement
from esper.nissa import AlarmRaised
from esper.simic.agent import PPOAgent, load_agent
from esper.simic.rewards import Rewarded
from esper.simic.rewards.families import SHAPING
from esper.simic.telemetry import AnomalyDetector, Detail
from esper.simic.telemetry.detector import DRIFT_WARMUP
from esper.simic.telemetry.rules import RULES
from esper.simic.training import collect
from esper.simic.training.collect import action_draws
from esper.simic.training.rollouts import RoundRecord
from esper.simic.training.run_folder import EXTRAS, checkpoints_of
from esper.simic.training.trainer import Trainer

CALM = 1
"""Rounds before anything is broken."""
WAIT, FOSSILIZE = int(LifecycleOp.WAIT), int(LifecycleOp.FOSSILIZE)
Break = Callable[[Trainer, pytest.MonkeyPatch], None]


class Expected(NamedTuple):
    """One alarm that what was broken leads to."""

    kind: str
    after: int
    """The broken round that raises it, counted from 1"""
    cause: str
    """Words of it"""
    subject: str = ""


class Provocation(NamedTuple):
    """What is broken, and what that leads to."""

    broken: Break
    expected: list[Expected]
    hosts: int = 4
    """Half of them are controls."""


# -- what is broken ---------------------------------------------------------------------------------------------------


def set_ppo(trainer: Trainer, **changes: Any) -> None:  # Any: settings of PPO by name
    """Change settings in mid-run."""
    trainer.agent.config = replace(trainer.agent.config, **changes)


@torch.no_grad()
def shift(weights: Tensor, amount: float) -> None:
    """Add to weights of the policy."""
    weights += amount


def op_bias(agent: PPOAgent) -> Tensor:
    """Of the op head's logits."""
    layer = agent.network.heads["op"]
    assert isinstance(layer, nn.Linear)
    return layer.bias


def gates(trainer: Trainer) -> Tensor:
    """Biases of the memory's gates (4, hidden): input, forget, cell, output."""
    return trainer.agent.network.get_parameter("memory.bias_ih_l0").view(4, -1)


def scale_gradients(factor: float, *weights: Tensor) -> None:
    """Every gradient that comes back to these weights, from now on."""
    for weight in weights:
        weight.register_hook(lambda gradient: gradient * factor)


def pay_too_much(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Rewards whose sum is no float32 any more."""

    honest = collect.reward_step

    def reward_step(*given: Any) -> Rewarded:  # Any: whatever the honest one takes
        rewarded = honest(*given)
        parts = {**rewarded.parts, SHAPING: torch.full_like(rewarded.total, 3e38)}
        return rewarded._replace(parts=parts)

    patch.setattr(collect, "reward_step", reward_step)


def break_a_gradient(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The critic's last layer gets NaN."""
    scale_gradients(math.nan, trainer.agent.network.critic_out.weight)


def learn_too_fast(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """A rate a thousand times too high, and nothing that stops an update."""
    set_ppo(trainer, rate=1.0, target_kl=None)


def touch_in_mid_update(agent: PPOAgent, amount: float) -> None:
    """After the first minibatch that is learnt from, something else than the optimiser makes WAIT likelier."""
    step, steps = agent.optimizer.step, count()

    def then_touch(closure: None = None) -> None:
        step()
        if next(steps) == 0:
            shift(op_bias(agent)[WAIT], amount)

    agent.optimizer.step = then_touch  # type: ignore[method-assign]


def jump(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """In the middle of an update, WAIT becomes the one answer."""
    set_ppo(trainer, explore=0.0)
    touch_in_mid_update(trainer.agent, 40.0)


def jump_a_bit(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The same by so little that the KL is within the band of a spike. How much that is, copies of the agent find out
    on the round that will be collected once more."""
    trainer.collector.collect(trainer.round)
    folder = checkpoints_of(trainer.folder.path).newest()
    assert folder is not None
    kl, low, high = 0.0, 0.0, 40.0
    while not 0.2 < kl < 0.4:
        amount = (low + high) / 2
        trial, _ = load_agent(folder, EXTRAS)
        touch_in_mid_update(trial, amount)
        kl = trial.update(trainer.collector.buffer).max_kl
        low, high = (amount, high) if kl < 0.3 else (low, amount)
    trainer.agent, _ = load_agent(folder, EXTRAS)
    trainer.collector.agent = trainer.agent
    touch_in_mid_update(trainer.agent, amount)


def jump_to_what_was_unlikely(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The same after a round in which a broken generator let everybody wait, against all odds."""
    jump(trainer, patch)
    shift(op_bias(trainer.agent)[WAIT], -4.0)
    patch.setattr(collect, "action_draws", lambda *given, **options: action_draws(*given, **options) * 0)


def wait_always(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The op head knows one answer."""
    set_ppo(trainer, explore=0.0)
    shift(op_bias(trainer.agent)[WAIT], 30.0)


def never_commit(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Seeds are born, and none is fossilised."""
    set_ppo(trainer, explore=0.0)
    shift(op_bias(trainer.agent)[FOSSILIZE], -60.0)


def foresee_nonsense(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """A critic whose outputs are a thousand times too large."""
    with torch.no_grad():
        trainer.agent.network.critic_out.weight *= 1000


def measure_badly(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Gains have an error of 50 points."""
    set_ppo(trainer, advantage_floor=50.0)


def cut_the_graph(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """No gradient comes back to any weight."""
    scale_gradients(0.0, *trainer.agent.network.parameters())


def stand_still(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """A policy that hardly moves plays the same episodes in every round: from round to round the norms of a few hosts'
    gradients differ by more than the factor to be found. What the first round of a run was like, before observations
    were normalised, is forgotten: its norm is a tenth of the others'."""
    set_ppo(trainer, rate=1e-5)
    collected = trainer.collector.collect
    patch.setattr(trainer.collector, "collect", lambda round_index: collected(0))
    trainer.recorder.detector = AnomalyDetector(ppo=trainer.agent.config)


def begin_with_infinity(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Memories whose cells are infinite; what they let out is bounded, and looks healthy."""
    network = trainer.agent.network
    empty = network.initial_state
    patch.setattr(network, "initial_state", lambda n: (empty(n)[0], torch.full_like(empty(n)[1], math.inf)))


def open_all_gates(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Everything is remembered, at full strength."""
    shift(gates(trainer), 20.0)


def close_the_output(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """Nothing of the memory is let out."""
    shift(gates(trainer)[3], -50.0)


def change_behind_the_back(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """After a round was collected, somebody touches the weights."""
    collected = trainer.collector.collect

    def then_touch(round_index: int) -> list[RoundRecord]:
        records = collected(round_index)
        shift(op_bias(trainer.agent)[WAIT], 0.004)
        return records

    patch.setattr(trainer.collector, "collect", then_touch)


def claim(contribution: float, gain: float) -> Break:
    """Every acting seed measures so many points, in hosts that are so many better than their controls."""

    def measure(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        [runner] = trainer.runners
        fleet, groups = runner.fleet, runner.groups
        measured = fleet.validate

        def validate(*, deployed: bool = True) -> list[Comparison]:
            found = measured(deployed=deployed)
            for env in groups.envs:
                correct = found[env + 1].main.hits.clone()  # groups of one host and its control
                images = round(gain / 100 * len(correct))
                right, wrong = (correct == 1).nonzero().flatten(), (correct == 0).nonzero().flatten()
                correct[wrong[: max(images, 0)]], correct[right[: max(-images, 0)]] = 1, 0
                found[env] = found[env]._replace(main=found[env].main._replace(correct=correct))
                for slot_id, state in fleet.states[env].items():
                    if state.contributions:
                        fleet.states[env][slot_id] = replace(state, contributions=(Measurement(contribution, 0.1),))
            return found

        patch.setattr(fleet, "validate", validate)

    return measure


def break_a_host(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
    """The first host's weights become NaN in the third step of each episode."""
    fleet = trainer.runners[0].fleet
    train = fleet.train_step

    def faulty() -> Tensor:
        if fleet.step_index == 2:
            fleet.host.weights.matrix.data[0] = math.nan
        return train()

    patch.setattr(fleet, "train_step", faulty)


# -- what is expected of it -------------------------------------------------------------------------------------------

PROVOCATIONS = [
    Provocation(pay_too_much, [Expected("numerical_fault", 1, "ppo/return_mean")]),
    Provocation(
        break_a_gradient, [Expected("gradient_not_finite", 1, "minibatches with a gradient that is not finite is 4")]
    ),
    Provocation(learn_too_fast, [Expected("kl_extreme", 1, "joint KL is ")]),
    Provocation(jump, [Expected("ratio_vanished", 1, "smallest joint ratio is 2.06e-09 (limit 0.001)")]),
    Provocation(jump_to_what_was_unlikely, [Expected("ratio_exploded", 1, "largest joint ratio is ")]),
    Provocation(jump_a_bit, [Expected("kl_spike", 1, "joint KL is 0.")]),
    Provocation(
        wait_always,
        [
            Expected("entropy_collapse", 3, "(limit 0.02), 3 rounds running", "op"),
            Expected("no_growth", 3, "number of seeds per episode is 0 (limit 0.5), 3 rounds running"),
        ],
    ),
    Provocation(
        never_commit, [Expected("too_few_commits", 3, "share of episodes with a commit is 0 (limit 0.05), of ")]
    ),
    Provocation(
        foresee_nonsense,
        [
            Expected("value_collapse", 1, "value loss is "),
            Expected("gradient_exploding", 1, "gradient norm is "),
            Expected("value_misleads", 3, "explained variance is -"),
        ],
    ),
    Provocation(measure_badly, [Expected("advantage_floor", 1, "under its floor")]),
    Provocation(
        cut_the_graph,
        [
            Expected("gradient_vanishing", 2, "gradient norm is 0 (limit 0.001)"),
            Expected("gradient_vanishing", 2, "gradient norm of head op is 0 (limit 1e-06)", "op"),
        ],
    ),
    Provocation(
        begin_with_infinity, [Expected("lstm_not_finite", 1, "NaN and infinities in the hidden state is 32 (limit 0)")]
    ),
    Provocation(open_all_gates, [Expected("lstm_extreme", 1, "saturated hidden values is 1 (limit 0.5)", "hidden")]),
    Provocation(close_the_output, [Expected("lstm_dead", 1, "silent LSTM units is 1 (limit 0.5)")]),
    Provocation(change_behind_the_back, [Expected("behaviour_gap", 1, "behaviour gap is 0.00")]),
    Provocation(
        claim(6.0, 1.0), [Expected("reward_hacking", 1, "suspected of reward hacking is 1 (limit 0.25) (")], hosts=8
    ),
    Provocation(claim(2.0, -0.5), [Expected("ransomware", 1, "suspected of ransomware is 1 (limit 0.25) (")], hosts=8),
    Provocation(break_a_host, [Expected("panics", 1, "panics per episode is 0.5 (limit 0.1)")]),
]
DRIFT = Expected("gradient_drift", 3, "factor between the norm of the heads' gradients and its usual one is 2.")
"""Needs a longer past than the others: see below."""


def name_of(provocation: Provocation) -> str:
    """As a test's id."""
    return " ".join(dict.fromkeys(each.kind for each in provocation.expected))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs after their calm rounds, by the number of their hosts."""
    folders = {}
    for hosts in (4, 8):
        trainer = quick_trainer(tmp_path_factory.mktemp("calm") / "run", hosts=hosts)
        with trainer.folder:
            assert run(trainer, CALM) == dict.fromkeys(range(CALM), ())
        folders[hosts] = trainer.folder.path
    return folders


def go_on(calm: dict[int, Path], folder: Path, hosts: int = 4) -> Trainer:
    """The continuation of one of them, in a folder of its own."""
    shutil.copytree(calm[hosts], folder)
    return Trainer(quick_config(hosts=hosts), folder, resume=True)


def run(trainer: Trainer, rounds: int) -> dict[int, tuple[AlarmRaised, ...]]:
    """So many rounds, and what each raised."""
    seen = {}
    for _ in range(rounds):
        trainer.run_round()
        seen[trainer.round - 1] = trainer.recorder.alarms
    return seen


def events(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """The log of a run."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def logged(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Alarms in the log, their ends left out."""
    return [event for event in events(folder) if event["kind"] == "alarm" and not event["ended"]]


def check(expected: Expected, first: int, seen: dict[int, tuple[AlarmRaised, ...]], folder: Path) -> None:
    """It was raised once, in its round, with its cause, and is in the log alike."""
    severity = {rule.kind: rule.severity for rule in RULES}[expected.kind]
    key = (expected.kind, expected.subject)
    [(number, alarm)] = [
        (number, alarm)
        for number, alarms in seen.items()
        for alarm in alarms
        if (alarm.alarm, alarm.subject) == key and not alarm.ended
    ]
    assert (number, alarm.round, alarm.severity) == (first + expected.after - 1, number, severity)
    assert expected.cause in alarm.cause
    [event] = [event for event in logged(folder) if (event["alarm"], event["subject"]) == key]
    assert (event["round"], event["severity"], event["cause"]) == (number, severity, alarm.cause)


@pytest.mark.requirement(8, 9, 15)
@pytest.mark.parametrize(
    "provocation",
    [pytest.param(each, marks=pytest.mark.slow if number else ()) for number, each in enumerate(PROVOCATIONS)],
    ids=name_of,
)
def test_alarm(
    provocation: Provocation, calm: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alarm is an event of the round in which its cause has lasted long enough, and of no other."""
    trainer = go_on(calm, tmp_path / "run", provocation.hosts)
    provocation.broken(trainer, monkeypatch)
    with trainer.folder:
        seen = run(trainer, max(each.after for each in provocation.expected) + 1)
    for each in provocation.expected:
        check(each, CALM, seen, tmp_path / "run")


def test_silence(calm: dict[int, Path], tmp_path: Path) -> None:
    """As long as nothing is broken, nothing at all is raised."""
    trainer = go_on(calm, tmp_path / "run")
    with trainer.folder:
        assert run(trainer, 4) == dict.fromkeys(range(CALM, CALM + 4), ())


@pytest.mark.requirement(42)
@pytest.mark.parametrize("factor", [3.0, 1 / 3, 1.0], ids=["three times", "a third", "unchanged"])
@pytest.mark.default_cases("three times")
def test_drift(calm: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Gradients three times larger or smaller raise drift right after the warm-up."""
    trainer = go_on(calm, tmp_path / "run")
    stand_still(trainer, monkeypatch)
    warmup = DRIFT_WARMUP
    first = CALM + warmup
    with trainer.folder:
        assert run(trainer, warmup) == dict.fromkeys(range(CALM, first), ())
        scale_gradients(factor, *trainer.agent.network.parameters())
        seen = run(trainer, DRIFT.after + 1)
    if factor == 1:
        assert seen == dict.fromkeys(range(first, first + DRIFT.after + 1), ())
    else:
        check(DRIFT, first, seen, tmp_path / "run")
        assert sum(map(len, seen.values())) == 1


@pytest.mark.requirement(41)
def test_offenders_are_named(calm: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detailed round lists the exploded ratios with their actions, worst first; the alarm counts them."""
    trainer = go_on(calm, tmp_path / "run")
    trainer.recorder.detail = Detail(1, 1)
    jump_to_what_was_unlikely(trainer, monkeypatch)
    with trainer.folder:
        [alarms] = run(trainer, 1).values()
    [ratios] = [event["ratios"] for event in events(tmp_path / "run") if event["kind"] == "detail"]
    [metrics] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[CALM:]]
    joint = [offender["ratio"] for offender in ratios["worst"] if offender["head"] == "joint"]
    assert joint == sorted(joint, reverse=True)
    assert joint[0] == pytest.approx(metrics["ppo/joint_ratio_max"], rel=1e-3)
    assert {tuple(offender["action"]) for offender in ratios["worst"]} == {(WAIT, 0, 0)}
    assert len(joint) == ratios["exploded"]["joint"] > 0
    [alarm] = [alarm for alarm in alarms if alarm.alarm == "ratio_exploded"]
    assert alarm.cause.endswith(f"; {len(joint)} exploded")


def test_every_kind_is_provoked() -> None:
    """A rule that no broken run raises may have lost its wire."""
    provoked = {each.kind for provocation in PROVOCATIONS for each in provocation.expected} | {DRIFT.kind}
    assert provoked == {rule.kind for rule in RULES}
