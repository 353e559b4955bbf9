"""A day of events: how many bytes a long run writes, and how long questions about them take.

The default run of a large machine is simulated, not trained: 64 hosts of `cifar_baseline`, a round every 9 seconds.
Rounds of `digits_blind`, which has as many steps, slots and blueprints, are played for real by an untrained policy,
with hardly any training in them. Their episodes are drawn again and again, with noise on what is measured, and written
by the functions that a run writes with. Every question then reads the files anew.

How much is written depends on how much is done, so beside the day stand bytes per round of a policy that never waits
where it can act.

    python benchmarks/event_volume.py
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from harness import RESULTS, Json, print_table, write_result
from torch import Tensor

from esper.karn.queries import ask
from esper.nissa import AlarmRaised, as_line
from esper.simic.agent import PPOUpdateMetrics
from esper.simic.training.config import TrainConfig
from esper.simic.training.recorder import round_values, write_record
from esper.simic.training.rollouts import RoundRecord
from esper.simic.training.run_folder import EVENTS, METRICS, RunFolder
from esper.simic.training.trainer import Trainer
from esper.storage.logs import JsonLines
from esper.tolaria import TaskRegistry, get_task

DAY_S = 24 * 3600
BOUND = 2**30
PLAYED, SHOWN = "digits_played", "cifar_baseline"
ROUNDS_PER_ALARM = 40
NEVER_WAIT = -20.0
"""On the logit of WAIT."""
FEW = 4
"""Rounds of a policy that never waits, from which its day is extrapolated."""
QUESTIONS = {
    "learning curve": "SELECT round, objective, gain, ppo_approx_kl, ppo_op_entropy FROM rounds ORDER BY round",
    "which seeds stay": "SELECT slot, blueprint, count(*) AS seeds, avg((outcome = 'committed')::INTEGER) AS kept,"
    " avg(ended_at - germinated_at) AS steps FROM seeds GROUP BY ALL ORDER BY kept DESC",
    "ops over time": "SELECT round // 100 AS hundred, op, count(*) AS decisions, avg(reward) AS paid FROM decisions"
    " GROUP BY ALL ORDER BY ALL",
    "what is paid for": "SELECT round // 100 AS hundred, part, avg(points) AS points FROM rewards GROUP BY ALL"
    " ORDER BY ALL",
    "gain by what stayed": "SELECT kept, count(*) AS episodes, avg(gain) AS gain FROM episodes JOIN"
    " (SELECT round, env, string_agg(slot || '/' || blueprint, ' ' ORDER BY slot) AS kept FROM seeds"
    " WHERE outcome = 'committed' GROUP BY ALL) USING (round, env) GROUP BY kept ORDER BY episodes DESC",
}


class Pool(NamedTuple):
    """Rounds that were really played."""

    records: list[RoundRecord]
    update: PPOUpdateMetrics


class Asked(NamedTuple):
    """One question, with all reading of files."""

    seconds: float
    cpu_seconds: float
    """Of all threads: what other work on the machine does not change"""
    rows: int


class Figures(NamedTuple):
    """What was found; bytes are of a day."""

    rounds_per_day: int
    rounds: int
    """Simulated"""
    per_day: dict[str, float]
    """By file"""
    at_most: float
    """Of a policy that never waits"""
    acts: float
    """Decisions of an episode that are no WAIT"""
    acts_at_most: float
    writing: float
    """Seconds per round"""
    answers: dict[str, Asked]


def play(hosts: int, rounds: int, seed: int, folder: Path, wait_bias: float | None = None) -> Pool:
    """Rounds of an untrained policy on hosts that are hardly trained."""
    task = replace(
        get_task("digits_blind"), name=PLAYED, batches_per_step=1, batch=8, calibration_size=16, validation_size=100
    )
    if PLAYED not in TaskRegistry.names():
        TaskRegistry.register(task)
    config = TrainConfig(task=PLAYED, hosts=hosts, seed=seed)
    if wait_bias is not None:
        ops = len(config.agent_config(task).network.first_bias)
        network = replace(config.ppo.network, first_bias=(wait_bias, *(0.0,) * (ops - 1)))
        config = replace(config, ppo=replace(config.ppo, network=network))
    trainer = Trainer(config, folder)
    with trainer.folder:
        records = [trainer.collector.collect(number)[0] for number in range(rounds)]
        update = trainer.agent.update(trainer.collector.buffer)
    return Pool(records, update)


def resample(pool: Pool, generator: torch.Generator) -> RoundRecord:
    """A round of episodes drawn from all that were played."""
    records, envs = pool.records, len(pool.records[0].objective)
    drawn = torch.randint(len(records) * envs, (envs,), generator=generator).tolist()
    places = [divmod(number, envs) for number in drawn]

    def pick(name: str, noise: float = 0.0) -> Tensor:
        found = torch.stack([getattr(records[which], name)[..., env] for which, env in places], -1)
        return found + noise * torch.randn(found.shape, generator=generator) if noise else found

    changes = [
        (step, change._replace(env=row))
        for row, (which, env) in enumerate(places)
        for step, change in records[which].changes
        if change.env == env
    ]
    suspects = tuple(
        replace(suspect, env=row)
        for row, (which, env) in enumerate(places)
        for suspect in records[which].suspects
        if suspect.env == env
    )
    return records[0]._replace(
        task=SHOWN,
        suspects=suspects,
        objective=pick("objective", 1.0),
        gain=pick("gain", 1.0),
        accuracy=pick("accuracy", 1.0),
        added_parameters=pick("added_parameters"),
        actions=torch.stack([records[which].actions[:, env] for which, env in places], 1),
        rewards=pick("rewards", 0.1),
        parts={
            name: torch.stack([records[which].parts[name][:, env] for which, env in places], 1)
            for name in records[0].parts
        },
        accuracies=pick("accuracies", 1.0),
        control_accuracies=pick("control_accuracies", 1.0),
        alphas=torch.stack([records[which].alphas[:, env] for which, env in places], 1),
        changes=sorted(changes, key=lambda entry: entry[0]),
        symptoms=[(2, 0, ["LOSS"])] if torch.rand((), generator=generator) < 0.1 else [],
    )


def write_round(events: JsonLines, metrics: JsonLines, number: int, record: RoundRecord, pool: Pool) -> None:
    """As a run does."""
    write_record(events, number, record)
    if number % ROUNDS_PER_ALARM == ROUNDS_PER_ALARM - 1:
        words = "the joint KL of a minibatch was 0.2, above 0.15", "one is noise; if it comes back lower the rate"
        alarm = AlarmRaised("kl_spike", "warning", number, "", False, 0.2, 0.15, *words)
        events.write(**as_line(alarm))
    metrics.write(round=number, **round_values([record], pool.update, {"collect_s": 24.1273, "update_s": 0.8734}))


def simulate(pool: Pool, folder: Path, rounds: int, seed: int) -> dict[str, int]:
    """Write `rounds` rounds; returns bytes by file."""
    generator = torch.Generator().manual_seed(seed)
    with RunFolder.create(folder, TrainConfig(task=SHOWN, hosts=64, rounds=rounds)) as run:
        for number in range(rounds):
            write_round(run.events, run.metrics, number, resample(pool, generator), pool)
    return {name: (folder / name).stat().st_size for name in (EVENTS, METRICS)}


def time_questions(folder: Path) -> dict[str, Asked]:
    """Ask each, and take all rows."""
    found = {}
    for name, statement in QUESTIONS.items():
        start, cpu = time.perf_counter(), time.process_time()
        with ask(folder, statement) as answer:
            rows = sum(1 for _ in answer.rows)
        found[name] = Asked(time.perf_counter() - start, time.process_time() - cpu, rows)
    return found


def acts_per_episode(records: Sequence[RoundRecord]) -> float:
    """Decisions that are no WAIT."""
    return sum(float((record.actions[..., 0] > 0).sum(0).float().mean()) for record in records) / len(records)


def main() -> None:
    """Simulate, ask, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-seconds", type=float, default=9.0, help="how long a round takes on the large machine")
    parser.add_argument("--rounds", type=int, help="simulate only so many, and extrapolate (default: a whole day)")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--played", type=int, default=4, help="rounds that are played for real")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    day = round(DAY_S / arguments.round_seconds)
    rounds = arguments.rounds or day
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool = play(arguments.hosts, arguments.played, arguments.seed, folder / "played")
        busy = play(arguments.hosts, 1, arguments.seed, folder / "busy", NEVER_WAIT)
        start = time.perf_counter()
        sizes = simulate(pool, folder / "run", rounds, arguments.seed)
        writing = (time.perf_counter() - start) / rounds
        figures = Figures(
            day,
            rounds,
            {file: size / rounds * day for file, size in sizes.items()},
            sum(simulate(busy, folder / "busiest", FEW, arguments.seed).values()) / FEW * day,
            acts_per_episode(pool.records),
            acts_per_episode(busy.records),
            writing,
            time_questions(folder / "run"),
        )
    report(arguments, figures)


def report(arguments: argparse.Namespace, figures: Figures) -> None:
    """Bytes and seconds."""
    total = sum(figures.per_day.values())
    lines: list[Sequence[object]] = [
        *([f"{file}, MB a day", f"{size / 1e6:.1f}"] for file, size in figures.per_day.items()),
        ["together, share of 1 GiB", f"{total / BOUND:.2f}"],
        ["decisions that act, per episode", figures.acts],
        ["of a policy that never waits", figures.acts_at_most],
        ["its share of 1 GiB", f"{figures.at_most / BOUND:.2f}"],
        ["drawing and writing a round, s", f"{figures.writing:.3f}"],
        *(
            [f"{name} ({asked.rows} rows), s", f"{asked.seconds:.2f} ({asked.cpu_seconds:.2f} of CPU)"]
            for name, asked in figures.answers.items()
        ),
    ]
    title = f"{figures.rounds_per_day} rounds a day of {arguments.hosts} hosts; {figures.rounds} simulated"
    print_table(title, ["figure", "value"], lines)
    result: dict[str, Json] = {
        "hosts": arguments.hosts,
        "round_seconds": arguments.round_seconds,
        "rounds_per_day": figures.rounds_per_day,
        "rounds_simulated": figures.rounds,
        "bytes_per_day": figures.per_day,
        "share_of_gib": total / BOUND,
        "acts_per_episode": figures.acts,
        "never_waits": {"share_of_gib": figures.at_most / BOUND, "acts_per_episode": figures.acts_at_most},
        "seconds_per_round_written": figures.writing,
        "questions": {name: {"sql": QUESTIONS[name], **asked._asdict()} for name, asked in figures.answers.items()},
    }
    write_result("event_volume", result, arguments.out)


if __name__ == "__main__":
    main()
