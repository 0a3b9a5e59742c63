"""Pictures and a store of their features: adding pictures, and finding those that are most similar to a query.

A picture's name in the store is its path, and its class the name of its folder where that is known; one of a data set
in memory is named after its place there.

Letters: m queries, k neighbours, d width, c channels, h, w pixels.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torchvision.transforms.v2.functional import resize
from tqdm import tqdm

from ssvit import atomic_io
from ssvit.data.batch import EvalTransform
from ssvit.data.decode import load
from ssvit.data.sources.base import Data, Unreadable, class_text
from ssvit.evaluation.features import Extractor
from ssvit.evaluation.neighbours import Flat, Kind, Neighbours, check_k, nearest, recall, relative_distances
from ssvit.evaluation.probes.retrieval import average_precisions, measure
from ssvit.figures.contact_sheet import QUERIES, Neighbour, Row, contact_sheet
from ssvit.figures.display import PLAIN, Display
from ssvit.figures.png import png
from ssvit.figures.style import evenly_spaced
from ssvit.options import UserError, one_of, printable, whole, within
from ssvit.retrieval.store import UNKNOWN, Store, check_vacant

Load = Callable[[str], Tensor]  # a picture's name -> (c, h, w) uint8

_LINES = 20  # of queries reported on the console
_LONGER = 340  # pixels of a picture on a sheet
_BLANK = torch.full((3, 1, 1), 230, dtype=torch.uint8)  # for a picture that is no longer there


def of_data_set(called: str, data: Data, split: str, load: Load = load) -> tuple[dict[str, str | None], Load]:
    """The pictures {name: class} of a split of a data set, and what opens a picture of any split by its name.

    split: train, validation, test, or held_out for what is reported on. Files have their path for a name. Other
    pictures are named like cifar10/train/17 and read from their source; any other name is taken for a file's, which
    `load` opens. An image of several classes has their names, joined by |, for its class. OptionError if the data set
    has no such split.
    """
    splits: dict[str, dict[str, str | None]] = {}
    places = {}
    for own, source in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if source is None:
            continue
        splits[own] = {}
        for index in range(len(source)):
            name = source.name(index)
            name = os.path.abspath(name) if os.path.isfile(name) else f"{called}/{own}/{index}"
            places[name] = source, index
            label = None if source.labels is None else class_text(source.labels[index], source.classes)
            splits[own][name] = label or None
    splits["held_out"] = splits[data.reported[0]]
    one_of("split", split, splits)

    def opened(name: str) -> Tensor:
        if name not in places:
            return load(name)
        source, index = places[name]
        return source.read(index)

    return splits[split], opened


class NoneRead(UserError):
    """None of the pictures can be read."""


class Describer:
    """Vectors of transformed pictures by an extractor of one feature.

    Files that cannot be read are named on the console and left out; `report` says how many, and how fast it went.
    workers: threads that read files. load: what opens a picture. display: makes the RGB images of sheets. bar: whether
    a terminal shows the progress.
    """

    def __init__(
        self,
        extractor: Extractor,
        transform: EvalTransform,
        *,
        batch_size: int = 64,
        workers: int = 4,
        load: Load = load,
        display: Display = PLAIN,
        bar: bool = True,
    ) -> None:
        whole("batch_size", batch_size)
        whole("workers", workers)
        self.extractor, self.transform, self.load, self.display, self.bar = extractor, transform, load, display, bar
        self.batch_size, self.workers = batch_size, workers
        self.opened, self.left_out, self.seconds = 0, 0, 0.0

    @property
    def report(self) -> str:
        """Of the files read so far."""
        left_out = f"; {self.left_out} could not be read and stayed out" if self.left_out else ""
        return f"read {self.opened} pictures, {self.opened / max(self.seconds, 1e-9):.0f} a second{left_out}"

    def __call__(self, paths: Sequence[str]) -> tuple[list[str], Tensor]:
        """The files that can be read, in order, and their vectors (n, d). NoneRead if there is none."""
        read, vectors, began = [], [], time.perf_counter()
        with tqdm(total=len(paths), unit=" pictures", disable=not (self.bar and sys.stderr.isatty())) as bar:
            for part, images in self._batches(paths):
                for path, image in zip(part, images, strict=True):
                    if isinstance(image, Tensor):
                        read.append(path)
                    else:
                        tqdm.write(str(image), file=sys.stdout)
                        self.left_out += 1
                if good := [image for image in images if isinstance(image, Tensor)]:
                    (values,) = self.extractor(torch.cat(good)).values()
                    vectors.append(values)
                bar.update(len(part))
        self.opened += len(paths)
        self.seconds += time.perf_counter() - began
        if not read:
            raise NoneRead(f"none of the {len(paths)} pictures can be read")
        return read, torch.cat(vectors)

    def _batches(self, paths: Sequence[str]) -> Iterator[tuple[Sequence[str], list[Tensor | Unreadable]]]:
        """Parts of the paths and what came of each file; the next part is read while one is worked on."""
        parts = (paths[start : start + self.batch_size] for start in range(0, len(paths), self.batch_size))
        with ThreadPoolExecutor(self.workers) as pool:
            begun = ((part, pool.map(self._seen, part)) for part in parts)
            for (part, images), _ in pairwise(chain(begun, [((), iter(()))])):
                yield part, list(images)

    def _seen(self, path: str) -> Tensor | Unreadable:
        """A file as the extractor sees it, (1, c, h, w): made small at once, since a batch of photographs is large."""
        try:
            return self.transform([self.load(path)])
        except Unreadable as failure:
            return failure


def index(folder: str, pictures: Mapping[str, str | None], describe: Describer, *, standardize: bool = False) -> str:
    """Make a store of pictures {path: class}, and say what it holds. StoreError if the folder holds something."""
    check_vacant(Path(folder))
    names, vectors = describe(list(pictures))
    labels, encoder = _labels(names, pictures), describe.extractor.identity
    store = Store.create(folder, vectors, names, *labels, encoder=encoder, standardize=standardize)
    standardized = "; each feature is standardised" if standardize else ""
    return f"{folder}: holds {len(store)} pictures of {len(store.classes)} classes{standardized}"


def add(folder: str, pictures: Mapping[str, str | None], describe: Describer) -> str:
    """Add to a store the pictures {path: class} that it does not hold, and say what became of them.

    StoreError if another encoder made the store; NoneRead if it holds none of them and none can be read.
    """
    store, paths = Store.open(folder, encoder=describe.extractor.identity), list(pictures)
    before = len(store)
    absent = [paths[place] for place in store.absent(paths)]
    if absent:
        try:
            names, vectors = describe(absent)
        except NoneRead:
            if len(absent) == len(paths):
                raise
        else:
            store.add(vectors, names, *_labels(names, pictures))
    known = f", {len(paths) - len(absent)} were there already" if len(absent) < len(paths) else ""
    return (
        f"{folder}: {len(store) - before} pictures added{known}; "
        f"holds {len(store)} pictures of {len(store.classes)} classes"
    )


@dataclass(frozen=True)
class Answer:
    """The pictures of a store that are most like each of m queries.

    names, classes, vectors (m, d): of the queries. own (m,): their places in the store, -1 for none, or None if none
    has one. exactness: the share of the true neighbours that an approximate index has found, or None. load, display: as
    of `Describer`.
    """

    store: Store
    names: list[str]
    classes: list[str | None]
    vectors: Tensor
    own: Tensor | None
    neighbours: Neighbours
    exactness: float | None
    load: Load
    display: Display

    @cached_property
    def distances(self) -> Tensor:
        """(m, k) of `relative_distances`."""
        return relative_distances(self.neighbours, self.vectors, self.store.vectors)

    def record(self, row: int) -> dict[str, Any]:
        """A query and its neighbours, best first; an approximate index may have found fewer than k."""
        columns = (self.neighbours.indices, self.neighbours.similarities, self.distances)
        classes = (*self.store.classes, None)  # the last is that of UNKNOWN
        neighbours = [
            {
                "image": self.store.names[place],
                "class": classes[self.store.labels[place]],
                "similarity": similarity,
                "relative_distance": distance,
            }
            for place, similarity, distance in zip(*(column[row].tolist() for column in columns), strict=True)
            if place >= 0
        ]
        return {"image": self.names[row], "class": self.classes[row], "neighbours": neighbours}

    def records(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [self.record(row) for row in range(len(self.names))]

    def measures(self, *, ranking: bool) -> dict[str, float]:
        """Of `measure` at 1, 5, 10 and k; ranking: mAP over the whole store too. Empty if no class is known.

        UserError if the store knows classes of the queries but has no other picture of any.
        """
        numbers = {name: number for number, name in enumerate(self.store.classes)}
        labels = torch.tensor([numbers.get(name, UNKNOWN) for name in self.classes])
        if (labels == UNKNOWN).all():
            return {}
        k = self.neighbours.indices.shape[1]
        ks = sorted({*(n for n in (1, 5, 10) if n < k), k})
        found = measure(self.neighbours, labels, self.store.labels, own=self.own, ks=ks)
        if ranking:
            searched = (self.store.vectors, self.store.labels)
            found["map"] = average_precisions(self.vectors, labels, *searched, own=self.own).mean().item()
        return found

    def report(self, *, ranking: bool) -> str:
        """For the console: the nearest of the first queries, the share of the true neighbours found, the measures."""
        lines = []
        for record in map(self.record, range(min(_LINES, len(self.names)))):
            nearest = "nothing"
            for best in record["neighbours"][:1]:
                of_class = f" ({best['class']})" if best["class"] else ""
                distance = f"{100 * best['relative_distance']:.1f} % of the median distance"
                nearest = f"{best['image']}{of_class}, {distance}"
            lines.append(printable(f"{record['image']}: {nearest}"))
        if len(self.names) > _LINES:
            lines.append(f"… and {len(self.names) - _LINES} more; output=FILE has all")
        if self.exactness is not None:
            lines.append(f"{100 * self.exactness:.2f} % of the neighbours that the exact index finds")
        try:
            if measures := self.measures(ranking=ranking):
                lines.append(f"{measures.pop('queries')} queries of a class that the store has")
                lines += [f"{name:14} {100 * value:6.2f} %" for name, value in measures.items()]
        except UserError as reason:
            lines.append(str(reason))
        return "\n".join(lines)

    def write(self, *, sheet: str | None, output: str | None) -> None:
        """Save the contact sheet as a PNG file and the records as a JSON file, where they are named; each whole."""
        if output is not None:
            atomic_io.replace(Path(output), (json.dumps(self.records(), indent=1) + "\n").encode())
        if sheet is not None:
            atomic_io.replace(Path(sheet), png(self.sheet()))

    def sheet(self) -> Figure:
        """As many queries as a contact sheet holds, evenly spaced."""
        rows = []
        for query in map(self.record, evenly_spaced(len(self.names), QUERIES)):
            neighbours = []
            for one in query["neighbours"]:
                right = None if None in (query["class"], one["class"]) else query["class"] == one["class"]
                name = one["class"] or Path(one["image"]).name
                neighbours.append(Neighbour(self._small(one["image"]), one["relative_distance"], name, right))
            rows.append(Row(self._small(query["image"]), query["class"] or Path(query["image"]).name, neighbours))
        return contact_sheet(rows)

    def _small(self, path: str) -> Tensor:
        """A picture of a sheet, (3, h, w) in [0, 1]."""
        try:
            image = self.load(path)
        except Unreadable:
            return self.display(_BLANK)
        h, w = image.shape[1:]
        scale = min(1, _LONGER / max(h, w))
        return self.display(resize(image, (math.ceil(scale * h), math.ceil(scale * w))))


def query(folder: str, pictures: Mapping[str, str | None], describe: Describer, kind: Kind, k: int) -> Answer:
    """The k pictures of a store most like each of `pictures`, {path: class}, by an index of that kind.

    A picture that stands in the store itself is no neighbour of its own. OptionError if the store has too few;
    StoreError if another encoder made it.
    """
    store = Store.open(folder, encoder=describe.extractor.identity)
    check_k(k, len(store), own=len(store.absent(list(pictures))) < len(pictures))
    with within("index"):
        built = kind.over(store.vectors)
    names, vectors = describe(list(pictures))
    vectors, places = store.directions(vectors, names), store.places(names)
    own = places if (places >= 0).any() else None
    neighbours, exactness = nearest(built, vectors, k, own=own), None
    if not isinstance(kind, Flat):
        exact = nearest(Flat().over(store.vectors), vectors, k, own=own)
        exactness = recall(neighbours, exact)
    classes = [pictures[name] for name in names]
    return Answer(store, names, classes, vectors, own, neighbours, exactness, describe.load, describe.display)


def _labels(names: Sequence[str], pictures: Mapping[str, str | None]) -> tuple[list[int], list[str]]:
    """Labels of pictures, -1 for none, and the names of the classes."""
    known = [pictures[name] for name in names]
    classes = sorted({label for label in known if label is not None})
    number = {label: number for number, label in enumerate(classes)}
    return [UNKNOWN if label is None else number[label] for label in known], classes
