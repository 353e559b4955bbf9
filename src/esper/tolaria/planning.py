"""From the structure of a fleet to the rows of its passes."""

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina import SeedState
from esper.leyline import ACTIVE_STAGES, SeedStage
from esper.tolaria.banks import Bank
from esper.tolaria.rows import START, Act, Birth, Extra, Rows, indices

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

Entry = tuple[int, int]
"""(row, env of the member)"""


def main_rows(fleet: "HostFleet") -> Rows:
    """One row per env: the networks themselves. A bank whose seeds all wait or have shadows costs nothing here."""
    everyone = torch.arange(len(fleet.host.weights), device=fleet.device)
    acts: dict[int, list[Act]] = {}
    for (slot_id, blueprint), bank in fleet.banks.items():
        here = []
        acting = _acting(fleet, slot_id, bank)
        if size := fleet.group_size(("main", slot_id, blueprint), len(acting)):
            here.append(_act(bank, acting, bank.strength, size, detached=False))
        if fleet.isolation == "straight_through":
            training = _acting(fleet, slot_id, bank, stages=(SeedStage.TRAINING,))
            if size := fleet.group_size(("training", slot_id, blueprint), len(training)):
                here.append(_act(bank, training, bank.full, size, detached=False)._replace(silent=True))
        if here:
            acts.setdefault(fleet.places[slot_id], []).extend(here)
    return Rows(everyone, (Birth(START, everyone),), acts, whole_fleet=True)


def shadow_rows(fleet: "HostFleet") -> Rows | None:
    """One row per TRAINING seed, padded to a bucket at each place; None where nothing trains, or on the main rows."""
    extras = [extra for extra in find_extras(fleet) if not extra.silent]
    if not extras or fleet.isolation == "straight_through":
        return None
    padded: list[Extra | None] = []
    births = []
    for place in sorted(fleet.places.values()):
        born: list[Extra | None] = [extra for extra in extras if extra.place == place]
        born += [None] * (fleet.group_size(("born", place), len(born)) - len(born))
        if born:
            births.append(Birth(place, indices([extra.env if extra else 0 for extra in born], fleet.device)))
            padded += born
    env = torch.cat([birth.parents for birth in births])
    valid = torch.tensor([extra is not None for extra in padded], device=fleet.device)
    return Rows(env, tuple(births), _acts(fleet, padded, first_row=0, main={}, pad=True), valid)


def eval_rows(fleet: "HostFleet", envs: Sequence[int]) -> tuple[Rows, list[tuple[int, str]]]:
    """Main rows of these envs, then a row per TRAINING seed (shadow) and per acting one (ablation) of theirs; and whose
    seed each of those is about."""
    number = {env: row for row, env in enumerate(envs)}
    extras = sorted((extra for extra in find_extras(fleet) if extra.env in number), key=lambda extra: extra.place)
    births = [
        Birth(place, indices([number[extra.env] for extra in extras if extra.place == place], fleet.device))
        for place in sorted({extra.place for extra in extras})
    ]
    start = Birth(START, torch.arange(len(envs), device=fleet.device))
    env = indices([*envs, *(extra.env for extra in extras)], fleet.device)
    slot_at = {place: slot_id for slot_id, place in fleet.places.items()}
    acts = _acts(fleet, extras, first_row=len(envs), main=number, pad=False)
    return Rows(env, (start, *births), acts), [(extra.env, slot_at[extra.place]) for extra in extras]


def deployed_rows(fleet: "HostFleet", envs: Sequence[int]) -> Rows:
    """Main rows of these envs alone."""
    number = {env: row for row, env in enumerate(envs)}
    acts = _acts(fleet, [], first_row=len(envs), main=number, pad=False)
    return Rows(indices(envs, fleet.device), (Birth(START, torch.arange(len(envs), device=fleet.device)),), acts)


def committed_rows(fleet: "HostFleet", envs: Sequence[int]) -> Rows:
    """Rows of these envs with only their fossils in them: what remains when they are hardened."""
    number = {env: row for row, env in enumerate(envs)}
    acts: dict[int, list[Act]] = {}
    for (slot_id, _), bank in fleet.banks.items():
        entries = [
            (number[env], env)
            for env in envs
            if env < fleet.n and _acts_here(fleet.states[env][slot_id], bank, (SeedStage.FOSSILIZED,))
        ]
        if entries:
            act = _act(bank, entries, bank.strength, len(entries) + 1, detached=True)
            acts.setdefault(fleet.places[slot_id], []).append(act)
    return Rows(indices(envs, fleet.device), (Birth(START, torch.arange(len(envs), device=fleet.device)),), acts)


def find_extras(fleet: "HostFleet") -> list[Extra]:
    """The rows that can be compared with main rows: every seed that trains or acts, by env and slot."""
    return [
        Extra(env, fleet.places[slot_id], silent=state.stage in ACTIVE_STAGES)
        for env, states in enumerate(fleet.states)
        for slot_id, state in states.items()
        if state.stage is SeedStage.TRAINING or state.stage in ACTIVE_STAGES
    ]


def _acting(
    fleet: "HostFleet",
    slot_id: str,
    bank: Bank,
    number: Mapping[int, int] | None = None,
    stages: Container[SeedStage] = ACTIVE_STAGES,
) -> list[Entry]:
    """The main rows whose seeds of this bank are in these stages; `number` gives the rows by env where not all envs are
    there."""
    return [
        (env if number is None else number[env], env)
        for env, states in enumerate(fleet.states)
        if _acts_here(states[slot_id], bank, stages) and (number is None or env in number)
    ]


def _acts_here(state: SeedState, bank: Bank, stages: Container[SeedStage] = ACTIVE_STAGES) -> bool:
    return state.blueprint == bank.blueprint and state.stage in stages


def _acts(
    fleet: "HostFleet", extras: Sequence[Extra | None], *, first_row: int, main: Mapping[int, int], pad: bool
) -> dict[int, list[Act]]:
    """What every bank does to the extra rows, from `first_row` on, and to the `main` rows of this pass, by env.

    Padded to a bucket, so that shapes recur, or by one entry: neither whether a member is alone nor whether it lies in
    the odd rest that vector kernels round differently must show in its last bits.
    """
    acts: dict[int, list[Act]] = {}
    numbered = [(first_row + number, extra) for number, extra in enumerate(extras) if extra is not None]
    for (slot_id, blueprint), bank in fleet.banks.items():
        place = fleet.places[slot_id]
        own = [
            (row, extra.env)
            for row, extra in numbered
            if extra.place == place and not extra.silent and fleet.states[extra.env][slot_id].blueprint == blueprint
        ]
        passing = [
            (row, extra.env)
            for row, extra in numbered
            if extra.place < place and _acts_here(fleet.states[extra.env][slot_id], bank)
        ]
        passing += _acting(fleet, slot_id, bank, main)
        for kind, entries, strength in (("own", own, bank.full), ("passing", passing, bank.strength)):
            size = len(entries)
            if pad:
                size = fleet.group_size((kind, slot_id, blueprint), size)
            elif size:
                size += 1
            if size:
                act = _act(bank, entries, strength, size, detached=kind == "passing")
                acts.setdefault(place, []).append(act)
    return acts


def _act(bank: Bank, entries: list[Entry], strength: Tensor, size: int, *, detached: bool) -> Act:
    """Entries, padded to a size by some that are not valid."""
    padded = entries + [entries[0] if entries else (0, 0)] * (size - len(entries))
    rows, members = (indices(column, bank.device) for column in zip(*padded, strict=True))
    valid = torch.arange(size, device=bank.device) < len(entries)
    return Act(bank, rows, members, strength.index_select(0, members), valid, detached)
