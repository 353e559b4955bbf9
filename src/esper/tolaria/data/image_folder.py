"""Images in class folders, `train|test/<class>/<n>.jpg|png`, in an archive or unpacked.

Decoding takes seconds, so the pixels are cached in the user's cache, in a file that is named by the checksum of the
source. Nothing is written next to the user's data.
"""

import hashlib
import re
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.leyline.progress import progress_bar
from esper.storage.files import replace_file, waiting_lock
from esper.tolaria.data.arrays import ImageArrays, LabelledImages, check_image_arrays
from esper.tolaria.data.directory import SUFFIXES, archive_files, checksum, prepare_folder, user_cache

PARTS = ("train", "test")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
MAX_IMAGE_BYTES = 16 << 20


def find_image_folder(folder: Path, stem: str) -> Path | None:
    """The archive `folder/stem.*`, else `folder` itself when it holds unpacked images, else None."""
    for suffix in SUFFIXES:
        if (archive := folder / (stem + suffix)).is_file():
            return archive
    tops = (folder, *sorted(path for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
    return folder if any((top / "train").is_dir() for top in tops) else None


def read_image_folder(source: Path) -> ImageArrays:
    """Images (N, C, H, W) of an archive or a directory, sorted by class and by the numbers in their names."""
    try:
        cache = user_cache() / "decoded" / f"{source.name}-{_fingerprint(source)}.npz"
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    if (cached := _load_cache(cache)) is not None:
        return cached
    with waiting_lock(source):
        # Of several processes, the first has decoded the images for all.
        return _load_cache(cache) or _decode_into(cache, source)


def _decode_into(cache: Path, source: Path) -> ImageArrays:
    entries: Mapping[str, Path | bytes]
    if source.is_dir():
        entries = {path.relative_to(source).as_posix(): path for path in _walk(source)}
    else:
        entries = dict(archive_files(source, _is_image, max_bytes=MAX_IMAGE_BYTES))
    arrays = check_image_arrays(_decode(entries, source), source)
    _write_cache(arrays, cache)
    return arrays


def _walk(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if _is_image(path.relative_to(directory).as_posix()))


def _is_image(name: str) -> bool:
    """Whether `name` is `[top/]train|test/<class>/<file>` with an image's suffix, and no shadow file of macOS."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    in_class = len(path.parts) in (3, 4) and path.parts[-3] in PARTS
    return in_class and not hidden and path.suffix.lower() in IMAGE_SUFFIXES


def _fingerprint(source: Path) -> str:
    """Hexadecimal digits that change with the source: its bytes, or a directory's names, sizes and times."""
    if not source.is_dir():
        return f"{checksum(source, 'sha256')[:16]}-{source.stat().st_size}"
    digest = hashlib.sha256()
    for path in _walk(source):
        status = path.stat()
        digest.update(f"{path.relative_to(source).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _by_class_and_number(path: PurePosixPath) -> tuple[str, list[str | int], str]:
    """A key that sorts by class, and puts 2.jpg before 10.jpg."""
    pieces = re.split(r"(\d+)", path.name)
    return path.parent.name, [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], str(path)


def _decode(entries: Mapping[str, Path | bytes], source: Path) -> ImageArrays:
    paths = sorted(map(PurePosixPath, entries), key=_by_class_and_number)
    train, test = ([path for path in paths if path.parts[-3] == part] for part in PARTS)
    if not train or not test:
        raise DataError(f"{source}: expected images as train|test/<class>/<n>.jpg|png; found {len(entries)} such files")
    if len(tops := {path.parts[:-3] for path in paths}) > 1:
        raise DataError(f"{source}: expected one top folder at most; found {sorted('/'.join(top) for top in tops)}")
    classes, test_classes = (sorted({path.parent.name for path in part}) for part in (train, test))
    if classes != test_classes:
        raise DataError(f"{source}: training classes {classes} but test classes {test_classes}")
    parts, shape = [], None
    with progress_bar(f"decoding {source.name}", len(entries)) as advance:
        for part in (train, test):
            images = []
            for path in part:
                images.append(_decode_image(entries[str(path)], f"{source}: {path}", shape))
                shape = images[0].shape
                advance(1)
            labels = np.array([classes.index(path.parent.name) for path in part], np.int64)
            parts.append(LabelledImages(np.stack(images), labels))
    return ImageArrays(parts[0], parts[1], tuple(classes))


def _decode_image(content: Path | bytes, where: str, shape: tuple[int, ...] | None) -> NDArray[np.uint8]:
    """Pixels (C, H, W) of one image, which must have `shape` if that is known."""
    from PIL import Image

    try:
        with Image.open(BytesIO(content) if isinstance(content, bytes) else content, formats=("JPEG", "PNG")) as image:
            if image.mode not in ("L", "RGB"):
                raise DataError(f"{where}: expected a grey or RGB image; found mode {image.mode}")
            own_shape = (len(image.mode), image.height, image.width)
            if shape is not None and own_shape != shape:  # before decoding, as the header alone tells
                raise DataError(f"{where}: expected (C, H, W) {shape} as in the images before; found {own_shape}")
            pixels: NDArray[np.uint8] = np.asarray(image)
    except DataError:
        raise
    except Exception as error:  # damaged bytes can make a decoder fail in any way at all
        raise DataError(f"{where} is truncated or damaged: {error}") from error
    return pixels.reshape(*own_shape[1:], own_shape[0]).transpose(2, 0, 1)


def _load_cache(path: Path) -> ImageArrays | None:
    """Cached pixels; None if there are none, or if the file is damaged."""
    try:
        # Opened here, as np.load leaves a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as cache:
            train, test = (LabelledImages(cache[f"{part}_images"], cache[f"{part}_labels"]) for part in PARTS)
            return check_image_arrays(ImageArrays(train, test, tuple(cache["classes"].tolist())), path)
    except (OSError, EOFError, KeyError, ValueError, TypeError, zlib.error, zipfile.BadZipFile):
        return None


def _write_cache(arrays: ImageArrays, path: Path) -> None:
    """Write the pixels, if the path can be written."""
    content = {"classes": np.array(arrays.classes)}
    for part, (images, labels) in zip(PARTS, arrays[:2], strict=True):
        content |= {f"{part}_images": images, f"{part}_labels": labels}
    file = BytesIO()
    np.savez(file, **content)  # type: ignore[arg-type]  # its keywords are arrays, or one flag
    with suppress(OSError):  # a full disk, say: the pixels are decoded anyway
        if prepare_folder(path.parent):
            replace_file(path, file.getvalue())
