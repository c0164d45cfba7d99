"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow and trackio get metrics, settings and samples of a run.

Invariants
----------
1. A tracker never ends a run: its first error is one warning, and it gets nothing more.
2. All get the same: numbers by `libra.observe.metric_groups`, settings when they open, texts that act on no reader.
3. They write into the run directory. Nothing leaves the machine unless the tracker's own environment variables say so
   (``WANDB_MODE=online``, ``MLFLOW_TRACKING_URI``, ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL``).
4. Each start of a run is a run of its own in Weights & Biases and MLflow, under the run's name; in the others it goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, Protocol

from libra.errors import ConfigError
from libra.observe.metric_groups import grouped

logger = logging.getLogger(__name__)

PROJECT: Final = "libra"
SECTIONS: Final = ("run", "model", "environment", "rollout", "trainer", "policy", "evaluation")
"""Sections of the configuration whose settings trackers get."""

Setting = bool | int | float | str


class Tracker(Protocol):
    """One tracker of one start of a run."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None: ...

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Numbers of a step; NaN and infinity are possible."""

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts by name."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """TensorBoard's own event files in ``RUN/tensorboard``: no torch, no TensorFlow."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory / "tensorboard"))
        started = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time(), group_name=run)
        for name, value in settings.items():
            kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
            setattr(started.hparams[name], f"{kind}_value", value)
        about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_start_info=started))
        self._add(
            0,
            time.time(),
            [{"tag": metadata.SESSION_START_INFO_TAG, "metadata": about, "tensor": metadata.NULL_TENSOR}],
        )

    def _add(self, step: int, wall_time_s: float, values: Sequence[Mapping[str, Any]]) -> None:
        summary = self._summary(value=[self._summary.Value(**value) for value in values])
        self._writer.add_event(self._event(wall_time=wall_time_s, step=step, summary=summary))
        self._writer.flush()

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        self._add(step, wall_time_s, [{"tag": name, "simple_value": value} for name, value in values.items()])

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        from tensorboard.plugins.text import metadata
        from tensorboard.util import tensor_util

        about = metadata.create_summary_metadata(display_name=None, description=None)
        indented = {
            name: "\n".join(f"    {line}" for line in text.split("\n")) for name, text in texts.items()
        }  # code in Markdown
        tensors = {name: tensor_util.make_tensor_proto([text.encode()]) for name, text in indented.items()}
        self._add(step, time.time(), [{"tag": n, "metadata": about, "tensor": tensor} for n, tensor in tensors.items()])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases, offline in ``RUN/wandb`` unless ``WANDB_MODE`` says otherwise; ``wandb sync`` sends it later."""

    def __init__(self, directory: Path, run: str, settings: Mapping[str, Setting]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, group=run, dir=directory, config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"), reinit="create_new",  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # an evaluation has the step of the next iteration

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        pages = {name: self._wandb.Html(f"<pre>{escape(text)}</pre>") for name, text in texts.items()}
        self._run.log({"step": step, **pages})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow at ``MLFLOW_TRACKING_URI``, or in ``RUN/mlflow/mlflow.db`` (``mlflow ui --backend-store-uri sqlite:///...``)."""

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
        with _silent():
            import trackio

            self._trackio = trackio
            self._run = trackio.init(
                project=PROJECT,
                name=run,
                config=dict(settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```") for name, text in texts.items()}, step=step)

    def close(self) -> None:
        with _silent():
            self._trackio.finish()  # the run's own would leave it current, to be ended again at exit


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what a library prints: the terminal is the run's."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


TRACKERS: Final[Mapping[str, type[Tracker]]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip
"""By the names of ``observe.trackers``, and TensorBoard."""


def check_trackers(names: Sequence[str]) -> None:
    """ConfigError if one of these trackers is not installed, with what to type."""
    for name in names:
        needed = [name, "sqlalchemy"] if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI") else [name]
        if any(importlib.util.find_spec(module) is None for module in needed):
            raise ConfigError(
                f"observe.trackers: {name} is not installed in this environment; type: pip install {name}, or leave it out of "
                "observe.trackers"
            )


def settings_of(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Settings of a configuration as plain values by dotted name; those that are not set are left out."""
    found: dict[str, Setting] = {}
    for section in SECTIONS:
        values = config.get(section)
        for name, value in (values if isinstance(values, Mapping) else {}).items():
            if value is not None:
                found[f"{section}.{name}"] = value if isinstance(value, Setting) else str(value)
    return found


class Trackers:
    """The open trackers of a start of a run.

    Parameters
    ----------
    names : sequence of str
        Of `TRACKERS`, each installed.
    directory : Path
        The run directory.
    run : str
        Its name.
    config : mapping
        Its configuration as plain values.
    """

    def __init__(self, names: Sequence[str], directory: Path, run: str, config: Mapping[str, Any]) -> None:
        self._open: dict[str, Tracker] = {}
        settings = settings_of(config)
        for name in dict.fromkeys(names):
            self._try(name, self._begin, name, directory, run, settings)

    def _begin(self, name: str, directory: Path, run: str, settings: Mapping[str, Setting]) -> None:
        self._open[name] = TRACKERS[name](directory, run, settings)

    def __bool__(self) -> bool:
        return bool(self._open)

    def numbers(self, step: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        """Numbers of a step, by their names in ``metrics.jsonl``."""
        named = {grouped(name): value for name, value in values.items()}
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.numbers, step, wall_time_s, named)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts by name, e.g. ``samples/best``; they must act on no reader."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.texts, step, texts)

    def close(self) -> None:
        """Close all; a second call does nothing."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, call: Callable[..., object], *given: object) -> None:
        try:
            call(*given)
        except Exception as error:  # noqa: BLE001  the boundary to other libraries: none of them may end a run
            first = (str(error).strip() or "no message").splitlines()[0]
            logger.warning("%s gets nothing more of this run: %s: %s", name, type(error).__name__, first[:300])
            self._open.pop(name, None)
