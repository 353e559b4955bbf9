"""The rows of a pass, and how they follow from the structure of a fleet."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from esper.leyline import ACTIVE_STAGES, SeedStage
from esper.tolaria.banks import Bank, bucket

START = -1
"""The place in front of the first segment; other places are the index of the segment they lie behind."""

LEAST_ROWS = 2
"""The fewest rows of a pass, and members of a group: kernels for a single one round differently. So a fleet of one
carries a dead second row."""


class Birth(NamedTuple):
    """Rows that join at a place; their streams are taken from these parents."""

    place: int
    parents: Tensor


class Act(NamedTuple):
    """A bank at its slot: entry e changes row `rows[e]` by member `members[e]`."""

    bank: Bank
    rows: Tensor
    members: Tensor
    strength: Tensor
    valid: Tensor
    """Others are padding."""
    learns: Tensor
    """Whether its seed gets gradient: not where another seed's row passes it, nor in padding."""
    silent: bool = False
    """Straight through: the rows stay what they are; members get the gradient as if they acted, and nothing in front of
    them does."""


@dataclass(frozen=True)
class Rows:
    """The rows of a pass in order of birth."""

    env: Tensor
    """(R,): whose weights each row uses."""
    births: tuple[Birth, ...]
    acts: dict[int, list[Act]] = field(default_factory=dict)
    valid: Tensor | None = None
    """(R,), None: all. Others are padding."""
    whole_fleet: bool = False
    """Row i is env i, and its weights get gradient; else weights are taken by `env` and detached."""

    def __len__(self) -> int:
        return len(self.env)


class PassPlan(NamedTuple):
    """A training minibatch: the main rows, and a row for every seed that trains beside them."""

    main: Rows
    """With the banks that act on them, for passes without shadows."""
    shadow: Rows | None
    """Without banks."""
    acts: dict[int, list[Act]]
    """By place, what banks do to the main rows and, numbered behind them, to the shadow rows: one group per bank,
    whosever rows they are, as every group costs dozens of kernels."""


class Extra(NamedTuple):
    """A row beside the main ones: it differs from its env's main row at one slot, and is born there."""

    env: int
    place: int
    silent: bool
    """The seed there is silenced (ablation), instead of acting at full strength (shadow)."""


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """Row or member numbers as a tensor."""
    return torch.tensor(list(values), dtype=torch.int64, device=device)


if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet


class Entry(NamedTuple):
    """A row, and the env whose seed changes it."""

    row: int
    env: int
    full: bool = False
    """At full strength, instead of that of its alpha."""
    learns: bool = True


Sizes = Callable[[Bank, int], int]
"""How large the group of a bank is made for so many entries."""


def make_plan(fleet: "HostFleet") -> PassPlan:
    """The rows of a training minibatch. A bank whose seeds all wait costs nothing, unless graphs are replayed: then it
    keeps the group that it has had, so that structures recur."""
    everyone = torch.arange(len(fleet.host.weights), device=fleet.device)
    number = {env: env for env in range(len(everyone))}
    alone = _acts(fleet, _entries(fleet, number, []), lambda _, count: bucket(count))
    main = Rows(everyone, (Birth(START, everyone),), alone, whole_fleet=True)

    def size(bank: Bank, count: int) -> int:
        return fleet.group_size(("acts", bank.slot.slot_id, bank.blueprint), count)

    if fleet.isolation == "straight_through":
        acts = _acts(fleet, _entries(fleet, number, []), size)
        for place, silent in _silent_acts(fleet).items():
            acts.setdefault(place, []).extend(silent)
        return PassPlan(main, None, acts)
    training = [extra for extra in find_extras(fleet) if not extra.silent]
    shadow, padded = None, list[Extra | None]()
    if training:
        births, padded = _births(fleet, training, number, lambda place, count: fleet.group_size(("born", place), count))
        env = torch.cat([birth.parents for birth in births])
        valid = torch.tensor([extra is not None for extra in padded], device=fleet.device)
        shadow = Rows(env, births, valid=valid)
    numbered = [(len(everyone) + row, extra) for row, extra in enumerate(padded) if extra is not None]
    return PassPlan(main, shadow, _acts(fleet, _entries(fleet, number, numbered), size))


def _births(
    fleet: "HostFleet", extras: Sequence[Extra], number: Mapping[int, int], size_of: Callable[[int, int], int]
) -> tuple[tuple[Birth, ...], list[Extra | None]]:
    """The births of extra rows from the main rows of their envs, and the rows in order, None where they are padding;
    `size_of` a place and a count is how many are born there."""
    births, padded = [], list[Extra | None]()
    for place in sorted(fleet.places.values()):
        born: list[Extra | None] = [extra for extra in extras if extra.place == place]
        born += [None] * (size_of(place, len(born)) - len(born))
        if born:
            births.append(Birth(place, indices([number[extra.env] if extra else 0 for extra in born], fleet.device)))
            padded += born
    return tuple(births), padded


def eval_rows(fleet: "HostFleet", envs: Sequence[int]) -> tuple[Rows, dict[int, tuple[int, str]]]:
    """Main rows of these envs, then a row per TRAINING seed (shadow) and per acting one (ablation) of theirs; and by
    the number of such a row whose seed it is about."""
    number = {env: row for row, env in enumerate(envs)}
    extras = [extra for extra in find_extras(fleet) if extra.env in number]
    on_cuda = fleet.device.type == "cuda"  # where shapes that were met before need no new kernels
    births, padded = _births(fleet, extras, number, lambda _, count: bucket(count) if on_cuda else count)
    start = Birth(START, torch.arange(len(envs), device=fleet.device))
    env = indices([*envs, *(extra.env if extra else envs[0] for extra in padded)], fleet.device)
    slot_at = {place: slot_id for slot_id, place in fleet.places.items()}
    numbered = [(row, extra) for row, extra in enumerate(padded, len(envs)) if extra is not None]
    acts = _acts(fleet, _entries(fleet, number, numbered), _eval_size)
    return Rows(env, (start, *births), acts), {row: (extra.env, slot_at[extra.place]) for row, extra in numbered}


def deployed_rows(fleet: "HostFleet", envs: Sequence[int]) -> Rows:
    """Main rows of these envs alone."""
    return _bare_rows(fleet, envs, ACTIVE_STAGES)


def committed_rows(fleet: "HostFleet", envs: Sequence[int]) -> Rows:
    """Rows of these envs with only their fossils in them: what remains when they are hardened."""
    return _bare_rows(fleet, envs, (SeedStage.FOSSILIZED,))


def _bare_rows(fleet: "HostFleet", envs: Sequence[int], stages: Container[SeedStage]) -> Rows:
    number = {env: row for row, env in enumerate(envs)}
    acts = _acts(fleet, _entries(fleet, number, [], stages), _eval_size)
    return Rows(indices(envs, fleet.device), (Birth(START, torch.arange(len(envs), device=fleet.device)),), acts)


def _eval_size(bank: Bank, count: int) -> int:
    """On CUDA a bucket. On the CPU one entry more: neither whether a member is alone nor whether it lies in the odd
    rest that vector kernels round differently must show in its last bits."""
    if bank.device.type == "cuda":
        return bucket(count)
    return count + 1 if count else 0


def find_extras(fleet: "HostFleet") -> list[Extra]:
    """The rows that can be compared with main rows: every seed that trains or acts, by env and slot."""
    return [
        Extra(env, fleet.places[slot_id], silent=state.stage in ACTIVE_STAGES)
        for env, states in enumerate(fleet.states)
        for slot_id, state in states.items()
        if state.stage is SeedStage.TRAINING or state.stage in ACTIVE_STAGES
    ]


def _entries(
    fleet: "HostFleet",
    main: Mapping[int, int],
    extras: Sequence[tuple[int, Extra]],
    stages: Container[SeedStage] = ACTIVE_STAGES,
) -> dict[tuple[str, str], list[Entry]]:
    """By bank: the main rows (by env) whose seeds are in these stages, then the numbered extra rows: those about a
    TRAINING seed of the bank, and those that pass an acting one behind their own slot."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for env, row in main.items():
        for slot_id, state in fleet.states[env].items() if env < fleet.n else ():
            if state.stage in stages:
                found.setdefault((slot_id, str(state.blueprint)), []).append(Entry(row, env))
    for row, extra in extras:
        for slot_id, state in fleet.states[extra.env].items():
            key, place = (slot_id, str(state.blueprint)), fleet.places[slot_id]
            if place == extra.place and not extra.silent:
                found.setdefault(key, []).append(Entry(row, extra.env, full=True))
            elif place > extra.place and state.stage in ACTIVE_STAGES:
                found.setdefault(key, []).append(Entry(row, extra.env, learns=False))
    return found


def _silent_acts(fleet: "HostFleet") -> dict[int, list[Act]]:
    """Straight through: TRAINING seeds on their main rows."""
    acts: dict[int, list[Act]] = {}
    for (slot_id, blueprint), bank in fleet.banks.items():
        training = [
            Entry(env, env, full=True)
            for env, states in enumerate(fleet.states)
            if states[slot_id].blueprint == blueprint and states[slot_id].stage is SeedStage.TRAINING
        ]
        if size := fleet.group_size(("training", slot_id, blueprint), len(training)):
            acts.setdefault(fleet.places[slot_id], []).append(_act(bank, training, size)._replace(silent=True))
    return acts


def _acts(fleet: "HostFleet", entries: Mapping[tuple[str, str], list[Entry]], size_of: Sizes) -> dict[int, list[Act]]:
    """One act per bank that has something to do, or whose group is kept, by place."""
    acts: dict[int, list[Act]] = {}
    for key, bank in fleet.banks.items():
        own = entries.get(key, [])
        if size := size_of(bank, len(own)):
            acts.setdefault(fleet.places[key[0]], []).append(_act(bank, own, size))
    return acts


def _act(bank: Bank, entries: list[Entry], size: int) -> Act:
    """Entries, padded to a size by some that are not valid."""
    padded = entries + [entries[0] if entries else Entry(0, 0)] * (size - len(entries))
    rows, members = (indices(column, bank.device) for column in zip(*((e.row, e.env) for e in padded), strict=True))
    full, learns, valid = torch.tensor(
        [[e.full for e in padded], [e.learns for e in padded], [index < len(entries) for index in range(size)]],
        device=bank.device,
    )
    strength = torch.where(full, bank.full.index_select(0, members), bank.strength.index_select(0, members))
    return Act(bank, rows, members, strength, valid, learns & valid)
