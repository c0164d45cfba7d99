"""MLflow and trackio as trackers of a run: ``observe.trackers=[examples.trackers:MLflow]`` in a checkout.

Both write into the run directory unless ``MLFLOW_TRACKING_URI``, ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` name
another place. Type ``pip install mlflow sqlalchemy`` or ``pip install trackio``. A tracker that fails ends no run
(`libra.observe.metrics.Trackers`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from libra.observe.metrics import PROJECT, Setting


class MLflow:
    """MLflow at ``MLFLOW_TRACKING_URI``, by default in ``RUN/mlflow/mlflow.db``."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = Metric
        place, uri = directory / "mlflow", os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            place.mkdir(exist_ok=True)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{(place / 'mlflow.db').absolute()}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        files = None if uri else (place / "artifacts").absolute().as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifact_location=files)
        self._id = self._client.create_run(experiment, run_name=run).info.run_id
        params = [Param(name, str(value)[:6000]) for name, value in settings.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        at_ms = int(1000 * wall_time_s)
        known = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items() if math.isfinite(value)}
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, at_ms, step) for name, value in known.items()]
        )

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.log_text(self._id, text, f"{name}/step-{step:06d}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """trackio, in ``TRACKIO_DIR`` or ``RUN/trackio``."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((directory / "trackio").absolute()))
        with contextlib.redirect_stdout(io.StringIO()):  # the terminal is the run's
            import trackio

            self._trackio = trackio
            self._run = trackio.init(
                project=PROJECT, name=run, config=dict(settings), resume="allow", embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```") for name, text in texts.items()}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # the run's own would leave it current, to be ended again at exit
