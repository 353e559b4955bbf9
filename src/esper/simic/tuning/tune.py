"""`esper tune`: search a schedule or the heuristic's thresholds with a stated number of episodes, and freeze them.

An episode is one grown host; controls come on top, as they do for the learner. Hosts are of the tuning range, which
neither training nor evaluation ever uses.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import RHO, BadValueError, UnknownNameError, head_preset
from esper.leyline.numbers import require_whole
from esper.leyline.progress import progress_bar
from esper.leyline.records import Json, encode
from esper.simic.training.hosts import check_device
from esper.simic.tuning.candidates import search_heuristic, search_schedule
from esper.simic.tuning.search import Evaluate, Search, Trial
from esper.simic.tuning.workers import Place, SharedTrials, workers_at
from esper.storage.files import replace_file
from esper.tamiyo.policies import HeuristicConfig, Plan
from esper.tamiyo.policies.shipped import CONTENT, FORMAT, TUNED_KINDS, TunedKind
from esper.tolaria import get_task

EPISODES = 480
"""As many as the learner has by default: 20 rounds × 24 grown hosts."""


@dataclass(frozen=True)
class Tuned:
    """What a search found, and all that it tried."""

    kind: TunedKind
    task: str
    best: Plan | HeuristicConfig
    objective: float
    """Its mean on the hosts where the finalists met, points."""
    budget: int
    """Episodes that were allowed."""
    used: int
    """Episodes that were run."""
    rng_seed: int
    log: tuple[Trial, ...]

    def to_json(self) -> dict[str, Json]:
        """The content of a tuned file."""
        search = {name: encode(getattr(self, name)) for name in ("budget", "used", "rng_seed", "objective", "log")}
        found = {CONTENT[self.kind]: encode(self.best)}
        return {"format": FORMAT, "kind": self.kind, "task": self.task, **found, "search": search}


def tune(
    task_name: str,
    kind: TunedKind,
    episodes: int = EPISODES,
    rng_seed: int = 0,
    *,
    preset: str = "core",
    rho: float = RHO,
    data_dir: Path | None = None,
    device: str = "cpu",
    workers: int = 1,
    progress: bool = True,
) -> Tuned:
    """Search with at most so many episodes. Everything random follows from `rng_seed`."""
    if kind not in TUNED_KINDS:
        raise UnknownNameError("kind of search", kind, TUNED_KINDS)
    require_whole("workers", workers, 1)
    check_device(device)
    task = get_task(task_name)
    place = Place(task_name, kind, head_preset(preset).name, rng_seed, rho, device, data_dir)
    with ExitStack() as opened:
        advance = opened.enter_context(progress_bar(f"tuning the {kind}", episodes, shown=progress))
        if workers == 1:
            trials: Evaluate[Any] = place.open(advance)
        else:
            trials = SharedTrials(opened.enter_context(workers_at(place, workers)), workers, advance)
        if kind == "schedule":
            plans = Search[Plan](trials, episodes, rng_seed)
            return _tuned(kind, task_name, search_schedule(plans, task), plans)
        configs = Search[HeuristicConfig](trials, episodes, rng_seed)
        return _tuned(kind, task_name, search_heuristic(configs, task), configs)


def _tuned(
    kind: TunedKind,
    task_name: str,
    found: tuple[Plan | HeuristicConfig, float],
    search: Search[Plan] | Search[HeuristicConfig],
) -> Tuned:
    return Tuned(kind, task_name, *found, search.budget, search.used, search.rng_seed, tuple(search.log))


def check_free(path: Path) -> None:
    """Raise unless a tuned file can be written here: before the search, which may take an hour."""
    if path.exists():
        raise BadValueError(f"{path} exists and may be what an evaluation was made with; choose another --out")
    if not path.resolve().parent.is_dir():
        raise BadValueError(f"{path} cannot be written: there is no folder {path.parent}")


def write_tuned(path: Path, tuned: Tuned) -> None:
    """Write the file whole or not at all; one that exists is left alone."""
    check_free(path)
    replace_file(path, json.dumps(tuned.to_json(), indent=1, allow_nan=False) + "\n")
