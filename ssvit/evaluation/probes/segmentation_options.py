"""Define the options of the segmentation probe."""

from ssvit.config.choices import choice
from ssvit.config.declaration import AtLeastTwo, Count, Different, Positive
from ssvit.evaluation.probes.logistic_options import Logistic


@choice("probe", "segmentation")
class Segmentation(Logistic):
    """Predict the class of each pixel from patch features, by a linear layer and by nearest neighbours."""

    train_images: AtLeastTwo = 500
    """Maximum number of training images; all their patches are held in memory."""
    test_images: Count = 250
    """Maximum number of test images."""
    k: Count = 30
    """Maximum number of neighbours of a patch."""
    temperature: Positive = 0.02
    """Temperature of the weights exp(cosine / temperature) of the neighbours."""
    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    iterations: Count = 200
