"""`esper report`: a run folder as one page that needs nothing else."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from esper.karn import panels, timeline
from esper.karn.canvas import to_svg, write_whole
from esper.karn.evaluations import Evaluation, evaluation_section, read_evaluations
from esper.karn.page import Markup, element, folded, gallery, legend, page, paragraph, picture, section, table
from esper.karn.state import Commit, Episode, Round, RunState, read_run
from esper.karn.timeline import STANDINGS, marks_of, rank_at
from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole

SECTIONS = {
    "summary": "What was learned",
    "growth": "Growth of hosts",
    "policies": "Policies compared",
    "learning": "Learning curves",
    "decisions": "Decisions",
    "health": "Health of the learner",
}


def write_report(
    run_path: Path,
    out: Path | None = None,
    *,
    evaluations: Sequence[Path] | None = None,
    hosts: int = 4,
    round: int | None = None,
) -> Path:
    """Write the page of a run and return where it lies.

    `out` defaults to `report.html` in the run folder, `evaluations` to its `evaluation*.json`; `hosts` is how many
    timelines are drawn, of `round` or of the last one.
    """
    require_whole("hosts", hosts, 1)
    run_path = Path(run_path)
    target = run_path / "report.html" if out is None else Path(out)
    run = read_run(run_path, round)
    if target.is_dir() or not target.resolve().parent.is_dir():
        raise BadValueError(f"{target} cannot be written: it is a folder, or its folder does not exist")
    files = sorted(run_path.glob("evaluation*.json")) if evaluations is None else evaluations
    read = [evaluation for path in files for evaluation in read_evaluations(Path(path))]
    write_whole(target, build_page(run, read, hosts).encode())
    return target


def build_page(run: RunState, evaluations: Sequence[Evaluation], hosts: int) -> str:
    """The whole page."""
    title = f"Esper: {run.config['task']}, seed {run.setting('seed')}"
    links = [element("a", name, href=f"#{key}") for key, name in SECTIONS.items()]
    return page(
        title,
        element("header", element("h1", title), element("nav", *links)),
        _summary(run),
        _growth(run, hosts),
        _policies(evaluations),
        _learning(run),
        _decisions(run),
        _health(run),
    )


def _section(name: str, *parts: str) -> Markup:
    return section(name, SECTIONS[name], *parts)


def _summary(run: RunState) -> Markup:
    facts = {
        "run": str(run.path),
        "task": run.setting("task"),
        "seed": run.setting("seed"),
        "rounds": f"{len(run.rounds)} complete of {run.setting('rounds')}",
        "hosts per round": _present("{0}, controls included; {1} beside each control", run, "hosts", "members"),
        "steps per episode": run.steps,
        "heads and ops": run.setting("preset"),
        "sensing of empty slots": {"True": "on", "False": "off"}.get(str(run.setting("sensing"))),
        "reward": run.setting("reward", "family"),
        "rent": _present("{0} points per doubling", run.setting("reward"), "rho"),
        "PPO": _present(
            "{0} epochs of {1} minibatches, rate {2}, target KL {3}, entropy {4}",
            run.setting("ppo"), "epochs", "minibatches", "rate", "target_kl", "entropy",
        ),
        "git": run.git or "not recorded",
        "torch": run.torch,
        "device": run.setting("device"),
    }  # fmt: skip
    entries = [
        part for name, value in facts.items() if value is not None
        for part in (element("dt", name), element("dd", str(value)))
    ]  # fmt: skip
    return _section(
        "summary",
        paragraph(" ".join(what_was_learned(run)), class_="lead"),
        element("dl", *entries),
        folded("The whole configuration", element("pre", json.dumps(run.config, indent=1, ensure_ascii=False))),
    )


def _present(sentence: str, of: object, *keys: str) -> str | None:
    """A sentence with values of the configuration; None where one of them is not recorded."""
    source = of.config if isinstance(of, RunState) else of
    if not isinstance(source, dict) or any(key not in source for key in keys):
        return None
    return sentence.format(*(source[key] for key in keys))


def _growth(run: RunState, hosts: int) -> Markup:
    chosen = timeline.choose_hosts(run.episodes[run.shown], hosts)
    pictures = [
        picture(f"host{index}", to_svg(timeline.draw_host(run, episode), f"host{index}"), life_of(run, rank, episode))
        for index, (rank, episode) in enumerate(chosen)
    ]
    return _section(
        "growth",
        paragraph(
            f"Hosts of round {run.shown}. Bars are the stages of each slot; the black line inside a bar is alpha, from"
            " 0 at its lower edge to 1 at its upper one. ▲ a seed is germinated, ★ committed, ✖ cut; a dashed line"
            " across is a panic, after which the host went back to its snapshot. A control began alike and never grew."
        ),
        legend(timeline.stage_legend()),
        *pictures,
    )


def _policies(evaluations: Sequence[Evaluation]) -> Markup:
    if not evaluations:
        return _section(
            "policies",
            paragraph(
                "No evaluation was given. ",
                element("code", "esper evaluate --policies RUN,heuristic,random,wait --json RUN/evaluation.json"),
                " compares this run with rules on hosts that none of them has seen; the next report then shows it.",
                class_="note",
            ),
        )
    parts = [part for index, each in enumerate(evaluations) for part in evaluation_section(each, f"policies{index}")]
    return _section("policies", *parts)


def _learning(run: RunState) -> Markup:
    pictures = [
        _panel(run, panel, panel.patterns[0])
        for panel in panels.LEARNING
        if any(value is not None for value in run.series(panel.patterns[0]))
    ]
    formats = {
        "objective": "+.2f", "objective_std": ".2f", "gain": "+.2f", "accuracy": ".2f", "added_parameters": ".1f",
        "committed": ".2f", "panics": ".0f",
    }  # fmt: skip
    names = [name for name in formats if name in run.column_names]
    rows = [
        (
            str(entry.number),
            *(f"{entry.columns[name]:{formats[name]}}" if name in entry.columns else "–" for name in names),
        )
        for entry in run.rounds
    ]
    head = ("round", *(name.replace("_", " ") for name in names))
    return _section(
        "learning",
        gallery(pictures, "two"),
        folded("Numbers of every round", table(head, rows, "Means over the hosts of a round; points and percent.")),
    )


def _panel(run: RunState, panel: panels.Panel, name: str, columns: list[str] | None = None) -> Markup:
    return picture(name, to_svg(panels.draw_panel(run, panel, columns), name), panel.meaning)


def _decisions(run: RunState) -> Markup:
    parts = []
    if panels.rows_of(run):
        text = (
            "How often a host germinated a seed of a kind (left) and committed one (right), round by round: the lighter"
            " the more, blank is never."
        )
        parts.append(picture("seeds", to_svg(panels.draw_decisions(run), "seeds"), text))
    else:
        parts.append(paragraph("No seed was germinated in any round.", class_="note"))
    if panels.ops_of(run):
        text = "Share of each op among all decisions of a round."
        parts.append(picture("ops", to_svg(panels.draw_ops(run), "ops"), text))
    return _section("decisions", *parts)


def _health(run: RunState) -> Markup:
    drawn, constant = panels.health_panels(run)
    pictures = [_panel(run, panel, f"health{index}", columns) for index, (panel, columns) in enumerate(drawn)]
    parts: list[Markup] = [gallery(pictures)] if pictures else []
    if constant:
        listed = ", ".join(f"{name} = {value:.4g}" for name, value in constant)
        parts.append(paragraph(f"The same in every round, to a millionth: {listed}.", class_="note"))
    if not parts:
        parts.append(paragraph("The metrics of this run have no columns of the learner.", class_="note"))
    return _section("health", *parts)


# -- the run in words -------------------------------------------------------------------------------------------------


def ends_of(run: RunState) -> tuple[list[Round], list[Round]]:
    """The first and the last rounds, a quarter of the run each and at most five; a single one is both."""
    size = max(1, min(5, len(run.rounds) // 4))
    return run.rounds[:size], run.rounds[-size:]


def what_was_learned(run: RunState) -> list[str]:
    """A paragraph of sentences."""
    first, last = ends_of(run)
    sentences = [_commits(run, last), _objective(run, first, last)]
    added = _means(first, "added_parameters"), _means(last, "added_parameters")
    shares = _means(first, "committed"), _means(last, "committed")
    if added[1] is not None and shares[1] is not None:
        sentences.append(
            f"A host of {_span(last)} ended with {added[1]:.0f} added parameters in the mean, and"
            f" {100 * shares[1]:.0f} % of hosts kept at least one seed"
            + (
                f" ({added[0]:.0f} and {100 * shares[0]:.0f} % in {_span(first)})."
                if first[0] != last[0] and added[0] is not None and shares[0] is not None
                else "."
            )
        )
    return sentences


def _commits(run: RunState, last: list[Round]) -> str:
    kept = [commit for entry in last for commit in run.commits.get(entry.number, [])]
    if not kept:
        return f"No seed was committed in {_span(last)}."
    (slot, blueprint), count = Counter((commit.slot, commit.blueprint) for commit in kept).most_common(1)[0]
    own = [commit for commit in kept if (commit.slot, commit.blueprint) == (slot, blueprint)]
    return (
        f"In {_span(last)} the seed committed most was {blueprint} in slot {slot} ({count} of {len(kept)} commits,"
        f" {100 * count / len(kept):.0f} %): germinated at step {_median(own, 'germinated')} and committed at step"
        f" {_median(own, 'committed')} in the median, of {run.steps} steps."
    )


def _objective(run: RunState, first: list[Round], last: list[Round]) -> str:
    before, after = _means(first, "objective"), _means(last, "objective")
    assert before is not None  # every round has one
    assert after is not None
    if len(run.rounds) == 1:
        return f"The objective of the one round so far is {after:+.2f} points."
    return f"The objective went from {before:+.2f} points in {_span(first)} to {after:+.2f} in {_span(last)}."


def _means(rounds: Sequence[Round], column: str) -> float | None:
    values = [entry.columns[column] for entry in rounds if column in entry.columns]
    return statistics.fmean(values) if values else None


def _median(commits: Sequence[Commit], name: str) -> str:
    return f"{statistics.median(getattr(commit, name) for commit in commits):g}"


def _span(rounds: Sequence[Round]) -> str:
    first, last = rounds[0].number, rounds[-1].number
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def rank_name(rank: int, hosts: int) -> str:
    """How a host stands among those of its round."""
    if hosts == 1:
        return "the only one"
    for name, share in STANDINGS.items():
        if rank == rank_at(share, hosts) and (name != "median" or hosts > 2):
            return f"the {name} of {hosts}"
    return f"number {rank + 1} of {hosts}"


def life_of(run: RunState, rank: int, episode: Episode) -> str:
    """One host in a sentence or two: the caption of its timeline."""
    changes = [change for change in run.changes if change.env == episode.env]
    kinds = Counter(mark.kind for mark in marks_of(changes))
    panics = [panic for panic in run.panics if panic.env == episode.env]
    parts = [
        f"Host {episode.env}, {rank_name(rank, len(run.episodes[run.shown]))} by objective ({episode.objective:+.2f}):"
        f" {_times(kinds['birth'], 'birth')}, {_times(kinds['commit'], 'commit')}, {_times(kinds['cut'], 'cut')};"
        f" hardened it reached {episode.accuracy:.1f} %, {episode.gain:+.1f} points against its control, with"
        f" {episode.added_parameters:.0f} added parameters."
    ]
    parts += [
        f" After step {panic.step} the governor took it back ({', '.join(panic.symptoms) or 'no symptom recorded'})."
        for panic in panics
    ]
    if episode.accuracies is None:
        parts.append(" The log of this run has no curves of accuracy and alpha: only stages are shown.")
    return "".join(parts)


def _times(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
