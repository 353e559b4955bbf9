"""Policies of a later evaluation beside those of an earlier one, on the same hosts.

    python benchmarks/join_evaluations.py EARLIER.json LATER.json --replace schedule --out JOINED.json

What both ran has to be equal to the last digit, at least one policy, or the hosts or the arithmetic are others and
nothing is paired. A policy that is meant to differ (a schedule that was searched anew) is named in `--replace`.
"""

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.leyline import BadValueError
from esper.simic.evaluation.policies import ORACLE, TOLD, PolicySpec
from esper.simic.evaluation.statistics import MARGIN, compare_rows
from esper.storage.files import replace_file

Content = dict[str, Any]  # Any: what JSON holds
HOSTS = ("task", "hosts", "seed", "final")
"""What says which hosts an evaluation took, and which images."""


def join(earlier: Content, later: Content, replaced: Collection[str] = ()) -> Content:
    """The policies of both, in their order, and all differences anew."""
    for name in HOSTS:
        if earlier[name] != later[name]:
            raise BadValueError(f"{name} {earlier[name]!r} and {later[name]!r}: evaluations of different hosts")
    before, now = earlier["policies"], later["policies"]
    for name in replaced:
        if name not in before or name not in now:
            raise BadValueError(f"{name!r} cannot be replaced: it is not in both, {list(before)} and {list(now)}")
    shared = [name for name in before if name in now and name not in replaced]
    if not shared:
        raise BadValueError("no policy is in both, so nothing shows that hosts are alike; run `wait` again too")
    for name in shared:
        if before[name]["by_seed"] != now[name]["by_seed"]:
            raise BadValueError(
                f"{name!r} is not the same in both: other hosts, another machine, or another policy of that name, "
                f"which then has to be in --replace"
            )
    margins = {one["margin"] for found in (earlier, later) for one in found["differences"]} or {MARGIN}
    if len(margins) > 1:
        raise BadValueError(f"margins {sorted(margins)}: give both evaluations the same --margin")
    policies = {**before, **{name: each for name, each in now.items() if name not in shared}}
    return {
        **earlier,
        "policies": {name: _with_shares(each, policies) for name, each in policies.items()},
        "differences": [asdict(one) for one in compare_rows(_objectives(policies), *margins)],
        "warnings": list(dict.fromkeys([*earlier["warnings"], *later["warnings"]])),
        "joined": [
            *earlier.get("joined", []),
            {"policies": [name for name in now if name not in shared], "provenance": later["provenance"]},
        ],
    }


def _objectives(policies: Content) -> dict[str, list[list[float]]]:
    return {name: [seed["objective"] for seed in each["by_seed"]] for name, each in policies.items()}


def _with_shares(policy: Content, policies: Content) -> Content:
    """A policy that came without a yardstick has no share of it yet."""
    shares = {}
    for kind in (ORACLE, TOLD):
        yardstick = next((each for name, each in policies.items() if PolicySpec.parse(name).kind == kind), None)
        best = fmean(yardstick["objective"]) if yardstick is not None else 0.0
        shares[f"share_of_{kind}"] = fmean(policy["objective"]) / best if best > 0 else None
    return {**policy, **shares}


def main() -> None:
    """Join two files, write a third."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", type=Path)
    parser.add_argument("later", type=Path)
    parser.add_argument(
        "--replace", nargs="+", default=[], help="policies whose later rows take the earlier ones' place"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    earlier, later = (json.loads(path.read_text()) for path in (arguments.earlier, arguments.later))
    joined = join(earlier, later, arguments.replace)
    replace_file(arguments.out.resolve(), json.dumps(joined, indent=1, allow_nan=False) + "\n")
    print(f"{len(joined['policies'])} policies, {len(joined['differences'])} differences: {arguments.out}")


if __name__ == "__main__":
    main()
