"""Load the encoders of against=[RUN,FILE,{path:FILE,image_size:224}]. This module does not import torch."""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.configuration import Configuration, flatten, is_free
from ssvit.evaluation.baselines import OWN, PIXELS, RANDOM
from ssvit.evaluation.features_options import Reading
from ssvit.evaluation.report.options import Evaluate
from ssvit.loading.encoder_options import LoadEncoder
from ssvit.options import OptionError, UserError, pair, within

# Options in which runs of one configuration with several seeds may differ.
_FREE = (
    "recipe.seed", "name", "command", "outputs", "overwrite", "workers", "loader_timeout", "fabric", "logger", "probe",
    "probing", "seeds", "data.cache", "data.download",
)  # fmt: skip


@dataclass(frozen=True)
class Other:
    """Describe an encoder for comparison, and the readings of its features."""

    name: str
    loading: LoadEncoder
    readings: Sequence[Reading]

    @property
    def image_size(self) -> tuple[int, int]:
        """Return height and width of its images, those of its training unless other values are configured."""
        return pair("image_size", self.loading.loaded().image_size)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return path, image size and features of the encoder as plain data."""
        trained = self.loading.checkpoint().encoder
        return {
            "path": str(self.loading.path),
            "image_size": list(self.image_size),
            "pooling": self.readings[-1].pooling,
            "layers": [reading.layer for reading in self.readings],
            **{name: trained[name] for name in ("width", "depth", "patch_size", "mean", "std") if name in trained},
        }


def others(options: Evaluate, own: Checkpoint) -> list[Other]:
    """Return the encoders of the option `against`, named by run or file, or by path if names are not unique.

    Args:
        options: Options of the evaluation.
        own: The evaluated checkpoint.

    Raises:
        OptionError: If an entry is invalid, repeated, or lacks one of the layers.
    """
    opened: list[tuple[LoadEncoder, Checkpoint]] = []
    for entry in options.against:
        with within("against"):
            loading = LoadEncoder(**({"path": entry} if isinstance(entry, str) else entry))
            checkpoint = loading.checkpoint()
            loading.loaded()
        if checkpoint.path in [own.path, *(other.path for _, other in opened)]:
            raise OptionError("against", str(loading.path), "is the evaluated checkpoint or listed twice")
        opened.append((loading, checkpoint))
    count = Counter([own.name, RANDOM, PIXELS, *(checkpoint.name for _, checkpoint in opened)])
    compared = []
    for loading, checkpoint in opened:
        name = checkpoint.name if count[checkpoint.name] == 1 else str(checkpoint.path)
        try:
            with within("features"):
                readings = options.features.readings(checkpoint.encoder | loading.changes)
        except OptionError as error:
            raise OptionError(error.name, error.value, f"{error.expectation} ({name})") from None
        compared.append(Other(name, loading, readings))
    return compared


def groups(own: Checkpoint, compared: Sequence[Other], *, baselines: bool) -> dict[str, list[str]]:
    """Group runs that differ only in the seed into one entry, and return the encoders by entry, the checkpoint first.

    Args:
        own: The evaluated checkpoint.
        compared: The encoders for comparison.
        baselines: Whether the baselines are evaluated.
    """
    runs = {OWN: own, **{other.name: other.loading.checkpoint() for other in compared}}
    by_configuration: dict[str, dict[object, str]] = {}
    for encoder, checkpoint in runs.items():
        configuration, seed = _configuration(checkpoint)
        if seed in by_configuration.get(configuration, {}):
            configuration += encoder  # another run of the same seed is an entry of its own
        by_configuration.setdefault(configuration, {})[seed] = encoder
    entries = [list(seeds.values()) for seeds in by_configuration.values()]
    named = {_common_name([encoder or own.name for encoder in entry]): entry for entry in entries}
    first, *rest = named.items()
    baseline = {RANDOM: [RANDOM], PIXELS: [PIXELS]} if baselines else {}
    return dict([first, *baseline.items(), *rest])


def _configuration(checkpoint: Checkpoint) -> tuple[str, object]:
    """Return the configuration of a run without the seed, as text, and the seed; for a file, its path and None."""
    try:
        config = Configuration.read(checkpoint.path.parent / "config.yaml")
    except (UserError, OSError):
        return str(checkpoint.path), None
    if checkpoint.foreign is not None:
        return str(checkpoint.path), None
    values: dict[str, Any] = dict(flatten(config.values))
    fixed = {name: value for name, value in values.items() if not is_free(name, _FREE)}
    return json.dumps([checkpoint.step, fixed], sort_keys=True, default=str), values.get("recipe.seed")


def _common_name(names: Sequence[str]) -> str:
    """Return the common prefix of the names of several seeds: mae_seed0, mae_seed1 -> mae."""
    if len(names) == 1:
        return names[0]
    shared = os.path.commonprefix(names)  # noqa: RUF071 (of characters, not of folders)
    return re.sub(r"[\W_]*(seed)?[\W_]*$", "", shared) or names[0]
