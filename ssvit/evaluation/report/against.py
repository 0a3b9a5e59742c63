"""Load the encoders of against=[RUN,FILE,{path:FILE,image_size:224}]. This module does not import torch."""

import json
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
from ssvit.exchange.reading_options import FOREIGN_OPTIONS
from ssvit.loading.encoder_options import LoadEncoder
from ssvit.options import OptionError, UserError, pair, within

_OPTIONS = ("path", "image_size", "resize", "pooling", *FOREIGN_OPTIONS)
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
    def facts(self) -> dict[str, Any]:
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
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in options.against]
    opened: list[tuple[LoadEncoder, Checkpoint]] = []
    for entry in entries:
        if unknown := [name for name in entry if name not in _OPTIONS] or ["path"][: "path" not in entry]:
            right = f"must be a path, or {{path: …}} with other options of {', '.join(_OPTIONS)}"
            raise OptionError(f"against.{unknown[0]}", entry.get(unknown[0]), right)
        try:
            loading = LoadEncoder(**entry)
            found = loading.checkpoint()
            loading.loaded()
        except OptionError as error:
            raise OptionError(
                f"against.{error.name}".replace(".checkpoint", ""), error.value, error.expectation
            ) from None
        if found.path in [one.path for _, one in opened] + [own.path]:
            raise OptionError("against", entry["path"], "stands there twice, or is the checkpoint itself")
        opened.append((loading, found))
    count = Counter([own.name, RANDOM, PIXELS, *(found.name for _, found in opened)])
    compared = []
    for loading, found in opened:
        name = found.name if count[found.name] == 1 else str(found.path)
        try:
            with within("features"):
                asked = options.features.readings(found.encoder | loading.changes)
        except OptionError as error:
            raise OptionError(error.name, error.value, f"{error.expectation}; that is of {name}") from None
        compared.append(Other(name, loading, asked))
    return compared


def groups(own: Checkpoint, compared: Sequence[Other], *, baselines: bool) -> dict[str, list[str]]:
    """Group runs that differ only in the seed into one entry, and return the encoders by entry, the checkpoint first.

    Args:
        own: The evaluated checkpoint.
        compared: The encoders for comparison.
        baselines: Whether the baselines are evaluated.
    """
    baseline = {RANDOM: [RANDOM], PIXELS: [PIXELS]} if baselines else {}
    runs = {OWN: own, **{other.name: other.loading.checkpoint() for other in compared}}
    by_configuration: dict[str, dict[object, str]] = {}
    for encoder, found in runs.items():
        configuration, seed = _but_for_seed(found)
        seeds = by_configuration.setdefault(configuration, {})
        if seed in seeds:
            seeds = by_configuration.setdefault(f"{configuration} {encoder}", {})
        seeds[seed] = encoder
    (first, ours), *theirs = (
        (_name([encoder or own.name for encoder in seeds.values()]), list(seeds.values()))
        for seeds in by_configuration.values()
    )
    return {first: ours, **baseline, **dict(theirs)}


def _but_for_seed(found: Checkpoint) -> tuple[str, object]:
    """Return the configuration of a run without the seed, as text, and the seed; for a file, its path and None."""
    if found.foreign is None:
        try:
            config = Configuration.read(found.path.parent / "config.yaml")
        except (UserError, OSError):
            return str(found.path), None
        values: dict[str, Any] = dict(flatten(config.values))
        told = {name: value for name, value in values.items() if not is_free(name, _FREE)}
        return json.dumps([found.step, told], sort_keys=True, default=str), values.get("recipe.seed")
    return str(found.path), None


def _name(names: Sequence[str]) -> str:
    """Return the common prefix of the names of several seeds: mae_seed0, mae_seed1 -> mae."""
    if len(names) == 1:
        return names[0]
    first = names[0]
    shared = max(length for length in range(len(first) + 1) if all(name.startswith(first[:length]) for name in names))
    return re.sub(r"[\W_]*(seed)?[\W_]*$", "", first[:shared]) or first
