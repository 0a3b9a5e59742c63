"""Write the YAML front matter of a model card for the Hugging Face Hub: library, task, tags, data set, results."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_LIBRARIES = {"timm": "timm", "huggingface": "transformers", "onnx": "onnx", "torch_export": "pytorch"}
_DATASETS = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "imagenet": "ILSVRC/imagenet-1k"}
# The metrics that are accuracies: of a classifier, and of probes of frozen features.
_ACCURACIES = re.compile(r"(?P<part>test|validation)/(accuracy|map)|probe/(knn|few_shot|logistic|sgd)\d*")


def write(
    *, name: str, format: str, license: str | None, trained: Mapping[str, object], measured: Mapping[str, object],
    is_classifier: bool,
) -> str:  # fmt: skip
    """Return the front matter, between two lines of dashes.

    Args:
        name: Name of the model.
        format: Format of the export.
        license: Identifier of the licence on the Hub; None: left out.
        trained: Result of `card.trained`.
        measured: Result of `card.measured`.
        is_classifier: Whether the model has a head.
    """
    task = "image-classification" if is_classifier else "image-feature-extraction"
    objective, data = trained.get("objective"), str(trained.get("data", ""))
    results = list(_results(task, data, measured))
    matter: dict[str, Any] = {
        "library_name": _LIBRARIES.get(format, "ssvit"),
        "license": license,
        "pipeline_tag": task,
        "tags": ["ssvit", "vision", "vision-transformer", *([str(objective).replace("_", "-")] if objective else [])],
        "datasets": [_DATASETS[data]] if data in _DATASETS else None,
        "metrics": sorted({result["metrics"][0]["type"] for result in results}) or None,
        "model-index": [{"name": name, "results": results}] if results else None,
    }
    given = {key: value for key, value in matter.items() if value is not None}
    return f"---\n{yaml.safe_dump(given, sort_keys=False, allow_unicode=True)}---\n"


def _results(task: str, data: str, measured: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    for metric, value in measured.items():
        if (found := _ACCURACIES.fullmatch(metric)) is None or not isinstance(value, int | float) or not data:
            continue
        part = found["part"] or "held-out"
        of_several = metric.endswith("/map") or (found["part"] is None and "probe/multi_label" in measured)
        yield {
            "task": {"type": task},
            "dataset": {"name": data, "type": _DATASETS.get(data, data), "split": part},
            "metrics": [
                {"type": "mean_average_precision" if of_several else "accuracy", "name": metric, "value": value}
            ],
        }
