"""Adapting a frozen pretrained model: the order of things, and the rule of where it grows.

    first step      choose norm statistics, the original ones or those of the new data, by validation loss
    a sixth of it   train the head; then fit the temperature of the logits and germinate
    afterwards      fit the temperature again; commit seeds that help, judged in groups by silencing each group
    last steps      commit or prune the rest

The rule buys what a benchmark found to pay. Norms are adapted first, all of them if the budget allows. The rest buys
low-rank updates: rank 1 for each stage from the first to the last, then rank 2, and so on. Nothing grows behind the
last stage. A stage whose updates harm on validation data loses them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from esper.grower.container import CHILD
from esper.grower.growing_model import GrowingModel
from esper.grower.records import Action, GrowthReport
from esper.grower.rules import ENDING, LEAST_STEPS, spread, trial_of
from esper.kasmina.blueprints.adapters import RANKS
from esper.leyline import BadValueError, Measurement, SeedReport, SeedStage
from esper.leyline.records import Json

HEAD = 1 / 6  # share of the steps in which the head trains alone
NORMS = ("affine", "scale")
UPDATES = ("lora_linear", "lora_conv")
MOST_STAGES = 4  # groups of low-rank updates; models with more blocks have several blocks per group


def is_frozen(host: nn.Module) -> bool:
    """Whether a model is to be adapted: most of its parameters are frozen. Raises if all of them are."""
    parameters = [p for name, p in host.named_parameters() if not name.startswith(f"{CHILD}.")]
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    if frozen and all(not p.requires_grad for p in parameters):
        leaves = [name for name, part in host.named_modules() if next(part.parameters(recurse=False), None) is not None]
        raise BadValueError(
            f"all {len(parameters)} parameters of the model are frozen, so nothing learns before a seed is born: let "
            f"the head learn, say by model.get_submodule({leaves[-1]!r}).requires_grad_(True), and give it to the "
            "optimizer"
        )
    return 2 * frozen > sum(p.numel() for p in parameters)


def head_steps(steps: int) -> int:
    """Steps after which the head counts as trained, in a training of `steps`."""
    return max(1, math.ceil(HEAD * steps))


def stages_of(blocks: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """At most `MOST_STAGES` groups of neighbouring blocks."""
    size = max(1, math.ceil(len(blocks) / MOST_STAGES))
    return tuple(tuple(blocks[first : first + size]) for first in range(0, len(blocks), size))


def introduction(growing: GrowingModel, steps: int) -> str:
    """What is printed before a frozen model is adapted."""
    learning = sum(p.numel() for p in growing.host.parameters() if p.requires_grad)
    offers = [{offer.name for offer in slot.blueprints} for slot in growing.slots.values()]
    norms = sum(bool(names & set(NORMS)) for names in offers)
    layers = sum(any(_rank(name) for name in names) for names in offers)
    others = len(offers) - norms - layers
    places = [f"{norms} norms"] * bool(norms) + [f"{layers} layers"] * bool(layers) + [f"{others} slots"] * bool(others)
    lines = [
        f"Esper: a frozen model, {learning:,} of {growing.host_parameters:,} parameters learn; it is adapted at "
        f"{', '.join(places)}",
        f"Esper: budget {growing.budget:,}, {100 * growing.budget / growing.host_parameters:.2f} % of its parameters; "
        f"seeds are born after step {head_steps(steps)} of {steps}, when the head is trained",
    ]
    if steps < head_steps(steps) + LEAST_STEPS - 1:
        needed = LEAST_STEPS - 1 + head_steps(steps)
        lines.append(f"Esper: steps={steps} is too few to judge a seed, {needed} are needed: nothing will grow")
    return "\n".join(lines)


@dataclass
class Adaptation:
    """How far the adaptation of one frozen model is."""

    steps: int
    stages: tuple[tuple[str, ...], ...] = ()
    """Neighbouring blocks whose low-rank updates are bought and judged together"""
    statistics: str | None = None
    """Which norm statistics were chosen; None before"""
    temperature: float = 1.0
    """By which the logits are divided wherever losses are compared"""
    worths: dict[str, Measurement] = field(default_factory=dict)
    """By how much the loss is lower with each seed's group than without it, at the last step"""

    def notes(self) -> Json:
        """Everything that later steps depend on, as JSON."""
        return {"stages": self.stages, "statistics": self.statistics, "temperature": self.temperature.hex()}

    def restore(self, notes: Json) -> None:
        """Continue from these notes."""
        self.stages = tuple(tuple(map(str, blocks)) for blocks in notes["stages"])
        self.statistics, self.temperature = notes["statistics"], float.fromhex(notes["temperature"])

    def fits_at(self, step: int) -> bool:
        """Whether the temperature is to be fitted after this step: ever since the head is trained.

        At an old temperature, silencing a group that makes the model surer or less sure would change the loss for
        that alone.
        """
        return step >= head_steps(self.steps)

    # -- groups -------------------------------------------------------------------------------------------------------

    def stage(self, slot_id: str) -> int:
        """The number of the stage that a slot lies in; −1 in front of all, or between them."""
        inside = [
            index
            for index, blocks in enumerate(self.stages)
            if any(slot_id == block or slot_id.startswith(f"{block}.") for block in blocks)
        ]
        return inside[0] if inside else -1

    def group(self, slot_id: str, blueprint: str | None) -> str:
        """The seeds that are judged with this one: those of all norms, the updates of a stage, or it alone."""
        if blueprint in NORMS:
            return "norms"
        return f"stage {self.stage(slot_id)}" if _rank(blueprint or "") else slot_id

    # -- the rule -----------------------------------------------------------------------------------------------------

    def rule(self, report: GrowthReport) -> list[Action]:
        """Wait for the head, germinate once, and judge the seeds that have had their trial."""
        left = report.steps - report.step
        actions = [
            Action(op, slot_id, seed.blueprint or "")
            for slot_id, seed in report.slots.items()
            if (op := self._judge(seed, trial_of(report.steps), left)) is not None
        ]
        untouched = all(seed.germinations == 0 for seed in report.slots.values())
        if untouched and report.step >= head_steps(report.steps) and left >= LEAST_STEPS - 1:
            actions += [Action("germinate", slot_id, name) for slot_id, name in self.births(report).items()]
        return actions

    def births(self, report: GrowthReport) -> dict[str, str]:
        """Blueprints by slot, as far as the budget goes: norms, then low-rank updates, then seeds in other slots."""
        costs = {
            slot_id: {name: offer.parameters for name, offer in own.items()} for slot_id, own in report.offers.items()
        }
        chosen: dict[str, str] = {}
        left = report.budget_left
        for slot_id, own in costs.items():
            name = next((each for each in NORMS if each in own), None)
            if name is not None and own[name] <= left:
                chosen[slot_id], left = name, left - own[name]
        updates = {slot_id: ranks for slot_id, own in costs.items() if (ranks := _by_rank(own))}
        bought = self._updates(updates, left)
        left -= sum(costs[slot_id][name] for slot_id, name in bought.items())
        chosen |= bought
        others = {slot_id: own for slot_id, own in costs.items() if slot_id not in (*chosen, *updates) and own}
        if not any(name in own for own in costs.values() for name in NORMS) and not updates:
            chosen |= spread(others, left)
        return chosen

    def _updates(self, offers: Mapping[str, Mapping[int, tuple[str, int]]], left: int) -> dict[str, str]:
        """Low-rank updates by slot: rank 1 for each stage from the first to the last, then rank 2, and so on."""
        stages: dict[int, list[str]] = {}
        for slot_id in offers:
            stages.setdefault(self.stage(slot_id), []).append(slot_id)
        chosen: dict[int, dict[str, tuple[str, int]]] = {}
        for rank in RANKS:
            for stage, members in stages.items():
                update = {slot_id: _at_most(offers[slot_id], rank) for slot_id in members}
                extra = _cost(update) - _cost(chosen.get(stage, {}))
                if extra <= left:
                    chosen[stage], left = update, left - extra
        return {slot_id: name for update in chosen.values() for slot_id, (name, _) in update.items()}

    def _judge(self, seed: SeedReport, trial: int, left: int) -> str | None:
        """Commit a seed whose group lowers the loss beyond its error; prune one that still raises it at the end.

        Groups learn together, so in between one may look harmful only because another does its work.
        """
        worth = self.worths.get(seed.slot_id)
        if seed.stage is not SeedStage.HOLDING or worth is None:
            return None
        if left <= ENDING and worth.value > 0:
            return "fossilize"
        if seed.steps_in_stage < trial:
            return None
        if worth.beyond_error:
            return "fossilize"
        return "prune" if left <= ENDING and -worth.value > worth.error else None


def _rank(blueprint: str) -> int | None:
    """The rank of a low-rank update; None for another blueprint."""
    family, _, rank = blueprint.rpartition("_")
    return int(rank) if family in UPDATES else None


def _by_rank(costs: Mapping[str, int]) -> dict[int, tuple[str, int]]:
    """Names and parameters of the low-rank updates among these blueprints."""
    return {rank: (name, count) for name, count in costs.items() if (rank := _rank(name)) is not None}


def _cost(update: Mapping[str, tuple[str, int]]) -> int:
    """Parameters of the updates of a stage."""
    return sum(count for _, count in update.values())


def _at_most(ranks: Mapping[int, tuple[str, int]], most: int) -> tuple[str, int]:
    """The largest update up to a rank; the smallest if all are larger."""
    fitting: Iterable[int] = [rank for rank in ranks if rank <= most] or [min(ranks)]
    return ranks[max(fitting)]
