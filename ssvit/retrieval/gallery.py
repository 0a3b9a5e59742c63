"""Add pictures to a store of image features, and search it for the nearest neighbours of query pictures.

In the store, a file is named by its path, and its class is the name of its folder if that is known. A picture of a data
set in memory is named by its index in the data set.

Letters: m queries, k neighbours, n pictures, d width, c channels, h, w pixels.
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
from ssvit.figures.contact_sheet import QUERIES, Neighbour, Query, contact_sheet
from ssvit.figures.display import PLAIN, Display
from ssvit.figures.pictures import Gallery as ContactSheet
from ssvit.figures.style import evenly_spaced
from ssvit.options import UserError, one_of, printable, whole, within
from ssvit.progress import progress
from ssvit.retrieval.store import Store, check_directions, writing

Load = Callable[[str], Tensor]  # name of a picture -> (c, h, w) uint8

PART = 1024  # pictures whose features are computed before they are stored
_LINES = 20  # queries reported on the console
_LONGER = 340  # longer side of a picture on a contact sheet, in pixels
_BLANK = torch.full((3, 1, 1), 230, dtype=torch.uint8)  # shown for a picture that can no longer be read


def of_data_set(called: str, data: Data, split: str, load: Load = load) -> tuple[dict[str, str | None], Load]:
    """Return the pictures of a split of a data set as {name: class}, and a function that opens a picture of any split.

    Files are named by their absolute path. Other pictures are named like cifar10/train/17 and read from their source.
    The classes of a multi-label image are joined by |.

    Args:
        called: Name of the data set.
        data: The data set.
        split: train, validation, test, or held_out for the split of the reported figure.
        load: Opens a picture by a name that is not in the data set, which is taken for a path.

    Returns:
        {name: class} of the split, and a function from a name to the picture (c, h, w).

    Raises:
        OptionError: The data set has no such split.
    """
    splits: dict[str, dict[str, str | None]] = {}
    places = {}
    for part in ("train", "validation", "test"):
        if (source := getattr(data, part)) is None:
            continue
        splits[part] = {}
        for index in range(len(source)):
            name = source.name(index)
            name = os.path.abspath(name) if os.path.isfile(name) else f"{called}/{part}/{index}"
            places[name] = source, index
            label = None if source.labels is None else class_text(source.labels[index], source.classes)
            splits[part][name] = label or None
    splits["held_out"] = splits[data.reported[0]]
    one_of("split", split, splits)

    def opened(name: str) -> Tensor:
        if name not in places:
            return load(name)
        source, index = places[name]
        return source.read(index)

    return splits[split], opened


class Describer:
    """Compute the features of pictures with an extractor of one layer.

    Unreadable files are printed and skipped; `report` counts them and gives the throughput.

    Args:
        extractor: Computes the features of images.
        transform: Resizes pictures of any size to the input of the extractor.
        batch_size: Images per call of the extractor.
        workers: Number of threads that read files.
        load: Opens a picture by name.
        display: Converts pictures to RGB for contact sheets.
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
    ) -> None:
        whole("batch_size", batch_size)
        whole("workers", workers)
        self.extractor, self.transform, self.load, self.display = extractor, transform, load, display
        self.batch_size, self.workers = batch_size, workers
        self.opened, self.left_out, self.seconds = 0, 0, 0.0

    @property
    def report(self) -> str:
        """Return a line with the number of files read, files per second, and the number of unreadable files."""
        left_out = f"; {self.left_out} could not be read and stayed out" if self.left_out else ""
        return f"read {self.opened} pictures, {self.opened / max(self.seconds, 1e-9):.0f} a second{left_out}"

    def __call__(self, paths: Sequence[str]) -> Iterator[tuple[list[str], Tensor]]:
        """Yield names and features (n, d) of the readable files in order, in parts of about `PART` files."""
        show, began, done = progress("pictures", " pictures"), time.perf_counter(), 0
        names: list[str] = []
        vectors: list[Tensor] = []
        for part, images in self._batches(paths):
            read = {path: image for path, image in zip(part, images, strict=True) if isinstance(image, Tensor)}
            for failure in images:
                if isinstance(failure, Unreadable):
                    tqdm.write(str(failure), file=sys.stdout)
                    self.left_out += 1
            if read:
                (values,) = self.extractor(torch.cat([*read.values()])).values()
                names += read
                vectors.append(values)
            done += len(part)
            self.opened += len(part)
            show(done, len(paths))
            if names and (len(names) >= PART or done == len(paths)):
                yield names, torch.cat(vectors)
                names, vectors = [], []
        self.seconds += time.perf_counter() - began

    def _batches(self, paths: Sequence[str]) -> Iterator[tuple[Sequence[str], list[Tensor | Unreadable]]]:
        """Yield batches of paths with their images or errors, while a thread pool reads the next batch."""
        parts = (paths[start : start + self.batch_size] for start in range(0, len(paths), self.batch_size))
        with ThreadPoolExecutor(self.workers) as pool:
            begun = ((part, pool.map(self._seen, part)) for part in parts)
            for (part, images), _ in pairwise(chain(begun, [((), iter(()))])):
                yield part, list(images)

    def _seen(self, path: str) -> Tensor | Unreadable:
        """Read and transform one file to (1, c, h, w), or return its error.

        Each file is transformed at once, since a batch of photographs at full size takes much memory.
        """
        try:
            return self.transform([self.load(path)])
        except Unreadable as failure:
            return failure


def fill(store: Store, pictures: Mapping[str, str | None], describe: Describer) -> int:
    """Add the pictures {name: class} that a store lacks, part by part, and return how many were added.

    Raises:
        UserError: The store contains none of the pictures afterwards.
    """
    before = len(store)
    for names, vectors in describe(store.absent([*pictures])):
        store.add(names, [pictures[name] for name in names], vectors)
    if store.places.keys().isdisjoint(pictures):
        raise UserError(f"none of the {len(pictures)} pictures can be read")
    return len(store) - before


def index(folder: str, pictures: Mapping[str, str | None], describe: Describer, *, standardize: bool = False) -> str:
    """Create a store of pictures {path: class} and return a one-line summary.

    Args:
        folder: Folder of the new store.
        pictures: Class of each picture by path, None where unknown.
        describe: Extractor of the features.
        standardize: Whether queries compare standardised features.

    Raises:
        StoreError: The folder is not empty.
    """
    with writing(Path(folder)):
        store = Store.create(folder, describe.extractor.identity, standardize=standardize)
        fill(store, pictures, describe)
    return f"{folder}: {_holds(store)}{'; each feature is standardised' if standardize else ''}"


def add(folder: str, pictures: Mapping[str, str | None], describe: Describer) -> str:
    """Add the pictures {path: class} that a store lacks and return a one-line summary.

    Args:
        folder: Folder of the store.
        pictures: Class of each picture by path, None where unknown.
        describe: Extractor of the features.

    Raises:
        StoreError: The store was made with another encoder.
        UserError: None of the pictures is in the store and none can be read.
    """
    with writing(Path(folder)):
        store = Store.open(folder, encoder=describe.extractor.identity)
        known = len(pictures) - len(store.absent([*pictures]))
        added = fill(store, pictures, describe)
    return f"{folder}: {added} pictures added{f', {known} were there already' if known else ''}; {_holds(store)}"


def _holds(store: Store) -> str:
    return f"holds {len(store)} pictures of {len({*store.classes} - {None})} classes"


@dataclass(frozen=True)
class Answer:
    """The nearest neighbours of m queries in a store.

    Attributes:
        store: The store.
        vectors: Normalised features of the store, (n, d).
        names: Names of the queries.
        classes: Classes of the queries, None where unknown.
        queries: Normalised features of the queries, (m, d).
        own: Row of each query in the store, (m,) int64, -1 if it is not in the store.
        neighbours: The neighbours.
        exactness: Recall of an approximate index relative to exact search, in [0, 1]; None for exact search.
        describe: Opens and displays pictures.
    """

    store: Store
    vectors: Tensor
    names: list[str]
    classes: list[str | None]
    queries: Tensor
    own: Tensor
    neighbours: Neighbours
    exactness: float | None
    describe: Describer

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Return the queries with their neighbours, nearest first; an approximate index may return fewer than k."""
        names, classes = self.store.names, self.store.classes
        distances = relative_distances(self.neighbours, self.queries, self.vectors)
        columns = [column.tolist() for column in (self.neighbours.indices, self.neighbours.similarities, distances)]
        return [
            {
                "image": name,
                "class": of_class,
                "neighbours": [
                    {"image": names[row], "class": classes[row], "similarity": similar, "relative_distance": distance}
                    for row, similar, distance in zip(*rows, strict=True)
                    if row >= 0
                ],
            }
            for name, of_class, *rows in zip(self.names, self.classes, *columns, strict=True)
        ]

    def measures(self, *, ranking: bool) -> dict[str, float]:
        """Return the retrieval metrics at 1, 5, 10 and k, and mAP over the complete ranking if `ranking`.

        The result is empty if no query has a class that the store contains.

        Raises:
            UserError: The store has classes of the queries, but no other picture of any of them.
        """
        numbers = {name: number for number, name in enumerate(dict.fromkeys(filter(None, self.store.classes)))}
        labels, searched = (
            torch.tensor([numbers.get(name or "", -1) for name in classes])
            for classes in (self.classes, self.store.classes)
        )
        if (labels < 0).all():
            return {}
        k = self.neighbours.indices.shape[1]
        ks = sorted({k, *(n for n in (1, 5, 10) if n < k)})
        values = measure(self.neighbours, labels, searched, own=self.own, ks=ks)
        if ranking:
            precisions = average_precisions(self.queries, labels, self.vectors, searched, own=self.own)
            values["map"] = precisions.mean().item()
        return values

    def report(self, *, ranking: bool) -> str:
        """Return the console report: neighbours of the first queries, recall of an approximate index, and metrics."""
        lines = []
        for record in self.records[:_LINES]:
            best = "nothing"
            for first in record["neighbours"][:1]:
                of_class = f" ({first['class']})" if first["class"] else ""
                best = f"{first['image']}{of_class}, {100 * first['relative_distance']:.1f} % of the median distance"
            lines.append(printable(f"{record['image']}: {best}"))
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
        """Write the contact sheet (PNG) to `sheet` and the records (JSON) to `output`, each atomically, unless None."""
        if output is not None:
            atomic_io.replace(Path(output), (json.dumps(self.records, indent=1) + "\n").encode())
        if sheet is not None:
            atomic_io.replace(Path(sheet), self.sheet().png())

    def sheet(self) -> ContactSheet:
        """Return the contact sheet of evenly spaced queries and their neighbours."""
        rows = []
        for query in (self.records[row] for row in evenly_spaced(len(self.names), QUERIES)):
            neighbours = []
            for other in query["neighbours"]:
                is_same = None if None in (query["class"], other["class"]) else query["class"] == other["class"]
                image, distance = self._small(other["image"]), other["relative_distance"]
                neighbours.append(Neighbour(image, distance, other["class"] or Path(other["image"]).name, is_same))
            rows.append(Query(self._small(query["image"]), query["class"] or Path(query["image"]).name, neighbours))
        return contact_sheet(rows)

    def _small(self, path: str) -> Tensor:
        """Return a picture for the contact sheet, (3, h, w) in [0, 1], at most `_LONGER` pixels on its longer side."""
        try:
            image = self.describe.load(path)
        except Unreadable:
            return self.describe.display(_BLANK)
        h, w = image.shape[1:]
        scale = min(1, _LONGER / max(h, w))
        return self.describe.display(resize(image, (math.ceil(scale * h), math.ceil(scale * w))))


def query(folder: str, pictures: Mapping[str, str | None], describe: Describer, kind: Kind, k: int) -> Answer:
    """Find the k nearest neighbours in a store for each of `pictures`.

    A query that is in the store is not returned as its neighbour.

    Args:
        folder: Folder of the store.
        pictures: Class of each query by path, None where unknown.
        describe: Extractor of the features.
        kind: Index of the search, exact or approximate.
        k: Number of neighbours.

    Returns:
        The neighbours. The recall of an approximate index is measured against exact search.

    Raises:
        OptionError: The store has too few pictures.
        StoreError: The store was made with another encoder.
        UserError: None of the queries can be read.
    """
    store = Store.open(folder, encoder=describe.extractor.identity)
    check_k(k, len(store), own=not store.places.keys().isdisjoint(pictures))
    vectors = store.directions(store.features)
    with within("index"):
        built = kind.over(vectors)
    parts = list(describe([*pictures]))
    if not parts:
        raise UserError(f"none of the {len(pictures)} pictures can be read")
    names, features = [name for part, _ in parts for name in part], torch.cat([part for _, part in parts])
    check_directions(features, names)
    queries, own = store.directions(features), torch.tensor([store.places.get(name, -1) for name in names])
    left_out = own if (own >= 0).any() else None
    neighbours, exactness = nearest(built, queries, k, own=left_out), None
    if not isinstance(kind, Flat):
        exactness = recall(neighbours, nearest(Flat().over(vectors), queries, k, own=left_out))
    classes = [pictures[name] for name in names]
    return Answer(store, vectors, names, classes, queries, own, neighbours, exactness, describe)
