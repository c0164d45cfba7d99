"""Environment of the programs that Libra starts for agents, tool servers and sandboxes.

These programs get only listed variables. A worker's own environment has keys for clouds, hubs,
trackers and Slurm, which must not reach them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from libra.errors import ConfigError

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)  # fmt: skip
"""Variables that bound the threads of libraries."""
PROXIES = tuple(
    spelt for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY") for spelt in (name, name.lower())
)
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "PYTHONPATH", "LD_LIBRARY_PATH",  # modules and libraries are found where they are
    "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING",  # an agent that is started again does the same
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",  # no more than the worker has
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
    *PROXIES, *THREAD_VARIABLES,
})  # fmt: skip
"""Variables for agents and tool servers, beside every ``LC_...``."""
_LOOPBACK = ("127.0.0.1", "localhost")


def loopback_direct(environment: Mapping[str, str]) -> dict[str, str]:
    """Both spellings of ``NO_PROXY``, with this machine added, if ``environment`` has a proxy.
    Clients then reach Libra's own servers, such as the gateway, directly."""
    if not any(environment.get(name) for name in PROXIES if name.lower() != "no_proxy"):
        return {}
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""  # clients prefer the lower case
    names = [name.strip() for name in given.split(",") if name.strip()]
    direct = given if "*" in names else ",".join(dict.fromkeys([*names, *_LOOPBACK]))
    return {"NO_PROXY": direct, "no_proxy": direct}


def child_environment(more: Collection[str] = (), *, where: str = "") -> dict[str, str]:
    """This process's `INHERITED` variables, `loopback_direct`, and the variables ``more``.
    ConfigError, with the setting ``where``, if one of ``more`` is not set."""
    names = [name for name in os.environ if name in INHERITED or name.startswith("LC_")]
    found = chosen([*names, *more], where=where)
    return found | loopback_direct(found)


def chosen(names: Collection[str], *, where: str = "") -> dict[str, str]:
    """These variables of this process; ConfigError, naming ``where``, if one is not set."""
    unset = [name for name in names if name not in os.environ]
    if unset:
        raise ConfigError(
            f"{where}: {', '.join(unset)}: not set in the environment of this process; type export {unset[0]}=... where Libra is "
            f"started (on Slurm, where its workers are), or leave the name out of {where}"
        )
    return {name: os.environ[name] for name in names}
