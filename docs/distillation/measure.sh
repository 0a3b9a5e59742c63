#!/bin/sh
# Measure distillation on CIFAR-10 and on the hand signs. Finished rows are kept, interrupted runs are continued.
#     sh docs/distillation/measure.sh CIFAR10 SIGNS TEACHER
# The folders of images are data.root of data=cifar10 and of data=folder. The first seed of a table measures the cost of
# a step of each method, which requires a quiet machine.
# The stored rows have steps of 64 images, a former default: a new table requires pretrain=[recipe.batch_size=64].
set -e
cifar10=$1 signs=$2 teacher=$3
compare() {
    name=$1
    shift
    ssvit compare --config-dir docs/distillation teacher="$teacher" table="docs/distillation/$name" seeds=3 workers=0 "$@"
}
on_cifar10() {
    compare "$@" data=cifar10 data.root="$cifar10"
}

on_cifar10 cifar10_6min budget=6min objectives=[mae,distill,supervised]
on_cifar10 cifar10_29min budget=1760s objectives=[distill,cached]
# Budgets in which the steps without the passes of the teacher take 6 and 29 minutes.
on_cifar10 uncounted_6min budget=779s objectives=[distill] finetune=[]
on_cifar10 uncounted_29min budget=3809s objectives=[distill] finetune=[]
on_cifar10 variants_6min budget=6min objectives=[teacher_56,pooled,patches,mixup] finetune=[]
on_cifar10 narrow_6min budget=6min encoder.width=64 encoder.heads=1 objectives=[mae,distill] finetune=[]
on_cifar10 timm_6min budget=6min encoder=timm encoder.model=resnet10t objectives=[distill] finetune=[]
compare signs_6min data=folder data.root="$signs" budget=6min data.image_size=64 encoder.patch_size=8 \
    objectives=[mae,distill] finetune=[]

ssvit evaluate checkpoint="$teacher" data=cifar10 data.root="$cifar10" data.image_size=98 train_images=20000 \
    test_images=null probes=[ridge,few_shot,knn] probes.few_shot.shots=100 probes.knn.k=20 baselines=false \
    figures=none output=outputs/teacher
cp outputs/teacher/report.json docs/distillation/teacher.json
