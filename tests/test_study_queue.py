"""The queue of long studies: it goes on where it was, and past what fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHILD = """
import json, pathlib, signal, sys, time
kind, out = sys.argv[1], pathlib.Path(sys.argv[2])
steps = out / ".checkpoint"
count = int(steps.read_text()) if steps.exists() else 0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
if kind == "fails":
    sys.exit("this study has bad settings")
while count < (3 if kind == "short" else 1000):
    count += 1
    time.sleep(0.02)
    new = out / ".new"
    new.write_text(str(count))
    new.replace(steps)
(out / f"{kind}.json").write_text(json.dumps({"count": count}))
"""


@pytest.fixture
def queue(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import study_queue

    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(study_queue, "COMMAND", [sys.executable, str(child)])
    monkeypatch.setattr(study_queue, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(study_queue, "LOOK_SECONDS", 0.05)
    return study_queue


def listed(tmp_path, *kinds):
    path = tmp_path / "list.json"
    entries = [{"name": kind, "arguments": [kind, "OUT"], "hours": 1, "results": "here"} for kind in kinds]
    path.write_text(json.dumps(entries))
    return path


def run(queue, monkeypatch, tmp_path, path, *more):
    monkeypatch.setattr(sys, "argv", ["queue", "--list", str(path), "--state", str(tmp_path / "state"), *more])
    before = signal.getsignal(signal.SIGTERM)
    try:
        return queue.main()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_studies_are_done_once_and_their_results_copied(queue, monkeypatch, tmp_path, capsys):
    path = listed(tmp_path, "fails", "short")
    assert run(queue, monkeypatch, tmp_path, path) == 0
    said = capsys.readouterr().out
    assert "fails failed (1): …this study has bad settings" in said
    assert "| short | done |" in said
    assert json.loads((tmp_path / "results" / "here" / "short.json").read_text()) == {"count": 3}
    assert list((tmp_path / "results" / "here").iterdir()) == [tmp_path / "results" / "here" / "short.json"]
    assert run(queue, monkeypatch, tmp_path, path) == 0
    assert "short: begun" not in capsys.readouterr().out  # but what failed is tried again
    assert run(queue, monkeypatch, tmp_path, path, "--show") == 0
    assert "| fails | failed |" in capsys.readouterr().out


def test_a_stopped_queue_goes_on(queue, tmp_path):
    path = listed(tmp_path, "long")
    script = (
        "import sys; sys.path.insert(0, {!r}); import study_queue as q; from pathlib import Path; "
        "q.COMMAND = {!r}; q.RESULTS = Path({!r}); q.LOOK_SECONDS = 0.05; sys.argv = {!r}; sys.exit(q.main())"
    ).format(
        str(ROOT / "benchmarks"),
        queue.COMMAND,
        str(tmp_path / "results"),
        ["queue", "--list", str(path), "--state", str(tmp_path / "state")],
    )
    counts = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        before = counts[-1] if counts else 0
        checkpoint = tmp_path / "state" / "long" / ".checkpoint"
        for _ in range(600):
            if checkpoint.exists() and int(checkpoint.read_text()) > before + 3:
                break
            time.sleep(0.05)
        second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert "another queue works in" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert "stopped; the same command goes on" in process.communicate(timeout=60)[0]
        assert process.returncode == 130
        counts.append(int(checkpoint.read_text()))
    assert counts[1] > counts[0] > 3
    record = json.loads((tmp_path / "state" / "record.json").read_text())
    assert record["long"]["end"] == "stopped"
    assert record["long"]["seconds"] > 0


def test_what_is_damaged_is_named_and_passed_over(queue, monkeypatch, tmp_path, capsys):
    path = listed(tmp_path, "short")
    entries = json.loads(path.read_text())
    bad = [3, {"name": "x"}, {**entries[0], "name": "../x"}, {**entries[0], "results": "../x"}]
    path.write_text(json.dumps([*bad, *entries]))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "record.json").write_text("{half")
    assert run(queue, monkeypatch, tmp_path, path) == 0
    said = capsys.readouterr().out
    assert said.count("is passed over") == 4
    assert "moved to record.damaged" in said
    assert "| short | done |" in said
    path.write_text("{}")
    assert run(queue, monkeypatch, tmp_path, path) == 2
    assert "expected a list of studies" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_fails_one_study_alone(queue, monkeypatch, tmp_path, capsys):
    path = listed(tmp_path, "long", "short")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "long").write_text("a file where the study's folder should be")
    assert run(queue, monkeypatch, tmp_path, path) == 0
    said = capsys.readouterr().out
    assert "long: failed" in said
    assert "short: done" in said


def test_the_committed_list_can_be_read(queue, capsys):
    assert queue.studies(queue.LIST)
    assert capsys.readouterr().out == ""
