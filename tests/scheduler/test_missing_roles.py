"""A resource that nobody has is reported once, again with a new cause or after a long time, and when it is back."""

import asyncio

import pytest
from distributed import Worker

from libra import keys
from libra.errors import EngineError
from libra.facts import WorkerReady
from libra.scheduler.missing_roles import REMIND_S, START_S, TELL_AFTER_S, MissingRoles


async def test_missing_roles_are_reported_with_cause_and_advice(emulation, tmp_path):
    async with emulation.cluster() as live:
        live.scheduler.periodic_callbacks["libra-sample"].stop()  # which looks by the true time
        emulation.register(live, tmp_path)
        plugin, state, read = live.plugin, live.plugin.runs["demo"], [0]
        missing = MissingRoles(live.scheduler, plugin.not_ready, plugin.lost_workers, plugin.trajectories.phase_of)
        plugin.missing_roles = missing

        def ready(worker):
            emulation.say(live, WorkerReady(worker.name), worker=worker.address)

        def told(at_s):
            missing.look(state, at_s)
            new = plugin.notices("demo", 0, read[0])
            read[0] += len(new)
            return " | ".join(text for _, text in new)

        assert told(0.0) == told(TELL_AFTER_S - 0.1) == ""
        assert "TRAIN not there yet: no worker of this cluster has it" in told(TELL_AFTER_S)
        assert told(START_S - 0.1) == ""  # the others are being set up
        starting = told(START_S)
        assert "ROLLOUT, TOOL, GRADE, COMMIT not there yet: worker rollout-0 (process" in starting
        for worker in live.workers:
            ready(worker)
        assert f"is there after {START_S + 4.0:.0f} s: rollout-0, tool-0" in told(START_S + 4.0)
        key = keys.make("step", (0,), epoch=0, run="demo")
        step = live.client.submit(str, 1, key=key, resources={keys.TRAIN: 1})
        await emulation.until(lambda: getattr(live.scheduler.tasks.get(key), "state", "") == "no-worker")
        late = told(10.0 + REMIND_S)
        assert "(step 1)" in late and f"dask worker {live.scheduler.address} --nthreads 9 --resources TRAIN=1" in late

        await live.workers[1].close()
        await emulation.until(lambda: all(ws.name != "tool-0" for ws in live.scheduler.workers.values()))
        t_s = 400.0
        assert told(t_s) == told(t_s + TELL_AFTER_S - 0.1) == ""
        assert "(TOOL, COMMIT): worker tool-0 has left" in told(t_s + TELL_AFTER_S)
        supplies = {keys.TOOL: 2, keys.COMMIT: 1}
        async with Worker(live.scheduler.address, nthreads=4, name="tool-0", resources=supplies) as back:
            assert told(t_s + TELL_AFTER_S + 1.0) == ""  # it may be ready at once
            pid = live.scheduler.workers[back.address].pid
            assert f"worker tool-0 (process {pid} on" in told(t_s + 2 * TELL_AFTER_S)
            await emulation.until(lambda: live.scheduler.workers[back.address] in live.scheduler.running)
            ready(back)
            assert "TOOL, COMMIT is there again after 13 s: tool-0" in told(t_s + 2 * TELL_AFTER_S + 1.0)
            state.workers.quarantined.add(live.workers[0].address)
            told(500.0)
            assert "(ROLLOUT): the engine of worker rollout-0 failed the version check" in told(506.0)
            assert (
                plugin.progress("demo", 0)[2:] == (missing.lack("demo"), "")
                and missing.lack("demo") == "nobody generates"
            )
            waiting = keys.make("trajectory", (0, 0, 0), epoch=0, run="demo")
            trajectory = live.client.submit(str, 1, key=waiting, resources={keys.PARK: 1})
            await emulation.until(lambda: getattr(live.scheduler.tasks.get(waiting), "state", "") == "no-worker")
            state.workers.out[live.workers[0].address] = "version 3: layers.0: gap 0.5"
            told(513.0)
            with pytest.raises(EngineError, match=r"version 3: layers\.0: gap 0\.5.*libra resume"):
                await asyncio.wait_for(trajectory, 10)
            trajectory.release()
        assert plugin.notices("demo", 1, 0) == plugin.notices("other", 0, 0) == []
        step.release()
