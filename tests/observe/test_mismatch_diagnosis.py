"""`libra diagnose` on records of steps: its threshold, the parts it names, and what it makes of
damage and of hostile text."""

import pytest
from click.testing import CliRunner

from libra.cli.main import cli
from libra.errors import ConfigError, RunDirectoryError
from libra.facts import EngineQuarantined, Line, VersionRechecked
from libra.observe.mismatch_diagnosis import diagnose
from libra.seals import sealed_text
from libra.store.event_log import EventLog


def part(k3, tokens=100):
    return {"tokens": tokens, "k3": k3, "mean_abs": k3**0.5, "max_abs": 1.0}


@pytest.fixture
def make_run(tmp_path):
    """A run directory with records of steps: each is k3 of all tokens, and of engines by name."""

    def make(*steps, config="", tokens=100):
        run = tmp_path / "run"
        (run / "steps").mkdir(parents=True)
        (run / "config.resolved.yaml").write_text(config or "trainer: {}\n")
        for number, (k3, engines) in enumerate(steps):
            parts = {f"engine {name}": part(value, tokens) for name, value in engines.items()}
            worst = [
                {"trajectory": "train-0-0-0", "token": 7, "token_id": 5, "engine": name, "rollout": -1.0, "trainer": -2.0}
                for name in engines
            ]  # fmt: skip
            record = {
                "step": number, "mismatch_tokens": 1000, "mismatch_k3": k3, "mismatch_mean_abs": k3**0.5,
                "mismatch_parts": parts, "mismatch_worst": worst,
            }  # fmt: skip
            (run / "steps" / f"step-{number:06d}.json").write_text(sealed_text(record))
        return run

    return make


CALM = (1e-12, {"a": 1e-12, "b": 1e-12})


def test_the_first_step_above_is_named_by_the_engine_that_is(make_run):
    run = make_run(*[CALM] * 5, (2e-11, {"a": 1e-12, "b": 4e-10}), CALM, (1e-9, {"a": 1e-12, "b": 2e-9}))
    found = diagnose(run)
    assert (found.first, found.last, found.steps) == (5, 7, 8)
    assert found.threshold == pytest.approx(1e-10)
    assert [(each.name, each.first_step) for each in found.parts] == [("engine b", 5), ("all tokens", 7)]
    assert {token.engine for token in found.tokens} == {"b"} and found.tokens[0].text is None


def test_few_tokens_are_no_sign(make_run):
    run = make_run(*[CALM] * 5, (1e-12, {"a": 1e-12, "b": 1.0}), tokens=10)
    assert diagnose(run).first is None


def test_the_threshold_is_the_given_one_or_the_alarm_of_the_run(make_run):
    run = make_run(*[CALM] * 5, (1e-4, {}), config="trainer: {mismatch_args: {k3: 1.0e-3}}\n")
    assert diagnose(run).first is None and diagnose(run).threshold == 1e-3
    assert diagnose(run, above=1e-5).first == 5
    done = CliRunner().invoke(cli, ["diagnose", str(run)])
    assert done.exit_code == 0 and "no mismatch" in done.output


def test_layers_are_those_of_failed_checks_since_then(make_run):
    run = make_run(*[CALM] * 5, (1e-3, {"b": 1e-3}), (1e-3, {"b": 1e-3}))
    log = EventLog(run / "events.jsonl")
    check = {"method": "projections", "tolerance": 1e-5, "detail": ""}
    log.write(Line("run", 0.0, VersionRechecked(**check, version=3, worker="b", passed=False, layer="early", gap=1.0)))
    log.write(Line("run", 0.0, VersionRechecked(**check, version=5, worker="a", passed=True, layer="", gap=0.0)))
    failed = {"worker": "b", "passed": False, "layer": "q_proj", "gap": 0.5}
    for version in (5, 6):
        log.write(Line("run", 0.0, VersionRechecked(**check, version=version, **failed)))
    log.write(Line("run", 0.0, EngineQuarantined(**check, version=6, worker="b", layer="(all)", gap=None, out=False)))
    log.close()
    first, second = diagnose(run).layers
    assert (first.worker, first.layer, first.version, first.last_version, first.checks) == ("b", "q_proj", 5, 6, 2)
    assert (second.layer, second.gap, second.loading) == ("(all)", None, True)
    done = CliRunner().invoke(cli, ["diagnose", str(run)])
    assert done.exit_code == 1 and "q_proj" in done.output


def test_damage_is_named_and_left_out(make_run):
    run = make_run(*[CALM] * 6, (1e-3, {"b": 1e-3}))
    path = run / "steps" / "step-000003.json"
    path.write_text(path.read_text().replace("1e-12", "1e-02"))
    (run / "events.jsonl").write_text("no event\n{}\n")
    found = diagnose(run)
    assert found.damaged == ["step-000003.json"] and found.first == 6
    assert "step-000003.json is damaged" in CliRunner().invoke(cli, ["diagnose", str(run)]).output


def test_names_that_would_move_the_cursor_are_shown_as_text(make_run):
    run = make_run(*[CALM] * 5, (1e-3, {"b\x1b[2J": 1e-3}))
    output = CliRunner().invoke(cli, ["diagnose", str(run)]).output
    assert "\x1b" not in output and "engine b" in output


def test_no_run_and_no_record_are_errors_that_say_so(make_run, tmp_path):
    with pytest.raises(RunDirectoryError, match="none"):
        diagnose(tmp_path / "none")
    with pytest.raises(ConfigError):
        diagnose(make_run())
