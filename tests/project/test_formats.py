"""Each stored format has a schema number, and a file with another number fails with one line that names both."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from ssvit.checkpoints import configuration, manifest
from ssvit.checkpoints.configuration import Configuration
from ssvit.data.sources import shards
from ssvit.engine import atomic_io
from ssvit.errors import UserError
from ssvit.retrieval import store

RUN = Path(__file__).parents[1] / "fixtures" / "outputs" / "masked_patch_shapes"


def sealed(path: Path, schema: int) -> None:
    path.write_bytes(atomic_io.sealed({**json.loads(path.read_text()), "schema": schema}))


def a_checkpoint(folder, schema):
    shutil.copytree(RUN / "step_00000006", folder / "step_00000006")
    sealed(folder / "step_00000006" / "manifest.json", schema)
    return lambda: manifest.read_manifest(folder / "step_00000006")


def a_configuration(folder, schema):
    values = yaml.safe_load((RUN / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**values, "schema": schema}))
    return lambda: Configuration.read(folder / "config.yaml")


def a_store(folder, schema):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SCHEMA", schema)
        store.Store.open(folder / "store", "e", create=True).add(["a", "b", "c"], ["cat"] * 3, torch.eye(3))
    return lambda: store.Store.open(folder / "store", "e")


def an_index(folder, schema):
    index = shards.Index([shards.Row("a.png", 512, 3, None)], size=1024)
    (folder / "a.index.json").write_text(json.dumps({"schema": schema, **vars(index)}))
    return lambda: shards.read_index(folder / "a.tar")


FORMATS = {
    a_checkpoint: manifest.SCHEMA, a_configuration: configuration.SCHEMA, a_store: store.SCHEMA,
    an_index: shards.SCHEMA,
}  # fmt: skip


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_a_file_of_another_format_is_refused_in_one_line(stored, difference, tmp_path):
    schema = FORMATS[stored] + difference
    read = stored(tmp_path, schema)
    if not difference:
        read()
        return
    with pytest.raises(UserError) as raised:
        read()
    (line,) = str(raised.value).splitlines()
    assert line.startswith(str(tmp_path))
    assert f" {schema}, " in line
    assert f" {FORMATS[stored]}: " in line
