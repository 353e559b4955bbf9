"""The registry of tasks, and what each of them says of itself."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina import AlphaController, CNNHost, Host, MorphogeneticModel
from esper.kasmina.hosts import ConvSegment
from esper.leyline import BLEND_STYLES, BadValueError, SeedStage, UnknownNameError
from esper.tolaria import Task, TaskRegistry, get_task
from esper.tolaria.data import DATASET_NAMES

THREE_SLOTS = ("r1c0", "r1c1", "r1c2")
FIVE_SLOTS = ("r0c0", "r1c0", "r0c1", "r1c1", "r1c2")

# name: steps, batches per step, batch, validation size, classes, parameters of the host, slots, shift, flip.
TABLE = {
    "digits_blind": (20, 16, 64, 400, 10, 390, THREE_SLOTS, 0, False),
    "digits": (20, 16, 64, 400, 10, 1_702, THREE_SLOTS, 0, False),
    "digits_varied": (20, 16, 64, 400, 10, 1_702, THREE_SLOTS, 0, False),
    "fashion_small": (20, 40, 128, 2_000, 10, 1_702, THREE_SLOTS, 0, False),
    "cifar_baseline": (20, 40, 256, 2_000, 10, 6_418, THREE_SLOTS, 4, True),
    "cifar_impaired": (20, 40, 256, 2_000, 10, 77, THREE_SLOTS, 4, True),
    "cifar_scale": (20, 40, 256, 2_000, 10, 99_922, (*THREE_SLOTS, "r1c3", "r1c4"), 4, True),
    "cifar_growth": (20, 62, 256, 2_000, 10, 6_418, FIVE_SLOTS, 4, True),
    "cifar_varied": (20, 94, 256, 2_000, 10, 6_418, FIVE_SLOTS, 4, True),
    "shakespeare_char": (20, 40, 32, 100_000, 65, 212_224, ("r0c0", "r0c1", "r0c2"), 0, False),
}


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the registry that a test may write to."""
    monkeypatch.setattr(TaskRegistry, "_tasks", dict(TaskRegistry._tasks))
    yield


def weights(host: Host) -> list[Tensor]:
    """Everything that a host is made of."""
    return list(host.state_dict().values())


def same(left: Host, right: Host) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(weights(left), weights(right), strict=True))


# -- the table --------------------------------------------------------------------------------------------------------


def test_all_tasks_of_the_table_exist() -> None:
    """None is missing, and the default comes first."""
    assert TaskRegistry.names() == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_start_values(name: str) -> None:
    """Length, sizes, slots and host as the design has them."""
    task = get_task(name)
    found = (
        task.steps,
        task.batches_per_step,
        task.batch,
        task.validation_size,
        task.classes,
        task.host_parameters,
        task.slot_ids,
        task.shift,
        task.flip,
    )
    assert found == TABLE[name]
    assert task.dataset in DATASET_NAMES
    assert task.name == name
    assert task.why


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # conv 1·4 + 4·8 + 8·16, norms 2·(4 + 8 + 16), linear 16·10 + 10
        ("digits_blind", 4 + 32 + 128 + 56 + 170),
        # conv 9·(3·8 + 8·16 + 16·32), norms 2·(8 + 16 + 32), linear 32·10 + 10
        ("cifar_baseline", 9 * (24 + 128 + 512) + 112 + 330),
        # conv 3·1 + 1·2 + 2·4, norms 2·(1 + 2 + 4), linear 4·10 + 10
        ("cifar_impaired", 3 + 2 + 8 + 14 + 50),
        # conv 9·(3·8 + 8·16 + 16·32 + 32·64 + 64·128), norms 2·248, linear 128·10 + 10
        ("cifar_scale", 9 * (24 + 128 + 512 + 2_048 + 8_192) + 496 + 1_290),
    ],
)
def test_host_parameters_by_hand(name: str, parameters: int) -> None:
    """The counts follow from the widths."""
    assert get_task(name).host_parameters == parameters


@pytest.mark.parametrize("name", TABLE)
def test_hosts_take_their_inputs(name: str) -> None:
    """A host gives one score per class."""
    task = get_task(name)
    host = task.make_host(0).eval()
    config = host.config()
    assert config is not None
    if task.dataset == "tinyshakespeare":
        scores = host(torch.zeros(2, 64, dtype=torch.long))
        assert scores.shape == (2, 64, task.classes)
    else:
        side, channels = config["resolution"], config["in_channels"]
        assert isinstance(side, int)
        assert isinstance(channels, int)
        assert host(torch.zeros(2, channels, side, side)).shape == (2, task.classes)
        assert task.resolution in (None, side)


@pytest.mark.parametrize(
    ("name", "slot_id", "parameters"),
    [("digits_blind", "r1c0", 64), ("digits_blind", "r1c1", 160), ("cifar_baseline", "r1c2", 1_408)],
)
def test_offers_of_depthwise(name: str, slot_id: str, parameters: int) -> None:
    """What the design counts: 64 at width 4, 160 at 8, 1,408 at 32."""
    offers = {offer.name: offer.parameters for offer in get_task(name).slot_config[slot_id].blueprints}
    assert offers["depthwise"] == parameters


@pytest.mark.parametrize("name", TABLE)
def test_slot_config(name: str) -> None:
    """The slots in the order of the task, each with something to grow, as the host has them."""
    task = get_task(name)
    assert task.slot_config.slot_ids == task.slot_ids
    host = task.build_host()
    for slot in task.slot_config.slots:
        assert slot.blueprints
        assert replace(slot, blueprints=()) == host.slots[host.slot_index(slot.slot_id)]


def test_offers_leave_out_what_does_not_fit() -> None:
    """A stream of one channel has no room for most blueprints."""
    task = get_task("cifar_impaired")
    narrow, wide = ({o.name for o in task.slot_config[slot_id].blueprints} for slot_id in ("r1c0", "r1c2"))
    assert narrow < wide
    assert "depthwise" not in narrow


def test_depthwise_fits_the_budget_of_varied_digits_once() -> None:
    """200 parameters pay for one good seed, 64 or 160, and not for both."""
    task = get_task("digits_varied")
    costs = {
        slot_id: {offer.name: offer.parameters for offer in task.slot_config[slot_id].blueprints}["depthwise"]
        for slot_id in ("r1c0", "r1c1")
    }
    assert task.parameter_budget == 200
    assert max(costs.values()) <= 200 < sum(costs.values())


# -- what follows from the spec ---------------------------------------------------------------------------------------


@pytest.mark.requirement(24)
@pytest.mark.parametrize(
    ("classes", "loss", "chance"), [(2, 0.693147, 50.0), (10, 2.302585, 10.0), (100, 4.60517, 1.0)]
)
def test_baselines_come_from_the_spec(classes: int, loss: float, chance: float) -> None:
    """A new task with 100 classes has the random-guess loss ln 100, whatever its name."""
    for name in ("digits_blind", "new"):
        task = replace(get_task("digits_blind"), name=name, classes=classes)
        assert task.random_guess_loss == pytest.approx(loss, abs=1e-6)
        assert task.chance_accuracy == chance


@pytest.mark.requirement(24)
@pytest.mark.parametrize("name", TABLE)
def test_baselines_of_registered_tasks(name: str) -> None:
    """The number of classes is that of the host's outputs."""
    task = get_task(name)
    config = task.build_host().config()
    assert config is not None
    assert config.get("classes", config.get("vocab")) == task.classes
    assert task.random_guess_loss == math.log(task.classes)


@pytest.mark.parametrize("name", TABLE)
def test_budget_is_four_times_the_host(name: str) -> None:
    """Unless the task says otherwise."""
    task = get_task(name)
    own = {"digits_varied": 200, "cifar_growth": 6_000, "cifar_varied": 6_000}
    assert task.parameter_budget == own.get(name, 4 * task.host_parameters)
    assert replace(task, budget=7).parameter_budget == 7


def test_a_budget_of_nothing_is_a_budget() -> None:
    """Zero is not 'not given'."""
    assert replace(get_task("digits_blind"), budget=0).parameter_budget == 0


def test_a_changed_copy_counts_again() -> None:
    """`replace` leaves nothing behind of the task it copied."""
    task = get_task("digits_blind")
    assert task.host_parameters == 390
    wider = replace(task, build_host=get_task("digits").build_host)
    assert wider.host_parameters == 1_702


def test_tasks_are_frozen() -> None:
    """A task cannot be changed behind the registry's back."""
    with pytest.raises(FrozenInstanceError):
        get_task("digits").batch = 1  # type: ignore[misc]  # that is the point


# -- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(13)
@pytest.mark.parametrize("name", ["digits_blind", "digits_varied", "cifar_impaired", "shakespeare_char"])
def test_hosts_are_a_pure_function_of_the_seed(name: str) -> None:
    """Weights are bit-equal whatever the global generator does; other seeds give other weights."""
    task = get_task(name)
    torch.manual_seed(1)
    first = task.make_host(5)
    torch.manual_seed(2)
    torch.rand(7)
    assert same(first, task.make_host(5))
    assert not same(first, task.make_host(6))


def test_hosts_do_not_share_weights() -> None:
    """Each is its own."""
    task = get_task("digits_blind")
    first, second = task.make_host(0), task.make_host(0)
    with torch.no_grad():
        next(first.parameters()).add_(1)
    assert not same(first, second)


@pytest.mark.invariant(13)
def test_known_host() -> None:
    """The weights of seed 0 must never change, or old runs could not be repeated."""
    host = get_task("digits_blind").make_host(0)
    total = sum(float(parameter.detach().double().abs().sum()) for parameter in host.parameters())
    assert total == pytest.approx(80.926588, rel=1e-6)


# -- defects ----------------------------------------------------------------------------------------------------------


def defect_of(host: Host) -> str:
    """What is wrong with a host of `digits_varied`, from its buffers."""
    assert isinstance(host, CNNHost)
    masks = [segment.conv.mask for segment in host.segments if isinstance(segment, ConvSegment)]
    taps = [int(mask.sum()) for mask in masks if mask is not None]
    kinds = {(9, 1.0): "none", (1, 1.0): "blind", (1, 0.0): "blind_first_slot_cut"}
    assert taps == [taps[0]] * 3
    return kinds[taps[0], float(host.conductance.min())]


def varied_host(defect: str) -> CNNHost:
    """A host of `digits_varied` that has this defect."""
    task = get_task("digits_varied")
    hosts = (task.make_host(seed) for seed in range(100))
    host = next(host for host in hosts if defect_of(host) == defect)
    assert isinstance(host, CNNHost)
    return host.eval()


def test_each_defect_occurs() -> None:
    """Of 90 hosts about 30 have each: within four deviations of 4.5. Which, is a function of the seed."""
    task = get_task("digits_varied")
    found = [defect_of(task.make_host(seed)) for seed in range(90)]
    counts = Counter(found)
    assert set(counts) == set(task.defects)
    assert all(abs(count - 30) < 18 for count in counts.values())
    assert found[:20] == [defect_of(task.make_host(seed)) for seed in range(20)]


@pytest.mark.parametrize("name", [name for name in TABLE if name != "digits_varied"])
def test_other_hosts_are_sound(name: str) -> None:
    """All that grows in them reaches the next segment."""
    assert bool((get_task(name).make_host(3).conductance == 1).all())


def test_defects_do_not_change_the_weights() -> None:
    """A blind host and a sound one of the same seed differ in their masks alone."""
    task = get_task("digits_varied")
    sound, blind = replace(task, defects=("none",)).make_host(4), replace(task, defects=("blind",)).make_host(4)
    for left, right in zip(sound.parameters(), blind.parameters(), strict=True):
        assert torch.equal(left, right)
    assert defect_of(sound) == "none"
    assert defect_of(blind) == "blind"


@pytest.mark.parametrize("defect", ["blind", "blind_first_slot_cut"])
def test_blind_convolutions_are_their_centre_tap(defect: str) -> None:
    """3×3 kernels of a blind host are 1×1 kernels."""
    for segment in varied_host(defect).segments:
        if isinstance(segment, ConvSegment):
            x = torch.randn(2, segment.conv.inputs, 6, 6)
            assert torch.allclose(segment.conv(x), F.conv2d(x, segment.conv.weight[:, :, 1:2, 1:2]), atol=1e-6)


def shuffled_in_blocks(images: Tensor) -> Tensor:
    """Pixels change places inside each 2×2 block: another shape, the same maxima."""
    turned = images.clone()
    for row in (0, 1):
        for column in (0, 1):
            turned[..., row::2, column::2] = images[..., 1 - column :: 2, row::2]
    return turned


@pytest.mark.parametrize(
    ("name", "defect", "sees"),
    [
        ("digits_blind", None, False),
        ("digits", None, True),
        ("digits_varied", "blind", False),
        ("digits_varied", "blind_first_slot_cut", False),
        ("digits_varied", "none", True),
    ],
)
def test_blind_hosts_see_no_shapes(name: str, defect: str | None, sees: bool) -> None:
    """Turning every 2×2 block of an image is seen by 3×3 kernels and not by 1×1 kernels."""
    host = get_task(name).make_host(0).eval() if defect is None else varied_host(defect)
    images = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        moved = float((host(images) - host(shuffled_in_blocks(images))).abs().max())
    assert moved > 1e-3 if sees else moved < 1e-6


def grown(host: Host, slot_id: str, blueprint: str, style: str) -> MorphogeneticModel:
    """The host with a seed of random weights at full strength in one slot."""
    model = MorphogeneticModel(host, [slot_id])
    model.germinate_seed(slot_id, blueprint, style=style)
    slot = model.seed_slots[slot_id]
    with torch.no_grad():
        for parameter in slot.parameters():
            parameter.uniform_(0.5, 1.5)
    slot.settle(
        replace(slot.state, stage=SeedStage.HOLDING, controller=AlphaController(alpha=1.0, start=1.0, target=1.0))
    )
    return model.eval()


FIRST_OFFERS = [offer.name for offer in get_task("digits_varied").slot_config["r1c0"].blueprints]


@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("blueprint", FIRST_OFFERS)
def test_the_cut_slot_has_no_effect(blueprint: str, style: str) -> None:
    """Whatever grows in the first slot, or before its pool, stays there; the same seed moves a sound host."""
    images = torch.rand(4, 1, 8, 8)
    for slot_id in ("r0c0", "r1c0"):
        cut, sound = varied_host("blind_first_slot_cut"), varied_host("none")
        assert torch.equal(grown(cut, slot_id, blueprint, style)(images), cut(images))
        assert not torch.allclose(grown(sound, slot_id, blueprint, style)(images), sound(images), atol=1e-4)


def test_only_the_first_slot_is_cut() -> None:
    """A seed in the second slot of a cut host reaches the output."""
    images = torch.rand(4, 1, 8, 8)
    for slot_id in ("r0c1", "r1c1", "r1c2"):
        host = varied_host("blind_first_slot_cut")
        assert not torch.allclose(grown(host, slot_id, "bottleneck", "add")(images), host(images), atol=1e-4)


def test_a_seed_in_the_cut_slot_gets_no_gradient() -> None:
    """The defect can be sensed: the shadow of such a seed learns nothing."""
    norms = {}
    for defect in ("blind_first_slot_cut", "blind"):
        model = MorphogeneticModel(varied_host(defect), ["r1c0"])
        model.germinate_seed("r1c0", "depthwise")
        model.tick()
        losses = model.train().losses(torch.rand(8, 1, 8, 8), torch.arange(8))
        losses["r1c0"].backward()
        gradients = [p.grad for p in model.seed_parameters("r1c0") if p.grad is not None]
        norms[defect] = sum(float(gradient.abs().sum()) for gradient in gradients)
    assert norms["blind_first_slot_cut"] == 0.0
    assert norms["blind"] > 0.0


def test_a_defect_needs_a_host_that_can_have_it() -> None:
    """Neither a GPT nor a CNN without masks can be blinded."""
    with pytest.raises(BadValueError, match="'blind' is for CNN hosts, not for GPTHost"):
        replace(get_task("shakespeare_char"), defects=("blind",)).make_host(0)
    with pytest.raises(BadValueError, match="masked=True"):
        replace(get_task("digits"), defects=("blind",)).make_host(0)


# -- the registry -----------------------------------------------------------------------------------------------------


@pytest.mark.invariant(15)
def test_unknown_task() -> None:
    """The error names the value and everything that is allowed."""
    with pytest.raises(UnknownNameError) as caught:
        get_task("digits_blnd")
    assert "'digits_blnd'" in str(caught.value)
    assert all(name in str(caught.value) for name in TABLE)


@pytest.mark.usefixtures("own_registry")
def test_register() -> None:
    """A new task can be had by its name, which nobody else may then take."""
    task = replace(get_task("digits"), name="mine", classes=100)
    assert TaskRegistry.register(task) is task
    assert get_task("mine") is task
    assert TaskRegistry.names() == [*TABLE, "mine"]
    with pytest.raises(BadValueError, match="task 'mine' is already registered"):
        TaskRegistry.register(replace(task, classes=3))
    assert get_task("mine").classes == 100


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("name", TABLE)
def test_duplicate_registration(name: str) -> None:
    """The built-in names are taken."""
    with pytest.raises(BadValueError, match=repr(name)):
        TaskRegistry.register(get_task(name))


def test_shared_task_type() -> None:
    """`get_task` hands out the registered object itself."""
    task: Task = get_task("digits")
    assert task is TaskRegistry.get("digits")
