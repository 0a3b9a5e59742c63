"""The options of the devices and processes of a command. No torch."""

import re
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import AfterValidator

from ssvit import processes
from ssvit.config.declaration import Count, Expect, Options, Run, Text
from ssvit.models.encoder_options import Normalized
from ssvit.options import OptionError

_DEVICES = re.compile(r"auto|-1|[1-9]\d*|\[\d+(, \d+)*\]|\d+(, ?\d+)+")  # what Lightning Fabric takes, as text


def _devices(value: object) -> object:
    if not _DEVICES.fullmatch(str(value)):
        raise ValueError
    return value


Devices = Annotated[
    Any, AfterValidator(_devices), Expect("auto, a whole number, 1 or more, a list of GPU indices, or -1 for all GPUs")
]


class Fabric(Options):
    """Where a command runs. These options may change between a run and its continuation."""

    accelerator: Text = "auto"
    """The kind of device: cpu or cuda; auto: cuda where there is a GPU."""
    devices: Devices = "auto"
    """The number of devices of a machine; auto: all GPUs, or one process on a CPU."""
    num_nodes: Count = 1
    """The number of machines."""
    strategy: Text = "auto"
    """ddp: each process holds the whole model; fsdp: the model is divided among the processes; auto: ddp where there
    are several processes."""
    timeout: Annotated[float, Ge(1)] = 600
    """Seconds that a process waits for another one that hangs. A process that died is noticed at once."""

    @property
    def processes(self) -> int | None:
        """The number of processes that train; None if the machine decides."""
        return processes.count(self.devices, self.num_nodes)

    def check(self, run: Run) -> None:
        """Check that the encoder can be divided among processes."""
        if isinstance(run.encoder, Normalized) and not run.encoder.has_patches and self.strategy == "fsdp":
            raise OptionError("strategy", "fsdp", f"shares out a ViT, and the encoder is {run.encoder.label}")
