"""Define the options of the attentive probe."""

from ssvit.config.declaration import AtLeastTwo, Count, Different
from ssvit.evaluation.probes.linear_options import Linear


class Attentive(Linear):
    """Train attention pooling of the patches and a linear classifier by AdamW on frozen features."""

    learning_rates: Different = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    """Learning rates for a batch size of 256, scaled linearly; linear warm-up over a tenth of the steps, then cosine
    decay to 0."""
    weight_decays: Different = (5e-4, 5e-2)
    """Weight decays, each combined with each learning rate; not applied to biases."""
    epochs: Count = 20
    """Epochs over the training images."""
    batch_size: Count = 128
    """Batch size."""
    train_images: AtLeastTwo | None = None
    """Maximum number of training images; all their patches are held in memory, in 16 bits. None: all."""
    test_images: AtLeastTwo | None = None
    """Maximum number of test images. None: all."""
