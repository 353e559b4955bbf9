"""Grow a network by hand: one host, one seed, its whole life.

The host sees digits through 1×1 kernels, so it cannot see shapes. We watch it stall, germinate a seed that has 3×3
kernels, let it learn in the host's shadow, blend it in, and commit it. Then the network is hardened into a plain torch
module and meets the test images for the first and only time.

    python examples/grow_by_hand.py               # seconds on one CPU core

Each printed line is one step:

    alpha         how strongly the seed acts: 0 silent, 1 full
    audition      points of accuracy that the host would gain if the seed acted at full strength (not acting yet)
    contributes   points of accuracy that the host would lose without the seed (acting)
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

from esper.karn.palette import BLUE, MUTED, STAGES, VERMILION
from esper.kasmina import Comparison
from esper.leyline import GateRefusedError, SeedStage
from esper.tolaria import HostTrainer, get_task

SLOT = "r1c0"  # after the pooling (row 1) of the first block (column 0)
BLUEPRINT = "bottleneck"
GERMINATE_AT = 5
SHADOW_STEPS = 6


class Moment(NamedTuple):
    """The network after one step."""

    stage: SeedStage
    alpha: float
    accuracy: float
    audition: float | None


def decide(trainer: HostTrainer, step: int) -> str:
    """The controller: you. Returns what was done."""
    model, state = trainer.model, trainer.model.seed_slots[SLOT].state
    if step == GERMINATE_AT:
        model.germinate_seed(SLOT, BLUEPRINT)
        return f"germinate {BLUEPRINT}"
    if state.stage is SeedStage.TRAINING and state.steps_in_stage >= SHADOW_STEPS:
        model.advance(SLOT)
        return "advance: blend it in"
    if state.stage is SeedStage.HOLDING:
        try:
            model.fossilize(SLOT)
        except GateRefusedError:  # too early: its contribution has to be measured in HOLDING first
            return ""
        return "fossilise: it stays"
    return ""


def narrate(step: int, moment: Moment, comparison: Comparison, action: str) -> None:
    """Print one line for a step."""
    extra = ""
    if SLOT in comparison.auditions:
        extra = f"audition {comparison.auditions[SLOT].points.value:+.1f}"
    elif SLOT in comparison.contributions:
        extra = f"contributes {comparison.contributions[SLOT].points.value:+.1f}"
    line = f"step {step:2d}  {moment.stage.name:<10}  alpha {moment.alpha:.2f}  validation {moment.accuracy:5.1f} %"
    print(f"{line}  {extra:<18}  {action}".rstrip())


def grow(rng_seed: int, *, quiet: bool = False) -> tuple[list[Moment], HostTrainer]:
    """Train one host of the task `digits_blind` from fresh weights to the end, with one seed in its first slot."""
    task = get_task("digits_blind")
    trainer = HostTrainer(task, task.load_batches(), rng_seed)
    moments = []
    for step in range(task.steps):
        action = decide(trainer, step)
        trainer.train_step()  # some minibatches, for the host and for a seed in its shadow
        comparison = trainer.validate()  # the host as it is, and with the seed switched: audition or contribution
        state = trainer.model.seed_slots[SLOT].state
        audition = comparison.auditions[SLOT].points.value if SLOT in comparison.auditions else None
        moments.append(Moment(state.stage, state.alpha, comparison.main.accuracy, audition))
        if not quiet:
            narrate(step, moments[-1], comparison, action)
        trainer.tick()  # ends the step: moves alpha along its ramp, and the seed to its next stage when it is due
    return moments, trainer


@torch.no_grad()
def test_accuracy(network: torch.nn.Module, trainer: HostTrainer) -> float:
    """Accuracy on the test images, in percent."""
    images, labels = trainer.batches.test()
    return 100.0 * float((network.eval()(images).argmax(-1) == labels).double().mean())


def draw(moments: list[Moment], path: Path) -> None:
    """The timeline: accuracy and alpha over the stages of the seed's life."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for step, moment in enumerate(moments):
        if moment.stage in STAGES:
            axis.axvspan(step, step + 1, color=STAGES[moment.stage], alpha=0.3, lw=0)
    for stage in STAGES:
        inside = [step for step, moment in enumerate(moments) if moment.stage is stage]
        if inside:
            middle, rotation = (inside[0] + inside[-1] + 1) / 2, 90 if len(inside) < 3 else 0
            axis.text(middle, 132, stage.name.lower(), ha="center", va="top", fontsize=8, rotation=rotation)
    trained = range(1, len(moments) + 1)  # a step is measured after its training
    axis.plot(trained, [moment.accuracy for moment in moments], "o-", color=BLUE, label="validation accuracy (%)")
    shadow = [(at, m.accuracy + m.audition) for at, m in zip(trained, moments, strict=True) if m.audition is not None]
    axis.plot(*zip(*shadow, strict=True), "x--", color=VERMILION, label="with the seed at full strength (audition)")
    axis.set(xlabel="steps trained", xlim=(0, len(moments)), xticks=range(0, len(moments) + 1, 2))
    axis.set(ylabel="%", ylim=(0, 135), yticks=range(0, 101, 20), title="One seed in a blind host")
    strength = axis.twinx()
    strength.stairs([moment.alpha for moment in moments], baseline=None, color=MUTED, linewidth=1.5, label="alpha")
    strength.set(ylim=(0, 1.35), yticks=[share / 5 for share in range(6)], ylabel="alpha")
    handles = [line for ax in (axis, strength) for line in ax.get_legend_handles_labels()[0]]
    axis.legend(handles=handles, loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Grow, harden, test once, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="initial weights and data order follow from it")
    parser.add_argument("--out", type=Path, default=Path("runs/grow_by_hand"), help="folder for picture and network")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a network is slower on two
    moments, trainer = grow(arguments.seed)
    model, before = trainer.model, [moment for moment in moments if moment.alpha == 0.0][-1]
    network = model.harden(arguments.out / "network")
    parameters = sum(parameter.numel() for parameter in network.parameters())
    draw(moments, arguments.out / "timeline.png")
    print(
        f"\nhardened network: test accuracy {test_accuracy(network, trainer):.1f} % (validation before blending "
        f"{before.accuracy:.1f} %), {parameters:,} parameters, {model.grown_parameter_count:,} of them grown"
    )
    print(f"network and timeline are in {arguments.out}")


if __name__ == "__main__":
    main()
