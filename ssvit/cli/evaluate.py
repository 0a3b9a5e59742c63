"""Measure frozen features by probes.

Usage: ssvit evaluate checkpoint=PATH probes=[knn].
"""

import json
from pathlib import Path

from tqdm import tqdm

from ssvit import advice
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.data.sources.base_options import SHORT_FORMS, ImageFiles
from ssvit.engine import atomic_io
from ssvit.engine.clock import cpu_time
from ssvit.engine.progress import progress
from ssvit.errors import OptionError, aligned, folder_to_write, print_lines, within
from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.evaluation.report import against
from ssvit.evaluation.report.folder import folder_of
from ssvit.evaluation.report.options import Evaluate
from ssvit.loading.finding import runs_on
from ssvit.loading.pretrained import add_placeholders, select_checkpoint
from ssvit.values import text_of


def run(config: Config) -> Path | None:
    """Print the features' results with their baselines, and write a report to a folder or the numbers to a file.

    Returns the path of the output, or None without output.
    """
    options: Evaluate = config.options
    Tree(options).check()
    if not options.report and len(options.chosen) > 1:
        raise OptionError("report", False, f"requires a single probe; there are {', '.join(options.chosen)}")
    for name in ("train_images", "test_images"):
        if options.budget is not None and name in config.line.typed:
            raise OptionError("budget", options.budget, f"must be null with {name}, which it determines")
    checkpoint = options.encoder.checkpoint()
    with within("features"):
        specs = options.features.specs(checkpoint.encoder)
    if options.against is None and options.report and checkpoint.foreign:
        root = getattr(options.data, "root", None)
        found = runs_on(options.outputs, config.choices["data"], root, checkpoint.checksum)
        if found:
            line = f"against={text_of([*map(str, found)])}: the newest runs on these images; against=[] leaves them out"
            config.line.say(line)
        options = options.changed(against=[*map(str, found)])
    if isinstance(options.data, ImageFiles):
        config.line.say(options.data.view.note)
    others = against.others(options, checkpoint)
    if options.report:
        choice = config.line.origin("data", config.choices["data"])
        folder = Path(options.output or folder_of(checkpoint, options.data, choice, options.outputs))
        folder_to_write("output", folder)
    config.line.announce()

    from ssvit.evaluation.measured import keep
    from ssvit.evaluation.report import comparison, cost, frozen, page
    from ssvit.evaluation.report.figures import figures
    from ssvit.evaluation.report.scores import score
    from ssvit.training import launch
    from ssvit.training.recipe import Recipe

    probes = {name: options.build_part(f"probes.{name}") for name in options.chosen}
    titles = [probe.title for probe in probes.values()]
    if equal := [title for title in titles if titles.count(title) > 1]:
        raise OptionError("probes", [*probes], f"two of these are {equal[0]}: change the options of one")
    data = frozen.images(options, probes)
    encoders = frozen.encoders_of(options, data, checkpoint, specs, others)
    began = cpu_time()
    splits = launch.in_all_processes(
        Recipe(precision="32-true"),  # the encoders have a precision of their own
        options.launch,
        lambda processes: frozen.features_of_probes(
            options,
            cost.planned(options, encoders, probes, processes.device, world=processes.world),
            probes,
            processes.device,
        ),
    )
    if splits is None:
        return None
    scores = [
        score(name, probe, splits[name], progress(probe.title, " feature sets")) for name, probe in probes.items()
    ]
    split = next(iter(splits.values()))  # splits of the first probe
    feature_sets = tuple(dict.fromkeys(name for split in splits.values() for name in split.feature_sets))
    own = str(checkpoint.path) if checkpoint.name in (RANDOM, PIXELS) else checkpoint.name  # a name of no baseline
    standings = comparison.compare_encoders(scores, own)
    summary = comparison.comparison_table(scores, standings)
    accuracies = comparison.accuracies(scores, own)
    counts = {len(of_probe.test) for of_probe in splits.values()}  # probes of patches may have fewer images
    images = f"{len(split.test):,} {split.part} images" if len(counts) == 1 else f"{split.part} images"
    table = comparison.accuracy_table(accuracies, images)
    start = next((other.name for other in others if other.checksum == checkpoint.manifest.get("start")), None)
    conclusion = comparison.conclude(scores, standings, start, advice.improvements(options, checkpoint))
    metadata = page.metadata_of(options, checkpoint, split, scores, others)
    first, *more = page.data(metadata)
    print_lines(f"{metadata['checkpoint']}: {first}", *more)
    if len(scores) == 1:
        print_lines(*aligned(page.scores_table(scores[0], feature_sets)), page.choice(scores[0], feature_sets))
    lines = aligned(table, letters=comparison.HEAD) if options.report else []
    print_lines(*(conclusion[:1] if start else ()), *lines, *(conclusion[1:] if start else conclusion))
    if options.report:
        by_name = {spec.name: spec for spec in specs}  # the commands do not apply to features of patches
        best = next((by_name[result.best] for result in scores if result.best in by_name), None)
        commands = [] if best is None else advice.after_evaluation(best, checkpoint, config)
        written = page.write(
            folder,
            metadata=metadata,
            scores=scores,
            feature_sets=feature_sets,
            figures={} if options.figures == "none" else figures(splits, scores, standings),
            tables=[table, summary],
            standings=standings,
            conclusion=conclusion,
            commands=commands,
        )
        print_lines(f"CPU time of this evaluation: {tqdm.format_interval(cpu_time() - began)}")
        print_lines(f"report: {', '.join(map(str, written))}")
        paths = {other.name: str(other.loading.checkpoint().path) for other in others}
        paths[own] = str(checkpoint.path)
        kept = [result for result in scores if result.chance is not None and splits[result.probe].has_images_of(split)]
        of_kept = comparison.accuracies(kept, own)
        images_of = options.outputs, split.test.source.take(split.test.indices), split.part
        following = commands or [advice.written(config.line, "visualize", [f"checkpoint={checkpoint.path}"])]
        if not kept:
            advice.print_next(following[0])
            return folder
        verdict, best_path = keep(
            *images_of, of_kept, train_images=len(split.train), paths=paths, baselines_of=paths[own]
        )
        is_other = best_path not in ("", str(checkpoint.path)) and Path(best_path).exists()
        advice.print_next(advice.tuning(best_path, config) if is_other else following[-1], verdict)
        return folder
    if options.output is None:
        return None
    numbers = {name: getattr(scores[0], name) for name in ("options", "best", "chosen_by", "numbers")}
    atomic_io.replace(Path(options.output), (json.dumps(metadata | numbers, indent=1) + "\n").encode())
    return Path(options.output)


command = Command(
    "evaluate",
    run,
    expansions=SHORT_FORMS,
    before=select_checkpoint,
    stand_in=add_placeholders,
    options=Evaluate,
    aliases={"probes": "probe@probes"},
    common=(
        "checkpoint", "against", "budget", "data.root", "data.image_size", "features", "baselines", "duplicates",
        "train_images", "test_images", "output", "k", "shots", "seeds", "l2", "method", "held_out", "standardize",
        "seed", "workers",
    ),
)  # fmt: skip
