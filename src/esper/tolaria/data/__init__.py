"""Data sets: located or fetched, verified, split by one rule, as tensors."""

from esper.tolaria.data.arrays import SPLIT_SEED, stratified_split
from esper.tolaria.data.dataset import DATASET_NAMES, ImageData, ImagePart, TextData, data_digest, is_present, load
from esper.tolaria.data.directory import RemoteFile, data_directory, fetch, locate
from esper.tolaria.data.image_folder import read_image_folder

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
