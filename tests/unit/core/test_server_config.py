"""The dial of the parameter server: what means something, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from echelon import strategy
from echelon.core.config import ParameterServerSection, job_from
from echelon.core.errors import ConfigError
from echelon.core.task import Task
from echelon.loop import rearranged


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
        ({"staleness": -1}, r"staleness = -1: .*greater than or equal to 0"),
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


def test_a_run_that_goes_on_without_servers_forgets_them() -> None:
    assert rearranged({"strategy": "single"})["parameter_server"] == {}
    assert "parameter_server" not in rearranged({"strategy": "parameter_server"})
    assert "parameter_server" not in rearranged({"workers": 2})


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
