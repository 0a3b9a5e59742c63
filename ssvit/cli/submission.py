"""What a sweep would submit to SLURM (hydra/launcher=submitit_slurm): the script and its jobs. Nothing is submitted."""

from collections.abc import Sequence

from ssvit.cli.launch import Tool
from ssvit.config import composition
from ssvit.config.command_line import CommandLine, Plain
from ssvit.options import Failure, UserError
from ssvit.training import preflight

LAUNCHER = "hydra/launcher=submitit_slurm"


def text(tool: Tool, arguments: Sequence[str]) -> str:
    """The script that sbatch would get, and a line for each job. Failure for a wrong option in any of them.

    arguments: of the command, with -m and the launcher.
    """
    line = CommandLine(arguments, aliases=tool.aliases)
    if not line.sweep:
        raise Failure(f"{LAUNCHER}: submits the jobs of a sweep: add -m", 2)
    lines = []
    for number, job in enumerate(jobs := composition.jobs(line)):
        own = " ".join(option for option in job if option not in line.options)
        lines.append(f"job {number}: {own}")
        try:
            preflight.check(tool.compose(tool.line([*line.flags, *job])).values)
        except UserError as error:
            raise Failure(str(error), 2) from None
    launcher = composition.launcher(tool.name, tool.line([*line.flags, *jobs[0]]))
    return "\n".join([_script(launcher, len(jobs)), *lines])


def _script(launcher: Plain, jobs: int) -> str:
    """As submitit writes it for the options of Hydra's launcher."""
    from submitit.slurm.slurm import SlurmExecutor

    class Anywhere(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # also where there is no srun

    options = {name: value for name, value in launcher.items() if name != "_target_" and value is not None}
    executor = Anywhere(folder=options.pop("submitit_folder"), max_num_timeout=options.pop("max_num_timeout"))
    executor.update_parameters(**executor._convert_parameters(options))
    if jobs > 1:
        executor.parameters["map_count"] = jobs
    return executor._make_submission_file_text(executor._submitit_command_str, "job")
