"""Recording episodes as they are played: a tape per episode, and the record files of a training run."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import BadValueError, HeadPreset
from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.simic.offline.records import RecordWriter
from esper.simic.offline.shards import SUFFIX, check_folder, open_shard, record_files
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.storage.files import remove_leftovers, storage_errors
from esper.tamiyo import ObservationLayout, growth_layout, growth_table
from esper.tamiyo.features import fill_in_control_end
from esper.tamiyo.policy import PolicyView
from esper.tolaria import Task

LEARNED = "learned"  # the name of the policy in records of training


def record_header(
    task: Task, preset: HeadPreset, policies: Sequence[str], layout: ObservationLayout | None = None
) -> RecordHeader:
    """The header of episodes of a task. `layout`: the runner's, by default that of a runner with sensing."""
    return RecordHeader(
        task=task.name,
        preset=preset.name,
        table=growth_table(preset, task.slot_config),
        layout=layout or growth_layout(task.slot_config),
        steps=task.steps,
        chance_accuracy=task.chance_accuracy,
        by_loss=task.by_loss,
        policies=tuple(policies),
    )


class EpisodeTape:
    """Collects the steps of one episode of a runner's grown envs, for a record."""

    def __init__(self, runner: EpisodeRunner) -> None:
        self.runner = runner
        self.steps: list[tuple[PolicyView, Tensor, StepResult, Tensor]] = []

    def add(self, view: PolicyView, actions: Tensor, result: StepResult, log_probs: Tensor) -> None:
        """Append a step: actions and the behaviour's log-probs are (n, heads). No device sync."""
        self.steps.append((view, actions, result, log_probs))

    def episodes(
        self,
        rows: Sequence[int],
        policies: Sequence[int],
        host_seeds: Sequence[int],
        *,
        epsilon: float = 0.0,
        round_index: int = -1,
    ) -> Episodes:
        """The finished episodes of some grown envs, on the CPU. Give the number of each one's policy, and its host."""
        views, actions, results, log_probs = zip(*self.steps, strict=True)
        last, chosen = results[-1], torch.tensor(rows)

        def by_env(values: Sequence[Tensor]) -> Tensor:  # per step (n, …) → (rows, steps, …)
            return torch.stack(list(values), 1).cpu()[chosen]

        def of_results(name: str) -> Tensor:
            return by_env([getattr(result, name) for result in results])

        features = torch.stack([view.features for view in views])
        assert last.hardened_control is not None, "the episode is not over"
        filled = fill_in_control_end(features, self.runner.layout, last.hardened_control)
        panics = of_results("panics")
        ends = torch.zeros_like(panics)
        ends[:, -1] = True
        masks = {name: by_env([view.masks[name] for view in views]) for name in self.runner.table.names}
        return Episodes(
            observations=by_env(filled.unbind()),
            masks=masks,
            actions=by_env(actions),
            log_probs=by_env(log_probs),
            forced=masks["op"].sum(-1) == 1,  # WAIT is always legal, and it uses no other head
            terminated=panics | ends,
            truncated=torch.zeros_like(panics),
            panics=panics,
            gain=of_results("gain"),
            accuracy=of_results("accuracy"),
            control_accuracy=of_results("control_accuracy"),
            acting_parameters=of_results("acting_parameters"),
            fossil_parameters=of_results("fossil_parameters"),
            host_parameters=self.runner.host_sizes.cpu()[chosen],
            final_gain=last.hardened_gain.cpu()[chosen],
            epsilon=torch.full((len(rows),), epsilon),
            policy=torch.tensor(policies),
            host_seed=torch.tensor(host_seeds),
            round=torch.full((len(rows),), round_index),
        )


class RoundRecords:
    """The record files of a training run, `round-<round>-<task>-<number>`."""

    def __init__(self, folder: Path, runners: Sequence[EpisodeRunner], source: str, rounds: int) -> None:
        """`rounds` are complete; what was recorded of later ones is removed, because they are played again."""
        self.folder, self.source = folder, source
        self.headers = [
            record_header(runner.fleet.task, runner.preset, (LEARNED,), runner.layout) for runner in runners
        ]
        remove_leftovers(folder)
        with storage_errors(folder):
            for path in record_files(folder):
                if _round_of(path) >= rounds:
                    path.unlink()

    @staticmethod
    def check(folder: Path, source: str) -> None:
        """Raise if a folder holds records that another run, or no run, has written."""
        check_folder(folder)
        for path in record_files(folder):
            if open_shard(path).content.source != source:
                raise BadValueError(f"{path} is no record of the run to resume; choose another --record folder")
            _round_of(path)

    def write(self, round_index: int, episodes: Sequence[Episodes]) -> None:
        """Write a round, task by task."""
        for task, (header, some) in enumerate(zip(self.headers, episodes, strict=True)):
            with RecordWriter(self.folder, header, f"round-{round_index:05d}-{task}-", self.source) as writer:
                writer.append(some)


def _round_of(path: Path) -> int:
    found = re.fullmatch(rf"round-(\d+)-\d+-\d+{re.escape(SUFFIX)}", path.name)
    if found is None:
        raise BadValueError(f"{path} was renamed; name it as the run did, or choose another --record folder")
    return int(found[1])
