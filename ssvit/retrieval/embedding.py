"""Write the features of many pictures, with their names, to one file; an interrupted command resumes without rereading.

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
    """Write names, classes, splits and features of pictures to `output`, and return a one-line summary.

    Features are collected in a store next to the output, from which an interrupted call is resumed.

    Args:
        splits: The pictures of each split as {name: class}. The key is "" for pictures without a split.
        describe: Extractor of the features of files.
        output: File to write.
        left_out: Number of pictures of the data set that are in none of the splits, for the summary.

    Returns:
        A line with the number of pictures, the feature width, and the number of pictures that were left out.
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
    """Write features and metadata to one file in the format of its suffix.

    .npz holds four arrays, with "" for an unknown class; .safetensors holds the features, and names, classes and splits
    as JSON in its metadata; .parquet holds four columns.

    Args:
        output: File to write; its suffix is .npz, .safetensors or .parquet.
        names: Names of the pictures, (n,).
        classes: Classes, (n,), None where unknown.
        splits: Splits, (n,), "" for none.
        features: (n, d) float32.
        identity: Identity of the features, stored as metadata (.safetensors and .parquet).
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

        def as_text(values: Sequence[str | None]) -> pyarrow.StringArray:  # file names may not be UTF-8
            return pyarrow.array(
                [text and text.encode(errors="backslashreplace").decode() for text in values], "string"
            )

        vectors = pyarrow.FixedSizeListArray.from_arrays(features.ravel(), features.shape[1])
        table = pyarrow.table({"name": as_text(names), "class": as_text(classes), "split": splits, "features": vectors})
        parquet.write_table(table.replace_schema_metadata({"encoder": identity}), content)
    atomic_io.replace(output, content.getvalue())
