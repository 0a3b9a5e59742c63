"""Write a table of the photographs of hand signs with five folds: python docs/methods/folds.py FOLDER TABLE.csv

A participant shows the digits 0 to 9 in ascending order of the cameras' numbers (IMG_1118.jpg). Each fold is a fifth of
the photographs with contiguous numbers and begins with a digit 0, so that no participant is in two folds.
"""

import csv
import re
import sys
from pathlib import Path


def main(folder: str, table: str) -> None:
    """Write the table: path, label (the subfolder) and fold of each photograph."""
    photographs = sorted((int(re.sub(r"\D", "", path.stem)), path) for path in Path(folder).rglob("*.jpg"))
    digits = [path.parent.name for _, path in photographs]
    fold, rows = 0, []
    for index, (digit, (_, path)) in enumerate(zip(digits, photographs, strict=True)):
        if digit == "0" and index >= (fold + 1) * len(digits) / 5:
            fold += 1
        rows.append((path.relative_to(folder), digit, fold))
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "fold"), *rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
