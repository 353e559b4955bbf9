"""`esper tune`: search plans or the heuristic's thresholds with a stated number of episodes, and store the best."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from esper.leyline import BadValueError, UnknownNameError, head_preset
from esper.leyline.progress import progress_bar
from esper.leyline.records import Json, encode
from esper.simic.distributed import Message, World
from esper.simic.distributed.world import this_code
from esper.simic.evaluation.arena import Arena
from esper.simic.evaluation.dealing import run_dealt
from esper.simic.offline.shards import check_unused
from esper.simic.training.hosts import check_device
from esper.simic.tuning.dealt import serve_trials, try_on_ranks
from esper.simic.tuning.heuristic import search_heuristic
from esper.simic.tuning.schedule import SEARCH_METHODS, SearchMethod, search_schedule
from esper.simic.tuning.search import Search, Trial
from esper.simic.tuning.trials import Trials
from esper.storage.files import check_writable, replace_file
from esper.tamiyo.policies import HeuristicConfig, Plan
from esper.tamiyo.policies.shipped import CONTENT, FORMAT, TUNED_KINDS, TunedKind
from esper.tolaria import Task, get_task
from esper.tolaria.data import data_digest

EPISODES = 480  # the learner's default: 20 rounds × 24 grown hosts


@dataclass(frozen=True)
class Tuned:
    """The best candidate of a search, and all trials."""

    kind: TunedKind
    task: str
    best: Plan | HeuristicConfig | dict[str, Plan]  # of `told`: a plan per kind of host
    objective: float  # mean on the hosts of the final, points; of `told`, over kinds as often as they occur
    budget: int  # episodes allowed
    used: int  # episodes run
    rng_seed: int
    log: tuple[Trial, ...]
    method: SearchMethod = "halving"

    def to_json(self) -> dict[str, Json]:
        """The content of a tuned file."""
        names = ("method", "budget", "used", "rng_seed", "objective", "log")
        search = {name: encode(getattr(self, name)) for name in names}
        best = {CONTENT[self.kind]: encode(self.best)}
        return {"format": FORMAT, "kind": self.kind, "task": self.task, **best, "search": search}


def tune(
    task_name: str,
    kind: TunedKind,
    episodes: int = EPISODES,
    rng_seed: int = 0,
    preset: str = "core",
    data_dir: Path | None = None,
    device: str = "cpu",
    workers: int = 1,
    *,
    progress: bool = True,
    record: Path | None = None,
    search: SearchMethod = "model",
    arena: Arena | None = None,
    world: World | None = None,
) -> Tuned:
    """Search with at most this number of episodes, or for `told` this number per kind of host.

    `rng_seed` determines everything random. `record`: folder for records of all episodes; the JSON of a candidate is
    the name of its policy. `search`: how plans are searched; thresholds are always searched by halving. `arena`: plays
    all episodes in this process, in fleets that it may share with others; records are then continued. `world`: all
    ranks of the search; the others call `help_tuning`.
    """
    world = world or World()
    if kind not in TUNED_KINDS:
        raise UnknownNameError("kind of search", kind, TUNED_KINDS)
    if search not in SEARCH_METHODS:
        raise UnknownNameError("search", search, SEARCH_METHODS)
    check_device(device)
    if record is not None and arena is None:
        check_unused(record)
    task = get_task(task_name)
    preset = head_preset(preset).name
    if world.size > 1:
        world.agree(agreed_search(task, data_dir))
    kinds = Counter[str](task.defects) if kind == "told" else Counter([""])  # by name: how often hosts are of it
    folder = None if record is None else record.parent
    with (
        progress_bar(f"tuning {kind}", len(kinds) * episodes, shown=progress) as advance,
        run_dealt(world, workers, folder) as (run_all, _),
    ):
        trials = Trials(task_name, kind, preset, rng_seed, world.device(device), data_dir, record, arena=arena)
        searches: dict[str, Search[Any]] = {  # Any: plans or thresholds
            name: Search(
                partial(try_on_ranks, world, replace(trials, defect=name), run_all, workers, advance),
                episodes,
                rng_seed,
                name,
            )
            for name in kinds
        }
        found: dict[str, tuple[Any, float]] = {
            name: search_heuristic(one, task) if kind == "heuristic" else search_schedule(one, task, search)
            for name, one in searches.items()
        }
        if world.size > 1:
            world.share(Message({}, {"found": True}))
    return Tuned(
        kind=kind,
        task=task_name,
        best={name: plan for name, (plan, _) in found.items()} if kind == "told" else found[""][0],
        objective=sum(weight * found[name][1] for name, weight in kinds.items()) / kinds.total(),
        budget=sum(one.budget for one in searches.values()),
        used=sum(one.used for one in searches.values()),
        rng_seed=rng_seed,
        log=tuple(trial for one in searches.values() for trial in one.log),
        method="halving" if kind == "heuristic" else search,
    )


def help_tuning(world: World, task_name: str, data_dir: Path | None = None, device: str = "cpu") -> None:
    """What ranks other than 0 do while it tunes."""
    check_device(device)
    world.agree(agreed_search(get_task(task_name), data_dir))
    serve_trials(world, world.share(), device, data_dir)


def agreed_search(task: Task, data_dir: Path | None) -> dict[str, Json]:
    """What must be equal on all ranks. Everything else is rank 0's to say."""
    return {"task": task.name, "data": data_digest(task.load_data(data_dir)), **this_code()}


def check_free(path: Path) -> None:
    """Raise unless a tuned file can be written here; checked before the search, which may take an hour."""
    if path.exists():
        raise BadValueError(f"{path} exists, and an evaluation may have used it; choose another --out")
    check_writable(path)


def write_tuned(path: Path, tuned: Tuned) -> None:
    """Write the file atomically; an existing file is not overwritten."""
    check_free(path)
    replace_file(path, json.dumps(tuned.to_json(), indent=1, allow_nan=False) + "\n")
