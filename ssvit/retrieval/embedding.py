"""The features of many pictures in one file, with their names. After an interruption no picture is read twice.

Letters: n pictures, d width.
"""

import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from ssvit import atomic_io
from ssvit.options import UserError
from ssvit.retrieval.gallery import Describer, NoneRead

_PART = 1024  # pictures whose vectors are stored together until all are there


def embed(
    splits: Mapping[str, Mapping[str, str | None]],
    describe: Describer,
    output: Path,
    *,
    identity: str,
    progress: Callable[[int, int], None],
    left_out: int = 0,
) -> str:
    """Write names, classes, splits and vectors of pictures into `output`, and return a line on what it holds.

    Args:
        splits: The pictures of each split, {name: class}. Those of no split have "".
        describe: Computes the vectors of files.
        output: The file to write.
        identity: What the vectors depend on besides the pictures.
        progress: Called with the number of pictures done and of all.
        left_out: How many pictures of the data set are in none of the splits.
    """
    pictures = {name: (of_class, split) for split, part in splits.items() for name, of_class in part.items()}
    names = list(pictures)
    folder = output.with_name(f"{output.name}.parts")
    parts = [names[start : start + _PART] for start in range(0, len(names), _PART)]
    plan = hashlib.sha256(json.dumps([identity, names]).encode()).hexdigest()

    def refusal(holder: str) -> UserError:
        return UserError(f"output={output}: {holder} is writing it; wait until it has ended")

    with atomic_io.locked(output.with_name(f".{output.name}.lock"), refusal):
        if folder.exists():
            if not (folder / "plan").is_file() and any(folder.iterdir()):
                raise UserError(f"{folder}: is needed for parts of {output.name}, and holds something else")
            if (folder / "plan").is_file() and (folder / "plan").read_text() != plan:  # other pictures, another encoder
                shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        atomic_io.replace(folder / "plan", plan.encode())
        done = 0
        for number, part in enumerate(parts):
            file = folder / f"{number:08}.safetensors"
            if not file.exists():
                try:
                    read, vectors = describe(part)
                except NoneRead:
                    read, vectors = [], torch.zeros(0, 0)
                content = {"features": np.asarray(vectors, np.float32)}
                atomic_io.replace(file, safetensors.numpy.save(content, {"names": json.dumps(read)}))
            done += len(part)
            progress(done, len(names))
        kept, features = [], []
        for number in range(len(parts)):
            with safetensors.safe_open(folder / f"{number:08}.safetensors", "np") as content:
                if read := json.loads(content.metadata()["names"]):
                    kept += read
                    features.append(content.get_tensor("features"))
        if not kept:
            shutil.rmtree(folder)
            raise UserError(f"none of the {len(names)} pictures can be read")
        classes, split_of = [pictures[name][0] for name in kept], [pictures[name][1] for name in kept]
        write(output, kept, classes, split_of, np.concatenate(features), identity)
        shutil.rmtree(folder)
    counts = ", ".join(f"{count:,} {split}" for split, count in Counter(split_of).items() if split)
    unread = f"; {len(names) - len(kept)} could not be read" if len(kept) < len(names) else ""
    others = f"; left out {left_out:,} of other splits or of none" if left_out else ""
    of_splits = f" ({counts})" if counts else ""
    return f"{output}: {len(kept)} pictures{of_splits}, {features[0].shape[1]} numbers each{unread}{others}"


def write(
    output: Path, names: list[str], classes: list[str | None], splits: list[str], features: np.ndarray, identity: str
) -> None:
    """Write one file in the format of its suffix: names (n,), classes (n,), splits (n,), features (n, d) float32.

    npz: four arrays, a class that is not known is empty. safetensors: the features, the rest as JSON in its metadata.
    parquet: four columns.
    """
    content = io.BytesIO()
    if output.suffix == ".npz":
        texts = names, [name or "" for name in classes], splits
        columns = dict(zip(("names", "classes", "splits"), map(np.array, texts), strict=True))
        np.savez(content, allow_pickle=False, features=features, **columns)
    elif output.suffix == ".safetensors":
        about = {"names": json.dumps(names), "classes": json.dumps(classes), "encoder": identity}
        about["splits"] = json.dumps(splits)
        content.write(safetensors.numpy.save({"features": features}, about))
    else:
        import pyarrow
        from pyarrow import parquet

        def as_text(values: Sequence[str | None]) -> pyarrow.StringArray:  # names of files may hold other bytes
            return pyarrow.array([one and one.encode(errors="backslashreplace").decode() for one in values], "string")

        vectors = pyarrow.FixedSizeListArray.from_arrays(features.ravel(), features.shape[1])
        table = pyarrow.table({"name": as_text(names), "class": as_text(classes), "split": splits, "features": vectors})
        parquet.write_table(table.replace_schema_metadata({"encoder": identity}), content)
    atomic_io.replace(output, content.getvalue())
