"""The options of the segmentation probe."""

from ssvit.config.choices import choice
from ssvit.config.declaration import AtLeastTwo, Count, Different, Positive
from ssvit.evaluation.probes.logistic_options import Logistic


@choice("probe", "segmentation")
class Segmentation(Logistic):
    """The class of each pixel from the features of patches, by a linear layer and by nearest neighbours."""

    train_images: AtLeastTwo = 500
    """The most training images; all their patches are held in memory."""
    test_images: Count = 250
    """The most test images."""
    k: Count = 30
    """Neighbours of a patch, or all if there are fewer."""
    temperature: Positive = 0.02
    """A neighbour's vote has the weight exp(cosine / temperature)."""
    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    iterations: Count = 200
