"""Whole runs whose bucket fails under one step: what was committed stays, and the same command continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nxdt_plugin_s3.storage import S3Storage

from nxdt_core import checkpoint
from nxdt_core.config import load
from nxdt_core.errors.checkpoints import StorageError
from nxdt_core.run import train
from tests.http_faults import FaultProxy, Request, refuse, reset
from tests.s3_server import refuse_s3
from tests.sampling import sampled
from tests.train.small import SMALL

LASTING = {
    "expired": (refuse_s3(400, "ExpiredToken", "The provided token has expired."), "NXDT-S102"),
    "denied": (refuse_s3(403, "AccessDenied"), "NXDT-S103"),
    "slow down": (refuse_s3(503, "SlowDown"), "NXDT-S108"),
    "no body": (refuse(503), "NXDT-S108"),
    "reset": (reset, "NXDT-S106"),
}
CASES = [(name, background) for name in LASTING for background in ("true", "false")]


def run(uri: str, proxy: FaultProxy, where: Path, *more: str) -> Any:
    settings = (
        f"exp_manager.exp_dir={where}",
        f"checkpoint.uri={uri}",
        f"checkpoint.storage.endpoint_url={proxy.url}",
        "checkpoint.storage.deadline_s=1",
        "checkpoint.every_n_train_steps=2",
        "checkpoint.save_top_k=-1",
        "checkpoint.resume_if_exists=true",
        "exp_manager.create_tensorboard_logger=false",
    )
    return train(load("recipe:llama-tiny", [*SMALL, *settings, *more]))


def of_step_4(request: Request) -> bool:
    return "step-00000004" in request.target


def committed(storage: S3Storage) -> list[int]:
    return [each.step for each in checkpoint.list_checkpoints(storage) if each.state == "committed"]


def test_a_failure_under_one_step_ends_the_run_and_loses_nothing(
    request: pytest.FixtureRequest, s3_uri: str, config: Any, proxy: FaultProxy, tmp_path: Path
) -> None:
    for name, background in sampled(request.config, CASES, 1, of=request.node.name):
        fault, code = LASTING[name]
        uri = f"{s3_uri}/{name.replace(' ', '-')}-{background}"
        where, storage = tmp_path / name / background, S3Storage(uri, config)
        proxy.clear()
        proxy.inject(fault, times=None, matching=of_step_4)
        with pytest.raises(StorageError) as caught:
            run(uri, proxy, where, "trainer.max_steps=100000", f"checkpoint.async_save={background}")
        assert caught.value.code == code, name
        assert committed(storage) == [2]
        assert checkpoint.verify(storage, 2) == []
        proxy.clear()
        assert run(uri, proxy, where, "trainer.max_steps=5").step == 5
        assert committed(storage) == [2, 4, 5]


@pytest.mark.slow
def test_bursts_of_failures_delay_a_run_and_nothing_else(
    s3_uri: str, config: Any, proxy: FaultProxy, tmp_path: Path
) -> None:
    """By default ``test_s3_faults.py`` repeats each request after such failures, and the test above resumes a run."""
    proxy.inject(refuse_s3(503, "SlowDown"), times=3)
    proxy.inject(reset, times=3, matching=of_step_4)
    assert run(s3_uri, proxy, tmp_path, "trainer.max_steps=4", "checkpoint.storage.deadline_s=60").step == 4
    proxy.inject(refuse_s3(503, "SlowDown"), times=3, matching=lambda request: request.method == "GET")
    assert run(s3_uri, proxy, tmp_path, "trainer.max_steps=5", "checkpoint.storage.deadline_s=60").step == 5
    assert committed(S3Storage(s3_uri, config)) == [2, 4, 5]
