"""Compile the layers in C++ for the CPU of this machine.

Usage: ssvit build-kernels.
"""

import shlex
import sys
from typing import Literal

from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Options
from ssvit.errors import print_lines


class BuildKernels(Options):
    """Faster layers for training in bfloat16 on a CPU that has AVX-512 with bfloat16 instructions, or AMX.

    They are compiled by g++, or the compiler of the environment variable CXX, and stored in the folder of
    TORCH_EXTENSIONS_DIR, or ~/.cache/torch_extensions. Another version of torch or of ssvit requires another build.
    """

    version: Literal["auto", "avx512", "amx"] = "auto"
    """Version to compile: avx512, amx, or auto for the CPU of this machine."""


def run(config: Config) -> None:
    """Compile a version, and print the command of the compiler and the file."""
    options: BuildKernels = config.options
    config.line.announce()

    from ssvit.kernels import operators

    version = operators.version() if options.version == "auto" else options.version
    if version is None:
        print_lines("nothing to build: this CPU has no instructions for products in bfloat16")
        return
    print(shlex.join(operators.command(version, operators.path(version))), file=sys.stderr)
    print_lines(f"{operators.build(version)}: used by runs in bfloat16 on this CPU")


command = Command("build_kernels", run, options=BuildKernels)
