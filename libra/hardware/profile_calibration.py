"""Rooflines and tables of one GPU from its profiles, with the error of each operator.

1. Profiles of several GPUs, or of an unnamed one, are never fitted together.
2. A table's error is taken at every second point, from a table of the others.
3. A profile with a finding of `libra.hardware.profile_audit` is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libra.errors import ConfigError
from libra.hardware.fit_rooflines import fit_forms
from libra.hardware.gpus import GPU, load_gpu
from libra.hardware.operators import operator_s
from libra.hardware.profile_audit import audit
from libra.hardware.profiles import KINDS, AttentionProfile, CollectiveProfile, LinearProfile, Profile, TrainingProfile
from libra.hardware.rooflines import Efficiencies, all_reduce_s
from libra.hardware.tables import Tables, all_reduce_table, attention_rows, make_tables

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OperatorError:
    """Prediction error of one operator.

    Attributes
    ----------
    operator : str
    num_points : int
    form_frac, table_frac : float
        Mean |predicted / measured - 1| of the roofline alone, and of a table of every second point at the others.
    """

    operator: str
    num_points: int
    form_frac: float
    table_frac: float


@dataclass(frozen=True, slots=True)
class GpuCalibration:
    """Tables of one GPU with their errors, and the profiles that were not used."""

    tables: Tables
    errors: tuple[OperatorError, ...]
    skipped: tuple[str, ...]


def calibrate(profiles: Iterable[Profile], gpu_name: str | None = None) -> GpuCalibration:
    """Fit the rooflines to profiles and build tables of the ratios.

    Parameters
    ----------
    profiles : iterable of Profile
    gpu_name : str, optional
        The GPU that they were measured on; None: the one that their paths name.

    Raises
    ------
    ConfigError
        No profile, no or several GPUs, or an impossible profile.
    """
    every = list(profiles)
    used = [p for p in every if not isinstance(p, TrainingProfile)]
    skipped = tuple(sorted({f"{p.source}: training of {p.model}" for p in every if isinstance(p, TrainingProfile)}))
    if not used:
        raise ConfigError(
            "calibrate: no profile of kernels or collectives among these files; see docs/hardware.md for layouts"
        )
    gpu = _one_gpu(used, gpu_name)
    findings = [finding for profile in used for finding in audit(profile, gpu)]
    if findings:
        lines = "\n".join(f"  {source}: {text}" for source, text in dict.fromkeys((f.source, f.text) for f in findings))
        raise ConfigError(
            f"calibrate: refused, these cannot be measurements of {gpu.name}:\n{lines}\nLeave them out, or fix them"
        )
    eff = fit_forms([(gpu, profile) for profile in used])
    return GpuCalibration(make_tables(gpu, eff, used), tuple(_errors(gpu, eff, used)), skipped)


def _one_gpu(profiles: Sequence[Profile], gpu_name: str | None) -> GPU:
    if gpu_name is not None:
        return load_gpu(gpu_name)
    named = sorted({profile.gpu or "" for profile in profiles})
    if len(named) == 1 and named[0]:
        return load_gpu(named[0])
    unnamed = sorted({profile.source for profile in profiles if profile.gpu is None})
    if unnamed:
        raise ConfigError(
            f"calibrate: nothing in the path of {unnamed[0]} names a GPU; type --gpu, e.g. --gpu A800-80G"
        )
    raise ConfigError(f"calibrate: profiles of {', '.join(named)}; calibrate one GPU at a time")


def _errors(gpu: GPU, eff: Efficiencies, profiles: Sequence[Profile]) -> list[OperatorError]:
    found: dict[str, list[tuple[Array, Array]]] = {}
    for profile in profiles:
        for operator, form, table in _log_errors(gpu, eff, profile):
            found.setdefault(operator, []).append((form, table))
    errors = []
    for operator, parts in found.items():
        form = np.concatenate([part[0] for part in parts])
        table = np.concatenate([part[1] for part in parts])
        errors.append(
            OperatorError(
                operator, len(form), float(np.abs(np.expm1(form)).mean()), float(np.abs(np.expm1(table)).mean())
            )
        )
    return errors


def _log_errors(gpu: GPU, eff: Efficiencies, profile: Profile) -> list[tuple[str, Array, Array]]:
    """(operator, log error of the roofline at all points, of the table at every second point)."""
    if isinstance(profile, LinearProfile):
        found = []
        for curve in profile.curves:
            form = np.log(operator_s(gpu, eff, profile.shape, curve.tp, curve.operator, curve.tokens) / curve.seconds)
            at = np.log(curve.tokens)
            if len(at) >= 4:
                found.append((curve.operator, form, form[1::2] - np.interp(at[1::2], at[::2], form[::2])))
        return found
    if isinstance(profile, CollectiveProfile):
        if profile.collective != "all_reduce":
            return []
        form = np.log(
            all_reduce_s(gpu, eff, profile.num_bytes, profile.workers, profile.workers_per_node) / profile.seconds
        )
        half = replace(profile, num_bytes=profile.num_bytes[::2], seconds=profile.seconds[::2])
        table = np.log(all_reduce_table(half).seconds(profile.num_bytes[1::2]) / profile.seconds[1::2])
        return [(f"all_reduce {profile.workers}x{profile.workers_per_node}", form, table)]
    if isinstance(profile, AttentionProfile):
        return _attention_errors(gpu, eff, profile)
    return []


def _attention_errors(gpu: GPU, eff: Efficiencies, profile: AttentionProfile) -> list[tuple[str, Array, Array]]:
    found = []
    for kind in KINDS:
        points = profile.points(kind)
        column = points[:, 1 if kind == "decode" else 0]
        learn = np.isin(column, np.unique(column)[::2])
        if learn.sum() < 2 or (~learn).sum() < 2:
            continue
        half = replace(profile, decode=points[learn]) if kind == "decode" else replace(profile, prefill=points[learn])
        rows = attention_rows(gpu, eff, half, kind)
        assert rows is not None
        form = np.log(profile.form_s(kind, gpu, eff, points) / points[:, 2])
        found.append((f"attn_{kind}", form, form[~learn] + rows.log_ratio(points[~learn, 0], points[~learn, 1])))
    return found
