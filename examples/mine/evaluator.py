"""An evaluator: the spread of the features of held-out images."""

from dataclasses import dataclass

from ssvit.data.loader import evaluation_batches
from ssvit.evaluation.evaluators.base import Evaluation, Evaluator
from ssvit.figures.base import Figure


@dataclass(frozen=True)
class Bars(Figure):
    """A bar for each number; matplotlib is imported when it is drawn."""

    heights: list[float]

    def draw(self):
        """Return the figure of matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().bar(range(len(self.heights)), self.heights)
        return figure


class Spread(Evaluator):
    """The standard deviation of the features over held-out images; near 0, all images have the same features."""

    def __init__(self, options, *, source, transform, display):
        images = options.images
        self.batch = next(evaluation_batches(source, transform, batch_size=images, limit=images))

    def __call__(self, objective, history=None):
        encoder = objective.backbone()
        spread = encoder.pool(encoder(self.batch.images.to(encoder.mean.device))).float().std(0)
        metrics = {"deviation": spread.mean().item()}
        if history is None:
            return Evaluation(metrics=metrics)
        return Evaluation(
            metrics=metrics,
            lines=[f"the features of different images have a standard deviation of {metrics['deviation']:.3f}"],
            figures={"spread": Bars(spread.tolist())},
            tables={"spread.csv": "\n".join(map(str, spread.tolist()))},
        )
