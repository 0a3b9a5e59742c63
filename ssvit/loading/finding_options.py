"""Define the options that select a checkpoint."""

from ssvit.config.declaration import Name, Options, Runs


class Pretrained(Options):
    """The checkpoint of a pre-training run, or foreign weights."""

    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run, a file of foreign weights, hf://OWNER/NAME, or timm:NAME; newest: the
    pre-training run that finished last."""
    outputs: Runs = "outputs"
    """Folder of all runs."""


class Finetuned(Options):
    """The checkpoint of a fine-tuned classifier."""

    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run, or an exported ONNX file; newest: the fine-tuning run that finished
    last."""
    outputs: Runs = "outputs"
    """Folder of all runs."""
