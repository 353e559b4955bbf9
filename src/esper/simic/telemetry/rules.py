"""The table of alarms: severity, condition, remedy, what is read, and how many rounds it must last.

A rule yields *readings*: quantities of a round, each with a verdict. What was not measured has no reading, and neither
has a NaN, which is the subject of `numerical_fault` and `gradient_not_finite`. Default thresholds come from 465 healthy
rounds of 25 runs (docs/telemetry.md).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, NamedTuple

from esper.nissa.events import Severity
from esper.simic.agent import PPOUpdateMetrics
from esper.simic.telemetry.alarms import AlarmLimits, Reading, RoundFacts, above, below, flag
from esper.simic.telemetry.examination import JOINT

GRADIENT_LOW = 2e-3  # global gradient norm below which gradients have vanished, in units of the clip norm
HEAD_GRADIENT_LOW = 2e-6  # the same for the weights of one head that had something to learn
LSTM_SATURATED = 0.5  # share of hidden values at their bounds
LSTM_DEAD = 0.5  # share of units that are silent in every env
GERMINATIONS = 0.5  # germinations per episode below which a policy does not try to grow
LEAST_SUSPECTS = 5  # suspects below which their share means nothing


class Evidence(NamedTuple):
    """Everything that the rules read about a round."""

    metrics: PPOUpdateMetrics
    facts: RoundFacts
    limits: AlarmLimits
    drift: float | None  # factor between the gradient norm and its mean; None during the warm-up
    clip_norm: float  # norm that gradients are clipped to: the unit of their limits

    def lstm(self, figure: str) -> float | None:
        """A figure of the LSTM's health, if it was measured."""
        value: float | None = getattr(self.facts.lstm, figure, None)
        return value

    def offenders(self, kind: Literal["exploded", "vanished"]) -> str:
        """A remark on the number of joint ratios of a kind, if they were examined."""
        report = self.facts.ratios
        return "" if report is None else f"; {getattr(report, kind).get(JOINT, 0)} {kind}"


@dataclass(frozen=True)
class Rule:
    """One kind of alarm."""

    severity: Severity
    kind: str
    when: str  # the condition, with names of limits in braces
    remedy: str
    read: Callable[[Evidence], Iterable[Reading]]
    patience: int = 1  # rounds running that the condition must last

    @property
    def duration(self) -> str:
        """The patience as the end of a sentence."""
        return f", {self.patience} rounds running" if self.patience > 1 else ""


critical, warning, info = partial(Rule, "critical"), partial(Rule, "warning"), partial(Rule, "info")


def broken_metrics(evidence: Evidence) -> list[Reading]:
    """Metrics that are not finite, except gradients and exploded ratios, which have their own rules."""
    broken = []
    for name, value in evidence.metrics.flat().items():
        field = name.rpartition("/")[2]
        exploded = field == "joint_ratio_max" and value == math.inf
        gradient = field in ("pre_clip_grad_norm", "clip_factor", "grad_norm")
        if not math.isfinite(value) and not exploded and not gradient:
            broken.append(name)
    remark = f": {', '.join(broken)}" if broken else ""
    return above("number of metrics that are not finite", len(broken), 0, remark=remark)


def broken_gradients(evidence: Evidence) -> list[Reading]:
    count, report = evidence.metrics.minibatches_not_finite, evidence.facts.gradients
    modules = report.not_finite if report is not None else ()
    remark = f", in {', '.join(modules)}" if modules else ""
    return flag("number of minibatches with a gradient that is not finite", bool(count or modules), count, 0, remark)


def joint_kl(metrics: PPOUpdateMetrics) -> float:
    """The largest joint KL of a minibatch; NaN if any is."""
    return max((metrics.max_kl, metrics.approx_kl), key=lambda kl: math.inf if math.isnan(kl) else kl)


def kl_spike(evidence: Evidence) -> list[Reading]:
    """The joint KL, up to where `kl_extreme` takes over."""
    kl, limits = joint_kl(evidence.metrics), evidence.limits
    extreme = kl > limits.kl_extreme
    return [Reading("joint KL", "between", kl, limits.kl_spike)] if extreme else above("joint KL", kl, limits.kl_spike)


def entropies(evidence: Evidence) -> Iterator[Reading]:
    """Each head's own entropy, without the share ε of uniform exploration.

    Entropy is concave, so that of the mixture is at least (1 − ε) · own + ε. This gives an upper bound of `own`.
    """
    epsilon = evidence.metrics.epsilon
    for head, metrics in evidence.metrics.heads.items():
        if metrics.entropy is not None:
            own = max((metrics.entropy - epsilon) / (1 - epsilon), 0.0)  # in this order, a NaN stays a NaN
            yield from below(f"entropy of head {head}", own, evidence.limits.entropy, head)


def advantage_floor(evidence: Evidence) -> list[Reading]:
    floored, std = evidence.metrics.advantage_floored, evidence.metrics.advantage_std
    return flag("deviation of the advantages", floored, std, None, " under its floor" if floored else "")


def small_gradients(evidence: Evidence) -> Iterator[Reading]:
    """The global norm, and that of each head that had something to learn."""
    metrics, unit = evidence.metrics, evidence.clip_norm
    yield from below("gradient norm", metrics.pre_clip_grad_norm, GRADIENT_LOW * unit)
    for name, head in metrics.heads.items():
        if head.learnable_fraction > 0:
            yield from below(f"gradient norm of head {name}", head.grad_norm, HEAD_GRADIENT_LOW * unit, name)


def large_gradient(evidence: Evidence) -> list[Reading]:
    norm, limit = evidence.metrics.pre_clip_grad_norm, evidence.limits.gradient_high * evidence.clip_norm
    return above("gradient norm", norm if math.isfinite(norm) else None, limit)


def growth(evidence: Evidence, *, report_idle: bool) -> list[Reading]:
    """Commits per episode, or germinations of a policy that is idle: it neither germinates nor commits."""
    facts, limit = evidence.facts, evidence.limits.commits
    commits, births = facts.per_episode(facts.committed), facts.per_episode(facts.germinated)
    if commits is None or births is None:
        return []
    idle, quantity = births < GERMINATIONS and commits < limit, "share of episodes with a commit"
    if report_idle:
        return flag("number of seeds per episode", idle, births, GERMINATIONS)
    if idle:
        return [Reading(quantity, "between", commits, limit)]
    return below(quantity, commits, limit, remark=f", of {births:.2g} seeds per episode")


def suspects(evidence: Evidence, suspicion: str, count: int | None, worst: str) -> list[Reading]:
    """The share of acting seeds under a suspicion. A share of very few is no evidence."""
    acting, limit = evidence.facts.acting, evidence.limits.suspects
    if count is None or not acting:
        return []
    quantity = f"share of acting seeds suspected of {suspicion}"
    remark = f" ({count} of {acting}{f'; the worst is {worst}' if worst else ''})"
    if count < LEAST_SUSPECTS:
        return flag(quantity, False, count / acting, limit, remark)
    return above(quantity, count / acting, limit, remark=remark)


RULES = (
    critical(
        "numerical_fault",
        "a loss, ratio, KL, advantage, return or value is NaN or infinite",
        "check this round's rewards and observations, then return to the last good checkpoint",
        broken_metrics,
    ),
    critical(
        "gradient_not_finite",
        "a minibatch had a NaN or an infinity in its gradient and was skipped",
        "check the modules that the gradient report names; if it recurs, lower the learning rate",
        broken_gradients,
    ),
    warning(
        "ratio_exploded",
        "the joint ratio of a step exceeds {ratio_high}",
        "see the offenders in the ratio report; lower the learning rate, the epochs or the target KL",
        lambda e: above(
            "largest joint ratio", e.metrics.joint_ratio_max, e.limits.ratio_high, remark=e.offenders("exploded")
        ),
    ),
    warning(
        "ratio_vanished",
        "the joint ratio of a step falls below {ratio_low}",
        "see the offenders in the ratio report; lower the learning rate, the epochs or the target KL",
        lambda e: below(
            "smallest joint ratio", e.metrics.joint_ratio_min, e.limits.ratio_low, remark=e.offenders("vanished")
        ),
    ),
    warning(
        "kl_spike",
        "the joint KL of a minibatch exceeds {kl_spike}, up to {kl_extreme}",
        "a single spike is noise; if it recurs, lower the learning rate or the epochs",
        kl_spike,
    ),
    critical(
        "kl_extreme",
        "the joint KL of a minibatch exceeds {kl_extreme}",
        "the policy has jumped: start from the checkpoint before this round with a lower learning rate",
        lambda e: above("joint KL", joint_kl(e.metrics), e.limits.kl_extreme),
    ),
    warning(
        "entropy_collapse",
        "the normalised entropy of a head, over the steps that gave it a choice, falls below {entropy}",
        "expected if one choice is always best; otherwise raise the entropy coefficient or the logit penalty",
        entropies,
        patience=3,
    ),
    warning(
        "value_collapse",
        "the value loss exceeds {value_loss} times the returns' variance",
        "check this round for rewards of another scale; a Huber loss limits their effect",
        lambda e: above("value loss", e.metrics.value_loss, e.limits.value_loss),
    ),
    warning(
        "value_misleads",
        "the explained variance falls below {explained_variance}",
        "advantages are worse than without a critic: lower the learning rate, or check that the critic's inputs vary",
        lambda e: below(
            "explained variance",
            e.metrics.explained_variance if e.metrics.return_std > 0 else None,
            e.limits.explained_variance,
        ),
        patience=3,
    ),
    info(
        "advantage_floor",
        "advantages vary by less than their floor, the measurement error of a gain",
        "differences between episodes are noise: the policy has converged, or there is nothing to gain",
        advantage_floor,
    ),
    warning(
        "gradient_vanishing",
        f"the gradient norm falls below {GRADIENT_LOW:g} times the clip norm, or that of a head with something to "
        f"learn below {HEAD_GRADIENT_LOW:g} times",
        "check whether all advantages are 0 or a head's logits are saturated",
        small_gradients,
        patience=2,
    ),
    warning(
        "gradient_exploding",
        "the gradient norm before clipping exceeds {gradient_high} times the clip norm",
        "clipping contains it for now; check the scale of the returns and the gradient report",
        large_gradient,
    ),
    warning(
        "gradient_drift",
        "the norm of the heads' gradients before clipping differs from its exponential mean by a factor of {drift}",
        "compare rewards, observations and hosts with those of earlier rounds",
        lambda e: above("factor between the norm of the heads' gradients and its usual one", e.drift, e.limits.drift),
        patience=3,
    ),
    critical(
        "lstm_not_finite",
        "the policy's hidden state contains a NaN or an infinity",
        "return to the last good checkpoint; check this round's observations",
        lambda e: above("number of NaN and infinities in the hidden state", e.lstm("faults"), 0),
    ),
    warning(
        "lstm_extreme",
        "the cells' root mean square exceeds {lstm_rms}, or the share of saturated hidden values exceeds "
        f"{LSTM_SATURATED:g}",
        "the hidden state no longer changes: lower the learning rate, or check for observations far out of range",
        lambda e: [
            *above("root mean square of the LSTM's cells", e.lstm("cell_rms"), e.limits.lstm_rms, "cell"),
            *above("share of saturated hidden values", e.lstm("saturated_share"), LSTM_SATURATED, "hidden"),
        ],
    ),
    warning(
        "lstm_dead",
        f"the share of units that are silent in every env exceeds {LSTM_DEAD:g}",
        "check that the hidden state is passed from step to step and that observations vary",
        lambda e: above("share of silent LSTM units", e.lstm("dead_share"), LSTM_DEAD),
    ),
    warning(
        "behaviour_gap",
        "log-probabilities differ by more than {behaviour_gap} between collection and update",
        "stored observations, masks or hidden states differ from those acted on; above 0.01 the update refuses",
        lambda e: above("behaviour gap", e.metrics.behaviour_gap, e.limits.behaviour_gap),
    ),
    warning(
        "too_few_commits",
        "the share of episodes that commit a seed falls below {commits}, with "
        f"{GERMINATIONS:g} or more germinations per episode",
        "seeds germinate and none stays: check gates, contributions and rent; expected where growth cannot pay",
        lambda e: growth(e, report_idle=False),
        patience=3,
    ),
    info(
        "no_growth",
        f"fewer than {GERMINATIONS:g} seeds per episode are germinated, and hardly any is committed",
        "expected if the host needs nothing; otherwise raise exploration or lower the bias towards WAIT",
        lambda e: growth(e, report_idle=True),
        patience=3,
    ),
    warning(
        "reward_hacking",
        "the share of acting seeds that contribute far more than their hosts have gained exceeds {suspects}",
        "check whether the reward pays for contribution without a gain over the control",
        lambda e: suspects(e, "reward hacking", e.facts.hacking, e.facts.worst_hacking),
    ),
    critical(
        "ransomware",
        "the share of acting seeds that a host depends on without having gained anything exceeds {suspects}",
        "hosts depend on seeds that do not help them: pay only for the gain over the control",
        lambda e: suspects(e, "ransomware", e.facts.ransomware, e.facts.worst_ransomware),
    ),
    warning(
        "panics",
        "the governor panics more than {panics} times per episode",
        "hosts diverge: check the panics' symptoms and the hosts' learning rate",
        lambda e: above("number of panics per episode", e.facts.per_episode(e.facts.panics), e.limits.panics),
    ),
)
"""All alarms, in the order in which they are reported."""


def alarm_catalogue(limits: AlarmLimits | None = None) -> str:
    """The alarms as a markdown table: kind, severity, condition under these limits, remedy."""
    numbers = {name: f"{value:g}" for name, value in asdict(limits or AlarmLimits()).items()}
    rows = [
        f"| `{rule.kind}` | {rule.severity} | {rule.when.format(**numbers)}{rule.duration} | {rule.remedy} |"
        for rule in RULES
    ]
    return "\n".join(["| alarm | severity | when | what to do |", "|---|---|---|---|", *rows])
