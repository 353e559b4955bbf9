"""A run folder that is written at an even pace, and the app that follows it, each in a process of its own.

An event is a line, or a change of stage in the line of an episode.

    python benchmarks/watched_folder.py write FOLDER 1000 30     # events per second, seconds
    python benchmarks/watched_folder.py follow FOLDER 30

Each prints one JSON object in the end. Nothing here imports torch, which the app does not need.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from esper.karn.terminal.app import WatchApp, settle
from esper.karn.terminal.moment import Watched
from esper.leyline.records import config_checksum
from esper.nissa import EpisodeEnded, HostFollowed, StepTaken, as_line
from esper.nissa.events import ActionRow, ChangeRow, SeedRow

Json = Any  # what will become JSON
SLOTS = ("r0c0", "r1c0", "r0c1", "r1c1", "r1c2")
HOSTS, STEPS, FOLLOWED = 24, 25, 8
LIFE = ("DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")


def stage_of(step: int, slot: int) -> str:
    """A seed in every slot, each germinated a step later than the one before."""
    return LIFE[min(max(0, (step - slot) // 3), len(LIFE) - 1)]


def step_line(number: int, step: int, hosts: int) -> Json:
    """One step of all hosts, every slot of which is in use in the end."""
    seeds: list[SeedRow] = [
        (env, slot, stage_of(step, index), "conv_small", 1.0, 1.25, 0.5, 2.5, 0.75)
        for env in range(hosts)
        for index, slot in enumerate(SLOTS)
        if stage_of(step, index) != "DORMANT"
    ]
    changes: list[ChangeRow] = [
        (env, slot, "conv_small", stage_of(step - 1, index), stage_of(step, index), "advance")
        for env in range(hosts)
        for index, slot in enumerate(SLOTS)
        if stage_of(step - 1, index) != stage_of(step, index)
    ]
    curve: list[float | None] = [60.0 + step + env / 100 for env in range(hosts)]
    chances, choices = [0.5] * hosts, [{"op": {"WAIT": 0.7, "ADVANCE": 0.3}}] * FOLLOWED
    actions: list[ActionRow] = [(change[0], "ADVANCE", change[1], None) for change in changes]
    where = (time.time(), number, "digits_blind", step, STEPS, 0, list(SLOTS))
    return as_line(StepTaken(*where, curve, curve, curve, curve, seeds, actions, chances, choices, changes, []))


def events_of(number: int) -> Iterator[Json]:
    """What a round adds to `events.jsonl`."""
    for env in range(FOLLOWED):
        choices = [{"op": {"WAIT": 0.7, "ADVANCE": 0.3}}] * STEPS
        yield as_line(HostFollowed(number, "digits_blind", 0, env, choices, [[("r1c0", 1.5, 0.5, 2.5, 0.75)]] * STEPS))
    for env in range(HOSTS):
        curve = [60.0 + step for step in range(STEPS)]
        decisions: dict[str, list[Json]] = {
            "step": list(range(0, 20, 4)), "op": ["ADVANCE"] * 5, "slot": list(SLOTS), "blueprint": [None] * 5,
        }  # fmt: skip
        figures, alphas = (5.0 + env / 10, 6.0, 80.0, 400), dict.fromkeys(SLOTS, [1.0] * STEPS)
        told = *figures, stages_of(), curve, curve, alphas, decisions
        yield as_line(EpisodeEnded(number, "digits_blind", env, *told, [*curve], {"gain": 1.0, "rent": -1.0}))


def stages_of() -> dict[str, Json]:
    """The changes of stage of a host: the seed of every slot lives from DORMANT to FOSSILIZED."""
    moves = sorted(
        (index + 3 * (1 + age), slot, age) for index, slot in enumerate(SLOTS) for age in range(len(LIFE) - 1)
    )
    letters = "".join(stage[0] for stage in LIFE)
    return {
        "step": [step for step, _, _ in moves], "slot": [slot for _, slot, _ in moves],
        "blueprint": ["conv_small"] * len(moves), "source": "".join(letters[age] for *_, age in moves),
        "target": "".join(letters[age + 1] for *_, age in moves), "cause": "a" * len(moves),
    }  # fmt: skip


def metrics_of(number: int) -> Json:
    """A line of `metrics.jsonl` of about the usual length."""
    headline = {"objective": 5.0, "objective_std": 1.0, "gain": 6.0, "accuracy": 80.0, "added_parameters": 400.0}
    names = ("entropy", "kl", "grad_norm")
    heads = {f"ppo/{head}/{name}": 0.5 for head in ("op", "slot", "blueprint") for name in names}
    others = {"ppo/max_kl": 0.05, "ppo/entropy": 0.5, "ppo/explained_variance": 0.5, "ppo/value_loss": 1.0}
    ops, germinated = {"WAIT": 400, "ADVANCE": 200}, {f"{slot}/conv_small": HOSTS for slot in SLOTS}
    timing = {"collect_s": 0.9, "update_s": 0.1, "spans": {"collect": 0.9, "update": 0.1}}
    return {
        "round": number, **headline, "committed": 0.5, "panics": 0, "reward": {"gain": 6.0, "rent": -1.0}, "ops": ops,
        "germinated": germinated, **heads, **others, "timing": timing,
    }  # fmt: skip


def begin(folder: Path) -> None:
    """The folder of a run that begins."""
    folder.mkdir(parents=True)
    config: Json = {"config": {"task": "digits_blind", "seed": 0, "rounds": 100_000, "hosts": 32, "members": 3}}
    (folder / "config.json").write_text(json.dumps(config | {"checksum": config_checksum(config)}))
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).touch()


def lines_of(number: int) -> list[tuple[str, Json]]:
    """A round as it is written: steps as they happen, then the events, then the metrics."""
    header = {"kind": "live", "version": 1, "round": number, "began": time.time_ns()}
    steps = [("live.jsonl", step_line(number, step, HOSTS)) for step in range(STEPS)]
    events = [("events.jsonl", event) for event in events_of(number)]
    return [("live.jsonl", header), *steps, *events, ("metrics.jsonl", metrics_of(number))]


def write(folder: Path, per_second: float, seconds: float) -> Json:
    """Write rounds at an even pace of events."""
    files = {name: (folder / name).open("a") for name in ("live.jsonl", "events.jsonl", "metrics.jsonl")}
    start, written, kinds = time.perf_counter(), 0, Counter[str]()
    number, pending = 0, lines_of(0)
    while (now := time.perf_counter() - start) < seconds:
        while written < now * per_second:
            name, line = pending.pop(0)
            if line.get("kind") == "live":
                files[name].truncate(0)
            files[name].write(json.dumps(line, separators=(",", ":")) + "\n")
            kinds[line.get("kind", "metrics")] += 1
            kinds["change of stage"] += len(line["stages"]["step"]) if "stages" in line else 0
            written = kinds.total()
            if name != "events.jsonl":  # a run flushes its events together with the metrics
                for file in files.values():
                    file.flush()
            if not pending:
                number, pending = number + 1, lines_of(number + 1)
        time.sleep(0.01)
    for file in files.values():
        file.close()
    return {"events": written, "seconds": time.perf_counter() - start, "rounds": number, "kinds": dict(kinds)}


def follow(folder: Path, seconds: float) -> Json:
    """Follow in the whole app, with the fleet on the screen."""

    async def run() -> Json:
        settle()
        app = WatchApp([Watched.of(folder)])
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("2")
            process = psutil.Process()
            cpu, start, mib = process.cpu_times(), time.perf_counter(), 0.0
            while time.perf_counter() - start < seconds:
                await asyncio.sleep(0.5)
                mib = max(mib, process.memory_info().rss / 2**20)
            after, wall = process.cpu_times(), time.perf_counter() - start
            share = (after.user + after.system - cpu.user - cpu.system) / wall
            run = app.watched
            read, size = run.follower.behind
            told = {
                "rounds_seen": run.state.complete + 1,
                "bytes_behind": size - read,
                "problems": run.follower.problems,
            }
            return {"cpu_share": share, "mib": mib, **told}

    return asyncio.run(run())


if __name__ == "__main__":
    task, path, *numbers = sys.argv[1:]
    tasks: dict[str, Callable[..., Json]] = {"write": write, "follow": follow}
    print(json.dumps(tasks[task](Path(path), *map(float, numbers))))
