"""Entry point of ``xinfer-vk``. Imports nothing at first, so that Ctrl-C ends it quietly from the start."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> None:
    """Run a command line, by default the process's own, and exit with its code."""
    try:
        from xinfer_vk.cli.app import run

        code = run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        from xinfer_vk.cli.interrupt import exit_code

        code = exit_code()
    sys.exit(code)


if __name__ == "__main__":
    main()
