"""`esper report`: a run folder as one page that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from esper.karn.evaluations import read_evaluations
from esper.karn.film import film_of_growth, film_of_host
from esper.karn.film_files import save_film
from esper.karn.film_page import FILM_RULES, film_scripts
from esper.karn.growth import read_growth
from esper.karn.growth_page import growth_page
from esper.karn.page import element, page
from esper.karn.sections import (
    decisions_section,
    growth_section,
    health_section,
    learning_section,
    policies_section,
    summary_section,
)
from esper.karn.state import is_of_grower, read_header, read_run
from esper.karn.taught import read_taught, taught_section
from esper.karn.timeline import Standing, episode_at
from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole
from esper.storage.files import check_writable, replace_file

SECTIONS = {
    "summary": "What was learned",
    "teaching": "What it was taught",
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
    """Write the page of a run, with timelines of `hosts` hosts of `round`, and return its path.

    Defaults: `report.html` and `evaluation*.json` in the run folder, and the last round. The folder of a Grower has one
    model and no rounds; its page shows that. A run that was only taught has no growth, learning curves or health.
    """
    require_whole("hosts", hosts, 1)
    run_path = Path(run_path)
    target = run_path / "report.html" if out is None else Path(out)
    if is_of_grower(read_header(run_path)):
        if round is not None or evaluations:
            raise BadValueError(f"{run_path} is the folder of a Grower: it has no rounds and no evaluations; omit them")
        growth = read_growth(run_path)
        check_writable(target)
        replace_file(target, growth_page(growth))
        return target
    taught = read_taught(run_path)
    run = read_run(run_path, round, rounds_needed=taught is None or round is not None)
    check_writable(target)
    files = sorted(run_path.glob("evaluation*.json")) if evaluations is None else evaluations
    compared = [evaluation for path in files for evaluation in read_evaluations(Path(path))]
    contents = {"summary": summary_section(run)}
    contents |= {} if taught is None else {"teaching": taught_section(taught)}
    contents |= {"growth": growth_section(run, hosts)} if run.rounds else {}
    contents["policies"] = policies_section(compared)
    contents |= (
        {"learning": learning_section(run), "decisions": decisions_section(run), "health": health_section(run)}
        if run.rounds
        else {}
    )
    sections = [element("section", element("h2", SECTIONS[name]), *parts, id=name) for name, parts in contents.items()]
    title = f"Esper: {run.config['task']}, seed {run.setting('seed')}"
    links = [element("a", SECTIONS[name], href=f"#{name}") for name in contents]
    header = element("header", element("h1", title), element("nav", *links))
    replace_file(target, page(title, header, *sections, film_scripts(), rules=FILM_RULES))
    return target


def write_film(
    run_path: Path, out: Path, *, host: int | Standing | None = None, round: int | None = None, step: int | None = None
) -> Path:
    """Write the growth of one host as an animated GIF, or its end or one step as a PNG; the name of `out` says which.

    `host`: its number, or best (the default), median or worst of the round. A Grower has one model and no rounds."""
    run_path, out = Path(run_path), Path(out)
    if is_of_grower(read_header(run_path)):
        if host is not None or round is not None:
            raise BadValueError(f"{run_path} is the folder of a Grower: it has one model; omit host and round")
        film = film_of_growth(read_growth(run_path))
    else:
        run = read_run(run_path, round)
        env = host if isinstance(host, int) else episode_at(run.episodes[run.shown], host or "best").env
        film = film_of_host(run, env)
    save_film(film, out, step)
    return out
