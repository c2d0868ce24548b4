"""The scheduler: pure Python, no torch, no clock, no I/O.

A step of the engine is three calls, and two of them live here:

    plan   = scheduler.schedule(now)
    result = executor.execute(plan)
    events = scheduler.update(plan, result, now)
"""
