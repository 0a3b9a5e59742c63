"""Load what the fork server shares with its children: torch, ssvit, and what most processes of tests import."""

import forked
import pytest  # noqa: F401
import runs  # noqa: F401
import tiny  # noqa: F401

forked.load(torch=True)
