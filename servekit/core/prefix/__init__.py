"""Which block holds which prefix: `base.py` says what a prefix index is, each other file is one."""
