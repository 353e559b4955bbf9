"""The catalogue as a page: `python -m esper.nissa.page > docs/metrics.md`."""

from esper.nissa.catalogue import SECTIONS, Metric

INTRODUCTION = """\
# Metrics: what a round is described by

*Made from `esper.nissa.catalogue` by `python -m esper.nissa.page > docs/metrics.md`; change it there.*

Every line of a run's `metrics.jsonl` is one round. Nested objects are read as paths: `{"reward": {"gain": 1}}` is
`reward/gain`. TensorBoard and W&B draw the same names. A number that was not measured is missing, never 0; one that is
not finite stands in the file as a word (`"nan"`, `"inf"`, `"-inf"`).

What is *healthy* ends where an [alarm](telemetry.md) begins, as far as there is one. Out of range is a reason to look,
not a verdict: `esper train --console` prints such figures in yellow. Points are percentage points of accuracy.
"""
REMARKS = {
    "Growth": "Over all hosts of the round. A run with several tasks has the same of each, under `tasks/<task>/`. Of "
    "the reward's parts (sums over an episode, mean over hosts) a run has those of its family.",
    "Heads": "One of each per head of the preset. Entropy, KL and clip fraction are missing in a round that gave the "
    "head no choice.",
    "Round and machine": "The hub's are there only in runs with sinks.",
    "In sinks only": "The log has alarms as events.",
}


def page() -> str:
    """All of it, in markdown."""
    parts = [INTRODUCTION]
    for title, metrics in SECTIONS.items():
        remark = f"\n{REMARKS[title]}\n" if title in REMARKS else ""
        rows = "\n".join(_row(metric) for metric in metrics)
        parts.append(f"## {title}\n{remark}\n| metric | unit | meaning | healthy |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    return f"| `{metric.name}` | {metric.unit} | {metric.meaning} | {metric.healthy} |"


if __name__ == "__main__":
    print(page(), end="")
