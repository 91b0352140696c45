"""How a failure of ranks becomes one line."""

from dataclasses import dataclass
from typing import Any

from moeserve.config import ConfigError
from moeserve_launch.errors import describe_failure, is_user_error, record_user_error


@dataclass
class Failure:
    """The fields of torchelastic's ProcessFailure that are read."""

    exitcode: int
    timestamp: int
    message: Any = ""

    def signal_name(self) -> str:
        return "SIGKILL"


def test_a_users_mistake_goes_before_what_followed_from_it() -> None:
    mistake = {"message": "no such tensor", "extraInfo": {"user_error": True, "timestamp": "9"}}
    failures = {0: Failure(-9, 5), 1: Failure(1, 9, mistake)}
    assert is_user_error(failures)
    assert describe_failure(failures) == "no such tensor"


def test_otherwise_the_first_failure_is_told() -> None:
    failures = {0: Failure(1, 7), 1: Failure(-9, 5)}
    assert not is_user_error(failures)
    assert describe_failure(failures) == "rank 1 was ended by SIGKILL"
    assert describe_failure({2: Failure(3, 1)}) == "rank 2 ended with exit code 3"


def test_what_a_rank_records_is_what_the_agent_reads(monkeypatch: Any, tmp_path: Any) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    record_user_error(ConfigError("port 80 is\n in use"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert is_user_error({0: failure})
    assert describe_failure({0: failure}) == "port 80 is in use"
