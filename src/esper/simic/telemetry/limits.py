"""When an alarm is raised. The defaults were set beside 465 healthy rounds of 25 runs (docs/telemetry.md)."""

from dataclasses import dataclass, fields

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_share, require_whole


@dataclass(frozen=True)
class AlarmLimits:
    """Limits of all alarms; one that is not wanted gets a limit that nothing reaches."""

    ratio_high: float = 40.0
    """Joint probability ratio above which an action's probability has exploded; healthy rounds reach 13."""
    ratio_low: float = 1e-3
    """Joint ratio below which it has vanished; healthy rounds reach 0.008."""
    value_loss: float = 10.0
    """Of the critic, in units of the returns' variance so far; where a policy begins to earn, 3.8 is healthy."""
    explained_variance: float = -1.0
    """Below it the critic misleads …"""
    value_patience: int = 3
    """… if it lasts so many rounds. (In a single round with hardly any variance the figure means little.)"""
    kl_spike: float = 0.18
    """Joint KL of a minibatch; updates stop at 0.045, and one that did may show 0.12."""
    kl_extreme: float = 0.5
    entropy: float = 0.02
    """Normalised entropy of a head's own choices, of steps that gave it one."""
    entropy_by_head: tuple[tuple[str, float], ...] = ()
    """(head, entropy) where another limit holds."""
    entropy_patience: int = 3
    """Rounds running."""
    gradient_low: float = 2e-3
    """Global norm before clipping, in units of the norm that gradients are clipped to."""
    head_gradient_low: float = 2e-6
    """Norm of a head's own weights, of a head that had something to learn, in the same units."""
    gradient_patience: int = 2
    """Rounds running for gradients that vanish."""
    gradient_high: float = 200.0
    """Global norm before clipping, in the same units."""
    drift: float = 2.4
    """Times that the norm of the heads' gradients, before clipping, differs from its exponential mean, up or down …"""
    drift_patience: int = 3
    """… for so many rounds: healthy runs reach 4.1 in one round, 2.7 in two running and 2.2 in three, while they begin
    to learn; a lasting factor of 3 on a steady norm shows as 3.0, 2.8 and 2.7 in a run of any age. (The *largest* norm
    of an update is no measure of drift: in healthy runs it is 3.3 times the usual for three rounds, as single
    minibatches surprise a good critic.)"""
    drift_momentum: float = 0.95
    drift_warmup: int = 5
    """Rounds before anything counts as what the norm used to be."""
    lstm_rms: float = 10.0
    """Of the cell."""
    lstm_saturated: float = 0.5
    """Share of hidden numbers at their end."""
    lstm_dead: float = 0.5
    """Share of units that are silent in every env."""
    behaviour_gap: float = 1e-3
    """Log-prob at collection against the update's; above 1e-2 the update refuses the round."""
    commits: float = 0.05
    """Share of episodes with a committed seed …"""
    germinations: float = 0.5
    """… where so many seeds are germinated per episode …"""
    commits_patience: int = 3
    """… rounds running."""
    suspects: float = 0.25
    """Share of measured, acting seeds (counted per step) that are suspected …"""
    suspects_least: int = 5
    """… if they are at least so many."""
    panics: float = 0.1
    """Governor's panics per episode."""
    band: float = 1.5
    """An alarm is over only beyond its limit by this factor …"""
    calm: int = 3
    """… for so many rounds running."""

    def __post_init__(self) -> None:
        signed = {"explained_variance", "entropy_by_head"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                require_whole(field.name, value, 1)
            elif field.name not in signed:
                require_positive(field.name, value)
        for name in ("lstm_saturated", "lstm_dead", "suspects", "commits"):
            require_share(name, getattr(self, name))
        for pair in (("ratio_low", "ratio_high"), ("kl_spike", "kl_extreme"), ("gradient_low", "gradient_high")):
            low, high = (getattr(self, name) for name in pair)
            if not low < high:
                raise BadValueError(f"{pair[0]} {low} is not below {pair[1]} {high}")
        if self.explained_variance >= 0:
            raise BadValueError(f"explained_variance {self.explained_variance}: a useless critic has 0; give less")
        if self.band <= 1 or self.drift <= 1:
            raise BadValueError(f"band {self.band} and drift {self.drift} are factors; they must exceed 1")
        if self.drift_momentum >= 1:
            raise BadValueError(f"drift_momentum {self.drift_momentum} is not below 1")
        for head, entropy in self.entropy_by_head:
            require_positive(f"entropy of head {head!r}", entropy)

    def entropy_of(self, head: str) -> float:
        """The limit of a head."""
        return dict(self.entropy_by_head).get(head, self.entropy)
