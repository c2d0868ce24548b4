"""How much memory a request must find free: `base.py` says what an admission rule is, each other file is one."""
