"""Entry point of ``xinfer-vk``. Imports nothing at first, so that Ctrl-C ends it quietly from the start."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> None:
    """Run a command line, by default the process's own, and exit with its code."""
    try:
        code = _run_limited() if argv is None else _run(argv)
    except KeyboardInterrupt:
        from xinfer_vk.cli.interrupt import exit_code

        code = exit_code()
    sys.exit(code)


def _run_limited() -> int:
    """Run in a child if a limit is set under which libraries crash."""
    from xinfer_vk.limits import tight_limits

    limits = tight_limits()
    if not limits:
        return _run(sys.argv[1:])
    from xinfer_vk.cli.supervise import supervised

    return supervised(lambda: _run(sys.argv[1:]), limits)


def _run(argv: list[str]) -> int:
    from xinfer_vk.limits import is_out_of_memory, out_of_memory

    try:
        from xinfer_vk.cli.app import run

        return run(argv)
    except KeyboardInterrupt:
        from xinfer_vk.cli.interrupt import exit_code

        return exit_code()
    except Exception as error:  # while modules were imported
        if not is_out_of_memory(error):
            raise
        print(f"error: {out_of_memory(str(error) or type(error).__name__)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    main()
