"""docs/metrics.md: the catalogue of metrics as a page.

python benchmarks/metrics_page.py > docs/metrics.md
"""

from esper.nissa.catalogue import SECTIONS

INTRODUCTION = """\
# Metrics

A run logs dozens of numbers per round. This page says what each of them means, in which unit, and
which values are healthy. `python benchmarks/metrics_page.py > docs/metrics.md` writes the page.

For example, the line `{"round": 3, "objective": 12.5, "reward": {"gain": 14.1}}` of `metrics.jsonl`
has the metrics `objective` and `reward/gain` of round 3. TensorBoard and W&B show the same names. A
number that was not measured is missing, never 0. One that is not finite is a word: `"nan"`,
`"inf"`, `"-inf"`.

A healthy range ends where an [alarm](telemetry.md) begins, if there is one. A number out of range
is a reason to look, not a verdict; `esper train --console` prints it in yellow. Points are
percentage points of accuracy.
"""
REMARKS = {
    "Growth": "Over all hosts of the round. With several tasks, each has its own under `tasks/<task>/`. Parts of\n"
    "the reward are summed over an episode and averaged over hosts. A run has the parts of its family.",
    "Heads": "One of each per head of the preset. Entropy, KL and clip fraction are missing if no step gave the\n"
    "head a choice.",
    "Round and machine": "Metrics of the hub exist only in runs with sinks.",
    "In sinks only": "In the log, alarms are events.",
}


def page() -> str:
    """The catalogue as a page of markdown."""
    parts = [INTRODUCTION]
    for title, metrics in SECTIONS.items():
        remark = f"\n{REMARKS[title]}\n" if title in REMARKS else ""
        rows = "\n".join(f"| `{each.name}` | {each.unit} | {each.meaning} | {each.healthy} |" for each in metrics)
        parts.append(f"## {title}\n{remark}\n| metric | unit | meaning | healthy |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
