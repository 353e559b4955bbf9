"""What a run learned, in words: every number is taken from the files."""

import statistics
from collections import Counter
from collections.abc import Sequence

from esper.karn.reading import Commit, Episode, Round, Run
from esper.karn.timeline import STANDINGS, marks_of, rank_at


def ends_of(run: Run) -> tuple[list[Round], list[Round]]:
    """The first and the last rounds, a quarter of the run each and at most five; a single one is both."""
    size = max(1, min(5, len(run.rounds) // 4))
    return run.rounds[:size], run.rounds[-size:]


def what_was_learned(run: Run) -> list[str]:
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


def _commits(run: Run, last: list[Round]) -> str:
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


def _objective(run: Run, first: list[Round], last: list[Round]) -> str:
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


def life_of(run: Run, rank: int, episode: Episode) -> str:
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
