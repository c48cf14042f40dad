"""Files appear complete or not at all, and what killed writers left behind is removed by the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from eigenoise import storage

HANGS = """
    import sys, time
    from eigenoise import storage

    def fill(temporary):
        open(temporary, "w").write("half of ")
        print("writing", flush=True)
        time.sleep(60)

    storage.write(sys.argv[1], fill)
"""


@pytest.mark.skipif(os.name != "posix", reason="locks are posix")
def test_leftovers_of_killed_writers_are_removed_and_files_of_living_ones_kept(tmp_path):
    path = tmp_path / "table.csv"

    def start():
        command = [sys.executable, "-c", textwrap.dedent(HANGS), str(path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "writing\n"
        return writer

    killed, living = start(), start()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(list(tmp_path.iterdir())) == 2
    storage.write_text(path, "whole")
    assert len(list(tmp_path.iterdir())) == 2  # the file and the living writer's
    living.kill()
    living.wait()
    storage.write_text(path, "whole again")
    assert [each.name for each in tmp_path.iterdir()] == ["table.csv"]
    assert path.read_text() == "whole again"
    living.stdout.close()
    killed.stdout.close()
