"""Who gives way when KV blocks run out: `base.py` says what a preemption component is, each other file is one.

`victims.py` has the rules for who it is.
"""
