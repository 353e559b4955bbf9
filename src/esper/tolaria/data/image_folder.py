"""Images in class folders, `train|test/<class>/<n>.jpg|png`, in an archive or unpacked.

Decoding tens of thousands of files takes seconds, so the pixels are kept as one .npz file beside the source or, where
that folder is read-only, in the user's cache. Its name holds the checksum of the source: another source, another file.
"""

import hashlib
import os
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import DataError
from esper.leyline.progress import progress_bar
from esper.tolaria.data.arrays import ImageArrays, LabelledImages, check_image_arrays
from esper.tolaria.data.directory import SUFFIXES, archive_files, atomic_file, checksum, prepare_folder, user_cache

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


def read_image_folder(source: Path, *, caches: Sequence[Path] | None = None) -> ImageArrays:
    """Images (N, C, H, W), classes sorted by name, and within a class by the numbers in their names.

    `source` is an archive or a directory. `caches` are the folders to look for the decoded pixels in, and to keep
    them in the first that is writable: by default the one that holds `source`, then the user's cache.
    """
    try:
        kept_name = f"{source.name}-{_fingerprint(source)}.npz"
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    folders = (source.parent, user_cache() / "decoded") if caches is None else tuple(caches)
    for folder in folders:
        if (cached := _load(folder / kept_name)) is not None:
            return cached
    entries: Mapping[str, Path | bytes]
    if source.is_dir():
        entries = {path.relative_to(source).as_posix(): path for path in _walk(source)}
    else:
        entries = dict(archive_files(source, _is_image, max_bytes=MAX_IMAGE_BYTES))
    arrays = check_image_arrays(_decode(entries, source), source)
    _keep(arrays, [folder / kept_name for folder in folders])
    return arrays


def _walk(directory: Path) -> list[Path]:
    found = [Path(folder, file) for folder, _, files in os.walk(directory) for file in files]
    return sorted(path for path in found if _is_image(path.relative_to(directory).as_posix()))


def _is_image(name: str) -> bool:
    """Whether `name` is `[top/]train|test/<class>/<file>` with an image's suffix; macOS's shadow files are not."""
    path = PurePosixPath(name)
    place = len(path.parts) in (3, 4) and path.parts[-3] in PARTS
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return place and not hidden and path.suffix.lower() in IMAGE_SUFFIXES


def _fingerprint(source: Path) -> str:
    """Hexadecimal digits that change with the source: its bytes, or a directory's names, sizes and times."""
    if not source.is_dir():
        return f"{checksum(source, 'sha256')[:16]}-{source.stat().st_size}"
    digest = hashlib.sha256()
    for path in _walk(source):
        status = path.stat()
        digest.update(f"{path.relative_to(source).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _natural(name: str) -> tuple[list[str | int], str]:
    """A key that puts 2.jpg before 10.jpg."""
    pieces = re.split(r"(\d+)", PurePosixPath(name).name)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], name


def _decode(entries: Mapping[str, Path | bytes], source: Path) -> ImageArrays:
    by_class: dict[str, dict[str, list[str]]] = {part: {} for part in PARTS}
    for name in entries:
        by_class[PurePosixPath(name).parts[-3]].setdefault(PurePosixPath(name).parent.name, []).append(name)
    if not all(by_class.values()):
        raise DataError(f"{source}: expected images as train|test/<class>/<n>.jpg|png; found {len(entries)} such files")
    if len(tops := {PurePosixPath(name).parts[:-3] for name in entries}) > 1:
        raise DataError(f"{source}: expected one top folder at most; found {sorted('/'.join(top) for top in tops)}")
    train_classes, test_classes = (sorted(by_class[part]) for part in PARTS)
    if train_classes != test_classes:
        raise DataError(f"{source}: training classes {train_classes} but test classes {test_classes}")

    shape: tuple[int, int, int] | None = None
    parts = []
    with progress_bar(f"decoding {source.name}", len(entries)) as advance:
        for part in PARTS:
            names = [name for folder in train_classes for name in sorted(by_class[part][folder], key=_natural)]
            counts = [len(by_class[part][folder]) for folder in train_classes]
            images = None
            for index, name in enumerate(names):
                pixels = _decode_image(entries[name], f"{source}: {name}", shape)
                if images is None:
                    shape = pixels.shape
                    images = np.empty((len(names), *shape), np.uint8)
                images[index] = pixels
                advance(1)
            assert images is not None, "every class folder came from a name"
            parts.append(LabelledImages(images, np.repeat(np.arange(len(counts), dtype=np.int64), counts)))
    return ImageArrays(parts[0], parts[1], tuple(train_classes))


def _decode_image(
    content: Path | bytes, where: str, shape: tuple[int, int, int] | None
) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    """Pixels (C, H, W) of one image, which must have `shape` where that is known."""
    from PIL import Image

    try:
        with Image.open(BytesIO(content) if isinstance(content, bytes) else content, formats=("JPEG", "PNG")) as image:
            if image.mode not in ("L", "RGB"):
                raise DataError(f"{where}: expected a grey or RGB image; found mode {image.mode}")
            found = (len(image.mode), image.height, image.width)
            if shape is not None and found != shape:  # before decoding, as the header alone tells
                raise DataError(f"{where}: expected (C, H, W) {shape} as in the images before; found {found}")
            pixels: NDArray[np.uint8] = np.asarray(image)
    except DataError:
        raise
    except Exception as error:  # damaged bytes can make a decoder fail in any way at all
        raise DataError(f"{where} is truncated or damaged: {error}") from error
    return pixels.reshape(*found[1:], found[0]).transpose(2, 0, 1)


def _load(path: Path) -> ImageArrays | None:
    """Decoded pixels kept earlier; None when there are none, or when the file is damaged and has to be made anew."""
    try:
        # Opened here, as np.load leaves a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            train, test = (LabelledImages(kept[f"{part}_images"], kept[f"{part}_labels"]) for part in PARTS)
            return check_image_arrays(ImageArrays(train, test, tuple(kept["classes"].tolist())), path)
    except (OSError, EOFError, KeyError, ValueError, TypeError, zlib.error, zipfile.BadZipFile):
        return None


def _keep(arrays: ImageArrays, candidates: Sequence[Path]) -> None:
    """Write the pixels to the first candidate that can be written; none of them need be."""
    content = {"classes": np.array(arrays.classes)}
    for part, (images, labels) in zip(PARTS, (arrays.train, arrays.test), strict=True):
        content |= {f"{part}_images": images, f"{part}_labels": labels}
    for path in candidates:
        try:
            if not prepare_folder(path.parent):
                continue
            with atomic_file(path) as file:
                np.savez(file, **content)  # type: ignore[arg-type]  # its keywords are arrays, or one flag
            return
        except OSError:  # a full disk, say: the pixels are at hand all the same
            continue
