"""How every tool starts: the environment that torch reads as it loads, Hydra, and failures in one line.

Status: 0 done, 1 failed, 2 the configuration is wrong, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# A waiting thread that spins takes the core from the one it waits for: up to 12 times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# But one that sleeps at once is woken late: to spin for some 25 microseconds first costs others little.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Hydra then raises its errors instead of printing them with advice for its developers; `launch` words them below.
os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from ssvit.options import OptionError, UserError

# A file name that the terminal's encoding lacks must not end a run.
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors="backslashreplace")

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def launch(
    name: str,
    main: Callable[[DictConfig, dict[str, Any]], None],
    *,
    before: Callable[[dict[str, str]], None] | None = None,
    positional: str | None = None,
) -> None:
    """Compose configs/<name>.yaml with the command line and call main(config, the same as plain data).

    before: called first, with the options as they were typed, to add choices of its own to Hydra's. positional: the
    option, a list, that arguments become which are not written option=value.
    """
    bare = [argument for argument in sys.argv[1:] if positional and _is_bare(argument)]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in bare]

    for argument in sys.argv[1:]:
        if argument.startswith("~"):
            leave(f"{argument}: an option can be changed, as option=value, but not taken away", 2)

    def run(config: DictConfig) -> None:
        try:
            if bare:
                config[positional] = [*config[positional], *bare]
            main(config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
        except OptionError as error:
            leave(f"{_typed(error.name, config)}={error.value}: {error.right}", 2)
        except UserError as error:
            leave(str(error), getattr(error, "status", 1))
        except InstantiationException as error:
            _explain(error, config)
        except OmegaConfBaseException as error:
            leave(_reason(error), 2)
        except OSError as error:
            leave(f"{error.filename or 'system'}: {error.strerror or error}", 1)

    try:
        if before:
            before(dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument))
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(run)()
    except (HydraException, OmegaConfBaseException) as error:
        leave(_reason(error), 2)
    except UserError as error:
        leave(str(error), 2)
    except KeyboardInterrupt:
        leave("stopped by Ctrl-C", 130)


def storable(config: DictConfig) -> dict[str, Any]:
    """A configuration as its run's folder keeps it: references as they were written, so that one can be changed."""
    return OmegaConf.to_container(config, resolve=False) | {"name": str(config.name)}


def _is_bare(argument: str) -> bool:
    """Whether an argument is no option: a file that there is, or without the = or - that options have."""
    return os.path.exists(argument) or not (argument.startswith("-") or "=" in argument)


def leave(line: str, status: int) -> NoReturn:
    """Print one line and end the process."""
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(status)


def _typed(name: str, config: DictConfig) -> str:
    """The option to type for one that only refers to it: data.root where data.source.root is ${data.root}."""
    node: Any = OmegaConf.to_container(config, resolve=False)
    for key in name.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    reference = re.fullmatch(r"\$\{([\w.]+)\}", node) if isinstance(node, str) else None
    return reference[1] if reference else name


def _explain(error: InstantiationException, config: DictConfig) -> NoReturn:
    """Tell what a constructor refused; any other failure in it is a fault of the program and is raised as it was."""
    part = str(error).rpartition("full_key: ")[2]
    cause = error.__cause__
    if isinstance(cause, OptionError):
        leave(f"{_typed(f'{part}.{cause.name}', config)}={cause.value}: {cause.right}", 2)
    if isinstance(cause, UserError):
        leave(str(cause), 1)
    if isinstance(cause, TypeError) and "argument" in str(cause):
        leave(f"{part}: {cause}", 2)
    raise cause or error


def _reason(error: Exception) -> str:
    """What a Hydra or OmegaConf error means for the command line, in one line."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    first = str(cause).partition("\n")[0]
    if isinstance(error, OverrideParseException):
        return f"{error.override}: must be written option=value"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={name}: must be one of {', '.join(error.options)}"
    if isinstance(cause, MissingMandatoryValue | InterpolationToMissingValueError):
        return f"{first.rpartition(': ')[2]}: has no default and must be given"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key and cause.parent_node is not None:
        known = [str(key) for key in cause.parent_node]
        parent, _, key = cause.full_key.rpartition(".")
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {parent + '.' if parent else ''}{close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{cause.full_key}: there is no such option; {hint}"
    return first
