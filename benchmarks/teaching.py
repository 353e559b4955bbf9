"""A controller from few episodes: search, imitate, improve; against plans searched with as many episodes.

    python benchmarks/teaching.py --task digits_varied --teach 300 --rounds 30 --workers 16 --keep FOLDER
    python benchmarks/teaching.py … --stage evaluate --final

    python benchmarks/teaching.py --task cifar_growth --together --device cuda --workers 5 --stage records --keep FOLDER

Every training seed has a data set and a search of its own. Everything is stored in FOLDER, and a second call continues.
`taughtN` is a controller after imitation, `runN` after PPO, `planN.json` a plan searched with as many episodes,
`heuristicN.json` thresholds. Only --final uses test images.

With --together the seeds share fleets, as a GPU wants it; only imitation runs in --workers processes. Stages then are
`records` (the searches that are imitated), `imitate`, `train` (PPO), `search`, `heuristic` and `evaluate`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from harness import RESULTS, print_table, write_result

from esper.leyline import head_preset
from esper.simic.agent import load_agent
from esper.simic.agent.policy import write_policy
from esper.simic.evaluation.comparison import EvaluationReport, run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig, short_names
from esper.simic.evaluation.provenance import made_with
from esper.simic.evaluation.results import overall_mean
from esper.simic.teaching import search_all, shared_arenas, teach
from esper.simic.training.config import TrainConfig, taught_config
from esper.simic.training.run_folder import CONFIG, checkpoints_of
from esper.simic.training.together import SEEDS, Learner, conduct, train_together
from esper.simic.training.trainer import Trainer
from esper.simic.tuning import tune, write_tuned
from esper.storage.files import replace_file
from esper.tamiyo.policies.shipped import TunedKind
from esper.tolaria import get_task

STAGES = ("records", "imitate", "train", "search", "heuristic", "evaluate")
OPPONENTS: dict[str, TunedKind] = {"search": "schedule", "heuristic": "heuristic"}
CHECKPOINTS = 10_000  # that are kept: all


def run_config(arguments: argparse.Namespace, seed: int) -> TrainConfig:
    """The settings of one training seed."""
    config = taught_config(arguments.teach)
    ppo = replace(
        config.ppo, **{name: json.loads(value) for name, value in (item.split("=") for item in arguments.ppo)}
    )
    names = {"task": arguments.task, "rounds": arguments.rounds, "hosts": arguments.hosts, "seed": seed}
    names |= {} if arguments.members is None else {"members": arguments.members}
    return replace(config, **names, device=arguments.device, ppo=ppo)


def train(arguments: argparse.Namespace, seed: int) -> None:
    """Teach and train one controller, or continue; then write the taught policy as a file."""
    workers = max(1, arguments.workers // len(arguments.seeds))
    make_trainer(arguments, seed, partial(teach, workers=workers, progress=False)).run(progress=False)
    write_policies(arguments, seed)


def make_trainer(arguments: argparse.Namespace, seed: int, teach_it: Callable[..., None]) -> Trainer:
    """A new run, or one to continue."""
    torch.set_num_threads(1)
    folder, config = run_folder(arguments, seed), run_config(arguments, seed)
    resume, begin = (folder / CONFIG).is_file(), partial(teach_it, config)
    return Trainer(config, folder, resume=resume, keep_checkpoints=CHECKPOINTS, begin=begin)


def run_folder(arguments: argparse.Namespace, seed: int) -> Path:
    """Where a training seed's run is."""
    keep: Path = arguments.keep
    return keep / "runs" / f"seed{seed}" if arguments.together else keep / f"run{seed}"


def write_policies(arguments: argparse.Namespace, seed: int) -> None:
    """Write the policies that are compared as files."""
    for number in checkpoint_numbers(arguments):
        path = arguments.keep / at_round(number, seed)
        if (checkpoint := checkpoints_of(run_folder(arguments, seed)).path_of(number)).is_dir() and not path.exists():
            write_policy(path, load_agent(checkpoint)[0], run_config(arguments, seed).preset)


def checkpoint_numbers(arguments: argparse.Namespace) -> list[int]:
    """The rounds whose policies are compared with the start: 0 is the start, the last one is the run itself."""
    return [0, *(range(arguments.every, arguments.rounds, arguments.every) if arguments.every else ())]


def at_round(number: int, seed: int) -> str:
    """The policy file of a training seed after this number of rounds."""
    return f"round{number}-{seed}" if number else f"taught{seed}"


def search(arguments: argparse.Namespace, seed: int) -> None:
    """Search one plan with the episodes of the teaching."""
    torch.set_num_threads(1)
    path = arguments.keep / f"plan{seed}.json"
    if not path.exists():
        config = run_config(arguments, seed)
        found = tune(
            config.task, "schedule", arguments.teach, seed, config.preset, device=arguments.device, progress=False
        )
        write_tuned(path, found)


def in_parallel(arguments: argparse.Namespace, jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs side by side, if there are several workers."""
    if arguments.workers == 1:
        for job in jobs:
            job()
        return
    with ProcessPoolExecutor(min(len(jobs), arguments.workers) or 1, mp_context=get_context("spawn")) as pool:
        for future in wait([pool.submit(job) for job in jobs]).done:
            future.result()


# -- seeds that share fleets ------------------------------------------------------------------------------------------


def run_together(arguments: argparse.Namespace) -> None:
    """The stages, each for all seeds at once."""
    torch.set_num_threads(1)
    seeds, config = arguments.seeds, run_config(arguments, arguments.seeds[0])
    if "records" in arguments.stage:
        conduct([partial(record_search, arguments, seed) for seed in seeds])
    if "imitate" in arguments.stage:
        (arguments.keep / "runs").mkdir(exist_ok=True)
        if not (arguments.keep / "runs" / SEEDS).exists():
            replace_file(arguments.keep / "runs" / SEEDS, json.dumps({"seeds": seeds}) + "\n")
        in_parallel(arguments, [partial(imitate, arguments, seed) for seed in seeds])
    if "train" in arguments.stage and arguments.rounds:
        train_together(config, arguments.keep / "runs", seeds, keep_checkpoints=CHECKPOINTS, progress=True)
        for seed in seeds:
            write_policies(arguments, seed)
    for stage, kind in OPPONENTS.items():
        if stage in arguments.stage:
            conduct([partial(search_opponent, arguments, kind, seed) for seed in seeds])


def record_search(arguments: argparse.Namespace, seed: int, learner: Learner) -> None:
    """The search of plans that a controller imitates."""
    config = run_config(arguments, seed)
    open_own = shared_arenas(learner, len(arguments.seeds), arguments.device, None)
    search_all(config, records_of(arguments, seed), 1, progress=seed == arguments.seeds[0], open_own=open_own)


def records_of(arguments: argparse.Namespace, seed: int) -> Path:
    """Where its records are."""
    records: Path = arguments.keep / "records" / f"seed{seed}"
    return records


def imitate(arguments: argparse.Namespace, seed: int) -> None:
    """Teach one controller from these records."""
    trainer = make_trainer(arguments, seed, partial(teach, progress=False, records=records_of(arguments, seed)))
    with trainer.folder:
        trainer.teach()
    write_policies(arguments, seed)


def search_opponent(arguments: argparse.Namespace, kind: TunedKind, seed: int, learner: Learner) -> None:
    """Search a plan or thresholds with the episodes of the teaching."""
    path, config = arguments.keep / f"{'plan' if kind == 'schedule' else kind}{seed}.json", run_config(arguments, seed)
    if path.exists():
        return
    open_own = shared_arenas(learner, len(arguments.seeds), arguments.device, None)
    found = tune(
        config.task,
        kind,
        arguments.teach,
        seed,
        config.preset,
        device=arguments.device,
        progress=seed == arguments.seeds[0],
        record=arguments.keep / "records" / f"{kind}{seed}",
        arena=open_own(get_task(config.task), head_preset(config.preset)),
    )
    write_tuned(path, found)


def policies(arguments: argparse.Namespace) -> list[str]:
    """What is evaluated: taught controllers, trained ones, searched plans, and rules."""
    keep, seeds = arguments.keep, arguments.seeds
    rounds = checkpoint_numbers(arguments)
    specs = ["+".join(str(keep / at_round(number, seed)) for seed in seeds) for number in rounds]
    specs += ["+".join(str(run_folder(arguments, seed)) for seed in seeds)] if arguments.rounds else []
    for kind, name in (("schedule", "plan"), ("heuristic", "heuristic")):
        if (keep / f"{name}{seeds[0]}.json").exists():
            specs.append(f"{kind}:" + "+".join(str(keep / f"{name}{seed}.json") for seed in seeds))
    return [*specs, *arguments.against]


def evaluate(arguments: argparse.Namespace) -> EvaluationReport:
    """All policies on the same unseen hosts."""
    config = run_config(arguments, 0)
    hosts = EvaluationConfig(config.task, arguments.eval_hosts, arguments.eval_seed, config.preset, arguments.final)
    return run_comparisons(
        [config.task],
        policies(arguments),
        replace(hosts, device=arguments.device),
        margin=arguments.margin,
        greedy=not (arguments.every or arguments.sampled_only),
        workers=arguments.workers,
        progress=False,
        keep=arguments.keep / "results",
    )


def main() -> None:
    """Run the stages, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_varied")
    parser.add_argument("--teach", type=int, default=300, help="episodes of each search")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of PPO after the imitation")
    parser.add_argument("--every", type=int, default=0, help="also evaluate the policy after every Nth round; 0: none")
    parser.add_argument("--hosts", type=int, default=32, help="hosts per round, controls included")
    parser.add_argument("--members", type=int, help="hosts per group, without its control")
    parser.add_argument("--ppo", nargs="*", default=[], metavar="NAME=VALUE", help="settings of PPO, e.g. rate=0.003")
    parser.add_argument("--together", action="store_true", help="the seeds share fleets")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--against", nargs="*", default=["random-commit", "wait"], help="further policies")
    parser.add_argument("--eval-hosts", type=int, default=64)
    parser.add_argument("--eval-seed", type=int, default=7)
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--final", action="store_true", help="hosts of the final range, scored on test images")
    parser.add_argument("--sampled-only", action="store_true", help="do not evaluate the likeliest actions")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", type=Path, required=True, help="folder of runs, plans and results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.together:
        run_together(arguments)
    else:
        stages = {"train": train, "search": search}
        chosen = [job for stage, job in stages.items() if stage in arguments.stage]
        in_parallel(arguments, [partial(job, arguments, seed) for job in chosen for seed in arguments.seeds])
    if "evaluate" not in arguments.stage:
        return
    report = evaluate(arguments)
    comparison = report.tasks[arguments.task]
    names = short_names(comparison.policies)
    rows = [
        [
            names[name],
            f"{overall_mean(results, 'objective'):+.2f}",
            f"{overall_mean(comparison.greedy[name], 'objective'):+.2f}" if name in comparison.greedy else "",
            f"{overall_mean(results, 'added_params'):.0f}",
            " ".join(f"{kind} {one.objective:+.2f}" for kind, one in comparison.kinds.get(name, {}).items()),
        ]
        for name, results in comparison.policies.items()
    ]
    print_table(comparison.title, ["policy", "objective", "greedy", "parameters", "by kind"], rows)
    for claim in comparison.claims:
        d = claim.difference
        verdict = "superior" if claim.superior else "not worse" if claim.not_worse else ""
        difference = f"{d.mean:+.2f} ({d.low:+.2f} to {d.high:+.2f}) {verdict}"
        print(f"{names[claim.policy]} − {names[claim.against]}: {difference}")
    content = json.loads(json.dumps(report.to_json()).replace(str(arguments.keep) + "/", ""))
    content["provenance"] = made_with(command(arguments), arguments.device)
    part = "taught" if arguments.final else "course" if arguments.every else "validation"
    path = write_result(
        f"{'evaluation' if arguments.final else 'teaching'}_{arguments.task}_{part}", content, arguments.out
    )
    print(path)


def command(arguments: argparse.Namespace) -> str:
    """The command of this evaluation, without paths of this machine."""
    words = ["python benchmarks/teaching.py"]
    for name, value in vars(arguments).items():
        if name not in ("keep", "out", "stage", "workers") and value not in (None, False, [], 0):
            flag = f"--{name.replace('_', '-')}"
            listed = value if isinstance(value, list) else [] if value is True else [value]
            words.append(" ".join([flag, *(str(item).replace(f"{arguments.keep}/", "") for item in listed)]))
    return " ".join(words)


if __name__ == "__main__":
    main()
