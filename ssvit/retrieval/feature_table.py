"""Write features as a Parquet table of one row for each picture or patch, which tools for embeddings open."""

import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

_ROWS = 1 << 16  # maximum number of vectors in a row group, unless a picture has more patches


def parquet(
    columns: Mapping[str, Sequence[str]], features: Tensor, *, encoder: str, size: tuple[int, int], **scores: Tensor
) -> memoryview:
    """Return the content of a Parquet file.

    A row has the text columns of its picture, "" as null, and "vector", a fixed-size list of float32. A row of a patch
    also has "row" and "column" in the grid, and "left", "top", "right" and "bottom", its box in pixels of the encoder's
    input, which is the resized and cropped picture. The metadata of the schema contain "encoder".

    Args:
        columns: Text of each picture by column.
        features: Features of pictures, (n, d), or of their patches, (n, y, x, d), float32.
        encoder: Identity of the features.
        size: Height and width of the encoder's input in pixels.
        **scores: Further columns: a number for each vector, (n,) or (n, y, x).
    """
    import pyarrow as arrow
    from pyarrow.parquet import ParquetWriter

    count, *grid, width = features.shape
    patches = math.prod(grid)
    position = _positions(grid, size) if grid else {}
    texts = {name: arrow.array([value or None for value in column], arrow.string()) for name, column in columns.items()}
    schema = arrow.schema(
        [
            *((name, arrow.string()) for name in texts),
            *((name, arrow.int32()) for name in position),
            *((name, arrow.float32()) for name in scores),
            ("vector", arrow.list_(arrow.float32(), width)),
        ],
        metadata={"encoder": encoder},
    )
    content = io.BytesIO()
    with ParquetWriter(content, schema) as writer:
        for pictures in np.array_split(np.arange(count), math.ceil(count * patches / _ROWS)):
            repeated, vectors = pictures.repeat(patches), arrow.array(features[pictures].flatten().numpy())
            arrays = [text.take(arrow.array(repeated)) for text in texts.values()]
            arrays += [arrow.array(np.tile(value, len(pictures)), arrow.int32()) for value in position.values()]
            arrays += [arrow.array(values[pictures].flatten().numpy()) for values in scores.values()]
            arrays.append(arrow.FixedSizeListArray.from_arrays(vectors, width))
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
    return content.getbuffer()


def _positions(grid: Sequence[int], image_size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the position of each patch, and its box in pixels of the encoder's input."""
    row, column = np.indices(grid).reshape(2, -1)
    (height, width), (rows, columns) = image_size, grid
    ends = {"right": (column + 1) * width // columns, "bottom": (row + 1) * height // rows}
    return {"row": row, "column": column, "left": column * width // columns, "top": row * height // rows} | ends
