"""Class folders of images, in archives and unpacked, with the decoded pixels kept."""

import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.tolaria.data import image_folder, load
from esper.tolaria.data.arrays import ImageArrays
from esper.tolaria.data.image_folder import find_image_folder, read_image_folder


def picture(value: int, size: int = 4, mode: str = "RGB", format: str = "PNG") -> bytes:
    from PIL import Image

    colour = (value, value + 1, value + 2) if mode == "RGB" else value
    buffer = io.BytesIO()
    Image.new(mode, (size, size), colour).save(buffer, format)
    return buffer.getvalue()


def files(top: str = "", mode: str = "RGB") -> dict[str, bytes]:
    """Two classes; within a class the numbers, not the letters, give the order."""
    return {
        f"{top}README.md": b"not an image",
        f"{top}train/dog/10.png": picture(30, mode=mode),
        f"{top}train/dog/9.png": picture(20, mode=mode),
        f"{top}train/cat/1.png": picture(10, mode=mode),
        f"{top}test/dog/0.png": picture(50, mode=mode),
        f"{top}test/cat/0.png": picture(40, mode=mode),
        f"{top}test/cat/._0.png": b"macOS leaves such files",
    }


def write(path: Path, content: dict[str, bytes]) -> Path:
    """Write an archive or, without a suffix, a directory."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, value in content.items():
                archive.writestr(name, value)
    elif path.suffix:
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
            for name, value in content.items():
                member = tarfile.TarInfo(name)
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value))
    else:
        for name, value in content.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(value)
    return path


def first_values(images: NDArray[np.uint8]) -> list[int]:
    return [int(value) for value in images[:, 0, 0, 0]]


def assert_is_the_example(arrays: ImageArrays) -> None:
    assert arrays.classes == ("cat", "dog")
    assert arrays.train.images.shape == (3, 3, 4, 4)
    assert first_values(arrays.train.images) == [10, 20, 30]
    assert arrays.train.images[1, :, 2, 3].tolist() == [20, 21, 22]
    assert arrays.train.labels.tolist() == [0, 1, 1]
    assert first_values(arrays.test.images) == [40, 50]
    assert arrays.test.labels.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["set.tar.gz", "set.tar", "set.zip", "set"])
@pytest.mark.parametrize("top", ["", "top/", "./"])
def test_every_form_reads_the_same(tmp_path: Path, name: str, top: str) -> None:
    source = write(tmp_path / name, files(top))
    assert_is_the_example(read_image_folder(source))
    assert_is_the_example(read_image_folder(source))  # out of the kept pixels


def test_grey_images_and_jpeg(tmp_path: Path) -> None:
    grey = read_image_folder(write(tmp_path / "grey.tar", files(mode="L")))
    assert grey.train.images.shape == (3, 1, 4, 4)
    content = {f"{part}/a/{n}.jpg": picture(100, 8, "L", "JPEG") for part in ("train", "test") for n in range(2)}
    assert (read_image_folder(write(tmp_path / "jpeg.tar", content)).train.images == 100).all()


def cached(surroundings: Path) -> list[Path]:
    """The files with decoded pixels."""
    return list((surroundings / "esper" / "data" / "decoded").glob("*.npz"))


def test_pixels_are_cached_away_from_the_source(
    tmp_path: Path, private_surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the user's cache; nothing is written next to the user's data."""
    source = write(tmp_path / "set.tar.gz", files())
    read_image_folder(source)
    assert {path.name for path in tmp_path.iterdir()} == {"set.tar.gz", private_surroundings.name}
    (kept,) = cached(private_surroundings)
    with monkeypatch.context() as patch:
        patch.setattr(image_folder, "_decode", None)  # calling it would be a TypeError
        assert_is_the_example(read_image_folder(source))
    kept.write_bytes(kept.read_bytes()[:-30])
    assert_is_the_example(read_image_folder(source))  # damaged, so decoded anew
    with np.load(kept, allow_pickle=False) as whole:
        assert whole["classes"].tolist() == ["cat", "dog"]
    changed = files() | {"train/cat/1.png": picture(11)}
    assert first_values(read_image_folder(write(source, changed)).train.images) == [11, 20, 30]


def test_a_pickle_among_the_cached_pixels_is_not_loaded(tmp_path: Path, private_surroundings: Path) -> None:
    source = write(tmp_path / "set.tar", files())
    read_image_folder(source)
    (kept,) = cached(private_surroundings)
    np.savez(kept, train_images=np.array([{"an": "object"}], object))
    assert_is_the_example(read_image_folder(source))


def test_a_read_only_directory_keeps_its_pixels_in_the_users_cache(tmp_path: Path, private_surroundings: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    source = write(folder / "set.tar.gz", files())
    folder.chmod(0o555)
    try:
        assert_is_the_example(read_image_folder(source))
        assert os.listdir(folder) == ["set.tar.gz"]
        assert len(list((private_surroundings / "esper" / "data" / "decoded").glob("set.tar.gz-*.npz"))) == 1
        assert_is_the_example(read_image_folder(source))
        private_surroundings.chmod(0o555)
        (private_surroundings / "esper").rename(tmp_path / "elsewhere")
        assert_is_the_example(read_image_folder(source))  # nowhere to cache them
        assert not (private_surroundings / "esper").exists()
    finally:
        folder.chmod(0o755)
        private_surroundings.chmod(0o755)


@pytest.mark.parametrize("name", ["set.tar.gz", "set.tar", "set.zip"])
def test_truncated_archives(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, files())
    whole = path.read_bytes()
    # For a plain tar: amid the files, and at the very border between two of them, where all that is missing
    # is the mark of the end. Past that mark a tar file holds nothing but padding.
    end = len(whole.rstrip(b"\0")) if name == "set.tar" else len(whole) - 1
    lengths = (0, 100, len(whole) // 2, end, *(range(512, end, 512) if name == "set.tar" else ()))
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError) as caught:
            read_image_folder(path)
        assert str(path) in str(caught.value)
    assert os.listdir(tmp_path) == [name]


def test_a_broken_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "set.tar", files() | {"zzz": bytes(600)})
    whole = bytearray(path.read_bytes())
    whole[whole.rindex(b"zzz")] = ord("Z")
    path.write_bytes(whole)
    with pytest.raises(DataError, match="no end of archive"):
        read_image_folder(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test/dog/0.png": picture(1, size=5)}, r"test/dog/0\.png: expected .*\(3, 4, 4\).* found \(3, 5, 5\)"),
        ({"test/dog/0.png": picture(1, mode="L")}, r"found \(1, 4, 4\)"),
        ({"test/dog/0.png": picture(1, mode="RGBA")}, "mode RGBA"),
        ({"test/dog/0.png": picture(1)[:-30]}, r"test/dog/0\.png is truncated or damaged"),
        ({"test/dog/0.png": b"GIF89a"}, r"test/dog/0\.png is truncated or damaged"),
        ({"test/bird/0.png": picture(1)}, "test classes .*bird"),
        ({"other/train/dog/1.png": picture(1)}, "one top folder"),
        ({"../train/dog/1.png": picture(1)}, "leads out of the archive"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_image_folder(write(tmp_path / "set.tar", files() | change))


def test_sources_without_images(tmp_path: Path) -> None:
    for name in ("set.tar", "set.zip", "set"):
        with pytest.raises(DataError, match="found 0 such files"):
            read_image_folder(write(tmp_path / name, {"README.md": b"nothing"}))
    with pytest.raises(DataError, match="cannot be read"):
        read_image_folder(tmp_path / "absent.tar")


def test_archive_comes_before_directory(tmp_path: Path) -> None:
    assert find_image_folder(tmp_path / "set", "pack") is None
    folder = write(tmp_path / "set", files("top/"))
    assert find_image_folder(folder, "pack") == folder
    archive = write(folder / "pack.zip", files())
    assert find_image_folder(folder, "pack") == archive
    shutil.rmtree(folder / "top")
    archive.unlink()
    assert find_image_folder(folder, "pack") is None


@pytest.mark.slow
def test_the_real_jpeg_copy(real_data: Path) -> None:
    if not (real_data / "cifar10_jpeg").is_dir():
        pytest.skip(f"no cifar10_jpeg in {real_data}")
    data = load("cifar10_jpeg", data_dir=real_data, validation_size=2_000)
    assert data.name == "cifar10_jpeg"
    source = find_image_folder(real_data / "cifar10_jpeg", "cifar10-jpeg")
    assert source is not None
    arrays = read_image_folder(source)
    assert arrays.train.images.shape == (50_000, 3, 32, 32)
    assert arrays.test.images.shape == (10_000, 3, 32, 32)
    assert np.bincount(arrays.train.labels).tolist() == [5_000] * 10
    assert np.bincount(arrays.test.labels).tolist() == [1_000] * 10
    # The published mean of CIFAR-10 is (0.4914, 0.4822, 0.4465); the JPEG copy is close.
    means = arrays.train.images.mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(means, (0.4914, 0.4822, 0.4465), atol=0.002)
