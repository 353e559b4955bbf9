"""False alarms of training: runs in which nothing is wrong, and every alarm that they raised.

    python benchmarks/healthy_rounds.py                        # trains 30 rounds of digits_blind on three seeds
    python benchmarks/healthy_rounds.py --runs RUN1 RUN2       # reads runs that were trained anyway

None of severity warning or above is expected. What is trained lies in `--into` and is gone on with when it was stopped.
"""

import argparse
from pathlib import Path

from harness import RESULTS, Json, print_table, write_result

from esper.leyline import BadValueError
from esper.nissa import read_lines
from esper.simic.agent import load_agent
from esper.simic.training.config import TrainConfig
from esper.simic.training.runs import EVENTS, EXTRAS, RunFolder, read_config
from esper.simic.training.trainer import Trainer


def train(config: TrainConfig, folder: Path) -> Path:
    """All rounds of a run, or those that are left."""
    Trainer(config, folder, resume=folder.exists()).run()
    return folder


def read(folder: Path) -> dict[str, Json]:
    """A run with its alarms, up to its last checkpoint. One whose rounds were not all watched proves nothing."""
    config = read_config(folder)
    last = RunFolder.last_checkpoint(folder)
    if last is None:
        raise BadValueError(f"{folder} has no complete round yet")
    _, extras = load_agent(last, EXTRAS)
    rounds, watched = extras["progress"].rounds, extras["watching"].detector.last_round + 1
    if rounds != watched:
        raise BadValueError(f"{folder} has {rounds} rounds, of which {watched} were watched; train it anew")
    alarms: list[Json] = [
        {name: event[name] for name in ("round", "severity", "alarm", "subject", "cause")}
        for event in read_lines(folder / EVENTS)
        if event["kind"] == "alarm" and event["round"] < rounds and not event["ended"]
    ]
    settings = {"task": config.task, "hosts": config.hosts, "seed": config.seed}
    return {"run": folder.name, **settings, "rounds": rounds, "alarms": alarms}


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
    runs = [read(folder) for folder in folders]
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
