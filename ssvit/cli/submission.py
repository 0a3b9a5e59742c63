"""What a sweep would submit to SLURM (hydra/launcher=submitit_slurm): the script and its jobs. Nothing is submitted."""

from collections.abc import Sequence
from typing import Any, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ssvit.cli.launch import Failure, Tool, as_dict
from ssvit.options import UserError
from ssvit.training import preflight

LAUNCHER = "hydra/launcher=submitit_slurm"
_MULTIRUN = ("-m", "--multirun")


def text(tool: Tool, arguments: Sequence[str]) -> str:
    """The script that sbatch would get, and a line for each job. Failure for a wrong option in any of them.

    arguments: of the command, with -m and the launcher.
    """
    if not set(_MULTIRUN).intersection(arguments):
        raise Failure(f"{LAUNCHER}: submits the jobs of a sweep: add -m", 2)
    flags = [argument for argument in arguments if argument not in _MULTIRUN and "=" not in argument]
    options = [argument for argument in arguments if "=" in argument]
    overrides = OverridesParser.create().parse_overrides(options)
    jobs: list[list[str]] = [list(job) for job in BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]]
    swept = [override.get_key_element() for override in overrides if override.is_sweep_override()]
    launcher = DictConfig({})
    for job in jobs:
        with tool.composed([*flags, *job]) as (config, _):
            try:
                preflight.check(as_dict(config))
            except UserError as error:
                raise Failure(str(error), 2) from None
            hydra = HydraConfig.get()
            of_hydra = {"launcher": hydra.launcher, "sweep": hydra.sweep, "job": {"name": tool.name}}
            launcher = OmegaConf.create({"outputs": config.outputs, "hydra": of_hydra}).hydra.launcher
    lines = [
        f"job {number}: {' '.join(option for option in job if option.partition('=')[0] in swept)}"
        for number, job in enumerate(jobs)
    ]
    return "\n".join([_script(launcher, len(jobs)), *lines])


def _script(launcher: DictConfig, jobs: int) -> str:
    """As submitit writes it for the options of Hydra's launcher."""
    from submitit.slurm.slurm import SlurmExecutor

    class Anywhere(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # also where there is no srun

    given = cast(dict[str, Any], OmegaConf.to_container(launcher, resolve=True))
    options = {name: value for name, value in given.items() if name != "_target_" and value is not None}
    executor = Anywhere(folder=options.pop("submitit_folder"), max_num_timeout=options.pop("max_num_timeout"))
    executor.update_parameters(**executor._convert_parameters(options))
    if jobs > 1:
        executor.parameters["map_count"] = jobs
    return executor._make_submission_file_text(executor._submitit_command_str, "job")
