"""Add controls to a finished evaluation, on the same hosts: the oracle, and `retrained:` and `static:` hosts of its
first learned policy. What that policy committed is read from the file.

    python benchmarks/late_controls.py EVALUATION.json --controls oracle retrained static --out JOINED.json

`wait` runs again too. If it is not equal to the last digit, hosts or arithmetic differ from those of the file.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from join_evaluations import join

from esper.leyline import BadValueError
from esper.leyline.progress import progress_bar
from esper.simic.evaluation.comparison import TaskComparison, kinds_of_hosts
from esper.simic.evaluation.policies import CONTROLS, ORACLE, Contender, EvaluationConfig, PolicySpec
from esper.simic.evaluation.provenance import made_with
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.workers import run_contenders, run_with
from esper.storage.files import replace_file

Content = dict[str, Any]  # Any: what JSON holds
SHARED = "wait"


def results_of(policy: Content) -> list[Result]:
    """Results of a policy, per training seed. Fossils are added at full strength, as by all policies of preset core."""
    return [
        Result(
            seed["objective"],
            seed["accuracy"],
            seed["control_accuracy"],
            seed["added_params"],
            [[Fossil(*commit.split("/")) for commit in commits] for commits in seed["commits"]],
        )
        for seed in policy["by_seed"]
    ]


def contenders_of(found: Content, controls: list[str], config: EvaluationConfig) -> dict[str, list[Contender]]:
    """By name: the oracle, controls of the first learned policy, and `wait`, which the file already has."""
    learned = next((name for name in found["policies"] if PolicySpec.parse(name).learned), None)
    if learned is None or SHARED not in found["policies"]:
        raise BadValueError(f"a learned policy and {SHARED!r} have to be among {list(found['policies'])}")
    for flag in ("--preset", "--isolation"):
        if flag in found["provenance"]["command"]:
            raise BadValueError(f"an evaluation with {flag} has seeds of other kinds, which its file does not tell of")
    wanted = {SHARED: [Contender(config, PolicySpec.parse(SHARED))]}
    for kind in controls:
        if kind == ORACLE:
            wanted[ORACLE] = [Contender(config, PolicySpec.parse(ORACLE))]
        else:
            spec = PolicySpec.parse(f"{kind}:{learned}")
            wanted[spec.text] = [Contender(config, spec, base=base) for base in results_of(found["policies"][learned])]
    return wanted


def run_controls(found: Content, controls: list[str], config: EvaluationConfig, workers: int) -> Content:
    """An evaluation of the controls alone."""
    wanted = contenders_of(found, controls, config)
    everyone = [one for group in wanted.values() for one in group]
    with (
        progress_bar("evaluating", len(everyone) * config.hosts) as advance,
        run_with(workers) as run_all,
    ):
        done = iter(run_contenders(everyone, run_all, advance, workers=workers))
    results = {name: [next(done) for _ in group] for name, group in wanted.items()}
    kinds = kinds_of_hosts(config, results)
    compared = TaskComparison(config, results, [], {}, kinds)
    command = f"python benchmarks/late_controls.py EVALUATION.json --controls {' '.join(controls)}"
    return {**compared.to_json(), "provenance": made_with(command)}


def main() -> None:
    """Run the controls, join them with the file, write another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("--controls", nargs="+", choices=[ORACLE, *CONTROLS], default=[ORACLE, *CONTROLS])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = json.loads(arguments.evaluation.read_text())
    config = EvaluationConfig(
        found["task"], found["hosts"], found["seed"], final=found["final"], data_dir=arguments.data_dir
    )
    joined = join(found, run_controls(found, arguments.controls, config, arguments.workers))
    replace_file(arguments.out.resolve(), json.dumps(joined, indent=1, allow_nan=False) + "\n")
    print(f"{len(joined['policies'])} policies, {len(joined['differences'])} differences: {arguments.out}")


if __name__ == "__main__":
    main()
