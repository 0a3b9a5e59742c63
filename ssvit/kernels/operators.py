"""Build and load operators of torch that compute layers of a Transformer in bfloat16 on a CPU, forward and backward.

torch and oneDNN take longer: they write and read the tensors between the products of a layer, round weights and
gradients in separate passes, and multiply the small matrices of attention slowly. The operators in `csrc` are an
extension of torch in C++, which `ssvit build_kernels` compiles once for a processor with AVX-512 and bfloat16
instructions, in a version for those with AMX and one for the others. docs/performance.md has the figures.

Letters: b images, q queries, t keys and values, h heads, d width, r rows, i inputs, o outputs. Tensors are contiguous
bfloat16, and parameters, their gradients and moments are float32. The operators of `library()`:

- linear(x, weight, bias): (r, i), (o, i), (o,) -> (r, o)
- pack(weight): a weight (o, i) in the form that `linear` and, without learns, `branches` take without conversion.
- linear_inputs(gradient, weight): gradient of x, (r, i), from that of the outputs, (r, o).
- linear_weights(gradient, x): gradients of weight (o, i) and bias (o,).
- attention(query, packed, heads): outputs (b, q, d), and the maximum logit of each query and its weight, (b, h, q, 2).
  `packed` contains queries, keys and values, (b, t, 3 * d); or with a query (b, q, d) keys and values, (b, t, 2 * d).
- attention_backward(query, packed, gradient, norms): list of the gradients of `packed` and, if it is given, of query;
  norms is the second result of `attention`.
- rotate(x, angles, rotated, back): x (b, t, i), whose first `rotated` channels are heads of width k, rotated as by
  `ssvit.models.positions.rotate`; angles are cosines and sines, (2, b, t, k / 2) or (2, 1, t, k / 2) for all images.
  back: the inverse rotation, which is also the gradient.
- layer_norm(x, weight, bias, epsilon): outputs (r, d), and the mean and 1 / deviation of each row, (r, 2).
- layer_norm_backward(x, gradient, weight, moments): gradients of x, weight and bias.
- branches(x, weights, heads, epsilon, adds, learns): residual branches of a Transformer: layer norm, linear layer,
  attention or, with 0 heads, GELU, and linear layer. x is (b, t, d). weights has six parameters for each branch: weight
  and bias of its layer norm, its first and its second linear layer. adds: whether the input of a branch is added to its
  output; required for several branches. The result is a list of the last output alone, or with learns of six tensors
  for each branch: its output, the normalised x, its moments (b, t, 2), queries, keys and values (b, t, 3 * d) or the
  slopes of GELU (b, t, o), the input of the second linear layer (b, t, i), and the second result of attention.
- branches_backward(gradient, x, weights, kept, heads, adds): gradients of x and of the weights; kept is the result of
  `branches` with learns.
"""

import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ssvit.engine import private
from ssvit.errors import UserError

Version = Literal["avx512", "amx"]
SOURCES = tuple(sorted((Path(__file__).parent / "csrc").iterdir()))
# Vectorisation requires reordered sums; infinities and NaNs keep their semantics.
_REORDERED = "-fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_PROCESSOR = "-march=x86-64-v4 -mavx512bf16 -mprefer-vector-width=512"
_FLAGS = f"-std=c++20 -O3 -funroll-loops -fopenmp -fPIC -shared {_REORDERED} {_PROCESSOR}"
VERSIONS: dict[Version, str] = {"avx512": _FLAGS, "amx": f"{_FLAGS} -mamx-tile -mamx-bf16"}
_LANES = 16  # products.h: widths must be multiples of this


def version() -> Version | None:
    """Return the name of the version for this processor, or None if it lacks the instructions."""
    if not private.multiplies_bfloat16():
        return None
    return "amx" if private.has_matrix_units() else "avx512"


def path(version: Version) -> Path:
    """Return the file of a version, in TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions.

    Its name depends on the sources, the options of the compiler and the version of torch.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    parts = [*(source.read_bytes() for source in SOURCES), VERSIONS[version].encode(), torch.__version__.encode()]
    name = f"ssvit_{version}_{hashlib.sha256(b'/'.join(parts)).hexdigest()[:12]}"
    return Path(root) / name / f"{name}.so"


def command(version: Version, to: Path) -> list[str]:
    """Return the command that compiles a version, with the compiler of the environment variable CXX or g++."""
    folder = Path(torch.__file__).parent
    headers = [folder / "include", folder / "include" / "torch" / "csrc" / "api" / "include"]
    sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    name = f"-DTORCH_EXTENSION_NAME={path(version).stem}"
    options = [*VERSIONS[version].split(), name, *(f"-I{header}" for header in headers), "-o", str(to)]
    # -fopenmp is no option of the linker, so torch's own OpenMP is used; two would compete for the cores.
    libraries = [f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    try:
        compiler = shlex.split(os.environ.get("CXX") or "g++")
    except ValueError as error:
        raise UserError(f"CXX={os.environ['CXX']}: must be a command ({error})") from None
    return [*compiler, *options, *sources, *libraries]


def build(version: Version) -> Path:
    """Compile a version and return its file.

    Raises:
        UserError: There is no compiler, or it fails.
    """
    built = path(version)
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        new = Path(folder) / built.name
        line = command(version, new)
        try:
            subprocess.run(line, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise UserError(f"CXX={line[0]}: is not installed; the kernels need a C++ compiler") from None
        except subprocess.CalledProcessError as error:
            raise UserError(f"CXX={line[0]}: cannot compile the kernels\n{error.stderr}") from None
        new.replace(built)
    return built


@functools.cache
def library() -> Any:
    """Return the operators (an attribute of torch.ops), or None if they are not built or not for this processor."""
    name = version()
    if name is None or not os.path.exists(path(name)):  # False too for a folder that cannot be entered
        return None
    torch.ops.load_library(path(name))
    return getattr(torch.ops, path(name).stem)


def supports(tensor: Tensor, *widths: int) -> bool:
    """Return whether the operators support a tensor, converted to bfloat16, and widths of heads, inputs or outputs."""
    here = tensor.device.type == "cpu" and not torch.compiler.is_compiling() and tensor.numel() > 0
    return here and not any(width % _LANES for width in widths) and library() is not None
