"""Whether implicit Q-learning grows hosts better than the policies whose records it learns from.

Policies are recorded on fresh hosts, once. IQL learns from all records with several seeds. The learners and the
recorded policies are then compared on the same unseen hosts. What is done is kept in `--folder` and not done again.

    python benchmarks/iql_growth.py --workers 2
    python benchmarks/iql_growth.py --episodes 150 --seeds 2 --hosts 16
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from harness import RESULTS, Json, print_table, spread, write_result

from esper.leyline import BadValueError
from esper.leyline.records import encode
from esper.simic.agent.policy import write_policy
from esper.simic.evaluation.behaviour import Behaviour, parse_policies, record_behaviour
from esper.simic.evaluation.comparison import EvaluationReport, run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig
from esper.simic.evaluation.workers import run_with
from esper.simic.offline.iql import IQLConfig, iql
from esper.simic.offline.records import Records
from esper.simic.offline.selection import select_transitions
from esper.tolaria import get_task

BEHAVIOURS = ("random", "heuristic")


def record(behaviour: Behaviour, folder: Path, workers: int) -> None:
    """Record the policies, unless the folder already holds as many episodes of them."""
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}.draft")
        record_behaviour(behaviour, draft, workers=workers)
        draft.rename(folder)
    records = Records.open(folder)
    wanted = (behaviour.task, behaviour.preset, behaviour.hosts * len(behaviour.policies))
    if (found := (records.header.task, records.header.preset, len(records))) != wanted:
        raise BadValueError(f"{folder} holds (task, preset, episodes) {found}, not {wanted}; name another --folder")


def learn(records: Path, folder: Path, config: IQLConfig, rng_seed: int) -> Path:
    """The policy file of one training seed."""
    path = folder / f"iql-{rng_seed}.safetensors"
    if not path.exists():
        torch.set_num_threads(1)
        chosen = select_transitions([records])
        learned = iql(chosen.data, chosen.header.table, chosen.header.layout, config, rng_seed=rng_seed)
        write_policy(path, learned.imitation.agent, chosen.header.preset)
    return path


def rows_of(report: EvaluationReport, learner: str) -> list[list[object]]:
    """A row per policy: means, and how much better the learner is."""
    (comparison,) = report.tasks.values()
    task = get_task(comparison.config.task)
    differences = {claim.against: claim for claim in comparison.claims if claim.policy == learner}
    rows: list[list[object]] = []
    for name, results in comparison.policies.items():
        shown = ""
        if (claim := differences.get(name)) is not None:
            gap = claim.difference
            shown = f"{gap.mean:+.2f} ({gap.low:+.2f} to {gap.high:+.2f})" + (" superior" if claim.superior else "")
        rows.append(
            [
                "iql" if name == learner else name,
                spread([fmean(result.objective) for result in results]),
                fmean(gain for result in results for gain in result.gains(task)),
                f"{fmean(len(fossils) for result in results for fossils in result.fossils):.2f}",
                shown,
            ]
        )
    return rows


def run(arguments: argparse.Namespace, folder: Path) -> tuple[EvaluationReport, str, dict[str, Json]]:
    """Record, learn, compare; returns the report, the learner's name and the settings."""
    policies = parse_policies(arguments.policies)
    behaviour = Behaviour(arguments.task, policies, arguments.episodes, 0, arguments.preset)
    config = IQLConfig()
    config = replace(
        config,
        epochs=arguments.epochs or config.epochs,
        policy=replace(config.policy, epochs=arguments.policy_epochs or config.policy.epochs),
    )
    record(behaviour, records := folder / "records", arguments.workers)
    seeds = range(arguments.seeds)
    with run_with(arguments.workers) as run_all:
        files = dict(run_all(partial(learn, records, folder, config), seeds))
    learner = "+".join(str(files[seed]) for seed in seeds)
    hosts = EvaluationConfig(arguments.task, arguments.hosts, arguments.seed, arguments.preset, arguments.final)
    report = run_comparisons(
        [arguments.task],
        [learner, *arguments.policies],
        hosts,
        greedy=arguments.greedy,
        workers=arguments.workers,
        keep=folder / "results",
    )
    settings: dict[str, Json] = {"behaviour": encode(behaviour), "iql": encode(config)}
    return report, learner, settings


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--policies", nargs="+", default=BEHAVIOURS, help="policies to record and to beat")
    parser.add_argument("--episodes", type=int, default=1000, help="of each policy")
    parser.add_argument("--preset", default="core")
    parser.add_argument("--seeds", type=int, default=5, help="learners")
    parser.add_argument("--epochs", type=int, default=None, help="of the values")
    parser.add_argument("--policy-epochs", type=int, default=None)
    parser.add_argument("--hosts", type=int, default=64, help="unseen hosts")
    parser.add_argument("--seed", type=int, default=7, help="of the unseen hosts")
    parser.add_argument("--final", action="store_true", help="hosts of the final range, scored on test images")
    parser.add_argument("--greedy", action="store_true", help="also evaluate the likeliest actions")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="keeps records, policies and results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Print one table, write one JSON."""
    arguments = parse()
    with TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report, learner, settings = run(arguments, folder)
    (comparison,) = report.tasks.values()
    episodes = f"{arguments.episodes} episodes of each"
    header = ["policy", "objective", "gain", "commits", "iql − it (95 %)"]
    print_table(f"{comparison.title}; {arguments.seeds} learners, {episodes}", header, rows_of(report, learner))
    name = f"iql_growth_{arguments.task}" + ("_final" if arguments.final else "")
    path = write_result(name, {"settings": settings, **_renamed(report.to_json(), learner)}, arguments.out)
    print(f"\n{path}")


def _renamed(content: dict[str, Json], learner: str) -> dict[str, Json]:
    """The report with `iql` for the paths of the learner's files."""
    policies, differences = content["policies"], content["differences"]
    assert isinstance(policies, dict)
    assert isinstance(differences, list)
    renamed = {("iql" if name == learner else name): figures for name, figures in policies.items()}
    claims = [
        {key: "iql" if value == learner else value for key, value in claim.items()}
        for claim in differences
        if isinstance(claim, dict)
    ]
    return {**content, "policies": renamed, "differences": claims}


if __name__ == "__main__":
    main()
