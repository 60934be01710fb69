"""The GPU check's report: written at once, whole wherever it is cut off, and taken over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gpu.report import Report
from tests.gpu.results import Results, Skipped

FACTS = {"device": "one", "versions": {"torch": "2"}, "source": "abc", "date": "now"}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_lines_are_there_before_the_next_thing_starts(tmp_path: Path) -> None:
    path = tmp_path / "events"
    results = Results(path, {"known": None})
    seen = []

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def fails() -> None:
        seen.append(lines()[-1])
        raise LookupError("gone")

    def skips() -> None:
        seen.append(lines()[-1])
        raise Skipped("no tool")

    results.check("known", fails)
    results.check("first", lambda: {"x": 1})
    results.check("second", fails)
    results.check("third", skips)
    results.finish()
    assert seen == [{"begin": "second"}, {"begin": "third"}]
    found = {line["name"]: (line["state"], line["value"]) for line in lines() if "name" in line}
    assert found["first"] == ("passed", {"x": 1})
    assert found["second"][0] == "failed"
    assert "LookupError: gone" in found["second"][1]
    assert found["third"] == ("skipped", "no tool")
    assert "known" not in found
    assert lines()[-1] == {"done": True}


def report_of(path: Path, **facts: Any) -> Report:
    return Report(path, FACTS | facts)


def test_what_an_earlier_file_has_is_not_done_again(tmp_path: Path) -> None:
    """Tasks that are done stay; of the others, what passed."""
    first = report_of(tmp_path / "new" / "first.json")
    good, bad = {"state": "passed", "value": 1}, {"state": "failed", "value": "no"}
    tasks = {
        "whole": {"state": "passed", "results": {"a": good}},
        "absent": {"state": "skipped", "reason": "no tool", "results": {}},
        "broken": {"state": "failed", "reason": "x", "results": {"a": good, "b": bad}},
        "killed": {"state": "running", "results": {"a": good}},
        "late": {"state": "dropped", "results": {}},
    }
    for name, task in tasks.items():
        first.task("part", name).update(task)
    first.write()
    assert [item.name for item in first.path.parent.iterdir()] == ["first.json"]
    second = report_of(tmp_path / "second.json", date="later")
    (line,) = second.take_over([tmp_path / "nothing.json", first.path, first.path])
    assert line.endswith("3 results that hold still")
    assert {name for name in tasks if second.is_done("part", name)} == {"whole", "absent"}
    left = {"state": "left", "results": {"a": good}}
    assert second.task("part", "broken") == left
    assert second.task("part", "killed") == left
    assert second.task("part", "late")["results"] == {}
    # as the code of the check that found it
    second.keep_if("part", "whole", "code")
    second.keep_if("part", "whole", "code")
    assert second.is_done("part", "whole")
    second.keep_if("part", "whole", "other code")
    assert second.task("part", "whole") == {"state": "left", "results": {}, "code": "other code"}


def test_files_of_something_else_give_nothing(tmp_path: Path) -> None:
    for key, value in (("device", "two"), ("source", "d"), ("versions", {"torch": "3"})):
        other = report_of(tmp_path / f"{key}.json", **{key: value})
        other.task("part", "task").update(state="passed", results={"a": {"state": "passed"}})
        other.write()
        report = report_of(tmp_path / "report.json")
        (line,) = report.take_over([other.path])
        assert f"another {key}" in line
        assert report.parts == {}
    for content in ("", "[]", "{}", '{"parts": 3}'):
        (tmp_path / "broken.json").write_text(content)
        report = report_of(tmp_path / "report.json")
        (line,) = report.take_over([tmp_path / "broken.json"])
        assert "cannot be read" in line or "not a report" in line


def test_a_write_that_is_cut_off_leaves_the_file_of_before(tmp_path: Path, monkeypatch) -> None:
    report = report_of(tmp_path / "report.json")
    report.task("part", "task")["state"] = "passed"
    report.write()
    before = read(report.path)
    report.task("part", "task")["state"] = "failed"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    try:
        report.write()
    except KeyboardInterrupt:
        assert read(report.path) == before
    else:
        raise AssertionError("written in place")
