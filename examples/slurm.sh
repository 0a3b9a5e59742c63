#!/bin/bash
# Several machines of SLURM: sbatch examples/slurm.sh data=PATH workers=12 launch.strategy=fsdp
# Two minutes before the time limit, the job is queued again, and then continues from the newest checkpoint.
# With MIN_NODES=1, it continues with fewer machines if some are lost and the others can share recipe.batch_size.
#SBATCH --job-name=ssvit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="${MIN_NODES:-$SLURM_NNODES}:$SLURM_NNODES" --nproc-per-node="${PROCESSES:-gpu}" \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:${PORT:-29500}" --max-restarts=3 \
    -m ssvit pretrain "$@" &
wait $!
status=$?
if [ $status -gt 128 ]; then wait $!; status=$?; fi # the signal has ended the first wait
exit $status
