"""Memory: validations keep to their budget, nothing grows, and running out of it is an error that helps."""

import gc
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fleets import (
    AT_ONCE,
    CPU,
    Kind,
    batches_of,
    difference,
    evaluation_rows,
    held_bytes,
    make_fleet,
    same_bits,
    shake,
    task_of,
    tensors_of,
)

from esper.kasmina import SeedState, lifecycle
from esper.kasmina.compare import RowScore
from esper.leyline import BadValueError, EsperError, FleetMemoryError, GateRefusedError, SlotOccupiedError, StageError
from esper.tolaria import HostFleet
from esper.tolaria import fleet as fleet_module
from esper.tolaria.batches import Samples
from esper.tolaria.graphs import MinibatchGraphs
from esper.tolaria.memory import LiveBytes, ValidationMemory, peak_bytes
from esper.tolaria.passes import CHUNK, StackedHost, calibrate, score, score_rows
from esper.tolaria.rows import eval_rows

KINDS = pytest.mark.parametrize("kind", ["cnn", "gpt"])


# -- measuring --------------------------------------------------------------------------------------------------------


def test_live_bytes_by_hand() -> None:
    """Views cost nothing, what is gone no longer counts, what is written in place was there."""
    with LiveBytes() as meter:
        first = torch.zeros(1000)  # 4,000 bytes
        second = first.view(10, 100) + 1  # 8,000 alive
        second.mul_(2)
        del first
        third = second.sum(1)  # 4,000 + 40
    assert meter.trace == [4_000, 8_000, 4_040]
    assert meter.live == 4_040
    del second, third
    assert meter.live == 0


def test_a_peak_is_a_line_per_operation() -> None:
    """Weights (fixed) dominate with few inputs, activations (per input) with many: known from tiny passes."""

    def run(inputs: int) -> None:
        weights = torch.zeros(500)  # 2,000 bytes
        small = torch.zeros(inputs, 10)  # 40 per input
        del weights
        torch.cat([small, small, small])  # 120 more

    peak = peak_bytes(run)
    assert peak(2) == 2_000 + 2 * 40
    assert peak(100) == 100 * 160
    for inputs in (1, 7, 1_000):
        with LiveBytes() as meter:
            run(inputs)
        assert peak(inputs) == max(meter.trace)


def test_a_peak_whose_operations_vary_is_bounded() -> None:
    """Traces of unlike length: counted per input in full, never too little."""
    peak = peak_bytes(lambda inputs: [torch.zeros(100) for _ in range(inputs)])
    for inputs in (3, 10, 50):
        assert peak(inputs) >= 400 * inputs


def test_held_bytes_by_hand() -> None:
    """Storages, not views; gradients too; other objects' share can be left out."""

    class Thing:
        def __init__(self) -> None:
            self.weights = torch.zeros(10, 10, requires_grad=True)
            self.views = {"a": self.weights.detach()[0], "b": [self.weights.detach()[1]]}
            self.other = torch.zeros(7, dtype=torch.uint8)

    thing = Thing()
    assert held_bytes(thing) == 400 + 7
    assert held_bytes(thing, without=[thing.other]) == 400
    thing.weights.sum().backward()
    assert held_bytes(thing) == 400 + 7 + 4 * 100
    assert held_bytes(thing, torch.device("cuda")) == 0


# -- the budget of a validation ---------------------------------------------------------------------------------------


def memory_of(fleet: HostFleet) -> ValidationMemory:
    """What its passes need."""
    fleet.update_plan()
    return ValidationMemory(fleet, fleet.batches.validation(), fleet.batches.calibration(fleet.task.calibration_size))


@KINDS
def test_estimates_are_bounds(kind: Kind) -> None:
    """For all rows and for a few, calibrating and scoring: never less than what is alive, nor some times as much."""
    fleet = make_fleet(task_of(kind))
    memory = memory_of(fleet)
    for envs in (range(8), range(4), range(4, 8)):
        rows, _ = eval_rows(fleet, envs)
        with torch.no_grad(), LiveBytes() as meter:
            statistics = calibrate(fleet, rows, memory.calibration)
        assert (
            max(meter.trace) <= memory.needs(memory.calibrating, rows, len(memory.calibration)) <= 5 * max(meter.trace)
        )
        for inputs in (1, 5, 16):
            with torch.no_grad(), LiveBytes() as meter:
                score(fleet, rows, Samples(*(part[:inputs] for part in memory.samples)), statistics)
            assert max(meter.trace) <= memory.needs(memory.scoring, rows, inputs) <= 5 * max(meter.trace)


def test_what_fits_is_not_divided() -> None:
    """All envs at once, in the largest chunks."""
    memory = memory_of(make_fleet(task_of("cnn")))
    assert memory.divide(range(8), 1 << 30) == [(range(8), CHUNK["cpu"])]


@KINDS
def test_parts_keep_to_the_budget(kind: Kind) -> None:
    """Every env once, in order; what each pass needs is within the budget, and more inputs would not be."""
    fleet = make_fleet(task_of(kind))
    memory = memory_of(fleet)
    rows, _ = eval_rows(fleet, range(8))
    budget = memory.needs(memory.calibrating, rows, len(memory.calibration)) * 3 // 4
    parts = memory.divide(range(8), budget)
    assert len(parts) == 2
    assert [env for envs, _ in parts for env in envs] == list(range(8))
    for envs, chunk in parts:
        rows, _ = eval_rows(fleet, envs)
        assert memory.needs(memory.calibrating, rows, len(memory.calibration)) <= budget
        assert memory.needs(memory.scoring, rows, chunk) <= budget
        assert chunk == CHUNK["cpu"] or memory.needs(memory.scoring, rows, chunk + 1) > budget


@KINDS
@pytest.mark.default_cases("cnn")
def test_a_validation_keeps_to_its_budget(kind: Kind) -> None:
    """Measured while it runs, beside the scores that it returns: less than an undivided one has alive."""
    task = replace(task_of(kind), calibration_size=16)
    fleet = make_fleet(task)
    fleet.validate()
    with torch.no_grad(), LiveBytes() as meter:
        fleet.validate()
    fleet.validation_bytes = max(meter.trace) * 3 // 4
    with torch.no_grad(), LiveBytes() as divided:
        fleet.validate()
    scores = 5 * fleet.n * 4 * len(fleet.batches.validation().targets.flatten())
    assert max(divided.trace) <= fleet.validation_bytes + scores


def assert_close(mine: RowScore, reference: RowScore) -> None:
    """To 1e-12."""
    assert torch.equal(mine.hits, reference.hits)
    assert difference(mine.losses, reference.losses) < 1e-12


@KINDS
@pytest.mark.parametrize("budget", [1, 500_000])
@pytest.mark.default_cases("1-cnn", "500000-gpt")
def test_the_budget_changes_no_result(kind: Kind, budget: int) -> None:
    """Scores, auditions and contributions in float64, against those of one pass over everything."""
    whole, pieces = (make_fleet(task_of(kind), dtype=torch.float64) for _ in range(2))
    pieces.validation_bytes = budget
    for fleet in (whole, pieces):
        shake(fleet)
    runs: list[int] = []
    run = pieces.host.run
    pieces.host.run = lambda rows, *a, **k: (runs.append(len(rows)), run(rows, *a, **k))[1]  # type: ignore[method-assign,func-returns-value]
    expected, found = whole.validate(), pieces.validate()
    assert len(runs) > 10, "it was not divided"
    assert len(found) == 8
    for mine, reference in zip(found, expected, strict=True):
        assert mine.deployed is not None and reference.deployed is not None
        assert_close(mine.main, reference.main)
        assert_close(mine.deployed, reference.deployed)
        assert mine.auditions.keys() == reference.auditions.keys()
        assert mine.contributions.keys() == reference.contributions.keys()
        for slot_id, value in (reference.auditions | reference.contributions).items():
            measured = (mine.auditions | mine.contributions)[slot_id]
            assert measured.points == value.points
            assert measured.loss.value == pytest.approx(value.loss.value, abs=1e-12)
    assert [{s: x.stage for s, x in states.items()} for states in pieces.states] == [
        {s: x.stage for s, x in states.items()} for states in whole.states
    ]


def test_a_fleet_of_one_within_a_budget() -> None:
    """It cannot be divided; its inputs can."""
    fleet = HostFleet(task_of("cnn"), 1, batches=batches_of(task_of("cnn")), validation_bytes=1)
    assert len(fleet.validate()) == 1
    assert memory_of(fleet).divide(range(2), 1) == [(range(2), 1)]


@pytest.mark.parametrize("size", [0, -1])
def test_a_budget_is_positive(size: int) -> None:
    """Zero bytes are a mistake."""
    with pytest.raises(BadValueError, match=f"validation_bytes {size}"):
        HostFleet(task_of("cnn"), 2, batches=batches_of(task_of("cnn")), validation_bytes=size)


def test_an_audition_does_not_know_who_else_grows_the_same() -> None:
    """Bit for bit: a seed alone in its bank, and beside another env's."""
    fleet = make_fleet(task_of("cnn"))
    shake(fleet)
    samples, calibration = fleet.batches.validation(), fleet.batches.calibration(64)

    def audition() -> RowScore:
        rows, whose = evaluation_rows(fleet)
        (row,) = [row for row, seed in whose.items() if seed == (7, "r1c2")]
        return score_rows(fleet, rows, samples, calibration)[row]

    beside = audition()
    fleet.states[2] = {slot_id: SeedState(slot_id) for slot_id in fleet.slots}  # the other bottleneck
    fleet.restructured(2, eased=False)
    alone = audition()
    assert same_bits(alone.losses, beside.losses)


# -- running out ------------------------------------------------------------------------------------------------------

SHORTAGES: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    lambda: RuntimeError("not enough memory: you tried to allocate 12345 bytes."),
    lambda: RuntimeError("CUDA error: out of memory"),
    MemoryError,
]


def suggested(error: BaseException) -> int:
    """The N in the message."""
    found = re.search(r"a fleet of (\d+) hosts", str(error))
    assert found is not None, str(error)
    return int(found[1])


def starve(monkeypatch: pytest.MonkeyPatch, most: int, shortage: Callable[[], Exception]) -> None:
    """Minibatches of more than so many hosts run out of memory."""
    run = HostFleet.run_minibatch

    def hungry(fleet: HostFleet, *args: object) -> object:
        if fleet.n > most:
            raise shortage()
        return run(fleet, *args)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(HostFleet, "run_minibatch", hungry)


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_out_of_memory_in_a_minibatch(shortage: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed, with what was asked and half of it as the remedy; what torch said is its cause."""
    starve(monkeypatch, 4, shortage)
    fleet = make_fleet(task_of("cnn"))
    with pytest.raises(FleetMemoryError, match="out of memory on cpu while training a minibatch: 8 hosts") as caught:
        fleet.train_step()
    assert isinstance(caught.value, EsperError)
    assert isinstance(caught.value, MemoryError)
    assert type(caught.value.__cause__) is type(shortage())
    assert suggested(caught.value) == 4


def test_one_host_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of one cannot be made smaller; its batch can."""
    starve(monkeypatch, 0, MemoryError)
    fleet = make_fleet(task_of("cnn"), 1, grown=False)
    with pytest.raises(FleetMemoryError, match=r"1 hosts of task 'noise' do not fit; use a smaller batch, or a device"):
        fleet.train_step()


def test_out_of_memory_while_building(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of eight do not fit, those of four do."""

    def hungry(hosts: list[object], *args: object, **kwargs: object) -> StackedHost:
        if len(hosts) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return StackedHost(hosts, *args, **kwargs)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(fleet_module, "StackedHost", hungry)
    with pytest.raises(FleetMemoryError, match="while building the fleet: 8 hosts") as caught:
        make_fleet(task_of("cnn"))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert suggested(caught.value) == 4


def test_out_of_memory_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same for any number of hosts."""
    task = task_of("cnn")

    def hungry(*_: object) -> object:
        raise MemoryError

    monkeypatch.setattr(type(task), "load_batches", hungry)
    with pytest.raises(FleetMemoryError, match=r"while loading the data.*or a device with more memory"):
        HostFleet(task, 8)


@pytest.mark.parametrize("verb", ["validate", "germinate", "govern"])
def test_out_of_memory_elsewhere(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation, a bank for a first seed, snapshots."""
    fleet = make_fleet(task_of("cnn"), grown=False)
    found = fleet.validate()

    def hungry(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fleet_module, "measure", hungry)
    monkeypatch.setattr(fleet_module, "Bank", hungry)
    monkeypatch.setattr(fleet.snapshots, "take", hungry)
    attempts: dict[str, Callable[[], object]] = {
        "validate": fleet.validate,
        "germinate": lambda: fleet.germinate(0, "r1c0", "norm"),
        "govern": lambda: fleet.govern(found),
    }
    with pytest.raises(FleetMemoryError, match="8 hosts"):
        attempts[verb]()


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake is no shortage."""
    starve(monkeypatch, 4, lambda: RuntimeError("shapes cannot be multiplied"))
    fleet = make_fleet(task_of("cnn"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fleet.train_step()


# -- nothing grows ----------------------------------------------------------------------------------------------------


def edit(fleet: HostFleet, chance: random.Random) -> bool:
    """One edit in a random place; whether it was allowed."""
    env, slot_id = chance.randrange(fleet.n), chance.choice(fleet.task.slot_ids[:2])
    verb = chance.choice(["germinate", "germinate", "advance", "prune"])
    fleet.states[env][slot_id] = lifecycle.record_gradient(fleet.states[env][slot_id], 1.0)
    try:
        if verb == "germinate":
            style = chance.choice(["add", "gate"])
            fleet.germinate(env, slot_id, chance.choice(["norm", "conv_light"]), style=style)
        elif verb == "advance":
            fleet.advance(env, slot_id)
        else:
            fleet.prune(env, slot_id)
    except (StageError, GateRefusedError, SlotOccupiedError):
        return False
    return True


def live(fleet: HostFleet, edits: int, chance: random.Random) -> None:
    """So many edits, each followed by a minibatch, a validation and a snapshot, now and then by a panic or a reset."""
    done = 0
    while done < edits:
        if not edit(fleet, chance):
            fleet.tick()
            continue
        done += 1
        fleet.train_minibatch(fleet.draw(done), 0.01)
        found = fleet.validate() if done % 10 == 0 else None
        if done % 25 == 0:
            fleet.host.weights.matrix[chance.randrange(fleet.n)] = torch.nan
        if found is not None:
            fleet.govern(found)
        else:
            fleet.snapshots.take()
        fleet.tick()
        if done % 30 == 0:
            fleet.reset(fleet.seeds)


@pytest.mark.slow
def test_memory_does_not_grow() -> None:
    """Two hundred edits and snapshots hold what forty do."""
    fleet, chance = make_fleet(task_of("cnn"), grown=False), random.Random(3)
    live(fleet, 40, chance)
    early, snapshots = held_bytes(fleet), held_bytes(fleet.snapshots._tensors)
    assert len(fleet.banks) == 4, "not all banks were met early"
    live(fleet, 160, chance)
    assert held_bytes(fleet) == pytest.approx(early, rel=0.05)
    assert held_bytes(fleet.snapshots._tensors) == snapshots


def test_a_leak_would_show() -> None:
    """Snapshots that were kept one beside the other are found by the walk."""
    fleet = make_fleet(task_of("cnn"), grown=False)
    early = held_bytes(fleet)
    fleet.snapshots._tensors |= {f"host {step}": fleet.host.weights.matrix.clone() for step in range(5)}
    assert held_bytes(fleet) > 1.05 * early


def forget_gradients(fleet: HostFleet) -> None:
    """Which banks have some depends on what the last graph was captured for."""
    for weights in (fleet.host.weights, *(bank.weights for bank in fleet.banks.values())):
        weights.zero_grad()


@pytest.mark.gpu
def test_memory_does_not_grow_on_cuda() -> None:
    """The same for what is allocated on the device, with graphs that come and go; snapshots are in host memory."""
    device = torch.device("cuda")
    task = task_of("cnn")
    fleet = HostFleet(task, 8, device, batches=batches_of(task, device), config=AT_ONCE)
    fleet.graphs = MinibatchGraphs(fleet, capacity=2)
    chance = random.Random(3)
    for _ in range(10):
        live(fleet, 40, chance)
        if fleet.graphs.captures > fleet.graphs.capacity:
            break
    assert fleet.graphs.captures > fleet.graphs.capacity, "graphs do not come and go"
    forget_gradients(fleet)
    early, allocated = held_bytes(fleet, device), torch.cuda.memory_allocated(device)
    live(fleet, 160, chance)
    forget_gradients(fleet)
    assert held_bytes(fleet, device) == pytest.approx(early, rel=0.05)
    assert torch.cuda.memory_allocated(device) == pytest.approx(allocated, rel=0.05)
    kept = list(tensors_of(fleet.snapshots, without=[fleet]))
    assert kept
    assert {tensor.device for tensor in kept} == {CPU}


@pytest.mark.gpu
def test_a_budget_is_kept_on_cuda() -> None:
    """The allocator's own count: activations of a validation stay within the budget and what its results take."""
    device = torch.device("cuda")
    task = replace(task_of("cnn"), calibration_size=64)
    fleet = HostFleet(task, 64, device, batches=batches_of(task, device), validation_bytes=4 << 20)
    fleet.validate()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fleet.validate()
    taken = torch.cuda.max_memory_allocated(device) - before
    assert taken <= 1.25 * fleet.validation_bytes


@pytest.mark.gpu
def test_out_of_memory_on_cuda() -> None:
    """A real shortage, as torch may use a part of the device only; halving as suggested ends in a fleet that trains."""
    device = torch.device("cuda:0")
    task = replace(task_of("cnn"), batch=128)
    batches = batches_of(task, device)

    def train(n: int) -> int | None:
        try:
            HostFleet(task, n, device, batches=batches, graphs=False).train_step()
        except FleetMemoryError as error:
            assert "out of memory on cuda:0 while" in str(error)
            assert isinstance(error.__cause__, torch.OutOfMemoryError)
            return suggested(error)
        return None

    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + (256 << 20)) / total, device)
    try:
        sizes = [2048]
        while (smaller := train(sizes[-1])) is not None:
            sizes.append(smaller)
            gc.collect()
        assert 2 <= len(sizes) <= 10
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
