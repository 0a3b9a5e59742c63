"""State which options have the value of another option unless they are set, and fill them in."""

from collections.abc import Iterator, Mapping
from typing import Any

from ssvit.config.dotted import at, put
from ssvit.errors import MISSING

# Options, and those whose values they take.
TAKEN = {
    "encoder.image_size": "data.image_size",
    "encoder.channels": "data.channels",
    "encoder.image_mean": "data.mean",
    "encoder.image_std": "data.std",
    "data.augment.size": "data.image_size",
    "data.view.size": "data.image_size",
    "objective.teacher.path": "teacher",
    "objective.teacher.side": "data.image_size",
    "objective.teacher.range": "data.range",
    "objective.distillation.teacher.path": "teacher",
    "objective.distillation.teacher.range": "data.range",
    "evaluators.test.workers": "workers",
    "evaluators.test.timeout": "loader_timeout",
}
# The same for options that a file of options sets to ???.
_BY_FILE = {
    "encoder.mean": "data.mean",
    "encoder.std": "data.std",
    "data.augment.local_size": "data.image_size",
    **{f"probes.few_shot.{name}": name for name in ("shots", "seeds", "l2")},
    **{f"probes.knn.{name}": name for name in ("k", "temperature", "standardize", "index")},
    **{f"{probe}.{name}": name for probe in ("sgd", "logistic") for name in ("held_out", "standardize", "seed")},
    **{f"probes.{probe}": probe for probe in ("sgd", "logistic")},
}
_SOURCES = TAKEN | _BY_FILE
_WITHOUT_SOURCE = {"encoder.channels": 3}  # values if there is no such option; otherwise None


def source_of(name: str) -> str | None:
    """Return the option whose value an option takes if it is ???; None if there is none."""
    return _SOURCES.get(_general(name))


def is_taken(name: str) -> bool:
    """Return whether an option takes the value of another option unless it is set."""
    return _general(name) in TAKEN


def _general(name: str) -> str:
    """Return encoder.X for the option against.NAME.X of one of several encoders."""
    group, *rest = name.split(".", 2)
    return f"encoder.{rest[1]}" if group == "against" and len(rest) == 2 else name


def fill(options: dict[str, Any]) -> dict[str, Any]:
    """Set the options that are ??? and take the value of another option, in place; return all options."""
    order = [*_SOURCES]
    taken = (name for name in missing(options) if _general(name) in _SOURCES)
    for name in sorted(taken, key=lambda name: order.index(_general(name))):  # an encoder before its targets
        value = at(options, _SOURCES[_general(name)])
        put(options, name, _WITHOUT_SOURCE.get(_general(name)) if value is None else value)
    return options


def missing(options: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the names of the options that are ???."""
    for key, value in [*options.items()]:
        if isinstance(value, Mapping):
            yield from missing(value, f"{path}{key}.")
        elif isinstance(value, str) and value == MISSING:
            yield f"{path}{key}"
