"""Measure a part of ssvit beside its peers: python tools/benchmark.py part=data"""

import importlib
import json
from pathlib import Path
from typing import Any

from launch import launch
from omegaconf import DictConfig

from ssvit.options import one_of, whole

PARTS = ("data", "probe", "knn")


def main(config: DictConfig, plain: dict[str, Any]) -> None:
    """Check the options, measure, print the tables, and write the rates if asked to."""
    one_of("part", plain["part"], PARTS)
    whole("rounds", plain["rounds"])

    from ssvit.benchmark.timing import as_json, table

    results = importlib.import_module(f"ssvit.benchmark.{plain['part']}").run(rounds=plain["rounds"])
    for title, rates in results.items():
        print(table(title, rates))
    if plain["output"] is not None:
        Path(plain["output"]).write_text(json.dumps(as_json(results), indent=2) + "\n")


if __name__ == "__main__":
    launch("benchmark", main)
