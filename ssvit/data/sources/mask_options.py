"""Define the options of the classes of segmentation masks. No torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated

from annotated_types import Ge, Le

from ssvit.config.declaration import Count, Expect, Options
from ssvit.errors import OptionError

MOST = 255  # classes, since a mask has 8 bits and one value stands for ignored pixels
Byte = Annotated[int, Ge(0), Le(255)]
Colour = tuple[int, int, int]
Value = Byte | Annotated[Sequence[Byte], Expect("a colour, [red, green, blue]")]
Classes = Mapping[str, Value] | Sequence[str] | Count


class MaskFormat(Options):
    """The classes of segmentation masks, which are PNG files of grey values, palette entries or colours."""

    mask_classes: Annotated[Classes, Expect("a list of names, {name: value or [r, g, b]}, or a number")] | None = None
    """Classes of the masks: {name: value} with the grey value or palette entry of each class, or its colour [r, g, b];
    names of the values 0, 1, … that are not ignored, in their order; or only the number of these. A mask with another
    value is not read. None: masks are read as they are, by the segmentation probe."""
    mask_ignored: Annotated[Sequence[Value], Expect("a list of values from 0 to 255, or of colours [r, g, b]")] = (255,)
    """Values or colours of pixels without a class, such as [0] for ADE20K; those that are a class do not count."""

    @property
    def masked(self) -> bool:
        """Return whether images have masks."""
        raise NotImplementedError

    @cached_property
    def mask_values(self) -> dict[str, int | Colour]:
        """Return the value or the colour of each class by its name, in the order of the numbers of the classes."""
        if self.mask_classes is None:
            return {}
        if isinstance(self.mask_classes, Mapping):
            return {name: _value(value) for name, value in self.mask_classes.items()}
        values = [value for value in range(256) if value not in self.mask_ignored]
        if isinstance(self.mask_classes, int):
            return {str(value): value for value in values[: self.mask_classes]}
        return dict(zip(map(str, self.mask_classes), values, strict=False))

    @property
    def ignored_values(self) -> set[int | Colour]:
        """Return the values or colours of ignored pixels."""
        return {*map(_value, self.mask_ignored)} - {*self.mask_values.values()}

    def check_consistency(self) -> None:
        """Check the number of classes, and that their values are different and of one kind."""
        super().check_consistency()
        if self.mask_classes is None:
            return
        named, values = self.mask_classes, [*self.mask_values.values()]
        count = named if isinstance(named, int) else len(named)
        if not 2 <= count <= MOST or len(values) != count or len(set(values)) != count:
            raise OptionError("mask_classes", named, f"must be 2 to {MOST} different classes")
        if len({*map(type, values)}) > 1 or any(len(v) != 3 for v in values if isinstance(v, tuple)):
            raise OptionError("mask_classes", named, "must have a value or a colour [r, g, b] for every class")


def _value(value: int | Sequence[int]) -> int | Colour:
    return value if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


ANY_MASK = MaskFormat()
