"""Parts that a configuration names as ``package.module:attribute``: finding and calling them.

Each process imports such a part itself, so the part is never sent between processes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from libra.errors import ConfigError, nearest_name


def is_named(name: str) -> bool:
    """Whether ``name`` is a ``package.module:attribute``, not the name of a shipped part."""
    module, _, attribute = name.partition(":")
    return bool(module and attribute)


def named_part(field: str, name: str) -> Any:
    """The object that ``name`` (``package.module:attribute``) names; ``field`` is the setting.

    ConfigError if the module cannot be imported, lacks the attribute, or raises anything.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing, top = getattr(error, "name", None) or module_name, module_name.split(".")[0]
        here = Path(f"{top}.py").is_file() or Path(top).is_dir()
        path = f"type PYTHONPATH={'.' if here else 'DIRECTORY'} before libra, or install it"
        advice = path if missing in (module_name, top) else f"install what has {missing!r}"
        raise ConfigError(f"{field}: {name!r}: cannot import {module_name!r} ({error}); {advice}") from error
    except (Exception, SystemExit) as error:  # the boundary to a user's module: importing it may raise anything
        raise ConfigError(
            f"{field}: {name!r}: cannot import {module_name!r} ({type(error).__name__}: {error}{raised_at(error)}); "
            "correct that file"
        ) from error
    for part in attribute.split("."):
        try:
            found, lacks = (
                (getattr(found, part), "") if hasattr(found, part) else (None, _lack(found, part, module_name))
            )
        except (Exception, SystemExit) as error:  # its own __getattr__, or a property
            raise ConfigError(
                f"{field}: {name!r}: {module_name!r}, asked for {part!r}, raised {type(error).__name__}: {error}"
                f"{raised_at(error)}; correct that file"
            ) from error
        if lacks:
            raise ConfigError(f"{field}: {name!r}: {lacks}")
    return found


def _lack(found: Any, part: str, module_name: str) -> str:
    names = [each for each in dir(found) if not each.startswith("_")]
    near = nearest_name(part, names)
    hint = f" (did you mean {near!r}?)" if near else ""
    own = [each for each in names if getattr(getattr(found, each), "__module__", "") == module_name]
    return f"{module_name!r} has no {part!r}{hint}; it defines {', '.join(own[:8]) or 'nothing of its own'}"


def raised_at(error: BaseException) -> str:
    """`` in FILE, line N``: last place in the user's code, else the place of the error; or ""."""
    places = traceback.extract_tb(error.__traceback__, limit=-1)
    return users_place(error) or "".join(f" in {place.filename}, line {place.lineno}" for place in places)


def users_place(error: BaseException | None) -> str:
    """`raised_at` within the user's own code; empty if the error arose elsewhere."""
    tb = None if error is None else error.__traceback__
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(tb)]
    return next((f" in {file}, line {line}" for file, line in reversed(places) if _is_users(file)), "")


def defined_at(function: Any) -> str:
    """`` in FILE, line N``: where the user wrote a function; empty if it is not the user's."""
    plain = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    codes = [getattr(each, "__code__", None) for each in (plain, getattr(type(plain), "__call__", None))]  # noqa: B004
    code = next((code for code in codes if code is not None and _is_users(code.co_filename)), None)
    return "" if code is None else f" in {code.co_filename}, line {code.co_firstlineno}"


_OTHERS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen ")


def _is_users(file: str) -> bool:
    return not file.startswith(_OTHERS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def named_function(field: str, name: str, call: str, *given: object, **keywords: object) -> Callable[..., Any]:
    """Callable ``name``, which must take these arguments; ``call``: text such as ``f(step)``."""
    found = named_part(field, name)
    if not callable(found):
        raise ConfigError(f"{field}: {name!r} is a {type(found).__name__}; it must be callable as {call}")
    if (wrong := unfit(found, given, keywords)) is not None:
        raise ConfigError(f"{field}: {name!r} is called as {call}, and does not take that: {wrong}")
    return found  # type: ignore[no-any-return]


def built(field: str, name: str, call: str, given: Mapping[str, Any], optional: Mapping[str, Any]) -> Any:
    """Result of ``name`` called with ``given`` and the ``optional`` arguments that it takes.

    ConfigError if it cannot be found, does not take ``given``, or raises.
    """
    factory = named_function(field, name, call, **given)
    try:
        return factory(**given, **taken(factory, optional))
    except ConfigError:
        raise
    except Exception as error:  # the boundary to a user's code
        raise ConfigError(f"{field}: {name!r} raised {type(error).__name__}: {error}") from error


def taken(function: Callable[..., Any], optional: Mapping[str, Any]) -> dict[str, Any]:
    """The ``optional`` arguments that ``function`` takes by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in optional.items() if takes_any or name in parameters}


def name_of(field: str, part: object) -> object:
    """``package.module:attribute`` of a function or class; any other ``part`` unchanged.

    ConfigError if other processes cannot find it: a lambda, a nested function, an object.
    """
    if part is None or isinstance(part, str) or not callable(part):
        return part
    module, attribute = getattr(part, "__module__", ""), getattr(part, "__qualname__", "")
    main = sys.modules.get("__main__")
    if module == "__main__":
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else ""
    if not module or not attribute or "<" in attribute:
        what = attribute or type(part).__name__
        raise ConfigError(
            f"{field}: {what} has no name by which workers can import it; define it at the top of a module, and give it, or "
            "its name as 'package.module:attribute'"
        )
    return f"{module}:{attribute}"


def unfit(function: Callable[..., Any], given: tuple[object, ...], keywords: Mapping[str, object]) -> str | None:
    """Why ``function`` does not take these arguments; None if it does or is opaque."""
    try:
        inspect.signature(function).bind(*given, **keywords)
    except TypeError as error:
        return str(error)
    except ValueError:  # written in C, without a signature
        return None
    return None
