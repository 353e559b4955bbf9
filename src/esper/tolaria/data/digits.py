"""scikit-learn's digits: 1,797 images of 8×8, which come with that package."""

import numpy as np

from esper.tolaria.data.arrays import ImageArrays, LabelledImages, check_image_arrays
from esper.tolaria.data.splits import stratified_split

HIGHEST_VALUE = 16
TEST_SIZE = 397


def read_digits() -> ImageArrays:
    """The digits as images (N, 1, 8, 8) with values 0..16 stretched to 0..255; 1,400 for training, 397 for the test.

    The package publishes one set; its test part is drawn here, by the seeded rule of `stratified_split`.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    values = np.asarray(bunch.images, np.float64)[:, np.newaxis]  # (N, 1, 8, 8)
    labels = np.asarray(bunch.target, np.int64)
    everything = LabelledImages(np.rint(values * 255 / HIGHEST_VALUE).astype(np.uint8), labels)
    train, test = stratified_split(labels, (len(labels) - TEST_SIZE, TEST_SIZE))
    classes = tuple(str(name) for name in bunch.target_names)
    return check_image_arrays(ImageArrays(everything.take(train), everything.take(test), classes), "digits")
