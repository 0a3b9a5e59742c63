"""Define the options of devices and processes of a command, and of the precision of inference. No torch."""

import re
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import AfterValidator, BeforeValidator

from ssvit.config.declaration import Count, Expect, NotNegative, Options, Tree, Whole
from ssvit.engine import processes
from ssvit.errors import OptionError
from ssvit.models.encoder_options import Normalized

_AUTO = "auto"
_DEVICES = re.compile(r"auto|-1|[1-9]\d*|\[\d+(, \d+)*\]|\d+(, ?\d+)+")


def _devices(value: object) -> object:
    if not _DEVICES.fullmatch(str(value)):
        raise ValueError
    return int(value) if isinstance(value, str) and value.isdecimal() else value


Devices = Annotated[
    Any, AfterValidator(_devices), Expect("auto, a whole number, 1 or more, a list of GPU indices, or -1 for all GPUs")
]


class Launch(Options):
    """Devices and processes of a command. These options may change between a run and its continuation."""

    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Type of device: cpu or cuda; auto: cuda if there is a GPU."""
    devices: Devices = "auto"
    """Devices per machine; auto: all GPUs, or one process on a CPU."""
    num_nodes: Count = 1
    """Number of machines."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """ddp: each process has the complete model; fsdp: the model is sharded over the processes; auto: ddp if there are
    several processes."""
    timeout: Annotated[float, Ge(1)] = 600
    """Seconds to wait for a process that does not respond. A process that has ended is detected immediately."""

    @property
    def processes(self) -> int | None:
        """Return the number of processes; None if it depends on the machine."""
        return processes.count(self.devices, self.num_nodes)

    def single(self) -> Any:
        """Return the value of `devices` for a program that cannot start further processes: 1 for auto.

        Raises:
            OptionError: The options require several processes.
        """
        expected = "must be 1 from Python, unless torchrun or srun starts the program"
        if self.num_nodes > 1:
            raise OptionError("launch.num_nodes", self.num_nodes, expected)
        if "," in (devices := str(self.devices)) or not (devices in (_AUTO, "1") or devices.startswith("[")):
            raise OptionError("launch.devices", self.devices, expected)
        return 1 if devices == _AUTO else self.devices

    def check(self, tree: Tree) -> None:
        """Check that the encoder can be sharded over processes."""
        if isinstance(tree.encoder, Normalized) and not tree.encoder.has_patches and self.strategy == "fsdp":
            raise OptionError("strategy", "fsdp", f"requires a ViT, and the encoder is {tree.encoder.label}")


class Workers(Options):
    """Loader processes of a command."""

    workers: Whole = 0
    """Processes that decode image files, for each process of the command. Data sets in memory need none."""
    loader_timeout: NotNegative = 300
    """Seconds to wait for a batch from these processes; 0: no limit."""


Precision = Literal["bf16", 32]
FROM_TEXT = BeforeValidator(lambda value: 32 if value == "32" else value)  # Python callers may pass either


class Inference(Options):
    """How the features or predictions of a model are computed."""

    precision: Annotated[Literal["auto"] | Precision, FROM_TEXT] = "auto"
    """Precision of the model: 32 (float32), bf16 (bfloat16), or auto: bf16 on devices that multiply faster in it."""
