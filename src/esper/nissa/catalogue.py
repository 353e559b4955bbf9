"""The metrics of a round: name, unit, meaning and healthy range. docs/metrics.md shows them.

Names are paths: a line of `metrics.jsonl` flattened with `/`. A word in <brackets> varies: `ppo/<head>/entropy` is one
metric per head. A healthy range ends where an alarm begins, if there is one (docs/telemetry.md).
"""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from esper.leyline import HEAD_NAMES, LifecycleOp

CHOICES = {"head": "|".join(HEAD_NAMES), "op": "|".join(op.name for op in LifecycleOp)}
"""What a word in brackets may stand for; other words stand for any part of a path."""


@dataclass(frozen=True)
class Metric:
    """One number, or one for each choice of the words in brackets."""

    name: str
    unit: str  # empty for a pure number
    meaning: str
    low: float | None = None  # lower end of the healthy range, included; None if there is none
    high: float | None = None
    remark: str = ""  # what is healthy, if a range does not say it
    always: bool = True  # whether every round has it

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the full names."""
        return re.compile(re.sub(r"<(\w+)>", lambda word: f"(?:{CHOICES.get(word[1], '[^/]+')})", self.name))

    def is_healthy(self, value: float) -> bool:
        """Whether a value is finite and in the healthy range."""
        above = self.low is None or value >= self.low
        return math.isfinite(value) and above and (self.high is None or value <= self.high)

    @property
    def healthy(self) -> str:
        """The healthy range in words; empty if every finite number is healthy."""
        low, high = self.low, self.high
        if low is not None and high is not None:
            numbers = f"{low:g} to {high:g}"
        else:
            numbers = f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else ""
        return "; ".join(part for part in (numbers, self.remark) if part)


def part(name: str, meaning: str) -> Metric:
    """A part of the reward."""
    return Metric(f"reward/{name}", "points", meaning, always=False)


GROWTH = (
    Metric("objective", "points", "gain of the hardened host − rent of its fossils, mean over hosts", remark="rises"),
    Metric("objective_std", "points", "standard deviation of the objective over hosts"),
    Metric("gain", "points", "accuracy of the hardened host − that of its control on the same images", remark="rises"),
    Metric("accuracy", "%", "accuracy of the hardened host"),
    Metric("added_parameters", "parameters", "parameters of committed seeds, mean over hosts"),
    Metric("committed", "share", "hosts with a committed seed", low=0.05),
    Metric("panics", "count", "hosts that the governor restored", remark="under 0.1 per host"),
    part("shaping", "change of the potential; sums to 0 over an episode if γ is 1"),
    part("gain", "hardened gain, at the end"),
    part("rent", "− rent of the fossils, at the end"),
    part("price", "− price of commits, if they have one (family paired)"),
    part("penalty", "penalty of panics, instead of an end"),
    part("accuracy", "hardened accuracy − rent, scaled, at the end (families sparse and minimal)"),
    part("loss", "loss of the hardened host below random guessing, at the end (family loss)"),
    part("op", "cost of interventions (families shaped and simplified)"),
    part("prune", "cost of pruning useful or young seeds (families shaped and minimal)"),
    part("ratio", "cost of contributions that no gain explains (family shaped)"),
    part("blending", "cost of blending in harmful seeds (family shaped)"),
    part("indecision", "cost of seeds neither committed nor pruned (family shaped)"),
    part("shock", "cost of sudden changes of alpha (family shaped)"),
)
DECISIONS = (
    Metric("ops/<op>", "count", "steps in which the controller chose this op; missing if never", always=False),
    Metric("germinated/<slot>/<blueprint>", "count", "germinations of a blueprint; missing if none", always=False),
)
UPDATE = (
    Metric("ppo/policy_loss", "", "clipped surrogate loss; only jumps matter"),
    Metric("ppo/value_loss", "variances", "squared error of the critic, in units of the returns' variance", high=10),
    Metric("ppo/entropy", "share", "mean normalised entropy of the heads; 1 is uniform", remark="falls slowly"),
    Metric("ppo/logit_spread", "", "spread of the logits of one choice", remark="does not run away"),
    Metric("ppo/approx_kl", "nats", "KL of the joint action in the last minibatch that was examined", high=0.18),
    Metric("ppo/max_kl", "nats", "largest KL of the joint action in any minibatch", high=0.18),
    Metric("ppo/head_kl_mean", "nats", "mean KL of the heads, weighted by how often each decided", high=0.18),
    Metric("ppo/clip_fraction", "share", "decisions whose ratio left the clip range", remark="not much above 0.2"),
    Metric("ppo/joint_ratio_max", "", "largest ratio, new over old probability, of a joint action", high=40),
    Metric("ppo/joint_ratio_min", "", "smallest ratio of a joint action", low=0.001),
    Metric("ppo/pre_clip_grad_norm", "", "largest gradient norm before clipping (default clip_norm)", 0.001, 100),
    Metric("ppo/clip_factor", "", "mean factor by which clipping scaled gradients; 1 if nothing was clipped"),
    Metric("ppo/minibatches_taken", "count", "minibatches with an optimiser step", low=1),
    Metric("ppo/minibatches_not_finite", "count", "minibatches skipped because of a NaN or an infinity", high=0),
    Metric("ppo/epochs_run", "count", "passes over the round", low=1),
    Metric("ppo/stopped_by_kl", "0 or 1", "whether the KL ended the update early", remark="not in every round"),
    Metric("ppo/behaviour_gap", "nats", "largest difference of log-probs, collection against update", high=0.001),
    Metric("ppo/advantage_mean", "points", "mean advantage before standardising, over steps with a choice"),
    Metric("ppo/advantage_std", "points", "standard deviation of advantages within tasks"),
    Metric("ppo/advantage_floored", "0 or 1", "advantages of a task vary by less than the error of a gain", high=0),
    Metric("ppo/advantage_mean_after", "", "mean advantage after standardising", remark="near 0"),
    Metric("ppo/advantage_std_after", "", "standard deviation after standardising", remark="near 1, unless floored"),
    Metric("ppo/return_mean", "points", "mean return"),
    Metric("ppo/return_std", "points", "standard deviation of returns"),
    Metric("ppo/value_mean", "points", "mean value of the critic", remark="near the mean return"),
    Metric("ppo/explained_variance", "share", "variance of returns that the critic explains", low=-1, remark="rises"),
    Metric("ppo/forced_fraction", "share", "forced steps"),
    Metric("ppo/rate", "", "learning rate"),
    Metric("ppo/entropy_coefficient", "", "weight of the entropy bonus"),
    Metric("ppo/epsilon", "share", "uniform exploration mixed into the policy"),
    Metric("ppo/steps", "count", "decisions in the round", low=1),
)
HEADS = (
    Metric("ppo/<head>/entropy", "share", "normalised entropy over steps with a choice", low=0.02, always=False),
    Metric("ppo/<head>/kl", "nats", "KL of the head, over the same steps", high=0.18, always=False),
    Metric("ppo/<head>/clip_fraction", "share", "of its decisions", remark="not much above 0.2", always=False),
    Metric("ppo/<head>/grad_norm", "", "mean norm before clipping", remark="at least 1e-06 if it could learn"),
    Metric("ppo/<head>/learnable_fraction", "share", "steps that it could learn from"),
    Metric("ppo/<head>/uncentred", "0 or 1", "too few steps to centre its advantages", remark="not in every round"),
)
MACHINE = (
    Metric("round", "count", "number of the round, from 0"),
    Metric("timing/collect_s", "s", "all episodes of the round"),
    Metric("timing/update_s", "s", "the update of the policy"),
    Metric("timing/spans/collect", "s", "all episodes of the round"),
    Metric("timing/spans/collect/begin", "s", "fresh hosts and their first measurement"),
    Metric("timing/spans/collect/observe", "s", "observations"),
    Metric("timing/spans/collect/act", "s", "decisions"),
    Metric("timing/spans/collect/step", "s", "everything that a step does to hosts"),
    Metric("timing/spans/collect/step/apply", "s", "structural changes"),
    Metric("timing/spans/collect/step/train", "s", "minibatches, including shadow rows"),
    Metric("timing/spans/collect/step/validate", "s", "validation, auditions and ablations"),
    Metric("timing/spans/collect/step/govern", "s", "the governor and its snapshots"),
    Metric("timing/spans/collect/step/probe", "s", "probes of empty slots"),
    Metric("timing/spans/collect/reward", "s", "rewards"),
    Metric("timing/spans/collect/watch", "s", "detectors of reward hacking, health of the LSTM"),
    Metric("timing/spans/update", "s", "the update of the policy"),
    Metric("timing/spans/watch", "s", "events and alarms"),
    Metric("timing/hub/dropped", "count", "events that sinks missed in this process", high=0, always=False),
    Metric("timing/hub/failed", "count", "sinks switched off in this process", high=0, always=False),
)
IN_SINKS = (
    Metric("alarms/<alarm>", "0 or 1", "1 in the round in which an alarm begins, 0 in which it ends", always=False),
    Metric("alarms/<alarm>/<subject>", "0 or 1", "the same for an alarm about a head or the LSTM", always=False),
)

SECTIONS = {
    "Growth": GROWTH,
    "Decisions": DECISIONS,
    "Update": UPDATE,
    "Heads": HEADS,
    "Round and machine": MACHINE,
    "In sinks only": IN_SINKS,
}
METRICS = (
    *(metric for section in SECTIONS.values() for metric in section),
    *(replace(metric, name=f"tasks/<task>/{metric.name}", always=False) for metric in GROWTH),
)


def find_metric(name: str) -> Metric | None:
    """The metric of a full name such as `ppo/slot/entropy`; None if the catalogue lacks it."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)
