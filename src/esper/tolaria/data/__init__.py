"""Data sets: found or fetched, verified, split by one rule, and handed out as tensors."""

from esper.tolaria.data.dataset import DATASET_NAMES, ImageData, ImagePart, TextData, is_present, load
from esper.tolaria.data.digest import data_digest
from esper.tolaria.data.directory import RemoteFile, data_directory, fetch, locate
from esper.tolaria.data.image_folder import read_image_folder
from esper.tolaria.data.splits import SPLIT_SEED, stratified_split

__all__ = [
    "DATASET_NAMES",
    "SPLIT_SEED",
    "ImageData",
    "ImagePart",
    "RemoteFile",
    "TextData",
    "data_digest",
    "data_directory",
    "fetch",
    "is_present",
    "load",
    "locate",
    "read_image_folder",
    "stratified_split",
]
