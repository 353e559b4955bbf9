"""What each part of the learner is worth: the same run with one thing changed at a time.

Every variant is trained with every seed, then evaluated on the same unseen hosts (validation images, sampled actions,
last checkpoint). A run that has a result is skipped, and one that was stopped resumes from its last round. Three seeds
are a report, not a claim.

    python benchmarks/ablations.py --workers 16
    python benchmarks/ablations.py --only "no memory" "joint clipping" --seeds 3
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from harness import RESULTS, Json, print_table, spread, write_result

from esper.leyline import BadValueError, UnknownNameError
from esper.leyline.records import encode
from esper.simic.evaluation.policies import Contender, EvaluationConfig, PolicySpec
from esper.simic.evaluation.workers import run_contenders
from esper.simic.training.config import TrainConfig
from esper.simic.training.run_folder import read_config
from esper.simic.training.trainer import Trainer
from esper.tolaria import TaskRegistry, get_task

DEFAULT = "default"
FIGURES = ("objective", "accuracy", "added_params")
Figures = dict[str, list[float]]
"""By name, over hosts."""
EVALUATION_SEED = 7
"""The same unseen hosts for all."""


def variants(base: TrainConfig) -> dict[str, TrainConfig]:
    """By name: the run as it is, and with one thing changed each."""
    reward, ppo, network = base.reward, base.ppo, base.ppo.network
    return {
        DEFAULT: base,
        "no shaping": replace(base, reward=replace(reward, shaping=0.0)),
        "no memory": replace(base, ppo=replace(ppo, network=replace(network, recurrent=False))),
        "critic without control": replace(base, ppo=replace(ppo, network=replace(network, informed_critic=False))),
        "joint clipping": replace(base, ppo=replace(ppo, clipping="joint")),
        "lambda 1": replace(base, ppo=replace(ppo, lam=1.0)),
        "epsilon 0": replace(base, ppo=replace(ppo, explore=0.0)),
        "uncentred heads": replace(base, ppo=replace(ppo, centred=False)),
        "straight-through": replace(base, isolation="straight_through"),
        "no sensing": replace(base, sensing=False),
        "shaped reward": replace(base, reward=replace(reward, family="shaped")),
    }


@dataclass(frozen=True)
class Job:
    """One variant with one seed. What it leads to is kept in `folder`."""

    variant: str
    config: TrainConfig
    hosts: int
    """Unseen ones."""
    folder: Path
    steps: int | None
    """Of an episode; None: as the task has it."""

    @property
    def name(self) -> str:
        """As part of a path."""
        return f"{self.variant.replace(' ', '_')}-{self.config.seed}"

    @property
    def result(self) -> Path:
        """Where its result is once it is done."""
        return self.folder / f"{self.name}.json"

    @property
    def settings(self) -> dict[str, Json]:
        """What a result must have been made with to be taken for this job's."""
        return {"unseen": self.hosts, **encode(replace(self.config, data_dir=None))}


def run(job: Job) -> str:
    """Train and evaluate, as far as that is not done yet; says what came out."""
    _register(job)
    if not job.result.exists():
        run_folder = job.folder / job.name
        resume = run_folder.exists()
        if resume and read_config(run_folder) != job.config:
            raise BadValueError(f"{run_folder} is a run with other settings; choose another --runs, or remove it")
        Trainer(job.config, run_folder, resume=resume).run(progress=False)
        content = {"settings": job.settings, "figures": _evaluate(job, run_folder)}
        whole = job.result.with_suffix(".part")
        whole.write_text(json.dumps(content))
        whole.replace(job.result)  # a result is there whole or not at all
    return f"{job.variant}, seed {job.config.seed}: objective {statistics.fmean(read(job)['objective']):+.2f}"


def read(job: Job) -> Figures:
    """The result of a job that is done."""
    content = json.loads(job.result.read_text())
    if content["settings"] != job.settings:
        raise BadValueError(f"{job.result} was made with other settings; choose another --runs, or remove it")
    figures: Figures = content["figures"]
    return figures


def _register(job: Job) -> None:
    """Worker processes know the built-in tasks alone."""
    if job.steps is not None and job.config.task not in TaskRegistry.names():
        original = get_task(job.config.task.rsplit("@", 1)[0])
        TaskRegistry.register(replace(original, name=job.config.task, steps=job.steps))


def _evaluate(job: Job, run_folder: Path) -> Figures:
    config = job.config
    unseen = EvaluationConfig(
        config.task, job.hosts, EVALUATION_SEED, config.preset,
        isolation=config.isolation, device=config.device, data_dir=config.data_dir,
    )  # fmt: skip
    (found,) = run_contenders([Contender(unseen, PolicySpec.parse(str(run_folder)))])
    return {name: [float(value) for value in getattr(found, name)] for name in FIGURES}


def plan(arguments: argparse.Namespace) -> dict[str, list[Job]]:
    """All jobs by variant."""
    name, steps = arguments.task, arguments.steps
    if steps is not None:
        original, name = get_task(name), f"{name}@{steps}"
        if name not in TaskRegistry.names():
            TaskRegistry.register(replace(original, name=name, steps=steps))
    base = TrainConfig(
        task=name,
        rounds=arguments.rounds,
        hosts=arguments.hosts,
        device=arguments.device,
        data_dir=arguments.data_dir,
    )
    known = variants(base)
    chosen = list(known) if arguments.only is None else arguments.only
    for variant in chosen:
        if variant not in known:
            raise UnknownNameError("variant", variant, known)
    seeds = range(arguments.seeds)
    return {
        variant: [
            Job(variant, replace(known[variant], seed=seed), arguments.unseen, arguments.runs, steps) for seed in seeds
        ]
        for variant in chosen
    }


def main() -> None:
    """Run what is left, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--hosts", type=int, default=32, help="per round, controls included")
    parser.add_argument("--unseen", type=int, default=64, help="hosts of the evaluation")
    parser.add_argument("--seeds", type=int, default=3, help="training seeds 0, 1 …")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants")
    parser.add_argument("--steps", type=int, default=None, help="shorten episodes")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/ablations"), help="folder for runs and their results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    planned = plan(arguments)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    jobs = [job for seed in range(arguments.seeds) for job in (jobs[seed] for jobs in planned.values())]
    if arguments.workers > 1:
        context = torch.multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
            for line in pool.map(run, jobs):
                print(line, flush=True)
    else:
        for job in jobs:
            print(run(job), flush=True)
    report(planned, arguments)


def report(planned: dict[str, list[Job]], arguments: argparse.Namespace) -> None:
    """Means over hosts, one per seed; the table shows their mean and deviation over seeds."""
    results = {variant: [read(job) for job in jobs] for variant, jobs in planned.items()}
    figures = {
        variant: {name: [statistics.fmean(result[name]) for result in found] for name in FIGURES}
        for variant, found in results.items()
    }
    base = figures.get(DEFAULT)
    rows = []
    for variant, by_name in figures.items():
        row = [variant, *(spread(by_name[name]) for name in FIGURES)]
        if base is None:
            row.append("-")
        else:
            row.append(spread([a - b for a, b in zip(by_name["objective"], base["objective"], strict=True)]))
        rows.append(row)
    print_table(
        f"{arguments.task}, {arguments.rounds} rounds of {arguments.hosts} hosts, {arguments.seeds} seeds (mean ± "
        f"deviation over seeds), {arguments.unseen} unseen hosts, validation images: a report, no claims",
        ["variant", "objective", "accuracy %", "added parameters", f"objective − {DEFAULT}"],
        rows,
    )
    settings = ("task", "rounds", "hosts", "unseen", "seeds")
    written: dict[str, Json] = {
        variant: {
            "by_seed": dict(figures[variant]),
            "hosts": [dict(result) for result in found],
        }
        for variant, found in results.items()
    }
    content = {**{name: getattr(arguments, name) for name in settings}, "variants": written}
    path = write_result(f"ablations_{arguments.task}", content, arguments.out)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
