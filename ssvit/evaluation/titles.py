"""Define the titles of probes in tables, pages and figures, with the standard library only."""

_METHODS = {
    "few_shot": "ridge regression",
    "ridge": "ridge regression",
    "knn": "",  # columns such as 20-NN are titles
    "sgd": "linear layer by SGD",
    "logistic": "logistic regression",
    "attentive": "attentive probe",
    "retrieval": "retrieval",
}
_VARIANTS = {"big_vision": "big_vision protocol", "standardized": "standardised features"}


def title(name: str, column: str = "") -> str:
    """Return the title of a probe, such as "ridge regression (5 labels per class)".

    Titles have no commas, since sentences list them.

    Args:
        name: The probe's name in metrics (few_shot5) or among the options (few_shot_big_vision).
        column: The probe's last column. Not needed with a name that contains the number of labels or neighbours.
    """
    method = next((key for key in _METHODS if name.startswith(key)), name)
    count, _, variant = name.removeprefix(method).partition("_")
    if count:
        column = f"{count}-NN" if method == "knn" else labels(count)
    elif method == "ridge":
        column = column or labels("all")
    column = column.removeprefix("test").strip()
    first = _METHODS.get(method, method.replace("_", " ")) or column
    details = "; ".join(filter(None, (column.removeprefix(first), _VARIANTS.get(variant, variant.replace("_", " ")))))
    return f"{first} ({details})" if details else first or name


def labels(count: int | str) -> str:
    """Return "all labels", "1 label per class" or "5 labels per class"."""
    return f"{count} labels" if count == "all" else f"{count} label{'s' * (str(count) != '1')} per class"
