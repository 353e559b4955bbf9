"""`esper tune`: search a schedule or the heuristic's thresholds with a stated number of episodes, and freeze them.

An episode is one grown host; controls come on top, as they do for the learner. Hosts are of the tuning range, which
neither training nor evaluation ever uses.
"""

import json
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from esper.leyline import BadValueError, UnknownNameError, head_preset
from esper.leyline.files import replace_file
from esper.leyline.progress import progress_bar
from esper.leyline.records import Json, encode
from esper.simic.training.fleets import check_device
from esper.simic.training.tuning_heuristic import HeuristicByEnv, search_heuristic
from esper.simic.training.tuning_schedule import plan_policy, search_schedule
from esper.simic.training.tuning_search import Search, Trial
from esper.simic.training.tuning_trials import Arena, MakePolicy, Trials
from esper.tamiyo.policies import HeuristicConfig, Plan
from esper.tamiyo.policies.shipped import CONTENT, FORMAT, TUNED_KINDS, TunedKind
from esper.tolaria import get_task

EPISODES = 480
"""As many as the learner has by default: 20 rounds × 24 grown hosts."""

Candidate = TypeVar("Candidate", bound=Hashable)


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
    rho: float = 2.0,
    data_dir: Path | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> Tuned:
    """Search with at most so many episodes. Everything random follows from `rng_seed`."""
    if kind not in TUNED_KINDS:
        raise UnknownNameError("kind of search", kind, TUNED_KINDS)
    check_device(device)
    task, heads = get_task(task_name), head_preset(preset)
    with progress_bar(f"tuning the {kind}", episodes, shown=progress) as advance:

        def start(make_policy: MakePolicy[Candidate]) -> Search[Candidate]:
            arena = Arena(task, heads, make_policy, device=device, data_dir=data_dir)
            return Search(Trials(arena, rng_seed, rho, advance), episodes, rng_seed)

        if kind == "schedule":
            plans = start(partial(plan_policy, task))
            return _tuned(kind, task_name, search_schedule(plans, task), plans)
        configs = start(partial(HeuristicByEnv, task))
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
