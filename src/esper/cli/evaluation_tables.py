"""What `esper evaluate` found, for a terminal."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from esper.simic.training.comparison import Comparison
from esper.simic.training.named import short_names
from esper.simic.training.results import OTHER_RHOS, Result
from esper.simic.training.verdicts import Compared


def policy_table(found: Comparison) -> Table:
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


def short_table(found: Comparison) -> Table:
    """The columns that matter most, for a narrow terminal."""
    table = _table(found.title, "policy", "objective", "accuracy %", "added parameters")
    for name, results in found.policies.items():
        figures = [_mean(results, column) for column in ("objective", "accuracy", "added_params")]
        table.add_row(name, f"{figures[0]:+.1f}", f"{figures[1]:.1f}", f"{figures[2]:.0f}")
    return table


def kind_table(found: Comparison) -> Table:
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


def tell_difference(compared: Compared, names: Mapping[str, str] | None = None) -> str:
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
