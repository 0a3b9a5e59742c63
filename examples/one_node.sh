#!/bin/bash
# One machine with several GPUs: examples/one_node.sh data=PATH workers=12
# PROCESSES=2 with launch.accelerator=cpu runs it without a GPU. The same command continues from the newest checkpoint.
exec torchrun --standalone --nproc-per-node="${PROCESSES:-gpu}" --max-restarts=3 -m ssvit pretrain "$@"
