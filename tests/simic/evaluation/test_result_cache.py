"""The result cache: interrupted evaluations are resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simic.training.tiny import NAME, tiny_task

from esper.leyline import BadValueError
from esper.simic.evaluation import cache, comparison, policies, workers
from esper.simic.evaluation.arena import AT_ONCE
from esper.simic.evaluation.cache import ResultCache
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.final_log import sign_final
from esper.simic.evaluation.policies import Contender, EvaluationConfig, PolicySpec
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.workers import Job, run_contenders
from esper.tolaria import TaskRegistry, get_task
from esper.tolaria.data import ImageData, ImagePart, TextData, data_digest

CONFIG = EvaluationConfig("digits_blind", 6, 7)
RULES = [Contender(CONFIG, PolicySpec.parse(spec)) for spec in ("wait", "random", "schedule")]


class StoppedError(Exception):
    """Stands for a kill."""


class Ran(list[tuple[str, int]]):
    """Which contender was run on which host; stops in the job that goes beyond so many of them."""

    stop_after = 10**9

    def run_job(self, job: Job) -> list[Result]:
        """Results that tell contender and host."""
        self.extend((one.spec.text, host) for one in job.contenders for host in job.hosts)
        if len(self) > self.stop_after:
            raise StoppedError
        return [
            Result(
                [float(host) for host in job.hosts], [1.5] * len(job.hosts), [float("inf")] * len(job.hosts),
                [3] * len(job.hosts), [[Fossil("r1c0", one.spec.text, alpha=0.5)] for _ in job.hosts],
                {"train": [2.0] * len(job.hosts)}, {"1": [0.25] * len(job.hosts)},
            )
            for one in job.contenders
        ]  # fmt: skip


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """No host lives; three contenders have two hosts at a time."""
    ran = Ran()
    monkeypatch.setattr(workers, "run_job", ran.run_job)
    monkeypatch.setitem(AT_ONCE, "cpu", 8)
    return ran


def run(contenders: list[Contender], folder: Path | None) -> list[Result]:
    return run_contenders(contenders, cache=ResultCache(folder) if folder else None)


def test_a_stopped_evaluation_goes_on_where_it_was(ran: Ran, tmp_path: Path) -> None:
    whole = run(RULES, None)
    ran.clear()
    ran.stop_after = 8
    with pytest.raises(StoppedError):
        run(RULES, tmp_path)
    ran.stop_after = 10**9
    done = set(ran[:6])  # the first of three jobs
    ran.clear()
    assert run(RULES, tmp_path) == whole, "to the bit, what JSON does not know included"
    assert sorted(ran) == sorted({(one.spec.text, host) for one in RULES for host in range(6)} - done)
    ran.clear()
    assert run(RULES, tmp_path) == whole
    assert not ran


def test_others_may_take_part_when_it_goes_on(ran: Ran, tmp_path: Path) -> None:
    """Blocks of hosts are then cut in another way: what is whole is taken, what is not is run again."""
    run(RULES, tmp_path / "whole")
    wanted = [run([one], None)[0] for one in RULES[:2]]
    ran.clear()
    ran.stop_after = 8
    with pytest.raises(StoppedError):
        run(RULES, tmp_path / "stopped")
    ran.stop_after = 10**9
    assert run(RULES[1::-1], tmp_path / "stopped") == wanted[::-1]
    ran.clear()
    assert run(RULES[:2], tmp_path / "stopped") == run(RULES[:2], tmp_path / "whole") == wanted
    assert not ran


def test_rules_that_one_evaluation_ran_are_there_for_the_next(ran: Ran, tmp_path: Path) -> None:
    run(RULES[:2], tmp_path)
    ran.clear()
    both = run([RULES[2], RULES[0]], tmp_path)
    assert {spec for spec, _ in ran} == {"schedule"}
    assert [result.fossils[0][0].blueprint for result in both] == ["schedule", "wait"], (
        "in the order that was asked for"
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(RULES[0], spec=PolicySpec.parse("heuristic")),
        replace(RULES[0], greedy=True),
        replace(RULES[0], config=replace(CONFIG, seed=8)),
        replace(RULES[0], config=replace(CONFIG, final=True)),
        replace(RULES[0], config=replace(CONFIG, task="digits_varied")),
        replace(RULES[0], config=replace(CONFIG, preset="full")),
        replace(RULES[0], config=replace(CONFIG, isolation="straight_through")),
        replace(RULES[0], config=replace(CONFIG, device="cuda")),
        replace(RULES[0], base=Result([0.0], [0.0], [0.0], [0], [[]])),
    ],
)
def test_what_differs_was_not_run_yet(ran: Ran, tmp_path: Path, other: Contender) -> None:
    run(RULES[:1], tmp_path)
    ran.clear()
    run([other], tmp_path)
    assert len(ran) == 6


def test_another_version_of_the_code_runs_everything(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(RULES[:1], tmp_path)
    ran.clear()
    monkeypatch.setattr(cache, "source_digest", lambda: "another")
    run(RULES[:1], tmp_path)
    assert len(ran) == 6


def test_a_file_with_another_content_is_another_policy(ran: Ran, tmp_path: Path) -> None:
    file, folder = tmp_path / "tuned.json", tmp_path / "kept"
    file.write_text("one")
    tuned = [Contender(CONFIG, PolicySpec.parse(f"heuristic:{file}"))]
    run(tuned, folder)
    file.write_text("two")
    ran.clear()
    run(tuned, folder)
    assert len(ran) == 6


def test_a_shipped_plan_is_known_by_its_content(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shipped.json"
    monkeypatch.setattr(policies, "shipped_file", lambda kind, task: file)
    for content in ("one", "two", "one"):
        file.write_text(content)
        run([Contender(CONFIG, PolicySpec.parse(s)) for s in ("schedule", "heuristic:shipped")], tmp_path / "kept")
    assert len(ran) == 24, "the first content was there already"


def test_a_run_that_goes_on_is_another_policy(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it goes on while it is evaluated: what round 1 found is never taken for what round 2 would find."""
    folder, kept_in = tmp_path / "run", tmp_path / "kept"

    def finish_round(number: int) -> None:
        checkpoint = folder / "checkpoints" / f"round-{number:05}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "agent.json").write_text(str(number))

    finish_round(1)
    learned = [Contender(CONFIG, PolicySpec.parse(str(folder)))]
    run_job = workers.run_job

    def train_meanwhile(job: Job) -> list[Result]:
        results = run_job(job)
        if not (folder / "checkpoints" / "round-00002").exists():
            finish_round(2)
        return results

    monkeypatch.setattr(workers, "run_job", train_meanwhile)
    run(learned, kept_in)
    assert len(ran) == 6
    run(learned, kept_in)
    assert len(ran) == 12
    run(learned, kept_in)
    assert len(ran) == 12


def test_where_the_data_lie_does_not_matter(ran: Ran, tmp_path: Path) -> None:
    run(RULES[:1], tmp_path)
    ran.clear()
    run([replace(RULES[0], config=replace(CONFIG, data_dir=tmp_path))], tmp_path)
    assert not ran


def write_images(folder: Path, shade: int) -> Path:
    """A folder of data in which `cifar10_jpeg` is ten small pictures, each twice; `shade` is the colour of one."""
    from PIL import Image

    for part in ("train", "test"):
        for label in range(10):
            place = folder / "cifar10_jpeg" / part / f"class{label}"
            place.mkdir(parents=True)
            for number in range(2):
                colour = shade if (part, label, number) == ("train", 3, 1) else 20 * label
                Image.new("RGB", (8, 8), (colour, colour, colour)).save(place / f"{number}.png")
    return folder


def test_what_the_data_are_matters(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pictures in another place are the same data; one picture that differs, in a set of the same name and
    size, makes others of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = replace(get_task("cifar_baseline"), validation_size=10, extra_size=0, batch=2)
    small = replace(task, name="pictures", dataset="cifar10_jpeg")
    monkeypatch.setattr(TaskRegistry, "_tasks", {**TaskRegistry._tasks, "pictures": small})
    folders = [write_images(tmp_path / name, shade) for name, shade in (("one", 60), ("same", 60), ("other", 61))]
    one, same, other = (
        replace(RULES[0], config=replace(CONFIG, task="pictures", data_dir=folder)) for folder in folders
    )
    run([one], tmp_path / "kept")
    ran.clear()
    run([same], tmp_path / "kept")
    assert not ran
    run([other], tmp_path / "kept")
    assert len(ran) == 6


def test_every_part_of_the_data_counts() -> None:
    """Images and labels of all three parts, and texts; equal ones have equal digests."""
    part = ImagePart(torch.arange(12, dtype=torch.uint8).view(3, 1, 2, 2), torch.tensor([0, 1, 1]))
    images = ImageData("set", part, part, part, ("a", "b"), (0.0,), (1.0,))
    text = TextData("text", torch.arange(4), torch.arange(3), torch.arange(2), ("a", "b"))
    changed = [part._replace(images=part.images + 1), part._replace(labels=1 - part.labels)]
    changed += [part._replace(images=part.images.view(3, 1, 1, 4))]
    others: list[ImageData | TextData] = [
        *(replace(images, train=other) for other in changed),
        *(replace(images, validation=other) for other in changed),
        *(replace(images, test=other) for other in changed),
        *(replace(images, extra=other) for other in changed),
        replace(text, train=torch.arange(9)), replace(text, validation=torch.arange(9)),
        replace(text, test=torch.arange(9)),
    ]  # fmt: skip
    digests = [data_digest(data) for data in (images, text, *others)]
    assert len(set(digests)) == len(digests)
    assert data_digest(replace(images)) == digests[0]


def test_damage_is_named(ran: Ran, tmp_path: Path) -> None:
    run(RULES[:1], tmp_path)
    damaged = next(tmp_path.glob("*.json"))
    damaged.write_text(damaged.read_text()[:-20])
    with pytest.raises(BadValueError, match=f"{damaged.name}.*remove it"):
        run(RULES[:1], tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadValueError, match=r"file cannot hold results"):
        ResultCache(blocked)


def test_real_results_survive(tmp_path: Path) -> None:
    """Through `esper evaluate`'s own path, with a control that starts from another's results."""
    config = EvaluationConfig(tiny_task().name, 2, 7)
    specs = ["random-commit", "wait", "retrained:random-commit"]
    first = run_comparisons([NAME], specs, config, keep=tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 3
    second = run_comparisons([NAME], specs, config, keep=tmp_path, progress=False)
    assert second == first


def test_going_on_is_not_another_look(tmp_path: Path) -> None:
    """At test images; other hosts are one, and so is the same evaluation where nothing was kept of it."""
    entry = {"when": "then", "task": "t", "hosts": 2, "seed": 1}
    assert sign_final([tmp_path], entry, resumed=True) == []
    assert sign_final([tmp_path], {**entry, "when": "later"}, resumed=True) == []
    assert "2 times, first at then" in sign_final([tmp_path], {**entry, "seed": 2}, resumed=True)[0]
    assert sign_final([tmp_path], entry)


def test_nothing_is_signed_where_nothing_can_be_kept(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed: list[object] = []
    monkeypatch.setattr(comparison, "sign_policies", lambda *given, **more: signed.append(given))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadValueError, match="cannot hold results"):
        run_comparisons(["digits_blind"], ["wait"], replace(CONFIG, final=True), keep=tmp_path / "file")
    assert not signed
