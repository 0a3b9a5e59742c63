"""Write the features of pictures to a file: arrays of numpy (.npz), or a Parquet table that tools for embeddings open.

Shapes use n pictures, y, x rows and columns of patches, d width, h, w pixels.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from ssvit.data.windows import parsed_name
from ssvit.errors import UserError, printable

_ROWS = 1 << 16  # maximum number of vectors in a row group, unless a picture has more patches
_SIDES = ("left", "top", "right", "bottom")


class Thumbnails(NamedTuple):
    """Show pictures as the encoder receives them, (3, h, w) in [0, 1], by name, in at most `side` x `side` pixels."""

    show: Callable[[str], Tensor]
    side: int

    def jpegs(self, name: str, boxes: Sequence[tuple[int, int, int, int]]) -> Iterator[bytes]:
        """Yield parts of a picture, left, top, right and bottom in pixels, as JPEG."""
        image = Image.fromarray((255 * self.show(name) + 0.5).byte().movedim(0, -1).numpy())
        for box in boxes:
            content, part = io.BytesIO(), image.crop(box)
            part.thumbnail((self.side, self.side))
            part.save(content, "JPEG", quality=90, subsampling=0)
            yield content.getvalue()


class FeatureTable(NamedTuple):
    """Store the features of pictures, or of their patches.

    Attributes:
        names: Name of each picture or window.
        splits: Split of each picture, "" for none.
        classes: Class of each picture, "" where unknown.
        features: Features of pictures, (n, d), or of their patches, (n, y, x, d), float32.
        encoder: Identity of the features.
    """

    names: Sequence[str]
    splits: Sequence[str]
    classes: Sequence[str]
    features: Tensor
    encoder: str

    def _places(self) -> tuple[list[str], np.ndarray | None]:
        """Return the picture of each row, and left, top, right and bottom of its window, (n, 4) or None."""
        parsed = [*map(parsed_name, self.names)]
        corners = [(box.left, box.top, box.left + box.width, box.top + box.height) for _, box in parsed if box]
        return [path for path, _ in parsed], np.array(corners, np.int32) if len(corners) == len(parsed) else None

    def npz(self, **scores: Tensor) -> memoryview:
        """Return the content of a .npz file.

        Its arrays are "names", "classes", "splits", "features", "encoder", the scores and, for windows, "windows":
        left, top, right and bottom in pixels of the picture, (n, 4).
        """
        paths, windows = self._places()
        arrays: dict[str, Any] = {
            "names": paths,
            "classes": self.classes,
            "splits": self.splits,
            "encoder": self.encoder,
        }
        arrays |= {name: values.numpy() for name, values in {"features": self.features, **scores}.items()}
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **arrays, **({} if windows is None else {"windows": windows}))
        return content.getbuffer()

    def parquet(self, size: tuple[int, int], thumbnails: Thumbnails | None = None, **scores: Tensor) -> memoryview:
        """Return the content of a Parquet file.

        A row has "path", "split" and "label" of its picture, "" as null; for windows "window_left", "window_top",
        "window_right" and "window_bottom" in pixels of the picture; the scores; and "vector", a fixed-size list of
        float32. A row of a patch also has "row" and "column" in the grid, and "left", "top", "right" and "bottom", its
        box in pixels of the encoder's input, which is the resized and cropped picture. "thumbnail" is a JPEG of the
        picture or patch, as a struct {bytes, path} like an image of Hugging Face. The metadata contain "encoder".

        Args:
            size: Height and width of the encoder's input in pixels.
            thumbnails: Shows the pictures; None: without the column "thumbnail".
            **scores: A number for each vector, (n,) or (n, y, x), by column.
        """
        import pyarrow as arrow
        from pyarrow.parquet import ParquetWriter

        count, *grid, width = self.features.shape
        patches = math.prod(grid)
        position = _positions(grid, size) if grid else {}
        boxes = [*zip(*(position[side] for side in _SIDES), strict=True)] if grid else [(0, 0, *size[::-1])]
        paths, windows = self._places()
        of_texts = {"path": paths, "split": self.splits, "label": self.classes}
        texts = {
            name: arrow.array([text or None for text in column], arrow.string()) for name, column in of_texts.items()
        }
        corners = {} if windows is None else {f"window_{side}": windows[:, at] for at, side in enumerate(_SIDES)}

        def table(pictures: np.ndarray) -> Any:
            repeated = pictures.repeat(patches)
            columns = {name: text.take(arrow.array(repeated)) for name, text in texts.items()}
            columns |= {name: arrow.array(corner[repeated]) for name, corner in corners.items()}
            columns |= {name: arrow.array(np.tile(of_grid, len(pictures))) for name, of_grid in position.items()}
            columns |= {name: arrow.array(values[pictures].flatten().numpy()) for name, values in scores.items()}
            if thumbnails:
                bodies = [body for row in pictures for body in thumbnails.jpegs(self.names[row], boxes)]
                image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
                columns["thumbnail"] = arrow.array([{"bytes": body} for body in bodies], image)
            vectors = arrow.array(self.features[pictures].flatten().numpy())
            columns["vector"] = arrow.FixedSizeListArray.from_arrays(vectors, width)
            return arrow.table(columns, metadata={"encoder": self.encoder})

        tables = map(table, np.array_split(np.arange(count), math.ceil(count * patches / _ROWS)))
        content, first = io.BytesIO(), next(tables)
        with ParquetWriter(content, first.schema) as writer:
            for part in chain([first], tables):
                writer.write_table(part)
        return content.getbuffer()


def check_texts(texts: Iterable[str | None]) -> None:
    """Check that texts can be stored in Parquet.

    Raises:
        UserError: A text is not UTF-8.
    """
    for text in filter(None, texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            expected = "is not UTF-8, as names in Parquet must be; output=NAME.npz supports any"
            raise UserError(f"{printable(text)}: {expected}") from None


def _positions(grid: Sequence[int], image_size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the position of each patch, and its box in pixels of the encoder's input, as int32."""
    row, column = np.indices(grid, np.int32).reshape(2, -1)
    (height, width), (rows, columns) = image_size, grid
    ends = {"right": (column + 1) * width // columns, "bottom": (row + 1) * height // rows}
    return {"row": row, "column": column, "left": column * width // columns, "top": row * height // rows} | ends
