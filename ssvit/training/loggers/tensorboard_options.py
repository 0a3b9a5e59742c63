"""Define the options of TensorBoard."""

from ssvit.config.choices import choice
from ssvit.config.declaration import Options


@choice("logger", "tensorboard")
class TensorBoard(Options):
    """TensorBoard's event files in the run's folder."""
