"""The figures of an evaluation: what its measures found, and the images that they found it on."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from ssvit.evaluation.banks import Banks
from ssvit.evaluation.measured import Measured
from ssvit.evaluation.neighbours import search
from ssvit.figures import classes, sweeps
from ssvit.figures.contact_sheet import NEIGHBOURS, QUERIES, Neighbour, Row, contact_sheet
from ssvit.figures.feature_map import feature_map


def draw(banks: Banks, measured: Sequence[Measured]) -> dict[str, Figure]:
    """Figures by name. Images are shown by the features that k-NN has chosen, or else the first of the measures."""
    by_name = {found.measure: found for found in measured}
    chosen = by_name.get("knn", measured[0]).best
    figures = {"by_layer": sweeps.by_layer(measured, banks.own)} if len(banks.own) > 1 else {}
    figures["by_column"] = sweeps.by_column(measured)
    if "logistic" in by_name:
        figures["confusion"] = confusion(banks, by_name["logistic"])
    figures["contact_sheet"] = neighbours(banks, chosen)
    figures["feature_map"] = feature_map(banks.test.values[chosen], banks.test.labels, banks.classes)
    return figures


def confusion(banks: Banks, logistic: Measured) -> Figure:
    """Which class the chosen logistic regression takes for which."""
    truth, k = banks.test.labels, len(banks.classes)
    taken = torch.tensor(logistic.numbers[logistic.best]["predictions"])
    counts = torch.bincount(truth * k + taken, minlength=k * k).view(k, k)
    return classes.confusion(counts, banks.classes, accuracy=(truth == taken).double().mean().item(), part=banks.part)


def neighbours(banks: Banks, name: str) -> Figure:
    """Test images, evenly from all classes, and the training images whose features of a name are most like theirs."""
    train, test = banks.train, banks.test
    by_class = test.labels.argsort(stable=True)
    rows = by_class[torch.arange(min(QUERIES, len(test))) * len(test) // min(QUERIES, len(test))]
    nearest = search(test.values[name][rows], train.values[name], min(NEIGHBOURS, len(train)))
    sheet = []
    for image, label, similarities, places in zip(
        test.images(rows), test.labels[rows].tolist(), nearest.similarities.tolist(), nearest.indices, strict=True
    ):
        labels = train.labels[places].tolist()
        alike = [
            Neighbour(picture, similarity, banks.classes[own], own == label)
            for picture, similarity, own in zip(train.images(places), similarities, labels, strict=True)
        ]
        sheet.append(Row(image, banks.classes[label], alike))
    return contact_sheet(sheet)
