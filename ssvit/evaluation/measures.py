"""The measures of frozen features, each with its options: it says from the labels whether it can be, then it measures.

Options are checked when a measure is made. Torch is not loaded before a method is called, so that mistakes are told at
once. No measure chooses by a test label.

Letters: n training images, m test images.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from ssvit.evaluation import few_shot_rules, knn_rules, linear_probe_rules
from ssvit.evaluation.measured import Measured
from ssvit.options import OptionError, one_of, whole

if TYPE_CHECKING:
    from torch import Tensor

    from ssvit.evaluation.banks import Banks

# told("few_shot", " feature sets") -> a function of (done, all) that shows how far a work is.
Told = Callable[[str, str], Callable[[int, int], None]]


class Measure(Protocol):
    """What is asked of frozen features; name: what it is called in a report."""

    name: str

    def check(self, train_labels: "Tensor", test_labels: "Tensor", classes: Sequence[str]) -> None:
        """OptionError or UserError unless images with these labels, (n,) and (m,), suffice."""

    def __call__(self, banks: "Banks", told: Told) -> Measured: ...


class FewShot:
    """Least squares on a few images of each class; leave-one-out on the most shots chooses the layer."""

    def __init__(
        self, *, protocol: str, shots: Any = None, seeds: Any = None, l2: Any = None, name: str = "few_shot"
    ) -> None:
        self.name, self.protocol = name, protocol
        self.asked = few_shot_rules.few_shot(protocol, shots=shots, seeds=seeds, l2=l2)

    def check(self, train_labels: "Tensor", test_labels: "Tensor", classes: Sequence[str]) -> None:
        """OptionError if a class has fewer training images than the shots."""
        from ssvit.evaluation.probes.ridge import check_shots

        check_shots(train_labels, len(classes), self.asked.shots, classes)

    def __call__(self, banks: "Banks", told: Told) -> Measured:
        """A column for each of the shots."""
        from ssvit.evaluation.probes.ridge import few_shot

        found = {}
        progress = told(self.name, " feature sets")
        for name, train in banks.train.values.items():
            found[name] = few_shot(
                train, banks.train.labels, banks.test.values[name], banks.test.labels, classes=len(banks.classes),
                names=banks.classes, protocol=self.protocol, **asdict(self.asked),
            ).scores  # fmt: skip
            progress(len(found), len(banks.train.values))
        left_out = {name: max(found[name], key=lambda score: score.fits[0].images).left_out for name in banks.own}
        return Measured(
            measure=self.name,
            columns=tuple(f"{count} shot" for count in self.asked.shots),
            values={name: tuple(score.mean for score in scores) for name, scores in found.items()},
            deviations={name: tuple(score.deviation for score in scores) for name, scores in found.items()},
            best=max(banks.own, key=left_out.__getitem__),
            chosen_by="leave-one-out on the most shots",
            options={"protocol": self.protocol, **asdict(self.asked)},
            numbers={name: [asdict(score) for score in scores] for name, scores in found.items()},
            **_against(banks),
        )


class Knn:
    """The vote of the nearest training images; each training image's own neighbours choose the layer."""

    name = "knn"

    def __init__(self, *, protocol: str, k: Any) -> None:
        one_of("protocol", protocol, knn_rules.PROTOCOLS)
        self.protocol = protocol
        _, self.k = knn_rules.knn([protocol], k)

    def check(self, train_labels: "Tensor", test_labels: "Tensor", classes: Sequence[str]) -> None:
        """OptionError unless each training image has so many others."""
        _others(self.k[-1], len(train_labels))

    def __call__(self, banks: "Banks", told: Told) -> Measured:
        """A column for each number of neighbours."""
        import torch

        from ssvit.evaluation.probes.knn import knn

        train, test = banks.train, banks.test
        shared = {"classes": len(banks.classes), "protocols": [self.protocol], "k": self.k}
        found, left_out = {}, {}
        progress = told(self.name, " feature sets")
        for name, bank in train.values.items():
            found[name] = knn(bank, train.labels, test.values[name], test.labels, **shared).scores
            if len(banks.own) > 1 and name in banks.own:
                itself = torch.arange(len(train))
                left_out[name] = knn(bank, train.labels, bank, train.labels, own=itself, **shared).scores
            progress(len(found), len(train.values))
        numbers = {
            name: {"top1": {score.k: score.top1 for score in scores}, "top5": {score.k: score.top5 for score in scores}}
            for name, scores in found.items()
        }
        for name, scores in left_out.items():
            numbers[name]["leave_one_out"] = {score.k: score.top1 for score in scores}
        return Measured(
            measure=self.name,
            columns=tuple(f"{k}-NN" for k in self.k),
            values={name: tuple(score.top1 for score in scores) for name, scores in found.items()},
            deviations=_none(found, len(self.k)),
            best=max(banks.own, key=lambda name: max((score.top1 for score in left_out.get(name, ())), default=0)),
            chosen_by="leave-one-out on the training images",
            options={"protocol": self.protocol, "k": self.k},
            numbers=numbers,
            **_against(banks),
        )


class LinearProbe:
    """A linear layer by SGD or by logistic regression; the images held out of training choose the layer."""

    def __init__(self, *, method: str, **options: Any) -> None:
        one_of("method", method, linear_probe_rules.METHODS)
        self.name = method
        self.asked = linear_probe_rules.METHODS[method](**options)

    def check(self, train_labels: "Tensor", test_labels: "Tensor", classes: Sequence[str]) -> None:
        """OptionError or UserError if no image can be held out, or a class is tested that is not trained."""
        from ssvit.evaluation.probes.linear import check_labels, hold_out_by_class

        check_labels(train_labels, test_labels, len(classes), classes)
        hold_out_by_class(train_labels, fraction=self.asked.held_out, seed=self.asked.seed)

    def __call__(self, banks: "Banks", told: Told) -> Measured:
        """Columns for the accuracy on the images trained on, on those held out of them, and on the test images."""
        find = self._sgd if self.name == "sgd" else self._logistic
        numbers = {name: find(banks, name, told) for name in banks.train.values}
        best = max(banks.own, key=lambda name: numbers[name]["validation"])
        for name in numbers.keys() - {best}:
            numbers[name].pop("predictions", None)
        columns = ("train", "validation", "test")
        return Measured(
            measure=self.name,
            columns=columns if banks.part == "test" else ("train", "held out of train", banks.part),
            values={name: tuple(own[column] for column in columns) for name, own in numbers.items()},
            deviations=_none(numbers, len(columns)),
            best=best,
            chosen_by="validation accuracy",
            options=asdict(self.asked),
            numbers=numbers,
            **_against(banks),
        )

    def _sgd(self, banks: "Banks", name: str, told: Told) -> dict[str, Any]:
        from ssvit.evaluation.probes.linear import SgdProbe

        found = SgdProbe(**asdict(self.asked))(
            {name: banks.train.values[name]}, banks.train.labels, {name: banks.test.values[name]}, banks.test.labels,
            classes=len(banks.classes), names=banks.classes, progress=told(f"sgd, {name}", " steps"),
        )  # fmt: skip
        return asdict(found.best) | {"validation_grid": found.grid[name]}

    def _logistic(self, banks: "Banks", name: str, told: Told) -> dict[str, Any]:
        from ssvit.evaluation.probes.linear import Logistic

        return asdict(Logistic(**asdict(self.asked))(
            banks.train.values[name], banks.train.labels, banks.test.values[name], banks.test.labels,
            classes=len(banks.classes), names=banks.classes, progress=told(f"logistic, {name}", " fits"),
        ))  # fmt: skip


class Retrieval:
    """Which training images are most like a test image: whether they are of its class, over the whole ranking too.

    queries: at most so many test images are asked, always the same ones, since each sorts the whole bank; null: all.
    As many training images, each asked of all others, choose the layer.
    """

    name = "retrieval"

    def __init__(self, *, k: Any, queries: int | None = None) -> None:
        if not isinstance(k, Sequence) or isinstance(k, str) or not k:
            raise OptionError("k", k, "must be a list of one or more")
        for count in k:
            whole("k", count)
        if queries is not None:
            whole("queries", queries)
        self.k, self.queries = tuple(sorted(set(k))), queries

    def check(self, train_labels: "Tensor", test_labels: "Tensor", classes: Sequence[str]) -> None:
        """OptionError unless each training image has so many others."""
        _others(self.k[-1], len(train_labels))

    def __call__(self, banks: "Banks", told: Told) -> Measured:
        """Columns for recall@k and precision@k of each k, and for the mAP."""
        numbers: dict[str, Any] = {}
        progress = told(self.name, " feature sets")
        for name in banks.train.values:
            numbers[name] = self._asked(banks, name, leave_one_out=False)
            if len(banks.own) > 1 and name in banks.own:
                numbers[name]["leave_one_out"] = self._asked(banks, name, leave_one_out=True)
            progress(len(numbers), len(banks.train.values))
        columns = (*(f"recall@{k}" for k in self.k), *(f"precision@{k}" for k in self.k), "mAP")
        return Measured(
            measure=self.name,
            columns=columns,
            values={name: tuple(own[column] for column in columns) for name, own in numbers.items()},
            deviations=_none(numbers, len(columns)),
            best=max(banks.own, key=lambda name: numbers[name].get("leave_one_out", {}).get("mAP", 0)),
            chosen_by="the mAP of training images, each left out",
            options={"k": self.k, "queries": self.queries},
            numbers=numbers,
        )

    def _asked(self, banks: "Banks", name: str, *, leave_one_out: bool) -> dict[str, float]:
        from torch.nn.functional import normalize

        from ssvit.evaluation.neighbours import search
        from ssvit.evaluation.probes.retrieval import mean_average_precision, measure
        from ssvit.randomness import permutation

        asked = banks.train if leave_one_out else banks.test
        rows = permutation(0, "retrieval, queries", len(asked))[: self.queries].sort().values
        bank, labels = normalize(banks.train.values[name]), banks.train.labels
        queries, own = normalize(asked.values[name][rows]), rows if leave_one_out else None
        found = measure(search(queries, bank, self.k[-1], own=own), asked.labels[rows], labels, own=own, ks=self.k)
        return found | {"mAP": mean_average_precision(queries, asked.labels[rows], bank, labels, own=own)}


def _others(k: int, images: int) -> None:
    """OptionError unless each of so many training images has k others."""
    if k >= images:
        raise OptionError("k", k, f"must be below {images}, the training images")


def _against(banks: "Banks") -> dict[str, Any]:
    """What an accuracy is to be above."""
    return {"chance": banks.chance, "images": len(banks.test)}


def _none(found: Mapping[str, Any], columns: int) -> dict[str, tuple[None, ...]]:
    """The deviations of what was measured once."""
    return dict.fromkeys(found, (None,) * columns)
