"""`esper evaluate`."""

import os
import platform
import shlex
from dataclasses import dataclass, fields
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from rich.console import Console

from esper.cli.evaluation_tables import kind_table, policy_table, tell_difference
from esper.leyline import BadValueError
from esper.leyline.files import replace_file, storing
from esper.leyline.records import Json
from esper.simic.training.comparison import Comparisons, run_comparisons
from esper.simic.training.jobs import EvaluationConfig
from esper.simic.training.named import short_names
from esper.simic.training.run_config import git_hash
from esper.simic.training.verdicts import CLAIM_SEEDS

PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class EvaluateCommand:
    """Compare policies on hosts that none of them was trained on, the same for each."""

    task: str = "digits_blind"
    """Task whose hosts they grow; several, separated by commas: a table each, and the mean over them."""
    policies: str = "heuristic,random,random-commit,wait"
    """Separated by commas: wait, random, random-commit, heuristic, heuristic:FILE, schedule, schedule:FILE, oracle, or
    a run folder; runs of one configuration, one per training seed, are joined by +. retrained:POLICY is what another
    policy of the list ended with, trained from scratch; static:POLICY hosts of that size that never grow."""
    hosts: int = 64
    """Hosts that each policy grows; their controls come on top."""
    seed: int = 7
    """Which hosts."""
    json: Path | None = None
    """Write everything here."""
    picture: Path | None = None
    """Draw gain against parameters here, .png or .svg."""
    greedy: bool = False
    """Beside the sampled actions, let learned policies also take the likeliest ones: one more pass for each."""
    margin: float = 1.0
    """Points by which a policy may be worse than another and still be called not worse."""
    workers: int = 1
    """Processes that share the work, one thread each; the results are the same."""
    keep: Path | None = None
    """Folder for what is done, piece by piece; the same command takes it from there and goes on. For long ones."""
    preset: str = "core"
    """Heads and ops of the policies: core or full, as the runs were trained."""
    isolation: Literal["shadow", "straight_through"] = "shadow"
    """How seeds in TRAINING learn, as the runs were trained."""
    final: bool = False
    """Take hosts of the final range and score them on test images: once, at the very end. Signed into the run folders
    (final.jsonl) before it begins."""
    device: str = "cpu"
    data_dir: Path | None = None
    """Where data sets are looked for (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Print tables of policies and their differences."""
        torch.set_num_threads(1)
        for target in (self.json, self.picture):
            if target is not None:
                check_target(target)
        if self.picture is not None and self.picture.suffix not in PICTURES:
            raise BadValueError(f"--picture {self.picture} must end in {' or '.join(PICTURES)}")
        tasks, policies = ([name.strip() for name in given.split(",")] for given in (self.task, self.policies))
        found = run_comparisons(
            tasks,
            policies,
            EvaluationConfig(
                tasks[0], self.hosts, self.seed, self.preset, self.final, self.isolation, self.device, self.data_dir
            ),
            margin=self.margin,
            greedy=self.greedy,
            workers=self.workers,
            keep=self.keep,
        )
        _print(console, found)
        if self.json is not None:
            content = {**found.to_json(), "provenance": self._provenance()}
            replace_file(self.json.resolve(), dumps(content, indent=1, allow_nan=False) + "\n")
        if self.picture is not None:
            with storing(self.picture):
                draw(found, self.picture)

    def _provenance(self) -> dict[str, Json]:
        """What the figures were made with."""
        places = ("json", "picture", "keep", "data_dir")  # where things lie on this machine made no figure
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in places}
        flags = [
            f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
            for name, value in given.items()
            if value != next(field.default for field in fields(self) if field.name == name)
        ]
        return made_with(" ".join(["esper evaluate", *flags]), self.device)


def made_with(command: str, device: str = "cpu") -> dict[str, Json]:
    """A command, the code and the machine."""
    accelerator = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "command": command,
        "git": git_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "accelerator": accelerator,
        },
    }


def check_target(target: Path) -> None:
    """Raise unless a file can be written here: before hours of work, and before a final evaluation is signed."""
    folder = target.resolve().parent
    if not folder.is_dir():
        raise BadValueError(f"{target} cannot be written: there is no folder {target.parent}")
    try:
        with TemporaryDirectory(prefix=f".{target.name}.", dir=folder):  # rights alone do not tell
            pass
    except OSError as error:
        raise BadValueError(f"{target} cannot be written: {error.strerror}; name another place") from None
    if target.exists() and not target.is_file():
        raise BadValueError(f"{target} cannot be written: it is no file; name one in a folder")
    if target.exists() and not os.access(target, os.W_OK):
        raise BadValueError(f"{target} cannot be written: it is write-protected; name another")


def _print(console: Console, found: Comparisons) -> None:
    names = short_names(next(iter(found.tasks.values())).policies)
    for warning in found.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    for comparison in found.tasks.values():
        console.print(policy_table(comparison))
        if comparison.kinds:
            console.print(kind_table(comparison))
        for compared in comparison.compared:
            console.print(tell_difference(compared, names), highlight=False, markup=False)
    if found.compared:
        console.print("Mean over tasks", highlight=False)
        for name, seeds in found.objectives().items():
            console.print(f"{names[name]}: {sum(seeds) / len(seeds):+.2f}", highlight=False, markup=False)
        for compared in found.compared:
            console.print(tell_difference(compared, names), highlight=False, markup=False)
    claims = [one for comparison in found.tasks.values() for one in comparison.compared]
    if claims and not all(one.enough_seeds for one in claims):
        console.print(
            f"Where a learned policy has fewer than {CLAIM_SEEDS} training seeds, or none takes part, a difference is "
            "a report, not a claim.",
            highlight=False,
        )


def draw(found: Comparisons, path: Path) -> None:
    """Gain against added parameters, a panel per task: hosts as dots, the mean of each policy on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(found.tasks), 4.5), layout="constrained")
    panels = figure.subplots(1, len(found.tasks), squeeze=False)[0]
    for panel, comparison in zip(panels, found.tasks.values(), strict=True):
        names = short_names(comparison.policies)
        for number, (name, results) in enumerate(comparison.policies.items()):
            added = [count for result in results for count in result.added_params]
            gain = [points for result in results for points in result.gain]
            colour = f"C{number % 10}"
            panel.plot(added, gain, ".", color=colour, alpha=0.25, markersize=5)
            mean = sum(added) / len(added), sum(gain) / len(gain)
            panel.plot(*mean, "o", color=colour, markersize=10, markeredgecolor="black", label=names[name])
        panel.axhline(0.0, color="grey", linewidth=0.8)
        panel.set_xscale("symlog", linthresh=10)
        panel.set_xlim(left=0)
        panel.set_title(comparison.title)
        panel.set_xlabel("added parameters")
        panel.set_ylabel("gain over the control, points")
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)
