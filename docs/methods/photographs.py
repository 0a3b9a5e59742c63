"""Draw photographs.png, the accuracy of frozen features on CIFAR-10 over labels: python docs/methods/photographs.py"""

import json
import statistics
from pathlib import Path

from ssvit.figures.plot import Line, Panel, Plot

FOLDER = Path(__file__).parent
LABELS = {"few_shot_big_vision": 250, "few_shot": 1000, "ridge": 20_000}  # labelled images of each probe
COLORS = {"random weights": "ink", "pixels": "unchanged"}


def main() -> None:
    """Draw the mean of the seeds of MAE with Muon, a band from the lowest to the highest, and the baselines."""
    files = sorted((FOLDER.parent / "distillation" / "cifar10_6min").glob("mae_seed*.json"))
    seeds = [accuracies(json.loads(file.read_text())["probes"]) for file in files]
    means = [statistics.fmean(values) for values in zip(*seeds, strict=True)]
    around = [(max(values) - min(values)) / 2 for values in zip(*seeds, strict=True)]
    lines = [Line([*LABELS.values()], means, f"MAE, 6 CPU minutes, {len(seeds)} seeds", marker="o", around=around)]
    baselines = json.loads((FOLDER / "cifar10_6min" / "baselines.json").read_text())["baselines"]
    for name, color in COLORS.items():
        title, dash = {"pixels": "raw pixels"}.get(name, name), (0, (5, 2))
        lines.append(Line([*LABELS.values()], accuracies(baselines[name]), title, color, dash, marker="s", size=4))
    panel = Panel(
        "top-1 on the test images (%)", lines, xlabel="labelled training images", xticks=[*LABELS.values()], log=True,
    )  # fmt: skip
    (FOLDER / "photographs.png").write_bytes(Plot([panel], (6.4, 3.8)).png())


def accuracies(probes: dict[str, dict[str, float]]) -> list[float]:
    """Return the accuracies in percent at the chosen layers, by the number of labels."""
    return [100 * probes[probe]["chosen"] for probe in LABELS]


if __name__ == "__main__":
    main()
