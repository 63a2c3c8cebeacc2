# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks` is `python -m benchmarks.run`."""

from benchmarks.run import main

if __name__ == "__main__":  # not in the processes that compile ahead
    main()
