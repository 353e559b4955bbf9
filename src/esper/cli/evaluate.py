"""`esper evaluate`, and its tables for a terminal."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from json import dumps
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from esper.leyline import OTHER_RHOS, BadValueError
from esper.leyline.numbers import CLAIM_SEEDS
from esper.leyline.records import Json
from esper.simic.distributed import World, open_world
from esper.simic.evaluation.comparison import EvaluationReport, TaskComparison, run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig, preset_of, short_names
from esper.simic.evaluation.provenance import made_with
from esper.simic.evaluation.results import overall_mean
from esper.simic.evaluation.statistics import Claim
from esper.storage.files import check_writable, replace_file, storage_errors
from esper.tolaria import get_task


def policy_table(comparison: TaskComparison) -> Table:
    """A row per policy: means over hosts and training seeds."""
    names, rows, task = short_names(comparison.policies), [], get_task(comparison.config.task)
    for name, results in comparison.policies.items():
        row = {"policy": names[name], "objective": f"{overall_mean(results, 'objective'):+.2f}"}
        for rho in OTHER_RHOS:
            row[f"at ρ={rho:g}"] = f"{fmean(v for result in results for v in result.objective_at[f'{rho:g}']):+.2f}"
        if comparison.greedy:
            greedy = comparison.greedy.get(name)
            row["greedy"] = f"{overall_mean(greedy, 'objective'):+.2f}" if greedy else ""
        if (share := comparison.share_of_oracle(name)) is not None:
            row["of\noracle"] = f"{share:.0%}"
        if (share := comparison.share_of_told(name)) is not None:
            row["of\ntold"] = f"{share:.0%}"
        row |= {
            "score\n%" if task.by_loss else "accuracy\n%": f"{overall_mean(results, 'accuracy'):.1f}",
            "gain": f"{fmean(v for result in results for v in result.gains(task)):+.2f}",
            "added\nparameters": f"{overall_mean(results, 'added_params'):.0f}",
            "commits": f"{fmean(len(fossils) for result in results for fossils in result.fossils):.2f}",
            "cost": f"{overall_mean(results, 'cost'):.1f}×" if results[0].cost else "",
        }
        rows.append(row)
    return _table(comparison.title, rows)


def kind_table(comparison: TaskComparison) -> Table:
    """A row per policy and kind of host."""
    names, rows = short_names(comparison.kinds), []
    for name, kinds in comparison.kinds.items():
        for kind, summary in kinds.items():
            slots = ", ".join(f"{slot} {share:.0%}" for slot, share in summary.slots.items() if share)
            share = "" if summary.right_slot_share is None else f" {summary.right_slot_share:.0%}"
            row = {"policy": names[name], "kind": kind, "hosts": str(summary.hosts)}
            row |= {"objective": f"{summary.objective:+.2f}", "gain": f"{summary.gain:+.2f}"}
            row |= {"added": f"{summary.added_share:.1%}"}
            row |= {"commits per slot": f"{summary.commits:.2f}" + (f": {slots}" if slots else "")}
            rows.append(row | {"right slot": (summary.right_slot or "") + share})
    return _table(f"{comparison.config.task} by kind of host", rows)


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """A table without lines between columns; long names are folded, never cut, so that it fits into 80 columns."""
    left = ("policy", "kind", "commits per slot")
    columns = (Column(name, justify="left" if name in left else "right", overflow="fold") for name in rows[0])
    table = Table(*columns, title=title, box=SIMPLE_HEAD, padding=0)
    for row in rows:
        table.add_row(*row.values())
    return table


def claim_line(claim: Claim, names: Mapping[str, str]) -> str:
    """One line about a claim; `names` are shorter names of the policies."""
    d = claim.difference
    verdicts = ["superior"] if claim.superior else []
    verdicts += [f"not worse by {claim.margin:g}"] if claim.not_worse else []
    return (
        f"{names[claim.policy]} − {names[claim.against]}: {d.mean:+.2f} (95 % {d.low:+.2f} to {d.high:+.2f}, bootstrap "
        f"{d.bootstrap_low:+.2f} to {d.bootstrap_high:+.2f}, adjusted p {claim.adjusted_p:.3g}, "
        f"{d.seeds} training seed{'s' if d.seeds > 1 else ''})" + (f" {', '.join(verdicts)}" if verdicts else "")
    )


PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class EvaluateCommand:
    """Compare policies on hosts that none of them was trained on, the same hosts for each."""

    task: str = "digits_blind"
    """Task of the hosts. Several, separated by commas, give a table each and the mean over them."""
    policies: str = "heuristic,random,random-commit,wait"
    """Policies, separated by commas: wait, random, random-commit, heuristic, heuristic:FILE, schedule, schedule:FILE,
    told, told:FILE, oracle, or a run folder. Join runs of one configuration, one per training seed, by +; files of
    several searches too. retrained:POLICY trains the architectures of another listed policy from scratch;
    static:POLICY trains static hosts of their size."""
    hosts: int = 64
    """Number of hosts that each policy grows, not counting controls."""
    seed: int = 7
    """Random seed that selects the hosts."""
    json: Path | None = None
    """Write all results to this file."""
    picture: Path | None = None
    """Draw gain against added parameters to this .png or .svg file."""
    greedy: bool = False
    """Also evaluate learned policies with the likeliest action instead of a sampled one."""
    margin: float = 1.0
    """Points by which a policy may be worse than another and still be called not worse."""
    workers: int = 1
    """Number of processes, of one thread each. On a CPU the results do not depend on it."""
    keep: Path | None = None
    """Folder for intermediate results. Run the same command again to resume."""
    record: Path | None = None
    """Folder for records of every transition, for offline learning. Yardsticks are not recorded."""
    preset: str | None = None
    """Heads and ops of the policies: core, commit or full (default: as the learned ones were trained, else core)."""
    isolation: Literal["shadow", "straight_through"] = "shadow"
    """How seeds in TRAINING learn, as in training."""
    final: bool = False
    """Use hosts of the final range and score them on test images: once, at the very end. Signed into the run folders
    (final.jsonl) before it begins."""
    device: str = "cpu"
    """Device of the hosts, such as cpu or cuda:0."""
    data_dir: Path | None = None
    """Folder of the data sets (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Evaluate, on all ranks of torchrun; rank 0 prints tables and writes the files."""
        torch.set_num_threads(1)
        with open_world() as world:
            if world.rank:
                self._compare(world)
            else:
                self._lead(world, console)

    def _lead(self, world: World, console: Console) -> None:
        for target in filter(None, (self.json, self.picture)):
            check_writable(target)
        if self.picture is not None and self.picture.suffix not in PICTURES:
            raise BadValueError(f"--picture {self.picture} must end in {' or '.join(PICTURES)}")
        report = self._compare(world)
        print_report(console, report)
        if self.json is not None:
            content = {**report.to_json(), "provenance": self._provenance()}
            replace_file(self.json.resolve(), dumps(content, indent=1, allow_nan=False) + "\n")
        if self.picture is not None:
            with storage_errors(self.picture):
                draw(report, self.picture)

    def _compare(self, world: World) -> EvaluationReport:
        tasks, policies = ([name.strip() for name in names.split(",")] for names in (self.task, self.policies))
        preset = preset_of(policies) if self.preset is None else self.preset
        hosts = (self.hosts, self.seed, preset, self.final, self.isolation, self.device, self.data_dir)
        config = EvaluationConfig(tasks[0], *hosts)
        return run_comparisons(
            tasks,
            policies,
            config,
            margin=self.margin,
            greedy=self.greedy,
            workers=self.workers,
            keep=self.keep,
            record=self.record,
            world=world,
        )

    def _provenance(self) -> dict[str, Json]:
        """What the figures were made with; paths on this machine are omitted."""
        flags = [
            f"--{flag.name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
            for flag in fields(self)
            if flag.name not in ("json", "picture", "keep", "record", "data_dir")
            and (value := getattr(self, flag.name)) != flag.default
        ]
        return made_with(" ".join(["esper evaluate", *flags]), self.device)


def print_report(console: Console, report: EvaluationReport) -> None:
    """Print warnings, tables and claims."""
    names = short_names(next(iter(report.tasks.values())).policies)
    items: list[Table | str] = [f"warning: {warning}" for warning in report.warnings]
    for comparison in report.tasks.values():
        items += [policy_table(comparison), *([kind_table(comparison)] if comparison.kinds else [])]
        items += [claim_line(claim, names) for claim in comparison.claims]
    if report.claims:
        means = [f"{names[name]}: {fmean(seeds):+.2f}" for name, seeds in report.objectives().items()]
        items += ["Mean over tasks", *means, *(claim_line(claim, names) for claim in report.claims)]
    if not all(claim.enough_seeds for comparison in report.tasks.values() for claim in comparison.claims):
        items += [
            f"Where a learned policy has fewer than {CLAIM_SEEDS} training seeds, or none takes part, a difference is "
            "a report, not a claim. The same holds for plans of several searches."
        ]
    for item in items:
        console.print(item, markup=False)


def draw(report: EvaluationReport, path: Path) -> None:
    """Draw gain against added parameters, a panel per task: hosts as dots, the mean of each policy on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(report.tasks), 4.5), layout="constrained")
    panels = figure.subplots(1, len(report.tasks), squeeze=False)[0]
    for panel, comparison in zip(panels, report.tasks.values(), strict=True):
        names, task = short_names(comparison.policies), get_task(comparison.config.task)
        for number, (name, results) in enumerate(comparison.policies.items()):
            added = [parameters for result in results for parameters in result.added_params]
            gain = [points for result in results for points in result.gains(task)]
            colour = f"C{number % 10}"
            panel.plot(added, gain, ".", color=colour, alpha=0.25, markersize=5)
            style = {"color": colour, "markersize": 10, "markeredgecolor": "black", "label": names[name]}
            panel.plot(fmean(added), fmean(gain), "o", **style)
        panel.axhline(0.0, color="grey", linewidth=0.8)
        panel.set_xscale("symlog", linthresh=10)
        panel.set_xlim(left=0)
        panel.set(title=comparison.title, xlabel="added parameters", ylabel="gain over the control, points")
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)
