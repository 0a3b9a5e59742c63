"""Track running statistics of batch norm layers, updated once for each optimiser update.

They are averaged over the processes, so that all processes have the same values, and a skipped update restores them.
"""

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ssvit.training import runtime


class RunningStatistics:
    """Track the running means and variances of a model's batch norm layers.

    Args:
        model: The model, with its initial or restored weights.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        both = (statistic for norm in norms for statistic in (norm.running_mean, norm.running_var))
        self._now = [statistic for statistic in both if statistic is not None]
        self._before = [statistic.clone() for statistic in self._now]
        # The count of forward passes includes skipped updates and is identical in all processes.
        self._counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._counted = [count.clone() for count in self._counts]

    @torch.no_grad()
    def follow(self, fabric: Fabric, applied: Tensor) -> None:
        """Average the statistics over the processes after the forward passes of an update, or restore them.

        Args:
            fabric: The processes.
            applied: () bool, whether the update is applied; if not, the statistics are restored.
        """
        if not self._now:
            return
        moved = runtime.mean(fabric, torch.cat(self._now))
        for now, before, mean in zip(
            self._now, self._before, moved.split([len(now) for now in self._now]), strict=True
        ):
            before.copy_(torch.where(applied, mean, before))
            now.copy_(before)
        for counted, count in zip(self._counted, self._counts, strict=True):
            counted.copy_(count)

    @torch.no_grad()
    def take_back(self) -> None:
        """Restore the statistics of the last update."""
        for now, before in zip([*self._now, *self._counts], [*self._before, *self._counted], strict=True):
            now.copy_(before)
