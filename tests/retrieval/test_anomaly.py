"""Anomaly scores are cosine distances to the nearest neighbour in a reference store, which `ssvit embed` writes."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command import TINY, one_line
from composing import untrained
from images import picture, put
from PIL import Image

from ssvit.errors import UserError
from ssvit.retrieval.anomaly import Anomalies
from ssvit.retrieval.store import Store


@pytest.mark.parametrize("grid", [(), (4, 5)])
def test_a_score_is_the_distance_to_the_nearest_vector(tmp_path, grid):
    generator = torch.Generator().manual_seed(0)
    store = Store(tmp_path, "encoder")
    store.add(["a/1", "a/2", "a/3"], ["a"] * 3, torch.randn(3, *grid, 6, generator=generator))
    features = torch.randn(2, *grid, 6, generator=generator)
    anomalies = Anomalies(store, ["x", "y"], ["a", "b"], features)
    reference = store.features.reshape(-1, 6)
    expected = torch.stack(
        [1 - F.cosine_similarity(vector, reference).max() for vector in features.reshape(-1, 6)]
    ).view(2, *grid)
    torch.testing.assert_close(anomalies.distances, expected)
    torch.testing.assert_close(anomalies.scores, expected.view(2, -1).amax(1))  # 1 % of 20 patches is one
    torch.testing.assert_close(Anomalies(store, ["x"] * 3, ["a"] * 3, store.features).scores, torch.zeros(3))
    pictures = {"x": torch.zeros(3, 8, 8), "y": torch.ones(3, 8, 8)}
    (row,) = anomalies.sheet(pictures.get).rows
    assert len(row) == (4 if grid else 2)  # each picture next to the map of its patches
    order = [picture.image.mean() for picture in row[:: 2 if grid else 1]]
    assert order == anomalies.scores.argsort(descending=True).tolist()


def test_the_auroc_compares_classes_of_the_store_with_others(tmp_path):
    store = Store(tmp_path, "encoder")
    store.add(["good/1"], [None], torch.tensor([[1.0, 0.0]]))  # its folder is its class
    features = torch.tensor([[1.0, 0.1], [1.0, 0.3], [1.0, 0.2], [1.0, 0.4], [1.0, 9.0]])
    names = [*map(str, range(5))]
    (line,) = Anomalies(store, names, ["good", "good", "odd", "odd", ""], features).report()
    assert " 0.750 " in line
    features = torch.cat([features, torch.tensor([[1.0, 0.0]])])
    own = Anomalies(store, [*names, "good/1#xywh=0,0,4,4"], ["good", "good", "odd", "odd", "", "good"], features)
    (line,) = own.report()  # without the score of the window of the picture in the store
    assert " 0.750 " in line
    assert re.search(r"\b2\b.*\b2\b.*\b1\b", line)
    (line,) = Anomalies(store, ["good/1", "5"], ["good", "odd"], features[[5, 3]]).report()
    assert re.findall(r"\d+", line) == ["1"]
    features = features[:5]
    assert not Anomalies(store, names, ["good"] * 5, features).report()
    assert not Anomalies(store, names, [""] * 5, features).report()


def test_an_empty_store_is_an_error(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        Anomalies(Store(tmp_path, "encoder"), ["x"], ["a"], torch.ones(1, 2))


def test_patches_that_the_reference_lacks_have_the_highest_scores(tool, tmp_path):
    """A white square that none of the reference pictures has is found, with its picture and its position."""
    table = pytest.importorskip("pyarrow.parquet")
    untrained(tmp_path / "outputs" / "run", *TINY)
    for number in range(6):
        folder = tmp_path / ("good" if number < 3 else "test/odd" if number == 5 else "test/good")
        put(folder / f"{number}.png", picture(0, size=(16, 16)))
    with Image.open(folder / "5.png") as image:
        image.paste("white", (8, 4, 16, 12))
        image.save(folder / "5.png")
    tool("retrieve", "action=index", "store=store", "features.pooling=patches", "good")
    done = tool("embed", "anomaly=store", "test", "output=f.parquet", "sheet=f.png")
    assert "AUROC 1.000" in done.stdout
    rows = table.read_table(tmp_path / "f.parquet").to_pylist()
    highest = max(rows, key=lambda row: row["anomaly"])
    assert highest["path"].endswith("odd/5.png")
    assert highest["right"] > 8
    assert max(row["anomaly"] for row in rows if "/good/" in row["path"]) < 1e-5
    assert (tmp_path / "f.png").is_file()


def test_scores_of_pictures_are_an_array(tool, tmp_path):
    untrained(tmp_path / "outputs" / "run", *TINY)
    for number in range(4):
        put(tmp_path / "photos" / f"{number}.png", picture(number, size=(16, 16)))
    tool("retrieve", "action=index", "store=store", "photos/0.png", "photos/1.png")
    tool("embed", "anomaly=store", "photos", "output=f.npz", "sheet=f.png")
    scores = np.load(tmp_path / "f.npz")["anomaly"]
    assert scores[:2].max() < 1e-5 < scores[2:].min()
    assert (tmp_path / "f.png").is_file()
    for option in ("anomaly=none", "sheet=g.png"):
        line = one_line(tool("embed", option, "photos", "output=g.npz", status=2))
        assert line.startswith(f"ssvit: {option}: ")
