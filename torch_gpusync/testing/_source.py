"""Where a function comes from, so that another process can import it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """A module by name and, should the name lead nowhere (or elsewhere) in another process, by file."""

    module: str
    file: str | None

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Source:
        while isinstance(fn, functools.partial):
            fn = fn.func
        name = getattr(fn, "__module__", None) or type(fn).__module__
        file = getattr(sys.modules.get(name), "__file__", None)
        return cls(name, os.path.abspath(file) if file else None)

    def load(self) -> None:
        """Sees to it that `sys.modules` holds the module. pytest's importlib mode gives names that no path leads to."""
        try:
            found = getattr(importlib.import_module(self.module), "__file__", None)
        except ModuleNotFoundError:
            if self.file is None:
                raise
            found = None
        if self.module == "__main__" or self.file is None or (found and os.path.abspath(found) == self.file):
            return
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None and spec.loader is not None, f"{self.file} is no Python source"
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)


def complain_of_place(fn: Callable[..., Any]) -> str:
    """Why another process cannot find a function by its name; empty if it can."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", "")
    if "<lambda>" in name:
        return "a lambda has no name to be found by"
    if "<locals>" in name:
        return f"'{name}' is defined inside another function"
    return ""
