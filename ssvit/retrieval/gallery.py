"""Add pictures to a store of image features, search it for neighbours of query pictures, and export features.

Letters: m queries, k neighbours, n pictures, d width, c channels, h, w pixels.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.config.declaration import Options
from ssvit.data.batch import EvalTransform
from ssvit.data.windows import parsed_name
from ssvit.engine import atomic_io
from ssvit.errors import OptionError, UserError, printable, within
from ssvit.evaluation.neighbours import Neighbours, nearest, relative_distances
from ssvit.evaluation.options import Flat
from ssvit.evaluation.probes.scaler import Scaler
from ssvit.evaluation.statistics import above_chance, of_accuracy
from ssvit.figures import contact_sheet
from ssvit.figures.display import Display
from ssvit.figures.pictures import Gallery, Picture, heat_map, outlined
from ssvit.figures.style import evenly_spaced
from ssvit.retrieval import patches
from ssvit.retrieval.anomaly import Anomalies
from ssvit.retrieval.feature_table import FeatureTable, Thumbnails, check_texts
from ssvit.retrieval.options import PARQUET, PART_FILES, StoreError, encoder_of
from ssvit.retrieval.pictures import Describer, PictureSet, pictures_of
from ssvit.retrieval.store import Store, check_directions, writing

_LINES = 20  # queries whose nearest neighbour is printed
_WITHIN = 6  # most similar patches of the picture of a query that have frames, the query included
_LONGER = 340  # longer side of a picture on a contact sheet, in pixels


def fill(store: Store, sets: Collection[PictureSet], describe: Describer) -> tuple[int, int]:
    """Add the pictures that a store lacks, and replace those whose content or class has changed.

    A picture whose class alone has changed keeps its features; an unknown class replaces none. Other entries of a file
    that was added or replaced are removed if they were made from other content, such as windows of a picture that had
    another size.

    Args:
        store: The store.
        sets: The pictures.
        describe: Computes their features.

    Returns:
        The numbers of replaced pictures and of removed entries.

    Raises:
        UserError: The store has none of the pictures afterwards.
    """
    requested = replaced = removed = 0
    for pictures in sets:
        requested += len(pictures.names)
        stored = dict(store.row_of)
        contents = [*map(pictures.source.content, range(len(pictures.names)))]
        changed, relabelled = [], []
        for name, row in {name: row for row, name in enumerate(pictures.names)}.items():
            if name not in stored or store.contents[stored[name]] != contents[row]:
                changed.append(row)
            elif pictures.classes[row] not in (None, store.classes[stored[name]]):
                relabelled.append(row)
        kept = [stored[pictures.names[row]] for row in relabelled]
        known = [(relabelled, store.features[kept])] if kept else []
        for rows, features in chain(known, describe(pictures, changed)):
            names, checksums = ([column[row] for row in rows] for column in (pictures.names, contents))
            classes = [pictures.classes[row] for row in rows]
            replaced += len(stored.keys() & names)
            store.add(names, classes, features, contents=checksums)
        content_of = {parsed_name(name)[0]: content for name, content in zip(pictures.names, contents, strict=True)}
        entries = [(name, parsed_name(name)[0], store.contents[row]) for name, row in store.row_of.items()]
        current = {file for _, file, content in entries if content_of.get(file) == content}
        outdated = [name for name, file, content in entries if file in current and content_of[file] != content]
        if outdated:
            store.add([], [], store.features[:0], removed=outdated)
        removed += len(outdated)
    if all(store.row_of.keys().isdisjoint(pictures.names) for pictures in sets):
        raise UserError(f"none of the {requested} pictures can be read")
    return replaced, removed


def index(folder: str, pictures: PictureSet, describe: Describer, checkpoint: Path | None = None) -> list[str]:
    """Create a store of pictures, or update it by `fill`. Returns lines for the console.

    Args:
        folder: Folder of the store.
        pictures: The pictures.
        describe: Computes their features.
        checkpoint: The checkpoint of the encoder, which later commands use.

    Raises:
        StoreError: The folder holds other files, or a store of another encoder.
        UserError: The store has none of the pictures afterwards.
    """
    with writing(Path(folder)):
        store = Store.open(folder, describe.extractor.identity, checkpoint=checkpoint, create=True)
        before = len(store)
        replaced, removed = fill(store, [pictures], describe)
    added = len(store) - before + removed
    present = len(pictures.names) - added - replaced - describe.unreadable
    updated = f"{replaced} have changed and were updated, " if replaced else ""
    updated += f"{removed} entries of changed pictures were removed, " if removed else ""
    return [
        f"{folder}: {added} pictures added, {updated}{present} were present, {describe.unreadable} could not be read",
        f"the store has {len(store)} pictures of {len({*store.classes} - {None})} classes",
    ]


def remove(folder: str, images: Sequence[str]) -> list[str]:
    """Remove pictures from a store, and return lines for the console. Their files may no longer exist.

    Args:
        folder: Folder of the store.
        images: Names of the pictures, or of folders that contain them.

    Raises:
        OptionError: A name belongs to no picture of the store.
        StoreError: The folder is not a store, or cannot be written.
    """
    forms = {image: {os.path.normpath(image), os.path.abspath(image)} - {os.curdir} for image in images}
    requested = set().union(*forms.values())
    with writing(Path(folder)):
        store = Store.open(folder, encoder_of(folder))
        files = {name: parsed_name(name)[0] for name in store.names}
        paths = {name: requested & {name, file, *map(str, Path(file).parents)} for name, file in files.items()}
        found = {*chain(*paths.values())}
        unused = [image for image, of_image in forms.items() if found.isdisjoint(of_image)]
        if unused:
            raise OptionError("images", min(unused), f"must be a picture of {folder}, or a folder of such pictures")
        removed = [name for name in store.names if paths[name]]
        store.add([], [], store.features[:0], removed=removed)
    return [f"{folder}: {len(removed)} pictures removed; the store has {len(store)} pictures"]


def embed(
    sets: Mapping[str, PictureSet],
    describe: Describer,
    output: Path,
    *,
    image_size: tuple[int, int],
    reference: Store | None = None,
    thumbnails: Thumbnails | None = None,
) -> tuple[list[str], Anomalies | None]:
    """Write names, classes, splits and features of pictures to a file, see `FeatureTable`.

    Features are collected in a store next to the output, from which an interrupted call is resumed. A picture that
    several splits or rows of a table list has as many rows in the file.

    Args:
        sets: The pictures of each split, "" for pictures without a split.
        describe: Computes their features.
        output: File to write, in the format .npz or .parquet.
        image_size: Height and width of the encoder's input in pixels.
        reference: Store of normal pictures; the distance of each vector to it becomes the array or column "anomaly".
        thumbnails: Shows the pictures for a column of a .parquet file; None: without thumbnails.

    Returns:
        Lines for the console, and the anomaly scores if there is a reference.

    Raises:
        StoreError: Another process writes the same file, or the folder of the store holds other files.
        UserError: None of the pictures can be read, or a name is not UTF-8, as texts in Parquet must be.
    """
    folder = output.with_name(f"{output.name}.parts")
    if output.suffix == PARQUET:
        for pictures in sets.values():
            check_texts([*pictures.names, *pictures.classes])
    with writing(folder):
        table = _collected(folder, sets, describe)
        anomalies = None if reference is None else Anomalies(reference, table.names, table.classes, table.features)
        scores = {"anomaly": anomalies.distances} if anomalies else {}
        is_table = output.suffix == PARQUET
        atomic_io.replace(output, table.parquet(image_size, thumbnails, **scores) if is_table else table.npz(**scores))
        shutil.rmtree(folder)
    counts = ", ".join(f"{number:,} {split}" for split, number in Counter(table.splits).items() if split)
    patches = " of each of {} x {} patches".format(*table.features.shape[1:3]) if table.features.ndim == 4 else " each"
    lines = [
        f"{output}: {len(table.names)} pictures{f' ({counts})' if counts else ''}, {table.features.shape[-1]} "
        f"features{patches}; {describe.unreadable} could not be read",
        *(anomalies.report() if anomalies else ()),
        f"read by {'pandas.read_parquet' if is_table else 'numpy.load'}({str(output)!r}) in Python",
    ]
    return lines, anomalies


def _collected(folder: Path, sets: Mapping[str, PictureSet], describe: Describer) -> FeatureTable:
    """Compute the features of pictures that a temporary store lacks, and return those of all readable pictures."""
    identity = f"{describe.extractor.identity} {describe.transform}"
    try:
        store = Store.open(folder, identity, create=True)
    except StoreError:  # of another encoder, or damaged
        for file in folder.glob(PART_FILES):
            atomic_io.remove(file)
        store = Store.open(folder, identity, create=True)
    fill(store, sets.values(), describe)
    listed = [
        (name, split, class_name or "")
        for split, pictures in sets.items()
        for name, class_name in zip(pictures.names, pictures.classes, strict=True)
        if name in store.row_of
    ]
    names, splits, classes = zip(*listed, strict=True)
    return FeatureTable(names, splits, classes, store.features[[store.row_of[name] for name in names]], identity)


def query(
    store: Store,
    pictures: PictureSet,
    describe: Describer,
    index: Options | None,
    *,
    k: int,
    standardize: bool = False,
    patch: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Find the k nearest neighbours in a store for each of `pictures`, or for a patch of each.

    Neighbours are of other pictures: neither the picture of the query nor its windows, also if links lead to it.

    Args:
        store: The store.
        pictures: The queries.
        describe: Computes their features.
        index: Options of the search index; None for exact search. Patches are searched exactly.
        k: Number of neighbours.
        standardize: Whether to standardise features to mean 0 and standard deviation 1 over the store.
        patch: Column and row of a pixel: the query is the patch of each picture that contains it, or of the window of
            each picture whose centre is nearest to it. None: the queries are pictures.

    Returns:
        Image and class of each readable query, and its neighbours, nearest first, each with image, class, cosine
        similarity, and cosine distance relative to the median over the store. An approximate index may find fewer
        than k. For a patch also row and column of the patch of the query and of each neighbour, the most similar one of
        its picture, and the cosines of the query with all patches of its own picture, (y, x).

    Raises:
        OptionError: The store has too few other pictures, or the encoder does not receive the pixel.
        StoreError: The store has features of patches and the queries are pictures, or the reverse, or the features are
            to be standardised, but all images of the store have the same ones.
        UserError: None of the queries can be read.
    """
    if (patch is None) == (store.features.ndim == 4):
        kind = "pictures, in which patch=X,Y is not searched" if patch else "patches, which patch=X,Y searches"
        raise StoreError(f"{store.folder}: has features of {kind}")
    of_store, of_names = pictures_of(store.names), pictures_of(pictures.names)
    counts = Counter(of_store)
    own = max((counts[picture] for picture in of_names), default=0)
    if len(store) == own:
        raise StoreError(f"{store.folder}: has no entries of other pictures than the query")
    if k > len(store) - own:
        most = f"{len(store) - own}, the entries of {store.folder} that are of other pictures than a query"
        raise OptionError("k", k, f"must be at most {most}")
    scaler = Scaler.of_features(store.features.flatten(0, -2), standardize)
    if not scaler.scale.any():
        raise StoreError(f"{store.folder}: all features are equal; set standardize=false")
    vectors = F.normalize(scaler.scaled(store.features), dim=-1)
    with within("index"):
        search_index: Any = None if patch else (index or Flat()).build(vectors=vectors)
    chosen = patches.nearest_windows(pictures, patch) if patch else range(len(pictures.names))
    parts = list(describe(pictures, chosen))
    if not parts:
        raise UserError(f"none of the {len(chosen)} pictures can be read")
    rows, features = [row for part, _ in parts for row in part], torch.cat([part for _, part in parts])
    names = [pictures.names[row] for row in rows]
    check_directions(features, names)
    queries = F.normalize(scaler.scaled(features), dim=-1)
    number_of = {picture: number for number, picture in enumerate(counts)}
    numbers = torch.tensor([number_of[picture] for picture in of_store])
    of_queries = torch.tensor([number_of.get(of_names[row], -1) for row in rows])
    if patch is None:
        neighbours = nearest(search_index, queries, k + own)
        neighbours.indices[numbers[neighbours.indices] == of_queries[:, None]] = -1
        return _records(store, pictures, rows, k, neighbours, relative_distances(neighbours, queries, vectors))
    maps, (_, height, width, _) = queries, features.shape
    cells = [patches.cell(pictures, row, patch, describe.transform, (height, width)) for row in rows]
    queries = torch.stack([of_picture[cell] for of_picture, cell in zip(maps, cells, strict=True)])
    is_own = numbers[:, None] == of_queries
    neighbours, most_similar = patches.nearest_patches(vectors.flatten(1, 2), queries, k, is_own)
    distances = relative_distances(neighbours, queries, vectors.flatten(0, 2))
    records = _records(store, pictures, rows, k, neighbours, distances)
    for record, cell, of_picture, vector, found in zip(records, cells, maps, queries, most_similar, strict=True):
        record |= {"patch": [*cell], "cosines": (of_picture @ vector).tolist()}
        for neighbour, number in zip(record["neighbours"], found, strict=True):
            neighbour["patch"] = [*divmod(number, width)]
    return records


def _records(
    store: Store, pictures: PictureSet, rows: Sequence[int], k: int, neighbours: Neighbours, distances: Tensor
) -> list[dict[str, Any]]:
    """Return image and class of the queries at some rows, and their neighbours, see `query`."""
    known, records = {*store.classes}, []
    columns = (neighbours.indices, neighbours.similarities, distances)
    for row, *of_query in zip(rows, *(column.tolist() for column in columns), strict=True):
        found = [of_neighbour for of_neighbour in zip(*of_query, strict=True) if of_neighbour[0] >= 0]
        nearest_pictures = [
            {"image": store.names[i], "class": store.classes[i], "similarity": cosine, "relative_distance": distance}
            for i, cosine, distance in found[:k]
        ]
        name, class_name = pictures.names[row], pictures.classes[row]
        if class_name is None and name in store.row_of:
            class_name = store.classes[store.row_of[name]]
        if class_name is None and (folder := Path(name).parent.name) in known:  # the pictures of a class are named
            class_name = folder
        records.append({"image": name, "class": class_name, "neighbours": nearest_pictures})
    return records


def report(records: Sequence[Mapping[str, Any]], store: Store) -> list[str]:
    """Return lines for the console: the nearest neighbours of the first queries, and metrics next to chance.

    Queries are measured if the store has another picture of their class. Chance is the share of these pictures. The
    windows of a picture are not independent, so each picture counts once, with the accuracy of its windows.

    Args:
        records: The queries with their neighbours, see `query`.
        store: The store.
    """
    lines = []
    for record in records[:_LINES]:
        nearest_picture = "no neighbour found"
        for first in record["neighbours"][:1]:
            class_name = f" ({first['class']})" if first["class"] else ""
            distance = f"{100 * first['relative_distance']:.1f} % of the median distance"
            nearest_picture = f"{first['image']}{class_name}, {distance}"
        lines.append(printable(f"{record['image']}: {nearest_picture}"))
    if len(records) > _LINES:
        lines.append(f"… and {len(records) - _LINES} more queries; output=FILE writes all of them")
    if store.features.ndim == 4:  # similar patches occur in pictures of any class
        return lines
    labelled = {*zip(pictures_of(store.names), store.classes, strict=True)}
    stored, counts = {picture for picture, _ in labelled}, Counter(class_name for _, class_name in labelled)
    chances: dict[str, float] = {}
    correct: dict[str, list[bool]] = {}
    for record, picture in zip(records, pictures_of(record["image"] for record in records), strict=True):
        class_name = record["class"]
        others = counts[class_name] - ((picture, class_name) in labelled)
        if class_name is not None and others > 0:
            chances[picture] = others / (len(stored) - (picture in stored))
            is_correct = any(neighbour["class"] == class_name for neighbour in record["neighbours"][:1])
            correct.setdefault(picture, []).append(is_correct)
    if counts.keys() <= {None}:
        hint = "a folder with one subfolder for each class has them"
        return [*lines, f"no metrics: the pictures of {store.folder} have no classes ({hint})"]
    if not chances:
        return [*lines, "no metrics: the store has no further picture of any query's class"]
    accuracy, chance = fmean(map(fmean, correct.values())), fmean(chances.values())
    low, high = of_accuracy(accuracy, len(chances))
    significant = "significant" if above_chance(accuracy, chance, len(chances)) else "not significant"
    return [
        *lines,
        f"nearest picture of the same class: {100 * accuracy:.1f} % of {len(chances)} queried pictures (95 % interval "
        f"{100 * low:.1f} to {100 * high:.1f}); baseline, a random order: {100 * chance:.1f} %; {significant}",
    ]


def sheet(
    records: Sequence[Mapping[str, Any]], opened: Callable[[str], Tensor], display: Display, transform: EvalTransform
) -> Gallery:
    """Return the contact sheet of evenly spaced queries and their neighbours.

    Patches have frames in their pictures, which are shown as the encoder receives them. The second picture of a row is
    a heat map of the cosines of the query with all patches of its picture, of which the highest have frames.

    Args:
        records: The queries with their neighbours, see `query`.
        opened: Returns a picture by its name, see `Opener`.
        display: Converts pictures to RGB.
        transform: Transforms pictures to the input of the encoder.
    """
    from torchvision.transforms.v2.functional import resize

    def small(record: Mapping[str, Any]) -> Tensor:
        image = opened(record["image"])
        if "patch" in record:
            return outlined(display(transform([image])[0]), [record["patch"]], grid, _LONGER)
        longer = max(image.shape[1:])
        size = [max(1, _LONGER * side // longer) for side in image.shape[1:]]
        return display(resize(image, size) if longer > _LONGER else image)

    def title(record: Mapping[str, Any]) -> str:
        return record["class"] or Path(record["image"]).name

    rows, kind, grid = [], "images", (1, 1)
    for record in (records[row] for row in evenly_spaced(len(records), contact_sheet.QUERIES)):
        if "cosines" in record:
            cosines, kind = torch.tensor(record["cosines"]), "patches"
            grid = (cosines.shape[0], cosines.shape[1])
        rows.append([contact_sheet.query(small(record), title(record))])
        if "cosines" in record:
            (low, high), image = cosines.aminmax(), display(transform([opened(record["image"])])[0])
            highest = cosines.flatten().topk(min(_WITHIN, cosines.numel())).indices
            heat = heat_map(image, (cosines - low) / (high - low).clamp(min=1e-6))
            heat = outlined(heat, [divmod(cell, grid[1]) for cell in highest.tolist()], grid, _LONGER)
            rows[-1].append(Picture(heat, ("cosines within it", f"{low:.2f} to {high:.2f}")))
        for other in record["neighbours"][: contact_sheet.NEIGHBOURS]:
            unknown = "patch" in record or None in (record["class"], other["class"])
            is_same = None if unknown else record["class"] == other["class"]
            rows[-1].append(contact_sheet.neighbour(small(other), other["relative_distance"], title(other), is_same))
    return contact_sheet.contact_sheet(rows, kind)
