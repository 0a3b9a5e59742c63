"""Define the options of inference."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from ssvit.config.declaration import Options

Precision = Literal["bf16", 32]
FROM_TEXT = BeforeValidator(lambda value: 32 if value == "32" else value)  # Python callers may pass either


class Inference(Options):
    """How the features or predictions of a model are computed."""

    precision: Annotated[Literal["auto"] | Precision, FROM_TEXT] = "auto"
    """Precision of the model: 32 (float32), bf16 (bfloat16), or auto: bf16 on devices that compute in it natively."""
