"""When requests join the batch: `base.py` says what a batching component is, each other file is one."""
