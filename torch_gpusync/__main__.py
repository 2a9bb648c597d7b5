"""``python -m torch_gpusync COMMAND``: the package's programs."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

_COMMANDS = {
    "demo": "train a small transformer split over several ranks and compare it with the unsplit model",
    "bench": "measure the ops beside the alternatives",
    "doctor": "report what this machine and this build can do",
}


def _available() -> dict[str, str]:
    """The commands whose module is part of this installation."""
    found = {name: importlib.util.find_spec(f"torch_gpusync.{name}") for name in _COMMANDS}
    return {name: text for name, text in _COMMANDS.items() if found[name]}


def main(argv: list[str] | None = None) -> int:
    """Run the command named by the first argument with the rest of them; its exit code is returned."""
    commands = _available()
    parser = argparse.ArgumentParser(
        prog="python -m torch_gpusync",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:8}{text}" for name, text in commands.items()),
    )
    parser.add_argument("command", choices=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own (see COMMAND --help)")
    options = parser.parse_args(argv)
    # Imported only now: a command must not pay for, or fail because of, the others.
    program = importlib.import_module(f"torch_gpusync.{options.command}")
    return int(program.main(options.arguments))


if __name__ == "__main__":
    sys.exit(main())
