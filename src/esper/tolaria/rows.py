"""The rows of a pass, and how they follow from the structure of a fleet."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from esper.leyline import ACTIVE_STAGES, SeedStage
from esper.tolaria.banks import LANES, Bank, bucket, with_spare

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

START = -1  # the place before the first segment; other places are the index of the segment before them

# The fewest rows of a pass, and members of a group: kernels for a single one round differently. So a fleet of one
# carries a dead second row.
LEAST_ROWS = 2
TILE_ROWS = 8  # rows that read their inputs together


class Birth(NamedTuple):
    """Rows that start at a place; their streams are copied from these parents."""

    place: int
    parents: Tensor


class Act(NamedTuple):
    """A bank at its slot: entry e changes row `rows[e]` by member `members[e]`."""

    bank: Bank
    rows: Tensor
    members: Tensor
    strength: Tensor
    valid: Tensor  # others are padding
    learns: Tensor  # whether its seed gets gradient: not where another seed's row passes it, nor in padding
    # Straight through: the rows do not change. Members get the gradient as if they acted; nothing before them does.
    silent: bool = False


@dataclass(frozen=True)
class Rows:
    """The rows of a pass in order of birth."""

    env: Tensor  # (R,): whose weights each row uses
    births: tuple[Birth, ...]
    acts: dict[int, list[Act]] = field(default_factory=dict)
    valid: Tensor | None = None  # (R,), None: all; others are padding
    whole_fleet: bool = False  # row i is env i, and its weights get gradient; else they are selected and detached
    tiles: Tensor | None = None  # which rows see the same inputs (`input_tiles`); None: nobody said

    def __len__(self) -> int:
        return len(self.env)


class PassPlan(NamedTuple):
    """A training minibatch: the main rows, and a shadow row for every seed that trains."""

    main: Rows  # with the banks that act on them, for passes without shadows
    shadow: Rows | None  # without banks
    # By place, what banks do to the main rows and, numbered after them, to the shadow rows. There is one group per bank
    # for both, as every group costs kernels.
    acts: dict[int, list[Act]]


class Extra(NamedTuple):
    """A row beside the main ones: it differs from its env's main row at one slot, where it starts."""

    env: int
    place: int
    silent: bool  # the seed there is silenced (ablation), instead of acting at full strength (shadow)


class Entry(NamedTuple):
    """A row, and the env whose seed changes it."""

    row: int
    env: int
    full: bool = False  # at full strength, instead of that of its alpha
    learns: bool = True


Entries = Mapping[tuple[str, str], list[Entry]]  # by bank
Sizes = Callable[[Bank, int], int]  # the padded size of a bank's group, by the number of its entries


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """Row or member numbers as a tensor."""
    return torch.tensor(list(values), dtype=torch.int64, device=device)


def input_tiles(groups: Sequence[int], device: torch.device) -> Tensor:
    """The numbers of rows that see the same inputs, those of one group: (T, members), −1 where a tile has fewer."""
    by_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        by_group.setdefault(group, []).append(row)
    members = min(TILE_ROWS, max(map(len, by_group.values())))
    tiles = [rows[first : first + members] for rows in by_group.values() for first in range(0, len(rows), members)]
    return torch.tensor([tile + [-1] * (members - len(tile)) for tile in tiles], device=device)


def make_plan(fleet: "HostFleet") -> PassPlan:
    """The rows of a training minibatch. A bank without a working seed costs nothing, unless graphs are replayed."""

    def bank_size(kind: str) -> Sizes:
        return lambda bank, count: fleet.group_size((kind, bank.slot.slot_id, bank.blueprint), count)

    everyone = torch.arange(len(fleet.host.weights), device=fleet.device)
    row_of = {env: env for env in range(len(everyone))}
    main_entries = _entries(fleet, row_of)
    main_acts = _acts(fleet, main_entries, lambda _, count: fleet.padded(count))
    main = Rows(everyone, (Birth(START, everyone),), main_acts, whole_fleet=True, tiles=fleet.tiles)
    if fleet.isolation == "straight_through":
        acts = _acts(fleet, main_entries, bank_size("acts"))
        training = _entries(fleet, row_of, (), (SeedStage.TRAINING,))
        full = {key: [entry._replace(full=True) for entry in entries] for key, entries in training.items()}
        for place, group in _acts(fleet, full, bank_size("training")).items():
            acts.setdefault(place, []).extend(act._replace(silent=True) for act in group)
        return PassPlan(main, None, acts)
    shadows = [extra for extra in _extras(fleet) if not extra.silent]
    if not shadows:
        return PassPlan(main, None, _acts(fleet, main_entries, bank_size("acts")))
    births, padded = _births(fleet, shadows, row_of, lambda place, count: fleet.group_size(("born", place), count))
    valid = torch.tensor([extra is not None for extra in padded], device=fleet.device)
    shadow = Rows(torch.cat([birth.parents for birth in births]), births, valid=valid)
    return PassPlan(main, shadow, _acts(fleet, _entries(fleet, row_of, padded), bank_size("acts")))


def _births(
    fleet: "HostFleet", extras: Sequence[Extra], row_of: Mapping[int, int], size_of: Callable[[int, int], int]
) -> tuple[tuple[Birth, ...], list[Extra | None]]:
    """The births of extra rows from the main rows of their envs, padded to `size_of(place, count)`, and the rows in
    order, None where they are padding."""
    births, padded = [], list[Extra | None]()
    for place in sorted(fleet.places.values()):
        born: list[Extra | None] = [extra for extra in extras if extra.place == place]
        born += [None] * (size_of(place, len(born)) - len(born))
        if born:
            births.append(Birth(place, indices([row_of[extra.env] if extra else 0 for extra in born], fleet.device)))
            padded += born
    return tuple(births), padded


def eval_rows(fleet: "HostFleet", envs: Sequence[int]) -> tuple[Rows, dict[int, tuple[int, str]]]:
    """The rows of a validation: main rows of these envs, a shadow row per TRAINING seed, an ablation row per acting
    seed, and padding on CUDA. Also returns the (env, slot) of each shadow and ablation row, by its number."""
    row_of = {env: row for row, env in enumerate(envs)}
    extras = [extra for extra in _extras(fleet) if extra.env in row_of]
    on_cuda = fleet.device.type == "cuda"  # where shapes that were met before need no new kernels
    births, padded = _births(fleet, extras, row_of, lambda _, count: bucket(count) if on_cuda else count)
    start, tiles = _same_start(len(envs), fleet.device)
    env = indices([*envs, *(extra.env if extra else envs[0] for extra in padded)], fleet.device)
    rows = Rows(env, (start, *births), _acts(fleet, _entries(fleet, row_of, padded), _eval_size), tiles=tiles)
    slot_at = {place: slot_id for slot_id, place in fleet.places.items()}
    return rows, {row: (extra.env, slot_at[extra.place]) for row, extra in enumerate(padded, len(envs)) if extra}


def deployed_rows(fleet: "HostFleet", envs: Sequence[int], stages: Container[SeedStage] = ACTIVE_STAGES) -> Rows:
    """Main rows of these envs alone, with their seeds of these stages."""
    row_of = {env: row for row, env in enumerate(envs)}
    acts = _acts(fleet, _entries(fleet, row_of, stages=stages), _eval_size)
    start, tiles = _same_start(len(envs), fleet.device)
    return Rows(indices(envs, fleet.device), (start,), acts, tiles=tiles)


def _same_start(count: int, device: torch.device) -> tuple[Birth, Tensor]:
    """The birth of rows that all see the same inputs, and their tiles."""
    return Birth(START, torch.arange(count, device=device)), input_tiles([0] * count, device)


def _eval_size(bank: Bank, count: int) -> int:
    # Evaluations have many inputs, but in any number.
    return bucket(count) if bank.device.type == "cuda" else with_spare(count, LANES + 1)


def _extras(fleet: "HostFleet") -> list[Extra]:
    """The rows that can be compared with main rows: every seed that trains or acts, by env and slot."""
    return [
        Extra(env, fleet.places[slot_id], silent=state.stage in ACTIVE_STAGES)
        for env, slot_id, state in fleet.lifecycles.working()
    ]


def _entries(
    fleet: "HostFleet",
    row_of: Mapping[int, int],
    extras: Sequence[Extra | None] = (),
    stages: Container[SeedStage] = ACTIVE_STAGES,
) -> Entries:
    """The rows on which each bank acts. First the main rows whose seeds are in these stages. Then extra rows, numbered
    after the main rows: those about a TRAINING seed of the bank, and those that meet an acting one behind their slot.
    """
    entries: dict[tuple[str, str], list[Entry]] = {}
    for env, row in row_of.items():
        for slot_id, state in fleet.states[env].items() if env < fleet.n else ():
            if state.stage in stages:
                entries.setdefault((slot_id, str(state.blueprint)), []).append(Entry(row, env))
    numbered = [(row, extra) for row, extra in enumerate(extras, len(row_of)) if extra]
    for row, extra in numbered:
        for slot_id, state in fleet.states[extra.env].items():
            key, place = (slot_id, str(state.blueprint)), fleet.places[slot_id]
            if place == extra.place and not extra.silent:
                entries.setdefault(key, []).append(Entry(row, extra.env, full=True))
            elif place > extra.place and state.stage in ACTIVE_STAGES:
                entries.setdefault(key, []).append(Entry(row, extra.env, learns=False))
    return entries


def _acts(fleet: "HostFleet", entries: Entries, size_of: Sizes) -> dict[int, list[Act]]:
    """By place, one act per bank that has entries, or whose group does not shrink. Padding is not valid."""
    groups = {key: entries.get(key, []) for key in fleet.banks}
    sizes = {key: size_of(fleet.banks[key], len(own)) for key, own in groups.items()}
    sizes = {key: size for key, size in sizes.items() if size}
    if not sizes:
        return {}
    padded = [
        (*entry, number < len(groups[key]))
        for key, size in sizes.items()
        for number, entry in enumerate(groups[key] + [(groups[key] or [Entry(0, 0)])[0]] * (size - len(groups[key])))
    ]
    # One copy to the device for all banks. Kernels expect neighbouring numbers.
    columns = torch.tensor(padded, dtype=torch.int64).T.contiguous().to(fleet.device)
    (rows, members), (full, learns, valid) = columns[:2], columns[2:].bool()
    parts = (column.split(list(sizes.values())) for column in (rows, members, full, learns & valid, valid))
    acts: dict[int, list[Act]] = {}
    for key, *own in zip(sizes, *parts, strict=True):
        acts.setdefault(fleet.places[key[0]], []).append(_act(fleet.banks[key], *own))
    return acts


def _act(bank: Bank, rows: Tensor, members: Tensor, full: Tensor, learns: Tensor, valid: Tensor) -> Act:
    """The act of one bank; padding has no strength."""
    strength = torch.where(full, bank.full.index_select(0, members), bank.strength.index_select(0, members))
    return Act(bank, rows, members, strength.where(valid, 0.0), valid, learns)
