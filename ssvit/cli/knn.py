"""Measure frozen features by their nearest training images (k-NN).

Usage: ssvit knn checkpoint=PATH.
"""

from dataclasses import replace

from ssvit.cli import evaluate
from ssvit.evaluation.report.options import Knn

command = replace(evaluate.command, name="knn", options=Knn)
