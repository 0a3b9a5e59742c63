#!/bin/bash
# One machine with several GPUs: examples/one_node.sh data=PATH workers=12
# PROCESSES=2 with launch.accelerator=cpu tries it without a GPU. Started again, it goes on from the newest checkpoint.
exec torchrun --standalone --nproc-per-node="${PROCESSES:-gpu}" --max-restarts=3 -m ssvit pretrain "$@"
