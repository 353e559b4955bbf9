"""What `esper evaluate` found, for a terminal."""

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from json import dumps
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from esper.leyline import OTHER_RHOS, BadValueError
from esper.leyline.records import Json
from esper.simic.evaluation.comparison import EvaluationReport, TaskComparison, run_comparisons
from esper.simic.evaluation.policies import short_names
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.statistics import CLAIM_SEEDS, Claim
from esper.simic.evaluation.workers import EvaluationConfig
from esper.simic.training.run_folder import git_hash
from esper.storage.files import replace_file, storage_errors


def policy_table(found: TaskComparison) -> Table:
    """A row per policy: means over hosts and training seeds."""
    shares = {name: found.share_of_oracle(name) for name in found.policies}
    bound = any(share is not None for share in shares.values())
    extra = [name for name, there in (("greedy", found.greedy), ("of\noracle", bound)) if there]
    other = [f"at ρ={rho:g}" for rho in OTHER_RHOS]
    table = _table(
        found.title, "policy", "objective", *other, *extra, "accuracy\n%", "gain", "added\nparameters", "commits",
        "cost",
    )  # fmt: skip
    names = short_names(found.policies)
    for name, results in found.policies.items():
        beside = {
            "greedy": f"{_mean(found.greedy[name], 'objective'):+.2f}" if name in found.greedy else "",
            "of\noracle": "" if shares[name] is None else f"{shares[name]:.0%}",
        }
        table.add_row(
            names[name],
            f"{_mean(results, 'objective'):+.2f}",
            *(f"{fmean(v for r in results for v in r.objective_at[f'{rho:g}']):+.2f}" for rho in OTHER_RHOS),
            *(beside[column] for column in extra),
            f"{_mean(results, 'accuracy'):.1f}",
            f"{_mean(results, 'gain'):+.2f}",
            f"{_mean(results, 'added_params'):.0f}",
            f"{fmean(len(fossils) for result in results for fossils in result.fossils):.2f}",
            f"{_mean(results, 'cost'):.1f}×" if results[0].cost else "",
        )
    return table


def short_table(found: TaskComparison) -> Table:
    """The columns that matter most, for a narrow terminal."""
    table = _table(found.title, "policy", "objective", "accuracy %", "added parameters")
    for name, results in found.policies.items():
        figures = [_mean(results, column) for column in ("objective", "accuracy", "added_params")]
        table.add_row(name, f"{figures[0]:+.1f}", f"{figures[1]:.1f}", f"{figures[2]:.0f}")
    return table


def kind_table(found: TaskComparison) -> Table:
    """A row per policy and kind of host."""
    table = _table(
        f"{found.task} by kind of host", "policy", "kind", "hosts", "objective", "gain", "added", "commits per slot",
        "right slot",
    )  # fmt: skip
    names = short_names(found.kinds)
    for name, kinds in found.kinds.items():
        for kind, summary in kinds.items():
            slots = ", ".join(f"{slot} {share:.0%}" for slot, share in summary.slots.items() if share)
            right = "" if summary.right_slot is None else summary.right_slot
            if summary.right_slot_share is not None:
                right += f" {summary.right_slot_share:.0%}"
            table.add_row(
                names[name], kind, str(summary.hosts), f"{summary.objective:+.2f}", f"{summary.gain:+.2f}",
                f"{summary.added_share:.1%}", f"{summary.commits:.2f}" + (f": {slots}" if slots else ""), right,
            )  # fmt: skip
    return table


def tell_difference(compared: Claim, names: Mapping[str, str] | None = None) -> str:
    """One line; `names` are what a reader knows the policies by, where that is not their name."""
    d = compared.difference
    policy, against = ((names or {}).get(name, name) for name in (compared.policy, compared.against))
    verdicts = [
        *(["superior"] if compared.superior else []),
        *([f"not worse by {compared.margin:g}"] if compared.not_worse else []),
    ]
    return (
        f"{policy} − {against}: {d.mean:+.2f} (95 % {d.low:+.2f} to {d.high:+.2f}, bootstrap "
        f"{d.bootstrap_low:+.2f} to {d.bootstrap_high:+.2f}, adjusted p {compared.adjusted_p:.3g}, "
        f"{d.seeds} training seed{'s' if d.seeds > 1 else ''})" + (f" {', '.join(verdicts)}" if verdicts else "")
    )


def _table(title: str, *columns: str) -> Table:
    """Without lines between columns, so that names and figures fit into 80; what does not is folded, never cut."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for column in columns:
        left = column in ("policy", "kind", "commits per slot")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table


def _mean(results: Sequence[Result], name: str) -> float:
    return fmean(value for result in results for value in getattr(result, name))


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
            with storage_errors(self.picture):
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


def _print(console: Console, found: EvaluationReport) -> None:
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


def draw(found: EvaluationReport, path: Path) -> None:
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
