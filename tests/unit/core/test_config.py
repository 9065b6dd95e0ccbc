"""Job files: values, overrides, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.config import Job, job_from, load_job
from echelon.core.config.loading import Document, overridden, parse_value
from echelon.core.errors import ConfigError

JOB = """\
task: classify
data: {name: digits}
optimizer:
  name: adam
  lr: 1e-3
epochs: 3
"""
PLATEAU = {"name": "plateau"}
BOMB = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(8)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    return path


def test_a_file_and_overrides_make_a_job(file: Path) -> None:
    job = load_job(file, ["optimizer.lr=0.5", "model={name: mlp}", "model.hidden=[8, 8]"]).job
    assert job.optimizer.name == "adam"
    assert job.optimizer.lr == 0.5
    assert job.model == {"name": "mlp", "hidden": [8, 8]}
    assert job.epochs == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("1.5", 1.5),
        ("-2", -2),
        (".5", 0.5),
        ("true", True),
        ("no", "no"),
        ("2026-11-15", "2026-11-15"),
        ("null", None),
        ("[1, a]", [1, "a"]),
        ("a: b: c", "a: b: c"),
        ("1e3x", "1e3x"),
    ],
)
def test_values_are_what_they_look_like(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimzer.lr=3", "key 'optimzer' is unknown; did you mean 'optimizer'?"),
        ("optimizer.nme=adam", "key 'optimizer.nme' is unknown; did you mean 'name'?"),
        ("optimizer.name=adm", "did you mean 'adam'?"),
        ("batch_size=many", "batch_size = 'many': input should be a valid integer"),
        ("batch_size='3'", "batch_size = '3': input should be a valid integer"),
        ("epochs=true", "epochs = True: input should be a valid integer"),
        ("epochs=0", "greater than 0"),
        ("seed.x=1", "seed = {'x': 1}"),
        ("data.path=x", "data has both a name and a path"),
        ("data.augment.crp=1", "did you mean 'crop'?"),
        ("data.valid_path=x", "goes with data.path"),
        ("clip={norm: 1, value: 1}", "clip has both a norm and a value"),
        ("accumulate=64", "it can be at most batch_size"),
        ("args={a: 1}", "args are for a task function"),
        ("schedule.name=step", "needs schedule.every"),
        ("schedule.every=3", "has no effect on 'constant'"),
        ("schedule.steps=3", "has no effect on 'constant'"),
        ("schedule.factor=0.5", "schedule.factor has no effect on 'constant'"),
        ("schedule.floor=0.5", "schedule.floor has no effect on 'constant'"),
        ("schedule.patience=5", "schedule.patience has no effect on 'constant'"),
        ("optimizer.lr=.inf", "optimizer.lr = inf: input should be a finite number"),
        ("clip.norm=.inf", "clip.norm = inf: input should be a finite number"),
        ("minutes=.nan", "minutes = nan: input should be a finite number"),
        ("optimizer.momentum=0.9", "has no effect on 'adam'"),
        ("optimizer={name: sgd, eps: 1.0}", "optimizer.eps has no effect on 'sgd'"),
        ("optimizer={name: sgd, betas: [0.9, 0.9]}", "optimizer.betas has no effect on 'sgd'"),
        ("track.exporters=[wandb, wandb]", "names one twice"),
        ("name=../x", "string should match pattern"),
        ("noequals", "must look like key.path=value"),
        ("epochs.x=1", "'epochs' is a value, it has no key 'x'"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(file, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_names_file_and_line(file: Path) -> None:
    file.write_text(JOB.replace("lr: 1e-3", "lrr: 1e-3"), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{file}:5: key 'optimizer.lrr' is unknown"):
        load_job(file)
    file.write_text(JOB.replace("lr: 1e-3", "lr: -1"), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{file}:5: optimizer.lr = -1"):
        load_job(file)


def test_no_choice_is_suggested_where_two_are_equally_near(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fp8': input should be 'fp32', 'bf16' or 'fp16'$"):
        load_job(file, ["precision=fp8"])


def test_an_override_may_go_into_a_list() -> None:
    document = overridden(Document({"read": [{"path": "a"}, {"path": "b"}]}), ["read.1.path=c"])
    assert document.values == {"read": [{"path": "a"}, {"path": "c"}]}
    assert document.where(("read", 1, "path")) == "command line: "
    for override in ("read.2.path=c", "read.x=c"):
        with pytest.raises(ConfigError, match="must be the number of an item, 0 to 1"):
            overridden(document, [override])


def test_an_error_in_an_override_names_the_command_line(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: optimizer\.lr = -1"):
        load_job(file, ["optimizer.lr=-1"])


@pytest.mark.parametrize(
    "override",
    [
        "optimzer.lr=3",
        "accumulate=64",
        "batch_size=1",
        "args={a: 1}",
        "args.a=1",
        "data.path=x",
        "schedule.name=step",
        "stop.patience=1",
        "schedule.floor=0.5",
        "clip.value=1",
    ],
)
def test_what_an_override_spoils_is_not_put_down_to_the_file(file: Path, override: str) -> None:
    more = "accumulate: 8\nevaluate: {every: never}\nclip: {norm: 1}\n"
    file.write_text(JOB + more, encoding="utf-8")
    load_job(file)
    with pytest.raises(ConfigError, match=r"^command line: "):
        load_job(file, [override])


def test_a_fault_of_the_file_is_not_put_down_to_an_override(file: Path) -> None:
    file.write_text(JOB + "accumulate: 64\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^{file}:7: accumulate \(64\)"):
        load_job(file, ["optimizer.lr=1"])
    file.write_text(JOB + "schedule: {patience: 7}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^{file}:7: schedule\.patience has no effect"):
        load_job(file, ["schedule.warmup=1"])


def test_what_cannot_have_been_meant_as_a_value_is_refused_on_the_command_line(file: Path) -> None:
    for value in ("&a [*a]", "[" * 3000 + "]" * 3000):
        with pytest.raises(ConfigError, match=r"^command line:1: nested too deeply"):
            load_job(file, [f"args={value}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "job.yaml:1: not valid YAML"),
        ("- 1\n", "job.yaml:1: not a mapping of keys"),
        ("seed: 1\nseed: 2\n", "job.yaml:2: key 'seed' is given twice"),
        ("a: !!python/object:os.system x\n", "not valid YAML"),
        ("seed: 1\n? [a, b]\n: 3\n", "job.yaml:2: a key is a word, not a list or a mapping"),
        ("seed: 1\nargs: &a [*a]\n", "job.yaml:2: nested too deeply"),
        ("seed: 1\nargs: " + "[" * 3000 + "]" * 3000, "job.yaml:2: nested too deeply"),
        ("seed: 1\nname: " + "9" * 5000, "job.yaml:2: not valid YAML: Exceeds the limit"),
        ("seed: \x00", "job.yaml: not valid YAML: unacceptable character"),
        (BOMB, "job.yaml:1: more than 100,000 values"),
    ],
)
def test_a_broken_file_names_the_line(file: Path, text: str, message: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_job(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_job(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job(tmp_path / "b.yaml")


def test_an_empty_file_is_a_job_of_defaults(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("", encoding="utf-8")
    assert load_job(tmp_path / "e.yaml").job == Job(epochs=10)


def test_a_job_always_has_an_end() -> None:
    assert job_from({}).epochs == 10
    assert job_from({"steps": 5}).epochs is None
    with pytest.raises(ConfigError, match="must know where it ends"):
        job_from({"minutes": 1.0, "schedule": {"name": "cosine"}})


@pytest.mark.parametrize(
    "waiting", [{"stop": {"patience": 1}}, {"stop": {"target": 0.5}}, {"schedule": PLATEAU}]
)
def test_nothing_waits_for_results_that_never_come(waiting: dict[str, object]) -> None:
    assert job_from(waiting)
    with pytest.raises(ConfigError, match=r"has no effect where evaluate\.every is 'never'"):
        job_from({**waiting, "evaluate": {"every": "never"}})


def test_settings_of_other_schedules_are_kept_where_they_act() -> None:
    assert job_from({"schedule": {"name": "step", "every": 3, "factor": 0.5, "floor": 0.1}})
    assert job_from({"schedule": {**PLATEAU, "factor": 0.5, "floor": 0.1, "patience": 9}})


def test_a_value_that_is_not_plain_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="not plain data"):
        job_from({"args": {"x": object()}})


def test_a_check_is_located_like_any_other_fault(file: Path) -> None:
    def check(job: Job) -> None:
        raise ConfigError(f"{job.optimizer.name} is out of fashion", ("optimizer", "name"))

    with pytest.raises(ConfigError, match=rf"{file}:4: adam is out of fashion"):
        load_job(file, checks=[check])


def test_a_resolved_job_reads_back_as_itself(file: Path) -> None:
    job = load_job(file).job
    assert job_from(job.model_dump(mode="json")) == job


@pytest.mark.parametrize("address", ["0.0.0.0", "::", ""])
def test_an_address_that_nobody_can_dial_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address to join at"):
        job_from({"elastic": {"address": address}})
