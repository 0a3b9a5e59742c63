"""All measures of an encoder's frozen features, and one report: python tools/evaluate.py checkpoint=PATH"""

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from ssvit.cli import frozen
from ssvit.cli.launch import launch
from ssvit.cli.pretrained import offer
from ssvit.options import OptionError


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Measure, write the report into a folder, and print how far the features are above the baselines."""
    readings = frozen.check(plain)
    made = instantiate(config.measures, _convert_="all")
    measures = {f"measures.{name}": measure for name, measure in made.items() if measure is not None}
    if not measures:
        raise OptionError("measures", "", "leave at least one")
    path = Path(plain["encoder"]["path"])
    home = Path(plain["outputs"], path.stem) if path.is_file() else path.parent
    folder = Path(plain["output"] or home / "evaluation")
    folder.mkdir(parents=True, exist_ok=True)

    found = frozen.measured(config, plain, readings, measures)
    if found is None:
        return
    banks, measured = found

    from ssvit.evaluation import pictures, report

    facts = frozen.facts(plain, banks)
    figures = pictures.draw(banks, measured)
    written = report.write(folder, facts=facts, measured=measured, own=banks.own, figures=figures)
    print(frozen.opening(facts))
    print(frozen.table(report.summary(measured, banks.own)))
    print(report.headline(measured, banks.own))
    print(f"report: {', '.join(map(str, written))}")


def main() -> None:
    """Start the tool."""
    launch("evaluate", run, before=offer)
