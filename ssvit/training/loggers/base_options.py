"""The check that a logger's library is installed."""

from importlib.util import find_spec

from ssvit.options import UserError


def check_installed(name: str, *packages: str) -> None:
    """UserError unless the packages of a logger are there."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise UserError(f"logger={name} needs {' and '.join(missing)}: pip install ssvit[{name}]")
