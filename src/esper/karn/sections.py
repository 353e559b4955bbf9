"""The sections of a training run's page, and the run in words."""

import json
import statistics
from collections import Counter

from esper.karn import panels
from esper.karn.evaluations import Evaluation, evaluation_section
from esper.karn.film import film_of_host
from esper.karn.film_page import FILM_CAPTION, film_element
from esper.karn.lines import Episode
from esper.karn.page import Markup, element, facts_list, folded, note, picture, stage_legend, table
from esper.karn.state import Round, RunState
from esper.karn.timeline import MARKS, STANDINGS, choose_hosts, draw_host, marks_of, rank_at
from esper.leyline.records import Json


def summary_section(run: RunState) -> list[Markup]:
    """What was learned in words, and the settings."""
    facts = {
        "run": str(run.path),
        "task": run.setting("task"),
        "random seed": run.setting("seed"),
        "rounds": f"{len(run.rounds)} complete of {run.setting('rounds')}",
        "hosts per round": _present("{0}, controls included; {1} beside each control", run.config, "hosts", "members"),
        "steps per episode": run.steps if run.rounds else None,
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
    return [
        element("p", " ".join(what_was_learned(run)), class_="lead"),
        facts_list(facts),
        folded("The whole configuration", element("pre", json.dumps(run.config, indent=1, ensure_ascii=False))),
    ]


def _present(sentence: str, settings: Json, *keys: str) -> str | None:
    """A sentence with values of the configuration; None where one of them is not recorded."""
    if not isinstance(settings, dict) or any(key not in settings for key in keys):
        return None
    return sentence.format(*(settings[key] for key in keys))


def growth_section(run: RunState, hosts: int) -> list[Markup]:
    """Timelines and films of so many hosts of the shown round."""
    chosen = choose_hosts(run.episodes[run.shown], hosts)
    return [
        element(
            "p",
            f"Hosts of round {run.shown}. Bars are the stages of each slot; the black line inside a bar is alpha, from"
            " 0 at its lower edge to 1 at its upper one. ▲ a seed is germinated, ★ committed, ✖ cut; a dashed line"
            " across is a panic, after which the host went back to its snapshot. A control began alike and never grew.",
        ),
        stage_legend(),
        *(part for index, host in enumerate(chosen) for part in host_parts(run, f"host{index}", *host)),
    ]


def host_parts(run: RunState, name: str, rank: int, episode: Episode) -> tuple[Markup, Markup]:
    """The timeline of a host, and its film."""
    film = film_element(film_of_host(run, episode.env), f"{name}-film", FILM_CAPTION)
    timeline = picture(name, draw_host(run, episode), life_of(run, rank, episode))
    return timeline, film if rank == 0 else folded("Its network, step by step", film)


def policies_section(evaluations: list[Evaluation]) -> list[Markup]:
    """Policies compared on unseen hosts, or how to compare them."""
    if evaluations:
        return [part for index, each in enumerate(evaluations) for part in evaluation_section(each, f"policies{index}")]
    command = "esper evaluate --policies RUN,heuristic,random,wait --json RUN/evaluation.json"
    remedy = " compares this run with rules on hosts that none of them has seen; the next report then shows it."
    return [note("No evaluation was given. ", element("code", command), remedy)]


def learning_section(run: RunState) -> list[Markup]:
    """Curves over rounds."""
    pictures = [picture(panel.patterns[0], panels.draw_panel(run, panel), panel.meaning) for panel in panels.LEARNING]
    formats = {
        "objective": "+.2f", "objective_std": ".2f", "gain": "+.2f", "accuracy": ".2f", "added_parameters": ".1f",
        "committed": ".2f", "panics": ".0f",
    }  # fmt: skip
    rows = [
        (str(entry.number), *(f"{entry.columns[name]:{form}}" for name, form in formats.items()))
        for entry in run.rounds
    ]
    head = ("round", *(name.replace("_", " ") for name in formats))
    numbers = table(head, rows, "Means over the hosts of a round; points and percent.")
    return [element("div", *pictures, class_="gallery two"), folded("Numbers of every round", numbers)]


def decisions_section(run: RunState) -> list[Markup]:
    """Which seeds were germinated and committed over rounds, and the ops."""
    parts = [note("No seed was germinated in any round.")]
    if panels.rows_of(run):
        caption = (
            "How often a host germinated a seed of a kind (left) and committed one (right), round by round: the lighter"
            " the more, blank is never."
        )
        parts = [picture("seeds", panels.draw_decisions(run), caption)]
    if panels.ops_of(run):
        parts.append(picture("ops", panels.draw_ops(run), panels.OPS.meaning))
    return parts


def health_section(run: RunState) -> list[Markup]:
    """Every number of the update."""
    drawn, constant = panels.health_panels(run)
    pictures = [
        picture(f"health{index}", panels.draw_panel(run, panel), panel.meaning) for index, panel in enumerate(drawn)
    ]
    parts = [element("div", *pictures, class_="gallery three")] if pictures else []
    if constant:
        listed = ", ".join(f"{name} = {value:.4g}" for name, value in constant.items())
        parts.append(note(f"The same in every round, to a millionth: {listed}."))
    return parts


# -- the run in words -------------------------------------------------------------------------------------------------


def ends_of(run: RunState) -> tuple[list[Round], list[Round]]:
    """The first and the last rounds, a quarter of the run each and at most five; a single one is both."""
    size = max(1, min(5, len(run.rounds) // 4))
    return run.rounds[:size], run.rounds[-size:]


def what_was_learned(run: RunState) -> list[str]:
    """A paragraph of sentences."""
    if not run.rounds:
        return ["The run has no complete round: its policy is the one that it was taught."]
    first, last = ends_of(run)
    begin, end = _span(first), _span(last)
    sentences = [f"No seed was committed in {end}."]
    if commits := [commit for entry in last for commit in run.commits.get(entry.number, [])]:
        (slot, blueprint), count = Counter((commit.slot, commit.blueprint) for commit in commits).most_common(1)[0]
        own = [commit for commit in commits if (commit.slot, commit.blueprint) == (slot, blueprint)]
        born = statistics.median(commit.germinated for commit in own)
        committed = statistics.median(commit.committed for commit in own)
        sentences = [
            f"In {end} the seed committed most was {blueprint} in slot {slot} ({count} of {len(commits)} commits,"
            f" {100 * count / len(commits):.0f} %): germinated at step {born:g} and committed at step {committed:g}"
            f" in the median, of {run.steps} steps."
        ]
    before, after = _mean(first, "objective"), _mean(last, "objective")
    if len(run.rounds) == 1:
        sentences.append(f"The objective of the one round so far is {after:+.2f} points.")
    else:
        sentences.append(f"The objective went from {before:+.2f} points in {begin} to {after:+.2f} in {end}.")
    added, old_added = (_mean(rounds, "added_parameters") for rounds in (last, first))
    share, old_share = (100 * _mean(rounds, "committed") for rounds in (last, first))
    compared = f" ({old_added:.0f} and {old_share:.0f} % in {begin})." if len(run.rounds) > 1 else "."
    sentences.append(
        f"A host of {end} ended with {added:.0f} added parameters in the mean, and {share:.0f} % of hosts kept at least"
        f" one seed{compared}"
    )
    return sentences


def _mean(rounds: list[Round], column: str) -> float:
    return statistics.fmean(entry.columns[column] for entry in rounds)


def _span(rounds: list[Round]) -> str:
    first, last = rounds[0].number, rounds[-1].number
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def _rank_name(rank: int, hosts: int) -> str:
    if hosts == 1:
        return "the only one"
    for name, share in STANDINGS.items():
        if rank == rank_at(share, hosts) and (name != "median" or hosts > 2):
            return f"the {name} of {hosts}"
    return f"number {rank + 1} of {hosts}"


def life_of(run: RunState, rank: int, episode: Episode) -> str:
    """One host in a sentence or two: the caption of its timeline."""
    changes = [change for change in run.changes if change.env == episode.env]
    kinds = Counter(MARKS[mark.target][0] for mark in marks_of(changes))
    counted = (f"{kinds[noun] or 'no'} {noun}{'' if kinds[noun] == 1 else 's'}" for noun in ("birth", "commit", "cut"))
    parts = [
        f"Host {episode.env}, {_rank_name(rank, len(run.episodes[run.shown]))} by objective"
        f" ({episode.objective:+.2f}): {', '.join(counted)};"
        f" hardened it reached {episode.accuracy:.1f} %, {episode.gain:+.1f} points against its control, with"
        f" {episode.added_parameters:.0f} added parameters."
    ]
    parts += [
        f" After step {panic.step} the governor took it back ({', '.join(panic.symptoms) or 'no symptom recorded'})."
        for panic in run.panics
        if panic.env == episode.env
    ]
    return "".join(parts)
