"""Least squares on a few images of each class as a probe of a run: the paper's, with one number of shots.

Letters: n training images, m test images, d width.
"""

from collections.abc import Sequence

from torch import Tensor

from ssvit.evaluation import probing_rules as rules
from ssvit.evaluation.online import Answer, Probe
from ssvit.evaluation.probes.ridge import check_shots, few_shot
from ssvit.figures.style import shown


class FewShotProbe(Probe):
    """`ssvit.evaluation.probes.ridge` by the protocol paper: the mean of its draws. Leave-one-out is on the shots."""

    def __init__(self, *, shots: int = 5) -> None:
        rules.few_shot(shots=shots)
        self.shots = shots
        self.name, self.title = f"few_shot{shots}", f"{shots}-shot"

    def check(self, labels: Tensor, classes: Sequence[str]) -> None:
        """OptionError unless each class has so many images."""
        check_shots(labels, len(classes), [self.shots], [shown(name) for name in classes])

    def measure(self, train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, classes: int) -> Answer:
        """The mean accuracy on the test images, and what the fits to all shots but one say of that one."""
        asked = {"classes": classes, "protocol": "paper", "shots": [self.shots]}
        score = few_shot(train, train_labels, test, test_labels, **asked).scores[0]
        return Answer(score.mean, score.left_out)
