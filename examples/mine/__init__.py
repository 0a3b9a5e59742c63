"""Parts of your own, one of each kind, each with its options next to it: docs/extending.md explains them."""

from ssvit.choices import add

add("augment", "mine", "mine.augmentation.Dim")
add("data", "mine", "mine.data.stripes", "mine.data_options.Stripes")
add("evaluator", "spread", "mine.evaluator.Spread")
add("objective", "mine", "mine.objective.HiddenPatches")
add("probe", "mine", "mine.probe.NearestMean")
add("target", "mine", "mine.target.Grey")
