"""What an update tells about itself."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class HeadMetrics:
    """One head over an update; None where no step gave it a choice."""

    entropy: float | None
    """Normalised, over the steps that used it with a choice."""
    kl: float | None
    clip_fraction: float | None
    grad_norm: float
    """Of its own weights, before clipping, mean over minibatches."""
    learnable_fraction: float
    """Share of the round's steps that it could learn from."""
    uncentred: bool
    """It was used in too few steps for its advantages to be centred."""

    @property
    def learnable(self) -> bool:
        """Whether the round taught it anything."""
        return self.learnable_fraction > 0


@dataclass(frozen=True)
class PPOUpdateMetrics:
    """One update. Means are over its minibatches unless something else is said."""

    policy_loss: float
    value_loss: float
    entropy: float
    """Mean over heads of the normalised entropy."""
    logit_spread: float
    approx_kl: float
    """KL of the joint action in the last minibatch that was looked at: it drives the stop."""
    max_kl: float
    head_kl_mean: float
    """Mean of the heads' KL, weighted by how often each decided."""
    clip_fraction: float
    joint_ratio_max: float
    joint_ratio_min: float
    pre_clip_grad_norm: float
    """Largest global norm before clipping."""
    clip_factor: float
    """Mean factor that clipping applied; 1: none."""
    minibatches_taken: int
    minibatches_not_finite: int
    epochs_run: int
    stopped_by_kl: bool
    behaviour_gap: float
    """max |log-prob recomputed − log-prob collected|"""
    advantage_mean: float
    """Before standardising, over steps that decided something."""
    advantage_std: float
    """Within tasks."""
    advantage_floored: bool
    """In some task of the round advantages varied by less than the floor."""
    advantage_mean_after: float
    advantage_std_after: float
    return_mean: float
    return_std: float
    value_mean: float
    explained_variance: float
    """1 − var(return − value) / var(return); 0 where returns do not vary."""
    forced_fraction: float
    rate: float
    entropy_coefficient: float
    epsilon: float
    steps: int
    heads: dict[str, HeadMetrics]

    def flat(self) -> dict[str, float]:
        """`ppo/<name>` and `ppo/<head>/<name>` → number; what does not exist is left out."""
        result: dict[str, float] = {}
        for field in fields(self):
            if field.name != "heads":
                result[f"ppo/{field.name}"] = float(getattr(self, field.name))
        for head, metrics in self.heads.items():
            for field in fields(metrics):
                value = getattr(metrics, field.name)
                if value is not None:
                    result[f"ppo/{head}/{field.name}"] = float(value)
        return result
