"""Define the options of inference."""

from typing import Literal

from ssvit.config.declaration import Options

Precision = Literal["bf16", 32]


class Inference(Options):
    """How the features or predictions of a model are computed."""

    precision: Literal["auto"] | Precision = "auto"
    """Precision of the model: 32 (float32), bf16 (bfloat16), or auto: bf16 on devices that compute in it natively."""
