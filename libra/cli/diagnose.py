"""`libra diagnose`: where a mismatch of engine and trainer began."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from libra.observe.mismatch_diagnosis import Diagnosis, LayerFinding


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--above", type=click.FloatRange(0, min_open=True), metavar="NATS", help="k3 above which a step counts.")
@click.option("--tokens", type=click.IntRange(1, 16), default=5, show_default=True, help="Tokens to show of a step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diagnose(run_dir: Path, above: float | None, tokens: int, as_json: bool) -> None:
    """Say where engine and trainer of RUN begin to disagree: step, version, engines, tokens, and the layer.

    Read are the records of its steps, its version checks and its tokens. The threshold is --above, else
    trainer.mismatch_k3_alarm, else 100 times k3 of the first steps. The layer is known where an engine failed a check: in runs
    with a mismatch alarm engines are checked again before they leave a version. Exit code 1 if a step is above.

    \b
    libra diagnose runs/NAME
    libra diagnose runs/NAME --above 1e-3 --json
    """
    from libra.observe.mismatch_diagnosis import diagnose as find

    found = find(run_dir, above=above, num_tokens=tokens)
    click.echo(json.dumps(_finite(found.as_dict())) if as_json else "\n".join(lines(found)))
    if found.first is not None:
        raise click.exceptions.Exit(1)


def lines(found: Diagnosis) -> Iterator[str]:
    """The diagnosis in words; what models wrote is made harmless."""
    from libra.untrusted import shown_line

    for name in found.damaged:
        yield f"steps/{shown_line(name)} is damaged, and left out"
    limit = f"{found.threshold:.3g} nats ({found.threshold_from})"
    if found.first is None:
        yield f"no mismatch: k3 is within {limit} at each of {found.steps} steps"
        return
    yield f"step {found.first}: k3 is above {limit} for the first time, and up to step {found.last}"
    yield f"version {found.first}: step s trains version s, and only tokens of version s count in it"
    yield ""
    yield f"{'':28}{'from step':>10}{'tokens':>8}{'mean gap':>11}{'k3':>11}{'k3, last step':>15}"
    for part in found.parts:
        yield (
            f"{shown_line(part.name):28}{part.first_step:>10}{part.tokens:>8}{part.mean_abs:>11.3g}{part.k3:>11.3g}"
            f"{part.last_k3:>15.3g}"
        )
    yield ""
    for token in found.tokens:
        text = f"token id {token.token_id}" if token.text is None else repr(shown_line(token.text))
        before = "" if token.before is None else f" after {shown_line(token.before)[-60:]!r}"
        yield (
            f"step {token.step}, {token.trajectory}, token {token.token} by {shown_line(token.engine)}: log p engine "
            f"{token.rollout:.4f}, trainer {token.trainer:.4f}: {text}{before}"
        )
    yield ""
    yield from (_layer(layer) for layer in found.layers)
    if not found.layers and found.checked:
        yield (
            f"layers: no check failed, {found.checked} were passed before a version was left: the weights are right, so look at "
            "sampling, KV cache, attention and types"
        )
    elif not found.layers:
        yield "layers: not known, no engine was checked again; set trainer.mismatch_k3_alarm, and engines are"


def _layer(layer: LayerFinding) -> str:
    from libra.untrusted import shown_line

    when = "after its load" if layer.loading else "when it left the version, after it had passed the check at its load"
    gap = "no number" if layer.gap is None else f"{layer.gap:.3g}"
    more = "" if layer.checks == 1 else f"; {layer.checks} such checks failed, the last of version {layer.last_version}"
    return (
        f"layer {shown_line(layer.layer)}: {shown_line(layer.worker)} disagrees with version {layer.version} {when}: "
        f"{layer.method} {gap}, allowed {layer.tolerance:.3g}{more}"
    )


def _finite(value: object) -> object:
    """NaN as None."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value != value else value
