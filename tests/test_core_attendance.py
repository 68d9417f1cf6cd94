"""What a chief says of those who work with it."""

from paceline.core.attendance import Attendance


def test_who_is_missing_is_said_once_and_again_when_something_begins() -> None:
    found = Attendance(["worker:0", "worker:1"], {})
    assert found.missing(["worker:0", "worker:1"]) == []
    assert found.missing(["worker:0"]) == ["missing: worker:1"]
    assert found.missing(["worker:0", "session:0"]) == []
    assert found.missing(["worker:0"], " as it begins") == ["missing as it begins: worker:1"]
    assert found.missing([]) == ["missing: worker:0, worker:1"]
    assert found.missing(["worker:1", "worker:0"]) == ["everybody is here"]
    assert found.missing(["worker:1", "worker:0"], " as it begins") == []


def test_each_failure_is_said_once_however_often_one_looks() -> None:
    found = Attendance(["worker:0", "worker:1"], {"worker:1": [1, "was lost"]})
    assert found.failures({"worker:1": [1, "was lost"]}) == []
    now = {"worker:0": [1, "has failed: E: x"], "worker:1": [3, "was lost"]}
    assert found.failures(now) == ["worker:0 has failed: E: x", "worker:1 was lost (2 times since)"]
    assert found.failures(now) == []
    # A server that was started again has counted anew.
    assert found.failures({"worker:1": [1, "was lost"]}) == []
    assert found.ended == {"worker:0": 1, "worker:1": 3}
