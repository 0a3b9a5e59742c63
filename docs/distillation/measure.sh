#!/bin/sh
# Measure distillation on CIFAR-10 and on the hand signs. Finished rows are kept, interrupted runs are continued.
#     sh docs/distillation/measure.sh CIFAR10 SIGNS TEACHER
# The folders of images are data.root of data=cifar10 and of data=folder. The first seed of a table measures the cost of
# a step of each method, which requires a quiet machine.
set -e
table=docs/distillation
compare() {
    name=$1
    shift
    ssvit compare --config-dir docs/distillation teacher="$teacher" name="distillation_$name" table="$table/$name" \
        workers=0 "$@"
}
cifar10=$1 signs=$2 teacher=$3
narrow="encoder.width=64 encoder.heads=1"

compare cifar10_6min data=cifar10 data.root="$cifar10" budget=6min seeds=3 \
    objectives=[mae,distill,teacher_56,pooled,patches,cached,mixup]
compare cifar10_29min data=cifar10 data.root="$cifar10" budget=1760s seeds=3 objectives=[mae,distill,cached]
compare narrow_6min data=cifar10 data.root="$cifar10" budget=6min seeds=3 $narrow objectives=[mae,distill]
compare timm_6min data=cifar10 data.root="$cifar10" budget=6min seeds=3 encoder=timm encoder.model=resnet10t \
    objectives=[distill]
compare signs_6min data=folder data.root="$signs" budget=6min seeds=3 data.image_size=64 encoder.patch_size=8 \
    finetune=[recipe.steps=300] objectives=[mae,distill]
