"""The processes of an engine world.

launch (inline, spawn) starts one; watcher (with loop, ward, startup, stderr) holds its processes; bootstrap and rank lead from
a process to an engine; worker (with rows, outbox, deadlines, calls) runs it; channel, progress and process are what they share.
"""
