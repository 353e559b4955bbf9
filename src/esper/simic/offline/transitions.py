"""What a policy learns from offline: steps of recorded episodes with rewards and weights, in a policy's own columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline import BadValueError, LifecycleOp
from esper.simic.agent.rollout import Sequences, find_sequences, pack
from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.simic.rewards import RewardConfig
from esper.tamiyo import ActionTable, ObservationLayout
from esper.tamiyo.encoder import Stretches
from esper.tamiyo.features import BLUEPRINT, fill_in_potential


class Transitions(NamedTuple):
    """Steps of E equally long episodes, (E, T, …)."""

    observations: Tensor  # (E, T, size): before normalisation
    masks: Mapping[str, Tensor]  # by head, (E, T, …) bool
    actions: Tensor  # (E, T, heads) long
    rewards: Tensor  # (E, T)
    terminated: Tensor  # (E, T) bool: nothing follows
    truncated: Tensor  # (E, T) bool: something follows that was not recorded
    weights: Tensor  # (E, T): how much an actor should imitate each step
    groups: Tensor  # (E,) long: episodes of one host; never divided between training and held-out data

    @property
    def n_episodes(self) -> int:
        """E."""
        return len(self.actions)

    def sequences(self) -> Sequences:
        """Where memory starts anew."""
        ends = (self.terminated | self.truncated).numpy()
        return find_sequences(ends, [ends.shape[1]] * len(ends))

    def part(self, rows: Tensor) -> "Transitions":
        """Some episodes, by number."""
        masks = {name: mask[rows] for name, mask in self.masks.items()}
        return Transitions(masks=masks, **{name: getattr(self, name)[rows] for name in _PLAIN})

    def minibatches(self, size: int, generator: torch.Generator) -> Iterator["PackedSteps"]:
        """One epoch: every episode once, in random order, `size` at a time."""
        sequences = self.sequences()
        for rows in torch.randperm(self.n_episodes, generator=generator).split(size):
            yield self.packed(sequences, rows.tolist())

    def packed(self, sequences: Sequences, rows: Sequence[int]) -> "PackedSteps":
        """The steps of some episodes in the order in which a network unrolls them."""
        packed = pack(sequences, rows)
        cells = torch.from_numpy(packed.cells)
        positions = None if packed.positions is None else torch.from_numpy(packed.positions)
        masks = {name: mask.flatten(0, 1)[cells] for name, mask in self.masks.items()}
        flat = {name: getattr(self, name).flatten(0, 1)[cells] for name in _PLAIN if name != "groups"}
        return PackedSteps(cells, Stretches(packed.blocks, positions), len(packed.starts), masks=masks, **flat)


_PLAIN = tuple(name for name in Transitions._fields if name != "masks")


class PackedSteps(NamedTuple):
    """Steps of whole sequences in packed order (see `Stretches`), (steps, …)."""

    cells: Tensor  # number of each step, episode by episode
    stretches: Stretches
    n_sequences: int
    observations: Tensor
    masks: Mapping[str, Tensor]
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    weights: Tensor


def from_episodes(
    episodes: Episodes,
    header: RecordHeader,
    *,
    reward: RewardConfig | None = None,
    weights: Tensor | None = None,
    layout: ObservationLayout | None = None,
) -> Transitions:
    """Recorded episodes as transitions. `weights` (E,) or (E, T): 1 by default.

    `layout`: that of a policy for more slots or more blueprints than the task has; by default the task's.
    """
    every = torch.ones_like(episodes.gain)
    weights = every if weights is None else every * (weights[:, None] if weights.dim() == 1 else weights)
    wanted, reward = header.layout if layout is None else layout, reward or RewardConfig()
    observations = episodes.observations
    if "potential" in header.layout.critic:  # searches and evaluations pay no reward, so they record none
        potentials = episodes.potentials(reward.rho)[:, :-1]
        observations = fill_in_potential(observations, header.layout, potentials)
    return Transitions(
        observations=fit_columns(observations, header.layout, wanted),
        masks=_fit_masks(episodes.masks, header.layout, wanted),
        actions=_fit_actions(episodes.actions, header.table, header.layout, wanted),
        rewards=episodes.rewards(header, reward),
        terminated=episodes.terminated,
        truncated=episodes.truncated,
        weights=weights,
        groups=episodes.host_seed,
    )


def join(parts: Sequence[Transitions]) -> Transitions:
    """The episodes of all parts. Shorter ones are filled up with steps that teach nothing: forced, of weight 0."""
    longest = max(part.actions.shape[1] for part in parts)
    padded = [_lengthen(part, longest - part.actions.shape[1]) for part in parts]
    masks = {name: torch.cat([part.masks[name] for part in padded]) for name in padded[0].masks}
    return Transitions(masks=masks, **{name: torch.cat([getattr(part, name) for part in padded]) for name in _PLAIN})


def _lengthen(part: Transitions, steps: int) -> Transitions:
    if not steps:
        return part

    def longer(values: Tensor) -> Tensor:
        return torch.cat([values, torch.zeros_like(values[:, :1]).expand(-1, steps, *values.shape[2:])], 1)

    masks = {name: longer(mask) for name, mask in part.masks.items()}
    first = next(iter(masks))
    masks[first][:, -steps:, 0] = True
    values = {name: longer(getattr(part, name)) for name in _PLAIN if name != "groups"}
    values["terminated"][:, -steps:] = True
    return Transitions(masks=masks, groups=part.groups, **values)


def fit_columns(flat: Tensor, own: ObservationLayout, wanted: ObservationLayout) -> Tensor:
    """Observations (…, size) of one layout in another, which may have more slots, other blueprints or fewer columns.

    What is new is zero. What `Translation` does to the signals of a live host, on recorded columns.
    """
    if own == wanted:
        return flat
    missing = {*wanted.slot, *wanted.offer} - {*own.slot, *own.offer}
    missing -= {f"{BLUEPRINT}.{name}" for name in wanted.vocabulary}
    if missing or (own.host, own.critic) != (wanted.host, wanted.critic):
        raise BadValueError(f"the records lack columns that the policy sees: {sorted(missing)[:5]}; record them again")
    if own.slots > wanted.slots:
        raise BadValueError(f"records of {own.slots} slots for a policy of {wanted.slots}; make one for more slots")
    host, slots, offers, critic = own.split(flat)
    slots = _choose(slots, _matching(own.slot, wanted.slot), -1)
    offers = _choose(offers, _matching(own.offer, wanted.offer), -1)
    offers = _choose(offers, _matching(own.vocabulary, wanted.vocabulary), -2)
    slots, offers = _pad(slots, -2, wanted.slots), _pad(offers, -3, wanted.slots)
    lead = host.dim() - 1
    return torch.cat([host, slots.flatten(lead), offers.flatten(lead), critic], -1)


def _fit_masks(masks: Mapping[str, Tensor], own: ObservationLayout, wanted: ObservationLayout) -> dict[str, Tensor]:
    if own == wanted:
        return dict(masks)
    blueprint = _choose(masks["blueprint"], _matching(own.vocabulary, wanted.vocabulary), -1)
    blueprint = _pad(blueprint, -2, wanted.slots)
    slot = _pad(masks["slot"], -1, wanted.slots)
    slot[..., LifecycleOp.GERMINATE, :] &= blueprint.any(-1)
    op = masks["op"] & slot.any(-1)
    op[..., LifecycleOp.WAIT] = masks["op"][..., LifecycleOp.WAIT]
    return {**masks, "op": op, "slot": slot, "blueprint": blueprint}


def _fit_actions(actions: Tensor, table: ActionTable, own: ObservationLayout, wanted: ObservationLayout) -> Tensor:
    if own == wanted:
        return actions
    column, known = table.index("blueprint"), _matching(wanted.vocabulary, own.vocabulary)
    used, fitted = table.relevance[actions[..., 0]][..., column], actions.clone()
    fitted[..., column] = known[actions[..., column]]
    if bool((used & (fitted[..., column] < 0)).any()):
        unknown = sorted(set(own.vocabulary) - set(wanted.vocabulary))
        raise BadValueError(f"records use the blueprints {unknown}, which the policy does not know; add them to it")
    fitted[..., column].clamp_(min=0)  # an unused head has a placeholder, which the policy may not know
    return fitted


def _matching(own: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """For each wanted name its index among the own ones, or −1."""
    return torch.tensor([own.index(name) if name in own else -1 for name in wanted])


def _choose(values: Tensor, index: Tensor, axis: int) -> Tensor:
    """Entries of an axis by index; zero or False where the index is −1."""
    shape = [1] * values.dim()
    shape[axis] = len(index)
    return values.index_select(axis, index.clamp(min=0)) * (index >= 0).view(shape)


def _pad(values: Tensor, axis: int, size: int) -> Tensor:
    """Zeros or False up to a size of an axis (negative)."""
    return F.pad(values, [0, 0] * (-axis - 1) + [0, size - values.shape[axis]])
