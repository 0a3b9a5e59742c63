"""Measure frozen features by ridge regression on a few images of each class.

Usage: ssvit few-shot checkpoint=PATH.
"""

from dataclasses import replace

from ssvit.cli import evaluate
from ssvit.evaluation.report.options import FewShot

command = replace(evaluate.command, name="few_shot", options=FewShot)
