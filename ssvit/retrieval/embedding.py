"""The features of many pictures in one file, with their names. After an interruption no picture is read twice.

Letters: n pictures, d width.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from ssvit import atomic_io
from ssvit.options import UserError
from ssvit.retrieval.gallery import Describer, NoneRead

_PART = 1024  # pictures whose vectors are stored together until all are there


def embed(
    pictures: Mapping[str, str | None],
    describe: Describer,
    output: Path,
    *,
    identity: str,
    progress: Callable[[int, int], None],
) -> str:
    """Write names, classes and vectors of pictures {name: class} into `output`, and say what it holds.

    identity: what the vectors depend on besides the pictures. progress: called with the pictures done and all.
    """
    names = list(pictures)
    folder = output.with_name(f"{output.name}.parts")
    parts = [names[start : start + _PART] for start in range(0, len(names), _PART)]
    plan = hashlib.sha256(json.dumps([identity, names]).encode()).hexdigest()
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
    write(output, kept, [pictures[name] for name in kept], np.concatenate(features), identity)
    shutil.rmtree(folder)
    left_out = f"; {len(names) - len(kept)} could not be read" if len(kept) < len(names) else ""
    return f"{output}: {len(kept)} pictures, {features[0].shape[1]} numbers each{left_out}"


def write(output: Path, names: list[str], classes: list[str | None], features: np.ndarray, identity: str) -> None:
    """One file in the format of its suffix: names (n,), classes (n,), features (n, d) float32.

    npz: three arrays, a class that is not known is empty. safetensors: the features, the rest as JSON in its metadata.
    parquet: three columns.
    """
    content = io.BytesIO()
    if output.suffix == ".npz":
        np.savez(content, names=np.array(names), classes=np.array([name or "" for name in classes]), features=features)
    elif output.suffix == ".safetensors":
        about = {"names": json.dumps(names), "classes": json.dumps(classes), "encoder": identity}
        content.write(safetensors.numpy.save({"features": features}, about))
    else:
        import pyarrow
        from pyarrow import parquet

        vectors = pyarrow.FixedSizeListArray.from_arrays(features.ravel(), features.shape[1])
        table = pyarrow.table({"name": names, "class": pyarrow.array(classes, pyarrow.string()), "features": vectors})
        parquet.write_table(table.replace_schema_metadata({"encoder": identity}), content)
    atomic_io.replace(output, content.getvalue())
