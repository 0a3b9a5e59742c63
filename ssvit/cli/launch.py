"""How every tool starts: the environment that torch reads when it loads, Hydra, and failures in one line.

Status: 0 done, 1 failed, 2 the configuration is wrong, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

# A waiting thread that spins takes the core from the one it waits for: up to 12 times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# One that sleeps at once is woken late; spinning for some 25 microseconds first costs the others little.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Hydra then raises its errors instead of printing them with advice for its developers; `launch` words them below.
os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from tqdm import tqdm

from ssvit.checkpoints.configuration import RENAMED, command
from ssvit.checkpoints.run_folder import is_main_process
from ssvit.options import OptionError, UserError, printable, typed

# A file name that the terminal's encoding lacks must not end a run.
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors="backslashreplace")

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALIASES = {"evaluator=": "evaluator@evaluators="}  # of the tools that train, see `launch`


def launch(
    name: str,
    main: Callable[[DictConfig, dict[str, Any]], None],
    *,
    before: Callable[[dict[str, str]], None] | None = None,
    positional: str | None = None,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Compose configs/<name>.yaml with the command line and call main(config, the same as plain data).

    before: called first, with the options as typed, to add choices to Hydra's. positional: the option, a list, that
    takes the arguments not written as option=value. aliases: what beginnings of options stand for.
    """
    for alias, option in aliases.items():
        sys.argv[1:] = [re.sub(f"^{re.escape(alias)}", option, argument) for argument in sys.argv[1:]]
    bare = []
    if positional:  # existing files, and what has neither the = nor the leading - of an option
        bare = [one for one in sys.argv[1:] if os.path.exists(one) or not (one.startswith("-") or "=" in one)]
    # Hydra wants its own flags before the options.
    sys.argv[1:] = sorted((argument for argument in sys.argv[1:] if argument not in bare), key=_is_option)

    for argument in sys.argv[1:]:
        _check_typed(argument)

    def run(config: DictConfig) -> None:
        try:
            _check_kinds(config, name)
            if bare:
                config[positional] = [*config[positional], *bare]
            main(config, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
        except OptionError as error:
            leave(f"{_option(error.name, config)}={typed(error.value)}: {error.right}", 2)
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
    except OSError as error:
        leave(f"{error.filename or 'system'}: {error.strerror or error}", 1)
    except ValueError as error:
        if "Config group override" not in str(error):
            raise
        leave(_misplaced(), 2)
    except KeyboardInterrupt:
        leave("stopped by Ctrl-C", 130)


def typed_command() -> str:
    """What identifies this command: its options as typed, in any order."""
    return command(argument for argument in sys.argv[1:] if _is_option(argument))


def job_name(name: str) -> str:
    """The name of a run; a job of a sweep (-m) has its own values in it."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        return name
    shared = {argument.lstrip("+") for argument in sys.argv[1:]}
    own = [option for option in hydra_config.overrides.task if option.lstrip("+") not in shared]
    if any(option.startswith("name=") for option in own):
        return name
    return "_".join([name, *(re.sub(r"[^\w.=,+-]+", "-", option) for option in own)])


def _check_typed(argument: str) -> None:
    """Refuse an option that is taken away, has another name now, or says what to call.

    What is called is chosen by the name of a file alone: a run's folder keeps no more of it.
    """
    if argument.startswith("~"):
        leave(f"{argument}: an option can be changed, as option=value, but not taken away", 2)
    option, given, value = argument.lstrip("+").partition("=")
    if option in RENAMED:
        name, values = RENAMED[option]
        right = f"{name}={values[value]}" if value in values else name
        leave(f"{argument}: is called {right} now", 2)
    if given and any(part.startswith("_") and part.endswith("_") and len(part) > 1 for part in option.split(".")):
        leave(f"{argument}: what is called is chosen by a file's name: put it into one of your own (--config-dir)", 2)


def _check_kinds(config: DictConfig, name: str) -> None:
    """OptionError for a value in the place of a group of options, or of a list, which would silently be lost."""
    choices, typed_options = HydraConfig.get().runtime.choices, HydraConfig.get().overrides.task
    options = {option.lstrip("+").partition("=")[0]: option for option in typed_options if "=" in option}
    before = hydra.compose(name, [option for group, option in options.items() if group in choices])
    for option in options.keys() - choices.keys():
        value, usual = (OmegaConf.select(node, option) for node in (config, before))
        if isinstance(usual, DictConfig) and not isinstance(value, DictConfig):
            if value is None and "." in option and (option.startswith("probes.") or "_target_" not in usual):
                continue  # one of several probes, or the stem of an encoder, may be left out
            first = next((key for key in usual if not str(key).startswith("_")), "option")
            raise OptionError(option, value, f"is a group of options: give one of them, as {option}.{first}=…")
        if isinstance(usual, ListConfig) and not isinstance(value, ListConfig | str) and "." not in option:
            raise OptionError(option, value, "must be a list")


def _misplaced() -> str:
    """What is wrong with a choice that is not the name of a file."""
    for argument in sys.argv[1:]:
        group, _, value = argument.partition("=")
        folder = CONFIGS / group.partition("@")[0]
        if folder.is_dir() and not isinstance(yaml.safe_load(value), str | list):
            typed_as = argument.removeprefix("probe@")  # see `aliases`
            return f"{typed_as}: must be one of {', '.join(sorted(path.stem for path in folder.glob('*.yaml')))}"
    return "a choice of a file must be its name, or a list of names"


def _is_option(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


_said: list[str] = []
say = _said.append  # keeps a line for `announce`: a mistake in the command is reported alone


def announce() -> None:
    """Print the lines that `say` kept, in the main process, before the work begins."""
    if is_main_process():
        print(*map(printable, _said), sep="\n", end="\n" * bool(_said), flush=True)
    _said.clear()


def progress(what: str, unit: str) -> Callable[[int, int], None]:
    """A function of (done, all) that shows the progress, its rate and the time left, unless it is soon done."""
    rarely = 0.5 if sys.stdout.isatty() else 10
    bar = tqdm(desc=what, unit=unit, mininterval=rarely, delay=rarely, dynamic_ncols=True, file=sys.stdout)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def leave(line: str, status: int) -> NoReturn:
    """Print one line and end the process."""
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {printable(' '.join(line.split()))}", file=sys.stderr)
    sys.exit(status)


def _option(name: str, config: DictConfig) -> str:
    """The option to type for one that refers to it: target.bits for objective.target.bits where that is ${target}."""
    node: Any = OmegaConf.to_container(config, resolve=False)
    keys = name.split(".")
    for place, key in enumerate(keys, 1):
        node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", node)):
            return _option(".".join([reference[1], *keys[place:]]), config)
    return name


def _explain(error: InstantiationException, config: DictConfig) -> NoReturn:
    """Report what a constructor refused; any other failure in it is a fault of the program and is raised again."""
    part = str(error).rpartition("full_key: ")[2]
    cause = error.__cause__
    if isinstance(cause, OptionError):
        leave(f"{_option(f'{part}.{cause.name}', config)}={typed(cause.value)}: {cause.right}", 2)
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
        known = [str(key) for key in cause.parent_node if key != "_target_"]
        parent, _, key = cause.full_key.rpartition(".")
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {parent + '.' if parent else ''}{close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{cause.full_key}: there is no such option; {hint}"
    return first
