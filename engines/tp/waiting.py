"""Imported before torch: how long its threads spin for each other before they sleep.

libgomp reads its settings once, as torch loads it. Its default, some milliseconds, is the best on a machine of one's own, but
where a frontend or anything else wants a core too, a thread that spins keeps the one that it waits for from running: steps
were measured to take 10 to 30 times as long. This short a wait bridges the gaps between two kernels of a step and no more.
"""

import os

_SPINS = "10000"

if not any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
    os.environ["GOMP_SPINCOUNT"] = _SPINS
