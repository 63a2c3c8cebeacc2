# SPDX-License-Identifier: Apache-2.0
"""Registrations with other packages, made once such a package is imported and not before."""

from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, register: Callable[[], None], failure: str) -> None:
    """Calls a function after the module of this name has been imported, or now if it has been.

    What it registers with may have other names in another release: an error becomes a warning that
    begins with `failure`.
    """

    def then() -> None:
        try:
            register()
        except Exception as error:
            warnings.warn(f"{failure}: {error!r}", stacklevel=2)

    if name in sys.modules:
        then()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(then)


class _Finder(MetaPathFinder):
    """Gives the modules that are waited for a loader that says when they have been imported.

    To be asked for a module is not yet to import it (importlib.util.find_spec asks, too, and an
    import may fail), so a function waits until its module's code has run.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self._asking: set[tuple[int, str]] = set()  # threads, and what they ask other finders for

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asked = (threading.get_ident(), fullname)
        if fullname not in self.waiting or asked in self._asking:
            return None
        self._asking.add(asked)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.discard(asked)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self)
        return spec


class _Telling(Loader):
    """A module's own loader, which calls what waits for the module after it has run its code."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:  # such as get_code, by which runpy runs a module
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for then in self._finder.waiting.pop(module.__name__, ()):
            then()


_finder = _Finder()
