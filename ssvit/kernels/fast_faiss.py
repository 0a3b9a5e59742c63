"""Import faiss with the matrix products of this CPU: `from ssvit.kernels.fast_faiss import faiss`.

The package faiss-cpu 1.15 contains OpenBLAS 0.3.15 of 2021, which uses SSE3 on later CPUs, so that an exact search
takes three to four times as long. OpenBLAS reads the environment variable when it is loaded.
"""

import os

import numpy  # noqa: F401  # its OpenBLAS is loaded before the variable is set
import torch

_VARIABLE = "OPENBLAS_CORETYPE"
_core = {"AVX2": "Haswell", "AVX512": "SkylakeX"}.get(torch.backends.cpu.get_cpu_capability())
if _core is None or _VARIABLE in os.environ:
    import faiss
else:
    os.environ[_VARIABLE] = _core
    import faiss

    del os.environ[_VARIABLE]

__all__ = ["faiss"]
