"""Images in the layouts of all data sets of files."""

import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """Eight images of two classes in the layout of ImageNet, a table, shards, lists and a saved set."""
    root = tmp_path_factory.mktemp("images")
    (root / "dataset_dict.json").write_text('{"splits": ["train", "val"]}')
    (root / "cifar").mkdir()
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    rows = ["path,label,split"]
    for part in ("train", "val"):
        for wnid in ("n01", "n02"):
            (root / part / wnid).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (30, 20), (number, 0, 0)).save(root / part / wnid / f"{number}.png")
                rows.append(f"{part}/{wnid}/{number}.png,{wnid},{part}")
        with tarfile.open(root / part / "0.tar", "w") as shard:
            shard.add(root / part, "", filter=lambda member: None if member.name.endswith(".tar") else member)
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["n01", "n02"]}}
        (root / part / "dataset_info.json").write_text(json.dumps({"features": features}))
        lines = [f"../{part}/n0{1 + label}/{number}.png {label}" for label in (0, 1) for number in range(4)]
        for name in ("train800.txt",) if part == "train" else ("val200.txt", "test.txt"):
            (root / "cifar" / name).write_text("\n".join(lines))
        (root / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("2007_000032\n")
    (root / "table.csv").write_text("\n".join(rows) + "\n")
    return root
