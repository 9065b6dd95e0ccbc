"""Settings of the parameter server: their meaning, and contradictions that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from echelon import strategy
from echelon.core.config import ParameterServerSection, job_from
from echelon.core.errors import ConfigError
from echelon.core.interfaces import Task
from echelon.loop import rearranged

IDLE = ("sync.deadline", "elastic.wait")


def job(workers: int = 4, name: str = "parameter_server", **section: Any) -> Any:
    values = {"strategy": name, "workers": workers, "parameter_server": section}
    return job_from(values, checks=[strategy.check])


@pytest.mark.parametrize(
    ("section", "together", "pushes"),
    [
        ({}, True, 4),
        ({"staleness": 0, "quorum": "all"}, True, 4),
        ({"staleness": 0, "quorum": 3}, False, 3),
        ({"staleness": 0, "quorum": 1}, False, 1),
        ({"staleness": 4}, False, 1),
        ({"staleness": "none"}, False, 1),
        ({"staleness": None, "quorum": 2}, False, 2),
    ],
)
def test_two_numbers_say_who_makes_an_update(
    section: dict[str, Any], together: bool, pushes: int
) -> None:
    found = job(**section).parameter_server
    assert found.together is together
    assert found.pushes(4) == pushes


def test_a_quorum_is_never_more_than_there_are_trainers() -> None:
    assert ParameterServerSection(quorum=3).pushes(2) == 2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"staleness": 4, "quorum": "all"}, "staleness = 4 has no effect where the quorum is"),
        ({"staleness": "none", "quorum": "all"}, "staleness = none has no effect"),
        ({"compensate": 0.5}, "compensate has no effect where staleness is 0"),
        ({"scale": "staleness", "quorum": 3}, "scale has no effect where staleness is 0"),
        ({"quorum": 5}, "quorum = 5, but only 4 workers are started"),
        ({"staleness": -1}, r"staleness = -1: .* whole number from 0 on, or 'none'$"),
        ({"staleness": "banana"}, r"staleness = 'banana': .* number from 0 on, or 'none'$"),
        ({"quorum": "al"}, r"'al': input .* a valid integer or 'all'; did you mean 'all'\?$"),
        ({"quorum": 0}, r"quorum = 0: input should be greater than 0 or 'all'$"),
        ({"replicas": 2}, "replicas = 2: input should be 0 or 1"),
        ({"plane": "memory", "address": "10.0.0.1"}, "'10.0.0.1' has no effect on plane 'memory'"),
        ({"address": "0.0.0.0"}, r"parameter_server\.address = '0\.0\.0\.0' is no address to join"),
        ({"plane": "pigeon"}, "plane = 'pigeon'"),
        ({"shards": 2}, "key 'parameter_server.shards' is unknown"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_one_clear_line(
    section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**section)


def test_servers_belong_to_one_strategy() -> None:
    with pytest.raises(ConfigError, match="servers has no effect with strategy 'all_reduce'"):
        job(name="all_reduce", servers=2)
    assert not strategy.has_servers(job(name="all_reduce"))
    assert strategy.has_servers(job(workers=1))


@pytest.mark.parametrize(
    ("section", "key", "value", "own"),
    [
        ("sharded", "level", "gradients", "sharded"),
        ("pipeline", "micro", 2, "pipeline"),
        ("tensor", "plan", {"a": "rows"}, "tensor"),
        ("parameter_server", "servers", 2, "parameter_server"),
    ],
)
def test_a_section_with_a_strategys_name_is_for_that_one_alone(
    section: str, key: str, value: Any, own: str
) -> None:
    values = {"workers": 2, section: {key: value}}
    assert strategy.remarks(job_from(values | {"strategy": own}, checks=[strategy.check])) == []
    with pytest.raises(
        ConfigError, match=rf"{section}\.{key} has no effect with strategy 'all_red"
    ):
        job_from(values | {"strategy": "all_reduce"}, checks=[strategy.check])
    # A run that goes on with another strategy forgets it.
    assert rearranged({"strategy": "all_reduce"})[section] == {}
    assert section not in rearranged({"strategy": own}) | rearranged({"workers": 2})


def test_what_is_for_members_of_any_strategy_is_remarked_on_where_there_are_none() -> None:
    values: dict[str, Any] = {"sync": {"deadline": 9.0}, "elastic": {"wait": 9.0}}
    told = strategy.remarks(job_from(values, checks=[strategy.check]))
    assert told == [f"{key} has no effect with strategy 'single'" for key in IDLE]
    several = job_from(values | {"strategy": "tensor", "workers": 2}, checks=[strategy.check])
    assert strategy.remarks(several) == ["elastic.wait has no effect with strategy 'tensor'"]
    assert strategy.remarks(job()) == []


def test_nothing_else_is_elastic_where_nothing_is() -> None:
    values = {"strategy": "all_reduce", "workers": 2, "elastic": {"enabled": False, "wait": 9.0}}
    with pytest.raises(ConfigError, match=r"elastic\.wait has no effect where elastic\.enabled is"):
        job_from(values)


def test_more_pieces_than_samples_are_refused() -> None:
    values: dict[str, Any] = {"strategy": "pipeline", "workers": 4, "batch_size": 9}
    values |= {"mesh": {"data": 2, "pipeline": 2}, "pipeline": {"micro": 5}}
    assert job_from(values, checks=[strategy.check])
    with pytest.raises(ConfigError, match=r"pipeline\.micro = 5, but no more than 3 samples"):
        job_from(values | {"accumulate": 2}, checks=[strategy.check])


@pytest.mark.parametrize(("clip", "quorum"), [({"norm": 1.0}, None), ({"value": 1.0}, 2)])
def test_stale_gradients_are_compensated_before_they_are_clipped_together_or_not_at_all(
    clip: dict[str, float], quorum: int | None
) -> None:
    section = {"staleness": 2, "compensate": 0.5, "quorum": quorum}
    values = {"strategy": "parameter_server", "workers": 3, "parameter_server": section}
    assert job_from(values | {"clip": clip}, checks=[strategy.check])
    with pytest.raises(ConfigError, match=r"compensate has no effect where clip\.norm is set and"):
        job_from(values | {"clip": {"norm": 1.0}, "parameter_server": section | {"quorum": 2}})


def test_trainers_can_always_do_without_each_other() -> None:
    values = {"strategy": "parameter_server", "elastic": {"enabled": False}}
    with pytest.raises(ConfigError, match=r"elastic\.enabled = false has no effect"):
        job_from(values, checks=[strategy.check])


def test_a_batch_has_a_sample_for_everybody_who_makes_an_update() -> None:
    values: dict[str, Any] = {"strategy": "parameter_server", "workers": 4, "batch_size": 3}
    with pytest.raises(ConfigError, match="4 members share each batch"):
        job_from(values, checks=[strategy.check])
    apart = values | {"parameter_server": {"staleness": 2}}
    assert job_from(apart, checks=[strategy.check]).batch_size == 3


def test_the_optimizer_is_the_servers() -> None:
    task = Task(model=lambda: None, loss=lambda *_: None, optimizer=lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="it is the servers that apply gradients"):
        strategy.check_task(job(), task)
    strategy.check_task(job(name="all_reduce"), task)


def test_how_updates_are_judged_has_no_effect_where_they_are_not() -> None:
    judged = {"parameter_server": {"merit": {"policy": "reject", "samples": 64}}}
    values: dict[str, Any] = {"strategy": "parameter_server", **judged}
    assert job_from(values, checks=[strategy.check]).parameter_server.merit.every == 4
    del judged["parameter_server"]["merit"]["policy"]
    with pytest.raises(ConfigError, match=r"merit\.samples has no effect where nobody is judged"):
        job_from(values, checks=[strategy.check])


def test_updates_are_judged_by_held_out_samples() -> None:
    values: dict[str, Any] = {
        "strategy": "parameter_server",
        "parameter_server": {"merit": {"policy": "weigh"}},
    }
    judged = job_from(values, checks=[strategy.check])
    task = Task(model=lambda: None, loss=lambda *_: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="merit needs held-out samples, and this task has none"):
        strategy.check_task(judged, task)
    task.valid = {"x": [1.0]}
    strategy.check_task(judged, task)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({}, "staleness"),
        ({"staleness": 1, "quorum": 2}, "quorum"),
        ({"staleness": 1, "replicas": 1}, "replicas"),
        ({"staleness": 1, "compensate": 0.1}, "compensate"),
        ({"staleness": 1, "merit": {"policy": "reject"}}, "merit"),
        ({"staleness": 1, "plane": "tcp"}, "plane"),
    ],
)
def test_live_weights_are_for_trainers_of_one_machine_that_need_no_version(
    section: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"weights = 'live' does not go with this {key}"):
        job(weights="live", **section)
    assert job(weights="live", staleness="none").parameter_server.weights == "live"
