"""The features of many pictures in one file, with their names. After an interruption no picture is read twice.

Letters: n pictures, d width.
"""

import io
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from ssvit import atomic_io
from ssvit.retrieval.gallery import Describer, fill
from ssvit.retrieval.options import encoder_of
from ssvit.retrieval.store import LOCK, MANIFEST, Store, writing


def embed(
    splits: Mapping[str, Mapping[str, str | None]], describe: Describer, output: Path, *, left_out: int = 0
) -> str:
    """Write names, classes, splits and vectors of pictures into `output`, and return a line on what it holds.

    Until all are there, they lie in a store next to the output, which the next call continues.

    Args:
        splits: The pictures of each split, {name: class}. Those of no split have "".
        describe: Computes the vectors of files.
        output: The file to write.
        left_out: How many pictures of the data set are in none of the splits.
    """
    pictures = {name: (of_class, split) for split, part in splits.items() for name, of_class in part.items()}
    folder = output.with_name(f"{output.name}.parts")
    identity = f"{describe.extractor.identity} {describe.transform}"
    with writing(folder):
        if encoder_of(folder) not in ("", identity):
            for file in {*folder.iterdir()} - {folder / LOCK}:
                atomic_io.remove(file)
        is_store = (folder / MANIFEST).exists()
        store = Store.open(folder, encoder=identity) if is_store else Store.create(folder, identity)
        fill(store, {name: of_class for name, (of_class, _) in pictures.items()}, describe)
        kept = [name for name in pictures if name in store.places]
        classes, split_of = ([pictures[name][place] for name in kept] for place in (0, 1))
        features = store.features[[store.places[name] for name in kept]].numpy()
        write(output, kept, classes, [str(split) for split in split_of], features, identity)
        shutil.rmtree(folder)
    counts = ", ".join(f"{count:,} {split}" for split, count in Counter(split_of).items() if split)
    unread = f"; {len(pictures) - len(kept)} could not be read" if len(kept) < len(pictures) else ""
    others = f"; left out {left_out:,} of other splits or of none" if left_out else ""
    of_splits = f" ({counts})" if counts else ""
    return f"{output}: {len(kept)} pictures{of_splits}, {features.shape[1]} numbers each{unread}{others}"


def write(
    output: Path,
    names: Sequence[str],
    classes: Sequence[str | None],
    splits: Sequence[str],
    features: np.ndarray,
    identity: str,
) -> None:
    """Write one file in the format of its suffix: names (n,), classes (n,), splits (n,), features (n, d) float32.

    npz: four arrays, a class that is not known is empty. safetensors: the features, the rest as JSON in its metadata.
    parquet: four columns.
    """
    content = io.BytesIO()
    texts: dict[str, Sequence[str | None]] = {"names": names, "classes": classes, "splits": splits}
    if output.suffix == ".npz":
        arrays = {key: np.array([text or "" for text in of]) for key, of in texts.items()}
        np.savez(content, allow_pickle=False, features=features, **arrays)
    elif output.suffix == ".safetensors":
        metadata = {"encoder": identity, **{key: json.dumps(of) for key, of in texts.items()}}
        content.write(safetensors.numpy.save({"features": features}, metadata))
    else:
        import pyarrow
        from pyarrow import parquet

        def as_text(values: Sequence[str | None]) -> pyarrow.StringArray:  # names of files may hold other bytes
            return pyarrow.array(
                [text and text.encode(errors="backslashreplace").decode() for text in values], "string"
            )

        vectors = pyarrow.FixedSizeListArray.from_arrays(features.ravel(), features.shape[1])
        table = pyarrow.table({"name": as_text(names), "class": as_text(classes), "split": splits, "features": vectors})
        parquet.write_table(table.replace_schema_metadata({"encoder": identity}), content)
    atomic_io.replace(output, content.getvalue())
