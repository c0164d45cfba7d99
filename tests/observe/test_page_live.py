"""The Libra page of a scheduler with Libra's own plugin, in a real browser, against the run's event log."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from distributed import Client, Reschedule, Worker, get_worker

from libra import keys
from libra.events import from_dict
from libra.observe.metrics import read_metrics
from libra.observe.worker_time import worker_times
from libra.scheduler import LibraPlugin, RunRegistration
from libra.scheduler.role_plugin import RolePlugin
from libra.store.event_log import read_events
from libra.types import Phase

DONE: dict[str, int] = {}
"""Quanta finished so far, by key; workers of the emulation run in this process."""


def shown_by(events):
    """What the page has to say of a run with these events, by ``data-libra`` name."""
    named = {}
    for event in events:
        named.setdefault(event["name"], []).append(event)
    quanta = Counter(event["phase"] for event in named["quantum_finished"])
    groups = [event for event in named["group_committed"] if event["split"] == "train"]
    return {
        "quanta_rollout": f"{quanta['ROLLOUT']:,}",
        "quanta_tool": f"{quanta['TOOL']:,}",
        "tokens": f"{sum(event['tokens'] for event in named['quantum_finished']):,}",
        "groups": f"{len(groups):,}",
        "version": f"v{max(event['version'] for event in named['version_published'])}",
        "reward": f"{named['iteration_finished'][-1]['reward']:.3f}",
        "iteration": f"{max(event['iteration'] for event in named['gate_opened'])}",
    }


def check_time(row, events, trainers):
    """The page's worker time is what the event log says."""
    times = worker_times(map(from_dict, events), trainers).times(row["until_s"])
    assert row["busy_frac"] == pytest.approx(times.busy_frac)
    assert row["shares"] == pytest.approx(times.shares)
    assert {each["worker"]: each["seconds"] for each in row["workers"]} == {
        each.worker: pytest.approx(dict(each.seconds)) for each in times.workers
    }


async def compare(page, expected):
    """The rendered page says exactly this; waits for it, since a page follows its run by half a second."""
    for name, value in expected.items():
        await page.until(f"deepQuery('[data-libra={name}]')[0].innerText == '{value}'")
    assert {name: await page.shown(name) for name in expected} == expected
    assert page.exceptions == []


# -- Libra's plugin on a real scheduler, trajectories emulated (they generate nothing) --------------------------------


def say(run, messages):
    """Task that sends what workers of a run report."""
    for message in messages:
        get_worker().log_event("libra", {"run": run, "epoch": 0, **message})


def gate(run, iteration):
    return iteration


async def quantum(key, run, length):
    """Stand-in for a trajectory: ``length`` quanta, generations and actions in turn, 7 tokens each generation."""
    done = DONE.get(key, 0)
    DONE[key] = done + 1
    phase, more = (Phase.TOOL if done % 2 else Phase.ROLLOUT), done + 1 < length
    following = Phase.ROLLOUT if done % 2 else Phase.TOOL
    message = {
        "kind": "quantum", "run": run, "epoch": 0, "key": key, "quantum": done, "end": "" if more else "answered",
        "next": str(following) if more else "", "goes_on": False, "failure": "none", "detail": "", "version": 0, "status": "ok",
        "tokens": 7 if phase is Phase.ROLLOUT else 0, "tool": "calculator" if phase is Phase.TOOL else "",
        "payload_tokens": 3, "context_tokens": 10 * (done + 1), "start_s": 1000.0 + done, "stop_s": 1000.5 + done,
    }  # fmt: skip
    get_worker().log_event("libra", message)
    if more:
        raise Reschedule
    return length


@contextlib.asynccontextmanager
async def emulated_cluster(live_scheduler):
    rollout, tool = {keys.ROLLOUT: 4, keys.GRADE: 4, keys.TRAIN: 1}, {keys.TOOL: 2, keys.COMMIT: 1}
    async with (
        live_scheduler() as scheduler,
        Worker(scheduler.address, nthreads=12, name="rollout-0", resources=rollout, dashboard=False),
        Worker(scheduler.address, nthreads=12, name="tool-0", resources=tool, dashboard=False),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        await client.register_plugin(LibraPlugin())
        yield SimpleNamespace(scheduler=scheduler, client=client, plugin=scheduler.plugins[LibraPlugin.name])


def test_page_of_the_plugin_agrees_with_the_event_log(live_scheduler, chromium, tmp_path):
    DONE.clear()
    lengths = [1, 3, 5, 5, 7, 2, 9, 1, 4]
    generations, actions = sum((n + 1) // 2 for n in lengths), sum(n // 2 for n in lengths)

    async def main():
        async with emulated_cluster(live_scheduler) as live:
            answer = live.plugin.register_run(RunRegistration("demo", 0, str(tmp_path), 1, 4, 2, True))
            assert "error" not in answer
            published = {"kind": "published", "version": 0, "digest": "d0", "num_bytes": 10}
            await live.client.submit(say, "demo", [published], key="say-0")
            opened = keys.make("gate", (0,), epoch=0, run="demo")
            assert await live.client.submit(gate, "demo", 0, key=opened, resources={keys.PARK: 1}) == 0
            named = {keys.make("trajectory", (0, 0, i), epoch=0, run="demo"): n for i, n in enumerate(lengths)}
            tasks = [
                live.client.submit(quantum, key, "demo", n, key=key, resources={keys.PARK: 1})
                for key, n in named.items()
            ]
            assert await live.client.gather(tasks) == lengths
            rollout = next(a for a, w in live.scheduler.workers.items() if w.name == "rollout-0")
            reports = [
                *(
                    {"kind": "group", "split": split, "iteration": 0, "group": g, "oldest_version": 0, "reward": 0.5,
                     "failures": {"tool": g}}
                    for split, g in (("train", 0), ("train", 1), ("eval", 2))
                ),
                {"kind": "iteration", "iteration": 0, "reward": 0.4375, "lag": 0.25},
                published | {"version": 1, "digest": "d1"},
                {"kind": "served", "version": 1, "name": "rollout-0", "address": rollout, "load_s": 0.1,
                 "check": {"method": "columns", "gap": 0.0, "tolerance": 0.0, "moved_nats": 0.1, "layers": 1,
                           "changed_layers": 1, "smallest_change": 0.0, "measured": True, "check_s": 0.1,
                           "stopped_s": 0.1}},
            ]  # fmt: skip
            await live.client.submit(say, "demo", reports, key="say-1")
            async with chromium(f"http://127.0.0.1:{live.scheduler.http_server.port}/libra") as page:
                live.plugin.runs["demo"].log.flush()
                logged = read_events(tmp_path / "events.jsonl").events
                expected = shown_by(logged)
                check_time(live.plugin.snapshots()[0]["time"], logged, ())
                assert re.fullmatch(r"\d+ %", await page.shown("busy"))
                assert expected["quanta_rollout"] == str(generations)
                assert expected["quanta_tool"] == str(actions)
                await compare(page, expected)
                assert (await page.columns("libra_rewards"))["reward"] == [0.4375]
                assert (await page.columns("libra_lag"))["lag"] == [0.25]
                assert set((await page.columns("libra_samples"))["used_rollout"]) <= {0, 1, 2, 3, 4}
            return await live.client.get_task_stream()

    rows = asyncio.run(main())
    drawn = Counter(row["key"][0] for row in rows if not isinstance(row["key"], str))
    assert drawn == {"generate": generations, "calculator": actions}
    assert not any("trajectory" in row["key"] for row in rows if isinstance(row["key"], str))


def test_page_follows_a_change_of_roles_and_a_worker_that_cannot_be_set_up(live_scheduler, chromium, tmp_path):
    async def cells(page, name, *expected):
        """The row says this, at these places (None: anything)."""
        row = f"deepQuery('[data-libra={name}]')[0].innerText.split('\\t')"
        for place, text in enumerate(expected):
            if text is not None:
                await page.until(f"{row}[{place}] == '{text}'")

    async def main():
        async with emulated_cluster(live_scheduler) as live:
            assert "error" not in live.plugin.register_run(RunRegistration("demo", 0, str(tmp_path), 1, 4, 2, True))
            await live.client.register_plugin(RolePlugin())
            roles = live.scheduler.plugins[RolePlugin.name]
            assert roles.register_roles("demo", 0) == {}
            supply, told = {keys.ROLLOUT: 2, keys.HYBRID: 1}, asyncio.Queue()
            async with (
                Worker(live.scheduler.address, name="rollout-1", resources=supply, dashboard=False) as hybrid,
                chromium(f"http://127.0.0.1:{live.scheduler.http_server.port}/libra") as page,
            ):
                hybrid.stream_handlers["libra-role"] = lambda **message: told.put_nowait(message)
                assert await page.shown("run") == "demo"
                assert await page.evaluate("deepQuery('[data-libra^=role]').length") == 0
                address = hybrid.address
                member = {"kind": "role_member", "run": "demo", "epoch": 0, "name": "rollout-1", "address": address}
                hybrid.log_event("libra", member | {"tp": 1, "slots": 2, "share": {}})
                await cells(page, "role-rollout-1", "rollout-1", "rollout TP 1", "resupplied", None, "", "0", "–", "")
                generation = roles.set_roles("demo", 0, {"rollout-1": {"role": "train"}})["generation"]
                for stage in ("draining", "sleeping", "taking_up"):
                    change = ("rollout TP 1 → train", f"{generation}", "–", "asked for")
                    await cells(page, "role-rollout-1", "rollout-1", "train", stage, None, *change)
                    message = await asyncio.wait_for(told.get(), 60)
                    assert (message["stage"], message["generation"]) == (stage, generation)
                    done = {"kind": "role_stage", "run": "demo", "epoch": 0, "name": "rollout-1", "seconds": 0.25}
                    hybrid.log_event("libra", done | {"stage": stage, "generation": generation})
                await cells(page, "role-rollout-1", None, "train", "resupplied", None, "", f"{generation}")
                took = next(row["seconds"] for row in roles.roles("demo", 0))
                await cells(page, "role-rollout-1", *[None] * 6, f"{took:,.2f} s")

                live.scheduler.worker_plugins[keys.host_name("demo")] = b""  # as if those that join set up their part
                live.plugin.add_worker(live.scheduler, address)
                await cells(page, "not-ready-rollout-1", "rollout-1", "setting_up")
                said = {"kind": "not_ready", "run": "demo", "epoch": 0, "name": "rollout-1", "address": address}
                hybrid.log_event("libra", said | {"detail": "OSError: no <b>space</b>"})
                await cells(page, "not-ready-rollout-1", "rollout-1", "failed", None, "OSError: no <b>space</b>")
                hybrid.log_event("libra", said | {"kind": "ready"})
                await page.until("deepQuery('[data-libra=not-ready-rollout-1]').length == 0")
                roles.end_roles("demo")
                await page.until("deepQuery('[data-libra^=role]').length == 0")
                assert page.exceptions == []
                del live.scheduler.worker_plugins[keys.host_name("demo")]

    asyncio.run(main())


# -- a whole run: model, engine, tools, trainer, processes -----------------------------------------------------------


@pytest.mark.timeout(240)
def test_page_of_a_real_run_agrees_with_its_event_log(chromium, tmp_path):
    from libra import Session
    from libra.config import config_from_dict

    config = config_from_dict(
        {
            "run": {"name": "page", "dir": str(tmp_path), "iterations": 2, "eta": 1},
            "model": {"path": "libra/tiny-arithmetic"},
            "rollout": {"slots": 16, "max_new_tokens": 32, "max_turns": 4, "max_context_tokens": 512},
            "trainer": {"prompts": 2, "group_size": 2},
            "cluster": {"dashboard_port": 0, "threads": 1},
            "observe": {"tensorboard": False, "progress": False},
        }
    )
    with Session(config) as session:
        figures = list(session.iterations())
        plugin = session.client.cluster.scheduler.plugins[LibraPlugin.name]

        async def look():
            async with chromium(session.dashboard) as page:
                state = plugin.runs["page"]
                (snapshot,) = session.client.sync(snapshots, plugin)
                session.client.sync(flush, state.log)
                logged = read_events(session.directory / "events.jsonl").events
                expected = shown_by(logged)
                check_time(snapshot["time"], logged, ("train-0",))
                await compare(page, expected)
                outcomes, rewards = await page.columns("libra_outcomes"), await page.columns("libra_rewards")
                return expected, outcomes, rewards, await page.screenshot()

        expected, outcomes, rewards, png = asyncio.run(look())
    (tmp_path / "libra.png").write_bytes(png)  # to look at; pytest keeps the last three
    assert all(0.0 <= line["forecast_skill"] <= 1.0 for line in read_metrics(session.directory))
    assert 0 < len(outcomes["tokens"]) <= 8
    assert expected["version"] == "v2"
    assert expected["groups"] == "4"
    assert rewards["reward"] == [values["reward"] for values in figures]


async def snapshots(plugin):
    """Runs on the scheduler's event loop."""
    return plugin.snapshots()


async def flush(log):
    """Runs on the scheduler's event loop, which owns the log."""
    log.flush()
