"""The results of growth as a page, from their JSON files: `python benchmarks/results_page.py > docs/results.md`.

`--refresh` first computes all differences in these files again, from the rows that they hold: for a change of the
statistics, which needs no new evaluation.
"""

import argparse
import json
import re
import statistics
import textwrap
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

A learned controller costs training; a rule costs a search at most. This page compares them on hosts
that no policy was trained or searched on. It also shows what each part of the learner is worth,
whether gains last, and how fast training is.

*`python benchmarks/results_page.py > docs/results.md` makes this page from `benchmarks/results`.*

## In short

Each learned policy, and the rule that was best on the same hosts:
"""

READING = """
## How to read the tables

- **Objective.** The gain over a control that begins alike and never grows, in points of accuracy,
  minus the rent of the parameters kept. The range in brackets is over training seeds.
- **learned − policy.** The difference of objectives, with its 95 % interval. Training seeds and
  hosts are both samples, and all seeds of a policy meet the same hosts. So the interval comes from
  crossed random effects, seeds × hosts. With a single training seed it is over hosts alone.
- **boot.** The interval of a bootstrap over seeds and hosts.
- **superior** means a Holm-adjusted p below 0.05. **not worse** means a lower end above −1 point.
  With fewer than five training seeds neither word is used.
  `python benchmarks/crossed_statistics.py` simulates how often such verdicts are wrong.
- **greedy.** The objective with the likeliest actions. Otherwise learned policies sample their
  actions, as they were trained to.
- **cost.** All work of an episode, in units of the host's own training.
- **oracle** and **retrained** are no controllers: they know from the first minibatch what to grow.
"""

LIMITS = """
## Limits

- Policies with one training seed (`cifar0`, `both0`) are reports: another seed may do otherwise.
- A policy that was scored on test images before is no longer a first look; *Warned* marks it.
- Ablations have three seeds and use validation images. They make no claims.
- Speed was measured on one machine, named in its heading.
"""

HEADINGS = {
    "evaluation_cifar_baseline_taught": "cifar_baseline: taught with 264 episodes",
    "evaluation_digits_blind_first": "digits_blind: the first recipe",
    "evaluation_digits_blind_few": "digits_blind: taught with 420 episodes",
    "evaluation_digits_blind_taught": "digits_blind: taught with 840 episodes",
    "evaluation_digits_varied_sensing": "digits_varied: without probes",
    "evaluation_digits_varied_taught": "digits_varied: taught with 300 episodes",
    "evaluation_digits_varied_ppo": "digits_varied: taught, then PPO",
}
"""By file: the heading of its section, where the task does not tell it from another."""

NOTES = {
    "evaluation_cifar_baseline": (
        "`cifar0` was trained for 13 rounds of 128 hosts (1,248 episodes). `both0` was trained on digits_varied and "
        "fashion_small, for 16 rounds of 64 hosts, and never here. `cifar_plan.json` is the schedule that is shipped, "
        "searched with 256 episodes."
    ),
    "evaluation_cifar_baseline_taught": (
        "`taught` are five controllers, each with a search of its own of 264 episodes ([teaching](teaching.md)), and "
        "no PPO. `plan` and `model` are schedules: five searches by halving with 176 episodes each, and five by a "
        "model with 88. `schedule` is shipped, and had 256. The margin is 0.4 points. All policies act under preset "
        "`commit`. Hosts that wait differ from their controls by rounding alone.\n\n"
        "The warnings are about a rehearsal of the command on two hosts. It was stopped before it printed a figure."
    ),
    "evaluation_digits_blind": (
        "Each run had 6,528 episodes on a GPU, in two stages ([controllers](controllers.md)). So had the search for "
        "the schedule; it found the plan that a search of 624 episodes had found. The search for the heuristic had "
        "624.\n\n"
        "The first stages had been scored on test images once, on other hosts (see *The gain lasts*). Nothing was "
        "chosen by that."
    ),
    "evaluation_digits_blind_first": (
        "This was the first look at test images, with runs of 12 rounds of 32 hosts (288 episodes). They were worse "
        "than the schedule. The recipe was then changed on validation hosts, and scored once on other final hosts: "
        "see *digits_blind*."
    ),
    "evaluation_digits_blind_few": (
        "`taught` are five controllers, each with a search of its own of 420 episodes ([teaching](teaching.md)); `run` "
        "are the same after 5 rounds of PPO (560 episodes in all). `plan` are schedules that were searched by halving "
        "with 240 episodes each. `schedule` is shipped, and had 6,528. All hosts are alike here, so a fixed plan is "
        "hard to beat; the taught controllers lose 0.6 points to the shipped one. After this result objectives could "
        "be pooled over hosts, and twice the episodes were scored once on other hosts: see *digits_blind: taught with "
        "840 episodes*."
    ),
    "evaluation_digits_blind_taught": (
        "`taught` are five controllers, each with a search of its own of 840 episodes ([teaching](teaching.md)); `run` "
        "are the same after 5 rounds of PPO (980 episodes in all). `plan` are schedules that were searched with 840 "
        "episodes each. `schedule` is shipped, and had 6,528. All policies act under preset `commit`."
    ),
    "gain_lasts_digits_blind": (
        "`blind_z` are first stages of `blind` ([controllers](controllers.md)): 32 rounds of 128 hosts at rent 4."
    ),
    "evaluation_digits_varied": (
        "Each run had 1,152 episodes, as many as the searches for the schedule and for the heuristic."
    ),
    "evaluation_digits_varied_sensing": "`blunt` was trained like `varied`, with `--no-sensing`.",
    "evaluation_digits_varied_taught": (
        "`taught` are five controllers, each with a search of its own of 300 episodes ([teaching](teaching.md)); `ppo` "
        "are the same after 30 rounds of PPO (1,140 episodes in all), at a rate of 0.001 and with a leash of 0.3 until "
        "half of the run. `plan` and `halved` are schedules that were searched with 300 episodes each, by a model and "
        "by halving; `told` had 160 episodes per kind of host. All policies act under preset `commit`.\n\n"
        "PPO did not help: one of the five runs lost 3.8 points. Because of this result, steps were made smaller and "
        "the leash stronger, and scored once on other hosts: see *digits_varied: taught, then PPO*."
    ),
    "evaluation_digits_varied_ppo": (
        "`taught` are five controllers, each with a search of its own of 300 episodes ([teaching](teaching.md)); `run` "
        "are the same after 30 rounds of PPO (1,140 episodes in all), at a rate of 0.0003 and with a leash of 1. "
        "`plan` are schedules that were searched with 300 episodes each; `told` is shipped, and had 300 episodes per "
        "kind of host. All policies act under preset `commit`."
    ),
}
"""By file: what its figures do not say."""

WIDTH = 100
RULES = ("schedule", "heuristic", "random", "random-commit", "wait")

Content = dict[str, Any]  # Any: what JSON holds


def short_name(spec: str) -> str:
    """A policy without its folders."""
    return PolicySpec.parse(spec).short


def page(folder: Path = RESULTS) -> str:
    """The whole page, in markdown."""
    files = [(render, path) for name, render in SECTIONS.items() for path in sorted(folder.glob(f"{name}_*.json"))]
    contents = {path.stem: json.loads(path.read_text()) for _, path in files}
    evaluations = {_heading(stem, found): found for stem, found in contents.items() if stem.startswith("evaluation_")}
    parts = [INTRODUCTION, summary(evaluations), READING]
    for render, path in files:
        found = contents[path.stem]
        parts.append(f"\n## {_heading(path.stem, found)}\n\n{render(found)}")
        parts += [f"\n{_wrap(note)}\n" for note in NOTES.get(path.stem, "").split("\n\n") if note]
    return "".join([*parts, LIMITS])


def _heading(stem: str, found: Content) -> str:
    if stem.startswith("loop_throughput"):
        return f"Throughput: {found['task']}, {found['hosts']} hosts, {found.get('machine', {}).get('gpu')}"
    kind = stem.removesuffix(f"_{found['task']}")
    titles = {
        "ablations": f"Ablations: {found['task']}",
        "audited_credit": f"Audited credit: {found['task']}",
        "gain_lasts": f"The gain lasts: {found['task']}",
    }
    return HEADINGS.get(stem) or titles.get(kind) or str(found["task"])


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _command(text: str) -> str:
    """A command as a code block. Long ones continue after a backslash, also within a word, and can still be pasted."""
    lines = [""]
    for piece in re.findall(r"[^ ,+]+[,+]? ?", text):
        if len(lines[-1]) + len(piece.rstrip()) > WIDTH - 2:
            between_words = lines[-1].endswith(" ")
            lines[-1] += "\\"
            lines.append("  " if between_words else "")
        lines[-1] += piece
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _made(provenance: Content, lead: str = "Made by") -> str:
    """The command, and where it ran."""
    machine = provenance["machine"]["accelerator"] or f"{provenance['machine']['cores']} CPU cores"
    return _wrap(f"{lead} ({machine}, torch {provenance['torch']}):") + "\n\n" + _command(provenance["command"])


def summary(evaluations: Content) -> str:
    """Each learned policy against the best rule on the same hosts, by heading of its section."""
    rows = []
    for heading, found in evaluations.items():
        means = {name: statistics.fmean(each["objective"]) for name, each in found["policies"].items()}
        best = max((name for name in means if name.split(":")[0] in RULES), key=means.__getitem__, default="")
        for one in found["differences"]:
            if one["against"] == best:
                policy = one["policy"]
                cells = [short_name(policy), f"{means[policy]:+.2f}", short_name(best), _difference(one)]
                rows.append([heading, *cells])
    return "\n" + _table(["section", "learned", "objective", "best rule", "learned − best rule"], rows) + "\n"


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
    header += [f"{short_name(policy)} − policy" for policy in compared]
    task = get_task(found["task"])
    images = task.steps * task.batches_per_step * task.batch
    scored = "test images" if found["final"] else "validation images"
    shape = f"An episode trains {images:,} images in {task.steps} steps of {task.batches_per_step} minibatches."
    text = [_wrap(f"{found['hosts']} unseen hosts, {scored}. {shape}"), "", _table(header, rows), ""]
    for policy in compared:
        for yardstick, name in (("oracle", "the oracle's"), ("told", "told's")):
            share = policies[policy].get(f"share_of_{yardstick}")
            if share is not None:
                text.append(f"{short_name(policy)} reaches {100 * share:.0f} % of {name} objective.\n")
    if any(each.get("by_kind") for each in policies.values()):
        text += [_kinds(policies), ""]
    text.append(_made(found["provenance"]))
    for later in found.get("joined", []):
        names = ", ".join(short_name(name) for name in later["policies"])
        text.append(_made(later["provenance"], f"Run later, on the same hosts: {names}"))
    return "\n".join([*text, *_warned(found)])


def _warned(found: Content) -> list[str]:
    warnings = found.get("warnings", [])
    more = f" (and {len(warnings) - 1} more like it)" if len(warnings) > 1 else ""
    return [_wrap(f"Warned: {warning}{more}.".replace(": its ", ". Its ")) + "\n" for warning in warnings[:1]]


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
    text = f"Mean ± standard deviation over {found['seeds']} seeds, {found['unseen']} unseen hosts, validation images. "
    text += f"Each run has {found['rounds']} rounds of {found['hosts']} hosts and changes one thing."
    command = f"python benchmarks/ablations.py --rounds {found['rounds']} --hosts {found['hosts']} "
    command += f"--unseen {found['unseen']} --seeds {found['seeds']}"
    table = _table(["variant", "objective", "accuracy %", "added parameters"], rows)
    return f"{_wrap(text)}\n\n{table}\n\nMade by:\n\n{_command(command)}"


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):,.1f} ± {statistics.stdev(values):,.1f}"


def audited_credit(found: Content) -> str:
    """What a contribution is worth as a forecast."""
    rows = [
        [name, str(each["seeds"]), f"{each['rho']:.2f} ({each['low']:.2f} to {each['high']:.2f})"]
        for name, each in found["spearman"].items()
    ]
    live = max(each["seeds"] for each in found["spearman"].values())
    text = (
        "Does the contribution of a seed predict what the host would lose without it? The contribution is measured on "
        "one half of the validation images. For the truth, twins from one snapshot train on for five steps, one of "
        "them with the seed cut. They are compared on the other half of the images."
    )
    table = _table(["by", "live seeds", "Spearman's rank correlation (95 % interval)"], rows)
    command = _command(f"python benchmarks/audited_credit.py --live {live}")
    return f"{_wrap(text)}\n\n{table}\n\nMade by:\n\n{command}"


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
    text = (
        f"{found['hosts']} unseen hosts, {scored}. Hardened hosts train on for {found['steps']} more steps at their "
        "final rate, and so do their controls. *Later* is after these steps. The last two columns compare with a host "
        "that never grows and trains with equal compute."
    )
    header = ["policy", "seeds", "gain", "later", "share kept", "over equal compute", "over equal compute, later"]
    command = f"python benchmarks/gain_lasts.py --policies {specs} --hosts {found['hosts']} --seed {found['seed']}"
    made = _command(command + (" --final" if found["final"] else ""))
    warned = "".join(f"\n{warning}" for warning in _warned(found))
    return f"{_wrap(text)}\n\n{_table(header, rows)}\n\nMade by:\n\n{made}{warned}"


def _points(difference: Content) -> str:
    return f"{difference['mean']:+.1f} ({difference['low']:+.1f} to {difference['high']:+.1f})"


def loop_throughput(found: Content) -> str:
    """The whole loop on a GPU."""
    seconds = sum(found["phases"].values())
    rows = [
        [name, f"{value:.2f}", f"{100 * value / seconds:.1f}"]
        for name, value in sorted(found["phases"].items(), key=lambda item: -item[1])
    ]
    figures = [
        ["trained images/s of main rows, everything included", f"{found['images_per_second'] / 1e6:.2f} M"],
        ["episodes/hour", f"{found['episodes_per_hour']:,.0f}"],
    ]
    phases = _table(["phase", "seconds per round", "share %"], rows)
    hosts, rounds = found["hosts"], len(found["seconds_per_round"])
    command = f"python benchmarks/loop_throughput.py --device cuda --hosts {hosts} --rounds {rounds} "
    made = _command(f"{command}--warm {found['warm']}")
    return f"The whole loop.\n\n{_table(['figure', 'value'], figures)}\n\n{phases}\n\nMade by:\n\n{made}"


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
