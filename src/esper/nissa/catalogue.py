"""Every number that a round is described by: its name, unit, meaning and healthy range. docs/metrics.md shows it.

Names are paths: a line of `metrics.jsonl` flattened with `/`. What stands in <brackets> varies: `ppo/<head>/entropy` is
one metric per head. Ranges end where an alarm begins, as far as there is one (docs/telemetry.md); being out of range is
a reason to look, no verdict.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from esper.leyline import HEAD_NAMES, LifecycleOp

CHOICES: Mapping[str, Sequence[str] | None] = MappingProxyType(
    {
        "head": HEAD_NAMES,
        "op": tuple(op.name for op in LifecycleOp),
        "slot": None,
        "blueprint": None,
        "task": None,
        "alarm": None,
        "subject": None,
    }
)
"""What may stand for a word in brackets; None: any one part of a path"""


@dataclass(frozen=True)
class Metric:
    """One number, or one for each choice of the words in brackets."""

    name: str
    unit: str
    """Empty for a pure number"""
    meaning: str
    low: float | None = None
    """The healthy range, ends included; None: no end"""
    high: float | None = None
    remark: str = ""
    """What is healthy, where numbers do not say it"""
    always: bool = True
    """Whether every round has it"""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What its full names look like."""
        parts = re.split(r"<(\w+)>", self.name)
        # Every second part was in brackets.
        return re.compile("".join(_choice(part) if place % 2 else re.escape(part) for place, part in enumerate(parts)))

    def is_healthy(self, value: float) -> bool:
        """Whether it is finite and in its range."""
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        return math.isfinite(value) and low <= value <= high

    @property
    def healthy(self) -> str:
        """In words; empty where every finite number may be."""
        if self.low is not None and self.low == self.high:
            numbers = f"{self.low:g}"
        elif self.low is not None and self.high is not None:
            numbers = f"{self.low:g} to {self.high:g}"
        else:
            ends = (("at least", self.low), ("at most", self.high))
            numbers = "".join(f"{words} {end:g}" for words, end in ends if end is not None)
        return "; ".join(part for part in (numbers, self.remark) if part)


def _choice(word: str) -> str:
    names = CHOICES[word]
    return "[^/]+" if names is None else f"(?:{'|'.join(map(re.escape, names))})"


def part(name: str, meaning: str) -> Metric:
    """Of the reward: its sum over an episode, mean over hosts."""
    return Metric(f"reward/{name}", "points", meaning, always=False)


GROWTH = (
    Metric("objective", "points", "gain of the hardened host − rent of its fossils, mean over hosts", remark="rises"),
    Metric("objective_std", "points", "standard deviation of it over hosts"),
    Metric("gain", "points", "accuracy of the hardened host − that of its control on the same images", remark="rises"),
    Metric("accuracy", "%", "accuracy of the hardened host"),
    Metric("added_parameters", "parameters", "of committed seeds, mean over hosts"),
    Metric("committed", "share", "hosts with a committed seed", low=0.05),
    Metric("panics", "count", "hosts that the governor took back", remark="under 0.1 per host"),
    part("shaping", "change of the potential; sums to 0 over an episode where γ is 1"),
    part("gain", "the hardened gain, at the end"),
    part("rent", "− rent of the fossils, at the end"),
    part("price", "− price of commits, where they have one (family paired)"),
    part("penalty", "for panics, in place of an end"),
    part("accuracy", "the hardened accuracy less rent, scaled, at the end (families sparse and minimal)"),
    part("loss", "the hardened host's loss below random guessing, at the end (family loss)"),
    part("op", "cost of interventions (families shaped and simplified)"),
    part("prune", "cost of pruning what was of use, or too early (families shaped and minimal)"),
    part("ratio", "cost of contributions that no gain explains (family shaped)"),
    part("blending", "cost of blending in what is measured to do harm (family shaped)"),
    part("indecision", "cost of seeds neither committed nor cut (family shaped)"),
    part("shock", "cost of sudden changes of alpha (family shaped)"),
)
"""Of all hosts; of a run with several tasks also of each, under `tasks/<task>/`"""

DECISIONS = (
    Metric("ops/<op>", "count", "steps in which the controller chose this op; missing: never", always=False),
    Metric(
        "germinated/<slot>/<blueprint>",
        "count",
        "seeds of this kind that were germinated there; missing: none",
        always=False,
    ),
)

UPDATE = (
    Metric("ppo/policy_loss", "", "the clipped surrogate; its size says little, a jump says something"),
    Metric("ppo/value_loss", "variances", "squared error of the critic, in units of the returns' variance", high=10),
    Metric(
        "ppo/entropy",
        "share",
        "mean of the heads' entropies; 1: fair choices among what is legal",
        remark="falls slowly",
    ),
    Metric("ppo/logit_spread", "", "how far the logits of one choice lie apart", remark="does not run away"),
    Metric("ppo/approx_kl", "nats", "KL of the joint action in the last minibatch that was looked at", high=0.18),
    Metric("ppo/max_kl", "nats", "largest KL of the joint action in any minibatch", high=0.18),
    Metric("ppo/head_kl_mean", "nats", "mean KL of the heads, by how often each decided", high=0.18),
    Metric("ppo/clip_fraction", "share", "decisions whose ratio left the clip range", remark="not much above 0.2"),
    Metric("ppo/joint_ratio_max", "", "largest ratio, new over old probability, of a joint action", high=40),
    Metric("ppo/joint_ratio_min", "", "smallest ratio of a joint action", low=0.001),
    Metric(
        "ppo/pre_clip_grad_norm",
        "",
        "largest global gradient norm before clipping, at the default clip_norm",
        low=0.001,
        high=100,
    ),
    Metric("ppo/clip_factor", "", "what clipping multiplied gradients by, mean; 1: nothing was clipped"),
    Metric("ppo/minibatches_taken", "count", "minibatches that were stepped on", low=1),
    Metric("ppo/minibatches_not_finite", "count", "minibatches skipped for a NaN or an infinity", high=0),
    Metric("ppo/epochs_run", "count", "passes over the round", low=1),
    Metric("ppo/stopped_by_kl", "0 or 1", "the KL ended the update early", remark="not in every round"),
    Metric("ppo/behaviour_gap", "nats", "largest difference of log-probs, collection against update", high=0.001),
    Metric("ppo/advantage_mean", "points", "of advantages before standardising, over steps that decided something"),
    Metric("ppo/advantage_std", "points", "standard deviation of them within tasks"),
    Metric("ppo/advantage_floored", "0 or 1", "advantages of some task vary by less than the error of a gain", high=0),
    Metric("ppo/advantage_mean_after", "", "of advantages after standardising", remark="near 0"),
    Metric("ppo/advantage_std_after", "", "standard deviation after standardising", remark="near 1, unless floored"),
    Metric("ppo/return_mean", "points", "of returns"),
    Metric("ppo/return_std", "points", "standard deviation of returns"),
    Metric("ppo/value_mean", "points", "what the critic expected", remark="near the mean of returns"),
    Metric(
        "ppo/explained_variance",
        "share",
        "of the returns that the critic foresees; 1: all, 0: their mean",
        low=-1,
        remark="rises",
    ),
    Metric("ppo/forced_fraction", "share", "steps that gave no choice at all"),
    Metric("ppo/rate", "", "learning rate"),
    Metric("ppo/entropy_coefficient", "", "weight of the entropy bonus"),
    Metric("ppo/epsilon", "share", "uniform choice mixed into the policy"),
    Metric("ppo/steps", "count", "decisions in the round", low=1),
)

HEADS = (
    Metric(
        "ppo/<head>/entropy",
        "share",
        "normalised, over the steps that used the head with a choice",
        low=0.02,
        always=False,
    ),
    Metric("ppo/<head>/kl", "nats", "KL of the head's own choice, over the same steps", high=0.18, always=False),
    Metric("ppo/<head>/clip_fraction", "share", "of its decisions", remark="not much above 0.2", always=False),
    Metric(
        "ppo/<head>/grad_norm",
        "",
        "of its own weights before clipping, mean over minibatches",
        remark="at least 1e-06 where it had something to learn",
    ),
    Metric("ppo/<head>/learnable_fraction", "share", "steps of the round that it could learn from"),
    Metric(
        "ppo/<head>/uncentred",
        "0 or 1",
        "used in too few steps for its advantages to be centred",
        remark="not in every round",
    ),
)
"""Missing where no step gave the head a choice, the last three apart"""

MACHINE = (
    Metric("round", "count", "which one, from 0"),
    Metric("timing/collect_s", "s", "all episodes of the round"),
    Metric("timing/update_s", "s", "the update of the policy"),
    Metric("timing/spans/collect", "s", "all episodes of the round"),
    Metric("timing/spans/collect/begin", "s", "of it: fresh hosts and their first measurement"),
    Metric("timing/spans/collect/observe", "s", "of it: what policies see"),
    Metric("timing/spans/collect/act", "s", "of it: decisions"),
    Metric("timing/spans/collect/step", "s", "of it: everything that a step does to hosts"),
    Metric("timing/spans/collect/step/apply", "s", "of a step: structure edits"),
    Metric("timing/spans/collect/step/train", "s", "of a step: minibatches, shadow rows included"),
    Metric("timing/spans/collect/step/validate", "s", "of a step: validation, auditions and ablations"),
    Metric("timing/spans/collect/step/govern", "s", "of a step: the governor and its snapshots"),
    Metric("timing/spans/collect/step/probe", "s", "of a step: sensing of empty slots"),
    Metric("timing/spans/collect/reward", "s", "of it: rewards"),
    Metric("timing/spans/collect/watch", "s", "of it: detectors of reward hacking, health of the memory"),
    Metric("timing/spans/update", "s", "the update of the policy"),
    Metric("timing/spans/watch", "s", "events and alarms"),
    Metric(
        "timing/hub/dropped",
        "count",
        "events that sinks were too slow for, since the process began, summed over sinks",
        high=0,
        always=False,
    ),
    Metric("timing/hub/failed", "count", "sinks that were switched off, since the process began", high=0, always=False),
)
"""The hub's are there only where a run has sinks"""

IN_SINKS = (
    Metric("alarms/<alarm>", "0 or 1", "1 in the round in which an alarm begins, 0 where it ends", always=False),
    Metric("alarms/<alarm>/<subject>", "0 or 1", "the same, of an alarm about one head", always=False),
)
"""What TensorBoard and W&B draw beside the line; the log has alarms as events"""

OF_TASKS = tuple(replace(metric, name=f"tasks/<task>/{metric.name}", always=False) for metric in GROWTH)
SECTIONS: Mapping[str, tuple[Metric, ...]] = MappingProxyType(
    {
        "Growth": GROWTH,
        "Decisions": DECISIONS,
        "Update": UPDATE,
        "Heads": HEADS,
        "Round and machine": MACHINE,
        "In sinks only": IN_SINKS,
    }
)
METRICS = (*(metric for section in SECTIONS.values() for metric in section), *OF_TASKS)


def find_metric(name: str) -> Metric | None:
    """What is known of a full name, as `ppo/slot/entropy`; None of a name that is not in the catalogue."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


INTRODUCTION = """\
# Metrics: what a round is described by

*Made from `esper.nissa.catalogue` by `python -m esper.nissa.catalogue > docs/metrics.md`; change it there.*

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
