"""A value that is not finite stays in the env where it arose: in training, validation and probing, on both devices."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from fleets import (
    Kind,
    Seedling,
    assert_same,
    assert_same_score,
    difference,
    everything_of,
    grow,
    make_fleet,
    same_bits,
    shake,
    task_of,
)
from torch import Tensor

from esper.kasmina.compare import RowScore
from esper.kasmina.slot import Isolation
from esper.leyline import SeedStage
from esper.tolaria import HostFleet, Symptom
from esper.tolaria.batches import Samples
from esper.tolaria.measurement import Prober

N, MINIBATCHES, RATE = 6, 4, 0.01
FIRST, INNER = 0, 2
"""The env that padding repeats, and one between two neighbours."""
ENVS = pytest.mark.parametrize("env", [FIRST, INNER])
STYLES = ("add", "multiply", "gate")


class Place(NamedTuple):
    """Where a fleet runs, in which precision, and how closely two runs agree there (0: to the bit)."""

    device: str
    compute: torch.dtype
    tolerance: float


PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(Place("cpu", torch.float32, 0.0), id="cpu"),
        pytest.param(Place("cuda", torch.float32, 1e-3), id="cuda", marks=pytest.mark.gpu),
        pytest.param(Place("cuda", torch.bfloat16, 5e-2), id="cuda_bfloat16", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def early_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA: two eager minibatches, then replayed ones; no TF32."""
    monkeypatch.setattr("esper.tolaria.graphs.CAPTURE_AFTER", 2)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def fleet_of(place: Place, kind: Kind, blueprint: str, isolation: Isolation = "shadow") -> HostFleet:
    """In every env a seed that acts and one that trains, of every style; weights away from their birth."""
    device = torch.device(place.device)
    fleet = make_fleet(task_of(kind), N, device=device, grown=False, isolation=isolation, compute=place.compute)
    stages = enumerate((SeedStage.BLENDING, SeedStage.TRAINING))
    seedlings = [
        Seedling(env, slot, blueprint, STYLES[env % 3], stage, 0.7, 0) for slot, stage in stages for env in range(N)
    ]
    grow(fleet, seedlings, fleet.task.slot_ids)
    shake(fleet, 0.1)
    fleet.snapshots.take()
    return fleet


class Found(NamedTuple):
    """What a run of a fleet gives for one env."""

    values: dict[str, Tensor]
    scores: list[RowScore]


def run(fleet: HostFleet, spoil: Callable[[Samples], Samples]) -> list[Found]:
    """Train, probe and validate; everything that came out, by env."""
    values: list[dict[str, Tensor]] = [{} for _ in range(N)]

    def keep(named: dict[str, Tensor]) -> None:
        for name, tensor in named.items():
            for env in range(N):
                values[env][name] = tensor[env].detach().cpu().clone()

    for index in range(MINIBATCHES):
        losses = fleet.train_minibatch(spoil(fleet.draw(index)), RATE)
        keep({f"loss {index}": losses, f"gradient {index}": fleet.host.weights.gradient()})
        keep({f"{key} {index}": bank.weights.gradient() for key, bank in fleet.banks.items()})
    keep(Prober(fleet)()._asdict())
    found = fleet.validate()
    scores: list[list[RowScore]] = []
    for env, comparison in enumerate(found):
        values[env] |= everything_of(fleet, env)
        for slot_id, value in (comparison.auditions | comparison.contributions).items():
            values[env][f"{slot_id} measured"] = torch.tensor([*value.points, *value.loss])
        assert comparison.deployed is not None
        scores.append([comparison.main, comparison.deployed])
    panics = fleet.govern(found)
    for panic in panics:
        values[panic.env]["panic"] = torch.tensor(Symptom.NOT_FINITE in panic.symptoms)
    assert fleet.graphs is None or fleet.graphs.replays >= MINIBATCHES - 2
    return [Found(*both) for both in zip(values, scores, strict=True)]


def assert_only_one_breaks(
    make: Callable[[], HostFleet],
    env: int,
    tolerance: float,
    harm: Callable[[HostFleet], None] = lambda _: None,
    spoil: Callable[[Samples], Samples] = lambda samples: samples,
) -> None:
    """All envs but one are what they are without the fault, and the governor restores that one alone."""
    calm, troubled = make(), make()
    with torch.no_grad():
        harm(troubled)
    wanted, found = run(calm, lambda samples: samples), run(troubled, spoil)
    assert [number for number in range(N) if "panic" in wanted[number].values] == []
    assert [number for number in range(N) if "panic" in found[number].values] == [env]
    assert found[env].values["panic"], "the governor sees that it is not finite"
    for other in set(range(N)) - {env}:
        mine, reference = found[other], wanted[other]
        if tolerance == 0:
            assert_same(mine.values, reference.values)
            for score, expected in zip(mine.scores, reference.scores, strict=True):
                assert_same_score(score, expected)
            continue
        assert mine.values.keys() == reference.values.keys()
        for name, value in mine.values.items():
            assert same_bits(value, reference.values[name]) or difference(value, reference.values[name]) < tolerance, (
                f"env {other}: {name}"
            )
        for score, expected in zip(mine.scores, reference.scores, strict=True):
            assert difference(score.losses, expected.losses) < tolerance, f"env {other}"


BLUEPRINTS: list[tuple[Kind, str]] = [
    *(("cnn", name) for name in ("norm", "attention", "depthwise", "bottleneck")),
    *(("cnn", name) for name in ("conv_small", "conv_light", "conv_heavy")),
    *(("gpt", name) for name in ("norm", "lora", "lora_large", "attention", "mlp_small", "mlp")),
]


@pytest.mark.invariant(12)
@pytest.mark.default_cases("*-acting-0-cpu", "*-training-2-cpu")
@PLACES
@ENVS
@pytest.mark.parametrize("slot", [0, 1], ids=["acting", "training"])
@pytest.mark.parametrize(("kind", "blueprint"), BLUEPRINTS)
def test_a_broken_seed_breaks_its_own_host_at_most(
    place: Place, env: int, slot: int, kind: Kind, blueprint: str
) -> None:
    """One weight, in the main rows' group or in that of the shadow rows, both with padding."""

    def harm(fleet: HostFleet) -> None:
        bank = fleet.banks[fleet.task.slot_ids[slot], blueprint]
        bank.weights.matrix[env, 1] = torch.nan if env == FIRST else torch.inf

    assert_only_one_breaks(lambda: fleet_of(place, kind, blueprint), env, place.tolerance, harm)


@pytest.mark.invariant(12)
@PLACES
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_a_broken_seed_without_a_shadow(place: Place, kind: Kind) -> None:
    """Its group is that of the main rows."""
    blueprint = "conv_light" if kind == "cnn" else "mlp"

    def harm(fleet: HostFleet) -> None:
        fleet.banks[fleet.task.slot_ids[1], blueprint].weights.matrix[INNER] = torch.nan

    assert_only_one_breaks(lambda: fleet_of(place, kind, blueprint, "straight_through"), INNER, place.tolerance, harm)


def leaves_of(kind: Kind) -> Iterator[tuple[Kind, str]]:
    """The host's weights and running statistics by name."""
    host = task_of(kind).build_host()
    buffers = [name for name, _ in host.named_buffers() if "running" in name]
    chosen = [name for name, _ in host.named_parameters()] + buffers
    return ((kind, name) for name in (chosen if kind == "cnn" else chosen[:3] + chosen[-2:]))


@pytest.mark.invariant(12)
@PLACES
@pytest.mark.parametrize(("kind", "leaf"), [*leaves_of("cnn"), *leaves_of("gpt")])
def test_a_broken_host_breaks_alone(place: Place, kind: Kind, leaf: str) -> None:
    """One number of every kind that it has."""

    def harm(fleet: HostFleet) -> None:
        stacked = (fleet.host.weights.leaves | fleet.host.buffers)[leaf]
        stacked[INNER].flatten()[:1].fill_(torch.nan if "weight" in leaf else torch.inf)

    blueprint = "conv_light" if kind == "cnn" else "mlp"
    assert_only_one_breaks(lambda: fleet_of(place, kind, blueprint), INNER, place.tolerance, harm)


@pytest.mark.invariant(12)
@PLACES
@ENVS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_images_break_their_host_alone(place: Place, env: int, value: float) -> None:
    """One pixel of one env's minibatch."""

    def spoil(samples: Samples) -> Samples:
        inputs = samples.inputs.clone()
        inputs[env, 3, 0, 4, 4] = value
        return Samples(inputs, samples.targets)

    assert_only_one_breaks(lambda: fleet_of(place, "cnn", "conv_light"), env, place.tolerance, spoil=spoil)


@pytest.mark.invariant(12)
@PLACES
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_a_broken_optimiser_breaks_its_host_alone(place: Place, kind: Kind) -> None:
    """What it remembers of a host and of a seed."""
    blueprint = "conv_light" if kind == "cnn" else "mlp"

    def harm(fleet: HostFleet) -> None:
        bank = fleet.banks[fleet.task.slot_ids[1], blueprint]
        for tensor in (*fleet.optimizer.state.values(), *bank.optimizer.state.values()):
            tensor[INNER, 3] = torch.inf

    assert_only_one_breaks(lambda: fleet_of(place, kind, blueprint), INNER, place.tolerance, harm)
