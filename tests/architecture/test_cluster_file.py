"""cluster.yaml is accepted by the installed Ray (offline), and says what MoETune needs of a cluster."""

import copy
from typing import Any

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config
from ruamel.yaml import YAML

from tests.architecture.project import ROOT

CLUSTER = ROOT / "cluster.yaml"


@pytest.fixture
def cluster() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(CLUSTER.read_text()))


def accept(config: dict[str, Any]) -> None:
    """Ray's own check; it needs the prepared form. Raises on a key it does not know."""
    validate_config(prepare_config(copy.deepcopy(config)))


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    accept(cluster)


def test_ray_refuses_a_key_of_ours(cluster: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="moetune"):  # jsonschema's error, which Ray re-raises as its own class
        accept({**cluster, "moetune": {"workers": 2}})


def test_every_node_is_set_up_from_the_pins(cluster: dict[str, Any]) -> None:
    assert cluster["setup_commands"] == ["cd ~/moetune && scripts/bootstrap.sh run"]
    assert cluster["file_mounts"] == {"~/moetune": "."}


def test_ray_starts_from_that_environment_with_its_dashboard_on_loopback(cluster: dict[str, Any]) -> None:
    head, workers = cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]
    assert all("~/moetune/.venv/bin/ray" in command for command in head + workers)
    assert "--dashboard-host=127.0.0.1" in head[-1]
    assert "--include-dashboard" not in head[-1]
    assert all("RAY_USAGE_STATS_ENABLED=0" in commands[-1] for commands in (head, workers))
