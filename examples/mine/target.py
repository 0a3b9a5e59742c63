"""A target: the mean grey value of a patch."""

from einops import rearrange

from ssvit.objectives.targets import Target


class Grey(Target):
    """The mean grey of a patch, times `contrast`. Labels are (b, n, 1)."""

    width, score_name = 1, "squared_error"

    def __init__(self, options, *, encoder):
        self.patch_size, self.contrast = encoder.patch_size, options.contrast

    def labels(self, images):
        p, q = self.patch_size
        patches = rearrange(images.float() / 255, "b c (y p) (x q) -> b (y x) (c p q)", p=p, q=q)
        return self.contrast * patches.mean(-1, keepdim=True)

    def losses(self, prediction, labels):
        return (prediction.float() - labels).square().mean(-1)

    def guess(self, prediction):
        return prediction.float()

    def score(self, guess, labels):
        return self.losses(guess, labels)

    def constant(self, labels):
        mean = labels.flatten(0, -2).mean(0)
        return self.losses(mean, labels).mean().item(), mean

    def paint(self, labels):
        return (labels / self.contrast).clamp(0, 1)[..., None, None].expand(*labels.shape[:-1], 3, *self.patch_size)
