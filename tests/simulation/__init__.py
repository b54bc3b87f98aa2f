"""A seeded simulation of whole compositions: the real ledger, frontend, lanes, sessions, liveness and worker on a virtual clock.

`python -m tests.simulation --seed N --schedules M --trace` runs it; each schedule is replayed from its own number.
"""
