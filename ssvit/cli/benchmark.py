"""Compare the speed of a part of ssvit with other libraries: ssvit benchmark part=step"""

import importlib
import json
from pathlib import Path

from ssvit.benchmark.options import Benchmark
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.options import within


def run(config: Config) -> None:
    """Check the options, measure, print the tables, and write rates and pictures if asked to."""
    options: Benchmark = config.options
    if options.part == "gpu":
        from ssvit.benchmark import gpu

        gpu.run(options.gpu, options.step, rounds=options.rounds)
        return

    from ssvit.benchmark.timing import as_json, table

    with within("step"):
        given = {"options": options.step} if options.part == "step" else {}
        results = importlib.import_module(f"ssvit.benchmark.{options.part}").run(rounds=options.rounds, **given)
    for title, rates in results.items():
        print(table(title, rates))
    if options.output is not None:
        Path(options.output).write_text(json.dumps(as_json(results), indent=2) + "\n")
    if options.plot is not None:
        from ssvit.figures.speed import speed

        file = Path(options.plot)
        for place, (title, rates) in enumerate(results.items()):
            # The machine's own rates have another unit.
            shown = [rate for rate in rates if "product of" not in rate.name]
            values = ([getattr(rate, name) for rate in shown] for name in ("name", "per_work_second", "quartiles"))
            figure = speed(*values, title=title, unit="items per second of work")
            figure.savefig(file.with_stem(f"{file.stem}_{place + 1}") if place else file)


command = Command("benchmark", run, options=Benchmark)
