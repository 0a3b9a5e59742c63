"""What may be asked of tools/visualize.py. Standard library only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssvit.options import OptionError, number, one_of, whole

POOLINGS = ("class_token", "patch_mean")
DEVICES = ("auto", "cpu")
CHECKED = ("checkpoint", "count", "shown", "batch_size", "workers", "loader_timeout", "device", "output")


def check(
    *,
    checkpoint: Any,
    count: Any,
    shown: Any,
    batch_size: Any,
    workers: Any,
    loader_timeout: Any,
    device: Any,
    output: Any,
) -> None:
    """OptionError for options that cannot be, whatever the encoder."""
    if checkpoint == "scratch":
        raise OptionError("checkpoint", checkpoint, "looked at beside a checkpoint by other=scratch; give that")
    for name, value in (("count", count), ("shown", shown)):
        whole(name, value)
    whole("batch_size", batch_size, at_least=8)
    whole("workers", workers, at_least=0)
    number("loader_timeout", loader_timeout, 0)
    one_of("device", device, DEVICES)
    if output is not None and Path(str(output)).exists() and not Path(str(output)).is_dir():
        raise OptionError("output", output, "must be a folder, and this is a file")


def asked(encoder: Mapping[str, Any], *, layer: Any, pooling: Any) -> dict[str, Any]:
    """Which layer's heads are drawn, from 1, and whose attention. OptionError for what an encoder does not have."""
    depth, class_token = encoder["depth"], encoder["class_token"]
    if layer == "last":
        layer = depth
    whole("layer", layer)
    if layer > depth:
        raise OptionError("layer", layer, f"must be at most {depth}, the encoder's layers, or last")
    if pooling is None:
        pooling = "class_token" if class_token else "patch_mean"
    one_of("pooling", pooling, POOLINGS)
    if pooling == "class_token" and not class_token:
        raise OptionError("pooling", pooling, "must be patch_mean: the encoder has no class token")
    return {"layer": layer, "pooling": pooling}
