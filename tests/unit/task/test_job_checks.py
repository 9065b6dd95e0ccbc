"""A job whose task, model and data do not go together is refused; all examples pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.config import job_from, load_job
from echelon.core.errors import ConfigError
from echelon.data.prepare.recipe import load_recipe
from echelon.task import check, check_python

TEXT = {"task": "text_classify", "data": {"path": "x"}}
FILES = sorted((Path(__file__).parents[3] / "examples").glob("*/*.yaml"))
RECIPES = [path for path in FILES if path.name.startswith("recipe")]
EXAMPLES = [path for path in FILES if path not in RECIPES]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "clasify"}, "task 'clasify' is unknown; did you mean 'classify'?"),
        ({"task": "own.py"}, "a task of your own is path/to/file.py:function"),
        ({"task": "classify"}, "needs data"),
        ({"task": "own.py:f", "model": {"name": "mlp"}}, "chosen by the task's own file"),
        ({"task": "classify", "model": {"name": "mpl"}}, "did you mean 'mlp'?"),
        (TEXT | {"model": {"name": "gpt"}}, "(models that fit: textcnn)"),
        (TEXT | {"task": "language_model", "model": {"name": "textcnn"}}, "that fit: gpt)"),
        (TEXT | {"task": "click_rate", "model": {"name": "mlp"}}, "(models that fit: dlrm)"),
        (TEXT | {"task": "regress", "model": {"name": "gpt"}}, "that fit: alexnet, cnn, mlp"),
    ],
)
def test_a_job_that_cannot_work_is_refused_at_once(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        job_from(settings, checks=[check])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("regress", {"augment": {"flip": True}}),
        ("click_rate", {"augment": {"crop": 2}}),
        ("text_classify", {"augment": {"mixup": 0.1}}),
        ("text_classify", {"columns": ["a"]}),
        ("language_model", {"normalise": False}),
        ("language_model", {"text": "body"}),
        ("classify", {"tokens": "words"}),
        ("classify", {"vocabulary": 5}),
        ("regress", {"text": "body"}),
        ("click_rate", {"length": 3}),
    ],
)
def test_a_setting_without_effect_is_refused(task: str, setting: dict[str, object]) -> None:
    key = next(iter(setting))
    with pytest.raises(ConfigError, match=rf"data\.{key} has no effect on task {task!r}"):
        job_from({"task": task, "data": {"path": "x", **setting}}, checks=[check])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"name": "mlp"}}, "brings its own model"),
        ({"data": {"path": "x"}}, "data.path has no effect"),
        ({"data": {"name": "digits"}}, "data.name has no effect"),
        ({"data": {"augment": {"flip": True}}}, "data.augment has no effect"),
    ],
)
def test_a_task_from_python_brings_model_and_data(
    settings: dict[str, object], message: str
) -> None:
    check_python(job_from({"task": "python", "data": {"prefetch": 0}}))
    with pytest.raises(ConfigError) as caught:
        job_from({"task": "python", **settings}, checks=[check_python])
    assert message in str(caught.value)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_resolved_example_passes_its_own_check(file: Path) -> None:
    here = [] if load_job(file).job.data.name else ["data.path=x"]
    job = load_job(file, here, checks=[check]).job
    assert job_from(job.model_dump(mode="json"), checks=[check]) == job


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_examples_is_one(path: Path) -> None:
    recipe = load_recipe(path).recipe
    assert len(recipe.steps()) == len(recipe.clean)
    made = [feature.name for feature in recipe.made()]
    assert [name for name in made if not name.startswith("_")] == ["x", "y"]
