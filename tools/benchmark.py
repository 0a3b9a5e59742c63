"""Measure a part of ssvit beside its peers: python tools/benchmark.py part=data"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must stand before torch is loaded

import importlib
import json
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from ssvit.options import UserError, one_of, whole

PARTS = ("data",)


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark")
def main(config: DictConfig) -> None:
    try:
        one_of("part", config.part, PARTS)
        whole("rounds", config.rounds)
    except UserError as error:
        sys.exit(str(error))
    from ssvit.benchmark.timing import plain, table

    results = importlib.import_module(f"ssvit.benchmark.{config.part}").run(rounds=config.rounds)
    for title, rates in results.items():
        print(table(title, rates))
    if config.output:
        Path(config.output).write_text(json.dumps(plain(results), indent=2) + "\n")


if __name__ == "__main__":
    main()
