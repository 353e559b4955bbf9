"""The results of growth as a page, from their JSON files: `python benchmarks/results_page.py > docs/results.md`.

`--refresh` first computes all differences in these files again, from the rows that they hold: for a change of the
statistics, which needs no new evaluation.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import RESULTS

from esper.simic.evaluation.policies import PolicySpec
from esper.simic.evaluation.statistics import compare, compare_rows
from esper.storage.files import replace_file
from esper.tolaria import get_task

INTRODUCTION = """\
# Results: is a learned controller worth having?

*Made from `benchmarks/results` by `python benchmarks/results_page.py > docs/results.md`; measure again there.*

Evaluations take hosts that no policy was trained or searched on. The *objective* is the gain in points of accuracy
over a control that begins alike and never grows, minus the rent of the parameters kept. Training seeds and hosts are
both samples, and all seeds of a policy meet the same hosts. So the 95 % interval in brackets comes from crossed random
effects, seeds × hosts; with a single training seed it is over hosts alone. *Superior* is a Holm-adjusted p below 0.05,
*not worse* a lower end above −1 point; with fewer than five training seeds neither word is used. After *boot* stands
the interval of a bootstrap over seeds and hosts. Learned policies sample their actions, as they were trained to;
*greedy* is the objective with the likeliest ones. How often such verdicts are wrong is simulated by
`python benchmarks/crossed_statistics.py`.
"""

NOTES = {
    "evaluation_cifar_baseline": """
`cifar0`: 13 rounds of 128 hosts. `both0`: digits_varied and fashion_small, 16 rounds of 64 hosts, never trained here.
`cifar_plan.json` is the schedule that is shipped, searched with 256 episodes; the learner has had 1,248.
""",
    "evaluation_digits_blind": """
Each run has had 6,528 episodes on a GPU (two stages, docs/controllers.md), and so has the search for the schedule,
which finds the plan again that one of 624 had found; that for the heuristic had 624.
The first stages had been scored on test images once, on other hosts (the gain lasts); nothing was chosen by that.
""",
    "evaluation_digits_blind_first": """
The first look at test images, with runs of 12 rounds of 32 hosts (288 episodes): worse than the schedule. The recipe
was then changed on validation hosts, and looked at once, on other final hosts: above.
""",
    "gain_lasts_digits_blind": """
`blind_z` are first stages of `blind` (docs/controllers.md): 32 rounds of 128 hosts at rent 4.
""",
    "evaluation_digits_varied": """
Each run has had 1,152 episodes, as many as the searches for the schedule and for the heuristic.
`oracle` and `retrained` are no controllers: they know from the first minibatch what to grow.
""",
}
"""By file: what its figures do not say."""

Content = dict[str, Any]  # Any: what JSON holds


def short_name(spec: str) -> str:
    """A policy without its folders."""
    return PolicySpec.parse(spec).short


def page(folder: Path = RESULTS) -> str:
    """Everything that is there, in markdown."""
    files = [(render, path) for name, render in SECTIONS.items() for path in sorted(folder.glob(f"{name}_*.json"))]
    parts = [render(json.loads(path.read_text())) + NOTES.get(path.stem, "") for render, path in files]
    return "\n".join([INTRODUCTION, *parts])


def refresh(folder: Path = RESULTS) -> list[Path]:
    """Write all files anew whose differences are others by today's statistics; returns them."""
    changed = []
    for name, recompute in RECOMPUTED.items():
        for path in sorted(folder.glob(f"{name}_*.json")):
            found = json.loads(path.read_text())
            now = recompute(found)
            if now != found:
                replace_file(path, json.dumps(now, indent=1, allow_nan=False) + "\n")
                changed.append(path)
    return changed


def evaluation_anew(found: Content) -> Content:
    """An evaluation with its differences from the objectives of its seeds and hosts."""
    rows = {name: [seed["objective"] for seed in each["by_seed"]] for name, each in found["policies"].items()}
    (margin,) = {one["margin"] for one in found["differences"]}
    return {**found, "differences": [asdict(one) for one in compare_rows(rows, margin)]}


def gain_lasts_anew(found: Content) -> Content:
    """The same for what policies have over hosts of equal compute."""
    policies = {}
    for name, each in found["policies"].items():
        columns = {key: [seed[key] for seed in each["by_seed"]] for key in each["by_seed"][0]}
        now = compare(columns["grown"], columns["compute"], paired=True)
        later = compare(columns["grown_later"], columns["compute_later"], paired=True)
        figures = {**each["figures"], "over_compute": asdict(now), "over_compute_later": asdict(later)}
        policies[name] = {**each, "figures": figures}
    return {**found, "policies": policies}


RECOMPUTED = {"evaluation": evaluation_anew, "gain_lasts": gain_lasts_anew}


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), ["---"] * len(list(header)), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def evaluation(found: Content) -> str:
    """One task: all policies, what learned ones have over the others, and kinds of hosts."""
    policies: Content = found["policies"]
    against = {(one["policy"], one["against"]): one for one in found["differences"]}
    compared = list(dict.fromkeys(policy for policy, _ in against))
    rows = []
    for spec, each in policies.items():
        by_seed = [statistics.fmean(seed["objective"]) for seed in each["by_seed"]]
        figures = [statistics.fmean(each[name]) for name in ("objective", "accuracy", "added_params")]
        cost = f"{statistics.fmean(each['cost']):.1f}×" if each["cost"] else ""  # an oracle's hindsight has none
        spread = f" ({min(by_seed):+.1f} to {max(by_seed):+.1f})" if len(by_seed) > 1 else ""
        greedy = f"{statistics.fmean(each['greedy']['objective']):+.2f}" if each.get("greedy") else ""
        cells = [f"{figures[0]:+.2f}{spread}", greedy, f"{figures[1]:.1f}", f"{figures[2]:,.0f}", cost]
        rows.append([short_name(spec), *cells, *(_difference(against.get((policy, spec))) for policy in compared)])
    header = ["policy", "objective", "greedy", "accuracy %", "added parameters", "cost"]
    header += [f"{short_name(policy)} − it" for policy in compared]
    scored = "test images" if found["final"] else "validation images"
    heading = f"## {found['task']}: {', '.join(map(short_name, compared))} on {found['hosts']} unseen hosts, {scored}\n"
    text = [heading, _table(header, rows), ""]
    for policy in compared:
        share = policies[policy].get("share_of_oracle")
        if share is not None:
            text.append(f"{short_name(policy)} reaches {100 * share:.0f} % of the oracle's objective.\n")
    if any(each.get("by_kind") for each in policies.values()):
        text += [_kinds(policies), ""]
    task = get_task(found["task"])
    images = task.steps * task.batches_per_step * task.batch
    text.append(
        f"An episode trains {images:,} images in {task.steps} steps of {task.batches_per_step} minibatches. "
        f"{_made(found['provenance'])}.\n"
    )
    for later in found.get("joined", []):
        names = ", ".join(short_name(name) for name in later["policies"])
        text.append(f"Run later, on the same hosts: {names}. {_made(later['provenance'])}.\n")
    return "\n".join([*text, *_warned(found)])


def _made(provenance: Content) -> str:
    """The command, and where it ran."""
    machine = provenance["machine"]["accelerator"] or f"{provenance['machine']['cores']} CPU cores"
    return f"`{provenance['command']}` ({machine}, torch {provenance['torch']})"


def _warned(found: Content) -> list[str]:
    warnings = found.get("warnings", [])
    more = f" (and {len(warnings) - 1} more like it)" if len(warnings) > 1 else ""
    return [f"Warned: {warning}{more}.\n" for warning in warnings[:1]]


def _difference(one: Content | None) -> str:
    if one is None:
        return ""
    difference = one["difference"]
    verdict = "superior" if one["superior"] else "not worse" if one["not_worse"] else ""
    word = f", {verdict}" if verdict and one["enough_seeds"] else ""
    low, high, *boot = (f"{difference[name]:+.2f}" for name in ("low", "high", "bootstrap_low", "bootstrap_high"))
    return f"{difference['mean']:+.2f} ({low} to {high}; boot {' to '.join(boot)}){word}"


def _kinds(policies: Content) -> str:
    rows = []
    for spec, each in policies.items():
        for kind, part in (each.get("by_kind") or {}).items():
            right = part["right_slot_share"]
            rows.append(
                [
                    short_name(spec), kind.replace("_", " "), str(part["hosts"]), f"{part['objective']:+.2f}",
                    f"{part['gain']:+.2f}", f"{100 * part['added_share']:.1f}", f"{part['commits']:.2f}",
                    "" if right is None else f"{100 * right:.0f} % in {part['right_slot']}",
                ]
            )  # fmt: skip
    return _table(
        ["policy", "kind of host", "hosts", "objective", "gain", "parameters added %", "commits", "in the right slot"],
        rows,
    )


def ablations(found: Content) -> str:
    """One thing changed at a time."""
    rows = [
        [name, *(_spread(each["by_seed"][figure]) for figure in ("objective", "accuracy", "added_params"))]
        for name, each in found["variants"].items()
    ]
    return (
        f"## Ablations: {found['task']}, {found['rounds']} rounds of {found['hosts']} hosts, {found['seeds']} seeds\n\n"
        + _table(["variant", "objective", "accuracy %", "added parameters"], rows)
        + f"\n\nMean ± deviation over seeds, {found['unseen']} unseen hosts, validation images; a report, no claims "
        f"(`python benchmarks/ablations.py --rounds {found['rounds']} --hosts {found['hosts']} --unseen "
        f"{found['unseen']} --seeds {found['seeds']}`).\n"
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):,.1f} ± {statistics.stdev(values):,.1f}"


def audited_credit(found: Content) -> str:
    """What a contribution is worth as a forecast."""
    rows = [
        [name, str(each["seeds"]), f"{each['rho']:.2f} ({each['low']:.2f} to {each['high']:.2f})"]
        for name, each in found["spearman"].items()
    ]
    live = max(each["seeds"] for each in found["spearman"].values())
    return (
        f"## Audited credit: {found['task']}\n\nContribution on one half of the validation images against the true "
        "effect of cutting the seed and training on for five steps, twins from one snapshot, on the other half "
        f"(`python benchmarks/audited_credit.py --live {live}`).\n\n"
        + _table(["by", "live seeds", "Spearman"], rows)
        + "\n"
    )


def gain_lasts(found: Content) -> str:
    """What is left of a gain when hosts train on."""
    rows = [
        [
            short_name(name), str(each["seeds"]),
            *(f"{each['figures'][when]:+.1f}" for when in ("gain", "gain_later")),
            f"{100 * each['figures']['share']:.0f} % ({100 * each['figures']['share_low']:.0f} to "
            f"{100 * each['figures']['share_high']:.0f})",
            *(_points(each["figures"][against]) for against in ("over_compute", "over_compute_later")),
        ]
        for name, each in found["policies"].items()
    ]  # fmt: skip
    scored = "test images" if found["final"] else "validation images"
    specs = " ".join(
        "+".join(f"runs/{run}" for run in name.split("+")) if "+" in name else name for name in found["policies"]
    )
    return (
        f"## The gain lasts: {found['task']}, {found['hosts']} unseen hosts, {scored}\n\n"
        f"Hardened hosts train on for {found['steps']} more steps at their final rate, and so does the control "
        f"(`python benchmarks/gain_lasts.py --policies {specs} --hosts {found['hosts']} --seed {found['seed']}"
        f"{' --final' if found['final'] else ''}`).\n\n"
        + _table(
            ["policy", "seeds", "gain", "later", "share kept", "over a wait host with equal compute", "later"], rows
        )
        + "\n"
        + "".join(f"\n{warned}" for warned in _warned(found))
    )


def _points(difference: Content) -> str:
    return f"{difference['mean']:+.1f} ({difference['low']:+.1f} to {difference['high']:+.1f})"


def loop_throughput(found: Content) -> str:
    """The whole loop on a GPU."""
    seconds = sum(found["phases"].values())
    rows = [
        [name, f"{value:.2f}", f"{100 * value / seconds:.1f}"]
        for name, value in sorted(found["phases"].items(), key=lambda item: -item[1])
    ]
    return (
        f"## Throughput: {found['task']}, {found['hosts']} hosts, {found['machine']['gpu']}\n\n"
        f"{found['images_per_second'] / 1e6:.2f} M trained images/s of main rows, everything included; "
        f"{found['episodes_per_hour']:,.0f} episodes/hour (`python benchmarks/loop_throughput.py --device cuda "
        f"--rounds {len(found['seconds_per_round'])} --warm {found['warm']}`).\n\n"
        + _table(["phase", "seconds a round", "share %"], rows)
        + "\n"
    )


SECTIONS = {
    "evaluation": evaluation,
    "ablations": ablations,
    "audited_credit": audited_credit,
    "gain_lasts": gain_lasts,
    "loop_throughput": loop_throughput,
}


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refresh", action="store_true", help="compute the stored differences again first")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
    if arguments.refresh:
        refresh(arguments.out)
    print(page(arguments.out), end="")


if __name__ == "__main__":
    main()
