"""`esper tune`."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from esper.simic.tuning.tune import EPISODES, Tuned, check_free, tune, write_tuned
from esper.tamiyo.policies import HeuristicConfig, Plan
from esper.tamiyo.policies.shipped import TunedKind


@dataclass(frozen=True)
class TuneCommand:
    """Search a fixed schedule, or the heuristic's thresholds, with a stated number of episodes; writes one file."""

    out: Path
    """File to write; it must not exist. Evaluate it as schedule:FILE or heuristic:FILE."""
    task: str = "digits_blind"
    """Task whose hosts it is searched on; they are of a range that training and evaluation never use."""
    kind: TunedKind = "schedule"
    """What is searched."""
    episodes: int = EPISODES
    """Most episodes to run; controls come on top. The default is what `esper train` uses by default."""
    seed: int = 0
    """Everything random follows from it."""
    preset: str = "core"
    """Heads and ops of the policy: core or full."""
    workers: int = 1
    """Processes that share the work, of one thread each."""
    device: str = "cpu"
    data_dir: Path | None = None
    """Where data sets are looked for (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Search, write, say what was found."""
        torch.set_num_threads(1)
        check_free(self.out)
        tuned = tune(
            self.task,
            self.kind,
            self.episodes,
            self.seed,
            preset=self.preset,
            data_dir=self.data_dir,
            device=self.device,
            workers=self.workers,
        )
        write_tuned(self.out, tuned)
        console.print(_told(tuned), highlight=False)
        console.print(f"{self.out} holds it; evaluate it as {self.kind}:{self.out}", highlight=False)


def _told(tuned: Tuned) -> str:
    """What was found, and how well it did where the finalists met."""
    spent = f"{tuned.used} of {tuned.budget} episodes on {tuned.task}"
    return f"{spent}: {_described(tuned.best)} (objective {tuned.objective:+.2f} on the finalists' hosts)"


def _described(best: Plan | HeuristicConfig) -> str:
    if isinstance(best, Plan):
        seeds = [f"{seed.blueprint} in {seed.slot} at step {seed.germinate_at}" for seed in best.seeds]
        return ", then ".join(seeds) or "wait, no plan gained anything"
    default = asdict(HeuristicConfig())
    changed = [f"{name} {_short(value)}" for name, value in asdict(best).items() if value != default[name]]
    return ", ".join(changed) or "the default thresholds, nothing did better"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
