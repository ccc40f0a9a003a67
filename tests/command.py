"""The command line in a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys


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
