"""The options of the attentive probe."""

from ssvit.config.choices import choice
from ssvit.config.declaration import AtLeastTwo, Count, Different
from ssvit.evaluation.probes.linear_options import Linear


@choice("probe", "attentive")
class Attentive(Linear):
    """Attention pooling of the patches and a linear classifier, trained by AdamW on frozen features."""

    learning_rates: Different = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    """Learning rates for batches of 256, in proportion for others; each rises over a tenth of the steps and falls to 0
    along half a cosine."""
    weight_decays: Different = (5e-4, 5e-2)
    """Weight decays; biases have none. Each is tried with each learning rate."""
    epochs: Count = 20
    """Passes over the training images."""
    batch_size: Count = 128
    """Images of a step."""
    train_images: AtLeastTwo | None = None
    """The most training images; all their patches are held in memory, in 16 bits. None: all."""
    test_images: AtLeastTwo | None = None
    """The most test images. None: all."""
