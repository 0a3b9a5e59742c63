#!/bin/sh
# Measure distillation on CIFAR-10 and on the hand signs. Finished rows are kept, interrupted runs are continued.
#     sh docs/distillation/measure.sh CIFAR10 SIGNS TEACHER
# The folders of images are data.root of data=cifar10 and of data=folder. The first seed of a table measures the cost of
# a step of each method, which requires a quiet machine.
set -e
cifar10="data=cifar10 data.root=$1" signs="data=folder data.root=$2" teacher=$3
compare() {
    name=$1
    shift
    ssvit compare --config-dir docs/distillation teacher="$teacher" name="distillation_$name" \
        table="docs/distillation/$name" seeds=3 workers=0 "$@"
}

compare cifar10_6min $cifar10 budget=6min objectives=[mae,distill]
compare cifar10_29min $cifar10 budget=1760s objectives=[distill,cached]
# Budgets in which the steps without the passes of the teacher take 6 and 29 minutes.
compare uncounted_6min $cifar10 budget=779s objectives=[distill] finetune=[]
compare uncounted_29min $cifar10 budget=3809s objectives=[distill] finetune=[]
compare variants_6min $cifar10 budget=6min objectives=[teacher_56,pooled,patches,mixup] finetune=[]
compare narrow_6min $cifar10 budget=6min encoder.width=64 encoder.heads=1 objectives=[mae,distill] finetune=[]
compare timm_6min $cifar10 budget=6min encoder=timm encoder.model=resnet10t objectives=[distill] finetune=[]
compare signs_6min $signs budget=6min data.image_size=64 encoder.patch_size=8 objectives=[mae,distill] finetune=[]
