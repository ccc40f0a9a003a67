"""The command line, for tests: in a process of its own as a user has it, or quicker, in this one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
from typing import Any

import pytest

from retrodraft.cli import main


def retrodraft(
    *arguments: str, stdin: str | bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `retrodraft` as a user does; output is text."""
    done = subprocess.run(
        [sys.executable, "-m", "retrodraft", *arguments],
        capture_output=True,
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=600,
    )
    out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def retrodraft_here(*arguments: object, stdin: str | bytes | None = b"") -> subprocess.CompletedProcess[str]:
    """Run the same command in this process, where torch is loaded already; a `stdin` of None is a closed one."""
    raw = stdin.encode() if isinstance(stdin, str) else stdin
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out, io.StringIO() as err:
        patch.setattr(sys, "argv", ["retrodraft", *map(str, arguments)])
        patch.setattr(sys, "stdin", None if raw is None else io.TextIOWrapper(io.BytesIO(raw)))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code: Any = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        except Exception:  # shown as the interpreter would, so that tests see a traceback where there should be none
            err.write(traceback.format_exc())
            code = 1
        return subprocess.CompletedProcess(sys.argv, code or 0, out.getvalue(), err.getvalue())
