"""What a rank collected in a round, on its way to rank 0, which joins all of it in env order.

That order is task by task, within a task rank by rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.leyline import SlotConfig, StageChange
from esper.leyline.records import Json, decode, encode
from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.distributed.world import Message
from esper.simic.offline.episodes import Episodes
from esper.simic.rewards import Finding
from esper.simic.telemetry import LstmHealth, compute_lstm_health
from esper.simic.training.episode import SeedChange
from esper.simic.training.live import Followed
from esper.tamiyo.memory import HiddenState


class RoundRecord(NamedTuple):
    """What happened in a round on one task, for every grown env (n,)."""

    task: str
    slots: SlotConfig
    heads: tuple[str, ...]  # names of the action heads
    first_env: int  # number of the first env among the grown envs of all tasks
    objective: Tensor  # (n,): hardened gain minus rent of the fossils, points
    gain: Tensor  # (n,): of the hardened hosts
    accuracy: Tensor  # (n,): of the hardened hosts, percent
    added_parameters: Tensor  # (n,): of the fossils
    features: Tensor  # (steps, n, size): not normalised; the critic's columns with their final values
    actions: Tensor  # (steps, n, heads)
    rewards: Tensor  # (steps, n)
    parts: dict[str, Tensor]  # of the reward, (steps, n) each
    accuracies: Tensor  # (steps, n): of the growing hosts
    control_accuracies: Tensor  # (steps, n)
    alphas: Tensor  # (steps, n, slots): during each step's training
    suspect_counts: Tensor  # (3,): acting seeds with a measured contribution; those under each suspicion (`Suspects`)
    suspects: tuple[Finding, ...]
    lstm: LstmHealth | None  # halfway through the episode
    changes: list[tuple[int, SeedChange]]  # (step, change), by step and env
    symptoms: list[tuple[int, int, list[str]]]  # (step, env, symptoms) of every panic
    episodes: Episodes | None = None  # every transition, if the run records them
    hidden: HiddenState | None = None  # (n, units): halfway through the episode, until the records are joined
    followed: tuple[Followed, ...] = ()  # the first envs, closely


BY_ENV = ("objective", "gain", "accuracy", "added_parameters")  # tensors (n,)
BY_STEP = ("features", "actions", "rewards", "accuracies", "control_accuracies", "alphas")  # tensors (steps, n, …)


def to_message(records: Sequence[RoundRecord], buffer: TamiyoRolloutBuffer, content: dict[str, Json]) -> Message:
    """A record per task with its rows of the buffer."""
    tensors, plain, end = dict[str, Tensor](), list[Json](), 0
    for number, record in enumerate(records):
        begin, end = end, end + len(record.objective)
        parts = {"record": _tensors_of(record), "steps": buffer.rows(range(begin, end))}
        tensors |= {f"{number}.{part}.{name}": value for part, named in parts.items() for name, value in named.items()}
        changes = [[step, env, encode(change), blueprint] for step, (env, change, blueprint) in record.changes]
        told = {"suspects": record.suspects, "symptoms": record.symptoms, "followed": record.followed}
        plain.append({**encode(told), "changes": changes})
    return Message(tensors, {**content, "records": plain})


def from_message(
    message: Message, own: Sequence[RoundRecord], buffer: TamiyoRolloutBuffer, rows: Sequence[range]
) -> list[RoundRecord]:
    """The records of another rank. Its steps go into these rows of the buffer, a range per task.

    `own` are records of the same tasks, for what does not differ between ranks."""
    records = []
    for number, (like, some) in enumerate(zip(own, rows, strict=True)):
        buffer.fill(some, _named(message.tensors, f"{number}.steps."))
        device = like.objective.device
        tensors = {name: value.to(device) for name, value in _named(message.tensors, f"{number}.record.").items()}
        plain = message.content["records"][number]
        taped = {name: value.cpu() for name, value in _named(tensors, "episodes.").items()}
        masks = _named(taped, "masks.")
        changes = [
            (step, SeedChange(env, decode(StageChange, change, "change"), blueprint))
            for step, env, change, blueprint in plain["changes"]
        ]
        own_tensors: dict[str, Any] = {name: tensors[name] for name in (*BY_ENV, *BY_STEP, "suspect_counts")}
        record = like._replace(
            **own_tensors,
            parts=_named(tensors, "parts."),
            suspects=decode(tuple[Finding, ...], plain["suspects"], "suspects"),
            changes=changes,
            symptoms=[(step, env, why) for step, env, why in plain["symptoms"]],
            followed=tuple(Followed(*parts) for parts in plain["followed"]),
            episodes=Episodes(masks=masks, **{name: taped[name] for name in EPISODES}) if taped else None,
            hidden=(tensors["hidden.0"], tensors["hidden.1"]) if "hidden.0" in tensors else None,
        )
        records.append(record)
    return records


EPISODES = tuple(name for name in Episodes._fields if name != "masks")


def _tensors_of(record: RoundRecord) -> dict[str, Tensor]:
    named = {name: getattr(record, name) for name in (*BY_ENV, *BY_STEP, "suspect_counts")}
    named |= {f"parts.{name}": part for name, part in record.parts.items()}
    if record.hidden is not None:
        named |= {f"hidden.{number}": state for number, state in enumerate(record.hidden)}
    if record.episodes is not None:
        named |= {f"episodes.{name}": getattr(record.episodes, name) for name in EPISODES}
        named |= {f"episodes.masks.{name}": mask for name, mask in record.episodes.masks.items()}
    return named


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def join_records(parts: Sequence[RoundRecord], first_env: int) -> RoundRecord:
    """The record of a task from those of its ranks."""
    firsts, count = list[int](), 0
    for part in parts:
        firsts.append(count)
        count += len(part.objective)
    everyone = list(zip(firsts, parts, strict=True))
    suspects = [replace(suspect, env=first + suspect.env) for first, part in everyone for suspect in part.suspects]
    changes = [
        (step, change._replace(env=first + change.env)) for first, part in everyone for step, change in part.changes
    ]
    symptoms = [(step, first + env, why) for first, part in everyone for step, env, why in part.symptoms]
    states = [part.hidden for part in parts if part.hidden is not None]
    hidden = (torch.cat([state[0] for state in states]), torch.cat([state[1] for state in states])) if states else None
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in BY_ENV}
    joined |= {name: torch.cat([getattr(part, name) for part in parts], 1) for name in BY_STEP}
    episodes = [part.episodes for part in parts if part.episodes is not None]
    return parts[0]._replace(
        **joined,
        first_env=first_env,
        parts={name: torch.cat([part.parts[name] for part in parts], 1) for name in parts[0].parts},
        suspect_counts=torch.stack([part.suspect_counts for part in parts]).sum(0),
        suspects=tuple(sorted(suspects, key=lambda each: (each.step, each.env, each.slot))),
        lstm=compute_lstm_health(hidden),
        changes=sorted(changes, key=lambda each: (each[0], each[1].env)),
        symptoms=sorted(symptoms, key=lambda each: each[:2]),
        episodes=_join_episodes(episodes) if episodes else None,
        hidden=None,
        followed=tuple(host for part in parts for host in part.followed),
    )


def _join_episodes(parts: Sequence[Episodes]) -> Episodes:
    masks = {name: torch.cat([part.masks[name] for part in parts]) for name in parts[0].masks}
    return Episodes(masks=masks, **{name: torch.cat([getattr(part, name) for part in parts]) for name in EPISODES})
