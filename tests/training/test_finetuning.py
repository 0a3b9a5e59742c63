"""preset=auto of ssvit finetune: a schedule for any number of labelled images, and typed options win."""

import itertools

import pytest

from ssvit.cli import find_command
from ssvit.cli.finetune import with_schedule
from ssvit.training.finetuning import FOREIGN, OWN, RANDOM
from ssvit.training.recipe import Recipe

IMAGES = (1, 2, 9, 40, 99, 500, 2000, 9999, 10_000, 50_000, 10**6, 10**9)
RUN = "checkpoint=outputs/masked_patch_shapes"


def scheduled(*options: str):
    """The options of a fine-tuning that starts from the run of the fixture `outputs`."""
    command = find_command("finetune")
    return with_schedule(command.compose(command.line([*options]))).options


@pytest.mark.parametrize(("rule", "images"), list(itertools.product((OWN, FOREIGN, RANDOM), IMAGES)))
def test_a_rule_gives_a_recipe_for_any_number_of_images(rule, images):
    batch_size = min(rule.batch_size(images), images)
    recipe = Recipe(**rule.options(images, batch_size=batch_size))
    assert recipe.batch_size <= images
    assert sum(recipe.due(step, recipe.evaluate_every) for step in range(1, recipe.steps + 1)) == 3


@pytest.mark.parametrize("rule", [OWN, FOREIGN, RANDOM])
def test_more_images_are_seen_in_no_fewer_steps_in_all_and_fewer_epochs(rule):
    seen = []
    for images in IMAGES[4:]:
        options = rule.options(images, batch_size=rule.batch_size(images))
        seen.append(options["steps"] * options["batch_size"])
    assert seen == sorted(seen)
    epochs = [count / images for count, images in zip(seen, IMAGES[4:], strict=True)]
    assert all(after <= 1.03 * before for before, after in itertools.pairwise(epochs))  # steps are rounded up


def test_typed_options_and_files_of_options_win(outputs, monkeypatch):
    monkeypatch.chdir(outputs.parent)
    chosen, of_file = scheduled(RUN), scheduled(RUN, "recipe=adamw", "preset=null")
    typed = scheduled(RUN, "recipe.steps=50", "recipe.lr=0.5", "recipe.batch_size=4", "data.augment.scale=[0.3,0.4]")
    assert (typed.recipe.steps, typed.recipe.lr, typed.recipe.batch_size) == (50, 0.5, 4)
    assert typed.recipe.warmup < 50
    assert tuple(typed.data.augment.scale) == (0.3, 0.4)
    assert typed.recipe.optimizer == chosen.recipe.optimizer
    for options in (("recipe=adamw",), ("preset=null",)):
        others = scheduled(RUN, *options)
        assert others.recipe.changed(batch_size=8) == of_file.recipe.changed(batch_size=8)
    assert of_file.recipe.steps != chosen.recipe.steps


@pytest.mark.parametrize("labels", [1, 3, 5])
def test_a_batch_is_at_most_the_labelled_images(outputs, monkeypatch, labels):
    monkeypatch.chdir(outputs.parent)
    assert scheduled(RUN, f"subset.images={labels}").recipe.batch_size == labels
    for count in (2, 3):
        accumulated = scheduled(RUN, f"subset.images={labels}", f"recipe.accumulate={count}").recipe.batch_size
        assert accumulated == max(count, labels // count * count)


def test_a_head_alone_has_a_higher_rate_unless_frozen_layers_are_changed_too(outputs, monkeypatch):
    monkeypatch.chdir(outputs.parent)
    usual = scheduled(RUN).recipe.lr
    assert scheduled(RUN, "objective.trained=head").recipe.lr > usual
    assert scheduled(RUN, "objective.trained=1").recipe.lr == usual
    assert scheduled(RUN, "objective.trained=head", "objective.lora={rank: 2, alpha: 2}").recipe.lr == usual
    assert scheduled(RUN, "objective.trained=head", "recipe.lr=0.25").recipe.lr == 0.25


def test_from_some_number_of_labels_on_all_weights_of_a_run_are_trained_as_random_ones(outputs, monkeypatch):
    monkeypatch.chdir(outputs.parent)
    rates = {
        (start, count): {
            name: getattr(scheduled(*options, f"data.images={count}").recipe, name) for name in RANDOM.rates
        }
        for start, options in {"all": [RUN], "part": [RUN, "objective.trained=1"]}.items()
        for count in (400, 4000)
    }
    assert rates["all", 4000] == RANDOM.rates
    assert rates["all", 400] == rates["part", 400] == rates["part", 4000] == OWN.rates


def test_random_weights_have_their_own_recipe_with_and_without_a_comparison(outputs, monkeypatch):
    monkeypatch.chdir(outputs.parent)
    compared = scheduled(RUN, "compare=scratch")
    alone = scheduled("checkpoint=scratch")
    for name in ("optimizer", "lr", "layer_decay"):
        assert compared.scratch_recipe[name] == getattr(alone.recipe, name)
    assert "steps" not in compared.scratch_recipe
    assert scheduled(RUN, "compare=scratch", "scratch_recipe={lr: 0.125}").scratch_recipe["lr"] == 0.125
