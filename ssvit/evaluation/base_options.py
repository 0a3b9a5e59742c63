"""The option that every evaluator may have: how often it evaluates."""

from typing import Annotated, Final, Literal

from ssvit.config.declaration import Count, Expect

AUTO: Final = "auto"
Every = Annotated[Literal["auto"] | Count, Expect("a whole number of steps, 1 or more, or auto")]
