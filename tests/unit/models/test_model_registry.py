"""Models by name: options are checked, models must fit the data, and the JSON schema."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from echelon import models
from echelon.core.config.sections import Section
from echelon.core.errors import ConfigError
from echelon.models import InputFacts
from echelon.models.mlp import MLPOptions

ALL = ["alexnet", "cnn", "dlrm", "gpt", "mlp", "resnet", "softmax", "textcnn"]
FACTS = {
    "vectors": InputFacts(shape=(30,), outputs=2),
    "images": InputFacts(shape=(28, 28), outputs=10),
    "colours": InputFacts(shape=(3, 32, 32), outputs=10),
    "tokens": InputFacts(shape=(64,), outputs=4, vocabulary=100),
    "fields": InputFacts(outputs=1, fields=(3, 4), dense=2),
}


def test_every_family_is_named() -> None:
    assert models.names() == ALL


def test_names_need_no_torch() -> None:
    script = "import sys; from echelon import models; models.names(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_what_is_exported_is_there() -> None:
    assert sorted(models.__all__) == models.__all__
    for name in models.__all__:
        assert getattr(models, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Normalize'"):
        _ = models.Normalize


@pytest.mark.parametrize("name", ALL)
def test_every_option_has_a_default(name: str) -> None:
    chosen = models.options(name, {})
    assert isinstance(chosen, Section)
    assert models.options(name, chosen.model_dump(mode="json")) == chosen


@pytest.mark.parametrize(
    ("kind", "fitting"),
    [
        ("vectors", ["mlp", "softmax"]),
        ("images", ["alexnet", "cnn", "mlp", "resnet", "softmax"]),
        ("colours", ["alexnet", "cnn", "mlp", "resnet", "softmax"]),
        ("tokens", ["gpt", "textcnn"]),
        ("fields", ["dlrm"]),
    ],
)
def test_a_model_fits_some_data_and_refuses_others(kind: str, fitting: list[str]) -> None:
    facts = FACTS[kind]
    for name in ALL:
        with torch.device("meta"):
            if name in fitting:
                models.build(name, models.options(name, {}), facts)
                continue
            with pytest.raises(ConfigError, match=rf"models that fit: {', '.join(fitting)}") as e:
                models.build(name, models.options(name, {}), facts)
        assert e.value.path == ("model", "name")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("cnn", "vectors", "model 'cnn' takes images, but the data are vectors of 30 values"),
        ("gpt", "colours", "model 'gpt' takes tokens, but the data are images of 3×32×32 values"),
        ("mlp", "tokens", "takes vectors or images, but the data are texts of 100 different"),
        ("mlp", "fields", "but the data are 2 categorical fields and 2 numbers"),
    ],
)
def test_a_misfit_says_what_the_data_are(name: str, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.build(name, models.options(name, {}), FACTS[kind])


def test_models_are_sized_by_the_facts() -> None:
    shapes = {
        "softmax": (FACTS["images"], (torch.rand(2, 28, 28),), (2, 10)),
        "mlp": (FACTS["vectors"], (torch.rand(2, 30),), (2, 2)),
        "cnn": (FACTS["images"], (torch.rand(2, 28, 28),), (2, 10)),
        "resnet": (InputFacts((3, 8, 8), 5), (torch.rand(2, 3, 8, 8),), (2, 5)),
        "textcnn": (FACTS["tokens"], (torch.randint(0, 100, (2, 9)),), (2, 4)),
        "gpt": (FACTS["tokens"], (torch.randint(0, 100, (2, 64)),), (2, 64, 100)),
        "dlrm": (FACTS["fields"], (torch.rand(2, 2), torch.tensor([[0, 0], [2, 3]])), (2, 1)),
    }
    for name, (facts, inputs, shape) in shapes.items():
        assert models.build(name, models.options(name, {}), facts)(*inputs).shape == shape


def test_sparse_facts_give_a_model_for_sparse_rows() -> None:
    for name in ("softmax", "mlp"):
        facts = InputFacts(shape=(1000,), outputs=2, sparse=True)
        model = models.build(name, models.options(name, {}), facts)
        assert next(model.parameters()).shape[0] == 1000


def test_options_reach_the_model() -> None:
    model = models.build("mlp", models.options("mlp", {"hidden": [7, 9]}), FACTS["vectors"])
    assert [tuple(p.shape) for p in model.parameters() if p.ndim == 2] == [(7, 30), (9, 7), (2, 9)]


@pytest.mark.parametrize("name", ["cn", "Mlp", "transformer", 3, ["mlp"]])
def test_an_unknown_name_is_refused_with_the_nearest(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"is unknown.*choices: alexnet, cnn, dlrm") as caught:
        models.options(name, {})
    assert caught.value.path == ("model", "name")
    if name == "cn":
        assert "did you mean 'cnn'?" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "path", "message"),
    [
        (
            "mlp",
            {"hiden": [64]},
            ("model", "hiden"),
            "key 'model.hiden' is unknown; did you mean 'hidden'? "
            "(choices: activation, dropout, hidden, init, norm)",
        ),
        (
            "mlp",
            {"activation": "rellu"},
            ("model", "activation"),
            "model.activation = 'rellu': input should be 'relu', 'leaky_relu', 'gelu', 'tanh' or "
            "'sigmoid'; did you mean 'relu'?",
        ),
        (
            "mlp",
            {"dropout": 1.0},
            ("model", "dropout"),
            "model.dropout = 1.0: input should be less than 1",
        ),
        (
            "mlp",
            {"dropout": "0.5"},
            ("model", "dropout"),
            "model.dropout = '0.5': input should be a valid number",
        ),
        (
            "mlp",
            {"hidden": [64, "x"]},
            ("model", "hidden", 1),
            "model.hidden.1 = 'x': input should be a valid integer",
        ),
        (
            "mlp",
            {"hidden": [64, 0]},
            ("model", "hidden", 1),
            "model.hidden.1 = 0: input should be greater than 0",
        ),
        (
            "resnet",
            {"depth": 19},
            ("model", "depth"),
            "model.depth = 19: input should be 18, 34, 50, 101 or 152",
        ),
        (
            "gpt",
            {"layers": 2.5},
            ("model", "layers"),
            "model.layers = 2.5: input should be a valid integer",
        ),
        (
            "alexnet",
            {"hidden": -1},
            ("model", "hidden"),
            "model.hidden = -1: input should be greater than 0",
        ),
        (
            "dlrm",
            {"bottom": [4]},
            ("model",),
            "model.bottom has no effect on interaction 'concat'",
        ),
        (
            "mlp",
            {"init": 3, "norm": "x"},
            ("model", "norm"),
            "model.norm = 'x': input should be 'none', 'batch' or 'layer' (and 1 more)",
        ),
        (
            "mlp",
            {"hidden": {1, 2}},
            ("model",),
            "model: a value is not plain data: Object of type set is not JSON serializable",
        ),
    ],
)
def test_a_wrong_option_is_one_clear_line(
    name: str, values: dict[str, Any], path: tuple[str | int, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        models.options(name, values)
    assert str(caught.value) == message
    assert caught.value.path == path


def test_options_of_another_family_are_refused() -> None:
    with pytest.raises(AssertionError, match="MLPOptions is not for cnn"):
        models.build("cnn", MLPOptions(), FACTS["images"])


def test_the_schema_has_one_form_for_each_name() -> None:
    forms = {form["title"]: form for form in models.schema()["oneOf"]}
    assert sorted(forms) == ALL
    assert json.loads(json.dumps(forms)) == forms
    mlp = forms["mlp"]
    assert mlp["properties"]["name"] == {"const": "mlp"}
    assert mlp["required"] == ["name"]
    assert mlp["additionalProperties"] is False
    assert mlp["properties"]["hidden"]["description"] == "Width of each hidden layer."
    assert mlp["properties"]["norm"]["enum"] == ["none", "batch", "layer"]
    for form in forms.values():
        assert "$ref" not in json.dumps(form), "a form must stand by itself in a larger schema"
