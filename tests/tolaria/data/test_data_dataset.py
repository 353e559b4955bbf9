"""Sets by name: parts, sizes, resolution and which copy was read."""

import gzip
import hashlib
import io
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from esper.leyline.errors import BadValueError, DataError, UnknownNameError
from esper.tolaria.data import DATASET_NAMES, ImageData, data_digest, is_present, load, readers
from esper.tolaria.data.arrays import (
    ImageArrays,
    LabelledImages,
    average_pool,
    channel_statistics,
    check_image_arrays,
)
from esper.tolaria.data.directory import RemoteFile


def load_images(name: str, data_dir: Path | None = None, validation_size: int = 400, **options: int) -> ImageData:
    data = load(name, data_dir=data_dir, validation_size=validation_size, **options)
    assert isinstance(data, ImageData)
    return data


def rows(images: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_digits() -> None:
    data = load_images("digits")
    assert data.name == "digits"
    assert data.classes == tuple("0123456789")
    for part, size in ((data.train, 1000), (data.validation, 400), (data.test, 397)):
        assert part.images.shape == (size, 1, 8, 8)
        assert part.images.dtype == torch.uint8
        assert part.labels.shape == (size,)
        assert part.labels.dtype == torch.int64
        shares = torch.bincount(part.labels, minlength=10) / size
        assert (shares - 0.1).abs().max() < 0.01
    # 0..16 → 0..255: 16 becomes 255 and 8 becomes 127.5, rounded to 128.
    levels = torch.unique(data.train.images)
    assert levels.tolist() == [round(value * 255 / 16) for value in range(17)]

    from sklearn.datasets import load_digits

    everything = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    found = rows(data.train.images) + rows(data.validation.images) + rows(data.test.images)
    assert sorted(found) == sorted(image.tobytes() for image in everything)


def test_mean_and_std_are_of_the_training_part() -> None:
    data = load_images("digits", train_size=200)
    pixels = data.train.images.double() / 255
    assert data.mean == pytest.approx([pixels.mean().item()], abs=1e-12)
    assert data.std == pytest.approx([pixels.std(correction=0).item()], abs=1e-12)


def test_validation_does_not_depend_on_the_other_sizes() -> None:
    whole = load_images("digits", validation_size=300)
    small = load_images("digits", validation_size=300, train_size=100, resolution=8)
    assert len(whole.train.images) == 1100
    assert rows(small.validation.images) == rows(whole.validation.images)
    assert len(small.train.images) == 100
    assert set(rows(small.train.images)) <= set(rows(whole.train.images))
    assert rows(small.test.images) == rows(whole.test.images)
    assert torch.bincount(small.train.labels).sub(10).abs().max() <= 1


def test_images_for_the_end_of_an_episode_come_from_the_training_part() -> None:
    plain, held = load_images("digits"), load_images("digits", extra_size=200)
    assert plain.extra is None and held.extra is not None
    assert rows(held.validation.images) == rows(plain.validation.images)
    assert sorted(rows(held.extra.images) + rows(held.train.images)) == sorted(rows(plain.train.images))
    assert torch.bincount(held.extra.labels).sub(20).abs().max() <= 1
    assert data_digest(held) != data_digest(plain)
    with pytest.raises(DataError, match="1400 samples for validation"):
        load_images("digits", extra_size=1_000)
    with pytest.raises(BadValueError, match="omit extra_size 5"):
        load("tinyshakespeare", 100, extra_size=5)


def test_a_loaded_set_is_shared() -> None:
    assert load("digits", validation_size=400) is load("digits", validation_size=400)
    assert load("digits", validation_size=400) is not load("digits", validation_size=399)


def test_refusals() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown data set 'imagenet'; allowed: digits, mnist"):
        load("imagenet", validation_size=400)
    with pytest.raises(UnknownNameError):
        is_present("imagenet")
    for sizes in ({"validation_size": 1400}, {"validation_size": 400, "train_size": 1001}):
        with pytest.raises(DataError, match="ask for fewer"):
            load_images("digits", None, **sizes)
    for sizes in ({"validation_size": 0}, {"train_size": 0}):
        with pytest.raises(BadValueError, match="at least 1"):
            load_images("digits", None, **sizes)
    with pytest.raises(BadValueError, match="resolution 3 does not divide images of 8×8; allowed: 1, 2, 4, 8"):
        load_images("digits", resolution=3)


@pytest.mark.parametrize("name", [name for name in DATASET_NAMES if name != "digits"])
def test_a_missing_set_says_what_to_do(tmp_path: Path, name: str) -> None:
    assert not is_present(name, tmp_path)
    with pytest.raises(DataError) as caught:
        load(name, data_dir=tmp_path, validation_size=400)
    for word in (str(tmp_path / name), "ESPER_DATA", "--data-dir"):
        assert word in str(caught.value)


def idx_file(folder: Path, name: str, array: NDArray[np.uint8]) -> RemoteFile:
    """Write an idx.gz file into `folder`; the description of it as if it were published."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    content = gzip.compress(header + array.tobytes())
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return RemoteFile(name, len(content), "md5", hashlib.md5(content).hexdigest(), ())


def test_mnist_from_its_four_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 28, 28), dtype=np.uint8)
    labels = (np.arange(60) % 10).astype(np.uint8)
    folder = tmp_path / "mnist"
    files = (
        idx_file(folder, "train-images-idx3-ubyte.gz", images[:40]),
        idx_file(folder, "train-labels-idx1-ubyte.gz", labels[:40]),
        idx_file(folder, "t10k-images-idx3-ubyte.gz", images[40:]),
        idx_file(folder, "t10k-labels-idx1-ubyte.gz", labels[40:]),
    )
    monkeypatch.setattr(readers, "MNIST_FILES", files)
    assert is_present("mnist", tmp_path)
    data = load_images("mnist", tmp_path, validation_size=10, resolution=14)
    assert data.train.images.shape == (30, 1, 14, 14)
    assert data.validation.labels.sort().values.tolist() == list(range(10))
    # Test images are the published ones, in their order; pooled by hand.
    pooled = np.rint(images[40:].reshape(20, 14, 2, 14, 2).mean(axis=(2, 4)))
    np.testing.assert_array_equal(data.test.images[:, 0].numpy(), pooled)
    assert data.test.labels.tolist() == labels[40:].tolist()


def write_jpeg_copy(directory: Path) -> None:
    from PIL import Image

    (directory / "cifar10_jpeg").mkdir()
    with tarfile.open(directory / "cifar10_jpeg" / "cifar10-jpeg.tar.gz", "w:gz") as tar:
        for part in ("train", "test"):
            for number in range(8):
                buffer = io.BytesIO()
                Image.new("RGB", (32, 32), (number, 0, 0)).save(buffer, "JPEG")
                member = tarfile.TarInfo(f"{part}/{'ab'[number % 2]}/{number:04}.jpg")
                member.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(member, buffer)


def test_the_jpeg_copy_stands_in_only_for_a_missing_original(tmp_path: Path) -> None:
    write_jpeg_copy(tmp_path)
    assert is_present("cifar10", tmp_path)
    data = load_images("cifar10", tmp_path, validation_size=2)
    assert data.name == "cifar10_jpeg"
    assert data is load("cifar10_jpeg", data_dir=tmp_path, validation_size=2)
    assert data.train.images.shape[1:] == (3, 32, 32)
    assert data.classes == ("a", "b")

    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-python.tar.gz").write_bytes(b"damaged")
    with pytest.raises(DataError, match="7 bytes instead of 170498071"):  # present, so it is not passed over in silence
        load("cifar10", data_dir=tmp_path, validation_size=2)
    assert load("cifar10_jpeg", data_dir=tmp_path, validation_size=2).name == "cifar10_jpeg"


def test_average_pool_by_hand() -> None:
    images = np.array([[0, 1, 10, 20], [2, 3, 30, 41], [255, 255, 0, 1], [255, 255, 1, 0]], np.uint8)[None, None]
    # 6/4 = 1.5 and 101/4 = 25.25; 255; 2/4 = 0.5: halves go to the even neighbour.
    assert average_pool(images, 2).tolist() == [[[[2, 25], [255, 0]]]]
    assert average_pool(images, 4).tolist() == images.tolist()
    with pytest.raises(BadValueError, match="not square"):
        average_pool(images[:, :, :2], 2)


def test_channel_statistics_by_hand() -> None:
    images = torch.zeros(2, 2, 1, 2, dtype=torch.uint8)
    images[1, 0] = 255  # channel 0: half 0, half 1; channel 1: all 0
    assert channel_statistics(images) == ((0.5, 0.0), (0.5, 0.0))


def test_arrays_that_do_not_fit() -> None:
    good = LabelledImages(np.zeros((2, 1, 4, 4), np.uint8), np.array([0, 1]))
    assert check_image_arrays(ImageArrays(good, good, ("a", "b")), "here").train is good
    for bad, message in (
        (LabelledImages(good.images[:, 0], good.labels), r"here: expected uint8 training images \(N, C, H, W\)"),
        (LabelledImages(good.images, good.labels[:1]), "expected 2 int64 training labels"),
        (
            LabelledImages(good.images[:0], good.labels[:0]),
            r"expected uint8 training images .* got uint8 \(0, 1, 4, 4\)",
        ),
        (LabelledImages(good.images, np.array([0, 2])), r"0\.\.1; got 0\.\.2"),
        (LabelledImages(good.images[..., :3], good.labels), "but test images of"),
    ):
        with pytest.raises(DataError, match=message):
            check_image_arrays(ImageArrays(bad, good, ("a", "b")), "here")


def test_the_real_fashion_mnist_at_14(real_data: Path) -> None:
    if not is_present("fashion_mnist", real_data):
        pytest.skip(f"no fashion_mnist in {real_data}")
    data = load_images("fashion_mnist", real_data, validation_size=2_000, train_size=5_000, resolution=14)
    assert data.train.images.shape == (5_000, 1, 14, 14)
    assert data.test.images.shape == (10_000, 1, 14, 14)
    assert torch.bincount(data.validation.labels).tolist() == [200] * 10
    assert torch.bincount(data.train.labels).tolist() == [500] * 10
    assert data.mean[0] == pytest.approx(0.286, abs=0.003)
    assert data.classes[7] == "Sneaker"
    # The split rule is a constant: these are the first labels of everybody's validation set.
    assert data.validation.labels[:10].tolist() == [5, 5, 7, 4, 2, 4, 3, 1, 7, 4]


def test_importing_needs_only_torch_and_numpy() -> None:
    code = (
        "import sys, esper.tolaria.data; "
        "print([name for name in ('sklearn', 'PIL', 'rich', 'matplotlib') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
