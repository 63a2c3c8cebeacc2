# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run in a fresh Python, which finds the packages that the tests find."""

import os
import subprocess
import sys
import textwrap


def run(*scripts, options=(), environment=None, fails=False, **words):
    """What scripts print, one behind the other, with values in the place of words, and what they
    write to stderr; they end in time, and, unless it is said, without an error."""
    text = "".join(map(textwrap.dedent, scripts))
    for word, value in words.items():
        text = text.replace(word, repr(value))
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, *options, "-c", text],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert fails or ran.returncode == 0, (ran.returncode, ran.stderr[-2000:])
    return ran.stdout.strip(), ran.stderr
