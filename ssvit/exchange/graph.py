"""Open ONNX graphs that ssvit exported, with onnxruntime. No torch."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssvit.engine.atomic_io import check_regular
from ssvit.errors import UserError
from ssvit.exchange.files import ForeignError
from ssvit.models.timm_options import vit

INPUT = "images"  # name of the graph's only input
MANIFEST = "ssvit"  # metadata entry that describes the exported checkpoint


def session(path: Path) -> Any:
    """Return the onnxruntime session of a graph, which computes on the CPU with as many threads as torch."""
    import onnxruntime

    options, threads = onnxruntime.SessionOptions(), os.environ.get("OMP_NUM_THREADS", "")
    options.intra_op_num_threads = int(threads) if threads.isdigit() else len(os.sched_getaffinity(0))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def read_graph(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the session of an exported graph, and the manifest of the export.

    Args:
        path: The file.

    Returns:
        The session, and the entries "encoder", "view", "range", "background", "classifier", "step" and "precision" of
        the manifest.

    Raises:
        ForeignError: The file is damaged, or was not exported by ssvit.
        UserError: onnxruntime is not installed.
    """
    if find_spec("onnxruntime") is None:
        raise UserError(f"checkpoint={path}: requires onnxruntime (pip install onnxruntime)")
    try:
        check_regular(path)
        opened = session(path)
        manifest = json.loads(opened.get_modelmeta().custom_metadata_map[MANIFEST])
        vit(manifest["encoder"])
    except (KeyError, TypeError):
        raise ForeignError(f"{path}: must be a graph with metadata of `ssvit export format=onnx`") from None
    except Exception as error:  # errors of onnxruntime have no common base class
        raise ForeignError(f"{path}: cannot be opened: {' '.join(str(error).split())[:200]}") from None
    return opened, manifest
