"""Several runs that belong together: pre-trained against scratch over seeds, the choice of a learning rate. No torch.

A run is made by a function of its folder's name and of what it changes in the configuration; it returns the rows of
metrics that the run has written. Each run goes on from where it was stopped, and so does the study.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssvit.options import OptionError, number, one_of, whole, within
from ssvit.training.run import is_main_process

Rows = list[dict[str, Any]]
Run = Callable[[str, Mapping[str, Any]], Rows]
SCORE = "test/accuracy"
SIDES = {"pretrained": "pre-trained", "scratch": "from scratch"}


def check(config: Mapping[str, Any]) -> None:
    """OptionError unless the options of a study can be, and can go together."""
    for name, allowed in (("compare", "scratch"), ("sweep", "table4")):
        if config[name] is not None:
            one_of(name, config[name], (allowed,))
    whole("seeds", config["seeds"])
    rates = config["table4"]["learning_rates"]
    if not isinstance(rates, list) or not rates:
        raise OptionError("table4.learning_rates", rates, "must be a list of numbers")
    with within("table4"):
        for rate in rates:
            number("learning_rates", rate, 0, above=True)
        number("development", config["table4"]["development"], 0, 0.9, above=True)
    if config["compare"] and config["sweep"]:
        raise OptionError("sweep", config["sweep"], "goes without compare: choose the rate first, then compare")
    if config["compare"] and config["checkpoint"] == "scratch":
        raise OptionError("checkpoint", "scratch", "compare=scratch needs a pre-trained side: give checkpoint=PATH")
    if config["sweep"] and config["development"] is not None:
        raise OptionError("development", config["development"], "sweep=table4 sets it: see table4.development")


def compare(run: Run, *, seed: int, seeds: int, folder: Path) -> None:
    """Train both sides with `seeds` seeds from `seed` on, the rest alike; print, store and plot them side by side.

    Leaves comparison.json and comparison.png in the folder.
    """
    sides: dict[str, list[Rows]] = {side: [] for side in SIDES}
    for own in range(seed, seed + seeds):
        for side in SIDES:
            start = {"checkpoint": "scratch"} if side == "scratch" else {}
            sides[side].append(run(f"{side}_seed{own}", {**start, "recipe.seed": own}))
    if not is_main_process():
        return
    finals = {side: [rows_[-1][SCORE] for rows_ in _scored(runs)] for side, runs in sides.items()}
    curves = {side: _curve(_scored(runs)) for side, runs in sides.items()}
    summary = {side: _spread(values) for side, values in finals.items()}
    gain = summary["pretrained"]["mean"] - summary["scratch"]["mean"]
    report = {"seeds": list(range(seed, seed + seeds)), "accuracy": summary, "gain": gain, "curves": curves}
    (folder / "comparison.json").write_text(json.dumps(report, indent=1) + "\n")

    from ssvit.inspection.comparison import comparison

    comparison(curves, SIDES).savefig(folder / "comparison.png")
    print(f"\ntop-1 on the test images, {f'{seeds} seeds each, mean ± deviation' if seeds > 1 else 'one seed each'}")
    for side, words in SIDES.items():
        each = "  ".join(f"{100 * value:.2f}" for value in finals[side])
        print(f"  {words:<14}{_percent(summary[side])}   ({each})")
    print(f"  {'gain':<14}{100 * gain:+6.2f} points\nstored: {folder / 'comparison.json'}, {folder / 'comparison.png'}")


def choose(run: Run, *, learning_rates: Sequence[float], development: float, folder: Path) -> float:
    """Train with each learning rate on the training images without the development split and choose the best on it.

    Then train with that one on all training images: only this last run, in the subfolder `chosen`, is measured on the
    test images. Of equals the lowest rate is taken. Leaves sweep.json in the folder; returns the rate chosen.
    """
    scores = {}
    for rate in sorted(learning_rates):
        rows = run(f"lr_{rate:g}", {"recipe.lr": rate, "development": development})
        scores[rate] = _scored([rows])[0][-1][SCORE]
    best = max(scores, key=lambda rate: scores[rate])
    if is_main_process():
        print("\ntop-1 on the development split")
        for rate, score in scores.items():
            print(f"  recipe.lr={rate:<8g}{100 * score:6.2f} %{'   chosen' if rate == best else ''}")
        print(f"now on all training images with recipe.lr={best:g}", flush=True)
    rows = run("chosen", {"recipe.lr": best})
    if is_main_process():
        test = _scored([rows])[0][-1][SCORE]
        report = {"development": {str(rate): score for rate, score in scores.items()}, "chosen": best, "test": test}
        (folder / "sweep.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"\ntop-1 on the test images with recipe.lr={best:g}: {100 * test:.2f} %; see {folder / 'sweep.json'}")
    return best


def _scored(runs: Sequence[Rows]) -> list[Rows]:
    """Of each run the rows that have the score, the last of the run's end."""
    return [[row for row in rows if row.get(SCORE) is not None] for rows in runs]


def _curve(runs: Sequence[Rows]) -> dict[str, list[float]]:
    """The score over the steps: its mean and deviation over runs that were measured at the same steps."""
    columns = list(zip(*runs, strict=True))
    spreads = [_spread([row[SCORE] for row in column]) for column in columns]
    return {
        "step": [column[0]["step"] for column in columns],
        "mean": [spread["mean"] for spread in spreads],
        "deviation": [spread["deviation"] for spread in spreads],
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (0 of a single value)."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation, "values": list(values)}


def _percent(spread: Mapping[str, Any]) -> str:
    deviation = f" ± {100 * spread['deviation']:.2f}" if len(spread["values"]) > 1 else ""
    return f"{100 * spread['mean']:6.2f}{deviation} %"
