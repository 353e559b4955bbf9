"""`esper report`: a run folder as one page that needs nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path

from esper.karn import curves, health, policies, timeline
from esper.karn.canvas import to_svg, write_whole
from esper.karn.evaluations import (
    Evaluation,
    read_evaluations,
)
from esper.karn.page import Markup, element, folded, gallery, legend, page, paragraph, picture, section, table
from esper.karn.reading import Run, read_run
from esper.karn.story import life_of, what_was_learned
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
    found = [evaluation for path in files for evaluation in read_evaluations(Path(path))]
    write_whole(target, build_page(run, found, hosts).encode())
    return target


def build_page(run: Run, evaluations: Sequence[Evaluation], hosts: int) -> str:
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


def _summary(run: Run) -> Markup:
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
    source = of.config if isinstance(of, Run) else of
    if not isinstance(source, dict) or any(key not in source for key in keys):
        return None
    return sentence.format(*(source[key] for key in keys))


def _growth(run: Run, hosts: int) -> Markup:
    chosen = timeline.choose_hosts(run.episodes[run.shown], hosts)
    pictures = []
    for place, (rank, episode) in enumerate(chosen):
        name = f"host{place}"
        drawing = to_svg(timeline.draw_host(run, episode), name)
        pictures.append(picture(name, drawing, life_of(run, rank, episode)))
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
    parts = [part for place, found in enumerate(evaluations) for part in policies.tell(found, f"policies{place}")]
    return _section("policies", *parts)


def _learning(run: Run) -> Markup:
    pictures = []
    for curve in curves.LEARNING:
        if any(value is not None for value in run.series(curve.column)):
            spread = "the middle half of hosts" if curve.of_host else "one standard error of such a share"
            text = f"{curve.title} after every round: the line is the mean over hosts, the band {spread}."
            drawing = to_svg(curves.draw_learning(run, curve), curve.column)
            pictures.append(picture(curve.column, drawing, text))
    columns = {
        "objective": "+.2f", "objective_std": ".2f", "gain": "+.2f", "accuracy": ".2f", "added_parameters": ".1f",
        "committed": ".2f", "panics": ".0f",
    }  # fmt: skip
    there = [name for name in columns if name in run.column_names]
    rows = [
        (
            str(entry.number),
            *(f"{entry.columns[name]:{columns[name]}}" if name in entry.columns else "–" for name in there),
        )
        for entry in run.rounds
    ]
    head = ("round", *(name.replace("_", " ") for name in there))
    return _section(
        "learning",
        gallery(pictures, "two"),
        folded("Numbers of every round", table(head, rows, "Means over the hosts of a round; points and percent.")),
    )


def _decisions(run: Run) -> Markup:
    parts = []
    if curves.rows_of(run):
        text = (
            "How often a host germinated a seed of a kind (left), and how often one stayed (right), round by round: the"
            " lighter the more, blank is never."
        )
        parts.append(picture("seeds", to_svg(curves.draw_decisions(run), "seeds"), text))
    else:
        parts.append(paragraph("No seed was germinated in any round.", class_="note"))
    if curves.ops_of(run):
        text = "Share of each op among all decisions of a round."
        parts.append(picture("ops", to_svg(curves.draw_ops(run), "ops"), text))
    return _section("decisions", *parts)


def _health(run: Run) -> Markup:
    drawn, constant = health.panels_of(run)
    pictures = []
    for place, (panel, columns) in enumerate(drawn):
        name = f"health{place}"
        pictures.append(picture(name, to_svg(health.draw_panel(run, panel, columns), name), panel.meaning))
    parts: list[Markup] = [gallery(pictures)] if pictures else []
    if constant:
        listed = ", ".join(f"{name} = {value:.4g}" for name, value in constant)
        parts.append(paragraph(f"The same in every round, to a millionth: {listed}.", class_="note"))
    if not parts:
        parts.append(paragraph("The metrics of this run have no columns of the learner.", class_="note"))
    return _section("health", *parts)
