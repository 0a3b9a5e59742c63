"""Define the options of the linear probe trained by SGD."""

from typing import Annotated

from annotated_types import Ge, Le

from ssvit.config.declaration import Count, Different, NotNegative
from ssvit.evaluation.probes.linear_options import Linear


class Sgd(Linear):
    """Train linear layers by SGD on the same batches, one for each learning rate, initialised at zero."""

    # The grid of DINOv2, where the batch size is 256.
    learning_rates: Different = (
        1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
    )  # fmt: skip
    """Initial learning rates, not scaled by the batch size, with a cosine decay to 0."""
    epochs: Count = 20
    """Epochs over the training images."""
    batch_size: Count = 256
    """Batch size."""
    momentum: Annotated[float, Ge(0), Le(0.999)] = 0.9
    """Momentum of SGD."""
    weight_decay: NotNegative = 0.0
    """Weight decay of weights and biases, as in torch.optim.SGD."""
