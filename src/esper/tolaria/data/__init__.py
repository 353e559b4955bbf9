"""Data sets: located or fetched, verified, split by one rule, as tensors."""

from esper.tolaria.data.dataset import DATASET_NAMES, ImageData, ImagePart, TextData, data_digest, is_present, load

__all__ = ["DATASET_NAMES", "ImageData", "ImagePart", "TextData", "data_digest", "is_present", "load"]
