"""False alarms of training: runs in which nothing is wrong, and every alarm that they raised.

    python benchmarks/healthy_rounds.py                        # trains 30 rounds of digits_blind on three seeds
    python benchmarks/healthy_rounds.py --runs RUN1 RUN2       # reads runs that were trained anyway
    python benchmarks/healthy_rounds.py --runs RUN1 --replay   # by the limits of now, not by those of then

None of severity warning or above is expected. What is trained lies in `--into` and is gone on with when it was stopped.
A replay judges what the metrics hold; memories and suspicious seeds are not in them, and are as the log has them.
"""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness import RESULTS, Json, print_table, write_result

from esper.leyline import BadValueError
from esper.simic.agent import HeadMetrics, PPOUpdateMetrics, load_agent
from esper.simic.telemetry import AnomalyDetector, RoundFacts
from esper.simic.training.config import TrainConfig
from esper.simic.training.hosts import Groups
from esper.simic.training.run_folder import EVENTS, EXTRAS, METRICS, checkpoints_of, read_config
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines

COLUMNS = ("round", "severity", "alarm", "subject", "cause")
UNMEASURED = ("lstm_not_finite", "lstm_extreme", "lstm_dead", "reward_hacking", "ransomware")
"""Kinds whose figures are in no metric."""


def train(config: TrainConfig, folder: Path) -> Path:
    """All rounds of a run, or those that are left."""
    Trainer(config, folder, resume=folder.exists()).run()
    return folder


def read(folder: Path, *, anew: bool = False) -> dict[str, Json]:
    """A run with its alarms, up to its last checkpoint. One whose rounds were not all watched proves nothing. `anew`:
    its rounds are judged by the limits of now."""
    config = read_config(folder)
    last = checkpoints_of(folder).newest()
    if last is None:
        raise BadValueError(f"{folder} has no complete round yet")
    _, extras = load_agent(last, EXTRAS)
    rounds, watched = extras["progress"].rounds, extras["watching"].detector.last_round + 1
    if rounds != watched:
        raise BadValueError(f"{folder} has {rounds} rounds, of which {watched} were watched; train it anew")
    alarms: list[Json] = [
        {name: event[name] for name in COLUMNS}
        for event in read_lines(folder / EVENTS)
        if event["kind"] == "alarm" and event["round"] < rounds and not event["ended"]
        if not anew or event["alarm"] in UNMEASURED
    ]
    if anew:
        alarms += replay(folder, config, rounds)
    settings = {"task": config.task, "hosts": config.hosts, "seed": config.seed}
    return {"run": folder.name, **settings, "rounds": rounds, "alarms": alarms}


def replay(folder: Path, config: TrainConfig, rounds: int) -> list[Json]:
    """What a detector of now says to the metrics of a run."""
    detector, alarms = AnomalyDetector(ppo=config.ppo), list[Json]()
    episodes = Groups.of(config.hosts, config.members).grown
    for line in read_lines(folder / METRICS):
        if line["round"] < rounds:
            facts = RoundFacts(
                episodes=episodes,
                committed=round(line["committed"] * episodes),
                germinated=sum(line["germinated"].values()),
                panics=line["panics"],
            )
            found = detector.look(line["round"], metrics_of(line), facts)
            alarms += [
                dict(zip(COLUMNS, (alarm.round, alarm.severity, alarm.alarm, alarm.subject, alarm.cause), strict=True))
                for alarm in found
                if not alarm.ended
            ]
    return alarms


def metrics_of(line: Mapping[str, Any]) -> PPOUpdateMetrics:  # Any: JSON
    """The metrics of an update from the line of its round."""
    names = [name.split("/")[1] for name in line if name.startswith("ppo/") and name.endswith("/grad_norm")]
    heads = {head: HeadMetrics(**_fields(HeadMetrics, line, f"ppo/{head}/")) for head in names}
    return PPOUpdateMetrics(**{**_fields(PPOUpdateMetrics, line, "ppo/"), "heads": heads})


def _fields(kind: type[Any], line: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """By name; what is not finite stands in the file as a word, what was not measured is missing."""
    found = {field.name: line.get(prefix + field.name) for field in fields(kind)}
    return {name: None if value is None else float(value) for name, value in found.items()}


def count_serious(run: dict[str, Json]) -> int:
    """Alarms of severity warning or above."""
    alarms = run["alarms"]
    assert isinstance(alarms, list)
    return sum(alarm["severity"] != "info" for alarm in alarms)


def rows_of(run: dict[str, Json]) -> list[list[object]]:
    """A row per alarm, or one that says that there is none."""
    name, alarms = f"{run['run']} ({run['task']}, seed {run['seed']}, {run['hosts']} hosts)", run["alarms"]
    assert isinstance(alarms, list)
    return [[name, alarm["round"], alarm["severity"], alarm["alarm"], alarm["cause"]] for alarm in alarms] or [
        [name, "-", "-", "-", f"none in {run['rounds']} rounds"]
    ]


def main() -> None:
    """Train or read runs, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", help="read these run folders instead of training")
    parser.add_argument("--replay", action="store_true", help="judge their rounds by the limits of now")
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--into", type=Path, default=Path("runs/healthy"))
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    folders = arguments.runs or [
        train(
            TrainConfig(
                task=arguments.task, rounds=arguments.rounds, hosts=arguments.hosts, seed=seed,
                data_dir=arguments.data_dir,
            ),
            arguments.into / f"{arguments.task}-{seed}",
        )
        for seed in arguments.seeds
    ]  # fmt: skip
    runs = [read(folder, anew=arguments.replay) for folder in folders]
    print_table(
        "Alarms in rounds in which nothing is wrong",
        ["run", "round", "severity", "alarm", "cause"],
        [row for run in runs for row in rows_of(run)],
    )
    serious, rounds = sum(count_serious(run) for run in runs), sum(int(str(run["rounds"])) for run in runs)
    print(f"\n{serious} of severity warning or above in {rounds} rounds of {len(runs)} runs")
    write_result("healthy_rounds", {"rounds": rounds, "warnings": serious, "runs": runs}, arguments.out)


if __name__ == "__main__":
    main()
