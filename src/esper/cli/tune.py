"""`esper tune`."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from esper.simic.distributed import World, open_world
from esper.simic.tuning import EPISODES, SearchMethod, check_free, tune, write_tuned
from esper.simic.tuning.tuned import help_tuning
from esper.tamiyo.policies import HeuristicConfig, Plan
from esper.tamiyo.policies.shipped import TunedKind


@dataclass(frozen=True)
class TuneCommand:
    """Search a plan, or the heuristic's thresholds, with a stated number of episodes; writes one file."""

    out: Path
    """File to write; it must not exist. Evaluate it as schedule:FILE, heuristic:FILE or told:FILE."""
    task: str = "digits_blind"
    """Task to search on. Its hosts are of a range that training and evaluation never use."""
    kind: TunedKind = "schedule"
    """What to search: one plan for all hosts, the heuristic's thresholds, or a plan per kind of host."""
    episodes: int = EPISODES
    """Most episodes to run, not counting controls; for `told`, per kind of host. The default is what `esper train` uses
    by default."""
    search: SearchMethod = "model"
    """How plans are searched: by a model of all plans, or by successive halving. Thresholds: always by halving."""
    seed: int = 0
    """Random seed of the search."""
    preset: str = "core"
    """Heads and ops of the policy: core, commit or full."""
    workers: int = 1
    """Number of processes, of one thread each."""
    device: str = "cpu"
    """Device of the hosts, such as cpu or cuda:0."""
    record: Path | None = None
    """Folder for records of every transition, for offline learning. Candidates name the policies."""
    data_dir: Path | None = None
    """Folder of the data sets (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Search, on all ranks of torchrun; rank 0 decides, writes the file, prints the result."""
        torch.set_num_threads(1)
        with open_world() as world:
            if world.rank:
                help_tuning(world, self.task, self.data_dir, self.device)
            else:
                self._lead(world, console)

    def _lead(self, world: World, console: Console) -> None:
        check_free(self.out)
        hosts = (self.preset, self.data_dir, self.device, self.workers)
        tuned = tune(
            self.task,
            self.kind,
            self.episodes,
            self.seed,
            *hosts,
            record=self.record,
            search=self.search,
            world=world,
        )
        write_tuned(self.out, tuned)
        console.print(
            f"{tuned.used} of {tuned.budget} episodes on {tuned.task}: {_describe(tuned.best)} (objective "
            f"{tuned.objective:+.2f} on the finalists' hosts)"
        )
        console.print(f"Written to {self.out}; evaluate it as {self.kind}:{self.out}")


def _describe(best: Plan | HeuristicConfig | dict[str, Plan]) -> str:
    if isinstance(best, dict):
        return "; ".join(f"{kind} hosts: {_describe(plan)}" for kind, plan in best.items())
    if isinstance(best, Plan):
        seeds = [f"{seed.blueprint} in {seed.slot} at step {seed.germinate_at}" for seed in best.seeds]
        return ", then ".join(seeds) or "wait, because no plan gained anything"
    default = asdict(HeuristicConfig())
    changes = [(name, value) for name, value in asdict(best).items() if value != default[name]]
    texts = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in changes)
    return ", ".join(texts) or "the default thresholds, because nothing was better"
