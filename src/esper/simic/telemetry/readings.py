"""What each rule reads: quantities of a round against their limits.

A number that is not finite belongs to `read_numbers` or `read_broken_gradients` alone; the others pass it over, except
that a ratio of infinity has exploded.
"""

import math
from collections.abc import Iterator

from esper.simic.agent import PPOUpdateMetrics
from esper.simic.telemetry.alarms import AlarmLimits, Reading, Sight, Verdict, above, below
from esper.simic.telemetry.ratios import JOINT

GRADIENT_FIELDS = ("pre_clip_grad_norm", "clip_factor", "grad_norm")


def read_numbers(sight: Sight) -> Iterator[Reading]:
    """Metrics that are not finite, those of gradients and exploded ratios apart."""
    broken = []
    for name, value in sight.metrics.flat().items():
        last = name.rpartition("/")[2]
        exploded = last == "joint_ratio_max" and value == math.inf
        if not math.isfinite(value) and last not in GRADIENT_FIELDS and not exploded:
            broken.append(name)
    remark = f": {', '.join(broken)}" if broken else ""
    yield Reading(_flag(bool(broken)), len(broken), 0, "number of metrics that are not finite", remark=remark)


def read_broken_gradients(sight: Sight) -> Iterator[Reading]:
    """Minibatches whose gradient was not finite."""
    count, report = sight.metrics.minibatches_not_finite, sight.facts.gradients
    modules = report.not_finite if report is not None else ()
    remark = f", in {', '.join(modules)}" if modules else ""
    what = "number of minibatches with a gradient that is not finite"
    yield Reading(_flag(bool(count or modules)), count, 0, what, remark=remark)


def read_high_ratio(sight: Sight) -> Iterator[Reading]:
    """The largest joint ratio."""
    limits, report = sight.limits, sight.facts.ratios
    remark = f"; {report.exploded.get(JOINT, 0)} exploded" if report is not None else ""
    yield from _upper(sight.metrics.joint_ratio_max, limits.ratio_high, limits, "largest joint ratio", remark=remark)


def read_low_ratio(sight: Sight) -> Iterator[Reading]:
    """The smallest joint ratio."""
    limits, report = sight.limits, sight.facts.ratios
    remark = f"; {report.vanished.get(JOINT, 0)} vanished" if report is not None else ""
    yield from _lower(sight.metrics.joint_ratio_min, limits.ratio_low, limits, "smallest joint ratio", remark=remark)


def read_kl_spike(sight: Sight) -> Iterator[Reading]:
    """The joint KL, up to where it is extreme: from there on it is the other rule's."""
    kl, limits = joint_kl(sight.metrics), sight.limits
    if kl > limits.kl_extreme:
        yield Reading("between", kl, limits.kl_spike, "joint KL")
    else:
        yield from _upper(kl, limits.kl_spike, limits, "joint KL")


def read_kl_extreme(sight: Sight) -> Iterator[Reading]:
    """The joint KL."""
    yield from _upper(joint_kl(sight.metrics), sight.limits.kl_extreme, sight.limits, "joint KL")


def joint_kl(metrics: PPOUpdateMetrics) -> float:
    """The largest joint KL that a minibatch showed; NaN if any is."""
    return max((metrics.max_kl, metrics.approx_kl), key=lambda kl: math.inf if math.isnan(kl) else kl)


def read_entropies(sight: Sight) -> Iterator[Reading]:
    """Each head's own entropy, from steps that used it and gave it a choice.

    The policy mixes in a share ε of uniform choice. Entropy is concave, so that of the mixture is at least
    (1 − ε) · own + ε, whatever the number of choices: `own` here is the most that the head itself can have.
    """
    limits, epsilon = sight.limits, sight.metrics.epsilon
    for head, metrics in sight.metrics.heads.items():
        if metrics.entropy is not None:
            # max() with a NaN in second place would hide it.
            own = max((metrics.entropy - epsilon) / (1 - epsilon), 0.0)
            yield from _lower(own, limits.entropy_of(head), limits, f"entropy of head {head}", head)


def read_value_loss(sight: Sight) -> Iterator[Reading]:
    """The critic's loss."""
    yield from _upper(sight.metrics.value_loss, sight.limits.value_loss, sight.limits, "value loss")


def read_explained_variance(sight: Sight) -> Iterator[Reading]:
    """How much of the returns' variance the critic explains; nothing to say where they do not vary."""
    if sight.metrics.return_std > 0:
        limit = sight.limits.explained_variance
        yield from _lower(sight.metrics.explained_variance, limit, sight.limits, "explained variance")


def read_floor(sight: Sight) -> Iterator[Reading]:
    """Whether the floor of the advantages' deviation binds."""
    floored, std = sight.metrics.advantage_floored, sight.metrics.advantage_std
    yield Reading(
        _flag(floored), std, None, "deviation of the advantages", remark=" under its floor" if floored else ""
    )


def read_small_gradients(sight: Sight) -> Iterator[Reading]:
    """The global norm, and each head's that had something to learn."""
    limits, unit = sight.limits, sight.clip_norm
    yield from _lower(sight.metrics.pre_clip_grad_norm, limits.gradient_low * unit, limits, "gradient norm")
    for head, metrics in sight.metrics.heads.items():
        if metrics.learnable:
            what = f"gradient norm of head {head}"
            yield from _lower(metrics.grad_norm, limits.head_gradient_low * unit, limits, what, head)


def read_large_gradients(sight: Sight) -> Iterator[Reading]:
    """The global norm."""
    norm = sight.metrics.pre_clip_grad_norm
    if math.isfinite(norm):
        yield from _upper(norm, sight.limits.gradient_high * sight.clip_norm, sight.limits, "gradient norm")


def read_drift(sight: Sight) -> Iterator[Reading]:
    """The norm of the heads' gradients against its exponential mean."""
    if sight.drift is not None:
        what = "factor between the norm of the heads' gradients and its usual one"
        yield from _upper(sight.drift, sight.limits.drift, sight.limits, what)


def read_lstm_finite(sight: Sight) -> Iterator[Reading]:
    """Numbers of the memory that are not finite."""
    if (health := sight.facts.lstm) is not None:
        count = health.nan + health.inf
        yield Reading(_flag(not health.finite), count, 0, "number of NaN and infinities in the memory")


def read_lstm_extremes(sight: Sight) -> Iterator[Reading]:
    """Cells that have grown without bound, hidden numbers that are stuck at their end."""
    if (health := sight.facts.lstm) is not None:
        limits = sight.limits
        if health.cell_rms is not None:
            yield from _upper(health.cell_rms, limits.lstm_rms, limits, "root mean square of the LSTM's cells", "cell")
        yield from _upper(
            health.saturated_share, limits.lstm_saturated, limits, "share of saturated hidden numbers", "hidden"
        )


def read_lstm_dead(sight: Sight) -> Iterator[Reading]:
    """Units that are silent in every env."""
    if (health := sight.facts.lstm) is not None:
        yield from _upper(health.dead_share, sight.limits.lstm_dead, sight.limits, "share of silent LSTM units")


def read_gap(sight: Sight) -> Iterator[Reading]:
    """Log-probs at collection against those of the update."""
    yield from _upper(sight.metrics.behaviour_gap, sight.limits.behaviour_gap, sight.limits, "behaviour gap")


def read_commits(sight: Sight) -> Iterator[Reading]:
    """Commits per episode, where seeds are germinated at all."""
    facts, limits = sight.facts, sight.limits
    commits, births = facts.per_episode(facts.committed), facts.per_episode(facts.germinated)
    if commits is not None and births is not None:
        if births < limits.germinations and commits < limits.commits:
            yield Reading("between", commits, limits.commits, "share of episodes with a commit")
        else:
            remark = f", of {births:.2g} seeds per episode"
            yield from _lower(commits, limits.commits, limits, "share of episodes with a commit", remark=remark)


def read_growth(sight: Sight) -> Iterator[Reading]:
    """Germinations per episode where nothing is committed."""
    facts, limits = sight.facts, sight.limits
    commits, births = facts.per_episode(facts.committed), facts.per_episode(facts.germinated)
    if commits is not None and births is not None:
        idle = births < limits.germinations and commits < limits.commits
        yield Reading(_flag(idle), births, limits.germinations, "number of seeds per episode")


def read_hacking(sight: Sight) -> Iterator[Reading]:
    """Share of acting seeds that the host leans on more than it has gained."""
    facts, what = sight.facts, "share of acting seeds suspected of reward hacking"
    yield from _suspects(sight, facts.hacking, what, facts.worst_hacking)


def read_ransomware(sight: Sight) -> Iterator[Reading]:
    """Share of acting seeds that the host needs without having gained anything."""
    facts, what = sight.facts, "share of acting seeds suspected of ransomware"
    yield from _suspects(sight, facts.ransomware, what, facts.worst_ransomware)


def _suspects(sight: Sight, count: int | None, what: str, worst: str) -> Iterator[Reading]:
    """A share of hardly anybody says nothing, of many it says that they are honest."""
    limits, acting = sight.limits, sight.facts.acting
    if count is None or not acting:
        return
    remark = f" ({count} of {acting}{f'; the worst is {worst}' if worst else ''})"
    if count >= limits.suspects_least:
        yield from _upper(count / acting, limits.suspects, limits, what, remark=remark)
    else:
        yield Reading("healthy", count / acting, limits.suspects, what, remark=remark)


def read_panics(sight: Sight) -> Iterator[Reading]:
    """Panics of the governor per episode."""
    panics = sight.facts.per_episode(sight.facts.panics)
    if panics is not None:
        yield from _upper(panics, sight.limits.panics, sight.limits, "number of panics per episode")


def _upper(
    value: float, limit: float, limits: AlarmLimits, what: str, subject: str = "", remark: str = ""
) -> Iterator[Reading]:
    if not math.isnan(value):
        yield Reading(above(value, limit, limits.band), value, limit, what, subject, remark)


def _lower(
    value: float, limit: float, limits: AlarmLimits, what: str, subject: str = "", remark: str = ""
) -> Iterator[Reading]:
    if not math.isnan(value):
        yield Reading(below(value, limit, limits.band), value, limit, what, subject, remark)


def _flag(bad: bool) -> Verdict:
    return "bad" if bad else "healthy"
