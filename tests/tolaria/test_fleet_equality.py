"""A fleet of N equals N networks trained one by one.

The other side of each comparison is `reference.OneByOne`. Tolerances are max |difference| / max |reference| per tensor:
1e-9 in float64 after twenty minibatches, 1e-6 in fp32 after one.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fleets import (
    ADAMW,
    CPU,
    SGD,
    Growable,
    Kind,
    difference,
    evaluation_rows,
    make_fleet,
    make_lone,
    rounding_task,
    shake,
    task_of,
)
from reference import OneByOne
from torch import Tensor

from esper.kasmina import Comparison, MorphogeneticModel
from esper.kasmina.compare import PairedDifference, RowScore, score_row
from esper.kasmina.slot import Isolation, Role
from esper.leyline import ACTIVE_STAGES, SeedStage
from esper.tolaria import HostFleet, OptimiserConfig
from esper.tolaria.passes import SIDE_STREAMS, score_rows

CASES = [
    pytest.param(kind, optimiser, id=f"{kind}-{optimiser.kind}")
    for kind in ("cnn", "gpt")
    for optimiser in (SGD, ADAMW)
]
EXACT = 1e-9
"""float64, twenty minibatches."""
CLOSE = 1e-6
"""fp32, one minibatch."""


def assert_close(mine: Tensor, reference: Tensor, tolerance: float, name: str) -> None:
    """By the largest difference, relative to the largest value."""
    assert difference(mine, reference) <= tolerance, f"{name}: {difference(mine, reference):.2e}"


def assert_equal_networks(fleet: HostFleet, lone: OneByOne, tolerance: float) -> None:
    """Weights, statistics, alphas, seeds and gates, of every host; and the same in every slot."""
    for env, model in enumerate(lone.models):
        mine, reference = fleet.extract(env).state_dict(), model.state_dict()
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            assert_close(mine[name], value, tolerance, f"env {env}, {name}")
        assert_equal_states(fleet, lone, env, tolerance)


def assert_equal_states(fleet: HostFleet, lone: OneByOne, env: int, tolerance: float) -> None:
    """Counters and schedules are the same; what was measured agrees."""
    for slot_id, reference in lone.states(env).items():
        mine = fleet.states[env][slot_id]
        assert replace(mine, gradient_norm=None, auditions=(), contributions=()) == replace(
            reference, gradient_norm=None, auditions=(), contributions=()
        )
        assert (mine.gradient_norm is None) == (reference.gradient_norm is None)
        if reference.gradient_norm is not None:
            assert mine.gradient_norm == pytest.approx(reference.gradient_norm, rel=tolerance)
        for one, other in zip(mine.auditions, reference.auditions, strict=True):
            assert one == pytest.approx(other)
        for one, other in zip(mine.contributions, reference.contributions, strict=True):
            assert one == pytest.approx(other)


def assert_equal_scores(mine: RowScore, reference: RowScore, tolerance: float, name: str) -> None:
    """The same predictions, and losses that agree."""
    assert mine.accuracy == reference.accuracy, name
    assert torch.equal(mine.hits, reference.hits), name
    assert_close(mine.losses, reference.losses, tolerance, name)


def assert_equal_differences(
    mine: dict[str, PairedDifference], reference: dict[str, PairedDifference], tolerance: float
) -> None:
    """Auditions or contributions of one env."""
    assert mine.keys() == reference.keys()
    for slot_id, found in reference.items():
        assert mine[slot_id].points == pytest.approx(found.points)
        assert mine[slot_id].loss == pytest.approx(found.loss, rel=tolerance, abs=tolerance)


def assert_equal_findings(comparisons: list[Comparison], reference: list[Comparison], tolerance: float) -> None:
    """A validation of all hosts at once, and of each alone."""
    for env, (mine, alone) in enumerate(zip(comparisons, reference, strict=True)):
        assert mine.deployed is not None and alone.deployed is not None
        assert_equal_scores(mine.main, alone.main, tolerance, f"env {env}, main row")
        assert_equal_scores(mine.deployed, alone.deployed, tolerance, f"env {env}, deployed")
        assert_equal_differences(mine.auditions, alone.auditions, tolerance)
        assert_equal_differences(mine.contributions, alone.contributions, tolerance)


def stages_of(fleet: HostFleet) -> set[SeedStage]:
    """All that occur."""
    return {state.stage for states in fleet.states for state in states.values()}


def run_step(fleet: HostFleet, lone: OneByOne, tolerance: float) -> None:
    """One step of both, with what it tells compared."""
    losses, reference = fleet.train_step(), lone.train_step()
    assert_close(losses, torch.tensor(reference, dtype=losses.dtype), tolerance, "losses")
    assert_equal_findings(fleet.validate(), lone.validate(), tolerance)
    fleet.tick()
    lone.tick()


# -- twenty minibatches -----------------------------------------------------------------------------------------------


@pytest.mark.invariant(11)
@pytest.mark.parametrize(("kind", "optimiser"), [CASES[0], CASES[3]])
@pytest.mark.default_cases("cnn-sgd")
def test_equals_networks_one_by_one(kind: Kind, optimiser: OptimiserConfig) -> None:
    """Five steps of four minibatches; ramps, rests and births run on by themselves."""
    task = task_of(kind, optimiser)
    fleet, lone = make_fleet(task, dtype=torch.float64), make_lone(task, dtype=torch.float64)
    seen = stages_of(fleet)
    for _ in range(task.steps):
        run_step(fleet, lone, EXACT)
        seen |= stages_of(fleet)
    assert seen == set(SeedStage)
    assert_equal_networks(fleet, lone, EXACT)


def play(grower: Growable, step: int, slots: tuple[str, ...], blueprint: str) -> None:
    """Edits between the steps: births, ramps up and down, cuts, fossils, a second seed where one was."""
    first, second, third = slots
    if step == 0:
        grower.germinate(0, first, "norm", style="gate", tempo=2, alpha_target=0.5)
        grower.germinate(0, second, blueprint)
    elif step == 1:
        grower.prune(5, third, steps=3, curve="cosine")
        grower.advance(7, third)
    elif step == 2:
        grower.prune(2, first)
        grower.set_alpha_target(4, first, 0.2, steps=2, curve="sigmoid6")
        grower.advance(2, third)
        grower.advance(0, second)
    elif step == 3:
        grower.germinate(6, first, blueprint, style="multiply")
        grower.advance(2, second)
    elif step == 4:
        grower.fossilize(3, first)
        grower.prune(7, second)
        grower.germinate(3, third, "norm")


@pytest.mark.invariant(11)
@pytest.mark.parametrize(("kind", "optimiser"), CASES)
@pytest.mark.default_cases("cnn-sgd", "gpt-adamw")
def test_equals_them_when_structure_changes(kind: Kind, optimiser: OptimiserConfig) -> None:
    """Edits before each of the five steps."""
    task = task_of(kind, optimiser)
    fleet, lone = make_fleet(task, dtype=torch.float64), make_lone(task, dtype=torch.float64)
    blueprint = "conv_heavy" if kind == "cnn" else "lora_large"
    seen = stages_of(fleet)
    for step in range(task.steps):
        play(fleet, step, task.slot_ids, blueprint)
        play(lone, step, task.slot_ids, blueprint)
        run_step(fleet, lone, EXACT)
        seen |= stages_of(fleet)
    assert seen == set(SeedStage)
    assert_equal_networks(fleet, lone, EXACT)


@pytest.mark.invariant(11)
@pytest.mark.parametrize(("kind", "optimiser"), [CASES[1], CASES[2]])
@pytest.mark.default_cases("cnn-adamw")
def test_equals_them_after_a_restore(kind: Kind, optimiser: OptimiserConfig) -> None:
    """Three hosts go back by a step, structure and all, and train on with empty optimisers; the others go on."""
    task = task_of(kind, optimiser)
    fleet, lone = make_fleet(task, dtype=torch.float64), make_lone(task, dtype=torch.float64)
    blueprint = "conv_heavy" if kind == "cnn" else "lora_large"
    for step in range(3):
        play(fleet, step, task.slot_ids, blueprint)
        play(lone, step, task.slot_ids, blueprint)
        run_step(fleet, lone, EXACT)
        if step == 1:
            fleet.snapshots.take()
            lone.snapshot()
    for env in (2, 4, 5):
        fleet.snapshots.restore(env)
        lone.restore(env)
    assert_equal_networks(fleet, lone, EXACT)
    assert fleet.states[2][task.slot_ids[0]].stage is SeedStage.TRAINING, "cut, and back again"
    for grower in (fleet, lone):
        grower.advance(2, task.slot_ids[1])
    run_step(fleet, lone, EXACT)
    run_step(fleet, lone, EXACT)
    assert_equal_networks(fleet, lone, EXACT)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_small_fleets(n: int) -> None:
    """A fleet of one too, though it carries a second row."""
    fleet = make_fleet(task_of("cnn"), n, dtype=torch.float64, grown=False)
    lone = make_lone(task_of("cnn"), range(n), dtype=torch.float64, grown=False)
    for grower in (fleet, lone):
        grower.germinate(n - 1, "r1c1", "conv_light")
        grower.advance(n - 1, "r1c1")
    for _ in range(2):
        run_step(fleet, lone, EXACT)
    assert_equal_networks(fleet, lone, EXACT)
    assert len(fleet.losses) == n


# -- one minibatch in fp32 --------------------------------------------------------------------------------------------


def fp32_fleet(kind: Kind, optimiser: OptimiserConfig, device: torch.device = CPU) -> HostFleet:
    """Before its first minibatch. Weights that are compared are moved off zero; gradients are those of birth."""
    fleet = make_fleet(rounding_task(kind, optimiser), device=device)
    if optimiser.kind == "sgd":
        shake(fleet)
    return fleet


def gradients_of(fleet: HostFleet, env: int) -> dict[str, Tensor]:
    """As the last minibatch left them, by the names that `MorphogeneticModel` gives them; those of no use left out."""
    leaves = fleet.host.weights.leaves
    found = {f"body.host.{name}": leaf.grad[env] for name, leaf in leaves.items() if leaf.grad is not None}
    for slot_id, state in fleet.states[env].items():
        if state.stage is SeedStage.TRAINING or state.stage in ACTIVE_STAGES:
            weights = fleet.banks[slot_id, str(state.blueprint)].weights
            gradient = weights.gradient()[env]
            for name, columns in weights.columns.items():
                if state.style == "gate" or not name.startswith("gate."):
                    found[f"body.slots.{slot_id}.{name}"] = gradient[columns].view(weights.shapes[name])
    return found


def assert_equal_after_one_minibatch(
    fleet: HostFleet, env: int, reference: dict[str, Tensor], gradients: dict[str, Tensor], tolerance: float
) -> None:
    """Weights and statistics after SGD, tensor by tensor; before AdamW gradients, relative to the env's largest.

    AdamW turns the rounding of a gradient that is next to zero into a step of full size.
    """
    if fleet.task.optimiser.kind == "sgd":
        mine = fleet.extract(env).state_dict()
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            assert_close(mine[name], value, tolerance, f"env {env}, {name}")
        return
    mine, scale = gradients_of(fleet, env), max(float(gradient.abs().max()) for gradient in gradients.values())
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        gap = float((mine[name].cpu() - gradient).abs().max())
        assert gap <= tolerance * scale, f"env {env}, gradient of {name}: {gap / scale:.2e}"


@pytest.mark.parametrize(("kind", "optimiser"), CASES)
def test_equals_them_in_fp32_after_one_minibatch(kind: Kind, optimiser: OptimiserConfig) -> None:
    """Both start from the same bits."""
    fleet = fp32_fleet(kind, optimiser)
    lone = make_lone(fleet.task)
    for env, host in enumerate(lone.hosts):
        host.adopt(fleet.extract(env).train())
    fleet.train_minibatch(fleet.draw(0), optimiser.rate)
    for env, host in enumerate(lone.hosts):
        host.train_minibatch(*host.batches.minibatch(host.order_seed, 0), optimiser.rate, 1.0)
        gradients = {name: p.grad for name, p in host.model.named_parameters() if p.grad is not None}
        assert_equal_after_one_minibatch(fleet, env, dict(host.model.state_dict()), gradients, CLOSE)


def compile_kernels(fleet: HostFleet) -> None:
    """None can be loaded while a graph is captured."""
    fleet.graphs = None
    fleet.train_minibatch(fleet.draw(0), 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("kind", "optimiser"), CASES)
def test_cuda_equals_cpu_after_one_minibatch(
    kind: Kind, optimiser: OptimiserConfig, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 without TF32, to 1e-5."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    here, there = fp32_fleet(kind, optimiser), fp32_fleet(kind, optimiser, torch.device("cuda"))
    if graphs:
        compile_kernels(fp32_fleet(kind, optimiser, torch.device("cuda")))
        monkeypatch.setattr("esper.tolaria.graphs.CAPTURE_AFTER", 0)
    else:
        there.graphs = None
    for fleet in (here, there):
        fleet.train_minibatch(fleet.draw(0), optimiser.rate)
    assert there.graphs is None or there.graphs.replays == 1
    for env in range(here.n):
        reference = dict(here.extract(env).state_dict())
        assert_equal_after_one_minibatch(there, env, reference, gradients_of(here, env), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("isolation", ["shadow", "straight_through"])
def test_replays_equal_eager_minibatches(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With seeds in every stage, more banks than lanes, and an edit inside a bucket on the way, which captures
    nothing."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("esper.tolaria.graphs.CAPTURE_AFTER", 2)
    task, device = rounding_task("cnn", SGD), torch.device("cuda")
    fleets = [make_fleet(task, device=device, isolation=isolation) for _ in range(2)]
    eager, replayed = fleets
    eager.graphs = None
    assert replayed.graphs is not None
    for fleet in fleets:
        shake(fleet)
    assert len(replayed.banks) > SIDE_STREAMS
    captures = 0
    for minibatch in range(12):
        if minibatch == 8:
            captures = replayed.graphs.captures
            for fleet in fleets:
                fleet.prune(7, "r1c1")
        for fleet in fleets:
            fleet.train_minibatch(fleet.draw(minibatch), 0.01)
    assert replayed.graphs.captures == captures > 0
    assert replayed.graphs.replays >= 9
    for env in range(eager.n):
        wanted = eager.extract(env).state_dict()
        for name, value in replayed.extract(env).state_dict().items():
            assert torch.allclose(value, wanted[name], rtol=1e-3, atol=1e-4), f"env {env}, {name}"


@pytest.mark.gpu
def test_a_replay_leaves_the_results_of_other_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs share one memory pool: a later graph keeps its results where an earlier one works."""
    task, device = rounding_task("cnn", SGD), torch.device("cuda")
    compile_kernels(make_fleet(task, device=device))
    monkeypatch.setattr("esper.tolaria.graphs.CAPTURE_AFTER", 0)
    fleet = make_fleet(task, device=device)
    fleet.train_minibatch(fleet.draw(0), 0.01)
    fleet.germinate(0, "r1c0", "bottleneck")  # a bank more is a new structure
    fleet.advance(0, "r1c0")
    results = [fleet.train_minibatch(fleet.draw(1), 0.01), *fleet.norms.values()]
    before = [tensor.clone() for tensor in results]
    assert fleet.graphs is not None
    assert fleet.graphs.captures == 2
    next(iter(fleet.graphs._graphs.values())).graph.replay()
    assert all(torch.equal(tensor, value) for tensor, value in zip(results, before, strict=True))


# -- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(11)
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_one_pass_over_all_rows_equals_a_pass_for_each(kind: Kind) -> None:
    """Main rows, shadows and ablations together equal one model per row."""
    fleet = make_fleet(task_of(kind), dtype=torch.float64)
    fleet.train_step()
    rows, whose = evaluation_rows(fleet)
    batches = fleet.batches
    samples, calibration = batches.validation(), batches.calibration(fleet.task.calibration_size)
    together = score_rows(fleet, rows, samples, calibration)
    assert len(together) == len(rows) == fleet.n + len(whose)
    inputs = samples.inputs.double() if samples.inputs.is_floating_point() else samples.inputs
    calibration = calibration.double() if calibration.is_floating_point() else calibration
    asked: list[tuple[int, dict[str, Role]]] = [(env, {}) for env in range(fleet.n)]
    assert list(whose) == list(range(fleet.n, len(rows)))
    for env, slot_id in whose.values():
        acts = fleet.states[env][slot_id].stage in ACTIVE_STAGES
        asked.append((env, {slot_id: Role.SILENT if acts else Role.SHADOW}))
    for row, (env, roles) in zip(together, asked, strict=True):
        with torch.no_grad():
            alone = score_row(fleet.extract(env).body, inputs, samples.targets, roles, calibration)
        assert_equal_scores(row, alone, EXACT, f"env {env}, {roles}")


def test_chunks_change_nothing() -> None:
    """Validation in pieces of seven."""
    fleet = make_fleet(task_of("cnn"), dtype=torch.float64)
    rows, _ = evaluation_rows(fleet)
    samples, calibration = fleet.batches.validation(), fleet.batches.calibration(64)
    whole, pieces = (score_rows(fleet, rows, samples, calibration, chunk=chunk) for chunk in (512, 7))
    for left, right in zip(whole, pieces, strict=True):
        assert_equal_scores(right, left, EXACT, "chunks")


def test_validation_changes_nothing_but_what_was_measured() -> None:
    """Weights, statistics and momentum stay."""
    often, never = make_fleet(task_of("cnn")), make_fleet(task_of("cnn"))
    for _ in range(2):
        often.validate()
        often.train_step()
        often.validate()
        often.tick()
        never.train_step()
        never.tick()
    for env in range(8):
        for name, value in never.extract(env).state_dict().items():
            assert torch.equal(value, often.extract(env).state_dict()[name])


# -- taking one out ---------------------------------------------------------------------------------------------------


def trained_fleet(kind: Kind = "cnn") -> HostFleet:
    """Grown, and trained for a step."""
    fleet = make_fleet(task_of(kind))
    fleet.train_step()
    return fleet


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_extracted_models_give_what_their_rows_give(kind: Kind) -> None:
    """Evaluated with running statistics, as they would be deployed."""
    fleet = trained_fleet(kind)
    samples = fleet.batches.validation()
    for env, comparison in enumerate(fleet.validate()):
        assert comparison.deployed is not None
        model = fleet.extract(env).eval()
        with torch.no_grad():
            logits = model(samples.inputs).flatten(0, -2)
        losses = torch.nn.functional.cross_entropy(logits, samples.targets.flatten(), reduction="none")
        assert_close(comparison.deployed.losses, losses, 1e-5, f"env {env}")
        assert model.grown_parameter_count == fleet.grown_parameters(env)
        assert model.reports() == fleet.reports(env)


def test_an_extracted_model_stands_alone() -> None:
    """Training it moves nothing in the fleet; another model of the same env is as before."""
    fleet = trained_fleet()
    model, before = fleet.extract(4), fleet.extract(4).state_dict()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = fleet.batches.minibatch(0, 0)
    first = last = 0.0
    for step in range(10):
        optimiser.zero_grad()
        losses = model.losses(inputs, targets)
        torch.stack(list(losses.values())).sum().backward()
        optimiser.step()
        last = float(losses["main"].detach())
        first = first if step else last
    assert last < first
    for name, value in fleet.extract(4).state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_extracted_model_goes_on_as_the_env_would() -> None:
    """Its next seed in a slot is the one that the fleet would have planted there."""
    fleet = make_fleet(task_of("cnn"), grown=False)
    model = fleet.extract(3)
    model.germinate_seed("r1c1", "conv_light", style="gate")
    fleet.germinate(3, "r1c1", "conv_light", style="gate")
    for name, value in fleet.extract(3).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_an_extracted_model_can_be_saved_and_hardened(tmp_path: Path) -> None:
    """To disk and back; and without its slots, the fossils built in."""
    fleet = trained_fleet()
    model = fleet.extract(5).eval()
    model.save(tmp_path)
    again = MorphogeneticModel.load(tmp_path).eval()
    inputs = fleet.batches.validation().inputs
    with torch.no_grad():
        assert torch.equal(again(inputs), model(inputs))
        plain = model.harden(keep=["r1c2"]).eval()
        assert torch.allclose(plain(inputs), model(inputs), rtol=1e-5, atol=1e-6)
    assert again.reports() == fleet.reports(5)
