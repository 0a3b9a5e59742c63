"""Define the options of TensorBoard."""

from ssvit.config.declaration import Options


class TensorBoard(Options):
    """TensorBoard's event files in the run's folder."""
