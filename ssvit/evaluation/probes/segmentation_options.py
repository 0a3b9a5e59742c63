"""Define the options of the segmentation probe."""

from ssvit.config.declaration import AtLeastTwo, Count, Different
from ssvit.evaluation.probes.logistic_options import Logistic


class Segmentation(Logistic):
    """Predict the class of each pixel from patch features, by a linear layer."""

    train_images: AtLeastTwo = 500
    """Maximum number of training images; all their patches are held in memory."""
    test_images: Count = 250
    """Maximum number of test images."""
    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    iterations: Count = 200
