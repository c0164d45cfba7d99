"""`libra page` of a run's files: a log that grows is followed, and the command serves on this machine only."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from libra.observe.recorded_run import RecordedRun


def test_a_log_that_grows_is_followed_and_read_once(made_run):
    log, half = made_run / "events.jsonl", 11
    whole = log.read_bytes().splitlines(keepends=True)
    log.unlink()
    (made_run / "metrics.jsonl").unlink()
    run = RecordedRun(made_run)
    (before,) = run.snapshots()
    assert (before["state"], before["run"], before["tokens"]) == ("new", "made", 0)
    assert before["note"]
    log.write_bytes(b"".join(whole[:half]) + whole[half][:10])  # the writer is in the middle of a line
    (middle,) = run.snapshots()
    assert (middle["note"], middle["tokens"], run.timeline.num_facts) == ("", 5, half)
    assert run.snapshots()[0] is middle
    log.write_bytes(b"".join(whole))
    (after,) = run.snapshots()
    assert (after["tokens"], run.timeline.num_facts) == (15, len(whole))
    assert after == RecordedRun(made_run).snapshots()[0]


def start(*args):
    command = [sys.executable, "-m", "libra", "page", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def status(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.live
def test_the_command_serves_on_this_machine_and_ends_with_one_line(made_run):
    process = start(made_run, "--port", "0")
    try:
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/libra", process.stdout.readline())
        assert status(url) == status(url.removesuffix("libra")) == 200
        assert json.loads(urllib.request.urlopen(f"{url}/state.json", timeout=60).read())[0]["tokens"] == 15
        assert status(url, Host="evil.example") == 403
        assert status(f"{url}/state.json", Origin="http://evil.example") == 403
        other = start(made_run, "--port", re.search(r":(\d+)/", url)[1])
        out, err = other.communicate(timeout=60)
        assert (other.returncode, out, err.count("\n")) == (2, "", 1)
        assert "--port 0" in err
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert f"libra page {made_run}" in out
    finally:
        process.kill()
        process.wait()
