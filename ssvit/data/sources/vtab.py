"""Define the 19 tasks of VTAB-1k and read their lists of images (standard library only).

A task is a folder with the lists train800.txt, val200.txt, train800val200.txt and test.txt, as in the public copies of
VTAB-1k. A line is the path of an image, relative to that folder, and the number of its class.
"""

import os

from ssvit.errors import UserError, printable

TRAIN, VALIDATION, ALL, TEST = "train800.txt", "val200.txt", "train800val200.txt", "test.txt"
GROUPS = {
    "natural": ("cifar", "caltech101", "dtd", "oxford_flowers102", "oxford_iiit_pet", "svhn", "sun397"),
    "specialised": ("patch_camelyon", "eurosat", "resisc45", "diabetic_retinopathy"),
    "structured": (
        "clevr_count", "clevr_dist", "dmlab", "kitti", "dsprites_loc", "dsprites_ori", "smallnorb_azi", "smallnorb_ele",
    ),
}  # fmt: skip
NAMES = tuple(name for group in GROUPS.values() for name in group)


def read_vtab_list(path: str) -> tuple[list[str], list[int]]:
    """Read the paths and class numbers of a list.

    Raises:
        UserError: The list is unreadable, a line is not `path label`, or an image does not exist.
    """
    top, paths, labels = os.path.dirname(path), [], []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                name, _, label = line.strip().rpartition(" ")
                if not name or not (label.isascii() and label.isdecimal()):
                    raise UserError(f"{path}, line {number}: must be `path label`, with the number of a class")
                paths.append(os.path.join(top, name.strip()))
                labels.append(int(label))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None
    if not paths:
        raise UserError(f"{path}: contains no path of an image")
    for name in paths:
        if not os.path.isfile(name):
            raise UserError(f"{path}: there is no file {printable(name)}")
    return paths, labels
