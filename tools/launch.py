"""How every tool starts: the environment that torch reads as it loads, Hydra, and failures in one line.

Status: 0 done, 1 failed, 2 the configuration is wrong, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# A waiting thread that spins takes the core from the one it waits for: up to 12 times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Hydra then raises its errors instead of printing them with advice for its developers; `launch` words them below.
os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from ssvit.options import OptionError, UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def launch(name: str, main: Callable[[DictConfig, dict[str, Any]], None]) -> None:
    """Compose configs/<name>.yaml with the command line and call main(config, the same as plain data)."""

    def run(config: DictConfig) -> None:
        main(config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))

    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(run)()
    except (HydraException, OmegaConfBaseException) as error:
        leave(_reason(error), 2)
    except UserError as error:
        leave(str(error), getattr(error, "status", 2 if isinstance(error, OptionError) else 1))
    except KeyboardInterrupt:
        leave("stopped by Ctrl-C", 130)
    except OSError as error:
        leave(f"{error.filename or 'system'}: {error.strerror or error}", 1)


def leave(line: str, status: int) -> NoReturn:
    """Print one line and end the process."""
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(status)


def _reason(error: Exception) -> str:
    """What a Hydra or OmegaConf error means for the command line, in one line."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={name}: must be one of {', '.join(error.options)}"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key or str(cause).rpartition(' ')[2]}: has no default and must be given"
    if isinstance(cause, ConfigKeyError) and cause.full_key:
        known = [str(key) for key in cause.parent_node] if cause.parent_node is not None else []
        parent, _, key = cause.full_key.rpartition(".")
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {parent + '.' if parent else ''}{close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{cause.full_key}: there is no such option; {hint}"
    return str(error).partition("\nSee https://")[0].partition("\n    full_key")[0]
